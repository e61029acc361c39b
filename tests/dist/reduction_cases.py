"""Functions that the ranks run in test_grad_reduction.py."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from gpu_parts.engines import (
    Role,
    logical_tensors,
    make_engine,
    mesh_groups,
    my_micro_batches,
    objective,
    token_batch,
)
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup

from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.gpt_model import PackedGPT
from rlhf_mc.models.strategies import distributed_optimizer

BUCKET = 20_000
"""Parameters of a bucket: a small part of the tests' models."""


def training_batch() -> RaggedBatch:
    """Return sequences of unlike lengths with random values of all that the losses read."""
    batch = token_batch(260, (3, 9, 5, 4, 4, 14, 2), (6, 1, 11, 5, 5, 16, 8))
    draw = torch.Generator().manual_seed(6)
    fields = ("old_log_probs", "ref_log_probs", "advantages", "values", "returns")
    size = len(batch.rollout_log_probs)
    return batch.with_fields(**{name: torch.randn(size, generator=draw) - 2.0 for name in fields})


class Training(NamedTuple):
    """Results of some optimizer steps."""

    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    num_groups: int
    """Groups of buckets that are reduced together, in this rank's first chunk."""
    early: int
    """Reductions in the last step that began before this rank's last gradient was complete."""


def train(
    checkpoint: str,
    role: Role,
    mesh: dict[str, int],
    batch: RaggedBatch,
    minis: Sequence[Sequence[int]],
    budget: int,
    frozen: str | None,
    offload: bool,
    clip_grad: float,
    **megatron: Any,
) -> Training:
    """Take one optimizer step per mini-batch. frozen: part of the names of parameters that are not
    trained."""
    small = functools.partial(DistributedDataParallelConfig, bucket_size=BUCKET)
    steps = []
    with (
        mesh_groups(**{"tp": 1, "pp": 1, **mesh}) as groups,
        mock.patch.object(distributed_optimizer, "DistributedDataParallelConfig", small),
    ):
        engine = make_engine(checkpoint, role, groups, **megatron)
        names = [
            name for name in engine.named_parameters() if frozen is not None and frozen in name
        ]
        engine.make_trainable(OptimConfig(lr=1e-2, eps=1e-3, clip_grad=clip_grad), 1, names)
        for indices in minis:
            if offload:
                engine.offload.offload_all_but(())
                engine.offload.onload(("params", "grads", "optimizer"))
            mini = batch.select(indices)
            micro_batches = my_micro_batches(engine, mini, budget)
            with _events() as events:
                steps.append(
                    engine.train_step(mini, micro_batches, objective(engine, mini, "token-mean"))
                )
        last = max((i for i, event in enumerate(events) if event == "gradient"), default=0)
        return Training(
            engine.statistics(steps),
            logical_tensors(engine, engine.params),
            _num_groups(engine),
            events[:last].count("reduction"),
        )


def steps_with_faults(
    checkpoint: str,
    mesh: dict[str, int],
    batch: RaggedBatch,
    budget: int,
    faults: Sequence[str],
    **megatron: Any,
) -> list[tuple[dict[str, float], bool]]:
    """Take one step per item of `faults`: on the last rank "loss" makes the loss of one micro-batch
    NaN, and "statistic" one of its statistics infinite. Return the statistics of each step, and
    whether a weight changed."""
    steps = []
    changed = []
    with mesh_groups(**{"tp": 1, "pp": 1, **mesh}) as groups:
        engine = make_engine(checkpoint, "actor", groups, **megatron)
        engine.make_trainable(OptimConfig(lr=1e-2, eps=1e-3), 1)
        plain = objective(engine, batch, "token-mean")
        pending: list[str] = []

        def loss(
            model: PackedGPT, states: torch.Tensor, micro: MicroBatch
        ) -> tuple[torch.Tensor, Any]:
            value, stats = plain(model, states, micro)
            fault = pending.pop() if pending and groups.rank == groups.mesh.world - 1 else ""
            if fault == "statistic":
                stats["entropy"] = stats["entropy"] + torch.inf
            return value * torch.nan if fault == "loss" else value, stats

        for fault in faults:
            before = {name: param.clone() for name, param in engine.params.items()}
            pending[:] = [fault]
            steps.append(engine.train_step(batch, my_micro_batches(engine, batch, budget), loss))
            changed.append(
                any(not torch.equal(param, before[name]) for name, param in engine.params.items())
            )
        return list(zip(engine.statistics(steps), changed, strict=True))


def _num_groups(engine: ModelEngine) -> int:
    return len(engine.strategy.buffered[0].bucket_groups)


@contextmanager
def _events() -> Iterator[list[str]]:
    """Yield the order in which gradients become ready and reductions begin."""
    events: list[str] = []
    ready = BucketGroup.register_grad_ready
    start = BucketGroup.start_grad_sync

    def on_ready(self: Any, *args: Any) -> None:
        if self.is_last_microbatch:
            events.append("gradient")
        ready(self, *args)

    def on_start(self: Any, *args: Any, **kwargs: Any) -> None:
        events.append("reduction")
        start(self, *args, **kwargs)

    with (
        mock.patch.object(BucketGroup, "register_grad_ready", on_ready),
        mock.patch.object(BucketGroup, "start_grad_sync", on_start),
    ):
        yield events
