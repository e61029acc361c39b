"""Scores of responses: by the reward workers of all ranks, or by forward passes of a model. No weight changes here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mc.data.balance import Limit
from rlhf_mc.data.batch import Prompt, RaggedBatch
from rlhf_mc.models.engine import Head, ModelEngine
from rlhf_mc.models.forward import MicroBatch, PackingCache
from rlhf_mc.models.heads import log_probs, values
from rlhf_mc.observability.phase_work import count
from rlhf_mc.rewards.manager import PendingScores, RewardManager
from rlhf_mc.rewards.results import Score
from rlhf_mc.topology.consensus import gather_results, sum_over_ranks
from rlhf_mc.trainer.micro_batching import my_micro_batches


def submit_responses(
    rewards: RewardManager,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    responses: Sequence[list[int]],
    training: bool = True,
) -> PendingScores:
    """Submit this rank's share of the responses to its reward workers. Responses are assigned to ranks round-robin.
    training: see RewardManager.submit."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    mine = prompts[rank::world]
    count(responses=len(mine))
    texts = tokenizer.batch_decode(list(responses[rank::world]), skip_special_tokens=True)
    asked = None
    if rewards.needs_prompts:
        asked = tokenizer.batch_decode([prompt.token_ids for prompt in mine], skip_special_tokens=True)
    return rewards.submit(mine, texts, training, asked)


def collect_scores(pending: PendingScores, num_rows: int) -> list[Score]:
    """Return the scores of all num_rows responses on every rank. Raise UserError on all ranks if a response on any
    cannot be scored. Every rank must call it."""
    world = dist.get_world_size()
    out = [Score(0.0)] * num_rows
    # Tuples are pickled four times as fast.
    for r, part in enumerate(gather_results(lambda: [score.as_tuple() for score in pending.result()])):
        out[r::world] = [Score(*fields) for fields in part]
    return pending.names.limit(out)


def log_prob_head(vocab_size: int, temperature: float) -> Head:
    """Return the head of `my_token_scores` that gives the log-prob of each response token."""

    def head(model: object, states: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        return log_probs(model, states, micro.targets, vocab_size, temperature)

    return head


def value_head(model: object, states: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Return the value of each state: the head of `my_token_scores` for a critic."""
    return values(model, states)


def score_tokens(
    engine: ModelEngine, batch: RaggedBatch, head: Head, limit: Limit, packing: PackingCache | None = None
) -> torch.Tensor:
    """Return the head's number for every response token of the batch: [R] float32, on every rank. Every rank must call
    it. A step, which makes several passes, sums the parts of all of them at once."""
    return sum_over_ranks(my_token_scores(engine, batch, head, limit, packing))


def my_token_scores(
    engine: ModelEngine, batch: RaggedBatch, head: Head, limit: Limit, packing: PackingCache | None = None
) -> torch.Tensor:
    """Return what this rank has of `score_tokens`, on the device: [R] float32, 0 for the tokens of other ranks."""
    return engine.my_scores(batch, my_micro_batches(engine, batch, limit, packing), head, packing=packing)


def score_sequences(
    engine: ModelEngine, batch: RaggedBatch, limit: Limit, packing: PackingCache | None = None
) -> torch.Tensor:
    """Return a reward model's score of each sequence, its value at the last token: [S] float32, on every rank."""
    micro_batches = my_micro_batches(engine, batch, limit, packing)
    return engine.score(batch, micro_batches, value_head, per_sequence=True, packing=packing)
