"""Packed micro-batches of the ragged batch."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models import megatron_patches
from rlhf_mc.models.context_parallel import Context
from rlhf_mc.models.forward import pack_micro_batch, packed_lengths


def make_batch(prompt_lens: list[int], response_lens: list[int]) -> RaggedBatch:
    total = sum(prompt_lens) + sum(response_lens)
    return RaggedBatch(
        tokens=torch.arange(1, total + 1),
        prompt_lens=torch.tensor(prompt_lens),
        response_lens=torch.tensor(response_lens),
        rollout_log_probs=torch.zeros(sum(response_lens)),
        finished=torch.ones(len(prompt_lens), dtype=torch.bool),
    )


@pytest.mark.parametrize(("multiple_of", "padded"), [(1, 11), (2, 12), (4, 12), (8, 16), (11, 11)])
def test_padding_is_a_separate_sequence_without_targets(multiple_of: int, padded: int) -> None:
    batch = make_batch([3, 2], [4, 2])
    plain = pack_micro_batch(batch, [0, 1])
    micro = pack_micro_batch(batch, [0, 1], multiple_of)
    assert micro.tokens.shape == (1, padded)
    assert (
        micro.tokens[0, :11].tolist()
        == plain.tokens[0].tolist()
        == [8, 9, 10, 11, 1, 2, 3, 4, 5, 6, 7]
    )
    assert micro.tokens[0, 11:].tolist() == [0] * (padded - 11)
    ends = [0, 4, 11] if padded == 11 else [0, 4, 11, padded]
    assert plain.targets.tolist() == [10, 11, 4, 5, 6, 7]
    assert plain.logit_positions.tolist() == [1, 2, 6, 7, 8, 9]  # of the tokens before them
    assert plain.response_index.tolist() == [4, 5, 0, 1, 2, 3]
    assert micro.packed.cu_seqlens_q.tolist() == ends
    assert micro.packed.positions.tolist() == [*range(4), *range(7), *range(padded - 11)]
    for name in ("logit_positions", "targets", "response_index"):
        assert getattr(micro, name).tolist() == getattr(plain, name).tolist()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("at_last_token", [False, True])
@pytest.mark.parametrize("multiple_of", [1, 3])
def test_context_parallel_ranks_have_each_token_and_each_result_once(
    size: int, at_last_token: bool, multiple_of: int
) -> None:
    batch = make_batch([3, 2, 1, 9], [4, 2, 1, 12])
    plain = pack_micro_batch(batch, [0, 1, 2, 3], at_last_token=at_last_token)
    contexts = [Context(size=size, rank=rank) for rank in range(size)]
    parts = [
        pack_micro_batch(batch, [0, 1, 2, 3], multiple_of, context, at_last_token)
        for context in contexts
    ]
    assert sorted(t for part in parts for t in part.tokens[0].tolist() if t) == sorted(
        plain.tokens[0].tolist()
    )
    assert sorted(i for part in parts for i in part.own_results.tolist()) == list(
        range(len(plain.response_index))
    )
    for context, part in zip(contexts, parts, strict=True):
        (length,) = packed_lengths(batch, [[0, 1, 2, 3]], multiple_of, [context])
        assert part.tokens.shape == (1, length) and length % multiple_of == 0
        assert part.response_index.tolist() == plain.response_index.tolist()
        assert part.targets.tolist() == plain.targets[part.own_results].tolist()
        before = plain.tokens[0, plain.logit_positions[part.own_results]]
        assert part.tokens[0, part.logit_positions].tolist() == before.tolist()
        position = plain.packed.positions[plain.logit_positions[part.own_results]]
        assert part.packed.positions[part.logit_positions].tolist() == position.tolist()


def test_context_parallel_ranks_have_a_chunk_from_each_end() -> None:
    """Check Transformer Engine's order of the chunks."""
    lens = np.array([8, 4])
    own = [Context(size=2, rank=rank).own_tokens(lens).tolist() for rank in range(2)]
    assert own == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_dummy_micro_batch_can_be_padded() -> None:
    micro = pack_micro_batch(make_batch([3], [4]), [], 4)
    assert micro.is_dummy
    assert micro.tokens.shape == (1, 4)  # it has two tokens


def test_hooks_of_gradients_are_removed() -> None:
    """Check what the removal is for: the owner of a hook, which refers to the node, can be
    collected."""

    class Owner:
        def __init__(self, parameter: torch.Tensor) -> None:
            self.nodes = [parameter.expand_as(parameter).grad_fn.next_functions[0][0]]
            for _ in range(2):
                self.nodes[0].register_hook(self.hook)

        def hook(self, *gradients: object) -> None:
            raise AssertionError("a removed hook is called")

    parameter = torch.zeros(2, requires_grad=True)
    owner = Owner(parameter)
    nodes = list(owner.nodes)
    collected = weakref.ref(owner)
    megatron_patches.remove_hooks(owner.nodes)
    assert owner.nodes == [] and collected() is not None
    parameter.sum().backward()
    del owner
    gc.collect()
    assert collected() is None and len(nodes) == 1
