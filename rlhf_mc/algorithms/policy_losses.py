"""The policy losses, on the ragged response tokens of one micro-batch.

A loss is a function of PolicyLossInputs that returns a scalar and its statistics; POLICY_LOSSES has
each by its name. It is a sum of a number per token times the token's weight, and a statistic is a
sum too: over micro-batches and ranks they add up to the values of the mini-batch (losses.py). A
sequence is never split (an agent's contexts are, with which the config checks refuse such losses),
so a number per token may depend on the other tokens of its sequence. What depends on the whole
mini-batch is computed beforehand: a loss may have a selection.

[r] is the number of response tokens of the micro-batch, [R] of the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlhf_mc.algorithms.kl import LOG_RATIO_BOUND
from rlhf_mc.config.algorithm_schema import PolicyLossConfig

Stats = dict[str, torch.Tensor]

SEQUENCE_LOG_RATIO_BOUND = 10.0
"""Largest log-ratio of a sequence in gspo; verl's constant."""
BINARY_EPS = 1e-8
"""Added to the probability of all other tokens in dppo_kl; verl's constant."""


@dataclass(frozen=True)
class PolicyLossInputs:
    """All that a policy loss may use. Log-probs are at the sampling temperature."""

    log_probs: torch.Tensor
    """[r]: log-probs of the current policy, with gradient."""
    old_log_probs: torch.Tensor
    """[r]: log-probs of the policy before the update."""
    advantages: torch.Tensor
    """[r]."""
    weights: torch.Tensor
    """[r]: weight of each token's loss in the mini-batch's loss (aggregation_weights)."""
    sequence: torch.Tensor
    """[r] int64: number of the token's sequence in the mini-batch."""
    num_tokens: int
    """Response tokens of the whole mini-batch, the divisor of a statistic that is a mean over
    tokens."""
    num_sequences: int
    """Sequences of the whole mini-batch."""
    selected: torch.Tensor | None = None
    """[r] bool: tokens that the loss's selection has chosen; None for a loss without a
    selection."""
    clip_low: float = 0.2
    """actor.clip_ratio_low."""
    clip_high: float = 0.2
    """actor.clip_ratio_high."""
    clip_c: float = 3.0
    """actor.clip_ratio_c."""
    kl_coef: float = 0.1
    """actor.policy_loss.ppo_kl_coef."""
    tau_pos: float = 1.0
    """actor.policy_loss.tau_pos."""
    tau_neg: float = 1.05
    """actor.policy_loss.tau_neg."""

    @property
    def log_ratio(self) -> torch.Tensor:
        """[r]: log of the ratio of the current policy to the old one, clamped to +-20."""
        return (self.log_probs - self.old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def sequence_means(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of x [r] over the tokens of each token's sequence: [r]."""
        sums = x.new_zeros(self.num_sequences).index_add(0, self.sequence, x)
        counts = x.new_zeros(self.num_sequences).index_add(0, self.sequence, torch.ones_like(x))
        return (sums / counts.clamp(min=1))[self.sequence]

    def result(
        self, token_loss: torch.Tensor, **token_stats: torch.Tensor
    ) -> tuple[torch.Tensor, Stats]:
        """Return the weighted sum of the token losses [r] and, as statistics, pg_loss (the same),
        ppo_kl (mean over tokens of old - log_prob) and the means over tokens of token_stats [r]."""
        loss = (self.weights * token_loss).sum()
        kl = self.old_log_probs - self.log_probs.detach()
        means = {
            name: x.sum() / self.num_tokens for name, x in {**token_stats, "ppo_kl": kl}.items()
        }
        return loss, {"pg_loss": loss.detach(), **means}


PolicyLossFunction = Callable[[PolicyLossInputs], tuple[torch.Tensor, Stats]]
Selection = Callable[[torch.Tensor, torch.Tensor, PolicyLossConfig, torch.Generator], torch.Tensor]
"""(old log-probs [R], advantages [R], settings, random draws of the step) -> bool [R]: the selected
tokens. All [R] tensors are on the host and of the whole mini-batch, so that the choice does not
depend on its split."""


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss, with the selection of its tokens if it has one."""

    function: PolicyLossFunction
    selection: Selection | None = None
    has_geometric_weights: bool = False
    """An importance weight is the geometric mean over the tokens of the sequence, as the ratio
    is."""


def vanilla(inputs: PolicyLossInputs) -> tuple[torch.Tensor, Stats]:
    """Return PPO's clipped surrogate loss, with separate clip ranges and dual clip.

    r = exp(log_ratio);  L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high));
    where A < 0 also L <= -A clip_c. Sources: arXiv 1707.06347 eq. 7; dual clip: arXiv 1912.09729
    eq. 5; separate ranges: arXiv 2503.14476.

    Statistics: pg_clipfrac (share of tokens whose L is raised by the clip range); pg_clipfrac_lower
    (share whose L is lowered by the dual clip).
    """
    unclipped, clipped = _surrogates(inputs, inputs.log_ratio.exp())
    surrogate = torch.maximum(unclipped, clipped)
    ceiling = -inputs.advantages * inputs.clip_c
    negative = inputs.advantages < 0
    token_loss = torch.where(negative, torch.minimum(surrogate, ceiling), surrogate)
    return inputs.result(
        token_loss,
        pg_clipfrac=clipped > unclipped,
        pg_clipfrac_lower=negative & (surrogate > ceiling),
    )


def gspo(inputs: PolicyLossInputs) -> tuple[torch.Tensor, Stats]:
    """Return the clipped surrogate loss with one ratio per sequence: s = exp(mean over its tokens
    of log_ratio).

    L = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)) on each token, where the gradient of s is
    s * grad log_prob of the token itself: GSPO-token, equal to GSPO if a sequence's advantages are
    equal. Source: GSPO (arXiv 2507.18071), sections 4.1 and 4.3. For actor.loss_agg_mode
    seq-mean-token-mean. The log-ratios are not clamped one by one; a mean above 10 is 10, without a
    gradient. Statistic: pg_clipfrac.
    """
    log_probs = inputs.log_probs.detach()
    mean = inputs.sequence_means(log_probs - inputs.old_log_probs)
    # the difference, which is 0, first: a sum would round the mean
    log_ratio = mean + (inputs.log_probs - log_probs)
    unclipped, clipped = _surrogates(inputs, log_ratio.clamp(max=SEQUENCE_LOG_RATIO_BOUND).exp())
    return inputs.result(torch.maximum(unclipped, clipped), pg_clipfrac=clipped > unclipped)


def geo_mean(inputs: PolicyLossInputs) -> tuple[torch.Tensor, Stats]:
    """Return -A s for each sequence, s = exp(mean over its tokens of the clipped log_ratio), A the
    mean advantage.

    The log-ratio of a token is clipped to [-clip_low, clip_high] where that lowers the objective:
    from above for A > 0, from below for A < 0. Source: GMPO (arXiv 2507.20673), eq. 4. For
    actor.loss_agg_mode seq-mean-token-mean.

    Statistics: pg_clipfrac and pg_clipfrac_lower (shares of tokens clipped from above and from
    below).
    """
    log_ratio = inputs.log_ratio
    above = (inputs.advantages > 0) & (log_ratio > inputs.clip_high)
    below = (inputs.advantages < 0) & (log_ratio < -inputs.clip_low)
    clipped = torch.where(above, inputs.clip_high, torch.where(below, -inputs.clip_low, log_ratio))
    token_loss = -inputs.sequence_means(inputs.advantages) * inputs.sequence_means(clipped).exp()
    return inputs.result(token_loss, pg_clipfrac=above, pg_clipfrac_lower=below)


def sapo(inputs: PolicyLossInputs) -> tuple[torch.Tensor, Stats]:
    """Return -A (4 / tau) sigmoid(tau (r - 1)), where tau is tau_pos for A > 0, else tau_neg.

    At r = 1 its gradient is the gradient of -A r; far from it the gradient fades, with a larger tau
    sooner. Source: SAPO (arXiv 2511.20347), section 3. For actor.loss_agg_mode seq-mean-token-mean.
    """
    tau = torch.full_like(inputs.advantages, inputs.tau_neg).masked_fill_(
        inputs.advantages > 0, inputs.tau_pos
    )
    gate = torch.sigmoid(tau * (inputs.log_ratio.exp() - 1.0)) * (4.0 / tau)
    return inputs.result(-inputs.advantages * gate)


def cispo(inputs: PolicyLossInputs) -> tuple[torch.Tensor, Stats]:
    """Return -A clip(r, 1 - clip_low, 1 + clip_high) log_prob, without a gradient through r.

    Clipped tokens keep a gradient. Source: CISPO, MiniMax-M1 (arXiv 2506.13585), equations 4 and 5.
    Statistic: pg_clipfrac (share of tokens whose r is clipped).
    """
    ratio = inputs.log_ratio.detach().exp()
    clipped = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high)
    return inputs.result(
        -inputs.advantages * clipped * inputs.log_probs, pg_clipfrac=clipped != ratio
    )


def sao(inputs: PolicyLossInputs) -> tuple[torch.Tensor, Stats]:
    """Return -A r log_prob, without a gradient through r, where 1 - clip_low <= r <= 1 + clip_high,
    else 0, whatever the sign of A.

    r is the ratio to the policy that has sampled: the old log-probs must be the rollout engine's
    (algorithm.rollout_correction.bypass_mode). Source: double-sided importance sampling of SAO
    (arXiv 2607.07508), as EasyDeL's page on its SAO trainer describes it. Statistic: pg_clipfrac
    (share of tokens of loss 0).
    """
    ratio = inputs.log_ratio.detach().exp()
    is_inside = (ratio >= 1.0 - inputs.clip_low) & (ratio <= 1.0 + inputs.clip_high)
    return _masked_policy_gradient(inputs, ratio, is_inside)


def dppo_tv(inputs: PolicyLossInputs) -> tuple[torch.Tensor, Stats]:
    """Return -A min(r, clip_c) log_prob, without a gradient through r; 0 where the probability p of
    the token has moved too far from the old one q on the side that A favours.

    That is p - q > clip_high where A > 0, else p - q < -clip_low: the total variation of the token
    against all others. Source: DPPO (arXiv 2602.04879), equations 12 and 13. The bound clip_c and a
    threshold for each side are verl's. The paper's q is that of the rollout engine
    (algorithm.rollout_correction.bypass_mode). Statistics: pg_clipfrac (share of tokens of loss 0);
    pg_clipfrac_lower (share of others where r > clip_c).
    """
    difference = inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()
    return _dppo(inputs, difference, -difference)


def dppo_kl(inputs: PolicyLossInputs) -> tuple[torch.Tensor, Stats]:
    """Return dppo_tv's loss with another measure of how far p has moved from q: 0 where D >
    clip_high and p > q for A > 0, else where D > clip_low and p < q.

    D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), with 1e-8 added to 1 - q and 1 - p, as in
    verl: the KL of the token against all others. Source: DPPO (arXiv 2602.04879), equations 12 and
    14. Statistics: as of dppo_tv.
    """
    log_probs = inputs.log_probs.detach()
    p = log_probs.exp()
    q = inputs.old_log_probs.exp()
    others = (1.0 - torch.stack((q, p))).clamp(min=0.0) + BINARY_EPS
    kl = q * (inputs.old_log_probs - log_probs) + (1.0 - q) * (others[0] / others[1]).log()
    return _dppo(inputs, torch.where(p > q, kl, 0.0), torch.where(p < q, kl, 0.0))


def gpg(inputs: PolicyLossInputs) -> tuple[torch.Tensor, Stats]:
    """Return the policy gradient's loss -A log_prob. Source: GPG (arXiv 2504.02546)."""
    return inputs.result(-inputs.advantages * inputs.log_probs)


