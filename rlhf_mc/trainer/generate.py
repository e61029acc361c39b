"""The responses of a step or a validation: the weight update before them, seeds of the sampler, generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhf_mc.config.roles import estimator_needs
from rlhf_mc.data.batch import Prompt, RaggedBatch, Responses, build_batch
from rlhf_mc.data.order import indices_of_batch
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.rollout.base import WEIGHTS, Request, RolloutEngine, Sampling
from rlhf_mc.rollout.generation import generate_responses
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import StepState

TRAINING = 0
VALIDATION = 1
"""Streams of sampling seeds: validation never shares random numbers with training."""


def sampling_seeds(
    seed: int, stream: int, step: int, prompts: Sequence[Prompt], n: int, drawn: Counter[int] | None = None
) -> list[int]:
    """Return one seed per response, in the order of `repeat_prompts`. A seed is a function of (seed, stream, step,
    prompt, response 0 to n - 1) alone: neither the number of ranks nor a resume changes it. A prompt that
    the step draws again (data.train_file_weights, algorithm.filter_groups) has responses n to 2n - 1.

    seed, step and the indices of prompts are below 2^32. drawn: how often the step has drawn each prompt before, by its
    index. It is brought up to date; None: never."""
    drawn = Counter() if drawn is None else drawn
    earlier = []
    for prompt in prompts:
        earlier.append(drawn[prompt.index])
        drawn[prompt.index] += 1
    entropy = np.empty((len(prompts), n, 5), dtype=np.uint32)
    entropy[..., :3] = (seed, stream, step)
    entropy[..., 3] = np.array([prompt.index for prompt in prompts])[:, None]
    entropy[..., 4] = np.arange(n) + n * np.array(earlier)[:, None]
    return [int(np.random.SeedSequence(row).generate_state(1, np.uint64)[0] >> 1) for row in entropy.reshape(-1, 5)]


def repeat_prompts(prompts: Sequence[Prompt], n: int) -> list[Prompt]:
    """Return each prompt n times, one after the other."""
    return [prompt for prompt in prompts for _ in range(n)]


def generate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    sampling: Sampling,
    expected_lens: Sequence[float] | None = None,
) -> Responses:
    """Return one response per prompt, on every rank. expected_lens: of the responses; the longest begin first."""
    requests = [Request(i, prompt.token_ids, seed) for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))]
    return generate_responses(engine, requests, sampling, expected_lens)


def update_weights(run: Run, timer: PhaseTimer) -> None:
    """Write the actor's weights into the rollout engine's parameters. Each rank receives only the blocks that it
    lacks."""
    with run.offload_schedule.phase(timer, "update_weights"):
        run.weight_sync.run(run.actor.params, run.rollout.params)
        run.rollout.weights_updated()


def generate_batch(run: Run, state: StepState) -> tuple[list[Prompt], RaggedBatch]:
    """Generate rollout.n responses to each prompt of the next batch with the current weights, and a greedy one if the
    advantage estimator needs it. Return the prompt of each response, and the batch."""
    cfg = run.config
    indices = indices_of_batch(cfg.data, run.train_prompts.file_sizes, state.num_batches, cfg.trainer.seed)
    drawn = run.train_prompts.at(indices)
    # The reward model's pass, between two batches of a step, may let the engine sleep, and its weights are then lost.
    if WEIGHTS not in run.rollout.awake:
        update_weights(run, state.timer)
    state.num_batches += 1
    with run.offload_schedule.phase(state.timer, "gen"):
        seeds = sampling_seeds(cfg.trainer.seed, TRAINING, state.step, drawn, cfg.rollout.n, state.drawn)
        prompts = repeat_prompts(drawn, cfg.rollout.n)
        parameters = Sampling(cfg.rollout.temperature, cfg.data.max_response_length, run.stop_token_ids)
        rows = [prompt.index for prompt in prompts]
        expected_lens = run.response_lengths.expected(rows)
        generations = generate(run.rollout, prompts, seeds, parameters, expected_lens)
        run.response_lengths.record(rows, generations.lens.tolist())
        if estimator_needs(cfg.algorithm).greedy_baseline:
            greedy = generate(run.rollout, drawn, seeds[:: cfg.rollout.n], replace(parameters, temperature=0.0))
            state.greedy = build_batch(drawn, greedy)
    return prompts, build_batch(prompts, generations)
