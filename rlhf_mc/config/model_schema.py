"""Settings of each model: its optimizer, and its parallel layout, precision and offload. The rest
is in schema.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlhf_mc.config.numbers import (
    CountOrMinus1,
    CountOrZero,
    Fraction,
    FractionBelow1,
    Layers,
    Positive,
    PositiveOrZero,
    Range,
    Ranks,
)


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule. Each PPO mini-batch is an optimizer step; the schedule
    counts PPO steps."""

    lr: PositiveOrZero = 1e-6
    """Peak learning rate."""
    min_lr: PositiveOrZero = 0.0
    """Learning rate at the end of the decay, after the last step."""
    lr_warmup_steps: CountOrZero = 0
    """PPO steps of linear warm-up W: step s has the learning rate lr * s / W."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Share of the run's PPO steps that are warm-up, where lr_warmup_steps is 0."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from lr, at the end of the warm-up, to min_lr, after the last step."""
    weight_decay: PositiveOrZero = 0.01
    """Decoupled weight decay, except of biases and norms."""
    betas: tuple[FractionBelow1, FractionBelow1] = (0.9, 0.999)
    """Adam's beta1 and beta2."""
    eps: Annotated[float, Range(1e-30, 1e6)] = 1e-8  # near the smallest float32
    """Adam's epsilon."""
    clip_grad: Annotated[float, Range(0, 1e30)] = 1.0
    """Maximum global gradient norm; 0: no clipping."""


ALL_LINEAR = "all-linear"


