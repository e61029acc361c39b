"""The token budget of an update's micro-batches, halved where a rank runs out of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_mc import platform
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import tokens_on_rank
from rlhf_mc.data.balance import (
    Cost,
    PromptGroups,
    plan_micro_batches,
    plan_prompt_groups,
    plan_shared,
)
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.health.adjustments import Adjustment, Adjustments
from rlhf_mc.models.engine import Loss, ModelEngine
from rlhf_mc.models.pipeline import OutOfMemory
from rlhf_mc.models.statistics import OptimizerStep
from rlhf_mc.runtime.console import print_line
from rlhf_mc.topology.mesh import Mesh


@dataclass(frozen=True)
class TokenBudget:
    """The tokens of a micro-batch in the updates of one model in one step."""

    role: str
    """The model: actor or critic."""
    step: int
    tokens: int
    """Of the config."""
    longest: int
    """Tokens of the longest sequence that the settings allow: no budget is below it."""
    adjustments: Adjustments

    def update_limit(self, number: int) -> int:
        """Return the tokens of an update of the step, from 0."""
        made = self.adjustments.max_token_len(f"update_{self.role}", self.step, number)
        return self.tokens if made is None else min(self.tokens, made)

    def halve(self, number: int, rank: int) -> None:
        """Halve the budget from an update of the step on. Raise UserError if it is no more than the
        longest sequence. Every rank must call it. rank: the one that is out of memory."""
        tokens = self.update_limit(number)
        if tokens <= self.longest:
            raise UserError(self.advice(number, rank))
        half = max(tokens // 2, self.longest)
        reason = f"{self._where(number, rank)}, with micro-batches of {tokens} tokens"
        self.adjustments.add(
            Adjustment("max_token_len", half, self.step - 1, reason, f"update_{self.role}", number)
        )
        print_line(
            f"warning: {reason}; repeating it with {half}, and {half} from now on", rank_0_only=True
        )

    def advice(self, number: int, rank: int) -> str:
        """Return what a user can do where the budget is not halved."""
        return (
            f"{self._where(number, rank)}, with micro-batches of {self.update_limit(number)} "
            f"tokens; lower {self.role}.ppo_max_token_len_per_gpu, or shard the model over more "
            f"ranks ({self.role}.megatron)"
        )

    def _where(self, number: int, rank: int) -> str:
        return (
            f"{self.role}: rank {rank} is out of memory in update {number + 1} of step {self.step}"
        )


def train_step(
    engine: ModelEngine, mini: RaggedBatch, loss: Loss, budget: TokenBudget, number: int
) -> OptimizerStep:
    """Take the optimizer step of one update, as ModelEngine.train_step does. Where a rank runs out
    of memory in it, repeat it with half the token budget if the engine recovers memory; else add to
    that rank's error what to lower. number: of the update in its step, from 0."""
    mini = mini.contexts()
    while True:
        micro_batches = my_micro_batches(engine, mini, budget.update_limit(number))
        try:
            return engine.train_step(mini, micro_batches, loss)
        except OutOfMemory as error:
            rank = error.rank
        except RuntimeError as error:
            if platform.is_out_of_memory(error):
                error.add_note(budget.advice(number, engine.groups.rank))
            raise
        budget.halve(number, rank)


def my_micro_batches(engine: ModelEngine, batch: RaggedBatch, budget: int) -> Sequence[list[int]]:
    """Return the sequences of each micro-batch of this rank's data-parallel replica.
    budget: a rank's tokens of one."""
    mesh = engine.groups.mesh
    coordinate = engine.groups.coordinate
    lens = batch.seq_lens.tolist()
    cost = engine.shape.sequence_cost
    if engine.shares_prompts and mesh.cp == 1:
        groups = PromptGroups(lens, batch.prompt_lens.tolist(), batch.prompt_groups.tolist())
        return plan_prompt_groups(groups, mesh.dp, budget, cost)[coordinate.dp]
    plan = micro_batches_by_replica(lens, mesh, budget, cost)
    return plan[coordinate.dp * mesh.cp + coordinate.cp]


def micro_batches_by_replica(
    seq_lens: Sequence[int], mesh: Mesh, budget: int, cost: Cost
) -> Sequence[Sequence[list[int]]]:
    """Return the sequences of the micro-batches of each replica, context-parallel ranks included:
    [replica][number]. budget: a rank's tokens of one."""
    if mesh.dynamic_cp:
        return plan_shared(seq_lens, mesh.replicas, mesh.cp, budget, cost, tokens_on_rank)
    padded = [tokens_on_rank(length, mesh.cp) * mesh.cp for length in seq_lens]
    plan = plan_micro_batches(padded, mesh.dp, budget * mesh.cp, cost)
    return [micro_batches for micro_batches in plan for _ in range(mesh.cp)]
