"""Checks of what the ranks have recorded: collectives that match, operators that have a CUDA
kernel."""

from __future__ import annotations

import re
import sys
import unittest
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace

from fake_cuda import Collective

_FORWARD = "models/gpt_model.py:PackedGPT.forward"
KNOWN_WAITS: dict[tuple[str, str, str], tuple[int | None, str]] = {
    ("load", "synchronize", "platform.py:synchronize"): (1, "after the first collectives"),
    ("load", "item", "checkpoint/finite.py:num_not_finite"): (
        None,
        "one a tensor, at the start of a run",
    ),
    ("load", "item", "checkpoint/finite.py:check_not_zero.<locals>.<setcomp>"): (
        None,
        "one a matrix, at the start",
    ),
    ("score", "Event.synchronize", _FORWARD): (None, "experts: tokens of each, one a layer"),
    ("score", "masked_select", _FORWARD): (None, "experts without Transformer Engine: two a layer"),
    ("gradient", "copy to the host", "autograd"): (
        None,
        "offload_policy: gradients that are added to those on the host",
    ),
    ("gradient", "Event.synchronize", _FORWARD): (None, "experts: tokens of each, one a layer"),
    ("gradient", "masked_select", _FORWARD): (
        None,
        "experts without Transformer Engine: two a layer",
    ),
    ("gradient", "Event.synchronize", "autograd"): (None, "experts, recomputed"),
    ("gradient", "masked_select", "autograd"): (
        None,
        "experts without Transformer Engine, recomputed",
    ),
    ("sum_scores", "copy to the host", "topology/consensus.py:sum_over_ranks"): (
        1,
        "scores of the batch",
    ),
    (
        "optimizer_step",
        "item",
        "models/strategies/distributed_optimizer.py:MegatronStrategy.grad_norm",
    ): (
        None,
        "the norm of the gradient; experts have one of their own",
    ),
    ("optimizer_step", "item", "models/strategies/fully_sharded.py:FsdpStrategy.grad_norm"): (
        None,
        "the norm of the gradient",
    ),
    ("statistics", "copy to the host", "topology/consensus.py:gather_vectors"): (
        1,
        "of all mini-batches",
    ),
    ("async_save", "synchronize", "platform.py:synchronize"): (
        1,
        "all copies to page-locked memory",
    ),
    (
        "save",
        "copy to the host",
        "checkpoint/training_tensors.py:TensorWriter._write.<locals>.<genexpr>",
    ): (
        None,
        "one a block, on the writer's thread",
    ),
    ("save", "synchronize", "platform.py:synchronize"): (
        1,
        "before the writer's thread reads the blocks",
    ),
    ("save", "synchronize", "platform.py:unlock_pages"): (1, "a host arena that is freed"),
    ("load_state", "item", "models/optimizer.py:adam_steps"): (
        None,
        "the fused optimizer has its step on the device",
    ),
    ("load_state", "synchronize", "platform.py:unlock_pages"): (1, "a host arena that is freed"),
    ("update_weights", "copy to the host", "reshard/verify.py:checksums"): (
        None,
        "verification alone",
    ),
    (
        "update_weights",
        "copy to the host",
        "reshard/verify.py:_checksums_of_senders.<locals>.<dictcomp>",
    ): (
        None,
        "verification alone, one a peer",
    ),
    ("onload", "synchronize", "platform.py:unlock_pages"): (None, "the model's host arenas"),
    ("update_weights", "synchronize", "platform.py:unlock_pages"): (
        None,
        "the model's host arenas, which are freed with it after the last phase",
    ),
}
"""(phase, operator or call, place) -> (1 where it is once in the phase, otherwise None; the
reason)."""
PAGEABLE_COPIES = {
    (
        "optimizer_step",
        "models/strategies/fully_sharded.py:FsdpStrategy.grad_norm",
    ): "offload_policy: the norm of the gradients on the host",
    (
        "update_weights",
        "models/engine.py:ModelEngine.rollout_params.<locals>.<dictcomp>",
    ): "offload_policy: the weights",
    ("load", "models/gpt_model.py:build_model"): "constants of the model",
    ("load", "reshard/execute.py:_Copies.run"): "weights of the files",
    ("load", "tests"): "the value head of the tests",
    (
        "make_trainable",
        "models/strategies/distributed_optimizer.py:MegatronStrategy.make_trainable",
    ): "constants of the optimizer",
    (
        "score",
        "models/gpt_model.py:PackedGPT.forward",
    ): "numbers of chunks before an all-to-all of heads, once a size; "
    "a number of gpt_oss's activation, one a layer of experts (Megatron-Core's "
    "weighted_bias_quick_geglu_impl)",
    ("gradient", "models/gpt_model.py:PackedGPT.forward"): "a number of gpt_oss's activation",
    ("load_state", "checkpoint/training_tensors.py:read_tensors"): "tensors of the files",
    (
        "update_weights",
        "reshard/verify.py:_checksums_of_senders.<locals>.<dictcomp>",
    ): "verification alone, one a peer",
}
"""(phase, place) -> the reason."""

