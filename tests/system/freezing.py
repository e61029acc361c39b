"""The program as a rank runs it, with a rank that gets stuck. Started by test_stuck_ranks.py; in
the environment STUCK says where (empty: nowhere), and SINCE names a file to which the time is then
written."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.core.tensor_parallel.mappings as mappings
from vllm.distributed.parallel_state import GroupCoordinator

from rlhf_mc.rollout.vllm_engine import VLLMEngine
from rlhf_mc.trainer import advantages, lifecycle

FIRST_STEP = 2
_step = 0


def getting_stuck(original: Callable[..., Any], stop: Callable[[], None]) -> Callable[..., Any]:
    """Return the function, with `stop` before its first call from FIRST_STEP on."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if _step >= FIRST_STEP:
            time.sleep(1.0)  # long enough for a heartbeat from this line
            Path(os.environ["SINCE"]).write_text(str(time.time()))
            stop()
        return original(*args, **kwargs)

    return call


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop_forever() -> None:
    """Never return."""
    while True:
        time.sleep(0.1)


def prepare(where: str) -> None:
    begin_step = lifecycle.begin_step

    def begin(step: int, *args: Any) -> Any:
        global _step
        _step = step
        return begin_step(step, *args)

    lifecycle.begin_step = begin
    if where == "in vLLM's group":
        GroupCoordinator.all_reduce = getting_stuck(GroupCoordinator.all_reduce, freeze)  # type: ignore[method-assign]
    elif where == "in Megatron's group":
        mappings._reduce = getting_stuck(mappings._reduce, freeze)
    elif where == "in its engine":
        VLLMEngine.step = getting_stuck(VLLMEngine.step, loop_forever)  # type: ignore[method-assign]
    elif where == "slow engine":
        VLLMEngine.step = getting_stuck(VLLMEngine.step, lambda: None)  # type: ignore[method-assign]
    else:
        assert where == "in code of its own"
        advantages.advantages_and_returns = getting_stuck(
            advantages.advantages_and_returns, loop_forever
        )


def main() -> None:
    if os.environ["STUCK"]:
        prepare(os.environ["STUCK"])
    sys.argv = ["rlhf_mc", *sys.argv[1:]]
    runpy.run_module("rlhf_mc", run_name="__main__")


if __name__ == "__main__":
    main()
