"""The weight update before each rollout: it writes the actor's parameters into the rollout engine's. The plan is made
once, at the start of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.reshard.execute import execute
from rlhf_mc.reshard.layout import Layout
from rlhf_mc.reshard.placement import split_layouts
from rlhf_mc.reshard.plan import Plan, make_plan
from rlhf_mc.reshard.shared_memory import host_transport
from rlhf_mc.reshard.transport import PointToPoint, Transport
from rlhf_mc.reshard.verify import verify

VerifyWhen = Literal["off", "first", "always"]


class WeightSync:
    """This rank's part of the update, and the byte counts of all ranks."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        verify_when: VerifyWhen,
        dtype: torch.dtype | None = None,
        biases: Plan | None = None,
    ) -> None:
        """dtype: of the messages; None: the one type of all tensors. biases: the plan of the correction biases,
        which are float32."""
        self._dtype = dtype
        self._biases = None if biases is None else biases.for_rank(rank)
        self.plan = plan.for_rank(rank)
        """This rank's transfers."""
        # On GPUs, NCCL chooses between NVLink and the network.
        self._transport: Transport = (
            PointToPoint(_world()) if platform.use_cuda() else host_transport(self.plan.outbox_bytes, _world())
        )
        self._verify_when = verify_when
        self._is_first = True
        self.metrics = {
            "reshard/shared_bytes": float(plan.shared_bytes[rank]),
            "reshard/copied_bytes": float(plan.copied_bytes[rank]),
            "reshard/sent_bytes": float(plan.sent_bytes[rank]),
            "reshard/received_bytes": float(plan.received_bytes[rank]),
        }
        """Bytes that one update moves on this rank."""
        self.summary = _summary(plan)
        """One line of text for the console."""

    def run(self, source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
        """Update the target. Collective. Raise UserError if verification finds a difference."""
        execute(self.plan, source, target, self._transport, self._dtype)
        if self._biases is not None:
            execute(self._biases, source, target, PointToPoint(_world()), torch.float32)
        if self._verify_when == "always" or (self._verify_when == "first" and self._is_first):
            with platform.named_range("verify"):
                verify(self.plan, source, target, _world(), self._dtype)
                if self._biases is not None:
                    verify(self._biases, source, target, _world())
        self._is_first = False


def plan_weight_sync(
    source: Sequence[Layout],
    target: Sequence[Layout],
    biases: frozenset[str],
    rank: int,
    dtype: torch.dtype,
    verify_when: VerifyWhen,
    bucket_bytes: int,
    ranks_per_node: int = 8,
    share: bool = False,
) -> WeightSync:
    """Return this rank's update from each rank's layout of the trainer to its layout of an engine, the same plan on
    every rank. biases: the correction biases, float32 in both, whatever the type `dtype` of the trainer's others."""
    source, source_biases = split_layouts(source, biases)
    target, target_biases = split_layouts(target, biases)
    plan = make_plan(source, target, dtype.itemsize, bucket_bytes, ranks_per_node, share=share)
    if not biases:
        return WeightSync(plan, rank, verify_when, dtype)
    others = make_plan(source_biases, target_biases, torch.float32.itemsize, bucket_bytes, ranks_per_node)
    return WeightSync(plan, rank, verify_when, dtype, others)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _summary(plan: Plan) -> str:
    def megabytes(counts: tuple[int, ...]) -> str:
        low = min(counts) / 1e6
        high = max(counts) / 1e6
        return f"{high:.1f} MB" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f} MB"

    line = (
        f"weight update: {megabytes(plan.shared_bytes)} shared (zero-copy), "
        f"{megabytes(plan.copied_bytes)} copied, {megabytes(plan.received_bytes)} received"
    )
    return f"{line}; largest sender {plan.sender_imbalance:.2f} x the mean" if any(plan.sent_bytes) else line
