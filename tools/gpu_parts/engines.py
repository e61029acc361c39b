"""Engines alone, without vLLM and the loop: built from a checkpoint, with PPO's losses, and weights
or gradients gathered by the names of the Hugging Face checkpoint. Every rank calls each function
with the same arguments."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.algorithms.policy_losses import POLICY_LOSSES
from rlhf_mc.architectures.parameters import with_adapters
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import HFReader, import_hf
from rlhf_mc.config.schema import (
    ActorConfig,
    CriticConfig,
    LoraConfig,
    LossAggMode,
    MegatronConfig,
    OptimConfig,
    RoleLayout,
)
from rlhf_mc.data.balance import plan_micro_batches
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import Loss, ModelEngine, engine_layouts
from rlhf_mc.models.heads import Head, log_prob_head
from rlhf_mc.models.statistics import OptimizerStep
from rlhf_mc.reshard.execute import execute
from rlhf_mc.reshard.layout import correction_biases, hf_layout, logical_shapes
from rlhf_mc.reshard.placement import chunk_prefix
from rlhf_mc.reshard.plan import make_plan
from rlhf_mc.reshard.transport import PointToPoint
from rlhf_mc.topology.consensus import gather_objects
from rlhf_mc.topology.groups import ProcessGroups, build_groups
from rlhf_mc.topology.mesh import Mesh
from rlhf_mc.trainer import token_budget
from rlhf_mc.trainer.update import ActorTerms, actor_objective, critic_objective

TEMPERATURE = 0.7
LOSS_SCALE_FACTOR = 16
"""Divisor of loss_agg_mode seq-mean-token-sum-norm."""
Role = Literal["actor", "critic"]


class Job(NamedTuple):
    """Gradient to compute."""

    checkpoint: str
    role: Role
    mode: LossAggMode
    budget: int
    sequences: tuple[int, ...]
    """Indices in the batch. With fewer than data-parallel replicas, some replicas run dummy
    micro-batches."""


def actor_config(mode: LossAggMode) -> ActorConfig:
    """Return a config with every term of the actor's loss, each large enough to matter."""
    return ActorConfig(
        entropy_coeff=0.05,
        use_kl_loss=True,
        kl_loss_coef=0.3,
        env_loss_coef=0.4,
        loss_agg_mode=mode,
    )


def critic_config(mode: LossAggMode) -> CriticConfig:
    """Return a config with this aggregation mode."""
    return CriticConfig(loss_agg_mode=mode)


def value_head_weight(hidden_size: int) -> torch.Tensor:
    """Return a value head [1, hidden_size] that is not zero: behind a zero one the body has no
    gradient."""
    return 0.1 * torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(3))


@contextlib.contextmanager
def shared_directory() -> Iterator[Path]:
    """Create a directory that all ranks of this machine use."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(gather_objects(own)[0])
        gather_objects(None)  # no rank deletes it before all are done


@contextlib.contextmanager
def mesh_groups(
    tp: int, pp: int, ep: int = 1, vpp: int = 1, cp: int = 1, dynamic_cp: bool = False, **sizes: Any
) -> Iterator[ProcessGroups]:
    """Build the process groups of a layout. sizes: other fields of Mesh."""
    mesh = Mesh(dist.get_world_size(), tp, pp, ep, vpp=vpp, cp=cp, dynamic_cp=dynamic_cp, **sizes)
    yield build_groups(mesh)


def make_engine(
    checkpoint: str,
    role: Role,
    groups: ProcessGroups,
    lora: LoraConfig | None = None,
    **megatron: Any,
) -> ModelEngine:
    """Build the checkpoint's model as an actor, or as a critic with value_head_weight; not
    trainable yet. lora: its adapters, which are left zero."""
    reader = HFReader(checkpoint)
    shape = ModelShape.from_hf_config(reader.config, value_head=role == "critic")
    shape = with_adapters(shape, f"{role}.lora", lora or LoraConfig())
    config = RoleLayout(
        tensor_model_parallel_size=groups.mesh.tp,
        pipeline_model_parallel_size=groups.mesh.pp,
        virtual_pipeline_model_parallel_size=groups.mesh.vpp if groups.mesh.vpp > 1 else None,
        expert_model_parallel_size=groups.mesh.ep,
        context_parallel_size=groups.mesh.cp,
        dynamic_context_parallel=groups.mesh.dynamic_cp,
        **{"dtype": "float32", "use_distributed_optimizer": False, **megatron},
    )
    engine = ModelEngine(role, shape, config, groups)
    engine.predicts_observations = role == "actor"
    check_parameters(engine)
    skip = ("score.weight",) if role == "critic" else ()
    import_hf(reader, engine_layouts(engine, shape.base)[groups.rank], engine.params, skip=skip)
    if role == "critic" and groups.is_last_stage:
        name = chunk_prefix(groups.mesh.vpp - 1, groups.mesh.vpp) + "output_layer.weight"
        if name in engine.params:  # a shard of its one row may be empty
            engine.params[name].copy_(value_head_weight(shape.hidden_size))
    return engine


def check_parameters(engine: ModelEngine) -> None:
    """Raise RuntimeError if names or shapes of this rank's parameters are not the ones of rlhf_mc's
    layout, which is another for Transformer Engine's layers."""
    shapes = {name: tuple(param.shape) for name, param in engine.named_parameters().items()}
    wanted = engine_layouts(engine)[engine.groups.rank].shapes
    differ = [name for name in {**wanted, **shapes} if shapes.get(name) != wanted.get(name)]
    if differ:
        first = differ[0]
        raise RuntimeError(
            f"{len(differ)} parameters differ from the layout, {first} first: the model has"
            f" {shapes.get(first, 'none')}, the layout {wanted.get(first, 'none')}"
        )


