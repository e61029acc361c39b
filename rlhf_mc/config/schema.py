"""The settings of a run: one dataclass per section of the YAML file, a docstring under each field.

Names follow verl's where the meaning is the same. Files are read in load.py. The range of each
number is in its type (numbers.py). Checks of several settings together are in checks.py. No torch
here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlhf_mc.config.algorithm_schema import (
    AlgorithmConfig,
    KLLossType,
    LossAggMode,
    PolicyLossConfig,
)
from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.health_schema import HealthConfig
from rlhf_mc.config.model_schema import (
    FrozenMegatronConfig,
    FsdpConfig,
    LoraConfig,
    MegatronConfig,
    OptimConfig,
    Pool,
    RoleLayout,
    Strategy,
)
from rlhf_mc.config.numbers import (
    Count,
    CountOrMinus1,
    FreeOnResume,
    Number,
    Positive,
    PositiveOrZero,
    Range,
    Ranks,
    Sequences,
    Tokens,
)
from rlhf_mc.config.reward_schema import (
    NAMED,
    TEACHERS,
    CustomRewardFunctionConfig,
    DistillationConfig,
    RewardConfig,
    RewardModelConfig,
    TeacherModelConfig,
    unnamed,
)
from rlhf_mc.config.trainer_schema import TrainerConfig


@dataclass
class ModelConfig:
    """The Hugging Face checkpoint from which actor and reference start."""

    path: str
    """Directory with config.json, the tokenizer and safetensors weights."""
    dist_checkpointing_path: str | None = None
    """Megatron checkpoint with the weights, written by tools/convert_hf_to_mcore.py; null: the
    safetensors of path."""
    tokenizer_path: str | None = None
    """Directory of the tokenizer; null: model.path."""


@dataclass
class DataConfig:
    """Prompts, their maximum lengths and the batch size."""

    train_files: list[str]
    """Files of training prompts, parquet or JSONL (.jsonl, .json): a list, or one string."""
    val_files: list[str] = field(default_factory=list)
    """Files of validation prompts; empty: no validation."""
    train_file_weights: list[Positive] = field(default_factory=list)
    """Sampling weights, one per training file: each batch has prompts of the files in these
    proportions, and a file is passed over at its own pace. []: every prompt once per epoch."""
    prompt_key: str = "prompt"
    """Column of the prompt: chat messages (list of {role, content}, of one or several turns) or a
    plain string."""
    reward_fn_key: str = "data_source"
    """Column with the name of the rule that scores the row. This column and reward_model may be
    absent with custom_reward_function.path, and from training files with a reward model."""
    train_max_samples: CountOrMinus1 = -1
    """Number of rows of the training set to use, from the first; -1: all."""
    val_max_samples: CountOrMinus1 = -1
    """Number of rows of the validation set to use, from the first; -1: all."""
    max_prompt_length: Annotated[int, Range(1, 10_000_000)] = 512
    """Maximum prompt length in tokens, after the chat template."""
    max_response_length: Annotated[int, Range(1, 10_000_000)] = 512
    """Maximum response length in tokens; generation stops there."""
    train_batch_size: Sequences = 1024
    """Prompts per step, over all ranks."""
    gen_batch_size: Sequences | None = None
    """algorithm.filter_groups: prompts that are generated for at once; null: train_batch_size. A
    larger number costs fewer calls of the engine where many groups are dropped, and drops more
    surplus ones."""
    shuffle: bool = True
    """Shuffle the training prompts in each epoch. The order is a function of trainer.seed and the
    epoch."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than max_prompt_length, with a warning that counts them. false: see
    truncation."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Behaviour for a prompt longer than max_prompt_length, without filter_overlong_prompts. error:
    a line that names its row. left, right: its first or last tokens are cut. middle: those between
    the first and the last half."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Behaviour for a row that cannot be used: a null, empty or malformed prompt, invalid JSON, a
    chat template that fails, a data source without a rule, a rule without a reference answer.
    error: a line that names file and row. skip: such rows are left out, with a warning that counts
    them and names the first."""
    chat_template_path: str | None = None
    """File with a chat template (Jinja), used in place of the tokenizer's. Exports keep the
    tokenizer's. null: the tokenizer's."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments for the chat template."""


