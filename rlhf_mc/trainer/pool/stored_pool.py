"""The pool of groups of a checkpoint, as a run continues with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_mc.checkpoint.training_state import read_arrays, reading_state
from rlhf_mc.config.roles import has_pool, trains_on_older_weights
from rlhf_mc.data.order import PromptOrder
from rlhf_mc.runtime.console import print_line
from rlhf_mc.topology.consensus import on_every_rank
from rlhf_mc.trainer.pool.generate import prompt_order
from rlhf_mc.trainer.pool.group_pool import (
    EXPERTS_FILE,
    POOL_FILE,
    check_arrays,
    load_experts,
    load_groups,
)
from rlhf_mc.trainer.pool.strategies import groups_at, next_position
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import Position


def load_pool(
    run: Run, state: Mapping[str, Any], path: Path, position: Position, order: PromptOrder
) -> int:
    """Load the pool of the checkpoint at path, from which the next step continues. position: the
    checkpoint's. order: with the checkpoint's sizes of a batch. Return position.num_prompts for the
    present sizes. Every rank must call it."""
    if run.environments is not None:
        run.environments.end_retained()  # of later steps, before a roll-back
    run.group_pool.groups = ()
    run.group_pool.next_batch = None
    run.group_pool.num_drawn = state["num_drawn"] or position.num_prompts
    if not state["num_groups"]:
        if has_pool(run.config.rollout):
            return next_position(run)
        return prompt_order(run).next_batch(position.num_prompts).start
    arrays = on_every_rank(lambda: read_arrays(path / POOL_FILE))
    shape = run.actor.shape
    with reading_state(path, POOL_FILE):
        check_arrays(
            arrays, state["num_groups"], run.group_pool.num_drawn, position.step, shape.vocab_size
        )
        positions = arrays["positions"].tolist()
        # written by an earlier version, which counted without the remainder of each epoch
        if "seeds" not in arrays:
            positions = [order.position(count) for count in positions]
        groups = groups_at(run, positions)
        groups = load_groups(
            arrays, groups, run.config.data.max_response_length, run.environments is not None
        )
    if not trains_on_older_weights(run.config.rollout):
        groups = [group.restarted() for group in groups]
    run.group_pool.groups = groups
    files = sorted(path.glob(EXPERTS_FILE.format("*")))

    def experts() -> None:
        if (replay := run.actor.replay) is None:
            return
        replay.stored = {}
        for file in files[run.groups.rank :: run.groups.mesh.world]:
            with reading_state(path, file.name):
                replay.stored |= load_experts(read_arrays(file), shape.num_experts)

    on_every_rank(experts)
    pairs = zip(groups, arrays["lens"], strict=True)
    if num_anew := sum(group.first_version is None and lens.any() for group, lens in pairs):
        print_line(
            f"warning: {num_anew} groups that earlier steps have begun are generated anew: data or "
            "settings changed",
            rank_0_only=True,
        )
    return next_position(run)
