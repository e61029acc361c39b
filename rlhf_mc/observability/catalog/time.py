"""Metrics of time, speed and memory."""

from __future__ import annotations

from rlhf_mc.observability.catalog.metric import Metric, Section

_SUM = "sum over the step, rank 0"
_PHASES = """\
Each phase is a part of one line of the training loop ([architecture.md](architecture.md#phases)).
`timing_s/testing` is the time of validation, under verl's name."""

TIME = Section(
    "Time",
    [
        Metric(
            "timing_s/update_weights",
            "the weight update: from Megatron-Core's parameters to vLLM's",
            "s",
            _SUM,
        ),
        Metric("timing_s/gen", "generation, of all batches that the step draws", "s", _SUM),
        Metric(
            "timing_s/reward",
            "sending responses to the reward workers and waiting for their scores",
            "s",
            _SUM,
            "if it grows, raise `reward.num_workers`",
        ),
        Metric(
            "timing_s/reward_hidden",
            "time of rank 0's reward workers that overlapped with the reward models' and the "
            "log-prob passes (with `algorithm.filter_groups` not with the latter)",
            "s",
            _SUM,
        ),
        Metric(
            "timing_s/reward_model timing_s/reward_models.<name> "
            "timing_s/distillation.teacher_models.<name>",
            "each reward model's and each teacher's pass",
            "s",
            _SUM,
        ),
        Metric(
            "timing_s/{old_log_prob,ref,values}",
            "forward passes of actor, reference and critic, without waiting for other "
            "data-parallel replicas or for later pipeline stages; no `old_log_prob` where the "
            "update computes them ([algorithms.md](algorithms.md#old-log-probs))",
            "s",
            _SUM,
        ),
        Metric(
            "timing_s/sum_log_probs",
            "sum of these passes' log-probs and values over the ranks, with the wait for the "
            "slowest rank's passes",
            "s",
            _SUM,
        ),
        Metric(
            "timing_s/idle",
            "with `resource_pools`, the wait of rank 0 for the rollout ranks",
            "s",
            _SUM,
        ),
        Metric(
            "perf/idle_share/{train,rollout}",
            "with `resource_pools`, the share of the step in which ranks of this pool wait for "
            "those of the other",
            "share",
            "mean over the ranks of the pool",
            "above 0.1: give the other pool more ranks",
        ),
        Metric("timing_s/adv", "rewards to advantages", "s", _SUM),
        Metric("timing_s/{update_critic,update_actor}", "the updates", "s", _SUM),
        Metric("timing_s/testing", "validation", "s", _SUM),
        Metric(
            "timing_s/save_checkpoint",
            "time that a training checkpoint blocks the loop: copying it, or with "
            "`trainer.async_save: false` writing it",
            "s",
            _SUM,
        ),
        Metric("timing_s/export", "writing the actor as a Hugging Face checkpoint", "s", _SUM),
        Metric(
            "timing_s/offload",
            "offload and onload between the step's phases, not of optimizer states within an "
            "update; only with offload "
            "settings or `rollout.free_cache_engine`",
            "s",
            _SUM,
        ),
        Metric(
            "timing_s/write_profile",
            "writing the profile, in a step of `profile.steps` "
            "([watching.md](watching.md#profiles-of-single-steps))",
            "s",
            _SUM,
        ),
        Metric(
            "timing_s/step",
            "the phases of training, from the weight update to the actor's update; validation, "
            "saving, export and profile come after it",
            "s",
            "rank 0",
        ),
    ],
    _PHASES,
)

_MFU = """\
MFU (model FLOPs utilization) is verl's quotient: FLOPs of the model / seconds of the phase / number
of ranks / peak. Products of matrices count (`rlhf_mc/architectures/operations.py`). A causal
sequence of n tokens counts n (n + 1) / 2 pairs of attention, and the output layer counts at
response tokens. verl counts n² pairs, and embedding and output layer at all tokens, so that its MFU
is higher. What is recomputed does not count, and tensors of actor.freeze count as trained ones, in
verl too; with adapters a frozen weight has one product in the backward pass, and adapters none.

The peak of a GPU is the data sheet's rate of dense bfloat16 products (`rlhf_mc/planner/gpus.py`),
whatever the dtype. Of a CPU, and of a GPU that is not in that table, each rank measures it at its
first step: the fastest of five products of large matrices in the actor's dtype, which differs by
some percent from start to start."""

SPEED = Section(
    "Speed",
    [
        Metric(
            "perf/total_num_tokens",
            "tokens of the batch, prompts and responses",
            "tokens",
            "sum over responses",
        ),
        Metric("perf/time_per_step", "`timing_s/step`", "s", "rank 0"),
        Metric(
            "perf/throughput",
            "tokens per second and rank: `perf/total_num_tokens` / `perf/time_per_step` / number "
            "of ranks",
            "tokens/s",
            "mean over ranks",
        ),
        Metric(
            "perf/mfu/{actor,critic}",
            "model FLOPs utilization of the update: FLOPs of its forward and backward passes over "
            "all PPO epochs, per rank and second of `timing_s/update_actor`, "
            "`timing_s/update_critic`, over the peak of a rank",
            "share",
            "mean over ranks",
            "a fall: shorter or fewer sequences in a micro-batch, a new layout, or another job on "
            "the machine",
        ),
        Metric(
            "perf/mfu/actor_infer",
            "the same of the forward pass that computes the old log-probs, if there is one, by the "
            "time of the slowest rank",
            "share",
            "mean over ranks",
        ),
        Metric(
            "timing_per_token_ms/gen",
            "generation, per response token that the step has generated",
            "ms",
            "rank 0",
        ),
        Metric(
            "timing_per_token_ms/{old_log_prob,ref,values,adv,update_critic,update_actor}",
            "the phase, per token of the batch, prompts and responses",
            "ms",
            "rank 0",
        ),
    ],
    _MFU,
)

MEMORY = Section(
    "Memory",
    [
        Metric(
            "memory/{actor,critic,ref,reward_model}_offloaded_gb "
            "memory/{reward_models,distillation.teacher_models}.<name>_offloaded_gb",
            "largest device memory of that model that was offloaded at one time; on a CPU nothing "
            "is saved",
            "GiB",
            "largest so far, rank 0",
        ),
        Metric(
            "perf/peak_memory_gb",
            "peak memory: tensors on a GPU, the whole process on a CPU. With "
            "`rollout.free_cache_engine` torch also "
            "counts what vLLM has released, so that the sum can exceed the device",
            "GiB",
            "largest so far, rank 0",
        ),
        Metric(
            "perf/memory_used_ratio",
            "used share of the device memory at the peak of torch's tensors so far; on a CPU of "
            "the machine's, now",
            "share",
            "at the end of the step, rank 0",
            "above 0.95: a longer batch may not fit",
        ),
        Metric(
            "perf/{max_memory_allocated_gb,max_memory_reserved_gb}",
            "peaks of what torch has allocated and reserved on the GPU",
            "GiB",
            "largest so far, rank 0",
        ),
        Metric(
            "perf/cpu_memory_used_gb",
            "memory of the machine, or of the job's control group, that is in use",
            "GiB",
            "at the end of the step, machine of rank 0",
        ),
    ],
)
