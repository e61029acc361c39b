"""Conclusions from the settings: the models that a run has besides the actor, what null stands for,
and the device placement of each phase, which the offload schedule establishes and the planner
counts. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_mc.config.algorithm_schema import (
    ESTIMATOR_NEEDS,
    SELECTING_LOSSES,
    AlgorithmConfig,
    EstimatorNeeds,
    RouterReplayMode,
)
from rlhf_mc.config.model_schema import fsdp_config
from rlhf_mc.config.reward_schema import unnamed
from rlhf_mc.config.schema import (
    Config,
    DataConfig,
    MegatronConfig,
    RolloutConfig,
    TrainerConfig,
    get_setting,
    reward_models,
    roles,
    teachers,
)

PASSES = {
    "old_log_prob": "rollout.log_prob",
    "ref": "ref.log_prob",
    "values": "critic.forward",
    "reward_model": "reward_model.forward",
    "update_critic": "critic.ppo",
    "update_actor": "actor.ppo",
}
"""Phases with a pass over a model, and how the setting of its token budget begins:
..._max_token_len_per_gpu."""


def token_budgets(cfg: Config) -> dict[str, int]:
    """Return the tokens of a micro-batch by phase. Phases of models that the run does not have
    never ask for theirs."""
    passes = {
        **PASSES,
        **{role: f"{role}.forward" for role in reward_models(cfg)},
        **{role: f"{role}.log_prob" for role in teachers(cfg)},
    }
    return {
        phase: get_setting(cfg, f"{name}_max_token_len_per_gpu") for phase, name in passes.items()
    }


def tokens_on_rank(length: int, cp: int) -> int:
    """Return a rank's tokens of a sequence that cp ranks share: two chunks of 2 cp, padded to equal
    lengths."""
    return length if cp == 1 else -(-length // (2 * cp)) * 2


def longest_sequence(tokens: int, cp: int) -> int:
    """Return the length of the longest sequence whose part on a rank has at most `tokens`
    tokens."""
    return tokens if cp == 1 else tokens // 2 * 2 * cp


def estimator_needs(algorithm: AlgorithmConfig) -> EstimatorNeeds:
    """Return the needs of the run's advantage estimator."""
    if algorithm.adv_estimator == "custom":
        return EstimatorNeeds(**dict.fromkeys(algorithm.custom_estimator.needs, True))
    return ESTIMATOR_NEEDS[algorithm.adv_estimator]


def uses_critic(cfg: Config) -> bool:
    """Return whether the run has a critic."""
    return estimator_needs(cfg.algorithm).critic


def has_ref_pass(cfg: Config) -> bool:
    """Return whether the loss or the rewards read the reference's log-probs."""
    return cfg.algorithm.use_kl_in_reward or cfg.actor.use_kl_loss


def uses_reference(cfg: Config) -> bool:
    """Return whether the run has a reference policy."""
    return has_ref_pass(cfg) or any(teacher.source == "ref" for teacher in teachers(cfg).values())


def num_teacher_tokens(cfg: Config) -> int:
    """Return the number of the teacher's most probable tokens at a position that the loss reads."""
    loss = cfg.distillation.distillation_loss
    return loss.topk if cfg.distillation.enabled and loss.loss_mode == "forward_kl_topk" else 0


def reference_is_actor(cfg: Config) -> bool:
    """Return whether the reference policy is the actor without its adapters."""
    return uses_reference(cfg) and cfg.actor.lora.rank > 0


def shared_models(cfg: Config) -> dict[str, str]:
    """Return the roles without a model of their own, and the role of the model that each uses."""
    shared = {"ref": "actor"} if reference_is_actor(cfg) else {}
    sources = {role: teacher.source for role, teacher in teachers(cfg).items() if teacher.source}
    return shared | {role: shared.get(source, source) for role, source in sources.items()}


def has_reference_model(cfg: Config) -> bool:
    """Return whether the reference policy is a model of its own."""
    return uses_reference(cfg) and not reference_is_actor(cfg)


def has_rollout_pool(cfg: Config) -> bool:
    """Return whether the rollout engines have ranks of their own."""
    return cfg.resource_pools.rollout is not None


def in_rollout_pool(cfg: Config, role: str) -> bool:
    """Return whether a role's model is on the ranks of the rollout pool. It has a phase of the
    role's name; that of any other phase is False."""
    return has_rollout_pool(cfg) and getattr(roles(cfg).get(role), "pool", "train") == "rollout"


