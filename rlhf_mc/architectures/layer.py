"""A layer of a model: a mixer, by which tokens see one another (attention, latent attention, a
gated delta net), and a feed-forward (dense, experts). Each kind of block is one class in a file of
its own, which answers all that planner, reshard and rollout ask. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from rlhf_mc.architectures.rows import Param

Indivisible = tuple[str, int, str]
"""(a size by its key of config.json, its value, a dimension of the tensors that it splits)."""


@dataclass(frozen=True)
class MixerActivations:
    """Elements per token that a rank stores of a mixer."""

    stored: float
    """Inputs and outputs of its operations, without those below."""
    queries: float = 0.0
    keys: float = 0.0
    """Keys, and as many for values."""
    heads: float = 0.0
    """Heads with a log-sum-exp."""
    padded: float = 0.0
    """Of values and output that torch's attention pads to the size of the keys
    (models/layers.py)."""
    normalised: float = 0.0
    """Queries and keys that are normalised."""
    recomputed_bytes: float = 0.0
    """Bytes that it computes again in its backward pass."""


@dataclass(frozen=True)
class FeedForwardActivations:
    """Elements per token that a rank stores of a feed-forward."""

    product: float
    """The product of gate and up, of the experts that a token has together."""
    local: float
    """All of a local layer on a CPU: gate and up with the activated gate, and where Megatron-Core
    computes the activation a copy of up; inputs of experts."""
    recomputed: float
    """The part that selective recomputation with Transformer Engine recomputes, but for the norm:
    gate, up and product; of experts the product, but for the shared expert's."""
    inputs: float = 0.0
    """Inputs of a token's experts. The dispatcher gathers the tokens of all tensor-parallel ranks,
    each of which has a part of every expert."""
    routing_bytes: float = 0.0
    """Bytes of a router's indices, probabilities and masks."""


