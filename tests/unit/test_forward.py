"""Packed micro-batches of the ragged batch, and the cache that passes share."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models import forward
from rlhf_mc.models.forward import PackingCache, PlanKey, pack_micro_batch


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
    assert micro.tokens[0, :11].tolist() == plain.tokens[0].tolist() == [8, 9, 10, 11, 1, 2, 3, 4, 5, 6, 7]
    assert micro.tokens[0, 11:].tolist() == [0] * (padded - 11)
    ends = [0, 4, 11] if padded == 11 else [0, 4, 11, padded]
    assert micro.packed.cu_seqlens_q.tolist() == ends
    assert micro.packed.positions.tolist() == [*range(4), *range(7), *range(padded - 11)]
    for name in ("logit_positions", "targets", "response_index"):
        assert getattr(micro, name).tolist() == getattr(plain, name).tolist()


def test_dummy_micro_batch_can_be_padded() -> None:
    micro = pack_micro_batch(make_batch([3], [4]), [], 4)
    assert micro.is_dummy
    assert micro.tokens.shape == (1, 8)


def test_passes_with_the_same_split_share_packed_micro_batches() -> None:
    """Pack each split once for three models' scoring passes and two models' updates of two epochs."""
    batch = make_batch([3, 2, 5, 1], [4, 2, 1, 3])
    split = ([0, 1], [2, 3])
    cache = PackingCache()
    with mock.patch.object(forward, "pack", wraps=forward.pack) as packs:
        first = [cache.micro_batch(batch, indices) for indices in split]
        for _ in range(2):
            batch = batch.with_fields(values=torch.ones(10))
            again = [cache.micro_batch(batch, indices) for indices in split]
            assert all(a is b for a, b in zip(first, again, strict=True))
        assert packs.call_count == 2
        for minis in [split] * 4:
            for mini in minis:
                cache.of_mini_batch(mini).micro_batch(batch.select(mini), [0, 1])
        assert packs.call_count == 4
        cache.micro_batch(batch, [0, 2])  # another budget
        cache.micro_batch(batch, [0, 1], 4)  # padded for sequence parallelism
        cache.micro_batch(batch, [])
        cache.of_mini_batch([1, 0]).micro_batch(batch.select([1, 0]), [0, 1])  # another order
        assert packs.call_count == 8
        cache.clear()
        assert cache.micro_batch(batch, split[0]) is not first[0]
    fresh = pack_micro_batch(make_batch([3, 2, 5, 1], [4, 2, 1, 3]), [2, 3])
    for name in ("tokens", "logit_positions", "targets", "response_index"):
        assert torch.equal(getattr(fresh, name), getattr(first[1], name))


def test_cache_of_another_batch_is_rejected() -> None:
    cache = PackingCache()
    cache.micro_batch(make_batch([3, 2], [4, 2]), [0])
    with pytest.raises(AssertionError, match="the cache is of another batch"):
        cache.micro_batch(make_batch([3, 3], [4, 2]), [0])


def test_plan_is_made_once_per_key() -> None:
    cache = PackingCache()
    plans = [[[[0], [1]]], [[[0, 1]]]]
    key = PlanKey(1, 8, (4.0, 5.0))
    assert cache.plan(key, lambda: plans[0]) is cache.plan(PlanKey(1, 8, (4.0, 5.0)), lambda: plans[1]) is plans[0]
    assert cache.plan(PlanKey(1, 9, (4.0, 5.0)), lambda: plans[1]) is plans[1]
