"""The program as a user starts it: exit codes, stderr, and that no process outlives its run. Which
input is refused, and with which words, is tested in tests/dist/test_bad_input.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import forked
import pytest
from runs import ends, gone, is_running, kill, last_step, members, read_of, wait_until
from tiny import make_workspace, write_config

from rlhf_mc.runtime.preemption import ONE_PRESS_SECONDS

pytestmark = pytest.mark.system

EXIT_USER_ERROR = 2
GONE_WITHIN_SECONDS = 300
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ONE_NODE = [str(Path(__file__).parents[2] / "launch" / "torchrun_1node.sh")]
ENV = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES} | {
    "OMP_NUM_THREADS": "1"
}
PLAIN = [sys.executable, "-m", "rlhf_mc"]
TWO_RANKS = ["--standalone", "--nproc-per-node", "2", "-m", "rlhf_mc"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", *TWO_RANKS]
FORKING_TORCHRUN = [str(Path(__file__).with_name("forking_torchrun.py")), *TWO_RANKS]
"""For tests whose ranks import everything, except those of signals to the agent."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("workspace"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def config(workspace: Path) -> Path:
    """Write the config of a run that would take hours."""
    return write_config(
        workspace,
        trainer={"total_training_steps": 100_000, "test_freq": -1, "val_before_train": False},
    )


def our_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("rlhf_mc: error")]


def ended(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=500)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{config}", "actor.ppo_epoch=2"], ["actor.ppo_epoch", "actor.ppo_epochs"]),
        (["/nowhere/config.yaml"], ["/nowhere/config.yaml"]),
        ([], ["usage: torchrun", "CONFIG.yaml"]),
        (["{config}", "actor.ppo_epochs=two"], ["actor.ppo_epochs", "two"]),
    ],
    ids=["misspelt key", "no config file", "no arguments", "wrong type"],
)
def test_one_line_and_exit_code_2(config: Path, arguments: list[str], words: list[str]) -> None:
    done = ended([*PLAIN, *(argument.format(config=config) for argument in arguments)])
    assert done.returncode == EXIT_USER_ERROR
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("rlhf_mc: error: ")
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ("run", "torchrun", "override", "words"),
    [
        (
            ended,
            TORCHRUN,
            "data.train_files=/nowhere/train.parquet",
            ["data.train_files /nowhere/train.parquet: no such"],
        ),
        (
            forked.run,
            FORKING_TORCHRUN,
            "data.max_prompt_length=3",
            ["data.train_files ", "row 0", "max_prompt_length 3"],
        ),
    ],
    ids=["before the ranks are connected", "after"],
)
def test_under_torchrun_the_ranks_say_it_once(
    run: Callable[[list[str]], subprocess.CompletedProcess[str]],
    torchrun: list[str],
    config: Path,
    override: str,
    words: list[str],
) -> None:
    done = run([*torchrun, str(config), override])
    assert done.returncode != 0
    lines = our_lines(done.stderr)
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0]
    # What torchrun itself prints afterwards is its own; a stack of ours would name a file of ours.
    assert "rlhf_mc/trainer" not in done.stderr


# ---------------------------------------------------------------- a rank that dies


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return start(command, name, env): a process with its output in tmp_path/name. Those that are
    left are killed."""
    started: list[subprocess.Popen[bytes]] = []

    def run(command: list[str], name: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(tmp_path / name, "wb") as output:
            process = subprocess.Popen(
                command, env=env, stdout=output, stderr=output, start_new_session=True
            )
        started.append(process)
        return process

    yield run
    for process in started:
        for pid in members(process.pid):
            kill(pid)
        process.wait()


def workers_of(torchrun: int) -> list[int]:
    """Return the two ranks: torchrun's direct children that run the program."""
    return [pid for pid in children_of(torchrun) if b"rlhf_mc" in read_of(pid, "cmdline")]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_step(run: Path, runs: Callable[[], bool], stderr: Path, step: int = 2) -> None:
    """Wait until the run has logged the step, or fail if it has ended."""
    wait_until(lambda: last_step(run) >= step or not runs())
    assert last_step(run) >= step, stderr.read_text()


@pytest.fixture
def ranks() -> Iterator[list[BaseProcess]]:
    """Return a list for the test to fill. Those that are left are killed."""
    started: list[BaseProcess] = []
    yield started
    for process in started:
        process.kill()
        process.join()


def test_torchrun_ends_when_a_rank_dies(
    config: Path, tmp_path: Path, ranks: list[BaseProcess]
) -> None:
    run = tmp_path / "run"
    stderr = tmp_path / "stderr"
    torchrun = forked.start(
        [*FORKING_TORCHRUN, str(config), f"trainer.default_local_dir={run}"], stderr, stderr
    )
    ranks.append(torchrun)
    assert torchrun.pid is not None
    wait_for_step(run, torchrun.is_alive, stderr)
    workers = children_of(torchrun.pid)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    torchrun.join(GONE_WITHIN_SECONDS)
    assert torchrun.exitcode not in (None, 0)
    assert gone(torchrun.pid) and all(gone(worker) for worker in workers)
    assert "rlhf_mc/trainer" not in stderr.read_text()


