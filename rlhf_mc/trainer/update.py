"""Updates of critic and actor: PPO epochs over mini-batches. Losses are in algorithms/losses.py;
models/engine.py computes gradients on the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from rlhf_mc import platform
from rlhf_mc.algorithms.distillation import distill, forward_kl, with_distillation
from rlhf_mc.algorithms.losses import (
    ActorLossInputs,
    actor_loss,
    aggregation_weights,
    right_token_weights,
    value_loss,
)
from rlhf_mc.algorithms.policy_losses import PolicyLoss, PolicyLossInputs
from rlhf_mc.algorithms.rollout_correction import geometric_means, weights_of_micro_batch
from rlhf_mc.config.algorithm_schema import RolloutCorrectionConfig
from rlhf_mc.config.reward_schema import DistillationLossConfig
from rlhf_mc.config.roles import adapts_kl_loss
from rlhf_mc.config.schema import ActorConfig, Config, CriticConfig
from rlhf_mc.data.batch import RaggedBatch, ragged_indices
from rlhf_mc.models.engine import Loss, ModelEngine
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.heads import log_probs_and_entropy, value_head
from rlhf_mc.models.sequence_rows import TopTokens
from rlhf_mc.models.statistics import LOG_PROBS, OptimizerStep
from rlhf_mc.observability.metrics import mean_by_key
from rlhf_mc.runtime.work import counted
from rlhf_mc.trainer.advantages import corrected
from rlhf_mc.trainer.log_probs import compare_with_engine
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.skipped_updates import SkippedUpdates
from rlhf_mc.trainer.step_state import StepState
from rlhf_mc.trainer.token_budget import TokenBudget, train_step


def mini_batches(
    num_prompts: int,
    responses_per_prompt: int,
    mini_batch_size: int,
    epochs: int,
    shuffle: bool,
    seed: tuple[int, ...],
) -> Iterator[list[int]]:
    """Yield the sequences of each mini-batch, epoch after epoch. A prompt's responses stay
    together.

    mini_batch_size: in prompts. The order is a function of `seed` alone: layout and resume do not
    change it."""
    n = responses_per_prompt
    for epoch in range(epochs):
        order = np.arange(num_prompts)
        if shuffle:
            order = np.random.default_rng((*seed, epoch)).permutation(num_prompts)
        for start in range(0, num_prompts, mini_batch_size):
            yield [int(p) * n + k for p in order[start : start + mini_batch_size] for k in range(n)]


@dataclass(frozen=True)
class ActorTerms:
    """Parts of the actor's loss in one step, beside its settings."""

    policy_loss: PolicyLoss
    """Function of actor.policy_loss.loss_mode."""
    entropy_coeff: float
    """Coefficient of the entropy bonus in this step."""
    kl_loss_coef: float
    """Coefficient of the KL loss in this step; 0 without one."""
    loss_scale_factor: int
    """Divisor of loss_agg_mode seq-mean-token-sum-norm."""
    draws: torch.Generator
    """Random draws of the step's mini-batches, one after the other: the same on every rank."""
    correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """For importance weights of a batch without old log-probs."""
    distillation: DistillationLossConfig | None = None
    """None without teachers."""
    teacher_top: TopTokens | None = None
    """With forward_kl_topk."""


def entropy_coeff(cfg: ActorConfig, step: int, total_steps: int) -> float:
    """Return the coefficient of the entropy bonus in a step, from 1 to total_steps."""
    if cfg.entropy_coeff_end is None or total_steps == 1:
        return cfg.entropy_coeff
    # more steps after a resume with smaller batches
    done = min((step - 1) / (total_steps - 1), 1.0)
    return cfg.entropy_coeff + done * (cfg.entropy_coeff_end - cfg.entropy_coeff)


def kl_loss_coef(run: Run, step: int) -> float:
    """Return the coefficient of the KL loss in a step; 0 without one. The controller, where it sets
    the coefficient, has seen the KL of this step."""
    cfg = run.config
    if not cfg.actor.use_kl_loss:
        return 0.0
    adjusted = run.adjustments.kl_coef(step)
    if adjusted is not None and not cfg.algorithm.use_kl_in_reward:
        return adjusted
    return run.kl_controller.value if adapts_kl_loss(cfg) else cfg.actor.kl_loss_coef


