"""Verification of an executed plan: checksums of every block at its source and at its destination
are compared.

Runs after execute.py with the same plan and tensors. Nothing here writes to weights.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.execute import Blocks, Sides, aliased_views, by_peer
from rlhf_mc.reshard.transfers import RankPlan, Transfer
from rlhf_mc.reshard.transport import message_device, send_and_receive
from rlhf_mc.topology.consensus import gather_objects

CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}
"""By type of device, the bytes that are summed at a time, a multiple of 8. The extra memory is at
most four times that: a contiguous copy, one that is padded or aligned, weights, mixed words. A
chunk fits into a CPU's cache; on a GPU the ten kernels of a chunk should take longer than their
launches."""
_READ_BYTES = 1 << 30
"""Bytes of blocks that are read before they are summed."""


@torch.no_grad()
def verify(
    plan: RankPlan,
    source: Mapping[str, Any],
    target: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Raise UserError, the same on every rank, if any block of a target differs from its source in
    any bit; the message names the first such block. Collective. Aliased tensors must share the
    source's storage. Source and target must have one type, or the target is compared as `dtype`,
    the source's."""
    failure = _first_difference(plan, source, target, group, dtype)
    failures = [failure] if group is None else gather_objects(failure, group)
    if first := next((f for f in failures if f), None):
        raise UserError(
            f"reshard.verify: {first}; {sum(f is not None for f in failures)} rank(s) have such "
            "blocks"
        )


def _first_difference(
    plan: RankPlan,
    source: Mapping[str, Any],
    target: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
    dtype: torch.dtype | None,
) -> str | None:
    received = [] if group is None else [t for _, receives in plan.buckets for t in receives]
    sides = Sides(source, target)
    wanted = [_checksums(plan.copies, sides.source_blocks)]
    if group is not None:
        wanted.append(_checksums_of_senders(plan, sides, received, group))
    for name, view in aliased_views(plan, source).items():
        if target[name].data_ptr() != view.data_ptr():
            return f"{name} on rank {plan.rank} does not alias its source, as the plan says"
    written = [*plan.copies, *received]
    got = _checksums(written, sides.destination, dtype)
    different = (torch.cat(wanted) != got).any(dim=1).nonzero().flatten().tolist()
    if not different:
        return None
    return (
        f"{_describe(written[different[0]])} ({len(different)} of the rank's {len(written)} blocks "
        "differ)"
    )


def _checksums_of_senders(
    plan: RankPlan, sides: Sides, received: Sequence[Transfer], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the senders' checksums of the blocks that this rank received: [blocks, 2], on the CPU.
    Collective."""
    device = message_device(group)
    leaving = by_peer([t for sends, _ in plan.buckets for t in sends], lambda t: t.dst_rank)
    arriving = by_peer(received, lambda t: t.src_rank)
    outgoing = {p: _checksums(ts, sides.source_blocks).to(device) for p, ts in leaving.items()}
    incoming = {
        p: torch.empty(len(ts), 2, dtype=torch.int64, device=device) for p, ts in arriving.items()
    }
    send_and_receive(outgoing, incoming, group)
    rows = {p: iter(sums.cpu()) for p, sums in incoming.items()}
    sums = [next(rows[t.src_rank]) for t in received]
    return torch.stack(sums) if sums else checksums([])


def _checksums(
    transfers: Sequence[Transfer],
    blocks: Callable[[Transfer], list[torch.Tensor]],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the `checksums` of the blocks of transfers, which are read a part at a time: those of
    merged weights are computed."""
    sums = [torch.empty(0, 2, dtype=torch.int64)]
    part: list[list[torch.Tensor]] = []
    num_bytes = 0
    for number, transfer in enumerate(transfers, 1):
        part.append(blocks(transfer))
        num_bytes += sum(block.nbytes for block in part[-1])
        if num_bytes >= _READ_BYTES or number == len(transfers):
            sums.append(checksums(part, dtype))
            part = []
            num_bytes = 0
    return torch.cat(sums)


def checksums(
    transfers: Sequence[Sequence[torch.Tensor]],
    dtype: torch.dtype | None = None,
    chunk_bytes: int | None = None,
) -> torch.Tensor:
    """Return for each transfer the `checksum` of its blocks, cast to `dtype` if given: [transfers,
    2], on the CPU, copied there at once. Transfers of one size are packed and summed together, as
    many as chunk_bytes have room for."""
    if not transfers:
        return torch.empty(0, 2, dtype=torch.int64)
    device = transfers[0][0].device
    limit = chunk_bytes or CHUNK_BYTES[device.type]
    by_size: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
    for number, blocks in enumerate(transfers):
        by_size[sum(block.numel() for block in blocks), dtype or blocks[0].dtype].append(number)
    rows_of_sums = []
    for (numel, kind), numbers in by_size.items():
        fit = limit // (numel * kind.itemsize)
        if fit == 0:
            rows_of_sums += [
                checksum([block.to(kind) for block in transfers[number]], limit)[None]
                for number in numbers
            ]
            continue
        for start in range(0, len(numbers), fit):
            chosen = numbers[start : start + fit]
            flat = torch.empty(len(chosen) * numel, dtype=kind, device=device)
            Blocks([[block for number in chosen for block in transfers[number]]], kind).pack([flat])
            rows = flat.view(len(chosen), numel).view(torch.uint8)
            if rows.shape[1] % 8:
                rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8))
            rows_of_sums.append(_sums(rows.view(torch.int64), 0))
    sums = torch.empty(len(transfers), 2, dtype=torch.int64)
    sums[list(itertools.chain.from_iterable(by_size.values()))] = torch.cat(rows_of_sums).cpu()
    return sums


