"""The entry point of every rank: read the config, join the world, build the run, fit, and end with an exit code.

torchrun --nproc-per-node N -m rlhf_mc CONFIG.yaml [section.key=value ...]
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
import warnings

USER_ERROR, OTHER_ERROR = 2, 1
"""Exit codes: something the user gave is wrong; anything else."""


def main(argv: list[str]) -> int:
    """Runs and returns the exit code."""
    from rlhf_mc.config.errors import UserError

    try:
        _run(argv)
        return 0
    except UserError as error:
        _report(str(error), None)
        return USER_ERROR
    except Exception as error:  # the entry point: whatever it is, say it once and end with a code
        _report(f"{type(error).__name__}: {error}".splitlines()[0], traceback.format_exc())
        return OTHER_ERROR


def _run(argv: list[str]) -> None:
    from rlhf_mc.config.errors import UserError
    from rlhf_mc.config.load import load_config

    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        raise UserError("usage: torchrun --nproc-per-node N -m rlhf_mc CONFIG.yaml [section.key=value ...]")
    cfg = load_config(argv[0], argv[1:])
    rank = int(os.environ.get("RANK", "0"))
    # Every rank says the same; one voice is enough. Libraries' advice about what they lack is not for the user.
    logging.basicConfig(level=logging.WARNING if rank == 0 else logging.ERROR, format="rlhf_mc: %(message)s")
    warnings.filterwarnings("ignore")

    from rlhf_mc.topology.groups import init_process_group, shut_down
    from rlhf_mc.trainer.ppo import fit
    from rlhf_mc.trainer.setup import build_run

    init_process_group(cfg.trainer.dist_timeout_seconds)
    run = build_run(cfg)
    fit(run)
    shut_down()


def _report(line: str, stack: str | None) -> None:
    """Prints the line (and the stack of what is no mistake of the user's) once for all ranks that have the same.

    torchrun prints a summary of its own after the ranks have ended; the error file gives it our line to show."""
    rank = int(os.environ.get("RANK", "0"))
    if _is_first_to_say(line):
        if stack is not None:
            print(stack, file=sys.stderr)
        where = "" if stack is None else f" on rank {rank}"
        print(f"rlhf_mc: error{where}: {line}", file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        info = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line, "extraInfo": info}}, file)


def _is_first_to_say(line: str) -> bool:
    """Whether no other rank has reported this line. Before the ranks are connected all have the same to say."""
    from torch import distributed as dist

    if not dist.is_initialized():
        return int(os.environ.get("RANK", "0")) == 0
    try:
        store = dist.distributed_c10d._get_default_store()
        return int(store.add(f"rlhf_mc/error/{line}", 1)) == 1
    except RuntimeError:  # the store went with the rank that held it
        return True


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after an error on one rank, threads of vLLM and gloo would keep the process waiting for the others.
    os._exit(code)
