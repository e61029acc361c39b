"""The losses of actor and critic on the ragged response tokens of one micro-batch.

A loss is a weighted *sum*. aggregation_weights computes the weights once for the whole mini-batch (all data-parallel
ranks, all micro-batches), and each micro-batch uses its slice. The sum over all micro-batches of all ranks is then the
mini-batch's loss, and the gradient does not depend on the split. A mean within a micro-batch would not add up if
lengths differ.

Statistics are sums too: over micro-batches and ranks they add up to the values of the mini-batch. Each is a detached
scalar tensor. `num_tokens` is the number of response tokens of the whole mini-batch. [r] is the number of response
tokens of this micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch

from rlhf_mc.algorithms.kl import LOG_RATIO_BOUND, kl_estimate
from rlhf_mc.config.schema import KLEstimator, LossAggMode

Stats = dict[str, torch.Tensor]


def aggregation_weights(response_lens: torch.Tensor, mode: LossAggMode) -> torch.Tensor:
    """Return the weight of each response token of the WHOLE mini-batch, such that loss = sum_t weight_t * loss_t.

    response_lens: [S] integers, each at least 1, of the mini-batch over all ranks. The result is [R] float32, sequence
    after sequence: 1 / R for token-mean, 1 / S for seq-mean-token-sum, 1 / (S * len_s) for seq-mean-token-mean.
    """
    num_sequences = len(response_lens)
    match mode:
        case "token-mean":
            per_sequence = torch.full_like(response_lens, 1, dtype=torch.float32) / response_lens.sum()
        case "seq-mean-token-sum":
            per_sequence = torch.full_like(response_lens, 1, dtype=torch.float32) / num_sequences
        case "seq-mean-token-mean":
            per_sequence = 1.0 / (num_sequences * response_lens.float())
        case _:
            assert_never(mode)
    return torch.repeat_interleave(per_sequence, response_lens)


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_tokens: int,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> tuple[torch.Tensor, Stats]:
    """Return PPO's clipped surrogate loss, a scalar, with separate clip ranges and dual clip, and its statistics.

    All tensors are [r].

    r = exp(clamp(log_prob - old, -20, 20));  L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high));
    where A < 0 also L <= -A clip_c. Sources: arXiv 1707.06347 eq. 7; dual clip: arXiv 1912.09729 eq. 5;
    separate ranges: arXiv 2503.14476.

    Statistics: pg_loss (aggregated as the loss); pg_clipfrac (share of tokens whose L is raised by the clip range);
    pg_clipfrac_lower (share whose L is lowered by the dual clip); ppo_kl (mean of old - log_prob).
    """
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.maximum(unclipped, clipped)
    ceiling = -advantages * clip_c
    negative = advantages < 0
    token_loss = torch.where(negative, torch.minimum(surrogate, ceiling), surrogate)
    loss = (weights * token_loss).sum()
    stats = {
        "pg_loss": loss.detach(),
        "pg_clipfrac": (clipped > unclipped).sum() / num_tokens,
        "pg_clipfrac_lower": (negative & (surrogate > ceiling)).sum() / num_tokens,
        "ppo_kl": -log_ratio.detach().sum() / num_tokens,
    }
    return loss, stats


@dataclass(frozen=True)
class ActorLossInputs:
    """Inputs of the actor's loss for one micro-batch, all [r]. Log-probs are at the sampling temperature."""

    log_probs: torch.Tensor
    """Log-probs of the current policy, with gradient."""
    old_log_probs: torch.Tensor
    """Log-probs of the policy before the update."""
    advantages: torch.Tensor
    """Advantages, whitened over the global batch."""
    weights: torch.Tensor
    """This micro-batch's slice of aggregation_weights."""
    entropy: torch.Tensor | None = None
    """Entropy of the policy at each position, in nats; None for no bonus and no statistic."""
    ref_log_probs: torch.Tensor | None = None
    """Log-probs of the reference; None for no KL loss."""


def actor_loss(
    inputs: ActorLossInputs,
    *,
    num_tokens: int,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    entropy_coeff: float = 0.0,
    kl_loss_coef: float = 0.0,
    kl_loss_type: KLEstimator = "k3",
) -> tuple[torch.Tensor, Stats]:
    """Return policy_loss - entropy_coeff * entropy + kl_loss_coef * KL(policy, reference), and its statistics.

    All terms are aggregated by the weights; a term whose input is None is omitted. Statistics: those of policy_loss,
    loss (the sum), entropy (mean over tokens), kl_loss (aggregated as the loss, without its coefficient).
    """
    assert entropy_coeff == 0.0 or inputs.entropy is not None, "an entropy bonus needs the entropy"
    assert kl_loss_coef == 0.0 or inputs.ref_log_probs is not None, "a KL loss needs the reference's log-probs"
    loss, stats = policy_loss(
        inputs.log_probs,
        inputs.old_log_probs,
        inputs.advantages,
        inputs.weights,
        num_tokens=num_tokens,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_c=clip_c,
    )
    if inputs.entropy is not None:
        if entropy_coeff != 0.0:  # with 0 no backward pass through the entropy
            loss = loss - entropy_coeff * (inputs.weights * inputs.entropy).sum()
        stats["entropy"] = inputs.entropy.detach().sum() / num_tokens
    if inputs.ref_log_probs is not None:
        kl = (inputs.weights * kl_estimate(inputs.log_probs, inputs.ref_log_probs, kl_loss_type)).sum()
        loss = loss + kl_loss_coef * kl
        stats["kl_loss"] = kl.detach()
    stats["loss"] = loss.detach()
    return loss, stats


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_tokens: int,
    cliprange: float,
) -> tuple[torch.Tensor, Stats]:
    """Return the critic's clipped loss, a scalar, and its statistics. All tensors are [r].

    L = 0.5 * max((v - R)^2, (clip(v, v_old - e, v_old + e) - R)^2) with e = cliprange. Source: OpenAI baselines'
    ppo2; the maximum keeps the values near the old ones.

    Statistics: vf_loss (aggregated as the loss); vf_clipfrac (share of tokens whose L is raised by the clip);
    vpred_mean (mean of v).
    """
    clipped_values = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    unclipped = (values - returns).square()
    clipped = (clipped_values - returns).square()
    loss = (weights * 0.5 * torch.maximum(unclipped, clipped)).sum()
    stats = {
        "vf_loss": loss.detach(),
        "vf_clipfrac": (clipped > unclipped).sum() / num_tokens,
        "vpred_mean": values.detach().sum() / num_tokens,
    }
    return loss, stats
