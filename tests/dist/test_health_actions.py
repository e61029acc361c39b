"""Runs that health rules roll back, adjust or end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import health_action_cases
import numpy as np
import pytest
from tiny import make_workspace, write_config

from rlhf_mc.checkpoint import directory

pytestmark = pytest.mark.dist
STEPS = 4
KL = "actor/reward_kl_penalty"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = {
        "total_training_steps": STEPS,
        "save_freq": 1,
        "test_freq": -1,
        "val_before_train": False,
    }
    return write_config(
        make_workspace(tmp_path_factory.mktemp("health"), num_hidden_layers=2),
        trainer=trainer,
        actor={"optim": {"lr": 2e-2}},
    )


@pytest.fixture(scope="module")
def train(pool: Any, config: Path) -> Any:
    def run(directory: Path, *overrides: str) -> list[dict[str, Any]]:
        settings = [f"trainer.default_local_dir={directory}", *overrides]
        found: list[dict[str, Any]] = pool(2).run(
            health_action_cases.train, config_path=str(config), overrides=settings
        )
        return found

    return run


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="module")
def plain(train: Any, plain_run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run without health rules: its KL to the reference grows from step to
    step."""
    rows: list[dict[str, Any]] = train(plain_run, "health.enable=false")[0]["metrics"]
    return rows


@pytest.fixture(scope="module")
def bound(plain: list[dict[str, Any]]) -> float:
    """Return a bound of the KL to the reference that the plain run first exceeds in step 3."""
    kls = [row[KL] for row in plain]
    assert max(kls[:2]) < 0.9 * kls[2], kls
    return 0.9 * kls[2]


def rolls_back(bound: float, *more: str) -> list[str]:
    return [
        "health.roll_back=[kl_explosion]",
        f"health.ref_kl_max={bound}",
        "health.ppo_kl_explosion=100",
        *more,
    ]


def roll_backs(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a roll-back, and all of its rule."""
    return [
        event
        for event in events
        if event["event"] == "rolled back" or event["rule"] == "kl_explosion"
    ]


def report_of(run: Path) -> str:
    """Return the table of health events in a run's report."""
    return (
        (run / "report.html")
        .read_text()
        .partition('aria-labelledby="health"')[2]
        .partition("</section>")[0]
    )


def test_pools_are_rolled_back_to_the_batch_that_was_sampled_then(
    train: Any, tmp_path: Path
) -> None:
    """Check that a run with ranks of their own for rollout, one step ahead, drops the batch that it
    has sampled, and repeats step 2 with the one of the checkpoint."""
    ahead = ["rollout.one_step_off=true", "algorithm.rollout_correction.rollout_is=token"]
    plain = train(tmp_path / "plain", *ahead, "health.enable=false")[0]["metrics"]
    kls = [row[KL] for row in plain]
    assert max(kls[:2]) < 0.9 * kls[2], kls
    settings = [*rolls_back(0.9 * kls[2], *ahead), "health.max_rollbacks=1"]
    pools = ["resource_pools.train=1", "resource_pools.rollout=1", "ref.pool=rollout"]
    trains, generates = train(tmp_path / "pools", *settings, *pools)
    assert trains["error"] == generates["error"]
    assert [made["after_step"] for made in trains["adjustments"]] == [1]
    repeated = trains["metrics"][1]
    assert repeated["actor/lr"] == 0.5 * plain[1]["actor/lr"]
    for key in ("critic/score/mean", "response_length/mean", "prompt_length/mean", KL):
        assert repeated[key] == pytest.approx(plain[1][key], rel=1e-4), key


def test_run_is_rolled_back_with_smaller_learning_rates(
    train: Any, plain: list[dict[str, Any]], bound: float, tmp_path: Path
) -> None:
    settings = rolls_back(bound, "health.rollback_lr_factor=0.25", "profile.steps=[100]")
    ranks = train(tmp_path / "run", *settings)
    rows = ranks[0]["metrics"]
    assert [rank["error"] for rank in ranks] == [None, None]
    assert [row["step"] for row in rows] == [1, 2, 3, 4], "each step has one row"
    (made,) = ranks[0]["adjustments"]
    # The KL of step 3 shows the weights of step 2, so the checkpoint of step 2 is none to go back
    # to.
    assert (
        made["after_step"] == 1
        and made["value"] == 0.25
        and f"step 3: kl_explosion: {KL}" in made["reason"]
    )
    assert rows[0]["actor/lr"] == plain[0]["actor/lr"]
    assert [row["actor/lr"] for row in rows[1:]] == [0.25 * row["actor/lr"] for row in plain[1:]]
    assert [row["critic/lr"] for row in rows[1:]] == [0.25 * row["critic/lr"] for row in plain[1:]]
    assert rows[0][KL] == plain[0][KL] and rows[2][KL] < bound < plain[2][KL]
    kept = sorted(path.name for path in (tmp_path / "run").glob("global_step_*"))
    assert "global_step_3.quarantined1" in kept and "global_step_2.quarantined1" in kept, kept

    said = ranks[0]["printed"]
    assert [
        sum(words in line for line in said) for words in ("a rank holds", "profile.steps has 100")
    ] == [1, 1]

    # Killed between step 4, which exceeds a lower bound, and the roll-back: the next start makes up
    # for it.
    late = tmp_path / "late"
    shutil.copytree(tmp_path / "run", late)
    lower = [
        f"health.ref_kl_max={0.99 * rows[3][KL]}",
        "trainer.total_training_steps=5",
        "health.max_rollbacks=1",
    ]
    for rank in train(late, *settings, *lower):
        assert (
            rank["error"].startswith(f"step 4: kl_explosion: {KL} is ")
            and "rolled back 1 times" in rank["error"]
        )

    # Killed after step 2 of the repeated steps, the run resumes as it would have continued.
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "run", resumed)
    for step in (3, 4):
        shutil.rmtree(resumed / f"global_step_{step}")
    again = train(resumed, *settings)
    events = roll_backs(ranks[0]["events"])
    assert roll_backs(again[0]["events"]) == events
    assert [(event["step"], event["rule"], event["rolled_back_to"]) for event in events] == [
        (3, "kl_explosion", 1)
    ]
    assert events[0]["text"].endswith("; rolled back to step 1") and "kl_explosion" in report_of(
        resumed
    )
    for rank, other in zip(ranks, again, strict=True):
        for (key, _, _, data), (other_key, _, _, other_data) in zip(
            rank["last"], other["last"], strict=True
        ):
            assert key == other_key and np.array_equal(data, other_data), key


