"""benchmarks/learning_curves.py: its commands, and the summary of runs that learn, do not learn,
and fail."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from rlhf_mc.config.algorithm_schema import ESTIMATOR_NEEDS
from rlhf_mc.config.load import load_config

ROOT = Path(__file__).parents[3]
spec = importlib.util.spec_from_file_location(
    "learning_curves", ROOT / "benchmarks" / "learning_curves.py"
)
assert spec is not None and spec.loader is not None
curves = importlib.util.module_from_spec(spec)
sys.modules["learning_curves"] = curves
spec.loader.exec_module(curves)

STAND_IN = """
import json, pathlib, sys
settings = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
rows = [{"step": 0, "val-core/arithmetic/acc/mean@1": 0.25}, {"step": 1, "critic/score/mean": 0.5}]
rows += [{"step": 5, "val-core/arithmetic/acc/mean@1": 0.5 + 0.25 * int(settings["trainer.seed"])}]
path = pathlib.Path(settings["trainer.default_local_dir"]) / "metrics.jsonl"
path.write_text("".join(json.dumps(row) + "\\n" for row in rows))
if settings["trainer.seed"] == "3":
    sys.exit("out | of memory")
"""
"""Learns the task with seed 2, does not with seed 1, and fails with seed 3."""


def test_every_estimator_has_a_run_that_loads(tmp_path: Path) -> None:
    estimators = []
    for variant in curves.VARIANTS:
        command = curves.run_command(variant, 2, 40, tmp_path, "torchrun --nproc-per-node 2")
        assert command[:5] == ["torchrun", "--nproc-per-node", "2", "-m", "rlhf_mc"]
        cfg = load_config(ROOT / command[5], command[6:])
        assert (cfg.trainer.seed, cfg.trainer.total_training_steps) == (2, 40)
        estimators.append(cfg.algorithm.adv_estimator)
    assert set(estimators) == set(ESTIMATOR_NEEDS)


def test_runs_are_summarised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    program = [
        "learning_curves.py",
        "--variants",
        "rloo",
        "--steps",
        "5",
        "--output",
        str(tmp_path / "out"),
    ]
    monkeypatch.setattr(
        sys, "argv", [*program, "--launch", f"{sys.executable} {tmp_path / 'stand_in.py'}"]
    )
    curves.main()
    assert capsys.readouterr().out.endswith("1 of 3 runs have learnt the task\n")
    rows = [
        "| estimator | seed | step 0 | step 5 | learnt |",
        "|---|---|---|---|---|",
        "| `rloo` | 1 | 0.250 | 0.750 | no |",
        "| `rloo` | 2 | 0.250 | 1.000 | yes |",
        "| `rloo` | 3 | 0.250 | 1.250 | exit code 1: out / of memory |",
    ]
    assert (tmp_path / "out" / "table.md").read_text() == "\n".join(rows) + "\n"
    assert (tmp_path / "out" / "curves.png").read_bytes()[:4] == b"\x89PNG"

    # the next start repeats the failed run alone
    (tmp_path / "stand_in.py").write_text(STAND_IN.replace('"3"', '"4"'))
    curves.main()
    results = [
        json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    ]
    assert [result["seed"] for result in results][3:] == [3] and results[3]["error"] is None
    assert "2 of 3 runs have learnt the task" in capsys.readouterr().out
