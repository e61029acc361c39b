"""The metrics of a step as a whole, and the console lines of a run. docs/metrics.md lists the
metrics."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache

import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.algorithms.estimators import differ
from rlhf_mc.architectures.operations import ForwardFlops, forward_flops
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import Config
from rlhf_mc.data.balance import Cost, assign_to_replicas, sequence_costs
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.machine.facts import memory
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.gpt_model import DTYPES
from rlhf_mc.observability.metrics import summarize_lengths
from rlhf_mc.observability.sinks import Sink
from rlhf_mc.planner.gpus import device_bfloat16
from rlhf_mc.runtime.console import print_line
from rlhf_mc.topology.consensus import gather_objects, on_every_rank
from rlhf_mc.trainer.logprob_check import Difference
from rlhf_mc.trainer.pool.generate import prompt_order
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import StepState, slowest_rank_times
from rlhf_mc.trainer.update import entropy_coeff, kl_loss_coef

_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""Phases that work on prompts and responses. Generation makes the responses."""
_PRODUCTS = 5
"""Products from which measured_flops takes the fastest."""


def step_metrics(run: Run, state: StepState, batch: RaggedBatch) -> None:
    """Add the metrics of the step as a whole: lengths, balance, throughput, memory. The ranks of a
    rollout pool get the metrics of rank 0. Every rank must call it."""
    if run.trains:
        _add_step_metrics(run, state, batch)
    if run.has_rollout_pool:
        state.metrics = gather_objects(state.metrics if run.groups.rank == 0 else {})[0]


def _add_step_metrics(run: Run, state: StepState, batch: RaggedBatch) -> None:
    """Add the metrics of `step_metrics` on a rank that trains."""
    data = run.config.data
    lens = batch.conversation_lens
    state.metrics |= summarize_lengths(
        "response_length", batch.response_lens, data.max_response_length, lens
    )
    state.metrics |= summarize_lengths("prompt_length", batch.prompt_lens, data.max_prompt_length)
    if not run.config.algorithm.rollout_correction.bypass_mode:
        state.metrics.update(difference_metrics(batch.trained()))
    seq_lens = batch.contexts().seq_lens.tolist()
    state.metrics.update(
        balance_metrics(seq_lens, run.groups.mesh.dp, run.actor.shape.sequence_cost)
    )
    if run.config.rollout.n > 1:
        state.metrics["train/equal_groups_ratio"] = equal_groups_ratio(batch, run.config.rollout.n)
    if run.config.actor.use_kl_loss:
        state.metrics["actor/kl_coef"] = kl_loss_coef(run, state.step)
    if run.config.actor.entropy_coeff_end is not None:
        coeff = entropy_coeff(run.config.actor, state.step, run.schedule.total_steps)
        state.metrics["actor/entropy_coeff"] = coeff
    sources = [prompt.data_source for prompt in state.prompts]
    state.metrics.update(response_lengths_by_source(batch, sources, data.max_response_length))
    times = state.timer.result()
    seconds = times["timing_s/step"]
    tokens = int(batch.seq_lens.sum())
    state.metrics.update(
        {
            "training/global_step": state.step,
            "training/epoch": (state.num_prompts - 1) // prompt_order(run).epoch_length,
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds / dist.get_world_size(),
            **{
                f"perf/idle_share/{pool}": idle / seconds
                for pool, idle in state.idle_seconds.items()
            },
            **memory_metrics(),
            **per_token_metrics(batch, state.num_generated, times),
            **utilization_metrics(
                run.actor,
                run.critic,
                run.config,
                batch,
                {**state.metrics, **times, **slowest_rank_times(state)},
            ),
            **run.weight_sync.metrics,
            **run.offload_schedule.metrics(),
        }
    )


def response_lengths_by_source(
    batch: RaggedBatch, sources: Sequence[str], limit: int
) -> dict[str, float]:
    """Return the lengths of the responses of each data source. sources: one entry per response."""
    rows: dict[str, list[int]] = {}
    for i, source in enumerate(sources):
        rows.setdefault(source, []).append(i)
    metrics: dict[str, float] = {}
    for source, indices in sorted(rows.items()):
        lens = batch.conversation_lens[indices]
        metrics |= summarize_lengths(
            f"response_length/{source}", batch.response_lens[indices], limit, lens
        )
    return metrics


