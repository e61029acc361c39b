"""Megatron-Core checkpoints of a model's weights, in any (tp, pp) layout: written and read through
dist_checkpointing. The Hugging Face form is in hf.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from rlhf_mc import platform
from rlhf_mc.checkpoint.hf import ASSETS
from rlhf_mc.config.errors import UserError
from rlhf_mc.models.build import PackedGPT

HF_ASSETS = "hf"
"""Folder of a Megatron checkpoint with what describes its model: config.json and the tokenizer's files."""


def _sharded(model: PackedGPT, skip_prefixes: tuple[str, ...] = ()) -> dict[str, Any]:
    state = model.sharded_state_dict(prefix="model.")
    return {name: value for name, value in state.items() if not name.removeprefix("model.").startswith(skip_prefixes)}


def save_mcore(model: PackedGPT, directory: str | Path, assets_dir: str | Path) -> None:
    """Writes the model, and beside it what describes it (from assets_dir). Every rank must call it.
    The writer starts helper processes: the program needs an `if __name__ == "__main__"` guard."""
    directory = Path(directory)
    if dist.get_rank() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / HF_ASSETS).mkdir(exist_ok=True)
            for name in ("config.json", *ASSETS):
                if (Path(assets_dir) / name).exists():
                    shutil.copyfile(Path(assets_dir) / name, directory / HF_ASSETS / name)
        except OSError as error:
            raise UserError(f"{directory}: cannot be written ({error.strerror})") from error
    dist.barrier()
    with platform.megatron():
        dist_checkpointing.save(_sharded(model), str(directory), async_sharded_save=False)


def load_mcore(model: PackedGPT, directory: str | Path, skip_prefixes: tuple[str, ...] = ()) -> None:
    """Fills the model from a checkpoint that save_mcore wrote in any layout; parameters whose names start with one
    of skip_prefixes stay as they are. UserError where it is no checkpoint, or of another model."""
    _check_is_checkpoint(directory)
    with platform.megatron():
        state = _sharded(model, skip_prefixes)
        _check_same_model(state, directory)
        loaded = dist_checkpointing.load(state, str(directory))
    with torch.no_grad():
        params = dict(model.named_parameters())
        for name, value in loaded.items():
            name = name.removeprefix("model.")
            if name in params and isinstance(value, torch.Tensor):
                params[name].copy_(value)


def checkpoint_dtype(directory: str | Path) -> Any:
    """The type of the weights, as MegatronConfig.dtype names it."""
    _check_is_checkpoint(directory)
    stored = dist_checkpointing.load_tensors_metadata(str(directory))
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in stored.values()}
    assert len(dtypes) == 1, dtypes
    return dtypes.pop()


def _check_is_checkpoint(directory: str | Path) -> None:
    if not (Path(directory) / "metadata.json").is_file():
        raise UserError(
            f"{directory}: not a Megatron checkpoint (no metadata.json); tools/convert_hf_to_mcore.py writes one"
        )


def _check_same_model(state: dict[str, Any], directory: str | Path) -> None:
    """Compares names and global shapes before anything is read: dist_checkpointing's own message is many lines."""
    stored = dist_checkpointing.load_tensors_metadata(str(directory))
    for value in state.values():
        if not isinstance(value, dist_checkpointing.ShardedTensor):
            continue
        if value.key not in stored:
            raise UserError(f"{directory}: holds no tensor {value.key}; it is a checkpoint of another architecture")
        found = tuple(stored[value.key].global_shape)
        if found != tuple(value.global_shape) and not value.allow_shape_mismatch:
            raise UserError(
                f"{directory}: tensor {value.key} has shape {found}, the model needs {tuple(value.global_shape)}; "
                "it is a checkpoint of another architecture"
            )
