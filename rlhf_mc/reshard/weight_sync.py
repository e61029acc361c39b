"""The weight update before each rollout: it writes the actor's parameters into the rollout
engine's. The plan is made once, at the start of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.reshard.execute import BoundPlan, bind
from rlhf_mc.reshard.plan import Plan
from rlhf_mc.reshard.shared_memory import host_transport
from rlhf_mc.reshard.transfers import RankPlan
from rlhf_mc.reshard.transport import PointToPoint, Transport
from rlhf_mc.reshard.verify import verify

VerifyWhen = Literal["off", "first", "always"]


class WeightSync:
    """This rank's part of the update, and the byte counts of all ranks."""

    def __init__(
        self,
        plans: Sequence[Plan],
        rank: int,
        verify_when: VerifyWhen,
        dtype: torch.dtype | None = None,
        keep_views: bool = True,
    ) -> None:
        """plans: of make_plans, the same on every rank. dtype: of the messages, except the
        correction biases'; None: the one type of all tensors. keep_views: the views of the first
        update serve the later ones; without it tensors may be temporary, and those of the source
        anything that slices to tensors."""
        self.plan, *biases = (plan.for_rank(rank) for plan in plans)
        """This rank's transfers, except the correction biases'."""
        # On GPUs, NCCL chooses between NVLink and the network.
        messages = (
            PointToPoint(_world())
            if platform.use_cuda()
            else host_transport(self.plan.outbox_bytes, _world())
        )
        self._parts: list[tuple[RankPlan, torch.dtype | None, Transport]] = [
            (self.plan, dtype, messages),
            *((part, torch.float32, PointToPoint(_world())) for part in biases),
        ]
        self._keep_views = keep_views
        self._bound: list[BoundPlan] = []
        """The plans with the views of `_tensors`."""
        self._tensors: list[torch.Tensor] = []
        self._verify_when = verify_when
        self._is_first = True
        self.metrics = {
            f"reshard/{kind}_bytes": float(
                sum(getattr(part, f"{kind}_bytes")[rank] for part in plans)
            )
            for kind in ("shared", "copied", "sent", "received")
        }
        """Bytes that one update moves on this rank."""
        self.summary = _summary(plans)
        """One line of text for the console."""

    def run(self, source: Mapping[str, Any], target: Mapping[str, torch.Tensor]) -> None:
        """Update the target. Collective. Raise UserError if verification finds a difference."""
        tensors = [*source.values(), *target.values()]
        bound = self._bound if self._bound and self._is_bound_to(tensors) else []
        if not bound:
            self._bound = []  # frees the storages of earlier parameters
            self._tensors = []
        for number, (plan, dtype, transport) in enumerate(self._parts):
            if len(bound) == number:
                bound_plan = bind(plan, source, target, dtype)
                bound.append(bound_plan.kept() if self._keep_views else bound_plan)
            bound[number].execute(transport)
        if self._keep_views:
            self._bound = bound
            self._tensors = tensors
        if self._verify_when == "always" or (self._verify_when == "first" and self._is_first):
            with platform.named_range("verify"):
                for plan, dtype, _ in self._parts:
                    verify(plan, source, target, _world(), dtype)
        self._is_first = False

    def _is_bound_to(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True where the views are of the memory of these tensors. An offload resizes a
        storage, which all of its views follow, and vLLM's sleep keeps addresses."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        return addresses == [tensor.data_ptr() for tensor in self._tensors]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _summary(plans: Sequence[Plan]) -> str:
    def megabytes(kind: str) -> str:
        counts = [
            sum(of_rank)
            for of_rank in zip(*(getattr(plan, f"{kind}_bytes") for plan in plans), strict=True)
        ]
        low = min(counts) / 1e6
        high = max(counts) / 1e6
        return f"{high:.1f} MB" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f} MB"

    line = (
        f"weight update: {megabytes('shared')} shared (zero-copy), "
        f"{megabytes('copied')} copied, {megabytes('received')} received"
    )
    plan = plans[0]
    return (
        f"{line}; largest sender {plan.sender_imbalance:.2f} x the mean"
        if any(plan.sent_bytes)
        else line
    )
