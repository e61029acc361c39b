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

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.environments import verl_tools
from rlhf_mc.environments.protocol import SECTION, called
from rlhf_mc.rewards.results import Failure
from rlhf_mc.runtime.user_function import load_attribute


def load_agent(cfg: EnvironmentConfig) -> Callable[[dict[str, Any], Mapping[str, str]], Any]:
    """Return an async function that runs the agent for a row with a client's `base_url`, `api_key`
    and `model`, and returns its score or None. Raise UserError if the file or the program is
    missing."""
    hosts = {"127.0.0.1", *filter(None, os.environ.get("NO_PROXY", "").split(","))}
    os.environ.update(dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(sorted(hosts))))
    command = cfg.command
    if command is not None:
        if shutil.which(command[0]) is None:
            raise UserError(f"{SECTION}.command: there is no program {command[0]!r}")
        return lambda row, settings: _run_program(command, row, settings)
    verl_tools.install()
    function = load_attribute(SECTION, str(cfg.path), "run")
    return lambda row, settings: called(function, row, settings, **cfg.kwargs)


async def _run_program(
    command: Sequence[str], row: dict[str, Any], settings: Mapping[str, str]
) -> None:
    """Run a program, with the row as JSON on its standard input. Raise Failure unless it exits
    with 0."""
    variables = {f"OPENAI_{name.upper()}": value for name, value in settings.items()}
    for name, value in settings.items():  # Anthropic's clients add /v1 themselves
        variables[f"ANTHROPIC_{name.upper()}"] = value.removesuffix("/v1")
    with open(os.memfd_create("row"), "w+b") as file:
        file.write(json.dumps(row, default=str).encode())
        file.seek(0)
        process = subprocess.Popen(
            command,
            stdin=file,
            stdout=subprocess.DEVNULL,
            env=os.environ | variables,
            start_new_session=True,
        )
    try:
        # without reaping it: its number must stay that of its group
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started too
        code = process.wait()
        _kill_detached(f"OPENAI_API_KEY={settings['api_key']}".encode())
    if code != 0:
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise Failure("exited", f"its program has ended with {how}")


def _kill_detached(variable: bytes) -> None:
    """Kill the processes with a variable that have detached themselves from their program: the
    guard (guard.py) has adopted them, and then what they have started."""
    guard = os.getppid()
    is_found = True
    while is_found:
        is_found = False
        with contextlib.suppress(OSError):
            for number in Path(f"/proc/{guard}/task/{guard}/children").read_text().split():
                with contextlib.suppress(OSError):
                    if variable in Path(f"/proc/{number}/environ").read_bytes().split(b"\0"):
                        os.kill(int(number), signal.SIGKILL)
                        is_found = True
