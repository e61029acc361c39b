"""Functions that the ranks run in test_profiled_runs.py."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import built_run

from rlhf_mc.observability import profile
from rlhf_mc.observability.phase_work import recorded
from rlhf_mc.patching import replaced
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import loop
from rlhf_mc.trainer.step_state import begin_step, slowest_rank_times, start_slowest_rank

DELAY = 0.2
"""Seconds by which rank 1 is late for each collective."""


def train(
    config_path: str, overrides: list[str], profile_directory: str = profile.PROFILE
) -> dict[str, Any]:
    """Run the whole loop. Return what the rank prints to standard output and standard error, and
    its weights."""
    out = io.StringIO()
    err = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        replaced(profile, "PROFILE", profile_directory),
        built_run(config_path, overrides) as run,
    ):
        loop.fit(run)
        weights = {name: param.clone() for name, param in run.actor.params.items()}
    return {"out": out.getvalue(), "err": err.getvalue(), "weights": weights}


def times_of_the_slowest_rank() -> dict[str, float]:
    """Return `slowest_rank_times` where rank 1 takes longer for the old log-probs, and less for the
    rest."""
    rank = dist.get_rank()
    state = begin_step(1, RankStatus())
    state.timer._seconds = {"old_log_prob": 1.0 + rank, "update_actor": 2.0 - rank}
    start_slowest_rank(state, "old_log_prob", dist.group.WORLD)
    return {**state.timer.result(), **slowest_rank_times(state)}


def waiting_by_collective() -> dict[str, float]:
    """Return the seconds of waiting that each collective takes, where rank 1 is late by DELAY."""
    vector = torch.ones(4)
    calls = {
        "all_reduce": lambda: dist.all_reduce(vector),
        "asynchronous": lambda: dist.all_reduce(vector, async_op=True).wait(),
        "objects": lambda: dist.all_gather_object([None, None], "object"),
        "all_gather": lambda: dist.all_gather_into_tensor(torch.empty(8), vector),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(2), vector),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(4), vector),
        "broadcast": lambda: dist.broadcast(vector, 1),
        "barrier": dist.barrier,
        "message": lambda: dist.recv(vector, 1) if dist.get_rank() == 0 else dist.send(vector, 0),
        "batch of messages": _batch_of_messages,
        "none": lambda: None,
    }
    with recorded() as work:
        for name, call in calls.items():
            with work.phase("outer"):
                dist.barrier()
                with work.phase(name):
                    if dist.get_rank() == 1:
                        time.sleep(DELAY)
                    call()
    return dict(work.waiting)


def _batch_of_messages() -> None:
    vector = torch.ones(4)
    operation = dist.P2POp(
        dist.irecv if dist.get_rank() == 0 else dist.isend, vector, 1 - dist.get_rank()
    )
    for request in dist.batch_isend_irecv([operation]):
        request.wait()


def slow_reward(directory: str) -> str:
    """Write a reward function that is slow on rank 1. Return its path."""
    path = Path(directory) / "slow_reward.py"
    path.write_text(
        "import os\nimport time\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    time.sleep({DELAY} if os.environ['RANK'] == '1' else 0)\n"
        "    return float(len(solution_str))\n"
    )
    return str(path)
