"""Token rewards, and the advantage estimators, on padded [S, L] matrices of response tokens.

An estimator is a function of EstimatorInputs that returns an Estimate. ADVANTAGE_ESTIMATORS has each by its name;
config/algorithm_schema.py has what each needs. Means and deviations of a group are computed in float64, in which sums
of equal float32 numbers are exact: responses of equal scores have advantages of exactly 0. Whitening is in masked.py,
the KL estimate that token_rewards subtracts in kl.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlhf_mc.algorithms.masked import masked_sum, masked_whiten

STD_EPS = 1e-6
"""Added to the standard deviation of a group's scores, as in verl."""


@dataclass(frozen=True)
class EstimatorInputs:
    """All that an estimator may use, of the whole batch of a step. Every rank has the same."""

    rewards: torch.Tensor
    """[S, L] float32: token rewards, 0 off the mask: the score on the last token, less the KL penalty of each token."""
    mask: torch.Tensor
    """[S, L] bool: True on response tokens, possibly with holes."""
    scores: torch.Tensor
    """[S] float32: of the reward function or the reward model, without a KL penalty."""
    group: torch.Tensor
    """[S] int64: number of the response's prompt."""
    values: torch.Tensor | None = None
    """[S, L] float32: the critic's values; None without a critic."""
    greedy_scores: torch.Tensor | None = None
    """[S] float32: score of the response to the same prompt at temperature 0; None if it is not needed."""
    gamma: float = 1.0
    """Discount per token, 0 to 1."""
    lam: float = 1.0
    """GAE's lambda, 0 to 1."""
    norm_by_std: bool = True
    """Divide a group's advantages by the standard deviation of its scores (grpo, grpo_passk)."""

    @property
    def response_rewards(self) -> torch.Tensor:
        """[S] float64: sum of each response's token rewards."""
        return masked_sum(self.rewards.double(), self.mask, dim=1)


@dataclass(frozen=True)
class Estimate:
    """The result of an estimator."""

    advantages: torch.Tensor
    """[S, L], in the dtype of the rewards, 0 off the mask."""
    returns: torch.Tensor | None = None
    """[S, L], the same: targets of the critic. Without a critic they are only logged; None: not defined."""


EstimatorFunction = Callable[[EstimatorInputs], Estimate]


@torch.no_grad()
def token_rewards(scores: torch.Tensor, kl: torch.Tensor | None, kl_coef: float, mask: torch.Tensor) -> torch.Tensor:
    """Return reward_t = -kl_coef * kl_t, plus the sequence's score on its last response token: [S, L], 0 off the mask.

    scores: [S]. kl: [S, L] in nats, or None for no KL term. mask: [S, L] bool, True on response tokens, possibly with
    holes; the last True of a row is its last response token. A row without response tokens gets no reward. Source:
    InstructGPT (arXiv 2203.02155), equation 2, per token as in Ziegler et al. (arXiv 1909.08593).
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True)  # -1 where the row has none
    zeros = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    rewards = torch.where(positions == last, scores[:, None], zeros)
    if kl is not None:
        rewards = rewards - kl_coef * torch.where(mask, kl, zeros)
    return rewards


# ---------------------------------------------------------------- with a critic


@torch.no_grad()
def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns) by generalised advantage estimation (arXiv 1506.02438), each [S, L], 0 off the mask.

    delta_t = r_t + gamma * V_next - V_t;  A_t = delta_t + gamma * lam * A_next;  returns = A + V.
    "next" is the next position of the row where mask is True, so holes inside a response (tokens that the policy did
    not sample) are skipped without a discount; after the last position V and A are 0. Returns are computed from
    unwhitened advantages: whiten them afterwards.

    rewards, values: [S, L], same dtype; mask: [S, L] bool; gamma, lam: per token, 0 to 1.
    """
    advantages = torch.zeros_like(values.t(), memory_format=torch.contiguous_format)  # [L, S]: one row per position
    rewards_t = rewards.t().contiguous()
    values_t = values.t().contiguous()
    mask_t = mask.t().contiguous()
    next_value = next_advantage = advantages.new_zeros(advantages.shape[1])
    for t in reversed(range(advantages.shape[0])):
        advantage = rewards_t[t] + gamma * next_value - values_t[t] + gamma * lam * next_advantage
        next_advantage = torch.where(mask_t[t], advantage, next_advantage)
        next_value = torch.where(mask_t[t], values_t[t], next_value)
        advantages[t] = next_advantage
    advantages = torch.where(mask, advantages.t(), torch.zeros_like(values))
    returns = torch.where(mask, advantages + values, torch.zeros_like(values))
    return advantages, returns


def whitened_gae(inputs: EstimatorInputs) -> Estimate:
    """Return the advantages of `gae`, whitened over the tokens of the batch, and its returns."""
    assert inputs.values is not None
    advantages, returns = gae(inputs.rewards, inputs.values, inputs.mask, inputs.gamma, inputs.lam)
    return Estimate(masked_whiten(advantages, inputs.mask), returns)


# ---------------------------------------------------------------- by comparison with the responses of a group


def grpo(inputs: EstimatorInputs) -> Estimate:
    """Return A = (R - mean of the group) / (std of the group + 1e-6) for each token of a response of reward R.

    std is the unbiased one. Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2. Without norm_by_std the advantage
    is not divided: Dr. GRPO (arXiv 2503.20783), section 3.2, which also takes the loss aggregation
    seq-mean-token-sum-norm.
    """
    groups = _Groups(inputs)
    advantages = groups.centred
    if inputs.norm_by_std:
        advantages = advantages / (groups.std + STD_EPS)
    return Estimate(_per_token(advantages, inputs))


