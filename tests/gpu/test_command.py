"""The command tools/gpu_check.py on the CPU: its table, its file, its exit codes, on one rank and
on two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import gpu_check
import pytest
from gpu_parts import catalog, processes
from gpu_parts.report import PASSED, Result

from rlhf_mc.topology import rendezvous

COMMAND = str(Path(__file__).parents[2] / "tools" / "gpu_check.py")

pytestmark = pytest.mark.system


def check(world: int, output: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Run the command. Return its exit code, its output and the content of its file."""
    command = [COMMAND, "--device", "cpu", "--output", str(output), *arguments]
    done = forked.run(command) if world == 1 else forked.run_ranks(world, command)
    return (
        done.returncode,
        done.stdout + done.stderr,
        json.loads(output.read_text()) if output.exists() else {},
    )


def rows(text: str) -> dict[str, list[str]]:
    """Return verdict, seconds and the rest of each row of the table, by the part's name."""
    lines = (line.split(maxsplit=2) for line in text.splitlines())
    return {
        line[0]: line[1:]
        for line in lines
        if len(line) > 2 and line[1] in ("passed", "failed", "skipped")
    }


def test_every_part_has_a_verdict_of_its_own(tmp_path: Path) -> None:
    names = ["timeouts", "checksums"]
    code, text, found = check(1, tmp_path / "out.json", "--parts", ",".join(names))
    assert code == 0, text
    assert list(rows(text)) == names == list(found["parts"])
    assert (
        found["parts"]["timeouts"]["verdict"] == "skipped"
        and "two ranks" in rows(text)["timeouts"][1]
    )
    assert found["parts"]["checksums"]["figures"]["gb_per_s"] > 0
    assert found["versions"]["torch"] and found["device"] == "cpu" and found["small"]


def test_a_part_that_does_not_end_is_stopped_and_the_next_runs(tmp_path: Path) -> None:
    code, text, found = check(
        1, tmp_path / "out.json", "--parts", "machine,timeouts", "--time-limit", "0.2"
    )
    assert code == 1
    assert found["parts"]["machine"]["reason"] == "not done after 0.2 s"
    assert found["parts"]["timeouts"]["verdict"] == "skipped"
    assert (
        "machine failed: not done after 0.2 s" in text and "0 passed, 1 failed, 1 skipped" in text
    )


def test_a_part_of_rank_0_alone_waits_for_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[float] = []
    ran: list[str] = []
    monkeypatch.setattr(rendezvous, "init_process_group", joined.append)
    monkeypatch.setattr(
        catalog.Part, "function", lambda part: lambda report, sizes: ran.append(part.name)
    )
    for name in ("quickstart", "machine"):
        processes._run_connected(catalog.find(name), None, None)
    assert ran == ["quickstart", "machine"] and joined == [catalog.find("machine").seconds]


def test_a_part_that_is_stopped_shows_where_it_was() -> None:
    code = (
        "from gpu_parts.processes import *; show_stack_when_stopped(); print(flush=True); "
        "time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(COMMAND).parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.terminate()
        log = process.communicate()[1]
    assert process.returncode == -signal.SIGTERM
    assert "Current thread 0x" in log and 'File "<string>", line 1' in log


def test_two_ranks_run_a_part_together(tmp_path: Path) -> None:
    code, text, found = check(2, tmp_path / "out.json", "--parts", "machine,process_groups")
    assert code == 0, text
    assert found["ranks"] == 2 and text.count("machine ") == 1
    assert [part["verdict"] for part in found["parts"].values()] == ["passed"] * 2


def test_a_gpu_that_torch_does_not_see_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = forked.run([COMMAND, "--device", "cuda"])
    assert done.returncode == 2
    assert (
        done.stdout
        == "--device cuda: torch sees no GPU here (torch.cuda.is_available() is False)\n"
    )


def test_an_unknown_part_is_named(tmp_path: Path) -> None:
    code, text, _ = check(1, tmp_path / "out.json", "--parts", "machine,bogus")
    assert code == 2 and "unknown part 'bogus'" in text


def test_what_no_gpu_has_been_measured_for_is_a_line_below_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--parts", "machine,checksums", "--output", str(output)]
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # of a world that another test has made here
    monkeypatch.setattr(sys, "argv", [COMMAND, *arguments])
    found = {
        "machine": Result(PASSED, unmeasured=["3 waits, none is expected"]),
        "checksums": Result(PASSED),
    }
    monkeypatch.setattr(processes, "run_part", lambda part, *others: found[part.name])
    assert gpu_check.main() == 0
    text = capsys.readouterr().out
    assert "\nmachine: 3 waits, none is expected (not measured yet on a GPU)\n" in text
    assert text.count("not measured yet") == 1 and "2 passed, 0 failed" in text
    assert json.loads(output.read_text())["parts"]["machine"]["unmeasured"] == [
        "3 waits, none is expected"
    ]
