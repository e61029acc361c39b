"""tests/fake_gpu/lock.py without the installation: folders that it leaves alone, and its line after
a difference."""

from __future__ import annotations

import sys
from pathlib import Path

import lock
import lock_config
import pytest


def test_every_shipped_config_has_a_model() -> None:
    configs = {path.stem for path in (lock_config.ROOT / "configs").glob("*.yaml")}
    assert lock_config.MODELS.keys() == configs


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lock.py", *arguments])
    return lock.main()


def test_a_folder_of_the_users_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyvenv.cfg").write_text("another environment")
    assert run_main(monkeypatch, "--environment", str(tmp_path)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path} is not empty") and line.endswith(
        "give another folder"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["pyvenv.cfg"]


@pytest.mark.parametrize(
    ("body", "status", "line"),
    [
        ("print('part | as expected')", 0, None),
        (
            "raise AssertionError('part: 1 in place of 2')",
            1,
            "error: {program}: part: 1 in place of 2",
        ),
        ("import sys; sys.exit('no module')", 1, "error: {program}: no module"),
    ],
)
def test_the_first_difference_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    body: str,
    status: int,
    line: str | None,
) -> None:
    program = tmp_path / "check.py"
    program.write_text(body)
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    (environment / "lib" / "python3.12" / "site-packages").mkdir(parents=True)
    monkeypatch.setattr(lock, "install", lambda environment, python: None)
    monkeypatch.setattr(lock, "stub_of_the_driver", lambda environment: tmp_path)
    monkeypatch.setattr(lock, "CHECKS", {"one": ([str(program)], {}), "two": ([str(program)], {})})
    assert run_main(monkeypatch, "--environment", str(environment), "--only", "one,two") == status
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ([] if line is None else [line.format(program=program)])
    # the last line says so of the lock
    assert printed.out.count("as expected") == (3 if status == 0 else 0)
