"""config.json: every key that transformers or vLLM reads for a supported family is handled, older
spellings included, and the honoured keys mean what they mean in transformers."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from families import EXTRA as SMALL
from families import YARN as GPT_OSS_ROPE
from families import nested
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoConfig

from rlhf_mc.architectures.families import FAMILIES
from rlhf_mc.architectures.hf_config import (
    HYBRID,
    IGNORED,
    QWEN3_5,
    RESTRICTED,
    SUPPORTED,
    check_architecture,
)
from rlhf_mc.architectures.rope_config import rope
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 70,
    "max_position_embeddings": 128,
}
EXTRA: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": GPT_OSS_ROPE},
    "deepseek_v3": {**SMALL["deepseek_v3"], "num_key_value_heads": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{name: SMALL[name] for name in sorted(HYBRID)},
}


def config_of(family: str = "llama", **changes: Any) -> dict[str, Any]:
    return nested(family, {**SIZES, **EXTRA.get(family, {}), **changes})


def shape_of(family: str = "llama", **changes: Any) -> ModelShape:
    return ModelShape.from_hf_config(config_of(family, **changes))


# Every key is handled.

PLAIN = [family for family in FAMILIES if not FAMILIES[family].is_nested]
"""The families whose config.json is that of the language model."""


def is_of_text(part: ast.stmt) -> bool:
    """Return whether a statement of a file is of the language model: not a class of the model of
    images or of both."""
    name = part.name if isinstance(part, ast.ClassDef) else ""
    both = ("Model", "ForConditionalGeneration", "ProcessingInfo")
    return "Vision" not in name and not (name.endswith(both) and "TextModel" not in name)


KNOWN = SUPPORTED | RESTRICTED.keys() | IGNORED.keys()


def source_of(package: str, file: str) -> ast.Module:
    """Return the syntax tree of an installed library's file, without importing it."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations is not None
    return ast.parse((Path(found.submodule_search_locations[0]) / file).read_text())


def keys_read(tree: ast.AST) -> set[str]:
    """Return the attributes that code reads from a config: `config.x`, `getattr(config, "x")` or
    `hasattr`."""

    def is_config(node: ast.AST) -> bool:
        name = (
            node.attr
            if isinstance(node, ast.Attribute)
            else node.id
            if isinstance(node, ast.Name)
            else ""
        )
        return name in ("config", "hf_config", "text_config", "hf_text_config")

    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_config(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1]
            if (
                node.func.id in ("getattr", "hasattr")
                and is_config(node.args[0])
                and isinstance(name, ast.Constant)
            ):
                found.add(str(name.value))
    return found


def names_in(tree: ast.AST, function: str) -> set[str]:
    """Return the strings in the lists and tuples of a function of vLLM that tries one key after the
    other."""
    (body,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function][
        :1
    ]
    lists = [n for n in ast.walk(body) if isinstance(n, ast.List | ast.Tuple)]
    return {
        e.value
        for found in lists
        for e in found.elts
        if isinstance(e, ast.Constant) and isinstance(e.value, str)
    }


def class_named(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)


METHODS = {
    # Methods of the config class and of vLLM's wrapper, not keys.
    *(
        "get_text_config",
        "is_heterogeneous",
        "per_layer_config",
        "model_type",
        "standardize_rope_params",
    ),
    *("_attn_implementation", "_experts_implementation", "update", "validate_rope"),
}
OTHER_MODELS_KEYS = {
    # vLLM's base class reads these only for other values of model_type, or for models of images and
    # speech.
    *(
        "attention_head_dim",
        "compress_ratios",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "kv_lora_rank",
        "encoder",
    ),
    *("vision_n_layers", "_dsv4_vl_inner", "model"),
}


def test_every_key_of_the_config_classes_is_handled() -> None:
    """Check declared fields, fields of the base class, and further attributes that the classes
    accept."""
    unknown = {}
    for family in PLAIN:
        kind = CONFIG_MAPPING[family]
        declared = (
            {field.name for field in fields(kind)}
            | set(kind.attribute_map)
            | set(kind.attribute_map.values())
        )
        written = set(AutoConfig.for_model(family).to_dict())
        unknown[family] = sorted(
            key for key in declared | written if key not in KNOWN and key[0] != "_"
        )
    assert not any(unknown.values()), unknown


