"""Megatron-Core checkpoints of weights: written and read through dist_checkpointing, in any
layout."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch.distributed.checkpoint.api import CheckpointException

from rlhf_mc import json_files
from rlhf_mc.checkpoint.dcp_metadata import read_metadata
from rlhf_mc.checkpoint.finite import check_finite, check_not_zero
from rlhf_mc.checkpoint.hf_format import HFReader, copy_assets
from rlhf_mc.config.errors import UserError, first_line
from rlhf_mc.models.gpt_model import PackedGPT
from rlhf_mc.models.megatron_patches import keep_results_in_process, megatron_calls
from rlhf_mc.runtime.work import working
from rlhf_mc.topology.consensus import gather_objects, on_every_rank, on_rank_0

HF_ASSETS = "hf"
"""Directory in a Megatron checkpoint with the model's config.json and tokenizer."""


def _sharded(model: PackedGPT | None, skip_prefixes: tuple[str, ...] = ()) -> dict[str, Any]:
    if model is None:
        return {}
    state = model.sharded_state_dict(
        prefix="model.", metadata={"dp_cp_group": model.pg_collection.dp_cp}
    )
    return {
        name: value
        for name, value in state.items()
        # adapters are in no Megatron checkpoint
        if not name.removeprefix("model.").startswith(skip_prefixes) and ".lora_" not in name
    }


def save_mcore(model: PackedGPT, directory: str | Path, reader: HFReader) -> None:
    """Write the model, and config.json and tokenizer of the reader's checkpoint. An existing
    checkpoint is replaced. Every rank must call it. The writer forks processes."""
    directory = Path(directory)
    on_rank_0(lambda: _begin(directory), f"{directory}: cannot be written")
    with megatron_calls(), working(f"writing {directory.name}"):
        keep_results_in_process()
        try:
            dist_checkpointing.save(_sharded(model), str(directory), async_sharded_save=False)
        except CheckpointException as error:
            raise UserError(
                f"{directory}: the weights cannot be written ({_cause(error)})"
            ) from error
    # After the weights: dist_checkpointing refuses a directory that is not empty.
    on_rank_0(lambda: _copy_assets(directory, reader), f"{directory}: cannot be written")


def _begin(directory: Path) -> None:
    """Make the directory. Delete the files of an older checkpoint and no others, first those
    without which it is not read."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("metadata.json", ".metadata", "common.pt"):
        (directory / name).unlink(missing_ok=True)
    for file in directory.glob("__*_*.distcp"):
        file.unlink()
    shutil.rmtree(directory / HF_ASSETS, ignore_errors=True)


def _copy_assets(directory: Path, reader: HFReader) -> None:
    (directory / HF_ASSETS).mkdir()
    copy_assets(reader.directory, directory / HF_ASSETS)
    config = {**reader.config, "tie_word_embeddings": reader.shape().tie_embeddings}
    (directory / HF_ASSETS / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_mcore(
    model: PackedGPT | None, directory: str | Path, skip_prefixes: tuple[str, ...] = ()
) -> None:
    """Load the weights of a checkpoint that save_mcore wrote in any layout. Parameters whose names
    start with one of skip_prefixes are unchanged. Raise UserError on every rank if it is no
    checkpoint, is of another model, has a value that is not finite or a matrix of zeros. Every rank
    must call it. model: None on a rank outside of its mesh."""
    stored = on_every_rank(lambda: _stored_tensors(directory))
    with megatron_calls():
        # Extra states (of fp8) are no weights. Transformer Engine's norms have one, and local norms
        # have none.
        state = {
            n: v
            for n, v in _sharded(model, skip_prefixes).items()
            if not isinstance(v, ShardedObject)
        }
        _check_same_model(state, stored, directory, skip_prefixes)
        try:
            with working(f"reading {Path(directory).name}"):
                loaded = dist_checkpointing.load(state, str(directory))
        except CheckpointException as error:
            raise UserError(
                f"{directory}: a file of weights is missing or truncated ({_cause(error)})"
            ) from error
    with torch.no_grad():
        params = {} if model is None else dict(model.named_parameters())
        for name, value in loaded.items():
            name = name.removeprefix("model.")
            if name in params and isinstance(value, torch.Tensor):
                params[name].copy_(value)

    def where(name: str) -> str:
        """Return the place of a tensor, with the layer's number in the whole model."""
        number = re.search(r"\blayers\.(\d+)\.", name)
        if number is not None and model is not None:
            layer = model.decoder.layers[int(number[1])].layer_number - 1
            name = name.replace(number[0], f"layers.{layer}.")
        return f"{directory}: tensor model.{name}"

    not_finite = "values that are not finite (NaN or infinite)"
    check_finite(params, lambda name, count: f"{where(name)} has {not_finite}: {count}")
    check_not_zero(
        {n: param for n, param in params.items() if not n.startswith(skip_prefixes)}, where
    )


