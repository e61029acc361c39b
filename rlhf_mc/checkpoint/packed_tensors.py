"""Tensors of files that hold all experts of a layer (architectures/packed_experts.py): read and
written by expert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from rlhf_mc.architectures.packed_experts import ExpertPart, part_of_file, stored_shapes
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.reshard.layout import logical_shapes


def expert_view(stack: torch.Tensor, part: ExpertPart) -> torch.Tensor:
    """Return the view of one expert's tensor, [output, input] or [output], in a tensor of all
    experts."""
    view = stack[part.expert]
    if not part.in_columns:
        return view if part.half is None else view.chunk(2)[part.half]
    view = view if part.half is None else view[..., part.half :: 2]
    return view.mT if view.dim() == 2 else view


class ExpertSlice:
    """The slice of one expert's tensor in a file: `slice[a:b, c:d]` reads a block."""

    def __init__(self, stored: Any, part: ExpertPart) -> None:
        """stored: the slice of the tensor of all experts."""
        self._stored = stored
        self._part = part
        self.get_dtype = stored.get_dtype

    def get_shape(self) -> list[int]:
        """Return the shape of the expert's tensor."""
        _, *sizes = self._stored.get_shape()
        outputs, *inputs = sizes[::-1] if self._part.in_columns else sizes
        return [outputs // (1 if self._part.half is None else 2), *inputs]

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, *inputs = index if isinstance(index, tuple) else (index,)
        part = self._part
        inputs = inputs or [slice(None)] * (len(self._stored.get_shape()) - 2)
        outputs = self.get_shape()[0]
        start, stop, _ = rows.indices(outputs)
        expert = slice(part.expert, part.expert + 1)
        if not part.in_columns:
            before = outputs * (part.half or 0)
            return self._stored[(expert, slice(before + start, before + stop), *inputs)][0]
        step = 1 if part.half is None else 2
        block = self._stored[(expert, *inputs, slice(start * step, stop * step))]
        return expert_view(block, replace(part, expert=0))


def logical_names(shape: ModelShape, stored: Iterable[str]) -> list[str]:
    """Return the names of the logical tensors that tensors of a file hold."""
    wanted = frozenset(stored)
    return [n for n in logical_shapes(shape) if part_of_file(shape.family, n)[0] in wanted]


def pack(shape: ModelShape, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, of its logical tensors."""
    sizes = stored_shapes(shape, logical_shapes(shape))
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stored, part = part_of_file(shape.family, name)
        if part is None:
            packed[stored] = tensor
            continue
        if stored not in packed:
            packed[stored] = tensor.new_empty(sizes[stored])
        expert_view(packed[stored], part).copy_(tensor)
    return packed
