"""Load balancing: the assignment of sequences to data-parallel replicas, and of a replica's
sequences to micro-batches.

Arithmetic on lengths, within token budgets; no torch here. Every rank has the lengths of the whole
batch and computes the same assignment, so nothing here communicates. A sequence is given by its
index in the list of lengths.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

Cost = Callable[[int], float]
"""Cost of a sequence as a function of its number of tokens, > 0, in any unit. Attention makes it
grow faster than the number of tokens (ModelShape.sequence_cost)."""


def sequence_costs(seq_lens: Sequence[int], cost: Cost) -> list[float]:
    """Return the cost of each sequence, computed once for each length."""
    of_length = {n: cost(n) for n in set(seq_lens)}
    return [of_length[n] for n in seq_lens]


def assign_to_replicas(
    seq_lens: Sequence[int], num_replicas: int, cost: Cost = float
) -> list[list[int]]:
    """Return the indices of each replica's sequences, ascending, such that the replicas' costs are
    nearly equal.

    Replicas may get different numbers of sequences. Each gets at least one if there are at least
    num_replicas sequences. Deterministic. The default cost is the number of tokens.
    """
    return [
        sorted(group)
        for group in _largest_differencing(sequence_costs(seq_lens, cost), num_replicas)
    ]


def num_micro_batches_needed(seq_lens: Sequence[int], budget: int) -> int:
    """Return the smallest number of micro-batches of `budget` tokens that `micro_batches` accepts;
    0 for none."""
    return len(_first_fit_decreasing(seq_lens, budget))


def micro_batches(
    seq_lens: Sequence[int], budget: int, num_micro_batches: int | None = None
) -> list[list[int]]:
    """Split the sequences into micro-batches of at most `budget` tokens each, with nearly equal
    numbers of tokens.

    seq_lens: each 1 to budget. num_micro_batches: at least num_micro_batches_needed, which is also
    the default; if it is larger than the number of sequences, the last micro-batches are empty.
    Return the indices of each micro-batch, ascending. The largest micro-batch comes first, so that
    an out-of-memory error comes early. Deterministic.
    """
    packed = _first_fit_decreasing(seq_lens, budget)
    count = len(packed) if num_micro_batches is None else num_micro_batches
    assert count >= len(packed), (
        f"{count} micro-batches of {budget} tokens requested, {len(packed)} needed"
    )
    if count == 0:
        return []

    def load(group: list[int]) -> int:
        return sum(seq_lens[i] for i in group)

    groups = [list(group) for group in _largest_differencing(seq_lens, count)]
    if max(map(load, groups)) > budget:
        # Balancing ignores the budget; a tight one needs the packing.
        groups = packed + [[] for _ in range(count - len(packed))]
        _fill_empty([groups], seq_lens)
    groups = [sorted(group) for group in groups]
    return sorted(groups, key=lambda group: (-load(group), group))


def plan_micro_batches(
    seq_lens: Sequence[int], num_replicas: int, budget: int, cost: Cost = float
) -> list[list[list[int]]]:
    """Return the indices of the sequences of each micro-batch of each replica:
    [replica][micro-batch] -> indices.

    Sequences are assigned to replicas, then split within the budget. All replicas have the same
    number of micro-batches, the largest that one of them needs, since their passes are collective.
    A micro-batch is empty only if there are fewer sequences than micro-batches in total; the caller
    then runs a dummy micro-batch. Otherwise sequences move between replicas to fill it.
    """
    return _plan(seq_lens, sequence_costs(seq_lens, cost), num_replicas, budget)


def _plan(
    seq_lens: Sequence[int], costs: Sequence[float], num_replicas: int, budget: int
) -> list[list[list[int]]]:
    """Return the plan of plan_micro_batches, of items of these lengths and costs."""
    replicas = [sorted(group) for group in _largest_differencing(costs, num_replicas)]
    lens = [[seq_lens[i] for i in replica] for replica in replicas]
    count = max(num_micro_batches_needed(replica_lens, budget) for replica_lens in lens)
    groups = [micro_batches(replica_lens, budget, count) for replica_lens in lens]
    plan = [
        [[replica[i] for i in group] for group in replica_groups]
        for replica, replica_groups in zip(replicas, groups, strict=True)
    ]
    _fill_empty(plan, costs)
    return plan


MIN_RATIO = 1.3
"""Tokens of the sequences of a micro-batch over its tokens with each prompt once, from which
prompts are shared: below it gathering rows for attention costs more than it saves."""


def is_worth_sharing(tokens: float, unique: float) -> bool:
    """Return whether a micro-batch with these tokens of whole sequences, `unique` of them with each
    prompt once, shares prompts (MIN_RATIO)."""
    return tokens >= MIN_RATIO * unique


@dataclass(frozen=True)
class PromptGroups:
    """Sequences with equal prompts, whose tokens a micro-batch has once."""

    seq_lens: Sequence[int]
    prompt_lens: Sequence[int]
    firsts: Sequence[int]
    """For each sequence the first one with an equal prompt."""

    def saved(self, sequences: Iterable[int]) -> int:
        """Return the tokens that these sequences need not have in one micro-batch."""
        seen: set[int] = set()
        total = 0
        for i in sequences:
            if self.firsts[i] in seen:
                total += self.prompt_lens[i]
            seen.add(self.firsts[i])
        return total

    def saved_if_worth(self, sequences: Sequence[int]) -> int:
        """Return `saved` where it is enough to share prompts, else 0."""
        tokens = sum(self.seq_lens[i] for i in sequences)
        saved = self.saved(sequences)
        return saved if is_worth_sharing(tokens, tokens - saved) else 0

    def cost(
        self, micro_batches: Iterable[Sequence[int]], costs: Sequence[float], of_token: float
    ) -> float:
        """Return the cost of micro-batches: attention has whole sequences, of these costs, and all
        else of a layer costs `of_token` a token."""
        return sum(
            sum(costs[i] for i in sequences) - of_token * self.saved_if_worth(sequences)
            for sequences in micro_batches
        )

    def parts(self, count: int, budget: int) -> list[list[int]]:
        """Return each group in at least `count` parts, even in their tokens, or single sequences,
        of at most `budget` tokens each."""
        members: dict[int, list[int]] = {}
        for i in sorted(range(len(self.firsts)), key=lambda i: (-self.seq_lens[i], i)):
            members.setdefault(self.firsts[i], []).append(i)
        parts: list[list[int]] = []
        for group in members.values():
            for number in range(min(count, len(group)), len(group) + 1):
                split = [group[part::number] for part in range(number)]
                if max(map(self.tokens, split)) <= budget:
                    break
            parts += split
        return parts

    def tokens(self, sequences: Sequence[int]) -> int:
        """Return the tokens of these sequences with each prompt once."""
        return sum(self.seq_lens[i] for i in sequences) - self.saved(sequences)


def plan_prompt_groups(
    groups: PromptGroups, num_replicas: int, budget: int, cost: Cost = float
) -> list[list[list[int]]]:
    """Return a plan as plan_micro_batches does, whose micro-batches have at most `budget` tokens
    with each prompt once.

    Responses to a prompt stay together, in groups split evenly into 1, 2, 4, ... parts, or each
    alone as in plan_micro_batches. The plan whose most expensive replica costs least is chosen."""
    costs = sequence_costs(groups.seq_lens, cost)
    of_token = cost(1)

    def most_expensive(plan: Sequence[Sequence[Sequence[int]]]) -> float:
        return max(groups.cost(replica, costs, of_token) for replica in plan)

    best = plan_micro_batches(groups.seq_lens, num_replicas, budget, cost)
    least = most_expensive(best)
    count = 1
    while count < max(Counter(groups.firsts).values(), default=0):
        items = groups.parts(count, budget)
        item_costs = [sum(costs[i] for i in x) - of_token * groups.saved(x) for x in items]
        plan = [
            [[i for item in of_items for i in items[item]] for of_items in replica]
            for replica in _plan(list(map(groups.tokens, items)), item_costs, num_replicas, budget)
        ]
        _fill_empty(plan, costs)
        most = most_expensive(plan)
        fits = all(
            sum(groups.seq_lens[i] for i in sequences) - groups.saved_if_worth(sequences) <= budget
            for replica in plan
            for sequences in replica
        )
        if fits and most < least:
            best = plan
            least = most
        count *= 2
    return best


DUMMY_TOKENS = 2
"""Tokens of a micro-batch without sequences."""


class Shared(list[int]):
    """The sequences of a micro-batch that neighbouring ranks share by context parallelism."""

    def __init__(self, sequences: Iterable[int], ranks: int) -> None:
        super().__init__(sequences)
        self.ranks = ranks
        """Number of ranks."""


def num_sharing_ranks(sequences: Sequence[int], all_ranks: int) -> int:
    """Return the number of context-parallel ranks that share a micro-batch: if it does not say,
    all; 1 without sequences."""
    if not sequences:
        return 1
    return sequences.ranks if isinstance(sequences, Shared) else all_ranks


def plan_shared(
    seq_lens: Sequence[int],
    num_ranks: int,
    most: int,
    budget: int,
    cost: Cost,
    tokens_on_rank: Callable[[int, int], int],
) -> list[list[Shared]]:
    """Return the micro-batches of each rank: [rank][micro-batch]. Each has a size of its own, a
    power of two up to `most`: an aligned block of that many ranks shares its sequences.

    A sequence gets the smallest size with which it is within the budget and costs no more than a
    rank's part of all sequences, if there is one. Sequences are assigned from the largest size to
    the smallest, of a size the most expensive first, each to the block with the least cost. Ranks
    that share a micro-batch have it at the same place of their lists, since larger sizes come
    first, and all lists are equally long: where a rank has fewer, an empty one of size 1 is the
    last. Deterministic.

    num_ranks: a multiple of `most`. budget: tokens of one rank. tokens_on_rank(length, size): a
    rank's tokens of a sequence, which are within the budget for size `most`."""
    costs = sequence_costs(seq_lens, cost)
    part = sum(costs) / num_ranks
    sizes = [1 << power for power in range(most.bit_length())]

    def smallest_size(i: int) -> int:
        fitting = [size for size in sizes if tokens_on_rank(seq_lens[i], size) <= budget]
        return next((size for size in fitting if costs[i] <= part * size), fitting[-1])

    chosen = [smallest_size(i) for i in range(len(seq_lens))]
    load = [0.0] * num_ranks
    plan: list[list[Shared]] = [[] for _ in range(num_ranks)]
    for size in reversed(sizes):
        blocks = [range(first, first + size) for first in range(0, num_ranks, size)]
        members: list[list[int]] = [[] for _ in blocks]
        heap = [(max(load[rank] for rank in block), number) for number, block in enumerate(blocks)]
        heapq.heapify(heap)
        for i in sorted(
            (i for i, of_sequence in enumerate(chosen) if of_sequence == size),
            key=lambda i: (-costs[i], i),
        ):
            total, number = heap[0]
            members[number].append(i)
            heapq.heapreplace(heap, (total + costs[i] / size, number))
        loads = {number: total for total, number in heap}
        for number, block in enumerate(blocks):
            lens = [tokens_on_rank(seq_lens[i], size) for i in members[number]]
            shared = [
                Shared((members[number][i] for i in group), size)
                for group in micro_batches(lens, budget)
            ]
            for rank in block:
                load[rank] = loads[number]
                plan[rank] += shared
    count = max(map(len, plan))
    return [of_rank + [Shared((), 1)] * (count - len(of_rank)) for of_rank in plan]


