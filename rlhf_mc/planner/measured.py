"""The times to expect of a step, by a table of measurements: what one model on one GPU has reached
of the peak rates.

For other models and machines the same factors are an extrapolation, and each time says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import Config, layouts
from rlhf_mc.planner.gpus import GPUS, Machine, Overheads
from rlhf_mc.planner.lengths import Lengths
from rlhf_mc.planner.memory import RankMemory
from rlhf_mc.planner.times import StepTimes, plan_times
from rlhf_mc.planner.traffic import GEN, Traffic, phase_work

MEASURED = "measured"
EXTRAPOLATED = "extrapolated"


@dataclass(frozen=True)
class Measurement:
    """Factors of one model on one GPU, in bfloat16."""

    source: str
    gpu: str
    """Key of GPUS."""
    hidden_size: int
    num_layers: int
    tokens: float
    """Tokens of each sequence."""
    sequences: int
    """Sequences that the engine decodes at a time."""
    phases: frozenset[str]
    """Phases of a step that were measured."""
    products: float
    """Share of the peak rate that a large product reaches."""
    memory: float
    """Share of the memory bandwidth that a copy reaches, each byte read and written."""
    host: float
    """Share of the host link."""
    links: float
    """Share of NVLink and network."""
    overheads: Overheads
    """Its logits are those of `hidden_size`."""
    logits: Mapping[int, tuple[float, float]]
    """Hidden size -> Overheads.forward_logits and training_logits."""


H200_HALF_BILLION = Measurement(
    source="one H200, Qwen2.5-0.5B, 256 sequences of 12 + 1024 tokens, 2026-11-26 (docs/gpu.md)",
    gpu="h200",
    hidden_size=896,
    num_layers=24,
    tokens=1036,
    sequences=256,
    phases=frozenset({"gen", "old_log_prob", "values", "update_critic", "update_actor"}),
    products=0.76,  # 749 TFLOP/s, 8192 x 8192
    memory=0.87,  # 2.09 TB/s copied
    host=0.86,  # 55 GB/s, page-locked
    # Not measured here: NCCL reaches 370 of NVLink's 450 GB/s on 8 H100 (NVIDIA/nccl-tests issue
    # 212).
    links=0.82,
    overheads=Overheads(
        # Not measured here: on an H100 cuDNN reaches 0.62 of the peak, forward and without a mask
        # (arXiv 2407.08608); masks and backward passes are slower. At 1036 tokens attention has 6 %
        # of the products.
        attention=0.5,
        forward_traffic=3.5,  # values: 518,000 tokens/s
        training_traffic=9.6,  # critic's update: 179,000 tokens/s
        layer_seconds=70e-6,  # 2.3 ms of kernels in an engine step
        host_seconds=42e-6,  # 23,700 tokens/s
    ),
    # 896: log-probs at 288,000 and the actor's update at 74,700 tokens/s, less the body. 3584:
    # heads_152k at 425 and 496 TFLOP/s, and 4 reads and writes more for an update's entropy.
    logits={896: (8.2, 44.3), 3584: (7.7, 24.5)},
)
MEASUREMENTS = (H200_HALF_BILLION,)


@dataclass(frozen=True)
class Expected:
    """The times to expect of a step."""

    times: StepTimes
    kinds: Mapping[str, str]
    """Phase -> MEASURED or EXTRAPOLATED."""
    source: str
    """The measurement whose factors they are."""

    @property
    def kind(self) -> str:
        """The kind of the step's time."""
        return MEASURED if set(self.kinds.values()) == {MEASURED} else EXTRAPOLATED


def expect_times(
    cfg: Config,
    shapes: Mapping[str, ModelShape],
    plan: Sequence[RankMemory],
    weights: Sequence[Traffic],
    machine: Machine,
    lengths: Lengths,
) -> Expected:
    """Return the times to expect by the nearest measurement. The arguments are plan_times's,
    machine at its peaks. A phase is MEASURED that was, of the same model on the same GPU, with half
    to twice as many tokens of a sequence and, in generation, sequences at a time."""
    reached, measurement = expected_machine(machine, shapes["actor"])
    times = plan_times(cfg, shapes, plan, weights, reached, lengths)
    roles = {work.phase: work.role for work in phase_work(cfg, shapes, machine.world, lengths)} | {
        GEN: "actor"
    }
    same_gpu = machine.world == 1 and machine.rates == GPUS[measurement.gpu].rates
    tokens = lengths.total / measurement.tokens
    sequences = times.sequences_at_a_time / measurement.sequences

    def kind(phase: str) -> str:
        ratios = (tokens, sequences) if phase == GEN else (tokens,)
        if (
            not same_gpu
            or phase not in measurement.phases
            or not all(0.5 <= r <= 2 for r in ratios)
        ):
            return EXTRAPOLATED
        shape = shapes[roles[phase]]
        megatron = layouts(cfg)[roles[phase]]
        same_model = (shape.hidden_size, shape.num_layers) == (
            measurement.hidden_size,
            measurement.num_layers,
        )
        plain = (megatron.dtype, megatron.fp8, megatron.recompute_granularity) == (
            "bfloat16",
            None,
            None,
        )
        plain &= phase != GEN or cfg.rollout.quantization is None
        return MEASURED if same_model and plain else EXTRAPOLATED

    return Expected(
        times, {phase.name: kind(phase.name) for phase in times.phases}, measurement.source
    )


def expected_machine(machine: Machine, shape: ModelShape) -> tuple[Machine, Measurement]:
    """Return the machine at the rates and with the overheads of the nearest measurement, by hidden
    size. shape: the actor's."""

    def distance(hidden_size: int) -> float:
        return abs(math.log(hidden_size / shape.hidden_size))

    nearest = min(MEASUREMENTS, key=lambda measurement: distance(measurement.hidden_size))
    forward, training = nearest.logits[min(nearest.logits, key=distance)]
    peak = machine.rates
    rates = replace(
        peak,
        bfloat16=peak.bfloat16 * nearest.products,
        fp8=peak.fp8 and peak.fp8 * nearest.products,
        float32=peak.float32 * nearest.products,
        memory=peak.memory * nearest.memory,
        nvlink=peak.nvlink * nearest.links,
        host=peak.host * nearest.host,
    )
    overheads = replace(nearest.overheads, forward_logits=forward, training_logits=training)
    return replace(
        machine, rates=rates, network=machine.network * nearest.links, overheads=overheads
    ), nearest
