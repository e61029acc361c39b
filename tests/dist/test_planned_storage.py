"""The planner's bytes of checkpoints, host memory and weight updates are those of real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import traffic_cases
from tiny import make_checkpoint, write_config

from rlhf_mc.checkpoint.hf_format import HFReader
from rlhf_mc.config.load import load_config
from rlhf_mc.config.model_schema import MegatronConfig
from rlhf_mc.planner.host_memory import saved_bytes
from rlhf_mc.planner.lengths import Lengths
from rlhf_mc.planner.model_state import trained_state
from rlhf_mc.planner.storage import checkpoint_bytes
from rlhf_mc.planner.traffic import plan_traffic, weight_update_plans
from rlhf_mc.reshard.placement import training_layouts
from rlhf_mc.topology.mesh import Mesh

BLOCK = 4096
"""Bytes that a file has for each block besides its elements, at most."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("storage")
    return {
        "qwen2": make_checkpoint(root / "qwen2"),
        "moe": make_checkpoint(root / "moe", family="qwen3_moe", tied=False),
    }


@pytest.mark.parametrize(
    ("world", "model", "role", "mesh", "freeze", "megatron"),
    [
        (2, "qwen2", "actor", {"tp": 2}, (), {"dtype": "bfloat16"}),
        (2, "qwen2", "critic", {"pp": 2}, ("model.embed_tokens.*",), {}),
        (
            4,
            "qwen2",
            "actor",
            {"tp": 2},
            (),
            {"dtype": "bfloat16", "use_distributed_optimizer": True},
        ),
        (
            4,
            "moe",
            "actor",
            {"ep": 2},
            (),
            {"dtype": "bfloat16", "use_distributed_optimizer": True},
        ),
    ],
)
def test_checkpoint(
    pool: Any,
    checkpoints: dict[str, Path],
    world: int,
    model: str,
    role: str,
    mesh: dict[str, int],
    freeze: tuple[str, ...],
    megatron: dict[str, Any],
) -> None:
    """Compare the tensors of a saved checkpoint, to the byte, its files, and host memory."""
    measured = pool(world).run(
        traffic_cases.saved,
        checkpoint=str(checkpoints[model]),
        role=role,
        mesh=mesh,
        freeze=freeze,
        **megatron,
    )
    shape = HFReader(str(checkpoints[model])).shape(value_head=role == "critic")
    config = MegatronConfig(**{"dtype": "float32", "use_distributed_optimizer": False, **megatron})
    total = {name: sum(rank[name] for rank in measured) for name in measured[0]}
    predicted = checkpoint_bytes(shape, config, freeze)
    assert total["tensors"] == predicted
    assert 0 < total["files"] - predicted < BLOCK * total["blocks"]
    # Each block is aligned in the arena.
    assert 0 <= total["asynchronous save"] - predicted < 128 * total["blocks"]
    if freeze:
        return
    ranks = Mesh(world, **{"tp": 1, "pp": 1, **mesh})
    planned = 0.0
    for rank, layout in enumerate(training_layouts(shape, ranks)):
        at = ranks.coordinate(rank)
        state = trained_state(layout, config, ranks, at.pp, (), False, shape.shares_embeddings)
        replicas = ranks.group_along(rank, "cp", "dp")
        assert state.params == measured[rank]["params"]
        assert state.optimizer == max(measured[other]["optimizer"] for other in replicas)
        planned += saved_bytes(state.params, state.optimizer, ranks)
    # Padding, norms that several tensor-parallel ranks hold, and the attention beside experts.
    assert predicted <= planned < 1.1 * predicted


def test_the_benchmark_of_saves_runs_small(pool: Any) -> None:
    """benchmarks/gpu/save.py: both kinds of save with both kinds of storages, which write the same
    bytes."""
    (found,) = pool(1).run(traffic_cases.measured_saves)
    assert found.keys() == {
        (a, b) for a in ("exact", "views") for b in ("background", "synchronous")
    }
    assert all(seconds > 0 for seconds, _ in found.values())


@pytest.mark.parametrize(
    ("world", "mesh", "rollout_tp"),
    [(2, {"tp": 2}, 1), (4, {"tp": 2, "pp": 2}, 1), (4, {"pp": 4}, 2), (4, {"tp": 4}, 2)],
)
def test_weight_update(
    pool: Any,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    world: int,
    mesh: dict[str, int],
    rollout_tp: int,
) -> None:
    """Compare with the bytes of the messages that arrive, on nodes of two ranks."""
    measured = pool(world).run(
        traffic_cases.moved, checkpoint=str(checkpoints["qwen2"]), mesh=mesh, rollout_tp=rollout_tp
    )
    ranks = Mesh(world, **{"tp": 1, "pp": 1, **mesh})
    sizes = {"tensor_model_parallel_size": ranks.tp, "pipeline_model_parallel_size": ranks.pp}
    rollout = {"tensor_model_parallel_size": rollout_tp}
    cfg = load_config(
        str(
            write_config(
                tmp_path,
                actor={"megatron": {**sizes, "dtype": "bfloat16"}},
                rollout=rollout,
                algorithm={"use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}},
            )
        ),
        [],
    )
    shape = HFReader(str(checkpoints["qwen2"])).shape()
    (plan,) = weight_update_plans(cfg, shape, world, 2)
    assert list(plan.received_bytes) == measured
    update, *_ = plan_traffic(cfg, {"actor": shape}, world, 2, Lengths(24, 12))
    assert update.intra_node + update.inter_node in measured
