"""The scores of a step's responses: their parts by the reward workers (rewards/manager.py) and by
models, what follows from them, and the files of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlhf_mc.algorithms.estimators import decoupled_scores
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import estimator_needs
from rlhf_mc.config.schema import Config
from rlhf_mc.data.batch import Prompt, RaggedBatch
from rlhf_mc.rewards.manager import ScoreStream
from rlhf_mc.rewards.mixture import Mixture
from rlhf_mc.rewards.results import Score, penalize_overlong, reward_metrics
from rlhf_mc.run_files import TRAIN_GENERATIONS
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.topology.consensus import gather_results
from rlhf_mc.trainer import reward_models
from rlhf_mc.trainer.log_probs import from_rollout_pool
from rlhf_mc.trainer.reward_models import RewardModel
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.samples import keep_samples, some_of_each_prompt
from rlhf_mc.trainer.step_state import StepState

_TRAIN_LOG_STEPS = 10
"""train_generations/ has responses of each step that is a multiple of this, and of the first."""


def rewards(
    run: Run,
    state: StepState,
    prompts: list[Prompt],
    batch: RaggedBatch,
    pending: ScoreStream | None,
    stop: StopRequests,
) -> RaggedBatch:
    """Return the batch with its scores, and record them. pending: of `rollout`; None: the batch has
    its scores. Raise StopRequested if a stop is requested, unless engines have ranks of their own,
    which do not call it: no update has begun."""
    end_check = None if run.has_rollout_pool else stop.start_check()
    if pending is not None:
        batch, scores = await_rewards(run, state, prompts, batch, pending)
        state.metrics |= reward_metrics([prompt.data_source for prompt in prompts], scores)
        record_samples(run, state, prompts, batch, scores)
    if end_check is not None:
        end_check()
    return batch


def await_rewards(
    run: Run, state: StepState, prompts: list[Prompt], batch: RaggedBatch, pending: ScoreStream
) -> tuple[RaggedBatch, list[Score]]:
    """Return the batch with the score of each response, and of the greedy response to its prompt if
    there is one: the weighted sum of its parts, by the reward workers and the reward models, less
    the penalty on long responses. Return the scores of the batch's responses with their parts
    too."""
    n = run.config.rollout.n
    greedy_prompts = [] if state.greedy is None else prompts[::n]
    by_role = scores_by_role(run, state, prompts, batch)
    hidden = state.metrics.get("timing_s/reward_hidden", 0.0)
    state.metrics["timing_s/reward_hidden"] = hidden + pending.hidden_seconds()
    with run.offload_schedule.phase(state.timer, "reward"):
        scores = pending.collect()
    for model in run.reward_models:
        values = by_role[model.role]
        scores = _with_part(run, state, model, [*prompts, *greedy_prompts], values, scores)
    buffer = run.config.reward.overlong_buffer
    if buffer.len > 0:
        lens = batch.conversation_lens.tolist()
        lens += [] if state.greedy is None else state.greedy.conversation_lens.tolist()
        scores = penalize_overlong(scores, lens, run.config.data.max_response_length, buffer)
    numbers = torch.tensor([score.score for score in scores], dtype=torch.float32)
    if greedy_prompts:
        batch = batch.with_fields(greedy_scores=numbers[len(prompts) :].repeat_interleave(n))
    is_masked = torch.tensor([score.is_masked for score in scores])
    scores = scores[: len(prompts)]
    mask = sample_mask(run.config, batch, is_masked)
    batch = batch.with_fields(sample_mask=mask)
    if run.environments is not None:
        batch = batch.with_fields(
            turn_rewards=turn_rewards(scores, batch.response_lens),
            turns=turn_numbers(scores, batch.response_lens),
        )
    algorithm = run.config.algorithm
    if estimator_needs(algorithm).parts:
        by_std = algorithm.norm_adv_by_std_in_grpo
        normalised = normalised_parts(run.rewards.mixture, prompts, scores, n, by_std, mask)
        batch = batch.with_fields(decoupled_scores=normalised)
    accuracies = torch.tensor([score.accuracy for score in scores], dtype=torch.float32)
    return batch.with_fields(scores=numbers[: len(prompts)], accuracies=accuracies), scores


def sample_mask(cfg: Config, batch: RaggedBatch, is_masked: torch.Tensor) -> torch.Tensor:
    """Return the responses that are trained on: [S] bool. is_masked: [S] bool, or [S + prompts]
    with the greedy responses last; a response whose baseline is masked is masked too.

    With algorithm.overlong_filtering truncated responses are not trained on. Nor is one that is
    left alone in its group, where the estimator compares the responses of a group."""
    n = cfg.rollout.n
    mask = ~is_masked[: batch.num_sequences].view(-1, n)
    if len(is_masked) > batch.num_sequences:
        mask &= ~is_masked[batch.num_sequences :, None]
    if cfg.algorithm.overlong_filtering:
        mask &= batch.finished.view(-1, n)
    if estimator_needs(cfg.algorithm).group:
        mask &= mask.sum(dim=1, keepdim=True) >= 2
    return mask.flatten()


def normalised_parts(
    mixture: Mixture,
    prompts: Sequence[Prompt],
    scores: Sequence[Score],
    n: int,
    norm_by_std: bool,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Return decoupled_scores of the parts of each score before their weights: [S] float32, 0 of
    responses that are not trained on. prompts: of each response. n: responses of a group. mask: [S]
    bool, of sample_mask. A part that a score lacks is 0; one that the mixture does not list, such
    as a penalty, has weight 1."""
    names = sorted({part for score in scores for part in score.parts})
    weighted = [[score.parts.get(part, 0.0) for score in scores] for part in names]
    weights = torch.tensor(
        [
            [mixture.training(prompt.data_source).get(part, 1.0) for prompt in prompts]
            for part in names
        ],
        dtype=torch.float64,
    ).view(len(names), len(scores))
    values = torch.tensor(weighted, dtype=torch.float64).view(len(names), len(scores))
    parts = torch.where(weights != 0.0, values / weights, 0.0).float()
    sizes = mask.view(-1, n).sum(dim=1).repeat_interleave(n)
    result = torch.zeros(len(scores))
    for size in sizes[mask].unique().tolist():
        rows = mask & (sizes == size)
        result[rows] = decoupled_scores(parts[:, rows], weights[:, rows], size, norm_by_std)
    return result


