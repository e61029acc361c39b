"""Functions that the rank runs in test_operations.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_parts.engines import Role, make_engine, mesh_groups, objective, token_batch
from torch.utils import flop_counter

from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.health.adjustments import Adjustments
from rlhf_mc.models.heads import log_prob_head, value_head
from rlhf_mc.trainer.skipped_updates import SkippedUpdates
from rlhf_mc.trainer.step_report import update_flops
from rlhf_mc.trainer.token_budget import TokenBudget
from rlhf_mc.trainer.update import mini_batches, update

PROMPTS = (5, 9, 3)
RESPONSES = (6, 2, 8)


def counted_flops(checkpoint: str, role: Role, **megatron: Any) -> dict[str, dict[str, int]]:
    """Return the FLOPs by operation that torch counts in a scoring pass and in an update, all
    sequences in one micro-batch. Attention on CPUs, which torch's counter does not know, is counted
    as torch counts it on GPUs: all pairs, and five products of such a matrix in the backward pass,
    one of them the scores again."""
    with mesh_groups(1, 1) as groups:
        engine = make_engine(checkpoint, role, groups, **megatron)
        engine.make_trainable(OptimConfig(), 1)
        batch = token_batch(250, PROMPTS, RESPONSES)
        zeros = batch.rollout_log_probs
        names = ("old_log_probs", "ref_log_probs", "advantages", "values", "returns")
        batch = batch.with_fields(**dict.fromkeys(names, zeros))
        head = value_head if role == "critic" else log_prob_head(engine.shape.vocab_size, 1.0)
        loss = objective(engine, batch, "token-mean")
        plan = [list(range(len(PROMPTS)))]
        passes: dict[str, Callable[[], object]] = {
            "forward": lambda: engine.score(batch, plan, head),
            "update": lambda: engine.backward(batch, plan, loss),
        }
        return {name: _counted(action) for name, action in passes.items()}


def counted_update(checkpoint: str, role: Role) -> tuple[dict[str, int], float]:
    """Return the FLOPs by operation that torch counts in an update of two epochs with mini-batches
    of two sequences and micro-batches of at most 20 tokens, and the FLOPs of its MFU."""
    epochs = 2
    with mesh_groups(1, 1) as groups:
        engine = make_engine(checkpoint, role, groups)
        engine.make_trainable(OptimConfig(), 1)
        batch = token_batch(250, PROMPTS, RESPONSES)
        names = ("old_log_probs", "ref_log_probs", "advantages", "values", "returns")
        batch = batch.with_fields(**dict.fromkeys(names, batch.rollout_log_probs))
        minis = mini_batches(len(PROMPTS), 1, 2, epochs, shuffle=True, seed=(1, 2))
        budget = TokenBudget(role, 1, 20, 20, Adjustments(Path()))
        counts = _counted(
            lambda: update(
                engine,
                batch,
                minis,
                lambda mini: objective(engine, mini, "token-mean"),
                budget,
                SkippedUpdates(1, Path()),
            )
        )
        return counts, update_flops(engine.shape, batch, epochs)


def _counted(action: Callable[[], object]) -> dict[str, int]:
    aten = torch.ops.aten
    on_cpu = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping=on_cpu)
    with counter:
        action()
    return {
        str(operation): count for operation, count in counter.get_flop_counts()["Global"].items()
    }


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return flop_counter.sdpa_flop_count(query, key, value)


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return flop_counter.sdpa_backward_flop_count(grad, query, key, value)