def step_generator(seed: int, step: int) -> torch.Generator:
    """Return the generator of a step's draws, a function of (seed, step) alone."""
    state = np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> 1))


def _policy_inputs(
    cfg: ActorConfig,
    log_probs: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    num_tokens: int,
    mini: RaggedBatch,
) -> PolicyLossInputs:
    """Return a micro-batch's inputs of the policy loss. fields: of its tokens, [r] each.
    num_tokens: of the mini-batch."""
    weights = fields["weights"]
    return PolicyLossInputs(
        log_probs=log_probs,
        old_log_probs=fields["old_log_probs"],
        advantages=fields["advantages"],
        weights=weights * fields["is_weights"] if "is_weights" in fields else weights,
        sequence=fields["sequence"],
        num_tokens=num_tokens,
        num_sequences=mini.num_sequences,
        selected=fields.get("selected"),
        clip_low=cfg.clip_ratio_low,
        clip_high=cfg.clip_ratio_high,
        clip_c=cfg.clip_ratio_c,
        kl_coef=cfg.policy_loss.ppo_kl_coef,
        tau_pos=cfg.policy_loss.tau_pos,
        tau_neg=cfg.policy_loss.tau_neg,
    )


def _distill(
    cfg: DistillationLossConfig,
    log_probs: torch.Tensor,
    others: Sequence[torch.Tensor],
    teacher: torch.Tensor | None,
    fields: dict[str, torch.Tensor],
    micro: MicroBatch,
) -> None:
    """Change a micro-batch's fields as `distill` does. others, teacher: log-probs of the teacher's
    tokens [r, k], by the student and by the teacher; none without them."""
    if teacher is not None:
        kl = forward_kl(others[0], teacher, cfg.log_prob_min_clamp)
        fields["forward_kl"] = micro.all_results(kl)[: len(micro.response_index)]
    distill(cfg, log_probs, fields)


def _actor_fields(
    mini: RaggedBatch, cfg: ActorConfig, terms: ActorTerms
) -> dict[str, torch.Tensor]:
    """Return what the actor's loss reads of each drawn token of the mini-batch, by name: [R]
    each."""
    assert mini.advantages is not None
    mode = cfg.loss_agg_mode
    selection = terms.policy_loss.selection
    per_token = {
        "advantages": mini.advantages,
        "weights": aggregation_weights(
            mini.response_lens, mode, terms.loss_scale_factor, mini.loss_mask
        ),
        "sequence": torch.repeat_interleave(mini.response_lens),
    }
    if mini.old_log_probs is not None:
        per_token["old_log_probs"] = mini.old_log_probs
    elif terms.correction.rollout_is is not None:
        per_token["rollout_log_probs"] = mini.rollout_log_probs
    if selection is not None:
        assert mini.old_log_probs is not None
        per_token["selected"] = selection(
            mini.old_log_probs, mini.advantages, cfg.policy_loss, terms.draws
        )
    if mini.is_weights is not None:
        per_token["is_weights"] = (
            geometric_means(mini.is_weights, mini.response_lens)
            if terms.policy_loss.has_geometric_weights
            else mini.is_weights
        )
    if cfg.use_kl_loss and mini.ref_log_probs is not None:
        per_token["ref_log_probs"] = mini.ref_log_probs
    if mini.teacher_log_probs is not None:
        per_token["teacher_log_probs"] = mini.teacher_log_probs
    if cfg.positive_nll_coef > 0:
        assert mini.accuracies is not None
        per_token["right_weights"] = right_token_weights(
            mini.accuracies, mini.response_lens, mini.loss_mask
        )
    return per_token


