"""Soak test: runs with random faults at random times, each compared with an uninterrupted run, bit
for bit.

    python tests/soak.py --minutes 30 [--seed 1] [--output DIR] [--faults NAME ...]

A campaign is one run of two ranks in one directory. It is started several times by the same
command, each time with another fault, then once without any. The first unexpected outcome ends the
soak test with exit code 1 and keeps the directory. pytest collects nothing here: tests/system tests
the same properties one by one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import forked
import pyarrow.parquet as pq
from runs import gone, members, outcome
from safetensors.torch import load_file, save_file
from tiny import make_workspace, write_config

WORLD = 2
STEPS = 20
ENDS_WITHIN_SECONDS = 300
LATEST = 0.6
"""The share of an uninterrupted run's time in which faults happen: each start completes some steps,
but not all."""
CRASHED = 1
EXIT_USER_ERROR = 2
REQUEUE = 75
LAYOUTS: dict[str, list[str]] = {
    "DP 2": [],
    "TP 2, one engine of TP 2": [
        "actor.megatron.tensor_model_parallel_size=2",
        "rollout.tensor_model_parallel_size=2",
    ],
    "PP 2": ["actor.megatron.pipeline_model_parallel_size=2"],
    "TP 2, critic in DP 2": [
        "actor.megatron.tensor_model_parallel_size=2",
        "critic.megatron.tensor_model_parallel_size=1",
    ],
    "TP 2, adapters": [
        "actor.megatron.tensor_model_parallel_size=2",
        "actor.lora.rank=4",
        "critic.lora.rank=4",
    ],
}
REWARD = """
import os
import sys
import time

FAULT, AFTER = os.environ.get("SOAK_REWARD", ""), int(os.environ.get("SOAK_AFTER", "0"))
calls = 0
if FAULT == "sys.exit at import":
    sys.exit(0)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    if FAULT and calls > AFTER:
        if FAULT == "sys.exit":
            sys.exit(0)
        if FAULT == "os._exit":
            os._exit(0)
        if FAULT == "hang":
            time.sleep(600)
        if FAULT == "nan":
            return float("nan")
        raise ValueError("asked to fail")
    return {"score": len(solution_str) / 10 + solution_str.count("1"), "length": len(solution_str)}
"""


class Broken(AssertionError):
    """An outcome that is not as documented."""


def require(ok: bool, what: str) -> None:
    if not ok:
        raise Broken(what)


class Attempt:
    """One start of a run's command, on all ranks."""

    def __init__(
        self,
        campaign: Campaign,
        *overrides: str,
        env: Mapping[str, str] | None = None,
        largest_file: int | None = None,
    ) -> None:
        self.logs = campaign.next_logs()
        self.began = time.monotonic()
        arguments = ["-m", "rlhf_mc", *campaign.arguments, *overrides]
        self.ranks: list[BaseProcess] = [
            forked.start(
                arguments,
                self.logs / "stdout",
                self.logs / "stderr",
                {**rank, **(env or {})},
                largest_file,
            )
            for rank in forked.rank_variables(WORLD)
        ]

    def running(self) -> bool:
        return any(rank.is_alive() for rank in self.ranks)

    def sleep(self, seconds: float) -> None:
        """Return `seconds` after the start, or once a rank has ended."""
        while time.monotonic() < self.began + seconds and all(
            rank.is_alive() for rank in self.ranks
        ):
            time.sleep(0.02)

    def signal(self, number: int, ranks: Sequence[int] = range(WORLD)) -> None:
        for rank in ranks:
            if self.ranks[rank].is_alive():
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.kill(self.ranks[rank].pid or 0, number)

    def end(self, ranks: Sequence[int] = range(WORLD)) -> list[int]:
        """Return the exit codes, once these ranks have ended and left no process behind."""
        deadline = time.monotonic() + ENDS_WITHIN_SECONDS
        for rank in ranks:
            self.ranks[rank].join(max(0.0, deadline - time.monotonic()))
        running = [rank for rank in ranks if self.ranks[rank].is_alive()]
        require(not running, f"ranks {running} have not ended within {ENDS_WITHIN_SECONDS} s")
        for rank in ranks:
            require(gone(self.ranks[rank].pid or 0), f"rank {rank} has left processes behind")
        return [self.ranks[rank].exitcode or 0 for rank in ranks]

    def said(self) -> str:
        return (self.logs / "stderr").read_text()

    def tail(self) -> str:
        return self.said()[-3000:]

    def no_stack(self) -> None:
        """Require that stderr has no stack trace."""
        require("Traceback" not in self.said(), f"a stack trace: {self.tail()}")

    def one_line(self, *words: str) -> None:
        """Require one error line on stderr, with these words, and no stack trace."""
        lines = [line for line in self.said().splitlines() if line.startswith("rlhf_mc: error")]
        require(
            len(lines) == 1 and "Traceback" not in self.said(),
            f"one error line expected:\n{self.tail()}",
        )
        for word in words:
            require(word in lines[0], f"{word!r} is not in: {lines[0]}")


