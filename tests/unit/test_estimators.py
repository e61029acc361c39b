"""The advantage estimators of advantages.py: hand-worked groups, slow plain-Python versions, equal scores, and their
needs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch

from rlhf_mc.algorithms import advantages
from rlhf_mc.algorithms.advantages import ADVANTAGE_ESTIMATORS, Estimate, EstimatorInputs, token_rewards
from rlhf_mc.algorithms.masked import masked_whiten
from rlhf_mc.config.algorithm_schema import ESTIMATOR_NEEDS, AdvEstimator

OF_GROUPS = sorted(name for name, needs in ESTIMATOR_NEEDS.items() if needs.group)
Rows = list[list[float]]


def test_every_estimator_can_be_set_and_has_needs() -> None:
    assert {*ADVANTAGE_ESTIMATORS, "custom"} == set(get_args(AdvEstimator))
    assert set(ADVANTAGE_ESTIMATORS) == set(ESTIMATOR_NEEDS)


def inputs_of(scores: list[float], lens: list[int], group: list[int], **fields: object) -> EstimatorInputs:
    mask = torch.arange(max(lens))[None, :] < torch.tensor(lens)[:, None]
    score = torch.tensor(scores)
    given = {"rewards": token_rewards(score, None, 0.0, mask), "scores": score, **fields}
    return EstimatorInputs(mask=mask, group=torch.tensor(group), **given)  # type: ignore[arg-type]


def random_inputs(seed: int) -> EstimatorInputs:
    """Return 5 prompts with 3 responses each, not in the order of the prompts, with rewards on every token, holes, and
    values off the mask that must not matter."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(15, 7, generator=g) < 0.7
    mask[:, 0] = True
    rewards = torch.where(mask, torch.randn(15, 7, generator=g), torch.zeros(15, 7))
    return EstimatorInputs(
        rewards=rewards,
        mask=mask,
        scores=rewards.sum(1),
        group=torch.arange(15)[torch.randperm(15, generator=g)] % 5,
        values=torch.where(mask, torch.randn(15, 7, generator=g), torch.nan),
        greedy_scores=torch.randn(15, generator=g),
        gamma=0.9,
        lam=0.8,
    )


# Slow versions, response by response.


def on_tokens(inputs: EstimatorInputs, per_response: Callable[[int, list[int]], float]) -> Rows:
    """Return per_response(response, its group's responses) on each token."""
    group = inputs.group.tolist()
    rows = []
    for i, row in enumerate(inputs.mask.tolist()):
        members = [j for j, g in enumerate(group) if g == group[i]]
        rows.append([per_response(i, members) if on else 0.0 for on in row])
    return rows


def slow(name: str, inputs: EstimatorInputs) -> Rows:
    mask = inputs.mask.tolist()
    rewards = [
        [r if on else 0.0 for r, on in zip(*row, strict=True)]
        for row in zip(inputs.rewards.tolist(), mask, strict=True)
    ]
    total = [math.fsum(row) for row in rewards]

    def of(members: list[int]) -> list[float]:
        return [total[j] for j in members]

    def deviation(members: list[int]) -> float:
        return statistics.stdev(of(members)) + 1e-6 if inputs.norm_by_std else 1.0

    def best_of(i: int, members: list[int]) -> float:
        ranked = sorted(of(members))
        return (ranked[-1] - ranked[-2]) / deviation(members) if total[i] == ranked[-1] else 0.0

    def weighted(i: int, members: list[int]) -> float:
        lens = [sum(mask[j]) for j in members]
        return total[i] - sum(n * r for n, r in zip(lens, of(members), strict=True)) / sum(lens)

    per_response: dict[str, Callable[[int, list[int]], float]] = {
        "grpo": lambda i, m: (total[i] - statistics.mean(of(m))) / deviation(m),
        "grpo_passk": best_of,
        "rloo": lambda i, m: total[i] - statistics.mean(total[j] for j in m if j != i),
        "opo": weighted,
        "gpg": lambda i, m: total[i] - statistics.mean(of(m)),  # no group has equal rewards
        "reinforce_plus_plus_baseline": lambda i, m: total[i] - statistics.mean(of(m)),
    }
    if name in per_response:
        return on_tokens(inputs, per_response[name])
    gamma = inputs.gamma if name == "reinforce_plus_plus" else 1.0
    assert inputs.greedy_scores is not None
    rows = []
    for i, row in enumerate(rewards):
        positions = [t for t, on in enumerate(mask[i]) if on]
        out = [0.0] * len(row)
        for k, t in enumerate(positions):
            out[t] = sum(gamma**j * row[u] for j, u in enumerate(positions[k:]))
            out[t] -= inputs.greedy_scores.tolist()[i] if name == "remax" else 0.0
        rows.append(out)
    return rows


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("name", sorted(set(ADVANTAGE_ESTIMATORS) - {"gae"}))
def test_estimator_matches_plain_python(name: str, norm_by_std: bool) -> None:
    inputs = replace(random_inputs(seed=len(name)), norm_by_std=norm_by_std)
    expected = torch.tensor(slow(name, inputs))
    if name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        expected = masked_whiten(expected, inputs.mask)
    found = ADVANTAGE_ESTIMATORS[name](inputs)
    assert found.advantages.dtype == torch.float32
    torch.testing.assert_close(found.advantages, expected, rtol=1e-4, atol=1e-5)
    assert (found.returns is not None) == (name in ("reinforce_plus_plus", "remax"))


