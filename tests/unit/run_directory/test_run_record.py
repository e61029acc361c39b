"""The record of a run's starts: its files, what a second start adds, and truncated lines."""

from __future__ import annotations

import json
import socket
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from config_files import MINIMAL
from documents import ROOT

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config
from rlhf_mc.config.schema import Config
from rlhf_mc.run_directory.starts import record_end, record_start
from rlhf_mc.run_files import CONFIG_FILE, STARTS_FILE, differences, json_objects
from rlhf_mc.trainer.lifecycle import write_run_report


def starts(root: Path) -> list[dict[str, Any]]:
    return json_objects(root / STARTS_FILE)


def config(root: Path, *overrides: str) -> Config:
    path = root / "given.yaml"
    path.write_text(MINIMAL)
    return load_config(str(path), [f"trainer.default_local_dir={root}", *overrides])


def test_first_start(tmp_path: Path) -> None:
    cfg = config(tmp_path, "rollout.n=3")
    record_start(cfg, "run1", 0)
    assert load_config(str(tmp_path / CONFIG_FILE)) == cfg
    (start,) = starts(tmp_path)
    assert (start["run_id"], start["after_step"], start["command"]) == (
        "run1",
        0,
        sys.orig_argv[:2],
    )
    assert (
        start["versions"]["torch"] == version("torch")
        and start["versions"]["python"] == sys.version.split()[0]
    )
    assert start["hosts"] == {socket.gethostname(): 1}
    assert start["config"]["rollout"]["n"] == 3 and "changed" not in start
    if (ROOT / ".git").exists():
        assert len(start["git"]["commit"]) == 40 and isinstance(start["git"]["has_changes"], bool)


def test_later_start_names_the_settings_that_changed(tmp_path: Path) -> None:
    record_start(config(tmp_path), "run1", 0)
    record_start(config(tmp_path, "rollout.n=2", "actor.optim.betas=[0.8,0.9]"), "run1", 7)
    first, second = starts(tmp_path)
    assert first["after_step"] == 0 and second["after_step"] == 7
    assert second["changed"] == {
        "rollout.n": [1, 2],
        "actor.optim.betas": [[0.9, 0.999], [0.8, 0.9]],
    }
    assert load_config(str(tmp_path / CONFIG_FILE)).rollout.n == 2


def test_incomplete_lines_are_left_out(tmp_path: Path) -> None:
    record_start(config(tmp_path), "run1", 0)
    with (tmp_path / STARTS_FILE).open("a") as file:
        file.write('[1]\n{"run_id": "ru')
    record_start(config(tmp_path), "run1", 1)
    assert [start["after_step"] for start in starts(tmp_path)] == [0, 1]
    assert all(json.loads(line) for line in (tmp_path / STARTS_FILE).read_text().splitlines())


def test_end_is_added_to_the_start_of_this_process(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    record_end(cfg, 0, 0, "failed", "nothing has started")
    assert starts(tmp_path) == []
    record_start(cfg, "run1", 0)
    record_end(cfg, 1, 3, "failed", "of another rank")
    assert "end" not in starts(tmp_path)[0]
    record_end(cfg, 0, 3, "stopped", "asked to stop")
    record_end(cfg, 0, 4, "failed", "a second end")
    (start,) = starts(tmp_path)
    assert {key: start["end"][key] for key in ("step", "how", "text")} == {
        "step": 3,
        "how": "stopped",
        "text": "asked to stop",
    }
    path = tmp_path / STARTS_FILE
    path.write_text(json.dumps({"run_id": "run1", "process": -1}) + "\n")
    record_end(cfg, 0, 4, "failed", "not recorded: another process's start")
    assert starts(tmp_path) == [{"run_id": "run1", "process": -1}]


@pytest.mark.slow
def test_report_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "critic/score/mean": 0.5}\n{"step": 2, "cri'
    )
    page = tmp_path / "report.html"
    for overrides in (("trainer.logger=[console]",), ("trainer.val_only=true",)):
        write_run_report(config(tmp_path, *overrides))
        assert not page.exists()
    record_start(config(tmp_path), "run1", 0)
    record_end(config(tmp_path), 0, 1, "stopped", "asked to stop")
    write_run_report(config(tmp_path))
    assert "stopped after step 1: asked to stop" in page.read_text()
    page.unlink()
    page.mkdir()
    write_run_report(config(tmp_path))
    assert "report.html cannot be written" in capsys.readouterr().err


def test_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    (tmp_path / CONFIG_FILE).mkdir()
    with pytest.raises(UserError, match=r"^trainer\.default_local_dir: .*resolved_config\.yaml"):
        record_start(cfg, "run1", 0)


def test_differences_of_sections_that_come_and_go() -> None:
    assert differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "d": 3}}) == {
        "c": [2, None],
        "a.d": [None, 3],
    }
    assert differences({"a": 1}, {"a": 1, "b": {"c": {"d": 2, "e": None}}}) == {"b.c.d": [None, 2]}
    assert differences({"a": {"b": 1}}, {"a": [1]}) == {"a.b": [1, None], "a": [None, [1]]}
    assert differences({"a": {"b": 1}}, {"a": None}) == {"a.b": [1, None]}


def test_differences_from_a_version_without_a_setting() -> None:
    """Check that such a version counts as one with the setting's default."""
    assert differences({"rollout": {}}, {"rollout": {"n": 1, "partial_rollout": True}}) == {
        "rollout.partial_rollout": [False, True]
    }
    assert differences({"data": {}}, {"data": {"train_files": ["a"]}}) == {
        "data.train_files": [None, ["a"]]
    }
