"""The names of tensors in files, and files in which all experts of a layer are one tensor. gpt_oss
has [experts, input, output], and [experts, output] for biases, the columns of gate and up in turn;
qwen3_5_moe has [experts, output, input], the rows of gate before those of up. Everywhere else each
expert has its own tensors, [output, input]. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rlhf_mc.architectures.families import FAMILIES
from rlhf_mc.architectures.spec import ModelShape

_PARTS = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", None),
}
"""Projection of an expert -> (tensor in the file, number of its half; None: the whole tensor)."""
_EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class ExpertPart:
    """The part of a tensor of all experts that is one expert's."""

    expert: int
    half: int | None
    """0: gate, 1: up; None: the expert's whole tensor."""
    in_columns: bool
    """The tensor is transposed, and has the columns of gate and up in turn."""


def file_name(family: str, name: str) -> str:
    """Return the name in files of a tensor by its logical name. The name of a file's tensor is its
    own."""
    prefix = FAMILIES[family].prefix if family in FAMILIES else "model."
    is_logical = name.startswith("model.") and not name.startswith((prefix, "model.visual."))
    return prefix + name.removeprefix("model.") if is_logical else name


def part_of_file(
    family: str, name: str, files: Collection[str] = ()
) -> tuple[str, ExpertPart | None]:
    """Return (tensor of a file, which part of it a logical tensor is; None: all of it).

    files: names of the files' tensors: an expert with tensors of its own among them is no part."""
    name = file_name(family, name)
    packing = FAMILIES[family].expert_names.in_one_tensor if family in FAMILIES else None
    match = _EXPERT.fullmatch(name) if packing and name not in files else None
    if match is None:
        return name, None
    prefix, expert, projection, kind = match.groups()
    tensor, half = _PARTS[projection]
    part = ExpertPart(int(expert), half, in_columns=packing == "columns")
    return f"{prefix}{tensor}{'_bias' if kind == 'bias' else ''}", part


def stored_shapes(
    shape: ModelShape, logical: Mapping[str, tuple[int, ...]], files: Collection[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors that files have. logical: name -> shape of the logical
    tensors; files: as in part_of_file."""
    stored = {}
    for name, (rows, *rest) in logical.items():
        tensor, part = part_of_file(shape.family, name, files)
        if part is None:
            stored[tensor] = (rows, *rest)
            continue
        rows *= 1 if part.half is None else 2
        sizes = (*rest, rows) if part.in_columns else (rows, *rest)
        stored[tensor] = (shape.num_experts, *sizes)
    return stored
