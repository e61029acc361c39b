"""Multi-head latent attention for Megatron-Core's layer specification: its own module, with
projections to latent vectors that every tensor-parallel rank has whole, and the rotation of packed
sequences in one operation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.nn.functional import linear

from rlhf_mc.architectures.latent_attention import LatentAttention
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.models.layers import PackedSequences, mark_sequence_parallel


class DuplicatedLinear(torch.nn.Module):
    """A linear layer that is the same on all tensor-parallel ranks, each of which has its part of
    the tokens: Transformer Engine's TELinear with parallel_mode "duplicated", for local layers."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size))
        mark_sequence_parallel(self.weight, config)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the output [T, 1, output_size] of x [T, 1, input_size], and no bias."""
        return linear(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1]), None


class PackedLatents(MLASelfAttention):
    """Megatron-Core's latent attention, but for its rotation: the original has one operation for
    each sequence, and refuses a PackedSeqParams with local_cp_size, which Transformer Engine's
    attention reads."""

    def __init__(
        self, config: Any, submodules: Any, *args: Any, pg_collection: Any, **kwargs: Any
    ) -> None:
        # The original gives this layer alone no group, and would take it from the global
        # parallel_state.
        projection = ModuleSpec(submodules.linear_q_proj, params={"tp_group": pg_collection.tp})
        submodules = replace(submodules, linear_q_proj=projection)
        super().__init__(config, submodules, *args, pg_collection=pg_collection, **kwargs)

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: None,
        position_ids: None,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Return this rank's q and k [T, 1, heads, head_dim] and v [T, 1, heads, v_head_dim], for
        "thd" without the second dimension, and the latent vectors."""
        config = self.config
        sizes = (config.qk_head_dim, config.qk_pos_emb_head_dim)
        latent_q = hidden_states
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            latent_q = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
            query, _ = self.linear_q_up_proj(latent_q)
        latent_kv, shared_key = self.linear_kv_down_proj(hidden_states)[0].split(
            (config.kv_lora_rank, config.qk_pos_emb_head_dim), dim=-1
        )
        latent_kv = self.kv_layernorm(latent_kv)
        heads = self.num_attention_heads_per_partition
        keys_values = self.linear_kv_up_proj(latent_kv)[0].unflatten(-1, (heads, -1))
        key, value = keys_values.split((config.qk_head_dim, config.v_head_dim), dim=-1)
        query, rotated = query.unflatten(-1, (heads, -1)).split(sizes, dim=-1)
        if config.sequence_parallel:
            shared_key = gather_from_sequence_parallel_region(shared_key, group=self.tp_group)
        angles = self.rotary_pos_emb(packed_seq_params)
        rotated, shared_key = (self._rotate(x, angles) for x in (rotated, shared_key.unsqueeze(-2)))
        query = torch.cat((query, rotated), dim=-1)
        key = torch.cat((key, shared_key.expand(-1, -1, heads, -1)), dim=-1)
        if packed_seq_params.qkv_format == "thd":
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        return query, key, value, latent_q, latent_kv

    def _rotate(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        rotated: torch.Tensor = attention.apply_rotary_pos_emb(
            x,
            angles,
            config=self.config,
            mscale=self.rotary_pos_emb.mscale,
            cp_group=self.pg_collection.cp,
        )
        return rotated


def latent_settings(block: LatentAttention, shape: ModelShape) -> dict[str, Any]:
    """Return the settings of MLATransformerConfig. Of its rotary settings Megatron-Core computes
    the scale of the scores; the angles are transformers'."""
    scaling = shape.rope_scaling or {}
    return {
        "num_attention_heads": block.num_heads,
        "num_query_groups": block.num_heads,
        "kv_channels": block.head_dim,
        "q_lora_rank": block.q_lora_rank or None,
        "kv_lora_rank": block.kv_lora_rank,
        "qk_head_dim": block.head_dim - block.rope_head_dim,
        "qk_pos_emb_head_dim": block.rope_head_dim,
        "v_head_dim": block.v_head_dim,
        "rope_type": "rope",
        "rotary_scaling_factor": scaling.get("factor", 1.0),
        "mscale_all_dim": scaling.get("mscale_all_dim", 0.0),
    }


def use_latents(spec: Any, norm: Any, is_local: bool) -> None:
    """Complete Megatron-Core's specification of a layer with latent attention. norm: of latent
    vectors in local layers; Transformer Engine's projections contain it."""
    attention_spec = spec.submodules.self_attention
    attention_spec.module = PackedLatents
    if is_local:
        parts = attention_spec.submodules
        parts.linear_q_down_proj = parts.linear_kv_down_proj = DuplicatedLinear
        parts.q_layernorm = parts.kv_layernorm = norm
        # In checkpoints norms have the names of Transformer Engine's layers.
        spec.submodules.sharded_state_dict_keys_map = {
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            **{
                f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_"
                for x in ("q", "kv")
            },
        }
