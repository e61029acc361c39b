"""Hugging Face checkpoints: reading just the bytes that a rank needs, and writing from any Megatron layout.

Both go through the planner of reshard/; nothing here knows how a model is split.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.finite import check_finite, num_not_finite
from rlhf_mc.checkpoint.tying import are_equal
from rlhf_mc.config.errors import UserError, first_line, reason_of
from rlhf_mc.reshard.execute import execute
from rlhf_mc.reshard.layout import EMPTY, Layout, hf_layout, logical_shapes, whole_layout
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.reshard.transport import Local, point_to_point
from rlhf_mc.topology.consensus import on_every_rank, on_rank_0

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
QUANTIZATION = "hf_quant_config.json"
ASSETS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that an exported checkpoint takes unchanged from the one that training began with."""
RUN_FILE = "run.json"
"""Says of which run a directory is: an export (with the step), or trainer.default_local_dir."""
STAGING = ".incomplete"
"""Folder inside the output directory for files that are not complete yet."""

logger = logging.getLogger(__name__)
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
TYPES = ", ".join(_DTYPES.values())
_HEADS = ("lm_head.weight", "score.weight", "score.bias")
"""Heads that a checkpoint may have and the model lack; trainer/value_heads.py checks the value head's bias."""
_BUFFERS = (".inv_freq", ".original_inv_freq", ".cos_cached", ".sin_cached")
"""Endings of names of tensors that are not weights: rotary tables, which follow from config.json."""
_NAMED = 5
"""Tensors that one message names; the others are counted."""


def is_buffer(name: str) -> bool:
    """Return whether a tensor of a checkpoint is a table that every model computes for itself."""
    return name.endswith(_BUFFERS)