@pytest.mark.parametrize(
    ("victim", "rollout_tp"), [(1, 1), (0, 2)], ids=["last rank", "first rank, one engine of both"]
)
def test_a_survivor_ends_by_itself(
    config: Path, tmp_path: Path, ranks: list[BaseProcess], victim: int, rollout_tp: int
) -> None:
    """Start ranks without torchrun's agent, as a plain srun does."""
    run = tmp_path / "run"
    # Longer responses, so that the engine is at work when the rank dies.
    command = ["-m", "rlhf_mc", str(config), f"trainer.default_local_dir={run}"]
    command += [f"rollout.tensor_model_parallel_size={rollout_tp}", "rollout.n=4"]
    outputs = [tmp_path / f"stderr{rank}" for rank in range(2)]
    for output, env in zip(outputs, forked.rank_variables(world=2), strict=True):
        ranks.append(forked.start(command, output, output, env))
    survivor = ranks[1 - victim]
    wait_for_step(run, lambda: all(rank.is_alive() for rank in ranks), outputs[1 - victim])
    ranks[victim].kill()
    survivor.join(GONE_WITHIN_SECONDS)
    stderr = outputs[1 - victim].read_text()
    assert survivor.exitcode == 1, stderr
    assert survivor.pid is not None and gone(survivor.pid)
    lines = our_lines(stderr)
    assert len(lines) == 1, stderr
    assert lines[0].startswith(
        f"rlhf_mc: error on rank {1 - victim}: lost contact with another rank in phase "
    )
    assert "Traceback" not in stderr


# ---------------------------------------------------------------- torchrun's agent


def ready_workers_of(torchrun: subprocess.Popen[bytes], ready: Callable[[int], bool]) -> list[int]:
    """Return torchrun's two ranks, once both are ready."""

    def both() -> list[int]:
        assert torchrun.poll() is None
        workers = workers_of(torchrun.pid)
        return workers if len(workers) == 2 and all(map(ready, workers)) else []

    assert wait_until(both), "torchrun has started no ranks"
    return both()


def takes_signals(pid: int) -> bool:
    """Return whether the rank blocks SIGINT, for the thread that handles its signals."""
    blocked = re.search(rb"^SigBlk:\s*(\w+)", read_of(pid, "status"), re.MULTILINE)
    return blocked is not None and bool(int(blocked[1], 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.parametrize("when", ["at once", "while they import"])
def test_ranks_end_with_torchruns_agent(
    config: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]], when: str
) -> None:
    torchrun = start(
        [*TORCHRUN, str(config), f"trainer.default_local_dir={tmp_path / 'run'}"], "output", ENV
    )
    workers = ready_workers_of(
        torchrun, takes_signals if when == "while they import" else lambda pid: True
    )
    torchrun.kill()
    assert [ends(pid) for pid in workers] == [True, True]


def test_ctrl_c_saves_and_says_so_in_one_line(
    config: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run = tmp_path / "run"
    env = ENV | {"NPROC": "2", "PYTHON": sys.executable}
    torchrun = start([*ONE_NODE, str(config), f"trainer.default_local_dir={run}"], "output", env)
    wait_for_step(run, lambda: torchrun.poll() is None, tmp_path / "output", step=1)
    workers = workers_of(torchrun.pid)
    os.killpg(torchrun.pid, signal.SIGINT)  # as the terminal does
    assert torchrun.wait(GONE_WITHIN_SECONDS) == 75
    assert [ends(pid) for pid in workers] == [True, True]
    said = (tmp_path / "output").read_text()
    lines = [
        line
        for line in said.splitlines()
        if "asked to stop (SIGINT): the checkpoint of step" in line
    ]
    assert len(lines) == 1 and "Traceback" not in said, said
    assert list(run.glob("global_step_*/manifest.json"))
    assert not (run / "success.json").exists()


def test_a_second_ctrl_c_ends_all_ranks_at_once(
    config: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    env = ENV | {"NPROC": "2", "PYTHON": sys.executable}
    torchrun = start(
        [*ONE_NODE, str(config), f"trainer.default_local_dir={tmp_path / 'run'}"], "output", env
    )
    workers = ready_workers_of(torchrun, takes_signals)
    os.killpg(torchrun.pid, signal.SIGINT)
    time.sleep(ONE_PRESS_SECONDS + 0.5)
    assert all(map(is_running, workers))  # nothing to save yet, but they import first
    os.killpg(torchrun.pid, signal.SIGINT)
    assert torchrun.wait(GONE_WITHIN_SECONDS) == 130
    assert [ends(pid) for pid in workers] == [True, True]
    assert "Traceback" not in (tmp_path / "output").read_text()
