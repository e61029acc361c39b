"""The part about profiles of single steps (rlhf_mc/observability/profile.py)."""

from __future__ import annotations

import gzip
import json
import pickle
import time
from pathlib import Path
from typing import Any

from gpu_parts.engines import (
    mesh_groups,
    random_engine,
    shared_directory,
    token_batch,
    train_once,
    with_targets,
)
from gpu_parts.report import Report
from gpu_parts.sizes import Sizes
from rlhf_mc import platform
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.observability.phase_work import recorded
from rlhf_mc.observability.profile import Trace

BUDGET = 1024
IDLE = 0.05
"""Seconds for which the host leaves the device without work."""
RANGES = {"update_actor", "pack", "forward", "backward", "grad_norm", "optimizer_step"}


def profile(report: Report, sizes: Sizes) -> None:
    """Take an optimizer step without profile, and one with. The trace must have the named ranges,
    on a GPU kernels, and the allocator's history blocks; the times of communication must lie inside
    the phase."""
    _check_marks(report)
    with mesh_groups(1, 1) as groups, shared_directory() as root:
        engine = random_engine(sizes.trained, groups)
        batch = with_targets(
            engine, token_batch(engine.shape.vocab_size, sizes.prompt_lens, sizes.response_lens)
        )
        train_once(engine, batch, BUDGET)
        plain = PhaseTimer(platform.synchronize)
        with plain.phase("update_actor"):
            train_once(engine, batch, BUDGET)
        trace = Trace(["memory", "shapes"])
        timer = PhaseTimer(platform.synchronize)
        trace.start()
        with recorded() as work, timer.phase("update_actor"):
            train_once(engine, batch, BUDGET)
        begin = time.perf_counter()
        path = root / f"rank_{groups.rank}.json.gz"
        trace.write(path)
        written = time.perf_counter() - begin
        size = path.stat().st_size
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        _check_history(report, path.with_name(f"rank_{groups.rank}_memory.pickle"))
    (without,) = plain.result().values()
    (seconds,) = timer.result().values()
    waiting = work.waiting["update_actor"]
    report.check(0 <= waiting <= seconds, f"{waiting} s of waiting in a phase of {seconds} s")
    report.check(work.amounts["update_actor"]["tokens"] > 0, "no tokens are counted")
    _check_events(report, events)
    slower = seconds / without
    report.record(
        trace_mb=size / 1e6, events=len(events), write_s=written, slower=slower, waiting_s=waiting
    )
    report.summarize(
        f"a step traced takes {slower:.2f}x the time, its {len(events)} events {size / 1e6:.2g} MB "
        f"and {written:.1f} s to write; {waiting:.3f} s of {seconds:.3f} s in collectives"
    )


def _check_marks(report: Report) -> None:
    """Check the marks of time around a device that has nothing to do."""
    platform.synchronize()
    start = platform.time_mark()
    time.sleep(IDLE)
    end = platform.time_mark()
    platform.synchronize()
    measured = platform.seconds_between(start, end)
    report.check(
        0.9 * IDLE < measured < 20 * IDLE,
        f"an idle time of {IDLE} s is measured as {measured:.4f} s",
    )


def _check_events(report: Report, events: list[dict[str, Any]]) -> None:
    ranges = {
        event["name"]
        for event in events
        if event.get("cat") in ("user_annotation", "gpu_user_annotation")
    }
    missing = sorted(RANGES - ranges)
    report.check(not missing, f"the trace lacks {', '.join(missing)}")
    kinds = {event.get("cat") for event in events}
    wanted = {"cpu_op", "cpu_instant_event"} | (
        {"kernel", "gpu_memcpy"} if platform.use_cuda() else set()
    )
    report.check(wanted <= kinds, f"the trace has no events of {', '.join(sorted(wanted - kinds))}")


def _check_history(report: Report, path: Path) -> None:
    """Check the allocator's history, which only a GPU has."""
    if not platform.use_cuda():
        report.check(not path.exists(), "a history of the allocator without a GPU")
        return
    history = pickle.loads(path.read_bytes())
    entries = sum(len(trace) for trace in history["device_traces"])
    report.check(bool(history["segments"]) and entries > 0, "the allocator's history is empty")
    report.record(allocations=entries)
