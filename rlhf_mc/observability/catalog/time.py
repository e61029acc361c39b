"""Metrics of time, speed and memory."""

from __future__ import annotations

from rlhf_mc.observability.catalog.metric import Metric, Section

_SUM = "sum over the step, rank 0"

TIME = Section(
    "Time",
    [
        Metric("timing_s/gen", "generation, of all batches that the step draws", "s", _SUM),
        Metric("timing_s/update_weights", "moving the weights from Megatron to vLLM", "s", _SUM),
        Metric(
            "timing_s/reward",
            "sending responses to the reward workers and waiting for their scores",
            "s",
            _SUM,
            "if it grows, raise `reward.num_workers`",
        ),
        Metric(
            "timing_s/reward_hidden",
            "time of rank 0's reward workers that overlapped with the reward models' and the log-prob passes (with "
            "`algorithm.filter_groups` not with the latter)",
            "s",
            _SUM,
        ),
        Metric("timing_s/reward_model timing_s/reward_models.<name>", "each reward model's pass", "s", _SUM),
        Metric("timing_s/{old_log_prob,ref,values}", "forward passes of actor, reference and critic", "s", _SUM),
        Metric("timing_s/adv", "rewards to advantages", "s", _SUM),
        Metric("timing_s/{update_critic,update_actor}", "the updates", "s", _SUM),
        Metric("timing_s/testing", "validation", "s", _SUM),
        Metric(
            "timing_s/save_checkpoint",
            "time that a training checkpoint blocks the loop: copying it, or with `trainer.async_save: false` writing "
            "it",
            "s",
            _SUM,
        ),
        Metric("timing_s/export", "writing the actor as a Hugging Face checkpoint", "s", _SUM),
        Metric(
            "timing_s/offload",
            "offload and onload between the step's phases; only with offload settings or `rollout.free_cache_engine`",
            "s",
            _SUM,
        ),
        Metric(
            "timing_s/write_profile",
            "writing the profile, in a step of `profile.steps` ([profiling.md](profiling.md))",
            "s",
            _SUM,
        ),
        Metric("timing_s/step", "the whole step", "s", "rank 0"),
    ],
)

SPEED = Section(
    "Speed",
    [
        Metric("perf/total_num_tokens", "tokens of the batch, prompts and responses", "tokens", "sum over responses"),
        Metric("perf/time_per_step", "`timing_s/step`", "s", "rank 0"),
        Metric(
            "perf/throughput",
            "tokens per second and rank: `perf/total_num_tokens` / `perf/time_per_step` / number of ranks",
            "tokens/s",
            "mean over ranks",
        ),
    ],
)

MEMORY = Section(
    "Memory",
    [
        Metric(
            "memory/{actor,critic,ref,reward_model}_offloaded_gb memory/reward_models.<name>_offloaded_gb",
            "largest device memory of that model that was offloaded at one time; on a CPU nothing is saved",
            "GiB",
            "largest so far, rank 0",
        ),
        Metric(
            "perf/peak_memory_gb",
            "peak memory: tensors on a GPU, the whole process on a CPU. With `rollout.free_cache_engine` torch also "
            "counts what vLLM has released, so that the sum can exceed the device",
            "GiB",
            "largest so far, rank 0",
        ),
        Metric(
            "perf/memory_used_ratio",
            "used share of the device memory, without what torch could release; on a CPU of the machine's memory",
            "share",
            "at the end of the step, rank 0",
            "above 0.95: a longer batch may not fit",
        ),
    ],
)
