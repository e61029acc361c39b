"""Gated delta nets on packed sequences, for Megatron-Core's layer specification. All of it is
torch's: one chunked rule for each run of equally long sequences, on CPUs and on GPUs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.linalg import solve_triangular
from torch.nn.functional import conv1d, pad, silu, softplus
from torch.utils.checkpoint import checkpoint

from rlhf_mc.architectures.operations import DELTA_CHUNK
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.models.layers import PackedSequences, RMSNorm


class PackedDeltaNet(GatedDeltaNet):
    """Megatron-Core's gated delta net, with its parameters and its checkpoints, on packed
    sequences. The original refuses them, and needs FLA's kernels. No pass stores what the rule
    computes from the projections: it is computed again in the backward pass, since its matrices are
    larger than all else in a layer."""

    def __init__(
        self, config: Any, submodules: Any, layer_number: int, *, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection)
        for param in (self.conv1d.weight, self.dt_bias, self.A_log):
            param.partition_dim = 0  # beside tensor_model_parallel, which the original sets
            param.partition_stride = 1
        if self.tp_size > 1 and not config.sequence_parallel:
            # Each rank has the gradient of its heads, and Megatron-Core adds those of QK norms
            # alone.
            self.out_norm.weight.register_hook(
                functools.partial(reduce_from_tensor_model_parallel_region, group=pg_collection.tp)
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output [T, 1, hidden] of the hidden states [T, 1, hidden], with sequence
        parallelism of a part of the tokens, and no bias."""
        projected, _none = self.in_proj(hidden_states)
        heads = self.num_v_heads_local_tp
        sizes = (self.conv_dim_local_tp, heads * self.value_head_dim, heads, heads)
        qkv, gate, beta, alpha = projected[:, 0].split(sizes, dim=-1)
        decay = -self.A_log.float().exp() * softplus(alpha.float() + self.dt_bias)
        inputs = (qkv, decay, beta.sigmoid(), packed_seq_params.runs)
        out = checkpoint(self._attend, *inputs, use_reentrant=False, preserve_rng_state=False)
        out = self._apply_gated_norm(out, gate.unflatten(-1, (heads, -1)))
        return self.out_proj(out.view(*projected.shape[:2], -1))

    def _attend(
        self,
        qkv: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        runs: list[tuple[int, int]],
    ) -> torch.Tensor:
        """Return what the heads read from their states [T, heads, value_head_dim]. qkv: [T,
        channels] before the convolution; decay, beta: [T, heads]."""
        parts = [count * length for count, length in runs]
        outputs = []
        for (count, length), *tensors in zip(
            runs, *(x.split(parts) for x in (qkv, decay, beta)), strict=True
        ):
            x, g, b = (tensor.unflatten(0, (count, length)) for tensor in tensors)
            x = conv1d(
                x.mT,
                self.conv1d.weight,
                padding=self.conv_kernel_dim - 1,
                groups=self.conv_dim_local_tp,
            )
            x = silu(x[..., :length]).mT
            q, k, v = x.split(
                (*2 * (self.qk_dim // self.tp_size,), self.v_dim // self.tp_size), dim=-1
            )
            q, k = (y.unflatten(-1, (-1, self.key_head_dim)) for y in (q, k))
            outputs.append(
                delta_rule(q, k, v.unflatten(-1, (-1, self.value_head_dim)), g, b).flatten(0, 1)
            )
        return torch.cat(outputs).to(qkv.dtype)


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Return the outputs [S, n, heads, v_dim] of the gated delta rule (arXiv 2412.06464), of each
    of S sequences of n tokens: with normalised q and k [S, n, key_heads, k_dim], v [S, n, heads,
    v_dim], decay and beta [S, n, heads] the state [k_dim, v_dim] of a head follows

        state_t = exp(decay_t) state_(t-1) + beta_t k_t (v_t - k_t^T exp(decay_t) state_(t-1))
        output_t = q_t^T state_t / sqrt(k_dim)

    in float32. Within a chunk of tokens the corrections v - k^T state are the solution of a
    triangular system; between chunks only the state is handed on."""
    length = q.shape[1]
    chunk = min(DELTA_CHUNK, length)
    q, k = (
        x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k)
    )
    q, k = (
        x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q * q.shape[-1] ** -0.5, k)
    )

    def in_chunks(x: torch.Tensor) -> torch.Tensor:
        x = pad(x.float(), (0, 0, 0, 0, 0, -length % chunk))
        return x.transpose(1, 2).unflatten(2, (-1, chunk))

    q, k, v, decay, beta = (in_chunks(x) for x in (q, k, v, decay[..., None], beta[..., None]))
    total = decay.cumsum(dim=-2)
    between = (total - total.mT).tril().exp().tril()
    corrected = torch.cat((v, k * total.exp()), dim=-1) * beta
    system = (k * beta) @ k.mT * between
    values, keys = solve_triangular(system, corrected, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), dim=-1
    )
    scores = q @ k.mT * between
    last = total[..., -1:, :]
    q = q * total.exp()
    k = k * (last - total).exp()
    state = torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0])
    outputs = []
    for i in range(q.shape[2]):
        new = values[:, :, i] - keys[:, :, i] @ state
        outputs.append(q[:, :, i] @ state + scores[:, :, i] @ new)
        state = state * last[:, :, i].exp() + k[:, :, i].mT @ new
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2)


def delta_net_settings(shape: ModelShape) -> dict[str, Any]:
    """Return the settings of TransformerConfig."""
    return {
        "experimental_attention_variant": "gated_delta_net",
        # A list has names for each layer of its own in Megatron checkpoints.
        "linear_attention_freq": [
            int(layer in shape.linear_layers) for layer in range(shape.num_layers)
        ],
        "linear_conv_kernel_dim": shape.linear_kernel,
        "linear_key_head_dim": shape.linear_key_dim,
        "linear_value_head_dim": shape.linear_value_dim,
        "linear_num_key_heads": shape.linear_key_heads,
        "linear_num_value_heads": shape.linear_value_heads,
    }


def use_delta_net(spec: Any) -> None:
    """Put a delta net in the place of attention in Megatron-Core's specification of a layer."""
    linear = spec.submodules.self_attention.submodules
    parts = GatedDeltaNetSubmodules(linear.linear_qkv, RMSNorm, linear.linear_proj)
    spec.submodules.self_attention = ModuleSpec(PackedDeltaNet, submodules=parts)
    names = spec.submodules.sharded_state_dict_keys_map
    if names:  # of local layers: in checkpoints norms have the names of Transformer Engine's
        names["input_layernorm."] = "self_attention.in_proj.layer_norm_"
