"""The PPO loop: the phases of a step, in order, the same lines on every rank. What a phase does is in
experience.py, update.py and evaluate.py.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.checkpoint.hf_format import export_hf
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import layouts
from rlhf_mc.data.batch import Prompt, RaggedBatch, build_batch
from rlhf_mc.data.prompts import prompt_indices, steps_per_epoch
from rlhf_mc.models.build import uses_transformer_engine
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.observability.plots import plot_run
from rlhf_mc.observability.sinks import METRICS_FILE, Sinks, view
from rlhf_mc.rewards.manager import PendingScores
from rlhf_mc.rollout.vllm_engine import Sampling
from rlhf_mc.runtime.preemption import StopRequested, StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.topology.consensus import on_rank_0
from rlhf_mc.trainer import evaluate, experience, success, update
from rlhf_mc.trainer.checkpointing import Checkpoints
from rlhf_mc.trainer.micro_batching import micro_batch_limit
from rlhf_mc.trainer.run_directory import EXPORT, HF, PLOT
from rlhf_mc.trainer.setup import Run, layouts_of

SINKS = "trainer.default_local_dir"
"""What is to blame where the run's record cannot be written."""


@dataclass
class StepState:
    """What one step gathers on its way."""

    step: int
    """1 for the first."""
    timer: PhaseTimer
    metrics: dict[str, float]


def fit(run: Run, place: RankStatus | None = None, stop: StopRequests | None = None) -> bool:
    """Trains to the last step, to the target accuracy, or until it is asked to stop. False: it is to go on when it is
    started again. Every rank must call it. `place` is told where the run is."""
    checkpoints = Checkpoints(run)
    try:
        train(run, checkpoints, place or RankStatus(), stop or StopRequests(run.config.trainer))
        return True
    except StopRequested as request:
        save_and_stop(run, checkpoints, str(request))
        return False
    finally:
        checkpoints.release()


def train(run: Run, checkpoints: Checkpoints, place: RankStatus, stop: StopRequests) -> None:
    """The loop. Raises StopRequested where it can give way: while the weights are those of the last complete step."""
    cfg, directory = run.config.trainer, Path(run.config.trainer.default_local_dir)
    with run.offload_schedule.phase(PhaseTimer(place=place), "save_checkpoint"):
        position = checkpoints.resume()
    run_id = checkpoints.run_id
    sinks: list[Sinks] = []  # one, on rank 0
    on_rank_0(lambda: sinks.append(Sinks(cfg, run.total_steps, position.step or None, run_id=run_id)), SINKS)
    for line in headlines(run):
        say(run, line)
    say(run, run.update.summary)
    reached = is_target(run, position.accuracy)
    if position.step == 0 and cfg.val_before_train and run.val_prompts:
        state = begin_step(0, place)
        reached = is_target(run, validate(run, state))
        log(sinks, state)
    for step in range(position.step + 1, run.total_steps + 1):
        if reached:
            break
        state = begin_step(step, place)
        one_step(run, state, stop)
        last, accuracy = step == run.total_steps, None
        if cfg.test_freq > 0 and (step % cfg.test_freq == 0 or last):
            accuracy = validate(run, state)
            reached = is_target(run, accuracy)
        if cfg.export_freq > 0 and step % cfg.export_freq == 0:
            export(run, state, directory / EXPORT / f"global_step_{step}", run_id)
        checkpoints.step_done(step, accuracy)
        if checkpoints.is_due(is_last=last or reached):
            with run.offload_schedule.phase(state.timer, "save_checkpoint"):
                checkpoints.begin()
        log(sinks, state)
        checkpoints.advance()
        stop.steps_done += 1
    checkpoints.advance(wait=True)
    export(run, StepState(position.step, PhaseTimer(), {}), directory / HF, run_id)
    checkpoints.close()
    on_rank_0(lambda: sinks[0].close(), SINKS)
    if sinks and "jsonl" in cfg.logger:
        png = directory / PLOT
        view(png.name, lambda: plot_run(directory / METRICS_FILE, png, title=directory.name))
    on_rank_0(lambda: success.write(directory, run_id, checkpoints.position.step), SINKS)
    why = "the target accuracy is reached" if reached else "all steps are done"
    say(run, f"{why}; the trained actor is in {directory / HF}, metrics, plot and samples beside it")