def test_gae_is_whitened_and_has_the_returns_of_the_values() -> None:
    inputs = random_inputs(seed=0)
    raw, returns = advantages.gae(inputs.rewards, inputs.values, inputs.mask, inputs.gamma, inputs.lam)
    found = ADVANTAGE_ESTIMATORS["gae"](inputs)
    assert torch.equal(found.advantages, masked_whiten(raw, inputs.mask))
    assert found.returns is not None and torch.equal(found.returns, returns)


def first_tokens(estimate: Estimate) -> list[float]:
    return estimate.advantages[:, 0].tolist()


def test_groups_by_hand() -> None:
    # Prompt 0: scores 1, 0, 2 with 1, 1, 2 tokens: mean 1, std 1. Prompt 1: scores 3, 3, 3.
    inputs = inputs_of([1.0, 0.0, 2.0, 3.0, 3.0, 3.0], [1, 1, 2, 1, 2, 3], [0, 0, 0, 1, 1, 1])
    zeros = [0.0] * 3
    near = {"abs": 1e-5}
    assert first_tokens(advantages.grpo(inputs)) == pytest.approx([0.0, -1.0, 1.0, *zeros], **near)
    assert first_tokens(advantages.rloo(inputs)) == [0.0, -1.5, 1.5, *zeros]  # 0 - (1 + 2) / 2, 2 - (1 + 0) / 2
    assert first_tokens(advantages.grpo_passk(inputs)) == pytest.approx([0.0, 0.0, 1.0, *zeros], **near)
    assert first_tokens(advantages.opo(inputs)) == [-0.25, -1.25, 0.75, *zeros]  # the mean by length is 5 / 4
    assert first_tokens(advantages.gpg(inputs)) == [0.0, -2.0, 2.0, *zeros]  # 3 of 6 responses differ: alpha is 2
    assert advantages.grpo(inputs).advantages[2].tolist() == pytest.approx([1.0, 1.0, 0.0], **near)
    doctor = replace(inputs_of([5.0, 0.0], [1, 1], [7, 7]), norm_by_std=False)
    assert first_tokens(advantages.grpo(doctor)) == [2.5, -2.5]


def test_remax_and_reinforce_plus_plus_by_hand() -> None:
    rewards = torch.tensor([[-0.5, 1.0], [2.0, 0.0]])
    inputs = inputs_of([1.0, 2.0], [2, 1], [0, 1], rewards=rewards, greedy_scores=torch.tensor([0.25, 3.0]), gamma=0.5)
    found = advantages.remax(inputs)
    assert found.advantages.tolist() == [[0.25, 0.75], [-1.0, 0.0]]
    assert found.returns is not None and found.returns.tolist() == [[0.5, 1.0], [2.0, 0.0]]
    discounted = advantages.reinforce_plus_plus(inputs)
    assert discounted.returns is not None and discounted.returns.tolist() == [[0.0, 1.0], [2.0, 0.0]]
    assert discounted.advantages.tolist() == [[-1.0, 0.0], [1.0, 0.0]]  # mean 1, std 1


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("score", [0.1, 1 / 3, -12.34])
def test_equal_scores_have_advantages_of_exactly_zero(name: str, score: float) -> None:
    inputs = inputs_of([score] * 6, [3, 1, 2, 5, 4, 7], [0, 0, 0, 1, 1, 1])
    assert torch.equal(ADVANTAGE_ESTIMATORS[name](inputs).advantages, torch.zeros(6, 7))


@pytest.mark.parametrize("name", OF_GROUPS)
def test_groups_of_one_response_are_refused(name: str) -> None:
    with pytest.raises(AssertionError):
        ADVANTAGE_ESTIMATORS[name](inputs_of([1.0, 2.0, 3.0], [1, 1, 1], [0, 0, 1]))


def test_passk_gives_nothing_to_several_best_responses() -> None:
    inputs = inputs_of([1.0, 1.0, 0.0], [1, 1, 1], [0, 0, 0])
    assert first_tokens(advantages.grpo_passk(inputs)) == [0.0, 0.0, 0.0]
