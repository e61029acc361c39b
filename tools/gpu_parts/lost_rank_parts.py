"""Ranks that are killed or stopped while the others are in a collective on the device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

from gpu_parts.processes import free_port
from gpu_parts.report import Report
from gpu_parts.sizes import Sizes
from rlhf_mc.runtime.exit_codes import EXIT_ERROR
from rlhf_mc.topology.consensus import gather_objects

TOOLS = Path(__file__).resolve().parents[1]
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
ENDS_WITHIN_SECONDS = 30.0
"""Time after the timeout of heartbeats within which the other ranks must have ended."""


def lost_ranks(report: Report, sizes: Sizes) -> None:
    """Start further processes of all ranks, which add tensors on the device. Kill, or stop, the
    last of them: the others must end with an error, of which one names the lost rank."""
    texts = []
    for kind in SIGNALS:
        with report.case(kind):
            texts.append(f"{kind}: {_lose(report, kind, sizes.timeout_seconds):.1f} s")
    report.summarize(
        f"the other ranks ended after {', '.join(texts)}; timeout of heartbeats "
        f"{sizes.timeout_seconds} s"
    )


def _lose(report: Report, kind: str, timeout: float) -> float:
    """Lose a rank in this way. Return the seconds after which the last of the others has ended."""
    rank = dist.get_rank()
    lost = dist.get_world_size() - 1
    env = {**os.environ, "MASTER_PORT": gather_objects(str(free_port()))[0]}
    env.pop("TORCHELASTIC_ERROR_FILE", None)  # torchrun would show the error as this process's
    env["PYTHONPATH"] = os.pathsep.join(
        [str(TOOLS.parent), str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    command = [sys.executable, "-m", "gpu_parts.lost_rank", str(timeout)]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        is_running = any(line == "running\n" for line in process.stdout)
        gather_objects(is_running)
        begin = time.monotonic()
        if rank == lost:
            process.send_signal(SIGNALS[kind])
        code = _exit_code(
            process, timeout + ENDS_WITHIN_SECONDS if rank != lost or kind == "killed" else 0.0
        )
        seconds = time.monotonic() - begin
        gather_objects(None)  # the stopped rank stays until the others have ended
    finally:
        process.kill()
        text = process.communicate()[0]
    print(text)
    report.check(is_running, f"{kind}: rank {rank} has ended before its first sum")
    wanted = EXIT_ERROR if rank != lost else (-signal.SIGKILL if kind == "killed" else None)
    report.check(
        code == wanted, f"{kind}: the process of rank {rank} ended with {code}, not {wanted}"
    )
    ended = gather_objects((seconds, text))[:lost]
    named = any(f"rank {lost} " in line or "lost contact" in line for _, line in ended)
    report.check(named or not ended, f"{kind}: no rank names rank {lost}")
    slowest = max((one for one, _ in ended), default=0.0)
    report.record(**{f"{kind}_ended_after_s": slowest})
    return slowest


def _exit_code(process: subprocess.Popen[str], seconds: float) -> int | None:
    """Return the exit code of a process; None if it has not ended within the seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