def test_every_key_popped_by_the_base_class_is_handled() -> None:
    """Check PreTrainedConfig's keyword arguments that are not fields: mostly older names."""
    base = class_named(source_of("transformers", "configuration_utils.py"), "PreTrainedConfig")
    mixin = class_named(
        source_of("transformers", "modeling_rope_utils.py"), "RotaryEmbeddingConfigMixin"
    )
    popped = {
        node.args[0].value
        for found in (*base.body, *mixin.body)
        if isinstance(found, ast.FunctionDef)
        and found.name in ("__post_init__", "convert_rope_params_to_dict")
        for node in ast.walk(found)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("pop", "get")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "kwargs"
        and isinstance(node.args[0], ast.Constant)
    }
    assert {"torch_dtype", "rope_scaling", "rope_theta", "partial_rotary_factor"} <= popped
    assert sorted(k for k in popped if k not in KNOWN) == ["_commit_hash"]


@pytest.mark.parametrize("family", PLAIN)
def test_every_key_read_by_a_model_is_handled(family: str) -> None:
    """Check the models' code in transformers and in vLLM, which builds mistral from llama's
    layers."""
    package = family.removesuffix("_text")
    code = source_of("transformers", f"models/{package}/modeling_{package}.py")
    file = {"deepseek_v3": "deepseek_v2"}.get(family, family)
    file = "qwen3_5" if family in QWEN3_5 else file
    vllm_code = source_of("vllm", f"model_executor/models/{file}.py")
    if family in QWEN3_5:
        for tree in (code, vllm_code):
            tree.body = [part for part in tree.body if is_of_text(part)]
    of_transformers = keys_read(code)
    of_vllm = keys_read(vllm_code)
    if family in HYBRID:
        if family in QWEN3_5:
            of_vllm |= keys_read(source_of("vllm", "model_executor/models/qwen3_next.py"))
        for file in ("base", "qwen_gdn_linear_attn"):
            of_vllm |= keys_read(source_of("vllm", f"model_executor/layers/mamba/gdn/{file}.py"))
        assert "linear_num_key_heads" in of_vllm
    if family == "mistral":
        of_vllm |= keys_read(source_of("vllm", "model_executor/models/llama.py"))
        of_vllm |= {"llama_4_scaling"}
    assert "rope_parameters" in of_transformers and "hidden_size" in of_vllm
    assert sorted(k for k in of_transformers | of_vllm if k not in KNOWN and k not in METHODS) == []


def test_every_key_vllm_reads_for_all_models_is_handled() -> None:
    tree = source_of("vllm", "transformers_utils/model_arch_config_convertor.py")
    base = class_named(tree, "ModelArchConfigConvertorBase")
    keys = keys_read(base)
    for function in ("get_total_num_kv_heads", "get_num_experts", "get_num_experts_per_token"):
        keys |= names_in(base, function)
    keys |= names_in(base, "derive_max_model_len_and_key")
    patched = source_of("vllm", "transformers_utils/config.py")
    keys |= names_in(patched, "patch_rope_parameters") | names_in(patched, "_mrope_section")
    assert {"num_kv_heads", "n_positions", "rotary_pct", "moe_topk", "quantization_config"} <= keys
    assert sorted(k for k in keys - METHODS - OTHER_MODELS_KEYS if k not in KNOWN) == []


def test_each_key_is_in_one_table_with_a_reason() -> None:
    assert not (
        SUPPORTED & RESTRICTED.keys()
        or SUPPORTED & IGNORED.keys()
        or RESTRICTED.keys() & IGNORED.keys()
    )
    assert all(len(reason) > 10 for reason in IGNORED.values())
    assert all(len(rule.reason) > 10 for rule in RESTRICTED.values())


@pytest.mark.parametrize("key", sorted(RESTRICTED))
def test_unsupported_value_of_a_key_is_rejected(key: str) -> None:
    rule = RESTRICTED[key]
    family = sorted(rule.families)[0] if rule.families else "llama"
    for value in (*rule.values, None):
        assert shape_of(family, **{key: value}) == shape_of(family)
    other = {"bits": 4} if key.endswith("_config") else 3
    with pytest.raises(UserError, match=rf"^config\.json: {key} is .*{rule.reason[:20]}") as caught:
        shape_of(family, **{key: other})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


