"""The state of a step while its phases run, the metrics of the step, and the console lines of a run. docs/metrics.md
lists the metrics.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rlhf_mc import platform
from rlhf_mc.data.balance import Cost, assign_to_replicas, costs_of
from rlhf_mc.data.batch import Prompt, RaggedBatch
from rlhf_mc.data.order import batches_per_epoch, prompts_per_batch
from rlhf_mc.models.forward import PackingCache
from rlhf_mc.observability.metrics import PhaseTimer, summarize_lengths
from rlhf_mc.observability.sinks import Sink
from rlhf_mc.runtime.console import say
from rlhf_mc.runtime.machine_facts import available_memory, memory
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.topology.consensus import on_every_rank, start_max_over_ranks
from rlhf_mc.trainer.logprob_check import Difference
from rlhf_mc.trainer.setup import Run
from rlhf_mc.trainer.speed_metrics import per_token_metrics, utilization_metrics
from rlhf_mc.trainer.update import entropy_coeff, kl_loss_coef


@dataclass
class StepState:
    """The state of one step that its phases share."""

    step: int
    """1 for the first; 0 before it."""
    timer: PhaseTimer
    metrics: dict[str, float] = field(default_factory=dict)
    num_batches: int = 0
    """Batches of prompts that the run has drawn so far."""
    drawn: Counter[int] = field(default_factory=Counter)
    """Number of times that this step has drawn each prompt, by its index."""
    prompts: Sequence[Prompt] = ()
    """The prompt of each response of this step's batch."""
    packing: PackingCache = field(default_factory=PackingCache)
    """Packed inputs of this step's batch."""
    greedy: RaggedBatch | None = None
    """One response to each prompt at temperature 0, if the advantage estimator needs its score."""
    slowest: dict[str, Callable[[], float]] = field(default_factory=dict)
    """By `timing_s/<phase>` the function that returns the seconds of the slowest rank."""


def begin_step(step: int, status: RankStatus, num_batches: int | None = None) -> StepState:
    """Return the state of a new step, whose timer keeps `status` up to date. num_batches: batches of prompts that
    earlier steps have drawn; None: one each."""
    status.step = step
    num_batches = max(step - 1, 0) if num_batches is None else num_batches
    return StepState(step, PhaseTimer(platform.synchronize, status), num_batches=num_batches)


def step_metrics(run: Run, state: StepState, batch: RaggedBatch) -> None:
    """Add the metrics of the step as a whole: lengths, balance, throughput, memory. Every rank must call it."""
    data = run.config.data
    state.metrics.update(length_metrics(batch, data.max_prompt_length, data.max_response_length))
    if not run.config.algorithm.rollout_correction.bypass_mode:
        state.metrics.update(difference_metrics(batch))
    seq_lens = batch.seq_lens.tolist()
    state.metrics.update(balance_metrics(seq_lens, run.groups.mesh.dp, run.actor.shape.sequence_cost))
    if run.config.rollout.n > 1:
        state.metrics["train/equal_groups_ratio"] = equal_groups_ratio(batch, run.config.rollout.n)
    if run.config.actor.use_kl_loss:
        state.metrics["actor/kl_coef"] = kl_loss_coef(
            run.config, run.kl_controller, run.adjustments.kl_coef(state.step)
        )
    if run.config.actor.entropy_coeff_end is not None:
        coeff = entropy_coeff(run.config.actor, state.step, run.schedule.total_steps)
        state.metrics["actor/entropy_coeff"] = coeff
    sources = [prompt.data_source for prompt in state.prompts]
    state.metrics.update(response_lengths_by_source(batch, sources, data.max_response_length))
    per_epoch = batches_per_epoch(len(run.train_prompts), prompts_per_batch(data))
    times = state.timer.result()
    seconds = times["timing_s/step"]
    tokens = int(batch.seq_lens.sum())
    state.metrics.update(
        {
            "training/global_step": state.step,
            "training/epoch": (state.num_batches - 1) // per_epoch,
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds / run.groups.mesh.world,
            **memory_metrics(),
            **per_token_metrics(batch, times),
            **utilization_metrics(run.actor, run.critic, run.config, batch, {**times, **of_slowest_rank(state)}),
            **run.weight_sync.metrics,
            **run.offload_schedule.metrics(),
        }
    )


def start_slowest_rank(state: StepState, phase: str) -> None:
    """Start to compute the time of a phase that has ended on its slowest rank. Only phases at whose end no rank waits
    for the others need it. Every rank must call it."""
    key = f"timing_s/{phase}"
    state.slowest[key] = start_max_over_ranks(state.timer.result()[key])