@dataclass
class ActorConfig:
    """The policy and its update."""

    ppo_mini_batch_size: Sequences = 256
    """Prompts per optimizer step, over all ranks. Each has rollout.n responses."""
    ppo_epochs: Annotated[int, Range(1, 10_000)] = 1
    """PPO epochs: passes over the batch of a step."""
    shuffle: bool = False
    """Shuffle the batch before it is split into mini-batches, in each PPO epoch of actor and
    critic. The order is a function of trainer.seed and the step."""
    ppo_max_token_len_per_gpu: Tokens = 16384
    """Token budget of one micro-batch of the update: prompts and responses, packed. At least the
    longest sequence."""
    clip_ratio_low: Positive = 0.2
    """Lower clip range of the policy ratio: it is clipped at 1 - clip_ratio_low. 1 or more: not
    clipped."""
    clip_ratio_high: Positive = 0.2
    """Upper clip range of the policy ratio: it is clipped at 1 + clip_ratio_high."""
    clip_ratio_c: Annotated[float, Range(1, 1e6, open=True)] = 3.0
    """Dual clip: for advantages A < 0 the loss is at most -A * clip_ratio_c. Above 1."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """The policy loss."""
    loss_agg_mode: LossAggMode = "token-mean"
    """Aggregation of token losses to the loss of a mini-batch."""
    loss_scale_factor: Tokens | None = None
    """seq-mean-token-sum-norm: divisor of the sum over a sequence's tokens; null:
    data.max_response_length."""
    entropy_coeff: Number = 0.0
    """Coefficient of the entropy bonus."""
    entropy_coeff_end: Number | None = None
    """Coefficient of the entropy bonus in the last step, reached linearly from entropy_coeff in the
    first; null: it is constant."""
    positive_nll_coef: PositiveOrZero = 0.0
    """Coefficient of VAPO's language-model loss on right responses, the mean of -log-prob over
    their drawn tokens in the mini-batch (docs/algorithms.md). 0: none."""
    env_loss_coef: PositiveOrZero = 0.0
    """Coefficient of ECHO's loss on observations, the mean of -log-prob over their tokens in the
    mini-batch, with an environment (docs/algorithms.md). 0: none."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(actor, reference) to the policy loss."""
    kl_loss_coef: PositiveOrZero = 0.001
    """Coefficient of the KL term of use_kl_loss."""
    kl_loss_type: KLLossType = "k3"
    """KL estimator of use_kl_loss (docs/algorithms.md). low_var_kl is k3 clipped at 10; verl's k3
    is clipped too. kl is k1, mse is k2. With "+" the value is the estimator's and the gradient
    k2's, which is the KL's own."""
    moe_aux_loss_coeff: PositiveOrZero = 0.0
    """Coefficient of an auxiliary loss of the routers, which evens the loads of the experts in each
    sequence (docs/algorithms.md). 0: none."""
    moe_z_loss_coeff: PositiveOrZero = 0.0
    """Coefficient of the z-loss of the routers, which keeps their logits small. 0: none."""
    moe_router_bias_update_rate: PositiveOrZero = 0.0
    """Change of an expert's correction bias in each optimizer step: up where its load is below the
    mean, else down. For routers with such a bias (glm4_moe, deepseek_v3). 0: the biases stay."""
    freeze: list[str] = field(default_factory=list)
    """Tensors that are not trained: names in the Hugging Face checkpoint, or patterns such as
    "model.embed_tokens.*" or "model.layers.0.*"."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters, which are trained in place of the model's tensors."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The actor's optimizer."""
    strategy: Strategy = "megatron"
    """megatron: Megatron-Core's data parallelism and distributed optimizer, with the splits of the
    section megatron. fsdp2: torch's fully_shard over all replicas, of each parameter by rows; the
    same modules, without tensor, pipeline or expert parallelism (docs/layouts.md). Weights are then
    gathered layer by layer in each pass, and none is shared with the rollout engine. The other
    roles inherit it."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    """strategy fsdp2: its sharding. The other roles inherit what they do not set."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """Parallel layout, precision and offload of the actor. The other roles inherit what they do not
    set."""


@dataclass
class CriticConfig:
    """The value model and its update. A run has one if its advantage estimator needs it
    (algorithm.adv_estimator)."""

    model_path: str | None = None
    """Hugging Face checkpoint from which the critic starts; null: the actor's body with a new value
    head."""
    ppo_mini_batch_size: Sequences | None = None
    """Prompts per optimizer step, over all ranks; null: actor.ppo_mini_batch_size."""
    ppo_epochs: Annotated[int, Range(1, 10_000)] | None = None
    """PPO epochs; null: actor.ppo_epochs."""
    ppo_max_token_len_per_gpu: Tokens = 32768
    """Token budget of one micro-batch of the update."""
    forward_max_token_len_per_gpu: Tokens = 32768
    """Token budget of one micro-batch of the values pass."""
    cliprange_value: Annotated[float, Range(0, 1e30, open=True)] = 0.5
    """Clip range of the values around the old values in the value loss."""
    loss_agg_mode: LossAggMode = "token-mean"
    """Aggregation of token losses to the loss of a mini-batch."""
    loss_scale_factor: Tokens | None = None
    """As actor.loss_scale_factor."""
    freeze: list[str] = field(default_factory=list)
    """As actor.freeze. ["model.*"] trains only the value head, score.weight."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """As actor.lora, for the critic, whose value head is trained too."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """The critic's optimizer."""
    strategy: Strategy = "megatron"
    """As actor.strategy. Left out: the actor's."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    """As actor.fsdp_config, from which it inherits."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """Parallel layout, precision and offload of the critic. Settings that are left out are
    inherited from actor.megatron, with two exceptions. sequence_parallel is not inherited if the
    critic's tensor-parallel size is 1. Virtual pipeline chunks and the layers of the first and last
    stage are not inherited if the critic has another number of stages."""


@dataclass
class RefConfig:
    """The frozen reference policy. It is built only if a KL term uses it."""

    log_prob_max_token_len_per_gpu: Tokens = 16384
    """Token budget of one micro-batch of the reference pass."""
    pool: Pool = "train"
    """With resource_pools: the ranks that hold the model. rollout: beside the engines, whose cache
    stays; before the next batch is generated, the model scores the one that the others train on."""
    strategy: Strategy = "megatron"
    """As actor.strategy. Left out: the actor's."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    """As actor.fsdp_config, from which it inherits."""
    megatron: FrozenMegatronConfig = field(default_factory=FrozenMegatronConfig)
    """As critic.megatron, for the reference."""


