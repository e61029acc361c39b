"""Validation with several responses per prompt in the loop: metrics, samples on disk, the best
checkpoint, and validation alone. The statistics themselves:
tests/unit/trainer/test_validation_metrics.py."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import validation_cases
from tiny import make_workspace, write_config

METRIC = "val-core/arithmetic/acc/best@3/mean"
USUAL = [
    "trainer.total_training_steps=2",
    "trainer.test_freq=1",
    "trainer.save_freq=1",
    "trainer.keep_best=true",
    f"trainer.best_metric={METRIC}",
    "rollout.val_kwargs={n: 3, temperature: 1.0, top_k: 4, top_p: 0.9}",
]
ALONE = "trainer.val_only=true"


def files(root: Path) -> dict[str, bytes]:
    """Return the content of each file of a run, without the files of validations alone."""
    paths = (path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file())
    return {
        str(path): (root / path).read_bytes() for path in paths if path.parts[0] != "validation"
    }


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_validation_of_several_responses(pool: Any, tmp_path: Path) -> None:
    make_workspace(tmp_path, num_hidden_layers=2)
    config = str(write_config(tmp_path))
    root = tmp_path / "run"
    usual = [
        f"trainer.default_local_dir={root}",
        *USUAL,
        "trainer.max_ckpt_to_keep=1",
        f"trainer.validation_data_dir={tmp_path}/val",
        f"trainer.rollout_data_dir={tmp_path}/train",
        "trainer.log_train_generations=2",
    ]
    assert pool(2).run(validation_cases.fit, config_path=config, overrides=usual) == [True, True]

    logged = {row["step"]: row for row in rows(root / "metrics.jsonl")}
    for step in (0, 1, 2):
        samples = rows(tmp_path / "val" / f"{step}.jsonl")
        assert {(row["step"], row["data_source"]) for row in samples} == {(step, "arithmetic")}
        scores = [row["score"] for row in samples]
        assert logged[step]["val-core/arithmetic/acc/mean@3"] == pytest.approx(
            sum(scores) / len(scores)
        )
        assert logged[step][METRIC] >= logged[step]["val-core/arithmetic/acc/mean@3"]
        assert samples[0]["input"] == samples[2]["input"] != samples[3]["input"]
        assert all(
            row["length"] >= 1 and sum(row["parts"].values()) == pytest.approx(row["score"])
            for row in samples
        )
    for step in (1, 2):
        scores = [row["score"] for row in rows(tmp_path / "train" / f"{step}.jsonl")]
        assert sum(scores) / len(scores) == pytest.approx(
            logged[step]["critic/score/mean"], abs=1e-6
        )
    assert not (tmp_path / "train" / "0.jsonl").exists()
    some = rows(root / "train_generations" / "1.jsonl")
    assert [row["step"] for row in some] == [1, 1] and some[0]["input"] == some[1]["input"]
    for row, trained_on in zip(some, rows(tmp_path / "train" / "1.jsonl"), strict=False):
        tokens = row.pop("tokens")
        assert row == trained_on
        fields = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "advantages")
        assert list(tokens) == ["text", "response_mask", *fields]
        assert re.sub(r"<\|\w+\|>", "", "".join(tokens["text"])) == row["output"]
        assert tokens["response_mask"] == [1] * row["length"]
        assert all(len(tokens[name]) == row["length"] for name in fields)
        assert tokens["old_log_probs"] == pytest.approx(tokens["rollout_log_probs"], abs=1e-4)
        assert any(tokens["advantages"]) and max(tokens["old_log_probs"]) < 0
    assert [path.name for path in (root / "train_generations").iterdir()] == ["1.jsonl"]
    histograms = rows(root / "histograms.jsonl")
    assert [row["step"] for row in histograms] == [1, 2]
    for row in histograms:
        assert sum(row["response_length"]["counts"]) == len(
            rows(tmp_path / "train" / f"{row['step']}.jsonl")
        )
    (start,) = rows(root / "starts.jsonl")
    assert (start["end"]["how"], start["end"]["step"]) == ("finished", 2)

    best = max((1, 2), key=lambda step: (logged[step][METRIC], step))
    assert {path.name for path in root.glob("global_step_*")} == {
        f"global_step_{best}",
        "global_step_2",
    }

    wrong = [
        *usual,
        f"trainer.default_local_dir={tmp_path}/other",
        "trainer.best_metric=val-core/arithmetic/acc/best@4",
    ]
    for ok, value in pool(2).outcomes(validation_cases.fit, config_path=config, overrides=wrong):
        assert not ok and value[0] == "UserError"
        assert value[1].startswith(
            "trainer.best_metric is 'val-core/arithmetic/acc/best@4', no metric of the validation"
        )


def test_validation_alone_changes_no_file_of_the_run(pool: Any, tmp_path: Path) -> None:
    make_workspace(tmp_path, num_hidden_layers=2)
    config = str(write_config(tmp_path))
    root = tmp_path / "run"
    usual = [*USUAL, f"trainer.default_local_dir={root}"]

    def fit(*overrides: str, world: int = 1) -> None:
        done = pool(world).run(
            validation_cases.fit, config_path=config, overrides=[*usual, *overrides]
        )
        assert done == [True] * world

    def refusal(*overrides: str) -> str:
        ((ok, value),) = pool(1).outcomes(
            validation_cases.fit, config_path=config, overrides=[*usual, *overrides]
        )
        assert not ok and value[0] == "UserError"
        return str(value[1])

    def validated(step: int) -> dict[str, float]:
        metrics = json.loads((root / "validation" / f"step_{step:06d}.json").read_text())
        assert (root / "validation" / "generations" / f"{step}.jsonl").exists()
        return {key: value for key, value in metrics.items() if key.startswith("val-")}

    # In an empty directory: the initial weights. A run that begins there later leaves the
    # validation there.
    fit(ALONE, world=2)
    assert files(root) == {}
    initial = validated(0)
    fit(f"trainer.validation_data_dir={tmp_path}/val")
    logged = {
        row["step"]: {key: value for key, value in row.items() if key.startswith("val-")}
        for row in rows(root / "metrics.jsonl")
    }
    assert logged[0] == initial == validated(0) and not (root / "earlier_runs").exists()

    # Of a finished run: its newest checkpoint, an earlier one, the initial weights.
    finished = files(root)
    fit(ALONE)
    assert validated(2) == logged[2]
    first = [
        ALONE,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={root}/global_step_1",
    ]
    fit(*first)
    assert validated(1) == logged[1]
    fit(ALONE, "trainer.resume_mode=disable")
    refused = refusal(ALONE, f"trainer.validation_data_dir={tmp_path}/val")
    assert refused == (
        f"trainer.validation_data_dir: {tmp_path}/val/2.jsonl is there already; give another "
        "directory, since trainer.val_only changes no file of a run"
    )
    assert files(root) == finished

    # Of a killed run: rows and checkpoints after the validated step, and no success marker.
    (root / "success.json").unlink()
    (root / "global_step_3.tmp").mkdir()
    (root / "global_step_3.tmp" / "rank_0.bin").write_bytes(b"unfinished")
    killed = files(root)
    fit(*first)
    assert files(root) == killed

    # Of a run without checkpoints there is nothing to validate.
    for step in (1, 2):
        shutil.rmtree(root / f"global_step_{step}")
    without = files(root)
    refused = refusal(ALONE)
    assert refused.startswith(f"trainer.val_only: the run in {root} has no training checkpoint")
    assert files(root) == without
