"""The load of experts in the updates of an actor: an auxiliary loss and a z-loss of each router,
and the update of the correction biases. Megatron-Core's losses are of a packed micro-batch with its
padding, and leave replayed choices out; these do not depend on the split into micro-batches.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
)
from megatron.core.transformer.moe.router import TopKRouter

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import ActorConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.topology.consensus import sum_over_ranks
from rlhf_mc.topology.groups import ProcessGroups


class RouterBalance:
    """Adds the two losses to the gradient of each router of a model, and moves its correction bias.

    Auxiliary loss of a sequence of T tokens, c_e of which choose expert e of E: E / (k T^2) sum_e
    c_e sum_t p_te, with scores p that sum to 1 for each token; averaged over the sequences of the
    mini-batch. z-loss: logsumexp(logits)^2, averaged over the tokens of the mini-batch. Both are
    summed over the layers. Padding is no token."""

    def __init__(
        self, settings: ActorConfig, shape: ModelShape, groups: ProcessGroups, chunks: Sequence[Any]
    ) -> None:
        """chunks: of this rank, of a model with experts."""
        self._settings = settings
        self._shape = shape
        self._groups = groups
        self._shards = groups.mesh.tp if chunks[0].config.sequence_parallel else 1
        self._routers = {
            c: [module for module in c.modules() if isinstance(module, TopKRouter)] for c in chunks
        }
        self._all = list(itertools.chain(*self._routers.values()))
        self._totals = torch.zeros(2, dtype=torch.float64, device=platform.device())
        """Both losses of this rank's tokens in its layers, summed over the mini-batches since
        `losses`."""
        self._steps = 0
        for index, router in enumerate(self._all):
            router.routing = functools.partial(self._route, router, index)

    def begin(self, batch: RaggedBatch, scale: float) -> None:
        """Begin the passes of a mini-batch, the sequences of all replicas. scale: the factor of a
        loss, by which Megatron-Core's schedule and the reduction of the gradients divide."""
        self._scale = scale
        self._num_sequences = batch.num_sequences
        self._num_tokens = int(batch.seq_lens.sum())
        self._sums = torch.zeros_like(self._totals)
        self._pending: dict[TopKRouter, deque[Any]] = {router: deque() for router in self._all}
        """The micro-batches that a router has still to route with a gradient, in their order:
        PackedSequences, and for each token of this rank its sequence in the micro-batch, or its
        node where prompts are shared, and its place in the batch, -1 of padding."""
        shape = (len(self._all), self._shape.num_experts)
        self._loads = torch.zeros(shape, dtype=torch.int64, device=platform.device())
        """[routers, experts]: this rank's tokens of each expert."""

    def expect(self, model: Any, micro: MicroBatch) -> None:
        """Announce a micro-batch to the routers of a chunk, before its forward pass. Where layers
        are recomputed, they route it with a gradient in the backward pass."""
        assert micro.sources is not None
        if micro.packed.shared is not None:
            sequences = micro.packed.shared.nodes
        else:
            lens = micro.packed.cu_seqlens_q.diff() // micro.packed.context.size
            sequences = torch.repeat_interleave(lens, output_size=len(micro.sources))
        shard = self._groups.coordinate.tp % self._shards
        local = [tensor.chunk(self._shards)[shard] for tensor in (sequences, micro.sources)]
        for router in self._routers[getattr(model, "module", model)]:
            self._pending[router].append((micro.packed, *local))

    def _route(self, router: TopKRouter, index: int, logits: torch.Tensor, **kwargs: Any) -> Any:
        """Route as the router does, and attach the losses where there is a gradient."""
        probs, chosen = TopKRouter.routing(router, logits, **kwargs)
        if not torch.is_grad_enabled():
            return probs, chosen
        packed, sequences, sources = self._pending[router].popleft()
        members = None if packed.shared is None else packed.shared.members
        num_experts = self._shape.num_experts
        k = self._shape.experts_per_token
        logits = logits.view(-1, num_experts)
        is_token = (sources >= 0)[:, None]
        scores = compute_routing_scores_for_aux_loss(logits, k, router.score_function)[1]
        num_nodes = len(packed.cu_seqlens_q) - 1 if members is None else members.shape[1]
        loads = scores.new_zeros(num_nodes, num_experts)
        loads.index_add_(0, sequences, (chosen & is_token).to(loads.dtype))
        if members is not None:  # of each sequence
            loads = (members @ loads.double()).to(loads.dtype)
        self._loads[index] += loads.sum(0).long()
        if self._shards > 1:
            dist.all_reduce(loads, group=self._groups.collection.tp)
        if packed.context.size > 1:
            dist.all_reduce(loads, group=packed.context.group)
        lens = loads.sum(1, keepdim=True).clamp(min=1) / k
        weights = loads * num_experts / (k * lens**2)
        counts = is_token
        if members is not None:  # a token counts in each of its sequences
            weights = (members.T @ weights.double()).to(weights.dtype)
            counts = members.sum(0)[sequences, None].to(weights.dtype) * is_token
        aux_loss = (scores * (weights[sequences] * is_token)).sum() / self._num_sequences
        z_loss = (logits.logsumexp(1, keepdim=True) ** 2 * counts).sum() / self._num_tokens
        self._sums += torch.stack([aux_loss, z_loss]).detach()
        loss = (
            self._settings.moe_aux_loss_coeff * aux_loss + self._settings.moe_z_loss_coeff * z_loss
        )
        return MoEAuxLossAutoScaler.apply(probs, loss * self._scale), chosen

    @torch.no_grad()
    def step(self) -> None:
        """Finish a mini-batch on which the optimizer has stepped: move the correction biases of
        routers that are trained, by the loads over all ranks. Every rank must call it."""
        self._totals += self._sums
        self._steps += 1
        rate = self._settings.moe_router_bias_update_rate
        if rate == 0.0 or not self._all:
            return
        dist.all_reduce(self._loads, group=self._groups.collection.tp_dp_cp)
        below_mean = self._loads.sum(1, keepdim=True) - self._loads * self._shape.num_experts
        for router, direction in zip(self._all, below_mean.sign().float(), strict=True):
            if router.weight.requires_grad:
                router.expert_bias += rate * direction

    def losses(self) -> dict[str, float]:
        """Return both losses without their coefficients, the means over layers and over the
        mini-batches since the last call; nothing if all of them were skipped. Every rank of the
        mesh must call it."""
        sums = sum_over_ranks(self._totals, self._groups.members).tolist()
        number = self._steps * len(self._shape.expert_layers)
        self._totals = torch.zeros_like(self._totals)
        self._steps = 0
        return {
            name: sums[i] / number
            for i, name in enumerate(("router_aux_loss", "router_z_loss"))
            if number
        }
