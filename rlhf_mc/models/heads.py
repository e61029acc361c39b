"""From hidden states to what PPO needs of a token: its log-prob and the entropy (policy), its value (critic).

The vocabulary is spread over tensor-parallel ranks, and logits exist for a chunk of tokens at a time: neither
passes over them keep more than that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

CHUNK_LOGITS = 1 << 26
"""Logits that exist at a time on a rank: tokens of a chunk times columns of the rank. 256 MiB in float32, twice that
where the entropy is asked for. benchmarks/log_probs.py: larger chunks are no faster, much smaller ones are slower."""
_NO_TOKEN = -1e30
"""Logit of a padding column: its probability is 0, and unlike infinity it can be multiplied by that."""


class ValueHead(torch.nn.Module):
    """hidden -> one value. The same on every tensor-parallel rank, like a norm's weight."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, 1, hidden] -> values [R] float32."""
        return torch.nn.functional.linear(hidden, self.weight)[:, 0, 0].float()


class _Logits:
    """Logits of a chunk at a time, in one buffer that every chunk uses again."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, num_tokens: int, temperature: float) -> None:
        """hidden [R, hidden], weight [columns, hidden], of which the first num_tokens stand for tokens."""
        self._hidden, self._weight, self._temperature = hidden, weight, temperature
        self._num_tokens, columns = num_tokens, weight.shape[0]
        size = max(1, min(len(hidden), CHUNK_LOGITS // columns))
        self._buffer = torch.empty(size, columns, dtype=weight.dtype, device=weight.device)
        self.parts = [slice(start, start + size) for start in range(0, len(hidden), size)]

    def scaled(self, part: slice) -> torch.Tensor:
        """[r, columns] float32, divided by the temperature; the caller may write on it until the next call."""
        hidden = self._hidden[part]
        out = self._buffer[: len(hidden)]
        torch.addmm(out, hidden, self._weight.t(), beta=0, alpha=1.0 / self._temperature, out=out)
        x = out.float()
        x[:, self._num_tokens :] = _NO_TOKEN
        return x


class _VocabParallelLogProbs(torch.autograd.Function):
    """log softmax(x)[target] and the entropy H of softmax(x), x = hidden weight^T / temperature, where the rows of
    weight are spread over a process group. The backward pass computes x again, chunk by chunk.

    d log p_t / dx_j = [j = t] - p_j;  dH / dx_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns = weight.shape[0]
        first = group.rank() * columns
        num_tokens = max(0, min(columns, vocab_size - first))
        local = targets - first
        is_local = (local >= 0) & (local < columns)
        local = torch.where(is_local, local, 0)
        # Of this rank's columns, relative to their largest x: the target's x, sum exp(x), sum exp(x) x.
        peak, target_x, total, weighted = torch.zeros(4, len(targets), dtype=torch.float32, device=hidden.device)
        logits = _Logits(hidden, weight, num_tokens, temperature)
        for part in logits.parts:
            x = logits.scaled(part)
            peak[part] = x.amax(-1)
            x.sub_(peak[part, None])
            target_x[part] = x.gather(1, local[part, None])[:, 0]
            exp = x.exp() if with_entropy else x.exp_()
            total[part] = exp.sum(-1)
            if with_entropy:
                weighted[part] = exp.mul_(x).sum(-1)
        target_x = torch.where(is_local, target_x + peak, 0.0)
        if group.size() > 1:
            highest = peak.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            share, below = (peak - highest).exp(), peak - highest
            sums = torch.stack([target_x, share * total, share * (weighted + below * total)])
            dist.all_reduce(sums, group=group)
            target_x, total, weighted = sums
            peak = highest
        log_z = peak + total.log()
        entropy = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, local, is_local, log_z, entropy)
        ctx.num_tokens, ctx.temperature, ctx.group = num_tokens, temperature, group
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return target_x - log_z, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:
        hidden, weight, local, is_local, log_z, entropy = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        grad_hidden = torch.empty_like(hidden)
        # Chunks add up in float32 even where weights are narrower. A frozen weight has none.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        logits = _Logits(hidden, weight, ctx.num_tokens, ctx.temperature)
        for part in logits.parts:
            log_p = logits.scaled(part).sub_(log_z[part, None])
            at_target = (local[part, None], is_local[part, None].float())
            if grad_entropy is None:
                # One factor for a row: it is taken out of the products with the weight and with the states.
                factor = -grad_log_probs[part, None] / ctx.temperature
                grad = log_p.exp_().scatter_add_(1, at_target[0], -at_target[1])
            else:
                factor = torch.full_like(log_z[part, None], 1.0 / ctx.temperature)
                grad = log_p.exp()
                log_p.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_log_probs[part, None]).neg_()
                grad.mul_(log_p).scatter_add_(1, at_target[0], at_target[1] * grad_log_probs[part, None])
            narrow = grad.to(weight.dtype)
            grad_hidden[part] = torch.mm(narrow, weight) * factor
            if grad_weight is None:
                continue
            states = (hidden[part] * factor).to(weight.dtype)
            if narrow.dtype == torch.float32:
                grad_weight.addmm_(narrow.t(), states)
            else:
                grad_weight += torch.mm(narrow.t(), states)
        if ctx.group.size() > 1:
            # Each rank has what its columns add; the states are the same on all of them.
            dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None


def _apply(
    model: Any, hidden: torch.Tensor, targets: torch.Tensor, vocab_size: int, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    tied = model.output_weight()
    weight = model.output_layer.weight if tied is None else tied
    out: tuple[torch.Tensor, torch.Tensor] = _VocabParallelLogProbs.apply(
        hidden[:, 0], weight, targets, vocab_size, temperature, model.pg_collection.tp, with_entropy
    )
    return out


def log_probs(
    model: Any, hidden: torch.Tensor, targets: torch.Tensor, vocab_size: int, temperature: float
) -> torch.Tensor:
    """Log-prob of each target token.

    hidden: [R, 1, hidden], the final states that predict the targets. targets: [R] int64.
    Returns [R] float32, in nats, at the sampling temperature; the same on every tensor-parallel rank,
    all of which must call it."""
    return _apply(model, hidden, targets, vocab_size, temperature, with_entropy=False)[0]


def log_probs_and_entropy(
    model: Any, hidden: torch.Tensor, targets: torch.Tensor, vocab_size: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As log_probs, and the entropy of the distribution each target was drawn from: two [R] float32. Where nothing
    is backpropagated through the entropy, the backward pass spends nothing on it."""
    return _apply(model, hidden, targets, vocab_size, temperature, with_entropy=True)


def values(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The critic's value at each of the states hidden [R, 1, hidden]: [R] float32."""
    out: torch.Tensor = model.output_layer(hidden)
    return out
