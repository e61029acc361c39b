"""The settings of the health rules: some bounds, patience, and the response to each rule.
health/rules.yaml has the other bounds, the meaning of each rule, and the setting to turn. No torch
here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlhf_mc.config.numbers import Count, Fraction, InnerFraction, Positive, PositiveOrZero, Range

PolicyRule = Literal["not_finite", "kl_explosion", "policy_collapsed"]
"""Rules that show weights with which training should not continue."""
StopRule = Literal[
    PolicyRule,
    "ppo_kl_high",
    "grad_norm_growing",
    "entropy_falling",
    "entropy_low",
    "vf_clipfrac_high",
    "explained_variance_low",
    "truncated",
    "reward_constant",
    "reward_flat",
    "reward_saturated",
    "equal_groups",
    "rollout_mismatch",
]
"""Rules after which a run may have a reason to end."""
Rule = Literal[
    StopRule,
    "throughput_falling",
    "replicas_unbalanced",
    "memory_near_limit",
    "groups_dropped",
    "calls_failing",
    "turns_falling",
]
RESPONSES = ("disable", "note", "warn", "stop", "roll_back")
"""Lists of rules in HealthConfig."""


@dataclass
class HealthConfig:
    """Rules that watch the metrics of each step. docs/health.md lists symptom, meaning and the
    setting to turn."""

    enable: bool = True
    """Check the rules. Rank 0 does, on the metrics that it logs."""
    disable: list[Rule] = field(default_factory=list)
    """Rules that are not checked. A rule that none of the lists has gets its own response
    (docs/health.md)."""
    note: list[Rule] = field(default_factory=list)
    """Rules that are an event in health.jsonl alone."""
    warn: list[Rule] = field(default_factory=list)
    """Rules that are a line on the console too."""
    stop: list[StopRule] = field(default_factory=list)
    """Rules after which the run saves a checkpoint, exports nothing and ends with an error."""
    roll_back: list[PolicyRule] = field(default_factory=list)
    """Rules after which the run continues from the checkpoint of the last healthy step, with its
    learning rates times rollback_lr_factor. The weights before the first step are saved for that
    too."""
    kl_coef: PositiveOrZero | None = None
    """Response to kl_explosion: from then on the coefficient of the KL term, in the reward or in
    the loss, is this, in place of the configured or adaptive one. null: kl_explosion has another
    response."""
    rollback_lr_factor: InnerFraction = 0.5
    """roll_back: the factor of the learning rates of actor and critic, each time."""
    max_rollbacks: Count = 3
    """roll_back: the run ends with an error when a rule asks for one more."""
    out_of_memory: Literal["stop", "halve_tokens"] = "stop"
    """Response to a rank that runs out of memory in an update. stop: the run ends with an error.
    halve_tokens: every rank repeats the update with half the token budget of a micro-batch, and
    keeps it; a micro-batch's size changes no number but for rounding. It needs data parallelism
    alone and megatron.overlap_grad_reduce: false for actor and critic: ranks must not wait for one
    that has failed. It needs no enable."""
    patience: Count = 5
    """Consecutive steps in which most rules must hold before they count. not_finite, kl_explosion,
    rollout_mismatch and memory_near_limit count at once."""
    window: Annotated[int, Range(2, 1_000_000)] = 20
    """Steps of a moving median. entropy_low and explained_variance_low must hold for as many
    consecutive steps."""
    ppo_kl_max: Positive = 0.03
    """actor/ppo_kl from which the policy moves too far within a step."""
    ppo_kl_explosion: Positive = 0.5
    """actor/ppo_kl of a policy that an update has thrown off, nats per token."""
    ref_kl_max: Positive = 5.0
    """KL to the reference of a policy that has left it, nats per token."""
    entropy_min: PositiveOrZero = 0.01
    """Entropy below which little is explored, nats per token."""
    truncated_max: Fraction = 0.1
    """Share of responses that may reach data.max_response_length."""


def listed_responses(health: HealthConfig, rule: str) -> list[str]:
    """Return the responses that the settings give to a rule: one at most, as config/checks.py
    ensures."""
    listed = [response for response in RESPONSES if rule in getattr(health, response)]
    return listed + ["fixed_kl_coef"] * (rule == "kl_explosion" and health.kl_coef is not None)


def rolls_back(health: HealthConfig) -> bool:
    """Return True if the response to a rule is roll_back."""
    return health.enable and bool(health.roll_back)
