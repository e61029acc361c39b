"""The settings of a run: one dataclass per section of the YAML file, a docstring under each field.

Names follow verl's where the meaning is the same. No torch here, and no reading of files
(see load.py); ranges are in ranges.py, what must go together is checked by `validate` in validate.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rlhf_mc.config.model_schema import MegatronConfig, OptimConfig

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
KLEstimator = Literal["k1", "k2", "k3", "low_var_kl"]


@dataclass
class DataConfig:
    """Which prompts are read, and in which sizes."""

    train_files: list[str]
    """Parquet files of training prompts (a single string is taken as a list of one)."""
    val_files: list[str] = field(default_factory=list)
    """Parquet files of validation prompts; empty: no validation."""
    prompt_key: str = "prompt"
    """Column of the prompt: chat messages (list of {role, content}) or a plain string."""
    reward_fn_key: str = "data_source"
    """Column that says which reward function scores the row."""
    train_max_samples: int = -1
    """Use only the first so many rows of the training set; -1: all."""
    val_max_samples: int = -1
    """Use only the first so many rows of the validation set; -1: all."""
    max_prompt_length: int = 512
    """Longest prompt, in tokens after the chat template."""
    max_response_length: int = 512
    """Longest response, in tokens; generation stops there."""
    train_batch_size: int = 1024
    """Prompts per step, over all ranks."""
    shuffle: bool = True
    """Draw the training prompts in a new order each epoch (a function of trainer.seed and the epoch)."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than max_prompt_length; false: such a prompt is an error that names its row."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments for the tokenizer's chat template."""


@dataclass
class ModelConfig:
    """The Hugging Face checkpoint that actor and reference start from."""

    path: str
    """Directory with config.json, the tokenizer, and safetensors weights."""
    dist_checkpointing_path: str | None = None
    """Megatron checkpoint (of tools/convert_hf_to_mcore.py) to read the weights from; null: the safetensors of path."""
    tokenizer_path: str | None = None
    """Directory of the tokenizer; null: model.path."""


@dataclass
class ActorConfig:
    """The policy's update."""

    ppo_mini_batch_size: int = 256
    """Prompts per optimizer step, over all ranks (each with its rollout.n responses)."""
    ppo_epochs: int = 1
    """Passes over the step's batch."""
    shuffle: bool = False
    """Draw the mini-batches in a new order each PPO epoch (a function of trainer.seed and the step)."""
    use_dynamic_bsz: bool = True
    """Micro-batches of all passes, of all models, are cut by token budget (the ..._max_token_len_per_gpu settings), so
    that they are alike in tokens; false: by number of sequences (the ..._micro_batch_size_per_gpu settings)."""
    ppo_max_token_len_per_gpu: int = 16384
    """Token budget of one micro-batch (prompt + response, packed); at least the longest sequence."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Without use_dynamic_bsz: sequences of one micro-batch."""
    clip_ratio_low: float = 0.2
    """Policy ratio clip, lower range: 1 - clip_ratio_low."""
    clip_ratio_high: float = 0.2
    """Policy ratio clip, upper range: 1 + clip_ratio_high."""
    clip_ratio_c: float = 3.0
    """Dual clip: where A < 0, the loss is at most -A * clip_ratio_c; must be > 1."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become the mini-batch's loss."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(actor, reference) to the policy loss."""
    kl_loss_coef: float = 0.001
    """Weight of that KL term."""
    kl_loss_type: KLEstimator = "k3"
    """Its estimator (docs/algorithms.md). verl's k3 and low_var_kl are both low_var_kl here: k3, at most 10."""
    freeze: list[str] = field(default_factory=list)
    """Tensors that are not trained: names as in the Hugging Face checkpoint, or patterns of them
    ("model.embed_tokens.*", "model.layers.0.*")."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The actor's optimizer."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """The actor's layout, and what the other roles' begin with."""


@dataclass
class CriticConfig:
    """The value model's update."""

    model_path: str | None = None
    """Hugging Face checkpoint that the critic starts from; null: the actor's body with a new value head."""
    ppo_mini_batch_size: int | None = None
    """Prompts per optimizer step, over all ranks; null: the actor's."""
    ppo_epochs: int | None = None
    """Passes over the step's batch; null: the actor's."""
    shuffle: bool = False
    """As actor.shuffle."""
    ppo_max_token_len_per_gpu: int = 32768
    """Token budget of one micro-batch of the update."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Without actor.use_dynamic_bsz: sequences of one micro-batch of the update; null: the actor's."""
    forward_max_token_len_per_gpu: int = 32768
    """Token budget of one micro-batch of the values pass."""
    forward_micro_batch_size_per_gpu: int | None = None
    """Without actor.use_dynamic_bsz: sequences of one micro-batch of the values pass; null: the actor's."""
    cliprange_value: float = 0.5
    """Values move at most this far from the old values before their loss is clipped."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become the mini-batch's loss."""
    freeze: list[str] = field(default_factory=list)
    """As actor.freeze; ["model.*"] trains the value head alone, score.weight."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """The critic's optimizer."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """The critic's own layout. What is not set is as in actor.megatron, save what belongs to a split that the critic
    does not have: sequence_parallel where its tensor-parallel size is 1; chunks and the layers of the first and last
    stage where it has another number of stages."""


@dataclass
class RefConfig:
    """The frozen reference policy. It exists only where a KL term uses it."""

    log_prob_max_token_len_per_gpu: int = 16384
    """Token budget of one micro-batch of the reference pass."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Without actor.use_dynamic_bsz: sequences of one micro-batch of the reference pass; null: the actor's."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """The reference's own layout; what is not set is taken from actor.megatron as in critic.megatron."""


