"""The settings that each model has for itself: its optimizer and its layout. The rest is in schema.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule. One optimizer step per PPO mini-batch; the schedule counts PPO steps."""

    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate that the decay reaches after the last step; the last step's own is above it."""
    lr_warmup_steps: int = 0
    """PPO steps of linear warm-up: step s of W has lr * s / W."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay from lr, after the warm-up, to min_lr, after the last step."""
    weight_decay: float = 0.01
    """Decoupled weight decay (not on biases and norms)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's moment coefficients."""
    eps: float = 1e-8
    """Adam's denominator term."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""


@dataclass
class MegatronConfig:
    """How Megatron-Core spreads a model over the ranks. Data-parallel size is what remains of the world."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer. More than the model has KV heads are allowed (docs/reshard.md)."""
    pipeline_model_parallel_size: int = 1
    """Stages that the layers are cut into."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Runs of layers that each stage holds, taken in turn (interleaved schedule): a stage then waits a part of the time
    for the others, for as many times more messages; null: one."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first stage, which holds the embedding too; null: as many as the other stages."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last stage, which holds the output layer too; null: as many as the other stages."""
    expert_model_parallel_size: int = 1
    """Data-parallel replicas that the experts of a mixture-of-experts model are spread over."""
    sequence_parallel: bool = False
    """Between layers each tensor-parallel rank holds its part of the tokens, not all of them: less activation memory
    for the same communication. A micro-batch is padded to a multiple of the tensor-parallel size."""
    recompute_granularity: Literal["selective", "full"] | None = None
    """Activations computed again in the backward pass, so as not to keep them: those inside attention (selective), or
    all but each layer's input (full, for about a third more computation); null: none."""
    use_distributed_optimizer: bool = True
    """Spread the optimizer state over the data-parallel ranks (ZeRO-1)."""
    param_offload: bool = False
    """Keep the weights in host memory in the phases that do not use them (table in trainer/offload_schedule.py).
    Not for an actor whose weights vLLM shares (reshard.share_weights). On a CPU both are the same memory: no saving."""
    grad_offload: bool = False
    """Give the gradient buffers' memory back outside of the model's update. A frozen model has none."""
    optimizer_offload: bool = False
    """Keep float32 main parameters and Adam's moments in host memory outside of the model's update. A frozen model has
    none."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights and activations; with bfloat16 main parameters and gradient reduction are float32."""
