"""Lengths that a step is planned with, and the batches and micro-batches that follow from them. All prompts have one
length, and all responses have one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import estimator_needs
from rlhf_mc.config.schema import Config
from rlhf_mc.data.balance import Limit, Sequences
from rlhf_mc.topology.mesh import Mesh


@dataclass(frozen=True)
class Lengths:
    """Tokens of each prompt and of each response."""

    prompt: float
    response: float

    @property
    def total(self) -> float:
        """Tokens of each sequence."""
        return self.prompt + self.response


@dataclass(frozen=True)
class Share:
    """One replica's share of a pass over a batch."""

    sequences: int
    micro_batches: int
    dummies: int
    """Dummy micro-batches, of one sequence each: virtual pipeline chunks need a multiple of the stages."""


def replica_share(mesh: Mesh, num_sequences: int, limit: Limit, lengths: Lengths) -> Share:
    """Return a replica's share of a batch. limit: of a micro-batch."""
    mine = math.ceil(num_sequences / mesh.dp)
    at_most = limit.at_most if isinstance(limit, Sequences) else max(1, int(limit // lengths.total))
    count = math.ceil(mine / at_most)
    return Share(mine, count, -count % mesh.pp if mesh.vpp > 1 else 0)


def expected_lengths(cfg: Config, prompt: float | None, response: float | None) -> Lengths:
    """Return the lengths to plan with: the given ones, and otherwise the configured maxima. Raise UserError if a given
    one is above the maximum."""
    for name, given in (("prompt", prompt), ("response", response)):
        most = getattr(cfg.data, f"max_{name}_length")
        if given is not None and given > most:
            raise UserError(f"--mean-{name}-length is {given}; it must be at most data.max_{name}_length, {most}")
    return Lengths(prompt or cfg.data.max_prompt_length, response or cfg.data.max_response_length)


def drawn_prompts(cfg: Config) -> int:
    """Return the prompts of one call of the engines; with filter_groups a step has one such call at least."""
    return (cfg.algorithm.filter_groups.enable and cfg.data.gen_batch_size) or cfg.data.train_batch_size


def responses_per_prompt(cfg: Config) -> int:
    """Return the responses to a prompt, the greedy one of remax included."""
    return cfg.rollout.n + estimator_needs(cfg.algorithm).greedy_baseline