def difference_metrics(batch: RaggedBatch) -> dict[str, float]:
    """Return the differences between the engine's and the trainer's log-probs of the sampled
    tokens. The correlation of their probabilities is 1 where one of them is the same for all
    tokens. Those of log-probs are absent where older weights have drawn all tokens."""
    assert batch.old_log_probs is not None
    if not batch.num_sequences:
        return {}
    probs = torch.stack([batch.old_log_probs, batch.rollout_log_probs]).double().exp()
    probs_diff = (probs[0] - probs[1]).abs()
    centred = probs - probs.mean(dim=1, keepdim=True)
    is_constant = bool((probs == probs[:, :1]).all(dim=1).any())
    correlation = (
        1.0 if is_constant else float((centred[0] @ centred[1]) / centred.norm(dim=1).prod())
    )
    difference = Difference.from_batch(batch)
    compared = {} if difference is None else asdict(difference)
    return {
        "training/rollout_probs_diff_max": float(probs_diff.max()),
        "training/rollout_probs_diff_mean": float(probs_diff.mean()),
        "training/rollout_probs_diff_std": float(probs_diff.std(correction=0)),
        "training/rollout_actor_probs_pearson_corr": correlation,
        **{f"training/rollout_logprobs_diff_{name}": value for name, value in compared.items()},
    }


def balance_metrics(seq_lens: Sequence[int], num_replicas: int, cost: Cost) -> dict[str, float]:
    """Return the tokens per data-parallel replica, assigned round-robin and by cost (balance.py),
    and the share of the replicas' time that they spend waiting for the one with the highest
    cost."""
    round_robin = [sum(seq_lens[r::num_replicas]) for r in range(num_replicas)]
    parts = assign_to_replicas(seq_lens, num_replicas, cost)
    balanced = [sum(seq_lens[i] for i in part) for part in parts]
    cost_of = sequence_costs(seq_lens, cost)
    costs = [sum(cost_of[i] for i in part) for part in parts]
    return {
        "global_seqlen/min": min(round_robin),
        "global_seqlen/max": max(round_robin),
        "global_seqlen/mean": sum(round_robin) / num_replicas,
        "global_seqlen/minmax_diff": max(round_robin) - min(round_robin),
        "global_seqlen/balanced_min": min(balanced),
        "global_seqlen/balanced_max": max(balanced),
        "global_seqlen/idle_share": 1.0 - sum(costs) / (num_replicas * max(costs)),
    }


def equal_groups_ratio(batch: RaggedBatch, responses_per_prompt: int) -> float:
    """Return the share of prompts whose responses all have the same score, but for those that are
    not trained on."""
    assert batch.scores is not None
    n = responses_per_prompt
    mask = None if batch.sample_mask is None else batch.sample_mask.view(-1, n)
    return 1.0 - float(differ(batch.scores.view(-1, n), mask).double().mean())


def memory_metrics() -> dict[str, float]:
    """Return the memory in use: on this rank's device at the peak of torch's tensors so far, and on
    its machine now. The used share is the device's; on a CPU the machine's."""
    machine, available = memory()
    total, free = platform.free_device_memory() or (machine, available)
    return {
        "perf/peak_memory_gb": platform.peak_memory_gb(),
        "perf/memory_used_ratio": min(max(1.0 - free / total, 0.0), 1.0),
        "perf/cpu_memory_used_gb": (machine - available) / 2**30,
        **{f"perf/{name}": size for name, size in platform.device_peaks_gb().items()},
    }


def log(sinks: Sink, state: StepState) -> None:
    """Log the step's metrics and times. Every rank must call it."""
    on_every_rank(lambda: sinks.log(state.step, {**state.metrics, **state.timer.result()}))


def print_on_console(cfg: Config, line: str) -> None:
    """Print one line to standard output on rank 0, if trainer.logger has "console"."""
    if "console" in cfg.trainer.logger:
        print_line(line, sys.stdout, rank_0_only=True)


