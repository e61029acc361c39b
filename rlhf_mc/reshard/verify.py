"""Verification of an executed plan: checksums of every block at its source and at its destination are compared.

Runs after execute.py with the same plan and tensors. Nothing here writes to weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.execute import aliased_views, by_peer, destination, source_blocks
from rlhf_mc.reshard.transfers import RankPlan, Transfer
from rlhf_mc.reshard.transport import message_device, send_and_receive
from rlhf_mc.topology.consensus import gather_objects

CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}
"""By type of device, the bytes that are summed at a time, a multiple of 8. The extra memory is at most four times that:
a contiguous copy, one that is padded or aligned, weights, mixed words. A chunk fits into a CPU's cache; on a GPU the
ten kernels of a chunk should take longer than their launches."""


@torch.no_grad()
def verify(
    plan: RankPlan,
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Raise UserError, the same on every rank, if any block of a target differs from its source in any bit; the message
    names the first such block. Collective. Aliased tensors must share the source's storage. Source and target must
    have one type, or the target is compared as `dtype`, the source's."""
    failure = _first_difference(plan, source, target, group, dtype)
    failures = [failure] if group is None else gather_objects(failure, group)
    if first := next((f for f in failures if f), None):
        raise UserError(f"reshard.verify: {first}; {sum(f is not None for f in failures)} rank(s) have such blocks")


def _first_difference(
    plan: RankPlan,
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
    dtype: torch.dtype | None,
) -> str | None:
    for name, view in aliased_views(plan, source).items():
        if target[name].data_ptr() != view.data_ptr():
            return f"{name} on rank {plan.rank} does not alias its source, but the plan says that it does"
    received = [] if group is None else [t for _, receives in plan.buckets for t in receives]
    wanted = [_checksums(source_blocks(t, source, target) for t in plan.copies)]
    if group is not None:
        wanted.append(_checksums_of_senders(plan, source, target, received, group))
    written = [*plan.copies, *received]
    got = _checksums([block.to(dtype or block.dtype) for block in destination(t, target)] for t in written)
    different = (torch.cat(wanted) != got).any(dim=1).nonzero().flatten().tolist()
    if not different:
        return None
    return f"{_describe(written[different[0]])} ({len(different)} of the rank's {len(written)} blocks differ)"


def _checksums_of_senders(
    plan: RankPlan,
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    received: Sequence[Transfer],
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return the senders' checksums of the blocks that this rank received: [blocks, 2], on the CPU. Collective."""
    device = message_device(group)
    leaving = by_peer([t for sends, _ in plan.buckets for t in sends], lambda t: t.dst_rank)
    arriving = by_peer(received, lambda t: t.src_rank)
    outgoing = {p: _checksums(source_blocks(t, source, target) for t in ts).to(device) for p, ts in leaving.items()}
    incoming = {p: torch.empty(len(ts), 2, dtype=torch.int64, device=device) for p, ts in arriving.items()}
    send_and_receive(outgoing, incoming, group)
    rows = {p: iter(sums.cpu()) for p, sums in incoming.items()}
    return _stacked([next(rows[t.src_rank]) for t in received])


def _checksums(transfers: Iterable[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Return the checksum of each transfer's blocks: [transfers, 2], on the CPU, copied there at once."""
    return _stacked([checksum(blocks) for blocks in transfers]).cpu()


def _stacked(checksums: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([*checksums]) if checksums else torch.empty(0, 2, dtype=torch.int64)


def checksum(blocks: Sequence[torch.Tensor], chunk_bytes: int | None = None) -> torch.Tensor:
    """Return two sums over the bits of the elements of all blocks [n, rows, ...], taken eight bytes at a time as an
    integer, the second weighted by position, modulo 2^64: [2] int64, on the blocks' device. Lost, changed or reordered
    elements change one of them.

    The second sum is of mixed words: the product with a multiple of 2^k has lost the first k bits of a word, so these
    bits are added to its others.

    chunk_bytes: bytes summed at a time, which do not change the result; None: as CHUNK_BYTES says."""
    device = blocks[0].device
    total = torch.zeros(2, dtype=torch.int64, device=device)
    weights = torch.arange(0, device=device)
    start = 0
    for words in _words(blocks, chunk_bytes or CHUNK_BYTES[device.type]):
        if len(words) > len(weights):
            weights = torch.arange(1, 1 + len(words), device=device)
        total[0] += words.sum()
        mixed = words.bitwise_right_shift(33).add_(words)
        # Not torch.dot: it has no CUDA kernel for int64.
        total[1] += start * mixed.sum() + mixed.mul_(weights[: len(words)]).sum()
        start += len(words)
    return total


def _words(blocks: Sequence[torch.Tensor], chunk_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the bytes of the elements in order, as int64 vectors of at most chunk_bytes. Each block is padded at its
    end to complete words."""
    row_bytes = max(1, blocks[0][0, 0].numel() * blocks[0].element_size())
    whole = 8 // math.gcd(8, row_bytes)  # rows that are complete words together: no chunk but a block's last is padded
    for block in itertools.chain.from_iterable(blocks):
        for rows in block.split(max(1, chunk_bytes // (row_bytes * whole)) * whole):
            for part in rows.contiguous().view(-1).view(torch.uint8).split(chunk_bytes):
                if len(part) % 8 or part.data_ptr() % 8:
                    part = torch.cat([part, part.new_zeros(-len(part) % 8)])
                yield part.view(torch.int64)


def _describe(transfer: Transfer) -> str:
    def where(local: str, offset: Sequence[int], step: int) -> str:
        lead = len(offset) - len(transfer.extent)
        ranges = [f"{at}:{at + size}" for at, size in zip(offset[lead:], transfer.extent, strict=True)]
        repeated = f" and {transfer.count - 1} more at every {step} rows" if transfer.count > 1 else ""
        return f"{local}[{', '.join([*map(str, offset[:lead]), *ranges])}]{repeated}"

    target = where(transfer.dst_local, transfer.dst_offset, transfer.dst_step)
    source = where(transfer.src_local, transfer.src_offset, transfer.src_step)
    return f"{target} on rank {transfer.dst_rank} differs from {source} on rank {transfer.src_rank}"
