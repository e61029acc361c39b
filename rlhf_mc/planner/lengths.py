"""Lengths that a step is planned with: all prompts have one length, and all responses have one."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import estimator_needs
from rlhf_mc.config.schema import Config, MegatronConfig
from rlhf_mc.data.balance import is_worth_sharing


@dataclass(frozen=True)
class Lengths:
    """Tokens of each prompt and of each response."""

    prompt: float
    response: float

    @property
    def total(self) -> float:
        """Tokens of each sequence."""
        return self.prompt + self.response


def expected_lengths(cfg: Config, prompt: float | None, response: float | None) -> Lengths:
    """Return the lengths to plan with: the given ones, and otherwise the configured maxima. Raise
    UserError if a given one is above the maximum."""
    for name, given in (("prompt", prompt), ("response", response)):
        most = getattr(cfg.data, f"max_{name}_length")
        if given is not None and given > most:
            raise UserError(
                f"--mean-{name}-length is {given}; it must be at most data.max_{name}_length, "
                f"{most}"
            )
    return Lengths(prompt or cfg.data.max_prompt_length, response or cfg.data.max_response_length)


def responses_per_prompt(cfg: Config) -> int:
    """Return the responses to a prompt, the greedy one of remax included."""
    return cfg.rollout.n + estimator_needs(cfg.algorithm).greedy_baseline


def computed_tokens(
    lengths: Lengths, megatron: MegatronConfig, responses: int, budget: float
) -> float:
    """Return the tokens of a sequence that a pass computes outside attention: fewer than all where
    prompts are shared by the responses that a micro-batch of `budget` tokens holds. responses: to a
    prompt."""
    if not megatron.share_prompts or megatron.context_parallel_size > 1:
        return lengths.total
    fitting = max(1, min(responses, int((budget - lengths.prompt) // lengths.response)))
    computed = lengths.response + lengths.prompt / fitting
    return computed if is_worth_sharing(lengths.total, computed) else lengths.total
