"""The trainer's own share of a PPO step: the time of real steps, less what the engines alone take
for the same work. A share that is above 10 % in 95 % of resampled runs is an error: one line, and
exit code 1. Needs an idle machine.

    export OMP_NUM_THREADS=1
    python benchmarks/step_overhead.py  # the quickstart, after `make quickstart`
    python benchmarks/step_overhead.py --size 0.7M                    # longer responses
    python benchmarks/step_overhead.py --size 26M --prompts 128

After each step the engines repeat its work without the trainer, in the same processes and on the
same weights:

    generation   vLLM's LLM.generate on the same prompts, with exactly the lengths that the step
                 has drawn, without seeds and log-probs; it renders each prompt, which the trainer's
                 own loop leaves out
    passes       Megatron-Core's model on the same packed micro-batches, torch's log-softmax over
                 full logits
    updates      the same with a backward pass, the reduction of gradients, clipping and the
                 optimizer's step as the trainer calls them

What is done beyond that in a step is the trainer's own: seeds, log-probs, exchange of responses,
packing, entropy, statistics, advantages, the weight update, waiting for the reward. Rounds of both
alternate. Medians are compared, and sums over all rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from workload import EQUAL, LONG_TAILED, SIZES, make_workload

from rlhf_mc.config.load import load_config
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.session import session
from rlhf_mc.trainer import step_state

ROWS = {
    "weight update": ("update_weights",),
    "generation": ("gen",),
    "reward, not hidden": ("reward",),
    "log-probs and values": ("old_log_prob", "ref", "values", "sum_log_probs"),
    "advantages": ("adv",),
    "update of the critic": ("update_critic",),
    "update of the actor": ("update_actor",),
}
"""Phases of a step, by the timer's names. Those of a row end together on all ranks."""
REST = "between the phases, metrics"
MOST_SHARE = 0.10
"""Largest own share of a step that is accepted, as its 5th percentile over resampled runs: the
share of one run of 61 rounds varies by 1.3 percentage points."""


class EnginesAlone:
    """The engines of a run, without the trainer. Every rank must call each method."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.micro_batches: dict[str, list[list[Any]]] = {}
        """By phase: of each optimizer step (one for a pass) this rank's packed micro-batches,
        packed beforehand."""
        self.lens: list[int] = []
        self.prompts: list[list[int]] = []

    def prepare(self, batch: RaggedBatch, prompts: Sequence[Any], step: int) -> None:
        """Take over the work of a step, cut into micro-batches as the step has cut it."""
        from rlhf_mc.models.forward import pack_micro_batch
        from rlhf_mc.trainer.token_budget import my_micro_batches
        from rlhf_mc.trainer.update import mini_batches

        run = self.run
        cfg = run.config
        rank = dist.get_rank()
        world = dist.get_world_size()
        self.prompts = [p.token_ids.tolist() for p in prompts[rank::world]]
        self.lens = batch.response_lens.tolist()[rank::world]
        models = {"old_log_prob": run.actor, "ref": run.reference, "values": run.critic}
        self.micro_batches = {}
        for phase, engine in models.items():
            if engine is not None:
                plan = my_micro_batches(engine, batch, run.token_budgets[phase])
                self.micro_batches[phase] = [[pack_micro_batch(batch, group) for group in plan]]
        for phase, engine, part in (
            ("update_critic", run.critic, cfg.critic),
            ("update_actor", run.actor, cfg.actor),
        ):
            if engine is None:
                continue
            size = part.ppo_mini_batch_size or cfg.actor.ppo_mini_batch_size
            epochs = part.ppo_epochs or cfg.actor.ppo_epochs
            order = mini_batches(
                cfg.data.train_batch_size,
                cfg.rollout.n,
                size,
                epochs,
                cfg.actor.shuffle,
                (cfg.trainer.seed, step),
            )
            minis = [batch.select(indices) for indices in order]
            self.micro_batches[phase] = [
                [
                    pack_micro_batch(mini, group)
                    for group in my_micro_batches(engine, mini, run.token_budgets[phase])
                ]
                for mini in minis
            ]

    def generate(self) -> None:
        """Generate responses of the lengths of this rank's share."""
        import vllm

        requests = [
            vllm.SamplingParams(
                temperature=self.run.config.rollout.temperature,
                max_tokens=n,
                ignore_eos=True,
                detokenize=False,
            )
            for n in self.lens
        ]
        self.run.rollout._llm.generate(
            [vllm.TokensPrompt(prompt_token_ids=p) for p in self.prompts], requests, use_tqdm=False
        )

    def _head(self, engine: Any, micro: Any, is_policy: bool) -> torch.Tensor:
        """Return log-probs or values at the response tokens by torch's own operations."""
        from rlhf_mc.models.forward import run_stage, states_at
        from rlhf_mc.models.heads import output_weight

        model = engine.strategy.buffered[0] if torch.is_grad_enabled() else engine.chunks[0]
        states = states_at(engine.chunks[0], run_stage(model, micro), micro)[:, 0]
        out = torch.nn.functional.linear(states, output_weight(engine.chunks[0]))
        if not is_policy:
            return out[:, 0]
        logits = out / self.run.config.rollout.temperature
        return logits.log_softmax(-1).gather(1, micro.targets[:, None])[:, 0]

    def score(self, phase: str) -> None:
        """Run a forward pass over the batch."""
        from rlhf_mc.models.megatron_patches import megatron_calls

        run = self.run
        engine = {"old_log_prob": run.actor, "ref": run.reference, "values": run.critic}[phase]
        with torch.no_grad(), megatron_calls():
            for micro in self.micro_batches[phase][0]:
                self._head(engine, micro, phase != "values")

    def update(self, phase: str) -> None:
        """Take the optimizer steps of an update, with a gradient of the size of PPO's."""
        from megatron.core.distributed import finalize_model_grads

        from rlhf_mc.models.megatron_patches import megatron_calls

        engine = self.run.actor if phase == "update_actor" else self.run.critic
        for mini in self.micro_batches[phase]:
            with megatron_calls():
                for ddp in engine.strategy.buffered:
                    ddp.zero_grad_buffer()
                engine.strategy.optimizer.zero_grad()
                for micro in mini:
                    (1e-6 * self._head(engine, micro, phase == "update_actor").sum()).backward()
                finalize_model_grads(
                    engine.strategy.buffered, pg_collection=engine.groups.collection
                )
                engine.strategy.step(1.0 / (engine.strategy.grad_norm() + 1e-6))

    def work(self) -> dict[str, Callable[[], None]]:
        """Return the work of each phase that engines do."""
        scores = {
            phase: (lambda phase=phase: self.score(phase))
            for phase in self.micro_batches
            if "update" not in phase
        }
        updates = {
            phase: (lambda phase=phase: self.update(phase))
            for phase in self.micro_batches
            if "update" in phase
        }
        return {"gen": self.generate, **scores, **updates}