def begin_step(step: int, place: RankStatus) -> StepState:
    """A step's empty state; step 0 is what comes before the first."""
    place.step = step
    return StepState(step, PhaseTimer(platform.synchronize, place), {})


def one_step(run: Run, state: StepState, stop: StopRequests) -> RaggedBatch:
    """The phases of one step. Returns its batch, with all that they found for each token. It gives way until an update
    begins."""
    stop.check()
    with state.timer.phase("step"):
        prompts, batch = rollout(run, state)
        stop.check()
        scores = reward(run, state, prompts, batch)
        batch = score(run, state, batch)
        run.log_prob_check.judge(batch, state.step)
        batch = rewarded(run, state, batch, scores)
        stop.check()
        batch = advantage(run, state, batch)
        update_models(run, state, batch)
    step_metrics(run, state, batch)
    return batch


def save_and_stop(run: Run, checkpoints: Checkpoints, reason: str) -> None:
    """Saves the last complete step, which the models still stand at."""
    with run.offload_schedule.phase(PhaseTimer(), "save_checkpoint"):
        checkpoints.save_now()
    checkpoints.close()
    step = checkpoints.position.step
    kept = f"the checkpoint of step {step} is complete" if step else "no step was complete yet, so none is saved"
    say(run, f"asked to stop ({reason}): {kept}; started again, the run goes on from there")


def say(run: Run, line: str) -> None:
    """One line for the person who watches, from one rank."""
    if run.groups.rank == 0 and "console" in run.config.trainer.logger:
        with contextlib.suppress(OSError, ValueError):  # standard output may be full or closed
            print(f"rlhf_mc: {line}", flush=True)


def headlines(run: Run) -> list[str]:
    """What is about to run, and the layout of each model: one line for all that have the same."""
    world, tp = run.groups.mesh.world, run.config.rollout.tensor_model_parallel_size
    layers = "Transformer Engine" if uses_transformer_engine() else "Megatron-Core's local"
    models: dict[str, list[str]] = {}
    for engine in (run.actor, run.critic, run.reference, run.reward_model):
        if engine is not None:
            megatron = layouts(run.config)[engine.name]
            sequence = ", sequence parallel" if megatron.sequence_parallel else ""
            how = f"{engine.groups.mesh}{sequence}; {layers} layers, {megatron.dtype}"
            models.setdefault(how, []).append(engine.name)
    return [
        f"{world} ranks on {platform.device().type}, {world // tp} vLLM engines of TP {tp}; "
        f"{len(run.train_prompts)} prompts, {run.total_steps} steps at most",
        *(f"{', '.join(names)}: {how}" for how, names in models.items()),
    ]


def sync_weights(run: Run, timer: PhaseTimer) -> None:
    """The actor's weights into vLLM's own parameters, each rank receiving only the blocks it lacks."""
    with run.offload_schedule.phase(timer, "update_weights"):
        run.update.run(run.actor.params, run.rollout.params)
        run.rollout.weights_updated()


def rollout(run: Run, state: StepState) -> tuple[list[Prompt], RaggedBatch]:
    """Generates n responses for each of this step's prompts with the current weights."""
    cfg = run.config
    indices = prompt_indices(
        len(run.train_prompts), cfg.data.train_batch_size, state.step - 1, cfg.trainer.seed, cfg.data.shuffle
    )
    drawn = [run.train_prompts[i] for i in indices]
    sync_weights(run, state.timer)
    with run.offload_schedule.phase(state.timer, "gen"):
        seeds = experience.sampling_seeds(cfg.trainer.seed, experience.TRAINING, state.step, drawn, cfg.rollout.n)
        prompts = experience.repeat_prompts(drawn, cfg.rollout.n)
        sampling = Sampling(cfg.rollout.temperature, cfg.data.max_response_length, run.stop_token_ids)
        generations = experience.generate(run.rollout, prompts, seeds, sampling)
    return prompts, build_batch(prompts, generations)