def actor_objective(
    mini: RaggedBatch, cfg: ActorConfig, vocab_size: int, temperature: float, terms: ActorTerms
) -> Loss:
    """Return the actor's loss of this mini-batch, as a function of a micro-batch that returns its
    share. Without old log-probs in the batch the micro-batch's own are the old ones, and are
    returned as LOG_PROBS."""
    is_geometric = terms.policy_loss.has_geometric_weights
    computes_old_log_probs = mini.old_log_probs is None
    per_token = _actor_fields(mini, cfg, terms)
    lens = None if cfg.env_loss_coef == 0 else mini.contexts().observation_lens
    num_observed = 0 if lens is None else int(lens.sum())
    on_device = dict(zip(per_token, platform.to_device(list(per_token.values())), strict=True))

    def loss(
        model: object, states: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        top = terms.teacher_top
        tokens, teacher = (None, None) if top is None else top.of(micro)
        log_probs, entropy, *others = log_probs_and_entropy(
            model, states, micro.targets, vocab_size, temperature, tokens
        )
        results = [micro.all_results(x) for x in (log_probs, entropy)]
        log_probs, entropy = (x[: len(micro.response_index)] for x in results)
        fields = {name: values[micro.response_index] for name, values in on_device.items()}
        if computes_old_log_probs:
            fields["old_log_probs"] = log_probs.detach()
        if "rollout_log_probs" in fields:
            fields["is_weights"] = weights_of_micro_batch(
                log_probs.detach() - fields["rollout_log_probs"],
                fields["sequence"],
                mini.num_sequences,
                terms.correction,
                is_geometric,
            )
        if terms.distillation is not None:
            _distill(terms.distillation, log_probs, others, teacher, fields, micro)
        inputs = ActorLossInputs(
            policy=_policy_inputs(cfg, log_probs, fields, len(per_token["weights"]), mini),
            weights=fields["weights"],
            entropy=entropy if terms.entropy_coeff != 0.0 else entropy.detach(),
            ref_log_probs=fields.get("ref_log_probs"),
            right_weights=fields.get("right_weights"),
            observed_log_probs=results[0][len(log_probs) :] if num_observed else None,
            num_observed=num_observed,
        )
        value, stats = actor_loss(
            inputs,
            terms.policy_loss.function,
            entropy_coeff=terms.entropy_coeff,
            kl_loss_coef=terms.kl_loss_coef,
            kl_loss_type=cfg.kl_loss_type,
            positive_nll_coef=cfg.positive_nll_coef,
            env_loss_coef=cfg.env_loss_coef,
        )
        if terms.distillation is not None:
            value, stats = with_distillation(terms.distillation, value, stats, fields)
        return value, {**stats, LOG_PROBS: log_probs.detach()} if computes_old_log_probs else stats

    return loss


def critic_objective(mini: RaggedBatch, cfg: CriticConfig, loss_scale_factor: int) -> Loss:
    """Return the critic's loss of this mini-batch, as a function of a micro-batch that returns its
    share."""
    assert mini.values is not None and mini.returns is not None
    weights = aggregation_weights(mini.response_lens, cfg.loss_agg_mode, loss_scale_factor)
    old_values, returns, weights = platform.to_device([mini.values, mini.returns, weights])

    def loss(
        model: object, states: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return value_loss(
            value_head(model, states, micro),
            old_values[micro.response_index],
            returns[micro.response_index],
            weights[micro.response_index],
            num_tokens=len(returns),
            cliprange=cfg.cliprange_value,
        )

    return loss


def update(
    engine: ModelEngine,
    batch: RaggedBatch,
    mini_batch_indices: Iterator[list[int]],
    objective: Callable[[RaggedBatch], Loss],
    budget: TokenBudget,
    skipped: SkippedUpdates,
    computes_old_log_probs: bool = False,
) -> tuple[RaggedBatch, dict[str, float]]:
    """Take one optimizer step per mini-batch, of its sequences that are trained on, if any. Return
    the batch, and by key the mean of each statistic over the steps taken, and the share of skipped
    steps: "{role}/{statistic}". Every rank must call it.

    computes_old_log_probs: the batch has none yet; it gets those of its only mini-batch."""
    trained = set(batch.trained_rows.tolist())
    wanted = ([i for i in indices if i in trained] for indices in mini_batch_indices)
    minis = [indices for indices in wanted if indices]
    steps: list[OptimizerStep] = []
    for number, indices in enumerate(counted(minis, len(minis), "mini-batches")):
        with platform.named_range("mini_batch"):
            mini = batch.select(indices)
            step = train_step(engine, mini, objective(mini), budget, number)
        steps.append(step)
        if computes_old_log_probs:
            log_probs = engine.collect_log_probs(step, mini)
            mini = mini.with_fields(old_log_probs=log_probs)
            positions = ragged_indices(batch.response_lens.numpy(), np.array(indices))
            batch = batch.with_fields(
                old_log_probs=batch.rollout_log_probs.index_put(
                    (torch.from_numpy(positions),), log_probs
                )
            )
        skipped.record(engine, budget.step, mini, step.skipped)
    metrics = mean_by_key(engine.statistics(steps))
    engine.end_of_ppo_step()
    if computes_old_log_probs and not minis:
        batch = batch.with_fields(old_log_probs=batch.rollout_log_probs)
    return batch, {f"{engine.name}/{key}": value for key, value in metrics.items()}


def update_critic(run: Run, state: StepState, batch: RaggedBatch) -> None:
    """Update the critic, if the run has one: PPO epochs over mini-batches."""
    cfg = run.config
    critic = cfg.critic
    if run.critic is None:
        return
    with run.offload_schedule.phase(state.timer, "update_critic"):
        size = critic.ppo_mini_batch_size or cfg.actor.ppo_mini_batch_size
        epochs = critic.ppo_epochs or cfg.actor.ppo_epochs
        minis = step_mini_batches(cfg, state.step, size, epochs)
        scale = critic.loss_scale_factor or cfg.data.max_response_length
        objective = partial(critic_objective, cfg=critic, loss_scale_factor=scale)
        budget = token_budget(run, "critic", state.step)
        _, metrics = update(run.critic, batch, minis, objective, budget, run.skipped)
        state.metrics |= metrics


def update_actor(run: Run, state: StepState, batch: RaggedBatch) -> RaggedBatch:
    """Update the actor: PPO epochs over mini-batches. Do nothing during trainer.critic_warmup.
    Return the batch with old log-probs, which are compared with the engine's here if no pass has
    computed them."""
    cfg = run.config
    actor = cfg.actor
    if state.step <= cfg.trainer.critic_warmup:
        return batch
    with run.offload_schedule.phase(state.timer, "update_actor"):
        minis = step_mini_batches(cfg, state.step, actor.ppo_mini_batch_size, actor.ppo_epochs)
        terms = ActorTerms(
            policy_loss=run.policy_loss,
            entropy_coeff=entropy_coeff(actor, state.step, run.schedule.total_steps),
            kl_loss_coef=kl_loss_coef(run, state.step),
            loss_scale_factor=actor.loss_scale_factor or cfg.data.max_response_length,
            draws=step_generator(cfg.trainer.seed, state.step),
            correction=cfg.algorithm.rollout_correction,
            distillation=cfg.distillation.distillation_loss if run.teachers else None,
            teacher_top=run.actor.teacher_top,
        )
        objective = partial(
            actor_objective,
            cfg=actor,
            vocab_size=run.actor.shape.vocab_size,
            temperature=cfg.rollout.temperature,
            terms=terms,
        )
        budget = token_budget(run, "actor", state.step)
        computes_old_log_probs = batch.old_log_probs is None
        batch, metrics = update(
            run.actor, batch, minis, objective, budget, run.skipped, computes_old_log_probs
        )
        run.actor.teacher_top = None  # to free them
        state.metrics |= metrics
        if computes_old_log_probs:
            compare_with_engine(run, state, batch.trained())
            batch, metrics = corrected(batch, cfg.algorithm.rollout_correction)
            state.metrics |= metrics
        if run.actor.replay is not None:
            state.metrics["actor/expert_choices_diff"] = (
                state.metrics["training/expert_choices_diff"]
                if computes_old_log_probs
                else run.actor.replay.differing_shares()[0]
            )
        if run.actor.balance is not None:
            state.metrics |= {
                f"actor/{name}": value for name, value in run.actor.balance.losses().items()
            }
    return batch


def step_mini_batches(cfg: Config, step: int, size: int, epochs: int) -> Iterator[list[int]]:
    """Yield the mini-batches of a model's updates in a step. size: in prompts."""
    seed = (cfg.trainer.seed, step)
    return mini_batches(
        cfg.data.train_batch_size, cfg.rollout.n, size, epochs, cfg.actor.shuffle, seed
    )


def token_budget(run: Run, role: str, step: int) -> TokenBudget:
    """Return the token budget of a model's updates in a step."""
    data = run.config.data
    longest = data.max_prompt_length + data.max_response_length
    return TokenBudget(role, step, run.token_budgets[f"update_{role}"], longest, run.adjustments)
