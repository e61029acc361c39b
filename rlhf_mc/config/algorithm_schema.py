"""Settings of the algorithm: advantage estimator, KL term in the reward, and the names that several
sections share. The rest is in schema.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlhf_mc.config.numbers import (
    Count,
    CountOrZero,
    Fraction,
    FractionAbove0,
    InnerFraction,
    Number,
    Positive,
    PositiveOrZero,
)

LossAggMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KLEstimator = Literal["k1", "k2", "k3", "low_var_kl", "kl", "abs", "mse"]
KLLossType = Literal[
    "k1", "k2", "k3", "low_var_kl", "kl", "abs", "mse", "k1+", "k3+", "low_var_kl+", "kl+", "abs+"
]
LossMode = Literal[
    "vanilla",
    "gspo",
    "geo_mean",
    "sapo",
    "cispo",
    "sao",
    "dppo_tv",
    "dppo_kl",
    "gpg",
    "clip_cov",
    "kl_cov",
    "custom",
]
RejectionStatistic = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
SEQUENCE_LOSSES = ("gspo", "geo_mean", "sapo")
"""Policy losses that weigh all sequences alike: gspo and geo_mean have one ratio per sequence."""
SELECTING_LOSSES = ("clip_cov", "kl_cov")
"""Policy losses that select tokens by the log-probs of the whole mini-batch."""
GroupMetric = Literal["acc", "score", "seq_reward"]
RouterReplayMode = Literal["rollout", "recompute", "off"]
AdvEstimator = Literal[
    "gae",
    "gae_turn",
    "grpo",
    "grpo_turn",
    "grpo_passk",
    "gdpo",
    "maxrl",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "custom",
]


@dataclass(frozen=True)
class EstimatorNeeds:
    """Requirements of an advantage estimator, beside token rewards."""

    critic: bool = False
    """Values of a critic: the run has one, and trains it."""
    group: bool = False
    """Several responses to each prompt: rollout.n of at least 2."""
    greedy_baseline: bool = False
    """The score of one more response to each prompt, generated at temperature 0."""
    parts: bool = False
    """The parts of each score (reward.mixture), normalised in their groups."""
    turns: bool = False
    """With group: the rewards of each turn, in place of the score alone."""


ESTIMATOR_NEEDS: dict[str, EstimatorNeeds] = {
    "gae": EstimatorNeeds(critic=True),
    "gae_turn": EstimatorNeeds(critic=True),
    "grpo": EstimatorNeeds(group=True),
    "grpo_turn": EstimatorNeeds(group=True, turns=True),
    "grpo_passk": EstimatorNeeds(group=True),
    "gdpo": EstimatorNeeds(group=True, parts=True),
    "maxrl": EstimatorNeeds(group=True),
    "rloo": EstimatorNeeds(group=True),
    "reinforce_plus_plus": EstimatorNeeds(),
    "reinforce_plus_plus_baseline": EstimatorNeeds(group=True),
    "remax": EstimatorNeeds(greedy_baseline=True),
    "opo": EstimatorNeeds(group=True),
    "gpg": EstimatorNeeds(group=True),
}
"""Needs of each estimator of algorithms/estimators.py. They are here, as settings are checked
without torch."""


@dataclass
class KLCtrlConfig:
    """The coefficient of the KL in the reward (use_kl_in_reward); without it, and with type
    adaptive, the coefficient of the KL loss (actor.use_kl_loss)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed: the coefficient is constant. adaptive: a controller keeps the KL near target_kl
    (Ziegler et al. 2019, arXiv 1909.08593)."""
    kl_coef: PositiveOrZero = 0.001
    """The coefficient in the reward; with adaptive, its initial value. The KL loss has
    actor.kl_loss_coef."""
    target_kl: PositiveOrZero = 0.1
    """adaptive: target of the KL, which is the mean over tokens of each sequence, averaged over
    sequences."""
    horizon: Count = 10000
    """adaptive: number of sequences over which the coefficient adapts."""


@dataclass
class CustomEstimatorConfig:
    """A user-defined advantage estimator, for adv_estimator: custom."""

    path: str | None = None
    """Python file with a function estimate(inputs) that takes EstimatorInputs and returns Estimate,
    both of rlhf_mc.algorithms.estimators (docs/extending.md); null: none."""
    needs: list[Literal["critic", "group", "greedy_baseline"]] = field(default_factory=list)
    """Inputs that the function reads beside token rewards. critic: inputs.values; the run has a
    critic, which learns Estimate.returns. group: inputs.group, to compare the responses of a
    prompt; rollout.n must be at least 2. greedy_baseline: inputs.greedy_scores; the run generates
    one more response per prompt, at temperature 0."""


@dataclass
class CustomLossConfig:
    """A user-defined policy loss, for loss_mode: custom."""

    path: str | None = None
    """Python file with a function policy_loss(inputs) that takes PolicyLossInputs of
    rlhf_mc.algorithms.policy_losses and returns a scalar and its statistics (docs/extending.md);
    null: none."""


@dataclass
class PolicyLossConfig:
    """The policy loss: the term of the actor's loss that contains the advantages."""

    loss_mode: LossMode = "vanilla"
    """vanilla: PPO's clipped surrogate. gspo, geo_mean (GMPO): with one ratio per sequence, for
    actor.loss_agg_mode seq-mean-token-mean. sapo: a smooth gate in place of the clip, for
    seq-mean-token-mean too. cispo: clipped weights of the policy gradient. sao: the policy gradient
    of the tokens whose ratio to the engine's policy is within the clip range; needs
    algorithm.rollout_correction.bypass_mode. dppo_tv, dppo_kl: the policy gradient without tokens
    whose probability has moved too far. gpg: the policy gradient. clip_cov, kl_cov: a few tokens of
    high covariance between log-prob and advantage are left out, or get a KL penalty. custom:
    custom_loss. All but sapo, gpg and kl_cov use actor.clip_ratio_low and clip_ratio_high
    (docs/algorithms.md)."""
    clip_cov_ratio: FractionAbove0 = 0.0002
    """clip_cov: share of the tokens of a mini-batch that are left out."""
    clip_cov_lb: Number = 1.0
    """clip_cov: the tokens are drawn with a covariance above this one ..."""
    clip_cov_ub: Number = 5.0
    """... and below this one."""
    kl_cov_ratio: FractionAbove0 = 0.0002
    """kl_cov: share of the tokens of a mini-batch, of the highest covariance, that get a KL
    penalty."""
    ppo_kl_coef: PositiveOrZero = 0.1
    """kl_cov: coefficient of the penalty |log-prob - old log-prob|."""
    tau_pos: Positive = 1.0
    """sapo: how soon the gradient of a token of positive advantage fades as the ratio leaves 1."""
    tau_neg: Positive = 1.05
    """sapo: the same for all other tokens."""
    custom_loss: CustomLossConfig = field(default_factory=CustomLossConfig)
    """A user-defined policy loss."""


