"""Conversion between Hugging Face, Megatron-Core and training checkpoints, on one process or on the
ranks of torchrun, each of which holds a shard of the model. The command lines are
tools/convert_*.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mc.architectures.lora import Lora, adapter_names
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.observability.phase_progress import phase_progress
from rlhf_mc.runtime.console import write_line
from rlhf_mc.runtime.exit_codes import exit_code
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.runtime.tool import whole_number
from rlhf_mc.runtime.work import importing

# Megatron-Core, whose import takes many seconds, is imported after the input has been checked.
if TYPE_CHECKING:
    import torch

    from rlhf_mc.architectures.spec import ModelShape
    from rlhf_mc.models.gpt_model import PackedGPT
    from rlhf_mc.topology.groups import ProcessGroups

LayoutSizes = tuple[int, int | None, int]
"""Tensor-parallel size, pipeline-parallel size (None: world size / tensor-parallel size),
expert-parallel size."""


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """Add the parallel sizes of the model during the conversion. The checkpoints do not depend on
    them."""
    size = whole_number(1, 1 << 20)
    group = parser.add_argument_group("under torchrun, the parallel layout of the model")
    group.add_argument("--tensor-model-parallel-size", type=size, default=1, metavar="N")
    group.add_argument(
        "--pipeline-model-parallel-size", type=size, metavar="N", help="default: what TP leaves"
    )
    group.add_argument("--expert-model-parallel-size", type=size, default=1, metavar="N")


def layout_sizes(args: argparse.Namespace) -> LayoutSizes:
    """Return the sizes that add_layout_options has read."""
    return (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.expert_model_parallel_size,
    )


def run_conversion(program: str, convert: Callable[[], None]) -> int:
    """Run a conversion on the CPU, since it computes nothing and a model may exceed the memory of a
    GPU. Show the progress on rank 0's console, without the warnings of libraries. Return the exit
    code."""
    is_first = os.environ.get("RANK", "0") == "0"

    def run() -> None:
        os.environ.setdefault("RLHF_MC_DEVICE", "cpu")
        warnings.filterwarnings("ignore")
        logging.getLogger("megatron").setLevel(logging.ERROR)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if not is_first:  # print warnings of this package once
            logging.getLogger("rlhf_mc").setLevel(logging.ERROR)
        with phase_progress(RankStatus(phases=["converting"]), wanted=is_first):
            convert()

    return exit_code(program, run)


def hf_to_mcore(hf_path: str, output: str, sizes: LayoutSizes) -> None:
    """Write the Megatron-Core checkpoint, in the dtype of the Hugging Face one. Raise UserError if
    it cannot be read."""
    from rlhf_mc.checkpoint.hf_format import HFReader, import_hf
    from rlhf_mc.models.transformer_engine import import_transformer_engine
    from rlhf_mc.reshard.placement import training_layouts

    reader = HFReader(hf_path)
    shape = reader.shape()
    reader.check(shape)
    dtype = reader.dtype_name()
    with importing("importing Megatron-Core"):
        import_transformer_engine()
        from rlhf_mc.checkpoint.megatron_format import save_mcore
    with _built_model(shape, dtype, sizes) as (model, groups):
        params = {name: param.data for name, param in model.named_parameters()}
        import_hf(reader, training_layouts(shape, groups.mesh)[groups.rank], params)
        save_mcore(model, output, reader)
        _report(groups.rank, hf_path, output, shape)


def mcore_to_hf(checkpoint: str, output: str, sizes: LayoutSizes, max_shard_bytes: int) -> None:
    """Write the Hugging Face checkpoint, in the dtype of the Megatron-Core one, in files of at most
    max_shard_bytes."""
    with importing("importing Megatron-Core"):
        from rlhf_mc.models.transformer_engine import import_transformer_engine

        import_transformer_engine()
        from rlhf_mc.checkpoint.hf_export import export_hf
        from rlhf_mc.checkpoint.hf_format import read_shape
        from rlhf_mc.checkpoint.megatron_format import HF_ASSETS, checkpoint_dtype, load_mcore
        from rlhf_mc.reshard.placement import training_layouts

    dtype = checkpoint_dtype(checkpoint)
    assets = Path(checkpoint) / HF_ASSETS
    shape = read_shape(assets)
    with _built_model(shape, dtype, sizes) as (model, groups):
        load_mcore(model, checkpoint)
        params = {name: param.data for name, param in model.named_parameters()}
        layouts = training_layouts(shape, groups.mesh)
        export_hf(params, layouts, shape, output, dtype, assets, max_shard_bytes)
        _report(groups.rank, checkpoint, output, shape)


@contextlib.contextmanager
def _built_model(
    shape: ModelShape, dtype: str, sizes: LayoutSizes
) -> Iterator[tuple[PackedGPT, ProcessGroups]]:
    """Yield this rank's shard of a model, without weights, and its process groups."""
    from rlhf_mc.models.gpt_model import build_model
    from rlhf_mc.topology.groups import tool_groups

    with tool_groups(*sizes) as groups:
        mesh = groups.mesh
        config = MegatronConfig(mesh.tp, mesh.pp, expert_model_parallel_size=mesh.ep, dtype=dtype)  # type: ignore[arg-type]
        yield build_model(shape, config, groups), groups


