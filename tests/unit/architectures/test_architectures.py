"""Specifications of architectures: names in the tables, shapes from config.json, stored shapes."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from families import BLOCKS, changed, config_of, shape_of, traits

from rlhf_mc.architectures.attention import num_pairs
from rlhf_mc.architectures.families import FAMILIES, Activation
from rlhf_mc.architectures.layer import Layer
from rlhf_mc.architectures.operations import forward_flops
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.training_state import check_shape
from rlhf_mc.config.errors import UserError
from rlhf_mc.models.gpt_model import ACTIVATIONS


def test_every_name_in_the_tables_exists() -> None:
    known = {field.name for block in (ModelShape, *BLOCKS) for field in fields(block)}
    for family in FAMILIES.values():
        assert known >= {*family.traits, *family.config_traits}


def test_every_activation_has_a_function() -> None:
    assert set(ACTIVATIONS) == set(typing.get_args(Activation))
    assert all(set(family.activations.values()) <= set(ACTIVATIONS) for family in FAMILIES.values())


STORED = [
    json.loads(line)
    for line in (Path(__file__).parent / "shapes_before_blocks.jsonl").read_text().splitlines()
]
"""Shapes of `shape_of` as checkpoints had them before layers had blocks, one of each family."""


def check_stored(stored: dict[str, Any], shape: ModelShape) -> None:
    check_shape(Path("ckpt"), "actor", {"actor": {"shape": stored}}, shape)


@pytest.mark.parametrize("stored", STORED, ids=[stored["family"] for stored in STORED])
def test_shapes_of_earlier_checkpoints_are_read(stored: dict[str, Any]) -> None:
    """Check each field of a block, and the layers that have the block."""
    shape = shape_of(stored["family"])
    check_stored(stored, shape)
    for name in {field.name for block in shape.blocks for field in fields(block)} - {
        "expert_names"
    }:
        with pytest.raises(UserError, match=f"the actor's {name} is other there and "):
            check_stored(stored | {name: "other"}, shape)
    with pytest.raises(UserError, match="the actor's num_layers is 3 there and 2 here"):
        check_stored(stored | {"num_layers": 3}, shape)
    for name in ("dense_layers", "linear_layers"):
        with pytest.raises(UserError, match=rf"the actor's {name} is \[7\] there and \["):
            check_stored(stored | {name: [7]}, shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_shapes_are_read(family: str) -> None:
    shape = shape_of(family)
    stored = json.loads(json.dumps(asdict(shape)))
    check_stored(stored, shape)
    with pytest.raises(UserError, match=r"the actor's hidden_size is \d+ there and 7 here"):
        check_stored(stored, replace(shape, hidden_size=7))
    with pytest.raises(UserError, match="the actor's num_layers is 2 there and 1 here"):
        check_stored(stored, replace(shape, layers=shape.layers[:1]))


def test_a_trait_that_a_checkpoint_does_not_know_has_its_default() -> None:
    shape = shape_of("llama")
    flat = {key: value for key, value in STORED[0].items() if key != "qk_norm"}
    by_layer = json.loads(json.dumps(asdict(shape)))
    for mixer, _ in by_layer["layers"]:
        del mixer["qk_norm"]
    for stored, name in ((flat, "qk_norm"), (by_layer, "layers.0.qk_norm")):
        check_stored(stored, shape)
        with pytest.raises(UserError, match=f"the actor's {name} is False there and True here"):
            check_stored(stored, changed(shape, qk_norm=True))


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
    assert (
        traits(shape).num_kv_heads,
        traits(shape).head_dim,
        shape.rope_theta,
        shape.rope_scaling,
    ) == (
        2,
        32,
        5e5,
        None,
    )
    assert traits(shape).qkv_bias and not traits(shape).o_bias and not shape.tie_embeddings
    newer = {
        "rope_parameters": {"rope_theta": 7e5, "rope_type": "linear", "factor": 8.0},
        "attention_bias": True,
    }
    shape = ModelShape.from_hf_config(CONFIG | newer | {"model_type": "llama"})
    assert shape.rope_theta == 7e5 and shape.rope_scaling == {"rope_type": "linear", "factor": 8.0}
    assert traits(shape).qkv_bias and traits(shape).o_bias and not traits(shape).mlp_bias
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
        and traits(gemma).activation == "gelu_pytorch_tanh"
    )
    assert gemma.tie_embeddings and not traits(gemma).qkv_bias
    assert traits(shape_of("gemma", hidden_act="gelu")).activation == "gelu_pytorch_tanh"
    assert shape_of("gemma", hidden_act="gelu", hidden_activation="gelu_pytorch_tanh") == gemma
    # Published configurations of gemma have no tie_word_embeddings and no head_dim.
    sparse = {key: value for key, value in config_of("gemma").items() if key != "head_dim"}
    assert traits(ModelShape.from_hf_config(sparse)).head_dim == 256
    qwen3 = shape_of("qwen3")
    assert (
        traits(qwen3).qk_norm
        and traits(qwen3).head_dim == 3
        and not traits(qwen3).qkv_bias
        and traits(qwen3).activation == "silu"
    )
    moe = shape_of("qwen3_moe")
    assert (
        moe.num_experts,
        moe.experts_per_token,
        traits(moe).expert_ffn_hidden_size,
        traits(moe).norm_topk_prob,
    ) == (4, 2, 4, True)
    newer = config_of("qwen3_moe", num_local_experts=4)
    del newer["num_experts"]
    assert ModelShape.from_hf_config(newer) == moe
    mixtral = shape_of("mixtral")
    assert (
        mixtral.num_experts,
        traits(mixtral).expert_ffn_hidden_size,
        traits(mixtral).norm_topk_prob,
    ) == (
        4,
        8,
        True,
    )
    assert mixtral.rope_theta == 1e6 and mixtral == shape_of("mixtral", norm_topk_prob=False)
    assert (
        kinds_of(shape_of("mistral"))[0] == "Attention Dense"
        and not traits(shape_of("mistral")).qkv_bias
    )


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
    block = traits(shape)
    assert (
        block.sinks
        and block.qkv_bias
        and block.o_bias
        and block.mlp_bias
        and block.activation == "clamped_swiglu"
    )
    assert (
        shape.num_experts,
        block.expert_ffn_hidden_size,
        block.norm_topk_prob,
    ) == (4, 4, True)
    assert (block.sliding_window, shape.rope_theta) == (128, 150000.0)
    assert shape_of("gpt_oss", layer_types=["sliding_attention", "full_attention"]) == shape
    config = config_of("gpt_oss", max_position_embeddings=131072)
    del config["rope_scaling"]
    assert ModelShape.from_hf_config(config).rope_scaling["factor"] == 32.0


def kinds_of(layers: ModelShape | Iterable[Layer]) -> list[str]:
    """Return the names of each layer's blocks."""
    layers = layers.layers if isinstance(layers, ModelShape) else layers
    return [" ".join(type(block).__name__ for block in layer) for layer in layers]


