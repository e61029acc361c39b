"""Collectives of a pass over a model, as Megatron-Core 0.16.1 and models/heads.py call them: name,
group, bytes.

Counted from the sources: tensor_parallel/layers.py (and Transformer Engine's linear layers, which
communicate the same), transformer/moe/token_dispatcher.py, pipeline_parallel/schedules.py,
distributed/. Collectives whose size does not grow with the tokens or the model are left out: the
norm of the gradient, statistics, numbers of tokens.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlhf_mc.architectures.layer import FeedForward, Layer, Mixer
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.model_schema import MegatronConfig
from rlhf_mc.planner.model_state import ITEMSIZES, model_buffers
from rlhf_mc.reshard.freeze import frozen_parameters, frozen_tensors
from rlhf_mc.reshard.layout import Layout
from rlhf_mc.reshard.model_checks import cp_comm_type
from rlhf_mc.topology.mesh import Axis, Mesh

_FLOAT32 = 4
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "receive"]


@dataclass(frozen=True)
class Collective:
    """Calls of one collective for one purpose, on one rank."""

    name: str
    """Its purpose: "tensor parallel", "experts", "pipeline", "gradients", ..."""
    kind: Kind
    group: tuple[int, ...]
    """Global ranks, ascending. For "receive": this rank and the sender."""
    num_bytes: float
    """Bytes of all calls: of the complete vector; for an all-to-all, those that the rank passes in;
    for "receive", those that it receives."""
    calls: float

    def times(self, factor: float) -> Collective:
        """Return `factor` times as many calls."""
        return replace(self, num_bytes=self.num_bytes * factor, calls=self.calls * factor)

    def received(self, rank: int, gpus_per_node: int) -> tuple[float, float]:
        """Return the bytes that the rank receives (from its own node, from other nodes).

        Rings (Patarasuk and Yuan 2009): of n ranks each receives 2 (n - 1) / n of the bytes in an
        all-reduce, and (n - 1) / n in an all-gather or reduce-scatter. Rings follow the nodes, so
        each enters a node once. NCCL makes as many rings as a node has members, each with another
        member at its entrance: of k members on its node a rank receives 1 / k of its bytes from
        another node. An all-to-all brings 1 / n from each rank."""
        first = rank // gpus_per_node * gpus_per_node
        n = len(self.group)
        k = bisect.bisect_left(self.group, first + gpus_per_node) - bisect.bisect_left(
            self.group, first
        )
        if self.kind == "receive":
            return (self.num_bytes, 0.0) if k == n else (0.0, self.num_bytes)
        if self.kind == "all_to_all":
            return self.num_bytes * (k - 1) / n, self.num_bytes * (n - k) / n
        total = self.num_bytes * (2 if self.kind == "all_reduce" else 1) * (n - 1) / n
        across = total / k if k < n else 0.0
        return total - across, across


@dataclass(frozen=True)
class PassTokens:
    """The tokens of a pass over the context-parallel ranks that share its sequences."""

    tokens: float
    """Prompts and responses, with the padding for sequence and context parallelism."""
    results: float
    """Positions at which the output layer is computed: response tokens."""
    all_results: float
    """Results of all replicas together."""
    num_micro_batches: int


class Passes:
    """The collectives of the passes over one model on one rank."""

    def __init__(
        self, shape: ModelShape, megatron: MegatronConfig, mesh: Mesh, rank: int, cuda: bool
    ) -> None:
        """cuda: on a GPU, with Transformer Engine, which recomputes other modules than local
        layers."""
        self._shape = shape
        self._megatron = megatron
        self._mesh = mesh
        self._rank = rank
        self._cuda = cuda
        self._stage = mesh.coordinate(rank).pp
        self._itemsize = ITEMSIZES[megatron.dtype]
        self._tp = mesh.group_along(rank, "tp")
        self._cp = mesh.group_along(rank, "cp")
        self._ep = mesh.group_along(rank, "ep")
        self._pp = mesh.group_along(rank, "pp")
        self._exchange = cp_comm_type(shape, megatron)
        self._layers = shape.by_kind(
            itertools.chain(*mesh.chunk_layers(shape.num_layers, self._stage))
        )
        self._is_first = self._stage == 0
        self._is_last = self._stage == mesh.pp - 1

    def forward(self, work: PassTokens) -> list[Collective]:
        """Return the collectives of a pass without gradients. All ranks get its results."""
        results = Collective(
            "results", "all_reduce", tuple(range(self._mesh.world)), work.all_results * _FLOAT32, 1
        )
        joined = self._joined(work, 1)
        return _merged(
            [*self._forward(work), *joined, *self._stages(work, backward=False), results]
        )

    def forward_and_backward(self, work: PassTokens) -> list[Collective]:
        """Return the collectives of one optimizer step that grow with the tokens: all but
        `gradients`."""
        collectives = [*self._forward(work), *self._backward(work), *self._recomputation(work)]
        # log-probs and entropy
        collectives += self._joined(work, 1 if self._shape.value_head else 2)
        return _merged(
            [*collectives, *self._stages(work, backward=False), *self._stages(work, backward=True)]
        )

    def gradients(self, layout: Layout, overlaps_reduction: bool) -> list[Collective]:
        """Return the collectives of gradients and new parameters in one optimizer step. layout: the
        rank's; all parameters are trained."""
        return _merged(list(self._gradients(layout, overlaps_reduction)))

    def _forward(self, work: PassTokens) -> Iterator[Collective]:
        yield from self._repeat(self._layer, work)
        states = self._states(work)
        if self._is_first:
            yield self._tensor_parallel(
                "reduce_scatter" if self._is_sequence_parallel else "all_reduce", states, work
            )
        if self._is_last:
            if self._is_sequence_parallel:
                yield self._tensor_parallel("all_gather", states, work)
            if not self._shape.value_head:  # the largest logits, then three sums
                results = work.results / self._mesh.cp
                yield self._tensor_parallel("all_reduce", results * _FLOAT32, work)
                yield self._tensor_parallel("all_reduce", 3 * results * _FLOAT32, work)

    def _backward(self, work: PassTokens) -> Iterator[Collective]:
        yield from self._repeat(self._layer_backward, work)
        if self._is_first and self._is_sequence_parallel:
            yield self._tensor_parallel("all_gather", self._states(work), work)
        if self._is_last and not self._shape.value_head:
            results = work.results / self._mesh.cp
            yield self._tensor_parallel(
                "all_reduce", results * self._shape.hidden_size * self._itemsize, work
            )

    def _recomputation(self, work: PassTokens) -> Iterator[Collective]:
        """Yield the collectives of forward passes that are repeated: of whole layers, of attention
        on a CPU, or of dense MLPs on a GPU."""
        granularity = self._megatron.recompute_granularity
        if granularity == "full":
            yield from self._repeat(self._layer, work)
        elif granularity == "selective" and not self._cuda:
            yield from self._repeat(lambda layer, work: self._attention(layer.mixer, work), work)
        elif granularity == "selective":
            yield from self._repeat(
                lambda layer, work: self._sharded_layers(work, layer.feed_forward.is_recomputed),
                work,
            )

    def _layer(self, layer: Layer, work: PassTokens) -> Iterator[Collective]:
        """Yield the collectives of a layer's forward pass: mixer, then feed-forward."""
        mixer, feed_forward = layer
        if gathered := mixer.gathered(self._mesh.tp):
            yield self._tensor_parallel("all_gather", gathered * self._bytes(work), work)
        yield from self._attention(mixer, work)
        yield from self._sharded_layers(work, mixer.sharded_pairs + feed_forward.sharded_pairs)
        yield from self._latents(mixer, work, "all_gather", "reduce_scatter")
        yield from self._experts(feed_forward, work, "all_gather", "reduce_scatter")

    def _layer_backward(self, layer: Layer, work: PassTokens) -> Iterator[Collective]:
        mixer, feed_forward = layer
        if gathered := mixer.gathered(self._mesh.tp):
            yield self._tensor_parallel("reduce_scatter", gathered * self._bytes(work), work)
        yield from self._attention_backward(mixer, work)
        pairs = mixer.sharded_pairs + feed_forward.sharded_pairs
        yield from self._sharded_layers(work, pairs)
        yield from self._latents(mixer, work, "reduce_scatter", "all_gather")
        if self._is_sequence_parallel:
            # The inputs of column-parallel layers are gathered again, for the gradients of their
            # weights.
            yield self._tensor_parallel("all_gather", pairs * self._states(work), work, pairs)
            *inputs, _shared = mixer.latents() or (0,)
            size = sum(inputs) * self._bytes(work)
            yield self._tensor_parallel("all_gather", size, work, len(inputs))
        elif self._mesh.tp > 1 and mixer.summed_gradients:
            size = work.num_micro_batches * mixer.summed_gradients * self._itemsize
            yield self._tensor_parallel("all_reduce", size, work)
        yield from self._experts(feed_forward, work, "reduce_scatter", "all_gather")

    def _attention(self, mixer: Mixer, work: PassTokens) -> Iterator[Collective]:
        """Yield the collectives of a layer's attention over context-parallel ranks. On a GPU
        Transformer Engine's (context_parallel.py): keys and values travel around the ring, or
        queries, keys, values and the output are exchanged by all-to-alls. On a CPU all keys and
        values are gathered."""
        queries, keys_values = self._heads(mixer, work)
        cp = self._mesh.cp
        if not self._cuda:
            yield self._context("all_gather", cp * keys_values, work, 2)
        elif self._exchange == "a2a":
            yield self._context("all_to_all", 2 * queries + keys_values, work, 4)
        else:
            yield self._ring(keys_values, cp - 1, work)

    def _attention_backward(self, mixer: Mixer, work: PassTokens) -> Iterator[Collective]:
        """Yield the collectives of attention's backward pass. Keys and values travel again, with
        their gradients, back to their owner."""
        _, keys_values = self._heads(mixer, work)
        cp = self._mesh.cp
        if not self._cuda:
            yield self._context("reduce_scatter", cp * keys_values, work, 2)
        if not self._cuda or self._exchange == "a2a":
            yield from self._attention(mixer, work)
        else:
            yield self._ring(keys_values, 2 * cp - 1, work)

    def _heads(self, mixer: Mixer, work: PassTokens) -> tuple[float, float]:
        """Return the bytes of a rank's queries, and of its keys and values together."""
        queries, keys_values = mixer.exchanged(self._mesh.tp)
        return queries * self._bytes(work), keys_values * self._bytes(work)

    def _latents(
        self, mixer: Mixer, work: PassTokens, gather: Kind, scatter: Kind
    ) -> Iterator[Collective]:
        """Yield the collectives of a layer's latent attention with sequence parallelism: the inputs
        of the projections to queries and to keys and values, and the part of the keys that all
        heads share, are gathered, and the output is scattered. gather, scatter: the collectives,
        which the backward pass exchanges."""
        latents = mixer.latents()
        if latents and self._is_sequence_parallel:
            size = sum(latents) * self._bytes(work)
            yield self._tensor_parallel(gather, size, work, len(latents))
            yield self._tensor_parallel(scatter, self._states(work), work)

    def _context(self, kind: Kind, num_bytes: float, work: PassTokens, calls: int) -> Collective:
        return Collective(
            "context parallel", kind, self._cp, num_bytes, calls * work.num_micro_batches
        )

    def _ring(self, num_bytes: float, times: int, work: PassTokens) -> Collective:
        """Return `times` messages of num_bytes in each micro-batch from the previous rank."""
        peers = tuple(sorted({self._rank, self._cp[self._cp.index(self._rank) - 1]}))
        return Collective(
            "context parallel", "receive", peers, times * num_bytes, times * work.num_micro_batches
        )

    def _joined(self, work: PassTokens, count: int) -> list[Collective]:
        """Return the collectives by which context-parallel ranks get one another's results. count:
        of results at each position."""
        return (
            [self._context("all_reduce", count * work.results * _FLOAT32, work, count)]
            if self._is_last
            else []
        )

    def _sharded_layers(self, work: PassTokens, pairs: int) -> Iterator[Collective]:
        """Yield the collectives of pairs of a column-parallel and a row-parallel layer, which are
        the same forward and backward: the tokens are gathered before and scattered after, or summed
        once."""
        states = pairs * self._states(work)
        if self._is_sequence_parallel:
            yield self._tensor_parallel("all_gather", states, work, pairs)
            yield self._tensor_parallel("reduce_scatter", states, work, pairs)
        else:
            yield self._tensor_parallel("all_reduce", states, work, pairs)

    def _experts(
        self, feed_forward: FeedForward, work: PassTokens, dispatch: Kind, combine: Kind
    ) -> Iterator[Collective]:
        """Yield the collectives of the "alltoall" dispatcher, for evenly routed tokens: states and
        float32 probabilities go to the experts' ranks and to all tensor-parallel ranks, and the
        outputs back. The outputs' sum over tensor-parallel ranks has the type of the probabilities.
        dispatch, combine: the collectives over tensor-parallel ranks, which the backward pass
        exchanges."""
        if not feed_forward.experts_per_token:
            return
        rows = work.tokens / self._mesh.cp * feed_forward.experts_per_token / self._mesh.tp
        hidden = self._shape.hidden_size
        calls = work.num_micro_batches
        for row_bytes, times in ((hidden * self._itemsize, 2), (_FLOAT32, 1)):
            yield Collective(
                "experts", "all_to_all", self._ep, times * rows * row_bytes, times * calls
            )
        gathered = rows * self._mesh.tp
        for row_bytes in (hidden * self._itemsize, _FLOAT32):
            yield Collective("experts", dispatch, self._tp, gathered * row_bytes, calls)
        yield Collective("experts", combine, self._tp, gathered * hidden * _FLOAT32, calls)

    def _stages(self, work: PassTokens, backward: bool) -> Iterator[Collective]:
        """Yield the messages that this stage receives: from the previous stage, or gradients from
        the next. Every virtual pipeline chunk receives them, except the one that begins the model,
        or ends it."""
        chunks = self._mesh.vpp - (self._is_last if backward else self._is_first)
        peer = self._pp[(self._stage + (1 if backward else -1)) % self._mesh.pp]
        size = self._states(work) / (self._mesh.tp if self._is_sequence_parallel else 1)
        group = tuple(sorted({self._rank, peer}))
        yield Collective(
            "pipeline", "receive", group, chunks * size, chunks * work.num_micro_batches
        )

    def _gradients(self, layout: Layout, overlaps_reduction: bool) -> Iterator[Collective]:
        """Yield the sums of gradients, in float32: over replicas, of norms over tensor-parallel
        ranks, of a tied embedding over both ends of the pipeline. With the distributed optimizer
        new parameters are gathered."""
        shares = self._shape.shares_embeddings
        frozen = frozen_parameters(frozen_tensors("", (), self._shape), layout)
        for buffer in model_buffers(
            layout, self._megatron, self._mesh, self._stage, frozen, overlaps_reduction, shares
        ):
            axes: tuple[Axis, ...] = ("expert_dp",) if buffer.is_of_experts else ("cp", "dp")
            group = self._mesh.group_along(self._rank, *axes)
            calls = len(buffer.buckets)
            if not self._megatron.use_distributed_optimizer:
                yield Collective("gradients", "all_reduce", group, buffer.numel * _FLOAT32, calls)
                continue
            yield Collective("gradients", "reduce_scatter", group, buffer.numel * _FLOAT32, calls)
            yield Collective(
                "parameters", "all_gather", group, buffer.numel * self._itemsize, calls
            )
        summed = [name for name in layout.shapes if name not in frozen and self._is_summed(name)]
        norms = sum(math.prod(layout.shapes[name]) for name in summed)
        if norms:
            yield Collective("gradients", "all_reduce", self._tp, norms * _FLOAT32, 1)
        if shares and self._mesh.pp > 1 and (self._is_first or self._is_last):
            table = next(
                size
                for name, size in layout.shapes.items()
                if "embedding" in name or "output_layer" in name
            )
            ends = tuple(sorted({self._pp[0], self._pp[-1]}))
            yield Collective("gradients", "all_reduce", ends, table[0] * table[1] * _FLOAT32, 1)

    def _is_summed(self, name: str) -> bool:
        """Return True for a parameter whose gradient on a tensor-parallel rank is of a part of the
        tokens."""
        if "q_layernorm" in name or "k_layernorm" in name:
            return True
        parts = (
            "layernorm",
            "_norm",
            "router",
            "gate_weight",
            "down_proj",
            "linear_proj.bias",
            "linear_fc2.bias",
        )
        return self._is_sequence_parallel and any(part in name for part in parts)

    def _states(self, work: PassTokens) -> float:
        """Return the bytes of the hidden states of a rank's tokens, before sequence parallelism
        shards them."""
        return self._shape.hidden_size * self._bytes(work)

    def _bytes(self, work: PassTokens) -> float:
        """Return the bytes of one element of each of a rank's tokens."""
        return work.tokens / self._mesh.cp * self._itemsize

    @property
    def _is_sequence_parallel(self) -> bool:
        return self._megatron.sequence_parallel

    def _tensor_parallel(
        self, kind: Kind, num_bytes: float, work: PassTokens, times: int = 1
    ) -> Collective:
        return Collective(
            "tensor parallel", kind, self._tp, num_bytes, times * work.num_micro_batches
        )

    def _repeat(
        self, of_layer: Callable[[Layer, PassTokens], Iterator[Collective]], work: PassTokens
    ) -> Iterator[Collective]:
        """Yield the collectives of all layers of the stage. of_layer: of one."""
        return (
            collective.times(count)
            for layer, count in self._layers.items()
            for collective in of_layer(layer, work)
        )


def _merged(collectives: Sequence[Collective]) -> list[Collective]:
    """Return one Collective for each purpose, kind and group; none for groups of one rank."""
    merged: dict[tuple[str, Kind, tuple[int, ...]], Collective] = {}
    for item in collectives:
        key = (item.name, item.kind, item.group)
        if len(item.group) == 1 or not item.calls:
            continue
        before = merged.get(key, Collective(*key, 0.0, 0.0))
        merged[key] = replace(
            item, num_bytes=before.num_bytes + item.num_bytes, calls=before.calls + item.calls
        )
    return list(merged.values())
