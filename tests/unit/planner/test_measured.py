"""Times to expect: the measured step of one H200 within some percent, and the kind of every
figure."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from documents import ROOT
from published import PLAN_70B

from rlhf_mc.planner.__main__ import main
from rlhf_mc.planner.gpus import GPUS
from rlhf_mc.planner.measured import H200_HALF_BILLION

MEASURED_STEP = [
    str(ROOT / "configs/ppo_qwen2.5_0.5b.yaml"),
    "--model=qwen2.5-0.5b",
    "--gpus-per-node=1",
    "--mean-prompt-length=12",
    "data.train_batch_size=128",
    "actor.ppo_mini_batch_size=64",
    "rollout.n=2",
    "data.max_prompt_length=24",
    "data.max_response_length=1024",
    "algorithm.use_kl_in_reward=false",
]
"""The step of gpu_check's part step_speed."""
H200 = "--gpu=h200"
PHASES = {
    "gen": "generation",
    "old_log_prob": "log-probs",
    "values": "values",
    "update_critic": "critic's update",
    "update_actor": "actor's update",
}
"""Phase -> its name in the row of docs/gpu.md."""


@pytest.fixture
def times(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the times of a config with these arguments."""

    def of(*arguments: str) -> dict[str, Any]:
        main([*arguments, "--json"])
        return json.loads(capsys.readouterr().out)["times"]

    return of


def measured_seconds() -> dict[str, float]:
    """Return the seconds of each phase by the tokens/s in docs/gpu.md, of 256 sequences of 12 +
    1024 tokens."""
    (row,) = re.findall(r"^\| step_speed .*$", (ROOT / "docs/gpu.md").read_text(), re.MULTILINE)
    rates = {phase: re.search(rf"{name} ([\d,]+)", row) for phase, name in PHASES.items()}
    tokens = dict.fromkeys(PHASES, 256 * 1036) | {"gen": 256 * 1024}
    return {
        phase: tokens[phase] / float(rate[1].replace(",", ""))
        for phase, rate in rates.items()
        if rate
    }


def test_the_measured_step_is_expected_within_two_percent(times: Any) -> None:
    """Hold the arithmetic of the factors, which are from these figures, and the planner's use of
    them."""
    expected = times(*MEASURED_STEP, H200)["expected"]
    found = {phase: sum(parts.values()) for phase, parts in expected["phases"].items()}
    assert found == pytest.approx(measured_seconds(), rel=0.02)
    assert len(found) == len(PHASES)
    assert set(expected["kinds"].values()) == {expected["kind"]} == {"measured"}
    assert expected["source"].startswith("one H200, Qwen2.5-0.5B")


def test_a_head_of_another_size_is_expected_as_it_was_measured() -> None:
    """Compute heads_152k, 16384 tokens at hidden size 3584: 425 TFLOP/s forward, 496 of four
    products
    with backward. It reads and writes the logits 4 times less than an update, which has the
    entropy."""
    factors = H200_HALF_BILLION
    rates = GPUS["h200"].rates
    assert rates is not None
    product = 2 * 16384 * 151936 * 3584
    logits = 4 * 16384 * 151936 / (rates.memory * factors.memory)
    forward, training = factors.logits[3584]
    peak = rates.bfloat16 * factors.products
    assert product / (product / peak + forward * logits) == pytest.approx(425e12, rel=0.02)
    assert 4 * product / (4 * product / peak + (training - 4) * logits) == pytest.approx(
        496e12, rel=0.02
    )


@pytest.mark.parametrize(
    ("changes", "extrapolated"),
    [
        ([H200], set()),
        (["--gpu=h100"], set(PHASES)),
        # the critic inherits it
        ([H200, "actor.megatron.recompute_granularity=full"], set(PHASES)),
        ([H200, "critic.megatron.recompute_granularity=full"], {"values", "update_critic"}),
        ([H200, "--mean-response-length=400"], set(PHASES)),
        ([H200, "rollout.max_num_seqs=64"], {"gen"}),
        ([H200, "algorithm.use_kl_in_reward=true"], {"ref"}),
        ([H200, "actor.megatron.optimizer_offload=true"], {"offload"}),
    ],
)
def test_what_was_not_measured_is_extrapolated(
    times: Any, changes: list[str], extrapolated: set[str]
) -> None:
    expected = times(*MEASURED_STEP, *changes)["expected"]
    assert {
        phase for phase, kind in expected["kinds"].items() if kind == "extrapolated"
    } == extrapolated
    assert expected["kind"] == ("extrapolated" if extrapolated else "measured")


@pytest.mark.slow
def test_what_is_expected_is_above_the_bound(times: Any) -> None:
    found = times(*PLAN_70B)
    expected = found["expected"]
    assert set(expected["kinds"].values()) == {"extrapolated"}
    for phase, parts in found["phases"].items():
        assert sum(expected["phases"][phase].values()) > 1.1 * sum(parts.values())
    # More sequences at a time, on engines of one GPU, take the host longer than the device.
    host = times(*MEASURED_STEP[:-1], "--gpu=b200")["expected"]["phases"]["gen"]["host"]
    assert host > 0 and "host" not in expected["phases"]["gen"]
    full = times(*PLAN_70B, "actor.megatron.recompute_granularity=full")["expected"]["phases"][
        "update_actor"
    ]
    assert full["activations"] > 1.2 * expected["phases"]["update_actor"]["activations"]


@pytest.mark.slow
def test_every_time_of_the_table_has_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    main([*MEASURED_STEP, H200])
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if "lower bound " in line)
    rows = [line.split() for line in lines[start + 1 : start + 7]]
    assert [row[0] for row in rows] == [*PHASES, "step"]
    assert all("measured" in row for row in rows)
    assert re.search(r"tokens/s on each GPU: \d+ \(bound\), \d+ \(measured\)", lines[start + 6])
    assert lines[start + 7].startswith("expected: the factors of one H200")
