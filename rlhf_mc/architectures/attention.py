"""Attention to keys and values of KV heads. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_mc.architectures import hf_config
from rlhf_mc.architectures.hf_config import size
from rlhf_mc.architectures.layer import Indivisible, Mixer, MixerActivations
from rlhf_mc.architectures.rows import HF, MC, HeadRows, Param, linear, norm
from rlhf_mc.config.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Attention(Mixer):
    """Causal attention with rotated queries and keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Dimensions of a query, a key and a value."""
    qkv_bias: bool = False
    """The projections to queries, keys and values have biases."""
    o_bias: bool = False  # type: ignore[misc]
    """The projection of the output has a bias."""
    qk_norm: bool = False
    """Each head's query and key are normalised (RMSNorm)."""
    attention_gate: bool = False
    """The output is multiplied by the sigmoid of gates. q_proj has for each head the rows of its
    query, then those of its gate."""
    sinks: bool = False
    """Each head has a sink: a trained logit beside those of the keys, whose probability goes to no
    value."""
    sliding_window: int = 0
    """Tokens that a query attends to; its own is one of them. 0: all."""

    def dims(self) -> dict[str, int]:
        return {
            "hidden": self.hidden_size,
            "q": self.num_heads * self.head_dim,
            "gated_q": 2 * self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "head": self.head_dim,
            "heads": self.num_heads,
        }

    def params(self) -> list[Param]:
        qkv = "self_attention.linear_qkv"
        dim = self.head_dim
        gates = 1 + self.attention_gate
        rows = [
            *(
                HeadRows("self_attn.q_proj", number * dim, dim, gates * dim, self.num_heads)
                for number in range(gates)
            ),
            *(HeadRows(f"self_attn.{x}_proj", 0, dim, dim, self.num_kv_heads) for x in "kv"),
        ]
        heads = {
            "self_attn.q_proj": ("gated_q" if self.attention_gate else "q", "hidden"),
            "self_attn.k_proj": ("kv", "hidden"),
            "self_attn.v_proj": ("kv", "hidden"),
        }
        params = [
            norm("input_layernorm", "input_layernorm", fused_with=qkv),
            *linear(
                qkv, heads, self.qkv_bias, "self_attn.qkv_proj", rows, kv_heads=self.num_kv_heads
            ),
            *linear(
                "self_attention.linear_proj", {"self_attn.o_proj": ("hidden", "q")}, self.o_bias
            ),
        ]
        if self.qk_norm:
            params += [
                norm(f"self_attn.{x}_norm", f"self_attention.{x}_layernorm", dim="head")
                for x in "qk"
            ]
        if self.sinks:
            sinks = {f"{HF}self_attn.sinks": ("heads",)}
            name = f"{MC}self_attention.core_attention.softmax_offset"
            params.append(Param("layer", sinks, name))
        return params

    def split_sizes(self) -> list[Indivisible]:
        return [("num_attention_heads", self.num_heads, "q")]

    def weights(self, tp: int = 1) -> float:
        projected_q = (3 if self.attention_gate else 2) * self.num_heads * self.head_dim / tp
        return self.hidden_size * (projected_q + 2 * max(self.num_kv_heads / tp, 1) * self.head_dim)

    def flops(self, seq_lens: Iterable[float]) -> float:
        pairs = num_pairs(seq_lens, self.sliding_window)
        return pairs * (4.0 * self.num_heads * self.head_dim)

    def decode_flops(self, context: float) -> float:
        return 2 * self.flops([context]) / (context + 1)

    def pair_cost(self, num_tokens: int) -> float:
        seen = min(num_tokens, self.sliding_window or num_tokens)
        return seen * (2 * num_tokens - seen) * self.num_heads * self.head_dim

    def cached_per_token(self, tp: int) -> int:
        return 2 * max(self.num_kv_heads // tp, 1) * self.head_dim

    def activations(self, tp: int, shards: int) -> MixerActivations:
        queries = self.num_heads * self.head_dim / tp
        keys = max(self.num_kv_heads / tp, 1) * self.head_dim
        stored = 3 * queries + 3 * keys  # inputs and output
        # padded copies; with windows each key is in two blocks
        if self.sinks:
            wider = (self.head_dim + 8) / self.head_dim
            stored = (2 * wider + 1) * queries + 3 * wider * keys
        if self.attention_gate:  # the gate's copy, its sigmoid, and the output before it
            stored += 3 * queries
        normalised = queries + keys if self.qk_norm else 0.0
        return MixerActivations(stored, queries, keys, self.num_heads / tp, normalised=normalised)

    def all_to_all_obstacle(self, tp: int, cp: int) -> str | None:
        kv_heads = max(1, self.num_kv_heads // tp)
        if kv_heads % cp == 0:
            return None
        return (
            f"it needs KV heads that context_parallel_size {cp} divides, and a tensor-parallel "
            f"rank has {kv_heads} of the model's {self.num_kv_heads}"
        )

    def exchanged(self, tp: int) -> tuple[float, float]:
        kv_heads = max(1.0, self.num_kv_heads / tp)
        return self.num_heads / tp * self.head_dim, kv_heads * 2 * self.head_dim

    def exchanges_less_by_all_to_all(self, tp: int, cp: int) -> bool:
        """Return whether all-to-alls exchange fewer bytes than a ring: of cp ranks, h query heads
        and g KV heads a ring moves 2 g (cp - 1) heads of a rank's tokens, all-to-alls
        (2 h + 2 g) (cp - 1) / cp."""
        kv_heads = max(1, self.num_kv_heads // tp)
        return self.num_heads / tp + kv_heads < kv_heads * cp and kv_heads % cp == 0

    def gathered(self, tp: int) -> int:
        if self.num_kv_heads >= tp:
            return 0
        return ((1 + self.attention_gate) * self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def context_obstacle(self) -> str | None:  # type: ignore[override]
        if not self.sinks:
            return None
        return "attention sinks and sliding windows, which only whole sequences support"

    def engine_obstacle(self, tp: int) -> tuple[str, str] | None:
        if self.sinks and tp > self.num_kv_heads:
            return f"num_key_value_heads is {self.num_kv_heads}, fewer than ranks", "kv"
        return None

    def cpu_obstacle(self) -> str | None:
        if self.head_dim % 32 == 0:
            return None
        return f"head dimension {self.head_dim}; vLLM's CPU attention takes multiples of 32"


def attention_layers(config: Mapping[str, Any], traits: Mapping[str, Any]) -> list[Attention]:
    """Return the attention of each layer that config.json describes. traits: of the family, by
    name. Raise UserError for an unsupported value."""
    num_heads = size(config, "num_attention_heads")
    num_kv_heads = (
        num_heads
        if config.get("num_key_value_heads") is None
        else size(config, "num_key_value_heads")
    )
    if num_heads % num_kv_heads:
        raise UserError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    block = Attention(
        hidden_size=size(config, "hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hf_config.head_dim(config, config["model_type"]),
        **Attention.traits(traits),
    )
    return [block] * size(config, "num_hidden_layers")


def num_pairs(seq_lens: Iterable[float], window: int = 0) -> float:
    """Return the pairs of a query and a key that it sees, of causal sequences of these lengths.
    window: tokens that a query sees; 0: all up to its own."""
    seen = ((n, min(n, window or n)) for n in seq_lens)
    return sum(most * (2 * n - most + 1) / 2 for n, most in seen)