def some_of(names: Collection[str]) -> str:
    """Return the first names, and how many there are beside them."""
    more = len(names) - _NAMED
    return ", ".join(sorted(names)[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class HFReader:
    """A checkpoint directory. Tensors are opened when asked for and read when sliced."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UserError(f"{self.directory}: no such directory; expected a Hugging Face checkpoint")
        self.config: dict[str, Any] = read_config(self.directory)
        self._open_files: dict[str, Any] = {}
        has_index, has_weights = ((self.directory / name).exists() for name in (INDEX, WEIGHTS))
        if has_index:
            self._file_of = self._read_index()
            if has_weights and WEIGHTS not in self._file_of.values():
                raise UserError(
                    f"{self.directory}: holds {WEIGHTS} and {INDEX}, which names other files; remove one of them"
                )
        elif has_weights:
            self._file_of = dict.fromkeys(self._open(WEIGHTS).keys(), WEIGHTS)
        else:
            other = next((f" (there is {path.name})" for path in sorted(self.directory.glob("*.bin*"))), "")
            raise UserError(
                f"{self.directory}: neither {WEIGHTS} nor {INDEX}; only safetensors weights are read{other}"
            )

    def _read_index(self) -> dict[str, str]:
        found = _read_json(self.directory / INDEX).get("weight_map")
        if not isinstance(found, dict) or not all(isinstance(f, str) and Path(f).name == f for f in found.values()):
            raise UserError(
                f"{self.directory / INDEX}: expected a weight_map from tensor names to names of files beside it"
            )
        return found

    def shape(self, value_head: bool = False) -> ModelShape:
        """Return the shape of the model that config.json describes. UserError for what is not supported.

        Embeddings are tied only where the checkpoint has no other language-model head."""
        found = read_shape(self.directory, value_head)
        if value_head or not found.tie_embeddings or not self._has_another_head:
            return found
        return replace(found, tie_embeddings=False)

    @functools.cached_property
    def _has_another_head(self) -> bool:
        """Whether there is a language-model head that is not the embedding."""
        names = ("lm_head.weight", "model.embed_tokens.weight")
        if any(name not in self.names for name in names):
            return False
        slices = self.slices(names)
        with self.reading():
            if are_equal(*slices.values()):
                return False
        logger.warning(
            "%s: lm_head.weight differs from model.embed_tokens.weight; the two are not tied, whatever "
            "tie_word_embeddings says in config.json",
            self.directory,
        )
        return True

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors that are there."""
        return self._file_of.keys()

    def slices(self, names: Iterable[str]) -> dict[str, Any]:
        """Name -> slice; `slice[a:b, c:d]` reads that block. UserError if a tensor or its file is missing."""
        return {name: self._slice(name) for name in names}

    def check(self, shape: ModelShape) -> None:
        """Raise UserError unless the checkpoint has exactly the model's tensors, each once and of a type that is read.

        A critic's `score.weight` may be missing; other heads and buffers are ignored."""
        expected = logical_shapes(shape)
        for name, wanted in expected.items():
            if name == "score.weight" and name not in self.names:
                continue
            found = tuple(self._slice(name).get_shape())
            if found != wanted:
                raise UserError(f"{self.file_of(name)}: {name} has shape {found}, config.json describes {wanted}")
        self._check_files()
        excess = [n for n in self.names if n not in expected and n not in _HEADS and not is_buffer(n)]
        if excess:
            be = "is" if len(excess) == 1 else "are"
            raise UserError(
                f"{self.directory}: {some_of(excess)} {be} no part of the {shape.family} model of config.json"
            )
        other = {n: self._slice(n).get_dtype() for n in expected if n in self.names}
        other = {name: dtype for name, dtype in other.items() if dtype not in _DTYPES}
        if other:
            raise UserError(f"{self.directory}: {_by_type(other)}; expected {TYPES}")

    def _check_files(self) -> None:
        """Raise UserError where a file of the index has a tensor that the index places elsewhere, or nowhere."""
        for file in sorted(set(self._file_of.values())):
            for name in self._open(file).keys():  # noqa: SIM118
                place = self._file_of.get(name)
                if place is None and not is_buffer(name):
                    raise UserError(f"{self.directory / file}: tensor {name} is not in {INDEX}")
                if place not in (None, file):
                    raise UserError(f"{self.directory}: tensor {name} is in {place} and in {file}; one of them counts")

    def dtype_name(self) -> str:
        """Return the type of the weights, as torch names it. UserError where they are not all of one floating type."""
        found = {name: self._slice(name).get_dtype() for name in self.names if not is_buffer(name)}
        types = set(found.values())
        if len(types) != 1 or not types <= _DTYPES.keys():
            raise UserError(f"{self.directory}: {_by_type(found)}; expected one of {TYPES} for all")
        return _DTYPES[types.pop()]

    def num_not_finite(self, name: str) -> int:
        """Return how many values of a tensor are NaN or infinite; reads it whole."""
        found = self._slice(name)
        with self.reading():
            return num_not_finite(found[:])

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Raise UserError where the content of a slice cannot be read inside."""
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.directory}: a tensor cannot be read ({first_line(error)})") from error

    def file_of(self, name: str) -> Path:
        """Return the file that has a tensor."""
        return self.directory / self._file_of[name]

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise UserError(f"{self.directory}: tensor {name} is missing")
        try:
            return self._open(self._file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise UserError(f"{self.file_of(name)}: tensor {name} is missing, though {INDEX} names it") from error

    def _open(self, file: str) -> Any:
        if file not in self._open_files:
            path = self.directory / file
            if not path.exists():
                raise UserError(f"{path}: missing, though {INDEX} names it")
            try:
                self._open_files[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path}: not a readable safetensors file, cut short or corrupt ({error})") from error
        return self._open_files[file]


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json of a directory, which may hold no weights."""
    return _read_json(Path(directory) / "config.json")


def read_shape(directory: str | os.PathLike[str], value_head: bool = False) -> ModelShape:
    """Return the shape of the model that the config.json of a directory describes, which may hold no weights."""
    try:
        shape = ModelShape.from_hf_config(read_config(directory), value_head)
    except UserError as error:
        message = str(error)
        raise UserError(f"{directory}/{message}" if message.startswith("config.json") else message) from None
    if (Path(directory) / QUANTIZATION).exists():
        raise UserError(f"{directory}/{QUANTIZATION}: quantized weights are not supported, and vLLM goes by this file")
    return shape


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({reason_of(error)})") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content


def _by_type(types: Mapping[str, str]) -> str:
    """Return which tensors have which of safetensors' types: the rarest type first, and the names of each."""
    names: dict[str, list[str]] = {}
    for name, dtype in types.items():
        names.setdefault(_DTYPES.get(dtype, dtype), []).append(name)
    rarest_first = sorted(names.items(), key=lambda item: len(item[1]))
    return "tensors of " + ", of ".join(f"{dtype} ({some_of(found)})" for dtype, found in rarest_first)


def import_hf(reader: HFReader, layout: Layout, params: Mapping[str, torch.Tensor], skip: Collection[str] = ()) -> None:
    """Fills one rank's parameters, by local name, from the checkpoint; casts to their types.

    Reads the blocks that `layout` names and no others; logical tensors in `skip` are left as they are. UserError on
    every rank where one of them cannot read its blocks, or finds a value that is not finite. Every rank must call it.
    """
    wanted = layout.without(skip)  # single tensors, as in the files

    def read() -> None:
        slices = reader.slices({piece.tensor: None for piece in wanted.shards})
        source = whole_layout({name: tuple(s.get_shape()) for name, s in slices.items()})
        plan = make_plan([source], [wanted], itemsize=1, bucket_bytes=1)
        with reader.reading():
            execute(plan.for_rank(0), slices, params, Local())

    on_every_rank(read)
    filled = {piece.local for piece in wanted.shards}

    def describe(local: str, count: int) -> str:
        of_param = {piece.tensor: None for piece in wanted.shards if piece.local == local}
        for name in of_param:
            if in_file := reader.num_not_finite(name):
                return f"{reader.file_of(name)}: {name} has values that are not finite (NaN or infinite): {in_file}"
        dtype = str(params[local].dtype).removeprefix("torch.")
        return f"{reader.directory}: {', '.join(of_param)} has values too large for {dtype}: {count}"

    check_finite({name: param for name, param in params.items() if name in filled}, describe)


def export_hf(
    params: Mapping[str, torch.Tensor],
    layouts: Sequence[Layout],
    shape: ModelShape,
    out_dir: str | os.PathLike[str],
    rank: int,
    group: dist.ProcessGroup | None,
    dtype_name: str,
    assets_dir: str | os.PathLike[str],
    max_shard_bytes: int = 5_000_000_000,
    bucket_bytes: int = 256 << 20,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes the model that `layouts` (one per rank of the group) spread over the ranks; every rank must call it.

    Shard i is gathered and written by rank i modulo their number, so that a rank holds one shard file's worth at
    a time. `assets_dir` gives config and tokenizer; `about` (run and step) goes to run.json. Nothing of the final names
    appears before all is written. UserError, the same on every rank, if some rank cannot write.
    """
    dtype: torch.dtype = getattr(torch, dtype_name)

    def gather(names: Sequence[Sequence[str]]) -> dict[str, torch.Tensor]:
        targets = [hf_layout(shape, mine) if mine else EMPTY for mine in names]
        plan = make_plan(layouts, targets, dtype.itemsize, bucket_bytes)
        tensors = {name: torch.empty(size, dtype=dtype) for name, size in targets[rank].shapes.items()}
        execute(plan.for_rank(rank), params, tensors, point_to_point(group), wire_dtype=dtype)
        return tensors

    _export(
        gather, shape, Path(out_dir), rank, len(layouts), group, dtype_name, Path(assets_dir), max_shard_bytes, about
    )


def export_read(
    read: Callable[[Sequence[str]], dict[str, torch.Tensor]],
    shape: ModelShape,
    out_dir: str | os.PathLike[str],
    rank: int,
    group: dist.ProcessGroup | None,
    dtype_name: str,
    assets_dir: str | os.PathLike[str],
    max_shard_bytes: int,
    about: Mapping[str, Any],
) -> None:
    """Write a checkpoint as export_hf does, of tensors that lie in files. `read` returns the tensors of the names that
    it is given. It is called on every rank of the group at the same time, with no names where a rank has no file to
    write."""
    world = dist.get_world_size(group)
    mine: Callable[[Sequence[Sequence[str]]], dict[str, torch.Tensor]] = lambda names: read(names[rank])  # noqa: E731
    _export(mine, shape, Path(out_dir), rank, world, group, dtype_name, Path(assets_dir), max_shard_bytes, about)


def _export(
    tensors_of: Callable[[Sequence[Sequence[str]]], dict[str, torch.Tensor]],
    shape: ModelShape,
    out: Path,
    rank: int,
    world: int,
    group: dist.ProcessGroup | None,
    dtype_name: str,
    assets_dir: Path,
    max_shard_bytes: int,
    about: Mapping[str, Any] | None,
) -> None:
    """Write the files. tensors_of: a collective that takes, by rank, the names of the tensors that it writes next, and
    returns this rank's tensors."""
    shards = _shards(shape, getattr(torch, dtype_name).itemsize, max_shard_bytes)
    subject = f"export of the Hugging Face checkpoint failed on rank {rank}"
    on_rank_0(lambda: _begin(out, assets_dir), subject, group)
    for start in range(0, len(shards), world):
        names = shards[start : start + world]
        tensors = tensors_of([*names, *[[]] * (world - len(names))])
        save = functools.partial(_save, tensors, out / STAGING / _shard_name(start + rank, len(shards)), subject)
        on_every_rank(save, subject, group)
        tensors.clear()
    on_rank_0(lambda: _finish(out, assets_dir, shards, shape, dtype_name, about), subject, group)


def _shards(shape: ModelShape, itemsize: int, max_shard_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file, in the model's order; a tensor above the limit has a file of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in logical_shapes(shape).items():
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
    _read_json(assets / "config.json")
    shutil.rmtree(out / STAGING, ignore_errors=True)
    (out / STAGING).mkdir(parents=True)


def _save(tensors: dict[str, torch.Tensor], file: Path, subject: str) -> None:
    if not tensors:
        return
    file.touch()
    mode = file.stat().st_mode  # the umask's; safetensors replaces the file by one that only its owner can read
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"{subject}: {first_line(error)}") from error
    file.chmod(mode)


def _exported_config(config: dict[str, Any], shape: ModelShape, dtype_name: str) -> dict[str, Any]:
    """config.json of the export: that of the start, with what is true of the written tensors."""
    # transformers 5 writes `dtype` and reads both; earlier ones know `torch_dtype` alone.
    config = {key: value for key, value in config.items() if key != "dtype"}
    config |= {"tie_word_embeddings": shape.tie_embeddings, "torch_dtype": dtype_name}
    if shape.value_head:
        names = config.get("architectures") or []
        config["architectures"] = [name.replace("ForCausalLM", "ForSequenceClassification") for name in names]
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config


def _finish(
    out: Path,
    assets: Path,
    shards: list[list[str]],
    shape: ModelShape,
    dtype_name: str,
    about: Mapping[str, Any] | None,
) -> None:
    """Adds what is not a shard, then gives all files their place: config.json, which makes it a checkpoint, last."""
    staging = out / STAGING
    files = [_shard_name(n, len(shards)) for n in range(len(shards))]
    if len(shards) > 1:
        sizes = logical_shapes(shape)
        total = sum(math.prod(size) for size in sizes.values()) * getattr(torch, dtype_name).itemsize
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        _write_json(staging / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        files.append(INDEX)
    for asset in ASSETS:
        if (assets / asset).exists():
            shutil.copyfile(assets / asset, staging / asset)
            files.append(asset)
    if about is not None:
        _write_json(staging / RUN_FILE, about)
        files.append(RUN_FILE)
    _write_json(staging / "config.json", _exported_config(_read_json(assets / "config.json"), shape, dtype_name))
    (out / "config.json").unlink(missing_ok=True)
    for old in [out / WEIGHTS, out / INDEX, out / RUN_FILE, *out.glob("model-*-of-*.safetensors")]:
        old.unlink(missing_ok=True)
    for file in [*files, "config.json"]:
        os.replace(staging / file, out / file)
    staging.rmdir()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
