"""Freeze patterns: the tensors that they match, and patterns that are rejected."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.freeze import check_experts, frozen_parameters, frozen_tensors
from rlhf_mc.reshard.layout import mcore_layout

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def shape_of(family: str, value_head: bool = False, **extra: object) -> ModelShape:
    config = AutoConfig.for_model(family, **SIZES, **extra).to_dict()
    return ModelShape.from_hf_config(config, value_head=value_head)


def test_patterns_name_tensors_of_the_checkpoint() -> None:
    shape = shape_of("qwen2", tie_word_embeddings=True)
    assert frozen_tensors("actor.freeze", [], shape) == frozenset()
    assert frozen_tensors("actor.freeze", ["model.norm.weight", "model.embed*"], shape) == {
        "model.norm.weight",
        "model.embed_tokens.weight",
    }
    assert len(frozen_tensors("actor.freeze", ["model.layers.1.*"], shape)) == 12


def test_tied_embedding_is_frozen_on_both_stages() -> None:
    shape = shape_of("qwen2", tie_word_embeddings=True)
    for stage, name in ((0, "embedding.word_embeddings.weight"), (1, "output_layer.weight")):
        layout = mcore_layout(
            shape, 0, 1, range(stage, stage + 1), first=stage == 0, last=stage == 1
        )
        assert frozen_parameters({"model.embed_tokens.weight"}, layout) == {name}


MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "norm_topk_prob": True,
}


def test_transformer_engine_freezes_all_experts_of_a_layer_or_none() -> None:
    shape = shape_of("qwen3_moe", **MOE)
    for patterns in (
        ["*.mlp.gate.weight"],
        ["model.layers.1.mlp.experts.*"],
        ["*.down_proj.weight", "model.norm.*"],
    ):
        check_experts("actor.freeze", frozen_tensors("actor.freeze", patterns, shape), shape)
    some = frozen_tensors("actor.freeze", ["model.layers.1.mlp.experts.[12].*"], shape)
    expert = r"model\.layers\.1\.mlp\.experts\.%d\.gate_proj\.weight"
    with pytest.raises(
        UserError, match=f"^actor.freeze freezes {expert % 1} but not {expert % 0}; "
    ) as error:
        check_experts("actor.freeze", some, shape)
    assert "freeze all of them or none" in str(error.value)


def test_routers_of_a_moe_can_be_frozen() -> None:
    shape = shape_of("qwen3_moe", **MOE)
    assert frozen_tensors("actor.freeze", ["*.mlp.gate.weight"], shape) == {
        "model.layers.0.mlp.gate.weight",
        "model.layers.1.mlp.gate.weight",
    }


@pytest.mark.parametrize(
    ("patterns", "value_head", "words"),
    [
        (
            ["model.embed_token.*"],
            False,
            ("'model.embed_token.*' matches no tensor", "'model.embed_tokens.weight'"),
        ),
        (["model.norm.weight", "score.weight"], False, ("'score.weight' matches no tensor",)),
        (
            ["*.0.self_attn.q_proj.weight"],
            False,
            ("0.self_attn.q_proj.weight but not", "k_proj", "v_proj"),
        ),
        (
            ["*.up_proj.weight"],
            False,
            ("up_proj.weight but not model.layers.0.mlp.gate_proj.weight",),
        ),
        (["*"], True, ("critic.freeze freezes every tensor",)),
        (["model.*", "score.*"], True, ("critic.freeze freezes every tensor",)),
    ],
)
def test_bad_patterns_are_rejected_in_one_line(
    patterns: list[str], value_head: bool, words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        frozen_tensors("critic.freeze", patterns, shape_of("qwen2", value_head))
    for word in ("critic.freeze", *words):
        assert word in str(caught.value)