def print_bounds(run: Any, batch: RaggedBatch) -> None:
    """Print what no program can do without: the operations of a step's matrix products, at the rate
    of one product on these cores, and the bytes of the weight update. Every rank must call it."""
    from rlhf_mc.trainer.step_report import log_prob_flops, update_flops

    size = 1024
    a = torch.randn(size, size)
    rate = 2 * size**3 / min(timed(lambda: a @ a)[0] for _ in range(10))
    models = [engine for engine in (run.actor, run.reference, run.critic) if engine is not None]
    epochs = run.config.actor.ppo_epochs
    passes = sum(log_prob_flops(engine.shape, batch) for engine in models)
    updates = sum(update_flops(engine.shape, batch, epochs) for engine in run.trained_models())
    generation = log_prob_flops(run.actor.shape, batch)
    if dist.get_rank() == 0:
        world = dist.get_world_size()
        print(
            f"bounds at {rate / 1e9:.1f} GFLOP/s a process, the rate of a product of {size} x "
            f"{size} matrices:"
        )
        for title, flops in (("generation", generation), ("passes", passes), ("updates", updates)):
            print(f"{title:>28} {flops / 1e9:>9.2f} GFLOP {flops / rate / world:>9.4f} s")
        moved = {key: value / 1e6 for key, value in run.weight_sync.metrics.items()}
        print(
            "weight update, rank 0: "
            + ", ".join(f"{key} {value:.2f} MB" for key, value in moved.items())
        )


