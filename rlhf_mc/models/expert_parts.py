"""Mixtures of experts in Megatron-Core's models: its settings, corrections of the models that it
has built, and the load of the experts in the updates of an actor.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
)
from megatron.core.transformer.moe.router import TopKRouter

from rlhf_mc import platform
from rlhf_mc.architectures.experts import Experts
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import ActorConfig, MegatronConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.steps import Assembly
from rlhf_mc.models.transformer_engine import uses_transformer_engine
from rlhf_mc.reshard.layout import correction_biases
from rlhf_mc.topology.consensus import sum_over_ranks
from rlhf_mc.topology.groups import ProcessGroups


def expert_settings(block: Experts, shape: ModelShape, megatron: MegatronConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": block.num_experts,
        # A list has names for each layer of its own in Megatron checkpoints, which equal layers do
        # not need.
        "moe_layer_freq": [int(layer.feed_forward == block) for layer in shape.layers]
        if len(shape.expert_layers) < shape.num_layers
        else 1,
        "moe_ffn_hidden_size": block.expert_ffn_hidden_size,
        "moe_router_topk": block.experts_per_token,
        # Softmax over all experts (True), or over the chosen ones, whose weights then sum to 1.
        "moe_router_pre_softmax": not block.norm_topk_prob,
        "moe_router_score_function": "sigmoid" if block.sigmoid_router else "softmax",
        "moe_router_topk_scaling_factor": None
        if block.routed_scaling == 1.0
        else block.routed_scaling,
        "moe_router_num_groups": block.router_groups if block.router_groups > 1 else None,
        "moe_router_group_topk": block.groups_per_token if block.router_groups > 1 else None,
        "moe_shared_expert_intermediate_size": block.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": block.shared_expert_gate,
        "moe_router_dtype": "fp32",
        # The losses of the routers are RouterBalance's.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # The experts of a rank in one call, and kernels for the order of tokens: Transformer
        # Engine's.
        "moe_grouped_gemm": uses_transformer_engine(),
        "moe_permute_fusion": uses_transformer_engine(),
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
    }


def ascending_in_buffer(
    named: Iterable[tuple[str, torch.nn.Parameter]],
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters in an order in which the experts of a linear layer ascend in
    Megatron-Core's buffer, which is filled from the last parameter to the first. They are then one
    tensor [experts, ...], which the weight update copies at once, or the rollout engine aliases."""
    stacks: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
    for name, param in named:
        stack = re.sub(
            r"(\.experts\.)(local_experts\.\d+\.)?(linear_fc\d\.\w+?)\d*$", r"\1\3", name
        )
        stacks.setdefault(stack, []).append((name, param))
    return [pair for stack in stacks.values() for pair in reversed(stack)]


CORRECTION_BIAS = "router.expert_bias"
"""Ending of Megatron-Core's names of the correction biases."""


def add_correction_biases(assembly: Assembly) -> None:
    """Give each router the correction bias by which it chooses experts: a float32 parameter
    without a gradient.

    Reason: Megatron-Core's own (moe_router_enable_expert_bias) are buffers, and no checkpoint
    of ours would have them. They are float32 whatever the type of the model."""
    if not correction_biases(assembly.shape):
        return
    for router in (module for module in assembly.model.modules() if isinstance(module, TopKRouter)):
        del router.expert_bias
        bias = torch.zeros(len(router.weight), dtype=torch.float32, device=router.weight.device)
        router.expert_bias = torch.nn.Parameter(bias, requires_grad=False)


def divide_output_biases(assembly: Assembly) -> None:
    """Let each tensor-parallel rank add its part of the bias of an expert's output.

    Reason: Megatron-Core sums the outputs of the ranks, of which each would add the whole bias,
    and then the parts of the bias's gradient. It also adds the bias to the output of a local
    layer in place, which autograd refuses if the ranks' outputs were summed before."""
    if not (assembly.model.config.num_moe_experts and assembly.model.config.add_bias_linear):
        return
    tp_size = assembly.groups.mesh.tp

    def divide(module: Any, inputs: Any, out: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        output, bias = out
        if isinstance(bias, list):  # all experts in a module of Transformer Engine
            return output, [part / tp_size for part in bias]
        return output.clone(), bias / tp_size

    for name, module in assembly.model.named_modules():
        if ".experts." in name and name.endswith("linear_fc2"):
            module.register_forward_hook(divide)
            for kind, param in module.named_parameters():
                if kind.startswith("bias"):
                    param.sequence_parallel = tp_size > 1


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