def reward(run: Run, state: StepState, prompts: list[Prompt], batch: RaggedBatch) -> PendingScores | None:
    """Has the responses scored by rule or by the user's function, by worker processes while the next phase runs.
    With a reward model it is that model's turn after that phase."""
    if run.reward_model is not None:
        return None
    with run.offload_schedule.phase(state.timer, "reward"):
        return experience.submit_responses(run.rewards, run.tokenizer, prompts, batch.responses())


def rewarded(run: Run, state: StepState, batch: RaggedBatch, pending: PendingScores | None) -> RaggedBatch:
    """Waits for the scores, or takes those of the reward model."""
    if pending is None:
        cfg = run.config.reward_model
        limit = micro_batch_limit(
            run.config.actor, cfg.forward_max_token_len_per_gpu, cfg.forward_micro_batch_size_per_gpu
        )
        assert run.reward_model is not None
        with run.offload_schedule.phase(state.timer, "reward_model"):
            scores = experience.score_sequences(run.reward_model, batch, limit)
        if not scores.isfinite().all():  # the same on every rank
            raise UserError(f"reward_model.model_path: {cfg.model_path}: a score is not finite in step {state.step}")
        return batch.with_fields(scores=scores)
    state.metrics["timing_s/reward_hidden"] = pending.seconds_until(time.perf_counter())
    with run.offload_schedule.phase(state.timer, "reward"):
        rows = experience.collect_scores(pending, batch.num_sequences)
    return batch.with_fields(scores=torch.tensor([row["score"] for row in rows], dtype=torch.float32))


def score(run: Run, state: StepState, batch: RaggedBatch) -> RaggedBatch:
    """Old log-probs (actor), reference log-probs, values (critic)."""
    cfg = run.config
    log_probs = experience.log_prob_head(run.actor.shape.vocab_size, cfg.rollout.temperature)
    with run.offload_schedule.phase(state.timer, "old_log_prob"):
        limit = micro_batch_limit(
            cfg.actor, cfg.rollout.log_prob_max_token_len_per_gpu, cfg.rollout.log_prob_micro_batch_size_per_gpu
        )
        batch = batch.with_fields(old_log_probs=experience.score_tokens(run.actor, batch, log_probs, limit))
    if run.reference is not None:
        with run.offload_schedule.phase(state.timer, "ref"):
            limit = micro_batch_limit(
                cfg.actor, cfg.ref.log_prob_max_token_len_per_gpu, cfg.ref.log_prob_micro_batch_size_per_gpu
            )
            batch = batch.with_fields(ref_log_probs=experience.score_tokens(run.reference, batch, log_probs, limit))
    with run.offload_schedule.phase(state.timer, "values"):
        limit = micro_batch_limit(
            cfg.actor, cfg.critic.forward_max_token_len_per_gpu, cfg.critic.forward_micro_batch_size_per_gpu
        )
        batch = batch.with_fields(values=experience.score_tokens(run.critic, batch, experience.value_head, limit))
    return batch


def advantage(run: Run, state: StepState, batch: RaggedBatch) -> RaggedBatch:
    """Token rewards, advantages and returns; then the KL controller moves on."""
    with run.offload_schedule.phase(state.timer, "adv"):
        coef = run.kl_controller.value
        batch, metrics, kl = experience.compute_advantages(batch, run.config.algorithm, coef)
        if run.config.algorithm.use_kl_in_reward:
            if run.config.algorithm.kl_ctrl.type == "adaptive":
                experience.check_kl(kl, batch, state.step)
            run.kl_controller.update(kl, batch.num_sequences)
        state.metrics.update(metrics)
    return batch


