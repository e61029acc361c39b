"""Stop requests: signals, the grace period, and the end of the job. The agreement of ranks is
tested in tests/dist/test_heartbeat.py, a whole preempted run in tests/system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import TrainerConfig
from rlhf_mc.run_directory.lock import Lock
from rlhf_mc.runtime import preemption
from rlhf_mc.runtime.preemption import StopRequested, StopRequests, job_end
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import lifecycle, loop
from rlhf_mc.trainer.save import CheckpointSaver
from rlhf_mc.trainer.step_state import Position

pytestmark = pytest.mark.slow

PROGRAM = """
import subprocess, sys, time
from rlhf_mc.config.schema import TrainerConfig
from rlhf_mc.runtime.preemption import StopRequests

stop = StopRequests(TrainerConfig("runs/x", preemption_grace_seconds=1))
stop.take_signals()
helper = subprocess.Popen(["sleep", "600"])
print(helper.pid, flush=True)
time.sleep(600)
"""


UNBLOCKED = (
    "import signal; signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])\n"
)
"""Signal mask after multiprocessing's resource tracker has started."""


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("SIGTERM", ""),
        ("SIGUSR1", ""),
        ("SIGINT", ""),
        ("SIGTERM", UNBLOCKED),
        ("SIGINT", UNBLOCKED),
    ],
    ids=["SIGTERM", "SIGUSR1", "SIGINT", "SIGTERM, unblocked", "SIGINT, unblocked"],
)
def test_process_exits_after_the_grace_period_and_its_helpers_survive(
    name: str, extra: str, tmp_path: Path
) -> None:
    program = PROGRAM.replace("print(helper", extra + "print(helper")
    env = {**os.environ, "RLHF_MC_EXIT_CODE_FILE": str(tmp_path / "code"), "RANK": "0"}
    # The signals are ignored until the program starts, as in launch/slurm_rank.sh.
    command = ["bash", "-c", 'trap \'\' USR1 TERM; exec "$0" -c "$1"', sys.executable, program]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    helper = int(process.stdout.readline())
    try:
        start = time.monotonic()
        os.kill(helper, getattr(signal, name))  # as Slurm does to every process of a step
        process.send_signal(getattr(signal, name))
        assert process.wait(500) == 75
        assert time.monotonic() - start > 0.9
        assert Path(f"/proc/{helper}/stat").read_text().split()[2] == "S"  # still asleep
    finally:
        os.kill(helper, signal.SIGKILL)
    line = f"rlhf_mc: error on rank 0: asked to stop ({name}) and not ready after 1 s"
    assert process.stderr.read().splitlines()[-1].startswith(line)
    assert (tmp_path / "code").read_text() == "75\n"


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"], ids=["by itself", "by torchrun"])
def test_second_ctrl_c_ends_the_process_at_once(second: str, tmp_path: Path) -> None:
    env = {**os.environ, "RLHF_MC_EXIT_CODE_FILE": str(tmp_path / "code"), "RANK": "0"}
    program = PROGRAM.replace("grace_seconds=1", "grace_seconds=600").replace(
        '["sleep", "600"]', '["true"]'
    )
    one_press = 3.0
    program = program.replace(
        "\nstop =",
        "\nfrom rlhf_mc.runtime import preemption; preemption.ONE_PRESS_SECONDS = "
        f"{one_press}\nstop =",
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", program], env=env, text=True, **pipes)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert "interrupted: saving, then ending" in process.stderr.readline()
    process.send_signal(signal.SIGINT)  # torchrun repeats the signal of the same Ctrl-C
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(one_press + 0.2)
    process.send_signal(getattr(signal, second))
    assert process.wait(500) == 130
    assert process.stderr.read() == "" and (tmp_path / "code").read_text() == "130\n"


def test_ctrl_c_works_with_a_closed_stderr(tmp_path: Path) -> None:
    """Cover `... 2>&1 | tee log`, where Ctrl-C ends tee as well."""
    program = PROGRAM.replace("print(helper.pid, flush=True)", "helper.kill(); print(flush=True)")
    env = {**os.environ, "RLHF_MC_EXIT_CODE_FILE": str(tmp_path / "code"), "RANK": "0"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", program], env=env, text=True, **pipes)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(500) == 75
    finally:
        process.kill()
    assert (tmp_path / "code").read_text() == "75\n"


def test_unrelated_signal_is_not_a_stop_request(tmp_path: Path) -> None:
    """Raise a signal that Python handles, such as a library's timer: it also wakes the thread that
    waits for stops."""
    timer = (
        "import signal; signal.signal(signal.SIGVTALRM, lambda *at: None); "
        "signal.raise_signal(signal.SIGVTALRM)"
    )
    program = PROGRAM.replace(
        "print(helper.pid, flush=True)", f"helper.kill(); {timer}; time.sleep(3); sys.exit(7)"
    )
    env = {**os.environ, "RLHF_MC_EXIT_CODE_FILE": str(tmp_path / "code"), "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=500
    )
    assert (done.returncode, done.stderr) == (7, "")


def test_background_job_of_a_shell_ignores_ctrl_c() -> None:
    command = ["bash", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, PROGRAM]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    helper = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    for pid in (helper, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def requests(**settings: float) -> StopRequests:
    # A long grace period, because its timer would end the test process.
    return StopRequests(TrainerConfig("runs/x", preemption_grace_seconds=10**6, **settings))  # type: ignore[arg-type]


def test_first_stop_reason_is_kept() -> None:
    stop = requests()
    stop.check()  # no request yet
    stop.request("SIGUSR1")
    stop.request("SIGTERM")
    with pytest.raises(StopRequested, match=r"^SIGUSR1$"):
        stop.check()


def test_job_end_is_read_from_the_environment_or_squeue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    assert job_end() is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\n[ "$2" = --jobs=7 ] && cat "$(dirname "$0")/answer"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "answer").write_text("2030-01-02T03:04:05\n")
    assert job_end() == time.mktime((2030, 1, 2, 3, 4, 5, 0, 0, -1))
    (tmp_path / "answer").write_text("N/A\n")
    assert job_end() is None
    (tmp_path / "answer").write_text("slurm_load_jobs error\n")
    with pytest.raises(UserError, match="does not tell when the job ends"):
        job_end()
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1234")
    assert job_end() == 1234


def test_run_stops_before_the_end_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(preemption, "job_end", lambda: now + 601)
    stop = requests(stop_before_minutes=10)
    stop.read_job_end()
    stop.check()
    stop.steps_done = 1
    monkeypatch.setattr(time, "time", lambda: now + 2)
    with pytest.raises(
        StopRequested, match=r"the job's time is almost up, trainer.stop_before_minutes is 10"
    ):
        stop.check()


def test_job_too_short_for_one_step_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(preemption, "job_end", lambda: now + 600)
    with pytest.raises(
        UserError, match=r"stop_before_minutes is 11, but the job ends in 10.0 minutes"
    ):
        requests(stop_before_minutes=11).read_job_end()
    stop = requests(stop_before_minutes=9.99)
    stop.read_job_end()
    monkeypatch.setattr(time, "time", lambda: now + 2)
    with pytest.raises(UserError, match="no step was complete by then"):
        stop.check()


@pytest.mark.parametrize(
    ("saved", "line"),
    [
        (
            None,
            (
                "no step is complete yet, so none is saved; the run begins anew, as another run, "
                "when it is started again"
            ),
        ),
        (
            2,
            (
                "the checkpoint of step 2 is complete; the run resumes from there when it is "
                "started again"
            ),
        ),
        (
            0,
            (
                "the checkpoint of step 0 is complete; the run resumes from there when it is "
                "started again"
            ),
        ),
    ],
)
def test_a_stopped_run_says_what_the_next_start_does(
    monkeypatch: pytest.MonkeyPatch, saved: int | None, line: str
) -> None:
    said: list[str] = []
    saver = CheckpointSaver.__new__(CheckpointSaver)
    saver._saved = saved
    saver.position = Position(step=saved or 0)
    monkeypatch.setattr(lifecycle, "saved_models", lambda run: [])
    monkeypatch.setattr(lifecycle, "lock_directory", lambda cfg: Lock(Path(cfg.default_local_dir)))
    monkeypatch.setattr(lifecycle, "CheckpointSaver", lambda run, models, lock: saver)
    monkeypatch.setattr(CheckpointSaver, "save_last_step", lambda self, timer: None)
    monkeypatch.setattr(lifecycle, "record_end", lambda *arguments: None)
    monkeypatch.setattr(lifecycle, "print_on_console", lambda run, text: said.append(text))

    def remaining_steps(life: lifecycle.Lifecycle) -> Iterator[int]:
        raise StopRequested("SIGTERM")
        yield

    monkeypatch.setattr(lifecycle.Lifecycle, "remaining_steps", remaining_steps)
    config = SimpleNamespace(trainer=TrainerConfig("runs/x"))
    run: Any = SimpleNamespace(config=config, groups=SimpleNamespace(rank=0), trains=True)
    assert list(loop.steps(run, RankStatus(), StopRequests(config.trainer))) == []
    assert said == [f"asked to stop (SIGTERM): {line}"]
