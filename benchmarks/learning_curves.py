"""Learning curves of the advantage estimators on the quickstart's task: greedy accuracy on the
held-out additions over steps, for several seeds. Each run is a process of its own. It takes the
model and data of `make quickstart`:

    OMP_NUM_THREADS=1 python benchmarks/learning_curves.py --processes 2

Each finished run is appended to results.jsonl in the output directory at once, and is not repeated
by the next start. table.md and curves.png there have all runs so far. A run that fails is a row of
the table with its error; the
next start resumes it. After `make real-model`, a language model that someone else trained:

    python benchmarks/learning_curves.py --variants smollm2_grpo smollm2_ppo --steps 15 \\
        --output runs/smollm2/curves --launch ".venv/bin/torchrun --standalone --nproc-per-node 2"
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from rlhf_mc.observability.step_table import validation_accuracies
from rlhf_mc.run_files import json_objects

ROOT = Path(__file__).resolve().parents[1]
COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea")
HIGHEST_START = 0.50
"""A run counts only if its accuracy before the first step is at most this."""
LOWEST_END = 0.90
"""Accuracy after the last step with which a run has learnt the quickstart's task."""


@dataclass(frozen=True)
class Variant:
    """An estimator with the settings that its runs add to its config."""

    name: str
    """Name in the table."""
    config: str = "configs/quickstart_grpo.yaml"
    settings: tuple[str, ...] = ()
    """key=value, as on the command line."""
    least: float = LOWEST_END
    """A run has learnt the task if its accuracy after the last step is at least this."""


def _without_critic(estimator: str, *settings: str, name: str | None = None) -> Variant:
    return Variant(name or estimator, settings=(f"algorithm.adv_estimator={estimator}", *settings))


_OFF = "algorithm.rollout_correction.rollout_is=token"
_PARTIAL = ("rollout.partial_rollout=true", _OFF)
# of 256 responses: most are unfinished when enough groups are complete
_FEW_PLACES = "rollout.max_num_seqs=32"

# python tools/make_guessing_game.py --output runs/guessing makes model and data
_TURNS = "configs/quickstart_turns.yaml"
_CRITIC = ("algorithm.lam=0.95", "critic.optim.lr=1e-3")