def clip_cov(inputs: PolicyLossInputs) -> tuple[torch.Tensor, Stats]:
    """Return PPO's clipped surrogate loss, 0 for the selected tokens.

    Source: Clip-Cov, "The Entropy Mechanism of Reinforcement Learning" (arXiv 2505.22617), section
    4. Statistic: pg_clipfrac (share of selected tokens).
    """
    assert inputs.selected is not None
    token_loss = torch.maximum(*_surrogates(inputs, inputs.log_ratio.exp()))
    return inputs.result(torch.where(inputs.selected, 0.0, token_loss), pg_clipfrac=inputs.selected)


def kl_cov(inputs: PolicyLossInputs) -> tuple[torch.Tensor, Stats]:
    """Return -A r, plus kl_coef * |log_ratio| for the selected tokens.

    Source: KL-Cov, "The Entropy Mechanism of Reinforcement Learning" (arXiv 2505.22617), section 4.
    Statistic: pg_clipfrac (share of selected tokens).
    """
    assert inputs.selected is not None
    log_ratio = inputs.log_ratio
    penalty = torch.where(inputs.selected, inputs.kl_coef * log_ratio.abs(), 0.0)
    return inputs.result(
        -inputs.advantages * log_ratio.exp() + penalty, pg_clipfrac=inputs.selected
    )


