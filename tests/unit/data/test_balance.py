"""balance.py: properties on random lengths, packings worked by hand, and idle time on lengths like
GSM8K's."""

import random
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mc.config.roles import tokens_on_rank
from rlhf_mc.data.balance import (
    assign_to_replicas,
    micro_batches,
    num_micro_batches_needed,
    plan_micro_batches,
    plan_shared,
)
from rlhf_mc.trainer.step_report import balance_metrics

BUDGET = 100
no_deadline = settings(deadline=None)  # the machine may be busy
lengths = st.lists(st.integers(1, BUDGET), max_size=60)
replicas = st.integers(1, 9)


def load(group: list[int], seq_lens: list[int]) -> int:
    return sum(seq_lens[i] for i in group)


def idle_share(loads: list[float]) -> float:
    """Return the share of the replicas' time spent waiting for the slowest one."""
    return 1 - sum(loads) / len(loads) / max(loads)


# Replicas


def test_assignment_by_hand() -> None:
    # 8+5+1 | 7+6+1
    groups = assign_to_replicas([8, 7, 6, 5, 1, 1], 2)
    assert sorted(load(g, [8, 7, 6, 5, 1, 1]) for g in groups) == [14, 14]


@no_deadline
@given(lengths, replicas)
def test_assignment_is_a_partition_without_idle_replicas(
    seq_lens: list[int], num_replicas: int
) -> None:
    groups = assign_to_replicas(seq_lens, num_replicas)
    assert len(groups) == num_replicas
    assert sorted(chain.from_iterable(groups)) == list(range(len(seq_lens)))
    assert all(group == sorted(group) for group in groups)
    assert sum(1 for group in groups if group) == min(num_replicas, len(seq_lens))
    assert groups == assign_to_replicas(list(seq_lens), num_replicas)
    if seq_lens:  # no replica leads another by more than the longest sequence
        loads = [load(group, seq_lens) for group in groups]
        assert max(loads) - min(loads) <= max(seq_lens)


def test_assignment_balances_the_given_cost() -> None:
    seq_lens = [60, 20, 20, 20]
    assert assign_to_replicas(seq_lens, 2) in ([[0], [1, 2, 3]], [[1, 2, 3], [0]])
    # the long sequence costs as much as three by tokens, but nine by squares: it stays alone
    seq_lens += [20, 20]
    by_square = assign_to_replicas(seq_lens, 2, cost=lambda n: float(n * n))
    assert [0] in by_square
    assert [0] not in assign_to_replicas(seq_lens, 2)


def gsm8k_like_lengths(count: int, seed: int) -> list[int]:
    """Return lengths of a prompt (median 100, 40 to 512) plus a response (median 180, 20 to 1024),
    both log-normal.
    The median question of GSM8K has 217 characters (about 50 tokens, without the template), the
    median answer 257.
    The standard deviations of the logarithms are 0.38 and 0.49.
    """
    rng = random.Random(seed)

    def draw(mu: float, sigma: float, low: int, high: int) -> int:
        return min(high, max(low, int(rng.lognormvariate(mu, sigma))))

    return [draw(4.6, 0.35, 40, 512) + draw(5.2, 0.5, 20, 1024) for _ in range(count)]


def test_idle_share_is_reported_by_cost() -> None:
    # By n^2: 81 | 64, so the second waits for 17 of 81, which is 17 / 162 of both.
    found = balance_metrics([9, 8], 2, lambda n: float(n * n))
    assert found["global_seqlen/idle_share"] == pytest.approx(17 / 162)
    assert (found["global_seqlen/balanced_min"], found["global_seqlen/balanced_max"]) == (8, 9)
    assert balance_metrics([5, 5, 5, 5], 2, float)["global_seqlen/idle_share"] == 0.0


def qwen_05b_cost(num_tokens: int) -> float:
    """Return ModelShape.sequence_cost of Qwen2.5-0.5B: 896 query dimensions and 14.9 M weights a
    layer."""
    return num_tokens + num_tokens**2 / 16640


