"""Two ranks are killed at random points and started again by the same command: each run ends with
the result of the uninterrupted run, bit for bit. Where the time of an environment's answers decides
batches, the result is that of the run's replay."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from runs import kill, outcome
from tiny import make_reward_model, make_workspace, write_config

from rlhf_mc.run_files import OBSERVATIONS, read_rows

pytestmark = pytest.mark.system

WORLD = 2
STEPS = 7
PROGRAM = str(Path(__file__).parent / "killable.py")
SAVE_EVENTS = ("save_checkpoint", "writing", "commit", "remove")
ENDS_WITHIN_SECONDS = 600
RESUMES = "kill again while it resumes"
KINDS = (
    "kill one rank",
    "terminate all",
    "kill in a save",
    RESUMES,
    "kill in a write of the journal",
)
ENVIRONMENT = """
import asyncio, os, zlib
from pathlib import Path

CALLS = Path(__file__).with_name("calls")

class Environment:
    def reset(self, row):
        self.name = os.urandom(8).hex()
        self.seen = str(row["prompt"])

    async def step(self, response, token_ids):
        self.seen += str(token_ids)
        call = zlib.crc32(self.seen.encode())
        with CALLS.open("a") as file:
            print(self.name, call, file=file)
        await asyncio.sleep(0.05 * os.urandom(1)[0] / 255)
        return [10 + call % 200, 8], float(call % 5), call % 5 == 0, {"call": call}
