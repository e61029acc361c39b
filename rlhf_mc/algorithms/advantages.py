"""Token rewards, advantages and returns from scores, on padded [S, L] matrices of response tokens.

Whitening is in masked.py, the KL estimate that token_rewards subtracts in kl.py.
"""

from __future__ import annotations

import torch


@torch.no_grad()
def token_rewards(scores: torch.Tensor, kl: torch.Tensor | None, kl_coef: float, mask: torch.Tensor) -> torch.Tensor:
    """Return reward_t = -kl_coef * kl_t, plus the sequence's score on its last response token: [S, L], 0 off the mask.

    scores: [S]. kl: [S, L] in nats, or None for no KL term. mask: [S, L] bool, True on response tokens, possibly with
    holes; the last True of a row is its last response token. A row without response tokens gets no reward. Source:
    InstructGPT (arXiv 2203.02155), equation 2, per token as in Ziegler et al. (arXiv 1909.08593).
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True)  # -1 where the row has none
    zeros = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    rewards = torch.where(positions == last, scores[:, None], zeros)
    if kl is not None:
        rewards = rewards - kl_coef * torch.where(mask, kl, zeros)
    return rewards


@torch.no_grad()
def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns) by generalised advantage estimation (arXiv 1506.02438), each [S, L], 0 off the mask.

    delta_t = r_t + gamma * V_next - V_t;  A_t = delta_t + gamma * lam * A_next;  returns = A + V.
    "next" is the next position of the row where mask is True, so holes inside a response (tokens that the policy did
    not sample) are skipped without a discount; after the last position V and A are 0. Returns are computed from
    unwhitened advantages: whiten them afterwards.

    rewards, values: [S, L], same dtype; mask: [S, L] bool; gamma, lam: per token, 0 to 1.
    """
    advantages = torch.zeros_like(values.t(), memory_format=torch.contiguous_format)  # [L, S]: one row per position
    rewards_t = rewards.t().contiguous()
    values_t = values.t().contiguous()
    mask_t = mask.t().contiguous()
    next_value = next_advantage = advantages.new_zeros(advantages.shape[1])
    for t in reversed(range(advantages.shape[0])):
        advantage = rewards_t[t] + gamma * next_value - values_t[t] + gamma * lam * next_advantage
        next_advantage = torch.where(mask_t[t], advantage, next_advantage)
        next_value = torch.where(mask_t[t], values_t[t], next_value)
        advantages[t] = next_advantage
    advantages = torch.where(mask, advantages.t(), torch.zeros_like(values))
    returns = torch.where(mask, advantages + values, torch.zeros_like(values))
    return advantages, returns


ADVANTAGE_ESTIMATORS = {"gae": gae}
"""By algorithm.adv_estimator: (rewards, values, mask, gamma, lam) -> (advantages, returns)."""