class Campaign:
    """One run's directory and command, and the random times of its faults."""

    def __init__(
        self, root: Path, config: Path, overrides: Sequence[str], seconds: float, rng: random.Random
    ) -> None:
        self.run = root / "run"
        self.config = config
        self.rng = rng
        self.arguments = [str(config), f"trainer.default_local_dir={self.run}", *overrides]
        self.seconds = seconds
        """Duration of the uninterrupted run."""
        self._root = root
        self._attempts = 0

    def next_logs(self) -> Path:
        self._attempts += 1
        logs = self._root / f"attempt{self._attempts}"
        logs.mkdir(parents=True)
        return logs

    def moment(self, first: float = 0.0) -> float:
        """Draw seconds after the start. first: the earliest, as a share of the time in which faults
        happen."""
        return self.rng.uniform(first * LATEST, LATEST) * self.seconds

    def checkpoints(self) -> list[Path]:
        """Return the run's checkpoints in the order of their steps."""
        found = (path for path in self.run.glob("global_step_*") if path.name[12:].isdigit())
        return sorted(found, key=lambda path: int(path.name[12:]))


def killed(campaign: Campaign, victims: Sequence[int], *overrides: str) -> str:
    """Kill ranks by SIGKILL: survivors end with code 1."""
    attempt = Attempt(campaign, *overrides)
    attempt.sleep(at := campaign.moment())
    attempt.signal(signal.SIGKILL, victims)
    codes = attempt.end()
    for rank, code in enumerate(codes):
        # A rank that has nothing left to do may have ended just before its neighbour was killed.
        expected = (0, -signal.SIGKILL) if rank in victims else (0, CRASHED)
        require(
            code in expected,
            f"rank {rank} ended with {code}, expected one of {expected}: {attempt.tail()}",
        )
    attempt.no_stack()
    return f"at {at:.1f} s: {codes}"


def kill_one_rank(campaign: Campaign) -> str:
    return killed(campaign, [campaign.rng.randrange(WORLD)])


def kill_all_ranks(campaign: Campaign) -> str:
    return killed(campaign, range(WORLD))


def interrupted(campaign: Campaign, number: int) -> str:
    """Send SIGTERM or SIGINT: the run saves its last complete step and ends with code 75."""
    attempt = Attempt(campaign)
    attempt.sleep(at := campaign.moment())
    attempt.signal(number)
    codes = attempt.end()
    if -number not in codes:  # a rank that does not handle signals yet dies of them
        require(codes in ([REQUEUE] * WORLD, [0] * WORLD), f"exit codes {codes}: {attempt.tail()}")
    attempt.no_stack()
    return f"at {at:.1f} s: {codes}"


def terminate(campaign: Campaign) -> str:
    return interrupted(campaign, signal.SIGTERM)


def press_ctrl_c(campaign: Campaign) -> str:
    return interrupted(campaign, signal.SIGINT)


def freeze_a_rank(campaign: Campaign) -> str:
    """Freeze a rank by SIGSTOP: the others end by themselves and name it."""
    victim = campaign.rng.randrange(WORLD)
    attempt = Attempt(
        campaign, "trainer.dist_timeout_seconds=60", "trainer.heartbeat_timeout_seconds=15"
    )
    attempt.sleep(at := campaign.moment(first=0.5))
    attempt.signal(signal.SIGSTOP, [victim])
    frozen = attempt.ranks[victim].is_alive()
    try:
        codes = attempt.end([rank for rank in range(WORLD) if rank != victim])
    finally:
        attempt.signal(signal.SIGKILL, [victim])
    attempt.end()
    if frozen and codes != [0] * (WORLD - 1):
        require(codes == [CRASHED] * (WORLD - 1), f"exit codes {codes} of the others")
        attempt.one_line(f"rank {victim}")
    return f"rank {victim} at {at:.1f} s: {codes}"


def fill_the_disk(campaign: Campaign) -> str:
    """Limit the size of files, as on a full disk: the run ends with one line, or succeeds if no
    file is as large. The limit holds for the logs too, which have up to 2 kB when the run ends."""
    size = int(2 ** campaign.rng.uniform(12, 22))
    attempt = Attempt(campaign, largest_file=size)
    codes = attempt.end()
    require(
        codes in ([EXIT_USER_ERROR] * WORLD, [0] * WORLD), f"exit codes {codes}: {attempt.tail()}"
    )
    if codes[0]:
        attempt.one_line("File too large")
    return f"files of at most {size} bytes: {codes}"