def _fill_empty(plan: list[list[list[int]]], costs: Sequence[float]) -> None:
    """Move single sequences into the empty micro-batches of `plan`, in place, from micro-batches of
    several sequences.

    The donor is the replica with the highest cost that has one; it gives the cheapest such
    sequence. No budget is exceeded: one micro-batch gets smaller, the other has one sequence.
    """
    for replica in plan:
        for empty in (group for group in replica if not group):
            donors = [other for other in plan if any(len(group) > 1 for group in other)]
            if not donors:
                return
            donor = max(donors, key=lambda other: sum(costs[i] for group in other for i in group))
            spare = [(costs[i], i, group) for group in donor if len(group) > 1 for i in group]
            _, index, giver = min(spare, key=lambda entry: entry[:2])
            giver.remove(index)
            empty.append(index)


def _first_fit_decreasing(seq_lens: Sequence[int], budget: int) -> list[list[int]]:
    """Assign the sequences, longest first, to the first micro-batch with room (at most 11/9 of the
    optimum + 1)."""
    if seq_lens and min(seq_lens) > 0 and sum(seq_lens) <= budget:
        return [list(range(len(seq_lens)))]
    groups: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(seq_lens)), key=lambda i: (-seq_lens[i], i)):
        assert 0 < seq_lens[i] <= budget, (
            f"sequence {i} has {seq_lens[i]} tokens, the budget is {budget}"
        )
        fits = next((g for g, free in enumerate(room) if free >= seq_lens[i]), None)
        if fits is None:
            groups.append([i])
            room.append(budget - seq_lens[i])
        else:
            groups[fits].append(i)
            room[fits] -= seq_lens[i]
    return groups


