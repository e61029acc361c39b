"""Specifications of architectures: names in the tables, shapes from config.json, stored shapes."""

from __future__ import annotations

import json
import typing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from families import config_of, shape_of

from rlhf_mc.architectures.families import FAMILIES, Activation, Traits
from rlhf_mc.architectures.operations import forward_flops, num_pairs, training_flops
from rlhf_mc.architectures.parameters import LAYERS
from rlhf_mc.architectures.spec import LayerKind, ModelShape
from rlhf_mc.checkpoint.training_state import check_shape
from rlhf_mc.config.errors import UserError
from rlhf_mc.models.gpt_model import ACTIVATIONS


def test_every_name_in_the_tables_exists() -> None:
    traits = {field.name for field in fields(Traits)}
    assert all(traits >= set(family.config_traits) for family in FAMILIES.values())
    assert set(LAYERS) == set(typing.get_args(LayerKind))


def test_every_activation_has_a_function() -> None:
    assert set(ACTIVATIONS) == set(typing.get_args(Activation))
    assert all(set(family.activations.values()) <= set(ACTIVATIONS) for family in FAMILIES.values())


def test_shapes_of_earlier_checkpoints_are_read() -> None:
    """Check the stored field names, traits included."""
    stored = {
        "family": "llama",
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "v_head_dim": 0,
        "rope_head_dim": 0,
        "kv_lora_rank": 0,
        "q_lora_rank": 0,
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
        "dense_layers": (),
        "rotary_fraction": 1.0,
        "routed_scaling": 1.0,
        "shared_ffn_hidden_size": 0,
        "router_groups": 1,
        "groups_per_token": 1,
        "split_delta_nets": False,
        "sigmoid_router": False,
        "norm_topk_prob": False,
        "sinks": False,
        "sliding_window": 0,
        "attention_gate": False,
        "shared_expert_gate": False,
        "linear_layers": (),
        "linear_key_heads": 0,
        "linear_value_heads": 0,
        "linear_key_dim": 0,
        "linear_value_dim": 0,
        "linear_kernel": 0,
        "value_head": False,
    }
    shape = ModelShape(**stored)
    assert asdict(shape) == stored
    check_shape(Path("ckpt"), "actor", {"actor": {"shape": stored}}, shape)
    other = stored | {"family": "qwen2", "o_bias": False}
    with pytest.raises(UserError, match="the actor's family is qwen2 there and llama here"):
        check_shape(Path("ckpt"), "actor", {"actor": {"shape": other}}, shape)
    check_shape(Path("ckpt"), "actor", {"actor": {"shape": json.loads(json.dumps(stored))}}, shape)
    # from before the trait was known
    older = {key: value for key, value in stored.items() if key != "qk_norm"}
    check_shape(Path("ckpt"), "actor", {"actor": {"shape": older}}, shape)
    with pytest.raises(UserError, match="the actor's qk_norm is False there and True here"):
        check_shape(
            Path("ckpt"), "actor", {"actor": {"shape": older}}, replace(shape, qk_norm=True)
        )


CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def test_shape_from_config() -> None:
    shape = ModelShape.from_hf_config(CONFIG | {"rope_theta": 5e5})
    assert (shape.num_kv_heads, shape.head_dim, shape.rope_theta, shape.rope_scaling) == (
        2,
        32,
        5e5,
        None,
    )
    assert shape.qkv_bias and not shape.o_bias and not shape.tie_embeddings
    newer = {
        "rope_parameters": {"rope_theta": 7e5, "rope_type": "linear", "factor": 8.0},
        "attention_bias": True,
    }
    shape = ModelShape.from_hf_config(CONFIG | newer | {"model_type": "llama"})
    assert shape.rope_theta == 7e5 and shape.rope_scaling == {"rope_type": "linear", "factor": 8.0}
    assert shape.qkv_bias and shape.o_bias and not shape.mlp_bias
    assert (
        ModelShape.from_hf_config(CONFIG | {"rope_parameters": {"rope_type": "default"}}).rope_theta
        == 1e4
    )
    hash(shape)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; known are llama, qwen2"),
        ({"model_type": "qwen3_5_moe"}, "text_config is missing"),
        ({"model_type": "qwen4_exp"}, "model_type is 'qwen4_exp'; known are llama"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 2},
            "num_attention_heads 3 is not a multiple",
        ),
    ],
)
def test_unsupported_configs_are_rejected(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelShape.from_hf_config(CONFIG | changes)


def test_traits_of_families() -> None:
    gemma = shape_of("gemma")
    assert (
        gemma.zero_centered_norms
        and gemma.scaled_embeddings
        and gemma.activation == "gelu_pytorch_tanh"
    )
    assert gemma.tie_embeddings and not gemma.qkv_bias
    assert shape_of("gemma", hidden_act="gelu").activation == "gelu_pytorch_tanh"
    assert shape_of("gemma", hidden_act="gelu", hidden_activation="gelu_pytorch_tanh") == gemma
    # Published configurations of gemma have no tie_word_embeddings and no head_dim.
    sparse = {key: value for key, value in config_of("gemma").items() if key != "head_dim"}
    assert ModelShape.from_hf_config(sparse).head_dim == 256
    qwen3 = shape_of("qwen3")
    assert (
        qwen3.qk_norm and qwen3.head_dim == 3 and not qwen3.qkv_bias and qwen3.activation == "silu"
    )
    moe = shape_of("qwen3_moe")
    assert (
        moe.num_experts,
        moe.experts_per_token,
        moe.expert_ffn_hidden_size,
        moe.norm_topk_prob,
    ) == (4, 2, 4, True)
    newer = config_of("qwen3_moe", num_local_experts=4)
    del newer["num_experts"]
    assert ModelShape.from_hf_config(newer) == moe
    mixtral = shape_of("mixtral")
    assert (mixtral.num_experts, mixtral.expert_ffn_hidden_size, mixtral.norm_topk_prob) == (
        4,
        8,
        True,
    )
    assert mixtral.rope_theta == 1e6 and mixtral == shape_of("mixtral", norm_topk_prob=False)
    assert shape_of("mistral").layer_kinds[0] == "dense" and not shape_of("mistral").qkv_bias


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {"sliding_window": 4096}, 'sliding_window is 4096.*"sliding_window": null'),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window is true"),
        (
            "gemma",
            {"hidden_act": "silu"},
            "hidden_act is 'silu'; only 'gelu_pytorch_tanh' or 'gelu'",
        ),
        ("gemma", {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        (
            "qwen3_moe",
            {"mlp_only_layers": [2]},
            r"mlp_only_layers is \[2\]; expected a list of layers from 0 to 1",
        ),
        (
            "qwen3_moe",
            {"mlp_only_layers": [1, 0]},
            r"mlp_only_layers is \[1, 0\]; none of the 2 layers",
        ),
        ("qwen3_moe", {"decoder_sparse_step": 3}, "decoder_sparse_step is 3; none of the 2 layers"),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 5},
            "num_experts_per_tok is 5, more than num_experts, which is 4",
        ),
        ("qwen3_moe", {"num_experts": None}, "num_local_experts is missing"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
    ],
)
def test_unsupported_configs_of_families_are_rejected(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        shape_of(family, **changes)


def test_traits_of_gpt_oss() -> None:
    shape = shape_of("gpt_oss")
    assert (
        shape.sinks
        and shape.qkv_bias
        and shape.o_bias
        and shape.mlp_bias
        and shape.activation == "clamped_swiglu"
    )
    assert (shape.num_experts, shape.expert_ffn_hidden_size, shape.norm_topk_prob) == (4, 4, True)
    assert (shape.sliding_window, shape.rope_theta) == (128, 150000.0)
    assert shape_of("gpt_oss", layer_types=["sliding_attention", "full_attention"]) == shape
    config = config_of("gpt_oss", max_position_embeddings=131072)
    del config["rope_scaling"]
    assert ModelShape.from_hf_config(config).rope_scaling["factor"] == 32.0


def test_kinds_of_layers() -> None:
    """Check the list of kinds, and the counts by kind of a pipeline stage."""
    mixed = shape_of("qwen3_moe", num_hidden_layers=6, mlp_only_layers=[0], decoder_sparse_step=2)
    assert mixed.layer_kinds == ("dense", "moe", "dense", "moe", "dense", "moe")
    assert mixed == replace(shape_of("qwen3_moe", num_hidden_layers=6), dense_layers=(0, 2, 4))
    assert [(part.num_layers, part.layer_kinds[0]) for part in mixed.by_kind(range(3))] == [
        (2, "dense"),
        (1, "moe"),
    ]
    assert [part.active_ffn_size for part in mixed.by_kind()] == [8, 8]
    last = shape_of("qwen3_moe", num_hidden_layers=6, mlp_only_layers=[5]).one_of_each_kind()
    assert last.layer_kinds == ("moe", "dense")


def test_kinds_and_costs_of_gated_delta_nets() -> None:
    shape = shape_of(
        "qwen3_next", num_hidden_layers=6, full_attention_interval=3, mlp_only_layers=[0, 2]
    )
    assert shape.layer_kinds == (
        "linear_dense",
        "linear_moe",
        "dense",
        "linear_moe",
        "linear_moe",
        "moe",
    )
    assert shape.one_of_each_kind().layer_kinds == ("linear_dense", "linear_moe", "dense", "moe")
    types = ["linear_attention", "linear_attention", "full_attention"] * 2
    assert shape == shape_of(
        "qwen3_next", num_hidden_layers=6, layer_types=types, mlp_only_layers=[0, 2]
    )
    parts = shape.by_kind(range(1, 6))
    assert [(part.num_layers, part.layer_kinds[0]) for part in parts] == [
        (3, "linear_moe"),
        (1, "dense"),
        (1, "moe"),
    ]
    assert [part.state_size for part in parts] == [4 * 3 * 5, 0, 0]
    projections = [6 * (2 * (2 * 3 + 4 * 5) + 2 * 4 + 4 * 5), *2 * [6 * (3 * 4 * 3 + 2 * 2 * 3)]]
    assert [part.attention_weights() for part in parts] == projections
    # Three products of each token with a state, as many whatever the length.
    one, two = (forward_flops(parts[0], [n], 0).attention for n in (10.0, 20.0))
    assert one == 3 * 10 * 6 * 60 and two == 2 * one
    assert shape.cached_per_sequence(2, 2) == 4 * (4 * 60 + 2 * 3 * (2 * 6 + 20)) / 2


def test_defaults_of_sliding_windows() -> None:
    """Check the defaults of transformers and vLLM: qwen has no window, mistral has one."""
    assert shape_of("qwen3", sliding_window=16) == shape_of("qwen3")
    config = config_of("mistral")
    del config["sliding_window"]
    with pytest.raises(UserError, match="sliding_window is 4096"):
        ModelShape.from_hf_config(config)
    config["sliding_window"] = None
    assert ModelShape.from_hf_config(config).family == "mistral"


def test_sequence_cost_is_proportional_to_flops() -> None:
    """Count 2 FLOPs per weight and token, and per visible pair of query and key."""
    shape = ModelShape.from_hf_config(
        {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": 96,
            "intermediate_size": 160,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "vocab_size": 10,
            "max_position_embeddings": 4096,
        }
    )

    def flops(n: int) -> float:
        per_token = 2 * (96 * 96 + 2 * 96 * 32 + 96 * 96 + 3 * 96 * 160)
        pairs = n * n / 2  # a query attends to half of the keys on average
        return n * per_token + 2 * (2 * pairs * 6 * 16)  # scores, and weighted values

    for n in (1, 100, 4000):
        assert shape.sequence_cost(n) / shape.sequence_cost(10) == pytest.approx(
            flops(n) / flops(10)
        )


def test_pairs_and_cost_with_a_sliding_window() -> None:
    """Count the pairs one by one."""
    for window in (1, 3, 8):
        for n in (1, 3, 7, 20):
            pairs = sum(1 for i in range(n) for j in range(n) if i - window < j <= i)
            assert num_pairs([n, 1], window) == pairs + 1
    shape = shape_of("gpt_oss", sliding_window=8, num_hidden_layers=3)
    no_window = replace(shape, sliding_window=0)
    assert (shape.num_windowed, no_window.num_windowed) == (2, 0)
    assert shape.sequence_cost(8) == no_window.sequence_cost(8)
    squares = (no_window.sequence_cost(20) - 20) / 20**2 * (20**2 + 2 * 8 * (2 * 20 - 8)) / 3
    assert shape.sequence_cost(20) == pytest.approx(20 + squares)
    of_all, of_three = (forward_flops(s, [20.0], 0).attention for s in (no_window, shape))
    assert of_three / of_all == pytest.approx(
        (num_pairs([20]) + 2 * num_pairs([20], 8)) / (3 * num_pairs([20]))
    )


def test_flops_of_70b() -> None:
    """Compare with hand-computed numbers of Llama-3 70B: 8192 x (8192 + 2 x 1024 + 8192 + 3 x
    28672) weights a layer. tests/dist/test_operations.py compares tiny models with torch."""
    sizes = {
        "num_layers": 80,
        "hidden_size": 8192,
        "ffn_hidden_size": 28672,
        "num_heads": 64,
        "num_kv_heads": 8,
    }
    shape = replace(shape_of("llama"), **sizes, head_dim=128, vocab_size=128256)
    one = forward_flops(shape, [1.0], 0)
    assert one.projections + one.feed_forward == 80 * 2 * 855_638_016
    assert one.attention == 80 * 4 * 8192
    two = forward_flops(shape, [2.0], 1)
    assert two.total == 2 * (2 * 80 * 855_638_016 + 3 * 80 * 2 * 8192 + 128256 * 8192)
    assert training_flops(shape, [2.0], 1) == 3 * two.total