def end_in_the_reward_function(campaign: Campaign) -> str:
    """Use a reward function that fails, exits with 0, or never returns: one line names it."""
    fault = campaign.rng.choice(
        ["raise", "sys.exit", "sys.exit at import", "os._exit", "hang", "nan"]
    )
    env = {"SOAK_REWARD": fault, "SOAK_AFTER": str(campaign.rng.randrange(60))}
    attempt = Attempt(campaign, "reward.timeout_seconds=10", env=env)
    codes = attempt.end()
    require(
        codes in ([EXIT_USER_ERROR] * WORLD, [0] * WORLD),
        f"{fault}: exit codes {codes}: {attempt.tail()}",
    )
    if codes[0]:
        attempt.one_line("reward")
    return f"{fault}: {codes}"


def kill_the_agent(campaign: Campaign) -> str:
    """Kill torchrun itself: its ranks end too."""
    logs = campaign.next_logs()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(WORLD),
    ]
    command += ["-m", "rlhf_mc", *campaign.arguments]
    with open(logs / "stderr", "wb") as stderr:
        agent = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
    try:
        at = campaign.rng.uniform(2, 30)  # importing the libraries takes about half of that
        time.sleep(at)
        agent.kill()
        agent.wait()
        require(gone(agent.pid), "ranks are left 60 s after torchrun was killed")
    finally:
        for pid in members(agent.pid):
            os.kill(pid, signal.SIGKILL)
    return f"at {at:.1f} s"


def corrupt(path: Path, rng: random.Random) -> str:
    """Corrupt one file of a checkpoint. Return which and how."""
    file = rng.choice(sorted(path.iterdir()))
    data = bytearray(file.read_bytes())
    way = rng.choice(
        ["truncated", "changed", "deleted", "replaced by a directory", "replaced by noise"]
    )
    file.unlink()
    if way == "truncated":
        file.write_bytes(data[: rng.randrange(len(data))])
    elif way == "changed":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    elif way == "replaced by a directory":
        file.mkdir()
    elif way == "replaced by noise":
        file.write_bytes(rng.randbytes(len(data)))
    return f"{path.name}/{file.name} {way}"


def corrupt_the_newest_checkpoint(campaign: Campaign) -> str:
    """Corrupt the newest checkpoint: the run resumes from the one before it."""
    saved = campaign.checkpoints()
    if len(saved) < 2:
        return kill_one_rank(campaign)
    what = corrupt(saved[-1], campaign.rng)
    return f"{what}; {kill_one_rank(campaign)}"


def copy_a_checkpoint(campaign: Campaign) -> str:
    """Copy a checkpoint under another step's name: the run does not touch it."""
    saved = campaign.checkpoints()
    if not saved:
        return kill_all_ranks(campaign)
    source = campaign.rng.choice(saved)
    name = campaign.rng.choice(
        ["global_step_99", "global_step_0" + source.name[12:], "global_step_5x"]
    )
    copy = campaign.run / name
    shutil.copytree(source, copy)
    said = kill_all_ranks(campaign)
    require((copy / "manifest.json").is_file(), f"{copy} was changed")
    shutil.rmtree(copy)
    return f"{source.name} copied as {name}; {said}"


def refused(campaign: Campaign, *words: str, overrides: Sequence[str] = ()) -> None:
    """Require that the run ends with one line with these words, and changes no checkpoint."""
    before = [path.name for path in campaign.checkpoints()]
    attempt = Attempt(campaign, *overrides)
    codes = attempt.end()
    require(
        codes == [EXIT_USER_ERROR] * WORLD,
        f"exit codes {codes}, expected a refusal: {attempt.tail()}",
    )
    attempt.one_line(*words)
    require(
        before == [path.name for path in campaign.checkpoints()],
        "a refused start has changed the checkpoints",
    )


