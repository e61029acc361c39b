"""The responses of a step or a validation: seeds of the sampler, prompts repeated for several responses, generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rlhf_mc.data.batch import Prompt, Responses
from rlhf_mc.rollout.base import RolloutEngine, Sampling
from rlhf_mc.trainer.seed_sequences import first_states

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
    states = first_states(entropy.reshape(-1, 5))
    seeds: list[int] = (states >> np.uint64(1)).tolist()
    return seeds


def repeat_prompts(prompts: Sequence[Prompt], n: int) -> list[Prompt]:
    """Return each prompt n times, one after the other."""
    return [prompt for prompt in prompts for _ in range(n)]


def generate(engine: RolloutEngine, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling) -> Responses:
    """Return one response per prompt, on every rank."""
    return engine.generate([p.token_ids for p in prompts], seeds, sampling)
