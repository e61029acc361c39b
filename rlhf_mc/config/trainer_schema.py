"""The settings of a run's length, output, checkpoints and timeouts. schema.py has the other
sections. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlhf_mc.config.numbers import (
    MOST_SECONDS,
    Count,
    CountOrMinus1,
    CountOrZero,
    FreeOnResume,
    Number,
    Positive,
    PositiveMinutes,
    Range,
    Seconds,
)

Logger = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab"]


@dataclass
class TrainerConfig:
    """The run: its length, output, checkpoints and timeouts."""

    default_local_dir: FreeOnResume[str]
    """Output directory. It belongs to one run: when another run begins in it, the files of the
    earlier run are moved to earlier_runs/<id of the earlier run>/."""
    total_epochs: Count = 30
    """Epochs over the training prompts. The run ends after the step that draws the last batch of
    them."""
    total_training_steps: Count | None = None
    """PPO steps; null: the steps of total_epochs."""
    val_before_train: bool = True
    """Validate before the first step."""
    test_freq: CountOrMinus1 = -1
    """Steps between validations. There is one after the last step too. -1: never."""
    save_freq: FreeOnResume[CountOrMinus1] = -1
    """Steps between training checkpoints, from which the run can resume. They are written to
    global_step_<n>/. There is one after the last step too. -1: never."""
    save_minutes: FreeOnResume[PositiveMinutes | None] = None
    """Minutes between training checkpoints, beside those of save_freq: after the first step that
    ends this long after the last checkpoint was begun, by rank 0's clock. null: never."""
    async_save: FreeOnResume[bool] = True
    """Continue training while the files of a checkpoint are written, from a copy in host memory."""
    max_ckpt_to_keep: FreeOnResume[Count | None] = None
    """Number of training checkpoints to keep of those that save_freq asks for, and apart from these
    of those of save_minutes. Older ones are deleted once a new one is complete. null: keep all."""
    keep_best: FreeOnResume[bool] = False
    """Also keep the checkpoint with the highest best_metric."""
    best_metric: FreeOnResume[str | None] = None
    """The validation metric by which keep_best chooses, such as
    val-core/openai/gsm8k/acc/best@4/mean; null: the mean accuracy."""
    resume_mode: FreeOnResume[Literal["auto", "disable", "resume_path"]] = "auto"
    """auto: resume from the newest intact checkpoint in default_local_dir, if there is one.
    disable: begin a new run; a requeued Slurm job still resumes the run that it began. resume_path:
    resume from resume_from_path."""
    resume_from_path: FreeOnResume[str | None] = None
    """resume_path: a training checkpoint (global_step_<n>) of any run of these models, in any
    layout. Once this run has its own checkpoints, the same command resumes from the newest of
    those."""
    replay: str | None = None
    """Directory of a run with rollout.tail_batching, partial_rollout or environment, whose
    decisions this run takes: from its rollouts.jsonl the groups of each step, and the token at
    which each response was cut; from its observations/ the answers of environments. So a run in
    another layout draws the same tokens."""
    resume_changed_inputs: FreeOnResume[Literal["refuse", "allow"]] = "refuse"
    """Behaviour on resume if data, model or tokenizer files have changed since the checkpoint, by
    size and content hash. refuse: an error that lists them. allow: a warning. A changed
    custom_reward_function is always a warning."""
    export_freq: FreeOnResume[CountOrMinus1] = -1
    """Steps between exports of the actor as a Hugging Face checkpoint to export/global_step_<n>/;
    -1: none. After the last step the actor is always exported to hf/."""
    log_val_generations: FreeOnResume[CountOrZero] = 8
    """Number of generations of each validation that are written to
    default_local_dir/generations/<step>.jsonl."""
    log_train_generations: FreeOnResume[CountOrZero] = 8
    """Number of generations that are written of the first training step and of every tenth one, in
    default_local_dir/train_generations/<step>.jsonl, of each prompt up to 4 first: texts, scores,
    and of the first 512 tokens log-probs, values and advantages."""
    validation_data_dir: FreeOnResume[str | None] = None
    """Directory for all generations of each validation, as <step>.jsonl: input, output, gts, score,
    parts of the score, length; null: none."""
    rollout_data_dir: FreeOnResume[str | None] = None
    """Directory for all generations that a training step trains on, in the same form; null:
    none."""
    val_only: FreeOnResume[bool] = False
    """Validate the initial weights or the checkpoint of resume_mode and end. Metrics and samples go
    to validation/; no other file in default_local_dir is changed."""
    target_val_acc: Number | None = None
    """End the run once the mean validation accuracy reaches this value; null: never."""
    logger: FreeOnResume[list[Logger]] = field(
        default_factory=lambda: ["console", "jsonl", "tensorboard"],
    )
    """Outputs of the metrics. wandb (Weights & Biases), mlflow and swanlab need the package of that
    name, and read the environment variables of that package (docs/trackers.md)."""
    project_name: FreeOnResume[str] = "rlhf_mc"
    """Project in Weights & Biases and SwanLab, experiment in MLflow."""
    experiment_name: FreeOnResume[str | None] = None
    """Name of the run there; null: the last part of default_local_dir."""
    critic_warmup: CountOrZero = 0
    """PPO steps at the start in which only the critic is updated."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 1  # numpy, which vLLM seeds too, takes 32 bits
    """Seed of all random draws, below 2^32."""
    deterministic: bool = False
    """On GPUs, use algorithms alone whose sums have one order: training then gives the same bits
    from the same inputs on the same kind of machine. Attention's backward pass and all-reduces are
    slower (docs/reliability.md). On CPUs this is so anyway."""
    max_rollout_logprob_diff: Positive | None = None
    """Bound of |trainer's log-prob - engine's log-prob| of the sampled tokens, at
    rollout.temperature 1: its mean may be at most the bound, its 99th percentile at most ten times
    the bound. The first rollout after a start or a resume is an error above the bound; the first
    later one is a warning. At temperature T the bound is divided by T, as the logits are. null:
    0.001 in float32, 0.1 in bfloat16, 0.3 with actor.megatron.fp8 or rollout.quantization."""
    planner: FreeOnResume[Literal["warn", "refuse", "off"]] = "warn"
    """Plan the memory of each rank at the start. warn: print the result, a warning if the run does
    not fit. refuse: an error if it does not fit, before anything is loaded. off: no plan. `python
    -m rlhf_mc.planner` prints the whole plan."""
    dist_timeout_seconds: FreeOnResume[Seconds] = 600
    """Timeout of collectives, for every process group."""
    heartbeat_timeout_seconds: FreeOnResume[Seconds] = 120
    """Timeout of heartbeats. If a rank sends none for this time (its process is frozen or its node
    is down), the run ends on all ranks. A thread sends them, so that a long computation or
    collective does not delay them."""
    # After a rank has crashed, torchrun and Slurm send SIGTERM to the others, and SIGKILL 30 s
    # later. A rank whose grace period ends before SIGKILL would end with EXIT_REQUEUE, and the
    # crashed run would be requeued.
    preemption_grace_seconds: FreeOnResume[Annotated[int, Range(60, MOST_SECONDS)]] = 300
    """Time after a stop request (SIGTERM, SIGUSR1) to finish or abandon the step and to save. The
    run then ends without saving, and the last complete checkpoint remains. At least 60, and less
    than the scheduler's own grace period (sbatch --signal)."""
    stop_before_minutes: FreeOnResume[PositiveMinutes | None] = None
    """In a Slurm job: minutes before the job's time limit at which the run stops and saves, as
    after a signal; null: never."""
