"""The interfaces of a rollout engine: one for the loop, and one for the setup. engines.py lists the
engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import Config, RolloutConfig
from rlhf_mc.reshard.layout import Layout

if TYPE_CHECKING:  # the dry run imports this file, and works without torch
    import numpy as np
    import torch

    from rlhf_mc.data.batch import Generation

WEIGHTS = "weights"
"""The weights, as a part of an engine's device memory. sleep releases it, wake_up allocates it
again."""
KV_CACHE = "kv_cache"
"""The KV cache, as a part of an engine's device memory."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of responses. Training never truncates the distribution (top_p 1, top_k
    -1)."""

    temperature: float
    """Sampling temperature; 0: greedy."""
    max_tokens: int
    """Maximum length of a response."""
    stop_token_ids: tuple[int, ...]
    """End tokens: the first one sampled ends the response, and belongs to it."""
    top_p: float = 1.0
    """Nucleus sampling: tokens are sampled from the smallest set of probability top_p; 1: all
    tokens."""
    top_k: int = -1
    """Tokens are sampled from the top_k most probable ones; -1: all tokens."""


@dataclass(frozen=True, eq=False)
class Request:
    """A response that an engine is to generate."""

    number: int
    """Id of the response in the call: its index among the call's responses."""
    prompt: np.ndarray
    """Prompt tokens [tokens] int32."""
    seed: int
    """Seed of the response's sampling: 0 to 2^63 - 1."""
    partial: Generation
    """Partial response that the engine continues; without tokens: a new response."""
    max_tokens: int | None = None
    """Maximum length of this response, `partial` included, at most Sampling.max_tokens; None:
    Sampling.max_tokens."""

    def tokens(self, end: int | None = None) -> list[int]:
        """Return the tokens that the engine continues: of the last context of the first `end`
        tokens of the partial response (None: of all)."""
        start = self.partial.context_start(end)
        prompt = [] if start else self.prompt.tolist()
        return [*prompt, *self.partial.token_ids[start:end]]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the engine continues."""
        start = self.partial.context_start()
        return len(self.partial.token_ids) - start + (0 if start else len(self.prompt))


@dataclass(frozen=True)
class Arrivals:
    """Conversations that environments have answered before a step of an engine. Arrivals are the
    same on all ranks of the engine."""

    requests: Sequence[Request] = ()
    """Conversations that continue: `partial` ends with the observation."""
    num_cached: int = 0
    """Tokens already in this engine's KV cache."""
    ended: Mapping[int, Generation] = field(default_factory=dict)
    """Conversations that have ended, by the request's number."""


class Turns(Protocol):
    """Conversations of one call of an engine. Each request is a turn of a conversation. All ranks
    of the engine call each method alike. No method blocks on an environment."""

    affinity: Mapping[int, int]
    """Engine of each conversation of an earlier call, by the request's number. The same on every
    rank."""

    @property
    def num_waiting(self) -> int:
        """Number of conversations that wait for their environment."""

    def start(self, requests: Sequence[Request]) -> list[Request]:
        """Begin conversations, or continue those of an earlier call. Return the requests of the
        conversations with a turn to sample. Other conversations wait for their environment."""

    def submit(self, stopped: Mapping[int, Generation]) -> None:
        """Send turns that have ended to their environments. stopped: by the request's number."""

    def receive(self, is_idle: bool) -> Arrivals:
        """Return the conversations that are answered. is_idle: the engine has nothing else to
        do."""

    def abort(self) -> dict[int, Generation]:
        """Close the environments, unless a later call continues the conversations. Return the
        unfinished responses outside of the engine, by the request's number."""


class RolloutEngine(Protocol):
    """This rank's part of the engines that generate responses. All ranks of an engine call each
    method alike."""

    groups: Sequence[Sequence[int]]
    """The ranks of each engine, in the order of their tensor-parallel ranks."""
    max_running: int
    """Maximum number of requests in a step."""
    cached_token_cost: float
    """Time for which a step reads one token's keys and values from the KV cache, relative to a step
    without any. The same on every rank."""
    awake: frozenset[str]
    """The parts (WEIGHTS, KV_CACHE) that have device memory."""

    @property
    def summary(self) -> str:
        """One line of text for the console."""

    @property
    def num_parameters(self) -> int:
        """Parameters that this rank holds, awake or not."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of these parameters, those that alias the trainer's included."""

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """This rank's parameters, by the names of the engine's layout; a reshard writes them in
        place."""

    def weights_updated(self) -> None:
        """Discard what was computed with earlier weights. Call after each weight update."""

    @property
    def num_unfinished(self) -> int:
        """Number of requests that were added and have not ended."""

    @property
    def num_running(self) -> int:
        """Number of unfinished requests that run. The others wait for memory or for a slot."""

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Add requests, with the same sampling parameters as all that have not ended."""

    def step(self) -> dict[int, Generation]:
        """Sample the next token of each running request. Return the responses that ended, by the
        request's number. A token depends on the tokens before it, the seed, its position and the
        weights alone."""

    def abort(self) -> dict[int, Generation]:
        """Abort all requests. Return the partial responses, by the request's number."""

    def sleep(self) -> None:
        """Release the device memory of WEIGHTS and KV_CACHE, and discard their contents."""

    def wake_up(self, part: str) -> None:
        """Allocate the device memory of WEIGHTS or KV_CACHE again. A weight update must then fill
        WEIGHTS."""

    def close(self) -> None:
        """Free the engine and its process groups; the trainer's groups stay."""


class EngineFactory(Protocol):
    """A rollout engine before it is built. The dry run asks for its layout too, so the module of a
    built-in engine imports neither torch nor the engine's library."""

    title: str
    """The engine's name in messages."""

    def layout(self, shape: ModelShape, tp_rank: int, tp_size: int) -> Layout:
        """Return the layout of this tensor-parallel rank of an engine, from which the weight update
        is planned."""

    def check_layout(self, shape: ModelShape, tp_size: int) -> None:
        """Raise UserError, with the sizes that work, if an engine of tp_size ranks cannot shard the
        model."""

    def check_installation(self) -> None:
        """Import the engine's library. Raise UserError if it is missing, or cannot work on this
        machine."""

    def check_model(self, shape: ModelShape, cfg: RolloutConfig) -> None:
        """Raise UserError if the engine cannot run the model on this machine, with these
        settings."""

    def build(
        self,
        cfg: Config,
        shape: ModelShape,
        groups: Sequence[Sequence[int]],
        rank: int,
        storage: Mapping[str, torch.Tensor],
    ) -> RolloutEngine:
        """Return this rank's part of the engines. Every rank must call it. groups: the ranks of
        each engine, in the order of its TP ranks. storage: tensors that become the engine's
        parameters of these names, in place of memory of its own; empty without
        reshard.share_weights."""
