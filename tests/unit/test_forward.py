"""Packed micro-batches of the ragged batch."""

from __future__ import annotations

import pytest
import torch

from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.forward import pack_micro_batch


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
