"""fp8: refused where it cannot run, and what it asks of sizes and of the tokens of a
micro-batch."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from config_files import validated
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.models import transformer_engine
from rlhf_mc.reshard.model_checks import FP8_MULTIPLES, check_layout

RECIPES = ("tensorwise", "blockwise", "mxfp8")


def shape_of(**sizes: int) -> ModelShape:
    config: dict[str, Any] = {
        "vocab_size": 270,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return ModelShape.from_hf_config(AutoConfig.for_model("qwen2", **(config | sizes)).to_dict())


def test_recipes_are_megatrons() -> None:
    """Compare with the recipes of Megatron-Core; delayed scaling has a state, custom needs code."""
    known = typing.get_args(
        typing.get_args(typing.get_type_hints(TransformerConfig)["fp8_recipe"])[0]
    )
    ours = typing.get_args(typing.get_args(typing.get_type_hints(MegatronConfig)["fp8"])[0])
    assert set(ours) == set(RECIPES) == FP8_MULTIPLES.keys() == set(known) - {"delayed", "custom"}
    for recipe in RECIPES:
        settings = transformer_engine.fp8_settings(MegatronConfig(fp8=recipe))
        assert settings["fp8_recipe"] == recipe and settings["fp8"] in ("hybrid", "e4m3")
    assert transformer_engine.fp8_settings(MegatronConfig()) == {}


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a machine with GPUs may have Transformer Engine"
)
def test_a_gpu_without_transformer_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    monkeypatch.setattr(transformer_engine, "uses_transformer_engine", lambda: False)
    with pytest.raises(UserError, match="fp8 needs Transformer Engine, which is not installed"):
        transformer_engine.check_fp8("critic.megatron", MegatronConfig(fp8="tensorwise"))


def test_settings_that_are_refused(config_file: Path) -> None:
    validated(config_file, "actor.megatron.fp8=mxfp8")
    for override, words in (
        (
            "actor.megatron.dtype=float32",
            "actor.megatron.fp8 is 'mxfp8' and actor.megatron.dtype is float32",
        ),
        ("actor.megatron.fp8=delayed", "actor.megatron.fp8"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            validated(config_file, "actor.megatron.fp8=mxfp8", override)


def test_sizes_that_a_recipe_cannot_multiply_are_refused() -> None:
    for recipe in RECIPES:
        check_layout(shape_of(), MegatronConfig(fp8=recipe))
    check_layout(shape_of(), MegatronConfig(fp8="mxfp8", tensor_model_parallel_size=2))
    with pytest.raises(
        UserError, match=r"^critic.megatron.fp8: 'blockwise' .*multiples of 128; .*\[320, 256\]"
    ):
        check_layout(shape_of(intermediate_size=160), MegatronConfig(fp8="blockwise"), "critic")
    with pytest.raises(
        UserError, match=r"'tensorwise' .*multiples of 16; .*linear_fc2.weight has \[256, 24\] on"
    ):
        check_layout(
            shape_of(intermediate_size=48),
            MegatronConfig(fp8="tensorwise", tensor_model_parallel_size=2),
        )


def test_tokens_of_a_micro_batch() -> None:
    assert transformer_engine.token_multiple(MegatronConfig()) == 1
    assert transformer_engine.token_multiple(MegatronConfig(tensor_model_parallel_size=4)) == 1
    split = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    assert transformer_engine.token_multiple(MegatronConfig(**split)) == 4
    assert [
        transformer_engine.token_multiple(MegatronConfig(fp8=recipe)) for recipe in RECIPES
    ] == [16, 128, 32]
    assert [
        transformer_engine.token_multiple(MegatronConfig(fp8=recipe, **split)) for recipe in RECIPES
    ] == [
        64,
        512,
        128,
    ]
