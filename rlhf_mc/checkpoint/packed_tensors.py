"""Tensors of files that hold all experts of a layer (architectures/packed_experts.py): read and
written by expert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rlhf_mc.architectures.packed_experts import part_of_file, stored_shapes
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.reshard.layout import logical_shapes


def expert_view(stack: torch.Tensor, expert: int, first: int | None) -> torch.Tensor:
    """Return the view of one expert's tensor, [output, input] or [output], in a tensor of all
    experts. first: of every second column; None: of all columns."""
    view = stack[expert] if first is None else stack[expert][..., first::2]
    return view.mT if view.dim() == 2 else view


class ExpertSlice:
    """The slice of one expert's tensor in a file: `slice[a:b, c:d]` reads a block."""

    def __init__(self, stored: Any, expert: int, first: int | None) -> None:
        """stored: the slice of the tensor of all experts."""
        self._stored = stored
        self._expert = expert
        self._first = first
        self.get_dtype = stored.get_dtype

    def get_shape(self) -> list[int]:
        """Return the shape of the expert's tensor."""
        _, *inputs, outputs = self._stored.get_shape()
        return [outputs // (1 if self._first is None else 2), *inputs]

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, *inputs = index if isinstance(index, tuple) else (index,)
        inputs = inputs or [slice(None)] * (len(self._stored.get_shape()) - 2)
        step = 1 if self._first is None else 2
        start, stop, _ = rows.indices(self.get_shape()[0])
        block = self._stored[
            (slice(self._expert, self._expert + 1), *inputs, slice(start * step, stop * step))
        ]
        return expert_view(block, 0, self._first)


def logical_names(shape: ModelShape, stored: Iterable[str]) -> list[str]:
    """Return the names of the logical tensors that tensors of a file hold."""
    wanted = frozenset(stored)
    return [name for name in logical_shapes(shape) if _stored_name(shape, name) in wanted]


def pack(shape: ModelShape, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, of its logical tensors."""
    sizes = stored_shapes(shape, logical_shapes(shape))
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        part = part_of_file(shape.family, name)
        if part is None:
            packed[name] = tensor
            continue
        stored, expert, first = part
        if stored not in packed:
            packed[stored] = tensor.new_empty(sizes[stored])
        expert_view(packed[stored], expert, first).copy_(tensor)
    return packed


def _stored_name(shape: ModelShape, name: str) -> str:
    part = part_of_file(shape.family, name)
    return name if part is None else part[0]