def turn_rewards(scores: Sequence[Score], response_lens: torch.Tensor) -> torch.Tensor:
    """Return the environment's reward of each turn before the last, on the turn's last token: [R]
    float32. scores: of each response."""
    rewards = torch.zeros(int(response_lens.sum()))
    for score, start in zip(
        scores, (response_lens.cumsum(0) - response_lens).tolist(), strict=True
    ):
        for position, reward in () if score.episode is None else score.episode.rewards[:-1]:
            if position >= 0:
                rewards[start + position] += reward
    return rewards


def turn_numbers(scores: Sequence[Score], response_lens: torch.Tensor) -> torch.Tensor:
    """Return the index of each token's turn in its response: [R] int64. scores: of each
    response."""
    numbers = [
        torch.bucketize(
            torch.arange(length),
            torch.tensor([place for place, _ in score.episode.rewards if place >= 0])
            if score.episode is not None
            else torch.zeros(0, dtype=torch.int64),
        )
        for score, length in zip(scores, response_lens.tolist(), strict=True)
    ]
    return torch.cat(numbers)


def record_samples(
    run: Run, state: StepState, prompts: list[Prompt], batch: RaggedBatch, scores: list[Score]
) -> None:
    """Write the responses that are trained on to trainer.rollout_data_dir."""
    state.scores = scores
    if run.groups.rank == 0:
        directory = run.config.trainer.rollout_data_dir
        responses = batch.responses()
        keep_samples(run.tokenizer, directory, state.step, prompts, responses, scores, batch)


