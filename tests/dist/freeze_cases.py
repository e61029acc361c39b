"""What the ranks run in test_freezing.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from model_cases import Role, _my_micro_batches, _objective, logical_tensors, make_engine, mesh_groups

from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.freeze import frozen_parameters, frozen_tensors
from rlhf_mc.trainer.setup import layouts_of


def frozen_step(
    checkpoint: str,
    role: Role,
    patterns: Sequence[str],
    tp: int,
    pp: int,
    batch: RaggedBatch,
    sequences: Sequence[int],
    **megatron: Any,
) -> dict[str, Any]:
    """One update with these tensors frozen: the gradient of each logical tensor (NaN where it has none, and not with
    the distributed optimizer, of which each rank has a part), the weights before and after, and the metrics."""
    with mesh_groups(tp, pp) as groups:
        engine = make_engine(checkpoint, role, groups, **megatron)
        tensors = frozen_tensors(f"{role}.freeze", patterns, engine.shape)
        before = logical_tensors(engine, engine.params)
        frozen = frozen_parameters(tensors, layouts_of(engine)[groups.rank])
        engine.make_trainable(OptimConfig(lr=1e-2, weight_decay=0.1), total_steps=1, frozen=frozen)
        mini = batch.select(sequences)
        cut = _my_micro_batches(engine, mini, 32)
        metrics = engine.train_step(mini, cut, _objective(engine, mini, "token-mean"))
        after = logical_tensors(engine, engine.params)
        engine.backward(mini, cut, _objective(engine, mini, "token-mean"))
        local = {
            name: param.main_grad if param.requires_grad else torch.full_like(param, torch.nan)
            for name, param in engine.named_parameters().items()
        }
        return {
            "tensors": tensors,
            "before": before,
            "after": after,
            "metrics": metrics,
            "trains_here": sum(param.requires_grad for param in engine.named_parameters().values()),
            "gradients_after": logical_tensors(engine, local),
        }
