"""One run writes to a directory at a time: a file there names who does, touched for as long as that process lives."""

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

from rlhf_mc.config.errors import UserError, reason_of
from rlhf_mc.runtime.console import say
from rlhf_mc.topology.consensus import gather_objects, on_rank_0

NAME = "run.lock"
TOUCH_SECONDS = 10.0
STALE_SECONDS = 60.0
"""Six touches missed: an owner that cannot be asked is then taken for dead."""
_LOOK_SECONDS = 1.0
_ATTEMPTS = 5
"""How often a file server is asked, so many seconds apart, before its refusal ends a run."""


@dataclass(frozen=True)
class Owner:
    """The process that a directory belongs to."""

    host: str
    pid: int
    started: str
    """When the process began, as its machine counts: numbers of processes are used again."""
    numbered_by: str
    """The machine's boot and the namespace in which `pid` is a process: containers share host names and numbers."""
    job: str
    """Slurm's number of the job, or empty."""
    restarts: int
    """How often Slurm has started the job again."""

    @classmethod
    def this_process(cls) -> Owner:
        """The one that asks."""
        job, restarts = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _start_of(pid) or "", _numbered_by(), job, int(restarts))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f", job {self.job}" if self.job else "")


def check_free(root: Path) -> None:
    """UserError, on every rank, where another run that lives holds the directory. An owner that cannot be asked is
    watched until it gives a sign of life, or has given none for long. Every rank must call it."""
    lock = Lock(root)
    on_rank_0(lock.look, "trainer.default_local_dir")
    if lock.in_doubt is not None:
        say(f"{lock.in_doubt}; waiting for a sign of life")
    while gather_objects(lock.in_doubt)[0] is not None:
        time.sleep(_LOOK_SECONDS)
        on_rank_0(lock.look, "trainer.default_local_dir")


class Lock:
    """Held from `take` to `release`, or to the end of the process."""

    def __init__(self, root: Path) -> None:
        self._path = root / NAME
        self._owner = Owner.this_process()
        self._released = threading.Event()
        self._seen: tuple[Owner, float] | None = None
        self.in_doubt: str | None = None
        """What `look` found of an owner that may be dead or alive."""

    def look(self) -> None:
        """UserError where another run holds the directory that is known to live, or was touched since the last look."""
        self.in_doubt = None
        owner = self._read()
        if owner is None or self._is_dead(owner, self._age()):
            return
        seen, self._seen = self._seen, (owner, self._touched())
        if self._can_be_asked(owner) or (seen is not None and seen != self._seen):
            self._find_dead_owner()
        self.in_doubt = f"{self._path.parent} belongs to another run: {owner}"

    def take(self) -> None:
        """UserError where another run that lives holds the directory, or it cannot be written to."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if (dead := self._find_dead_owner()) is not None:
                self._remove(dead)
            self._create()
        except OSError as error:
            raise UserError(
                f"trainer.default_local_dir: {self._path} cannot be written ({reason_of(error)})"
            ) from error
        threading.Thread(target=self._touch, name="run lock", daemon=True).start()

    def release(self) -> None:
        """Gives the directory free."""
        self._released.set()
        with contextlib.suppress(OSError):
            if self._read() == self._owner:
                self._path.unlink()

    def check_still_ours(self) -> None:
        """UserError where another run has taken the directory over, as it may after this one stood still for long. A
        lock that somebody removed is made again. OSError where it cannot be looked at, several times over."""
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
                "this run stood still; nothing more is written there"
            )

    def _find_dead_owner(self) -> Owner | None:
        """Who left the lock behind; None where there is none."""
        owner = self._read()
        if owner is None:
            return None
        age = self._age()
        if self._is_dead(owner, age):
            return owner
        sign = f" (it gave a sign of life {age:.0f} s ago; without one it counts as dead after {STALE_SECONDS:.0f} s)"
        wait = "" if self._can_be_asked(owner) else sign
        raise UserError(
            f"trainer.default_local_dir: {self._path.parent} belongs to another run: {owner}{wait}; wait for it, or "
            "give another directory"
        )

    def _can_be_asked(self, owner: Owner) -> bool:
        """Whether this machine's list of processes says if it lives."""
        return (owner.host, owner.numbered_by) == (self._owner.host, self._owner.numbered_by)

    def _is_dead(self, owner: Owner, age: float) -> bool:
        mine = self._owner
        if owner == mine:
            return True
        if self._can_be_asked(owner):
            return _start_of(owner.pid) != owner.started
        if owner.job and owner.job == mine.job and owner.restarts < mine.restarts:
            return True  # Slurm has ended a job before it starts it again
        return age > STALE_SECONDS

    def _read(self) -> Owner | None:
        try:
            return Owner(**json.loads(self._path.read_text()))
        except (FileNotFoundError, NotADirectoryError):  # the latter is said when the directory is made
            return None
        except (ValueError, TypeError):
            # Written in one piece, so this is no lock of ours: nobody's, as old as it is.
            return Owner("an unknown machine", 0, "", "", "", 0)

    def _touched(self) -> float:
        """When the lock was last touched, by the clock of the file system."""
        try:
            return self._path.stat().st_mtime
        except FileNotFoundError:
            return float("-inf")

    def _age(self) -> float:
        """Seconds since then. The file system's clock may be another machine's: a new file tells what it says now."""
        probe = self._path.with_name(f"{NAME}.{uuid.uuid4().hex}")
        probe.touch()
        try:
            return probe.stat().st_mtime - self._touched()
        finally:
            probe.unlink()

    def _create(self) -> None:
        """Only one of several that try at once succeeds; the file is never seen half written."""
        mine = self._path.with_name(f"{NAME}.{uuid.uuid4().hex}")
        mine.write_text(json.dumps(asdict(self._owner)))
        try:
            self._put(mine)
        except FileExistsError:
            raise UserError(
                f"trainer.default_local_dir: {self._path.parent} was taken by {self._read()} at this moment"
            ) from None
        finally:
            mine.unlink()

    def _put(self, written: Path) -> None:
        """Makes a file the lock. FileExistsError where there is one."""
        try:
            os.link(written, self._path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            with self._path.open("x") as file:
                file.write(written.read_text())

    def _remove(self, dead: Owner) -> None:
        """Moves the dead owner's file away; if it is another's by now, that one keeps the directory."""
        aside = self._path.with_name(f"{NAME}.{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, aside)
            moved = Lock(self._path.parent)
            moved._path = aside
            if moved._read() != dead:
                with contextlib.suppress(FileExistsError):
                    self._put(aside)
            aside.unlink()

    def _touch(self) -> None:
        while not self._released.wait(TOUCH_SECONDS):
            with contextlib.suppress(OSError):
                if self._read() == self._owner:
                    os.utime(self._path)


def _numbered_by() -> str:
    """By whom this machine's processes are numbered; empty where it does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When a process of this machine began (clock ticks since boot); None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if stat[0] in "ZX" else stat[19]
