"""The advantage estimators of estimators.py: hand-worked groups, slow plain-Python versions, equal
scores, and their needs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from rlhf_mc.algorithms import estimators
from rlhf_mc.algorithms.estimators import (
    ADVANTAGE_ESTIMATORS,
    STD_EPS,
    Estimate,
    EstimatorInputs,
    token_rewards,
    whiten,
)
from rlhf_mc.config.algorithm_schema import ESTIMATOR_NEEDS, AdvEstimator, AlgorithmConfig
from rlhf_mc.data.batch import (
    OBSERVED,
    Generation,
    Prompt,
    RaggedBatch,
    Responses,
    build_batch,
)
from rlhf_mc.rewards.results import Episode, Score
from rlhf_mc.trainer.advantages import advantages_and_returns
from rlhf_mc.trainer.scores import turn_numbers, turn_rewards

OF_GROUPS = sorted(
    name for name, needs in ESTIMATOR_NEEDS.items() if needs.group and not needs.parts
)
Rows = list[list[float]]


def test_every_estimator_can_be_set_and_has_needs() -> None:
    assert {*ADVANTAGE_ESTIMATORS, "custom"} == set(get_args(AdvEstimator))
    assert set(ADVANTAGE_ESTIMATORS) == set(ESTIMATOR_NEEDS)


def inputs_of(
    scores: list[float], lens: list[int], group: list[int], **fields: object
) -> EstimatorInputs:
    response_lens = torch.tensor(lens)
    score = torch.tensor(scores)
    given = {"rewards": token_rewards(score, None, 0.0, response_lens), "scores": score, **fields}
    return EstimatorInputs(response_lens=response_lens, group=torch.tensor(group), **given)  # type: ignore[arg-type]


def random_inputs(seed: int) -> EstimatorInputs:
    """Return 5 prompts with 3 responses each, not in the order of the prompts, with rewards on
    every token."""
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 8, (15,), generator=g)
    return EstimatorInputs(
        rewards=torch.randn(int(lens.sum()), generator=g),
        response_lens=lens,
        scores=torch.randn(15, generator=g),
        group=torch.arange(15)[torch.randperm(15, generator=g)] % 5,
        values=torch.randn(int(lens.sum()), generator=g),
        greedy_scores=torch.randn(15, generator=g),
        decoupled_scores=torch.randn(15, generator=g),
        gamma=0.9,
        lam=0.8,
    )


# Slow versions, response by response.


def responses_of(x: torch.Tensor, inputs: EstimatorInputs) -> Rows:
    """Return the tokens of each response."""
    return [part.tolist() for part in x.split(inputs.response_lens.tolist())]


def slow(name: str, inputs: EstimatorInputs) -> Rows:
    """Return the advantages of each response, token by token."""
    group = inputs.group.tolist()
    lengths = inputs.response_lens.tolist()
    rewards = responses_of(inputs.rewards, inputs)
    total = [math.fsum(row) for row in rewards]

    def of(members: list[int]) -> list[float]:
        return [total[j] for j in members]

    def deviation(members: list[int]) -> float:
        return statistics.stdev(of(members)) + 1e-6 if inputs.norm_by_std else 1.0

    def best_of(i: int, members: list[int]) -> float:
        ranked = sorted(of(members))
        return (ranked[-1] - ranked[-2]) / deviation(members) if total[i] == ranked[-1] else 0.0

    def weighted(i: int, members: list[int]) -> float:
        lens = [lengths[j] for j in members]
        return total[i] - sum(n * r for n, r in zip(lens, of(members), strict=True)) / sum(lens)

    def by_mean(i: int, members: list[int]) -> float:
        mean = statistics.mean(of(members))
        return (total[i] - mean) / (mean + 1e-6) if mean > 0 else 0.0

    decoupled = [] if inputs.decoupled_scores is None else inputs.decoupled_scores.tolist()
    per_response: dict[str, Callable[[int, list[int]], float]] = {
        "grpo": lambda i, m: (total[i] - statistics.mean(of(m))) / deviation(m),
        "grpo_turn": lambda i, m: (total[i] - statistics.mean(of(m))) / deviation(m),
        "grpo_passk": best_of,
        "gdpo": lambda i, _: decoupled[i],
        "maxrl": by_mean,
        "rloo": lambda i, m: total[i] - statistics.mean(total[j] for j in m if j != i),
        "opo": weighted,
        "gpg": lambda i, m: total[i] - statistics.mean(of(m)),  # no group has equal rewards
        "reinforce_plus_plus_baseline": lambda i, m: total[i] - statistics.mean(of(m)),
    }
    if name in per_response:
        members = [[j for j, other in enumerate(group) if other == mine] for mine in group]
        return [[per_response[name](i, members[i])] * n for i, n in enumerate(lengths)]
    gamma = inputs.gamma if name == "reinforce_plus_plus" else 1.0
    assert inputs.greedy_scores is not None
    baselines = inputs.greedy_scores.tolist() if name == "remax" else [0.0] * len(rewards)
    return [
        [sum(gamma**j * r for j, r in enumerate(row[t:])) - baseline for t in range(len(row))]
        for row, baseline in zip(rewards, baselines, strict=True)
    ]


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("name", sorted(set(ADVANTAGE_ESTIMATORS) - {"gae", "gae_turn"}))
def test_estimator_matches_plain_python(name: str, norm_by_std: bool) -> None:
    inputs = replace(random_inputs(seed=len(name)), norm_by_std=norm_by_std)
    expected = torch.tensor([x for row in slow(name, inputs) for x in row])
    if name in ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        expected = whiten(expected)
    found = ADVANTAGE_ESTIMATORS[name](inputs)
    assert found.advantages.dtype == torch.float32
    torch.testing.assert_close(found.advantages, expected, rtol=1e-4, atol=1e-5)
    assert (found.returns is not None) == (name in ("reinforce_plus_plus", "remax"))


def test_gae_is_whitened_and_has_the_returns_of_the_values() -> None:
    inputs = random_inputs(seed=0)
    raw, returns = estimators.gae(
        inputs.rewards, inputs.values, inputs.response_lens, inputs.gamma, inputs.lam
    )
    found = ADVANTAGE_ESTIMATORS["gae"](inputs)
    assert torch.equal(found.advantages, whiten(raw))
    assert found.returns is not None and torch.equal(found.returns, returns)


def test_lambdas_of_returns_and_advantages_match_the_definition() -> None:
    """Compare with sums over each response in float64: the returns with one lambda, the advantages
    with another, or with the response's own."""
    base = random_inputs(seed=5)
    assert base.values is not None and base.response_lens.min() < 3 < base.response_lens.max()
    inputs = replace(base, rewards=base.rewards.double(), values=base.values.double())
    settings: list[tuple[dict[str, float], float, Callable[[int], float]]] = [
        ({}, 0.8, lambda _: 0.8),
        ({"gae_lambda_value": 1.0}, 1.0, lambda _: 0.8),
        ({"gae_lambda_policy": 0.3}, 0.8, lambda _: 0.3),
        ({"gae_lambda_value": 0.0, "gae_lambda_policy": 1.0}, 0.0, lambda _: 1.0),
        # below 0 for responses of fewer than 4 tokens
        ({"length_adaptive_alpha": 0.25}, 0.8, lambda n: max(0.0, 1 - 4 / n)),
        (
            {"length_adaptive_alpha": 0.7, "gae_lambda_policy": 0.1, "gae_lambda_value": 0.9},
            0.9,
            lambda n: max(0.0, 1 - 1 / (0.7 * n)),
        ),
    ]
    for given, lambda_value, lambda_policy in settings:
        found = ADVANTAGE_ESTIMATORS["gae"](replace(inputs, **given))  # type: ignore[arg-type]
        advantages: list[float] = []
        returns: list[float] = []
        for rewards, values in zip(
            responses_of(inputs.rewards, inputs), responses_of(inputs.values, inputs), strict=True
        ):
            following = [*values[1:], 0.0]
            deltas = [r + 0.9 * n - v for r, n, v in zip(rewards, following, values, strict=True)]
            for lam, results, added in (
                (lambda_policy(len(values)), advantages, [0.0] * len(values)),
                (lambda_value, returns, values),
            ):
                results += [
                    sum((0.9 * lam) ** k * d for k, d in enumerate(deltas[t:])) + added[t]
                    for t in range(len(deltas))
                ]
        expected = whiten(torch.tensor(advantages, dtype=torch.float64))
        assert found.returns is not None
        torch.testing.assert_close(found.advantages, expected, rtol=0, atol=1e-12)
        assert found.returns.tolist() == pytest.approx(returns, abs=1e-12)