def covariances(old_log_probs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return (A - mean A) * (log_prob - mean log_prob) of each token: [R] float64. Means are over
    the mini-batch."""
    advantages = advantages.double()
    log_probs = old_log_probs.double()
    return (advantages - advantages.mean()) * (log_probs - log_probs.mean())


def select_in_band(
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    settings: PolicyLossConfig,
    draws: torch.Generator,
) -> torch.Tensor:
    """Return a random choice of tokens with a covariance between clip_cov_lb and clip_cov_ub: bool
    [R].

    Their number is clip_cov_ratio of all tokens, at least 1, or all in the band if these are
    fewer."""
    covariance = covariances(old_log_probs, advantages)
    inside = ((covariance > settings.clip_cov_lb) & (covariance < settings.clip_cov_ub)).nonzero()[
        :, 0
    ]
    count = max(1, int(settings.clip_cov_ratio * len(covariance)))
    chosen = inside[torch.randperm(len(inside), generator=draws)[:count]]
    return torch.zeros(len(covariance), dtype=torch.bool).index_fill_(0, chosen, True)


def select_highest(
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    settings: PolicyLossConfig,
    draws: torch.Generator,
) -> torch.Tensor:
    """Return the tokens of the highest covariance: kl_cov_ratio of all tokens, at least 1. bool
    [R]."""
    covariance = covariances(old_log_probs, advantages)
    chosen = covariance.topk(max(1, int(settings.kl_cov_ratio * len(covariance)))).indices
    return torch.zeros(len(covariance), dtype=torch.bool).index_fill_(0, chosen, True)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss(vanilla),
    "gspo": PolicyLoss(gspo),
    "geo_mean": PolicyLoss(geo_mean, has_geometric_weights=True),
    "sapo": PolicyLoss(sapo),
    "cispo": PolicyLoss(cispo),
    "sao": PolicyLoss(sao),
    "dppo_tv": PolicyLoss(dppo_tv),
    "dppo_kl": PolicyLoss(dppo_kl),
    "gpg": PolicyLoss(gpg),
    "clip_cov": PolicyLoss(clip_cov, select_in_band),
    "kl_cov": PolicyLoss(kl_cov, select_highest),
}
"""By actor.policy_loss.loss_mode."""


def _surrogates(inputs: PolicyLossInputs, ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's two losses of each token, with the ratio and with the clipped ratio: each
    [r]."""
    clipped = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high)
    return -inputs.advantages * ratio, -inputs.advantages * clipped


def _dppo(
    inputs: PolicyLossInputs, above: torch.Tensor, below: torch.Tensor
) -> tuple[torch.Tensor, Stats]:
    """Return the loss of DPPO. above, below: [r], how far a token's probability is above and below
    the old one; 0 or less on the other side."""
    is_inside = torch.where(
        inputs.advantages > 0, above <= inputs.clip_high, below <= inputs.clip_low
    )
    ratio = inputs.log_ratio.detach().exp()
    return _masked_policy_gradient(
        inputs,
        ratio.clamp(max=inputs.clip_c),
        is_inside,
        pg_clipfrac_lower=is_inside & (ratio > inputs.clip_c),
    )


def _masked_policy_gradient(
    inputs: PolicyLossInputs, ratio: torch.Tensor, is_inside: torch.Tensor, **stats: torch.Tensor
) -> tuple[torch.Tensor, Stats]:
    """Return -A ratio log_prob of the tokens inside, 0 of all others. ratio: [r], without gradient.
    is_inside: bool [r]. stats: as of result."""
    token_loss = -inputs.advantages * ratio * inputs.log_probs
    return inputs.result(torch.where(is_inside, token_loss, 0.0), pg_clipfrac=~is_inside, **stats)
