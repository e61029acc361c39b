"""Estimators of KL(policy, reference) from sampled tokens, and the controllers of the KL coefficient.

Where the KL goes is elsewhere: into the reward in advantages.py, into the loss in losses.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, assert_never

import torch

from rlhf_mc.algorithms.masked import masked_mean
from rlhf_mc.config.schema import KLEstimator

LOG_RATIO_BOUND = 20.0
"""Log ratios are clamped to +-20 before they are exponentiated: e^20 = 4.9e8 is still harmless in float32."""

LOW_VAR_KL_BOUND = 10.0
"""Largest low_var_kl of a token, in nats; verl's constant."""

_MAX_RELATIVE_ERROR = 0.2


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: KLEstimator) -> torch.Tensor:
    """Per-token estimate, in nats, of KL(policy, reference) at tokens sampled from the policy.

    log_probs, ref_log_probs: any one shape, which is the result's. With d = ref - log_prob, clamped to +-20:
    k1 = -d (unbiased, high variance), k2 = d^2 / 2 (biased, low variance), k3 = e^d - d - 1 (unbiased,
    never negative), low_var_kl = min(k3, 10), as in verl: a token beyond the bound has no gradient. Source:
    J. Schulman, "Approximating KL Divergence", 2020. Differentiable in both arguments; as a loss, k1's
    gradient is zero on average, so there use one of the others. docs/algorithms.md compares them with verl's,
    TRL's and OpenRLHF's.
    """
    d = (ref_log_probs - log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    match kind:
        case "k1":
            return -d
        case "k2":
            return 0.5 * d.square()
        case "k3":
            return torch.expm1(d) - d
        case "low_var_kl":
            return (torch.expm1(d) - d).clamp(max=LOW_VAR_KL_BOUND)
        case _:
            assert_never(kind)


def mean_sequence_kl(kl: torch.Tensor, mask: torch.Tensor) -> float:
    """What the controllers compare with their target: mean over tokens within a sequence, then over sequences.

    kl: [S, L] in nats; mask: [S, L] bool, at least one True in each row.
    """
    return masked_mean(kl, mask, dim=1).mean().item()


@dataclass
class FixedKLController:
    """A coefficient that never moves."""

    value: float
    """The KL coefficient beta."""

    def update(self, current_kl: float, n_sequences: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore: the coefficient is the config's, which may have been changed for the resumed run."""


@dataclass
class AdaptiveKLController:
    """Moves beta so that the KL stays near a target (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    beta *= 1 + clip(KL / target - 1, -0.2, 0.2) * n / horizon. n / horizon is taken as at most 1: without
    that, a batch of more than 5 * horizon sequences could turn beta negative.
    """

    value: float
    """The KL coefficient beta: its start value, then the current one."""
    target: float
    """The KL aimed at, in nats, measured as mean_sequence_kl does; > 0."""
    horizon: int
    """Sequences over which beta adapts; > 0."""

    def __post_init__(self) -> None:
        assert self.target > 0 and self.horizon > 0, (self.target, self.horizon)

    def update(self, current_kl: float, n_sequences: int) -> None:
        """Call it after the rewards of the step are made: they use the beta from before this update.

        current_kl: the step's KL in nats; n_sequences: sequences of the step, over all ranks.
        """
        assert math.isfinite(current_kl), f"KL is {current_kl}"  # it would stay in beta, and in the checkpoint
        error = min(max(current_kl / self.target - 1.0, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
        self.value *= 1.0 + error * min(n_sequences / self.horizon, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: beta is state, a resumed run must not start from the config's again."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state_dict of either controller; target and horizon stay the config's."""
        self.value = float(state["value"])


KLController = FixedKLController | AdaptiveKLController
