"""The phases of a run. Every rank calls each function. A phase runs with its row of the offload schedule and is timed
under the row's name. The phases that compute on the step's batch return it with more fields. Their order is in loop.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_mc.checkpoint.hf_export import export_hf
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import needs_of
from rlhf_mc.data.batch import Prompt, RaggedBatch, build_batch
from rlhf_mc.data.order import indices_of_batch
from rlhf_mc.models.engine import Head, ModelEngine
from rlhf_mc.models.forward import PackingCache
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.observability.run_files import TRAIN_GENERATIONS
from rlhf_mc.observability.sinks import view
from rlhf_mc.rewards.manager import PendingScores
from rlhf_mc.rewards.metrics import reward_metrics
from rlhf_mc.rewards.results import Score
from rlhf_mc.rewards.shaping import penalize_overlong
from rlhf_mc.rollout.base import WEIGHTS, Sampling
from rlhf_mc.topology.consensus import sum_over_ranks
from rlhf_mc.trainer import advantages, evaluate, reward_models, sampling, scoring
from rlhf_mc.trainer.checkpointing import Checkpoints, Position
from rlhf_mc.trainer.reward_models import RewardModel
from rlhf_mc.trainer.rollout_correction import corrected
from rlhf_mc.trainer.samples import some_of_each_prompt, write_samples
from rlhf_mc.trainer.setup import Run, layouts_of
from rlhf_mc.trainer.step_report import StepState, start_slowest_rank
from rlhf_mc.trainer.token_budget import TokenBudget
from rlhf_mc.trainer.update import (
    ActorTerms,
    actor_objective,
    critic_objective,
    entropy_coeff,
    kl_loss_coef,
    mini_batches,
    step_generator,
    update,
)


def load_checkpoint(run: Run, state: StepState, checkpoints: Checkpoints) -> Position:
    """Resume from the checkpoint of trainer.resume_mode, if there is one. Return the position of the run."""
    with run.offload_schedule.phase(state.timer, "load_checkpoint"):
        return checkpoints.resume()


def sync_weights(run: Run, timer: PhaseTimer) -> None:
    """Write the actor's weights into vLLM's parameters. Each rank receives only the blocks that it lacks."""
    with run.offload_schedule.phase(timer, "update_weights"):
        run.weight_sync.run(run.actor.params, run.rollout.params)
        run.rollout.weights_updated()


def rollout(run: Run, state: StepState) -> tuple[list[Prompt], RaggedBatch]:
    """Generate rollout.n responses to each prompt of the next batch with the current weights, and a greedy one if the
    advantage estimator needs it. Return the prompt of each response, and the batch."""
    cfg = run.config
    indices = indices_of_batch(cfg.data, run.train_prompts.file_sizes, state.num_batches, cfg.trainer.seed)
    drawn = run.train_prompts.at(indices)
    # The reward model's pass, between two batches of a step, may let vLLM sleep, and its weights are then lost.
    if not state.drawn or WEIGHTS not in run.rollout.awake:
        sync_weights(run, state.timer)
    state.num_batches += 1
    with run.offload_schedule.phase(state.timer, "gen"):
        seeds = sampling.sampling_seeds(
            cfg.trainer.seed, sampling.TRAINING, state.step, drawn, cfg.rollout.n, state.drawn
        )
        prompts = sampling.repeat_prompts(drawn, cfg.rollout.n)
        parameters = Sampling(cfg.rollout.temperature, cfg.data.max_response_length, run.stop_token_ids)
        generations = sampling.generate(run.rollout, prompts, seeds, parameters)
        if needs_of(cfg.algorithm).greedy_baseline:
            greedy = sampling.generate(
                run.rollout, drawn, seeds[:: cfg.rollout.n], replace(parameters, temperature=0.0)
            )
            state.greedy = build_batch(drawn, greedy)
    return prompts, build_batch(prompts, generations)


def submit_rewards(run: Run, state: StepState, prompts: list[Prompt], batch: RaggedBatch) -> PendingScores:
    """Submit the responses, the greedy ones last, to the reward workers, which score them during the next phase."""
    responses = batch.responses()
    if state.greedy is not None:
        prompts = prompts + prompts[:: run.config.rollout.n]
        responses += state.greedy.responses()
    with run.offload_schedule.phase(state.timer, "reward"):
        return scoring.submit_responses(run.rewards, run.tokenizer, prompts, responses)


def score(run: Run, state: StepState, batch: RaggedBatch) -> RaggedBatch:
    """Compute old log-probs (actor), compared with vLLM's, and, if the run has these models, reference log-probs and
    values (critic)."""
    log_probs = scoring.log_prob_head(run.actor.shape.vocab_size, run.config.rollout.temperature)
    bypass = run.config.algorithm.rollout_correction.bypass_mode
    passes: dict[str, tuple[str, ModelEngine, Head]] = {}
    if not bypass or run.log_prob_check.is_first:
        passes["old_log_probs"] = ("old_log_prob", run.actor, log_probs)
    if run.reference is not None:
        passes["ref_log_probs"] = ("ref", run.reference, log_probs)
    if run.critic is not None:
        passes["values"] = ("values", run.critic, scoring.value_head)
    mine: dict[str, torch.Tensor] = {}
    for name, (phase, engine, head) in passes.items():
        with run.offload_schedule.phase(state.timer, phase):
            mine[name] = scoring.my_token_scores(engine, batch, head, run.limits[phase], state.packing)
    if "old_log_probs" in mine:
        start_slowest_rank(state, "old_log_prob")
    if mine:
        # Once for all passes: a rank that is the slower one in the first may be the faster one in the next.
        with run.offload_schedule.phase(state.timer, "sum_log_probs"):
            found = sum_over_ranks(torch.stack(list(mine.values())))
        batch = batch.with_fields(**dict(zip(mine, found, strict=True)))
    if "old_log_probs" in mine:
        run.log_prob_check.check(batch, state.step)
    # With bypass_mode in the first step too, so that a resumed run computes the same.
    return batch.with_fields(old_log_probs=batch.rollout_log_probs) if bypass else batch


def collect_rewards(
    run: Run, state: StepState, prompts: list[Prompt], batch: RaggedBatch, pending: PendingScores
) -> RaggedBatch:
    """Return the batch with its scores, as `await_rewards`, and record them."""
    batch, scores = await_rewards(run, state, prompts, batch, pending)
    record_rewards(state, [prompt.data_source for prompt in prompts], scores)
    record_samples(run, state, prompts, batch, scores)
    return batch


def await_rewards(
    run: Run, state: StepState, prompts: list[Prompt], batch: RaggedBatch, pending: PendingScores
) -> tuple[RaggedBatch, list[Score]]:
    """Return the batch with the score of each response, and of the greedy response to its prompt if there is one: the
    weighted sum of its parts, by the reward workers and the reward models, less the penalty on long responses. Return
    the scores of the batch's responses with their parts too."""
    n = run.config.rollout.n
    greedy_prompts = [] if state.greedy is None else prompts[::n]
    by_model = {
        model.part: score_by_reward_model(run, state, model, [*prompts, *greedy_prompts], batch)
        for model in run.reward_models
    }
    hidden = state.metrics.get("timing_s/reward_hidden", 0.0)
    state.metrics["timing_s/reward_hidden"] = hidden + pending.seconds_until(time.perf_counter())
    sources = [prompt.data_source for prompt in (*prompts, *greedy_prompts)]
    with run.offload_schedule.phase(state.timer, "reward"):
        scores = scoring.collect_scores(pending, len(sources))
    for part, contributions in by_model.items():
        scores = [
            score if value is None else score.plus(part, value)
            for score, value in zip(scores, contributions, strict=True)
        ]
    buffer = run.config.reward.overlong_buffer
    if buffer.len > 0:
        lens = batch.response_lens.tolist() + ([] if state.greedy is None else state.greedy.response_lens.tolist())
        scores = penalize_overlong(scores, lens, run.config.data.max_response_length, buffer)
    numbers = torch.tensor([score.score for score in scores], dtype=torch.float32)
    if greedy_prompts:
        batch = batch.with_fields(greedy_scores=numbers[len(prompts) :].repeat_interleave(n))
    return batch.with_fields(scores=numbers[: len(prompts)]), scores[: len(prompts)]