@dataclass
class RolloutCorrectionConfig:
    """The correction of the difference between the rollout engine's policy, which samples, and the
    trainer's. rho is the ratio of their probabilities of a token, trainer / engine. It acts on the
    actor's loss."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Weigh each token's policy loss by rho of the token, or by the product of rho over its
    sequence; null: no weights."""
    rollout_is_threshold: Positive = 2.0
    """Upper bound of a weight (truncated importance sampling)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch, unless it is below 1e-8."""
    rollout_rs: list[RejectionStatistic] = field(default_factory=list)
    """Leave tokens (token_...) or whole sequences (seq_...) out of the actor's loss where a
    statistic of rho exceeds its threshold (docs/algorithms.md). IcePop: token_k1 with both
    bounds, and rollout_is token."""
    rollout_rs_threshold: list[Positive] = field(default_factory=list)
    """The threshold of each statistic of rollout_rs. Of ..._k1 it is the upper bound of rho."""
    rollout_rs_threshold_lower: InnerFraction | None = None
    """Lower bound of rho for the ..._k1 statistics of rollout_rs; null: 1 / the upper bound."""
    rollout_token_veto_threshold: InnerFraction | None = None
    """Leave out each sequence with a token of rho below this; null: none."""
    bypass_mode: bool = False
    """Use the rollout engine's log-probs as the old log-probs, and skip the pass that computes the
    trainer's, except in the first step after a start, which checks them
    (trainer.max_rollout_logprob_diff)."""


