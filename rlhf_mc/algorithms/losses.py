"""The losses of actor and critic on the ragged response tokens of one micro-batch. The policy term
is in policy_losses.py.

A loss is a weighted *sum*. aggregation_weights computes the weights once for the whole mini-batch
(all data-parallel ranks, all micro-batches), and each micro-batch uses its slice. The sum over all
micro-batches of all ranks is then the mini-batch's loss, and the gradient does not depend on the
split. A mean within a micro-batch would not add up if lengths differ.

Statistics are sums too: over micro-batches and ranks they add up to the values of the mini-batch.
Each is a detached scalar tensor. `num_tokens` is the number of response tokens of the whole
mini-batch. [r] is the number of response tokens of this micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch

from rlhf_mc.algorithms.kl import kl_estimate
from rlhf_mc.algorithms.policy_losses import PolicyLossFunction, PolicyLossInputs, Stats
from rlhf_mc.config.algorithm_schema import KLLossType, LossAggMode


def aggregation_weights(
    response_lens: torch.Tensor,
    mode: LossAggMode,
    scale_factor: int | None = None,
    loss_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weight of each response token of the WHOLE mini-batch, such that loss = sum_t
    weight_t * loss_t.

    response_lens: [S] integers, each at least 1, of the mini-batch over all ranks. The result is
    [R] float32, sequence after sequence: 1 / R for token-mean, 1 / S for seq-mean-token-sum, 1 / (S
    * len_s) for seq-mean-token-mean, and
    1 / (S * scale_factor) for seq-mean-token-sum-norm: Dr. GRPO (arXiv 2503.20783), which divides
    by a constant.
    loss_mask: [R] bool. Other tokens have weight 0; R, len_s and S count only its tokens, and
    sequences that have some. Without one all weights are 0.
    """
    if loss_mask is not None:
        sequence = torch.repeat_interleave(response_lens)
        counts = torch.zeros_like(response_lens).index_add(
            0, sequence, loss_mask.to(response_lens.dtype)
        )
        present = counts > 0
        weights = torch.zeros(len(loss_mask))
        if present.any():
            weights[loss_mask] = aggregation_weights(counts[present], mode, scale_factor)
        return weights
    num_sequences = len(response_lens)
    match mode:
        case "token-mean":
            per_sequence = (
                torch.full_like(response_lens, 1, dtype=torch.float32) / response_lens.sum()
            )
        case "seq-mean-token-sum":
            per_sequence = torch.full_like(response_lens, 1, dtype=torch.float32) / num_sequences
        case "seq-mean-token-mean":
            per_sequence = 1.0 / (num_sequences * response_lens.float())
        case "seq-mean-token-sum-norm":
            assert scale_factor is not None
            per_sequence = torch.full_like(response_lens, 1, dtype=torch.float32) / (
                num_sequences * scale_factor
            )
        case _:
            assert_never(mode)
    return torch.repeat_interleave(per_sequence, response_lens)


def right_token_weights(
    accuracies: torch.Tensor, response_lens: torch.Tensor, loss_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weight of each response token of the WHOLE mini-batch in VAPO's language-model
    loss: [R] float32.

    accuracies: [S]. The n drawn tokens of the responses of an accuracy of at least 1 have weight
    1 / n, all others 0. loss_mask: as of aggregation_weights; other tokens do not count.
    """
    is_right = torch.repeat_interleave(accuracies >= 1, response_lens)
    if loss_mask is not None:
        is_right &= loss_mask
    return aggregation_weights(response_lens, "token-mean", loss_mask=is_right)


@dataclass(frozen=True)
class ActorLossInputs:
    """Inputs of the actor's loss for one micro-batch, all [r]."""

    policy: PolicyLossInputs
    """Inputs of the policy loss."""
    weights: torch.Tensor
    """This micro-batch's slice of aggregation_weights, for entropy and KL."""
    entropy: torch.Tensor | None = None
    """Entropy of the policy at each position, in nats; None for no bonus and no statistic."""
    ref_log_probs: torch.Tensor | None = None
    """Log-probs of the reference at the sampling temperature; None for no KL loss."""
    right_weights: torch.Tensor | None = None
    """This micro-batch's slice of right_token_weights; None for no language-model loss."""
    observed_log_probs: torch.Tensor | None = None
    """[o]: log-probs of this micro-batch's tokens of observations; None for no loss of them."""
    num_observed: int = 0
    """Tokens of observations of the whole mini-batch."""


def actor_loss(
    inputs: ActorLossInputs,
    policy_loss: PolicyLossFunction,
    *,
    entropy_coeff: float = 0.0,
    kl_loss_coef: float = 0.0,
    kl_loss_type: KLLossType = "k3",
    positive_nll_coef: float = 0.0,
    env_loss_coef: float = 0.0,
) -> tuple[torch.Tensor, Stats]:
    """Return policy_loss - entropy_coeff * entropy + kl_loss_coef * KL(policy, reference) +
    positive_nll_coef * NLL(right responses) + env_loss_coef * NLL(observations), and its
    statistics.

    NLL = -sum of log_prob over the tokens / number of these tokens in the mini-batch. Sources: VAPO
    (arXiv 2504.05118), positive-example language-model loss; ECHO (arXiv 2605.24517), loss on
    observations; env_loss_coef is rLLM's name. All other terms are aggregated by the weights. A
    term whose input is None is omitted. Statistics: the ones of policy_loss, loss (the sum),
    entropy (mean over tokens), entropy_loss, kl_loss, positive_nll and env_loss (aggregated as in
    the loss, without coefficients).
    """
    assert entropy_coeff == 0.0 or inputs.entropy is not None, "an entropy bonus needs the entropy"
    assert kl_loss_coef == 0.0 or inputs.ref_log_probs is not None, (
        "a KL loss needs the reference's log-probs"
    )
    assert positive_nll_coef == 0.0 or inputs.right_weights is not None, (
        "a language-model loss needs its weights"
    )
    loss, stats = policy_loss(inputs.policy)
    stats = dict(stats)
    if inputs.entropy is not None:
        entropy = (inputs.weights * inputs.entropy).sum()
        if entropy_coeff != 0.0:  # with 0 no backward pass through the entropy
            loss = loss - entropy_coeff * entropy
        stats["entropy"] = inputs.entropy.detach().sum() / inputs.policy.num_tokens
        stats["entropy_loss"] = entropy.detach()
    if inputs.ref_log_probs is not None:
        kl = (
            inputs.weights
            * kl_estimate(inputs.policy.log_probs, inputs.ref_log_probs, kl_loss_type)
        ).sum()
        loss = loss + kl_loss_coef * kl
        stats["kl_loss"] = kl.detach()
    if inputs.right_weights is not None:
        nll = -(inputs.right_weights * inputs.policy.log_probs).sum()
        loss = loss + positive_nll_coef * nll
        stats["positive_nll"] = nll.detach()
    if inputs.observed_log_probs is not None:
        env_loss = -inputs.observed_log_probs.sum() / inputs.num_observed
        loss = loss + env_loss_coef * env_loss
        stats["env_loss"] = env_loss.detach()
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

    L = 0.5 * max((v - R)^2, (clip(v, v_old - e, v_old + e) - R)^2) with e = cliprange. Source:
    OpenAI baselines' ppo2; the maximum keeps the values near the old ones.

    Statistics: vf_loss (aggregated as the loss); vf_clipfrac (share of tokens whose L is raised by
    the clip); vpred_mean (mean of v)."""
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