@dataclass
class ValKwargsConfig:
    """Sampling for validation."""

    temperature: Annotated[float, Range(0.01, 2, also=0)] = 0.0
    """Sampling temperature; 0: greedy."""
    top_p: Annotated[float, Range(0.001, 1)] = 1.0
    """Draw tokens from the smallest set of this probability; 1: from all tokens."""
    top_k: CountOrMinus1 = -1
    """Draw tokens from this number of most probable ones; -1: from all tokens."""
    n: Annotated[int, Range(1, 10_000)] = 1
    """Responses per validation prompt: statistics such as mean@n, best@n and maj@n are over these
    (docs/metrics.md)."""


@dataclass
class CustomEngineConfig:
    """A user-defined rollout engine, for rollout.name: custom."""

    path: str | None = None
    """Python file with a class Engine without arguments that has the methods of
    rlhf_mc.rollout.base.EngineFactory (docs/extending.md); null: none. The other settings of
    rollout are those of vLLM; an engine may ignore them."""


@dataclass
class RolloutConfig:
    """The in-process rollout engine. Training samples are drawn from the full distribution (no
    top-k, no top-p), so that the log-probs of the engine and of the trainer are of the same
    distribution."""

    name: Literal["vllm", "sglang", "custom"] = "vllm"
    """The engine. sglang: for four families, in an environment of its own (docs/rollouts.md).
    custom: the one of custom_engine."""
    custom_engine: CustomEngineConfig = field(default_factory=CustomEngineConfig)
    """The engine of rollout.name custom."""
    tensor_model_parallel_size: Ranks = 1
    """Ranks that share one engine. The actor's tensor-parallel size must divide it, or be divided
    by it."""
    n: Annotated[int, Range(1, 10_000)] = 1
    """Responses per training prompt."""
    temperature: Annotated[float, Range(0.01, 2)] = 1.0
    """Sampling temperature, also of the trainer's log-probs. The bounds are vLLM's: it raises lower
    values to 0.01, and refuses higher ones."""
    gpu_memory_utilization: Annotated[float, Range(0.01, 1)] = 0.5
    """GPU only: fraction of the device memory for the engine's weights and KV cache."""
    cpu_kvcache_space_gb: Annotated[int, Range(1, 65_536)] = 1
    """CPU only: GiB of KV cache per rank."""
    enforce_eager: bool = False
    """GPU only: run without CUDA graphs. The CPU build always does."""
    free_cache_engine: bool = False
    """GPU only: the engine frees the memory of its weights and KV cache while it does not generate
    (sleep mode)."""
    offload_cuda_graphs: bool = True
    """GPU only, with free_cache_engine: the memory of CUDA graphs is copied to the host and back
    too. false, and with rollout.name sglang: it stays on the device."""
    quantization: Literal["fp8"] | None = None
    """fp8: the engine stores the weights of linear layers in fp8, with one scale per output
    channel, and quantizes their inputs token by token (compute capability 8.9). A weight update
    needs the memory of the unquantized weights too. Not with reshard.share_weights, nor for
    mixture-of-experts models. null: as the actor's weights."""
    clock: Literal["virtual", "measured"] = "virtual"
    """Time by which engines share requests. virtual: the cost of their steps, the same in each run.
    measured: seconds, for engines of different speed; the tokens are the same, but batches, and so
    the last bits of log-probs, differ from run to run, and a resumed run is not equal bit for
    bit."""
    tail_batching: bool = False
    """Begin more prompts than a step needs, train on those whose responses end first, and generate
    the others again from the beginning, in later steps of their own. Every token is of the weights
    that are trained, and each prompt is trained on once per epoch."""
    partial_rollout: bool = False
    """Begin more prompts than a step needs, train on those whose responses end first, and continue
    the others in the next steps with new weights. algorithm.rollout_correction then has to correct
    for the older weights."""
    one_step_off: bool = False
    """Train on the responses that the step before has sampled with its weights, as verl's
    one_step_off; with resource_pools both happen at the same time. The first step samples its own
    too. algorithm.rollout_correction then has to correct for the older weights."""
    prompts_in_flight: Sequences | None = None
    """Prompts that are generated for at once with tail_batching (null: 5/4 of
    data.train_batch_size) or partial_rollout (null: twice data.train_batch_size). A larger number
    leaves more of the longest responses to later steps."""
    max_off_policy_threshold: Annotated[int, Range(1, 1_000)] = 8
    """partial_rollout: the largest number of weight versions from the first token of a group to the
    step that trains on it; 1: every token is of the trained weights."""
    max_off_policy_strategy: Literal["drop", "wait"] = "drop"
    """partial_rollout: behaviour for a group that would exceed max_off_policy_threshold. drop: it
    is dropped. wait: the last step that may train on it waits for its end."""
    max_num_seqs: Annotated[int, Range(1, 65_536)] = 256
    """Maximum number of sequences that one engine decodes at a time."""
    max_num_batched_tokens: Annotated[int, Range(1, 16_777_216)] = 8192
    """Maximum number of tokens of one engine step. Chunked prefill splits a prompt that does not
    fit."""
    log_prob_max_token_len_per_gpu: Tokens = 16384
    """Token budget of one micro-batch of the old-log-prob pass."""
    val_kwargs: ValKwargsConfig = field(default_factory=ValKwargsConfig)
    """Sampling for validation."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """An environment, with which a response is a conversation of several turns, in training and
    validation."""


@dataclass
class ResourcePoolsConfig:
    """Ranks of their own for training and rollout. Ranks 0 to train - 1 train, the others hold the
    rollout engines, and frozen models of pool: rollout. A pool waits for the other as long as it
    makes progress (trainer.dist_timeout_seconds)."""

    train: Ranks | None = None
    """Ranks of the training pool; null: all ranks hold models and engines."""
    rollout: Ranks | None = None
    """Ranks of the rollout pool, a multiple of rollout.tensor_model_parallel_size; null: as
    train."""


@dataclass
class ReshardConfig:
    """The weight update from Megatron-Core's parameters to the rollout engine's, before each
    rollout."""

    share_weights: bool = True
    """Share the storage of rollout engine and Megatron-Core (zero-copy) for each of the engine's
    parameters whose layout on the rank is the same in both. With resource_pools no rank has
    both."""
    bucket_megabytes: Annotated[int, Range(1, 65_536)] = 256
    """Maximum MiB that a rank sends, and receives, at a time. An update needs two such buckets of
    extra memory."""
    verify: Literal["off", "first", "always"] = "first"
    """Compare checksums of all weights on both sides: never, after the first update of the run, or
    after each update."""


@dataclass
class ProfileConfig:
    """Profiles of single steps: traces, and a table of each phase's seconds by rank
    (docs/watching.md). They change no number of the training."""

    steps: list[Count] = field(default_factory=list)
    """Steps to profile, the first is 1. In these steps every rank measures each phase: its own
    work, and its waiting for others. The table goes to the console and to
    profile/step_<n>/phases.json. []: none."""
    ranks: list[Annotated[int, Range(0, 1_000_000)]] | None = field(default_factory=lambda: [0])
    """Ranks that also write a Chrome trace, profile/step_<n>/rank_<r>.json.gz. Tracing slows a rank
    down. []: none, for times without this. null: all ranks."""
    contents: list[Literal["memory", "shapes", "stack"]] = field(default_factory=list)
    """Further contents of the traces. memory: allocations; on GPUs also the allocator's history of
    the step, in rank_<r>_memory.pickle. shapes: of the operators' inputs. stack: lines of Python
    code; much slower."""


@dataclass
class Config:
    """One run."""

    data: DataConfig
    """Prompts."""
    model: ModelConfig
    """Checkpoint from which actor and reference start."""
    trainer: TrainerConfig
    """Length, output, checkpoints and timeouts of the run."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The policy."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The reference policy."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation."""
    resource_pools: ResourcePoolsConfig = field(default_factory=ResourcePoolsConfig)
    """Training and rollout on ranks of their own."""
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    """The weight update before each rollout."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Rewards to advantages."""
    custom_reward_function: CustomRewardFunctionConfig = field(
        default_factory=CustomRewardFunctionConfig
    )
    """A user-defined reward function."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Parts of the score, and the processes that run the reward functions."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """A reward model, in place of reward functions or beside them."""
    reward_models: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Further reward models by name, each with the settings of reward_model. The name is also the
    name of its part of the score in reward.mixture."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """On-policy distillation from teachers."""
    health: FreeOnResume[HealthConfig] = field(default_factory=HealthConfig)
    """Rules that watch the metrics, and the response to each."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Profiles of single steps."""