def record_rewards(state: StepState, sources: Sequence[str], scores: Sequence[Score]) -> None:
    """Add the metrics of the scores by data source. sources, scores: one entry per response."""
    state.metrics.update(reward_metrics(sources, scores))


def record_samples(run: Run, state: StepState, prompts: list[Prompt], batch: RaggedBatch, scores: list[Score]) -> None:
    """Write the responses that are trained on to trainer.rollout_data_dir, and some of them to train_generations/, in
    the steps in which they are due."""
    cfg = run.config.trainer
    if run.groups.rank != 0:
        return
    responses = batch.responses()
    if run.schedule.is_rollout_data_due(state.step):
        keep_samples(run, cfg.rollout_data_dir, state.step, prompts, responses, scores)
    if run.schedule.is_train_log_due(state.step):
        rows = some_of_each_prompt(len(prompts), run.config.rollout.n, cfg.log_train_generations)
        directory = str(Path(cfg.default_local_dir) / TRAIN_GENERATIONS) if rows else None
        some = [prompts[i] for i in rows], [responses[i] for i in rows], [scores[i] for i in rows]
        keep_samples(run, directory, state.step, *some)


def score_by_reward_model(
    run: Run, state: StepState, model: RewardModel, prompts: list[Prompt], batch: RaggedBatch
) -> list[float | None]:
    """Return the contribution of a reward model's part to each score, None where the mixture of the data source has no
    such part. prompts: of each response, the greedy ones last. Raise UserError if a score is not finite."""
    weights = [run.rewards.mixture.training(prompt.data_source).get(model.part) for prompt in prompts]
    num_sampled = batch.num_sequences
    passes = [(batch, slice(num_sampled), state.packing)]
    if state.greedy is not None:
        passes.append((state.greedy, slice(num_sampled, None), PackingCache()))
    values: list[float] = []
    num_truncated = 0
    with run.offload_schedule.phase(state.timer, model.role):
        for responses, part, packing in passes:
            asked = [i for i, weight in enumerate(weights[part]) if weight is not None]
            found = reward_models.score(model, run.tokenizer, prompts[part], responses, asked, packing)
            values += found.values.tolist()
            num_truncated += found.num_truncated
    if not all(map(math.isfinite, values)):  # the same on every rank
        raise UserError(f"{model.role}.model_path: {model.path}: a score is not finite in step {state.step}")
    if model.conversations is not None:
        key = f"reward/num_truncated/{model.part}"
        state.metrics[key] = state.metrics.get(key, 0) + num_truncated
    return [None if weight is None else weight * value for weight, value in zip(weights, values, strict=True)]


