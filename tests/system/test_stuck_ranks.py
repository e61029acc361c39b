"""A rank that is frozen (SIGSTOP) or loops forever ends the run on the other ranks, within the
timeout and with a line that names it. Ranks that die are the subject of test_cli.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import forked
import pytest
from tiny import make_workspace, write_config

pytestmark = pytest.mark.system
PROGRAM = str(Path(__file__).parent / "freezing.py")
START_WITHIN_SECONDS = 600
SLACK_SECONDS = 120
"""Allowed beyond the timeout: the interval of the heartbeats, and a busy machine."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the config of a run with tensor-parallel size 2 in training and generation."""
    return write_config(
        make_workspace(tmp_path_factory.mktemp("workspace"), num_hidden_layers=1),
        actor={"megatron": {"tensor_model_parallel_size": 2}},
        rollout={"tensor_model_parallel_size": 2},
        trainer={
            "total_training_steps": 100,
            "test_freq": -1,
            "val_before_train": False,
            "logger": ["console"],
        },
    )


POOLS = [
    "actor.megatron.tensor_model_parallel_size=1",
    "rollout.tensor_model_parallel_size=1",
    "resource_pools.train=1",
    "resource_pools.rollout=1",
    "rollout.one_step_off=true",
    "algorithm.rollout_correction.rollout_is=token",
]


# (rank that gets stuck, where, dist_timeout, heartbeat_timeout, words of the other one's error,
# settings)
CASES: dict[str, tuple[int, str, int, int, list[str], list[str]]] = {
    "frozen in vLLM's group": (
        *(1, "in vLLM's group", 12, 300),
        [
            "lost contact with another rank in phase gen (",
            "; in all_reduce, called from vllm_engine.py:",
        ]
        + ["; rank 1 (", ") has sent no heartbeat for ", ", last in phase gen of step 2"],
        [],
    ),
    "frozen in Megatron's group": (
        *(1, "in Megatron's group", 12, 300),
        [
            "lost contact with another rank in phase old_log_prob (",
            "; in all_reduce, called from gpt_model.py:",
        ]
        + ["; rank 1 (", ") has sent no heartbeat for ", ", last in phase old_log_prob of step 2"],
        [],
    ),
    "the first rank, by its silence": (
        *(0, "in Megatron's group", 600, 6),
        [
            "rank 0 (",
            ") has sent no heartbeat for ",
            "; this rank was in phase old_log_prob of step 2 for ",
        ]
        + ["in all_reduce, called from gpt_model.py:"],
        [],
    ),
    "alive, in code of its own": (
        *(1, "in code of its own", 12, 300),
        ["lost contact with another rank in phase update_critic (", "; in all_", "; rank 1 ("]
        + [") is behind: in phase adv of step 2 for ", "at freezing.py:", " (loop_forever)"],
        [],
    ),
    "alive, in the other pool": (
        *(1, "in its engine", 12, 300),
        ["rank 1 (", ") has made no progress for ", " s: in phase gen of step 2 for "]
        + ["at freezing.py:", " (loop_forever); this rank was in phase idle of step 2 for "],
        POOLS,
    ),
    # Heartbeats come every 5 s, and a token takes 1 s.
    "a pool takes longer than a collective": (
        *(1, "slow engine", 12, 300),
        [],
        [*POOLS, "trainer.total_training_steps=3", "data.max_response_length=16"],
    ),
}
*STUCK, SLOW = CASES


class Runs:
    """The runs of CASES. Each waits most of its time, so two run at once."""

    def __init__(self, config: Path, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._ranks: dict[str, list[BaseProcess]] = {}
        self.started: dict[str, float] = {}

    def directory(self, name: str) -> Path:
        return self._directory / name.replace(" ", "_")

    def ranks(self, name: str) -> list[BaseProcess]:
        """Return the ranks of a case. Start them and those of the next case, if they have not been
        started."""
        for case in [*CASES][[*CASES].index(name) :][:2]:
            if case not in self._ranks:
                self.started[case] = time.time()
                self._ranks[case] = self._start(case)
        return self._ranks[name]

    def _start(self, name: str) -> list[BaseProcess]:
        """Start the ranks, which write to rank0 and rank1 in the run's directory."""
        victim, where, dist_timeout, heartbeat_timeout, _, settings = CASES[name]
        place = self.directory(name)
        place.mkdir()
        arguments = [
            *(str(self._config), *settings),
            f"trainer.default_local_dir={place / 'run'}",
            f"trainer.dist_timeout_seconds={dist_timeout}",
            f"trainer.heartbeat_timeout_seconds={heartbeat_timeout}",
        ]
        started = []
        for rank, env in enumerate(forked.rank_variables(world=2)):
            env |= {"STUCK": where if rank == victim else "", "SINCE": str(place / "since")}
            files = place / f"out{rank}", place / f"rank{rank}"
            started.append(forked.start([PROGRAM, *arguments], *files, env))
        return started

    def kill(self) -> None:
        for process in (process for ranks in self._ranks.values() for process in ranks):
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def runs(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    started = Runs(config, tmp_path_factory.mktemp("runs"))
    yield started
    started.kill()


@pytest.mark.parametrize("name", STUCK)
def test_the_others_end_in_time_and_name_it(runs: Runs, name: str) -> None:
    victim, _, dist_timeout, heartbeat_timeout, words, settings = CASES[name]
    ranks = runs.ranks(name)
    survivor = ranks[1 - victim]
    survivor.join(START_WITHIN_SECONDS)
    written = runs.directory(name) / f"rank{1 - victim}"
    output = written.read_text()
    assert survivor.exitcode == 1, output
    took = written.stat().st_mtime - float((runs.directory(name) / "since").read_text())
    limit = min(dist_timeout, heartbeat_timeout)
    assert limit - 2 < took < limit + SLACK_SECONDS, f"{took:.1f} s: {output}"
    if settings != POOLS:  # there rank 0 ends them all
        assert ranks[victim].is_alive()  # the others have not ended because the victim has
        ranks[victim].kill()
    errors = [line for line in output.splitlines() if line.startswith("rlhf_mc: error")]
    assert len(errors) == 1, output
    for word in words:
        assert word in errors[0]


def test_a_pool_may_take_longer_than_a_collective(runs: Runs) -> None:
    """Generate for longer than trainer.dist_timeout_seconds."""
    ranks = runs.ranks(SLOW)
    for process in ranks:
        process.join(START_WITHIN_SECONDS)
    outputs = [(runs.directory(SLOW) / f"rank{rank}").read_text() for rank in range(2)]
    assert [process.exitcode for process in ranks] == [0, 0], outputs
    last_call = float((runs.directory(SLOW) / "since").read_text())
    assert last_call - runs.started[SLOW] > CASES[SLOW][2] and "is behind" not in outputs[0]
