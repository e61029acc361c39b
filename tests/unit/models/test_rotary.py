"""Rotary angles of packed sequences, for Transformer Engine's attention and for torch's."""

from __future__ import annotations

import torch

from rlhf_mc.models.layers import PackedRotaryEmbedding, PackedSequences, pack
from rlhf_mc.models.megatron_patches import megatron_calls


def angles(rope: PackedRotaryEmbedding, packed: PackedSequences) -> torch.Tensor:
    """Return the angles as GPTModel asks for them."""
    length = rope.get_rotary_seq_len(None, None, None, None, packed)
    return rope(length, packed_seq=packed.qkv_format == "thd", cp_group=None)


def test_formats_agree() -> None:
    packed = pack([2, 5, 3])
    with megatron_calls():
        rope = PackedRotaryEmbedding(8, rotary_percent=1.0, use_cpu_initialization=True)
        table = angles(rope, packed.for_format("thd"))
        of_tokens = angles(rope, packed.for_format("packed"))
    assert table.shape == (5, 1, 1, 8)
    of_positions = table[packed.positions]
    wanted = torch.cat((of_positions.cos(), of_positions[..., :4].sin()), dim=-1)  # on a CPU
    assert torch.equal(of_tokens, wanted)


def test_other_frequencies_change_the_table() -> None:
    packed = pack([2, 5]).for_format("thd")
    with megatron_calls():
        rope = PackedRotaryEmbedding(8, rotary_percent=1.0, use_cpu_initialization=True)
        first = angles(rope, packed)
        # Megatron-Core's own forward would return the first table from its cache
        rope.inv_freq = rope.inv_freq * 2
        assert torch.equal(angles(rope, packed), first * 2)
