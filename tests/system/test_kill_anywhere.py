"""Two ranks are killed at random points and started again by the same command: each run ends with the result of the
uninterrupted run, bit for bit."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import forked
import pytest
from runs import kill, outcome
from tiny import make_workspace, write_config

from rlhf_mc.run_files import read_rows

pytestmark = pytest.mark.system

WORLD = 2
STEPS = 7
PROGRAM = str(Path(__file__).parent / "killable.py")
SAVE_EVENTS = ("save_checkpoint", "writing", "commit", "remove")
ENDS_WITHIN_SECONDS = 600
KINDS = ("kill one rank", "kill all", "terminate all", "kill in a save", "kill again while it resumes")


@dataclass(frozen=True)
class Fault:
    """A signal, the ranks that get it, and its time."""

    victims: Sequence[int]
    signal: int
    rank: int
    """The rank whose events are counted."""
    only: tuple[str, ...]
    """Events that count; empty: all."""
    after: int
    """Number of the event, from 1."""
    delay: float
    """Seconds after that event."""


def draw(kind: str, rng: random.Random) -> Fault:
    """Draw a fault in the first steps after a start, so that every start completes some steps."""
    either_way = not kind.endswith("all") and rng.random() < 0.5
    victims = [rng.randrange(WORLD)] if kind == "kill one rank" or either_way else list(range(WORLD))
    number = signal.SIGTERM if kind == "terminate all" else signal.SIGKILL
    only: tuple[str, ...] = ()
    after = rng.randint(15, 30)  # the first are those of the start; a step has about 20
    if kind == "kill in a save":
        only = SAVE_EVENTS
        after = rng.randint(2, 9)
    if kind == "kill again while it resumes":
        after = rng.randint(1, 8)
    return Fault(victims, number, rng.randrange(WORLD), only, after, rng.choice((0.0, rng.uniform(0, 0.2))))


def start_with_fault(config: Path, logs: Path, fault: Fault | None, overrides: Sequence[str]) -> tuple[list[int], str]:
    """Run until all ranks have ended. Return their exit codes, and the event at which the fault was injected ("" if
    the run ended before it)."""
    logs.mkdir(parents=True, exist_ok=True)
    pipe = logs / "events"
    if not pipe.exists():
        os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    keep_open = os.open(pipe, os.O_WRONLY)
    ranks = [
        forked.start([PROGRAM, str(config), *overrides], logs / "stdout", logs / "stderr", {**env, "EVENTS": str(pipe)})
        for env in forked.rank_variables(WORLD)
    ]
    injected_at = ""
    injected_time = 0.0
    counted = 0
    text = ""
    deadline = time.monotonic() + ENDS_WITHIN_SECONDS
    try:
        while any(process.is_alive() for process in ranks):
            assert time.monotonic() < deadline, f"still running after {fault}: {(logs / 'stderr').read_text()[-2000:]}"
            if not select.select([reader], [], [], 0.02)[0]:
                continue
            text += os.read(reader, 65536).decode()
            *lines, text = text.split("\n")
            for line in lines:
                rank, event = line.split(" ")
                counted += fault is not None and int(rank) == fault.rank and (not fault.only or event in fault.only)
                if fault is not None and not injected_at and counted == fault.after:
                    time.sleep(fault.delay)
                    for victim in fault.victims:
                        if ranks[victim].is_alive():
                            kill(ranks[victim].pid or 0, fault.signal)
                    injected_at = event
                    injected_time = time.monotonic()
                    deadline = time.monotonic() + ENDS_WITHIN_SECONDS
        if injected_at:
            print(f"at {injected_at}: all ranks ended within {time.monotonic() - injected_time:.1f} s")
    finally:
        for process in ranks:
            process.kill()
            process.join()
        os.close(reader)
        os.close(keep_open)
    return [process.exitcode or 0 for process in ranks], injected_at


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = make_workspace(tmp_path_factory.mktemp("workspace"), num_hidden_layers=2, max_position_embeddings=128)
    (workspace / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(4, 10))}))
    return write_config(
        workspace,
        trainer={
            "total_training_steps": STEPS,
            "save_freq": 1,
            "max_ckpt_to_keep": 2,
            "test_freq": 3,
            "val_before_train": False,
            "critic_warmup": 1,
            "logger": ["jsonl"],
        },
        # A response ends after 40 tokens on average.
        data={"max_response_length": 96},
        actor={"ppo_max_token_len_per_gpu": 512, "optim": {"lr_decay_style": "linear"}, "ppo_epochs": 1},
        critic={"ppo_epochs": 1, "ppo_max_token_len_per_gpu": 512, "forward_max_token_len_per_gpu": 512},
        ref={"log_prob_max_token_len_per_gpu": 512},
        rollout={"log_prob_max_token_len_per_gpu": 512},
    )


PARTIAL = ["rollout.partial_rollout=true", "algorithm.rollout_correction.rollout_is=token", "rollout.max_num_seqs=16"]


# Two runs: each kind of fault, with saves in the background and without, with responses that end in their step and
# with responses that later steps continue. KILL_SEED moves the points.
@pytest.mark.parametrize(("seed", "settings"), [(0, []), (1, PARTIAL)], ids=["whole", "partial"])
def test_killed_anywhere(config: Path, tmp_path: Path, seed: int, settings: list[str]) -> None:
    directory = f"trainer.default_local_dir={tmp_path / 'uninterrupted'}"
    codes, _ = start_with_fault(config, tmp_path / "uninterrupted_logs", None, [directory, *settings])
    assert codes == [0, 0], (tmp_path / "uninterrupted_logs" / "stderr").read_text()
    uninterrupted = outcome(tmp_path / "uninterrupted", STEPS)
    rng = random.Random(f"{os.environ.get('KILL_SEED', '0')} {seed}")
    kinds = list(KINDS[:3] if settings == PARTIAL else KINDS[2:])
    rng.shuffle(kinds)
    if kinds[0] == KINDS[-1]:
        kinds.reverse()  # there is nothing to resume at the first start
    overrides = [f"trainer.default_local_dir={tmp_path / 'run'}", f"trainer.async_save={str(seed % 2 == 0).lower()}"]
    overrides += settings
    events = []
    for number, (kind, fault) in enumerate([(kind, draw(kind, rng)) for kind in kinds]):
        codes, event = start_with_fault(config, tmp_path / f"logs{number}", fault, overrides)
        print(f"{kind}: {fault} at {event or 'no event'}, exit codes {codes}")
        events.append(event)
    assert all(events), "a run ended before its fault was injected"
    codes, _ = start_with_fault(config, tmp_path / "logs", None, overrides)
    assert codes == [0, 0], (tmp_path / "logs" / "stderr").read_text()
    result = outcome(tmp_path / "run", STEPS)
    for key, value in uninterrupted.items():
        assert result[key] == value, key
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    ages = [row.get("training/off_policy/trajectory_staleness_worst/max", 0) for _, row in rows]
    assert (max(ages) > 0) == (settings == PARTIAL), "responses were continued"
