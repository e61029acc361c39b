"""Multi-head latent attention (deepseek_v3): its keys of config.json. Keys and values of all heads
are projected from one latent vector, queries from another one or from the hidden states. No torch
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlhf_mc.architectures import hf_config, rope_config
from rlhf_mc.architectures.attention import num_pairs
from rlhf_mc.architectures.hf_config import flag, refused, size
from rlhf_mc.architectures.layer import Indivisible, Mixer, MixerActivations
from rlhf_mc.architectures.rows import Param, linear, norm

CPU_DIMS = 576
"""The only number of dimensions that vLLM's kernel of latent attention takes on a CPU
(v1/attention/backends/mla)."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Mixer):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    num_heads: int
    head_dim: int
    """Dimensions of a query and of a key."""
    v_head_dim: int
    rope_head_dim: int
    """Dimensions of a query that are rotated, the last ones: its key has as many that all heads
    share."""
    kv_lora_rank: int
    """Size of the latent vector from which keys and values are projected."""
    q_lora_rank: int
    """Size of the latent vector from which queries are projected; 0: from the hidden states."""

    sharded_pairs: ClassVar[int] = 0
    # vLLM needs these, which transformers does not write, and computes the router in the model's
    # type otherwise.
    vllm_overrides: ClassVar[Mapping[str, Any]] = {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_router_dtype": "float32",
    }
    # Where the processor has AMX, vLLM's choice takes bfloat16 only, and repacks weights.
    vllm_cpu_options: ClassVar[Mapping[str, Any]] = {"attention_backend": "CPU_MLA"}

    def dims(self) -> dict[str, int]:
        return {
            "hidden": self.hidden_size,
            "q": self.num_heads * self.head_dim,
            "values": self.num_heads * self.v_head_dim,
            "latent_q": self.q_lora_rank,
            "latent_kv": self.kv_lora_rank,
            "latent_kv_rope": self.kv_lora_rank + self.rope_head_dim,
            "keys_values": self.num_heads * (self.head_dim - self.rope_head_dim + self.v_head_dim),
        }

    def params(self) -> list[Param]:
        # vLLM joins the two projections to latent vectors, and replicates them
        joint = "self_attn.fused_qkv_a_proj" if self.q_lora_rank else None

        def project(
            mcore: str, hf: str, out: str, of: str = "hidden", engine: str | None = None
        ) -> list[Param]:
            modules = {f"self_attn.{hf}": (out, of)}
            return linear(f"self_attention.linear_{mcore}", modules, False, engine)

        def latent_norm(x: str) -> Param:
            mcore = f"self_attention.{x}_layernorm"
            fused = f"self_attention.linear_{x}_up_proj"
            return norm(f"self_attn.{x}_a_layernorm", mcore, fused, dim=f"latent_{x}")

        queries = [
            *project("q_down_proj", "q_a_proj", "latent_q", engine=joint),
            latent_norm("q"),
            *project("q_up_proj", "q_b_proj", "q", "latent_q"),
        ]
        return [
            norm("input_layernorm", "input_layernorm"),
            *(queries if self.q_lora_rank else project("q_proj", "q_proj", "q")),
            *project("kv_down_proj", "kv_a_proj_with_mqa", "latent_kv_rope", engine=joint),
            latent_norm("kv"),
            *project("kv_up_proj", "kv_b_proj", "keys_values", "latent_kv"),
            *project("proj", "o_proj", "hidden", "values"),
        ]

    def split_sizes(self) -> list[Indivisible]:
        return [("num_attention_heads", self.num_heads, "q")]

    def weights(self, tp: int = 1) -> float:
        q = self.num_heads * self.head_dim / tp
        values = self.num_heads * self.v_head_dim / tp
        keys = q - self.num_heads * self.rope_head_dim / tp
        queries = (
            self.q_lora_rank * (self.hidden_size + q) if self.q_lora_rank else self.hidden_size * q
        )
        latent_kv = self.hidden_size * (
            self.kv_lora_rank + self.rope_head_dim
        ) + self.kv_lora_rank * (keys + values)
        return queries + latent_kv + self.hidden_size * values

    def flops(self, seq_lens: Iterable[float]) -> float:
        return num_pairs(seq_lens) * (2.0 * self.num_heads * (self.head_dim + self.v_head_dim))

    def decode_flops(self, context: float) -> float:
        """Return its FLOPs for a token after `context` tokens: on the latent vectors, which are
        longer than keys and values."""
        scores = (self.cached_per_token(1) + self.kv_lora_rank) / (self.head_dim + self.v_head_dim)
        return 2 * self.flops([context]) / (context + 1) * scores

    def pair_cost(self, num_tokens: int) -> float:
        return num_tokens**2 * self.num_heads * (self.head_dim + self.v_head_dim) / 2

    def cached_per_token(self, tp: int) -> int:
        """Return the elements of the latent vector and the rotated part of the keys."""
        return self.kv_lora_rank + self.rope_head_dim

    def activations(self, tp: int, shards: int) -> MixerActivations:
        queries = self.num_heads * self.head_dim / tp
        values = self.num_heads * self.v_head_dim / tp
        # latent vectors, normalised too, and the part of the keys that all heads share
        latents = (2 * (self.q_lora_rank + self.kv_lora_rank) + self.rope_head_dim) / shards
        padded = 2 * queries - values if self.v_head_dim < self.head_dim else 0.0
        heads = self.num_heads / tp
        return MixerActivations(2 * queries + 2 * values + latents, queries, queries, heads, padded)

    def exchanged(self, tp: int) -> tuple[float, float]:
        heads = self.num_heads / tp
        return heads * self.head_dim, heads * (self.head_dim + self.v_head_dim)

    def all_to_all_obstacle(self, tp: int, cp: int) -> str | None:
        return "multi-head latent attention has p2p alone"

    def latents(self) -> tuple[int, ...]:
        return (self.q_lora_rank or self.hidden_size, self.kv_lora_rank, self.rope_head_dim)

    def cpu_obstacle(self) -> str | None:
        if self.cached_per_token(1) == CPU_DIMS:
            return None
        return (
            f"kv_lora_rank {self.kv_lora_rank} + qk_rope_head_dim {self.rope_head_dim}; vLLM's CPU "
            f"latent attention takes {CPU_DIMS} dimensions together"
        )


