"""From hidden states to log-probs and entropy (policy) or values (critic).

The vocabulary is sharded over tensor-parallel ranks. The forward and the backward pass compute the
logits of one chunk of tokens at a time, and keep none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.architectures.operations import CHUNK_LOGITS, GPU_CHUNKS
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.steps import Assembly

_NO_TOKEN = -1e30
"""Logit of a padding column: its probability is 0, and 0 * this logit is 0, unlike 0 * infinity."""


class ValueHead(torch.nn.Module):
    """Linear layer hidden -> value. Its weight is replicated over tensor-parallel ranks, like a
    norm's weight."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the values [R] float32 of the states `hidden` [R, 1, hidden]."""
        return torch.nn.functional.linear(hidden, self.weight)[:, 0, 0].float()


def add_value_head(assembly: Assembly) -> None:
    """Put the value head in the place of the output layer.

    Reason: Megatron-Core's output layer has the columns of the vocabulary."""
    if not (assembly.shape.value_head and assembly.is_last):
        return
    assembly.model.output_layer = ValueHead(assembly.shape.hidden_size)


class _Logits:
    """Logits of one chunk of tokens at a time, in one buffer for all chunks."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, num_tokens: int, temperature: float
    ) -> None:
        """hidden [R, hidden]; weight [columns, hidden], whose rows after the first num_tokens are
        padding."""
        self._hidden = hidden
        self._weight = weight
        self._temperature = temperature
        self._num_tokens = num_tokens
        columns = weight.shape[0]
        limit = CHUNK_LOGITS * (GPU_CHUNKS if platform.use_cuda() else 1)
        size = max(1, min(len(hidden), limit // columns))
        dtype = torch.float32 if platform.float32_products() else weight.dtype
        self._buffer = torch.empty(size, columns, dtype=dtype, device=weight.device)
        self.parts = [slice(start, start + size) for start in range(0, len(hidden), size)]

    def scaled(self, part: slice) -> torch.Tensor:
        """Return the logits [r, columns] float32 of a chunk, divided by the temperature. The caller
        may overwrite them; the next call does."""
        hidden = self._hidden[part]
        out = self._buffer[: len(hidden)]
        _add_product(out, hidden, self._weight.t(), beta=0.0, alpha=1.0 / self._temperature)
        x = out.float()
        if self._num_tokens < x.shape[1]:
            x[:, self._num_tokens :] = _NO_TOKEN
        return x


def _add_product(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float = 1.0
) -> None:
    """Write beta * out + alpha * a b into `out`. It may be float32 where a and b are not, if
    platform says so."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)


def row_statistics(
    x: torch.Tensor, targets: torch.Tensor, out: torch.Tensor, with_entropy: bool
) -> None:
    """Write to out [4, r] the largest of each row of the logits x [r, columns] and, relative to it,
    the target's x and the sums of exp(x) and, with_entropy, exp(x) x. x is overwritten."""
    peak, target_x, total, weighted = out
    torch.amax(x, -1, out=peak)
    x.sub_(peak[:, None])
    torch.gather(x, 1, targets[:, None], out=target_x[:, None])
    exp = x.exp() if with_entropy else x.exp_()
    torch.sum(exp, -1, out=total)
    if with_entropy:
        torch.sum(exp.mul_(x), -1, out=weighted)


