"""Metrics of the speed of a step: tokens per second, milliseconds per token, and model FLOPs utilization (MFU)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache

import torch

from rlhf_mc import platform
from rlhf_mc.architectures.operations import forward_flops, training_flops
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import Config
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.build import DTYPES
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.planner.gpus import device_bfloat16
from rlhf_mc.runtime.console import say

_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""Phases that work on prompts and responses. Generation makes the responses."""
_PRODUCTS = 5


def per_token_metrics(batch: RaggedBatch, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return `{timing_per_token_ms/<phase>: milliseconds}`. seconds: `timing_s/<phase>` of the step."""
    num_tokens = {"gen": int(batch.response_lens.sum()), **dict.fromkeys(_PHASES, int(batch.seq_lens.sum()))}
    return {
        f"timing_per_token_ms/{phase}": 1000 * seconds[f"timing_s/{phase}"] / count
        for phase, count in num_tokens.items()
        if f"timing_s/{phase}" in seconds
    }


def utilization_metrics(
    actor: ModelEngine, critic: ModelEngine | None, cfg: Config, batch: RaggedBatch, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return the MFU of the step's updates and of the old log-probs: FLOPs of the pass, per rank and second of its
    phase, over the rank's peak; none if the peak is not known. seconds: as above, of the slowest rank; a phase that the
    step does not have has no MFU."""
    peak = peak_flops(cfg.actor.megatron.dtype)
    if peak is None:
        return {}
    peak *= actor.groups.mesh.world
    flops = {
        "actor": ("update_actor", update_flops(actor.shape, batch, cfg.actor.ppo_epochs)),
        "actor_infer": ("old_log_prob", log_prob_flops(actor.shape, batch)),
    }
    if critic is not None:
        epochs = cfg.critic.ppo_epochs or cfg.actor.ppo_epochs
        flops["critic"] = ("update_critic", update_flops(critic.shape, batch, epochs))
    return {
        f"perf/mfu/{name}": count / seconds[f"timing_s/{phase}"] / peak
        for name, (phase, count) in flops.items()
        if f"timing_s/{phase}" in seconds
    }


def update_flops(shape: ModelShape, batch: RaggedBatch, epochs: int) -> float:
    """Return the FLOPs of an update, summed over all ranks: forward and backward passes over the batch, once an epoch.
    Frozen tensors count as trained ones, as they do in verl."""
    return epochs * training_flops(shape, batch.seq_lens.tolist(), int(batch.response_lens.sum()))


def log_prob_flops(shape: ModelShape, batch: RaggedBatch) -> float:
    """Return the FLOPs of a pass that computes log-probs, summed over all ranks."""
    return forward_flops(shape, batch.seq_lens.tolist(), int(batch.response_lens.sum())).total


@lru_cache
def peak_flops(dtype: str) -> float | None:
    """Return the peak FLOP/s of a rank: of its GPU for dense bfloat16 by the data sheet, as verl's. Of a CPU, or of a
    GPU that is not in planner/gpus.py, the rate of the fastest of some large products in `dtype`, measured once;
    None, with a warning, if there is no memory for that."""
    rate = device_bfloat16(torch.cuda.get_device_name()) if platform.use_cuda() else None
    try:
        return rate or measured_flops(DTYPES[dtype], 8192 if platform.use_cuda() else 512)
    except Exception as error:
        if not platform.is_out_of_memory(error):
            raise
        say("warning: no memory to measure the device's FLOP/s; perf/mfu is left out", rank_0_only=True)
        return None


def measured_flops(dtype: torch.dtype, size: int) -> float:
    """Return the FLOP/s of the fastest of some products of two matrices [size, size] on this rank's device."""
    factor = torch.ones(size, size, dtype=dtype, device=platform.device())
    seconds = []
    for _ in range(_PRODUCTS):
        platform.synchronize()
        start = time.perf_counter()
        factor @ factor
        platform.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
