"""The planner's verdict on a run that starts: one line, an error where trainer.planner is
"refuse"."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from documents import ROOT
from published import model_path

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config, to_dict
from rlhf_mc.config.schema import Config
from rlhf_mc.planner.start import Capacity, check_start, plan_run, planned_shapes

GB = 10**9
SHORT = tuple(
    f"{key}={tokens}"
    for tokens, keys in (
        (2048, ("actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu")),
        (4096, ("critic.forward_max_token_len_per_gpu", "rollout.log_prob_max_token_len_per_gpu")),
        (4096, ("ref.log_prob_max_token_len_per_gpu",)),
    )
    for key in keys
)
"""Budgets for a small device."""


def config(*overrides: str) -> Config:
    return load_config(
        str(ROOT / "configs/ppo_qwen2.5_0.5b.yaml"),
        [model_path("qwen2.5-0.5b"), *SHORT, "trainer.planner=refuse", *overrides],
    )


def verdict_on(cfg: Config, capacity: Capacity) -> str:
    return check_start(cfg, planned_shapes(cfg), capacity)[0]


@pytest.mark.parametrize(
    ("capacity", "where"),
    [
        (Capacity(1, 80 * GB), "of each GPU"),
        (Capacity(1, 80 * GB, ranks_per_gpu=2), "of 1/2 of each GPU"),
        (Capacity(1, 80 * GB, cuda=False), "of a node"),
    ],
)
def test_one_line_where_it_fits(capacity: Capacity, where: str) -> None:
    line = verdict_on(config(), capacity)
    assert re.fullmatch(
        rf"memory as planned: (gen|update_\w+) takes most, [\d.]+ of the 80\.0 GB {where}", line
    )


def test_the_line_names_what_is_taken_for_something_else() -> None:
    custom = config(
        "rollout.name=custom", f"rollout.custom_engine.path={ROOT}/examples/transformers_engine.py"
    )
    layers = (
        "; activations are taken as those of Transformer Engine's layers, which are not installed "
        "here"
    )
    engine = "; the memory of the engine in rollout.custom_engine is taken as vLLM's"
    capacity = Capacity(1, 80 * GB, transformer_engine=False)
    assert verdict_on(config(), capacity).endswith(f"of each GPU{layers}")
    assert verdict_on(custom, capacity).endswith(f"of each GPU{engine}{layers}")
    assert verdict_on(custom, replace(capacity, cuda=False)).endswith(f"of a node{engine}")
    small = replace(capacity, device_bytes=22 * GB)
    with pytest.raises(UserError, match=f"{engine}{layers}; with trainer.planner=warn"):
        verdict_on(custom, small)


def test_ranks_of_a_rollout_pool_hold_the_engine_alone() -> None:
    """Compare with a colocated rank: each of its parts is on one of the two ranks, and shares no
    weight with the other."""
    alone = config("reshard.share_weights=false")
    shapes = planned_shapes(alone)
    (both,) = plan_run(alone, shapes, Capacity(1, 22 * GB))
    pools = config("resource_pools.train=1", "resource_pools.rollout=1")
    training, rollout = plan_run(pools, shapes, Capacity(2, 22 * GB))
    assert (training.ranks, rollout.ranks) == ((0,), (1,))
    assert training.rollout is None and training.states == both.states
    assert rollout.states == {} and rollout.rollout == both.rollout
    engine = {"vLLM", "vLLM weights"}
    for whole, of_training, of_rollout in zip(
        both.phases, training.phases, rollout.phases, strict=True
    ):
        names = engine | {"reserved"}
        assert {k: v for k, v in whole.parts.items() if k not in names} == {
            k: v for k, v in of_training.parts.items() if k not in names
        }
        assert not engine & of_training.parts.keys()
        assert of_rollout.parts["vLLM"] == both.rollout.budget  # type: ignore[union-attr]
        assert of_rollout.parts.keys() <= {"vLLM", "reserved", "reshard buckets"}
    assert "memory as planned" in verdict_on(pools, Capacity(2, 40 * GB))
    beside = config("resource_pools.train=1", "resource_pools.rollout=1", "ref.pool=rollout")
    trains, generates = plan_run(beside, shapes, Capacity(2, 22 * GB))
    assert {**trains.states, **generates.states} == both.states
    assert [*generates.states] == ["ref"] and "ref" not in trains.states
    passes = {phase.name: phase.parts for phase in generates.phases}
    assert passes["ref"].keys() == {"ref params", "activations", "vLLM", "reserved"}
    assert passes["gen"]["ref params"] == both.states["ref"].params


def test_refused_or_warned() -> None:
    """Check that both lines name the memory and settings with which the run fits."""
    capacity = Capacity(1, 22 * GB)
    with pytest.raises(UserError) as error:
        verdict_on(config(), capacity)
    refused = str(error.value)
    assert refused.startswith("does not fit: phase ") and refused.endswith(
        "; with trainer.planner=warn it starts all the same"
    )
    warned = verdict_on(config("trainer.planner=warn"), capacity)
    assert warned.startswith("warning: as planned it does not fit: ")
    for line in (refused, warned):
        found = re.search(r"it fits with ([^;]+)", line)
        assert found is not None
        settings = found.group(1).split()
        assert verdict_on(config(*settings), capacity).startswith("memory as planned")


def test_cpu_has_its_own_settings() -> None:
    """Check that on a CPU nothing is gained by an offload, and the KV cache is named."""
    cfg = config("rollout.cpu_kvcache_space_gb=40")
    with pytest.raises(
        UserError, match=r"largest part is vLLM, .* it fits with rollout\.cpu_kvcache_space_gb=\d+;"
    ):
        verdict_on(cfg, Capacity(1, 45 * GB, cuda=False))
    with pytest.raises(UserError, match="use fewer ranks on a node, or one with more memory"):
        verdict_on(config(), Capacity(1, 2 * GB, cuda=False))


def test_micro_batches_shrink_before_activations_are_recomputed() -> None:
    """Check that a budget is halved as often as it takes, down to an eighth."""
    large = config(*(f"{role}.ppo_max_token_len_per_gpu=32768" for role in ("actor", "critic")))
    (ranks,) = plan_run(large, planned_shapes(large), Capacity(1, GB, cuda=False))
    capacity = Capacity(1, int(0.5 * ranks.fullest.total), cuda=False)
    with pytest.raises(
        UserError, match=r"fits with actor\.ppo_max_token_len_per_gpu=8192 critic\S+=8192;"
    ):
        verdict_on(large, capacity)


def test_ranks_of_a_node_share_its_memory() -> None:
    """Check that a rank may take more than an equal share where its neighbours take less."""
    cfg = config("actor.megatron.pipeline_model_parallel_size=2")
    plan = plan_run(cfg, planned_shapes(cfg), Capacity(2, GB, False, 2))
    first, last = (
        next(ranks.fullest.total for ranks in plan if rank in ranks.ranks) for rank in (0, 1)
    )
    assert abs(first - last) > 0.2 * GB
    share = int((first + last) / 2) + 1
    assert verdict_on(cfg, Capacity(2, share, False, 2)).endswith(" GB of a node")
    with pytest.raises(UserError, match="on ranks 0 to 1 takes"):
        verdict_on(cfg, Capacity(2, share - GB, False, 2))


@pytest.mark.parametrize("tokens", [2048, 24576])
def test_optimizer_state_leaves_between_steps_where_there_is_no_room(tokens: int) -> None:
    """Check that an update then takes the larger of its activations and of the state, not their
    sum."""
    cfg = config(
        "actor.megatron.optimizer_offload=true",
        f"actor.ppo_max_token_len_per_gpu={tokens}",
        "rollout.free_cache_engine=true",
    )

    def planned(num_bytes: float, *overrides: str) -> tuple[frozenset[str], dict[str, float]]:
        changed = load_config(to_dict(cfg), overrides)
        (ranks,) = plan_run(changed, planned_shapes(cfg), Capacity(1, int(num_bytes)))
        return ranks.staying, next(
            dict(phase.parts) for phase in ranks.phases if phase.name == "update_actor"
        )

    staying, together = planned(200 * GB)
    assert staying == {"actor", "critic"}
    total = sum(together.values())
    state = together.pop("actor optimizer")
    passes = together.pop("activations")
    assert (state < passes) == (tokens == 24576)
    staying, parts = planned(total / 0.94)
    assert "actor" in staying and sum(parts.values()) == pytest.approx(total)
    larger = {"activations": passes} if state < passes else {"actor optimizer": state}
    for device_bytes, override in (
        (total / 0.96, "trainer.planner=warn"),
        (200 * GB, "trainer.planner=off"),
    ):
        staying, parts = planned(device_bytes, override)
        assert "actor" not in staying and parts == together | larger


def test_saving_may_take_most() -> None:
    """Check that a run which trains its models in turn, offloaded, must still hold both in a
    save."""
    offloads = [f"actor.megatron.{part}_offload=true" for part in ("param", "grad", "optimizer")]
    cfg = config(
        *offloads,
        "reshard.share_weights=false",
        "actor.ppo_max_token_len_per_gpu=1024",
        "critic.ppo_max_token_len_per_gpu=1024",
        "actor.megatron.recompute_granularity=full",
        "rollout.free_cache_engine=true",
        "rollout.gpu_memory_utilization=0.2",
    )
    (ranks,) = plan_run(cfg, planned_shapes(cfg), Capacity(1, 40 * GB))
    sizes = {phase.name: phase.parts for phase in ranks.phases}
    states = sum(
        sizes["save_checkpoint"][f"{role} {part}"]
        for role in ("actor", "critic")
        for part in ("params", "optimizer")
    )
    assert states == sum(
        state.params + state.optimizer for role, state in ranks.states.items() if role != "ref"
    )
    assert "ref params" not in sizes["save_checkpoint"]
