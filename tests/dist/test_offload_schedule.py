"""Offload between phases: training is bit-exact, the memory is freed, and in each phase the tensor
groups of the table are on the device. vLLM's sleep, which needs a GPU, is simulated."""

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

from rlhf_mc.config.roles import DEVICE_PLACEMENT, parts_on_device
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.rollout.vllm_engine import VLLMEngine
from rlhf_mc.trainer.offload_schedule import OffloadSchedule

OFFLOAD_ALL = [
    "reshard.share_weights=false",
    "trainer.planner=off",  # no state stays on the device between two optimizer steps
    # critic and ref likewise
    *(f"actor.megatron.{part}_offload=true" for part in ("param", "grad", "optimizer")),
]
OFFLOAD_ALL_BUT_ALIASED = [
    "actor.megatron.grad_offload=true",
    "actor.megatron.optimizer_offload=true",
    *(f"{role}.megatron.param_offload=true" for role in ("critic", "ref")),
]
"""Settings with vLLM's weights aliased to the actor's (equal tensor parallelism)."""
STEP_PHASES = [
    "update_weights",
    "gen",
    "old_log_prob",
    "ref",
    "values",
    "sum_log_probs",
    "reward",
    "adv",
]
STEP_PHASES += ["update_critic", "update_actor", "testing"]
MACHINE_METRICS = ("run_id", "timing_", "perf/", "reshard/", "memory/")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_workspace(tmp_path_factory.mktemp("offload"), num_hidden_layers=2)
    write_config(directory, trainer={"logger": ["jsonl"]})
    return directory


@pytest.mark.parametrize(
    ("world", "tp", "rollout_tp", "dtype", "settings"),
    [
        # float32 and one rank: test_optimizer_state_survives_offload
        (2, 1, 1, "bfloat16", OFFLOAD_ALL),
        (2, 2, 2, "bfloat16", OFFLOAD_ALL_BUT_ALIASED),
    ],
)
def test_loop_with_offload_is_bit_exact(
    pool: Any,
    workspace: Path,
    world: int,
    tp: int,
    rollout_tp: int,
    dtype: str,
    settings: list[str],
    tmp_path: Path,
) -> None:
    def fit(name: str, extra: list[str]) -> list[dict[str, Any]]:
        overrides = [
            f"trainer.default_local_dir={tmp_path / name}",
            f"actor.megatron.dtype={dtype}",
            *extra,
        ]
        results: list[dict[str, Any]] = pool(world).run(
            offload_cases.fit,
            config_path=str(workspace / "config.yaml"),
            overrides=[
                *overrides,
                "trainer.save_freq=2",
                *cases.layout_overrides(tp, 1, rollout_tp),
            ],
            vllm_sleeps=name == "offloaded",
        )
        return results

    plain = fit("plain", [])
    offloaded = fit("offloaded", settings)
    assert len(plain[0]["steps"]) == 3
    for mine, wanted in zip(offloaded[0]["steps"], plain[0]["steps"], strict=True):
        assert training_metrics(mine) == training_metrics(wanted)
    assert checksums(tmp_path / "offloaded") == checksums(tmp_path / "plain")
    if tp < world:
        fit("offloaded", settings)  # resumes after the last step, and exports the loaded weights
        assert checksums(tmp_path / "offloaded") == checksums(tmp_path / "plain")

    assert plain[0]["vllm_calls"] == [] and "timing_s/offload" not in plain[0]["steps"][1]
    assert not any(key.startswith("memory/") for key in plain[0]["steps"][1])
    last = offloaded[0]["steps"][-1]
    assert last["timing_s/offload"] > 0
    assert all(last[f"memory/{role}_offloaded_gb"] > 0 for role in ("actor", "critic", "ref"))
    for result in plain + offloaded:
        check_reported(result["reported"])
    for result in offloaded:
        check_vllm(result["vllm_calls"])
        check_table(
            result["on_device"],
            {"actor": {"params"}} if settings == OFFLOAD_ALL_BUT_ALIASED else {},
        )


def checksums(directory: Path) -> dict[str, str]:
    """Return the checksums of the training checkpoint's tensors and of the exported weights."""
    files = [
        *(directory / "global_step_2").rglob("*.distcp"),
        directory / "hf" / "model.safetensors",
    ]
    assert len(files) > 1
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def training_metrics(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not key.startswith(MACHINE_METRICS)}


def check_vllm(calls: list[str]) -> None:
    """Check that weights wake before the weight update and the KV cache after it, that both sleep
    while models train, that the KV cache sleeps during the update between a validation and the next
    rollout, and that an engine that sleeps wakes before it is closed.
    """
    generate = ["wake weights", "wake kv_cache"]
    train = ["sleep 2"]
    make_room = train
    step = [*make_room, *generate, *train, *generate]  # rollout, training, validation
    validation_first = [*make_room, *generate]
    export = train
    close = ["wake everything"]
    assert calls == [*validation_first, *step, *step, *export, *close]


def check_reported(reported: list[tuple[int, str]]) -> None:
    """Check that the rank status names every phase and its step, also before the first step and
    after the last."""
    phases = [
        (step, phase) for step, phase in reported if phase not in ("start", "offload", "step")
    ]
    assert [*dict.fromkeys(phases)] == [
        *[(0, phase) for phase in ("load_checkpoint", "update_weights", "testing")],
        *[(1, phase) for phase in STEP_PHASES],
        *[(2, phase) for phase in (*STEP_PHASES, "save_checkpoint", "export")],
    ]