def of_slowest_rank(state: StepState) -> dict[str, float]:
    """Return `timing_s/<phase>` of the slowest rank, of the phases of `start_slowest_rank`. Every rank must call it."""
    return {key: seconds() for key, seconds in state.slowest.items()}


def length_metrics(batch: RaggedBatch, max_prompt_length: int, max_response_length: int) -> dict[str, float]:
    """Return the lengths of prompts and responses."""
    return {
        **summarize_lengths("response_length", batch.response_lens, max_response_length),
        **summarize_lengths("prompt_length", batch.prompt_lens, max_prompt_length),
    }


def response_lengths_by_source(batch: RaggedBatch, sources: Sequence[str], limit: int) -> dict[str, float]:
    """Return the lengths of the responses of each data source. sources: one entry per response."""
    rows: dict[str, list[int]] = {}
    for i, source in enumerate(sources):
        rows.setdefault(source, []).append(i)
    metrics: dict[str, float] = {}
    for source, indices in sorted(rows.items()):
        metrics |= summarize_lengths(f"response_length/{source}", batch.response_lens[indices], limit)
    return metrics


def difference_metrics(batch: RaggedBatch) -> dict[str, float]:
    """Return the differences between vLLM's and the trainer's log-probs of the sampled tokens. The correlation of their
    probabilities is 1 where one of them is the same for all tokens."""
    assert batch.old_log_probs is not None
    probs = torch.stack([batch.old_log_probs, batch.rollout_log_probs]).double().exp()
    probs_diff = (probs[0] - probs[1]).abs()
    centred = probs - probs.mean(dim=1, keepdim=True)
    is_constant = bool((probs == probs[:, :1]).all(dim=1).any())
    correlation = 1.0 if is_constant else float((centred[0] @ centred[1]) / centred.norm(dim=1).prod())
    difference = Difference.of(batch)
    return {
        "training/rollout_probs_diff_max": float(probs_diff.max()),
        "training/rollout_probs_diff_mean": float(probs_diff.mean()),
        "training/rollout_probs_diff_std": float(probs_diff.std(correction=0)),
        "training/rollout_actor_probs_pearson_corr": correlation,
        "training/rollout_logprobs_diff_mean": difference.mean,
        "training/rollout_logprobs_diff_p99": difference.p99,
        "training/rollout_logprobs_diff_max": difference.max,
    }


def balance_metrics(seq_lens: Sequence[int], num_replicas: int, cost: Cost) -> dict[str, float]:
    """Return the tokens per data-parallel replica, assigned round-robin and by cost (balance.py), and the share of the
    replicas' time that they spend waiting for the one with the highest cost."""
    round_robin = [sum(seq_lens[r::num_replicas]) for r in range(num_replicas)]
    parts = assign_to_replicas(seq_lens, num_replicas, cost)
    balanced = [sum(seq_lens[i] for i in part) for part in parts]
    of_sequence = costs_of(seq_lens, cost)
    costs = [sum(of_sequence[i] for i in part) for part in parts]
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
    """Return the share of prompts whose responses all have the same score."""
    assert batch.scores is not None
    groups = batch.scores.view(-1, responses_per_prompt)
    return float((groups == groups[:, :1]).all(1).double().mean())


@functools.cache
def _machine_memory() -> int:
    return memory()[0]


def memory_metrics() -> dict[str, float]:
    """Return the memory in use: on this rank's device at the peak of torch's tensors so far, and on its machine now.
    The used share is the device's; on a CPU the machine's."""
    machine = _machine_memory()
    available = available_memory()
    total, free = platform.free_device_memory() if platform.use_cuda() else (machine, available)
    return {
        "perf/peak_memory_gb": platform.peak_memory_gb(),
        "perf/memory_used_ratio": min(max(1.0 - free / total, 0.0), 1.0),
        "perf/cpu_memory_used_gb": (machine - available) / 2**30,
        **{f"perf/{name}": size for name, size in platform.device_peaks_gb().items()},
    }


def log(sinks: Sink, state: StepState) -> None:
    """Log the step's metrics and times. Every rank must call it."""
    on_every_rank(lambda: sinks.log(state.step, {**state.metrics, **state.timer.result()}))


def say_on_console(run: Run, line: str) -> None:
    """Print one line to standard output on rank 0, if trainer.logger has "console"."""
    if "console" in run.config.trainer.logger:
        say(line, sys.stdout, rank_0_only=True)
