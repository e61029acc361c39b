"""A part in a process of its own on every rank: an error of CUDA ends that process alone, and a
part that does not end is stopped. The ranks of one part are connected by a rendezvous of their own,
which the parents arrange."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from gpu_parts.catalog import Part
from gpu_parts.report import FAILED, PASSED, SKIPPED, Result

LOG_CHARACTERS = 20_000
"""Number of characters of a part's output that are kept, from its end."""
GRACE_SECONDS = 15.0
"""Time that the other ranks of a part have to end after one has failed."""
_STOP_SECONDS = 10.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ranks:
    """The parents, one per rank. Without torchrun there is one."""

    rank: int = 0
    world: int = 1
    store: Any = None
    """torch's store of the parents; None for one rank."""

    @staticmethod
    def join() -> Ranks:
        """Return the ranks that torchrun has started, or this process alone."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return Ranks()
        import torch.distributed as dist

        rank = int(os.environ["RANK"])
        is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        at = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store = dist.TCPStore(
            *at, world, is_master=is_host, wait_for_workers=False, multi_tenant=True
        )
        return Ranks(rank, world, dist.PrefixStore("gpu_check", store))

    def share(self, key: str, value: Callable[[], str]) -> str:
        """Return the value that rank 0 computes, on every rank."""
        if self.store is None:
            return value()
        if self.rank == 0:
            self.store.set(key, value())
        return str(self.store.get(key).decode())

    def gather(self, key: str, value: str, seconds: float) -> list[str]:
        """Return the value of every rank, in rank order. Wait at most `seconds` for one."""
        if self.store is None:
            return [value]
        self.store.set(f"{key}/{self.rank}", value)
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        self.store.wait(keys, timedelta(seconds=seconds))
        values = [self.store.get(other).decode() for other in keys]
        self.store.set(f"{key}/read/{self.rank}", "")
        if self.rank == 0:  # with its process the store may end, which others still read
            self.store.wait(
                [f"{key}/read/{rank}" for rank in range(self.world)], timedelta(seconds=seconds)
            )
        return values

    def fail(self, key: str) -> None:
        """Tell all ranks that one has failed."""
        if self.store is not None:
            self.store.set(f"{key}/failed", "")

    def has_failed(self, key: str) -> bool:
        """Return whether a rank has failed."""
        return self.store is not None and bool(self.store.check([f"{key}/failed"]))


def free_port() -> int:
    """Return a port of this machine that is free at this time."""
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def run_part(part: Part, ranks: Ranks, command: list[str], device: str, limit: float) -> Result:
    """Run the part on all ranks. Return the joint result, on every rank.

    command: the program that runs the part given as its last argument but one, and writes the
    result to the last."""
    port = ranks.share(f"{part.name}/port", lambda: str(free_port()))
    start = time.monotonic()
    result = (
        Result(PASSED)
        if part.rank_0_only and ranks.rank
        else _run_here(part, ranks, command, device, limit, port)
    )
    result.seconds = time.monotonic() - start
    texts = ranks.gather(
        f"{part.name}/result", json.dumps(asdict(result)), limit + 2 * GRACE_SECONDS
    )
    return _join([Result(**json.loads(text)) for text in texts])


def _run_here(
    part: Part, ranks: Ranks, command: list[str], device: str, limit: float, port: str
) -> Result:
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as directory:
        path = Path(directory) / "result.json"
        log = Path(directory) / "log"
        env = _environment(ranks, device, port, directory)
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, part.name, str(path)],
                env=env,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                stopped = _wait(process, part.name, ranks, limit)
            finally:
                _stop(process)
        result = Result(**json.loads(path.read_text())) if path.exists() else Result()
        result.log = log.read_text(errors="replace")[-LOG_CHARACTERS:]
    if stopped or process.returncode != 0:
        reason = stopped or f"its process ended with {_exit_name(process.returncode)}"
        result.reason = "; ".join(filter(None, [result.reason, reason]))
        result.verdict = FAILED
    if result.verdict == FAILED:
        ranks.fail(part.name)
    return result


def _environment(ranks: Ranks, device: str, port: str, directory: str) -> dict[str, str]:
    """Return the environment of the part's process: the one of this process, with the rendezvous of
    the part."""
    env = {
        **os.environ,
        "RANK": str(ranks.rank),
        "WORLD_SIZE": str(ranks.world),
        "MASTER_PORT": port,
    }
    env.setdefault("LOCAL_RANK", "0")
    env.setdefault("MASTER_ADDR", "localhost")
    env["TMPDIR"] = directory
    env["PYTHONPATH"] = os.pathsep.join(
        [str(_ROOT), str(_ROOT / "tools"), *filter(None, [env.get("PYTHONPATH")])]
    )
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"):
        env.pop(name, None)
    env |= {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
    # As in launch/env.sh. torchrun sets 1: a collective that has timed out then returns before its
    # process is ended.
    env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    if device == "cpu":
        env["RLHF_MC_DEVICE"] = "cpu"
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


def _wait(process: subprocess.Popen[bytes], name: str, ranks: Ranks, limit: float) -> str:
    """Wait for the process. Return the reason for which it has to be stopped; empty if it has
    ended."""
    deadline = time.monotonic() + limit
    others_failed = False
    while process.poll() is None:
        if time.monotonic() > deadline:
            if others_failed:
                return "stopped, since another rank had failed"
            return f"not done after {limit:g} s"
        if not others_failed and ranks.has_failed(name):
            others_failed = True
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.1)
    return ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it has started: first by a signal that lets a launcher end its
    ranks."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _exit_name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _join(results: list[Result]) -> Result:
    """Return the figures of rank 0, with the verdict of all ranks."""
    first = results[0]
    failed = [(rank, result) for rank, result in enumerate(results) if result.verdict == FAILED]
    if not failed:
        return first
    own = [
        (rank, result) for rank, result in failed if "another rank" not in result.reason
    ] or failed
    several = len(results) > 1
    reason = "; ".join(
        f"rank {rank}: {result.reason}" if several else result.reason for rank, result in own
    )
    seconds = max(result.seconds for result in results)
    return Result(
        FAILED, reason, seconds, first.summary, first.figures, first.unmeasured, own[0][1].log
    )


def run_in_this_process(part: Part, path: Path, sizes: Any) -> None:
    """Run the part as one rank of those that the environment describes, and end this process."""
    show_stack_when_stopped()
    for name in part.hides:
        sys.modules[name] = None  # type: ignore[assignment]
    if part.exact_float32:
        from rlhf_mc.runtime.cuda_environment import forbid_tf32

        forbid_tf32(("float32",))  # before torch is imported
    if not part.hides:
        from rlhf_mc.models.transformer_engine import import_transformer_engine

        import_transformer_engine()  # before Megatron-Core, as a run does
    from gpu_parts.report import Report

    report = Report(path)
    with report.verdict():
        _run_connected(part, report, sizes)
    if report.result.verdict != FAILED:
        import torch.distributed as dist

        if dist.is_initialized() and report.result.verdict != SKIPPED:
            dist.barrier()  # rank 0 hosts the store of the others
    sys.stdout.flush()
    sys.stderr.flush()
    # At its end an interpreter would wait for threads of libraries.
    os._exit(0)


def show_stack_when_stopped() -> None:
    """Let SIGTERM print the stacks of all threads before it ends this process, also where it waits
    in a library."""
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)


def _run_connected(part: Part, report: Any, sizes: Any) -> None:
    from rlhf_mc.runtime.determinism import use_deterministic_algorithms
    from rlhf_mc.topology.rendezvous import init_process_group

    if part.deterministic:
        use_deterministic_algorithms()
    if not part.rank_0_only:  # the other ranks run no process
        init_process_group(part.seconds)
    part.function()(report, sizes)
