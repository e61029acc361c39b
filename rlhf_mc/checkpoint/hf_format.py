"""Import of Hugging Face checkpoints. A rank reads only the blocks of its layout, by a plan of
reshard/.

Export is in hf_export.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlhf_mc.architectures.packed_experts import ExpertPart, part_of_file, stored_shapes
from rlhf_mc.architectures.run_shapes import described_shape, read_json_object
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.finite import check_finite, check_not_zero, num_not_finite
from rlhf_mc.checkpoint.packed_tensors import ExpertSlice
from rlhf_mc.config.errors import UserError, first_line
from rlhf_mc.reshard.execute import execute
from rlhf_mc.reshard.layout import Layout, correction_biases, logical_shapes, whole_layout
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.runtime.work import working
from rlhf_mc.topology.consensus import on_every_rank

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
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
"""Files that an export copies from the checkpoint with which training began."""
COMPARED_BYTES = 16 << 20
"""Bytes of each tensor that a comparison of two tensors reads at a time."""

logger = logging.getLogger(__name__)
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
TYPES = ", ".join(_DTYPES.values())
_HEADS = ("lm_head.weight", "score.weight", "score.bias")
"""Heads that a checkpoint may have and a model may lack. The bias of a value head is checked in
setup/value_heads.py."""
_BUFFERS = (".inv_freq", ".original_inv_freq", ".cos_cached", ".sin_cached")
"""Endings of the names of rotary tables, which are not weights and are computed from
config.json."""
_NAMED = 5
"""Maximum number of tensors that a message names; the others are counted."""


def is_buffer(name: str) -> bool:
    """Return whether a tensor of a checkpoint is a table that the model computes."""
    return name.endswith(_BUFFERS)


def shorten_names(names: Collection[str]) -> str:
    """Return the first names, and the number of the others."""
    more = len(names) - _NAMED
    return ", ".join(sorted(names)[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class HFReader:
    """A checkpoint directory. Files are opened on first use, and tensors are read when they are
    sliced."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UserError(
                f"{self.directory}: no such directory; expected a Hugging Face checkpoint"
            )
        self.config: dict[str, Any] = read_config(self.directory)
        self._open_files: dict[str, Any] = {}
        has_index, has_weights = ((self.directory / name).exists() for name in (INDEX, WEIGHTS))
        if has_index:
            self._files = self._read_index()
            if has_weights and WEIGHTS not in self._files.values():
                raise UserError(
                    f"{self.directory}: holds {WEIGHTS} and {INDEX}, which names other files; "
                    "remove one of them"
                )
        elif has_weights:
            self._files = dict.fromkeys(self._open(WEIGHTS).keys(), WEIGHTS)
        else:
            other = next(
                (f" (there is {path.name})" for path in sorted(self.directory.glob("*.bin*"))), ""
            )
            raise UserError(
                f"{self.directory}: neither {WEIGHTS} nor {INDEX}; only safetensors weights are "
                f"read{other}"
            )

    def _read_index(self) -> dict[str, str]:
        weight_map = read_json_object(self.directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(f, str) and Path(f).name == f for f in weight_map.values()
        ):
            raise UserError(
                f"{self.directory / INDEX}: expected a weight_map from tensor names to names of "
                "files beside it"
            )
        return weight_map

    def shape(self, value_head: bool = False) -> ModelShape:
        """Return the shape of the model that config.json describes. Raise UserError if it is not
        supported.

        Embeddings are tied only if the checkpoint has no other language-model head."""
        shape = _shape(self.directory, self.config, value_head)
        if value_head or not shape.tie_embeddings or not self._has_another_head:
            return shape
        return replace(shape, tie_embeddings=False)

    @functools.cached_property
    def _has_another_head(self) -> bool:
        """True if the checkpoint has a language-model head that is not the embedding."""
        names = ("lm_head.weight", "model.embed_tokens.weight")
        if any(self._part(name)[0] not in self.names for name in names):
            return False
        slices = self.slices(names)
        with self.reading():
            if _are_equal(*slices.values()):
                return False
        logger.warning(
            "%s: lm_head.weight differs from model.embed_tokens.weight; the two are not tied, "
            "whatever tie_word_embeddings says in config.json",
            self.directory,
        )
        return True

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors in the files."""
        return self._files.keys()

    def slices(self, names: Iterable[str]) -> dict[str, Any]:
        """Return slices of logical tensors by name; `slice[a:b, c:d]` reads a block. Raise
        UserError if a tensor or its file is missing."""
        return {name: self._slice(name) for name in names}

    def draft_tensors(self, num_layers: int) -> list[str]:
        """Return the tensors that no pass here uses: of the layers of multi-token prediction, which
        follow the model's num_layers layers or are named "mtp", and of a model of images."""
        count = self.config.get("num_nextn_predict_layers", self.config.get("num_mtp_layers"))
        drafts = range(num_layers, num_layers + (count if isinstance(count, int) else 0))
        layers = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in self.names}
        return sorted(
            name
            for name, layer in layers.items()
            if name.startswith(("mtp.", "model.visual."))
            or (layer is not None and int(layer[1]) in drafts)
        )

    def check(self, shape: ModelShape) -> None:
        """Raise UserError unless the checkpoint has exactly the model's tensors, each once and of a
        supported dtype, beside draft_tensors.

        A critic's `score.weight` may be missing; other heads and buffers are ignored."""
        expected = stored_shapes(shape, logical_shapes(shape), self.names)
        for name, wanted in expected.items():
            if name == "score.weight" and name not in self.names:
                continue
            stored = tuple(self._slice(name).get_shape())
            if stored != wanted:
                raise UserError(
                    f"{self.file_path(name)}: {name} has shape {stored}, config.json describes "
                    f"{wanted}"
                )
        self._check_files()
        others = {*expected, *_HEADS, *self.draft_tensors(shape.num_layers)}
        excess = [n for n in self.names if n not in others and not is_buffer(n)]
        if excess:
            be = "is" if len(excess) == 1 else "are"
            is_quantized = any(name.endswith("_scale_inv") for name in excess)
            hint = "; the weights are quantized: convert them to bfloat16" if is_quantized else ""
            part = f"{be} no part of the {shape.family} model of config.json"
            raise UserError(f"{self.directory}: {shorten_names(excess)} {part}{hint}")
        other = {n: self._slice(n).get_dtype() for n in expected if n in self.names}
        other = {name: dtype for name, dtype in other.items() if dtype not in _DTYPES}
        if other:
            raise UserError(f"{self.directory}: {_by_type(other)}; expected {TYPES}")

    def _check_files(self) -> None:
        """Raise UserError if a file has a tensor that the index does not list, or lists in another
        file."""
        for file in sorted(set(self._files.values())):
            for name in self._open(file).keys():  # noqa: SIM118
                place = self._files.get(name)
                if place is None and not is_buffer(name):
                    raise UserError(f"{self.directory / file}: tensor {name} is not in {INDEX}")
                if place not in (None, file):
                    raise UserError(
                        f"{self.directory}: tensor {name} is in {place} and in {file}; one of them "
                        "counts"
                    )

    def dtype_name(self) -> str:
        """Return torch's name of the dtype of the weights. Raise UserError unless all have the same
        supported dtype."""
        shape = self.shape()
        others = {*correction_biases(shape), *self.draft_tensors(shape.num_layers)}
        names = [name for name in self.names if not is_buffer(name) and name not in others]
        dtypes = {name: self._slice(name).get_dtype() for name in names}
        types = set(dtypes.values())
        if len(types) != 1 or not types <= _DTYPES.keys():
            raise UserError(
                f"{self.directory}: {_by_type(dtypes)}; expected one of {TYPES} for all"
            )
        return _DTYPES[types.pop()]

    def num_not_finite(self, name: str) -> int:
        """Return the number of NaN and infinite values of a tensor, which is read completely."""
        stored = self._slice(name)
        with self.reading():
            return num_not_finite(stored[:])

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Raise UserError in place of an error of a read inside."""
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{self.directory}: a tensor cannot be read ({first_line(error)})"
            ) from error

    def file_path(self, name: str) -> Path:
        """Return the file of a tensor."""
        return self.directory / self._files[self._part(name)[0]]

    def _part(self, name: str) -> tuple[str, ExpertPart | None]:
        """Return as part_of_file does which part of a file's tensor a logical tensor is."""
        return part_of_file(str(self.config.get("model_type")), name, self.names)

    def _slice(self, name: str) -> Any:
        name, part = self._part(name)
        if part is not None:
            return ExpertSlice(self._slice(name), part)
        if name not in self._files:
            raise UserError(f"{self.directory}: tensor {name} is missing")
        try:
            return self._open(self._files[name]).get_slice(name)
        except SafetensorError as error:
            raise UserError(
                f"{self.file_path(name)}: tensor {name} is missing, though {INDEX} names it"
            ) from error

    def _open(self, file: str) -> Any:
        if file not in self._open_files:
            path = self.directory / file
            if not path.exists():
                raise UserError(f"{path}: missing, though {INDEX} names it")
            try:
                self._open_files[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"{path}: not a readable safetensors file, truncated or corrupt ({error})"
                ) from error
        return self._open_files[file]


