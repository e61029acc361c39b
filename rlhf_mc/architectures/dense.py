"""A dense feed-forward network: gate, up and down. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_mc.architectures.hf_config import size
from rlhf_mc.architectures.layer import FeedForward, FeedForwardActivations, Indivisible
from rlhf_mc.architectures.rows import Param, linear, norm


@dataclass(frozen=True, kw_only=True)
class Dense(FeedForward):
    """The same network for all tokens."""

    ffn_hidden_size: int

    def dims(self) -> dict[str, int]:
        return {"hidden": self.hidden_size, "ffn": self.ffn_hidden_size}

    def params(self) -> list[Param]:
        gate_up = {"mlp.gate_proj": ("ffn", "hidden"), "mlp.up_proj": ("ffn", "hidden")}
        return [
            norm("post_attention_layernorm", "pre_mlp_layernorm", fused_with="mlp.linear_fc1"),
            *linear("mlp.linear_fc1", gate_up, self.mlp_bias, "mlp.gate_up_proj"),
            *linear("mlp.linear_fc2", {"mlp.down_proj": ("hidden", "ffn")}, self.mlp_bias),
        ]

    def split_sizes(self) -> list[Indivisible]:
        return [("intermediate_size", self.ffn_hidden_size, "ffn")]

    def active_size(self) -> int:
        return self.ffn_hidden_size

    def weights(self, ep: int) -> int:
        return self.hidden_size * 3 * self.ffn_hidden_size

    def read_weights(self, tp: int, tokens: int) -> float:
        return self.hidden_size * 3 * (self.ffn_hidden_size / tp)

    def activations(self, tp: int) -> FeedForwardActivations:
        product = self.ffn_hidden_size / tp
        local = (4 if self.activation == "silu" else 5) * product
        return FeedForwardActivations(product, local, recomputed=3 * product)


def dense_layers(config: Mapping[str, Any], traits: Mapping[str, Any]) -> list[Dense]:
    """Return the feed-forward of each layer that config.json describes. traits: of the family, by
    name."""
    block = Dense(
        hidden_size=size(config, "hidden_size"),
        ffn_hidden_size=size(config, "intermediate_size"),
        **Dense.traits(traits),
    )
    return [block] * size(config, "num_hidden_layers")
