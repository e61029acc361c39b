"""Packed micro-batches of the ragged batch."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch

from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models import megatron_patches
from rlhf_mc.models.context_parallel import Context
from rlhf_mc.models.forward import pack_micro_batch, packed_lengths
from rlhf_mc.models.shared_prompts import Reads, read


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


@pytest.mark.parametrize("size", [1, 2])
def test_observations_have_results_after_the_drawn_tokens(size: int) -> None:
    """Check an observation at the beginning, within and at the end of a response."""
    batch = make_batch([2, 3], [4, 3])
    mask = torch.tensor([0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 1, 0]).bool()
    observed = dataclasses.replace(
        batch,
        response_mask=mask,
        response_lens=torch.tensor([2, 2]),
        observation_lens=torch.tensor([2, 1]),
    )
    parts = [
        pack_micro_batch(observed, [0, 1], 1, Context(size=size, rank=rank), with_observations=True)
        for rank in range(size)
    ]
    found = {}
    for part in parts:
        assert part.response_index.tolist() == [0, 1, 2, 3] and part.num_observed == 3
        before = part.tokens[0, part.logit_positions].tolist()
        assert part.targets.tolist() == [token + 1 for token in before], "token t + 1 follows t"
        index = part.own_results.tolist() if size > 1 else range(7)
        found |= dict(zip(index, part.targets.tolist(), strict=True))
    # the drawn tokens, sequence after sequence, then those of observations
    assert [found[i] for i in range(7)] == [4, 6, 10, 11, 3, 5, 12]
    plain = pack_micro_batch(observed, [0, 1])
    assert plain.num_observed == 0 and plain.targets.tolist() == [4, 6, 10, 11]


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


def grouped_batch(groups: list[tuple[int, list[int]]]) -> RaggedBatch:
    """Return sequences of groups with one prompt each: (its tokens, those of the responses)."""
    sizes = [(prompt, response) for prompt, lens in groups for response in lens]
    batch = make_batch([p for p, _ in sizes], [r for _, r in sizes])
    starts = iter((batch.seq_lens.cumsum(0) - batch.seq_lens).tolist())
    for prompt, lens in groups:
        first = next(starts)
        for start in [next(starts) for _ in lens[1:]]:
            batch.tokens[start : start + prompt] = batch.tokens[first : first + prompt]
    return batch


@pytest.mark.parametrize("multiple_of", [1, 8])
@pytest.mark.parametrize("at_last_token", [False, True])
def test_shared_prompts_are_packed_once(multiple_of: int, at_last_token: bool) -> None:
    batch = grouped_batch([(9, [3, 1, 4]), (8, [2, 2]), (5, [1])])
    batch.tokens[53:55] = batch.tokens[43:45]  # identical responses
    every = list(range(batch.num_sequences))
    plain = pack_micro_batch(batch, every, 1, at_last_token=at_last_token, with_sources=True)
    micro = pack_micro_batch(
        batch,
        every,
        multiple_of,
        at_last_token=at_last_token,
        with_sources=True,
        share_prompts=True,
    )
    shared = micro.packed.shared
    assert shared is not None
    (length,) = packed_lengths(batch, [every], multiple_of, [Context()], True)
    assert micro.tokens.shape == (1, length) and length == -(-35 // multiple_of) * multiple_of
    rows = shared.rows.index
    tokens = len(plain.tokens[0])
    assert micro.tokens[0, rows][:tokens].tolist() == plain.tokens[0].tolist()
    assert micro.packed.positions[rows][:tokens].tolist() == plain.packed.positions.tolist()
    assert micro.targets.tolist() == plain.targets.tolist()
    assert micro.response_index.tolist() == plain.response_index.tolist()
    before = micro.tokens[0, micro.logit_positions]
    assert before.tolist() == plain.tokens[0, plain.logit_positions].tolist()
    assert rows[shared.owners].tolist() == list(range(length))
    assert micro.sources is not None and plain.sources is not None
    assert shared.sources[:tokens].tolist() == plain.sources.tolist()
    # Each unique token counts in as many sequences as have it.
    assert shared.members.sum(0)[shared.nodes].tolist() == rows.bincount().tolist()


def test_shared_prompts_before_observations() -> None:
    """Let the second token of each conversation be an observation."""
    batch = grouped_batch([(9, [3, 4]), (6, [3, 3])])
    mask = torch.zeros(len(batch.tokens), dtype=torch.bool)
    for end, length in zip(batch.seq_lens.cumsum(0), batch.response_lens, strict=True):
        mask[end - length : end] = True
        mask[end - length + 1] = False
    batch = dataclasses.replace(
        batch,
        response_mask=mask,
        response_lens=batch.response_lens - 1,
        observation_lens=torch.ones(4, dtype=torch.int64),
        rollout_log_probs=torch.zeros(9),
    )
    every = list(range(4))
    plain = pack_micro_batch(batch, every)
    micro = pack_micro_batch(batch, every, share_prompts=True)
    assert micro.packed.shared is not None and micro.tokens.shape[1] == 9 + 7 + 6 + 6
    assert micro.targets.tolist() == plain.targets.tolist()
    before = micro.tokens[0, micro.logit_positions]
    assert before.tolist() == plain.tokens[0, plain.logit_positions].tolist()


def test_short_prompts_and_context_parallel_sequences_are_not_shared() -> None:
    short = grouped_batch([(3, [9, 9]), (2, [8, 9])])
    context = Context(size=2, rank=0)
    long = grouped_batch([(9, [3, 3])])
    for batch, own in ((short, Context()), (long, context)):
        every = list(range(batch.num_sequences))
        plain = pack_micro_batch(batch, every, context=own)
        micro = pack_micro_batch(batch, every, context=own, share_prompts=True)
        assert micro.packed.shared is None
        assert torch.equal(micro.tokens, plain.tokens)
        assert packed_lengths(batch, [every], 1, [own], True) == [plain.tokens.shape[1]]


def test_gradients_of_shared_tokens_are_added_in_float32() -> None:
    """Add 256 to 1 in bfloat16, which has 8 bits: one by one, each addition of 1 is lost."""
    index = np.array([1, 1, 0, 1, 1])
    x = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    out = read(x, Reads.of(index, 3))
    grad = torch.tensor([[256.0], [1.0], [5.0], [1.0], [1.0]]).expand(5, 2).bfloat16()
    out.backward(grad)
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [5.0, float(torch.tensor(259.0).bfloat16()), 0.0]
    assert x.grad[1, 0] != 256.0
