"""Profiles of single steps in runs on two ranks: traces, the table, and the same numbers as
without."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import profile_cases
import pytest
import torch
from profile_cases import DELAY
from runs import VARIES
from tiny import make_workspace, write_config

from rlhf_mc.config.load import load_config
from rlhf_mc.observability.phase_work import WHOLE

pytestmark = pytest.mark.dist

PHASES = (
    "update_weights",
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "sum_log_probs",
    "adv",
    "update_critic",
    "update_actor",
)
OTHERS = ("step", "testing", "save_checkpoint", "write_profile")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = make_workspace(tmp_path_factory.mktemp("profile"), num_hidden_layers=1)
    profile_cases.slow_reward(str(workspace))
    trainer = {"val_before_train": False, "save_freq": 2, "test_freq": 2, "async_save": False}
    return write_config(workspace, trainer=trainer)


@pytest.fixture(scope="module")
def runs(
    pool: Any, config: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Any]]:
    """Return (directory, result of each rank) of a run without profile, and of one that profiles
    its second step."""
    outcomes = {}
    for name, settings in {
        "plain": [],
        "profiled": ["profile.steps=[2, 9]", "profile.ranks=[1]"],
    }.items():
        root = tmp_path_factory.mktemp(name)
        overrides = [*settings, f"trainer.default_local_dir={root}"]
        outcomes[name] = (
            root,
            pool(2).run(profile_cases.train, config_path=str(config), overrides=overrides),
        )
    return outcomes


def test_trace_of_the_chosen_rank_has_every_phase_and_its_parts(runs: Any) -> None:
    root = runs["profiled"][0]
    files = sorted(
        str(path.relative_to(root)) for path in (root / "profile").rglob("*") if path.is_file()
    )
    assert files == ["profile/step_2/phases.json", "profile/step_2/rank_1.json.gz"]
    trace = json.loads(gzip.decompress((root / files[1]).read_bytes()))
    assert trace["distributedInfo"]["rank"] == 1
    events = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert {*PHASES, *OTHERS} - {"write_profile"} <= {event["name"] for event in events}
    inside = {
        "update_actor": {"mini_batch", "pack", "forward", "backward", "grad_norm", "optimizer_step"}
    }
    inside["update_weights"] = {"local_copies"}
    inside["ref"] = {"forward"}
    for phase, names in inside.items():
        begin, end = next(
            (event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == phase
        )
        assert names <= {event["name"] for event in events if begin <= event["ts"] <= end}, phase
    operators = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"}
    assert {"aten::addmm", "aten::mm", "c10d::allreduce_"} & operators


def test_profile_changes_no_number(runs: Any) -> None:
    rows = {}
    for name, (root, results) in runs.items():
        lines = (root / "metrics.jsonl").read_text().splitlines()
        rows[name] = [
            {k: v for k, v in json.loads(line).items() if not k.startswith(VARIES)}
            for line in lines
        ]
        plain = runs["plain"][1]
        for rank, result in enumerate(results):
            assert all(
                torch.equal(weight, plain[rank]["weights"][key])
                for key, weight in result["weights"].items()
            )
    assert len(rows["plain"]) == len(rows["profiled"]) == 2
    for plain_row, row in zip(rows["plain"], rows["profiled"], strict=True):
        assert {
            key: (plain_row.get(key), row.get(key)) for key in row if plain_row.get(key) != row[key]
        } == {}
        assert plain_row.keys() == row.keys()


def test_table_has_the_times_of_all_ranks(runs: Any) -> None:
    root, (first, second) = runs["profiled"]
    table = json.loads((root / "profile/step_2/phases.json").read_text())
    assert (table["step"], table["ranks"], table["traced"]) == (2, 2, [1])
    row = json.loads((root / "metrics.jsonl").read_text().splitlines()[1])
    for name in {*PHASES, *OTHERS} - {"write_profile"}:
        phase = table["phases"][name]
        assert phase["seconds"][0] == pytest.approx(row[f"timing_s/{name}"], abs=1e-5)
        assert all(
            0 <= waits <= takes
            for waits, takes in zip(phase["waiting"], phase["seconds"], strict=True)
        )
    assert all(
        sum(table["phases"][name]["tokens"]) > 0 for name in ("gen", "old_log_prob", "update_actor")
    )
    assert all(
        table["phases"][name]["waiting"] == [0, 0] for name in ("old_log_prob", "ref", "values")
    )
    assert all(waits > 0 for waits in table["phases"]["sum_log_probs"]["waiting"])
    assert table["phases"]["reward"]["responses"] == [8, 8]
    epochs = load_config(root / "resolved_config.yaml", []).actor.ppo_epochs
    of_pass = row["perf/mfu/actor_infer"] * max(table["phases"]["old_log_prob"]["seconds"])
    of_update = row["perf/mfu/actor"] * row["timing_s/update_actor"]
    # backward passes take twice the forward's
    assert 3 * epochs * of_pass == pytest.approx(of_update, rel=0.01)
    rest = table["phases"]["between_phases"]
    assert rest["file_seconds"][1] == 0 < rest["file_seconds"][0] < rest["seconds"][0]
    assert "profile of step 2" in first["out"] and "profile of step" not in second["out"]
    assert "warning: profile.steps has 9; this start runs steps 1 to 2" in first["err"]
    assert "profile" not in second["err"]


def test_table_names_the_slow_rank_and_its_work(pool: Any, config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the place of a directory")
    overrides = [
        "profile.steps=[1]",
        "profile.ranks=[0]",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"custom_reward_function.path={config.parent}/slow_reward.py",
        f"trainer.default_local_dir={tmp_path}",
    ]
    first, _ = pool(2).run(
        profile_cases.train, config_path=str(config), overrides=overrides, profile_directory="file"
    )
    lines = " ".join(line.strip() for line in first["out"].splitlines())
    assert re.search(
        r"reward: the other waited for rank 1 \(host \S+\): .*reward_seconds [\d.]+ against", lines
    )
    for file in ("phases.json", "rank_0.json.gz"):
        assert f"warning: file/step_1/{file} cannot be written" in first["err"]
    assert (tmp_path / "success.json").exists()


def test_old_log_probs_are_timed_by_the_slowest_rank(pool: Any) -> None:
    first, second = pool(2).run(profile_cases.times_of_the_slowest_rank)
    assert first == {"timing_s/old_log_prob": 2.0, "timing_s/update_actor": 2.0}
    assert second == {"timing_s/old_log_prob": 2.0, "timing_s/update_actor": 1.0}


def test_waiting_is_the_time_in_collectives(pool: Any) -> None:
    first, second = pool(2).run(profile_cases.waiting_by_collective)
    assert first.pop("none") < DELAY / 2
    assert first.pop(WHOLE) >= first["outer"]
    outer = first.pop("outer")
    assert outer >= sum(first.values())
    for name, seconds in first.items():
        assert seconds > DELAY * 0.9, name
        assert second[name] < seconds, name
