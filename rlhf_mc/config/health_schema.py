"""The settings of the health rules: some bounds, patience, and the response to each rule. health/conditions.py has the
other bounds; what each rule means, and which setting to turn, is in health/rules.py. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlhf_mc.config.numbers import Count, Fraction, InnerFraction, Positive, PositiveOrZero, Range

Response = Literal["off", "note", "warn", "stop"]
MildResponse = Literal["off", "note", "warn"]
"""For rules after which a run has no reason to end."""
PolicyResponse = Literal["off", "note", "warn", "stop", "roll_back"]
"""For rules that show weights with which training should not continue."""
KLResponse = Literal["off", "note", "warn", "stop", "roll_back", "fixed_kl_coef"]


@dataclass
class HealthResponsesConfig:
    """The response to each rule. off: the rule is not checked. note: an event in health.jsonl. warn: a line on the
    console too. stop: the run also saves a checkpoint, exports nothing and ends with an error. roll_back: the run
    continues from the checkpoint of the last healthy step, with its learning rates times rollback_lr_factor; the
    weights before the first step are saved for that too. fixed_kl_coef: the coefficient of the KL term is kl_coef from
    then on."""

    not_finite: PolicyResponse = "warn"
    """A metric is not finite, or an update was skipped because its loss or gradient was not."""
    kl_explosion: KLResponse = "warn"
    """actor/ppo_kl above ppo_kl_explosion, or the KL to the reference above ref_kl_max."""
    policy_collapsed: PolicyResponse = "stop"
    """actor/entropy below a tenth of entropy_min, scores no better than in the first step, and a KL to the reference
    above 1 nat per token or, where it is not measured, half of the first step's scores lost: the policy gives one
    answer, a bad one."""
    ppo_kl_high: Response = "warn"
    """actor/ppo_kl above ppo_kl_max."""
    ppo_kl_low: MildResponse = "note"
    """actor/ppo_kl below a third of ppo_kl_max, with several updates per step (in the first one the KL is 0)."""
    grad_norm_high: Response = "note"
    """actor/grad_norm or critic/grad_norm above grad_norm_max."""
    grad_norm_growing: Response = "warn"
    """actor/grad_norm or critic/grad_norm above 10 times its median over the window before."""
    grad_norm_low: MildResponse = "note"
    """actor/grad_norm or critic/grad_norm below a quarter of grad_norm_max."""
    entropy_falling: Response = "warn"
    """actor/entropy below half of its median over the window before."""
    entropy_low: Response = "warn"
    """actor/entropy below entropy_min."""
    vf_clipfrac_high: Response = "warn"
    """critic/vf_clipfrac above 0.05."""
    explained_variance_low: Response = "warn"
    """critic/vf_explained_var below 0."""
    truncated: Response = "warn"
    """response_length/clip_ratio above truncated_max."""
    reward_constant: Response = "warn"
    """Every response of a step has the same score, which is not the best one."""
    reward_flat: Response = "warn"
    """critic/score/mean has no trend over the last 5 windows."""
    reward_saturated: Response = "warn"
    """critic/score/mean is 0.99 of the way from the lowest to the highest score that the run has seen, or higher."""
    equal_groups: Response = "warn"
    """Share of prompts whose responses all score the same above 0.9, with an estimator that compares them."""
    rollout_mismatch: Response = "warn"
    """The log-probs of rollout engine and trainer differ by more than trainer.max_rollout_logprob_diff."""
    throughput_falling: MildResponse = "warn"
    """perf/throughput below half of its median over the window before."""
    replicas_unbalanced: MildResponse = "warn"
    """global_seqlen/idle_share above 0.1."""
    memory_near_limit: MildResponse = "warn"
    """perf/memory_used_ratio above 0.95: of the device, or on a CPU of the machine."""


@dataclass
class HealthConfig:
    """Rules that watch the metrics of each step. docs/health.md lists symptom, meaning and the setting to turn."""

    enable: bool = True
    """Check the rules. Rank 0 does, on the metrics that it logs."""
    responses: HealthResponsesConfig = field(default_factory=HealthResponsesConfig)
    """The response to each rule."""
    rollback_lr_factor: InnerFraction = 0.5
    """roll_back: the factor of the learning rates of actor and critic, each time."""
    max_rollbacks: Count = 3
    """roll_back: the run ends with an error when a rule asks for one more."""
    kl_coef: PositiveOrZero | None = None
    """fixed_kl_coef: the coefficient of the KL term, in the reward or in the loss, in place of the configured or
    adaptive one."""
    out_of_memory: Literal["stop", "halve_tokens"] = "stop"
    """Response to a rank that runs out of memory in an update. stop: the run ends with an error. halve_tokens: every
    rank repeats the update with half the token budget of a micro-batch, and keeps it; a micro-batch's size changes no
    number but for rounding. It needs data parallelism alone and megatron.overlap_grad_reduce: false for actor and
    critic: ranks must not wait for one that has failed. It needs no enable."""
    patience: Count = 5
    """Consecutive steps in which most rules must hold before they count. not_finite, kl_explosion, rollout_mismatch and
    memory_near_limit count at once."""
    window: Annotated[int, Range(2, 1_000_000)] = 20
    """Steps of a moving median. ppo_kl_low, grad_norm_low, entropy_low and explained_variance_low must hold for as many
    consecutive steps."""
    ppo_kl_max: Positive = 0.03
    """Upper end of the target range of actor/ppo_kl."""
    ppo_kl_explosion: Positive = 0.5
    """actor/ppo_kl of a policy that an update has thrown off, nats per token."""
    ref_kl_max: Positive = 5.0
    """KL to the reference of a policy that has left it, nats per token."""
    grad_norm_max: Annotated[float, Range(0, 1e30, open=True)] = 2.0
    """Upper end of the expected range of a gradient norm, before clipping."""
    entropy_min: PositiveOrZero = 0.01
    """Entropy below which little is explored, nats per token."""
    truncated_max: Fraction = 0.1
    """Share of responses that may reach data.max_response_length."""


def rolls_back(health: HealthConfig) -> bool:
    """Return True if the response to a rule is roll_back."""
    return health.enable and "roll_back" in vars(health.responses).values()