# Honoured keys mean what they mean in transformers.


@pytest.mark.parametrize("family", PLAIN)
def test_missing_keys_take_the_config_class_defaults(family: str) -> None:
    """Read a config that has only the sizes that every published config has."""
    named = (
        "num_hidden_layers",
        "hidden_size",
        *(() if family == "qwen3_5_moe_text" else ("intermediate_size",)),
        "num_attention_heads",
        "vocab_size",
    )
    theirs = AutoConfig.for_model(family)
    # vLLM needs it, and the class has no default
    named += ("head_dim",) if family == "glm4_moe" else ()
    theirs.head_dim = (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    sparse = {"model_type": family} | {
        key: getattr(theirs, key) for key in (*named, "max_position_embeddings")
    }
    sparse |= {
        k: getattr(theirs, k)
        for k in ("moe_intermediate_size", "num_experts_per_tok")
        if hasattr(theirs, k)
    }
    if hasattr(theirs, "num_experts"):
        sparse["num_experts"] = theirs.num_experts
    if hasattr(theirs, "n_routed_experts"):
        sparse["n_routed_experts"] = theirs.n_routed_experts
    if family == "mistral":
        sparse["sliding_window"] = None
    shape = ModelShape.from_hf_config(sparse)
    assert shape.num_kv_heads == theirs.num_key_value_heads
    assert shape.head_dim == getattr(theirs, "qk_head_dim", theirs.head_dim)
    for ours, key in (("router_groups", "n_group"), ("groups_per_token", "topk_group")):
        assert getattr(shape, ours) == (getattr(theirs, key, None) or 1)
    for key in ("q_lora_rank", "kv_lora_rank", "v_head_dim"):
        assert getattr(shape, key) == getattr(theirs, key, 0)
    assert shape.routed_scaling == getattr(theirs, "routed_scaling_factor", 1.0)
    assert shape.tie_embeddings == theirs.tie_word_embeddings
    assert shape.norm_eps == theirs.rms_norm_eps
    assert shape.activation == ("clamped_swiglu" if family == "gpt_oss" else theirs.hidden_act)
    assert shape.sliding_window == (theirs.sliding_window if family == "gpt_oss" else 0)
    if family == "gpt_oss":
        assert (shape.rope_scaling or {}).items() <= theirs.rope_parameters.items()
    assert shape.rope_theta == theirs.rope_parameters["rope_theta"]
    assert shape.rotary_fraction == theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    shared = getattr(theirs, "n_shared_experts", 0) * shape.expert_ffn_hidden_size
    assert shape.shared_ffn_hidden_size == getattr(
        theirs, "shared_expert_intermediate_size", shared
    )
    if family in HYBRID:
        linear = [kind == "linear_attention" for kind in theirs.layer_types]
        assert [i in shape.linear_layers for i in range(shape.num_layers)] == linear
        heads = (
            shape.linear_key_heads,
            shape.linear_value_heads,
            shape.linear_key_dim,
            shape.linear_value_dim,
        )
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        assert heads == tuple(getattr(theirs, f"linear_{name}") for name in names)
        assert shape.linear_kernel == theirs.linear_conv_kernel_dim
    assert shape.norm_topk_prob == getattr(
        theirs, "norm_topk_prob", family in ("mixtral", "gpt_oss", "qwen3_5_moe_text")
    )


YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SPELLINGS: list[dict[str, Any]] = [
    {},
    {"rope_theta": 5e5},
    {"rope_theta": 500000, "rope_scaling": None},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 4}},
    {"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 1e6},
    {"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 2.0}},
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            **YARN,
            "beta_fast": 16,
            "attention_factor": 1.5,
        }
    },
    {
        "rope_scaling": {
            "type": "yarn",
            **YARN,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        }
    },
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64},
    {"rope_scaling": {"type": "llama3", **LLAMA3}, "rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5, "factor": 3.0}},
    {"rope_scaling": {"type": "default"}},
]


