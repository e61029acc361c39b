"""The entry point of every rank: read the config, join the ranks, build the run, fit, and end with
an exit code.

torchrun --nproc-per-node N -m rlhf_mc CONFIG.yaml [section.key=value ...]
(--help prints all usage)
"""

from __future__ import annotations

import os
import signal
import sys

from rlhf_mc.runtime.parent_death import exit_with_launcher

if __name__ == "__main__":
    exit_with_launcher()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # until there is something to save, Ctrl-C ends the process
        signal.signal(signal.SIGINT, signal.SIG_DFL)

# These imports take time.
from rlhf_mc.command_line import CommandLine, parse
from rlhf_mc.config.load import load_config
from rlhf_mc.runtime.console import write_line
from rlhf_mc.runtime.exit_codes import (
    END_SECONDS,
    EXIT_REQUEUE,
    CheckError,
    RequeueError,
    exit_after,
    exit_code,
    exit_now,
    write_exit_code,
)
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.session import session
from rlhf_mc.setup.early_checks import check_early, world_size
from rlhf_mc.verl.table import key_hint


def main(argv: list[str]) -> None:
    """Print the text that an option asks for, on rank 0, or train. Raise CheckError if --check
    finds that no run could start."""
    command = parse(argv)
    if command.option is None:
        train(command)
        return
    if command.option == "--check":
        check()
        return
    text = command.text()
    if os.environ.get("RANK", "0") == "0":
        write_line(text, sys.stdout)


def check() -> None:
    """Print what this machine has. Raise CheckError if no run could start."""
    from rlhf_mc.machine.check import report

    text, can_start = report()
    write_line(text, sys.stdout)
    if not can_start:
        raise CheckError


def train(command: CommandLine) -> None:
    """Train, from the config to the end of the run. Raise RequeueError if the run was asked to
    stop."""
    cfg = load_config(command.config, command.overrides, key_hint)
    stop = StopRequests(cfg.trainer)
    # before check_early: it imports pyarrow, whose threads must inherit the signal mask
    stop.take_signals()
    check_early(cfg, world_size())
    status = RankStatus()
    is_finished = False
    with session(
        cfg, status, stop, lambda: exit_after(END_SECONDS, 0 if is_finished else EXIT_REQUEUE)
    ) as run:
        from rlhf_mc.trainer.loop import fit

        is_finished = fit(run, status, stop)
        if not is_finished:
            write_exit_code(EXIT_REQUEUE)
    if not is_finished:
        raise RequeueError


if __name__ == "__main__":
    exit_now(exit_code("rlhf_mc", lambda: main(sys.argv[1:])))