NOT_SHOWN = (
    "any number that a kernel computes",
    "the order of streams, and races between them",
    "NCCL: its connections, timeouts and memory",
    "torch.compile, Triton's kernels and CUDA graphs",
    "the attention kernel that torch and cuDNN choose",
    "fragmentation of torch's allocator, and memory beside its tensors",
    "vLLM on a GPU",
    "speed",
)
"""Parts of a run on a GPU that fake devices do not execute. docs/gpu.md has the same list."""

P2P = ("send", "recv")


def mismatches(collectives: Mapping[int, Sequence[Collective]]) -> list[str]:
    """Return a line for each group of which two ranks have called different collectives, and for
    each pair of ranks whose messages do not match. NCCL would hang. collectives: by rank, in
    order."""
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
            (
                f"group {ranks}: ranks {first} and {other}: "
                f"{_first_difference(by_rank[first], by_rank[other])}"
            )
            for other in others
            if by_rank[first] != by_rank[other]
        ]
    for sender in collectives:
        for receiver in collectives.keys() - {sender}:
            sent = [
                c.tensors for c in collectives[sender] if (c.kind, c.peer) == ("send", receiver)
            ]
            received = [
                c.tensors for c in collectives[receiver] if (c.kind, c.peer) == ("recv", sender)
            ]
            if sent != received:
                lines.append(
                    f"messages of {sender} to {receiver}: {_first_difference(sent, received)}"
                )
    return lines


def _first_difference(one: Sequence[object], other: Sequence[object]) -> str:
    number = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return (
        f"call {number} of {len(one)} and {len(other)}: {one[number : number + 1]} and "
        f"{other[number : number + 1]}"
    )


NAMES = {
    "_safe_softmax": "softmax",
    "_softmax": "softmax",
    "embedding_dense_backward": "nn.functional.embedding_backward",
    "index": "__getitem__",
}
"""Operators whose entry in OpInfo has another name."""
# fmt: off
NO_ARITHMETIC = frozenset({
    "_local_scalar_dense", "_to_copy", "_unsafe_view", "alias", "arange", "as_strided", "clone",
    "copy", "device",
    "detach", "empty", "empty_like", "empty_strided", "equal", "expand", "fill", "full",
    "full_like",
    "is_same_size", "lift_fresh", "masked_select", "new_empty", "new_zeros", "normal", "ones",
    "ones_like",
    "permute", "resize", "select", "set", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose",
    "unbind", "unsqueeze", "view", "zero", "zeros", "zeros_like", "new_empty_strided", "new_full",
})
# fmt: on
"""Views, allocations and copies: CUDA has them for every type."""


def cuda_types() -> dict[str, frozenset[str]]:
    """Return OpInfo's types for CUDA by name, those of backward passes too. It needs a process of
    fake CUDA devices: elsewhere torch leaves out what needs a newer GPU."""
    # torch's test utilities import a package for expected outputs, of which the table uses nothing.
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal import common_methods_invocations as tables

    entries = [
        entry for name, table in vars(tables).items() if name.endswith("op_db") for entry in table
    ]
    types: dict[str, set[str]] = defaultdict(set)
    for entry in entries:
        names = {entry.name, entry.aten_name, *(alias.name for alias in entry.aliases)}
        for name in names:
            types[name] |= {str(dtype)[6:] for dtype in entry.dtypesIfCUDA}
            types[f"{name}_backward"] |= {str(dtype)[6:] for dtype in entry.backward_dtypesIfCUDA}
    return {name: frozenset(dtypes) for name, dtypes in types.items()}


WITHOUT_ENTRY = {
    "_fused_adamw": "torch.optim.AdamW(fused=True) of float32: FusedAdamWKernel.cu",
    "convolution": "conv1d, of which OpInfo has the name of torch.nn.functional: cuDNN",
    "convolution_backward": "the same",
    "_embedding_bag_forward_only": "torch.nn.functional.embedding_bag: EmbeddingBag.cu",
    "all_gather_copy_in": "of fully_shard: a copy into parts of a buffer",
    "chunk_cat": "of fully_shard: _chunk_cat_out_cuda (native_functions.yaml)",
}
"""Operators that OpInfo does not have -> the reason for which CUDA has them."""


def without_kernel(
    operators: Iterable[tuple[str, tuple[str, ...]]], table: Mapping[str, frozenset[str]]
) -> tuple[list[str], set[str]]:
    """Return the operators whose types OpInfo does not list for CUDA, and the names that neither
    OpInfo nor WITHOUT_ENTRY has. table: OpInfo's types for CUDA by name."""
    unsupported: list[str] = []
    unknown: set[str] = set()
    for name, types in sorted(operators):
        base = re.match(r"\w+\.(\w+)", name)[1].rstrip("_")
        if base in NO_ARITHMETIC or base in WITHOUT_ENTRY:
            continue
        names = (
            base,
            NAMES.get(base),
            f"nn.functional.{base}",
            f"{NAMES.get(base.removesuffix('_backward'))}_backward",
        )
        entry = next((name for name in names if name in table), None)
        if entry is None:
            unknown.add(base)
            continue
        # Beside numbers there are indices, of int64.
        numbers = {t for t in types if "float" in t} or set(types)
        if numbers - table[entry]:
            unsupported.append(f"{name} of {types}")
    return unsupported, unknown
