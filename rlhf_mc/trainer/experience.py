"""The phases that make a step's batch: rollout, reward, scoring, advantages. Each takes a batch and returns it
with more fields filled in; none of them changes a weight. Updates are in update.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mc.algorithms.advantages import ADVANTAGE_ESTIMATORS, token_rewards
from rlhf_mc.algorithms.kl import kl_estimate, mean_sequence_kl
from rlhf_mc.algorithms.masked import masked_sum, masked_whiten
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import AlgorithmConfig
from rlhf_mc.data.balance import Cost, Limit, assign_to_replicas
from rlhf_mc.data.batch import Generation, Prompt, RaggedBatch, pad_responses
from rlhf_mc.models.engine import Head, ModelEngine
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.heads import log_probs, values
from rlhf_mc.observability.metrics import summarize, summarize_lengths
from rlhf_mc.rewards.manager import PendingScores, RewardManager
from rlhf_mc.rollout.vllm_engine import RolloutEngine, Sampling
from rlhf_mc.topology.consensus import gather_objects, on_every_rank
from rlhf_mc.trainer.logprob_check import Difference
from rlhf_mc.trainer.micro_batching import my_micro_batches

TRAINING, VALIDATION = 0, 1
"""Streams of sampling seeds: validation never shares random numbers with training."""


def sampling_seeds(seed: int, stream: int, step: int, prompts: Sequence[Prompt], n: int) -> list[int]:
    """One seed per response, a function of (seed, stream, step, prompt, which of its n responses) alone:
    neither the number of ranks nor a resume changes it. Prompt-major, as repeat_prompts."""
    return [
        int(np.random.SeedSequence((seed, stream, step, prompt.index, k)).generate_state(1, np.uint64)[0] >> 1)
        for prompt in prompts
        for k in range(n)
    ]


def repeat_prompts(prompts: Sequence[Prompt], n: int) -> list[Prompt]:
    """Each prompt n times in a row."""
    return [prompt for prompt in prompts for _ in range(n)]


def generate(
    engine: RolloutEngine, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
) -> list[Generation]:
    """One response for each prompt given, on every rank."""
    return engine.generate([p.token_ids for p in prompts], seeds, sampling)


def submit_responses(
    rewards: RewardManager,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    responses: Sequence[list[int]],
) -> PendingScores:
    """Sends this rank's share of the responses to its reward workers: the rows are dealt out over the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    texts = tokenizer.batch_decode(list(responses[rank::world]), skip_special_tokens=True)
    return rewards.submit(prompts[rank::world], texts)


def collect_scores(pending: PendingScores, num_rows: int) -> list[dict[str, float]]:
    """Each response's scores ("score" and what else the reward function gives), on every rank: what all ranks have
    submitted, num_rows in all. A rank whose reward function fails makes all ranks raise."""
    world = dist.get_world_size()
    out: list[dict[str, float]] = [{}] * num_rows
    for r, part in enumerate(gather_objects(on_every_rank(pending.result))):
        out[r::world] = part
    return out


