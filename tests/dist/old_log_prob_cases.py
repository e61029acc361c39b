"""Functions that the ranks run in test_old_log_probs.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from cases import built_run

from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import log_probs, loop, step_state

FIELDS = ("old_log_probs", "is_weights", "advantages")


def two_steps(
    config_path: str, overrides: Sequence[str], with_pass: bool, broken: str | None = None
) -> list[dict[str, Any]]:
    """Return of two steps the metrics, the actor's weights, and fields of the batch.

    with_pass: old log-probs have a pass, whatever the settings. broken: in the second step this
    parameter of the actor, if the rank has it, is NaN during the update."""
    out = []
    compute_advantages = loop.compute_advantages
    decide = log_probs.has_old_log_prob_pass
    with built_run(config_path, list(overrides)) as run:
        for step in (1, 2):
            state = step_state.begin_step(
                step, RankStatus(), (step - 1) * run.config.data.train_batch_size
            )
            saved = {}

            def break_then_compute(*args: Any, step: int = step, saved: Any = saved) -> Any:
                if step == 2 and broken in run.actor.params:
                    saved["value"] = run.actor.params[broken].clone()
                    run.actor.params[broken].fill_(torch.nan)
                return compute_advantages(*args)

            with (
                mock.patch.object(loop, "compute_advantages", break_then_compute),
                mock.patch.object(
                    log_probs, "has_old_log_prob_pass", lambda *args: with_pass or decide(*args)
                ),
            ):
                batch = loop.one_step(run, state, StopRequests(run.config.trainer))
            if saved:
                run.actor.params[broken].copy_(saved["value"])
            out.append(
                {
                    "metrics": {**state.metrics, **state.timer.result()},
                    "weights": {name: x.clone() for name, x in run.actor.params.items()},
                    "batch": {name: getattr(batch, name) for name in FIELDS},
                }
            )
    return out