def compute_advantages(run: Run, state: StepState, batch: RaggedBatch) -> RaggedBatch:
    """Compute token rewards, advantages and returns, update the KL controller, and correct for the rollout's policy."""
    algorithm = run.config.algorithm
    n = run.config.rollout.n
    adjusted = run.adjustments.kl_coef(state.step)
    with run.offload_schedule.phase(state.timer, "adv"):
        kl_coef = run.kl_controller.value if adjusted is None else adjusted
        batch, metrics, kl = advantages.advantages_and_returns(batch, algorithm, kl_coef, n, run.estimator)
        if algorithm.kl_ctrl.type == "adaptive":
            advantages.check_kl(kl, batch, state.step)
            if adjusted is None:
                run.kl_controller.update(kl, batch.num_sequences)
        state.metrics.update(metrics)
        batch, metrics = corrected(batch, algorithm.rollout_correction)
        state.metrics.update(metrics)
    return batch


def update_critic(run: Run, state: StepState, batch: RaggedBatch) -> None:
    """Update the critic, if the run has one: PPO epochs over mini-batches."""
    cfg = run.config
    critic = cfg.critic
    if run.critic is None:
        return
    with run.offload_schedule.phase(state.timer, "update_critic"):
        minis = mini_batches(
            cfg.data.train_batch_size,
            cfg.rollout.n,
            critic.ppo_mini_batch_size or cfg.actor.ppo_mini_batch_size,
            critic.ppo_epochs or cfg.actor.ppo_epochs,
            critic.shuffle,
            (cfg.trainer.seed, state.step),
        )
        scale = critic.loss_scale_factor or cfg.data.max_response_length
        objective = lambda mini: critic_objective(mini, critic, scale)  # noqa: E731
        budget = token_budget(run, "critic", state.step)
        metrics = update(run.critic, batch, minis, objective, budget, run.skipped, state.packing)
        state.metrics.update(metrics)


