"""How a micro-batch is cut out of the ragged batch."""

from __future__ import annotations

import pytest
import torch

from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.forward import cut_micro_batch


def a_batch(prompt_lens: list[int], response_lens: list[int]) -> RaggedBatch:
    total = sum(prompt_lens) + sum(response_lens)
    return RaggedBatch(
        tokens=torch.arange(1, total + 1),
        prompt_lens=torch.tensor(prompt_lens),
        response_lens=torch.tensor(response_lens),
        rollout_log_probs=torch.zeros(sum(response_lens)),
        finished=torch.ones(len(prompt_lens), dtype=torch.bool),
    )


@pytest.mark.parametrize(("multiple_of", "padded"), [(1, 11), (2, 12), (4, 12), (8, 16), (11, 11)])
def test_padding_is_a_sequence_of_its_own_from_which_nothing_is_predicted(multiple_of: int, padded: int) -> None:
    batch = a_batch([3, 2], [4, 2])
    plain, micro = cut_micro_batch(batch, [0, 1]), cut_micro_batch(batch, [0, 1], multiple_of)
    assert micro.tokens.shape == (1, padded)
    assert micro.tokens[0, :11].tolist() == plain.tokens[0].tolist() == [8, 9, 10, 11, 1, 2, 3, 4, 5, 6, 7]
    assert micro.tokens[0, 11:].tolist() == [0] * (padded - 11)
    ends = [0, 4, 11] if padded == 11 else [0, 4, 11, padded]
    assert micro.packed.cu_seqlens_q.tolist() == ends
    assert micro.packed.positions.tolist() == [*range(4), *range(7), *range(padded - 11)]
    for name in ("predicting", "targets", "response_index"):
        assert getattr(micro, name).tolist() == getattr(plain, name).tolist()


def test_a_filler_can_be_padded_too() -> None:
    micro = cut_micro_batch(a_batch([3], [4]), [], 4)
    assert micro.is_filler
    assert micro.tokens.shape == (1, 8)