@dataclass
class ValKwargsConfig:
    """Sampling for validation."""

    temperature: float = 0.0
    """0: greedy."""
    n: int = 1
    """Responses per validation prompt; val-core/<data_source>/acc/mean@n is their mean."""


@dataclass
class RolloutConfig:
    """The in-process vLLM engine. Its training samples are drawn from the full distribution
    (no top-k, no top-p), so that its log-probs and the trainer's are of the same distribution."""

    tensor_model_parallel_size: int = 1
    """Ranks that share one vLLM engine."""
    n: int = 1
    """Responses per training prompt."""
    temperature: float = 1.0
    """Sampling temperature, also of the trainer's log-probs. At least 0.01: with less vLLM would sample at 0.01."""
    gpu_memory_utilization: float = 0.5
    """GPU only: share of the device's memory for vLLM's weights and KV cache."""
    cpu_kvcache_space_gb: int = 1
    """CPU only: GiB of KV cache per rank."""
    enforce_eager: bool = False
    """GPU only: no CUDA graphs. (The CPU build always runs eagerly.)"""
    free_cache_engine: bool = False
    """GPU only: vLLM gives back the memory of its weights and KV cache while it does not generate (its sleep mode)."""
    max_num_seqs: int = 256
    """Sequences that one engine decodes at a time."""
    max_num_batched_tokens: int = 8192
    """Tokens that one engine step may process. Chunked prefill cuts a prompt that exceeds the rest of a step."""
    log_prob_max_token_len_per_gpu: int = 16384
    """Token budget of one micro-batch of the old-log-prob pass."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Without actor.use_dynamic_bsz: sequences of one micro-batch of the old-log-prob pass; null: the actor's."""
    val_kwargs: ValKwargsConfig = field(default_factory=ValKwargsConfig)
    """Sampling for validation."""


@dataclass
class KLCtrlConfig:
    """The coefficient of the KL term in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: moves kl_coef so that the KL stays near target_kl (Ziegler et al. 2019, arXiv 1909.08593)."""
    kl_coef: float = 0.001
    """The coefficient, or its start value."""
    target_kl: float = 0.1
    """adaptive: the aim for the mean over tokens of a sequence's KL, averaged over sequences."""
    horizon: int = 10000
    """adaptive: sequences over which the coefficient adapts."""


@dataclass
class AlgorithmConfig:
    """Rewards to advantages."""

    adv_estimator: Literal["gae"] = "gae"
    """Advantage estimator."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """GAE's lambda."""
    use_kl_in_reward: bool = False
    """Subtract kl_coef * KL(actor, reference) from each token's reward."""
    kl_penalty: KLEstimator = "k1"
    """Its estimator, as in actor.kl_loss_type; k1 is verl's kl."""
    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)
    """Its coefficient."""


@dataclass
class CustomRewardFunctionConfig:
    """A reward function of the user's own, in place of the built-in rules."""

    path: str | None = None
    """Python file that defines it; null: the built-in rule of the row's data_source."""
    name: str = "compute_score"
    """compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float or {"score": float, ...}."""


@dataclass
class RewardModelConfig:
    """A reward model: frozen, its score of a response is its value head's at the response's last token."""

    model_path: str | None = None
    """Hugging Face checkpoint of a sequence classifier of one label, with the actor's tokenizer: its scores take the
    place of the reward functions' in training. Validation is by the functions. null: no reward model."""
    forward_max_token_len_per_gpu: int = 32768
    """Token budget of one micro-batch."""
    forward_micro_batch_size_per_gpu: int | None = None
    """Without actor.use_dynamic_bsz: sequences of one micro-batch; null: the actor's."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """The reward model's own layout; what is not set is taken from actor.megatron as in critic.megatron."""


@dataclass
class RewardConfig:
    """How reward functions are run."""

    num_workers: int = 1
    """Processes of each rank that score its share of the responses while the log-prob passes run. Each imports the
    user's file for itself. At least 1: a function that ends or blocks its process must not end or block a rank."""
    timeout_seconds: float = 300.0
    """Time after which a worker that has scored no further response, or has not imported the user's file, is an
    error."""


