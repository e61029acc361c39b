"""Measure where the log-prob head's time goes at small hidden sizes. The present head (A) and the
one
with two Triton row kernels (B, head_kernels.py; left out without Triton), alternating, with 152k
columns: forward and backward apart, as an update has them, beside each product alone and the reads
and writes of the logits, counted.

    python benchmarks/gpu/head.py
    python benchmarks/gpu/head.py --hidden 32 --columns 1000 --tokens 64

Bounds are printed first: the products at the data sheet's rate, and one read or write of the logits
at twice the measured rate of a copy. docs/decisions/0021-the-log-prob-head.md says what the figures
decide.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
sys.path.append(str(Path(__file__).resolve().parent))

from gpu_parts import measure

from rlhf_mc import platform
from rlhf_mc.models import heads

try:
    import head_kernels
except ModuleNotFoundError:
    head_kernels = None

TEMPERATURE = 0.7
SPLITS = (4, 16)
"""Numbers of parts of the columns in which the hidden gradient is multiplied at a time, and then
added."""


class LogitPasses(TorchDispatchMode):
    """Counts reads and writes of tensors of the shape of a chunk of logits, in sizes of all float32
    logits."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        tokens = len(inputs.states)
        rows = {inputs.chunk(), tokens % inputs.chunk() or inputs.chunk()}
        self._shapes = {(n, inputs.columns) for n in rows} | {(inputs.columns, n) for n in rows}
        self._logits = tokens * inputs.columns
        self.passes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").split(".")[0]
        if name not in (
            "t",
            "slice",
            "view",
            "alias",
            "empty",
            "empty_like",
            "gather",
            "scatter_add_",
        ):
            inputs = list(args)
            if name == "addmm" and (kwargs or {}).get("beta") == 0.0:
                inputs = inputs[1:]  # the sum's other part is not read
            moved = [x for x in (*inputs, result) if isinstance(x, torch.Tensor)]
            large = [x.nbytes for x in moved if tuple(x.shape) in self._shapes]
            self.passes += sum(large) / (4 * self._logits)
        return result


