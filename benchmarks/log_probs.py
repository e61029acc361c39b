"""Log-probs from hidden states in chunks of tokens (rlhf_mc/models/heads.py) against full logits:
time and peak additional memory. One process, on the CPU:

    OMP_NUM_THREADS=2 python benchmarks/log_probs.py
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from rlhf_mc.models import heads


def full_logits(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return log-probs [tokens] by log-softmax over [tokens, vocabulary] and the target's
    column."""
    logits = torch.nn.functional.linear(hidden, weight).float() / temperature
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def peak_bytes(run: Callable[[], None]) -> int:
    """Return the peak resident memory of `run`, less the memory that is resident before it."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    run()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--chunk-logits", type=int, nargs="+", default=[1 << 23, heads.CHUNK_LOGITS, 1 << 28]
    )
    parser.add_argument(
        "--entropy", action="store_true", help="compute the entropy too, as an actor's update does"
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, generator=draw).to(dtype)
    weight = (0.05 * torch.randn(args.vocab, args.hidden, generator=draw)).to(dtype)
    targets = torch.randint(args.vocab, (args.tokens,), generator=draw)
    upstream = torch.randn(args.tokens, generator=draw)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = SimpleNamespace(
        output_weight=lambda: None,
        output_layer=SimpleNamespace(weight=weight),
        pg_collection=SimpleNamespace(tp=dist.group.WORLD),
    )

    def measure(chunk: int | None, backward: bool) -> tuple[float, int]:
        def run() -> None:
            with torch.set_grad_enabled(backward):
                if chunk is None:
                    out = full_logits(hidden, weight, targets, 0.7)
                else:
                    heads.CHUNK_LOGITS = chunk
                    head = heads.log_probs_and_entropy if args.entropy else heads.log_probs
                    result = head(model, hidden[:, None], targets, args.vocab, 0.7)
                    out = result[0] if args.entropy else result
                if backward:
                    out.backward(upstream)

        for tensor in (hidden, weight):
            tensor.grad = None
            tensor.requires_grad_(backward)
        start = time.perf_counter()
        peak = peak_bytes(run)
        return time.perf_counter() - start, peak

    variants: list[int | None] = [None, *args.chunk_logits]
    print(
        f"{args.tokens} tokens, hidden {args.hidden}, vocabulary {args.vocab}, {args.dtype}, ",
        end="",
    )
    print(f"{torch.get_num_threads()} threads; medians of {args.rounds} rounds, variants in turn")
    print(
        f"weight gradient {args.vocab * args.hidden * dtype.itemsize >> 20} MiB (in forward + "
        "backward)"
    )
    print(f"{'':>28} {'forward':>22} {'forward + backward':>22}")
    results: dict[tuple[int | None, bool], list[tuple[float, int]]] = {}
    for _ in range(args.rounds):
        for variant in variants:
            for backward in (False, True):
                results.setdefault((variant, backward), []).append(measure(variant, backward))
    for variant in variants:
        name = (
            "full logits"
            if variant is None
            else f"{variant >> 20} Mi logits, {max(1, variant // args.vocab)} tokens"
        )
        cells = []
        for backward in (False, True):
            seconds, peak = (
                statistics.median(column)
                for column in zip(*results[variant, backward], strict=True)
            )
            cells.append(f"{seconds:>8.2f} s {int(peak) >> 20:>7} MiB")
        print(f"{name:>28} {cells[0]:>22} {cells[1]:>22}")


if __name__ == "__main__":
    main()
