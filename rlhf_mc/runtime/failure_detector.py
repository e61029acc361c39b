"""The conclusions that rank 0 draws from heartbeats: which ranks are lost, which are stragglers.
Neither threads nor connections are in this file (see heartbeat_server.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rlhf_mc.runtime.rank_status import SILENT_PHASES, Heartbeat

MAX_NAMED = 4
"""Ranks that one message names; it counts the others."""


class FailureDetector:
    """The latest heartbeat of every rank and when it came. All times are seconds of one monotonic
    clock."""

    def __init__(self, hosts: list[str], interval: float, now: float) -> None:
        """hosts: the host name of each rank. interval: seconds between two heartbeats of a rank."""
        self._hosts = hosts
        self._interval = interval
        self.num_ranks = len(hosts)
        self._received_at = [now] * len(hosts)
        """Time of each rank's latest heartbeat; infinity once the rank has signed off."""
        self._latest: dict[int, Heartbeat] = {}
        self._progressed_at = [now] * len(hosts)
        """Time of the first heartbeat with each rank's present progress."""
        self._disconnected_at: dict[int, float] = {}
        self._warned: set[tuple[int, int]] = set()

    def received(self, heartbeat: Heartbeat, now: float) -> None:
        """Record a heartbeat."""
        self._received_at[heartbeat.rank] = now
        before = self._latest.get(heartbeat.rank)
        if before is None or before.progress != heartbeat.progress:
            self._progressed_at[heartbeat.rank] = now
        self._latest[heartbeat.rank] = heartbeat
        self._disconnected_at.pop(heartbeat.rank, None)

    def signed_off(self, rank: int) -> None:
        """Record that the rank sends no more heartbeats on purpose."""
        self._received_at[rank] = math.inf
        self._disconnected_at.pop(rank, None)

    def disconnected(self, rank: int, now: float) -> None:
        """Record that the rank's connection was closed from its side."""
        if self._received_at[rank] != math.inf:
            self._disconnected_at.setdefault(rank, now)

    def restart_timeouts(self, now: float) -> None:
        """Count all silence from now on: until now this process itself was not running."""
        self._received_at = [max(then, now) for then in self._received_at]
        self._progressed_at = [now] * self.num_ranks
        self._disconnected_at = dict.fromkeys(self._disconnected_at, now)

    def lost(self, now: float, timeout: float, reconnect: float) -> str:
        """Return one line that names the lost ranks, or an empty text.

        A rank is lost if it has been disconnected for `reconnect` seconds, or silent for `timeout`
        seconds outside of SILENT_PHASES."""
        ended = [rank for rank, since in self._disconnected_at.items() if now - since > reconnect]
        if ended:
            return self._name(
                ended, lambda rank: f"is gone: its process has ended; last {self._last_phase(rank)}"
            )
        may_be_silent = {
            rank for rank, heartbeat in self._latest.items() if heartbeat.phase in SILENT_PHASES
        }
        silent = [
            r
            for r, then in enumerate(self._received_at)
            if now - then > timeout and r not in may_be_silent
        ]
        return self._name(silent, lambda rank: self._silence(rank, now))

    def stuck(self, now: float, seconds: float) -> str:
        """Return one line that names the ranks of a pool that the other pool waits for, if none of
        them has made progress for `seconds`; else an empty text."""
        if not self._has_waiting() or self._quiet_seconds(now) < seconds:
            return ""
        ranks = [heartbeat.rank for heartbeat in self._behind()]
        return self._name(
            ranks,
            lambda rank: (
                f"has made no progress for {now - self._progressed_at[rank]:.0f} s: "
                f"{self._latest[rank].position()}"
            ),
        )

    def stragglers(self, now: float) -> str:
        """Return one line that names the ranks that the others wait for, or an empty text if no
        rank stands out.

        These are the silent ranks; else the ranks that have made fewer moves than others; else the
        ranks that are in no collective while others are in one."""
        silent = [
            rank for rank, then in enumerate(self._received_at) if now - then > 2 * self._interval
        ]
        if silent:
            return self._name(silent, lambda rank: self._silence(rank, now))
        latest = list(self._latest.values())
        behind = [heartbeat.rank for heartbeat in self._behind()]
        if not behind and any(heartbeat.collective for heartbeat in latest):
            behind = [heartbeat.rank for heartbeat in latest if not heartbeat.collective]
        return self._name(behind, lambda rank: f"is behind: {self._latest[rank].position()}")

    def straggler_warning(self, now: float, seconds: float) -> str:
        """Return one line if no rank has moved for `seconds` and some ranks are behind the others,
        else an empty text. Of a pool that the other pool waits for no rank has made progress.

        The warning comes once for each rank and phase."""
        latest = list(self._latest.values())
        behind = self._behind()
        if not behind or min(heartbeat.seconds for heartbeat in latest) < seconds:
            return ""
        if self._has_waiting() and self._quiet_seconds(now) < seconds:
            return ""
        positions = {(heartbeat.rank, heartbeat.moves) for heartbeat in behind}
        if positions <= self._warned:
            return ""
        self._warned |= positions
        waiting = max(latest, key=lambda heartbeat: heartbeat.moves)
        return f"{self.stragglers(now)}; rank {waiting.rank} waits {waiting.position()}"

    def _behind(self) -> list[Heartbeat]:
        """Return the heartbeats of the ranks that another pool waits for; without such a wait, of
        those that have made fewer moves than the furthest rank of their pool."""
        latest = list(self._latest.values())
        if self._has_waiting():
            return [heartbeat for heartbeat in latest if not heartbeat.waits]
        furthest = {
            pool: max((other.moves for other in latest if other.trains is pool), default=0)
            for pool in (True, False)
        }
        return [heartbeat for heartbeat in latest if heartbeat.moves < furthest[heartbeat.trains]]

    def _has_waiting(self) -> bool:
        """Return whether ranks of a pool wait for the other one."""
        return any(heartbeat.waits for heartbeat in self._latest.values())

    def _quiet_seconds(self, now: float) -> float:
        """Return the seconds since any of the ranks that are waited for has made progress."""
        ranks = [heartbeat.rank for heartbeat in self._behind()]
        return min((now - self._progressed_at[rank] for rank in ranks), default=0.0)

    def _silence(self, rank: int, now: float) -> str:
        return (
            f"has sent no heartbeat for {now - self._received_at[rank]:.0f} s, last "
            f"{self._last_phase(rank)}"
        )

    def _last_phase(self, rank: int) -> str:
        heartbeat = self._latest.get(rank)
        return (
            "in phase unknown"
            if heartbeat is None
            else f"in phase {heartbeat.phase} of step {heartbeat.step}"
        )

    def _name(self, ranks: list[int], describe: Callable[[int], str]) -> str:
        """Return a line that names at most MAX_NAMED of the ranks and counts the others; empty
        without ranks."""
        if not ranks:
            return ""
        named = [
            f"rank {rank} ({self._hosts[rank]}) {describe(rank)}"
            for rank in sorted(ranks)[:MAX_NAMED]
        ]
        return "; ".join(named) + (
            f"; and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
        )