def copy_assets(source: Path, target: Path) -> list[str]:
    """Copy the ASSETS that a checkpoint has. Return their names."""
    names = [name for name in ASSETS if (source / name).exists()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def read_config(directory: str | os.PathLike[str], name: str = "config.json") -> dict[str, Any]:
    """Return a JSON file of a directory, which need not have weights."""
    return read_json_object(Path(directory) / name)


def read_shape(directory: str | os.PathLike[str], value_head: bool = False) -> ModelShape:
    """Return the shape of the model that config.json of a directory describes, which need not have
    weights."""
    return _shape(Path(directory), read_config(directory), value_head)


def _shape(directory: Path, config: dict[str, Any], value_head: bool) -> ModelShape:
    shape = described_shape(str(directory), config, value_head)
    if (directory / QUANTIZATION).exists():
        raise UserError(
            f"{directory}/{QUANTIZATION}: quantized weights are not supported, and vLLM reads this "
            "file"
        )
    return shape


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two slices of safetensors files have the same shape and values. transformers
    and vLLM make the same comparison; here only some rows of both are in memory at a time."""
    shape = first.get_shape()
    if shape != second.get_shape() or not shape:
        return False
    step = max(1, COMPARED_BYTES // max(1, 4 * math.prod(shape[1:])))
    parts = (slice(start, start + step) for start in range(0, shape[0], step))
    return all(torch.equal(first[part].float(), second[part].float()) for part in parts)


def _by_type(types: Mapping[str, str]) -> str:
    """Return words that list the tensors of each safetensors dtype, the rarest dtype first."""
    names: dict[str, list[str]] = {}
    for name, dtype in types.items():
        names.setdefault(_DTYPES.get(dtype, dtype), []).append(name)
    rarest_first = sorted(names.items(), key=lambda item: len(item[1]))
    return "tensors of " + ", of ".join(
        f"{dtype} ({shorten_names(group)})" for dtype, group in rarest_first
    )


def import_hf(
    reader: HFReader, layout: Layout, params: Mapping[str, torch.Tensor], skip: Collection[str] = ()
) -> None:
    """Read one rank's parameters, by local name, from the checkpoint, and cast them to their
    dtypes.

    Only the blocks of `layout` are read; logical tensors in `skip` are unchanged. Raise UserError
    on every rank if one of them cannot read its blocks or has a value that is not finite, or if a
    matrix is zero. Every rank must call it.
    """
    wanted = layout.without(skip)  # single tensors, as in the files

    def read() -> None:
        slices = reader.slices({shard.tensor: None for shard in wanted.shards})
        source = whole_layout({name: tuple(s.get_shape()) for name, s in slices.items()})
        plan = make_plan([source], [wanted], itemsize=1, bucket_bytes=1)
        with reader.reading(), working(f"reading {reader.directory.name}"):
            execute(plan.for_rank(0), slices, params, transport=None)

    on_every_rank(read)
    tensors: dict[str, dict[str, None]] = {}
    for shard in wanted.shards:
        tensors.setdefault(shard.local, {})[shard.tensor] = None

    def describe(local: str, count: int) -> str:
        for name in tensors[local]:
            if in_file := reader.num_not_finite(name):
                return (
                    f"{reader.file_path(name)}: {name} has values that are not finite (NaN or "
                    f"infinite): {in_file}"
                )
        dtype = str(params[local].dtype).removeprefix("torch.")
        return (
            f"{reader.directory}: {', '.join(tensors[local])} has values too large for {dtype}: "
            f"{count}"
        )

    filled = {name: param for name, param in params.items() if name in tensors}
    check_finite(filled, describe)
    check_not_zero(filled, lambda local: f"{reader.directory}: {', '.join(tensors[local])}")
