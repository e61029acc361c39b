"""Bytes of parameters, gradients and optimizer state of one model on one rank, as Megatron-Core
0.16.1 allocates them.

Gradients, and with the distributed optimizer parameters too, lie in flat buffers
(distributed/param_and_grad_buffer.py). With the distributed optimizer a buffer has buckets, and
each data-parallel rank updates an equal part of each bucket.
"""

from __future__ import annotations

import bisect
import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.model_schema import MegatronConfig
from rlhf_mc.reshard.layout import Layout
from rlhf_mc.topology.mesh import Mesh

ITEMSIZES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element, by MegatronConfig.dtype."""
_FLOAT32 = 4
_MOMENTS = 2
_PARAM_ALIGNMENT = 64
"""Elements. With the distributed optimizer each parameter starts at a multiple of it in its
buffer."""
_BUCKET_ALIGNMENT = 128
"""Elements. With the distributed optimizer a bucket ends at a multiple of it and of the
data-parallel size."""
_BUCKET_NUMEL = 40_000_000
"""Elements of a bucket where the reduction of gradients overlaps the backward pass, or 1,000,000
per data-parallel rank if that is more (distributed/distributed_data_parallel.py)."""
_ORDER = {
    name: index
    for names in (
        ("embedding", "decoder", "output_layer"),
        ("layers", "final_layernorm"),
        ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp"),
        ("linear_proj", "linear_qkv", "q_layernorm", "k_layernorm"),
        ("dt_bias", "A_log", "in_proj", "conv1d", "out_norm", "out_proj"),
        ("router", "experts", "shared_experts", "gate_weight", "linear_fc1", "linear_fc2"),
        ("layer_norm_weight", "weight", "bias", "lora_A", "lora_B"),
    )
    for index, name in enumerate(names)
}
"""Places of Megatron-Core's modules and parameters among their siblings, in the order of
named_parameters."""


@dataclass(frozen=True)
class ModelState:
    """Bytes on one rank."""

    params: int
    grads: int
    """0 for a model that is never trained."""
    optimizer: int
    """Main parameters and Adam's moments: from the first optimizer step on."""

    def stored_params(self, shape: ModelShape, itemsize: int) -> float:
        """Return the bytes of its parameters in a training checkpoint: with adapters those that are
        trained alone."""
        return self.params if shape.lora is None else self.grads / _FLOAT32 * itemsize