RoleConfig = ActorConfig | CriticConfig | RefConfig | RewardModelConfig | TeacherModelConfig


def roles(cfg: Config) -> dict[str, RoleConfig]:
    """Return the section of each model by its dotted key, which is the model's role; the actor's
    first."""
    named: dict[str, RoleConfig] = {f"{NAMED}.{name}": s for name, s in cfg.reward_models.items()}
    named |= {f"{TEACHERS}.{name}": s for name, s in cfg.distillation.teacher_models.items()}
    return {
        "actor": cfg.actor,
        "critic": cfg.critic,
        "ref": cfg.ref,
        "reward_model": cfg.reward_model,
        **named,
    }


def layouts(cfg: Config) -> dict[str, RoleLayout]:
    """Return the layout of each model's section, by section, the actor's first. Settings that a
    frozen model does not have are the defaults."""
    return {
        role: RoleLayout(
            **vars(section.megatron),
            fsdp=section.fsdp_config if section.strategy == "fsdp2" else None,
        )
        for role, section in roles(cfg).items()
    }


def reward_models(cfg: Config) -> dict[str, RewardModelConfig]:
    """Return the sections of the reward models that the run has, by role."""
    return {
        role: section
        for role, section in roles(cfg).items()
        if isinstance(section, RewardModelConfig) and section.model_path
    }