def change_the_data(campaign: Campaign) -> str:
    """Replace the prompts' rows: the run refuses to resume."""
    if not campaign.checkpoints():
        return kill_one_rank(campaign)
    path = campaign.config.parent / "train.parquet"
    original = path.read_bytes()
    table = pq.read_table(path)
    keep = campaign.rng.choice([list(reversed(range(len(table)))), list(range(len(table) // 2))])
    pq.write_table(table.take(keep), path)
    try:
        refused(campaign, "data.train_files")
    finally:
        path.write_bytes(original)
    return f"{len(keep)} of {len(table)} rows, from row {keep[0]}: refused"


def change_the_weights(campaign: Campaign) -> str:
    """Replace the initial weights: the run refuses to resume."""
    if not campaign.checkpoints():
        return kill_one_rank(campaign)
    path = campaign.config.parent / "model" / "model.safetensors"
    original = path.read_bytes()
    save_file(
        {name: tensor * 1.5 for name, tensor in load_file(path).items()},
        path,
        metadata={"format": "pt"},
    )
    try:
        refused(campaign, "model.path")
    finally:
        path.write_bytes(original)
    return "all weights times 1.5: refused"


def drop_a_row_of_metrics(campaign: Campaign) -> str:
    """Remove a row of metrics.jsonl: the run refuses to resume."""
    path = campaign.run / "metrics.jsonl"
    steps = [int(saved.name[12:]) for saved in campaign.checkpoints()]
    if not steps:
        return kill_one_rank(campaign)
    original = path.read_text()
    # later checkpoints may be corrupt, and their rows no longer needed
    lost = campaign.rng.randint(1, steps[0])
    path.write_text(
        "".join(row + "\n" for row in original.splitlines() if json.loads(row).get("step") != lost)
    )
    try:
        refused(campaign, "metrics.jsonl")
    finally:
        path.write_text(original)
    return f"step {lost}: refused"


def misspell_a_setting(campaign: Campaign) -> str:
    refused(campaign, "actor.ppo_epoch", overrides=["actor.ppo_epoch=2"])
    return "refused"


def start_another_run(campaign: Campaign) -> str:
    """Begin another run in the directory: it moves all files of the first one away. Move them back
    afterwards."""
    if not campaign.checkpoints():
        return kill_one_rank(campaign)
    root = campaign.run
    earlier = root / "earlier_runs"
    # A start deletes what an interrupted save has left.
    before = {path.name for path in root.iterdir() if path.suffix != ".tmp"} - {
        "run.lock",
        earlier.name,
    }
    known = set(earlier.iterdir()) if earlier.exists() else set()
    attempt = Attempt(campaign, "trainer.resume_mode=disable")
    attempt.sleep(at := campaign.moment(first=0.7))
    attempt.signal(signal.SIGKILL)
    attempt.end()
    moved = (set(earlier.iterdir()) if earlier.exists() else set()) - known
    if not moved:
        return f"killed at {at:.1f} s, before it began"
    (directory,) = moved
    missing = (
        before
        - {path.name for path in directory.iterdir()}
        - {path.name for path in root.iterdir()}
    )
    require(not missing, f"{sorted(missing)} are neither in {root} nor in {directory}")
    # the last file that is moved: the others here are the other run's
    if (directory / "run.json").exists():
        for path in set(root.iterdir()) - {earlier}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in directory.iterdir():
        path.rename(root / path.name)
    directory.rmdir()
    return f"{len(before)} files and directories moved away, killed at {at:.1f} s, put back"


def connect_and_say_nothing(campaign: Campaign) -> str:
    """Open idle connections to every port that rank 0 listens on: the run continues."""
    attempt = Attempt(campaign)
    attempt.sleep(at := campaign.moment(first=0.3))
    ports = listening_ports(attempt.ranks[0].pid or 0)
    connections = []
    for port in ports * 100:
        try:
            connections.append(socket.create_connection(("localhost", port), timeout=5))
        except OSError:  # bounded, or not of this interface
            continue
    attempt.sleep(at + campaign.rng.uniform(0, campaign.seconds / 2))
    attempt.signal(signal.SIGTERM)
    codes = attempt.end()
    for connection in connections:
        connection.close()
    require(codes in ([REQUEUE] * WORLD, [0] * WORLD), f"exit codes {codes}: {attempt.tail()}")
    return f"{len(connections)} to {len(ports)} ports at {at:.1f} s: {codes}"


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports that a process listens on."""
    inodes = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:  # the process has ended
        return []
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


FAULTS: tuple[Callable[[Campaign], str], ...] = (
    kill_one_rank,
    kill_all_ranks,
    terminate,
    press_ctrl_c,
    freeze_a_rank,
    fill_the_disk,
    end_in_the_reward_function,
    kill_the_agent,
    corrupt_the_newest_checkpoint,
    copy_a_checkpoint,
    change_the_data,
    change_the_weights,
    drop_a_row_of_metrics,
    misspell_a_setting,
    start_another_run,
    connect_and_say_nothing,
)


class Soak:
    """Runs campaigns until the time is over, and counts the faults."""

    def __init__(
        self, root: Path, rng: random.Random, faults: Sequence[Callable[[Campaign], str]]
    ) -> None:
        self._root = root
        self._rng = rng
        self._kinds = faults
        workspace = make_workspace(root / "workspace", num_hidden_layers=2)
        (workspace / "reward.py").write_text(REWARD)
        trainer = {
            "total_training_steps": STEPS,
            "save_freq": 1,
            "max_ckpt_to_keep": 3,
            "test_freq": 4,
        }
        self._config = write_config(
            workspace,
            trainer={
                **trainer,
                "val_before_train": False,
                "critic_warmup": 1,
                "logger": ["jsonl", "tensorboard"],
            },
            actor={"optim": {"lr_decay_style": "linear"}, "ppo_epochs": 1},
            critic={"ppo_epochs": 1},
        )
        # starts the server of forked.py, so that no campaign waits for it
        (root / "first").mkdir(exist_ok=True)
        Attempt(Campaign(root / "first", self._config, ["actor.ppo_epoch=2"], 0.0, rng)).end()
        self._uninterrupted: dict[str, tuple[dict[str, object], float]] = {}
        self.faults: collections.Counter[str] = collections.Counter()
        self.starts = 0
        self.compared = 0

    def uninterrupted(self, layout: str) -> tuple[dict[str, object], float]:
        """Return the outcome and the seconds of a run without faults, made once for each layout."""
        if layout not in self._uninterrupted:
            root = self._root / f"uninterrupted{len(self._uninterrupted)}"
            campaign = Campaign(root, self._config, LAYOUTS[layout], 0.0, self._rng)
            seconds = self._clean(campaign)
            say(f"{layout}: an uninterrupted run takes {seconds:.1f} s")
            self._uninterrupted[layout] = outcome(campaign.run, STEPS), seconds
        return self._uninterrupted[layout]

    def _clean(self, campaign: Campaign) -> float:
        attempt = Attempt(campaign)
        codes = attempt.end()
        require(codes == [0] * WORLD, f"exit codes {codes} without a fault: {attempt.tail()}")
        self.starts += 1
        return time.monotonic() - attempt.began

    def campaign(self, number: int) -> None:
        """Run with several faults, then to the end, and compare with the uninterrupted run."""
        layout = self._rng.choice(sorted(LAYOUTS))
        expected, seconds = self.uninterrupted(layout)
        overrides = [*LAYOUTS[layout], f"trainer.async_save={self._rng.choice(['true', 'false'])}"]
        root = self._root / f"campaign{number}"
        campaign = Campaign(
            root, self._config, overrides, seconds, random.Random(self._rng.random())
        )
        say(f"campaign {number}: {layout}, {overrides[-1]}")
        for fault in self._rng.choices(self._kinds, k=self._rng.randint(4, 8)):
            began = time.monotonic()
            seen = fault(campaign)
            self.starts += 1
            self.faults[fault.__name__] += 1
            saved = [path.name[12:] for path in campaign.checkpoints()]
            say(
                f"  {fault.__name__}: {seen} ({time.monotonic() - began:.0f} s; saved: "
                f"{', '.join(saved) or 'none'})"
            )
        self._clean(campaign)
        result = outcome(campaign.run, STEPS)
        for key, value in expected.items():
            require(result[key] == value, f"{key} differs from the uninterrupted run's")
        self.compared += 1
        say("  equal to the uninterrupted run, bit for bit")
        shutil.rmtree(root)


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Random faults at random times, compared with uninterrupted runs."
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="begin no campaign after this time"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the choice of faults and of their times"
    )
    parser.add_argument(
        "--output", type=Path, help="directory of the runs and logs; default: a temporary one"
    )
    names = [fault.__name__ for fault in FAULTS]
    parser.add_argument(
        "--faults", nargs="+", choices=names, metavar="NAME", help="draw only these; default: all"
    )
    arguments = parser.parse_args()
    faults = [
        fault for fault in FAULTS if arguments.faults is None or fault.__name__ in arguments.faults
    ]
    root = arguments.output or Path(tempfile.mkdtemp(prefix="soak"))
    root.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * arguments.minutes
    soak = Soak(root, random.Random(arguments.seed), faults)
    number = 0
    try:
        while time.monotonic() < end:
            number += 1
            soak.campaign(number)
    except Broken as error:
        say(f"BROKEN (seed {arguments.seed}, campaign {number}; logs in {root}): {error}")
        return 1
    for name, count in sorted(soak.faults.items()):
        say(f"{count:4d} {name}")
    say(
        f"{soak.starts} starts, {sum(soak.faults.values())} faults, {soak.compared} runs equal to "
        "uninterrupted ones"
    )
    if arguments.output is None:
        shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