"""


@dataclass(frozen=True)
class Fault:
    """A signal, the ranks that get it, and its time."""

    victims: Sequence[int]
    signal: int
    rank: int
    """The rank whose events are counted."""
    only: tuple[str, ...]
    """Events that count; empty: all but the rows of the journal."""
    after: int
    """Number of the event, from 1."""
    delay: float
    """Seconds after that event."""

    def counts(self, event: str) -> bool:
        """Return whether an event counts."""
        return event in self.only if self.only else event != OBSERVATIONS


def draw(kind: str, rng: random.Random) -> Fault:
    """Draw a fault in the first steps after a start, so that every start completes some steps."""
    either_way = kind != "terminate all" and rng.random() < 0.5
    victims = (
        [rng.randrange(WORLD)] if kind == "kill one rank" or either_way else list(range(WORLD))
    )
    number = signal.SIGTERM if kind == "terminate all" else signal.SIGKILL
    only: tuple[str, ...] = ()
    after = rng.randint(15, 30)  # the first are those of the start; a step has about 20
    if kind == "kill in a save":
        only = SAVE_EVENTS
        after = rng.randint(2, 9)
    if kind == RESUMES:
        after = rng.randint(1, 8)
    if kind == KINDS[-1]:
        only = (OBSERVATIONS,)
        after = rng.randint(40, 120)
    return Fault(
        victims, number, rng.randrange(WORLD), only, after, rng.choice((0.0, rng.uniform(0, 0.2)))
    )


def start_with_fault(
    config: Path, logs: Path, fault: Fault | None, overrides: Sequence[str]
) -> tuple[list[int], str]:
    """Run until all ranks have ended. Return their exit codes, and the event at which the fault was
    injected ("" if
    the run ended before it)."""
    logs.mkdir(parents=True, exist_ok=True)
    pipe = logs / "events"
    if not pipe.exists():
        os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    keep_open = os.open(pipe, os.O_WRONLY)
    ranks = [
        forked.start(
            [PROGRAM, str(config), *overrides],
            logs / "stdout",
            logs / "stderr",
            {**env, "EVENTS": str(pipe)},
        )
        for env in forked.rank_variables(WORLD)
    ]
    injected_at = ""
    injected_time = 0.0
    counted = 0
    text = ""
    deadline = time.monotonic() + ENDS_WITHIN_SECONDS
    try:
        while any(process.is_alive() for process in ranks):
            assert time.monotonic() < deadline, (
                f"still running after {fault}: {(logs / 'stderr').read_text()[-2000:]}"
            )
            if not select.select([reader], [], [], 0.02)[0]:
                continue
            text += os.read(reader, 65536).decode()
            *lines, text = text.split("\n")
            for line in lines:
                rank, event = line.split(" ")
                counted += fault is not None and int(rank) == fault.rank and fault.counts(event)
                if fault is not None and not injected_at and counted == fault.after:
                    time.sleep(fault.delay)
                    for victim in fault.victims:
                        if ranks[victim].is_alive():
                            kill(ranks[victim].pid or 0, fault.signal)
                    injected_at = event
                    injected_time = time.monotonic()
                    deadline = time.monotonic() + ENDS_WITHIN_SECONDS
        if injected_at:
            print(
                f"at {injected_at}: all ranks ended within {time.monotonic() - injected_time:.1f} s"
            )
    finally:
        for process in ranks:
            process.kill()
            process.join()
        os.close(reader)
        os.close(keep_open)
    return [process.exitcode or 0 for process in ranks], injected_at


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = make_workspace(
        tmp_path_factory.mktemp("workspace"), num_hidden_layers=2, max_position_embeddings=128
    )
    (workspace / "model" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": list(range(4, 10))})
    )
    (workspace / "environment.py").write_text(ENVIRONMENT)
    make_reward_model(workspace / "reward_model")
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
        actor={
            "ppo_max_token_len_per_gpu": 512,
            "optim": {"lr_decay_style": "linear"},
            "ppo_epochs": 1,
        },
        critic={
            "ppo_epochs": 1,
            "ppo_max_token_len_per_gpu": 512,
            "forward_max_token_len_per_gpu": 512,
        },
        ref={"log_prob_max_token_len_per_gpu": 512},
        rollout={"log_prob_max_token_len_per_gpu": 512},
    )


PARTIAL = [
    "rollout.partial_rollout=true",
    "algorithm.rollout_correction.rollout_is=token",
    "rollout.max_num_seqs=16",
]
IN_POOLS = [
    "rollout.one_step_off=true",
    "algorithm.rollout_correction.rollout_is=token",
    "resource_pools.train=1",
    "ref.pool=rollout",
    "resource_pools.rollout=1",
]
TURNS = [
    "custom_reward_function.path=null",
    "rollout.environment.max_turns=4",
    "rollout.environment.max_tokens_per_turn=12",
]
REPLAYABLE = ["trainer.max_ckpt_to_keep=null", "trainer.test_freq=-1"]
OF_BATCHES = ("training/rollout_", "rollout_corr/")
"""Starts of the metrics that compare the engine's log-probs. Their last bits depend on the engine's
batches, and these on when an environment answers."""


# Each kind of fault, with saves in the background and without. Responses are conversations that
# later steps continue, and in pools those of the step before. KILL_SEED moves the points.
@pytest.mark.parametrize(
    ("seed", "settings", "kinds"),
    [
        (2, [*PARTIAL, *TURNS, *REPLAYABLE], KINDS[3:]),
        (3, IN_POOLS, KINDS[:3]),
    ],
    ids=["partial turns", "pools"],
)
def test_killed_anywhere(
    config: Path, tmp_path: Path, seed: int, settings: Sequence[str], kinds: Sequence[str]
) -> None:
    calls = config.parent / "calls"
    calls.write_text("")
    has_turns = TURNS[0] in settings
    is_replayed = REPLAYABLE[0] in settings
    if has_turns:
        settings = [*settings, f"rollout.environment.path={config.parent / 'environment.py'}"]
    else:
        model = f"reward_model.model_path={config.parent / 'reward_model'}"
        settings = [*settings, "reward_model.pool=rollout", model]
    rng = random.Random(f"{os.environ.get('KILL_SEED', '0')} {seed}")
    kinds = list(kinds)
    rng.shuffle(kinds)
    if kinds[0] == RESUMES:
        kinds.reverse()  # there is nothing to resume at the first start
    run = tmp_path / "run"
    overrides = [
        f"trainer.default_local_dir={run}",
        f"trainer.async_save={str(seed % 2 == 0).lower()}",
        *settings,
    ]
    events = []
    for number, (kind, fault) in enumerate([(kind, draw(kind, rng)) for kind in kinds]):
        if IN_POOLS[-1] in settings:
            fault = replace(fault, rank=0)  # a rollout rank has too few events in a step
        codes, event = start_with_fault(config, tmp_path / f"logs{number}", fault, overrides)
        print(f"{kind}: {fault} at {event or 'no event'}, exit codes {codes}")
        events.append(event)
    assert all(events), "a run ended before its fault was injected"
    answered = {row["row"]["reply"]["info"].get("call") for row in answers(run)}
    num_before = len(calls.read_text().splitlines())
    complete(config, run, tmp_path / "logs", overrides)
    if is_replayed:
        assert_answered_once(run, answered, calls.read_text().splitlines()[num_before:])
    wanted = tmp_path / "wanted"
    replay = [f"trainer.replay={run}"] if is_replayed else []
    complete(
        config,
        wanted,
        tmp_path / "wanted_logs",
        [*settings, *replay, f"trainer.default_local_dir={wanted}"],
    )
    ignored = OF_BATCHES if has_turns and not is_replayed else ()
    result = outcome(run, STEPS, ignored)
    for key, value in outcome(wanted, STEPS, ignored).items():
        assert result[key] == value, key
    rows = [row for _, row in read_rows(run / "metrics.jsonl")]
    ages = [row.get("training/off_policy/trajectory_staleness_worst/max", 0) for row in rows]
    are_older = PARTIAL[0] in settings or IN_POOLS[0] in settings
    assert (max(ages) > 0) == are_older, "responses were continued"
    assert not has_turns or min(row["num_turns/mean"] for row in rows) > 1


def complete(config: Path, run: Path, logs: Path, overrides: Sequence[str]) -> None:
    """Run to the end."""
    codes, _ = start_with_fault(config, logs, None, overrides)
    assert codes == [0, 0], (logs / "stderr").read_text()


def answers(run: Path) -> list[dict[str, Any]]:
    """Return the rows of answers in the journal of a run."""
    rows = [row for path in run.glob(f"{OBSERVATIONS}/*.jsonl") for _, row in read_rows(path)]
    return [row for row in rows if row["row"]["type"] == "answer"]


def assert_answered_once(run: Path, answered: set[int], calls: Sequence[str]) -> None:
    """Check that each turn of a run has one answer, and the calls of environments, in the order in
    which they were made, since the journal had the answers to the calls `answered`."""
    assert (
        max(
            Counter(
                (row["step"], *row["row"]["turn"], row["row"]["digest"]) for row in answers(run)
            ).values()
        )
        == 1
    )
    last_calls = dict(line.split() for line in calls)
    # An environment that is begun again gets the earlier turns, and then one without an answer,
    # unless the run ends.
    with np.load(run / f"global_step_{STEPS}" / "group_pool.npz") as arrays:
        left = [one for group in json.loads(str(arrays["conversations"])) for one in group.values()]
    again = [call for call in last_calls.values() if int(call) in answered]
    assert answered and last_calls and len(again) <= sum(one["waits"] for one in left)
