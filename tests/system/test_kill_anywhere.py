"""Two ranks are ended at points drawn at random, and started again by the same command: each run ends as the one that
was left in peace, bit for bit."""

from __future__ import annotations

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
from runs import outcome
from tiny import make_workspace, write_config

pytestmark = pytest.mark.system

WORLD, STEPS = 2, 7
PROGRAM = str(Path(__file__).parent / "killable.py")
SAVE_EVENTS = ("save_checkpoint", "writing", "commit", "remove")
ENDS_WITHIN_SECONDS = 200
KINDS = ("kill one rank", "kill all", "terminate all", "kill in a save", "kill again while it resumes")


@dataclass(frozen=True)
class Blow:
    """Which processes get which signal, and when."""

    victims: Sequence[int]
    signal: int
    rank: int
    """The rank whose events are counted."""
    only: tuple[str, ...]
    """Events that count; empty: all."""
    after: int
    """The so many-th of them, from 1."""
    delay: float
    """Seconds after that event."""


def draw(kind: str, rng: random.Random) -> Blow:
    """A point in the first steps after a start: what is done again is little, and the run gets on."""
    either_way = not kind.endswith("all") and rng.random() < 0.5
    victims = [rng.randrange(WORLD)] if kind == "kill one rank" or either_way else list(range(WORLD))
    number = signal.SIGTERM if kind == "terminate all" else signal.SIGKILL
    only, after = (), rng.randint(15, 45)  # the first are those of the start; a step has some 20
    if kind == "kill in a save":
        only, after = SAVE_EVENTS, rng.randint(2, 9)
    if kind == "kill again while it resumes":
        after = rng.randint(1, 8)
    return Blow(victims, number, rng.randrange(WORLD), only, after, rng.choice((0.0, rng.uniform(0, 0.2))))


def start_and_strike(config: Path, logs: Path, blow: Blow | None, overrides: Sequence[str]) -> tuple[list[int], str]:
    """The exit codes of a run, and at what event the blow fell ("" where the run came to its end before)."""
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
    fell, counted, text, struck = "", 0, "", 0.0
    deadline = time.monotonic() + ENDS_WITHIN_SECONDS
    try:
        while any(process.is_alive() for process in ranks):
            assert time.monotonic() < deadline, f"still there after {blow}: {(logs / 'stderr').read_text()[-2000:]}"
            if not select.select([reader], [], [], 0.02)[0]:
                continue
            text += os.read(reader, 65536).decode()
            *lines, text = text.split("\n")
            for line in lines:
                rank, event = line.split(" ")
                counted += blow is not None and int(rank) == blow.rank and (not blow.only or event in blow.only)
                if blow is not None and not fell and counted == blow.after:
                    time.sleep(blow.delay)
                    for victim in blow.victims:
                        if ranks[victim].is_alive():
                            os.kill(ranks[victim].pid or 0, blow.signal)
                    fell, struck = event, time.monotonic()
                    deadline = time.monotonic() + ENDS_WITHIN_SECONDS
        if fell:
            print(f"at {fell}: all had ended {time.monotonic() - struck:.1f} s after the blow")
    finally:
        for process in ranks:
            process.kill()
            process.join()
        os.close(reader)
        os.close(keep_open)
    return [process.exitcode or 0 for process in ranks], fell


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = make_workspace(tmp_path_factory.mktemp("workspace"), num_hidden_layers=2)
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
        actor={"optim": {"lr_decay_style": "linear"}, "ppo_epochs": 1},
        critic={"ppo_epochs": 1},
    )


@pytest.fixture(scope="module")
def in_peace(config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    root = tmp_path_factory.mktemp("peace")
    codes, _ = start_and_strike(config, root / "logs", None, [f"trainer.default_local_dir={root / 'run'}"])
    assert codes == [0, 0], (root / "logs" / "stderr").read_text()
    return outcome(root / "run", STEPS)


@pytest.mark.parametrize("seed", range(4))
def test_killed_anywhere(config: Path, in_peace: dict[str, object], tmp_path: Path, seed: int) -> None:
    rng = random.Random(f"{os.environ.get('KILL_SEED', '0')} {seed}")
    kinds = list(KINDS)
    rng.shuffle(kinds)
    if kinds[0] == KINDS[-1]:
        kinds.reverse()  # there is nothing to resume before the first blow
    overrides = [f"trainer.default_local_dir={tmp_path / 'run'}", f"trainer.async_save={str(seed % 2 == 0).lower()}"]
    blows = [(kind, draw(kind, rng)) for kind in kinds]
    fallen = []
    for number, (kind, blow) in enumerate(blows):
        codes, fell = start_and_strike(config, tmp_path / f"logs{number}", blow, overrides)
        print(f"{kind}: {blow} at {fell or 'no time'}, exit codes {codes}")
        fallen += [fell] if fell else []
    assert len(fallen) == len(KINDS), "a run came to its end before it was struck"
    codes, _ = start_and_strike(config, tmp_path / "logs", None, overrides)
    assert codes == [0, 0], (tmp_path / "logs" / "stderr").read_text()
    result = outcome(tmp_path / "run", STEPS)
    for key, value in in_peace.items():
        assert result[key] == value, key
