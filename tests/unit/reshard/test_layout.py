"""Layouts: names, vocabulary padding, and sizes that cannot be split."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from families import shape_of
from megatron.core.transformer.moe.router import TopKRouter
from simulated_ranks import make_shape

from rlhf_mc.architectures.spec import padded_vocab_size
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.models.gpt_model import transformer_config
from rlhf_mc.models.megatron_patches import megatron_calls
from rlhf_mc.reshard.layout import check_mcore, mcore_layout
from rlhf_mc.rollout.vllm_layout import check_vllm, vllm_layout


def test_names_of_fused_norms() -> None:
    layout = mcore_layout(make_shape(), 0, 1, range(3), True, True, transformer_engine=True)
    names = {p.local for p in layout.shards if "layernorm" in p.tensor}
    assert {
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    } <= names


@pytest.mark.parametrize(
    ("num_kv_heads", "tp", "wanted"), [(2, 4, [0, 0, 1, 1]), (1, 2, [0, 0]), (4, 4, [0, 1, 2, 3])]
)
def test_neighbouring_ranks_of_vllm_have_the_same_kv_head(
    num_kv_heads: int, tp: int, wanted: list[int]
) -> None:
    shape = make_shape(num_kv_heads=num_kv_heads)
    for name in ("k_proj", "v_proj"):
        tensor = f"model.layers.0.self_attn.{name}.weight"
        boxes = [
            next(s.box for s in vllm_layout(shape, t, tp).shards if s.tensor == tensor)
            for t in range(tp)
        ]
        heads = [(head * shape.head_dim, (head + 1) * shape.head_dim) for head in wanted]
        assert [rows for rows, _ in boxes] == heads


def test_routers_of_glm_are_float32_in_vllm_and_in_the_trainer() -> None:
    shape = shape_of("glm4_moe")
    routers = {s.local for s in vllm_layout(shape, 0, 1).shards if ".gate." in s.tensor}
    assert routers and vllm_layout(shape, 0, 1).float32 == routers
    router = SimpleNamespace(
        config=transformer_config(shape, MegatronConfig(dtype="bfloat16")), bias=None
    )
    router.weight = torch.randn(4, 8).bfloat16()
    states = torch.randn(3, 8).bfloat16()
    with megatron_calls():
        logits = TopKRouter.gating(router, states)
    torch.testing.assert_close(logits, states.float() @ router.weight.float().T)


@pytest.mark.parametrize(
    "check, tp, changes, message",
    [
        (
            check_mcore,
            3,
            {},
            "tensor_model_parallel_size 3 .Megatron.: num_attention_heads is 4.*work: 1, 2, 4$",
        ),
        (check_mcore, 8, {}, "num_attention_heads is 4, which 8 does not divide.*work: 1, 2, 4$"),
        (
            check_mcore,
            2,
            {"num_heads": 6, "num_kv_heads": 3},
            "num_key_value_heads is 3, and neither.*work: 1$",
        ),
        (
            check_mcore,
            4,
            {"num_kv_heads": 1, "head_dim": 1},
            "rows of q, k and v together is 6, which 4 does not divide.*work: 1, 2$",
        ),
        (
            check_mcore,
            2,
            {"ffn_hidden_size": 15},
            "intermediate_size is 15, which 2 does not divide.*work: 1$",
        ),
        (
            check_vllm,
            6,
            {"num_heads": 12, "num_kv_heads": 4},
            "num_key_value_heads is 4.*work: 1, 2, 4$",
        ),
        (
            check_vllm,
            3,
            {"num_heads": 6, "num_kv_heads": 3, "ffn_hidden_size": 24},
            "vocab_size is 128.*work: 1$",
        ),
        (check_vllm, 1, {"value_head": True}, "value head"),
    ],
)
def test_invalid_sizes_are_rejected(check, tp: int, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(make_shape(**changes), tp)


def test_vocabulary_padding() -> None:
    assert [padded_vocab_size(447, tp) for tp in (1, 2, 64, 3, 128)] == [448, 448, 448, 576, 512]
    assert padded_vocab_size(448, 1) == 448