def test_kinds_of_layers() -> None:
    """Check the list of layers, and the counts by kind of a pipeline stage."""
    mixed = shape_of("qwen3_moe", num_hidden_layers=6, mlp_only_layers=[0], decoder_sparse_step=2)
    assert kinds_of(mixed) == ["Attention Dense", "Attention Experts"] * 3
    counts = mixed.by_kind(range(3))
    assert kinds_of(counts) == ["Attention Dense", "Attention Experts"]
    assert list(counts.values()) == [2, 1] and mixed.expert_layers == [1, 3, 5]
    assert [layer.feed_forward.active_size() for layer in mixed.kinds] == [8, 8]
    last = shape_of("qwen3_moe", num_hidden_layers=6, mlp_only_layers=[5]).one_of_each_kind()
    assert kinds_of(last) == ["Attention Experts", "Attention Dense"]


def test_kinds_and_costs_of_gated_delta_nets() -> None:
    shape = shape_of(
        "qwen3_next", num_hidden_layers=6, full_attention_interval=3, mlp_only_layers=[0, 2]
    )
    linear = ["DeltaNet Dense", "DeltaNet Experts"]
    attending = ["Attention Dense", "Attention Experts"]
    assert kinds_of(shape) == [*linear, attending[0], *2 * [linear[1]], attending[1]]
    assert kinds_of(shape.one_of_each_kind()) == [*linear, *attending]
    types = ["linear_attention", "linear_attention", "full_attention"] * 2
    assert shape == shape_of(
        "qwen3_next", num_hidden_layers=6, layer_types=types, mlp_only_layers=[0, 2]
    )
    counts = shape.by_kind(range(1, 6))
    assert kinds_of(counts) == [linear[1], *attending] and list(counts.values()) == [3, 1, 1]
    mixers = [layer.mixer for layer in counts]
    assert [mixer.state_size for mixer in mixers] == [4 * 3 * 5, 0, 0]
    projections = [6 * (2 * (2 * 3 + 4 * 5) + 2 * 4 + 4 * 5), *2 * [6 * (3 * 4 * 3 + 2 * 2 * 3)]]
    assert [mixer.weights() for mixer in mixers] == projections
    # Three products of each token with a state, as many whatever the length.
    one, two = (mixers[0].flops([n]) for n in (10.0, 20.0))
    assert one == 10 * 6 * 60 and two == 2 * one
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
    no_window = changed(shape, sliding_window=0)
    assert (traits(shape).num_windowed, traits(no_window).num_windowed) == (2, 0)
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
    shape = changed(shape_of("llama"), **sizes, head_dim=128, vocab_size=128256)
    one = forward_flops(shape, [1.0], 0)
    assert one.projections + one.feed_forward == 80 * 2 * 855_638_016
    assert one.attention == 80 * 4 * 8192
    two = forward_flops(shape, [2.0], 1)
    assert two.total == 2 * (2 * 80 * 855_638_016 + 3 * 80 * 2 * 8192 + 128256 * 8192)
