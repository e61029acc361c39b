"""One model, as config.json describes it: its layers, and what is outside of them. families.py has
what the model families differ in."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_mc.architectures import hf_config, rope_config
from rlhf_mc.architectures.families import FAMILIES, SAME_FAMILY
from rlhf_mc.architectures.hf_config import flag, need, size
from rlhf_mc.architectures.layer import Layer, LayerBlock, Mixer
from rlhf_mc.architectures.lora import RANK, Lora

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this. Megatron's padding follows it, so that vocabulary
shards agree."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Everything that a model's parameters and its computation follow from.

    Checkpoints store the fields by name (checkpoint/training_state.py)."""

    family: str
    layers: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int
    tie_embeddings: bool
    norm_eps: float
    rope_theta: float
    rotary_fraction: float = 1.0
    """Share of a head's dimensions that are rotated, the first ones."""
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""
    value_head: bool = False
    """A critic: `score.weight` [1, hidden] replaces the language-model head."""
    lora: Lora | None = None
    """The adapters that are trained in place of all other tensors but the value head."""

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
        config = {**family.defaults, **config, **family.fixed, "model_type": family_name}
        if family.rope and not (config.get("rope_scaling") or config.get("rope_parameters")):
            config["rope_parameters"] = family.rope
        family.check(config)
        hf_config.check_keys(config, family_name)
        rope_theta, rope_scaling = rope_config.rope(config, family.rope_theta)
        traits = family.traits_in(config)
        return cls(
            family=family_name,
            layers=family.layers(config),
            hidden_size=size(config, "hidden_size"),
            vocab_size=size(config, "vocab_size"),
            tie_embeddings=flag(config, "tie_word_embeddings"),
            norm_eps=hf_config.positive(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rotary_fraction=rope_config.rotary_fraction(config, family.rotary_fraction),
            max_position_embeddings=size(config, "max_position_embeddings"),
            zero_centered_norms=traits.get("zero_centered_norms", False),
            scaled_embeddings=traits.get("scaled_embeddings", False),
            value_head=value_head,
        )

    def __hash__(self) -> int:
        # Of a part of the fields: caches of layouts and plans look shapes up.
        ends = self.layers[:1] + self.layers[-1:]
        return hash(
            (self.family, self.num_layers, ends, self.vocab_size, self.value_head, self.lora)
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @functools.cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """The distinct layers, in the order of their first."""
        return tuple(dict.fromkeys(self.layers))

    @functools.cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """The index in `kinds` of each layer."""
        numbers = {kind: number for number, kind in enumerate(self.kinds)}
        return tuple(numbers[layer] for layer in self.layers)

    def by_kind(self, layers: Iterable[int] | None = None) -> dict[Layer, int]:
        """Return the distinct layers among these (None: all), with the number of each."""
        kinds = self.layer_kinds
        counts = Counter(kinds if layers is None else [kinds[layer] for layer in layers])
        return {self.kinds[kind]: count for kind, count in counts.items()}

    @functools.cached_property
    def base(self) -> ModelShape:
        """The model without adapters."""
        return self if self.lora is None else replace(self, lora=None)

    def one_of_each_kind(self) -> ModelShape:
        """Return the model with one layer of each kind."""
        return replace(self, layers=self.kinds)

    @functools.cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The distinct mixers."""
        return tuple(dict.fromkeys(layer.mixer for layer in self.kinds))

    @functools.cached_property
    def blocks(self) -> tuple[LayerBlock, ...]:
        """The distinct mixers, then the distinct feed-forwards."""
        return (*self.mixers, *dict.fromkeys(layer.feed_forward for layer in self.kinds))

    def sequence_cost(self, num_tokens: int) -> float:
        """Return the compute of a sequence of n tokens, in units of one token of a short sequence.

        It is n + (FLOPs between tokens, in pairs) / (weights that one token uses): a product with a
        weight takes 2 FLOPs per token, causal attention 2 n^2 FLOPs per query dimension, and with a
        window of w < n tokens 2 w (2 n - w). Dimensions and weights are the layers' mean. The
        states of a delta net count as 3 weights each element (operations.py)."""
        kinds = self.by_kind().items()
        pairs = sum(count * layer.mixer.pair_cost(num_tokens) for layer, count in kinds)
        return num_tokens + pairs / self._token_weights

    @functools.cached_property
    def _token_weights(self) -> float:
        """The weights of all layers that one token uses."""
        return sum(count * layer.weights() for layer, count in self.by_kind().items())

    def cached_per_token(self, tp: int) -> int:
        """Return the elements that a rank of an engine of `tp` ranks caches for a token in all
        layers."""
        return sum(n * layer.mixer.cached_per_token(tp) for layer, n in self.by_kind().items())

    def cached_per_sequence(self, tp: int, itemsize: int) -> float:
        """Return the bytes that it caches for a sequence in all layers, whatever its length."""
        kinds = self.by_kind().items()
        return sum(n * layer.mixer.cached_per_sequence(tp, itemsize) for layer, n in kinds)

    @functools.cached_property
    def expert_layers(self) -> list[int]:
        """The layers that are mixtures of experts."""
        return [i for i, layer in enumerate(self.layers) if layer.feed_forward.num_experts]

    @property
    def num_experts(self) -> int:
        """Experts of each layer that has them; 0: none has."""
        return max(layer.feed_forward.num_experts for layer in self.kinds)

    @property
    def experts_per_token(self) -> int:
        """Experts of a token in each layer that has them."""
        return max(layer.feed_forward.experts_per_token for layer in self.kinds)

    @property
    def choice_bytes(self) -> int:
        """Bytes of the numbers of the experts that a token has chosen in one layer."""
        return max(layer.feed_forward.choice_bytes for layer in self.kinds)

    @property
    def shares_embeddings(self) -> bool:
        """The language-model head is the embedding."""
        return self.tie_embeddings and not self.value_head

    def dims(self) -> dict[str, int]:
        """Return the sizes of the dimensions that parameters.py names."""
        sizes = {"hidden": self.hidden_size, "vocab": self.vocab_size, "one": 1}
        sizes |= {} if self.lora is None else {RANK: self.lora.rank}
        return functools.reduce(lambda a, b: a | b.dims(), self.blocks, sizes)


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return the rows of Megatron's embedding over all tensor-parallel ranks: the next multiple of
    lcm(64, tp_size)."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp_size)
    return -(-vocab_size // multiple) * multiple