def update_models(run: Run, state: StepState, batch: RaggedBatch) -> None:
    """PPO epochs over mini-batches: the critic, then, once the critic is warm, the actor."""
    cfg = run.config
    seed = (cfg.trainer.seed, state.step)
    num_prompts, n = cfg.data.train_batch_size, cfg.rollout.n
    with run.offload_schedule.phase(state.timer, "update_critic"):
        size, epochs = cfg.critic.ppo_mini_batch_size, cfg.critic.ppo_epochs
        minis = update.mini_batches(
            num_prompts,
            n,
            cfg.actor.ppo_mini_batch_size if size is None else size,
            cfg.actor.ppo_epochs if epochs is None else epochs,
            cfg.critic.shuffle,
            seed,
        )
        limit = micro_batch_limit(
            cfg.actor, cfg.critic.ppo_max_token_len_per_gpu, cfg.critic.ppo_micro_batch_size_per_gpu
        )
        objective = lambda mini: update.critic_objective(mini, cfg.critic)  # noqa: E731
        state.metrics.update(update.update(run.critic, batch, minis, objective, limit, run.skipped, state.step))
    if state.step <= cfg.trainer.critic_warmup:
        return
    with run.offload_schedule.phase(state.timer, "update_actor"):
        minis = update.mini_batches(
            num_prompts, n, cfg.actor.ppo_mini_batch_size, cfg.actor.ppo_epochs, cfg.actor.shuffle, seed
        )
        vocab, temperature = run.actor.shape.vocab_size, cfg.rollout.temperature
        objective = lambda mini: update.actor_objective(mini, cfg.actor, vocab, temperature)  # noqa: E731
        limit = micro_batch_limit(
            cfg.actor, cfg.actor.ppo_max_token_len_per_gpu, cfg.actor.ppo_micro_batch_size_per_gpu
        )
        state.metrics.update(update.update(run.actor, batch, minis, objective, limit, run.skipped, state.step))


def step_metrics(run: Run, state: StepState, batch: RaggedBatch) -> None:
    """What is known of the step as a whole."""
    data = run.config.data
    state.metrics.update(experience.rollout_metrics(batch, data.max_prompt_length, data.max_response_length))
    lens, cost = batch.seq_lens.tolist(), run.actor.shape.sequence_cost
    state.metrics.update(experience.balance_metrics(lens, run.groups.mesh.dp, cost))
    if run.config.actor.use_kl_loss:
        state.metrics["actor/kl_coef"] = run.config.actor.kl_loss_coef
    seconds = state.timer.result()["timing_s/step"]
    tokens = int(batch.seq_lens.sum())
    state.metrics.update(
        {
            "training/global_step": state.step,
            "training/epoch": (state.step - 1) // steps_per_epoch(len(run.train_prompts), data.train_batch_size),
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds / run.groups.mesh.world,
            "perf/peak_memory_gb": platform.peak_memory_gb(),
            **run.update.metrics,
            **run.offload_schedule.metrics(),
        }
    )


def validate(run: Run, state: StepState) -> float:
    """Validates with the current weights. Returns the mean accuracy."""
    cfg = run.config
    sync_weights(run, state.timer)
    with run.offload_schedule.phase(state.timer, "testing"):
        metrics, accuracy, texts = evaluate.evaluate(
            run.rollout,
            run.val_prompts,
            run.rewards,
            run.tokenizer,
            cfg.rollout.val_kwargs,
            cfg.data.max_response_length,
            run.stop_token_ids,
            cfg.trainer.seed,
        )
    state.metrics.update(metrics)
    directory, limit = Path(cfg.trainer.default_local_dir), cfg.trainer.log_val_generations
    if run.groups.rank == 0:
        view("generations/", lambda: evaluate.write_generations(directory, state.step, texts, limit))
    return accuracy


def is_target(run: Run, accuracy: float | None) -> bool:
    """Whether a validation reached the accuracy at which the run ends; None: there was none."""
    target = run.config.trainer.target_val_acc
    return accuracy is not None and target is not None and accuracy >= target


def export(run: Run, state: StepState, directory: Path, run_id: str | None = None) -> None:
    """Write the actor as a Hugging Face checkpoint, which names the run."""
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


def log(sinks: list[Sinks], state: StepState) -> None:
    """Sends the step's metrics and times off, where there are sinks. Every rank must call it."""
    on_rank_0(lambda: sinks[0].log(state.step, {**state.metrics, **state.timer.result()}), SINKS)
