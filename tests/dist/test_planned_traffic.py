"""The planner's collectives are those that Megatron-Core calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import traffic_cases
from documents import ROOT
from tiny import make_checkpoint
from traffic_cases import Counts

from rlhf_mc.checkpoint.hf_format import HFReader
from rlhf_mc.config.load import load_config
from rlhf_mc.config.model_schema import FsdpConfig, MegatronConfig
from rlhf_mc.planner.collectives import Collective, Passes, PassTokens
from rlhf_mc.planner.full_sharding import full_sharding
from rlhf_mc.reshard.placement import training_layouts
from rlhf_mc.topology.mesh import Mesh

MICRO_BATCHES = 2
SEQUENCE_PARALLEL: dict[str, Any] = {"sequence_parallel": True, "dtype": "bfloat16"}
DISTRIBUTED: dict[str, Any] = {"use_distributed_optimizer": True, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("traffic")
    return {
        "qwen2": make_checkpoint(root / "qwen2"),
        "qwen3": make_checkpoint(root / "qwen3", family="qwen3", tied=False, num_kv_heads=1),
        "latent": make_checkpoint(root / "latent", family="deepseek_v3", tied=False),
        "glm": make_checkpoint(root / "glm", family="glm4_moe", tied=False),
        "gpt_oss": make_checkpoint(root / "gpt_oss", family="gpt_oss", tied=False),
        "delta_net": make_checkpoint(root / "delta_net", family="qwen3_next", tied=False),
        "delta_dense": make_checkpoint(root / "delta_dense", family="qwen3_5_text"),
        "moe": make_checkpoint(root / "moe", family="qwen3_moe", tied=False, mlp_only_layers=[1]),
    }


def planned(
    checkpoint: Path, role: str, mesh: Mesh, trains: bool, rank: int, megatron: dict[str, Any]
) -> list[Collective]:
    """Return the collectives that the planner counts for traffic_cases.recorded."""
    shape = HFReader(str(checkpoint)).shape(value_head=role == "critic")
    config = MegatronConfig(**{"dtype": "float32", "use_distributed_optimizer": False, **megatron})
    passes = Passes(shape, config, mesh, rank, cuda=False)
    sequence = traffic_cases.PROMPT + traffic_cases.RESPONSE
    results = MICRO_BATCHES * traffic_cases.RESPONSE
    work = PassTokens(MICRO_BATCHES * sequence, results, mesh.dp * results, MICRO_BATCHES)
    if not trains:
        return passes.forward(work)
    gradients = passes.gradients(training_layouts(shape, mesh)[rank], overlaps_reduction=False)
    return passes.forward_and_backward(work) + gradients


def counted(collectives: Sequence[Collective]) -> Counts:
    """Return the collectives as traffic_cases.recorded counts them."""
    found: dict[Any, list[float]] = defaultdict(lambda: [0, 0])
    for one in collectives:
        key = (one.kind, () if one.kind == "receive" else one.group)
        found[key][0] += one.num_bytes
        found[key][1] += one.calls
    return {key: (int(size), int(calls)) for key, (size, calls) in found.items()}


@pytest.mark.parametrize(
    ("world", "model", "role", "mesh", "megatron"),
    [
        (2, "qwen2", "actor", {"tp": 2}, {}),
        (2, "qwen3", "actor", {"tp": 2}, {**SEQUENCE_PARALLEL, "recompute_granularity": "full"}),
        (2, "qwen2", "critic", {"tp": 2}, SEQUENCE_PARALLEL),
        (2, "qwen2", "critic", {"pp": 2, "vpp": 2}, {}),
        (4, "qwen2", "actor", {"pp": 2}, DISTRIBUTED),
        (
            4,
            "qwen2",
            "actor",
            {"tp": 2, "pp": 2},
            {"sequence_parallel": True, "recompute_granularity": "selective"},
        ),
        (2, "qwen2", "actor", {"cp": 2}, {}),
        (2, "qwen3", "actor", {"cp": 2}, {"dtype": "bfloat16", "recompute_granularity": "full"}),
        (
            4,
            "qwen2",
            "critic",
            {"cp": 2, "pp": 2},
            {**DISTRIBUTED, "recompute_granularity": "selective"},
        ),
        (4, "qwen2", "critic", {"cp": 2, "tp": 2}, SEQUENCE_PARALLEL),
        (2, "delta_dense", "actor", {"tp": 2}, {}),
        (2, "delta_dense", "actor", {"tp": 2}, SEQUENCE_PARALLEL),
    ],
)
def test_collectives_are_exact(
    pool: Any,
    checkpoints: dict[str, Path],
    world: int,
    model: str,
    role: str,
    mesh: dict[str, int],
    megatron: dict[str, Any],
) -> None:
    """Compare bytes and calls of each collective in each group, on every rank."""
    passes = [False, True]
    measured: list[list[Counts]] = pool(world).run(
        traffic_cases.recorded,
        checkpoint=str(checkpoints[model]),
        role=role,
        mesh=mesh,
        micro_batches=MICRO_BATCHES,
        trains=passes,
        **megatron,
    )
    ranks = Mesh(world, **{"tp": 1, "pp": 1, **mesh})
    for rank in range(world):
        for trains, found in zip(passes, measured[rank], strict=True):
            expected = planned(checkpoints[model], role, ranks, trains, rank, megatron)
            assert counted(expected) == found, trains


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    ("model", "shards", "frees"), [("qwen2", 4, True), ("qwen3", 2, True), ("moe", 4, False)]
)
def test_collectives_of_fsdp2_are_exact(
    pool: Any, checkpoints: dict[str, Path], model: str, shards: int, frees: bool, trains: bool
) -> None:
    """Compare bytes and calls of each collective in each group, on every rank of four."""
    settings = [
        "actor.strategy=fsdp2",
        f"actor.fsdp_config.fsdp_size={shards}",
        f"actor.fsdp_config.reshard_after_forward={frees}",
    ]
    cfg = load_config(str(ROOT / "configs/ppo_qwen2.5_0.5b.yaml"), settings)
    measured: list[list[Counts]] = pool(4).run(
        traffic_cases.recorded,
        checkpoint=str(checkpoints[model]),
        role="actor",
        mesh={"shards": shards},
        micro_batches=MICRO_BATCHES,
        trains=[trains],
        dtype="bfloat16",
        fsdp=FsdpConfig(shards, frees),
    )
    shape = HFReader(str(checkpoints[model])).shape()
    mesh = Mesh(4, 1, 1, shards=shards)
    passes = Passes(shape, MegatronConfig(), mesh, 0, cuda=False)
    sharding = full_sharding(cfg, "actor", shape, mesh, cuda=False)
    assert sharding is not None
    results = MICRO_BATCHES * traffic_cases.RESPONSE
    work = PassTokens(0, results, mesh.dp * results, MICRO_BATCHES)
    for rank in range(4):
        gathers = sharding.collectives(rank, MICRO_BATCHES, trains)
        others = [] if trains else passes.forward(work)
        assert [counted([*gathers, *others])] == measured[rank]


@pytest.mark.parametrize(
    ("model", "mesh", "megatron"),
    [
        ("moe", {"ep": 2}, DISTRIBUTED),
        ("moe", {"tp": 2, "ep": 2}, {**SEQUENCE_PARALLEL, **DISTRIBUTED}),
        ("glm", {"tp": 2, "ep": 2}, {**SEQUENCE_PARALLEL, **DISTRIBUTED}),
        ("gpt_oss", {"tp": 2, "ep": 2}, {**SEQUENCE_PARALLEL, **DISTRIBUTED}),
        ("delta_net", {"tp": 4}, {**SEQUENCE_PARALLEL, **DISTRIBUTED}),  # more ranks than KV heads
        ("latent", {"tp": 2, "ep": 2}, {**SEQUENCE_PARALLEL, **DISTRIBUTED}),
        ("latent", {"tp": 2, "cp": 2}, {**SEQUENCE_PARALLEL, **DISTRIBUTED}),
    ],
)
def test_collectives_of_experts(
    pool: Any,
    checkpoints: dict[str, Path],
    model: str,
    mesh: dict[str, int],
    megatron: dict[str, Any],
) -> None:
    """Compare the sums over all ranks: tokens are not routed evenly, and gloo gathers uneven parts
    by all-to-all."""
    measured: list[list[Counts]] = pool(4).run(
        traffic_cases.recorded,
        checkpoint=str(checkpoints[model]),
        role="actor",
        mesh=mesh,
        micro_batches=MICRO_BATCHES,
        trains=[True],
        **megatron,
    )
    ranks = Mesh(4, **{"tp": 1, "pp": 1, **mesh})
    found = [
        counted(planned(checkpoints[model], "actor", ranks, True, rank, megatron))
        for rank in range(4)
    ]
    assert by_group(found) == by_group([counts for (counts,) in measured])


def by_group(ranks: Sequence[Counts]) -> dict[tuple[int, int], list[int]]:
    """Return bytes and calls of all collectives of all ranks, by (ranks of the group, distance of
    its first two)."""
    found: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for counts in ranks:
        for (_, group), (size, calls) in counts.items():
            found[len(group), group[1] - group[0]][0] += size
            found[len(group), group[1] - group[0]][1] += calls
    return dict(found)
