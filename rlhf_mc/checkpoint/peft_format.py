"""The start of a model's adapters, and their files in the format of the PEFT library:
adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlhf_mc.architectures.lora import Lora, is_a
from rlhf_mc.architectures.packed_experts import file_name
from rlhf_mc.architectures.run_shapes import read_json_object
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.finite import num_not_finite
from rlhf_mc.checkpoint.hf_export import gather_tensors
from rlhf_mc.config.errors import UserError, error_prefix, first_line
from rlhf_mc.reshard.layout import EMPTY, Layout, hf_layout, logical_shapes
from rlhf_mc.topology.consensus import on_every_rank, on_rank_0

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ADAPTER = "adapter"
"""Directory of an adapter inside the checkpoint of the model with it."""
_PREFIX = "base_model.model."
_OTHER_METHODS = (
    "use_dora",
    "use_rslora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
)
"""Keys of adapter_config.json that change what an adapter computes, where they are set."""
_OTHER_BASES = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Beginnings of init_lora_weights with which PEFT has changed the weights below the adapter too."""


def adapter_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the logical tensors of the model's adapters."""
    base = logical_shapes(shape.base)
    return {name: size for name, size in logical_shapes(shape).items() if name not in base}


def start_adapters(
    params: Mapping[str, torch.Tensor], layout: Layout, shape: ModelShape, seed: int
) -> None:
    """Fill this rank's adapters as PEFT does: A uniformly from -1 / sqrt(in) to 1 / sqrt(in), so
    that B A x has the same size for any rank, and B with 0. The values do not depend on the
    layout."""
    sizes = adapter_tensors(shape)
    for shard in layout.shards:
        if shard.tensor in sizes and is_a(shard.tensor):
            draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {shard.tensor}".encode()))
            whole = torch.rand(sizes[shard.tensor], generator=draw) * 2 - 1
            whole /= math.sqrt(sizes[shard.tensor][1])
            _fill(params, shard.local, shard.offset, whole[_slices(shard.box)])


def read_adapters(
    key: str,
    path: str | os.PathLike[str],
    params: Mapping[str, torch.Tensor],
    layout: Layout,
    shape: ModelShape,
) -> None:
    """Fill this rank's adapters from a PEFT adapter. key: the setting that names its directory.
    Raise UserError on every rank if it is not of these adapters. Every rank must call it."""
    directory = Path(path)
    names = {tensor: _PREFIX + file_name(shape.family, tensor) for tensor in adapter_tensors(shape)}

    def read() -> None:
        assert shape.lora is not None
        _check_config(key, directory, shape.lora)
        try:
            with safe_open(directory / WEIGHTS, framework="pt") as file:
                stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                _check_tensors(key, directory, shape, names, stored)
                for shard in layout.shards:
                    if shard.tensor not in names:
                        continue
                    name = names[shard.tensor]
                    block = stored[name][_slices(shard.box)]
                    if count := num_not_finite(block):
                        raise UserError(
                            f"{key}: {directory / WEIGHTS}: {name} has {count} values that are not "
                            "finite"
                        )
                    _fill(params, shard.local, shard.offset, block)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{key}: {directory / WEIGHTS} cannot be read ({first_line(error)})"
            ) from error

    on_every_rank(read)


def _check_config(key: str, directory: Path, lora: Lora) -> None:
    path = directory / CONFIG
    with error_prefix(f"{key}:"):
        config = read_json_object(path)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{key}: {path} is not of a LoRA adapter: peft_type must be LORA")
    has_other_base = str(config.get("init_lora_weights")).lower().startswith(_OTHER_BASES)
    for name in (*_OTHER_METHODS, *(["init_lora_weights"] if has_other_base else [])):
        if config.get(name):
            raise UserError(f"{key}: {path}: {name} is {config[name]}, which is not supported")
    section = key.rpartition(".")[0]
    for name, setting, value in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if config.get(name) != value:
            raise UserError(
                f"{key}: {path}: {name} is {config.get(name)}, and {section}.{setting} is {value}"
            )


def _check_tensors(
    key: str,
    directory: Path,
    shape: ModelShape,
    names: Mapping[str, str],
    stored: Mapping[str, Any],
) -> None:
    """Raise UserError if the file has other tensors than the model. names: logical tensor -> its
    name in the file."""
    wanted = {names[tensor]: size for tensor, size in adapter_tensors(shape).items()}
    modules = f"{key.rpartition('.')[0]}.target_modules"
    where = f"{key}: {directory / WEIGHTS}"
    for name, size in wanted.items():
        if name not in stored:
            raise UserError(f"{where} has no {name}, which {modules} asks for")
        stored_size = tuple(stored[name].get_shape())
        if stored_size != size:
            raise UserError(
                f"{where}: {name} is {list(stored_size)}, and this model's is {list(size)}: the "
                "adapter is of another model"
            )
    if unknown := next((name for name in stored if name not in wanted), None):
        raise UserError(f"{where} has {unknown}, which {modules} does not ask for")


def export_adapters(
    params: Mapping[str, torch.Tensor],
    layouts: Sequence[Layout],
    shape: ModelShape,
    directory: Path,
    dtype_name: str,
    base_path: str,
) -> None:
    """Write the adapters, sharded over the ranks by `layouts`, as a PEFT adapter of the model in
    base_path. Rank 0 writes. Every rank must call it."""
    names = list(adapter_tensors(shape))
    targets = [hf_layout(shape, names), *[EMPTY] * (len(layouts) - 1)]
    tensors = gather_tensors(params, layouts, targets, getattr(torch, dtype_name))

    def write() -> None:
        assert shape.lora is not None
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG).unlink(missing_ok=True)  # makes it an adapter, and is written last
        stored = {_PREFIX + file_name(shape.family, name): x for name, x in tensors.items()}
        save_file(stored, directory / WEIGHTS, metadata={"format": "pt"})
        (directory / CONFIG).write_text(json.dumps(_config(shape.lora, base_path), indent=2) + "\n")
        if any("{e}" in module for module in shape.lora.modules):
            logger.warning(
                "%s: PEFT finds the adapters of experts of qwen3_moe without dense layers and of "
                "mixtral alone; the merged model has all of them",
                directory,
            )

    on_rank_0(write, f"{directory}: cannot be written")


def _config(lora: Lora, base_path: str) -> dict[str, Any]:
    # transformers has the experts of a layer in one module, whose name may be another, without
    # numbers: PEFT looks there for those that match.
    names = [re.sub(r".*experts\.\{e\}\.", r"experts.(\\d+.)?", name) for name in lora.modules]
    modules = "|".join(dict.fromkeys(names)).replace(".", r"\.")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": rf".*\.({modules})",
    }


def _slices(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in box)


def _fill(
    params: Mapping[str, torch.Tensor], local: str, offset: Sequence[int], block: torch.Tensor
) -> None:
    ends = (start + size for start, size in zip(offset, block.shape, strict=True))
    params[local][_slices(tuple(zip(offset, ends, strict=True)))].copy_(block)