@dataclass(frozen=True, kw_only=True)
class LayerBlock:
    """A part of a layer. Its fields are stored in training checkpoints by name."""

    hidden_size: int

    vllm_overrides: ClassVar[Mapping[str, Any]] = {}
    """Keys of config.json that vLLM reads otherwise."""
    vllm_options: ClassVar[Mapping[str, Any]] = {}
    vllm_cpu_options: ClassVar[Mapping[str, Any]] = {}

    def dims(self) -> dict[str, int]:
        """Return the sizes of the dimensions that its parameters have."""
        raise NotImplementedError

    def params(self) -> list[Param]:
        """Return the rows of its parameters, with the norm before it."""
        raise NotImplementedError

    def split_sizes(self) -> list[Indivisible]:
        """Return the sizes that the number of ranks must divide in any engine."""
        raise NotImplementedError

    def engine_obstacle(self, tp: int) -> tuple[str, str] | None:
        """Return (the reason why vLLM cannot split it over tp ranks, a dimension of the tensors
        that it cannot split)."""
        return None

    @classmethod
    def traits(cls, traits: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a family's traits that the block has."""
        return {field.name: traits[field.name] for field in fields(cls) if field.name in traits}


@dataclass(frozen=True, kw_only=True)
class Mixer(LayerBlock):
    """By default: without a KV cache, and with whole heads on each rank."""

    sharded_pairs: ClassVar[int] = 1
    """Pairs of a column-parallel and a row-parallel layer."""
    o_bias: ClassVar[bool] = False
    """The projection of the output has a bias."""
    context_obstacle: ClassVar[str | None] = None
    """The reason why context-parallel ranks cannot share a sequence."""
    cpu_dtypes: ClassVar[tuple[str, ...]] = ()
    """The types of vLLM's kernel on a CPU; none: any."""
    summed_gradients: ClassVar[int] = 0
    """Elements of weights that every rank has, whose gradients of its heads the ranks add in each
    backward pass without sequence parallelism."""
    returns_experts: ClassVar[bool] = True
    """vLLM returns the experts of routers beside it."""

    def weights(self, tp: int = 1) -> float:
        """Return the weights of its projections that one of `tp` ranks of an engine holds."""
        raise NotImplementedError

    def flops(self, seq_lens: Iterable[float]) -> float:
        """Return the FLOPs of a forward pass besides projections, over causal sequences."""
        raise NotImplementedError

    def decode_flops(self, context: float) -> float:
        """Return its FLOPs for a token after `context` tokens."""
        raise NotImplementedError

    def pair_cost(self, num_tokens: int) -> float:
        """Return half of the FLOPs between tokens of a long sequence of n tokens, as n grows."""
        raise NotImplementedError

    @property
    def state_size(self) -> int:
        """Elements of the states of a sequence."""
        return 0

    def cached_per_token(self, tp: int) -> int:
        """Return the elements that a rank of an engine of `tp` ranks caches for a token."""
        return 0

    def cached_per_sequence(self, tp: int, itemsize: int) -> float:
        """Return the bytes that it caches for a sequence, whatever its length."""
        return 0.0

    def activations(self, tp: int, shards: int) -> MixerActivations:
        """Return what a rank stores. shards: ranks with a part of the tokens each, by sequence
        parallelism."""
        raise NotImplementedError

    def exchanged(self, tp: int) -> tuple[float, float]:
        """Return the elements per token of a rank's queries, and of its keys and values together,
        which context-parallel ranks exchange."""
        return 0.0, 0.0

    def all_to_all_obstacle(self, tp: int, cp: int) -> str | None:
        """Return the reason why context-parallel ranks cannot exchange heads by all-to-alls."""
        return None

    def exchanges_less_by_all_to_all(self, tp: int, cp: int) -> bool:
        """Return whether context-parallel ranks exchange fewer bytes by all-to-alls."""
        return False

    def gathered(self, tp: int) -> int:
        """Return the elements per token that tensor-parallel ranks gather, since a rank has less
        than a KV head."""
        return 0

    def latents(self) -> tuple[int, ...]:
        """Return the elements per token that are gathered with sequence parallelism in place of the
        mixer's input: the inputs of two projections, and the part of the keys that all heads
        share."""
        return ()

    def cpu_obstacle(self) -> str | None:
        """Return the reason why vLLM has no kernel for it on a CPU."""
        return None


@dataclass(frozen=True, kw_only=True)
class FeedForward(LayerBlock):
    """By default: one network for all tokens."""

    activation: str
    mlp_bias: bool = False
    """The projections have biases; of a mixture of experts also the router."""

    num_experts: ClassVar[int] = 0
    experts_per_token: ClassVar[int] = 0
    choice_bytes: ClassVar[int] = 0
    sharded_pairs: ClassVar[int] = 1
    """Pairs of a column-parallel and a row-parallel layer."""
    is_recomputed: ClassVar[bool] = True
    """Selective recomputation with Transformer Engine repeats its products."""
    quantizes: ClassVar[bool] = True
    """The engine computes it in fp8 with rollout.quantization."""

    def active_size(self) -> int:
        """Return the intermediate size that one token uses."""
        raise NotImplementedError

    def training_obstacle(self) -> str | None:
        """Return the reason why it cannot be trained."""
        return None

    def router_rows(self) -> int:
        """Return the output dimensions of its routers and gates."""
        return 0

    def weights(self, ep: int) -> int:
        """Return the weights of its projections on all tensor-parallel ranks, with the experts of
        one of ep expert-parallel ranks."""
        raise NotImplementedError

    def read_weights(self, tp: int, tokens: int) -> float:
        """Return the weights that an engine step of `tokens` tokens reads on a rank."""
        raise NotImplementedError

    def activations(self, tp: int) -> FeedForwardActivations:
        """Return what a rank stores. Of experts: for evenly routed tokens."""
        raise NotImplementedError


class Layer(NamedTuple):
    """One layer of a model."""

    mixer: Mixer
    feed_forward: FeedForward

    def weights(self) -> float:
        """Return the weights that one token uses, states as three each element."""
        projections = self.mixer.weights() + 3 * self.mixer.state_size
        return projections + 3 * self.mixer.hidden_size * self.feed_forward.active_size()