def log_prob_head(vocab_size: int, temperature: float) -> Head:
    """For ModelEngine.score: the log-prob of each response token."""

    def head(model: object, states: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        return log_probs(model, states, micro.targets, vocab_size, temperature)

    return head


def value_head(model: object, states: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """For ModelEngine.score: the value of each state."""
    return values(model, states)


def score_tokens(engine: ModelEngine, batch: RaggedBatch, head: Head, limit: Limit) -> torch.Tensor:
    """The head's number for every response token of the batch: [R] float32, on every rank."""
    return engine.score(batch, my_micro_batches(engine, batch, limit), head)


def score_sequences(engine: ModelEngine, batch: RaggedBatch, limit: Limit) -> torch.Tensor:
    """A reward model's score of each sequence, its value at the last token: [S] float32, on every rank."""
    return engine.score(batch, my_micro_batches(engine, batch, limit), value_head, per_sequence=True)


def compute_advantages(
    batch: RaggedBatch, algorithm: AlgorithmConfig, kl_coef: float
) -> tuple[RaggedBatch, dict[str, float], float]:
    """KL-shaped token rewards, then advantages (whitened over the whole batch) and returns.

    Every rank holds the whole batch, so every rank computes the same numbers without communication.
    Returns the batch, metrics, and the KL that the controller sees (0 without a KL term)."""
    assert batch.scores is not None and batch.values is not None and batch.old_log_probs is not None
    padded_values, mask = pad_responses(batch.values, batch.response_lens)
    kl: torch.Tensor | None = None
    sequence_kl = 0.0
    if algorithm.use_kl_in_reward:
        assert batch.ref_log_probs is not None
        token_kl = kl_estimate(batch.old_log_probs, batch.ref_log_probs, algorithm.kl_penalty)
        kl, _ = pad_responses(token_kl, batch.response_lens)
        sequence_kl = mean_sequence_kl(kl, mask)
    rewards = token_rewards(batch.scores, kl, kl_coef, mask)
    estimator = ADVANTAGE_ESTIMATORS[algorithm.adv_estimator]
    advantages, returns = estimator(rewards, padded_values, mask, algorithm.gamma, algorithm.lam)
    whitened = masked_whiten(advantages, mask)[mask]
    metrics = {
        **summarize("critic/score", batch.scores),
        **summarize("critic/rewards", masked_sum(rewards, mask, dim=1)),
        **summarize("critic/advantages", whitened),
        **summarize("critic/returns", returns[mask]),
        **summarize("critic/values", batch.values),
        "critic/vf_explained_var": _explained_variance(batch.values, returns[mask]),
    }
    batch = batch.with_fields(advantages=whitened, returns=returns[mask])
    if algorithm.use_kl_in_reward:
        metrics["actor/reward_kl_penalty"] = sequence_kl
        metrics["actor/reward_kl_penalty_coeff"] = kl_coef
    return batch, metrics, sequence_kl


def check_kl(kl: float, batch: RaggedBatch, step: int) -> None:
    """Raise UserError for a KL that is not finite: an adaptive coefficient would keep it. Every rank has the same
    batch, so all of them raise."""
    if math.isfinite(kl):
        return
    assert batch.old_log_probs is not None and batch.ref_log_probs is not None
    old, ref = (int((~x.isfinite()).sum()) for x in (batch.old_log_probs, batch.ref_log_probs))
    raise UserError(
        f"algorithm.kl_ctrl.type adaptive: the KL of step {step} is {kl}; of {len(batch.old_log_probs)} tokens the "
        f"actor's log-probs are not finite for {old} and the reference's for {ref}"
    )


def _explained_variance(predicted: torch.Tensor, actual: torch.Tensor) -> float:
    """1 - Var(actual - predicted) / Var(actual); 0 where the actual values are all the same."""
    variance = actual.double().var(correction=0)
    residual = (actual - predicted).double().var(correction=0)
    return float(1.0 - residual / variance) if variance > 0 else 0.0


def balance_metrics(seq_lens: Sequence[int], num_replicas: int, cost: Cost) -> dict[str, float]:
    """Tokens per data-parallel replica: dealt out in order, and as balance.py spreads them by cost; and the share of
    the replicas' time in which they wait for the one with most to do."""
    dealt = [sum(seq_lens[r::num_replicas]) for r in range(num_replicas)]
    parts = assign_to_replicas(seq_lens, num_replicas, cost)
    balanced = [sum(seq_lens[i] for i in part) for part in parts]
    costs = [sum(cost(seq_lens[i]) for i in part) for part in parts]
    return {
        "global_seqlen/min": min(dealt),
        "global_seqlen/max": max(dealt),
        "global_seqlen/mean": sum(dealt) / num_replicas,
        "global_seqlen/minmax_diff": max(dealt) - min(dealt),
        "global_seqlen/balanced_min": min(balanced),
        "global_seqlen/balanced_max": max(balanced),
        "global_seqlen/idle_share": 1.0 - sum(costs) / (num_replicas * max(costs)),
    }


def rollout_metrics(batch: RaggedBatch, max_prompt_length: int, max_response_length: int) -> dict[str, float]:
    """Lengths, and how far vLLM's log-probs are from the trainer's on the sampled tokens."""
    assert batch.old_log_probs is not None
    probs_diff = (batch.old_log_probs.exp() - batch.rollout_log_probs.exp()).abs().double()
    difference = Difference.of(batch)
    return {
        **summarize_lengths("response_length", batch.response_lens, max_response_length),
        **summarize_lengths("prompt_length", batch.prompt_lens, max_prompt_length),
        "training/rollout_probs_diff_max": float(probs_diff.max()),
        "training/rollout_probs_diff_mean": float(probs_diff.mean()),
        "training/rollout_probs_diff_std": float(probs_diff.std(correction=0)),
        "training/rollout_logprobs_diff_mean": difference.mean,
        "training/rollout_logprobs_diff_p99": difference.p99,
        "training/rollout_logprobs_diff_max": difference.max,
    }