@pytest.mark.parametrize("keys", SPELLINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rope_settings_match_transformers(family: str, keys: dict[str, Any]) -> None:
    """Compare the standardised settings key by key, except for keys that the rope type ignores."""
    config = config_of(family, **keys)
    theta, scaling = rope(config)
    theirs = AutoConfig.for_model(**config)
    theirs.standardize_rope_params()
    wanted = dict(theirs.rope_parameters)
    assert theta == wanted.pop("rope_theta")
    ignored = {"type"} | ({"factor"} if wanted["rope_type"] == "default" else set())
    assert (scaling or {"rope_type": "default"}) == {
        k: v for k, v in wanted.items() if k not in ignored
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_scaling.rope_type is 'longrope'; supported: de",
        ),
        ({"rope_scaling": {"type": ["yarn"]}}, r"rope_scaling.rope_type is \['yarn'\]"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "type is 'linear'.*keep one",
        ),
        ({"rope_scaling": {"rope_type": None}}, "rope_scaling.rope_type is null"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; expected an object"),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor is null; a linear rope needs a number of at least",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            r"factor is 2; vLLM requires a float; write 2\.0",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor is 0.5; a yarn rope needs"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": None}}, "beta_fast is null"),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "factor": 2.0}},
            "it is 64, vLLM's maximum position",
        ),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor is null"),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
            "expected less than high_freq",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000}},
            "rope_scaling.alpha is 1000; a dynamic",
        ),
        (
            {"rope_scaling": {"a\nb": 1}},
            r"rope_scaling\.'a\\nb' is 1; a default rope has no such key",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters.full_attention is",
        ),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2]}}, "mrope_section"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4},
            "rope_theta is 10000.0; rope_parameters.rope_th",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "default"}},
            "rope_parameters differs",
        ),
        ({"rope_theta": None}, "rope_theta is null; expected a positive number"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5; only 1 is supported: partial rotary",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is .*full attention",
        ),
        ({"layer_types": ["full_attention"]}, 'layer_types is .*2 times "full_attention"'),
        ({"layer_types": [[]]}, "layer_types"),
        ({"sliding_window": 64}, "sliding_window is 64"),
        ({"sliding_window": 64, "use_sliding_window": False}, "sliding_window is 64"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        (
            {"hidden_act": "silu", "hidden_activation": "gelu"},
            "hidden_activation is 'gelu'; only 'silu'",
        ),
        (
            {"qkv_bias": True},
            "qkv_bias is true; attention_bias is False, and vLLM prefers qkv_bias",
        ),
        (
            {"head_dim": None, "hidden_size": 65},
            "hidden_size 65 is not a multiple of num_attention_heads 2",
        ),
        ({"head_dim": 0}, "head_dim is 0"),
        (
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings is 'false'; expected true or false",
        ),
        ({"rms_norm_eps": None}, "rms_norm_eps is null; expected a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"vocab_size": True}, "vocab_size is true"),
        ({"model_type": ["llama"]}, "model_type"),
    ],
)
def test_unsupported_llama_configs_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        shape_of(**changes)
    assert str(caught.value).startswith("config.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        # use_sliding_window is a key of qwen and does not disable mistral's window.
        ("mistral", {"sliding_window": 64, "use_sliding_window": False}, "sliding_window is 64"),
        (
            "mistral",
            {"attention_bias": True},
            "attention_bias is true; a mistral model has no biases",
        ),
        ("mistral", {"mlp_bias": True}, "mlp_bias is true"),
        ("qwen2", {"head_dim": 64}, "head_dim is 64; vLLM gives a qwen2 model heads of .*, 32"),
        (
            "gemma",
            {"hidden_act": "gelu", "hidden_activation": "gelu"},
            "hidden_activation is 'gelu'; only 'gelu_pyto",
        ),
        (
            "gemma",
            {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "relu"},
            "hidden_act is 'relu'",
        ),
        (
            "glm4_moe",
            {"partial_rotary_factor": 0},
            "partial_rotary_factor is 0; expected a number above 0",
        ),
        (
            "glm4_moe",
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "rope_parameters.partial_rotary_factor is 0.25; keep one",
        ),
        (
            "deepseek_v3",
            {"scoring_func": "softmax"},
            "scoring_func is 'softmax'; only 'sigmoid' is supported",
        ),
        (
            "deepseek_v3",
            {"topk_method": "greedy"},
            "topk_method is 'greedy'; only 'noaux_tc' is supported",
        ),
        (
            "deepseek_v3",
            {"attention_bias": True},
            "attention_bias is true; vLLM's latent attention has no biases",
        ),
        (
            "deepseek_v3",
            {"tie_word_embeddings": True},
            "tie_word_embeddings is true; vLLM's models with latent",
        ),
        (
            "deepseek_v3",
            {"num_key_value_heads": 1},
            "num_key_value_heads is 1; each head has keys of its own",
        ),
        (
            "deepseek_v3",
            {"rope_interleave": None},
            "rope_interleave is null; vLLM rotates neighbouring",
        ),
        ("deepseek_v3", {"qk_rope_head_dim": 3}, "qk_rope_head_dim is 3; pairs of dimensions"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("deepseek_v3", {"n_group": 3}, "n_group is 3; expected a divisor of 8 experts"),
        (
            "deepseek_v3",
            {"topk_group": 1},
            "topk_group is 1; expected half of num_experts_per_tok 4",
        ),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "'linear'; vLLM's latent attention has y",
        ),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "yarn", **YARN, "mscale": 0.7}},
            "mscale is 0.7; give both",
        ),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "yarn", **YARN, "attention_factor": 1.0}},
            "attention_factor is 1.0; vLLM does not",
        ),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "yarn", **YARN, "truncate": False}},
            "truncate is false",
        ),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is .*: convert quantized weights to bfloat16",
        ),
        ("glm4_moe", {"n_group": 2}, "n_group is 2; only 1 is supported"),
        (
            "glm4_moe",
            {"first_k_dense_replace": 2},
            "first_k_dense_replace is 2; none of the 2 layers",
        ),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("glm4_moe", {"head_dim": None}, "head_dim is missing"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias is false; vLLM's model has biases"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "layer_types is .*vLLM alternates"),
        (
            "gpt_oss",
            {"tie_word_embeddings": True},
            "tie_word_embeddings is true; vLLM's model has a head of its own",
        ),
        ("gpt_oss", {"sliding_window": None}, "sliding_window is missing"),
        (
            "gpt_oss",
            {"rope_scaling": {"rope_type": "default"}},
            "rope_type is 'default'; vLLM's model has 'yarn'",
        ),
        (
            "gpt_oss",
            {"rope_scaling": GPT_OSS_ROPE | {"beta_slow": None}},
            "rope_scaling.beta_slow is missing",
        ),
        (
            "gpt_oss",
            {"rope_scaling": GPT_OSS_ROPE | {"mscale": 2.0}},
            "mscale is 2.0; vLLM's model does not read",
        ),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "mxfp4 weights are not read; .*dequantize",
        ),
        (
            "qwen3_next",
            {"attention_bias": True},
            "attention_bias is true; transformers and vLLM add it",
        ),
        ("qwen3_next", {"qkv_bias": True}, "qkv_bias is true; transformers and vLLM add it"),
        (
            "qwen3_next",
            {"tie_word_embeddings": True},
            "tie_word_embeddings is true; vLLM's model has a head of its",
        ),
        (
            "qwen3_next",
            {"layer_types": ["full_attention"]},
            "layer_types is .*expected 2 times 'linear_attention' or",
        ),
        (
            "qwen3_next",
            {"layer_types": ["sliding_attention"] * 2},
            "layer_types is .*expected 2 times",
        ),
        (
            "qwen3_next",
            {"linear_num_value_heads": 3},
            "linear_num_value_heads is 3; expected a multiple of 2 key",
        ),
        (
            "qwen3_next",
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size is 0; expected a pos",
        ),
        ("qwen3_next", {"use_sliding_window": True}, "use_sliding_window is true"),
        (
            "qwen3_moe",
            {"num_local_experts": 8},
            "num_local_experts is 8; num_experts is 4, and they are",
        ),
    ],
)
def test_unsupported_configs_of_other_families_are_rejected(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        shape_of(family, **changes)


def test_kimi_k2_is_deepseek_v3() -> None:
    assert ModelShape.from_hf_config(
        config_of("deepseek_v3") | {"model_type": "kimi_k2"}
    ) == shape_of("deepseek_v3")


def test_published_configs_are_accepted() -> None:
    """Accept keys that no library reads, and the switches of published configs."""
    more = {
        "_name_or_path": "x",
        "auto_map": {},
        "unsloth_fixed": True,
        "temperature": 0.6,
        "use_mrope": False,
    }
    assert shape_of("llama", **more, pretraining_tp=2, torch_dtype="bfloat16") == shape_of("llama")
    assert shape_of(
        "qwen2", **more, use_sliding_window=False, sliding_window=64, max_window_layers=1
    )
    assert shape_of("qwen2", layer_types=["full_attention"] * 2) == shape_of("qwen2")
    assert shape_of("gemma", hidden_act="gelu", hidden_activation=None) == shape_of("gemma")


NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, True])
SCALARS = st.none() | NUMBERS | st.text(max_size=5) | st.sampled_from(["yarn", "linear", "default"])
ROPE = st.dictionaries(
    st.sampled_from(["type", "factor", "rope_theta", "beta_fast", "truncate", "x"]), SCALARS
)
ANYTHING = SCALARS | ROPE | st.lists(SCALARS, max_size=2)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from(sorted(SUPPORTED | RESTRICTED.keys())), ANYTHING, max_size=3),
)
def test_arbitrary_values_give_a_shape_or_a_one_line_error(
    family: str, changes: dict[str, Any]
) -> None:
    try:
        shape_of(family, **changes)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 400