def is_training_checkpoint(checkpoint: str) -> bool:
    """Return whether a directory is a training checkpoint, even if it is corrupt."""
    return any((Path(checkpoint) / name).exists() for name in ("manifest.json", "state.json"))


def training_checkpoint_to_hf(
    checkpoint: str, output: str, role: str, hf_path: str | None, max_shard_bytes: int
) -> None:
    """Write the model of a role as a Hugging Face checkpoint, as the run would have exported it at
    that step. Any number of processes may do it, whatever the run's layout was: each reads and
    writes its share of the files.

    hf_path: the checkpoint with which the role began, for config.json and tokenizer; None: the path
    in the run's settings. Raise UserError if the checkpoint is corrupt or has no such role."""
    from rlhf_mc.models.transformer_engine import import_transformer_engine

    import_transformer_engine()
    from rlhf_mc.checkpoint import directory
    from rlhf_mc.checkpoint.hf_export import write_hf
    from rlhf_mc.checkpoint.hf_format import read_shape
    from rlhf_mc.checkpoint.training_state import check_shape, stored_config, stored_models
    from rlhf_mc.topology.groups import tool_groups

    path = Path(checkpoint)
    with tool_groups() as groups:
        directory.verify(path)
        models = stored_models(path)
        if role not in models:
            raise UserError(f"--role {role}: {path} holds {', '.join(models)}")
        lora = models[role]["shape"].get("lora")
        start = (
            Path(hf_path)
            if hf_path is not None
            else _initial_checkpoint(role, stored_config(path), lora is not None)
        )
        if not start.is_dir():
            raise UserError(
                f"{start}: no such directory; give the directory of the run's initial model as "
                "--hf-path"
            )
        shape = read_shape(start, value_head=role == "critic")
        # The run has compared language-model head and embedding of its initial model, which may be
        # deleted.
        shape = replace(
            shape, tie_embeddings=models[role]["shape"].get("tie_embeddings", shape.tie_embeddings)
        )
        shape = replace(shape, lora=lora and Lora(**{**lora, "modules": tuple(lora["modules"])}))
        check_shape(path, role, models, shape)
        dtype_name: str = models[role]["dtype"]
        tensors = functools.partial(_stored_tensors, path, role, shape, dtype_name, start)

        def read(names_by_rank: Sequence[Sequence[str]]) -> dict[str, torch.Tensor]:
            return tensors(names_by_rank[groups.rank])

        manifest = directory.read_manifest(path)
        origin = {"run_id": manifest.run_id, "step": manifest.step}
        write_hf(read, shape.base, Path(output), dtype_name, start, max_shard_bytes, origin)
        _report(groups.rank, f"{checkpoint} ({role}, step {manifest.step})", output, shape.base)


def _stored_tensors(
    path: Path, role: str, shape: ModelShape, dtype_name: str, start: Path, names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return tensors of a role's model in a training checkpoint. With adapters it has these alone:
    the others are those of the initial checkpoint `start`, which are merged with them. Every rank
    must call it."""
    import torch

    from rlhf_mc.checkpoint.hf_format import HFReader
    from rlhf_mc.checkpoint.training_blocks import Block
    from rlhf_mc.checkpoint.training_tensors import read_tensors
    from rlhf_mc.models.adapted_layers import merge
    from rlhf_mc.reshard.layout import correction_biases, logical_shapes

    shapes = logical_shapes(shape)
    biases = correction_biases(shape)
    dtype = getattr(torch, dtype_name)
    types = {name: torch.float32 if name in biases else dtype for name in shapes}
    frozen = [name for name in names if shape.lora is not None and name != "score.weight"]
    pairs = {name: pair for name in frozen if (pair := adapter_names(name))[0] in shapes}
    stored = [*(name for name in names if name not in frozen), *itertools.chain(*pairs.values())]
    tensors = {name: torch.empty(shapes[name], dtype=types[name]) for name in stored}
    boxes = {name: tuple((0, size) for size in shapes[name]) for name in stored}
    blocks = [Block(f"{role}.weight.{n}", shapes[n], boxes[n], tensors[n], False) for n in stored]
    read_tensors(blocks, path)
    reader = HFReader(start)
    with reader.reading():
        for name, weight in reader.slices(frozen).items():
            tensors[name] = weight[:].to(types[name])
    for name, pair in pairs.items():
        assert shape.lora is not None
        a, b = (tensors.pop(part) for part in pair)
        tensors[name] = merge(tensors[name], a, b, shape.lora.scale)
    return tensors


def _initial_checkpoint(role: str, config: dict[str, Any], has_adapters: bool) -> Path:
    """Return the Hugging Face checkpoint with which a role of a run began, from the run's settings.
    Raise UserError if another one has the weights below its adapters."""
    path = config.get("critic", {}).get("model_path") if role == "critic" else None
    model = config.get("model", {})
    mcore = model.get("dist_checkpointing_path")
    if has_adapters and path is None and mcore is not None:
        raise UserError(
            f"the {role}'s weights without its adapters are in {mcore} "
            "(model.dist_checkpointing_path): convert it, and give its directory as --hf-path"
        )
    return Path(path or model.get("path", ""))


def _report(rank: int, source: str, output: str, shape: ModelShape) -> None:
    from rlhf_mc.reshard.layout import logical_shapes

    if rank == 0:
        count = sum(math.prod(size) for size in logical_shapes(shape).values())
        write_line(f"{source} -> {output}: {count:,} parameters", sys.stdout)
