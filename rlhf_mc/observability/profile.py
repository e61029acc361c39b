"""Profiles of single steps (the section profile of the config): Chrome traces of some ranks by
torch.profiler, and the table of all ranks' times, which is in phase_table.py.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from torch.profiler import profile

from rlhf_mc import platform
from rlhf_mc.config.schema import Config
from rlhf_mc.observability import phase_table, phase_work
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.observability.phase_work import PhaseWork
from rlhf_mc.observability.sinks import best_effort
from rlhf_mc.run_files import PROFILE
from rlhf_mc.runtime.console import print_line
from rlhf_mc.runtime.rank_status import WRITE_PROFILE
from rlhf_mc.topology.consensus import gather_objects
from rlhf_mc.topology.groups import ProcessGroups, barrier

PHASES_FILE = "phases.json"
_HEARTBEAT_SECONDS = 0.1
"""Time for the heartbeat thread to report a phase."""


def warn_of_unreached(cfg: Config, done: int, last: int) -> None:
    """Print a warning on rank 0 if profile.steps has steps that this start does not reach and no
    earlier one has profiled. done: steps that were done before this start. last: the last step of
    the run."""
    root = Path(cfg.trainer.default_local_dir, PROFILE)
    unreached = [step for step in cfg.profile.steps if not done < step <= last]
    unreached = [step for step in unreached if not (root / f"step_{step}" / PHASES_FILE).exists()]
    if unreached:
        does = f"runs steps {done + 1} to {last}" if last > done else "runs no step"
        print_line(
            f"warning: profile.steps has {', '.join(map(str, unreached))}; this start {does}",
            rank_0_only=True,
        )


@contextlib.contextmanager
def profiled(cfg: Config, step: int, timer: PhaseTimer, groups: ProcessGroups) -> Iterator[None]:
    """Profile the step of the body, whose phases `timer` times, if profile.steps has it. Every rank
    must call it: a profiled step ends with an exchange of the ranks' times. groups: the actor's.

    Nothing is written of a step that raises."""
    if step not in cfg.profile.steps:
        yield
        return
    is_traced = cfg.profile.ranks is None or groups.rank in cfg.profile.ranks
    trace = Trace(cfg.profile.contents) if is_traced else None
    with _recorded(trace) as work:
        start = time.perf_counter()
        yield
        span = time.perf_counter() - start
    with timer.phase(WRITE_PROFILE):
        # No rank may fall silent before all ranks are in this phase, and have told one another by
        # heartbeats.
        barrier()
        time.sleep(_HEARTBEAT_SECONDS)
        path = Path(PROFILE, f"step_{step}")
        root = Path(cfg.trainer.default_local_dir)
        if trace is not None:
            name = path / f"rank_{groups.rank}.json.gz"
            best_effort(str(name), lambda: trace.write(root / name))
        seconds = {key.removeprefix("timing_s/"): value for key, value in timer.result().items()}
        times = phase_table.RankTimes(
            socket.gethostname(), is_traced, seconds, dict(work.waiting), dict(work.amounts)
        )
        ranks = gather_objects(phase_table.with_rest(times, phase_work.WHOLE, span))
        if groups.rank == 0:
            best_effort(
                str(path / PHASES_FILE), lambda: _write_json(root / path / PHASES_FILE, step, ranks)
            )
            if "console" in cfg.trainer.logger:
                print_line("\n".join(phase_table.as_text(step, ranks)), sys.stdout)


@contextlib.contextmanager
def _recorded(trace: Trace | None) -> Iterator[PhaseWork]:
    """Record the body's work, and its trace, if any, which then waits for `write`."""
    if trace is not None:
        trace.start()
    try:
        with phase_work.recorded() as work:
            yield work
    except BaseException:  # raised again, once the trace has ended
        if trace is not None:
            trace.stop()
        raise


def _write_json(path: Path, step: int, ranks: list[phase_table.RankTimes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(phase_table.as_json(step, ranks), indent=1) + "\n")


class Trace:
    """A trace of this rank by torch.profiler."""

    def __init__(self, contents: Collection[str]) -> None:
        """contents: of profile.contents."""
        self._with_memory = "memory" in contents
        self._profiler = profile(
            activities=platform.traced_activities(),
            record_shapes="shapes" in contents,
            profile_memory=self._with_memory,
            with_stack="stack" in contents,
        )

    def start(self) -> None:
        """Begin to record."""
        if self._with_memory:
            platform.record_allocations()
        self._profiler.start()

    def stop(self) -> None:
        """End the recording. For a large trace this takes minutes, in which no other Python thread
        runs."""
        platform.synchronize()
        self._profiler.stop()
        if self._with_memory:
            platform.stop_allocations()

    def write(self, path: Path) -> None:
        """Stop, and write the trace to <path> (.json.gz), and the allocator's history, if any,
        beside it. Raise OSError if there is no room."""
        stem = path.name.removesuffix(".json.gz")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._with_memory:
                platform.write_allocations(path.with_name(f"{stem}_memory.pickle"))
        finally:
            self.stop()
        with tempfile.TemporaryDirectory(prefix=f".{stem}_", dir=path.parent) as scratch:
            plain = Path(scratch, "trace.json")
            self._profiler.export_chrome_trace(str(plain))
            _check_complete(plain)
            packed = Path(scratch, path.name)
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            os.replace(packed, path)


def _check_complete(path: Path) -> None:
    """Raise OSError if the trace is absent or truncated: torch does not raise where a disk is
    full."""
    size = path.stat().st_size if path.exists() else 0
    if size:
        with path.open("rb") as file:
            file.seek(max(0, size - 16))
            if file.read().rstrip().endswith(b"}"):
                return
    raise OSError(errno.ENOSPC, "no room for the trace, or it may not be written")
