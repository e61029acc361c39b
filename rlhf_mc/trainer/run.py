"""The type Run: the parts of a run, which setup/build.py builds."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mc.algorithms.estimators import EstimatorFunction
from rlhf_mc.algorithms.kl import KLController
from rlhf_mc.algorithms.policy_losses import PolicyLoss
from rlhf_mc.checkpoint.input_fingerprints import Inputs
from rlhf_mc.config.roles import has_rollout_pool, reference_is_actor
from rlhf_mc.config.schema import Config
from rlhf_mc.data.dataset import Prompts
from rlhf_mc.environments.environment_manager import EnvironmentManager
from rlhf_mc.health.adjustments import Adjustments
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.reshard.weight_sync import WeightSync
from rlhf_mc.rewards.manager import RewardManager
from rlhf_mc.rollout.base import RolloutEngine
from rlhf_mc.rollout.work_sharing import ResponseLengths
from rlhf_mc.topology.groups import ProcessGroups
from rlhf_mc.trainer.logprob_check import LogProbCheck
from rlhf_mc.trainer.offload_schedule import OffloadSchedule
from rlhf_mc.trainer.pool.group_pool import GroupPool
from rlhf_mc.trainer.pool.rollout_journal import RolloutJournal
from rlhf_mc.trainer.reward_models import RewardModel
from rlhf_mc.trainer.skipped_updates import SkippedUpdates
from rlhf_mc.trainer.step_state import StepSchedule
from rlhf_mc.trainer.teachers import Teacher


@dataclass(frozen=True)
class Run:
    """The parts of a run. They are the same on every rank, except for the rank's own shards."""

    config: Config
    groups: ProcessGroups
    """The actor's process groups; each model has groups of its own layout."""
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    train_prompts: Prompts
    val_prompts: Prompts
    """The prompts of the samples that are written have a text."""
    schedule: StepSchedule
    """The steps after which validation, export and checkpoint are due."""
    token_budgets: dict[str, int]
    """By phase, the tokens of a micro-batch."""
    inputs: Inputs
    """Size and content hash of every input file."""
    rewards: RewardManager
    actor: ModelEngine
    critic: ModelEngine | None
    """None if the advantage estimator needs none."""
    reference: ModelEngine | None
    reward_models: list[RewardModel]
    teachers: list[Teacher]
    """The teachers of distillation; none without it."""
    rollout: RolloutEngine
    rollout_pool: dist.ProcessGroup | None
    """The ranks with a rollout engine; None: all, or this is none of them."""
    exchange: dist.ProcessGroup | None
    """Group in which ranks of a rollout pool send the scores of their models and the experts that
    their engines have chosen; None: no such pool."""
    environments: EnvironmentManager | None
    """Environments of rollout.environment; None: none."""
    group_pool: GroupPool
    """Pool of rollout.tail_batching, partial_rollout and one_step_off."""
    journal: RolloutJournal
    """Journal of pooled steps."""
    response_lengths: ResponseLengths
    """Expected response lengths of the training prompts: the longest responses start first."""
    weight_sync: WeightSync
    """From the actor's parameters to the rollout engine's."""
    offload_schedule: OffloadSchedule
    """Device placement of the models by phase."""
    estimator: EstimatorFunction
    """Function of algorithm.adv_estimator."""
    policy_loss: PolicyLoss
    """Function of actor.policy_loss.loss_mode."""
    kl_controller: KLController
    skipped: SkippedUpdates
    log_prob_check: LogProbCheck
    adjustments: Adjustments
    """Settings that the run has changed by itself."""

    @property
    def rollout_ranks(self) -> list[int]:
        """The ranks with a rollout engine, in ascending order."""
        return sorted(rank for ranks in self.rollout.groups for rank in ranks)

    @property
    def has_rollout_pool(self) -> bool:
        """The rollout engines have ranks of their own."""
        return has_rollout_pool(self.config)

    @property
    def trains(self) -> bool:
        """This rank trains: it is not one of a rollout pool."""
        return self.groups.is_member

    def trained_models(self) -> list[ModelEngine]:
        """Return the models that are updated and saved, the actor first."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def models(self) -> list[ModelEngine]:
        """Return the models of all roles; a reference that is the actor without adapters is none of
        them."""
        reference = None if reference_is_actor(self.config) else self.reference
        frozen = [] if reference is None else [reference]
        frozen += [model.engine for model in self.reward_models]
        frozen += [teacher.engine for teacher in self.teachers if teacher.section.source is None]
        return [*self.trained_models(), *frozen]
