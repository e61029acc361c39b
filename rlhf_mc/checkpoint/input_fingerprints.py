"""Fingerprints (size and content hash) of every file that a run reads: stored in its checkpoints,
compared on resume.

Small files are hashed completely. Of a large file of weights the header and evenly spread blocks
are hashed, so that a start does not read the model twice. A change of all weights (another, scaled
or further trained model) changes these blocks; a change of single elements may not.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_mc import json_files
from rlhf_mc.checkpoint import peft_format
from rlhf_mc.checkpoint.directory import digest_file
from rlhf_mc.checkpoint.hf_format import ASSETS, INDEX, WEIGHTS
from rlhf_mc.config.errors import UserError, error_reason
from rlhf_mc.config.paths import CUSTOM_FUNCTIONS, input_paths
from rlhf_mc.config.schema import Config
from rlhf_mc.runtime.work import counted
from rlhf_mc.topology.consensus import gather_results, on_rank_0

WHOLE_BYTES = 16 << 20
"""Files of weights up to this size are hashed completely."""
BLOCK_BYTES = 4096
NUM_BLOCKS = 1024
"""Blocks of a larger file, evenly spread from its first byte to its last. A safetensors file has
one more block from the middle of every tensor."""
MAY_CHANGE = ("custom_reward_function.path", *CUSTOM_FUNCTIONS)
"""Inputs whose change is a warning, not an error: a user's function may be corrected during a run,
and a hash does not tell comments from code."""

Inputs = dict[str, dict[str, dict[str, Any]]]
"""{setting: {file: {"bytes": size, "sha256" or "sampled_sha256": hash}}}. A data file is named by
its index in the setting, and has a "path" too; other files by their names without the directory,
which may be moved."""


@dataclass(frozen=True)
class _File:
    setting: str
    name: str
    path: Path
    is_weights: bool = False


def read_inputs(cfg: Config) -> Inputs:
    """Return the fingerprints of the run's inputs, which the ranks hash in turn. Raise UserError on
    every rank if a file cannot be read. Every rank must call it."""
    files = on_rank_0(lambda: list(_files(cfg)), "inputs")
    numbers = range(dist.get_rank(), len(files), dist.get_world_size())
    hashed = counted(numbers, len(numbers), "files", "hashing inputs")
    hashes = gather_results(lambda: {number: _hashed(files[number]) for number in hashed})
    by_number = {number: entry for entries in hashes for number, entry in entries.items()}
    inputs: Inputs = {}
    for number, file in enumerate(files):
        inputs.setdefault(file.setting, {})[file.name] = by_number[number]
    return inputs


def paths(cfg: Config) -> list[tuple[str, Path]]:
    """Return (setting, file) of every input."""
    return [(file.setting, file.path) for file in _files(cfg)]


def differences(before: Inputs, now: Inputs) -> dict[str, list[str]]:
    """Return by setting a phrase for each file that differs."""
    out: dict[str, list[str]] = {}
    for setting in sorted(before.keys() | now.keys()):
        old = before.get(setting, {})
        new = now.get(setting, {})
        for name in sorted(old.keys() | new.keys()):
            if _content(old.get(name)) != _content(new.get(name)):
                path = (new.get(name) or {}).get("path")
                named = name if path is None else f"{name} ({path})"
                out.setdefault(setting, []).append(
                    f"{named}: {_phrase(old.get(name))} -> {_phrase(new.get(name))}"
                )
    return out


def _content(entry: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a fingerprint without the path, which is for messages: a file that was moved has not
    changed."""
    return (
        None if entry is None else {name: value for name, value in entry.items() if name != "path"}
    )


