"""The advantage phase: the functions of algorithms/ on the step's batch. Every rank holds the whole
batch and computes the same numbers without communication.
"""

from __future__ import annotations

import math

import torch

from rlhf_mc.algorithms.estimators import EstimatorFunction, EstimatorInputs, token_rewards
from rlhf_mc.algorithms.kl import kl_estimate, mean_sequence_kl
from rlhf_mc.algorithms.rollout_correction import (
    accepted_tokens,
    importance_weights,
    mismatch_metrics,
)
from rlhf_mc.config.algorithm_schema import RolloutCorrectionConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import estimator_needs
from rlhf_mc.config.schema import AlgorithmConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.observability.metrics import summarize
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import StepState


def advantages_and_returns(
    batch: RaggedBatch,
    algorithm: AlgorithmConfig,
    kl_coef: float,
    responses_per_prompt: int,
    estimator: EstimatorFunction,
) -> tuple[RaggedBatch, dict[str, float], float]:
    """Compute token rewards with the KL penalty, then advantages and, where the estimator defines
    them, returns: of the responses that are trained on, 0 of others.

    Return the batch with both, metrics, and the KL that the controller sees, in nats (0 where it
    sees none)."""
    whole, batch = batch, batch.trained()
    assert batch.scores is not None
    if not batch.num_sequences:
        zeros = torch.zeros_like(whole.rollout_log_probs)
        return whole.with_fields(advantages=zeros, returns=zeros), {}, 0.0
    kl: torch.Tensor | None = None
    sequence_kl = 0.0
    if algorithm.use_kl_in_reward or algorithm.kl_ctrl.type == "adaptive":
        assert batch.old_log_probs is not None and batch.ref_log_probs is not None
        kl = kl_estimate(batch.old_log_probs, batch.ref_log_probs, algorithm.kl_penalty)
        sequence_kl = mean_sequence_kl(kl, batch.response_lens)
    # Equal scores of a group stay equal: they are not summed from parts.
    needs = estimator_needs(algorithm)
    turn_rewards = None if needs.group and not needs.turns else batch.turn_rewards
    penalty = kl if algorithm.use_kl_in_reward else None
    rewards = token_rewards(batch.scores, penalty, kl_coef, batch.response_lens, turn_rewards)
    inputs = EstimatorInputs(
        rewards=rewards,
        response_lens=batch.response_lens,
        scores=batch.scores,
        group=whole.trained_rows // responses_per_prompt,
        values=batch.values,
        turns=batch.turns,
        greedy_scores=batch.greedy_scores,
        decoupled_scores=batch.decoupled_scores,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        gae_lambda_value=algorithm.gae_lambda_value,
        gae_lambda_policy=algorithm.gae_lambda_policy,
        length_adaptive_alpha=algorithm.length_adaptive_alpha,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
    )
    estimate = estimator(inputs)
    metrics = {
        **summarize("critic/score", batch.scores),
        **summarize(
            "critic/rewards", torch.segment_reduce(rewards, "sum", lengths=batch.response_lens)
        ),
        **summarize("critic/advantages", estimate.advantages),
    }
    whole = whole.with_fields(advantages=whole.spread(estimate.advantages))
    if estimate.returns is not None:
        metrics |= summarize("critic/returns", estimate.returns)
        whole = whole.with_fields(returns=whole.spread(estimate.returns))
        if batch.values is not None:
            metrics |= summarize("critic/values", batch.values)
            metrics["critic/vf_explained_var"] = _explained_variance(batch.values, estimate.returns)
    if batch.greedy_scores is not None:
        metrics |= summarize("critic/greedy_score", batch.greedy_scores)
    if algorithm.use_kl_in_reward:
        metrics["actor/reward_kl_penalty"] = sequence_kl
        metrics["actor/reward_kl_penalty_coeff"] = kl_coef
    elif algorithm.kl_ctrl.type == "adaptive":
        metrics["actor/controlled_kl"] = sequence_kl
    return whole, metrics, sequence_kl


def check_kl(kl: float, batch: RaggedBatch, step: int) -> None:
    """Raise UserError if the KL is not finite: an adaptive coefficient would stay non-finite. All
    ranks raise, since they have the same batch."""
    if math.isfinite(kl):
        return
    assert batch.old_log_probs is not None and batch.ref_log_probs is not None
    old, ref = (int((~x.isfinite()).sum()) for x in (batch.old_log_probs, batch.ref_log_probs))
    raise UserError(
        f"algorithm.kl_ctrl.type adaptive: the KL of step {step} is {kl}; of "
        f"{len(batch.old_log_probs)} tokens the "
        f"actor's log-probs are not finite for {old} and the reference's for {ref}"
    )


def _explained_variance(predicted: torch.Tensor, actual: torch.Tensor) -> float:
    """Return 1 - Var(actual - predicted) / Var(actual); 0 if all actual values are the same."""
    variance = actual.double().var(correction=0)
    residual = (actual - predicted).double().var(correction=0)
    return float(1.0 - residual / variance) if variance > 0 else 0.0


def corrected(
    batch: RaggedBatch, cfg: RolloutCorrectionConfig
) -> tuple[RaggedBatch, dict[str, float]]:
    """Return the batch with the importance weights and the loss mask that the settings ask for, and
    the mismatch metrics, which need no setting. The batch stays unchanged, without metrics, with
    bypass_mode and before an update that computes the old log-probs."""
    trained = batch.trained()
    if cfg.bypass_mode or trained.old_log_probs is None or not trained.num_sequences:
        return batch, {}
    lens = trained.response_lens
    metrics = mismatch_metrics(trained.old_log_probs, trained.rollout_log_probs, lens)
    log_ratio = trained.old_log_probs - trained.rollout_log_probs
    if cfg.rollout_is is not None:
        weights, weight_metrics = importance_weights(log_ratio, lens, cfg)
        metrics |= weight_metrics
        batch = batch.with_fields(is_weights=batch.spread(weights))
    if cfg.rollout_rs or cfg.rollout_token_veto_threshold is not None:
        accepted, rejection_metrics = accepted_tokens(log_ratio, lens, cfg)
        metrics |= rejection_metrics
        batch = batch.with_fields(loss_mask=batch.spread(accepted))
    return batch, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def compute_advantages(run: Run, state: StepState, batch: RaggedBatch) -> RaggedBatch:
    """Compute token rewards, advantages and returns, update the KL controller, and correct for the
    rollout's policy."""
    algorithm = run.config.algorithm
    n = run.config.rollout.n
    adjusted = run.adjustments.kl_coef(state.step)
    with run.offload_schedule.phase(state.timer, "adv"):
        kl_coef = run.kl_controller.value if adjusted is None else adjusted
        batch, metrics, kl = advantages_and_returns(batch, algorithm, kl_coef, n, run.estimator)
        if algorithm.kl_ctrl.type == "adaptive":
            check_kl(kl, batch, state.step)
            num_trained = len(batch.trained_rows)
            if adjusted is None and num_trained:
                run.kl_controller.update(kl, num_trained)
        state.metrics.update(metrics)
        num_masked = batch.num_sequences - len(batch.trained_rows)
        state.metrics["train/masked_samples_ratio"] = num_masked / batch.num_sequences
        batch, metrics = corrected(batch, algorithm.rollout_correction)
        state.metrics.update(metrics)
    return batch