def role_ranks(cfg: Config, role: str, world: int) -> range:
    """Return the ranks that hold a role's model."""
    num_training = num_training_ranks(cfg, world)
    return range(num_training, world) if in_rollout_pool(cfg, role) else range(num_training)


def num_training_ranks(cfg: Config, world: int) -> int:
    """Return the number of ranks that train: the first ones of the run."""
    return cfg.resource_pools.train or world


def num_rollout_ranks(cfg: Config, world: int) -> int:
    """Return the number of ranks that hold rollout engines: the last ones of the run."""
    return cfg.resource_pools.rollout or world


def shares_weights(cfg: Config) -> bool:
    """Return whether weights of the rollout engine are the actor's own. With adapters the engine's
    are others: those of both together. In another pool the engine has no rank with the actor. With
    strategy fsdp2 a rank has some rows of each tensor."""
    has_tensors = cfg.actor.strategy == "megatron" and not has_rollout_pool(cfg)
    return cfg.reshard.share_weights and cfg.actor.lora.rank == 0 and has_tensors


def has_old_log_prob_pass(cfg: Config, replay: RouterReplayMode) -> bool:
    """Return whether a pass before the update computes the actor's old log-probs. Without it they
    are the engine's (bypass_mode), or those of the step's only optimizer step: the policy has not
    changed before it, and nothing else reads them earlier. An update splits the contexts of a
    sequence, whose importance weight is of all of them. replay: of `router_replay`."""
    algorithm = cfg.algorithm
    correction = algorithm.rollout_correction
    if correction.bypass_mode:
        return False
    return (
        cfg.actor.ppo_epochs > 1
        or cfg.actor.ppo_mini_batch_size < cfg.data.train_batch_size
        or algorithm.use_kl_in_reward
        or algorithm.kl_ctrl.type == "adaptive"
        or bool(correction.rollout_rs)
        or correction.rollout_token_veto_threshold is not None
        or (correction.rollout_is is not None and correction.rollout_is_batch_normalize)
        or (correction.rollout_is == "sequence" and cfg.rollout.environment.has_contexts)
        or cfg.actor.policy_loss.loss_mode in SELECTING_LOSSES
        or replay == "recompute"
    )


def mini_batch_sizes(cfg: Config) -> dict[str, int]:
    """Return the prompts per optimizer step of each model that is trained."""
    actor = cfg.actor.ppo_mini_batch_size
    critic = cfg.critic.ppo_mini_batch_size
    return {
        "actor": actor,
        **({"critic": actor if critic is None else critic} if uses_critic(cfg) else {}),
    }


def adapts_kl_loss(cfg: Config) -> bool:
    """Return whether the controller of algorithm.kl_ctrl sets the coefficient of the KL loss."""
    return cfg.algorithm.kl_ctrl.type == "adaptive" and not cfg.algorithm.use_kl_in_reward


def saves_checkpoints(trainer: TrainerConfig) -> bool:
    """Return whether the run writes training checkpoints without being asked to stop."""
    return trainer.save_freq > 0 or trainer.save_minutes is not None


def prompts_per_batch(data: DataConfig) -> int:
    """Return the number of prompts that are generated for at once."""
    return data.train_batch_size if data.gen_batch_size is None else data.gen_batch_size


def has_pool(rollout: RolloutConfig) -> bool:
    """Return whether groups are generated over several steps."""
    return rollout.tail_batching or trains_on_older_weights(rollout)


def depends_on_time(rollout: RolloutConfig) -> bool:
    """Return whether the groups of a step depend on the (virtual) time of their generation."""
    return rollout.tail_batching or rollout.partial_rollout


def trains_on_older_weights(rollout: RolloutConfig) -> bool:
    """Return whether steps train on tokens that earlier weights have sampled."""
    return rollout.partial_rollout or rollout.one_step_off


def sampling_versions(rollout: RolloutConfig) -> int:
    """Return the most weight versions that may sample one group of rollout.partial_rollout: with
    one_step_off it is trained on one version later."""
    return rollout.max_off_policy_threshold - rollout.one_step_off


