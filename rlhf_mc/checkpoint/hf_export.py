"""Export of a model to a Hugging Face checkpoint, from any Megatron layout or from a training
checkpoint.

Reading is in hf_format.py.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from rlhf_mc.architectures.families import FAMILIES
from rlhf_mc.architectures.packed_experts import stored_shapes
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import INDEX, WEIGHTS, HFReader, copy_assets, read_config
from rlhf_mc.checkpoint.packed_tensors import logical_names, pack
from rlhf_mc.config.errors import UserError, first_line
from rlhf_mc.reshard.execute import execute
from rlhf_mc.reshard.layout import EMPTY, Layout, correction_biases, hf_layout, logical_shapes
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.reshard.transport import PointToPoint
from rlhf_mc.run_files import RUN_FILE
from rlhf_mc.runtime.console import global_rank
from rlhf_mc.runtime.work import counted
from rlhf_mc.topology.consensus import on_every_rank, on_rank_0

logger = logging.getLogger(__name__)
STAGING = ".incomplete"
"""Directory inside the output directory for files that are not complete."""


def export_hf(
    params: Mapping[str, Any],
    layouts: Sequence[Layout],
    shape: ModelShape,
    out_dir: str | os.PathLike[str],
    dtype_name: str,
    assets_dir: str | os.PathLike[str],
    max_shard_bytes: int = 5_000_000_000,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Write the model whose parameters (anything that slices to tensors) are sharded over the ranks
    by `layouts` (one per rank), as write_hf does. Every rank must call it."""
    dtype: torch.dtype = getattr(torch, dtype_name)

    def gather(names: Sequence[Sequence[str]]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for kind, of_kind in tensors_by_dtype(shape, dtype, names):
            targets = [hf_layout(shape, of_rank) if of_rank else EMPTY for of_rank in of_kind]
            tensors |= gather_tensors(params, layouts, targets, kind)
        return tensors

    write_hf(gather, shape, Path(out_dir), dtype_name, Path(assets_dir), max_shard_bytes, origin)


def gather_tensors(
    params: Mapping[str, Any],
    layouts: Sequence[Layout],
    targets: Sequence[Layout],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Return this rank's tensors of `targets`, a layout for each rank, from parameters that are
    sharded by `layouts`. Every rank must call it."""
    rank = global_rank()
    plan = make_plan(layouts, targets, dtype.itemsize, bucket_bytes=256 << 20)
    tensors = {name: torch.empty(size, dtype=dtype) for name, size in targets[rank].shapes.items()}
    group = dist.group.WORLD  # None without a process group
    transport = None if group is None else PointToPoint(group)
    execute(plan.for_rank(rank), params, tensors, transport, wire_dtype=dtype)
    return tensors


def tensors_by_dtype(
    shape: ModelShape, dtype: torch.dtype, names: Sequence[Sequence[str]]
) -> Iterator[tuple[torch.dtype, list[list[str]]]]:
    """Yield each dtype with its tensors of each rank: the correction biases are float32."""
    biases = correction_biases(shape)
    yield dtype, [[name for name in of_rank if name not in biases] for of_rank in names]
    if biases:
        yield torch.float32, [[name for name in of_rank if name in biases] for of_rank in names]


def write_hf(
    gather: Callable[[Sequence[Sequence[str]]], dict[str, torch.Tensor]],
    shape: ModelShape,
    out: Path,
    dtype_name: str,
    assets_dir: Path,
    max_shard_bytes: int,
    origin: Mapping[str, Any] | None,
) -> None:
    """Write a checkpoint of the tensors that `gather` returns. `gather` is a collective: it gets
    the names of the tensors that each rank writes next, by rank, and returns this rank's. Every
    rank must call it.

    File i is gathered and written by rank i modulo the number of ranks, so that a rank holds the
    tensors of one file at a time. Config, tokenizer, layers of multi-token prediction and weights
    for images are copied from `assets_dir`; `origin` (run and step) is written to run.json. Files
    get their final names after all are written. Raise the same UserError on every rank if one
    cannot write.
    """
    rank = global_rank()
    world = dist.get_world_size() if dist.is_initialized() else 1
    shards = _shards(
        stored_shapes(shape, logical_shapes(shape)),
        getattr(torch, dtype_name).itemsize,
        max_shard_bytes,
    )
    subject = f"export of the Hugging Face checkpoint failed on rank {rank}"
    drafts = on_every_rank(lambda: _draft_files(assets_dir, shape, max_shard_bytes), subject)
    if FAMILIES[shape.family].is_nested and not drafts and rank == 0:
        logger.warning("%s: the weights for images are not written: %s has none", out, assets_dir)
    count = len(shards) + len(drafts)
    on_rank_0(lambda: _begin(out, assets_dir), subject)
    rounds = range(0, len(shards), world)
    for start in counted(rounds, len(rounds), "rounds of files"):
        names = [logical_names(shape, of_file) for of_file in shards[start : start + world]]
        tensors = pack(shape, gather([*names, *[[]] * (world - len(names))]))
        save = functools.partial(
            _save, tensors, out / STAGING / _shard_name(start + rank, count), subject
        )
        on_every_rank(save, subject)
        tensors.clear()

    def copy_drafts() -> None:
        for number in range(rank, len(drafts), world):
            reader = HFReader(assets_dir)
            with reader.reading():
                copied = {name: tensor[:] for name, tensor in reader.slices(drafts[number]).items()}
            _save(copied, out / STAGING / _shard_name(len(shards) + number, count), subject)

    on_every_rank(copy_drafts, subject)
    files = [*shards, *drafts]
    on_rank_0(lambda: _finish(out, assets_dir, files, shape, dtype_name, origin), subject)


def _draft_files(assets: Path, shape: ModelShape, max_shard_bytes: int) -> list[list[str]]:
    """Return the names of the tensors of multi-token prediction in each file that is copied: none
    where `assets` has no weights, and for a value model."""
    if shape.value_head or not ((assets / INDEX).exists() or (assets / WEIGHTS).exists()):
        return []
    reader = HFReader(assets)
    drafts = reader.slices(reader.draft_tensors(shape.num_layers))
    return (
        _shards({name: drafts[name].get_shape() for name in drafts}, 4, max_shard_bytes)
        if drafts
        else []
    )


def _shards(
    sizes: Mapping[str, Sequence[int]], itemsize: int, max_shard_bytes: int
) -> list[list[str]]:
    """Return the tensor names of each file, in the order of `sizes`. A tensor above the limit has
    its own file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        tensor_bytes = math.prod(size) * itemsize
        if shards[-1] and filled + tensor_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor_bytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return WEIGHTS if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _begin(out: Path, assets: Path) -> None:
    read_config(assets)
    shutil.rmtree(out / STAGING, ignore_errors=True)
    (out / STAGING).mkdir(parents=True)


def _save(tensors: dict[str, torch.Tensor], file: Path, subject: str) -> None:
    if not tensors:
        return
    file.touch()
    # as the umask allows; safetensors replaces the file by one that only its owner can read
    mode = file.stat().st_mode
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"{subject}: {first_line(error)}") from error
    file.chmod(mode)


def _exported_config(config: dict[str, Any], shape: ModelShape, dtype_name: str) -> dict[str, Any]:
    """Return config.json of the export: the file of the initial checkpoint, updated for the written
    tensors."""
    # transformers 5 writes `dtype` and reads both keys; earlier versions read only `torch_dtype`.
    config = {key: value for key, value in config.items() if key != "dtype"}
    written = {"tie_word_embeddings": shape.tie_embeddings, "torch_dtype": dtype_name}
    config |= written
    if FAMILIES[shape.family].is_nested:
        text = {key: value for key, value in config["text_config"].items() if key != "dtype"}
        config["text_config"] = text | written
    if shape.value_head:
        names = config.get("architectures") or []
        config["architectures"] = [
            re.sub("For(CausalLM|ConditionalGeneration)$", "ForSequenceClassification", name)
            for name in names
        ]
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config


def _finish(
    out: Path,
    assets: Path,
    shards: list[list[str]],
    shape: ModelShape,
    dtype_name: str,
    origin: Mapping[str, Any] | None,
) -> None:
    """Write the other files, then move all files to their final names: config.json, which makes it
    a checkpoint, last."""
    staging = out / STAGING
    files = [_shard_name(n, len(shards)) for n in range(len(shards))]
    if len(shards) > 1:
        total = sum(_tensor_bytes(staging / file) for file in files)
        weight_map = {
            name: file for file, names in zip(files, shards, strict=True) for name in names
        }
        _write_json(staging / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        files.append(INDEX)
    files += copy_assets(assets, staging)
    if origin is not None:
        _write_json(staging / RUN_FILE, origin)
        files.append(RUN_FILE)
    _write_json(staging / "config.json", _exported_config(read_config(assets), shape, dtype_name))
    (out / "config.json").unlink(missing_ok=True)
    for old in [out / WEIGHTS, out / INDEX, out / RUN_FILE, *out.glob("model-*-of-*.safetensors")]:
        old.unlink(missing_ok=True)
    for file in [*files, "config.json"]:
        os.replace(staging / file, out / file)
    staging.rmdir()


def _tensor_bytes(file: Path) -> int:
    """Return the bytes of the tensors of a safetensors file: those after the header, whose size it
    begins with."""
    with file.open("rb") as stream:
        return file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
