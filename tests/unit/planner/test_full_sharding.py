"""The planner's FSDP2: bytes and collectives of a small model by hand, directions of change, a run
that does not fit, and the line that compares with Megatron's layout."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from documents import ROOT

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.load import load_config
from rlhf_mc.config.schema import layouts
from rlhf_mc.planner.__main__ import main
from rlhf_mc.planner.collectives import Collective
from rlhf_mc.planner.full_sharding import FullySharded, full_sharding
from rlhf_mc.planner.model_state import ModelState
from rlhf_mc.topology.mesh import training_mesh

CONFIG = str(ROOT / "configs/ppo_qwen2.5_0.5b.yaml")
SMALL = ModelShape.from_hf_config(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
)
ROOT_UNIT = 22 * 8 + 3
"""Elements on each of 3 ranks: 22 of the embedding's 64 rows, and 3 of the norm's 8."""
LAYER = 3 + 6 * 8 + 6 + 3 * 8 + 3 + 8 * 8 + 3 * 12
"""Norm, queries with keys and values and their bias (16 rows), projection, norm, gate with up (24),
down (8)."""
BUDGETS = ["actor.ppo_max_token_len_per_gpu=4096", "critic.ppo_max_token_len_per_gpu=4096"]
TOTAL = ROOT_UNIT + 2 * LAYER


def sharded(role: str, world: int, *overrides: str) -> FullySharded:
    cfg = load_config(CONFIG, ["actor.strategy=fsdp2", *overrides])
    found = full_sharding(cfg, role, SMALL, training_mesh(layouts(cfg)[role], world))
    assert found is not None
    return found


def test_bytes_of_a_small_model_by_hand() -> None:
    actor = sharded("actor", 3)
    assert (ROOT_UNIT, LAYER) == (179, 184)
    assert actor.state == ModelState(4 * TOTAL, 4 * TOTAL, 8 * TOTAL)
    assert sharded("ref", 3).state == ModelState(2 * TOTAL, 0, 0)
    whole = 3 * 2  # ranks, bytes of bfloat16
    float32 = 3 * 4
    assert actor.gathered == whole * ROOT_UNIT
    assert actor.gathered_at_layer == whole * 2 * LAYER
    assert actor.gradients_at_layer == whole * (ROOT_UNIT + LAYER) + float32 * LAYER
    assert actor.at_start == whole * 2 * (ROOT_UNIT + LAYER)
    assert actor.at_end == whole * 2 * ROOT_UNIT + float32 * ROOT_UNIT
    frozen = sharded("actor", 3, "actor.freeze=[model.embed_tokens.*]")
    trained = TOTAL - 22 * 8
    assert frozen.state == ModelState(4 * trained + 2 * 22 * 8, 4 * trained, 8 * trained)


def test_bytes_of_a_small_state_on_the_host_by_hand() -> None:
    """Check page-locked blocks of a power of two for float32 parameters, their gradients and the
    bfloat16 weights as they were read; Adam's moments; and a bfloat16 copy."""
    policy = "actor.fsdp_config.offload_policy=true"
    actor = sharded("actor", 3, policy)
    blocks = 256 + 4 + 2 * (4 + 64 + 8 + 32 + 4 + 64 + 64)
    assert actor.host_bytes == blocks * (4 + 4 + 2) + TOTAL * (8 + 2)
    full = sharded("actor", 3, policy, "actor.megatron.dtype=float32")
    assert full.host_bytes == blocks * (4 + 4) + TOTAL * 8
    assert sharded("ref", 3, policy).host_bytes == blocks * 2
    replicas = sharded("actor", 6, policy, "actor.fsdp_config.fsdp_size=3")
    assert (actor.grads, replicas.grads) == (0, 4 * TOTAL), "on the device"
    copies = 4 * TOTAL + 4 * (TOTAL + 2 * LAYER) * 5
    assert actor.copied(5, is_update=True) == copies + 4 * 4 * TOTAL
    assert replicas.copied(5, is_update=True) == copies


