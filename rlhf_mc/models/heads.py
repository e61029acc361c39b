"""From hidden states to what PPO needs of a token: its log-prob and the entropy (policy), its value (critic).

The vocabulary is spread over tensor-parallel ranks; no rank sees a whole row of logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class ValueHead(torch.nn.Module):
    """hidden -> one value. The same on every tensor-parallel rank, like a norm's weight."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, 1, hidden] -> values [R] float32."""
        return torch.nn.functional.linear(hidden, self.weight)[:, 0, 0].float()


class _VocabParallelLogProbs(torch.autograd.Function):
    """log softmax(x)[target] and the entropy of softmax(x), x = logits / temperature, over a vocabulary whose
    columns are spread over a process group.

    d log p_t / dx_j = [j = t] - p_j;  dH / dx_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns = logits.shape[-1]
        first = group.rank() * columns
        x = logits.float() / temperature
        # Padding columns are no tokens.
        x[:, max(0, vocab_size - first) :] = -torch.inf
        peak = x.max(dim=-1).values
        if group.size() > 1:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        local = targets - first
        is_local = (local >= 0) & (local < columns)
        local = torch.where(is_local, local, 0)
        target_x = torch.where(is_local, x.gather(1, local[:, None])[:, 0], 0.0)
        exp = (x - peak[:, None]).exp_()
        sums = torch.stack([target_x, exp.sum(-1), (exp * x.clamp_min(torch.finfo(x.dtype).min)).sum(-1)])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        target_x, denominator, weighted_x = sums
        log_z = peak + denominator.log()
        entropy = log_z - weighted_x / denominator
        probs = exp.div_(denominator[:, None])
        ctx.save_for_backward(probs, entropy, local, is_local)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return target_x - log_z, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:
        probs, entropy, local, is_local = ctx.saved_tensors
        grad = torch.zeros_like(probs)
        if grad_log_probs is not None:
            grad.addcmul_(probs, grad_log_probs[:, None], value=-1.0)
            grad.scatter_add_(1, local[:, None], torch.where(is_local, grad_log_probs, 0.0)[:, None])
        if grad_entropy is not None:
            grad -= grad_entropy[:, None] * (torch.xlogy(probs, probs) + probs * entropy[:, None])
        return grad.div_(ctx.temperature).to(ctx.dtype), None, None, None, None


def log_probs_and_entropy(
    model: Any, hidden: torch.Tensor, targets: torch.Tensor, vocab_size: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target token and entropy of the distribution it was drawn from.

    hidden: [R, 1, hidden], the final states that predict the targets. targets: [R] int64.
    Returns two [R] float32, in nats, at the sampling temperature; the same on every tensor-parallel rank,
    all of which must call it."""
    logits, _ = model.output_layer(hidden, weight=model.output_weight())
    out: tuple[torch.Tensor, torch.Tensor] = _VocabParallelLogProbs.apply(
        logits[:, 0], targets, vocab_size, temperature, model.pg_collection.tp
    )
    return out


def values(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The critic's value at each of the states hidden [R, 1, hidden]: [R] float32."""
    out: torch.Tensor = model.output_layer(hidden)
    return out
