"""Ranks of their own for training and rollout beside colocated ranks: the quickstart on as many
processes, colocated, in pools, and in pools one step ahead, in turns.

    OMP_NUM_THREADS=1 python benchmarks/pools.py --ranks 2 --rounds 3

The bound of a step one step ahead is the longer of generation and training on its pool's ranks, and
the weight update; that of colocated ranks is their sum on all ranks. With m and n ranks of m + n
alike the former is at least the latter (max(G / m, T / n) >= (G + T) / (m + n)): what pools gain is
where one of both does not get faster by more ranks, as generation that waits for its longest
response. So the model's responses end at random, and --longest is the limit of their tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
AHEAD = ("rollout.one_step_off=true", "algorithm.rollout_correction.rollout_is=token")


def modes(ranks: int) -> dict[str, tuple[str, ...]]:
    """Return the settings of each mode."""
    half = ranks // 2
    pools = (f"resource_pools.train={ranks - half}", f"resource_pools.rollout={half}")
    return {"colocated": (), "pools": pools, "pools, one step ahead": (*pools, *AHEAD)}


def run(ranks: int, settings: tuple[str, ...], steps: int, longest: int) -> dict[str, float]:
    """Run the quickstart. Return medians over its steps but the first two."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(ranks), "-m", "rlhf_mc", "configs/quickstart.yaml"),
                *settings,
                f"trainer.default_local_dir={directory}/run",
                f"trainer.total_training_steps={steps}",
                f"data.max_response_length={longest}",
                "trainer.test_freq=-1",
                "trainer.target_val_acc=null",
                "trainer.val_before_train=false",
                "trainer.save_freq=-1",
            ],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        text = (Path(directory) / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()][2:]
    keys = ("timing_s/step", "timing_s/gen", "perf/idle_share/train", "perf/idle_share/rollout")
    return {key: median(row[key] for row in rows) for key in keys if key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--longest", type=int, default=64)
    arguments = parser.parse_args()
    settings = modes(arguments.ranks)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    for _ in range(arguments.rounds):
        for name, changes in settings.items():
            found[name].append(run(arguments.ranks, changes, arguments.steps, arguments.longest))
    base = median(row["timing_s/step"] for row in found["colocated"])
    for name, rows in found.items():
        medians = {key: median(row[key] for row in rows) for key in rows[0]}
        ratio = medians["timing_s/step"] / base
        print(f"{name}: {ratio:.2f} of a colocated step;", json.dumps(medians))


if __name__ == "__main__":
    main()
