"""The linear layers that get adapters, and the settings that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import shape_of

from rlhf_mc.architectures.parameters import with_adapters
from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config
from rlhf_mc.config.schema import LoraConfig
from rlhf_mc.reshard.layout import logical_shapes


@pytest.mark.parametrize(
    ("family", "targets", "exclude", "modules"),
    [
        ("qwen2", ["q_proj"], [], ["self_attn.q_proj"]),
        (
            "qwen3_moe",
            ["all-linear"],
            ["self_attn.o_proj", "gate_proj"],
            [
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "mlp.experts.{e}.up_proj",
                "mlp.experts.{e}.down_proj",
            ],
        ),
        (
            "deepseek_v3",
            ["kv_b_proj", "shared_experts.up_proj"],
            [],
            ["self_attn.kv_b_proj", "mlp.shared_experts.up_proj"],
        ),
        (
            "qwen3_next",
            ["in_proj_qkvz", "out_proj"],
            [],
            ["linear_attn.in_proj_qkvz", "linear_attn.out_proj"],
        ),
    ],
)
def test_names_choose_linear_layers(
    family: str, targets: list[str], exclude: list[str], modules: list[str]
) -> None:
    settings = LoraConfig(4, target_modules=targets, exclude_modules=exclude)
    shape = with_adapters(shape_of(family), "actor.lora", settings)
    assert shape.lora is not None and list(shape.lora.modules) == modules
    adapters = logical_shapes(shape).keys() - logical_shapes(shape.base).keys()
    ends = {module.rpartition(".")[2] for module in modules}
    assert {name.rsplit(".", 3)[1] for name in adapters} == ends
    for name in adapters:
        rows, columns = logical_shapes(shape)[name]
        assert (rows if name.endswith("lora_A.weight") else columns) == 4


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "qwen2",
            LoraConfig(4, target_modules=["q_prj"]),
            "actor.lora.target_modules: 'q_prj' is no linear layer that can have an adapter; the "
            "nearest is 'q_proj', and all are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
            "down_proj",
        ),
        ("qwen3_moe", LoraConfig(4, target_modules=["gate"]), "'gate' is no linear layer"),
        ("qwen2", LoraConfig(4, target_modules=["embed_tokens"]), "'embed_tokens' is no linear"),
        ("qwen2", LoraConfig(4, target_modules=["lm_head"]), "'lm_head' is no linear layer"),
        ("qwen3_next", LoraConfig(4, target_modules=["conv1d"]), "'conv1d' is no linear layer"),
        (
            "qwen2",
            LoraConfig(4, exclude_modules=["all-linear"]),
            "actor.lora.exclude_modules leaves none of target_modules",
        ),
        ("qwen2", LoraConfig(4, exclude_modules=["typo"]), "actor.lora.exclude_modules: 'typo' is"),
    ],
)
def test_names_of_no_linear_layer_are_refused(
    family: str, settings: LoraConfig, message: str
) -> None:
    with pytest.raises(UserError) as error:
        with_adapters(shape_of(family), "actor.lora", settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["actor.lora.rank=-1"], "actor.lora.rank is -1"),
        (["actor.lora.alpha=0"], "actor.lora.alpha is 0"),
        (
            ["actor.freeze=[model.embed_tokens.*]"],
            "rank is 4 and actor.freeze is set; all but the adapters is frozen: remove it",
        ),
        (
            ["critic.lora.rank=4", "critic.freeze=[model.*]"],
            "critic.lora.rank is 4 and critic.freeze",
        ),
        (
            ["actor.strategy=fsdp2", "model.dist_checkpointing_path=null"],
            "actor.lora.rank is 4 and actor.strategy is fsdp2; adapters need megatron",
        ),
        (
            ["actor.moe_router_bias_update_rate=0.1"],
            "actor.moe_router_bias_update_rate is 0.1; routers are frozen: set it to 0",
        ),
        (
            ["actor.use_kl_loss=true", "ref.megatron.param_offload=true"],
            "ref.megatron.param_offload is True; the reference is the actor without its adapters",
        ),
    ],
)
def test_settings_that_contradict_adapters_are_refused(settings: list[str], message: str) -> None:
    config = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
    with pytest.raises(UserError) as error:
        check_config(load_config(str(config), ["actor.lora.rank=4", *settings]), 2)
    assert message in str(error.value)
