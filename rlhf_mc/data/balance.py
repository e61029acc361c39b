"""Who gets which sequence: sequences over data-parallel replicas, and a replica's sequences into micro-batches.

Plain arithmetic on lengths. Every rank holds the lengths of the whole batch and gets the same answer
from them, so nothing here communicates. Sequences are named by their index in the given lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Cost = Callable[[int], float]
"""What a sequence of so many tokens costs to compute, in any unit, > 0. Attention makes long sequences dearer than
their tokens (ModelShape.sequence_cost)."""


@dataclass(frozen=True)
class Sequences:
    """The limit of a micro-batch where it counts sequences, whatever their lengths."""

    at_most: int


Limit = int | Sequences
"""How large a micro-batch may be: so many tokens, or so many sequences."""


def assign_to_replicas(seq_lens: Sequence[int], num_replicas: int, cost: Cost = float) -> list[list[int]]:
    """Spreads the sequences so that the replicas' costs are as equal as the lengths allow.

    Returns the indices of each replica, ascending. With at least num_replicas sequences each replica gets at
    least one; with fewer, some get none. How many a replica gets may differ. Deterministic. `cost` is the
    number of tokens by default.
    """
    return [sorted(group) for group in _largest_differencing([cost(n) for n in seq_lens], num_replicas)]


def num_micro_batches_needed(seq_lens: Sequence[int], budget: int) -> int:
    """How many micro-batches of at most `budget` tokens micro_batches can cut the sequences into; 0 for none."""
    return len(_first_fit_decreasing(seq_lens, budget))


def micro_batches(seq_lens: Sequence[int], budget: int, num_micro_batches: int | None = None) -> list[list[int]]:
    """Cuts the sequences into micro-batches of at most `budget` tokens each, as equal in tokens as that allows.

    seq_lens: each 1 to budget. num_micro_batches: at least num_micro_batches_needed, which is also the default; more
    than there are sequences leaves empty lists at the end. Returns the indices of each micro-batch, ascending;
    the largest micro-batch comes first, so that memory peaks, or runs out, at once. Deterministic.
    """
    packed = _first_fit_decreasing(seq_lens, budget)
    count = len(packed) if num_micro_batches is None else num_micro_batches
    assert count >= len(packed), f"{count} micro-batches of {budget} tokens asked for, {len(packed)} needed"
    if count == 0:
        return []

    def load(group: list[int]) -> int:
        return sum(seq_lens[i] for i in group)

    groups = _largest_differencing(list(seq_lens), count)
    if max(map(load, groups)) > budget:
        # Balancing knows no budget; a tight one needs the packing.
        groups = packed + [[] for _ in range(count - len(packed))]
        _fill_empty([groups], seq_lens)
    groups = [sorted(group) for group in groups]
    return sorted(groups, key=lambda group: (-load(group), group))


def even_micro_batches(
    seq_lens: Sequence[int], limit: Sequences, num_micro_batches: int | None = None
) -> list[list[int]]:
    """As micro_batches, with at most limit.at_most sequences in each, as equal in their number, then in tokens, as
    dealing them out to and fro makes them."""
    count = -(-len(seq_lens) // limit.at_most) if num_micro_batches is None else num_micro_batches
    assert count * limit.at_most >= len(seq_lens)
    groups: list[list[int]] = [[] for _ in range(count)]
    for k, i in enumerate(sorted(range(len(seq_lens)), key=lambda i: (-seq_lens[i], i))):
        turn, place = divmod(k, count)
        groups[place if turn % 2 == 0 else count - 1 - place].append(i)
    return sorted((sorted(group) for group in groups), key=lambda g: (-sum(seq_lens[i] for i in g), g))


def plan_micro_batches(
    seq_lens: Sequence[int], num_replicas: int, limit: Limit, cost: Cost = float
) -> list[list[list[int]]]:
    """[replica][micro-batch] -> indices: assign_to_replicas, then micro-batches, as many for every replica.

    The same number everywhere, since a replica's forward and backward passes are collective with the others'
    and with its own pipeline stages; it is the largest number that some replica needs. Each micro-batch
    keeps to the limit. A micro-batch is empty only if there are fewer sequences than micro-batches in all (sequences
    move between replicas to avoid it): the caller then runs a dummy whose weights are 0.
    """
    replicas = assign_to_replicas(seq_lens, num_replicas, cost)
    lens = [[seq_lens[i] for i in replica] for replica in replicas]
    if isinstance(limit, Sequences):
        count = max(-(-len(replica) // limit.at_most) for replica in replicas)
        groups = [even_micro_batches(replica_lens, limit, count) for replica_lens in lens]
    else:
        count = max(num_micro_batches_needed(replica_lens, limit) for replica_lens in lens)
        groups = [micro_batches(replica_lens, limit, count) for replica_lens in lens]
    plan = [
        [[replica[i] for i in group] for group in replica_groups]
        for replica, replica_groups in zip(replicas, groups, strict=True)
    ]
    _fill_empty(plan, [cost(n) for n in seq_lens])
    return plan


def _fill_empty(plan: list[list[list[int]]], costs: Sequence[float]) -> None:
    """Moves single sequences into the empty micro-batches of `plan`, in place, as long as another can spare one.

    The dearest replica that can spare one gives its cheapest such sequence. Taking a sequence out, and putting
    one alone, both keep to any limit.
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
    """Longest first, each sequence into the first micro-batch that has room (at most 11/9 of the optimum + 1)."""
    groups: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(seq_lens)), key=lambda i: (-seq_lens[i], i)):
        assert 0 < seq_lens[i] <= budget, f"sequence {i} has {seq_lens[i]} tokens, the budget is {budget}"
        fits = next((g for g, free in enumerate(room) if free >= seq_lens[i]), None)
        if fits is None:
            groups.append([i])
            room.append(budget - seq_lens[i])
        else:
            groups[fits].append(i)
            room[fits] -= seq_lens[i]
    return groups


def _largest_differencing(costs: Sequence[float], num_groups: int) -> list[list[int]]:
    """Karmarkar and Karp's largest differencing method: the indices of `costs` (> 0) in groups of near equal sum.

    A partial solution is num_groups groups, dearest first; it starts as one item and empty groups. The two
    solutions with the largest spread are merged, one's dearest group with the other's cheapest, until one
    remains. Empty groups are the cheapest, so they fill first: no group stays empty if the items suffice.
    """
    if not costs:
        return [[] for _ in range(num_groups)]
    if num_groups == 1:
        return [list(range(len(costs)))]
    empty = [(0.0, ())] * (num_groups - 1)
    solutions: list[tuple[float, int, list[tuple[float, tuple[int, ...]]]]] = [
        (-cost, i, [(cost, (i,)), *empty]) for i, cost in enumerate(costs)
    ]  # the number in the middle breaks ties, and is unique
    heapq.heapify(solutions)
    for serial in range(len(costs), 2 * len(costs) - 1):
        a = heapq.heappop(solutions)[2]
        b = heapq.heappop(solutions)[2]
        merged = [(ca + cb, ia + ib) for (ca, ia), (cb, ib) in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda group: group[0], reverse=True)
        heapq.heappush(solutions, (merged[-1][0] - merged[0][0], serial, merged))
    return [list(group) for _, group in solutions[0][2]]