def test_architectures_must_match_the_model_type() -> None:
    check_architecture({}, "llama", "LlamaForCausalLM")
    check_architecture({"architectures": ["LlamaForCausalLM"]}, "llama", "LlamaForCausalLM")
    with pytest.raises(
        UserError, match=r"architectures is \['Phi3ForCausalLM'\]; .*means \['LlamaFor"
    ):
        check_architecture({"architectures": ["Phi3ForCausalLM"]}, "llama", "LlamaForCausalLM")


def test_architecture_names_are_those_of_transformers() -> None:
    """Compare with the class name that transformers has for each family."""
    from transformers.models.auto import modeling_auto as names

    for family, found in FAMILIES.items():
        of_text = names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        of_images = names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        assert found.architecture == (of_images if found.is_nested else of_text)[family]


def published(**sizes: Any) -> dict[str, Any]:
    """Return the keys of text_config that every published Qwen3.5, 3.6 and 3.8 has, with sizes."""
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_theta": 10000000}
    return {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "linear_num_value_heads": 32,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {**rope, "partial_rotary_factor": 0.25, "rope_type": "default"},
        "vocab_size": 248320,
        **sizes,
    }


def test_published_configurations_of_qwen3_6_and_3_8_are_read() -> None:
    """Check Qwen3.8-27B, whose config.json has the gate's type, Qwen3.6-35B-A3B, and that a sigmoid
    gate is refused."""
    sizes = {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 17408}
    heads = {"num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48}
    dense = published(**sizes, **heads, output_gate_type="swish", model_type="qwen3_5_text")

    def shape(text: dict[str, Any], **outer: Any) -> ModelShape:
        family = text["model_type"].removesuffix("_text")
        return ModelShape.from_hf_config({"model_type": family, "text_config": text, **outer})

    found = shape(dense)
    assert found.linear_layers == tuple(i for i in range(64) if i % 4 != 3)
    assert (found.rope_theta, found.rotary_fraction, found.rope_scaling) == (1e7, 0.25, None)
    assert shape(dense, tie_word_embeddings=True).tie_embeddings
    assert not shape(
        {**dense, "tie_word_embeddings": True}, tie_word_embeddings=False
    ).tie_embeddings
    sizes = {"num_hidden_layers": 40, "hidden_size": 2048, "num_attention_heads": 16}
    experts = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    moe = published(**sizes, **experts, mlp_only_layers=[], model_type="qwen3_5_moe_text")
    assert len(shape(moe).expert_layers) == 40 and shape(moe).norm_topk_prob
    for text, message in (
        ({**dense, "output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
        ({**moe, "norm_topk_prob": False}, "norm_topk_prob is false; transformers always"),
        ({**dense, "layer_scale": True}, "layer_scale is true"),
        (
            {**dense, "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 2},
            "num_local_experts is missing",
        ),
    ):
        with pytest.raises(UserError, match=message):
            shape(text)
    with pytest.raises(UserError, match="expected an object with model_type qwen3_5_text"):
        ModelShape.from_hf_config({"model_type": "qwen3_5", "text_config": moe})
    quantized = {"quantization_config": {"bits": 4}}
    with pytest.raises(UserError, match="quantization_config is"):
        shape(dense, **quantized)
