"""The distillation loss of drawn tokens: from the log-probs of the student, which is the actor, and
of its teacher. Where they come from is in trainer/teachers.py.
"""

from __future__ import annotations

import torch

from rlhf_mc.algorithms.kl import kl_estimate
from rlhf_mc.algorithms.policy_losses import Stats
from rlhf_mc.config.reward_schema import DistillationLossConfig

_SMALLEST_REST = 1e-7
"""Smallest probability of the tokens that are not among the k, near a rounding of float32."""


def forward_kl(
    log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, min_clamp: float | None = None
) -> torch.Tensor:
    """Return KL(teacher, student) over the k tokens of each position, and all others as one more:
    sum_i q_i (log q_i - log p_i), [r] in nats.

    log_probs, teacher_log_probs: log p and log q, [r, k]. The rest, with 1 - sum_i p_i and 1 -
    sum_i q_i, keeps the sum and its gradient at 0 where p = q. min_clamp: lower bound of log q, and
    of log p, which has no gradient below it. Source: generalized knowledge distillation (arXiv
    2306.13649).
    """
    if min_clamp is not None:
        log_probs, teacher_log_probs = (
            x.clamp(min=min_clamp) for x in (log_probs, teacher_log_probs)
        )
    log_p, log_q = (
        torch.cat([x, (1.0 - x.exp().sum(-1, True)).clamp(min=_SMALLEST_REST).log()], -1)
        for x in (log_probs, teacher_log_probs)
    )
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def distill(
    cfg: DistillationLossConfig, log_probs: torch.Tensor, fields: dict[str, torch.Tensor]
) -> None:
    """Add "distillation", the loss of each token, to a micro-batch's fields, and change
    "advantages": to 0 without use_task_rewards, and less the losses with use_policy_gradient.

    log_probs: of the drawn tokens, [r]. fields: [r] each, of which "forward_kl" is read with
    loss_mode forward_kl_topk, else "teacher_log_probs"."""
    if cfg.loss_mode == "forward_kl_topk":
        losses = fields["forward_kl"]
    else:
        losses = kl_estimate(log_probs, fields["teacher_log_probs"], cfg.loss_mode)
    if cfg.loss_max_clamp is not None:
        losses = losses.clamp(-cfg.loss_max_clamp, cfg.loss_max_clamp)
    fields["distillation"] = losses
    if not cfg.use_task_rewards:
        fields["advantages"] = torch.zeros_like(losses)
    if cfg.use_policy_gradient:
        fields["advantages"] = fields["advantages"] - _coef(cfg) * losses.detach()


def _coef(cfg: DistillationLossConfig) -> float:
    return cfg.distillation_loss_coef if cfg.use_task_rewards else 1.0


def with_distillation(
    cfg: DistillationLossConfig, loss: torch.Tensor, stats: Stats, fields: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, Stats]:
    """Return the actor's loss with the distillation loss, aggregated by "weights", unless it is in
    the advantages; and its statistics with distillation_loss. fields: after distill."""
    value = (fields["weights"] * fields["distillation"]).sum()
    if not cfg.use_policy_gradient:
        loss = loss + _coef(cfg) * value
    return loss, {**stats, "distillation_loss": value.detach(), "loss": loss.detach()}