def update_actor(run: Run, state: StepState, batch: RaggedBatch) -> None:
    """Update the actor: PPO epochs over mini-batches. Do nothing during trainer.critic_warmup."""
    cfg = run.config
    actor = cfg.actor
    if state.step <= cfg.trainer.critic_warmup:
        return
    with run.offload_schedule.phase(state.timer, "update_actor"):
        minis = mini_batches(
            cfg.data.train_batch_size,
            cfg.rollout.n,
            actor.ppo_mini_batch_size,
            actor.ppo_epochs,
            actor.shuffle,
            (cfg.trainer.seed, state.step),
        )
        terms = ActorTerms(
            policy_loss=run.policy_loss,
            entropy_coeff=entropy_coeff(actor, state.step, run.schedule.total_steps),
            kl_loss_coef=kl_loss_coef(cfg, run.kl_controller, run.adjustments.kl_coef(state.step)),
            loss_scale_factor=actor.loss_scale_factor or cfg.data.max_response_length,
            draws=step_generator(cfg.trainer.seed, state.step),
        )
        vocab_size = run.actor.shape.vocab_size
        objective = lambda mini: actor_objective(mini, actor, vocab_size, cfg.rollout.temperature, terms)  # noqa: E731
        budget = token_budget(run, "actor", state.step)
        metrics = update(run.actor, batch, minis, objective, budget, run.skipped, state.packing)
        state.metrics.update(metrics)


def token_budget(run: Run, role: str, step: int) -> TokenBudget:
    """Return the token budget of a model's updates in a step."""
    data = run.config.data
    longest = data.max_prompt_length + data.max_response_length
    return TokenBudget(role, step, run.limits[f"update_{role}"], longest, run.adjustments)


def validate(run: Run, state: StepState) -> float:
    """Validate with the current weights. Return the mean accuracy. Raise UserError if trainer.best_metric is none of
    the metrics."""
    cfg = run.config
    sync_weights(run, state.timer)
    with run.offload_schedule.phase(state.timer, "testing"):
        found = evaluate.evaluate(
            run.rollout,
            run.val_prompts,
            run.rewards,
            run.tokenizer,
            cfg.rollout.val_kwargs,
            cfg.data.max_response_length,
            run.stop_token_ids,
            cfg.trainer.seed,
        )
        metrics = found.metrics()
    state.metrics.update(metrics)
    best = cfg.trainer.best_metric
    if best is not None and best not in metrics:  # the same on every rank
        raise UserError(f"trainer.best_metric is {best!r}, no metric of the validation; it has {', '.join(metrics)}")
    directory = Path(cfg.trainer.default_local_dir)
    if run.groups.rank == 0:
        texts = found.texts(run.tokenizer, cfg.trainer.log_val_generations)
        view("generations/", lambda: evaluate.write_generations(directory, state.step, texts))
        responses = found.generations.token_ids()
        keep_samples(run, cfg.trainer.validation_data_dir, state.step, found.prompts, responses, found.scores)
    return found.accuracy


def keep_samples(
    run: Run,
    directory: str | None,
    step: int,
    prompts: list[Prompt],
    responses: list[list[int]],
    scores: list[Score],
) -> None:
    """Write all generations to <directory>/<step>.jsonl, unless there is none. Only rank 0 calls it."""
    if directory is not None:
        view(directory, lambda: write_samples(Path(directory), step, run.tokenizer, prompts, responses, scores))


def save_checkpoint(run: Run, state: StepState, checkpoints: Checkpoints, wait: bool = False) -> None:
    """Save the last complete step. With trainer.async_save and without `wait` the files are written in the
    background."""
    with run.offload_schedule.phase(state.timer, "save_checkpoint"):
        if wait:
            checkpoints.save_now()
        else:
            checkpoints.begin()


def export(run: Run, state: StepState, directory: Path, run_id: str | None = None) -> None:
    """Write the actor as a Hugging Face checkpoint. run_id: the run that the checkpoint names, None for none."""
    with run.offload_schedule.phase(state.timer, "export"):
        export_hf(
            run.actor.params,
            layouts_of(run.actor),
            run.actor.shape,
            directory,
            run.groups.rank,
            dist.group.WORLD,
            run.config.actor.megatron.dtype,
            run.config.model.path,
            about=None if run_id is None else {"run_id": run_id, "step": state.step},
        )
