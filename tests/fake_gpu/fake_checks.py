"""Checks of what the ranks have recorded: collectives that match, operators that have a CUDA kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from fake_cuda import Collective

P2P = ("send", "recv")


def mismatches(collectives: Mapping[int, Sequence[Collective]]) -> list[str]:
    """Return a line for each group of which two ranks have called different collectives, and for each pair of ranks
    whose messages do not match. NCCL would hang. collectives: by rank, in order."""
    lines = []
    groups = {call.ranks for calls in collectives.values() for call in calls}
    for ranks in sorted(groups):
        by_rank = {
            rank: [call for call in calls if call.ranks == ranks and call.kind not in P2P]
            for rank, calls in collectives.items()
            if rank in ranks
        }
        first, *others = by_rank
        lines += [
            f"group {ranks}: ranks {first} and {other}: {_first_difference(by_rank[first], by_rank[other])}"
            for other in others
            if by_rank[first] != by_rank[other]
        ]
    for sender in collectives:
        for receiver in collectives.keys() - {sender}:
            sent = [c.tensors for c in collectives[sender] if (c.kind, c.peer) == ("send", receiver)]
            received = [c.tensors for c in collectives[receiver] if (c.kind, c.peer) == ("recv", sender)]
            if sent != received:
                lines.append(f"messages of {sender} to {receiver}: {_first_difference(sent, received)}")
    return lines


def _first_difference(one: Sequence[object], other: Sequence[object]) -> str:
    number = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"call {number} of {len(one)} and {len(other)}: {one[number : number + 1]} and {other[number : number + 1]}"


NAMES = {
    "_log_softmax": "log_softmax",
    "_softmax": "softmax",
    "_fused_rms_norm": "nn.functional.rms_norm",
    "embedding": "nn.functional.embedding",
    "gelu": "nn.functional.gelu",
    "silu": "nn.functional.silu",
    "softplus": "nn.functional.softplus",
}
"""Operators whose entry in OpInfo has another name."""
# fmt: off
NO_ARITHMETIC = frozenset({
    "_local_scalar_dense", "_to_copy", "_unsafe_view", "alias", "arange", "as_strided", "clone", "copy",
    "detach", "empty", "empty_like", "empty_strided", "equal", "expand", "fill", "full", "full_like",
    "is_same_size", "lift_fresh", "masked_select", "new_empty", "new_zeros", "normal", "ones", "ones_like",
    "permute", "resize", "select", "set", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unsqueeze", "view", "zero", "zeros", "zeros_like", "new_empty_strided", "new_full",
})
# fmt: on
"""Views, allocations and copies: CUDA has them for every type."""


def without_kernel(
    operators: Iterable[tuple[str, tuple[str, ...]]], table: Mapping[str, frozenset[str]], listed: Mapping[str, str]
) -> tuple[list[str], set[str]]:
    """Return the operators whose types OpInfo does not list for CUDA, and the names that it does not have and that
    `listed` does not either. table: OpInfo's types for CUDA by name."""
    unsupported, unknown = [], set()
    for name, types in sorted(operators):
        base = re.match(r"\w+\.(\w+)", name)[1].rstrip("_")
        if base in NO_ARITHMETIC or base in listed:
            continue
        entry = next((n for n in (base, NAMES.get(base), base.removesuffix("_backward")) if n in table), None)
        if entry is None:
            unknown.add(base)
            continue
        # Beside numbers there are indices, of int64.
        numbers = {t for t in types if "float" in t} or set(types)
        if numbers - table[entry]:
            unsupported.append(f"{name} of {types}")
    return unsupported, unknown
