"""What is put away between phases: the loop trains alike to the last bit, the memory is really given back, and in each
phase is on the device what the table says. vLLM's sleep, which needs a GPU, is acted out."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import offload_cases
import pytest
import torch
from tiny import make_checkpoint, make_workspace, write_config

from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.rollout.vllm_engine import RolloutEngine
from rlhf_mc.trainer.offload_schedule import TABLE, OffloadSchedule, row_of

ALL_AWAY = [
    "reshard.share_weights=false",
    *(f"actor.megatron.{part}_offload=true" for part in ("param", "grad", "optimizer")),  # critic and ref likewise
]
ALL_BUT_SHARED = [
    "actor.megatron.grad_offload=true",
    "actor.megatron.optimizer_offload=true",
    *(f"{role}.megatron.param_offload=true" for role in ("critic", "ref")),
]
"""With vLLM on the actor's own weights (equal tensor parallelism)."""
OF_THE_MACHINE = ("run_id", "timing_s/", "perf/", "reshard/", "memory/")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_workspace(tmp_path_factory.mktemp("offload"))
    write_config(directory, trainer={"logger": ["jsonl"]})
    return directory


@pytest.mark.parametrize(
    ("world", "tp", "rollout_tp", "dtype", "settings"),
    [
        (1, 1, 1, "float32", ALL_AWAY),
        (2, 1, 1, "bfloat16", ALL_AWAY),
        (2, 2, 2, "bfloat16", ALL_BUT_SHARED),
    ],
)
def test_the_loop_trains_saves_and_resumes_alike_whoever_is_put_away(
    pool: Any, workspace: Path, world: int, tp: int, rollout_tp: int, dtype: str, settings: list[str], tmp_path: Path
) -> None:
    def fit(name: str, more: list[str]) -> list[dict[str, Any]]:
        overrides = [f"trainer.default_local_dir={tmp_path / name}", f"actor.megatron.dtype={dtype}", *more]
        results: list[dict[str, Any]] = pool(world).run(
            offload_cases.fit,
            config_path=str(workspace / "config.yaml"),
            overrides=[*overrides, "trainer.save_freq=2", *cases.layout_overrides(tp, 1, rollout_tp)],
            vllm_sleeps=name == "away",
        )
        return results

    here = fit("here", [])
    away = fit("away", settings)
    assert len(here[0]["steps"]) == 3
    for mine, wanted in zip(away[0]["steps"], here[0]["steps"], strict=True):
        assert of_training(mine) == of_training(wanted)
    assert files_of(tmp_path / "away") == files_of(tmp_path / "here")
    if tp < world:
        fit("away", settings)  # resumes after the last step, and exports what it has read
        assert files_of(tmp_path / "away") == files_of(tmp_path / "here")

    assert here[0]["told"] == [] and "timing_s/offload" not in here[0]["steps"][1]
    assert not any(key.startswith("memory/") for key in here[0]["steps"][1])
    last = away[0]["steps"][-1]
    assert last["timing_s/offload"] > 0
    assert all(last[f"memory/{role}_offloaded_gb"] > 0 for role in ("actor", "critic", "ref"))
    for result in away:
        check_vllm(result["told"])
        check_table(result["seen"], {"actor": {"params"}} if settings == ALL_BUT_SHARED else {})


def files_of(directory: Path) -> dict[str, str]:
    """Checksums of the tensors of the training checkpoint and of the exported weights."""
    files = [*(directory / "global_step_2").rglob("*.distcp"), directory / "hf" / "model.safetensors"]
    assert len(files) > 1
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def of_training(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not key.startswith(OF_THE_MACHINE)}


def check_vllm(told: list[str]) -> None:
    """Weights wake before the update, the KV cache after it; both sleep while models train. From validation to the next
    rollout the KV cache makes room for the update."""
    generate = ["wake weights", "wake kv_cache"]
    train = ["sleep 2"]
    make_room = train
    step = [*make_room, *generate, *train, *generate]  # rollout, training, validation
    validation_first = [*make_room, *generate]
    export = train
    assert told == [*validation_first, *step, *step, *export]