@dataclass
class Buffer:
    """A flat buffer of parameters, given in the order of named_parameters, that have the same
    data-parallel group."""

    is_of_experts: bool
    """Its group consists of the replicas of an expert."""
    ranks: int
    """Data-parallel size."""
    is_sharded: bool
    """The optimizer state is sharded over the ranks (the distributed optimizer)."""
    bucket_numel: int | None
    """Elements after which a bucket is complete; None: one bucket."""
    own_bucket: Collection[str]
    """Parameters that have a bucket of their own: an embedding that two stages share."""
    numel: int = 0
    """Number of elements with the distributed optimizer's padding."""
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """[start, end) of each parameter."""
    buckets: list[tuple[int, int]] = field(default_factory=list)

    def fill(self, sizes: Sequence[tuple[str, int]]) -> None:
        """Place parameters (name, elements) in reverse order, as the backward pass reaches them."""
        start = 0
        first = 0
        filled = False
        for name, numel in reversed(sizes):
            alone = self.is_sharded and name in self.own_bucket
            start = self._padded(start, _PARAM_ALIGNMENT)
            if alone and filled:
                first = start = self._close(first, start)
            end = start + numel
            self.ranges.append((start, end))
            filled = True
            if alone or (self.bucket_numel is not None and end - first >= self.bucket_numel):
                first = end = self._close(first, end)
                filled = False
            start = end
        self.numel = self._close(first, start) if filled else start

    def largest_share(self) -> int:
        """Return the elements of parameters that the rank with the most updates."""
        if not self.is_sharded:
            return sum(end - start for start, end in self.ranges)
        shares = [0] * self.ranks
        lasts = [last for _, last in self.buckets]
        for start, end in self.ranges:
            first, last = self.buckets[bisect.bisect_left(lasts, end)]
            size = (last - first) // self.ranks
            for rank in range((start - first) // size, -(-(end - first) // size)):
                low = first + rank * size
                shares[rank] += min(end, low + size) - max(start, low)
        return max(shares)

    def _close(self, first: int, end: int) -> int:
        last = self._padded(end, math.lcm(self.ranks, _BUCKET_ALIGNMENT))
        self.buckets.append((first, last))
        return last

    def _padded(self, numel: int, multiple: int) -> int:
        return -(-numel // multiple) * multiple if self.is_sharded else numel


def frozen_state(layout: Layout, megatron: MegatronConfig) -> ModelState:
    """Return the bytes of a model that is never trained."""
    return ModelState(_num_bytes(layout, layout.stacked_shapes, ITEMSIZES[megatron.dtype]), 0, 0)


def _num_bytes(layout: Layout, shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> int:
    return sum(math.prod(size) * layout.itemsize(name, itemsize) for name, size in shapes.items())


def trained_state(
    layout: Layout,
    megatron: MegatronConfig,
    mesh: Mesh,
    stage: int,
    frozen: Collection[str],
    overlaps_reduction: bool,
    tied_embedding: bool,
) -> ModelState:
    """Return the bytes of a trained model on that data-parallel rank of this stage which updates
    most elements.

    layout: the rank's. frozen: names of its parameters that are not trained. overlaps_reduction,
    tied_embedding: see `model_buffers`."""
    itemsize = ITEMSIZES[megatron.dtype]
    copies = _MOMENTS + (megatron.dtype != "float32")
    buffers = list(
        model_buffers(layout, megatron, mesh, stage, frozen, overlaps_reduction, tied_embedding)
    )
    not_trained = {name: size for name, size in layout.shapes.items() if name in frozen}
    numel = sum(buffer.numel for buffer in buffers)
    shares = sum(buffer.largest_share() for buffer in buffers)
    params = _num_bytes(layout, not_trained, itemsize) + numel * itemsize
    return ModelState(params, numel * _FLOAT32, shares * copies * _FLOAT32)


def model_buffers(
    layout: Layout,
    megatron: MegatronConfig,
    mesh: Mesh,
    stage: int,
    frozen: Collection[str],
    overlaps_reduction: bool,
    tied_embedding: bool,
) -> Iterator[Buffer]:
    """Yield the buffers of a trained model on a rank of this stage: for each virtual pipeline chunk
    one of experts, if they are sharded, and one of all else.

    overlaps_reduction: gradients are reduced during the backward pass. tied_embedding: the output
    layer is the embedding."""
    own_bucket = {
        name for name in layout.shapes if "word_embeddings" in name or "output_layer" in name
    }
    own_bucket = own_bucket if tied_embedding and mesh.pp > 1 else set()
    for sizes in _chunks(layout).values():
        trained = [(name, numel) for name, numel in sizes if name not in frozen]
        is_expert = [mesh.ep > 1 and ".experts." in name for name, _ in trained]
        for ranks, expert in ((mesh.replicas, False), (mesh.replicas // mesh.ep, True)):
            members = [size for size, e in zip(trained, is_expert, strict=True) if e == expert]
            # Stages after the first reduce all gradients at once.
            bucket = (
                max(_BUCKET_NUMEL, 1_000_000 * mesh.replicas)
                if overlaps_reduction and stage == 0
                else None
            )
            buffer = Buffer(expert, ranks, megatron.use_distributed_optimizer, bucket, own_bucket)
            buffer.fill(members)
            if members:
                yield buffer


def _chunks(layout: Layout) -> dict[str, list[tuple[str, int]]]:
    """Return (name, elements) of the parameters of each virtual pipeline chunk, in the order of
    named_parameters."""
    chunks: dict[str, list[tuple[str, int]]] = {}
    for name, size in layout.shapes.items():
        chunk = re.match(r"(?:chunk\d+\.)?", name)
        assert chunk is not None
        chunks.setdefault(chunk.group(), []).append((name, math.prod(size)))
    return {
        chunk: sorted(sizes, key=lambda size: _place(size[0])) for chunk, sizes in chunks.items()
    }


@functools.lru_cache(maxsize=1 << 16)
def _place(name: str) -> tuple[int, ...]:
    """Return the sort key of a parameter: the places of its modules, and the numbers in its
    name."""
    key: list[int] = []
    # Experts of local layers are in the buffer as those of Transformer Engine are: by linear layer.
    name = re.sub(r"local_experts\.(\d+)\.(.*)", r"\2\1", name)
    for part in name.split("."):
        word, number = re.fullmatch(r"(.*?)(\d*)", part).groups()  # type: ignore[union-attr]
        key += [_ORDER.get(word, 0), int(number or 0)]
    return tuple(key)
