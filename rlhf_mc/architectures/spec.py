"""The sizes and traits of one model, as config.json gives them. families.py has what the model
families differ in."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from rlhf_mc.architectures import delta_net, hf_config, latent, rope_config
from rlhf_mc.architectures.families import (
    FAMILIES,
    SAME_FAMILY,
    Activation,
    Family,
    Traits,
)
from rlhf_mc.architectures.hf_config import flag, need, size
from rlhf_mc.config.errors import UserError

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this. Megatron's padding follows it, so that vocabulary
shards agree."""

LayerKind = Literal["dense", "moe", "linear_dense", "linear_moe"]
"""Kinds of layers: attention, or a gated delta net ("linear"), and a feed-forward network or a
mixture of experts. parameters.py has the parameters of each."""
_KINDS: tuple[LayerKind, ...] = get_args(LayerKind)


@dataclass(frozen=True, kw_only=True)
class ModelShape(Traits):
    """Sizes and traits of one model: everything that its parameters and its computation follow
    from.

    Checkpoints store the fields by name (checkpoint/training_state.py)."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Dimensions of a query and of a key."""
    v_head_dim: int = 0
    """Dimensions of a value; 0: head_dim."""
    rope_head_dim: int = 0
    """Dimensions of a query that are rotated, the last ones: its key has as many that all heads
    share. 0: no latent attention."""
    kv_lora_rank: int = 0
    """Size of the latent vector from which keys and values are projected; 0: from the hidden
    states."""
    q_lora_rank: int = 0
    """Size of the latent vector from which queries are projected; 0: from the hidden states."""
    vocab_size: int
    tie_embeddings: bool
    norm_eps: float
    rope_theta: float
    rotary_fraction: float = 1.0
    """Share of a head's dimensions that are rotated, the first ones."""
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    activation: Activation = "silu"
    sliding_window: int = 0
    """Tokens that a query attends to in every other layer, beginning with the first; its own is one
    of them. 0: all."""
    num_experts: int = 0
    """Experts of each layer that has them; 0: all layers are dense."""
    dense_layers: tuple[int, ...] = ()
    """The layers of a mixture of experts that are dense."""
    experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    """Intermediate size of one expert; a dense layer has ffn_hidden_size."""
    shared_ffn_hidden_size: int = 0
    """Intermediate size of the expert that every token has; 0: there is none."""
    routed_scaling: float = 1.0
    """Factor of the router's weights."""
    norm_topk_prob: bool = False
    """The router's weights of a token's experts are normalised to sum to 1."""
    router_groups: int = 1
    """Equal groups of experts."""
    groups_per_token: int = 1
    """Groups that a token's experts come from: those with the largest sums of their best scores."""
    linear_layers: tuple[int, ...] = ()
    """The layers with a gated delta net in place of attention."""
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    """Dimensions of a key and of a query of a delta net; its value has linear_value_dim."""
    linear_value_dim: int = 0
    linear_kernel: int = 0
    """Tokens that the convolution before a delta net sees."""
    value_head: bool = False
    """A critic: `score.weight` [1, hidden] replaces the language-model head."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], value_head: bool = False) -> ModelShape:
        """Return the shape that a parsed config.json describes. Raise UserError for an unsupported
        value."""
        family_name = need(config, "model_type")
        family_name = SAME_FAMILY.get(str(family_name), family_name)
        if not isinstance(family_name, str) or family_name not in FAMILIES:
            known = f"known are {', '.join(FAMILIES)}"
            raise hf_config.refused("model_type", family_name, known)
        family = FAMILIES[family_name]
        if family.is_nested:
            config = hf_config.language_config(config, family_name)
        if family_name in hf_config.QWEN3_5:
            config = rope_config.without_sections(config)
        config = {**family.defaults, **config, **family.fixed}
        if family.rope and not (config.get("rope_scaling") or config.get("rope_parameters")):
            config["rope_parameters"] = family.rope
        family.check(config)
        hf_config.check_keys(config, family_name)
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
        rope_theta, rope_scaling = rope_config.rope(config, family.rope_theta)
        return cls(
            family=family_name,
            num_layers=size(config, "num_hidden_layers"),
            hidden_size=size(config, "hidden_size"),
            ffn_hidden_size=size(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            **(
                latent.latent_sizes(config, rope_scaling)
                if family.has_latents
                else {"head_dim": hf_config.head_dim(config, family_name)}
            ),
            **(delta_net.delta_net_sizes(config) if family.has_delta_nets else {}),
            vocab_size=size(config, "vocab_size"),
            tie_embeddings=flag(config, "tie_word_embeddings"),
            norm_eps=hf_config.positive(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rotary_fraction=rope_config.rotary_fraction(config, family.rotary_fraction),
            max_position_embeddings=size(config, "max_position_embeddings"),
            activation=hf_config.activation(config, family.activations),
            sliding_window=size(config, "sliding_window")
            if family_name in hf_config.WINDOWED
            else 0,
            value_head=value_head,
            **family.traits_in(config),
            **(_moe_sizes(config, family) if family.is_moe else {}),
        )

    def sequence_cost(self, num_tokens: int) -> float:
        """Return the compute of a sequence of n tokens, in units of one token of a short sequence.

        It is n + n^2 x (dimensions of all queries) / (weights of a layer that one token uses): a
        product with a weight takes 2 FLOPs per token, causal attention 2 n^2 FLOPs per query
        dimension, and with a window of w < n tokens
        2 w (2 n - w). Dimensions and weights are the layers' mean. The states of a delta net count
        as 3 weights each element (operations.py)."""
        seen = min(num_tokens, self.sliding_window or num_tokens)
        windowed = self.num_windowed / self.num_layers
        squares = (1 - windowed) * num_tokens**2 + windowed * seen * (2 * num_tokens - seen)
        return num_tokens + squares * self._attention_cost

    @property
    def num_windowed(self) -> int:
        """Number of layers with a sliding window."""
        return (self.num_layers + 1) // 2 if self.sliding_window else 0

    @functools.cached_property
    def _attention_cost(self) -> float:
        """The mean of query and value dimensions, divided by the weights that one token uses."""
        weights = sum(
            part.num_layers
            * (
                part.attention_weights()
                + 3 * part.state_size
                + 3 * self.hidden_size * part.active_ffn_size
            )
            for part in self.by_kind()
        )
        return (
            self.num_attending * self.num_heads * (self.head_dim + self.value_dim) / (2 * weights)
        )

    @property
    def num_attending(self) -> int:
        """Number of layers with attention."""
        return self.num_layers - len(self.linear_layers)

    @property
    def state_size(self) -> int:
        """Elements of the states of a sequence in a layer, of a model whose layers are of one kind:
        0 in attention."""
        return (
            self.linear_value_heads * self.linear_key_dim * self.linear_value_dim
            if self.linear_layers
            else 0
        )

    @property
    def value_dim(self) -> int:
        """Dimensions of a value."""
        return self.v_head_dim or self.head_dim

    def attention_weights(self, tp: int = 1) -> float:
        """Return the weights of the projections of attention, or of a delta net, in a layer that
        one of `tp` ranks of an engine holds, of a model whose layers are of one kind."""
        if self.linear_layers:
            sizes = self.dims()
            return (
                self.hidden_size
                * (sizes["linear_qkvz"] + sizes["linear_ba"] + sizes["linear_values"])
                / tp
            )
        q = self.num_heads * self.head_dim / tp
        if not self.kv_lora_rank:
            projected_q = (3 if self.attention_gate else 2) * q
            return self.hidden_size * (
                projected_q + 2 * max(self.num_kv_heads / tp, 1) * self.head_dim
            )
        values = self.num_heads * self.value_dim / tp
        keys = q - self.num_heads * self.rope_head_dim / tp
        queries = (
            self.q_lora_rank * (self.hidden_size + q) if self.q_lora_rank else self.hidden_size * q
        )
        latent_kv = self.hidden_size * (
            self.kv_lora_rank + self.rope_head_dim
        ) + self.kv_lora_rank * (keys + values)
        return queries + latent_kv + self.hidden_size * values

    def cached_per_token(self, tp: int) -> int:
        """Return the elements that a rank of an engine of `tp` ranks caches for a token in a layer
        with attention: keys and values, or the latent vector and the rotated part of the keys."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.rope_head_dim
        return 2 * max(self.num_kv_heads // tp, 1) * self.head_dim

    def cached_per_sequence(self, tp: int, itemsize: int) -> float:
        """Return the bytes that it caches for a sequence in all delta nets: float32 states, and the
        convolution's last inputs, of itemsize bytes each."""
        parts = (part for part in self.by_kind() if part.linear_layers)
        inputs = (self.linear_kernel - 1) * self.dims()["linear_qkv"] * itemsize
        return sum(part.num_layers * (4 * part.state_size + inputs) / tp for part in parts)

    @functools.cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        dense = self.dense_layers if self.has_experts else range(self.num_layers)
        return tuple(
            _KINDS[2 * (i in self.linear_layers) + (i not in dense)] for i in range(self.num_layers)
        )

    @property
    def expert_layers(self) -> list[int]:
        """The layers that are mixtures of experts."""
        return [layer for layer, kind in enumerate(self.layer_kinds) if kind.endswith("moe")]

    @property
    def choice_bytes(self) -> int:
        """Bytes of the numbers of the experts that a token has chosen in one layer: one each of up
        to 256 experts, else two."""
        return self.experts_per_token * (1 if self.num_experts <= 256 else 2)

    def by_kind(self, layers: Iterable[int] | None = None) -> list[ModelShape]:
        """Return one shape per kind among these layers (None: all): a model of as many layers, all
        of this kind."""
        kinds = self.layer_kinds
        counts = Counter(kinds if layers is None else [kinds[layer] for layer in layers])
        sizes = (
            "num_experts",
            "experts_per_token",
            "expert_ffn_hidden_size",
            "shared_ffn_hidden_size",
        )
        experts: dict[str, Any] = dict.fromkeys(sizes, 0)
        return [
            replace(
                self,
                num_layers=count,
                dense_layers=(),
                linear_layers=tuple(range(count)) if kind.startswith("linear") else (),
                **(experts if kind.endswith("dense") else {}),
            )
            for kind, count in counts.items()
        ]

    def one_of_each_kind(self) -> ModelShape:
        """Return the model with one layer of each kind."""
        kinds = list(dict.fromkeys(self.layer_kinds))
        dense = (
            tuple(i for i, kind in enumerate(kinds) if kind.endswith("dense"))
            if self.has_experts
            else ()
        )
        linear = tuple(i for i, kind in enumerate(kinds) if kind.startswith("linear"))
        return replace(self, num_layers=len(kinds), dense_layers=dense, linear_layers=linear)

    @property
    def has_experts(self) -> bool:
        """Some or all layers are mixtures of experts."""
        return self.num_experts > 0

    @property
    def active_ffn_size(self) -> int:
        """The intermediate size that one token uses, of a model whose layers are of one kind
        (by_kind): of a dense layer, or of the token's experts together."""
        if not self.has_experts:
            return self.ffn_hidden_size
        return self.experts_per_token * self.expert_ffn_hidden_size + self.shared_ffn_hidden_size

    @property
    def shares_embeddings(self) -> bool:
        """The language-model head is the embedding."""
        return self.tie_embeddings and not self.value_head

    def dims(self) -> dict[str, int]:
        """Return the sizes of the dimensions that parameters.py names."""
        keys = self.linear_key_heads * self.linear_key_dim
        values = self.linear_value_heads * self.linear_value_dim
        return {
            "hidden": self.hidden_size,
            "q": self.num_heads * self.head_dim,
            "gated_q": 2 * self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "head": self.head_dim,
            "heads": self.num_heads,
            "values": self.num_heads * self.value_dim,
            "latent_q": self.q_lora_rank,
            "latent_kv": self.kv_lora_rank,
            "latent_kv_rope": self.kv_lora_rank + self.rope_head_dim,
            "keys_values": self.num_heads * (self.head_dim - self.rope_head_dim + self.value_dim),
            "ffn": self.ffn_hidden_size,
            "experts": self.num_experts,
            "expert_ffn": self.expert_ffn_hidden_size,
            "shared_ffn": self.shared_ffn_hidden_size,
            "linear_qkvz": 2 * (keys + values),
            "linear_qkv": 2 * keys + values,
            "linear_ba": 2 * self.linear_value_heads,
            "linear_heads": self.linear_value_heads,
            "linear_values": values,
            "linear_head": self.linear_value_dim,
            "kernel": self.linear_kernel,
            "vocab": self.vocab_size,
            "one": 1,
        }


def _moe_sizes(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of ModelShape that describe a mixture of experts."""
    # transformers 5 writes num_local_experts, earlier versions num_experts.
    key = next(
        (key for key in ("num_experts", "n_routed_experts") if config.get(key)), "num_local_experts"
    )
    if config.get("num_local_experts") not in (None, config.get(key)):
        other = f"{key} is {config[key]}, and they are two names of one number"
        raise hf_config.refused("num_local_experts", config["num_local_experts"], other)
    num_experts = size(config, key)
    ffn = size(config, family.expert_ffn_key)
    per_token = size(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise UserError(
            f"config.json: num_experts_per_tok is {per_token}, more than {key}, which is "
            f"{num_experts}"
        )
    return {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "expert_ffn_hidden_size": ffn,
        "shared_ffn_hidden_size": ffn * hf_config.count(config, "n_shared_experts")
        or hf_config.count(config, "shared_expert_intermediate_size"),
        "routed_scaling": hf_config.positive(config, "routed_scaling_factor", 1.0),
        "norm_topk_prob": flag(config, "norm_topk_prob"),
        "dense_layers": _dense_layers(config),
        **(latent.router_groups(config, num_experts, per_token) if family.has_latents else {}),
    }


def _dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers that have no experts: mlp_only_layers, those that decoder_sparse_step
    passes over, and the first_k_dense_replace first ones."""
    num_layers = size(config, "num_hidden_layers")
    listed = [] if config.get("mlp_only_layers") is None else config["mlp_only_layers"]
    if not isinstance(listed, list) or not all(
        type(layer) is int and 0 <= layer < num_layers for layer in listed
    ):
        raise hf_config.refused(
            "mlp_only_layers", listed, f"expected a list of layers from 0 to {num_layers - 1}"
        )
    step = 1 if config.get("decoder_sparse_step") is None else size(config, "decoder_sparse_step")
    first = hf_config.count(config, "first_k_dense_replace")
    dense = tuple(
        layer
        for layer in range(num_layers)
        if layer < first or layer in listed or (layer + 1) % step
    )
    if len(dense) == num_layers:
        key = "mlp_only_layers" if len(set(listed)) == num_layers else "decoder_sparse_step"
        key = "first_k_dense_replace" if first >= num_layers else key
        raise hf_config.refused(
            key, config[key], f"none of the {num_layers} layers would have experts"
        )
    return dense


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return the rows of Megatron's embedding over all tensor-parallel ranks: the next multiple of
    lcm(64, tp_size)."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp_size)
    return -(-vocab_size // multiple) * multiple
