"""A PPO step of rlhf_mc and of TRL (experimental PPOTrainer, generation by transformers): the same model, prompts,
distribution of lengths, epoch, optimizer steps and cores, one after the other, several times.

    python3.11 -m venv TRL                              # an environment of its own, with this project's torch:
    echo "$PWD/.venv/lib/python3.11/site-packages" > TRL/lib/python3.11/site-packages/project.pth
    TRL/bin/pip install accelerate datasets
    TRL/bin/pip install --no-deps trl==1.12.0           # 1.16 has no PPO
    OMP_NUM_THREADS=1 python benchmarks/vs_trl.py --trl-python TRL/bin/python               # a table of 8 cells

Both train actor and critic with one PPO epoch and an optimizer step for each 64 sequences, compute log-probs of a
frozen reference, and have a reward that costs next to nothing. Response lengths: "equal" has 64 tokens and no end
token; "long-tailed" has an end token with probability 1/64 at each token, and at most 512 tokens. TRL takes the old
log-probs from the generation. rlhf_mc computes them by default; "generation's log-probs" is rlhf_mc with
algorithm.rollout_correction.bypass_mode, which takes them from the generation too.

A program is started anew in each round, and its first two steps are not counted. A step is all that happens from one
step's end to the next one's, with metrics and their files.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PHASES = {
    "generation": ("gen", "update_weights"),
    "passes": ("old_log_prob", "ref", "values"),
    "updates": ("update_critic", "update_actor"),
}
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, required=True, help="Python of the environment with TRL")
    parser.add_argument("--size", default="0.7M", help="0.7M or 26M parameters")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--lengths", nargs="+", choices=("equal", "long-tailed"), default=["equal", "long-tailed"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="counted steps of a round")
    parser.add_argument("--micro-batch", type=int, default=32, help="TRL's sequences of a micro-batch")
    parser.add_argument("--rollout-batch", type=int, default=0, help="TRL's sequences of a generation; 0: all")
    parser.add_argument("--seconds", type=int, default=1800, help="at most, for one program")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for lengths, prompts, processes in itertools.product(args.lengths, args.prompts, args.processes):
            compare(args, Path(directory), lengths, prompts, processes)


def compare(args: argparse.Namespace, root: Path, lengths: str, prompts: int, processes: int) -> None:
    """Measure one cell and print its rows."""
    directory = root / f"{lengths}_{prompts}_{processes}"
    directory.mkdir()
    config, settings = make_inputs(args, directory, lengths, prompts)
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    found: dict[str, list[dict[str, float]]] = {"rlhf_mc": [], "rlhf_mc, generation's log-probs": [], "TRL": []}
    for number in range(args.rounds):
        runs = directory / f"round_{number}"
        found["rlhf_mc"] += own_steps(args, config, runs / "plain", processes, [])
        found["rlhf_mc, generation's log-probs"] += own_steps(args, config, runs / "bypass", processes, [bypass])
        found["TRL"] += trl_steps(args, settings, processes)
    print(f"\n{args.size} parameters, {prompts} prompts, {lengths} lengths, {processes} process(es)")
    print(
        f"{'seconds a step, median':>34} {'whole':>8} {'min':>8} {'gen':>8} {'passes':>8} {'updates':>8} {'TRL/it':>8}"
    )
    trl = statistics.median(step["whole"] for step in found["TRL"]) if found["TRL"] else float("nan")
    for name, steps in found.items():
        if not steps:
            print(f"{name:>34} over {args.seconds} s, stopped")
            continue
        whole = [step["whole"] for step in steps]
        cells = [
            f"{statistics.median(step[phase] for step in steps):>8.2f}" if phase in steps[0] else f"{'':>8}"
            for phase in PHASES
        ]
        print(
            f"{name:>34} {statistics.median(whole):>8.2f} {min(whole):>8.2f} {' '.join(cells)} "
            f"{trl / statistics.median(whole):>8.2f}",
            flush=True,
        )


def make_inputs(args: argparse.Namespace, directory: Path, lengths: str, prompts: int) -> tuple[Path, Path]:
    """Write model, prompts and settings for both trainers. Return rlhf_mc's config and TRL's settings."""
    # Imported here: torch in this process would take memory from those that are measured.
    code = (
        "import json, sys; from pathlib import Path; import workload as w; from rlhf_mc.data.tokenizer import *;"
        "d, size, lengths, prompts, steps = Path(sys.argv[1]), *sys.argv[2:];"
        "l = {'equal': w.EQUAL, 'long-tailed': w.LONG_TAILED}[lengths];"
        "w.make_workload(d, w.SIZES[size], l, int(prompts), trainer={'total_training_steps': int(steps)});"
        "from transformers import AutoTokenizer; t = AutoTokenizer.from_pretrained(d / 'model');"
        "chats = [[{'role': 'user', 'content': q.text}] for q in w.questions()];"
        "ids = [t(c, add_special_tokens=False)['input_ids'] for c in"
        " t.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)];"
        "(d / 'prompts.json').write_text(json.dumps([ids, l.longest, l.end_probability]))"
    )
    steps = WARM_UP + args.steps
    arguments = [str(directory), args.size, lengths, str(prompts), str(steps)]
    run([sys.executable, "-c", code, *arguments], args.seconds, PYTHONPATH=f"{ROOT}:{ROOT / 'benchmarks'}")
    ids, longest, end_probability = json.loads((directory / "prompts.json").read_text())
    settings = {
        "model": str(directory / "model"),
        "prompts": ids,
        "num_prompts": prompts,
        "mini_batch": 64,
        "micro_batch": args.micro_batch,
        "rollout_batch": args.rollout_batch,
        "longest": longest,
        "has_end": end_probability > 0,
        "steps": steps,
        "output": str(directory / "trl"),
    }
    (directory / "trl.json").write_text(json.dumps(settings))
    return directory / "config.yaml", directory / "trl.json"


def own_steps(
    args: argparse.Namespace, config: Path, output: Path, processes: int, overrides: list[str]
) -> list[dict[str, float]]:
    """Run rlhf_mc. Return the seconds of each counted step, by phase."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [__file__, "--own", str(config), f"trainer.default_local_dir={output}", *overrides]
    out = run(command, args.seconds, PYTHONPATH=str(ROOT))
    if out is None:
        return []
    return json.loads(next(line for line in reversed(out.splitlines()) if line.startswith("[{")))[WARM_UP:]


def train(config: str, overrides: list[str]) -> None:
    """Run rlhf_mc in this process. On rank 0 print the seconds of each step, by phase."""
    from rlhf_mc.api import Trainer

    found = []
    last = time.perf_counter()
    for step in Trainer(config, overrides):
        now = time.perf_counter()
        log = json.loads((Path(overrides[0].partition("=")[2]) / "metrics.jsonl").read_text().splitlines()[-1])
        of_phases = {
            name: sum(log.get(f"timing_s/{phase}", 0.0) for phase in phases) for name, phases in PHASES.items()
        }
        assert log["training/global_step"] == step.number
        found.append({"whole": now - last, **of_phases})
        last = time.perf_counter()
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


def trl_steps(args: argparse.Namespace, settings: Path, processes: int) -> list[dict[str, float]]:
    """Run TRL. Return the seconds of each counted step, and of its generation."""
    program = str(Path(__file__).with_name("trl_ppo.py"))
    command = [str(args.trl_python), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    out = run([*command, program, str(settings)], args.seconds)
    if out is None:
        return []
    result = json.loads(next(line for line in reversed(out.splitlines()) if line.startswith("{")))
    pairs = list(zip(result["steps"], result["generation"], strict=True))[WARM_UP:]
    return [{"whole": whole, "generation": generation} for whole, generation in pairs]


def run(command: list[str], seconds: int, **environment: Any) -> str | None:
    """Return the standard output of a command, or None if it takes longer than this. Exit with its last lines if it
    fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **environment}, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        sys.exit(f"{' '.join(command)} has failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1:2] == ["--own"]:
        train(sys.argv[2], sys.argv[3:])
    else:
        main()