@dataclass
class TrainerConfig:
    """The run: how long, how often, where to."""

    default_local_dir: str
    """Directory of everything that the run writes. It belongs to one run: when another run begins in it, the files of
    the earlier one are moved to earlier_runs/<its id>/."""
    total_epochs: int = 30
    """Passes over the training prompts."""
    total_training_steps: int | None = None
    """PPO steps; null: as many as total_epochs gives."""
    val_before_train: bool = True
    """Validate before the first step."""
    test_freq: int = -1
    """Validate every so many steps, and after the last; -1: never."""
    save_freq: int = -1
    """Write a training checkpoint, from which the run can go on, to global_step_<n>/ every so many steps and after the
    last; -1: never."""
    async_save: bool = True
    """Training goes on while a checkpoint's files are written, from a copy in host memory."""
    max_ckpt_to_keep: int | None = None
    """Training checkpoints that stay: once a new one is complete, all but the last so many go; null: all stay."""
    keep_best: bool = False
    """Beside those, keep the checkpoint of the highest validation accuracy."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """Where the run begins. auto: at the newest whole checkpoint in default_local_dir, if there is one; disable: at the
    start, and a Slurm job that was requeued resumes the run that it began; resume_path: at resume_from_path."""
    resume_from_path: str | None = None
    """resume_path: the checkpoint (global_step_<n>) of any run of these models, in any layout. Once this run has
    checkpoints of its own, the same command goes on from them."""
    resume_changed_inputs: Literal["refuse", "allow"] = "refuse"
    """What to do on resume where data, model or tokenizer files differ from the checkpoint's, by size and content hash:
    refuse, with a line that lists them, or allow, with a warning. A changed custom_reward_function is a warning."""
    export_freq: int = -1
    """Write the actor as a Hugging Face checkpoint to export/global_step_<n>/ every so many steps; -1: only after the
    last (to hf/)."""
    log_val_generations: int = 8
    """Validation generations written as text each time."""
    target_val_acc: float | None = None
    """End the run early once the mean validation accuracy has reached this; null: never."""
    logger: list[Literal["console", "jsonl", "tensorboard"]] = field(
        default_factory=lambda: ["console", "jsonl", "tensorboard"]
    )
    """Where metrics go."""
    critic_warmup: int = 0
    """PPO steps at the start in which the critic learns and the actor stays as it is."""
    seed: int = 1
    """Seed of everything random, below 2^32."""
    max_consecutive_skipped_updates: int = 3
    """An update whose loss or gradient is not finite is skipped; so many in a row of one model end the run."""
    max_rollout_logprob_diff: float | None = None
    """Bound of the mean of |log-prob by the trainer - log-prob by vLLM| over the sampled tokens; ten times as much
    bounds the 99th percentile. Beyond it the first rollout after a start or a resume ends the run, later ones warn. At
    rollout.temperature T the bound is divided by T, as the logits are. null: 0.001 in float32, 0.1 in bfloat16."""
    dist_timeout_seconds: int = 600
    """Time after which a collective that some rank has not reached is an error, for every process group."""
    heartbeat_timeout_seconds: int = 120
    """Time after which a rank that is not heard of (frozen, or its node is gone) ends the run on all ranks. Ranks
    report beside the collectives; one that computes for long is heard all the same."""
    preemption_grace_seconds: int = 300
    """Time that a run asked to stop (SIGTERM, SIGUSR1) has to finish or abandon its step and to save; then it ends all
    the same, and the last checkpoint is what is kept. At least 60; less than the scheduler's own (sbatch --signal)."""
    stop_before_minutes: float | None = None
    """In a Slurm job: stop and save, as after a signal, so many minutes before the job's time limit; null: do not."""


@dataclass
class ReshardConfig:
    """The weight update: from Megatron-Core's parameters to vLLM's, before each rollout."""

    share_weights: bool = True
    """Where a vLLM parameter is, block for block, what Megatron-Core holds on the rank, one memory serves both."""
    bucket_megabytes: int = 256
    """Largest bytes that a rank sends, and receives, at a time; an update takes two such buckets of extra memory."""
    verify: Literal["off", "first", "always"] = "first"
    """Compare checksums of every block on both sides after an update: never, after the run's first, or after each."""


@dataclass
class Config:
    """One run."""

    data: DataConfig
    """Prompts."""
    model: ModelConfig
    """The checkpoint to start from."""
    trainer: TrainerConfig
    """The run."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The policy."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The reference policy."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation."""
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    """The weight update before each rollout."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Rewards to advantages."""
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    """A reward function of the user's own."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """How reward functions are run."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """A reward model in place of reward functions."""


def layouts(cfg: Config) -> dict[str, MegatronConfig]:
    """The layout of each section that has one ({section}.megatron), the actor's first."""
    sections = {section.name: getattr(cfg, section.name) for section in fields(cfg)}
    return {name: section.megatron for name, section in sections.items() if hasattr(section, "megatron")}