def row_gradient(
    x: torch.Tensor,
    targets: torch.Tensor,
    counted: torch.Tensor,
    log_z: torch.Tensor,
    entropy: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the gradient of the logits x [r, columns], which are overwritten; without grad_entropy
    divided by -grad_log_probs. All others are [r, 1]; counted is 1.0 where the target is among the
    columns, else 0.0."""
    log_p = x.sub_(log_z)
    if grad_entropy is None:
        grad = log_p.exp_().scatter_add_(1, targets, -counted)
    else:
        grad = log_p.exp()
        log_p.add_(entropy).mul_(grad_entropy).add_(grad_log_probs).neg_()
        grad.mul_(log_p).scatter_add_(1, targets, counted * grad_log_probs)
    return grad.to(dtype)


def _over_ranks(
    rows: torch.Tensor, is_local: torch.Tensor | None, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the target's x, the logsumexp and the entropy, of the columns of all ranks of the
    group. rows: of row_statistics. is_local: targets among this rank's columns; None: all."""
    peak, target_x, total, weighted = rows
    target_x = target_x + peak if is_local is None else torch.where(is_local, target_x + peak, 0.0)
    if group.size() > 1:
        highest = peak.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        below = peak - highest
        share = below.exp()
        sums = torch.stack([target_x, share * total, share * (weighted + below * total)])
        dist.all_reduce(sums, group=group)
        target_x, total, weighted = sums
        peak = highest
    log_total = total.log()
    return target_x, peak + log_total, log_total - weighted / total


def _local(
    tokens: torch.Tensor, columns: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the columns of tokens on this rank, 0 for those of other ranks, and which are its own;
    None on one rank, which has all."""
    if group.size() == 1:
        return tokens, None
    local = tokens - group.rank() * columns
    is_local = (local >= 0) & (local < columns)
    return torch.where(is_local, local, 0), is_local


class _VocabParallelLogProbs(torch.autograd.Function):
    """log softmax(x)[target], the entropy H of softmax(x), and log softmax(x) of further tokens,
    x = hidden weight^T / temperature, where the rows of weight are sharded over a process group.
    The backward pass recomputes x, chunk by chunk.

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
        others: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        columns = weight.shape[0]
        num_tokens = max(0, min(columns, vocab_size - group.rank() * columns))
        local, is_local = _local(targets, columns, group)
        others, is_other = (None, None) if others is None else _local(others, columns, group)
        others_x = None if others is None else hidden.new_zeros(others.shape, dtype=torch.float32)
        # Of this rank's columns, relative to their largest x: the target's x, sum exp(x), sum
        # exp(x) x.
        rows = torch.zeros(4, len(targets), dtype=torch.float32, device=hidden.device)
        logits = _Logits(hidden, weight, num_tokens, temperature)
        for part in logits.parts:
            x = logits.scaled(part)
            if others is not None and others_x is not None:
                torch.gather(x, 1, others[part], out=others_x[part])
            row_statistics(x, local[part], rows[:, part], with_entropy)
        target_x, log_z, entropy = _over_ranks(rows, is_local, group)
        if others_x is not None:
            if is_other is not None:
                others_x.masked_fill_(~is_other, 0.0)
                dist.all_reduce(others_x, group=group)
            others_x -= log_z[:, None]
        ctx.save_for_backward(hidden, weight, local, is_local, log_z, entropy, others, is_other)
        ctx.num_tokens = num_tokens
        ctx.temperature = temperature
        ctx.group = group
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return target_x - log_z, entropy, others_x

    @staticmethod
    def backward(
        ctx: Any,
        grad_log_probs: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
        grad_others: torch.Tensor | None,
    ) -> Any:
        hidden, weight, local, is_local, log_z, entropy, others, is_other = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        grad_hidden = torch.empty_like(hidden)
        # Chunks are summed in float32 for all weight types. A frozen weight has no gradient.
        grad_weight = (
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        logits = _Logits(hidden, weight, ctx.num_tokens, ctx.temperature)
        counted = torch.ones_like(log_z) if is_local is None else is_local.float()
        dtype = weight.dtype
        tokens = of_tokens = None
        if grad_others is not None:
            # The gradients of all log-probs of a row are added here; row_gradient has their sum.
            own = grad_others if is_other is None else grad_others.masked_fill(~is_other, 0.0)
            tokens = torch.cat([local[:, None], others], 1)
            of_tokens = torch.cat([(counted * grad_log_probs)[:, None], own], 1)
            counted = torch.zeros_like(log_z)
            grad_log_probs = grad_log_probs + grad_others.sum(1)
            grad_entropy = torch.zeros_like(log_z) if grad_entropy is None else grad_entropy
            dtype = torch.float32
        for part in logits.parts:
            narrow = row_gradient(
                logits.scaled(part),
                local[part, None],
                counted[part, None],
                log_z[part, None],
                entropy[part, None],
                grad_log_probs[part, None],
                None if grad_entropy is None else grad_entropy[part, None],
                dtype,
            )
            if tokens is not None and of_tokens is not None:
                narrow = narrow.scatter_add_(1, tokens[part], of_tokens[part]).to(weight.dtype)
            # Without grad_entropy a factor per row is applied outside the products with the weight
            # and the states.
            of_row = -grad_log_probs if grad_entropy is None else torch.ones_like(log_z)
            factor = of_row[part, None] / ctx.temperature
            grad_hidden[part] = torch.mm(narrow, weight) * factor
            if grad_weight is not None:
                states = (hidden[part] * factor).to(weight.dtype)
                if narrow.dtype == torch.float32 or platform.float32_products():
                    _add_product(grad_weight, narrow.t(), states, beta=1.0)
                else:
                    grad_weight += torch.mm(narrow.t(), states)
            del narrow  # before that of the next chunk
        if ctx.group.size() > 1:
            # Each rank has the contribution of its columns.
            dist.all_reduce(grad_hidden, group=ctx.group)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
            None,
            None,
            None,
            None,
        )


def output_weight(model: Any) -> torch.Tensor:
    """Return the weight of the output layer or of the value head, on the last stage."""
    tied: torch.Tensor | None = model.output_weight()
    weight: torch.Tensor = model.output_layer.weight if tied is None else tied
    return weight


def log_probs(
    model: Any, hidden: torch.Tensor, targets: torch.Tensor, vocab_size: int, temperature: float
) -> torch.Tensor:
    """Return the log-prob of each target token: [R] float32, in nats, at the sampling temperature.

    hidden: [R, 1, hidden], the final states at the logit positions. targets: [R] int64. Every
    tensor-parallel rank must call it; all get the same result."""
    return log_probs_and_entropy(
        model, hidden, targets, vocab_size, temperature, with_entropy=False
    )[0]


def top_log_probs(
    model: Any,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    temperature: float,
    k: int,
) -> torch.Tensor:
    """Return the log-prob of each target, the numbers of the k most probable tokens, and their
    log-probs: [R, 1 + 2 k] float32, without a gradient. The arguments are those of log_probs, and
    vocab_size is at least k: further tokens have probability 0."""
    group = model.pg_collection.tp
    weight = output_weight(model)
    columns = weight.shape[0]
    first = group.rank() * columns
    local, is_local = _local(targets, columns, group)
    rows = torch.zeros(4, len(targets), dtype=torch.float32, device=hidden.device)
    best = torch.zeros(2, len(targets), min(k, columns), device=hidden.device)
    num_tokens = max(0, min(columns, vocab_size - first))
    logits = _Logits(hidden[:, 0], weight, num_tokens, temperature)
    for part in logits.parts:
        x = logits.scaled(part)
        best[1, part], tokens = x.topk(best.shape[2])
        best[0, part] = tokens + first
        row_statistics(x, local[part], rows[:, part], with_entropy=False)
    target_x, log_z, _ = _over_ranks(rows, is_local, group)
    if group.size() > 1 and k > 0:
        of_ranks = best.new_empty(group.size() * 2, *best.shape[1:])
        dist.all_gather_into_tensor(of_ranks, best, group=group)
        best = of_ranks.unflatten(0, (group.size(), 2)).permute(1, 2, 0, 3).flatten(2)
    top_x, places = best[1].topk(k)
    log_z = log_z[:, None]
    return torch.cat([target_x[:, None] - log_z, best[0].gather(1, places), top_x - log_z], 1)


def log_probs_and_entropy(
    model: Any,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    temperature: float,
    others: torch.Tensor | None = None,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Return log_probs and the entropy of the distribution of each target: two [R] float32; and
    with further tokens `others` [R, k] int64 their log-probs at each position: [R, k] float32. The
    backward pass computes no gradient of the entropy where none is needed. Without with_entropy the
    entropy is not computed."""
    *out, of_others = _VocabParallelLogProbs.apply(
        hidden[:, 0],
        output_weight(model),
        targets,
        vocab_size,
        temperature,
        model.pg_collection.tp,
        with_entropy,
        others,
    )
    return (*out,) if others is None else (*out, of_others)


Head = Callable[[Any, torch.Tensor, MicroBatch], torch.Tensor]
"""(model, states [r, 1, hidden], micro-batch) -> [R] or [R, columns] float32 (MicroBatch): of all
context-parallel ranks."""


def log_prob_head(vocab_size: int, temperature: float) -> Head:
    """Return the head that gives the log-prob of each response token."""

    def head(model: object, states: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        return micro.all_results(log_probs(model, states, micro.targets, vocab_size, temperature))

    return head


def teacher_head(vocab_size: int, temperature: float, k: int) -> Head:
    """Return the head that gives top_log_probs of each response token. vocab_size: the tokens that
    teacher and student have in common."""

    def head(model: object, states: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        return micro.all_results(
            top_log_probs(model, states, micro.targets, vocab_size, temperature, k)
        )

    return head


def value_head(model: Any, states: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Return the critic's value of each state, as a Head does."""
    return micro.all_results(model.output_layer(states))