@pytest.mark.parametrize("count", [64, 256, 1024])
def test_idle_share_on_8_replicas_is_small(count: int) -> None:
    """Check the idle share by compute cost. The plan may move sequences between replicas to fill
    micro-batches."""
    for seed in range(5):
        costs = [qwen_05b_cost(n) for n in gsm8k_like_lengths(count, seed)]
        plan = plan_micro_batches(gsm8k_like_lengths(count, seed), 8, 4096, qwen_05b_cost)
        planned = [sum(costs[i] for group in replica for i in group) for replica in plan]
        round_robin = [sum(costs[r::8]) for r in range(8)]
        assert idle_share(planned) <= 0.03 < idle_share(round_robin)


# Micro-batches


def test_micro_batches_by_hand() -> None:
    seq_lens = [60, 50, 40, 30, 20]  # 200 tokens: two full micro-batches, 60+40 and 50+30+20
    assert num_micro_batches_needed(seq_lens, 100) == 2
    assert micro_batches(seq_lens, 100) == [[0, 2], [1, 3, 4]]
    assert micro_batches(seq_lens, 1000) == [[0, 1, 2, 3, 4]]


def test_more_micro_batches_than_needed() -> None:
    seq_lens = [10, 20, 30]
    assert micro_batches(seq_lens, 100, 2) == [[0, 1], [2]]
    assert micro_batches(seq_lens, 100, 3) == [[2], [1], [0]]  # the largest first
    assert micro_batches(seq_lens, 100, 5) == [[2], [1], [0], [], []]
    assert micro_batches([], 100, 2) == [[], []]
    assert micro_batches([], 100) == []


def test_token_budget_is_kept_where_balancing_would_exceed_it() -> None:
    # Only 50+50 | 34+33+33 keeps to 100, and balancing alone gives 50+33+33 | 50+34 = 116 | 84.
    seq_lens = [50, 50, 34, 33, 33]
    assert micro_batches(seq_lens, 100) == [[0, 1], [2, 3, 4]]


def test_sequence_over_budget_and_too_few_micro_batches_are_rejected() -> None:
    with pytest.raises(AssertionError, match="sequence 1 has 101 tokens"):
        micro_batches([50, 101], 100)
    with pytest.raises(AssertionError, match="2 needed"):
        micro_batches([60, 60], 100, 1)


@no_deadline
@given(lengths, st.integers(0, 20))
def test_micro_batches_partition_within_the_budget(seq_lens: list[int], extra: int) -> None:
    count = num_micro_batches_needed(seq_lens, BUDGET) + extra
    groups = micro_batches(seq_lens, BUDGET, count)
    assert len(groups) == count
    assert sorted(chain.from_iterable(groups)) == list(range(len(seq_lens)))
    # empty only when it must be
    assert sum(1 for group in groups if group) == min(count, len(seq_lens))
    loads = [load(group, seq_lens) for group in groups]
    assert loads == sorted(loads, reverse=True)
    assert max(loads, default=0) <= BUDGET
    assert groups == micro_batches(list(seq_lens), BUDGET, count)


