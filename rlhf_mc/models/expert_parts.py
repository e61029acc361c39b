"""Mixtures of experts in Megatron-Core's models: its settings, and corrections of the models that
it has built."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from rlhf_mc.architectures.experts import Experts
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.models.steps import Assembly
from rlhf_mc.models.transformer_engine import uses_transformer_engine
from rlhf_mc.reshard.layout import correction_biases


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
        # The losses of the routers are in router_balance.py.
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
