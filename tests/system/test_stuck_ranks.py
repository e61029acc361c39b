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


@pytest.fixture
def ranks() -> Iterator[list[BaseProcess]]:
    """Yield a list for the test to fill with processes; those that are left are killed."""
    started: list[BaseProcess] = []
    yield started
    for process in started:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("victim", "where", "dist_timeout", "heartbeat_timeout", "words", "settings"),
    [
        pytest.param(
            *(1, "in vLLM's group", 12, 300),
            [
                "lost contact with another rank in phase gen (",
                "; in all_reduce, called from vllm_engine.py:",
            ]
            + ["; rank 1 (", ") has sent no heartbeat for ", ", last in phase gen of step 2"],
            [],
            id="frozen in vLLM's group",
        ),
        pytest.param(
            *(1, "in Megatron's group", 12, 300),
            [
                "lost contact with another rank in phase old_log_prob (",
                "; in all_reduce, called from gpt_model.py:",
            ]
            + [
                "; rank 1 (",
                ") has sent no heartbeat for ",
                ", last in phase old_log_prob of step 2",
            ],
            [],
            id="frozen in Megatron's group",
        ),
        pytest.param(
            *(0, "in Megatron's group", 600, 6),
            [
                "rank 0 (",
                ") has sent no heartbeat for ",
                "; this rank was in phase old_log_prob of step 2 for ",
            ]
            + ["in all_reduce, called from gpt_model.py:"],
            [],
            id="the first rank, by its silence",
        ),
        pytest.param(
            *(1, "in code of its own", 12, 300),
            ["lost contact with another rank in phase update_critic (", "; in all_", "; rank 1 ("]
            + [") is behind: in phase adv of step 2 for ", "at freezing.py:", " (loop_forever)"],
            [],
            id="alive, in code of its own",
        ),
        pytest.param(
            *(1, "in its engine", 12, 300),
            ["rank 1 (", ") has made no progress for ", " s: in phase gen of step 2 for "]
            + ["at freezing.py:", " (loop_forever); this rank was in phase idle of step 2 for "],
            POOLS,
            id="alive, in the other pool",
        ),
    ],
)
def test_the_others_end_in_time_and_name_it(
    config: Path,
    tmp_path: Path,
    ranks: list[BaseProcess],
    victim: int,
    where: str,
    dist_timeout: int,
    heartbeat_timeout: int,
    words: list[str],
    settings: list[str],
) -> None:
    arguments = [
        *(str(config), *settings),
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"trainer.dist_timeout_seconds={dist_timeout}",
        f"trainer.heartbeat_timeout_seconds={heartbeat_timeout}",
    ]
    for rank, env in enumerate(forked.rank_variables(world=2)):
        env |= {"STUCK": where if rank == victim else "", "SINCE": str(tmp_path / "since")}
        ranks.append(
            forked.start(
                [PROGRAM, *arguments], tmp_path / f"out{rank}", tmp_path / f"rank{rank}", env
            )
        )
    survivor = ranks[1 - victim]
    survivor.join(START_WITHIN_SECONDS)
    output = (tmp_path / f"rank{1 - victim}").read_text()
    assert survivor.exitcode == 1, output
    took = time.time() - float((tmp_path / "since").read_text())
    limit = min(dist_timeout, heartbeat_timeout)
    assert limit - 2 < took < limit + SLACK_SECONDS, f"{took:.1f} s: {output}"
    if settings != POOLS:  # there rank 0 ends them all
        assert ranks[victim].is_alive()  # the others have not ended because the victim has
    errors = [line for line in output.splitlines() if line.startswith("rlhf_mc: error")]
    assert len(errors) == 1, output
    for word in words:
        assert word in errors[0]


def test_a_pool_may_take_longer_than_a_collective(
    config: Path, tmp_path: Path, ranks: list[BaseProcess]
) -> None:
    """Generate for longer than trainer.dist_timeout_seconds: one second for each token."""
    timeout = 12  # heartbeats come every 5 s
    arguments = [
        *(str(config), *POOLS, f"trainer.default_local_dir={tmp_path / 'run'}"),
        *(f"trainer.dist_timeout_seconds={timeout}", "trainer.total_training_steps=3"),
        f"data.max_response_length={timeout + 4}",
    ]
    for rank, env in enumerate(forked.rank_variables(world=2)):
        env |= {"STUCK": "slow engine" if rank == 1 else "", "SINCE": str(tmp_path / "since")}
        ranks.append(
            forked.start(
                [PROGRAM, *arguments], tmp_path / f"out{rank}", tmp_path / f"rank{rank}", env
            )
        )
    start = time.time()
    for process in ranks:
        process.join(START_WITHIN_SECONDS)
    outputs = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert [process.exitcode for process in ranks] == [0, 0], outputs
    assert time.time() - start > timeout and "is behind" not in outputs[0]
