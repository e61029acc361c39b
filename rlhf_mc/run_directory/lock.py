"""The lock by which one run at a time writes to a directory: a file that names the owner, a
process, which touches the file for as long as it lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_mc import json_files
from rlhf_mc.config.errors import UserError, disk_errors
from rlhf_mc.run_files import LOCK_FILE, STALE_SECONDS
from rlhf_mc.runtime.console import print_line
from rlhf_mc.runtime.namespaces import namespace_id
from rlhf_mc.topology.consensus import on_rank_0

TOUCH_SECONDS = 10.0
_LOOK_SECONDS = 1.0
_ATTEMPTS = 5
"""Attempts to read the lock, _LOOK_SECONDS apart, before an error of the file server ends a run."""


@dataclass(frozen=True)
class Owner:
    """The process that holds the lock of a directory."""

    host: str
    pid: int
    started: str
    """Start of the process in clock ticks since the machine's boot: process numbers are used
    again."""
    pid_namespace: str
    """The machine's boot and the namespace of `pid`: containers share host names and process
    numbers."""
    job: str
    """Number of the Slurm job, or empty."""
    restarts: int
    """Number of times that Slurm has requeued the job."""

    @classmethod
    def this_process(cls) -> Owner:
        """Build the Owner that stands for this process."""
        pid = os.getpid()
        job = os.environ.get("SLURM_JOB_ID", "")
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return cls(
            socket.gethostname(), pid, _start_time(pid) or "", namespace_id("pid"), job, restarts
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f", job {self.job}" if self.job else "")


def check_free(root: Path) -> None:
    """Raise UserError on every rank if another live run holds the directory.

    An owner on another machine is watched until it touches the lock (then it is alive), or has not
    touched it for STALE_SECONDS. Every rank must call it."""
    lock = Lock(root)
    unknown_owner = on_rank_0(lock.look, "trainer.default_local_dir")
    if unknown_owner is not None:
        print_line(f"{unknown_owner}; waiting to see whether it touches its lock", rank_0_only=True)
    while unknown_owner is not None:
        time.sleep(_LOOK_SECONDS)
        unknown_owner = on_rank_0(lock.look, "trainer.default_local_dir")


class Lock:
    """The lock of one directory, held from `take` to `release`, or to the end of the process."""

    def __init__(self, root: Path) -> None:
        self._path = root / LOCK_FILE
        self._owner = Owner.this_process()
        self._released = threading.Event()
        self._seen: tuple[Owner, float] | None = None

    def look(self) -> str | None:
        """Return a message if the owner may be dead or alive, None if the directory is free. Raise
        UserError if the owner is alive: its process is on this machine, or it has touched the lock
        since the last look."""
        owner = self._read()
        if owner is None or self._is_dead(owner, self._age()):
            return None
        seen = self._seen
        self._seen = (owner, self._touched())
        if self._is_on_this_machine(owner) or (seen is not None and seen != self._seen):
            self._find_dead_owner()
        return f"{self._path.parent} belongs to another run: {owner}"

    def take(self) -> None:
        """Take the lock. Raise UserError if another live run holds the directory, or it cannot be
        written to."""
        with disk_errors(f"trainer.default_local_dir: {self._path} cannot be written"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if (dead := self._find_dead_owner()) is not None:
                self._remove(dead)
            self._create()
        threading.Thread(target=self._touch, name="run lock", daemon=True).start()

    def release(self) -> None:
        """Remove the lock, if this process holds it."""
        self._released.set()
        with contextlib.suppress(OSError):
            if self._read() == self._owner:
                self._path.unlink()

    def check_still_ours(self) -> None:
        """Raise UserError if another run has taken the directory over, as it may after this process
        was frozen for STALE_SECONDS. Raise OSError if the lock cannot be read in _ATTEMPTS
        attempts. A removed lock is made again."""
        for attempt in range(_ATTEMPTS):
            try:
                if (owner := self._read()) is None:
                    self._create()
                    owner = self._owner
                break
            except OSError:
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_LOOK_SECONDS)
        if owner != self._owner:
            raise UserError(
                f"trainer.default_local_dir: {self._path.parent} was taken over by {owner} while "
                "this run was frozen; nothing more is written there"
            )

    def _find_dead_owner(self) -> Owner | None:
        """Return the dead owner that has left its lock behind, or None without a lock. Raise
        UserError if the owner is alive."""
        owner = self._read()
        if owner is None:
            return None
        age = self._age()
        if self._is_dead(owner, age):
            return owner
        touched = (
            f" (it touched its lock {age:.0f} s ago; after {STALE_SECONDS:.0f} s it counts as dead)"
        )
        wait = "" if self._is_on_this_machine(owner) else touched
        raise UserError(
            f"trainer.default_local_dir: {self._path.parent} belongs to another run: "
            f"{owner}{wait}; wait for it, or give another directory"
        )

    def _is_on_this_machine(self, owner: Owner) -> bool:
        """Return whether this machine's list of processes says if the owner is alive."""
        return (owner.host, owner.pid_namespace) == (self._owner.host, self._owner.pid_namespace)

    def _is_dead(self, owner: Owner, age: float) -> bool:
        """Return whether the owner is dead; age: seconds since its last touch."""
        if owner == self._owner:
            return True
        if self._is_on_this_machine(owner):
            return _start_time(owner.pid) != owner.started
        if owner.job and owner.job == self._owner.job and owner.restarts < self._owner.restarts:
            return True  # Slurm ends a job before it requeues it
        return age > STALE_SECONDS

    def _read(self) -> Owner | None:
        """Return the lock's owner, or None without a lock."""
        try:
            return Owner(**json_files.read(self._path))
        except (FileNotFoundError, NotADirectoryError):
            # the latter is reported when the directory is made
            return None
        except (ValueError, TypeError):
            # A lock is written in one piece, so this is another file. Its age decides when it may
            # be replaced.
            return Owner("an unknown machine", 0, "", "", "", 0)

    def _touched(self) -> float:
        """Return the time of the last touch by the file system's clock, or -infinity without a
        lock."""
        try:
            return self._path.stat().st_mtime
        except FileNotFoundError:
            return float("-inf")

    def _age(self) -> float:
        """Return the seconds since the last touch.

        The file system's clock may be another machine's, so a new file's time stamp serves as its
        present time."""
        probe = self._path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")
        probe.touch()
        try:
            return probe.stat().st_mtime - self._touched()
        finally:
            probe.unlink()

    def _create(self) -> None:
        """Write the lock in one piece. Raise UserError if another process does so first."""
        staging = self._path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")
        staging.write_text(json.dumps(asdict(self._owner)))
        try:
            self._put(staging)
        except FileExistsError:
            raise UserError(
                f"trainer.default_local_dir: {self._path.parent} was taken by {self._read()} at "
                "this moment"
            ) from None
        finally:
            staging.unlink()

    def _put(self, written: Path) -> None:
        """Make the written file the lock. Raise FileExistsError if there is a lock."""
        try:
            os.link(written, self._path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            with self._path.open("x") as file:
                file.write(written.read_text())

    def _remove(self, dead: Owner) -> None:
        """Remove the dead owner's lock. If it is another owner's by now, that owner keeps the
        directory."""
        moved_path = self._path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, moved_path)
            moved = Lock(self._path.parent)
            moved._path = moved_path
            if moved._read() != dead:
                with contextlib.suppress(FileExistsError):
                    self._put(moved_path)
            moved_path.unlink()

    def _touch(self) -> None:
        """Touch the lock every TOUCH_SECONDS until it is released. This is the thread's program."""
        while not self._released.wait(TOUCH_SECONDS):
            with contextlib.suppress(OSError):
                if self._read() == self._owner:
                    os.utime(self._path)


def _start_time(pid: int) -> str | None:
    """Return when a process of this machine began (clock ticks since boot), or None without such a
    process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if stat[0] in "ZX" else stat[19]
