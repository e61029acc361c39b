"""Whole PPO steps in every kind of layout, against the same steps on one rank.

python -m gpu_parts.layout_parts SIZE_AS_JSON FILE      (the one rank, which the part starts)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

# as gpu_check.py prepares the part, before torch and Megatron-Core are imported
if __name__ == "__main__":
    from rlhf_mc.runtime.cuda_environment import forbid_tf32

    forbid_tf32(("float32",))
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]

import torch
import torch.distributed as dist

from gpu_parts.engines import logical_tensors, shared_directory
from gpu_parts.processes import free_port
from gpu_parts.report import Report
from gpu_parts.rollout_parts import built_run, take_step
from gpu_parts.sizes import Sizes
from rlhf_mc.topology.consensus import gather_objects, on_rank_0
from rlhf_mc.topology.rendezvous import init_process_group
from rlhf_mc.trainer.run import Run

METRICS = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/reward_kl_penalty",
    "critic/vf_loss",
    "critic/grad_norm",
    "critic/values/mean",
)
METRIC_BOUND = 2e-3
"""Largest difference of a metric in float32, relative to the larger of it and METRIC_SCALE."""
METRIC_SCALE = 1e-2
UPDATE_BOUND = 1e-2
"""Largest difference of the weights after two steps, relative to what the steps have changed in
them."""
STEPS = (1, 2)
TOOLS = Path(__file__).resolve().parents[1]
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
ONE = {"tensor_model_parallel_size": 1, "sequence_parallel": False}


class Layout(NamedTuple):
    """Keys of megatron of each role, and the tensor-parallel size of the rollout engines."""

    actor: dict[str, Any]
    rollout: int = 1
    critic: dict[str, Any] = {}
    """Keys that differ from the actor's."""
    ref: dict[str, Any] = {}
    """Keys that differ from the actor's."""


class Trained(NamedTuple):
    """Results of some PPO steps."""

    tokens: list[torch.Tensor]
    """Tokens of each step's batch: [T] int64."""
    metrics: list[dict[str, float]]
    """METRICS of each step."""
    before: dict[str, torch.Tensor]
    """Weights of actor and critic by the names of the checkpoint."""
    after: dict[str, torch.Tensor]


def layouts_of(world: int) -> dict[str, Layout]:
    """Return the layouts to run on this number of ranks. The rest of the ranks are replicas."""
    found = {"dp": Layout({})}
    if world % 2 == 0:
        found |= {
            "tp2": Layout(TP, rollout=2),
            "pp2": Layout({**PP, "virtual_pipeline_model_parallel_size": 2}),
            "ep2": Layout(EP),
            "cp2": Layout(CP),
            "roles": Layout(TP, critic={**ONE, **PP}, ref={**ONE, **CP}),
        }
    if world % 4 == 0:
        found |= {
            "tp2_pp2": Layout({**TP, **PP}, rollout=4),
            "tp2_ep2": Layout({**TP, **EP}, rollout=2),
            "tp2_cp2": Layout({**TP, **CP}, rollout=2),
        }
    return found


def layouts(report: Report, sizes: Sizes) -> None:
    """Take two PPO steps in each layout of sizes.layout_names, with verified weight updates, in
    float32. Tokens, losses, gradient norms and weights must be those of one rank."""
    texts = []
    with shared_directory() as directory:
        path = directory / "one_rank.pt"
        on_rank_0(lambda: _run_one_rank(sizes.layouts, path))
        wanted = Trained(*torch.load(path))
        report.check(
            all(
                not torch.equal(wanted.before[name], weight)
                for name, weight in wanted.after.items()
            ),
            "one rank: some weights have not been trained",
        )
        found = layouts_of(dist.get_world_size())
        names = sizes.layout_names if sizes.layout_names and len(found) > 1 else found
        for name in names:
            with report.case(name):
                trained = train(sizes.layouts, found[name])
                texts.append(f"{name} {_compare(report, name, trained, wanted):.0e}")
    report.summarize(
        f"weights after {len(STEPS)} steps off by (of their change): {', '.join(texts)}"
    )


def _run_one_rank(size: dict[str, Any], path: Path) -> None:
    """Take the steps in a further process, which is the only rank of its world, and write them to
    the file."""
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": str(free_port())}
    paths = [str(TOOLS.parent), str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "gpu_parts.layout_parts", json.dumps(size), str(path)],
        env={**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    print(done.stdout[-2000:], done.stderr[-4000:])
    if done.returncode != 0:
        last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-1:]
        raise RuntimeError(f"one rank ended with exit code {done.returncode}: {' '.join(last)}")


def train(size: dict[str, Any], layout: Layout) -> Trained:
    """Build a run in this layout, and take the steps. Every rank must call it."""
    optim = {
        "lr": 5e-3,
        "eps": 1e-3,
    }  # a large eps keeps Adam smooth where a gradient is all but zero
    settings: dict[str, dict[str, Any]] = {
        "actor": {"optim": optim, "megatron": {"dtype": "float32", **layout.actor}},
        "critic": {"optim": optim, "megatron": layout.critic},
        "ref": {"megatron": layout.ref},
        # Its kernels compile for a minute in each layout; other parts run them.
        "rollout": {"tensor_model_parallel_size": layout.rollout, "enforce_eager": True},
        "algorithm": {"use_kl_in_reward": True},
        "reshard": {"verify": "always"},
    }
    with built_run(size, settings) as run:
        tokens = []
        metrics = []
        before = _weights(run)
        for step in STEPS:
            state, batch = take_step(run, step)
            tokens.append(batch.tokens.cpu())
            metrics.append({name: float(state.metrics[name]) for name in METRICS})
        return Trained(tokens, metrics, before, _weights(run))


def _weights(run: Run) -> dict[str, torch.Tensor]:
    """Return the weights of actor and critic on every rank."""
    engines = {"actor": run.actor, "critic": run.critic}
    return {
        f"{role} {name}": tensor
        for role, engine in engines.items()
        if engine is not None
        for name, tensor in logical_tensors(engine, engine.params).items()
    }


def _compare(report: Report, name: str, got: Trained, wanted: Trained) -> float:
    """Check the results of a layout. Return the largest error of a weight on any rank, relative to
    its change."""
    for step, mine, reference in zip(STEPS, got.tokens, wanted.tokens, strict=True):
        same = len(mine) == len(reference) and torch.equal(mine, reference)
        report.check(same, f"{name}, step {step}: other tokens than those of one rank")
    for step, metrics, reference_metrics in zip(STEPS, got.metrics, wanted.metrics, strict=True):
        for key, value in reference_metrics.items():
            error = abs(metrics[key] - value) / max(abs(value), METRIC_SCALE)
            report.check(
                error < METRIC_BOUND,
                f"{name}, step {step}: {key} is {metrics[key]:.6g}, not {value:.6g}",
            )
    errors = {
        key: float((got.after[key] - weight).norm() / (weight - wanted.before[key]).norm())
        for key, weight in wanted.after.items()
    }
    worst = max(errors, key=lambda key: errors[key])
    report.check(
        errors[worst] < UPDATE_BOUND, f"{name}: {worst} is off by {errors[worst]:.1e} of its change"
    )
    largest = max(gather_objects(errors[worst]))
    report.record(**{f"{name}_weight_error": largest})
    return largest


if __name__ == "__main__":
    init_process_group(300)
    torch.save(tuple(train(json.loads(sys.argv[1]), Layout({}))), sys.argv[2])
    os._exit(0)