def test_run_is_rolled_back_to_its_start_and_a_limited_number_of_times(
    train: Any, tmp_path: Path
) -> None:
    """Give a bound that every policy but the reference itself exceeds: step 1 is healthy, step 2
    never."""
    settings = rolls_back(
        1e-9, "health.max_rollbacks=2", "trainer.save_freq=100", "trainer.val_before_train=true"
    )
    for rank in train(tmp_path, *settings, "trainer.test_freq=100"):
        assert rank["error"].startswith(f"step 2: kl_explosion: {KL} is ")
        assert "the run was rolled back 2 times before (health.max_rollbacks)" in rank["error"]
        assert [(made["after_step"], made["value"]) for made in rank["adjustments"]] == [
            (0, 0.5),
            (0, 0.5),
        ]
        assert [row["step"] for row in rank["metrics"]] == [0, 1, 2], (
            "the validation before the first step is kept"
        )
    assert not (tmp_path / "hf").exists()
    healthy = ["health.enable=false", *settings[1:], "trainer.test_freq=100"]
    again = train(tmp_path, *healthy, "trainer.total_training_steps=2")  # from global_step_0
    assert [row["step"] for row in again[0]["metrics"]] == [0, 1, 2] and again[0]["error"] is None


def test_run_without_a_healthy_checkpoint_ends_on_every_rank(
    train: Any, plain: list[dict[str, Any]], plain_run: Path, tmp_path: Path
) -> None:
    """Begin with a checkpoint of another directory."""
    start = [
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={plain_run / 'global_step_3'}",
    ]
    for rank in train(tmp_path, *rolls_back(1e-9), *start):
        assert (
            "there is no checkpoint of a healthy step to roll back to; set a lower actor.optim.lr"
            in rank["error"]
        )
    assert not (tmp_path / "hf").exists()


def test_unhealthy_run_has_a_fixed_kl_coefficient_and_keeps_its_last_healthy_checkpoint(
    train: Any, plain: list[dict[str, Any]], bound: float, tmp_path: Path
) -> None:
    """Check that the coefficient is fixed from the next step on."""
    ranks = train(
        tmp_path,
        "health.kl_coef=0.75",
        f"health.ref_kl_max={bound}",
        "health.ppo_kl_explosion=100",
        "trainer.max_ckpt_to_keep=2",
    )
    assert ranks[0]["error"] is None
    coefs = [row["actor/reward_kl_penalty_coeff"] for row in ranks[0]["metrics"]]
    assert coefs == [*(row["actor/reward_kl_penalty_coeff"] for row in plain[:3]), 0.75]
    assert [(made["setting"], made["after_step"]) for made in ranks[0]["adjustments"]] == [
        ("kl_coef", 3)
    ]
    # the KL of step 3 shows the weights of step 2
    assert directory.steps_with_checkpoint(tmp_path) == [1, 3, 4]