@dataclass
class LoraConfig:
    """LoRA: adapters A [rank, in] and B [out, rank] of linear layers are trained, and the model
    itself is not. The rollout engine gets W + alpha / rank B A, and the reference policy is the
    actor without its adapters."""

    rank: Annotated[int, Range(0, 1024)] = 0
    """Rank of the adapters. 0: none, all of the model is trained."""
    alpha: Positive = 16.0
    """Adapters are multiplied by alpha / rank."""
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Linear layers that get adapters, by the ends of their names in the Hugging Face checkpoint:
    q_proj, gate_proj, ...; all-linear: all of them. Routers, embeddings and heads have none."""
    exclude_modules: list[str] = field(default_factory=list)
    """Linear layers of target_modules that get none."""
    adapter_path: str | None = None
    """Directory with a PEFT adapter of the same rank, alpha and modules, from which training
    starts; null: A is random, B is 0."""


@dataclass
class FrozenMegatronConfig:
    """Parallel layout, precision and offload of a model that is never trained."""

    tensor_model_parallel_size: Ranks = 1
    """Ranks that share each layer. It may exceed the number of KV heads (docs/reshard.md)."""
    pipeline_model_parallel_size: Ranks = 1
    """Pipeline stages."""
    context_parallel_size: Ranks = 1
    """Ranks that share each sequence: each has its tokens of a micro-batch's sequences, and
    replicas of the weights. Each sequence is padded to a multiple of twice the size."""
    dynamic_context_parallel: bool = False
    """Choose the size for each micro-batch, a power of two up to context_parallel_size: short
    sequences stay on one rank, and a long one is shared by as many ranks as it needs."""
    cp_comm_type: Literal["p2p", "a2a"] | None = None
    """Attention over context-parallel ranks on GPUs. p2p: keys and values travel around the ring of
    ranks while they are used. a2a (Ulysses): all-to-all, after which a rank has some heads of whole
    sequences; the size must divide the KV heads of a tensor-parallel rank. Transformer Engine has
    all_gather and a2a+p2p for padded batches alone. On a CPU it is ignored: ranks gather keys and
    values. null: a2a if it moves fewer bytes, else p2p."""
    virtual_pipeline_model_parallel_size: Annotated[int, Range(2, 100_000)] | None = None
    """Virtual pipeline chunks per stage (interleaved schedule): a smaller pipeline bubble for
    proportionally more P2P messages. null: one chunk."""
    num_layers_in_first_pipeline_stage: Layers | None = None
    """Layers of the first stage, which also holds the embedding; null: as the other stages."""
    num_layers_in_last_pipeline_stage: Layers | None = None
    """Layers of the last stage, which also holds the output layer; null: as the other stages."""
    expert_model_parallel_size: Ranks = 1
    """Replicas, context-parallel ranks included, over which the experts of a mixture-of-experts
    model are sharded."""
    sequence_parallel: bool = False
    """Shard the tokens over the tensor-parallel ranks between layers: less activation memory for
    the same communication. A micro-batch is padded to a multiple of the tensor-parallel size."""
    param_offload: bool = False
    """Offload the weights to host memory in phases that do not use them (table in
    config/roles.py). Not for an actor whose weights the rollout engine shares
    (reshard.share_weights). On a CPU nothing is saved."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations. With bfloat16, main parameters and gradient reduction are
    float32."""
    share_prompts: bool = True
    """Compute a prompt once for all its responses in a micro-batch (docs/algorithms.md): exact, and
    for less computation and activation memory where prompts are long beside responses. As verl's
    use_prefix_grouper."""
    fp8: Literal["tensorwise", "blockwise", "mxfp8"] | None = None
    """Multiply matrices in fp8 by a recipe of Transformer Engine, with one scale per tensor
    (compute capability 8.9), per block of 128 (9.0), or per 32 values (10.0). Weights stay in
    bfloat16. A micro-batch is padded to a multiple of 16, 128 or 32 tokens per tensor-parallel
    rank. Log-probs differ more from the engine's (trainer.max_rollout_logprob_diff). Delayed
    scaling is not offered: its scales depend on earlier steps, and checkpoints do not hold them. On
    a CPU it is ignored. null: no fp8."""


@dataclass
class MegatronConfig(FrozenMegatronConfig):
    """Parallel layout, precision and offload of a model. The data-parallel size is world size / (TP
    x CP x PP)."""

    recompute_granularity: Literal["selective", "full"] | None = None
    """Activations that are recomputed in the backward pass instead of stored. selective: those
    inside attention (on a CPU), inside the MLP (on GPUs), or an expert's activation and the norms
    (mixture-of-experts on GPUs). full: all except the input of each layer, for about a third more
    computation. null: none."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the replicas, data-parallel and context-parallel ranks
    (ZeRO-1)."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients over the data-parallel ranks during the backward pass of the last
    micro-batch, bucket by bucket, instead of after it. null: on GPUs with more than one
    data-parallel rank."""
    grad_offload: bool = False
    """Free the gradient buffers outside the update of the model."""
    optimizer_offload: bool = False
    """Offload float32 main parameters and Adam's moments to host memory outside the optimizer steps
    of the model. Between the steps of an update they stay on the device if the planner finds room
    (trainer.planner)."""


@dataclass
class FsdpConfig:
    """Sharding of a model by strategy fsdp2."""

    fsdp_size: CountOrMinus1 = -1
    """Neighbouring ranks over which each parameter is sharded, a divisor of the ranks that hold
    models; the groups of them are replicas (HSDP). -1: all of these ranks."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass, and gather them again for its
    backward pass (ZeRO-3). false: they stay until then (ZeRO-2)."""
    offload_policy: bool = False
    """Keep parameters, gradients and optimizer state in host memory, where the optimizer step runs
    too; a GPU has gathered layers, and with replicas (fsdp_size) the gradients of an update."""


Strategy = Literal["megatron", "fsdp2"]
Pool = Literal["train", "rollout"]


@dataclass
class RoleLayout(MegatronConfig):
    """All that decides how a model lies on the ranks: {role}.megatron, and fsdp_config where the
    role's strategy is fsdp2. No section of the settings."""

    fsdp: FsdpConfig | None = None
    """None: strategy megatron."""


def fsdp_config(megatron: MegatronConfig) -> FsdpConfig | None:
    """Return the sharding of a RoleLayout with strategy fsdp2; None of others."""
    return megatron.fsdp if isinstance(megatron, RoleLayout) else None


UNSPLIT: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "fp8": None,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": None,
    "grad_offload": False,
}
"""The values of MegatronConfig's settings that strategy fsdp2 has instead of a choice."""
TRAINING_ONLY = tuple(MegatronConfig.__annotations__)
"""Settings of MegatronConfig that a model that is never trained does not have."""
