"""A model with its optimizer on the training mesh: one number per response token of a batch, or one
optimizer step.
The caller passes the head or the loss.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.model_schema import fsdp_config
from rlhf_mc.config.schema import MegatronConfig, OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.adapted_layers import adapters_off
from rlhf_mc.models.expert_parts import RouterBalance
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.gpt_model import PackedGPT, enable_input_gradients
from rlhf_mc.models.heads import Head
from rlhf_mc.models.offload import GRADS, OPTIMIZER, PARAMS, model_offload
from rlhf_mc.models.optimizer import (
    OptimizerPart,
    adam_steps,
    learning_rate_schedule,
    set_adam_steps,
    set_learning_rates,
    state_bytes,
)
from rlhf_mc.models.pipeline import (
    MemoryRecovery,
    MicroBatchSchedule,
    OnLastStage,
    loss_of_dummy,
)
from rlhf_mc.models.router_replay import ExpertReplay, replayed
from rlhf_mc.models.sequence_rows import TopTokens
from rlhf_mc.models.statistics import LOG_PROBS, Exchange, OptimizerStep, StatisticSums
from rlhf_mc.models.strategies.distributed_optimizer import MegatronStrategy
from rlhf_mc.models.strategies.fully_sharded import FsdpStrategy
from rlhf_mc.models.strategies.strategy import TrainingStrategy
from rlhf_mc.models.transformer_engine import uses_transformer_engine
from rlhf_mc.reshard.layout import EMPTY, Layout
from rlhf_mc.reshard.placement import chunk_prefix, training_layouts
from rlhf_mc.topology.consensus import gather_objects, sum_over_ranks
from rlhf_mc.topology.groups import ProcessGroups

Loss = Callable[[PackedGPT, torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(model, states [r, 1, hidden], micro-batch) -> (this micro-batch's share of the loss, its shares
of statistics, and with LOG_PROBS its log-probs). All context-parallel ranks compute the same."""


@dataclass(frozen=True)
class RankShare:
    """Share of a model that one rank holds, in bytes, offloaded or not."""

    num_parameters: int
    weights: int
    gradients: int = 0
    optimizer: int = 0
    """From the first optimizer step on."""
    offloaded: frozenset[str] = frozenset()
    """The groups (models/offload.py) that are on the device in some phases only."""


