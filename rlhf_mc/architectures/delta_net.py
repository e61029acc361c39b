"""Gated delta nets (qwen3_next, qwen3_5) in some layers, attention in the others. No torch here.

A layer has key heads and, for each, equally many value heads, each with a state [key dimensions,
value dimensions].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlhf_mc.architectures.attention import attention_layers
from rlhf_mc.architectures.hf_config import flag, refused, size
from rlhf_mc.architectures.layer import Indivisible, Mixer, MixerActivations
from rlhf_mc.architectures.rows import HF, MC, HeadRows, Param, linear, norm

DELTA_NET_DEFAULTS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_TYPES = ("linear_attention", "full_attention")
_QKVZ = "linear_attn.in_proj_qkvz"
_BA = "linear_attn.in_proj_ba"


CHUNK = 64
"""Tokens whose products with the states are computed at a time."""
CPU_DIMS = (64, 128)
"""The dimensions of heads that vLLM's kernels take on a CPU, in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class DeltaNet(Mixer):
    """A gated delta net (arXiv 2412.06464)."""

    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    """Dimensions of a key and of a query; its value has linear_value_dim."""
    linear_value_dim: int
    linear_kernel: int
    """Tokens that the convolution before it sees."""
    split_delta_nets: bool = False
    """The projections are four tensors: to queries, keys and values together, to gates, and to the
    two numbers of each head."""

    context_obstacle: ClassVar[str | None] = "gated delta nets, whose states need whole sequences"
    # States in float32, as the trainer's, which a cached prefix would have only where a block ends.
    vllm_options: ClassVar[Mapping[str, Any]] = {
        "mamba_ssm_cache_dtype": "float32",
        "enable_prefix_caching": False,
    }
    cpu_dtypes: ClassVar[tuple[str, ...]] = ("bfloat16",)
    returns_experts: ClassVar[bool] = False

    def dims(self) -> dict[str, int]:
        keys = self.linear_key_heads * self.linear_key_dim
        values = self.linear_value_heads * self.linear_value_dim
        return {
            "hidden": self.hidden_size,
            "linear_qkvz": 2 * (keys + values),
            "linear_qkv": 2 * keys + values,
            "linear_ba": 2 * self.linear_value_heads,
            "linear_heads": self.linear_value_heads,
            "linear_values": values,
            "linear_head": self.linear_value_dim,
            "kernel": self.linear_kernel,
            "one": 1,
        }

    def params(self) -> list[Param]:
        """Return its rows."""
        conv1d = "linear_attn.conv1d"
        convolution = {conv1d: ("linear_qkv", "one", "kernel")}
        rows = self._query_key_value(conv1d)
        output = {"linear_attn.out_proj": ("hidden", "linear_values")}
        return [
            norm("input_layernorm", "input_layernorm", fused_with="self_attention.in_proj"),
            *(self._split_projections() if self.split_delta_nets else self._projections()),
            *linear("self_attention.conv1d", convolution, False, rows=rows),
            *(
                Param(
                    "layer",
                    {f"{HF}linear_attn.{name}": ("linear_heads",)},
                    f"{MC}self_attention.{name}",
                    engine_float32=name == "A_log",
                )
                for name in ("dt_bias", "A_log")
            ),
            norm("linear_attn.norm", "self_attention.out_norm", dim="linear_head"),
            *linear("self_attention.out_proj", output, bias=False),
        ]

    def _projections(self) -> list[Param]:
        """Return the row of two tensors, which have, of each key head, its query, its key, and the
        values and their gates of its value heads; and the two numbers of each of these."""
        keys = self.linear_key_heads
        d_k = self.linear_key_dim
        values = self.linear_value_heads // keys * self.linear_value_dim
        group = self.linear_value_heads // keys
        starts = itertools.accumulate((0, d_k, d_k, values))
        rows = [
            *(
                HeadRows(_QKVZ, start, size, 2 * (d_k + values), keys)
                for start, size in zip(starts, (d_k, d_k, values, values), strict=True)
            ),
            *(HeadRows(_BA, start, group, 2 * group, keys) for start in (0, group)),
        ]
        tensors = {_QKVZ: ("linear_qkvz", "hidden"), _BA: ("linear_ba", "hidden")}
        return linear("self_attention.in_proj", tensors, False, rows=rows)

    def _split_projections(self) -> list[Param]:
        """Return the row of four tensors, of which vLLM joins two and two."""
        heads = self.linear_value_heads
        qkv, z, b, a = (f"linear_attn.in_proj_{x}" for x in ("qkv", "z", "b", "a"))
        rows = [
            *self._query_key_value(qkv),
            *(
                HeadRows(name, 0, size, size, heads)
                for name, size in ((z, self.linear_value_dim), (b, 1), (a, 1))
            ),
        ]
        tensors = {
            qkv: ("linear_qkv", "hidden"),
            z: ("linear_values", "hidden"),
            b: ("linear_heads", "hidden"),
            a: ("linear_heads", "hidden"),
        }
        engine = {qkv: _QKVZ, z: _QKVZ, b: _BA, a: _BA}
        return linear("self_attention.in_proj", tensors, False, engine, rows)

    def _query_key_value(self, module: str) -> list[HeadRows]:
        """Return the rows of a tensor with all queries, all keys and all values in turn."""
        keys = self.linear_key_heads
        d_k = self.linear_key_dim
        d_v = self.linear_value_dim
        return [
            *(HeadRows(module, part * keys * d_k, d_k, d_k, keys) for part in (0, 1)),
            HeadRows(module, 2 * keys * d_k, d_v, d_v, self.linear_value_heads),
        ]

    def split_sizes(self) -> list[Indivisible]:
        rows = "linear_qkv" if self.split_delta_nets else "linear_qkvz"
        return [("linear_num_key_heads", self.linear_key_heads, rows)]

    def weights(self, tp: int = 1) -> float:
        sizes = self.dims()
        rows = sizes["linear_qkvz"] + sizes["linear_ba"] + sizes["linear_values"]
        return self.hidden_size * rows / tp

    @property
    def summed_gradients(self) -> int:  # type: ignore[override]
        return self.linear_value_dim

    @property
    def state_size(self) -> int:
        return self.linear_value_heads * self.linear_key_dim * self.linear_value_dim

    def flops(self, seq_lens: Iterable[float]) -> float:
        """Return the FLOPs of three products of each token with its states: what the key reads,
        what is written, what the query reads (equation 10)."""
        return sum(seq_lens) * 6.0 * self.state_size

    def decode_flops(self, context: float) -> float:
        return 6.0 * self.state_size

    def pair_cost(self, num_tokens: int) -> float:
        return 0.0

    def cached_per_sequence(self, tp: int, itemsize: int) -> float:
        """Return the bytes of float32 states, and of the convolution's last inputs, of itemsize
        bytes each."""
        inputs = (self.linear_kernel - 1) * self.dims()["linear_qkv"] * itemsize
        return (4 * self.state_size + inputs) / tp

    def activations(self, tp: int, shards: int) -> MixerActivations:
        """Return what a rank stores: the projections, and of the gated norm its input, output, the
        gate's copy, its activation and the product (models/gated_delta_net.py)."""
        sizes = self.dims()
        stored = (sizes["linear_qkvz"] + sizes["linear_ba"] + 5 * sizes["linear_values"]) / tp
        of_head = 10 * self.linear_key_dim + 6 * self.linear_value_dim + 6 * CHUNK
        rule = 4 / tp * (self.linear_value_heads * of_head + 2 * self.state_size / CHUNK)
        return MixerActivations(stored, recomputed_bytes=rule)

    def cpu_obstacle(self) -> str | None:
        dims = (self.linear_key_dim, self.linear_value_dim)
        if dims[0] == dims[1] and dims[0] in CPU_DIMS:
            return None
        return (
            f"linear_key_head_dim {dims[0]} and linear_value_head_dim {dims[1]}; vLLM's CPU gated "
            "delta net takes 64 or 128 for both"
        )