class Inputs:
    """The output layer alone, on one rank: random states, weight, targets, and gradients of the
    log-probs."""

    def __init__(self, hidden: int, columns: int, tokens: int) -> None:
        on_device = {"device": platform.device()}
        draw = torch.Generator(**on_device).manual_seed(1)
        dtype = torch.bfloat16 if platform.use_cuda() else torch.float32
        self.columns = columns
        states = torch.randn(tokens, hidden, generator=draw, **on_device).to(dtype)
        weight = (
            torch.randn(columns, hidden, generator=draw, **on_device)
            .mul_(2 / hidden**0.5)
            .to(dtype)
        )
        self.states = states.requires_grad_()
        self.weight = weight.requires_grad_()
        self.targets = torch.randint(columns, (tokens,), generator=draw, **on_device)
        self.upstream = torch.randn(tokens, generator=draw, **on_device)

    def results(self, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies by rlhf_mc.models.heads."""
        model = SimpleNamespace(
            output_weight=lambda: self.weight, pg_collection=SimpleNamespace(tp=dist.group.WORLD)
        )
        inputs = (model, self.states[:, None], self.targets, self.columns, TEMPERATURE)
        return heads.log_probs_and_entropy(*inputs, with_entropy=with_entropy)

    def backward(self, log_probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients of states and weight. The graph stays."""
        return torch.autograd.grad(
            log_probs, (self.states, self.weight), self.upstream, retain_graph=True
        )

    def chunk(self) -> int:
        """Return the tokens of a chunk of logits."""
        limit = heads.CHUNK_LOGITS * (heads.GPU_CHUNKS if platform.use_cuda() else 1)
        return max(1, min(len(self.states), limit // self.columns))


@contextlib.contextmanager
def variant(kernels: ModuleType | SimpleNamespace | None) -> Iterator[None]:
    """Let the head use these row functions; None: its own."""
    with contextlib.ExitStack() as stack:
        for name in ("row_statistics", "row_gradient") if kernels else ():
            stack.enter_context(mock.patch.object(heads, name, getattr(kernels, name)))
        yield


def count_passes(inputs: Inputs, action: Callable[[], object], kernels: ModuleType | None) -> float:
    """Return the reads and writes of all logits in the action. A kernel says its own."""
    counter = LogitPasses(inputs)

    def unseen(kernel: Callable[..., Any], passes: float) -> Callable[..., Any]:
        def run(x: torch.Tensor, *rest: Any) -> Any:
            counter.passes += passes * len(x) / len(inputs.states)
            with _disable_current_modes():
                return kernel(x, *rest)

        return run

    counted = kernels and SimpleNamespace(
        row_statistics=unseen(kernels.row_statistics, kernels.STATISTICS_PASSES),
        row_gradient=unseen(kernels.row_gradient, kernels.GRADIENT_PASSES),
    )
    with torch.autograd.set_multithreading_enabled(False), variant(counted), counter:
        action()
    return counter.passes


def products(inputs: Inputs) -> dict[str, Callable[[], object]]:
    """Return each product of the head over all chunks: name -> action."""
    rows = inputs.chunk()
    states = inputs.states.detach()
    weight = inputs.weight.detach()
    parts = [slice(start, start + rows) for start in range(0, len(states), rows)]
    wide = torch.empty(rows, inputs.columns, dtype=torch.float32, device=states.device)
    narrow = torch.randn(rows, inputs.columns, device=states.device).to(weight.dtype)
    sums = torch.zeros_like(weight, dtype=torch.float32)

    def each(action: Callable[[int, slice], object]) -> Callable[[], None]:
        def run() -> None:
            for part in parts:
                action(len(states[part]), part)

        return run

    def split(number: int, count: int) -> object:
        # what is left over, less than `number` columns, is left out
        size = inputs.columns // number
        of_parts = narrow[:count, : number * size].unflatten(1, (number, size)).transpose(0, 1)
        return (
            torch.bmm(of_parts, weight[: number * size].unflatten(0, (number, size))).float().sum(0)
        )

    add = heads._add_product
    actions = {
        "logits": each(
            lambda n, part: add(wide[:n], states[part], weight.t(), beta=0.0, alpha=1 / TEMPERATURE)
        ),
        "hidden gradient": each(lambda n, _: torch.mm(narrow[:n], weight)),
        "weight gradient": each(lambda n, part: add(sums, narrow[:n].t(), states[part], beta=1.0)),
    }
    for number in SPLITS:
        actions[f"hidden gradient in {number}"] = each(lambda n, _, number=number: split(number, n))
    return actions


def report(
    hidden: int, columns: int, tokens: int, rounds: int, copy: float
) -> dict[str, dict[str, float]]:
    """Print the bounds and the figures of a hidden size. Return each variant's figures."""
    inputs = Inputs(hidden, columns, tokens)
    flops = 2.0 * tokens * hidden * columns
    logits = 4.0 * tokens * columns
    one_pass = logits / (2 * copy)
    peak = measure.data_sheet_flops() or measure.matmul_rate(512, inputs.weight.dtype)
    print(
        f"hidden {hidden}, {tokens} tokens in chunks of {inputs.chunk()}, {columns} columns, "
        f"{inputs.weight.dtype}"
    )
    print(
        f"  bounds: a product {1e3 * flops / peak:.2f} ms, a read or write of the logits "
        f"{1e3 * one_pass:.2f} ms"
    )
    alone = {name: measure.seconds(action, rounds) for name, action in products(inputs).items()}
    for name, seconds in alone.items():
        print(f"  {name:<22} {1e3 * seconds:8.2f} ms  {flops / seconds / peak:5.2f} of the peak")

    variants = {"A": None} | ({"B": head_kernels} if head_kernels else {})
    figures: dict[str, dict[str, float]] = {name: {} for name in variants}
    results = {}
    for name, kernels in variants.items():
        with variant(kernels):
            log_probs, entropy = inputs.results(True)
            results[name] = (log_probs.detach(), entropy.detach(), *inputs.backward(log_probs))
        actions = {
            "forward": lambda: inputs.results(False),
            "forward, entropy": lambda: inputs.results(True),
            "backward": lambda x=log_probs: inputs.backward(x),
        }
        for key, action in actions.items():
            figures[name][f"{key} passes"] = count_passes(inputs, action, kernels)
    times: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    for _ in range(rounds):
        for name, kernels in variants.items():
            with variant(kernels):
                log_probs = inputs.results(True)[0]
                with torch.no_grad():
                    seconds = measure.seconds(lambda: inputs.results(False), 1)
                    times[name].setdefault("forward", []).append(seconds)
                    seconds = measure.seconds(lambda: inputs.results(True), 1)
                    times[name].setdefault("forward, entropy", []).append(seconds)
                seconds = measure.seconds(lambda x=log_probs: inputs.backward(x), 1)
                times[name].setdefault("backward", []).append(seconds)
    back = alone["logits"] + alone["hidden gradient"] + alone["weight gradient"]
    for key, of_products in (
        ("forward", alone["logits"]),
        ("forward, entropy", alone["logits"]),
        ("backward", back),
    ):
        for name in variants:
            seconds = sorted(times[name][key])[rounds // 2]
            passes = figures[name][f"{key} passes"]
            figures[name][f"{key} seconds"] = seconds
            rest = 1e3 * (seconds - of_products - passes * one_pass)
            print(
                f"  {key:<17} {name}  {1e3 * seconds:8.2f} ms = products {1e3 * of_products:.2f}"
                f" + {passes:.1f} passes {1e3 * passes * one_pass:.2f} + unexplained {rest:.2f}"
            )
    for name in list(variants)[1:]:
        errors = [
            float((b - a).float().abs().max())
            for a, b in zip(results["A"], results[name], strict=True)
        ]
        keys = ("log-probs", "entropy", "hidden gradient", "weight gradient")
        figures[name] |= {f"{key} error": error for key, error in zip(keys, errors, strict=True)}
        print(
            f"  {name} - A, at most: "
            f"{', '.join(f'{k} {e:.1e}' for k, e in zip(keys, errors, strict=True))}"
        )
    if platform.use_cuda():
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            inputs.backward(inputs.results(True)[0])
            platform.synchronize()
        print(
            recorded.key_averages().table(
                sort_by="self_device_time_total", row_limit=14, max_name_column_width=90
            )
        )
    return figures


def main(argv: Sequence[str]) -> dict[int, dict[str, dict[str, float]]]:
    """Return each hidden size's figures by variant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[896, 3584, 5120])
    parser.add_argument("--columns", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--copy-bytes", type=int, default=1 << 30, help="size of the copy that is measured"
    )
    args = parser.parse_args(argv)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if head_kernels is None:
        print("B is left out: Triton is not installed")
    try:
        copy = measure.device_copy_rate(args.copy_bytes)
        return {
            size: report(size, args.columns, args.tokens, args.rounds, copy) for size in args.hidden
        }
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
