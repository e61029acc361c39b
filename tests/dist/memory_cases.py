"""Functions that the ranks run in test_out_of_memory.py."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_parts import measure
from model_cases import _objective, make_engine, mesh_groups

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.health.adjustments import Adjustments
from rlhf_mc.models.engine import Loss
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.gpt_model import PackedGPT
from rlhf_mc.trainer.skipped_updates import SkippedUpdates
from rlhf_mc.trainer.token_budget import TokenBudget
from rlhf_mc.trainer.update import update

BYTES_PER_TOKEN = 16 << 20
"""Of the memory that each micro-batch's loss asks for: far more than all else, so that the limit is
sharp."""


def updates(
    checkpoint: str,
    batch: RaggedBatch,
    budget: int,
    tokens_in_memory: int | None,
    directory: str,
    computes_old_log_probs: bool = False,
) -> dict[str, Any]:
    """Take two optimizer steps with micro-batches of at most `budget` tokens, of which rank 1 has
    memory for `tokens_in_memory` in the second. Return the metrics or the error, the weights after
    them and the budgets used. computes_old_log_probs: take one, without that memory,
    which returns the old log-probs."""
    if computes_old_log_probs:
        batch = replace(batch, old_log_probs=None)
    used: list[int] = []
    with mesh_groups(1, 1) as groups:
        engine = make_engine(checkpoint, "actor", groups)
        # a large eps keeps Adam smooth where a gradient is all but zero
        engine.make_trainable(OptimConfig(lr=1e-3, eps=1e-3), total_steps=1)
        engine.recover_memory()

        limits = contextlib.ExitStack()

        def objective(mini: RaggedBatch) -> Loss:
            # from the second update on
            if (
                (used or computes_old_log_probs)
                and tokens_in_memory is not None
                and dist.get_rank() == 1
            ):
                limits.enter_context(
                    measure.limited_memory(tokens_in_memory * BYTES_PER_TOKEN + (64 << 20))
                )
            loss = _objective(engine, mini, "token-mean")

            def hungry(model: PackedGPT, states: torch.Tensor, micro: MicroBatch) -> Any:
                used.append(micro.tokens.numel())
                activations = torch.empty(micro.tokens.numel() * BYTES_PER_TOKEN, dtype=torch.uint8)
                value, stats = loss(model, states, micro)
                del activations
                return value, stats

            return hungry

        adjustments = Adjustments(Path(directory))
        token_budget = TokenBudget("actor", 1, budget, int(batch.seq_lens.max()), adjustments)
        whole = list(range(batch.num_sequences))

        result: dict[str, Any] = {}
        try:
            with limits:
                skipped = SkippedUpdates(1, Path(directory))
                minis = iter([whole] if computes_old_log_probs else [whole, whole])
                trained, result["metrics"] = update(
                    engine, batch, minis, objective, token_budget, skipped, computes_old_log_probs
                )
                result["old_log_probs"] = trained.old_log_probs
        except UserError as error:
            result["error"] = str(error)
        result["weights"] = {name: tensor.clone() for name, tensor in engine.params.items()}
        result["budgets"] = [token_budget.update_limit(0), token_budget.update_limit(1)]
        result["used"] = used
        again = Adjustments(Path(directory))
        again.load()
        result["after_resume"] = [
            again.max_token_len("update_actor", 1, 0),
            again.max_token_len("update_actor", 1, 1),
        ]
    return result