def check_table(on_device: dict[str, dict[str, list[str]]], always: dict[str, set[str]]) -> None:
    assert on_device.keys() == DEVICE_PLACEMENT.keys() - {"reward_model", "teacher_model"}, (
        "a phase is missing in the table, or was not run"
    )
    for phase, groups in on_device.items():
        row = parts_on_device(phase)
        # Adam's moments, in float32 the whole optimizer state, are made when they are loaded or
        # first updated.
        unknown = {"optimizer"} if phase == "load_checkpoint" else set()
        if row is not None:
            assert {role: set(names) - unknown for role, names in groups.items()} == {
                role: (row[role] | always.get(role, set())) - unknown for role in groups
            }, phase
    # the state comes for its steps alone
    assert set(on_device["update_actor"]["actor"]) == {"params", "grads"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("offload_models")
    return {
        family: str(make_checkpoint(root / family, family=family))
        for family in ("qwen2", "qwen3_moe")
    }


@pytest.fixture(scope="module")
def batch() -> RaggedBatch:
    """Return a batch of random tokens, with random values in the fields that the losses read."""
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
def test_optimizer_state_survives_offload(
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
    for offload in (False, True):
        results = pool(world).run(
            offload_cases.steps_with_offload,
            checkpoint=checkpoints[family],
            mesh=mesh,
            batch=batch,
            offload=offload,
            dtype=dtype,
            use_distributed_optimizer=distributed,
        )
        outcomes.append(results)
    for (plain, norms, no_bytes), (offloaded, offloaded_norms, num_bytes) in zip(
        *outcomes, strict=True
    ):
        assert norms == offloaded_norms and no_bytes == [0, 0, 0]
        assert len(plain) == len(offloaded) and all(map(torch.equal, plain, offloaded))
        # Adam's moments exist from the first step on.
        assert 0 < num_bytes[0] < num_bytes[1] == num_bytes[2]


@pytest.mark.parametrize("world", [1])
def test_frozen_model_is_copied_to_the_host_once(
    pool: Any, checkpoints: dict[str, str], batch: RaggedBatch, world: int
) -> None:
    result = pool(world).run(
        offload_cases.frozen_scores, checkpoint=checkpoints["qwen2"], batch=batch
    )[0]
    first, *others = result["scores"]
    assert all(torch.equal(first, scores) for scores in others)
    assert "the params of actor are offloaded" in result["message"]
    assert result["copies"] == 1


class RecordingOffload:
    """Stand-in for a model's Offload that records its calls with the model's name."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name = name
        self._calls = calls
        self.offloaded_bytes = 0

    def differs_from(self, on_device: Any) -> bool:
        return True

    def offload_all_but(self, on_device: Any) -> None:
        self._calls.append(f"offload {self._name}")

    def onload(self, on_device: Any) -> None:
        self._calls.append(f"onload {self._name}")


class RecordingRollout:
    """Stand-in for the rollout engine that records its calls."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self.awake = frozenset({"weights", "kv_cache"})

    def sleep(self) -> None:
        self._calls.append("sleep")
        self.awake = frozenset()

    def wake_up(self, part: str) -> None:
        self._calls.append(f"wake {part}")
        self.awake |= {part}


def test_offloads_precede_onloads() -> None:
    calls: list[str] = []
    schedule = OffloadSchedule()
    for role in ("actor", "critic"):
        schedule.add(role, SimpleNamespace(offload=RecordingOffload(role, calls)))  # type: ignore[arg-type]
    assert calls == ["offload actor", "offload critic"], "a finished model makes room for the next"
    schedule.add_rollout(RecordingRollout(calls))  # type: ignore[arg-type]
    offloads = ["offload actor", "offload critic"]
    onloads = ["onload actor", "onload critic"]
    for phase, wanted in {
        "update_weights": [*offloads, "sleep", *onloads, "wake weights"],
        "gen": [*offloads, *onloads, "wake kv_cache"],
        "reward": [],
        "old_log_prob": [*offloads, "sleep", *onloads],
        "update_actor": [*offloads, *onloads],
    }.items():
        calls.clear()
        timer = PhaseTimer()
        with schedule.phase(timer, phase):
            assert calls == wanted, phase
        assert set(timer.result()) == {f"timing_s/{phase}"} | (
            {"timing_s/offload"} if wanted else set()
        )


@pytest.mark.parametrize("kept", [True, False])
def test_buffer_lost_in_vllms_sleep_is_detected(kept: bool) -> None:
    model = torch.nn.Module()
    model.register_buffer("cos_sin_cache", torch.arange(6.0), persistent=False)

    def sleep(level: int) -> None:
        if not kept:
            model.get_buffer("cos_sin_cache").zero_()

    engine = VLLMEngine.__new__(VLLMEngine)
    engine._layout = SimpleNamespace(zero=())
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
def test_a_config_for_gpus_is_built_on_a_cpu(pool: Any, workspace: Path, world: int) -> None:
    sections = {
        "rollout": {
            "free_cache_engine": True,
            "gpu_memory_utilization": 0.6,
            "enforce_eager": True,
        },
        "actor": {"megatron": {"dtype": "bfloat16", "fp8": "tensorwise"}},
    }
    assert pool(world).outcomes(
        cases.try_to_build, directory=str(workspace), sections=sections
    ) == [(True, None)]