def test_collectives_of_a_small_model_by_hand() -> None:
    """Check rank 4 of 6, in groups of 3, in 5 micro-batches."""
    groups = "actor.fsdp_config.fsdp_size=3"
    freed = sharded("actor", 6, groups)
    kept = sharded("actor", 6, groups, "actor.fsdp_config.reshard_after_forward=false")
    shards = (3, 4, 5)
    replicas = (1, 4)

    def gather(elements: int, calls: int) -> Collective:
        return Collective("parameters", "all_gather", shards, 5 * 3 * 2 * elements, 5 * calls)

    gradients = [
        Collective("gradients", "reduce_scatter", shards, 5 * 3 * 4 * TOTAL, 5 * 3),
        Collective("gradients", "all_reduce", replicas, 4 * TOTAL, 3),
    ]
    again = gather(TOTAL + 2 * LAYER, 5)
    assert freed.collectives(4, 5, is_update=True) == [again, *gradients]
    assert kept.collectives(4, 5, is_update=True) == [gather(TOTAL, 3), *gradients]
    # Without a backward pass the root stays, and so do layers that are not freed.
    (once,) = kept.collectives(4, 5, is_update=False)
    assert (once.num_bytes, once.calls) == (3 * 2 * TOTAL, 3)
    (scored,) = freed.collectives(4, 5, is_update=False)
    assert (scored.num_bytes, scored.calls) == (3 * 2 * (ROOT_UNIT + 5 * 2 * LAYER), 1 + 5 * 2)
    assert sharded("actor", 1).collectives(0, 5, is_update=True) == []


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that plans Qwen2.5-7B under FSDP2 on 2 nodes: exit code, plan, errors."""

    def of(*arguments: str) -> tuple[int, Any, str]:
        fixed = ["actor.strategy=fsdp2", "--model", "qwen2.5-7b", "--nodes", "2", *BUDGETS]
        code = main([CONFIG, *fixed, *arguments, *([] if "--search" in arguments else ["--json"])])
        printed = capsys.readouterr()
        text = printed.out
        return code, text if "--search" in arguments else json.loads(text), printed.err

    return of


def taken(found: Any, phase: str, part: str) -> float:
    size: float = found["ranks"][0]["phases"][phase].get(part, 0.0)
    return size


def received(found: Any, phase: str, name: str) -> float:
    """Return the bytes that a rank receives in a phase for a purpose."""
    return sum(
        one["intra_node"] + one["inter_node"]
        for one in found["traffic"]
        if (one["phase"], one["name"]) == (phase, name)
    )


def across(found: Any, phase: str, name: str) -> float:
    """Return those that come from other nodes."""
    return sum(
        one["inter_node"]
        for one in found["traffic"]
        if (one["phase"], one["name"]) == (phase, name)
    )


def test_more_ranks_and_freed_layers_take_less_memory(plan: Any) -> None:
    shards = [
        plan(f"actor.fsdp_config.fsdp_size={size}", "critic.fsdp_config.fsdp_size=-1")[1]
        for size in (4, 8, 16)
    ]
    for part in ("actor params", "actor grads", "actor optimizer"):
        sizes = [taken(found, "update_actor", part) for found in shards]
        assert sizes[0] == pytest.approx(2 * sizes[1], rel=1e-3)
        assert sizes[1] == pytest.approx(2 * sizes[2], rel=1e-3)
    whole = {taken(found, "update_actor", "critic params") for found in shards}
    assert len(whole) == 1
    # Groups of a node gather inside it, and reduce gradients over both nodes once more.
    gathers = [across(found, "update_actor", "parameters") for found in shards]
    assert gathers[:2] == [0, 0] and gathers[2] > 0
    assert across(shards[1], "update_actor", "gradients") > 0
    freed, kept = (
        plan(f"actor.fsdp_config.reshard_after_forward={value}")[1] for value in ("true", "false")
    )
    part = "gathered"
    assert taken(kept, "update_actor", part) > 5 * taken(freed, "update_actor", part)
    gathers = [received(found, "update_actor", "parameters") for found in (kept, freed)]
    assert 1.8 * gathers[0] < gathers[1] < 2 * gathers[0]
    scored = [received(found, "old_log_prob", "parameters") for found in (kept, freed)]
    assert scored[0] <= scored[1]


def test_a_state_on_the_host_takes_no_device_memory(plan: Any) -> None:
    """Compare 4 ranks, whose state of 7.6e9 elements x 16 bytes / 4 leaves a GPU of 45 GB too
    little. Besides, parameters and gradients are in blocks of a power of two, and there are two
    bfloat16 copies."""
    few = (
        *("--gpus-per-node", "2", "--gpu", "45e9"),
        *("rollout.gpu_memory_utilization=0.5", "rollout.free_cache_engine=true"),
    )
    assert plan(*few)[0] == 2
    code, found, errors = plan(*few, "actor.fsdp_config.offload_policy=true")
    assert code == 0, errors
    assert not any(taken(found, "update_actor", f"actor {part}") for part in ("params", "grads"))
    on_host = found["host_memory"]["parts"]["actor state"] / 2  # of a rank
    assert 1.7 < on_host / (16 * 7.616e9 / 4) < 1.9


def test_nothing_is_divided_by_tensor_or_pipeline_parallelism(plan: Any) -> None:
    """Compare 7.6e9 elements over 16 ranks: main parameters, gradients, two moments."""
    _, found, _ = plan()
    for part, size in {"params": 4, "grads": 4, "optimizer": 8}.items():
        assert taken(found, "update_actor", f"actor {part}") == pytest.approx(
            size * 7.616e9 / 16, rel=0.01
        )
    assert taken(found, "ref", "ref params") == pytest.approx(2 * 7.616e9 / 16, rel=0.01)
    assert taken(found, "gen", "actor grads") == 0, "gradients are freed after each update"
    # An engine on each rank receives all rows but the rank's own.
    weights = received(found, "update_weights", "weights")
    assert weights == pytest.approx(2 * 7.616e9 * 15 / 16, rel=0.01)


def test_a_run_that_does_not_fit_says_which_part(plan: Any) -> None:
    code, _, errors = plan("--gpu", "16e9")
    assert code == 2
    assert re.search(r"does not fit: phase \w+ on ranks 0 to 15 takes .* the largest part", errors)


@pytest.mark.slow
def test_search_keeps_the_strategy_and_compares(plan: Any) -> None:
    code, out, _ = plan("--search", "--top", "2", "actor.fsdp_config.offload_policy=true")
    assert code == 0
    first, second, _, line = out.splitlines()[-4:]
    for row in (first, second):
        assert row.split()[6:11] == ["1"] * 5  # TP, CP, PP, chunks, EP
    assert line.startswith("Megatron's quickest layout, TP")
