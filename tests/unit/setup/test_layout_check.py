"""Layouts of large models compared with Megatron-Core's modules on the meta device, on every rank;
a wrong entry of the table of parameters is one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from documents import ROOT
from published import CONFIGS, LLAMA_3_70B, QWEN_3_30B_A3B

from rlhf_mc.architectures.parameters import Param, model_params
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.models import gpt_model
from rlhf_mc.reshard import coverage, layout
from rlhf_mc.reshard.layout import mcore_layout
from rlhf_mc.reshard.placement import training_layouts
from rlhf_mc.setup.layout_check import check_training_layouts
from rlhf_mc.topology.mesh import training_mesh

MOE = ModelShape.from_hf_config(
    {**QWEN_3_30B_A3B, "num_hidden_layers": 4, "num_experts": 16, "mlp_only_layers": [1]}
)
"""The first of two stages has layers of both kinds."""
MOE_LAYOUT = MegatronConfig(
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    expert_model_parallel_size=2,
    sequence_parallel=True,
    dtype="bfloat16",
)


@pytest.mark.slow
def test_70b_on_one_replica() -> None:
    """Build every shard of the actor and the critic, with one layer in each virtual pipeline chunk
    instead of 5: 32 ranks, of which the config has two replicas."""
    cfg = load_config(str(ROOT / "configs/ppo_70b.yaml"))
    config = {**LLAMA_3_70B, "num_hidden_layers": 16}
    roles = {
        role: ModelShape.from_hf_config(config, value_head=role == "critic")
        for role in ("actor", "critic")
    }
    found = check_training_layouts(
        {role: (shape, cfg.actor.megatron) for role, shape in roles.items()}, 32
    )
    # 16 layers of 6 parameters on 8 ranks each; embedding, final norm and output layer on 8 each.
    assert [checked.num_local for checked in found.values()] == [8 * (16 * 6 + 3)] * 2
    actor, critic = (checked.coverage.num_elements for checked in found.values())
    assert actor == 70_553_706_496 - 64 * 855_654_400 and actor - critic == 128_255 * 8192


def test_experts_of_all_ranks() -> None:
    found = check_training_layouts({"actor": (MOE, MOE_LAYOUT)}, 8)
    of_experts = 7 + 8 * 2  # of half of the experts two matrices each
    dense = 8
    # embedding; norm and output layer
    assert found["actor"].num_local == 4 * (3 * of_experts + dense) + 4 + 8


def test_latent_attention_of_all_ranks() -> None:
    """Build yarn's angles too, which need memory."""
    config = {
        **CONFIGS["deepseek-v3"],
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
    }
    found = check_training_layouts({"actor": (ModelShape.from_hf_config(config), MOE_LAYOUT)}, 8)
    attention = 8
    of_experts = attention + 5 + 8 * 2  # norm, router with its bias, shared expert
    dense = attention + 3
    # embedding; norm and output layer
    assert found["actor"].num_local == 4 * (3 * of_experts + dense) + 4 + 8


def test_gated_delta_nets_of_all_ranks() -> None:
    """Build a delta net in each of the first three layers, and attention in the last."""
    config = {**CONFIGS["qwen3-next-80b-a3b"], "num_hidden_layers": 4, "num_experts": 16}
    found = check_training_layouts({"actor": (ModelShape.from_hf_config(config), MOE_LAYOUT)}, 8)
    experts = 5 + 8 * 2  # norm, router, shared expert with its gate
    delta_net = 7 + experts
    attention = 5 + experts
    # embedding; norm and output layer
    assert found["actor"].num_local == 4 * (3 * delta_net + attention) + 4 + 8


def test_dense_gated_delta_nets_of_all_ranks() -> None:
    """Build layers with delta nets and dense layers in the place of experts."""
    text = {**CONFIGS["qwen3.5-27b"]["text_config"], "num_hidden_layers": 4}
    config = {**CONFIGS["qwen3.5-27b"], "text_config": text}
    layout = replace(MOE_LAYOUT, expert_model_parallel_size=1)
    found = check_training_layouts({"actor": (ModelShape.from_hf_config(config), layout)}, 8)
    dense = 3
    assert found["actor"].num_local == 4 * (3 * (7 + dense) + 5 + dense) + 4 + 8


def test_names_of_transformer_engine_are_of_the_same_blocks() -> None:
    """Compare the two layouts, since the models above have Megatron-Core's local names alone."""
    mesh = training_mesh(MOE_LAYOUT, 8)
    for local, te in zip(
        training_layouts(MOE, mesh), training_layouts(MOE, mesh, True), strict=True
    ):
        assert set(local.shapes) != set(te.shapes)
        assert sorted(
            (s.tensor, s.box, s.offset, local.shapes[s.local]) for s in local.shards
        ) == sorted((s.tensor, s.box, s.offset, te.shapes[s.local]) for s in te.shards)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return replace_row(name, **fields), which changes the row of one parameter of
    Megatron-Core."""

    def replace_row(name: str, **fields: Any) -> None:
        def changed(shape: ModelShape) -> tuple[Param, ...]:
            return tuple(
                replace(row, **fields) if row.mcore.endswith(name) else row
                for row in model_params(shape)
            )

        monkeypatch.setattr(layout, "model_params", changed)
        monkeypatch.setattr(coverage, "model_params", changed)
        mcore_layout.cache_clear()

    yield replace_row
    monkeypatch.undo()
    mcore_layout.cache_clear()


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        (
            "self_attention.linear_proj.weight",
            {"hf": {"model.layers.{i}.self_attn.o_proj.weight": ("q", "hidden")}},
            "actor, rank 0 (TP rank 0, CP rank 0, stage 0, DP rank 0, EP rank 0): "
            "decoder.layers.0.self_attention.linear_proj.weight is split along dimension 1 in "
            "Megatron-Core's model and 0 in the layout",
        ),
        (
            "mlp.router.weight",
            {"mcore": "decoder.layers.{i}.mlp.gate.weight"},
            (
                "the layout lacks decoder.layers.0.mlp.router.weight [16, 2048] of Megatron-Core's "
                "model"
            ),
        ),
        (
            "decoder.final_layernorm.weight",
            {"stage": "first"},
            "Megatron-Core's model lacks decoder.final_layernorm.weight [2048] of the layout",
        ),
    ],
)
def test_wrong_row_is_one_line(table: Any, row: str, fields: dict[str, Any], message: str) -> None:
    table(row, **fields)
    with pytest.raises(UserError) as error:
        check_training_layouts({"actor": (MOE, MOE_LAYOUT)}, 8)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_wrong_type_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt_model, "DTYPES", {"bfloat16": torch.float32})
    with pytest.raises(
        UserError,
        match=r"is torch.float32 in Megatron-Core's model, and megatron.dtype is bfloat16",
    ):
        check_training_layouts({"actor": (MOE, MOE_LAYOUT)}, 8)