def grpo_passk(inputs: EstimatorInputs) -> Estimate:
    """Return A = (R - second highest reward of the group) for the best response of a group, 0 for the others.

    It estimates the gradient of the expected maximum over a group (pass@k). With norm_by_std it is divided by the
    group's standard deviation + 1e-6. Source: arXiv 2503.19595; where several responses are the best, all have 0.
    """
    groups = _Groups(inputs)
    best = groups.highest(groups.rewards)
    is_best = groups.rewards == best
    second = groups.highest(torch.where(is_best, -torch.inf, groups.rewards))
    is_only_best = is_best & (groups.sums(is_best.double()) == 1)
    advantages = torch.where(is_only_best, best - second, 0.0)
    if inputs.norm_by_std:
        advantages = advantages / (groups.std + STD_EPS)
    return Estimate(_per_token(advantages, inputs))


def rloo(inputs: EstimatorInputs) -> Estimate:
    """Return A = R - mean of the other responses of the group (leave-one-out), equal to (R - mean) * n / (n - 1).

    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; RLOO (arXiv 2402.14740).
    """
    groups = _Groups(inputs)
    return Estimate(_per_token(groups.centred * groups.sizes / (groups.sizes - 1), inputs))


def opo(inputs: EstimatorInputs) -> Estimate:
    """Return A = R - the group's mean weighted by length: b = sum_i len_i R_i / sum_i len_i.

    It is the baseline of least variance if a response's squared gradient norm is proportional to its length. Source:
    OPO (arXiv 2505.23585).
    """
    groups = _Groups(inputs)
    lengths = inputs.mask.sum(dim=1).double()
    # Of the centred rewards: a group of equal rewards then has exactly 0, whatever its lengths.
    baseline = groups.sums(lengths * groups.centred) / groups.sums(lengths)
    return Estimate(_per_token(groups.centred - baseline, inputs))


def gpg(inputs: EstimatorInputs) -> Estimate:
    """Return A = alpha * (R - mean of the group), with alpha = responses / responses of groups of unequal rewards.

    Groups of equal rewards have no gradient; alpha makes up for their share of the batch. Source: GPG (arXiv
    2504.02546), accurate gradient estimation, alpha = B / (B - M). verl divides by the responses of nonzero reward.
    """
    groups = _Groups(inputs)
    counted = (groups.highest(groups.rewards) != -groups.highest(-groups.rewards)).sum()
    alpha = len(inputs.scores) / counted.clamp(min=1)
    return Estimate(_per_token(alpha * groups.centred, inputs))


def reinforce_plus_plus_baseline(inputs: EstimatorInputs) -> Estimate:
    """Return R - mean of the group on each token, whitened over the tokens of the batch. Source: REINFORCE++ (arXiv
    2501.03262), the variant with a group's mean as baseline."""
    return Estimate(masked_whiten(_per_token(_Groups(inputs).centred, inputs), inputs.mask))


# ---------------------------------------------------------------- of each response alone


def reinforce_plus_plus(inputs: EstimatorInputs) -> Estimate:
    """Return the discounted sum of the rewards from each token on, whitened over the tokens of the batch.

    Source: REINFORCE++ (arXiv 2501.03262), where the mean over the batch is the baseline. It is GAE with lambda 1 and
    values of 0.
    """
    advantages, returns = gae(inputs.rewards, torch.zeros_like(inputs.rewards), inputs.mask, inputs.gamma, 1.0)
    return Estimate(masked_whiten(advantages, inputs.mask), returns)


def remax(inputs: EstimatorInputs) -> Estimate:
    """Return the sum of the rewards from each token on, less the score of the greedy response to the same prompt.

    Source: ReMax (arXiv 2310.10505), algorithm 1.
    """
    assert inputs.greedy_scores is not None
    returns, _ = gae(inputs.rewards, torch.zeros_like(inputs.rewards), inputs.mask, 1.0, 1.0)
    baseline = torch.where(inputs.mask, inputs.greedy_scores[:, None], 0.0)
    return Estimate(returns - baseline.to(returns.dtype), returns)


ADVANTAGE_ESTIMATORS: dict[str, EstimatorFunction] = {
    "gae": whitened_gae,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
}
"""By algorithm.adv_estimator."""


class _Groups:
    """Statistics of the responses of each prompt. Every tensor is [S] float64, one entry per response."""

    def __init__(self, inputs: EstimatorInputs) -> None:
        _, self._index, sizes = torch.unique(inputs.group, return_inverse=True, return_counts=True)
        assert sizes.min() >= 2, "a group needs two responses"
        self._count = len(sizes)
        self.rewards = inputs.response_rewards
        self.sizes = sizes.double()[self._index]
        self.centred = self.rewards - self.sums(self.rewards) / self.sizes

    @property
    def std(self) -> torch.Tensor:
        """The unbiased standard deviation of the group's rewards."""
        return (self.sums(self.centred.square()) / (self.sizes - 1)).sqrt()

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """Return for each response the sum of x over its group."""
        return x.new_zeros(self._count).index_add(0, self._index, x)[self._index]

    def highest(self, x: torch.Tensor) -> torch.Tensor:
        """Return for each response the maximum of x over its group."""
        start = x.new_full((self._count,), -torch.inf)
        return start.scatter_reduce(0, self._index, x, "amax")[self._index]


def _per_token(advantages: torch.Tensor, inputs: EstimatorInputs) -> torch.Tensor:
    """Return [S] advantages on each response token: [S, L] in the dtype of the rewards, 0 off the mask."""
    return torch.where(inputs.mask, advantages[:, None], 0.0).to(inputs.rewards.dtype)
