"""Traits of architectures: every name that a table uses exists, and checkpoints store traits as fields of the shape."""

from __future__ import annotations

import typing
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from test_spec import shape_of

from rlhf_mc.architectures.parameters import PARAMS
from rlhf_mc.architectures.spec import FAMILIES, Activation, ModelShape, Traits
from rlhf_mc.checkpoint.training_state import check_shape
from rlhf_mc.config.errors import UserError
from rlhf_mc.models.build import ACTIVATIONS


def test_every_name_in_the_tables_exists() -> None:
    traits = {field.name for field in fields(Traits)}
    assert all(traits >= set(family.config_traits) for family in FAMILIES.values())
    shape = shape_of("qwen2")
    assert all(isinstance(getattr(shape, p.only_if), bool) for p in PARAMS if p.only_if)


def test_every_activation_has_a_function() -> None:
    assert set(ACTIVATIONS) == set(typing.get_args(Activation))
    assert all(set(family.activations.values()) <= set(ACTIVATIONS) for family in FAMILIES.values())


def test_stored_shapes_of_earlier_checkpoints_are_read() -> None:
    """Traits are stored beside the sizes, under these names."""
    stored = {
        "family": "llama",
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "vocab_size": 10,
        "tie_embeddings": False,
        "qkv_bias": True,
        "norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 32,
        "rope_scaling": None,
        "o_bias": True,
        "mlp_bias": False,
        "qk_norm": False,
        "zero_centered_norms": False,
        "scaled_embeddings": False,
        "activation": "silu",
        "num_experts": 0,
        "experts_per_token": 0,
        "expert_ffn_hidden_size": 0,
        "norm_topk_prob": False,
        "value_head": False,
    }
    shape = ModelShape(**stored)
    assert asdict(shape) == stored
    check_shape(Path("ckpt"), "actor", {"actor": {"shape": stored}}, shape)
    other = stored | {"family": "qwen2", "o_bias": False}
    with pytest.raises(UserError, match="the actor's family is qwen2 there and llama here"):
        check_shape(Path("ckpt"), "actor", {"actor": {"shape": other}}, shape)
    older = {key: value for key, value in stored.items() if key != "qk_norm"}  # from before the trait was known
    check_shape(Path("ckpt"), "actor", {"actor": {"shape": older}}, shape)
    with pytest.raises(UserError, match="the actor's qk_norm is False there and True here"):
        check_shape(Path("ckpt"), "actor", {"actor": {"shape": older}}, replace(shape, qk_norm=True))