def _largest_differencing(costs: Sequence[float], num_groups: int) -> list[tuple[int, ...]]:
    """Return the indices of `costs` (> 0) in groups of nearly equal sum, by Karmarkar and Karp's
    largest differencing.

    A partial solution is num_groups groups, by decreasing sum; it starts as one item and empty
    groups. The two solutions with the largest spread are merged, the largest group of one with the
    smallest of the other, until one solution remains. Empty groups are the smallest and filled
    first: none stays empty if there are enough items.
    """
    if not costs:
        return [()] * num_groups
    if num_groups == 1:
        return [tuple(range(len(costs)))]
    empty = [(0.0, ())] * (num_groups - 1)
    solutions: list[tuple[float, int, list[tuple[float, tuple[int, ...]]]]] = [
        (-cost, i, [(cost, (i,)), *empty]) for i, cost in enumerate(costs)
    ]  # the unique index breaks ties
    heapq.heapify(solutions)
    for serial in range(len(costs), 2 * len(costs) - 1):
        a = heapq.heappop(solutions)[2]
        b = heapq.heappop(solutions)[2]
        merged = [(ca + cb, ia + ib) for (ca, ia), (cb, ib) in zip(a, reversed(b), strict=True)]
        merged.sort(key=itemgetter(0), reverse=True)
        heapq.heappush(solutions, (merged[-1][0] - merged[0][0], serial, merged))
    return [group for _, group in solutions[0][2]]
