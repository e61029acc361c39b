"""LoRA in Megatron-Core's models: adapters of linear layers, and the weights that a layer and its
adapter are together. architectures/lora.py has their rows in the table of parameters.

An adapter adds s B A x to the output W x of its linear layer. Where several projections are one
layer (q, k and v), so are their adapters: A has those of all projections one after another, and a
row of B is multiplied by the products of the projection that the row of W belongs to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch.nn.functional import linear

from rlhf_mc.architectures.lora import AdapterRows, weight_name
from rlhf_mc.architectures.parameters import model_adapters
from rlhf_mc.architectures.rows import SPLIT_DIMS, Param
from rlhf_mc.models.steps import Assembly
from rlhf_mc.models.transformer_engine import uses_transformer_engine
from rlhf_mc.reshard.layout import Layout, Stack, mcore_layout, name_in_layer

_MERGED_NUMEL = 1 << 24
"""Elements of a weight that are merged at a time: their float32 copies are 128 MiB."""


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer of this rank with an adapter, or Transformer Engine's module of a layer's
    experts, with one for each."""

    module: Any
    name: str
    """The module's name in the model."""
    tensors: Sequence[Sequence[str]]
    """Names in the module of W, A and B."""
    scale: float
    split_axis: int | None
    """Axis of W that is split over tensor-parallel ranks: each has some rows of W and B (0), or
    some columns of W and A (1); None: each has all of them."""
    is_expert: bool
    """The token dispatcher gathers the inputs and sums the outputs of tensor-parallel ranks."""
    sequence_parallel: bool
    group: Any
    """The tensor-parallel ranks."""

    def product(self, x: torch.Tensor, splits: Sequence[int] | None = None) -> torch.Tensor:
        """Return B A x, of the layer's input x [..., in]: [..., out], as the layer returns it.
        splits: tokens of each expert."""
        matrix = x.flatten(0, -2)
        inputs = [matrix] if splits is None else matrix.split(list(splits))
        outputs = [
            self._product(part, getattr(self.module, a), getattr(self.module, b))
            for part, (_, a, b) in zip(inputs, self.tensors, strict=True)
        ]
        out = outputs[0] if splits is None else torch.cat(outputs)
        # sequence parallelism gathers and scatters tokens
        return out.unflatten(0, (-1, *x.shape[1:-1]))

    def _product(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        inner = linear(x, a)
        if self.split_axis == 0 and not self.is_expert:
            inner = (
                mappings.gather_from_sequence_parallel_region(inner, group=self.group)
                if self.sequence_parallel
                else mappings.copy_to_tensor_model_parallel_region(inner, group=self.group)
            )
        if self.split_axis == 1 and not self.is_expert:
            inner = (
                mappings.reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
                if self.sequence_parallel
                else mappings.reduce_from_tensor_model_parallel_region(inner, group=self.group)
            )
        return linear(inner, self._joint(b))

    def _joint(self, b: torch.Tensor) -> torch.Tensor:
        """Return B for the products of all projections: [out, projections x r]."""
        if self.module.lora_rows is not None:
            b = b[self.module.lora_rows]
        if self.module.lora_mask is None:
            return b
        return (self.module.lora_mask[:, :, None] * b[:, None]).flatten(1)

    def merged(self) -> dict[str, MergedWeight]:
        """Return the weights with their adapters, by the names of the weights in the model."""
        merged = {}
        for names in self.tensors:
            weight, a, b = (getattr(self.module, name).data for name in names)
            merged[f"{self.name}.{names[0]}"] = MergedWeight(weight, a, b, self._joint, self.scale)
        return merged


@dataclass(frozen=True)
class MergedWeight:
    """W + s B A, of which a block is computed when it is read."""

    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    joint: Callable[[torch.Tensor], torch.Tensor]
    """B for the products of all projections."""
    scale: float

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @torch.no_grad()
    def __getitem__(self, block: Sequence[slice]) -> torch.Tensor:
        rows, columns = block
        b = self.joint(self.b)[rows]
        return merge(self.weight[rows, columns], self.a[:, columns], b, self.scale)


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return W + s B A, computed in float32, some rows at a time, and rounded once."""
    rows = max(1, _MERGED_NUMEL // weight.shape[1])
    wide = a.float()
    parts = [
        torch.add(part.float(), of_b.float() @ wide, alpha=scale).to(weight.dtype)
        for part, of_b in zip(weight.split(rows), b.split(rows), strict=True)
    ]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@contextmanager
def adapters_off(chunks: Sequence[Any]) -> Iterator[None]:
    """Compute without adapters while the body runs."""
    for chunk in chunks:
        chunk.has_adapters_on = False
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.has_adapters_on = True


def add_adapters(assembly: Assembly) -> None:
    """Give the linear layers of the model their adapters: parameters `lora_A` and `lora_B` of the
    layer's module.

    Reason: Megatron-Core has none, and a module around the layer would change the names of its
    parameters in checkpoints."""
    model = assembly.model
    model.adapted_layers = []
    model.has_adapters_on = True
    if assembly.shape.lora is None:
        return
    mesh = assembly.groups.mesh
    at = assembly.groups.coordinate
    layout = mcore_layout(
        assembly.shape,
        at.tp,
        mesh.tp,
        assembly.layers,
        assembly.is_first,
        assembly.is_last,
        uses_transformer_engine(),
        ep_rank=at.ep,
        ep_size=mesh.ep,
    )
    for rows in model_adapters(assembly.shape):
        for number, layer in enumerate(assembly.layers):
            if assembly.shape.layer_kinds[layer] == rows.weight.kind:
                model.adapted_layers += _adapt(assembly, layout, rows, number)


def _adapt(
    assembly: Assembly, layout: Layout, rows: AdapterRows, number: int
) -> Iterator[AdaptedLayer]:
    """Add the adapters of one row in one layer. number: of the layer in these modules."""
    shape = assembly.shape
    assert shape.lora is not None
    local = [_local_name(row, number) for row in (rows.weight, rows.a, rows.b)]
    sizes = [layout.stacked_shapes[name][isinstance(name, Stack) :] for name in local[1:]]
    experts = range(shape.num_experts // assembly.groups.mesh.ep)
    modules: dict[str, list[list[str]]] = {}
    for names in zip(*(_members(name, experts) for name in local), strict=True):
        parts = [name.rpartition(".") for name in names]
        modules.setdefault(parts[0][0], []).append([name for *_, name in parts])
    dims = next(iter(rows.weight.hf.values()))
    split_axis = next((axis for axis, dim in enumerate(dims) if dim in SPLIT_DIMS), None)
    joint = _joint(layout, rows, local, assembly.layers[number])
    for path, tensors in modules.items():
        module: Any = assembly.model.get_submodule(path)
        for weight, *adapter in tensors:
            _register(assembly, module, weight, dict(zip(adapter, sizes, strict=True)), split_axis)
        for name, buffer in zip(("lora_rows", "lora_mask"), joint, strict=True):
            module.register_buffer(name, buffer, persistent=False)
        normalises = hasattr(module, "return_layernorm_output")
        if normalises:  # Transformer Engine's layer with the norm before it
            module.return_layernorm_output = True
        adapted = AdaptedLayer(
            module,
            path,
            tensors,
            shape.lora.scale,
            split_axis,
            isinstance(local[0], Stack),
            assembly.megatron.sequence_parallel,
            assembly.groups.collection.tp,
        )
        module.register_forward_hook(_hook(assembly.model, adapted, normalises))
        yield adapted


def _local_name(row: Param, layer: int) -> str:
    te = row.mcore_te if uses_transformer_engine() else None
    return name_in_layer(te or row.mcore, layer)


def _members(name: str, experts: range) -> list[str]:
    return [name.member(expert) for expert in experts] if isinstance(name, Stack) else [name]


def _register(
    assembly: Assembly,
    module: Any,
    weight: str,
    sizes: Mapping[str, tuple[int, ...]],
    split_axis: int | None,
) -> None:
    """Add A and B, of these sizes by name, to a module. split_axis: of the weight."""
    base = getattr(module, weight)
    for whole_axis, (name, size) in zip((0, 1), sizes.items(), strict=True):
        param: Any = torch.nn.Parameter(base.new_empty(size))
        if hasattr(base, "allreduce"):  # False of experts that are spread over ranks
            param.allreduce = base.allreduce
        if split_axis is None or split_axis == whole_axis:
            # each tensor-parallel rank has the gradient of its tokens, or of its part of an expert
            param.sequence_parallel = assembly.megatron.sequence_parallel
        else:
            set_tensor_model_parallel_attributes(param, True, split_axis, 1)
        module.register_parameter(name, param)


def _joint(
    layout: Layout, rows: AdapterRows, local: Sequence[str], layer: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return lora_rows, the row of B of each row of the weight, None where they are the same, and
    lora_mask, 1 for the projection of each row: [out, projections], None where there is one. local:
    names of weight, A and B; layer: global number."""
    weight, _, b = local
    num_rows = layout.stacked_shapes[weight][isinstance(weight, Stack)]
    row_of_b = list(range(num_rows))
    mask = [[False] * len(rows.b.hf) for _ in range(num_rows)]
    for projection, pattern in enumerate(rows.b.hf):
        tensors = [name_in_layer(name, layer) for name in (pattern, weight_name(pattern))]
        parts = [
            [shard for shard in layout.by_local[name] if shard.tensor == tensor]
            for name, tensor in zip((b, weight), tensors, strict=True)
        ]
        for of_b, of_weight in itertools.product(*parts):
            start, end = of_weight.box[-2]
            first = of_weight.offset[-2]
            for row in range(max(start, of_b.box[-2][0]), min(end, of_b.box[-2][1])):
                row_of_b[first + row - start] = of_b.offset[-2] + row - of_b.box[-2][0]
                mask[first + row - start][projection] = True
    has_all = all(map(any, mask))
    is_same = row_of_b == list(range(layout.stacked_shapes[b][isinstance(b, Stack)]))
    return (
        None if is_same else torch.tensor(row_of_b),
        None if has_all and len(rows.b.hf) == 1 else torch.tensor(mask, dtype=torch.float32),
    )


def _hook(model: Any, layer: AdaptedLayer, normalises: bool) -> Any:
    def add(module: Any, inputs: tuple[Any, ...], out: tuple[Any, ...]) -> tuple[Any, Any]:
        x, *splits = inputs
        output, bias = out[:2]
        if normalises:
            (output, x), bias = out if len(out) == 2 else ((out[0], out[2]), out[1])
        if model.has_adapters_on:
            output = torch.add(output, layer.product(x, *splits), alpha=layer.scale)
        return output, bias

    return add