def timed(action: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of an action on this rank, by the clock and of processor time."""
    dist.barrier()
    start = time.perf_counter()
    cpu = time.process_time()
    action()
    return time.perf_counter() - start, time.process_time() - cpu


def measure(run: Any, rounds: int) -> list[dict[str, tuple[float, float]]]:
    """Alternate steps and the engines alone. Return of each round, by "step", "step/<phase>" and
    "alone/<phase>", the seconds on this rank, by the clock and of processor time (of phases of a
    step by the clock alone)."""
    from rlhf_mc.trainer import loop

    alone = EnginesAlone(run)
    counted = []
    for step in range(1, rounds + 2):  # the first is a warm-up
        state = step_state.begin_step(
            step, RankStatus(), (step - 1) * run.config.data.train_batch_size
        )
        stop = StopRequests(run.config.trainer)
        batches = []
        row = {"step": timed(lambda: batches.append(loop.one_step(run, state, stop)))}  # noqa: B023
        for key, seconds in state.timer.result().items():
            name = key.removeprefix("timing_s/")
            row[f"step/{name}"] = (seconds, 0.0)
        alone.prepare(batches[0], state.prompts, step)
        for phase, action in alone.work().items():
            row[f"alone/{phase}"] = timed(action)
        if step > 1:
            counted.append(row)
        else:
            print_bounds(run, batches[0])
    return counted


def slowest(rounds: list[list[dict[str, tuple[float, float]]]], *keys: str) -> list[float]:
    """Return of each round the seconds, by the clock, of the rank that took longest for these
    together. rounds: [rank][round]."""
    per_round = zip(*rounds, strict=True)
    return [
        max(sum(row[key][0] for key in keys if key in row) for row in ranks) for ranks in per_round
    ]


def share(by_round: Sequence[tuple[float, float]]) -> float:
    """Return 1 - engines / step of the sums over rounds of (step, engines). Both alternate, so that
    a slow drift of
    the machine concerns both; the medians of either differ by more."""
    return 1 - sum(engines for _, engines in by_round) / sum(step for step, _ in by_round)


def interval(by_round: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the 5th and the 95th percentile of `share` of as many rounds, drawn with replacement
    (bootstrap)."""
    draw = random.Random(0)
    shares = sorted(share(draw.choices(by_round, k=len(by_round))) for _ in range(1000))
    return shares[50], shares[950]


def report(rounds: list[list[dict[str, tuple[float, float]]]]) -> tuple[float, float]:
    """Print the table. Return the own share, and its 5th percentile over resampled runs. rounds:
    [rank][round]."""
    whole = statistics.median(slowest(rounds, "step"))
    print(
        f"\n{'seconds, median':>28} {'step':>9} {'engines':>9} {'own':>9} {'of the step':>12} "
        f"{'engines, min':>13}"
    )
    in_phases = 0.0
    alone_rounds: list[list[float]] = []
    for title, phases in ROWS.items():
        step = statistics.median(slowest(rounds, *(f"step/{phase}" for phase in phases)))
        alone = slowest(rounds, *(f"alone/{phase}" for phase in phases))
        seconds = statistics.median(alone)
        in_phases += step
        alone_rounds.append(alone)
        print(
            f"{title:>28} {step:>9.4f} {seconds:>9.4f} {step - seconds:>9.4f} "
            f"{(step - seconds) / whole:>12.1%} {min(alone):>13.4f}"
        )
    rest = whole - in_phases
    print(f"{REST:>28} {rest:>9.4f} {'':>9} {rest:>9.4f} {rest / whole:>12.1%}")
    # Of a round's sum: the sum of the rows' medians is below the median of their sums where times
    # are skewed.
    alone_total = statistics.median(map(sum, zip(*alone_rounds, strict=True)))
    print(
        f"{'whole':>28} {whole:>9.4f} {alone_total:>9.4f} {whole - alone_total:>9.4f}"
        f" {(whole - alone_total) / whole:>12.1%}"
    )
    by_round = list(
        zip(slowest(rounds, "step"), map(sum, zip(*alone_rounds, strict=True)), strict=True)
    )
    low, high = interval(by_round)
    print(
        f"own share, sums over {len(by_round)} rounds: {share(by_round):.1%} (90 % of resampled "
        f"runs: {low:.1%} to {high:.1%})"
    )
    cpu_step = [
        sum(r) for r in zip(*[[row["step"][1] for row in rank] for rank in rounds], strict=True)
    ]
    cpu_alone = [
        sum(r)
        for r in zip(
            *[
                [sum(v[1] for k, v in row.items() if k.startswith("alone/")) for row in rank]
                for rank in rounds
            ],
            strict=True,
        )
    ]
    shares = [1 - b / a for a, b in zip(cpu_step, cpu_alone, strict=True)]
    print(
        f"processor time of all ranks: step {statistics.median(cpu_step):.3f} s, engines "
        f"{statistics.median(cpu_alone):.3f} s, own share {statistics.median(shares):.1%}"
        f" (rounds {min(shares):.1%} to {max(shares):.1%})"
    )
    return share(by_round), low


def run_rank(config: Path, overrides: list[str], rounds: int) -> tuple[float, float]:
    """Run the steps and the engines alone on this rank. Return `report` on rank 0, zeros on
    another."""
    cfg = load_config(config, overrides)
    with session(cfg, RankStatus(), StopRequests(cfg.trainer)) as run:
        from rlhf_mc.topology.consensus import gather_objects

        rounds_of_ranks = gather_objects(measure(run, rounds))
        if dist.get_rank() != 0:
            return 0.0, 0.0
        print(f"{dist.get_world_size()} processes, {torch.get_num_threads()} threads each")
        return report(rounds_of_ranks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument(
        "--size", choices=SIZES, help="a model of this size in place of the config's"
    )
    parser.add_argument("--prompts", type=int, default=256, help="with --size")
    parser.add_argument(
        "--long-tailed",
        action="store_true",
        help="with --size: geometric lengths, mean 64, at most 512",
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        config = args.config
        if args.size is not None:
            lengths = LONG_TAILED if args.long_tailed else EQUAL
            config = make_workload(Path(directory), SIZES[args.size], lengths, args.prompts)
        launch = LaunchConfig(
            1, 1, args.processes, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0
        )
        overrides = [
            f"trainer.default_local_dir={directory}/run",
            "trainer.logger=[]",
            *args.overrides,
        ]
        own_share, low = elastic_launch(launch, run_rank)(config, overrides, args.rounds)[0]
    if low > MOST_SHARE:
        sys.exit(f"the trainer's own share of a step is {own_share:.1%}, above {MOST_SHARE:.0%}")


if __name__ == "__main__":
    main()