def hybrid_layers(config: Mapping[str, Any], traits: Mapping[str, Any]) -> list[Mixer]:
    """Return the mixer of each layer that config.json describes: a delta net, or attention."""
    layers = range(size(config, "num_hidden_layers"))
    interval = size(config, "full_attention_interval")
    types = config.get("layer_types") or [_TYPES[(layer + 1) % interval == 0] for layer in layers]
    if (
        not isinstance(types, list)
        or len(types) != len(layers)
        or any(kind not in _TYPES for kind in types)
    ):
        raise refused(
            "layer_types", types, f"expected {len(layers)} times {' or '.join(map(repr, _TYPES))}"
        )
    key_heads = size(config, "linear_num_key_heads")
    value_heads = size(config, "linear_num_value_heads")
    if value_heads % key_heads:
        raise refused(
            "linear_num_value_heads", value_heads, f"expected a multiple of {key_heads} key heads"
        )
    block = DeltaNet(
        hidden_size=size(config, "hidden_size"),
        linear_key_heads=key_heads,
        linear_value_heads=value_heads,
        linear_key_dim=size(config, "linear_key_head_dim"),
        linear_value_dim=size(config, "linear_value_head_dim"),
        linear_kernel=size(config, "linear_conv_kernel_dim"),
        **DeltaNet.traits(traits),
    )
    attention = attention_layers(config, traits)
    return [block if types[layer] == _TYPES[0] else attention[layer] for layer in layers]


def check_gated_attention(config: Mapping[str, Any]) -> None:
    """Raise UserError for a value that vLLM's model does not follow."""
    for key in ("attention_bias", "qkv_bias"):
        if flag(config, key):
            raise refused(
                key, True, "transformers and vLLM add it to different projections: expected false"
            )
    if flag(config, "tie_word_embeddings") and config["model_type"] == "qwen3_next":
        raise refused("tie_word_embeddings", True, "vLLM's model has a head of its own")
    if "shared_expert_intermediate_size" in config:
        size(config, "shared_expert_intermediate_size")


def check_qwen3_5_moe(config: Mapping[str, Any]) -> None:
    """Raise UserError for a value that vLLM's model does not follow."""
    check_gated_attention(config)
    if not flag(config, "norm_topk_prob"):
        raise refused("norm_topk_prob", False, "transformers always normalises: expected true")