def random_engine(
    config: dict[str, Any], groups: ProcessGroups, seed: int = 0, **megatron: Any
) -> ModelEngine:
    """Build an actor of this config.json with random weights in bfloat16 and an optimizer, the same
    on all replicas."""
    settings = MegatronConfig(
        tensor_model_parallel_size=groups.mesh.tp,
        pipeline_model_parallel_size=groups.mesh.pp,
        **megatron,
    )
    engine = ModelEngine("actor", ModelShape.from_hf_config(config), settings, groups)
    engine.predicts_observations = True
    draw = torch.Generator(platform.device()).manual_seed(seed)
    for param in engine.params.values():
        if param.dim() > 1:
            param.normal_(std=0.02, generator=draw)
        else:
            param.fill_(1.0)
    engine.make_trainable(OptimConfig(lr=1e-4), total_steps=10)
    return engine


def with_targets(engine: ModelEngine, batch: RaggedBatch) -> RaggedBatch:
    """Return the batch with the inputs of the actor's loss: old log-probs near the model's, random
    advantages."""
    head = log_prob_head(engine.shape.vocab_size, TEMPERATURE)
    log_probs = score_tokens(engine, batch, head, int(batch.seq_lens.sum()))
    noise = torch.randn(3, len(log_probs), generator=torch.Generator().manual_seed(6))
    return batch.with_fields(
        old_log_probs=log_probs + 0.1 * noise[0],
        ref_log_probs=log_probs + 0.1 * noise[1],
        advantages=noise[2],
    )


def train_once(engine: ModelEngine, batch: RaggedBatch, budget: int) -> OptimizerStep:
    """Take one optimizer step on the batch."""
    micro_batches = my_micro_batches(engine, batch, budget)
    return engine.train_step(batch, micro_batches, objective(engine, batch, "token-mean"))


def cloned_state(engine: ModelEngine) -> dict[str, torch.Tensor]:
    """Return copies of this rank's weights and optimizer state, by name."""
    state = {name: param.clone() for name, param in engine.params.items()}
    for part in engine.optimizer_parts():
        state |= {f"{part.local} {key}": value.clone() for key, value in part.state.items()}
    return state


def different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors of which any bit differs, or which one of the two lacks."""
    both = a.keys() & b.keys()
    return sorted((a.keys() ^ b.keys()) | {name for name in both if not _equal(a[name], b[name])})


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def logical_tensors(engine: ModelEngine, local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather what is trained of the whole model on this rank, by the names of the Hugging Face
    checkpoint. This rank's own blocks come from itself, so that over all ranks every replica of
    every block is compared."""
    target = hf_layout(
        engine.shape, logical_shapes(engine.shape).keys() - correction_biases(engine.shape)
    )
    plan = make_plan(
        engine_layouts(engine), [target] * dist.get_world_size(), torch.float32.itemsize, 64 << 20
    )
    tensors = {name: torch.full(size, torch.nan) for name, size in target.shapes.items()}
    assert dist.group.WORLD is not None
    execute(plan.for_rank(dist.get_rank()), local, tensors, PointToPoint(dist.group.WORLD))
    return tensors


def objective(engine: ModelEngine, batch: RaggedBatch, mode: LossAggMode) -> Loss:
    """Return the PPO loss of the engine's role on this mini-batch."""
    if engine.name == "critic":
        return critic_objective(batch, critic_config(mode), LOSS_SCALE_FACTOR)
    cfg = actor_config(mode)
    terms = ActorTerms(
        POLICY_LOSSES["vanilla"],
        cfg.entropy_coeff,
        cfg.kl_loss_coef,
        LOSS_SCALE_FACTOR,
        torch.Generator(),
    )
    return actor_objective(batch, cfg, engine.shape.vocab_size, TEMPERATURE, terms)


def my_micro_batches(engine: ModelEngine, batch: RaggedBatch, budget: int) -> Sequence[list[int]]:
    """Return the micro-batches of this rank's replica."""
    mesh = engine.groups.mesh
    if mesh.dynamic_cp:
        return token_budget.my_micro_batches(engine, batch, budget)
    return plan_micro_batches(batch.seq_lens.tolist(), mesh.dp, budget)[engine.groups.coordinate.dp]


def score_tokens(engine: ModelEngine, batch: RaggedBatch, head: Head, budget: int) -> torch.Tensor:
    """Return the head's number for every response token of the batch, as a step computes it: [R]
    float32, on every rank. Every rank must call it."""
    return engine.score(batch, token_budget.my_micro_batches(engine, batch, budget), head)


def token_batch(
    vocab: int, prompt_lens: Sequence[int], response_lens: Sequence[int], seed: int = 5
) -> RaggedBatch:
    """Return sequences of random tokens of these lengths, without the fields of later phases."""
    prompts = torch.tensor(prompt_lens)
    responses = torch.tensor(response_lens)
    draw = torch.Generator().manual_seed(seed)
    return RaggedBatch(
        tokens=torch.randint(vocab, (int((prompts + responses).sum()),), generator=draw),
        prompt_lens=prompts,
        response_lens=responses,
        rollout_log_probs=torch.zeros(int(responses.sum())),
        finished=torch.ones(len(prompts), dtype=torch.bool),
    )
