"""Building micro-batches from the ragged batch."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models import forward
from rlhf_mc.models.forward import cut_micro_batch


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
    plain = cut_micro_batch(batch, [0, 1])
    micro = cut_micro_batch(batch, [0, 1], multiple_of)
    assert micro.tokens.shape == (1, padded)
    assert micro.tokens[0, :11].tolist() == plain.tokens[0].tolist() == [8, 9, 10, 11, 1, 2, 3, 4, 5, 6, 7]
    assert micro.tokens[0, 11:].tolist() == [0] * (padded - 11)
    ends = [0, 4, 11] if padded == 11 else [0, 4, 11, padded]
    assert micro.packed.cu_seqlens_q.tolist() == ends
    assert micro.packed.positions.tolist() == [*range(4), *range(7), *range(padded - 11)]
    for name in ("predicting", "targets", "response_index"):
        assert getattr(micro, name).tolist() == getattr(plain, name).tolist()


def test_dummy_micro_batch_can_be_padded() -> None:
    micro = cut_micro_batch(make_batch([3], [4]), [], 4)
    assert micro.is_filler
    assert micro.tokens.shape == (1, 8)


def test_passes_with_the_same_split_share_packed_sequences() -> None:
    """Pack each split once for three models' scoring passes and two models' updates of two epochs."""
    batch = make_batch([3, 2, 5, 1], [4, 2, 1, 3])
    with mock.patch.object(forward, "pack", wraps=forward.pack) as packs:
        first = [cut_micro_batch(batch, cut) for cut in ([0, 1], [2, 3])]
        for _ in range(2):
            batch = batch.with_fields(values=torch.ones(10))
            assert all(
                a is b for a, b in zip(first, [cut_micro_batch(batch, c) for c in ([0, 1], [2, 3])], strict=True)
            )
        assert packs.call_count == 2
        for minis in [([0, 1], [2, 3])] * 4:
            for mini in minis:
                cut_micro_batch(batch.select(mini), [0, 1])
        assert packs.call_count == 4
        cut_micro_batch(batch, [0, 2])  # another budget
        cut_micro_batch(batch, [0, 1], 4)  # padded for sequence parallelism
        cut_micro_batch(batch, [])
        assert packs.call_count == 7
    fresh = cut_micro_batch(make_batch([3, 2, 5, 1], [4, 2, 1, 3]), [2, 3])
    for name in ("tokens", "predicting", "targets", "response_index"):
        assert torch.equal(getattr(fresh, name), getattr(first[1], name))