def prompts_in_flight(cfg: Config) -> int:
    """Return the number of prompts that a rollout generates for, those included whose responses it
    continues: one batch without partial_rollout or tail_batching."""
    size = cfg.data.train_batch_size
    default = (
        2 * size
        if cfg.rollout.partial_rollout
        else -(-5 * size // 4)
        if cfg.rollout.tail_batching
        else size
    )
    return cfg.rollout.prompts_in_flight or default


def overlaps_reduction(megatron: MegatronConfig, replicas: int, cuda: bool) -> bool:
    """Return True where each bucket of gradients is reduced over the replicas as soon as it is
    complete."""
    if fsdp_config(megatron) is not None:
        return False
    if megatron.overlap_grad_reduce is None:
        return cuda and replicas > 1
    return megatron.overlap_grad_reduce


def has_contiguous_experts(cfg: Config) -> bool:
    """Return whether the actor's experts lie in the buffer of the distributed optimizer, which has
    no frozen ones."""
    trains_all = not cfg.actor.freeze and cfg.actor.lora.rank == 0
    is_buffered = cfg.actor.strategy == "megatron" and cfg.actor.megatron.use_distributed_optimizer
    return is_buffered and trains_all


def absent_roles(cfg: Config) -> list[str]:
    """Return the sections of models that the run does not have."""
    is_present = {
        "critic": uses_critic(cfg),
        "ref": uses_reference(cfg),
    }
    return [
        role
        for role in roles(cfg)
        if role != "actor"
        and not is_present.get(role, role in (*reward_models(cfg), *teachers(cfg)))
    ]


UNCHANGED = None
"""Placement of a phase that needs nothing on the device: it stays as it was."""
_PLACED = ("actor", "critic", "ref", "rollout", "reward_model")
"""The roles of the columns of DEVICE_PLACEMENT; the last one is the scorer's."""

# fmt: off
DEVICE_PLACEMENT: dict[str, tuple[str, str, str, str, str] | None] = {
    #                  actor               critic              reference rollout engine      scorer
    "update_weights": ("params",           "",                 "",       "weights",          ""),
    "gen":            ("",                 "",                 "",       "weights kv_cache", ""),
    "testing":        ("",                 "",                 "",       "weights kv_cache", ""),
    "reward":          UNCHANGED,
    "old_log_prob":   ("params",           "",                 "",       "",                 ""),
    "ref":            ("",                 "",                 "params", "",                 ""),
    "reward_model":   ("",                 "",                 "",       "",              "params"),
    "teacher_model":  ("",                 "",                 "",       "",              "params"),
    "values":         ("",                 "params",           "",       "",                 ""),
    "sum_log_probs":   UNCHANGED,
    "adv":             UNCHANGED,
    "update_critic":  ("",                 "params grads",     "",       "",                 ""),
    "update_actor":   ("params grads",     "",                 "",       "",                 ""),
    "load_checkpoint":("params optimizer", "params optimizer", "",       "",                 ""),
    "save_checkpoint":("params optimizer", "params optimizer", "",       "",                 ""),
    "export":         ("params",           "",                 "",       "",                 ""),
}
# fmt: on
"""The parts that each phase needs on the device. All others are offloaded if the settings allow it:
params, grads and optimizer by
{actor,critic,ref,reward_model}.megatron.{param,grad,optimizer}_offload, both parts of the rollout
engine by rollout.free_cache_engine. An update brings the optimizer state for each of its steps
(Offload.optimizer_step); it stays between them where the planner finds room. Each of reward_models
and each teacher has a phase of its own, in which it is the scorer. Weights that the engine shares
with the actor (reshard.share_weights) stay on the device: the actor's params then cannot be
offloaded, and the engine's sleep skips them."""

Placement = Mapping[str, frozenset[str]]


def parts_on_device(phase: str, shared: Mapping[str, str] | None = None) -> Placement | None:
    """Return the parts that the phase needs on the device, by role; None for UNCHANGED. The phase
    of a reward model or a teacher is named after its role, and needs that model. shared: what
    `shared_models` returns."""
    row = DEVICE_PLACEMENT[unnamed(phase)]
    if row is None:
        return None
    is_scoring = unnamed(phase) in ("reward_model", "teacher_model")
    placed = (*_PLACED[:-1], phase if is_scoring else _PLACED[-1])
    parts = {role: frozenset(names.split()) for role, names in zip(placed, row, strict=True)}
    for role, other in (shared or {}).items():
        if role in parts:
            parts[other] |= parts.pop(role)
    return parts
