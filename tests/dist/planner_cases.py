"""Functions that the ranks run in test_planned_memory.py. Each is called on every rank with the
same arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low
from typing import Any

from gpu_parts.engines import make_engine, mesh_groups, objective, token_batch
from gpu_parts.measure import activation_peak

from rlhf_mc.config.schema import LoraConfig, OptimConfig
from rlhf_mc.models.engine import ModelEngine, engine_layouts
from rlhf_mc.models.offload import distinct_storages, optimizer_tensors, tensors_besides
from rlhf_mc.planner.model_state import ModelState
from rlhf_mc.reshard.freeze import frozen_parameters, frozen_tensors

SEQUENCES = 4
"""Sequences of a micro-batch."""
PROMPT = 40
"""Tokens."""
RESPONSE = 60
"""Tokens."""
PASSES = 9


def measured_state(
    checkpoint: str, mesh: dict[str, int], freeze: Sequence[str], lora_rank: int, **megatron: Any
) -> ModelState:
    """Build a trained actor with Adam's moments and return the bytes of its storages on this
    rank."""
    with mesh_groups(**{"tp": 1, "pp": 1, **mesh}) as groups:
        engine = make_engine(checkpoint, "actor", groups, LoraConfig(lora_rank), **megatron)
        frozen = frozen_tensors("actor.freeze", freeze, engine.shape)
        engine.make_trainable(
            OptimConfig(), 1, frozen_parameters(frozen, engine_layouts(engine)[groups.rank])
        )
        at_start = engine.rank_share()
        engine.load_progress({"optimizer_steps": 1, "schedule_steps": 1})
        state = _state(engine)
        # The table of a run's start, before the moments exist; only storages have padding.
        assert (at_start.gradients, at_start.optimizer) == (state.grads, state.optimizer), (
            at_start,
            state,
        )
        assert 0 <= state.params - at_start.weights < 4096
        return state


def measured_share(
    checkpoint: str, mesh: dict[str, int], freeze: Sequence[str], **megatron: Any
) -> tuple[ModelState, ModelState]:
    """Build an actor and return the bytes on this rank, before and after it is trained."""
    with mesh_groups(tp=1, pp=1, **mesh) as groups:
        engine = make_engine(checkpoint, "actor", groups, **megatron)
        kept = engine.rank_share()
        frozen = frozen_tensors("actor.freeze", freeze, engine.shape)
        layout = engine_layouts(engine)[groups.rank]
        engine.make_trainable(OptimConfig(), 1, frozen_parameters(frozen, layout))
        engine.load_progress({"optimizer_steps": 1, "schedule_steps": 1})
        share = engine.rank_share()
        return (
            ModelState(kept.weights, kept.gradients, kept.optimizer),
            ModelState(share.weights, share.gradients, share.optimizer),
        )


def _state(engine: ModelEngine) -> ModelState:
    params = list(engine.named_parameters().values())
    grads = [
        buffer.grad_data
        for ddp in engine.strategy.buffered
        for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)
    ]
    optimizer = list(tensors_besides(optimizer_tensors(engine.strategy.optimizer), params))
    return ModelState(
        *[sum(s.nbytes() for s in distinct_storages(part)) for part in (params, grads, optimizer)]
    )


def measured_peak(
    checkpoint: str, mesh: dict[str, int], micro_batches: int, lora_rank: int = 0, **megatron: Any
) -> int:
    """Return the peak of the bytes that torch's profiler counts while a gradient is computed, over
    `micro_batches` micro-batches of SEQUENCES sequences on every replica. The gradient buffers
    exist before.

    On one rank it is that of the first profiled pass. Later ones leave out what the pass before has
    left: a profile counts from 0, and after a recomputation some tensors are freed in the next
    pass. On several ranks it is the median of PASSES passes: gloo's threads free tensors of
    collectives at different times, and no profile sees it."""
    with mesh_groups(**{"tp": 1, "pp": 1, **mesh}) as groups:
        engine = make_engine(checkpoint, "actor", groups, LoraConfig(lora_rank), **megatron)
        frozen = frozen_tensors("actor.freeze", (), engine.shape)
        engine.make_trainable(
            OptimConfig(), 1, frozen_parameters(frozen, engine_layouts(engine)[groups.rank])
        )
        batch = token_batch(
            250, [PROMPT] * SEQUENCES * micro_batches, [RESPONSE] * SEQUENCES * micro_batches
        )
        zeros = batch.rollout_log_probs
        batch = replace(batch, advantages=zeros + 1, old_log_probs=zeros, ref_log_probs=zeros)
        plan = [
            range(start, start + SEQUENCES) for start in range(0, batch.num_sequences, SEQUENCES)
        ]
        loss = objective(engine, batch, "token-mean")
        engine.backward(batch, plan, loss)
        passes = PASSES if groups.mesh.world > 1 else 1
        return median_low(
            activation_peak(lambda: engine.backward(batch, plan, loss)) for _ in range(passes)
        )