def per_token_metrics(
    batch: RaggedBatch, num_generated: int, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return `{timing_per_token_ms/<phase>: milliseconds}`, without a phase that had no tokens.
    num_generated: response tokens that the step has generated. seconds: `timing_s/<phase>` of the
    step."""
    num_tokens = {"gen": num_generated, **dict.fromkeys(_PHASES, int(batch.seq_lens.sum()))}
    return {
        f"timing_per_token_ms/{phase}": 1000 * seconds[f"timing_s/{phase}"] / count
        for phase, count in num_tokens.items()
        if count and f"timing_s/{phase}" in seconds
    }


def utilization_metrics(
    actor: ModelEngine,
    critic: ModelEngine | None,
    cfg: Config,
    batch: RaggedBatch,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Return the MFU of the step's updates and of the old log-probs: FLOPs of the pass, per rank
    and second of its phase, over the rank's peak; none if the peak is not known. seconds: as above,
    of the slowest rank, and the shares of tokens that the updates have computed, 1 without shared
    prompts; a phase that the step does not have has no MFU."""
    peak = peak_flops(cfg.actor.megatron.dtype)
    if peak is None:
        return {}
    peak *= actor.groups.mesh.world
    trained = batch.trained()
    computed = seconds.get("actor/computed_tokens", 1.0)
    flops = {
        "actor": (
            "update_actor",
            update_flops(actor.shape, trained, cfg.actor.ppo_epochs, computed),
        ),
        "actor_infer": ("old_log_prob", log_prob_flops(actor.shape, batch, computed)),
    }
    if critic is not None:
        epochs = cfg.critic.ppo_epochs or cfg.actor.ppo_epochs
        computed = seconds.get("critic/computed_tokens", 1.0)
        flops["critic"] = ("update_critic", update_flops(critic.shape, trained, epochs, computed))
    return {
        f"perf/mfu/{name}": count / seconds[f"timing_s/{phase}"] / peak
        for name, (phase, count) in flops.items()
        if f"timing_s/{phase}" in seconds
    }


def update_flops(
    shape: ModelShape, batch: RaggedBatch, epochs: int, computed: float = 1.0
) -> float:
    """Return the FLOPs of an update, summed over all ranks: forward and backward passes over the
    batch, once an epoch. Tensors that actor.freeze names count as trained ones, as they do in verl.
    Nothing that is recomputed counts. computed: as log_prob_flops."""
    flops = _pass_flops(shape, batch, computed)
    return epochs * (flops.total + flops.backward(shape).total)


def log_prob_flops(shape: ModelShape, batch: RaggedBatch, computed: float = 1.0) -> float:
    """Return the FLOPs of a pass that computes log-probs, summed over all ranks. computed: share of
    the tokens that all but attention computes, below 1 where prompts are shared."""
    return _pass_flops(shape, batch, computed).total


def _pass_flops(shape: ModelShape, batch: RaggedBatch, computed: float) -> ForwardFlops:
    lens = batch.contexts().seq_lens.tolist()
    flops = forward_flops(shape, lens, int(batch.response_lens.sum()))
    return replace(
        flops,
        projections=computed * flops.projections,
        feed_forward=computed * flops.feed_forward,
    )


@lru_cache
def peak_flops(dtype: str) -> float | None:
    """Return the peak FLOP/s of a rank: of its GPU for dense bfloat16 by the data sheet, as verl's.
    Of a CPU, or of a GPU that is not in planner/gpus.py, the rate of the fastest of some large
    products in `dtype`, measured once; None, with a warning, if there is no memory for that."""
    gpu = platform.gpu_name()
    try:
        if gpu is None:
            return measured_flops(DTYPES[dtype], 512)
        return device_bfloat16(gpu) or measured_flops(DTYPES[dtype], 8192)
    except RuntimeError as error:
        if not platform.is_out_of_memory(error):
            raise
        print_line(
            "warning: no memory to measure the device's FLOP/s; perf/mfu is left out",
            rank_0_only=True,
        )
        return None


def measured_flops(dtype: torch.dtype, size: int) -> float:
    """Return the FLOP/s of the fastest of some products of two matrices [size, size] on this rank's
    device."""
    factor = torch.ones(size, size, dtype=dtype, device=platform.device())
    seconds = []
    for _ in range(_PRODUCTS):
        platform.synchronize()
        start = time.perf_counter()
        factor @ factor
        platform.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
