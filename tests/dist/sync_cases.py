"""Functions that the ranks run in test_host_syncs.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from gpu_parts.engines import TEMPERATURE, Role, make_engine, mesh_groups, objective
from gpu_parts.host_syncs import host_syncs

from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import Loss
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.gpt_model import PackedGPT
from rlhf_mc.models.heads import log_prob_head, value_head


def waits(
    checkpoint: str,
    role: Role,
    layout: tuple[int, int, int],
    batch: RaggedBatch,
    reading: bool,
    computes_old_log_probs: bool = False,
    **megatron: Any,
) -> dict[str, list[dict[str, int]]]:
    """Return for a scoring pass and a gradient what makes the host wait with all sequences in one
    micro-batch, and with one sequence in each. reading: the loss reads a number in each
    micro-batch. computes_old_log_probs: it computes the old log-probs.

    layout: (tensor-parallel, pipeline-parallel, virtual pipeline chunks)."""
    tp, pp, vpp = layout
    if computes_old_log_probs:
        batch = replace(batch, old_log_probs=None)
    counts_by_pass: dict[str, list[dict[str, int]]] = {"score": [], "gradient": []}
    with mesh_groups(tp, pp, vpp=vpp) as groups:
        engine = make_engine(checkpoint, role, groups, **megatron)
        engine.make_trainable(OptimConfig(), total_steps=1)
        head = (
            value_head if role == "critic" else log_prob_head(engine.shape.vocab_size, TEMPERATURE)
        )
        loss = (
            _reading(objective(engine, batch, "token-mean"))
            if reading
            else objective(engine, batch, "token-mean")
        )
        everything = list(range(batch.num_sequences))
        for micro_batches in ([everything], [[i] for i in everything]):
            passes = {
                "score": lambda m=micro_batches: engine.score(batch, m, head),
                "gradient": lambda m=micro_batches: engine.backward(batch, m, loss),
            }
            for name, run in passes.items():
                run()  # agrees on the names of the statistics
                with host_syncs() as counts:
                    run()
                counts_by_pass[name].append(dict(counts))
    return counts_by_pass


def _reading(loss: Loss) -> Loss:
    def read(
        model: PackedGPT, states: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        value, stats = loss(model, states, micro)
        assert float(value) == float(value)
        return value, stats

    return read
