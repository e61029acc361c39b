"""Common code of the comparisons with other trainers (vs_trl.py, vs_verl.py): the work of
workload.py, rlhf_mc on it, and the tables.

    torchrun peers.py CONFIG trainer.default_local_dir=DIR [section.key=value ...]  # rlhf_mc alone

Rank 0 prints the seconds of each step, by phase. A program is started anew in each round, and its
first two steps are not counted. A step is all that happens from one step's end to the next one's,
with metrics and their files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PHASES = {
    "generation": ("gen", "update_weights"),
    "passes": ("old_log_prob", "ref", "values", "sum_log_probs"),
    "updates": ("update_critic", "update_actor"),
}
"""verl's names of timers, which are rlhf_mc's too; `sum_log_probs` is rlhf_mc's alone."""
WARM_UP = 2
"""Steps of a round that are not counted."""
Steps = list[dict[str, float]]
"""Seconds of each counted step: the whole, and its phases where they are known."""


@dataclass(frozen=True)
class Cell:
    """One cell of a comparison: its work, as files, and its processes."""

    directory: Path
    """Has model/, train.parquet, reward.py and config.yaml, the config of rlhf_mc."""
    prompt_ids: list[list[int]]
    num_prompts: int
    longest: int
    """Tokens at which a response is truncated."""
    has_end: bool
    token_budget: int
    """Tokens of a micro-batch, at most."""
    processes: int
    num_steps: int
    """Steps of a run, with those that are not counted."""
    seconds: int
    """At most, for one program."""


Program = Callable[[Cell, Path], Steps]
"""Runs a trainer on a cell, with a new directory for its output. No steps: it was stopped."""


def parser(
    description: str | None, lengths: Sequence[str] = ("equal", "long-tailed")
) -> argparse.ArgumentParser:
    """Return a parser of the settings that each comparison has. lengths: the distributions that it
    can have."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--size", default="0.7M", help="0.7M or 26M parameters")
    result.add_argument("--prompts", type=int, nargs="+", default=[64, 256])
    result.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    result.add_argument("--lengths", nargs="+", choices=lengths, default=list(lengths))
    result.add_argument("--rounds", type=int, default=2)
    result.add_argument("--steps", type=int, default=6, help="counted steps of a round")
    result.add_argument("--seconds", type=int, default=1800, help="at most, for one program")
    return result


def compare(args: argparse.Namespace, programs: Mapping[str, Program]) -> None:
    """Measure each cell and print its table. The last program is the one that the others are
    compared with."""
    with tempfile.TemporaryDirectory() as directory:
        for lengths, prompts, processes in itertools.product(
            args.lengths, args.prompts, args.processes
        ):
            cell = make_cell(
                args,
                Path(directory) / f"{lengths}_{prompts}_{processes}",
                lengths,
                prompts,
                processes,
            )
            steps: dict[str, Steps] = {name: [] for name in programs}
            for number, (index, name) in itertools.product(range(args.rounds), enumerate(programs)):
                output = cell.directory / f"round_{number}_{index}"
                output.mkdir()
                steps[name] += programs[name](cell, output)
            print(
                f"\n{args.size} parameters, {prompts} prompts, {lengths} lengths, {processes} "
                "process(es)"
            )
            print_table(steps, args.seconds)


def print_table(steps_by_program: Mapping[str, Steps], seconds: int) -> None:
    """Print one row for each program."""
    first = max(len("seconds a step, median"), *(len(name) + 2 for name in steps_by_program))
    last, reference = list(steps_by_program.items())[-1]
    head = ["whole", "min", "gen", "passes", "updates", f"{last}/it"]
    widths = [max(8, len(cell)) for cell in head]
    print(f"{'seconds a step, median':>{first}} {' '.join(map(str.rjust, head, widths))}")
    for name, steps in steps_by_program.items():
        if not steps:
            print(f"{name:>{first}} over {seconds} s, stopped")
            continue
        median = statistics.median(step["whole"] for step in steps)
        cells = [median, min(step["whole"] for step in steps)]
        cells += [
            statistics.median(step[phase] for step in steps) if phase in steps[0] else None
            for phase in PHASES
        ]
        cells.append(
            statistics.median(step["whole"] for step in reference) / median if reference else None
        )
        row = ["" if cell is None else f"{cell:.2f}" for cell in cells]
        print(f"{name:>{first}} {' '.join(map(str.rjust, row, widths))}", flush=True)


def make_cell(
    args: argparse.Namespace, directory: Path, lengths: str, prompts: int, processes: int
) -> Cell:
    """Write model, prompts, reward function and rlhf_mc's config."""
    directory.mkdir()
    # Imported there: torch in this process would take memory from those that are measured.
    code = (
        "import json, sys; from pathlib import Path; import workload as w;d, size, lengths, "
        "prompts, steps = Path(sys.argv[1]), *sys.argv[2:];l = {'equal': w.EQUAL, 'long-tailed': "
        "w.LONG_TAILED}[lengths];w.make_workload(d, w.SIZES[size], l, int(prompts), "
        "trainer={'total_training_steps': int(steps)});from transformers import AutoTokenizer; t = "
        "AutoTokenizer.from_pretrained(d / 'model');chats = [[{'role': 'user', 'content': q.text}] "
        "for q in w.questions()];ids = [t(c, add_special_tokens=False)['input_ids'] for c in "
        "t.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)];(d / "
        "'prompts.json').write_text(json.dumps([ids, l.longest, l.end_probability > 0, "
        "w.TOKEN_BUDGET]))"
    )
    num_steps = WARM_UP + args.steps
    arguments = [str(directory), args.size, lengths, str(prompts), str(num_steps)]
    run(
        [sys.executable, "-c", code, *arguments],
        args.seconds,
        PYTHONPATH=f"{ROOT}:{ROOT / 'benchmarks'}",
    )
    prompt_ids, longest, has_end, token_budget = json.loads(
        (directory / "prompts.json").read_text()
    )
    return Cell(
        directory,
        prompt_ids,
        prompts,
        longest,
        has_end,
        token_budget,
        processes,
        num_steps,
        args.seconds,
    )