VARIANTS = (
    Variant("gae", "configs/quickstart.yaml"),
    Variant(
        "gae_tail_batching", "configs/quickstart.yaml", ("rollout.tail_batching=true", _FEW_PLACES)
    ),
    Variant("gae_partial_rollout", "configs/quickstart.yaml", (*_PARTIAL, _FEW_PLACES)),
    # colocated: the bits of engines with ranks of their own
    Variant("gae_one_step_off", "configs/quickstart.yaml", ("rollout.one_step_off=true", _OFF)),
    # four batches of 256 responses, which the engine samples together: four steps train on them
    Variant(
        "gae_four_steps_off",
        "configs/quickstart.yaml",
        (
            "rollout.one_step_off=true",
            *_PARTIAL,
            "rollout.prompts_in_flight=256",
            "rollout.max_num_seqs=1024",
        ),
    ),
    Variant(
        "gae_decoupled",
        "configs/quickstart.yaml",
        ("algorithm.gae_lambda_value=1.0", "algorithm.gae_lambda_policy=0.9"),
    ),
    Variant("gae_adaptive", "configs/quickstart.yaml", ("algorithm.length_adaptive_alpha=1.0",)),
    Variant("gae_overlong", "configs/quickstart.yaml", ("algorithm.overlong_filtering=true",)),
    # as many responses as gae, each to a prompt of its own
    Variant(
        "gae_sao",
        "configs/quickstart.yaml",
        (
            "rollout.n=1",
            "data.train_batch_size=256",
            "actor.ppo_mini_batch_size=64",
            "actor.policy_loss.loss_mode=sao",
            "actor.clip_ratio_low=0.8",
            "actor.clip_ratio_high=3.0",
            "algorithm.rollout_correction.bypass_mode=true",
            "algorithm.length_adaptive_alpha=1.0",
            "critic.ppo_epochs=2",
            "critic.freeze=[model.layers.*.self_attn.*]",
            "trainer.critic_warmup=3",
        ),
    ),
    Variant("turns_gae", _TURNS, ("algorithm.adv_estimator=gae", *_CRITIC)),
    Variant("turns_gae_turn", _TURNS, ("algorithm.adv_estimator=gae_turn", *_CRITIC)),
    Variant("turns_grpo", _TURNS),
    Variant("turns_grpo_echo", _TURNS, ("actor.env_loss_coef=0.05",)),
    Variant("turns_grpo_turn", _TURNS, ("algorithm.adv_estimator=grpo_turn",)),
    _without_critic("grpo"),
    _without_critic("maxrl"),
    _without_critic("gdpo"),
    _without_critic("grpo_passk"),
    # As many responses in groups of 2: a group of 8 seldom has exactly one right response, and no
    # gradient otherwise.
    Variant(
        "grpo_passk_n2",
        settings=(
            "algorithm.adv_estimator=grpo_passk",
            "rollout.n=2",
            "data.train_batch_size=128",
            "actor.ppo_mini_batch_size=32",
        ),
    ),
    _without_critic("rloo"),
    _without_critic("reinforce_plus_plus"),
    _without_critic("reinforce_plus_plus_baseline"),
    _without_critic("remax"),
    _without_critic("opo"),
    _without_critic("gpg"),
    _without_critic(
        "reinforce_plus_plus",
        "distillation.enabled=true",
        "distillation.distillation_loss.loss_mode=k1",
        "distillation.distillation_loss.use_policy_gradient=true",
        "distillation.distillation_loss.use_task_rewards=false",
        "distillation.teacher_models.trained.model_path=runs/quickstart/hf",
        name="distillation",
    ),
    Variant("smollm2_grpo", "configs/smollm2_grpo.yaml", least=0.60),
    Variant("smollm2_ppo", "configs/smollm2_ppo.yaml", least=0.60),
    Variant(
        "smollm2_ppo_decoupled",
        "configs/smollm2_ppo.yaml",
        ("algorithm.gae_lambda_value=1.0", "algorithm.gae_lambda_policy=0.95"),
        least=0.60,
    ),
    Variant(
        "smollm2_ppo_adaptive",
        "configs/smollm2_ppo.yaml",
        ("algorithm.length_adaptive_alpha=1.0",),
        least=0.60,
    ),
    Variant(
        "smollm2_lora",
        "configs/smollm2_grpo.yaml",
        ("actor.lora.rank=32", "actor.lora.alpha=64", "actor.optim.lr=1e-4"),
        least=0.60,
    ),
    Variant(
        "smollm2_bfloat16",
        "configs/smollm2_grpo.yaml",
        ("actor.megatron.dtype=bfloat16", "actor.optim.lr=5e-5"),
        least=0.60,
    ),
)
BY_NAME = {variant.name: variant for variant in VARIANTS}


@dataclass(frozen=True)
class Result:
    """A finished or failed run, and a line of results.jsonl."""

    variant: str
    seed: int
    num_steps: int
    settings: list[str]
    """Of the variant."""
    points: list[tuple[int, float]]
    """(step, greedy accuracy), from step 0; of a failed run those that it reached."""
    error: str | None = None
    """Last line of a failed process."""

    @property
    def has_learnt(self) -> bool:
        """The run has finished, and its accuracy rose from at most HIGHEST_START to at least the
        variant's."""
        least = BY_NAME[self.variant].least
        return (
            self.error is None
            and self.points[0][1] <= HIGHEST_START
            and self.points[-1][1] >= least
        )


def run_command(
    variant: Variant, seed: int, num_steps: int, directory: Path, launch: str
) -> list[str]:
    """Return the command of a run that validates every 5 steps, and ends once the accuracy is 0.95
    (target_val_acc of the quickstart). It writes its metrics to `directory`."""
    settings = [
        *variant.settings,
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={num_steps}",
        "trainer.test_freq=5",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={directory}",
    ]
    return [*shlex.split(launch), "-m", "rlhf_mc", variant.config, *settings]


def greedy_accuracies(metrics_file: Path) -> list[tuple[int, float]]:
    """Return (step, mean accuracy of the data sources) of each validation in a metrics.jsonl; an
    empty list if there is no such file."""
    if not metrics_file.is_file():
        return []
    by_step = [(row["step"], validation_accuracies(row)) for row in json_objects(metrics_file)]
    return [(step, fmean(of_source.values())) for step, of_source in by_step if of_source]


