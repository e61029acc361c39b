"""GPUs by name: their memory and their rates by the vendor's data sheets, without structured
sparsity; and the machine whose rates bound a step's times.

A bandwidth that a data sheet gives for both directions together is halved: the planner counts each
direction.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_mc.architectures.operations import ForwardFlops
from rlhf_mc.config.errors import UserError

NETWORK_BANDWIDTH = 50e9
"""Bytes per second and direction of the network, per GPU: one adapter of 400 Gb/s for each GPU, as
in a DGX H100 or DGX B200 (NVIDIA's user guides of both)."""


@dataclass(frozen=True)
class Rates:
    """Peak rates of a GPU, per second. A run reaches a part of each."""

    bfloat16: float
    """FLOPs of dense bfloat16 products."""
    fp8: float | None
    """FLOPs of dense fp8 products; None: the GPU has none."""
    float32: float
    """FLOPs of float32 products, without TF32."""
    memory: float
    """Bytes to and from device memory."""
    nvlink: float
    """Bytes to other GPUs of the node, and as many from them at the same time."""
    host: float
    """Bytes to host memory, and as many from it at the same time."""


@dataclass(frozen=True)
class Gpu:
    """A GPU."""

    memory: int
    """Bytes of device memory. The driver keeps up to 1 GiB of it (reserved.DRIVER)."""
    rates: Rates | None = None
    """None: the GPU was given by its bytes alone, so that no times are known."""


GPUS = {
    "a100": Gpu(80 << 30, Rates(312e12, None, 19.5e12, 2.039e12, 300e9, 32e9)),
    "h100": Gpu(80 << 30, Rates(989e12, 1979e12, 67e12, 3.35e12, 450e9, 64e9)),
    "h200": Gpu(139 << 30, Rates(989e12, 1979e12, 67e12, 4.8e12, 450e9, 64e9)),
    "b200": Gpu(178 << 30, Rates(2250e12, 4500e12, 75e12, 8e12, 900e9, 64e9)),
}
"""The SXM variant of each GPU. Sources: NVIDIA's data sheets "A100 80GB SXM" (PCIe 4.0: 64 GB/s,
NVLink 600 GB/s), "H100 SXM" and "H200 SXM" (tensor cores "with sparsity" halved; PCIe 5.0: 128
GB/s, NVLink 900 GB/s), "DGX B200" (eight GPUs: 1,440 GB, 64 TB/s, 36 PFLOP/s bfloat16 and 72
PFLOP/s fp8 with sparsity, NVLink 14.4 TB/s; its hosts have PCIe 5.0) and "HGX B200" (float32)."""

DEVICE_BFLOAT16 = {
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "B100": 1750e12,
    "L40S": 362e12,
}
"""Dense bfloat16 FLOP/s by a part of the name that a device reports; the first that matches
counts."""


def parse_gpu(text: str) -> Gpu:
    """Return a GPU that is named or given by the bytes of its memory. Raise UserError if the text
    is neither."""
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    try:
        memory = int(float(text))
    except (ValueError, OverflowError):
        memory = 0
    if memory < 1 << 30:
        raise UserError(
            f"--gpu is {text!r}; it must be one of {', '.join(GPUS)}, or its memory in bytes, such "
            "as 80e9"
        )
    return Gpu(memory)


def device_bfloat16(name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a device by the name that it reports; None where it is
    not known."""
    return next((rate for part, rate in DEVICE_BFLOAT16.items() if part in name), None)


@dataclass(frozen=True)
class Overheads:
    """Time of a step on top of products, memory and links at their rates: none in a lower bound."""

    attention: float = 1.0
    """Share of the rate of other products that attention reaches."""
    forward_traffic: float = 0.0
    """Bytes that a forward pass reads and writes outside of products, over those that its layers
    store for a backward pass without recomputation."""
    training_traffic: float = 0.0
    """The same of a forward and a backward pass, over the same bytes."""
    forward_logits: float = 0.0
    """Reads and writes of float32 logits in a forward pass of the log-prob head."""
    training_logits: float = 0.0
    """The same of a forward and a backward pass."""
    layer_seconds: float = 0.0
    """Seconds of an engine step per layer, on top of products and bytes: launches, small kernels, a
    part of the sampler."""
    host_seconds: float = 0.0
    """Seconds of an engine step on the host per sequence. The device computes meanwhile."""


@dataclass(frozen=True)
class Machine:
    """The GPUs of a run and their links."""

    world: int
    gpus_per_node: int
    rates: Rates
    network: float
    """Bytes per second and direction of the network, per GPU."""
    overheads: Overheads = Overheads()

    def seconds(self, intra_node: float, inter_node: float) -> float:
        """Return the seconds in which a rank receives bytes from its node and, at the same time,
        from others."""
        return max(intra_node / self.rates.nvlink, inter_node / self.network)


class ProductRate:
    """Rates of products."""

    def __init__(self, machine: Machine, dtype: str, fp8: bool) -> None:
        rates = machine.rates
        self._wide = rates.float32 if dtype == "float32" else rates.bfloat16
        self._weights = (rates.fp8 or self._wide) if fp8 else self._wide
        self._attention = self._wide * machine.overheads.attention

    def seconds(self, flops: ForwardFlops) -> float:
        """Return the seconds of a forward pass. With fp8 attention and output layer are in
        bfloat16."""
        in_layers = (flops.projections + flops.feed_forward) / self._weights
        return in_layers + flops.attention / self._attention + flops.output / self._wide
