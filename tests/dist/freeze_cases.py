"""Functions that the ranks run in test_freezing.py."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from gpu_parts.engines import score_tokens
from model_cases import (
    TEMPERATURE,
    Role,
    _my_micro_batches,
    _objective,
    logical_tensors,
    make_engine,
    mesh_groups,
)
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models import gpt_model
from rlhf_mc.models.engine import engine_layouts
from rlhf_mc.models.heads import log_prob_head
from rlhf_mc.reshard.freeze import frozen_parameters, frozen_tensors

Product = tuple[str, tuple[torch.Size, ...]]
"""Name of an operator and the sizes of its tensors."""


class Products(TorchDispatchMode):
    """Records every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear"):
            self.seen.append((name, tuple(x.shape for x in args if isinstance(x, torch.Tensor))))
        return func(*args, **(kwargs or {}))


def train_step_with_frozen_tensors(
    checkpoint: str,
    role: Role,
    patterns: Sequence[str],
    tp: int,
    pp: int,
    batch: RaggedBatch,
    sequences: Sequence[int],
    recompute_modules: list[str] | None = None,
    **megatron: Any,
) -> dict[str, Any]:
    """Run one update with the tensors that match `patterns` frozen. Return their names, the weights
    before and after, the metrics, the number of parameters that train on this rank, and the
    gradient of each logical tensor after the update: NaN for frozen ones, and only this rank's
    shard with the distributed optimizer. recompute_modules: those of selective recomputation, in
    place of a CPU's.
    """
    patch = mock.patch.object(gpt_model, "recompute_modules", lambda *args: recompute_modules)
    with mesh_groups(tp, pp) as groups, patch if recompute_modules else contextlib.nullcontext():
        engine = make_engine(checkpoint, role, groups, **megatron)
        tensors = frozen_tensors(f"{role}.freeze", patterns, engine.shape)
        before = logical_tensors(engine, engine.params)
        frozen = frozen_parameters(tensors, engine_layouts(engine)[groups.rank])
        engine.make_trainable(OptimConfig(lr=1e-2, weight_decay=0.1), total_steps=1, frozen=frozen)
        mini = batch.select(sequences)
        micro_batches = _my_micro_batches(engine, mini, 32)
        step = engine.train_step(mini, micro_batches, _objective(engine, mini, "token-mean"))
        after = logical_tensors(engine, engine.params)
        engine.backward(mini, micro_batches, _objective(engine, mini, "token-mean"))
        local = {
            name: param.main_grad if param.requires_grad else torch.full_like(param, torch.nan)
            for name, param in engine.named_parameters().items()
        }
        return {
            "tensors": tensors,
            "before": before,
            "after": after,
            "step": (step.lr, step.skipped),
            "trains_here": sum(param.requires_grad for param in engine.named_parameters().values()),
            "gradients_after": logical_tensors(engine, local),
        }


def matrix_products(
    checkpoint: str, tp: int, batch: RaggedBatch, patterns: Sequence[str], **megatron: Any
) -> dict[str, list[Product]]:
    """Return the matrix products of the log-prob pass of a frozen and of a trainable model, and of
    a forward and backward pass with the tensors that match `patterns` frozen. Each pass is one
    micro-batch.
    """
    out = {}
    every = [list(range(batch.num_sequences))]
    with mesh_groups(tp, 1) as groups:
        for kind in ("frozen", "trainable", "partly frozen"):
            engine = make_engine(checkpoint, "actor", groups, **megatron)
            if kind != "frozen":
                tensors = (
                    frozen_tensors("actor.freeze", patterns, engine.shape)
                    if kind == "partly frozen"
                    else ()
                )
                frozen = frozen_parameters(tensors, engine_layouts(engine)[groups.rank])
                engine.make_trainable(OptimConfig(), total_steps=1, frozen=frozen)
            with Products() as products:
                if kind == "partly frozen":
                    engine.backward(batch, every, _objective(engine, batch, "token-mean"))
                else:
                    score_tokens(
                        engine, batch, log_prob_head(engine.shape.vocab_size, TEMPERATURE), 1 << 20
                    )
            out[kind] = products.seen
    return out