def own(*overrides: str) -> Program:
    """Return the program that runs rlhf_mc with these settings."""

    def steps(cell: Cell, output: Path) -> Steps:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [
            f"--nproc-per-node={cell.processes}",
            __file__,
            str(cell.directory / "config.yaml"),
        ]
        command += [f"trainer.default_local_dir={output}", *overrides]
        out = run(command, cell.seconds, PYTHONPATH=str(ROOT))
        if out is None:
            return []
        return json.loads(
            next(line for line in reversed(out.splitlines()) if line.startswith("[{"))
        )[WARM_UP:]

    return steps


def train(config: str, overrides: list[str]) -> None:
    """Run rlhf_mc in this process. On rank 0 print the seconds of each step, by phase."""
    from rlhf_mc.api import Trainer

    steps = []
    last = time.perf_counter()
    for step in Trainer(config, overrides):
        now = time.perf_counter()
        log = json.loads(
            (Path(overrides[0].partition("=")[2]) / "metrics.jsonl").read_text().splitlines()[-1]
        )
        assert log["training/global_step"] == step.number
        steps.append({"whole": now - last, **phases(log)})
        last = time.perf_counter()
    if os.environ["RANK"] == "0":
        print(json.dumps(steps), flush=True)


def phases(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase, of the metrics of a step."""
    return {
        name: sum(metrics.get(f"timing_s/{timer}", 0.0) for timer in timers)
        for name, timers in PHASES.items()
    }


def run(command: list[str], seconds: int, **environment: Any) -> str | None:
    """Return the standard output of a command, or None if it takes longer than this. Exit with its
    last lines if it fails."""
    # Files and not pipes: processes that Ray has left behind hold a pipe open, and the wait for its
    # end has no timeout.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(
                command,
                stdout=out,
                stderr=errors,
                timeout=seconds,
                env={**os.environ, **environment},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        out.seek(0)
        errors.seek(0)
        if done.returncode:
            sys.exit(f"{' '.join(command)} has failed:\n{(out.read() + errors.read())[-3000:]}")
        return out.read()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2:])
