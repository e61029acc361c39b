"""Frozen parameters of a model, from patterns of the tensor names of its Hugging Face checkpoint.
No torch here."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import defaultdict
from collections.abc import Collection, Sequence

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.layout import Layout, correction_biases, logical_shapes, mcore_layout


def frozen_tensors(key: str, patterns: Sequence[str], shape: ModelShape) -> frozenset[str]:
    """Return the checkpoint's tensors that one of the patterns matches (* is any text), and the
    correction biases.

    Raise UserError, the same on every rank, if a pattern matches no tensor, if all tensors match,
    or if only a part of the tensors of one Megatron-Core parameter match."""
    if shape.lora is not None:
        return frozenset(logical_shapes(shape.base)) - {"score.weight"}
    if not patterns:
        return correction_biases(shape)
    names = list(logical_shapes(shape))
    frozen: set[str] = set(correction_biases(shape))
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            nearest = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)[0]
            raise UserError(
                f"{key}: {pattern!r} matches no tensor of the model; the nearest name is "
                f"{nearest!r}"
            )
        frozen.update(matched)
    together: dict[str, set[str]] = defaultdict(set)
    for shard in mcore_layout(shape, 0, 1, range(shape.num_layers), first=True, last=True).shards:
        together[shard.local].add(shard.tensor)
    for tensors in together.values():
        if tensors & frozen and tensors - frozen:
            raise UserError(
                f"{key} freezes {min(tensors & frozen)} but not "
                f"{', '.join(sorted(tensors - frozen))}; Megatron-Core"
                " holds them as one parameter: freeze all of them or none"
            )
    if len(frozen) == len(names):
        raise UserError(
            f"{key} freezes every tensor of the model; at least one must be left to train"
        )
    return frozenset(frozen)


def check_experts(key: str, frozen: Collection[str], shape: ModelShape) -> None:
    """Raise UserError if some of the experts of a layer are frozen and others are not. Transformer
    Engine computes their gradients in one call, and asks the first expert's weight whether they are
    needed."""
    experts: dict[str, set[str]] = defaultdict(set)
    for name in logical_shapes(shape):
        experts[re.sub(r"\.experts\.\d+\.", ".experts.*.", name)].add(name)
    for stack, members in experts.items():
        if (frozen_members := members.intersection(frozen)) and frozen_members != members:
            raise UserError(
                f"{key} freezes {min(frozen_members)} but not {min(members - frozen_members)}; "
                f"Transformer Engine computes the gradients of {stack} in one call: freeze all of "
                "them or none"
            )


def frozen_parameters(tensors: Collection[str], layout: Layout) -> frozenset[str]:
    """Return the names of a rank's parameters that hold these tensors."""
    if not tensors:
        return frozenset()  # the shards of single experts are many
    return frozenset(shard.local for shard in layout.shards if shard.tensor in tensors)
