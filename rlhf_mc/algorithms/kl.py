"""Estimators of KL(policy, reference) from sampled tokens, and the controller of the KL
coefficient.

The KL enters the reward in estimators.py and the loss in losses.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_mc.config.algorithm_schema import KLLossType

LOG_RATIO_BOUND = 20.0
"""Bound of |log ratio| before exponentiation: e^20 = 4.9e8 is safe in float32."""

LOW_VAR_KL_BOUND = 10.0
"""Largest low_var_kl of a token, in nats; verl's constant."""

_MAX_RELATIVE_ERROR = 0.2


def kl_estimate(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: KLLossType
) -> torch.Tensor:
    """Return the per-token estimate, in nats, of KL(policy, reference) at tokens sampled from the
    policy.

    log_probs, ref_log_probs: of one shape, also the result's. With d = ref - log_prob, clamped to
    +-20:
    k1 = kl = -d (unbiased, high variance), abs = |d|, k2 = mse = d^2 / 2 (biased, low variance), k3
    = e^d - d - 1 (unbiased, never negative), low_var_kl = min(k3, 10), as in verl: a token beyond
    the bound has no gradient. Source: J. Schulman, "Approximating KL Divergence", 2020.
    Differentiable in both arguments. The expected gradient of k1 is zero, so a loss needs one of
    the others. With "+" the value is the estimator's and the gradient is d^2 / 2's, with
    d as it is, not clamped: its expectation is the gradient of the KL. docs/algorithms.md compares
    them with the estimators of verl, TRL and OpenRLHF.
    """
    d = ref_log_probs - log_probs
    value = _estimate(d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), kind.removesuffix("+"))
    if kind.endswith("+"):
        k2 = 0.5 * d.square()
        return value.detach() + (k2 - k2.detach())
    return value


def _estimate(d: torch.Tensor, kind: str) -> torch.Tensor:
    match kind:
        case "k1" | "kl":
            return -d
        case "abs":
            return d.abs()
        case "k2" | "mse":
            return 0.5 * d.square()
        case "k3":
            return torch.expm1(d) - d
        case "low_var_kl":
            return (torch.expm1(d) - d).clamp(max=LOW_VAR_KL_BOUND)
        case _:
            raise AssertionError(f"no KL estimator {kind}")


def mean_sequence_kl(kl: torch.Tensor, response_lens: torch.Tensor) -> float:
    """Return the KL that the controller compares with its target: the mean over the tokens of a
    response, then over responses, in nats. kl: [R] in nats, response after response; response_lens:
    [S]."""
    return torch.segment_reduce(kl, "mean", lengths=response_lens).mean().item()


@dataclass
class KLController:
    """The KL coefficient beta: constant without a target, else one that keeps the KL near it
    (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    beta *= 1 + clip(KL / target - 1, -0.2, 0.2) * min(n / horizon, 1). Without the bound of 1 a
    batch of more than
    5 * horizon sequences could make beta negative.
    """

    value: float
    """The current KL coefficient beta."""
    target: float | None = None
    """Target of mean_sequence_kl, in nats; > 0. None: beta is constant."""
    horizon: int = 1
    """Number of sequences over which beta adapts; > 0."""

    def __post_init__(self) -> None:
        assert (self.target is None or self.target > 0) and self.horizon > 0, (
            self.target,
            self.horizon,
        )

    def update(self, current_kl: float, n_sequences: int) -> None:
        """Update beta after the step's rewards, which use the previous beta, are computed.

        current_kl: the step's KL in nats; n_sequences: sequences of the step, over all ranks.
        """
        if self.target is None:
            return
        # beta, and the checkpoint, would stay non-finite
        assert math.isfinite(current_kl), f"KL is {current_kl}"
        error = min(max(current_kl / self.target - 1.0, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
        self.value *= 1.0 + error * min(n_sequences / self.horizon, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the beta of a checkpoint if it adapts. A constant beta, the target and the
        horizon stay as in the config, which may differ in the resumed run."""
        if self.target is not None:
            self.value = float(state["value"])
