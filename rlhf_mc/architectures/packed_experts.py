"""Files in which all experts of a layer are one tensor (gpt_oss): [experts, input, output], and
[experts, output] for biases, the columns of gate and up in turn. Everywhere else each expert has
its own tensors, [output, input]. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlhf_mc.architectures.families import FAMILIES
from rlhf_mc.architectures.spec import ModelShape

_PARTS = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", None),
}
"""Projection of an expert -> (tensor in the file, number of the first of every second column; None:
all columns)."""
_EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(\w+)\.(weight|bias)")

Part = tuple[str, int, int | None]
"""(tensor in the file, number of the expert, first column of every second; None: all columns)."""


def part_of_file(family: str, name: str) -> Part | None:
    """Return which part of which tensor of a file a logical tensor is; None: the tensor of its own
    name."""
    names = FAMILIES[family].expert_names if family in FAMILIES else None
    packs = names is not None and names.in_one_tensor
    match = _EXPERT.fullmatch(name) if packs else None
    if match is None:
        return None
    prefix, expert, projection, kind = match.groups()
    tensor, first = _PARTS[projection]
    return f"{prefix}{tensor}{'_bias' if kind == 'bias' else ''}", int(expert), first


def stored_shapes(
    shape: ModelShape, logical: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors that files have. logical: name -> shape of the logical
    tensors."""
    stored = {}
    for name, (rows, *rest) in logical.items():
        part = part_of_file(shape.family, name)
        if part is None:
            stored[name] = (rows, *rest)
        else:
            stored[part[0]] = (shape.num_experts, *rest, rows if part[2] is None else 2 * rows)
    return stored