def check_table(seen: dict[str, dict[str, list[str]]], always: dict[str, set[str]]) -> None:
    assert seen.keys() == TABLE.keys() - {"reward_model"}, "a phase that the table lacks, or one that is not entered"
    for phase, parts in seen.items():
        row = row_of(phase)
        # Adam's moments, in float32 the whole optimizer state, are made when they are loaded or first updated.
        unknown = {"optimizer"} if phase == "load_checkpoint" else set()
        if row is not None:
            assert {role: set(names) - unknown for role, names in parts.items()} == {
                role: (row[role] | always.get(role, set())) - unknown for role in parts
            }, phase
    assert set(seen["update_actor"]["actor"]) == {"params", "grads", "optimizer"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("offload_models")
    return {family: str(make_checkpoint(root / family, family=family)) for family in ("qwen2", "qwen3_moe")}


@pytest.fixture(scope="module")
def batch() -> RaggedBatch:
    """Random tokens, and numbers for what the losses read."""
    draw = torch.Generator().manual_seed(5)
    prompt_lens = torch.tensor([3, 9, 5, 4])
    response_lens = torch.tensor([6, 1, 11, 5])
    fields = ("old_log_probs", "ref_log_probs", "advantages", "values", "returns")
    responses = int(response_lens.sum())
    return RaggedBatch(
        tokens=torch.randint(270, (int((prompt_lens + response_lens).sum()),), generator=draw),
        prompt_lens=prompt_lens,
        response_lens=response_lens,
        rollout_log_probs=torch.zeros(responses),
        finished=torch.ones(len(prompt_lens), dtype=torch.bool),
    ).with_fields(**{name: torch.randn(responses, generator=draw) - 4.0 for name in fields})


@pytest.mark.parametrize(
    ("world", "mesh", "family", "dtype", "distributed"),
    [
        (1, {}, "qwen2", "bfloat16", False),
        (1, {}, "qwen2", "float32", False),
        (2, {}, "qwen2", "bfloat16", True),
        (2, {"tp": 2}, "qwen2", "float32", True),
        (2, {"pp": 2, "vpp": 2}, "qwen2", "bfloat16", True),
        (2, {"ep": 2}, "qwen3_moe", "bfloat16", True),
    ],
)
def test_all_that_an_optimizer_holds_comes_back(
    pool: Any,
    checkpoints: dict[str, str],
    batch: RaggedBatch,
    world: int,
    mesh: dict[str, int],
    family: str,
    dtype: str,
    distributed: bool,
) -> None:
    outcomes = []
    for pauses in (False, True):
        results = pool(world).run(
            offload_cases.steps_with_pauses,
            checkpoint=checkpoints[family],
            mesh=mesh,
            batch=batch,
            pauses=pauses,
            dtype=dtype,
            use_distributed_optimizer=distributed,
        )
        outcomes.append(results)
    for (held, norms, nothing), (held_away, norms_away, away) in zip(*outcomes, strict=True):
        assert norms == norms_away and nothing == [0, 0, 0]
        assert len(held) == len(held_away) and all(map(torch.equal, held, held_away))
        # Adam's moments are there from the first step on.
        assert 0 < away[0] < away[1] == away[2]


@pytest.mark.parametrize("world", [1])
def test_a_frozen_model_scores_alike_and_is_copied_to_the_host_once(
    pool: Any, checkpoints: dict[str, str], batch: RaggedBatch, world: int
) -> None:
    result = pool(world).run(offload_cases.frozen_scores, checkpoint=checkpoints["qwen2"], batch=batch)[0]
    first, *others = result["scores"]
    assert all(torch.equal(first, scores) for scores in others)
    assert "the params of actor are put away" in result["message"]
    assert result["copies"] == 1


class Recorded:
    """Stands for a model's Offload: writes down what it is told, with the model's name."""

    def __init__(self, name: str, told: list[str]) -> None:
        self._name = name
        self._told = told
        self.offloaded_bytes = 0

    def differs_from(self, on_device: Any) -> bool:
        return True

    def offload_all_but(self, on_device: Any) -> None:
        self._told.append(f"put away {self._name}")

    def onload(self, on_device: Any) -> None:
        self._told.append(f"bring back {self._name}")


class RecordedRollout:
    """Stands for the rollout engine, likewise."""

    def __init__(self, told: list[str]) -> None:
        self._told = told
        self.awake = frozenset({"weights", "kv_cache"})

    def sleep(self) -> None:
        self._told.append("sleep")
        self.awake = frozenset()

    def wake_up(self, part: str) -> None:
        self._told.append(f"wake {part}")
        self.awake |= {part}


def test_all_that_leaves_goes_before_anything_comes() -> None:
    told: list[str] = []
    places = OffloadSchedule()
    for role in ("actor", "critic"):
        places.add(role, SimpleNamespace(offload=Recorded(role, told)))  # type: ignore[arg-type]
    assert told == ["put away actor", "put away critic"], "a finished model makes room for the next"
    places.add_rollout(RecordedRollout(told))  # type: ignore[arg-type]
    away = ["put away actor", "put away critic"]
    back = ["bring back actor", "bring back critic"]
    for phase, wanted in {
        "update_weights": [*away, "sleep", *back, "wake weights"],
        "gen": [*away, *back, "wake kv_cache"],
        "reward": [],
        "old_log_prob": [*away, "sleep", *back],
        "update_actor": [*away, *back],
    }.items():
        told.clear()
        timer = PhaseTimer()
        with places.phase(timer, phase):
            assert told == wanted, phase
        assert set(timer.result()) == {f"timing_s/{phase}"} | ({"timing_s/offload"} if wanted else set())


@pytest.mark.parametrize("kept", [True, False])
def test_a_buffer_that_vllm_loses_in_its_sleep_is_found(kept: bool) -> None:
    model = torch.nn.Module()
    model.register_buffer("cos_sin_cache", torch.arange(6.0), persistent=False)

    def sleep(level: int) -> None:
        if not kept:
            model.get_buffer("cos_sin_cache").zero_()

    engine = RolloutEngine.__new__(RolloutEngine)
    runner = SimpleNamespace(worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)))
    executor = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))
    engine._llm = SimpleNamespace(sleep=sleep, wake_up=lambda tags: None, llm_engine=executor)
    engine.sleep()
    if kept:
        engine.wake_up("weights")
        assert engine.awake == {"weights"}
    else:
        with pytest.raises(RuntimeError, match="buffer cos_sin_cache is not what it was"):
            engine.wake_up("weights")


@pytest.mark.parametrize("world", [1])
def test_a_cpu_refuses_vllms_sleep(pool: Any, workspace: Path, world: int) -> None:
    sections = {"rollout": {"free_cache_engine": True}}
    [(ok, value)] = pool(world).outcomes(cases.try_to_build, directory=str(workspace), sections=sections)
    assert not ok and value[0] == "UserError"
    assert value[1].startswith("rollout.free_cache_engine is true; ") and "set it to false" in value[1]
