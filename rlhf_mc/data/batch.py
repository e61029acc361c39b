"""The ragged batch that the phases of a step pass on: token vectors end to end, and lengths.

Nothing is padded. Every rank holds the whole batch (token ids and one float per token: small
compared with the weights), so that computing on it needs no communication.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt, ready to generate from."""

    index: int
    """Row of the dataset (over all its files, after filtering). It names the row in messages and
    seeds its sampling."""
    token_ids: np.ndarray
    """[tokens] int32: the prompt after the chat template."""
    data_source: str
    """The name by which the reward rule is chosen and validation reports accuracy."""
    ground_truth: Any
    """The reward function's argument of this name."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """The reward function's argument of this name."""
    file: str = ""
    """The setting and the file that the row is from, for messages."""
    row: int = 0
    """Row of that file."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The prompt as chat messages, before the template; empty where load_prompts does not keep
    them."""
    agent_name: str | None = None
    """The row's column of this name, with tools."""
    teacher_ids: np.ndarray | None = None
    """[tokens] int32: the prompt of the row's teacher; None: token_ids."""

    @property
    def where(self) -> str:
        """The row with its file, for messages."""
        return f"{self.file}, row {self.row}" if self.file else f"row {self.index}"


OBSERVED = math.inf
"""In place of the log-prob of a token that the model has not drawn: one of an observation. No drawn
token has it."""
CONTEXT_START = 2.0**100
"""OBSERVED, of the first token of a new context: the conversation's history was rewritten, and the
tokens after it attend to none before it."""


@dataclass(frozen=True)
class Generation:
    """One response of a rollout engine. With an environment it is a conversation: drawn tokens and
    observations."""

    token_ids: list[int]
    """Sampled tokens, the end-of-sequence token included where one was sampled, and those of
    observations."""
    log_probs: list[float]
    """The engine's log-prob of each sampled token at the sampling temperature; OBSERVED or
    CONTEXT_START of the others."""
    finished: bool
    """True: ended with an end token, or by its environment; False: truncated at
    max_response_length, or not ended yet."""
    experts: np.ndarray | None = field(default=None, compare=False, repr=False)
    """The experts chosen for each token of prompt and response before the last drawn one, in the
    layers that have experts: [tokens, layers, k] uint8, or uint16 of more than 256. On the ranks of
    the engine alone, and with router replay."""

    @property
    def num_drawn(self) -> int:
        """Number of tokens that the model has sampled."""
        num_observed = sum(map(self.log_probs.count, (OBSERVED, CONTEXT_START)))
        return len(self.log_probs) - num_observed

    def context_start(self, end: int | None = None) -> int:
        """Return the place of the first token of the last context that begins before `end` (None:
        of all); 0 for the first one, which begins with the prompt."""
        if CONTEXT_START not in self.log_probs:
            return 0
        starts = (i for i, x in enumerate(self.log_probs[:end]) if x == CONTEXT_START)
        return max(starts, default=0)


NOTHING = Generation([], [], finished=False)
"""A response of which nothing is generated yet."""