def _cause(error: CheckpointException) -> BaseException:
    """Return the error of the first rank that failed. The error itself has the stack traces of all
    ranks."""
    cause: BaseException = next(iter(error.failures.values()))[0]
    return cause


def checkpoint_dtype(directory: str | Path) -> Any:
    """Return the dtype of the weights, as in MegatronConfig.dtype."""
    stored = {
        name: tensor
        for name, tensor in _stored_tensors(directory).items()
        if not name.endswith("expert_bias")
    }
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in stored.values()}
    assert len(dtypes) == 1, dtypes
    return dtypes.pop()


def _check_is_checkpoint(directory: str | Path) -> None:
    for name in ("metadata.json", ".metadata", "common.pt"):
        if not (Path(directory) / name).is_file():
            raise UserError(
                f"{directory}: not a Megatron checkpoint ({name} is missing); "
                "tools/convert_hf_to_mcore.py writes one"
            )
    try:
        content = json_files.read(Path(directory) / "metadata.json")
        backends = (
            (content["sharded_backend"], content["common_backend"])
            if isinstance(content, dict)
            else None
        )
    except (OSError, ValueError, KeyError):
        backends = None
    if backends != ("torch_dist", "torch"):
        raise UserError(
            f"{directory}: not a Megatron checkpoint (metadata.json names no sharded_backend "
            "torch_dist)"
        )
    _check_common(Path(directory) / "common.pt")


def _check_common(path: Path) -> None:
    """Raise UserError unless dist_checkpointing can read the state that is not tensors. torch's
    weights-only reader, which executes nothing, reads it here."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a corrupt archive or pickle raises any exception
        raise UserError(f"{path}: corrupt ({first_line(error)})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: corrupt (holds a {type(content).__name__})")


def _stored_tensors(directory: str | Path) -> dict[str, Any]:
    """Return the metadata (dtype, global shape) of each tensor by name. Raise UserError if there is
    no valid checkpoint."""
    _check_is_checkpoint(directory)
    read_metadata(Path(directory) / ".metadata")
    tensors: dict[str, Any] = dist_checkpointing.load_tensors_metadata(str(directory))
    return tensors


def _check_same_model(
    state: dict[str, Any],
    stored: dict[str, Any],
    directory: str | Path,
    skip_prefixes: tuple[str, ...],
) -> None:
    """Raise UserError on every rank unless names and global shapes are the model's.
    dist_checkpointing's own message has many lines and does not mention excess tensors. Every rank
    must call it."""
    # A factory makes the tensors of linear_fc1, and of a delta net, whose parts have names of their
    # own.
    built = [
        value.build() if isinstance(value, ShardedTensorFactory) else value
        for value in state.values()
    ]
    tensors = {
        value.key: value for value in nested_values(built) if isinstance(value, ShardedTensor)
    }
    # A pipeline stage has only some of the names.
    wanted = set().union(*gather_objects(set(tensors)))

    def check() -> None:
        for key in sorted(wanted - stored.keys()):
            raise UserError(
                f"{directory}: holds no tensor {key}; it is a checkpoint of another architecture"
            )
        for key in sorted(stored.keys() - wanted):
            if not key.removeprefix("model.").startswith(skip_prefixes):
                raise UserError(
                    f"{directory}: tensor {key} is no part of the model; it is of another "
                    "architecture"
                )
        for key, value in tensors.items():
            stored_shape = tuple(stored[key].global_shape)
            if stored_shape != tuple(value.global_shape) and not value.allow_shape_mismatch:
                raise UserError(
                    f"{directory}: tensor {key} has shape {stored_shape}, the model needs "
                    f"{tuple(value.global_shape)}; "
                    "it is a checkpoint of another architecture"
                )

    on_every_rank(check)
