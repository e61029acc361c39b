"""Tests in several processes: `pytest --lanes 2`. The processes are forked after collection, so
they import and collect once, and each takes the next file when it has done one. Their reports come
back to the first process, whose summary and exit code are of all tests.

One process begins with tests/dist and one with tests/system, and both end with tests/unit. So one
process has most
of tests/dist, which share ranks and fixtures, and the last files are short ones."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ORDER = ("dist", "gpu", "fake_gpu", "unit", "system")
"""Order of the folders. The first process takes files from the front, the second from the back, and
so on in turn."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lanes", type=int, default=1, help="number of processes that run the tests")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in several processes. Return None, which has pytest run them, where one is
    enough."""
    groups = _groups(session.items)
    lanes = min(session.config.getoption("lanes"), len(groups))
    if lanes < 2 or session.config.option.collectonly or session.testsfailed:
        return None
    session.config._tmp_path_factory.getbasetemp()  # one for all processes
    context = mp.get_context("fork")
    taken = context.Array("i", [0, 0])
    # vLLM's sleep collects garbage: a second each time with the libraries' and the tests' objects
    gc.freeze()
    processes = {}
    for number in range(1, lanes + 1):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_lane, args=(session, _items(groups, taken, number % 2 == 0), sender)
        )
        process.start()
        sender.close()
        # The terminal's and the XML file's reporters take reports of several processes that look
        # like pytest-xdist's.
        process.gateway = SimpleNamespace(id=f"lane {number}")
        process._workerinfocache = process.gateway.id
        processes[receiver] = process
    missing = {item.nodeid for item in session.items}
    while processes:
        for receiver in wait(list(processes)):
            try:
                data = receiver.recv()
            except (EOFError, OSError):  # OSError: the process has ended within a message
                data = None
            if data is None:
                processes.pop(receiver).join()
                continue
            if isinstance(data, str):
                session.shouldfail = data
                continue
            report = session.config.hook.pytest_report_from_serializable(
                config=session.config, data=data
            )
            report.node = processes[receiver]
            session.config.hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                missing.discard(report.nodeid)
    if missing and not session.shouldfail:
        session.shouldfail = (
            f"{len(missing)} tests have not run, {min(missing)} first: their process has ended"
        )
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


def _groups(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Group the tests by file, in the order of ORDER."""
    groups: dict[Path, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(item.path, []).append(item)

    def place(group: list[pytest.Item]) -> int:
        return next(ORDER.index(part) for part in reversed(group[0].path.parts) if part in ORDER)

    return sorted(groups.values(), key=place)


def _lane(session: pytest.Session, items: Iterator[pytest.Item], sender: Connection) -> None:
    """Run the tests, then end the process."""
    config = session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are those of the first process
    capture.start_global_capturing()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Sender(config, sender))
    try:
        item = next(items, None)
        while item is not None and not session.shouldfail:
            following = next(items, None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
    except BaseException as error:  # Ctrl-C, pytest.exit, an error of a plugin
        sender.send(f"{type(error).__name__}: {error}")
    finally:
        try:
            session._setupstate.teardown_exact(None)  # where the last test has not done it
            sender.send(None)  # a process that a test has forked may hold the pipe open
        finally:
            os._exit(0)  # an exit by sys.exit would wait for the processes that tests have left


def _items(groups: list[list[pytest.Item]], taken: Any, from_back: bool) -> Iterator[pytest.Item]:
    """Yield the tests of the groups that no other process has taken. taken: number of groups taken
    from the front and from the back."""
    while True:
        with taken.get_lock():
            front, back = taken
            if front + back >= len(groups):
                return
            taken[from_back] += 1
        yield from groups[-1 - back if from_back else front]


class _Sender:
    """The plugin of a process that reports to the first one."""

    def __init__(self, config: pytest.Config, sender: Connection) -> None:
        self._config = config
        self._sender = sender

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._sender.send(
            self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )
