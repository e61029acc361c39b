"""An agent's program, in a process of its own or as a function of this one: its start, its score,
and its end with all that it has started. Neither torch nor numpy is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.environments import verl_tools
from rlhf_mc.environments.protocol import SECTION, called
from rlhf_mc.rewards.results import Failure
from rlhf_mc.runtime.user_function import load_attribute

FUNCTION = "run"
"""Name of the function of rollout.environment.path."""
_PIPE_BYTES = 1 << 16
_TAIL_BYTES = 1 << 14
_PAUSE_SECONDS = 0.01
_LOCAL = "127.0.0.1"

Settings = Mapping[str, str]
"""What a client needs: `base_url`, `api_key` and `model`."""


def load_agent(cfg: EnvironmentConfig) -> Callable[[dict[str, Any], Settings], Any]:
    """Return an async function that runs the agent for a row, and returns its score or None. Raise
    UserError if the file or the program is missing."""
    hosts = {_LOCAL, *filter(None, os.environ.get("NO_PROXY", "").split(","))}
    os.environ |= dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(sorted(hosts)))
    command = cfg.command
    if command is not None:
        if shutil.which(command[0]) is None:
            raise UserError(f"{SECTION}.command: there is no program {command[0]!r}")
        return lambda row, settings: _run_program(command, row, settings)
    verl_tools.install()
    function = load_attribute(SECTION, str(cfg.path), FUNCTION)
    return lambda row, settings: called(function, row, settings, **cfg.kwargs)


async def _run_program(command: Sequence[str], row: dict[str, Any], settings: Settings) -> Any:
    """Run a program, with the row as JSON on its standard input. Return the score that it has
    written, None without one. Raise Failure unless it exits with 0."""
    output, score = _Tail(), _Tail()
    with open(os.memfd_create("row"), "w+b") as file:
        file.write(json.dumps(row, default=str).encode("utf-8", "replace"))
        file.seek(0)
        variables = {
            "OPENAI_BASE_URL": settings["base_url"],
            "OPENAI_API_KEY": settings["api_key"],
            "OPENAI_MODEL": settings["model"],
            "ANTHROPIC_BASE_URL": settings["base_url"].removesuffix("/v1"),
            "ANTHROPIC_API_KEY": settings["api_key"],
            "ANTHROPIC_MODEL": settings["model"],
            "RLHF_MC_SCORE_FILE": f"/dev/fd/{score.write_end}",
        }
        try:
            process = subprocess.Popen(
                command,
                stdin=file,
                stdout=output.write_end,
                stderr=output.write_end,
                pass_fds=(score.write_end,),
                env=os.environ | variables,
                start_new_session=True,
            )
        except OSError as error:
            output.close()
            score.close()
            raise Failure("raised", f"cannot be started ({error})") from error
    try:
        await _ended(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started too
        code = process.wait()
        _kill_detached(f"OPENAI_API_KEY={settings['api_key']}".encode())
        texts = [tail.close() for tail in (output, score)]
    if code != 0:
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        last = texts[0].decode(errors="replace").strip().rpartition("\n")[2]
        raise Failure("exited", f"the program has ended with {how}{f': {last}' if last else ''}")
    line = texts[1].strip().rpartition(b"\n")[2]
    try:
        return msgspec.json.decode(line) if line else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise Failure("invalid", f"the score of the program is not JSON ({error})") from error


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process, without a thread."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _kill_detached(mark: bytes) -> None:
    """Kill the processes with a variable that have detached themselves from their program: the
    guard has adopted them."""
    guard = os.getppid()
    children = Path(f"/proc/{guard}/task/{guard}/children")
    for _ in range(1000):  # those of a killed one are adopted in turn
        is_found = False
        with contextlib.suppress(OSError):
            for number in children.read_text().split():
                with contextlib.suppress(OSError):
                    if mark in Path(f"/proc/{number}/environ").read_bytes().split(b"\0"):
                        os.kill(int(number), signal.SIGKILL)
                        is_found = True
        if not is_found:
            return


class _Tail:
    """The last bytes that a program writes to a pipe. A flood is slowed down."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._bytes = b""
        self._loop.add_reader(self._read_end, self._pause)

    def close(self) -> bytes:
        """Close the pipe. Return the bytes."""
        self._read()
        self._loop.remove_reader(self._read_end)
        for descriptor in (self._read_end, self.write_end):
            os.close(descriptor)
        self._read_end = -1
        return self._bytes

    def _pause(self) -> None:
        self._read()
        self._loop.remove_reader(self._read_end)
        self._loop.call_later(_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._read_end >= 0:
            self._loop.add_reader(self._read_end, self._pause)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bytes = (self._bytes + os.read(self._read_end, _PIPE_BYTES))[-_TAIL_BYTES:]
