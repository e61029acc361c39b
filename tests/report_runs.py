"""Directories of runs that never ran, for tests of the report: their files as a run of many steps
leaves them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SOURCES = ("openai/gsm8k", "lighteval/MATH", "hellaswag")
PHASES = {
    "gen": 4.0,
    "update_weights": 0.3,
    "reward": 0.2,
    "old_log_prob": 1.0,
    "ref": 1.0,
    "values": 0.9,
    "adv": 0.05,
}
UPDATES = {"update_critic": 2.0, "update_actor": 2.5}


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics_of(step: int, num_steps: int, draws: random.Random) -> dict[str, float | None]:
    """Return the metrics of a step as a run that learns would log them."""
    done = step / num_steps
    noise = draws.gauss(0, 0.02)
    reward = 0.2 + 0.6 * (1 - math.exp(-4 * done)) + noise
    row: dict[str, float | None] = {"training/global_step": step, "critic/score/mean": reward}
    for i, source in enumerate(SOURCES):
        row[f"critic/score/{source}/mean"] = reward - 0.1 * i
        row[f"reward_extra/{source}/acc"] = reward - 0.1 * i
        if step % 20 == 0:
            row[f"val-core/{source}/acc/mean@1"] = min(1.0, reward + 0.05 * i)
    row |= {
        "actor/ppo_kl": 0.002 + 0.001 * draws.random() + (0.04 if 300 <= step < 305 else 0.0),
        "actor/reward_kl_penalty": 0.4 * done,
        "actor/entropy": 2.0 * math.exp(-2 * done) + 0.1,
        "actor/pg_clipfrac": 0.02 + noise / 10,
        "actor/pg_clipfrac_lower": 0.001,
        "critic/vf_clipfrac": 0.01,
        "actor/grad_norm": None if step == 301 else 1.0 + draws.random(),
        "critic/grad_norm": 3.0 * draws.random(),
        "critic/vf_explained_var": 0.8 * (1 - math.exp(-6 * done)),
        "response_length/mean": 300 + 200 * done + 20 * draws.random(),
        "response_length/max": 1024,
        "response_length/clip_ratio": 0.1 * done,
        "perf/throughput": 2500 + 300 * draws.random(),
        "perf/mfu/actor": 0.31,
        "perf/mfu/critic": 0.28,
        "actor/lr": 1e-6,
    }
    seconds = {
        name: mean * (0.9 + 0.2 * draws.random()) for name, mean in {**PHASES, **UPDATES}.items()
    }
    row |= {f"timing_s/{name}": value for name, value in seconds.items()}
    return {**row, "timing_s/step": sum(seconds.values()) + 0.2, "timing_s/reward_hidden": 0.5}


def write_run(
    root: Path, num_steps: int = 500, seed: int = 1, lr: float = 1e-6, health: bool = True
) -> Path:
    """Write a run that was resumed twice, once after it had died, and has finished."""
    root.mkdir(parents=True)
    draws = random.Random(seed)
    rows = [
        {"step": step, "run_id": root.name, **metrics_of(step, num_steps, draws)}
        for step in range(num_steps + 1)
    ]
    write_lines(root / "metrics.jsonl", rows)
    edges = list(range(0, 1025, 16))

    def counts(step: int) -> list[int]:
        peak = 20 + 12 * step / num_steps
        return [int(200 * math.exp(-(((b - peak) / 8) ** 2))) for b in range(64)]

    lengths = [
        {
            "step": step,
            "run_id": root.name,
            "response_length": {"edges": edges, "counts": counts(step)},
        }
        for step in range(1, num_steps + 1)
    ]
    write_lines(root / "histograms.jsonl", lengths)
    write_starts(root, num_steps, lr)
    if health:
        write_health(root)
    for step in range(0, num_steps + 1, max(1, num_steps // 5)):
        write_samples(root, step)
    folder = root / "profile" / "step_3"
    folder.mkdir(parents=True)
    gen = {"seconds": [4.1, 4.1], "waiting": [0.0, 0.9], "slowest": 0}
    update = {"seconds": [2.5, 2.5], "waiting": [0.001, 0.0], "slowest": None}
    phases = {"gen": gen, "update_actor": update}
    (folder / "phases.json").write_text(json.dumps({"step": 3, "ranks": 2, "phases": phases}))
    (root / "success.json").write_text(json.dumps({"run_id": root.name, "step": num_steps}))
    return root


def write_starts(root: Path, num_steps: int, lr: float) -> None:
    """Write three starts: the first died, the second was stopped, the third has finished."""
    config = {
        "actor": {"optim": {"lr": lr}},
        "trainer": {"total_training_steps": num_steps, "seed": 1},
    }
    start = {
        "run_id": root.name,
        "command": [
            "python",
            "-m",
            "rlhf_mc",
            "configs/a_config_with_a_long_name.yaml",
            "actor.optim.lr=1e-6",
        ],
        "versions": {
            "python": "3.11.2",
            "rlhf_mc": "0.1.0",
            "torch": "2.13.0",
            "megatron-core": "0.16.1",
        },
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "has_changes": True},
        "hosts": {"node001.cluster.example": 8, "node002.cluster.example": 8},
        "config": config,
    }
    times = ["2026-11-20T08:00:00+0000", "2026-11-20T19:30:00+0000", "2026-11-21T07:00:00+0000"]
    stopped = {
        "time": times[1],
        "step": 400,
        "how": "stopped",
        "text": "asked to stop (SIGTERM); step 400 is saved",
    }
    finished = {
        "time": times[2],
        "step": num_steps,
        "how": "finished",
        "text": "all steps are done",
    }
    rows = [
        {"time": times[0], "after_step": 0, **start},
        {
            "time": times[1],
            "after_step": 180,
            **start,
            "changed": {"actor.optim.lr": [2e-6, lr]},
            "end": stopped,
        },
        {"time": times[2], "after_step": 400, **start, "changed": {}, "end": finished},
    ]
    write_lines(root / "starts.jsonl", rows)


def write_health(root: Path) -> None:
    """Write events of two rules, one of them on a metric without a chart of its own."""
    event = {"run_id": root.name, "time": "2026-11-20T20:00:00+0000", "action": "warn"}
    kl = {"rule": "ppo_kl", "metric": "actor/ppo_kl", "bound": "above 0.03"}
    text = (
        "actor/ppo_kl is 0.043, above 0.03: the update leaves the policy that sampled; lower "
        "actor.optim.lr"
    )
    write_lines(
        root / "health.jsonl",
        [
            {
                "step": 300,
                **event,
                **kl,
                "value": 0.043,
                "count": 1,
                "event": "begins",
                "text": text,
            },
            {
                "step": 305,
                **event,
                **kl,
                "value": 0.002,
                "count": 5,
                "event": "ends",
                "text": "actor/ppo_kl is back",
            },
            {
                **{
                    "step": 301,
                    **event,
                    "rule": "nan",
                    "metric": "actor/lr",
                    "value": None,
                    "bound": "finite",
                },
                **{
                    "count": 1,
                    "event": "begins",
                    "text": "a metric is not finite <script>alert(1)</script>",
                },
            },
        ],
    )


def write_samples(root: Path, step: int) -> None:
    """Write two generations of the validation after a step, and of the step."""
    generations = root / "generations"
    generations.mkdir(exist_ok=True)
    rows = [
        {
            "input": f"<|user|>What is {n} + {n}?\nAnswer briefly.<|assistant|>",
            "output": f"At step {step}: {2 * n}\n\nDone.",
            "gts": 2 * n,
            "score": float(n % 2),
            "step": step,
        }
        for n in (3, 4)
    ]
    write_lines(generations / f"{step}.jsonl", rows)
    folder = root / "train_generations"
    folder.mkdir(exist_ok=True)
    row = {
        "input": "Name a prime.",
        "output": f"{step} </script><b>",
        "gts": "7",
        "score": 0.5,
        "step": step,
    }
    row["turns"] = [("response", row["output"]), ("observation", "right"), ("response", "end")]
    row |= {"length": 900, "tokens": TOKENS | {"text": [str(step), *TOKENS["text"][1:]]}}
    own = {
        "input": f"Name a prime above {step}.",
        "output": "<i>no",
        "gts": "",
        "score": -1.0,
        "step": step,
    }
    write_lines(folder / f"{step}.jsonl", [row, own | {"length": 2, "tokens": OWN_TOKENS}])


TOKENS: dict[str, list[Any]] = {
    "text": [
        "",
        " </script>",
        "<b>",
        "\n",
        "right",
        '" onmouseover=alert(1) ',
        "</span><img src=x>",
        "\ud800\u202e<|end|>",
    ],
    "response_mask": [1, 1, 1, 1, 0, 1, 1, 1],
    "rollout_log_probs": [-0.5, -1.0, -2.0, -0.1, None, -3.0, -0.25, -0.125],
    "old_log_probs": [-0.5, -1.0, -2.25, -0.1, None, -3.0, -0.25, -0.125],
    "ref_log_probs": [-0.5, -1.0, -2.0, -0.1, None, -1.0, -0.25, -0.125],
    "values": [0.1, 0.2, 0.3, 0.4, None, 0.5, 0.6, 0.7],
    "advantages": [2.0, 1.0, 0.25, -0.5, None, -1.0, -2.0, None],
    "loss_mask": [1, 1, 0, 1, None, 1, 1, 1],
}
"""Of a response with one turn of an environment, and of hostile texts."""
OWN_TOKENS: dict[str, list[Any]] = {
    "text": ["<i>", "no"],
    "response_mask": [1, 1],
    "advantages": [1.0, -1.0],
}