def _phrase(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "none"
    return f"{entry['bytes']} bytes {str(entry.get('sha256') or entry.get('sampled_sha256'))[:8]}"


# ---------------------------------------------------------------- which files


def _files(cfg: Config) -> Iterator[_File]:
    numbers: Counter[str] = Counter()
    for setting, given in input_paths(cfg):
        path = Path(given)
        name = setting.rpartition(".")[2]
        if setting in ("data.train_files", "data.val_files"):
            numbers[setting] += 1
            yield _File(setting, f"file {numbers[setting]}", path)
        elif setting == "model.path":
            yield from _model_files(
                setting, path, with_weights=cfg.model.dist_checkpointing_path is None
            )
        elif name == "model_path":
            yield from _model_files(setting, path, with_weights=True)
        elif name == "adapter_path":
            files = (peft_format.CONFIG, peft_format.WEIGHTS)
            yield from (_File(setting, file, path / file) for file in files)
        elif name == "dist_checkpointing_path":
            yield from _megatron_files(setting, path)
        elif name == "tokenizer_path":
            yield from _existing(setting, path, _TOKENIZER)
        elif setting not in ("trainer.resume_from_path", "trainer.replay"):
            # of runs, not inputs of this one
            yield _File(setting, "file", path)
    if cfg.model.tokenizer_path is None:
        yield from _existing("model.tokenizer_path", Path(cfg.model.path), _TOKENIZER)


_TOKENIZER = tuple(name for name in ASSETS if name != "generation_config.json")


def _model_files(setting: str, root: Path, with_weights: bool) -> Iterator[_File]:
    yield from _existing(setting, root, ("config.json", "generation_config.json"))
    if with_weights:
        # Like HFReader: the files of the index, if there is one.
        names = {WEIGHTS}
        if (root / INDEX).exists():
            yield _File(setting, INDEX, root / INDEX)
            names = set(json_files.read(root / INDEX)["weight_map"].values())
        yield from (_File(setting, name, root / name, is_weights=True) for name in sorted(names))


def _megatron_files(setting: str, root: Path) -> Iterator[_File]:
    # Not .metadata: it has a random id, so that another conversion of the same model would be a
    # change.
    yield from _existing(setting, root, ("metadata.json", "common.pt"))
    yield from (
        _File(setting, path.name, path, is_weights=True)
        for path in sorted(root.glob("__*_*.distcp"))
    )


def _existing(setting: str, root: Path, names: Iterable[str]) -> Iterator[_File]:
    yield from (_File(setting, name, root / name) for name in names if (root / name).is_file())


# ---------------------------------------------------------------- hashes


def _hashed(file: _File) -> dict[str, Any]:
    try:
        size = file.path.stat().st_size
        if file.is_weights and size > WHOLE_BYTES:
            return {"bytes": size, "sampled_sha256": _sampled(file.path, size)}
        whole = digest_file(file.path)
        path = {"path": str(file.path)} if file.setting.startswith("data.") else {}
        return {"bytes": whole.num_bytes, "sha256": whole.sha256, **path}
    except (OSError, ValueError) as error:
        reason = error_reason(error) if isinstance(error, OSError) else error
        raise UserError(f"{file.setting}: {file.path} cannot be read ({reason})") from error


def _sampled(path: Path, size: int) -> str:
    """Return the hash of the sampled blocks, whose positions are a function of the file's size and
    header."""
    starts = {(size - BLOCK_BYTES) * i // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS)}
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if path.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
            if length > size:
                raise ValueError("no safetensors file")
            header = os.pread(descriptor, length, 8)
            digest.update(header)
            starts |= _middles(header, 8 + length)
        for start in sorted(starts):
            digest.update(os.pread(descriptor, BLOCK_BYTES, start))
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _middles(header: bytes, data: int) -> set[int]:
    """Return the offset of a block in the middle of each tensor. data: offset of the first
    tensor."""
    offsets = [
        entry["data_offsets"]
        for name, entry in json_files.parse(header).items()
        if name != "__metadata__"
    ]
    return {data + max(start, (start + end - BLOCK_BYTES) // 2) for start, end in offsets}


def check_unchanged(before: Inputs, now: Inputs, allowed: bool, where: str) -> list[str]:
    """Return lines of warnings. Raise UserError if an input has changed and this is not allowed.
    before: fingerprints of the checkpoint."""
    lines = {
        setting: f"{setting} has changed since the checkpoint: {'; '.join(files)}"
        for setting, files in differences(before, now).items()
    }
    refused = [line for setting, line in lines.items() if setting not in MAY_CHANGE]
    if refused and not allowed:
        raise UserError(
            f"{where}: {' | '.join(refused)} (bytes, SHA-256); give the files that the run began "
            "with, or trainer.resume_changed_inputs=allow to resume with the new ones"
        )
    return list(lines.values())
