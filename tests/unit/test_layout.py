"""Layouts: names, vocabulary padding, and sizes that cannot be split."""

from __future__ import annotations

import pytest
from simulated_ranks import make_shape

from rlhf_mc.architectures.spec import padded_vocab_size
from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.layout import check_mcore, mcore_layout
from rlhf_mc.rollout.vllm_layout import check_vllm


def test_names_of_fused_norms() -> None:
    layout = mcore_layout(make_shape(), 0, 1, range(3), True, True, transformer_engine=True)
    names = {p.local for p in layout.shards if "layernorm" in p.tensor}
    assert {
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    } <= names


@pytest.mark.parametrize(
    "check, tp, changes, message",
    [
        (check_mcore, 3, {}, "tensor_model_parallel_size 3 .Megatron.: num_attention_heads is 4.*work: 1, 2, 4$"),
        (check_mcore, 8, {}, "num_attention_heads is 4, which 8 does not divide.*work: 1, 2, 4$"),
        (check_mcore, 2, {"num_heads": 6, "num_kv_heads": 3}, "num_key_value_heads is 3, and neither.*work: 1$"),
        (
            check_mcore,
            4,
            {"num_kv_heads": 1, "head_dim": 1},
            "rows of q, k and v together is 6, which 4 does not divide.*work: 1, 2$",
        ),
        (check_mcore, 2, {"ffn_hidden_size": 15}, "intermediate_size is 15, which 2 does not divide.*work: 1$"),
        (check_vllm, 6, {"num_heads": 12, "num_kv_heads": 4}, "num_key_value_heads is 4.*work: 1, 2, 4$"),
        (check_vllm, 3, {"num_heads": 6, "num_kv_heads": 3, "ffn_hidden_size": 24}, "vocab_size is 128.*work: 1$"),
        (check_vllm, 1, {"value_head": True}, "value head"),
    ],
)
def test_invalid_sizes_are_rejected(check, tp: int, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(make_shape(**changes), tp)


def test_vocabulary_padding() -> None:
    assert [padded_vocab_size(447, tp) for tp in (1, 2, 64, 3, 128)] == [448, 448, 448, 576, 512]
    assert padded_vocab_size(448, 1) == 448