class ModelEngine:
    """One role's model. Without optimizer settings it is frozen. A rank outside of its mesh holds
    no part of it, and calls neither its passes nor its updates."""

    def __init__(
        self, name: str, shape: ModelShape, megatron: MegatronConfig, groups: ProcessGroups
    ) -> None:
        self.name = name
        self.shape = shape
        self.groups = groups
        self.strategy = build_strategy(shape, megatron, groups)
        self.chunks = self.strategy.chunks
        """The modules, one for each virtual pipeline chunk."""
        self._schedule = MicroBatchSchedule(self.chunks, groups, megatron)
        self._megatron = megatron
        self._scheduler: Any = None
        self._memory_recovery: MemoryRecovery | None = None
        self._adapters_on = True
        self._exchange = Exchange(groups)
        self.replay: ExpertReplay | None = None
        """The experts that the passes take in place of the routers' choice; None: the routers
        choose."""
        self.balance: RouterBalance | None = None
        """The losses of the routers and the update of their correction biases; None: neither."""
        self.teacher_top: TopTokens | None = None
        """The teachers' tokens that the step's losses read; None: they read none."""
        self.predicts_observations = False
        """Losses get the states of observations too (MicroBatch.num_observed)."""
        self.offload = model_offload(name, megatron, self.strategy)
        """The groups of this model's tensors that can be offloaded."""

    @property
    def shares_prompts(self) -> bool:
        """True where a micro-batch has a prompt once for all its responses."""
        return self._megatron.share_prompts

    @property
    def model(self) -> PackedGPT:
        """This rank's part of the model. Raises UserError where it has several virtual pipeline
        chunks."""
        if len(self.chunks) > 1:
            raise UserError(
                "Megatron checkpoints of virtual pipeline chunks are not supported; set "
                f"{self.name}.megatron.virtual_pipeline_model_parallel_size to null"
            )
        return self.chunks[0]

    def rank_share(self) -> RankShare:
        """Return the share of the model that this rank holds."""
        params = self.named_parameters().values()
        return RankShare(
            sum(param.numel() for param in params),
            sum(param.numel() * param.element_size() for param in params),
            self.strategy.gradient_bytes(),
            0 if self.strategy.optimizer is None else state_bytes(self.strategy.optimizer),
            self.offload.names,
        )

    def named_parameters(self) -> Mapping[str, torch.Tensor]:
        """Return what this rank has of the parameters, by the names of reshard's Megatron-Core
        layout."""
        return self.strategy.named_parameters()

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """The values of named_parameters in the model's type, written in place by a reshard."""
        self.offload.require(PARAMS)
        return self.strategy.weights()

    @property
    def rollout_params(self) -> dict[str, Any]:
        """The parameters of the model without adapters, of which weights with one are
        MergedWeights: what the rollout engine and Hugging Face checkpoints get."""
        device = platform.device()  # the shards of fsdp2 may be on the host
        params: dict[str, Any] = {
            name: param.to(device, non_blocking=True) for name, param in self.params.items()
        }
        for number, chunk in enumerate(self.chunks):
            prefix = chunk_prefix(number, len(self.chunks))
            for layer in chunk.adapted_layers:
                params |= {prefix + name: weight for name, weight in layer.merged().items()}
        return params

    def as_scorer(self) -> ModelEngine:
        """Return this model, with the same weights, as one whose routers choose in each pass."""
        scorer = copy.copy(self)
        scorer.replay = scorer.balance = None
        return scorer

    def without_adapters(self) -> ModelEngine:
        """Return as_scorer as the reference policy: its adapters are off in each pass."""
        reference = self.as_scorer()
        reference.name = "ref"
        reference._adapters_on = False
        return reference

    def make_trainable(
        self, optim: OptimConfig, total_steps: int, frozen: Collection[str] = ()
    ) -> None:
        """Add gradient buffers and the optimizer. The parameters `frozen` (this rank's, by name)
        get neither. The weights must be loaded before: the optimizer copies them."""
        for chunk in self.chunks:
            chunk.train()
            embedding = getattr(chunk, "embedding", None)
            if embedding is not None and self._megatron.recompute_granularity is not None:
                enable_input_gradients(embedding)
        self.strategy.make_trainable(optim, frozen, self._schedule.overlaps_reduction)
        self.offload = model_offload(self.name, self._megatron, self.strategy)
        self._optim = optim
        self._scheduler = learning_rate_schedule(self.strategy.optimizer, optim, total_steps)

    def recover_memory(self) -> None:
        """Let train_step raise OutOfMemory on every rank, with weights and optimizer as before,
        where a rank runs out of memory in its passes. For the layouts of MemoryRecovery;
        make_trainable must precede."""
        assert self.groups.mesh.dp == self.groups.mesh.world, self.groups.mesh
        self._memory_recovery = MemoryRecovery(self.chunks[0].config)

    @property
    def lr(self) -> float:
        """The learning rate of the next optimizer step."""
        # a rank whose parameters are all frozen has no group to look at
        return float(self._scheduler.get_lr({}))

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate of the config by `factor`, at this and all later steps of the
        schedule."""
        set_learning_rates(self._scheduler, self._optim, factor)

    def end_of_ppo_step(self) -> None:
        """Advance the learning-rate schedule by one step."""
        self._scheduler.step(increment=1)

    @property
    def dtype(self) -> str:
        """The type of the weights, as MegatronConfig.dtype names it."""
        return self._megatron.dtype

    def optimizer_parts(self) -> list[OptimizerPart]:
        """Return this rank's part of the optimizer's state by parameter, for the checkpoint."""
        self.offload.require(OPTIMIZER)
        return self.strategy.optimizer_parts()

    def progress(self) -> dict[str, int]:
        """Return the steps of optimizer and schedule, for the checkpoint. Every rank must call
        it."""
        steps = max(gather_objects(adam_steps(self.strategy.optimizer)))
        return {"optimizer_steps": steps, "schedule_steps": self._scheduler.num_steps}

    def load_progress(self, progress: Mapping[str, int]) -> None:
        """Set the steps of optimizer and schedule, and allocate the tensors of optimizer_parts,
        which the caller then fills. The schedule keeps this run's shape."""
        self.offload.require(OPTIMIZER)
        set_adam_steps(self.strategy.optimizer, progress["optimizer_steps"])
        self._scheduler.num_steps = progress["schedule_steps"]
        self._scheduler.step(increment=0)

    @torch.no_grad()
    def score(
        self,
        batch: RaggedBatch,
        micro_batches: Sequence[Sequence[int]],
        head: Head,
        per_sequence: bool = False,
    ) -> torch.Tensor:
        """Return the head's number for each response token of the whole batch, from the state at
        its logit position: [R] float32, on every rank. With per_sequence: for each sequence, from
        the state of its last token: [S].

        micro_batches: the sequences of this rank's data-parallel replica. Every rank of the mesh
        must call it."""
        own_scores = self.my_scores(batch, micro_batches, head, per_sequence)
        return sum_over_ranks(own_scores, self.groups.members)

    @torch.no_grad()
    def my_scores(
        self,
        batch: RaggedBatch,
        micro_batches: Sequence[Sequence[int]],
        head: Head,
        per_sequence: bool = False,
        columns: int | None = None,
    ) -> torch.Tensor:
        """Return what this rank has of `score`, on the device: 0 for all other tokens. The sum over
        the ranks of the mesh is exact. With columns the head gives as many numbers for each token,
        and the result is [R, columns]. Every rank of the mesh must call it."""
        size = batch.num_sequences if per_sequence else len(batch.rollout_log_probs)
        shape = (size,) if columns is None else (size, columns)
        result = torch.zeros(shape, device=platform.device())

        def keep(model: PackedGPT, hidden: torch.Tensor, micro: MicroBatch) -> None:
            if micro.is_dummy:
                return
            # On all tensor-parallel ranks: each has a shard of the columns. On all context-parallel
            # ranks: each has a part of the results.
            scored = head(model, hidden, micro)
            if self.groups.coordinate.tp == 0 and micro.packed.context.rank == 0:
                result[micro.response_index] = scored.float()

        micro_batches = self._schedule.with_dummies(micro_batches)
        with replayed(self.replay, batch, micro_batches, True):
            self._run(batch, micro_batches, keep, at_last_token=per_sequence)
        # Each token is scored by one replica, on its last stage; one of the replica's ranks has the
        # result.
        return result

    def train_step(
        self,
        batch: RaggedBatch,
        micro_batches: Sequence[Sequence[int]],
        loss: Loss,
    ) -> OptimizerStep:
        """Compute the gradient of a mini-batch as `backward` does and take one optimizer step.
        Where loss, statistics or gradient are not finite on any rank, no rank steps. Every rank of
        the mesh must call it."""
        sums = self._compute_gradient(batch, micro_batches, loss)
        with platform.named_range("grad_norm"):
            result = OptimizerStep(self.strategy.grad_norm(), self.lr, sums)
        if not result.skipped:
            with self.offload.optimizer_step(), platform.named_range("optimizer_step"):
                self.strategy.step(self._optim.clip_grad / (result.grad_norm + 1e-6))
            if self.balance is not None:
                self.balance.step()
        else:
            self.strategy.zero_grad()  # other phases need its memory
        return result

    def statistics(self, steps: Sequence[OptimizerStep]) -> list[dict[str, float]]:
        """Return for each step its statistics over all ranks, grad_norm, lr and "skipped": 0; for a
        skipped one {"skipped": 1}. Every rank of the mesh must call it, with the same steps."""
        taken = [step for step in steps if not step.skipped]
        sums = iter(self._exchange.over_ranks([step.sums for step in taken], self._has_loss))
        return [
            {"skipped": 1.0}
            if step.skipped
            else {**next(sums), "grad_norm": step.grad_norm, "lr": step.lr, "skipped": 0.0}
            for step in steps
        ]

    def collect_log_probs(self, step: OptimizerStep, batch: RaggedBatch) -> torch.Tensor:
        """Return the log-probs (LOG_PROBS) that the loss of an optimizer step on this batch has
        returned: [R] float32, of the weights before the step, on every rank. Every rank of the mesh
        must call it."""
        log_probs = step.sums.log_probs
        if log_probs is None:
            log_probs = torch.zeros(len(batch.rollout_log_probs), device=platform.device())
        return sum_over_ranks(log_probs, self.groups.members)

    def backward(
        self,
        batch: RaggedBatch,
        micro_batches: Sequence[Sequence[int]],
        loss: Loss,
    ) -> dict[str, float]:
        """Compute the gradient (strategy.gradients) of the sum of the shares that `loss` returns,
        over all micro-batches of all replicas; of the part that this rank updates.
        Return the sums of the statistics. Every rank of the mesh must call it."""
        sums = self._compute_gradient(batch, micro_batches, loss)
        return self._exchange.over_ranks([sums], self._has_loss)[0]

    def _compute_gradient(
        self, batch: RaggedBatch, micro_batches: Sequence[Sequence[int]], loss: Loss
    ) -> StatisticSums:
        """Do as `backward`, but return this rank's sums of the statistics. Where one is not finite,
        the gradient is not either, so that its norm tells every rank."""
        self.offload.require(GRADS)
        sums = StatisticSums()
        micro_batches = self._schedule.with_dummies(micro_batches)
        self.strategy.zero_grad()
        # The schedule divides the loss by the number of micro-batches and multiplies it by the
        # context-parallel size; a strategy divides the gradient by the number of replicas.
        scale = float(self.groups.mesh.dp * len(micro_batches))
        num_tokens = len(batch.tokens)
        if self.balance is not None:
            self.balance.begin(batch, scale)
        if self.teacher_top is not None:
            self.teacher_top.receive(batch, micro_batches)

        def share(model: PackedGPT, hidden: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            if micro.is_dummy:
                return loss_of_dummy(model, hidden)
            value, stats = loss(model, hidden, micro)
            if self.shares_prompts:
                computed = micro.tokens.shape[1] * micro.packed.context.size / num_tokens
                stats = {**stats, "computed_tokens": value.new_full((), computed)}
            log_probs = stats.pop(LOG_PROBS, None)
            if micro.packed.context.rank == 0:
                sums.add(stats)
                if log_probs is not None and self._has_loss:
                    sums.keep_log_probs(
                        log_probs, micro.response_index, len(batch.rollout_log_probs)
                    )
            return value * (scale + sums.zero_if_finite())

        passes = lambda: self._run(batch, micro_batches, share, self.strategy.trained)  # noqa: E731
        with replayed(self.replay, batch, micro_batches, False):
            if self._memory_recovery is None:
                passes()
            else:
                self._memory_recovery.run(passes)
        return sums

    @property
    def _has_loss(self) -> bool:
        """True on the ranks whose statistics count: one of each replica, on the stage with the
        output layer."""
        return self.groups.is_last_stage and self.groups.coordinate.tp == 0

    def _run(
        self,
        batch: RaggedBatch,
        micro_batches: Sequence[Sequence[int]],
        on_last_stage: OnLastStage,
        trained: Sequence[Any] = (),
        at_last_token: bool = False,
    ) -> None:
        """Run the schedule with this model's router settings."""
        self.offload.require(PARAMS)
        with contextlib.nullcontext() if self._adapters_on else adapters_off(self.chunks):
            self._schedule.run(
                batch,
                micro_batches,
                on_last_stage,
                trained,
                at_last_token,
                self.replay,
                self.balance,
                bool(trained) and self.predicts_observations,
            )
        self.strategy.end_passes()


def build_strategy(
    shape: ModelShape, megatron: MegatronConfig, groups: ProcessGroups
) -> TrainingStrategy:
    """Return a model of zero weights, by the strategy of its layout."""
    is_sharded = fsdp_config(megatron) is not None
    return (FsdpStrategy if is_sharded else MegatronStrategy)(shape, megatron, groups)


def engine_layouts(engine: ModelEngine, shape: ModelShape | None = None) -> list[Layout]:
    """Return each rank's layout of an engine's model, EMPTY outside of its mesh. shape: in place of
    the engine's, such as the model without adapters."""
    mesh = engine.groups.mesh
    of_mesh = training_layouts(shape or engine.shape, mesh, uses_transformer_engine())
    num_after = dist.get_world_size() - mesh.ranks.stop
    return [*[EMPTY] * mesh.first, *of_mesh, *[EMPTY] * num_after]