@dataclass
class FilterGroupsConfig:
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). A group, the rollout.n responses to
    a prompt, is dropped if its responses are all alike in the metric, and further prompts are drawn
    in its place."""

    enable: bool = False
    """Draw batches of prompts in each step until data.train_batch_size groups are kept. Surplus
    groups are dropped."""
    metric: GroupMetric = "acc"
    """acc: the accuracy, "acc" of the reward function or else its score. score: the sum of the
    functions' parts of the score. seq_reward: the score that is trained on, with the parts of the
    reward model and of reward.overlong_buffer (docs/algorithms.md)."""
    max_num_gen_batches: CountOrZero = 0
    """Most batches of data.gen_batch_size prompts that a step draws. The run ends with a line if
    they have too few groups to keep. 0: as many as one pass over the training prompts has."""


@dataclass
class AlgorithmConfig:
    """Rewards to advantages."""

    adv_estimator: AdvEstimator = "gae"
    """Advantage estimator (docs/algorithms.md). gae and gae_turn have a critic, the others have
    none. grpo, grpo_turn, grpo_passk, gdpo, maxrl, rloo, reinforce_plus_plus_baseline, opo and gpg
    compare the rollout.n responses of a prompt, gdpo each part of the score by itself. ..._turn: by
    the turns of conversations. remax compares each with one more response, generated at temperature
    0. custom: custom_estimator."""
    custom_estimator: CustomEstimatorConfig = field(default_factory=CustomEstimatorConfig)
    """A user-defined advantage estimator."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo, grpo_turn, grpo_passk, gdpo: divide a prompt's advantages by the standard deviation of
    its scores. false, with actor.loss_agg_mode seq-mean-token-sum-norm: Dr. GRPO."""
    gamma: Fraction = 1.0
    """Discount per token of gae and reinforce_plus_plus, per turn of gae_turn and grpo_turn."""
    lam: Fraction = 1.0
    """GAE's lambda."""
    gae_lambda_value: Fraction | None = None
    """GAE's lambda of the returns, the targets of the critic (decoupled GAE, arXiv 2503.01491);
    null: lam."""
    gae_lambda_policy: Fraction | None = None
    """GAE's lambda of the advantages; null: lam."""
    length_adaptive_alpha: PositiveOrZero = 0.0
    """GAE's lambda of the advantages of a response of l drawn tokens is 1 - 1 / (alpha l), at least
    0 (VAPO, arXiv 2504.05118), in place of gae_lambda_policy; 0: it does not depend on l."""
    use_kl_in_reward: bool = False
    """Subtract kl_coef * KL(actor, reference) from each token's reward."""
    kl_penalty: KLEstimator = "k1"
    """KL estimator of use_kl_in_reward, as actor.kl_loss_type."""
    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)
    """Coefficient of the KL in the reward, or with type adaptive and without use_kl_in_reward of
    the KL loss."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Dynamic sampling: training on groups whose responses differ alone."""
    overlong_filtering: bool = False
    """Do not train on truncated responses, which have not ended within data.max_response_length:
    they are out of the statistics of groups, whitening and the losses (docs/rewards.md). The name
    is NeMo-RL's, where they stay in the statistics of groups."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """Correction of the difference between the rollout engine's policy and the trainer's."""
    router_replay: RouterReplayMode | None = None
    """The experts that the actor's passes use. rollout: those that the rollout engine has chosen
    for each token (R3, arXiv 2510.11370), so that both compute the same function. recompute: those
    that the pass of the old log-probs has chosen (R2), in the updates. off: each pass chooses.
    null: rollout for a model with experts, recompute for one with linear attention too, or an
    agent with new contexts, off for others. The weights of the experts are the trainer's own
    (docs/algorithms.md)."""