def teachers(cfg: Config) -> dict[str, TeacherModelConfig]:
    """Return the sections of the teachers that the run has, by role."""
    return {
        role: section
        for role, section in roles(cfg).items()
        if isinstance(section, TeacherModelConfig) and cfg.distillation.enabled
    }


def teacher_paths(cfg: Config) -> dict[str, str]:
    """Return the checkpoints of the teachers that are models of their own, by role."""
    return {role: it.model_path for role, it in teachers(cfg).items() if it.model_path is not None}


def expand_named_models(cfg: Config, keys: Iterable[str]) -> Iterator[str]:
    """Yield the keys. In place of a setting of reward_model or of teacher_model, yield the setting
    of each section of a reward model, or of each teacher that the run has."""
    sections = {
        "reward_model": [role for role in roles(cfg) if unnamed(role) == "reward_model"],
        "teacher_model": list(teachers(cfg)),
    }
    for key in keys:
        section, _, name = key.partition(".")
        named = sections.get(section)
        yield from [key] if named is None else [f"{role}.{name}" for role in named]


def get_setting(cfg: Config, key: str) -> Any:
    """Return the value of section.key."""
    value: Any = cfg
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def score_part(role: str) -> str:
    """Return the name of a reward model's part of the score."""
    return role.rpartition(".")[2]
