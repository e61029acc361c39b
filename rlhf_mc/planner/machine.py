"""The machine that a step's times are bounds for: its GPUs, and what they do in a second."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_mc.architectures.operations import ForwardFlops
from rlhf_mc.planner.gpus import Rates


@dataclass(frozen=True)
class Machine:
    """The GPUs of a run and their links."""

    world: int
    gpus_per_node: int
    rates: Rates
    network: float
    """Bytes per second and direction of the network, per GPU."""

    def seconds(self, intra_node: float, inter_node: float) -> float:
        """Return the seconds in which a rank receives bytes from its node and, at the same time, from others."""
        return max(intra_node / self.rates.nvlink, inter_node / self.network)


class ProductRate:
    """Rates of products."""

    def __init__(self, rates: Rates, dtype: str, fp8: bool) -> None:
        self._wide = rates.float32 if dtype == "float32" else rates.bfloat16
        self._weights = (rates.fp8 or self._wide) if fp8 else self._wide

    def seconds(self, flops: ForwardFlops) -> float:
        """Return the seconds of a forward pass. With fp8 attention and output layer are in bfloat16."""
        in_layers = (flops.projections + flops.feed_forward) / self._weights
        return in_layers + (flops.attention + flops.output) / self._wide
