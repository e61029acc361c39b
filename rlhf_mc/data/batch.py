"""The ragged batch that travels between the phases of a step: token vectors end to end, and offsets.

Nothing is padded here. Every rank holds the same whole batch (token ids and one float per token:
small beside any weight), so what is computed from it needs no further communication.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready to generate from."""

    index: int
    """Row of the dataset (over all its files, after filtering); names the row in messages and seeds its sampling."""
    token_ids: list[int]
    """The prompt after the chat template."""
    text: str
    """The same as text, for logs."""
    data_source: str
    """Which reward rule scores it, and under which name validation reports it."""
    ground_truth: Any
    """What the reward function compares with."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Passed through to the reward function."""


@dataclass(frozen=True)
class Generation:
    """One response of the rollout engine."""

    token_ids: list[int]
    """Sampled tokens, the end-of-sequence token included where one was sampled."""
    log_probs: list[float]
    """vLLM's log-prob of each sampled token at the sampling temperature."""
    finished: bool
    """True: ended by itself; False: cut at max_response_length."""


@dataclass(frozen=True)
class RaggedBatch:
    """S sequences, each prompt + response, end to end in one vector of T tokens.

    Per-token fields have one entry per *response* token, end to end: R in all. None until the phase
    that computes them has run.
    """

    tokens: torch.Tensor
    """[T] int64: prompt and response of sequence 0, of sequence 1, ..."""
    prompt_lens: torch.Tensor
    """[S] int64."""
    response_lens: torch.Tensor
    """[S] int64, each at least 1."""
    rollout_log_probs: torch.Tensor
    """[R] float32: vLLM's log-probs."""
    finished: torch.Tensor
    """[S] bool: the response ended by itself."""
    scores: torch.Tensor | None = None
    """[S] float32: what the reward function gave."""
    old_log_probs: torch.Tensor | None = None
    """[R] float32: the actor's log-probs before the update."""
    ref_log_probs: torch.Tensor | None = None
    """[R] float32: the reference's log-probs."""
    values: torch.Tensor | None = None
    """[R] float32: the critic's values before the update."""
    advantages: torch.Tensor | None = None
    """[R] float32, whitened."""
    returns: torch.Tensor | None = None
    """[R] float32: targets of the critic."""
    shared: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What has been worked out from tokens and lengths alone, by what it is. Batches of the same sequences in the same
    order have one, whatever their per-token fields: copies of with_fields, and repeated calls of select."""

    @property
    def num_sequences(self) -> int:
        return len(self.prompt_lens)

    @property
    def seq_lens(self) -> torch.Tensor:
        """[S] int64: prompt + response."""
        return self.prompt_lens + self.response_lens

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, from tokens and lengths alone; worked out the first time that these sequences are asked
        for it, and kept as long as the batch that they came in."""
        if what not in self.shared:
            self.shared[what] = make()
        kept: T = self.shared[what]
        return kept

    def responses(self) -> list[list[int]]:
        """Each sequence's response tokens."""
        return [
            seq[prompt_len:].tolist()
            for seq, prompt_len in zip(
                self.tokens.split(self.seq_lens.tolist()), self.prompt_lens.tolist(), strict=True
            )
        ]

    def with_fields(self, **fields: torch.Tensor) -> RaggedBatch:
        """A copy with per-token or per-sequence results filled in; lengths are checked."""
        for name, value in fields.items():
            want = self.num_sequences if name == "scores" else int(self.response_lens.sum())
            assert value.shape == (want,), f"{name}: shape {tuple(value.shape)}, expected ({want},)"
        return replace(self, **fields)  # type: ignore[arg-type]

    def select(self, indices: Sequence[int] | torch.Tensor) -> RaggedBatch:
        """The batch of these sequences, in this order."""
        idx = torch.as_tensor(indices, dtype=torch.int64)
        token_idx = ragged_indices(self.seq_lens, idx)
        response_idx = ragged_indices(self.response_lens, idx)
        per_token = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "advantages", "returns")
        out: dict[str, torch.Tensor | None] = {}
        for name in per_token:
            value = getattr(self, name)
            out[name] = None if value is None else value[response_idx]
        return RaggedBatch(
            tokens=self.tokens[token_idx],
            prompt_lens=self.prompt_lens[idx],
            response_lens=self.response_lens[idx],
            finished=self.finished[idx],
            scores=None if self.scores is None else self.scores[idx],
            shared=self.once(("select", tuple(idx.tolist())), dict),
            **out,  # type: ignore[arg-type]
        )


def ragged_indices(lens: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Positions of the segments `which` [K], in that order, in a vector of segments of `lens` [S] end to end."""
    starts = torch.cumsum(lens, 0) - lens
    picked = lens[which]
    out_starts = torch.cumsum(picked, 0) - picked
    total = int(picked.sum())
    return torch.arange(total) + torch.repeat_interleave(starts[which] - out_starts, picked)


def build_batch(prompts: Sequence[Prompt], generations: Sequence[Generation]) -> RaggedBatch:
    """Joins prompt i and generation i into sequence i."""
    assert len(prompts) == len(generations)
    tokens = [t for p, g in zip(prompts, generations, strict=True) for t in (*p.token_ids, *g.token_ids)]
    return RaggedBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        prompt_lens=torch.tensor([len(p.token_ids) for p in prompts], dtype=torch.int64),
        response_lens=torch.tensor([len(g.token_ids) for g in generations], dtype=torch.int64),
        rollout_log_probs=torch.tensor([x for g in generations for x in g.log_probs], dtype=torch.float32),
        finished=torch.tensor([g.finished for g in generations], dtype=torch.bool),
    )


def pad_responses(values: torch.Tensor, response_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R] ragged to ([S, max response] zero-padded, [S, max response] bool mask): the form algorithms/ works in."""
    width = int(response_lens.max())
    mask = torch.arange(width)[None, :] < response_lens[:, None]
    padded = torch.zeros(mask.shape, dtype=values.dtype)
    padded[mask] = values
    return padded, mask