@pytest.mark.parametrize("statistic", ["sum", "mean", "max", "min", "std"])
def test_statistics_match_plain_python(statistic: str) -> None:
    functions = {
        "sum": math.fsum,
        "mean": statistics.fmean,
        "max": max,
        "min": min,
        "std": statistics.stdev,
    }
    function = functions[statistic]
    inputs = random_inputs(seed=3)
    scores = inputs.scores.tolist()
    of_group = {
        g: [x for x, other in zip(scores, inputs.group, strict=True) if other == g]
        for g in range(5)
    }
    expected = [function(of_group[g]) for g in inputs.group.tolist()]
    assert inputs.per_prompt(inputs.scores, statistic).tolist() == pytest.approx(
        expected, rel=1e-12
    )  # type: ignore[arg-type]
    assert inputs.group_sizes.tolist() == [3.0] * 15
    if statistic != "std":
        expected = [function(row) for row in responses_of(inputs.rewards, inputs)]
        found = inputs.per_response(inputs.rewards, statistic)  # type: ignore[arg-type]
        assert found.dtype == torch.float64 and found.tolist() == pytest.approx(expected, rel=1e-12)


def test_numbers_of_responses_on_tokens_and_prompts_of_one_response() -> None:
    inputs = inputs_of([1.0, 2.0, 4.0], [2, 1, 3], [9, 4, 9])
    assert inputs.per_token(inputs.scores.double()).tolist() == [1.0, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert inputs.per_token(inputs.scores.double()).dtype == torch.float32
    assert inputs.per_prompt(inputs.scores).tolist() == [2.5, 2.0, 2.5]
    assert math.isnan(inputs.per_prompt(inputs.scores, "std")[1])


def first_tokens(estimate: Estimate, inputs: EstimatorInputs) -> list[float]:
    return [row[0] for row in responses_of(estimate.advantages, inputs)]


def test_groups_by_hand() -> None:
    # Prompt 0: scores 1, 0, 2 with 1, 1, 2 tokens: mean 1, std 1. Prompt 1: scores 3, 3, 3.
    inputs = inputs_of([1.0, 0.0, 2.0, 3.0, 3.0, 3.0], [1, 1, 2, 1, 2, 3], [0, 0, 0, 1, 1, 1])
    zeros = [0.0] * 3
    near = {"abs": 1e-5}
    assert first_tokens(estimators.grpo(inputs), inputs) == pytest.approx(
        [0.0, -1.0, 1.0, *zeros], **near
    )
    # 0 - (1 + 2) / 2, 2 - (1 + 0) / 2
    assert first_tokens(estimators.rloo(inputs), inputs) == [0.0, -1.5, 1.5, *zeros]
    assert first_tokens(estimators.grpo_passk(inputs), inputs) == pytest.approx(
        [0.0, 0.0, 1.0, *zeros], **near
    )
    # the mean by length is 5 / 4
    assert first_tokens(estimators.opo(inputs), inputs) == [-0.25, -1.25, 0.75, *zeros]
    assert first_tokens(estimators.gpg(inputs), inputs) == [
        0.0,
        -2.0,
        2.0,
        *zeros,
    ]  # 3 of 6 responses differ: alpha is 2
    assert estimators.grpo(inputs).advantages[2:4].tolist() == pytest.approx([1.0, 1.0], **near)
    doctor = replace(inputs_of([5.0, 0.0], [1, 1], [7, 7]), norm_by_std=False)
    assert first_tokens(estimators.grpo(doctor), doctor) == [2.5, -2.5]


def test_remax_and_reinforce_plus_plus_by_hand() -> None:
    rewards = torch.tensor([-0.5, 1.0, 2.0])
    inputs = inputs_of(
        [1.0, 2.0],
        [2, 1],
        [0, 1],
        rewards=rewards,
        greedy_scores=torch.tensor([0.25, 3.0]),
        gamma=0.5,
    )
    found = estimators.remax(inputs)
    assert found.advantages.tolist() == [0.25, 0.75, -1.0]
    assert found.returns is not None and found.returns.tolist() == [0.5, 1.0, 2.0]
    discounted = estimators.reinforce_plus_plus(inputs)
    assert discounted.returns is not None and discounted.returns.tolist() == [0.0, 1.0, 2.0]
    assert discounted.advantages.tolist() == [-1.0, 0.0, 1.0]  # mean 1, std 1


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("score", [0.1, 1 / 3, -12.34])
def test_equal_scores_have_advantages_of_exactly_zero(name: str, score: float) -> None:
    inputs = inputs_of([score] * 6, [3, 1, 2, 5, 4, 7], [0, 0, 0, 1, 1, 1])
    assert torch.equal(ADVANTAGE_ESTIMATORS[name](inputs).advantages, torch.zeros(22))


@pytest.mark.parametrize("name", OF_GROUPS)
def test_equal_scores_with_unequal_rewards_of_turns_give_nothing(name: str) -> None:
    """Sums of 0.1, 0.2, and what is left of 0.3, are not 0.3."""
    prompts = [Prompt(0, np.array([5, 6], np.int32), "", None)] * 3
    batch = build_batch(prompts, Responses.of([Generation([9] * 3, [-1.0] * 3, True)] * 3))
    batch = batch.with_fields(
        scores=torch.tensor([0.3] * 3),
        turn_rewards=torch.tensor([0.1, 0.2, 0.0, 0.3, 0.0, 0.0, 0.7, -0.4, 0.0]),
        old_log_probs=torch.zeros(9),
    )
    cfg = AlgorithmConfig(adv_estimator=name)  # type: ignore[arg-type]
    found, _, _ = advantages_and_returns(batch, cfg, 0.0, 3, ADVANTAGE_ESTIMATORS[name])
    assert found.advantages is not None and not found.advantages.any()


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_masked_responses_are_out_of_all_statistics(name: str) -> None:
    """Compare with the batch of the other responses alone, bit for bit, in groups of 3 and 2."""
    g = torch.Generator().manual_seed(3)
    lens = [2, 5, 1, 4, 3, 2]
    prompts = [Prompt(0, np.array([5, 6], np.int32), "", None)] * 6
    responses = [Generation([9] * n, [-1.0] * n, True) for n in lens]
    batch = build_batch(prompts, Responses.of(responses))
    per_token = {
        key: torch.randn(sum(lens), generator=g)
        for key in ("values", "old_log_probs", "ref_log_probs")
    }
    per_response = {
        key: torch.rand(6, generator=g) for key in ("scores", "greedy_scores", "decoupled_scores")
    }
    batch = batch.with_fields(**per_token, **per_response)
    adds_kl = name not in ("maxrl", "gdpo")
    cfg = AlgorithmConfig(adv_estimator=name, use_kl_in_reward=adds_kl, gamma=0.9, lam=0.8)  # type: ignore[arg-type]
    mask = torch.tensor([1, 1, 1, 1, 0, 1]).bool()
    function = ADVANTAGE_ESTIMATORS[name]
    found, metrics, kl = advantages_and_returns(
        batch.with_fields(sample_mask=mask), cfg, 0.5, 3, function
    )
    for score in (-7.0, 7.0):
        assert batch.scores is not None
        other = batch.with_fields(sample_mask=mask, scores=batch.scores.where(mask, score))
        again = advantages_and_returns(other, cfg, 0.5, 3, function)
        assert torch.equal(again[0].advantages, found.advantages)  # type: ignore[arg-type]
        assert again[1:] == (metrics, kl)
    alone = batch.select([0, 1, 2, 3, 5])
    inputs = EstimatorInputs(
        token_rewards(
            alone.scores,  # type: ignore[arg-type]
            alone.old_log_probs - alone.ref_log_probs if adds_kl else None,  # type: ignore[operator]
            0.5,
            alone.response_lens,
        ),
        alone.response_lens,
        alone.scores,  # type: ignore[arg-type]
        torch.tensor([0, 0, 0, 1, 1]),
        alone.values,
        alone.greedy_scores,
        alone.decoupled_scores,
        0.9,
        0.8,
    )
    wanted = function(inputs).advantages.tolist()
    masked = slice(sum(lens[:4]), sum(lens[:5]))
    assert found.advantages is not None
    parts = found.advantages.tolist()
    assert parts[: masked.start] + parts[masked.stop :] == wanted and any(wanted)
    assert parts[masked] == [0.0] * lens[4]
    nothing, metrics, kl = advantages_and_returns(
        batch.with_fields(sample_mask=torch.zeros(6, dtype=torch.bool)), cfg, 0.5, 3, function
    )
    assert nothing.advantages is not None and not nothing.advantages.any()
    assert (metrics, kl) == ({}, 0.0)


@pytest.mark.parametrize("name", OF_GROUPS)
def test_groups_of_one_response_are_refused(name: str) -> None:
    with pytest.raises(AssertionError):
        ADVANTAGE_ESTIMATORS[name](inputs_of([1.0, 2.0, 3.0], [1, 1, 1], [0, 0, 1]))


def test_maxrl_by_hand() -> None:
    """Compare two groups: K right responses of 4 have (4 - K) / K each, the wrong ones -1; without
    a right one all have 0."""
    scores = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    inputs = inputs_of(scores, [1] * 12, [g for g in range(3) for _ in range(4)])
    third = 1 / 3
    assert first_tokens(estimators.maxrl(inputs), inputs) == pytest.approx(
        [3, -1, -1, -1, third, third, -1, third, 0, 0, 0, 0], rel=1e-5
    )
    below = inputs_of([1.0, -2.0], [1, 1], [0, 0])
    assert first_tokens(estimators.maxrl(below), below) == [0.0, 0.0]


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_decoupled_scores_match_gdpos_definition(norm_by_std: bool) -> None:
    """Compare with loops over the groups in float64: each reward normalised in its group, then
    summed with its weight."""
    g = torch.Generator().manual_seed(6)
    parts = torch.randn(3, 12, generator=g)
    parts[1, :4] = 0.1  # a part that does not differ in the first group
    weights = torch.randn(3, 12, generator=g, dtype=torch.float64)
    expected = [0.0] * 12
    for k, row in enumerate(parts.tolist()):
        for first in range(0, 12, 4):
            of_group = row[first : first + 4]
            scale = statistics.stdev(of_group) + 1e-6 if norm_by_std else 1.0
            for i in range(first, first + 4):
                normalised = (row[i] - statistics.fmean(of_group)) / scale
                expected[i] += float(weights[k, i]) * normalised
    found = estimators.decoupled_scores(parts, weights, 4, norm_by_std)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    equal = torch.full((2, 7), 0.1)
    alike = estimators.decoupled_scores(equal, torch.ones(2, 7).double(), 7, norm_by_std)
    assert alike.tolist() == [0.0] * 7


def test_gdpo_keeps_apart_what_grpo_joins() -> None:
    """Compare two groups of the paper's example, rewards (0, 1) and (0, 2) in sum: grpo gives both
    the same advantages, gdpo twice as much to the second."""
    parts = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    scores = parts.sum(dim=0)
    inputs = inputs_of(
        scores.tolist(),
        [1] * 4,
        [0, 0, 1, 1],
        decoupled_scores=estimators.decoupled_scores(parts, torch.ones(2, 4).double(), 2, True),
    )
    joined = first_tokens(estimators.grpo(inputs), inputs)
    assert joined[:2] == pytest.approx(joined[2:], rel=1e-5)
    apart = first_tokens(estimators.gdpo(inputs), inputs)
    assert apart[2:] == pytest.approx([2 * x for x in apart[:2]], rel=1e-5)
    assert inputs.decoupled_scores is not None
    assert apart == whiten(inputs.decoupled_scores).tolist()


def test_passk_gives_nothing_to_several_best_responses() -> None:
    inputs = inputs_of([1.0, 1.0, 0.0], [1, 1, 1], [0, 0, 0])
    assert first_tokens(estimators.grpo_passk(inputs), inputs) == [0.0, 0.0, 0.0]


def conversations() -> tuple[RaggedBatch, list[list[list[float]]], list[list[float]]]:
    """Return a batch of two groups of three conversations with scores, values, rewards and numbers
    of turns; and by response and turn the values of its tokens, and the rewards. A 0 of a mask is
    an observation's token, and a turn may end without an observation."""
    draw = np.random.default_rng(7)
    turn_lens = [[2, 3], [1, 1, 2], [3], [2, 2, 1, 1], [1, 4], [1, 2, 2, 3]]
    gaps = [[2, 0], [1, 0, 0], [0], [1, 0, 3, 0], [2, 2], [1, 1, 1, 0]]
    responses = []
    episodes = []
    for lens, after in zip(turn_lens, gaps, strict=True):
        log_probs = [
            x for n, gap in zip(lens, after, strict=True) for x in [-1.0] * n + [OBSERVED] * gap
        ]
        responses.append(Generation([9] * len(log_probs), log_probs, True))
        ends = np.cumsum(lens) - 1
        rewards = [(int(end), float(draw.normal())) for end in ends]
        episodes.append(Episode([(-1, 0.0), *rewards], {}, {}, None, 0.0))
    prompts = [Prompt(i // 3, np.array([5, 6], np.int32), "", None) for i in range(6)]
    batch = build_batch(prompts, Responses.of(responses))
    scores = [Score(episode.score, episode=episode) for episode in episodes]
    batch = batch.with_fields(
        scores=torch.tensor([score.score for score in scores]).double(),
        values=torch.from_numpy(draw.normal(size=sum(map(sum, turn_lens)))),
        turn_rewards=turn_rewards(scores, batch.response_lens).double(),
        turns=turn_numbers(scores, batch.response_lens),
    )
    assert batch.values is not None
    values = iter(batch.values.tolist())
    return (
        batch,
        [[[next(values) for _ in range(n)] for n in lens] for lens in turn_lens],
        [[reward for _, reward in episode.rewards[1:]] for episode in episodes],
    )


@pytest.mark.parametrize(
    ("given", "lambda_value", "lambda_policy"),
    [
        ({"lam": 0.8}, 0.8, lambda _: 0.8),
        ({"gae_lambda_value": 1.0, "gae_lambda_policy": 0.3}, 1.0, lambda _: 0.3),
        ({"lam": 0.6, "length_adaptive_alpha": 0.7}, 0.6, lambda n: max(0.0, 1 - 1 / (0.7 * n))),
    ],
)
def test_gae_over_turns_matches_the_definition(
    given: dict[str, float], lambda_value: float, lambda_policy: Callable[[int], float]
) -> None:
    """Compare with sums over the turns in float64; observations between take no part."""
    batch, values, rewards = conversations()
    cfg = AlgorithmConfig(adv_estimator="gae_turn", gamma=0.9, **given)  # type: ignore[arg-type]
    found, _, _ = advantages_and_returns(batch, cfg, 0.0, 3, ADVANTAGE_ESTIMATORS["gae_turn"])
    advantages = []
    returns = []
    for of_turns, of_rewards in zip(values, rewards, strict=True):
        v = [turn[0] for turn in of_turns] + [0.0]
        deltas = [r + 0.9 * v[k + 1] - v[k] for k, r in enumerate(of_rewards)]
        for k, turn in enumerate(of_turns):
            for lam, results, added in (
                (lambda_policy(len(of_turns)), advantages, 0.0),
                (lambda_value, returns, v[k]),
            ):
                total = sum((0.9 * lam) ** j * d for j, d in enumerate(deltas[k:]))
                results += [total + added] * len(turn)
    assert found.advantages is not None and found.returns is not None
    wanted = whiten(torch.tensor(advantages, dtype=torch.float64))
    torch.testing.assert_close(found.advantages, wanted, rtol=0, atol=1e-6)
    assert found.returns.tolist() == pytest.approx(returns, abs=1e-6)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_turns_are_compared_with_those_of_their_index(norm_by_std: bool) -> None:
    """Compare with loops over groups and turns in float64; a turn without another of its index has
    0."""
    batch, values, rewards = conversations()
    cfg = AlgorithmConfig(adv_estimator="grpo_turn", gamma=0.9, norm_adv_by_std_in_grpo=norm_by_std)
    found, _, _ = advantages_and_returns(batch, cfg, 0.0, 3, ADVANTAGE_ESTIMATORS["grpo_turn"])
    gains = [
        [sum(0.9**j * r for j, r in enumerate(row[k:])) for k in range(len(row))] for row in rewards
    ]
    wanted = []
    for i, row in enumerate(gains):
        for k, gain in enumerate(row):
            others = [other[k] for other in gains[i // 3 * 3 :][:3] if k < len(other)]
            advantage = gain - statistics.fmean(others)
            if norm_by_std and len(others) > 1:
                advantage /= statistics.stdev(others) + STD_EPS
            wanted += [advantage] * len(values[i][k])
    assert found.advantages is not None
    assert found.advantages.tolist() == pytest.approx(wanted, abs=1e-5)
    assert wanted.count(0.0) == 2, "the last turn of the first group"


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_advantages_of_conversations_equal_a_slow_masked_version(estimator: str) -> None:
    """Compare with loops over all tokens of a response and its mask: the value that follows a drawn
    token is the next drawn one's, and a group is compared by its scores."""
    draw = np.random.default_rng(4)
    masks = [[1, 1, 0, 0, 1, 1], [1, 0, 1, 0, 0, 1], [1, 1, 1], [1, 0, 1]]
    conversations = [
        Generation([9] * len(mask), [-1.0 if drawn else OBSERVED for drawn in mask], True)
        for mask in masks
    ]
    prompts = [Prompt(0, np.array([5, 6], np.int32), "", None)] * 4
    episodes = [
        Episode([(1, 0.5), (3, 1.0)], {}, {}, None, 0.0),
        Episode([(0, -1.0), (1, 0.0), (2, 2.0)], {}, {}, None, 0.0),
        Episode([(2, 1.0)], {}, {}, None, 0.0),
        Episode([(0, 0.0), (1, 0.0)], {}, {}, "timeout", -2.0),
    ]
    scores = [Score(episode.score, episode=episode) for episode in episodes]
    batch = build_batch(prompts, Responses.of(conversations))
    num_drawn = int(batch.response_lens.sum())
    fields = {
        name: torch.from_numpy(draw.normal(size=num_drawn)).float()
        for name in ("values", "old_log_probs")
    }
    batch = batch.with_fields(
        **fields,
        ref_log_probs=fields["old_log_probs"] + 0.1,
        scores=torch.tensor([score.score for score in scores]),
        turn_rewards=turn_rewards(scores, batch.response_lens),
    )
    cfg = AlgorithmConfig(adv_estimator=estimator, use_kl_in_reward=True, gamma=0.9, lam=0.8)  # type: ignore[arg-type]
    found, _, _ = advantages_and_returns(batch, cfg, 0.5, 2, ADVANTAGE_ESTIMATORS[estimator])
    kl_penalty = 0.5 * -0.1  # k1, on each drawn token
    advantages = []
    values = iter(fields["values"].tolist())
    for mask, episode in zip(masks, episodes, strict=True):
        places = [t for t, drawn in enumerate(mask) if drawn]
        value = {t: next(values) for t in places}
        reward = dict.fromkeys(places, -kl_penalty)
        given = (
            episode.rewards
            if episode.failure is None
            else [(len(places) - 1, episode.default_score)]
        )
        for place, one in given:
            reward[places[place]] += one
        if estimator == "grpo":
            advantages += [sum(reward.values())] * len(places)
            continue
        following = 0.0
        next_value = 0.0
        of_response = []
        for t in reversed(range(len(mask))):
            if mask[t]:
                following = reward[t] + 0.9 * next_value - value[t] + 0.9 * 0.8 * following
                next_value = value[t]
                of_response.append(following)
        advantages += reversed(of_response)
    wanted = torch.tensor(advantages, dtype=torch.float64)
    if estimator == "grpo":
        first = np.cumsum([0, *batch.response_lens.tolist()])[:4]
        sums = wanted[first].view(2, 2)
        scaled = (sums - sums.mean(1, keepdim=True)) / (sums.std(1, keepdim=True) + STD_EPS)
        wanted = scaled.flatten().repeat_interleave(batch.response_lens)
    else:
        wanted = whiten(wanted)
    assert found.advantages is not None
    torch.testing.assert_close(found.advantages.double(), wanted, atol=1e-5, rtol=0)