@no_deadline
@given(lengths)
def test_number_of_micro_batches_is_near_the_lower_bound(seq_lens: list[int]) -> None:
    # First-fit-decreasing leaves at most one micro-batch half full or less.
    needed = num_micro_batches_needed(seq_lens, BUDGET)
    assert -(-sum(seq_lens) // BUDGET) <= needed <= 2 * sum(seq_lens) / BUDGET + 1


# Plans: replicas and micro-batches


def test_plan_by_hand() -> None:
    # 90+80 on each replica, and no two of them fit into one micro-batch.
    assert plan_micro_batches([90, 90, 80, 80], 2, 100) in (
        [[[0], [3]], [[1], [2]]],
        [[[1], [2]], [[0], [3]]],
    )


def test_plan_moves_a_sequence_to_avoid_an_empty_micro_batch() -> None:
    # The most even split by tokens, 100 | 40+31+31, gives one micro-batch and two, so that the
    # first replica would run a dummy micro-batch. Instead it takes over a sequence of 31.
    plan = plan_micro_batches([100, 40, 31, 31], 2, 100)
    assert sorted(
        sorted(group for micro_batch in replica for group in micro_batch) for replica in plan
    ) in (
        [[0, 2], [1, 3]],
        [[0, 3], [1, 2]],
    )
    assert all(len(group) == 1 for replica in plan for group in replica)


def test_plan_has_empty_micro_batches_if_sequences_run_out() -> None:
    assert plan_micro_batches([10], 3, 100) == [[[0]], [[]], [[]]]
    assert plan_micro_batches([], 2, 100) == [[], []]
    # Two micro-batches on each replica, because of the sequences of 60: three sequences for four
    # micro-batches.
    plan = plan_micro_batches([100, 60, 60], 2, 100)
    assert sorted(len(group) for replica in plan for group in replica) == [0, 1, 1, 1]


@no_deadline
@given(lengths, replicas)
@pytest.mark.slow
def test_plan_is_a_partition_of_equal_counts_within_the_budget(
    seq_lens: list[int], num_replicas: int
) -> None:
    plan = plan_micro_batches(seq_lens, num_replicas, BUDGET)
    assert len(plan) == num_replicas
    count = len(plan[0])
    assert all(len(replica) == count for replica in plan)
    groups = [group for replica in plan for group in replica]
    assert sorted(chain.from_iterable(groups)) == list(range(len(seq_lens)))
    assert max((load(group, seq_lens) for group in groups), default=0) <= BUDGET
    assert sum(1 for group in groups if group) == min(len(seq_lens), num_replicas * count)
    assert plan == plan_micro_batches(list(seq_lens), num_replicas, BUDGET)


# Micro-batches that several ranks share


def test_a_long_sequence_is_shared_and_short_ones_are_not() -> None:
    """Let the cost be the square of the length: of 4 ranks one sequence needs all, and the rest 1
    each."""
    plan = plan_shared([96, 20, 20, 20, 20], 4, 4, 30, lambda n: n * n, tokens_on_rank)
    assert [[(list(micro), micro.ranks) for micro in rank] for rank in plan] == [
        [([0], 4), ([i], 1)] for i in (1, 2, 3, 4)
    ]


def test_a_sequence_is_shared_for_its_cost_alone() -> None:
    """Take a long one that is within the budget of one rank, with half of all cost, or more."""
    plan = plan_shared([40, 10, 10, 10, 10], 2, 2, 100, float, tokens_on_rank)
    assert [micro.ranks for micro in plan[0]] == [1, 1][: len(plan[0])]
    plan = plan_shared([60, 10, 10], 2, 2, 100, float, tokens_on_rank)
    assert [[(list(micro), micro.ranks) for micro in rank] for rank in plan] == [
        [([0], 2), ([1], 1)],
        [([0], 2), ([2], 1)],
    ]


@no_deadline
@given(
    st.lists(st.integers(1, 4 * BUDGET), max_size=60),
    st.sampled_from([(2, 2), (4, 4), (8, 4), (12, 4)]),
)
@pytest.mark.slow
def test_shared_micro_batches_are_at_the_same_place_of_their_ranks(
    seq_lens: list[int], sizes: tuple[int, int]
) -> None:
    num_ranks, most = sizes
    fitting = [n for n in seq_lens if tokens_on_rank(n, most) <= BUDGET]
    plan = plan_shared(fitting, num_ranks, most, BUDGET, lambda n: n + n * n / 100, tokens_on_rank)
    assert len({len(rank) for rank in plan}) == 1
    assigned = []
    for at in range(len(plan[0])):
        for rank, micro_batches_of_rank in enumerate(plan):
            micro = micro_batches_of_rank[at]
            first = rank // micro.ranks * micro.ranks
            block = [plan[other][at] for other in range(first, first + micro.ranks)]
            assert all(other == micro and other.ranks == micro.ranks for other in block)
            assert sum(tokens_on_rank(fitting[i], micro.ranks) for i in micro) <= BUDGET
            assigned += micro if rank == first else []
    assert sorted(assigned) == list(range(len(fitting)))
    for rank in plan:
        assert [micro.ranks for micro in rank] == sorted(
            (micro.ranks for micro in rank), reverse=True
        )