@dataclass(frozen=True, eq=False)
class Responses:
    """S responses of the rollout engine with R tokens, as vectors: as Python objects a million
    tokens take a tenth of a second at each step from the engine to the batch."""

    lens: np.ndarray
    """[S] int64: tokens of each, at least 1; 0 of one that has not begun."""
    tokens: np.ndarray
    """[R] int32: their tokens, end to end."""
    log_probs: np.ndarray
    """[R] float32: as Generation has them."""
    finished: np.ndarray
    """[S] bool: as Generation has it."""

    @functools.cached_property
    def is_sampled(self) -> np.ndarray:
        """[R] bool: tokens that the model has sampled."""
        return ~(self.log_probs >= CONTEXT_START)

    @property
    def num_drawn(self) -> int:
        """Number of tokens that the model has sampled."""
        return int(self.is_sampled.sum())

    @staticmethod
    def of(generations: Sequence[Generation]) -> Responses:
        """Return these responses."""
        return Responses(
            np.array([len(g.token_ids) for g in generations], dtype=np.int64),
            np.array([t for g in generations for t in g.token_ids], dtype=np.int32),
            np.array([x for g in generations for x in g.log_probs], dtype=np.float32),
            np.array([g.finished for g in generations], dtype=np.bool_),
        )

    def __len__(self) -> int:
        return len(self.lens)

    def token_ids(self) -> list[list[int]]:
        """Return the tokens of each response."""
        ends = self.lens.cumsum().tolist()
        tokens = self.tokens.tolist()
        return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def generations(self) -> list[Generation]:
        """Return the responses one by one."""
        ends = self.lens.cumsum().tolist()
        log_probs = self.log_probs.tolist()
        parts = [log_probs[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return [
            Generation(*row)
            for row in zip(self.token_ids(), parts, self.finished.tolist(), strict=True)
        ]

    def select(self, indices: np.ndarray) -> Responses:
        """Return these responses, in this order."""
        source = ragged_indices(self.lens, indices)
        return Responses(
            self.lens[indices], self.tokens[source], self.log_probs[source], self.finished[indices]
        )


_PER_SEQUENCE = (
    "prompt_lens",
    "response_lens",
    "observation_lens",
    "finished",
    "numbers",
    "scores",
    "accuracies",
    "decoupled_scores",
    "greedy_scores",
    "sample_mask",
)
"""Fields of RaggedBatch with one entry per sequence."""
_NUMBER_BITS = 48
"""Bits of a response's number; those above it are the index of the context."""
_PER_TOKEN = ("tokens", "response_mask", "context_starts")
"""Fields with one entry per token."""


@dataclass(frozen=True)
class RaggedBatch:
    """S sequences, each prompt + response, end to end in one vector of T tokens.

    Per-token fields have one entry per *drawn* response token, end to end: [R]. So no phase needs a
    mask: the tokens of observations are in `tokens` alone. A field is None until the phase that
    computes it has run.
    """

    tokens: torch.Tensor
    """[T] int32: prompt and response of sequence 0, of sequence 1, ..."""
    prompt_lens: torch.Tensor
    """[S] int64."""
    response_lens: torch.Tensor
    """[S] int64: drawn tokens, each at least 1."""
    rollout_log_probs: torch.Tensor
    """[R] float32: the engine's log-probs."""
    finished: torch.Tensor
    """[S] bool: the response ended with an end token, or by its environment."""
    observation_lens: torch.Tensor | None = None
    """[S] int64: tokens of observations in the response; None: 0."""
    response_mask: torch.Tensor | None = None
    """[T] bool: tokens that the model has drawn; None: all after the prompts."""
    context_starts: torch.Tensor | None = None
    """[T] bool: tokens with which a context begins whose prompt is all that precedes its first
    drawn token; None: there is none."""
    numbers: torch.Tensor | None = None
    """[S] int64: of each response in the run. Router replay finds the experts that were chosen for
    it by its number."""
    token_ages: torch.Tensor | None = None
    """[R] int32: weight updates since the token was drawn, 0 where this step's weights drew it;
    None: all are 0."""
    scores: torch.Tensor | None = None
    """[S] float32: by the reward function or the reward model."""
    accuracies: torch.Tensor | None = None
    """[S] float32: "acc" of the reward function or else its score; at least 1: a right response."""
    decoupled_scores: torch.Tensor | None = None
    """[S] float32: the parts of the score, each normalised in its group, summed; None: not
    needed."""
    greedy_scores: torch.Tensor | None = None
    """[S] float32: scores of the responses to the same prompts at temperature 0."""
    sample_mask: torch.Tensor | None = None
    """[S] bool: responses that are trained on; None: all."""
    old_log_probs: torch.Tensor | None = None
    """[R] float32: the actor's log-probs before the update. Where the update computes them, those
    of responses that are not trained on are the engine's."""
    is_weights: torch.Tensor | None = None
    """[R] float32: importance weights of the policy loss; None: 1."""
    loss_mask: torch.Tensor | None = None
    """[R] bool: tokens of the actor's loss; None: all."""
    ref_log_probs: torch.Tensor | None = None
    """[R] float32: the reference's log-probs."""
    teacher_log_probs: torch.Tensor | None = None
    """[R] float32: the teacher's log-probs."""
    values: torch.Tensor | None = None
    """[R] float32: the critic's values before the update."""
    advantages: torch.Tensor | None = None
    """[R] float32."""
    returns: torch.Tensor | None = None
    """[R] float32: targets of the critic."""
    turns: torch.Tensor | None = None
    """[R] int64: index of the token's turn in its response; None without an environment."""
    turn_rewards: torch.Tensor | None = None
    """[R] float32: the environment's reward of each turn before the last, on the turn's last token,
    0 elsewhere; None: all of the score is on the response's last token."""

    @property
    def num_sequences(self) -> int:
        return len(self.prompt_lens)

    @functools.cached_property
    def seq_lens(self) -> torch.Tensor:
        """[S] int64: prompt + response, observations included."""
        return self.prompt_lens + self.conversation_lens

    @functools.cached_property
    def prompt_groups(self) -> np.ndarray:
        """[S] int64: for each sequence the first one with an equal prompt."""
        tokens = self.tokens.numpy()
        starts = (self.seq_lens.cumsum(0) - self.seq_lens).tolist()
        first: dict[bytes, int] = {}
        return np.array(
            [
                first.setdefault(tokens[start : start + length].tobytes(), i)
                for i, (start, length) in enumerate(
                    zip(starts, self.prompt_lens.tolist(), strict=True)
                )
            ],
            dtype=np.int64,
        )

    @property
    def conversation_lens(self) -> torch.Tensor:
        """[S] int64: tokens of the response, observations included, at most
        data.max_response_length."""
        return (
            self.response_lens
            if self.observation_lens is None
            else self.response_lens + self.observation_lens
        )

    @property
    def last_drawn(self) -> torch.Tensor:
        """[S] int64: place of each sequence's last drawn token in the sequence. An observation may
        follow it."""
        if self.response_mask is None:
            return self.seq_lens - 1
        positions = self.response_mask.nonzero().flatten()[self.response_lens.cumsum(0) - 1]
        return positions - (self.seq_lens.cumsum(0) - self.seq_lens)

    def responses(self) -> list[list[int]]:
        """Return the response tokens of each sequence, observations included."""
        tokens = self.tokens.tolist()
        ends = self.seq_lens.cumsum(0)
        starts = (ends - self.conversation_lens).tolist()
        return [tokens[start:end] for start, end in zip(starts, ends.tolist(), strict=True)]

    @property
    def drawn_tokens(self) -> torch.Tensor:
        """[R] int32: the tokens that the model has sampled."""
        return self.tokens[self.drawn_mask]

    @property
    def drawn_mask(self) -> torch.Tensor:
        """[T] bool: tokens that the model has sampled."""
        mask = _with_mask(self).response_mask
        assert mask is not None
        return mask

    @functools.cached_property
    def trained_rows(self) -> torch.Tensor:
        """[K] int64: the sequences that are trained on."""
        mask = self.sample_mask
        return torch.arange(self.num_sequences) if mask is None else mask.nonzero().flatten()

    def trained(self) -> RaggedBatch:
        """Return the batch of the sequences that are trained on."""
        all_are = len(self.trained_rows) == self.num_sequences
        return self if all_are else self.select(self.trained_rows)

    def contexts(self) -> RaggedBatch:
        """Return the batch as models read it: its sequences are the contexts of these. The tokens
        of a context in context_starts before its first drawn one are its prompt. Per-token fields
        stay as they are; of those per sequence it has the lengths and the numbers alone, and all
        are finished."""
        if self.context_starts is None or not self.context_starts.any():
            return self
        ends = self.seq_lens.cumsum(0).numpy()
        firsts = ends - self.seq_lens.numpy()
        starts = np.union1d(firsts, self.context_starts.nonzero().flatten())
        is_drawn = self.drawn_mask.numpy()
        drawn = np.flatnonzero(is_drawn)
        prompt_lens = drawn[np.searchsorted(drawn, starts)] - starts
        has_prompt = ~self.context_starts.numpy()[firsts]
        prompt_lens[np.searchsorted(starts, firsts[has_prompt])] = self.prompt_lens[has_prompt]
        lens = np.diff(starts, append=ends[-1:])
        num_drawn = np.add.reduceat(is_drawn.astype(np.int64), starts)
        rest = dict.fromkeys(_PER_SEQUENCE)
        rest |= {
            "prompt_lens": torch.from_numpy(prompt_lens),
            "response_lens": torch.from_numpy(num_drawn),
            "observation_lens": torch.from_numpy(lens - prompt_lens - num_drawn),
            "finished": torch.ones(len(starts), dtype=torch.bool),
            "context_starts": None,
        }
        if self.numbers is not None:
            row = np.searchsorted(ends, starts, side="right")
            nth = np.arange(len(starts)) - np.searchsorted(row, row)
            rest["numbers"] = self.numbers[row] + (torch.from_numpy(nth) << _NUMBER_BITS)
        return replace(self, **rest)  # type: ignore[arg-type]

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, of the tokens that are trained on, among all tokens: [R], 0 of others."""
        if len(x) == len(self.rollout_log_probs):
            return x
        rows = ragged_indices(self.response_lens.numpy(), self.trained_rows.numpy())
        whole = x.new_zeros(len(self.rollout_log_probs))
        return whole.index_put((torch.from_numpy(rows),), x)

    def with_fields(self, **fields: torch.Tensor) -> RaggedBatch:
        """Return a copy with these per-token [R] or per-sequence [S] fields. Their lengths are
        checked."""
        for name, value in fields.items():
            want = self.num_sequences if name in _PER_SEQUENCE else int(self.response_lens.sum())
            assert value.shape == (want,), f"{name}: shape {tuple(value.shape)}, expected ({want},)"
        return replace(self, **fields)

    def select(self, indices: Sequence[int] | torch.Tensor) -> RaggedBatch:
        """Return the batch of these sequences, in this order."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        positions = torch.from_numpy(ragged_indices(self.response_lens.numpy(), rows.numpy()))
        index_of = dict.fromkeys(_PER_SEQUENCE, rows)
        of_sequences = torch.from_numpy(ragged_indices(self.seq_lens.numpy(), rows.numpy()))
        index_of |= dict.fromkeys(_PER_TOKEN, of_sequences)
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return RaggedBatch(
            **{
                name: None
                if column is None
                else column.index_select(0, index_of.get(name, positions))
                for name, column in columns.items()
            }  # type: ignore[arg-type]
        )


def with_prompts(batch: RaggedBatch, prompts: Sequence[np.ndarray]) -> RaggedBatch:
    """Return the same responses after other prompts: [tokens] int32 of each sequence."""
    count = len(prompts)
    lens = np.array([len(prompt) for prompt in prompts])
    # All new prompts, then prompts and responses: response i is segment count + 2 i + 1.
    old_lens = torch.stack([batch.prompt_lens, batch.conversation_lens], 1).numpy().ravel()
    order = np.stack([np.arange(count), count + 2 * np.arange(count) + 1], axis=1).ravel()
    source = torch.from_numpy(ragged_indices(np.concatenate([lens, old_lens]), order))
    new = torch.from_numpy(np.concatenate(prompts))
    mask = batch.response_mask
    starts = batch.context_starts
    return replace(
        batch,
        tokens=torch.cat([new, batch.tokens])[source],
        prompt_lens=torch.from_numpy(lens),
        response_mask=None if mask is None else torch.cat([new < 0, mask])[source],
        context_starts=None if starts is None else torch.cat([new < 0, starts])[source],
    )


def concatenate(batches: Sequence[RaggedBatch]) -> RaggedBatch:
    """Return the sequences of all batches, end to end. The batches have the same fields, but for
    the mask and the starts of contexts."""
    if any(batch.response_mask is not None for batch in batches):
        batches = [_with_mask(batch) for batch in batches]
    if any(batch.context_starts is not None for batch in batches):
        none = [torch.zeros_like(batch.drawn_mask) for batch in batches]
        batches = [
            batch if batch.context_starts is not None else replace(batch, context_starts=zeros)
            for batch, zeros in zip(batches, none, strict=True)
        ]
    columns = {
        field.name: [getattr(batch, field.name) for batch in batches]
        for field in fields(RaggedBatch)
    }
    joined = {
        name: None if values[0] is None else torch.cat(values) for name, values in columns.items()
    }
    return RaggedBatch(**joined)  # type: ignore[arg-type]


def _with_mask(batch: RaggedBatch) -> RaggedBatch:
    """Return the batch with response_mask and observation_lens."""
    if batch.response_mask is not None:
        return batch
    lens = torch.stack([batch.prompt_lens, batch.response_lens], dim=1).flatten()
    mask = torch.tensor([False, True]).repeat(batch.num_sequences).repeat_interleave(lens)
    return replace(
        batch, response_mask=mask, observation_lens=torch.zeros_like(batch.response_lens)
    )


def ragged_indices(lens: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Return the positions of the segments `which` [K], in that order, in a vector of segments of
    `lens` [S]."""
    # By numpy: on so few numbers torch takes twice as long.
    picked = lens[which]
    shifts = (lens.cumsum() - lens)[which] - (picked.cumsum() - picked)
    return np.arange(picked.sum()) + np.repeat(shifts, picked)


def build_batch(
    prompts: Sequence[Prompt], responses: Responses, of_agents: bool = False
) -> RaggedBatch:
    """Return the batch whose sequence i is prompt i and response i. of_agents: each is a context,
    whose prompt is all that precedes the first drawn token."""
    count = len(prompts)
    assert count == len(responses)
    prompt_lens = np.array([len(p.token_ids) for p in prompts], dtype=np.int64)
    # All prompts and then all responses: segment i is prompt i, segment count + i response i.
    lens = np.concatenate([prompt_lens, responses.lens])
    tokens = np.concatenate([*(p.token_ids for p in prompts), responses.tokens])
    order = np.arange(2 * count).reshape(2, count).T.ravel()
    source = ragged_indices(lens, order)
    batch = RaggedBatch(
        tokens=torch.from_numpy(tokens[source]),
        prompt_lens=torch.from_numpy(prompt_lens),
        response_lens=torch.from_numpy(responses.lens),
        rollout_log_probs=torch.from_numpy(responses.log_probs),
        finished=torch.from_numpy(responses.finished),
    )
    if responses.is_sampled.all():
        return batch
    num_drawn = np.bincount(
        np.repeat(np.arange(count), responses.lens)[responses.is_sampled], minlength=count
    )
    of_prompts = np.zeros(prompt_lens.sum(), np.bool_)
    mask = np.concatenate([of_prompts, responses.is_sampled])[source]
    of_prompts[prompt_lens.cumsum() - prompt_lens] = of_agents
    starts = np.concatenate([of_prompts, responses.log_probs == CONTEXT_START])
    return replace(
        batch,
        response_lens=torch.from_numpy(num_drawn),
        rollout_log_probs=torch.from_numpy(responses.log_probs[responses.is_sampled]),
        observation_lens=torch.from_numpy(responses.lens - num_drawn),
        response_mask=torch.from_numpy(mask),
        context_starts=torch.from_numpy(starts[source]) if starts.any() else None,
    )
