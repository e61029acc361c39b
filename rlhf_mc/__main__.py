"""The entry point of every rank: read the config, join the ranks, build the run, fit, and end with an exit code.

torchrun --nproc-per-node N -m rlhf_mc CONFIG.yaml [section.key=value ...]        (--help prints all usage)
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings

from rlhf_mc.runtime.parent_death import exit_with_launcher

if __name__ == "__main__":
    exit_with_launcher()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to save, Ctrl-C ends the process

# These imports take time.
from rlhf_mc.config.load import load_config
from rlhf_mc.config.schema import layouts
from rlhf_mc.runtime.command_line import CommandLine, parse
from rlhf_mc.runtime.console import write_line
from rlhf_mc.runtime.cuda_connections import set_cuda_connections
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
from rlhf_mc.runtime.tf32 import forbid_tf32
from rlhf_mc.trainer.early_checks import check_early, world_size


def main(argv: list[str]) -> None:
    """Print the text that an option asks for, on rank 0, or train. Raise CheckError if --check finds that no run could
    start."""
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
    from rlhf_mc.runtime.machine_check import report

    text, can_start = report()
    write_line(text, sys.stdout)
    if not can_start:
        raise CheckError


def train(command: CommandLine) -> None:
    """Train, from the config to the end of the run. Raise RequeueError if the run was asked to stop."""
    cfg = load_config(command.config, command.overrides)
    stop = StopRequests(cfg.trainer)
    stop.take_signals()  # before check_early: it imports pyarrow, whose threads must inherit the signal mask
    check_early(cfg, world_size())
    rank = int(os.environ.get("RANK", "0"))
    # Rank 0 alone logs warnings, which are the same on all ranks. The user need not see libraries' warnings.
    logging.basicConfig(level=logging.WARNING if rank == 0 else logging.ERROR, format="rlhf_mc: %(message)s")
    warnings.filterwarnings("ignore")
    logging.getLogger("torch._library").setLevel(logging.ERROR)  # about missing Triton, on every rank
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported, below
    set_cuda_connections(max(megatron.tensor_model_parallel_size for megatron in layouts(cfg).values()))
    forbid_tf32([megatron.dtype for megatron in layouts(cfg).values()])

    from rlhf_mc.observability.metrics import PhaseTimer
    from rlhf_mc.runtime.determinism import use_deterministic_algorithms
    from rlhf_mc.runtime.heartbeat import heartbeats
    from rlhf_mc.topology.rendezvous import init_process_group

    trainer = cfg.trainer
    if trainer.deterministic:
        use_deterministic_algorithms()
    status = RankStatus()
    timer = PhaseTimer(status=status)  # used for the names of the phases, which an error carries as notes
    with timer.phase("join"):
        init_process_group(trainer.dist_timeout_seconds)
    stop.read_job_end()
    # A straggler is named after half the timeout of a collective, before the other ranks fail.
    with heartbeats(status, rank, trainer.heartbeat_timeout_seconds, trainer.dist_timeout_seconds / 2):
        with timer.phase("import"):  # Megatron-Core
            from rlhf_mc.models.transformer_engine import import_transformer_engine

            import_transformer_engine()
            from rlhf_mc.topology.groups import barrier, shut_down
            from rlhf_mc.trainer.loop import fit
            from rlhf_mc.trainer.setup import build_run
        with timer.phase("setup"):
            run = build_run(cfg)
        with timer.phase("fit"):
            is_finished = fit(run, status, stop)
            if not is_finished:
                write_exit_code(EXIT_REQUEUE)
            barrier()
    exit_after(END_SECONDS, 0 if is_finished else EXIT_REQUEUE)
    run.rollout.close()  # before its process groups are destroyed: garbage collection would print a stack trace
    # No heartbeats from here on: the ranks end at different times.
    shut_down()
    if not is_finished:
        raise RequeueError


if __name__ == "__main__":
    exit_now(exit_code("rlhf_mc", lambda: main(sys.argv[1:])))