def record_tokens(run: Run, state: StepState, batch: RaggedBatch) -> None:
    """Write some responses, token by token, to train_generations/ in the first step and every tenth
    one. Any rank may call it; rank 0 writes."""
    cfg = run.config.trainer
    rows = some_of_each_prompt(batch.num_sequences, run.config.rollout.n, cfg.log_train_generations)
    if run.groups.rank != 0 or not rows or (state.step > 1 and state.step % _TRAIN_LOG_STEPS):
        return
    directory = str(Path(cfg.default_local_dir) / TRAIN_GENERATIONS)
    some = batch.select(rows)
    prompts = [state.prompts[i] for i in rows]
    scores = [state.scores[i] for i in rows]
    keep_samples(run.tokenizer, directory, state.step, prompts, some.responses(), scores, some)


class FailedInPool(Exception):
    """A reward model of the rollout pool has no scores: its ranks raise a UserError."""


def scores_by_role(
    run: Run, state: StepState, prompts: list[Prompt], batch: RaggedBatch
) -> dict[str, torch.Tensor]:
    """Return score_by_reward_model of each reward model; on ranks of a rollout pool, which send
    theirs, of their models alone, unless they choose groups too. Raise FailedInPool on a rank that
    does not get the scores of a model. Every rank must call it."""
    every_prompt = [*prompts, *([] if state.greedy is None else prompts[:: run.config.rollout.n])]

    def own_scores() -> dict[str, torch.Tensor]:
        return {
            model.role: score_by_reward_model(run, state, model, every_prompt, batch)
            for model in run.reward_models
            if model.engine.groups.is_member
        }

    if run.has_rollout_pool and run.config.algorithm.filter_groups.enable:
        by_rank = gather_results(own_scores)
        return {m.role: by_rank[m.engine.groups.mesh.first][m.role] for m in run.reward_models}
    by_role: dict[str, torch.Tensor] = {}
    try:
        by_role = own_scores()
    finally:  # after an error too, as others wait for the scores
        for model in run.reward_models:
            if model.engine.groups.mesh.first:
                none = torch.full((len(every_prompt) + 1,), torch.nan)
                values = by_role.get(model.role, none)
                by_role[model.role] = from_rollout_pool(run, state, model.engine, values)
    if any(values.isnan().any() for values in by_role.values()):
        raise FailedInPool
    return by_role


def score_by_reward_model(
    run: Run, state: StepState, model: RewardModel, prompts: list[Prompt], batch: RaggedBatch
) -> torch.Tensor:
    """Return a reward model's score of each response, 0 where the mixture of the data source has no
    such part, and the number of conversations that lost their first tokens: [S + 1] float32.
    prompts: of each response, the greedy ones last. Raise UserError if a score is not finite."""
    mixture = run.rewards.mixture
    is_scored = [model.part in mixture.training(prompt.data_source) for prompt in prompts]
    num_sampled = batch.num_sequences
    passes = [(batch, slice(num_sampled))]
    if state.greedy is not None:
        passes.append((state.greedy, slice(num_sampled, None)))
    values: list[torch.Tensor] = []
    num_truncated = 0
    with run.offload_schedule.phase(state.timer, model.role):
        for responses, part in passes:
            indices = [i for i, scored in enumerate(is_scored[part]) if scored]
            of_part = prompts[part]
            scores, num = reward_models.score(model, run.tokenizer, of_part, responses, indices)
            values.append(scores)
            num_truncated += num
    result = torch.cat([*values, torch.tensor([float(num_truncated)])])
    if not result.isfinite().all():  # the same on every rank
        raise UserError(
            f"{model.role}.model_path: {model.path}: a score is not finite in step {state.step}"
        )
    return result


def _with_part(
    run: Run,
    state: StepState,
    model: RewardModel,
    prompts: list[Prompt],
    values: torch.Tensor,
    scores: list[Score],
) -> list[Score]:
    """Return the scores with a reward model's part, and count its truncated conversations. prompts:
    of each score. values: of score_by_reward_model."""
    *numbers, num_truncated = values.tolist()
    if model.conversations is not None:
        key = f"reward/num_truncated/{model.part}"
        state.metrics[key] = state.metrics.get(key, 0) + int(num_truncated)
    weights = [
        run.rewards.mixture.training(prompt.data_source).get(model.part) for prompt in prompts
    ]
    return [
        score if weight is None else score.plus(model.part, weight * number)
        for score, weight, number in zip(scores, weights, numbers, strict=True)
    ]
