"""The health rules as data: what each reads, its condition, what that means, and which setting to
turn. The conditions with more than one expression and the bounds without a setting are in
health/conditions.py, the other bounds in config/health_schema.py, counting and printing in
health/monitor.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlhf_mc.config.health_schema import HealthConfig, listed_responses
from rlhf_mc.health import conditions
from rlhf_mc.health.conditions import (
    ENTROPY,
    ENTROPY_LEFT,
    EXPLAINED_VARIANCE_MIN,
    FAILED_CALLS_MAX,
    GRAD_NORM_GROWTH,
    GRAD_NORMS,
    IDLE_SHARE_MAX,
    MEMORY_MAX,
    PPO_KL,
    REF_KL,
    THROUGHPUT,
    THROUGHPUT_LEFT,
    TURNS,
    TURNS_LEFT,
    VF_CLIPFRAC_MAX,
    Observed,
    Violation,
)


@dataclass(frozen=True)
class HealthRule:
    """A rule on the metrics of a step."""

    name: str
    condition: str
    """Its condition in words, with the settings of health by their names."""
    check: Callable[[Observed], Violation | None]
    meaning: str
    setting: str
    """The setting to turn, and in which direction. With `meaning` it is one line of the console."""
    more: str = ""
    """Further advice, for the page of rules."""
    after: Literal["at once", "patience", "window"] = "patience"
    """The consecutive steps after which it counts: one, health.patience or health.window."""
    harms_policy: bool = False
    """The run must not roll back to the weights of a step in which the condition holds."""
    default: Literal["note", "warn", "stop"] = "warn"
    """The response to it, unless a list of the settings has another."""

    def response(self, cfg: HealthConfig) -> str:
        """Return the response to the rule: disable, note, warn, stop, roll_back or
        fixed_kl_coef."""
        return next(iter(listed_responses(cfg, self.name)), self.default)

    def steps_needed(self, cfg: HealthConfig) -> int:
        """Return the consecutive steps after which the rule counts."""
        return {"at once": 1, "patience": cfg.patience, "window": cfg.window}[self.after]


RULES: tuple[HealthRule, ...] = (
    HealthRule(
        "not_finite",
        "A metric is not finite, or an update was skipped because its loss or gradient was not",
        conditions.not_finite,
        "a loss, a gradient or a reward is no number",
        "lower actor.optim.lr or critic.optim.lr",
        "`nonfinite_step_N.json` has the samples of a skipped update.",
        after="at once",
        harms_policy=True,
    ),
    HealthRule(
        "kl_explosion",
        "actor/ppo_kl above ppo_kl_explosion, or the KL to the reference above ref_kl_max",
        lambda seen: seen.above("ppo_kl_explosion", PPO_KL) or seen.above("ref_kl_max", *REF_KL),
        "an update has thrown the policy off",
        "lower actor.optim.lr; go back to a checkpoint before",
        "It seldom returns by itself. actor.optim.lr_warmup_steps and a larger "
        "algorithm.kl_ctrl.kl_coef help.",
        after="at once",
        harms_policy=True,
    ),
    HealthRule(
        "policy_collapsed",
        "actor/entropy below a tenth of entropy_min, scores no better than in the first step, and "
        "a KL to the reference above 1 nat per token or, where it is not measured, half of the "
        "first step's scores lost: the policy gives one answer, a bad one",
        conditions.policy_collapsed,
        "one answer to everything, and a bad one",
        "go back to a checkpoint before; lower actor.optim.lr",
        "Gradients are 0, so that nothing more is learned. trainer.resume_from_path names the "
        "checkpoint.",
        harms_policy=True,
        default="stop",
    ),
    HealthRule(
        "ppo_kl_high",
        "actor/ppo_kl above ppo_kl_max",
        lambda seen: seen.above("ppo_kl_max", PPO_KL),
        "the policy moves too far within a step",
        "lower actor.optim.lr or actor.ppo_epochs",
        "Later mini-batches train on samples of another policy. A larger actor.ppo_mini_batch_size "
        "helps too.",
    ),
    HealthRule(
        "grad_norm_growing",
        "actor/grad_norm or critic/grad_norm above 10 times its median over the window before",
        lambda seen: seen.beyond_median("above", GRAD_NORM_GROWTH, *GRAD_NORMS),
        "gradients grow: training becomes unstable",
        "lower actor.optim.lr or critic.optim.lr",
        "Compare actor/ppo_kl and the longest responses.",
    ),
    HealthRule(
        "entropy_falling",
        "actor/entropy below half of its median over the window before",
        lambda seen: seen.beyond_median("below", ENTROPY_LEFT, ENTROPY),
        "the policy soon explores nothing",
        "raise actor.entropy_coeff or actor.clip_ratio_high",
        "A lower actor.optim.lr slows it down.",
    ),
    HealthRule(
        "entropy_low",
        "actor/entropy below entropy_min",
        lambda seen: seen.below("entropy_min", ENTROPY),
        "responses to a prompt are nearly all alike",
        "raise actor.entropy_coeff or rollout.temperature",
        "With a high reward the run is simply done.",
        after="window",
    ),
    HealthRule(
        "vf_clipfrac_high",
        "critic/vf_clipfrac above 0.05",
        lambda seen: seen.above(VF_CLIPFRAC_MAX, "critic/vf_clipfrac"),
        "values move further than the clip range",
        "raise critic.cliprange_value, or lower critic.optim.lr",
        "The range is in units of the return: rewards of tens need a larger one.",
    ),
    HealthRule(
        "explained_variance_low",
        "critic/vf_explained_var below 0",
        lambda seen: seen.below(EXPLAINED_VARIANCE_MIN, "critic/vf_explained_var"),
        "the critic predicts worse than a constant",
        "raise critic.optim.lr or trainer.critic_warmup",
        "Advantages are noisier than without a critic; an algorithm.adv_estimator without one may "
        "do better.",
        after="window",
    ),
    HealthRule(
        "truncated",
        "response_length/clip_ratio above truncated_max",
        lambda seen: seen.above("truncated_max", "response_length/clip_ratio"),
        "answers are cut off before they end",
        "raise data.max_response_length",
        "reward.overlong_buffer.len makes answers shorter.",
    ),
    HealthRule(
        "reward_constant",
        "Every response of a step has the same score, which is not the best one",
        conditions.reward_constant,
        "all scores are equal: nothing to learn from",
        "check the reward function, and train_generations/",
        "Often the answer's format is not the one that the reward reads. Else: easier prompts, a "
        "larger rollout.n.",
    ),
    HealthRule(
        "reward_flat",
        "critic/score/mean has no trend over the last 5 windows",
        conditions.reward_flat,
        "the run has converged, or does not learn",
        "raise actor.optim.lr, or lower algorithm.kl_ctrl.kl_coef",
        "Look at equal_groups, explained_variance_low and the generations first.",
    ),
    HealthRule(
        "reward_saturated",
        "critic/score/mean is 0.99 of the way from the lowest to the highest score that the run "
        "has seen, or higher",
        conditions.reward_saturated,
        "the prompts teach nothing more",
        "end the run (trainer.target_val_acc), or take harder prompts",
        "If validation does not rise with it, the reward is exploited: read train_generations/.",
    ),
    HealthRule(
        "equal_groups",
        "Share of prompts whose responses all score the same above 0.9, with an estimator that "
        "compares them",
        conditions.equal_groups,
        "most advantages are 0",
        "raise rollout.n, or set algorithm.filter_groups.enable",
        "The batch is smaller than it seems. Prompts are too easy or too hard.",
    ),
    HealthRule(
        "rollout_mismatch",
        "The log-probs of rollout engine and trainer differ by more than "
        "trainer.max_rollout_logprob_diff",
        conditions.rollout_mismatch,
        "vLLM samples from another policy than is trained",
        "reshard.verify=always (docs/debugging.md)",
        "Either the weights do not arrive, or a kernel or type is too inexact: "
        "algorithm.rollout_correction.rollout_is corrects for the latter.",
        after="at once",
    ),
    HealthRule(
        "groups_dropped",
        "training/off_policy/dropped_groups above 0",
        lambda seen: seen.above(0.0, "training/off_policy/dropped_groups"),
        "groups are too old before they are complete",
        "lower rollout.prompts_in_flight",
        "Or raise rollout.max_off_policy_threshold; with max_off_policy_strategy wait the step "
        "waits for them instead.",
    ),
    HealthRule(
        "calls_failing",
        "environment/failed_calls_ratio above 0.1",
        lambda seen: seen.above(FAILED_CALLS_MAX, "environment/failed_calls_ratio"),
        "the environment or its tools fail",
        "read the warnings; raise rollout.environment.timeout_seconds",
        "The model learns from their errors, and from rollout.environment.default_score.",
    ),
    HealthRule(
        "turns_falling",
        "num_turns/mean below half of its median over the window before",
        lambda seen: seen.beyond_median("below", TURNS_LEFT, TURNS),
        "the model has stopped taking turns or calling tools",
        "lower actor.optim.lr; read train_generations/",
        "Often a tool's answers help the score less than a guess does. A reward for calls in the "
        "environment helps.",
        default="note",
    ),
    HealthRule(
        "throughput_falling",
        "perf/throughput below half of its median over the window before",
        lambda seen: seen.beyond_median("below", THROUGHPUT_LEFT, THROUGHPUT),
        "steps take longer than they did",
        "compare the timing_s/* of this step and earlier ones",
        "Another program, a throttled GPU, slow storage, or one slow rank.",
    ),
    HealthRule(
        "replicas_unbalanced",
        "global_seqlen/idle_share above 0.1",
        lambda seen: seen.above(IDLE_SHARE_MAX, "global_seqlen/idle_share"),
        "replicas wait for the one with the most to do",
        "raise actor.ppo_mini_batch_size",
        "A few long sequences cannot be spread evenly: more sequences, or fewer replicas with more "
        "tensor parallelism.",
    ),
    HealthRule(
        "memory_near_limit",
        "perf/memory_used_ratio above 0.95: of the device, or on a CPU of the machine",
        lambda seen: seen.above(MEMORY_MAX, "perf/memory_used_ratio"),
        "a longer batch may end the run",
        "lower actor.ppo_max_token_len_per_gpu",
        "Or rollout.gpu_memory_utilization, or offload; docs/planner.md has what takes how much.",
        after="at once",
    ),
)
"""All rules, in the order in which their lines are printed."""