def checksum(blocks: Sequence[torch.Tensor], chunk_bytes: int | None = None) -> torch.Tensor:
    """Return two sums over the bits of the elements of all blocks, one after another, taken eight
    bytes at a time as an integer, the second weighted by position, modulo 2^64: [2] int64, on the
    blocks' device. Lost, changed or reordered elements change one of them.

    The second sum is of mixed words: the product with a multiple of 2^k has lost the first k bits
    of a word, so these bits are added to its others.

    chunk_bytes: bytes summed at a time, which do not change the result; None: as CHUNK_BYTES
    says."""
    device = blocks[0].device
    total = torch.zeros(2, dtype=torch.int64, device=device)
    start = 0
    for words in _words(blocks, chunk_bytes or CHUNK_BYTES[device.type]):
        total += _sums(words[None], start)[0]
        start += len(words)
    return total


def _sums(words: torch.Tensor, start: int) -> torch.Tensor:
    """Return the two sums of each row of words [rows, n], the first of which is at position
    `start`: [rows, 2]."""
    weights = torch.arange(start + 1, start + 1 + words.shape[1], device=words.device)
    mixed = words.bitwise_right_shift(33).add_(words)
    # Not torch.mv: it has no CUDA kernel for int64.
    return torch.stack([words.sum(1), mixed.mul_(weights).sum(1)], dim=1)


def _words(blocks: Sequence[torch.Tensor], chunk_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the bytes of the elements in order, as int64 vectors of about chunk_bytes, padded to a
    complete word at the end."""
    rest = torch.empty(0, dtype=torch.uint8, device=blocks[0].device)
    for piece in itertools.chain.from_iterable(_pieces(block, chunk_bytes) for block in blocks):
        part = piece.contiguous().view(-1).view(torch.uint8)
        if len(rest) or part.data_ptr() % 8:
            part = torch.cat([rest, part])
        end = len(part) // 8 * 8
        rest = part[end:]
        yield part[:end].view(torch.int64)
    yield torch.nn.functional.pad(rest, (0, -len(rest) % 8)).view(torch.int64)


def _pieces(block: torch.Tensor, num_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the parts of a block, in order, as consecutive ranges of a dimension, of at most
    num_bytes each."""
    row_bytes = block[0].nbytes
    if row_bytes <= num_bytes:
        yield from block.split(num_bytes // row_bytes)
    else:
        for part in block.unbind():
            yield from _pieces(part, num_bytes)


def _describe(transfer: Transfer) -> str:
    def where(local: str, offset: Sequence[int], step: int) -> str:
        lead = len(offset) - len(transfer.extent)
        ranges = [
            f"{start}:{start + size}"
            for start, size in zip(offset[lead:], transfer.extent, strict=True)
        ]
        repeated = (
            f" and {transfer.count - 1} more at every {step} rows" if transfer.count > 1 else ""
        )
        return f"{local}[{', '.join([*map(str, offset[:lead]), *ranges])}]{repeated}"

    target = where(transfer.dst_local, transfer.dst_offset, transfer.dst_step)
    source = where(transfer.src_local, transfer.src_offset, transfer.src_step)
    return f"{target} on rank {transfer.dst_rank} differs from {source} on rank {transfer.src_rank}"
