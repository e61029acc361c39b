"""The planner's traffic: how collectives split over nodes, and a 70B run by hand."""

from __future__ import annotations

import pytest
from documents import ROOT
from published import model_path

from rlhf_mc.architectures.run_shapes import model_shapes
from rlhf_mc.config.load import load_config
from rlhf_mc.planner.collectives import Collective
from rlhf_mc.planner.lengths import expected_lengths
from rlhf_mc.planner.traffic import Traffic, plan_traffic

WORLD = 64
NODE = 8


@pytest.mark.parametrize(
    ("kind", "group", "expected"),
    [
        ("all_reduce", (0, 1, 2, 3), (150, 0)),
        ("all_gather", (0, 1, 2, 3), (75, 0)),
        ("reduce_scatter", (0, 8, 16, 24), (0, 75)),
        # Two members on each node: half of what the ring brings comes from the other node.
        ("all_reduce", (0, 1, 8, 9), (75, 75)),
        ("all_to_all", (0, 1, 8, 9), (25, 50)),
        ("receive", (0, 7), (100, 0)),
        ("receive", (0, 8), (0, 100)),
    ],
)
def test_received_bytes(kind: str, group: tuple[int, ...], expected: tuple[int, int]) -> None:
    assert Collective("", kind, group, 100, 1).received(0, NODE) == expected  # type: ignore[arg-type]


def traffic_70b(*overrides: str, world: int = WORLD) -> dict[tuple[str, str, str], Traffic]:
    cfg = load_config(str(ROOT / "configs/ppo_70b.yaml"), [model_path("llama-3-70b"), *overrides])
    shapes = {role: shape for role, (_, shape) in model_shapes(cfg).items()}
    return {
        (t.phase, t.name, t.kind): t
        for t in plan_traffic(cfg, shapes, world, NODE, expected_lengths(cfg, None, None))
    }


def test_70b_by_hand() -> None:
    """TP 8 x PP 4 (4 chunks) x DP 2, rollout TP 8, 1024 sequences of 3072 tokens."""
    found = traffic_70b()
    states = 512 * 3072 * 8192 * 2  # bytes, of a replica
    # Each of a stage's 20 layers gathers its tokens twice forward and twice backward, and twice for
    # weights' gradients.
    gathers = found["update_actor", "tensor parallel", "all_gather"]
    assert gathers.intra_node == pytest.approx(6 * 20 * states * 7 / 8)
    assert gathers.inter_node == 0
    messages = found["update_actor", "pipeline", "receive"]
    # activations and gradients, 4 chunks
    assert (messages.intra_node, messages.inter_node) == (0, 2 * 4 * states / 8)
    parameters = found["update_actor", "parameters", "all_gather"]
    gradients = found["update_actor", "gradients", "reduce_scatter"]
    # Half of 4.3 GB in each of 4 optimizer steps.
    assert parameters.inter_node == pytest.approx(4 * 70.6e9 / 32 * 2 / 2, rel=0.05)
    assert gradients.inter_node == pytest.approx(2 * parameters.inter_node)
    generation = found["gen", "tensor parallel", "all_reduce"]
    assert generation.intra_node == pytest.approx(161 * states / 512 * 128 * 2 * 7 / 8)
    assert found["gen", "responses", "all_gather"].count == 1


def test_the_experts_that_a_rollout_pool_sends() -> None:
    """48 layers, 8 of 128 experts for each of 1024 x 3072 tokens, to 8 ranks of another node."""
    overrides = (
        model_path("qwen3-30b-a3b"),
        "actor.megatron.tensor_model_parallel_size=4",
        "actor.megatron.pipeline_model_parallel_size=1",
        "actor.megatron.virtual_pipeline_model_parallel_size=null",
        "rollout.tensor_model_parallel_size=4",
    )
    key = ("gen", "router replay", "receive")
    pools = ("resource_pools.train=8", "resource_pools.rollout=8")
    sent = traffic_70b(*overrides, *pools, world=16)[key]
    assert (sent.intra_node, sent.inter_node) == (0, 1024 * 3072 * 48 * 8 / 8)
    for others in ((*pools, "algorithm.router_replay=recompute"), ()):
        assert key not in traffic_70b(*overrides, *others, world=16)


@pytest.mark.slow
def test_tensor_parallelism_over_two_nodes() -> None:
    """Check that each of the 8 members on a node receives an eighth of its bytes from the other
    node."""
    inside = traffic_70b()["old_log_prob", "tensor parallel", "all_gather"]
    over_two = traffic_70b(
        "actor.megatron.tensor_model_parallel_size=16",
        "actor.megatron.pipeline_model_parallel_size=2",
        "actor.megatron.virtual_pipeline_model_parallel_size=null",
    )["old_log_prob", "tensor parallel", "all_gather"]
    assert inside.inter_node == 0
    assert over_two.inter_node == pytest.approx(over_two.intra_node / 7)


def test_recomputation_repeats_the_forward_pass() -> None:
    key = ("update_actor", "tensor parallel", "reduce_scatter")
    none, selective, full = (
        traffic_70b(f"actor.megatron.recompute_granularity={value}")[key].intra_node
        for value in ("null", "selective", "full")
    )
    assert (selective - none, full - none) == pytest.approx((none / 4, none / 2), rel=0.05)