def latent_layers(config: Mapping[str, Any], traits: Mapping[str, Any]) -> list[LatentAttention]:
    """Return the latent attention of each layer that config.json describes. Raise UserError for
    values that transformers and vLLM read differently."""
    if flag(config, "attention_bias"):
        raise refused("attention_bias", True, "vLLM's latent attention has no biases")
    if flag(config, "tie_word_embeddings"):
        raise refused(
            "tie_word_embeddings",
            True,
            "vLLM's models with latent attention have a head of their own",
        )
    if (kv_heads := config.get("num_key_value_heads")) not in (None, config["num_attention_heads"]):
        raise refused(
            "num_key_value_heads",
            kv_heads,
            "each head has keys of its own: expected num_attention_heads",
        )
    if config.get("rope_interleave", True) is not True:
        raise refused(
            "rope_interleave",
            config["rope_interleave"],
            "vLLM rotates neighbouring dimensions: expected true",
        )
    _check_rope(rope_config.rope(config)[1])
    rope_dim = size(config, "qk_rope_head_dim")
    if rope_dim % 2:
        raise refused(
            "qk_rope_head_dim", rope_dim, "pairs of dimensions are rotated: expected an even number"
        )
    block = LatentAttention(
        hidden_size=size(config, "hidden_size"),
        num_heads=size(config, "num_attention_heads"),
        head_dim=size(config, "qk_nope_head_dim") + rope_dim,
        rope_head_dim=rope_dim,
        v_head_dim=size(config, "v_head_dim"),
        q_lora_rank=hf_config.size_or_zero(config, "q_lora_rank"),
        kv_lora_rank=size(config, "kv_lora_rank"),
    )
    return [block] * size(config, "num_hidden_layers")


def _check_rope(scaling: Mapping[str, Any] | None) -> None:
    """Raise UserError for rotary settings that vLLM computes otherwise: it has yarn alone, without
    some of its keys."""
    if scaling is None:
        return
    if scaling["rope_type"] != "yarn":
        raise refused(
            "rope_scaling.rope_type", scaling["rope_type"], "vLLM's latent attention has yarn alone"
        )
    if "attention_factor" in scaling:
        raise refused(
            "rope_scaling.attention_factor", scaling["attention_factor"], "vLLM does not read it"
        )
    if not scaling.get("truncate", True):
        raise refused("rope_scaling.truncate", False, "vLLM's latent attention has true")
    if ("mscale" in scaling) != ("mscale_all_dim" in scaling):
        given = "mscale" if "mscale" in scaling else "mscale_all_dim"
        raise refused(
            f"rope_scaling.{given}", scaling[given], "give both mscale and mscale_all_dim, or none"
        )
