"""Token rewards, and the advantage estimators. All tensors are of the whole batch of a step, which
every rank has: [R] response tokens, response after response, of response_lens [S].

An estimator is a function of EstimatorInputs that returns an Estimate. ADVANTAGE_ESTIMATORS has
each by its name; config/algorithm_schema.py has what each needs. Statistics and whitening are
computed in float64, in which sums of equal float32 numbers are exact: responses of equal scores
have advantages of exactly 0. The KL estimate that token_rewards subtracts is in kl.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

STD_EPS = 1e-6
"""Added to the standard deviation of a group's scores, as in verl, and to its mean in maxrl."""
WHITEN_EPS = 1e-8
TURN_EPS = 1e-6
"""Sums of the rewards of turns, which are float32, are equal within this share of the largest."""


@dataclass(frozen=True)
class EstimatorInputs:
    """All that an estimator may use, and statistics of it. An estimator must not change the
    tensors."""

    rewards: torch.Tensor
    """[R] float32: token rewards: the score on a response's last token, or the rewards of an
    environment on the last token of each turn, less the KL penalty of each token."""
    response_lens: torch.Tensor
    """[S] int64: tokens of each response, at least 1."""
    scores: torch.Tensor
    """[S] float32: of the reward function or the reward model, without a KL penalty."""
    group: torch.Tensor
    """[S] int64: number of the response's prompt."""
    values: torch.Tensor | None = None
    """[R] float32: the critic's values; None without a critic."""
    greedy_scores: torch.Tensor | None = None
    """[S] float32: score of the response to the same prompt at temperature 0; None if it is not
    needed."""
    decoupled_scores: torch.Tensor | None = None
    """[S] float32: of decoupled_scores; None if they are not needed."""
    gamma: float = 1.0
    """Discount per token, 0 to 1."""
    lam: float = 1.0
    """GAE's lambda, 0 to 1."""
    gae_lambda_value: float | None = None
    """algorithm.gae_lambda_value."""
    gae_lambda_policy: float | None = None
    """algorithm.gae_lambda_policy."""
    length_adaptive_alpha: float = 0.0
    """algorithm.length_adaptive_alpha."""
    norm_by_std: bool = True
    """Divide a group's advantages by the standard deviation of its scores (grpo, grpo_turn,
    grpo_passk)."""
    turns: torch.Tensor | None = None
    """[R] int64: index of the token's turn in its response; None without an environment, where a
    response is one turn."""

    @property
    def lambda_value(self) -> float:
        """GAE's lambda of the returns."""
        return self.lam if self.gae_lambda_value is None else self.gae_lambda_value

    @property
    def lambda_policy(self) -> float | torch.Tensor:
        """GAE's lambda of the advantages, with length_adaptive_alpha of each response: [S]
        float64."""
        if self.length_adaptive_alpha > 0:
            horizons = self.length_adaptive_alpha * self.response_lens.double()
            return 1.0 - 1.0 / horizons.clamp(min=1.0)
        return self.lam if self.gae_lambda_policy is None else self.gae_lambda_policy

    def by_turn(self) -> tuple[EstimatorInputs, torch.Tensor]:
        """Return the inputs with K turns in place of tokens, and the tokens of each turn: [K]
        int64. A turn has the sum of its rewards and, in float64, the value of the state before its
        first token."""
        turns = torch.zeros_like(self.rewards).long() if self.turns is None else self.turns
        most = int(turns.max()) + 1
        keys = torch.repeat_interleave(self.response_lens) * most + turns
        keys, lens = torch.unique_consecutive(keys, return_counts=True)
        counts = (keys // most).bincount(minlength=len(self.response_lens))
        rewards = torch.segment_reduce(self.rewards.double(), "sum", lengths=lens)
        values = None if self.values is None else self.values.double()[lens.cumsum(0) - lens]
        turns = keys % most
        return replace(
            self, rewards=rewards, values=values, turns=turns, response_lens=counts
        ), lens

    @property
    def response_rewards(self) -> torch.Tensor:
        """[S] float64: sum of each response's token rewards."""
        return self.per_response(self.rewards)

    @property
    def group_sizes(self) -> torch.Tensor:
        """[S] float64: number of responses to the response's prompt."""
        return self.per_prompt(torch.ones_like(self.scores), "sum")

    def per_response(
        self, x: torch.Tensor, statistic: Literal["sum", "mean", "max", "min"] = "sum"
    ) -> torch.Tensor:
        """Return the statistic of x [R] over the tokens of each response: [S] float64."""
        return torch.segment_reduce(x.double(), statistic, lengths=self.response_lens)

    def per_prompt(
        self, x: torch.Tensor, statistic: Literal["sum", "mean", "max", "min", "std"] = "mean"
    ) -> torch.Tensor:
        """Return for each response the statistic of x [S] over the responses to its prompt: [S]
        float64. std is the unbiased one, NaN of a single response."""
        x = x.double()
        if statistic == "std":
            squares = (x - self.per_prompt(x)).square()
            return (self.per_prompt(squares, "sum") / (self.group_sizes - 1)).sqrt()
        _, index = torch.unique(self.group, return_inverse=True)
        reduce = {"max": "amax", "min": "amin"}.get(statistic, statistic)
        return torch.zeros_like(x).scatter_reduce(0, index, x, reduce, include_self=False)[index]

    def per_token(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [S] on each token of its response: [R], in the dtype of the rewards."""
        return torch.repeat_interleave(x.to(self.rewards.dtype), self.response_lens)


@dataclass(frozen=True)
class Estimate:
    """The result of an estimator."""

    advantages: torch.Tensor
    """[R], in the dtype of the rewards."""
    returns: torch.Tensor | None = None
    """[R], the same: targets of the critic. Without a critic they are only logged; None: not
    defined."""


EstimatorFunction = Callable[[EstimatorInputs], Estimate]


def token_rewards(
    scores: torch.Tensor,
    kl: torch.Tensor | None,
    kl_coef: float,
    response_lens: torch.Tensor,
    turn_rewards: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return reward_t = -kl_coef * kl_t, plus the response's score on its last token: [R], in the
    dtype of the scores. With turn_rewards [R] the part of the score that an earlier turn has earned
    is on that turn's last token.

    scores: [S]. kl: [R] in nats, or None for no KL term. Source: InstructGPT (arXiv 2203.02155),
    equation 2, per token as in Ziegler et al. (arXiv 1909.08593).
    """
    ends = response_lens.cumsum(0)
    rewards = scores.new_zeros(int(ends[-1]))
    rewards[ends - 1] = scores
    if turn_rewards is not None:
        rewards[ends - 1] -= torch.segment_reduce(turn_rewards, "sum", lengths=response_lens)
        rewards += turn_rewards
    return rewards if kl is None else rewards - kl_coef * kl


def discounted_sums(
    x: torch.Tensor, response_lens: torch.Tensor, factor: float | torch.Tensor
) -> torch.Tensor:
    """Return y_t = x_t + factor * y_next, where y_next is 0 after a response's last token. x, y:
    [R]. factor: of all responses, or [S] of each."""
    lens, order = response_lens.sort(descending=True)
    factors = factor[order].to(x.dtype) if isinstance(factor, torch.Tensor) else None
    last = (response_lens.cumsum(0) - 1)[order]
    # Responses by length: those with a token this far before the last one are the first `count`.
    counts = len(lens) - lens.bincount().cumsum(0)
    sums = x.clone()
    for back, count in enumerate(counts[1:].tolist(), start=1):
        tokens = last[:count] - back
        sums[tokens] += (factor if factors is None else factors[:count]) * sums[tokens + 1]
    return sums


def whiten(x: torch.Tensor) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) over all tokens [R], with the unbiased variance, as in
    verl and TRL.

    In float64 equal tokens whiten to exactly 0. In float32 the rounding error of their mean would
    remain, divided by sqrt(1e-8), and Adam, which is invariant to a gradient's scale, would take a
    full step.
    """
    centred = x.double() - x.double().mean()
    variance = centred.square().sum() / max(len(x) - 1, 1)
    return (centred * torch.rsqrt(variance + WHITEN_EPS)).to(x.dtype)


def extremes(
    values: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest value of each group: two [G]. values: [G, n]. mask: [G,
    n] bool, values that count; None: all. A group without one has infinity and -infinity."""
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    low = values.masked_fill(~mask, torch.inf).amin(dim=1)
    return low, values.masked_fill(~mask, -torch.inf).amax(dim=1)


def differ(values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return whether the responses of a group differ: [G] bool. values, mask: as of extremes.

    verl asks for a standard deviation above 0, which rounding gives to three responses of 0.1."""
    low, high = extremes(values, mask)
    return low < high


# ---------------------------------------------------------------- with a critic


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    response_lens: torch.Tensor,
    gamma: float,
    lam: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns) by generalised advantage estimation (arXiv 1506.02438), each
    [R].

    delta_t = r_t + gamma * V_next - V_t;  A_t = delta_t + gamma * lam * A_next;  returns = A + V.
    After a response's last token V and A are 0. Returns are computed from unwhitened advantages:
    whiten them afterwards. rewards, values: [R], same dtype; gamma, lam: per token, 0 to 1;
    lam: of all responses, or [S] of each.
    """
    next_values = values.roll(-1)
    next_values[response_lens.cumsum(0) - 1] = 0.0
    advantages = discounted_sums(rewards + gamma * next_values - values, response_lens, gamma * lam)
    return advantages, advantages + values


def whitened_gae(inputs: EstimatorInputs) -> Estimate:
    """Return the advantages of `gae`, whitened over the tokens of the batch, and its returns.

    Each has its own lambda with gae_lambda_value or gae_lambda_policy: decoupled GAE, VC-PPO (arXiv
    2503.01491). With length_adaptive_alpha the advantages of a response of l tokens have lambda =
    max(0, 1 - 1 / (alpha l)): VAPO (arXiv 2504.05118). The coefficients lambda^k of the temporal
    differences then sum to 1 / (1 - lambda) = alpha l.
    """
    advantages, returns = _decoupled_gae(inputs)
    return Estimate(whiten(advantages), returns)


def _decoupled_gae(inputs: EstimatorInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantages with lambda_policy, and the returns with lambda_value."""
    assert inputs.values is not None
    terms = inputs.rewards, inputs.values, inputs.response_lens, inputs.gamma
    lam = inputs.lambda_policy
    advantages, returns = gae(*terms, lam)
    if isinstance(lam, torch.Tensor) or lam != inputs.lambda_value:
        _, returns = gae(*terms, inputs.lambda_value)
    return advantages, returns


def gae_turn(inputs: EstimatorInputs) -> Estimate:
    """Return whitened_gae with turns in place of tokens: r_k is the sum of a turn's rewards, V_k
    the value of the state before its first token, and gamma and lambda are per turn.

    Each token has the advantage and the return of its turn; whitening is over tokens. Source:
    Turn-PPO (arXiv 2512.17008).
    """
    turns, lens = inputs.by_turn()
    advantages, returns = (
        torch.repeat_interleave(x.to(inputs.rewards.dtype), lens) for x in _decoupled_gae(turns)
    )
    return Estimate(whiten(advantages), returns)


# ---------------------------------------------------------------- by comparison with the responses
# of a group


def _compared(inputs: EstimatorInputs) -> torch.Tensor:
    """Return the response rewards, of groups of at least two."""
    assert inputs.group_sizes.min() >= 2, "a group needs two responses"
    return inputs.response_rewards


def _centred(inputs: EstimatorInputs) -> torch.Tensor:
    """Return R - mean of the group for each response: [S] float64."""
    rewards = _compared(inputs)
    return rewards - inputs.per_prompt(rewards)


def _by_std(advantages: torch.Tensor, inputs: EstimatorInputs) -> torch.Tensor:
    """Return the advantages [S] over the group's standard deviation + 1e-6, or as they are without
    norm_by_std."""
    return (
        advantages / (inputs.per_prompt(_compared(inputs), "std") + STD_EPS)
        if inputs.norm_by_std
        else advantages
    )


def grpo(inputs: EstimatorInputs) -> Estimate:
    """Return A = (R - mean of the group) / (std of the group + 1e-6) for each token of a response
    of reward R.

    std is the unbiased one. Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2. Without
    norm_by_std the advantage is not divided: Dr. GRPO (arXiv 2503.20783), section 3.2, which also
    takes the loss aggregation seq-mean-token-sum-norm.
    """
    return Estimate(inputs.per_token(_by_std(_centred(inputs), inputs)))


def grpo_turn(inputs: EstimatorInputs) -> Estimate:
    """Return A = (G - mean) / (std + 1e-6) for each token of a turn, where G is the discounted sum
    of the rewards of this turn and the later ones, and mean and std are over the turns of the same
    index in the group; 0 where these are equal to 1e-6 of the largest, or the turn is the only one.

    The baseline does not depend on whether the conversation continues, unlike that of a sum of the
    normalised rewards of turns (github.com/verl-project/verl, issue 7244). Source of statistics per
    turn: MT-GRPO (arXiv 2505.11821).
    """
    _compared(inputs)
    turns, lens = inputs.by_turn()
    assert turns.turns is not None
    gains = discounted_sums(turns.rewards, turns.response_lens, inputs.gamma)
    most = int(turns.turns.max()) + 1
    group = torch.repeat_interleave(inputs.group, turns.response_lens) * most + turns.turns
    of_index = replace(inputs, scores=gains, group=group)
    advantages = gains - of_index.per_prompt(gains)
    if inputs.norm_by_std:
        advantages = advantages / (of_index.per_prompt(gains, "std") + STD_EPS)
    high = of_index.per_prompt(gains, "max")
    low = of_index.per_prompt(gains, "min")
    differs = high - low > TURN_EPS * torch.maximum(high.abs(), low.abs())
    advantages = torch.where(differs, advantages, 0.0).to(inputs.rewards.dtype)
    return Estimate(torch.repeat_interleave(advantages, lens))


def grpo_passk(inputs: EstimatorInputs) -> Estimate:
    """Return A = (R - second highest reward of the group) for the best response of a group, 0 for
    the others.

    It estimates the gradient of the expected maximum over a group (pass@k). With norm_by_std it is
    divided by the group's standard deviation + 1e-6. Source: arXiv 2503.19595; where several
    responses are the best, all have 0.
    """
    rewards = _compared(inputs)
    best = inputs.per_prompt(rewards, "max")
    is_best = rewards == best
    second = inputs.per_prompt(torch.where(is_best, -torch.inf, rewards), "max")
    is_only_best = is_best & (inputs.per_prompt(is_best, "sum") == 1)
    return Estimate(
        inputs.per_token(_by_std(torch.where(is_only_best, best - second, 0.0), inputs))
    )


def decoupled_scores(
    parts: torch.Tensor, weights: torch.Tensor, responses_per_prompt: int, norm_by_std: bool
) -> torch.Tensor:
    """Return sum_k w_k (r_k - mean of the group) / (std of the group + 1e-6) for each response: [S]
    float32, 0 where no part differs in the group.

    parts: [K, S] float32, the rewards r_k of a response, whose groups are one after the other.
    weights: [K, S], w_k. std is the unbiased one; without norm_by_std there is no division. Source:
    GDPO (arXiv 2601.05242), group-wise normalisation of each reward, as verl has it.
    """
    grouped = parts.double().unflatten(1, (-1, responses_per_prompt))
    centred = grouped - grouped.mean(dim=-1, keepdim=True)
    if norm_by_std:
        centred = centred / (grouped.std(dim=-1, keepdim=True) + STD_EPS)
    return (weights * centred.flatten(1)).sum(dim=0).float()


def gdpo(inputs: EstimatorInputs) -> Estimate:
    """Return the decoupled score of a response on each token, whitened over the tokens of the
    batch. Source: GDPO (arXiv 2601.05242), batch-wise normalisation. Mean and deviation are over
    tokens, as in verl, in NeMo-RL over responses."""
    assert inputs.decoupled_scores is not None
    return Estimate(whiten(inputs.per_token(inputs.decoupled_scores)))


def maxrl(inputs: EstimatorInputs) -> Estimate:
    """Return A = (R - mean of the group) / (mean of the group + 1e-6), 0 in a group whose mean is
    not above 0.

    R must be 0 or more. With R of 0 and 1 it is an unbiased gradient of a truncated series of the
    log of the prompt's success probability. Source: MaxRL (arXiv 2602.02710), as the authors' code
    has it (github.com/tajwarfahim/maxrl, p_normalization).
    """
    means = inputs.per_prompt(_compared(inputs))
    advantages = _centred(inputs) / (means + STD_EPS)
    return Estimate(inputs.per_token(torch.where(means > 0, advantages, 0.0)))


def rloo(inputs: EstimatorInputs) -> Estimate:
    """Return A = R - mean of the other responses of the group (leave-one-out), equal to (R - mean)
    * n / (n - 1).

    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; RLOO (arXiv
    2402.14740).
    """
    sizes = inputs.group_sizes
    return Estimate(inputs.per_token(_centred(inputs) * sizes / (sizes - 1)))


def opo(inputs: EstimatorInputs) -> Estimate:
    """Return A = R - the group's mean weighted by length: b = sum_i len_i R_i / sum_i len_i.

    It is the baseline of least variance if a response's squared gradient norm is proportional to
    its length. Source: OPO (arXiv 2505.23585).
    """
    # Of the centred rewards: a group of equal rewards then has exactly 0, whatever its lengths.
    centred = _centred(inputs)
    lens = inputs.response_lens
    baseline = inputs.per_prompt(lens * centred, "sum") / inputs.per_prompt(lens, "sum")
    return Estimate(inputs.per_token(centred - baseline))


def gpg(inputs: EstimatorInputs) -> Estimate:
    """Return A = alpha * (R - mean of the group), with alpha = responses / responses of groups of
    unequal rewards.

    Groups of equal rewards have no gradient; alpha makes up for their share of the batch. Source:
    GPG (arXiv 2504.02546), accurate gradient estimation, alpha = B / (B - M). verl divides by the
    responses of nonzero reward.
    """
    rewards = inputs.response_rewards
    counted = (inputs.per_prompt(rewards, "max") != inputs.per_prompt(rewards, "min")).sum()
    alpha = len(rewards) / counted.clamp(min=1)
    return Estimate(inputs.per_token(alpha * _centred(inputs)))


def reinforce_plus_plus_baseline(inputs: EstimatorInputs) -> Estimate:
    """Return R - mean of the group on each token, whitened over the tokens of the batch. Source:
    REINFORCE++ (arXiv 2501.03262), the variant with a group's mean as baseline."""
    return Estimate(whiten(inputs.per_token(_centred(inputs))))


# ---------------------------------------------------------------- of each response alone


def reinforce_plus_plus(inputs: EstimatorInputs) -> Estimate:
    """Return the discounted sum of the rewards from each token on, whitened over the tokens of the
    batch.

    Source: REINFORCE++ (arXiv 2501.03262), where the mean over the batch is the baseline.
    """
    returns = discounted_sums(inputs.rewards, inputs.response_lens, inputs.gamma)
    return Estimate(whiten(returns), returns)


def remax(inputs: EstimatorInputs) -> Estimate:
    """Return the sum of the rewards from each token on, less the score of the greedy response to
    the same prompt.

    Source: ReMax (arXiv 2310.10505), algorithm 1.
    """
    assert inputs.greedy_scores is not None
    returns = discounted_sums(inputs.rewards, inputs.response_lens, 1.0)
    return Estimate(returns - inputs.per_token(inputs.greedy_scores), returns)


ADVANTAGE_ESTIMATORS: dict[str, EstimatorFunction] = {
    "gae": whitened_gae,
    "gae_turn": gae_turn,
    "grpo": grpo,
    "grpo_turn": grpo_turn,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "maxrl": maxrl,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
}
"""By algorithm.adv_estimator."""