def run(variant: Variant, seed: int, num_steps: int, output: Path, launch: str) -> Result:
    """Run one process to its end, and return its curve."""
    directory = output / f"{variant.name}_seed{seed}"
    directory.mkdir(parents=True, exist_ok=True)
    command = run_command(variant, seed, num_steps, directory, launch)
    with open(directory / "console.log", "w") as log:
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
    error = None
    if code != 0:
        lines = (directory / "console.log").read_text().split("\n")
        error = f"exit code {code}: " + next(
            (line for line in reversed(lines) if line.strip()), "no output"
        )
    points = greedy_accuracies(directory / "metrics.jsonl")
    return Result(variant.name, seed, num_steps, list(variant.settings), points, error)


def read_results(path: Path) -> list[Result]:
    """Return the newest result of each variant and seed, in the order of VARIANTS; [] if there is
    no file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    results = [Result(**json.loads(line)) for line in lines]
    newest = {(result.variant, result.seed): result for result in results}
    names = list(BY_NAME)
    return sorted(newest.values(), key=lambda result: (names.index(result.variant), result.seed))


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table of a row per run: its accuracies, and the error of a failed run."""
    steps = sorted({step for result in results for step, _ in result.points})
    lines = [
        "| estimator | seed | " + " | ".join(f"step {step}" for step in steps) + " | learnt |",
        "|" + "---|" * (len(steps) + 3),
    ]
    for result in results:
        accuracy = dict(result.points)
        cells = [f"{accuracy[step]:.3f}" if step in accuracy else "–" for step in steps]
        learnt = result.error or ("yes" if result.has_learnt else "no")
        cells = [f"`{result.variant}`", str(result.seed), *cells, learnt.replace("|", "/")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(results: Sequence[Result], output: Path) -> None:
    """Write a PNG of a panel per variant with a curve per seed."""
    names = list(dict.fromkeys(result.variant for result in results))
    columns = min(5, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(2.7 * columns, 2.2 * rows), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)  # needs no display and no global state
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for name, axes in zip(names, panels, strict=False):
        _panel(axes, name, [result for result in results if result.variant == name])
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("greedy accuracy", fontsize=9)
    figure.savefig(output, format="png")


def _panel(axes: Axes, name: str, results: Sequence[Result]) -> None:
    """Draw the curves of one variant, and a line at the accuracy with which it has learnt."""
    axes.set_title(name, loc="left", fontsize=9, fontweight="bold")
    axes.axhline(BY_NAME[name].least, color="#9ca3af", linewidth=0.8, linestyle="--")
    for result, color in zip(results, COLORS, strict=False):
        if result.points:
            axes.plot(
                *zip(*result.points, strict=True),
                "o-",
                color=color,
                markersize=3,
                label=f"seed {result.seed}",
            )
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="lower right")


def report(output: Path) -> list[Result]:
    """Write table.md and curves.png of results.jsonl, and return the results."""
    results = read_results(output / "results.jsonl")
    (output / "table.md").write_text(table(results))
    plot(results, output / "curves.png")
    return results


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed arguments; an unknown name of a variant is an error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(BY_NAME)
    quick = [name for name in names if not name.startswith(("smollm2", "turns"))]
    parser.add_argument(
        "--variants", nargs="+", choices=names, default=quick, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--launch", default=sys.executable, help="command that starts Python, such as torchrun ..."
    )
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "learning_curves")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    results_file = args.output / "results.jsonl"
    done = {
        (result.variant, result.seed, result.num_steps, tuple(result.settings))
        for result in read_results(results_file)
        if result.error is None
    }
    runs = [
        (variant, seed)
        for seed in args.seeds
        for variant in VARIANTS
        if variant.name in args.variants
        and (variant.name, seed, args.steps, variant.settings) not in done
    ]
    with ThreadPoolExecutor(args.processes) as pool, open(results_file, "a") as file:
        futures = [
            pool.submit(run, variant, seed, args.steps, args.output.resolve(), args.launch)
            for variant, seed in runs
        ]
        for future in as_completed(futures):
            result = future.result()
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            print(table([result]), flush=True)
    results = report(args.output)
    print((args.output / "table.md").read_text())
    print(
        f"{sum(result.has_learnt for result in results)} of {len(results)} runs have learnt the "
        "task"
    )


if __name__ == "__main__":
    main()
