"""The sbatch scripts on a real Slurm of 16 virtual nodes of this machine (slurm/cluster_up.sh): the
quickstart over two of them, and the unchanged 70B job with a stand-in for the training program.
Skipped where Slurm is not installed; .ci/run installs it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import forked
import inputs_70b
import pytest
from runs import last_step
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
CLUSTER = Path(__file__).parent / "slurm"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
NODES = 16
GPUS = 8
FEW = 4
"""The first nodes, beside which a job of the others runs."""
ON_FEW = f"--exclude=node[{FEW + 1}-{NODES}]"
STEPS = 8
AFTER_CRASH = "the run crashed after "
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        not all(shutil.which(name, path=_PATH) for name in NEEDED),
        reason=(
            "Slurm is not installed: apt-get install -y --no-install-recommends munge slurmctld "
            "slurmd slurm-client"
        ),
    ),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start the cluster. Return the environment in which Slurm's commands reach it."""
    # Not pytest's own folder: its path is too long for a socket.
    folder = f"/tmp/rlhf_mc-slurm-{os.getpid()}"
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "SBATCH"))
    }
    env |= {
        "PATH": _PATH,
        "SLURM_CI_DIR": folder,
        "SLURM_CI_PORT": str(18000 + os.getpid() % 80 * 20),
    }
    env |= {
        "SLURM_CI_NODES": str(NODES),
        "SLURM_CI_CPUS": "128",
        "SLURM_CI_MEM": "2000000",
        "SLURM_CI_GPUS": str(GPUS),
    }
    env |= {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "RLHF_MC_DEVICE": "cpu"}
    up = subprocess.run(
        [CLUSTER / "cluster_up.sh"], env=env, capture_output=True, text=True, timeout=500
    )
    assert up.returncode == 0, up.stderr
    yield {**env, "SLURM_CONF": f"{folder}/etc/slurm.conf"}
    subprocess.run(
        [CLUSTER / "cluster_down.sh"], env=env, capture_output=True, timeout=500, check=True
    )


class Job:
    """A job of this cluster."""

    def __init__(self, env: dict[str, str], folder: Path, arguments: list[str]) -> None:
        """Submit the job from the repository's root, with its log and its ranks' logs in the
        folder."""
        self._env = {**env, "LOG_ROOT": str(folder / "logs")}
        self._log = folder / "job.log"
        self.logs = folder / "logs"
        self.id = self.slurm("sbatch", "--parsable", f"--output={self._log}", *arguments)

    def slurm(self, *command: str) -> str:
        """Return the output of one of Slurm's commands."""
        done = subprocess.run(
            command, cwd=ROOT, env=self._env, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def send(self, name: str) -> None:
        """Send a signal to the batch script alone, as Slurm does for --signal=B:..."""
        self.slurm("scancel", "--batch", f"--signal={name}", self.id)

    def wait(self, seconds: float) -> str:
        """Wait until the job is over. Return its final state and number of restarts."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            shown = self.slurm("scontrol", "--oneliner", "show", "job", self.id)
            facts = dict(re.findall(r"(\w+)=(\S*)", shown))
            if facts["JobState"] in FINAL:
                return f"{facts['JobState']} {facts['Restarts']}"
            time.sleep(0.3)
        pytest.fail(f"job {self.id} is not over after {seconds} s: {shown}\n{self.said()}")

    def said(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def until(self, ready: Callable[[], bool], seconds: float = 500.0) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)


# ---------------------------------------------------------------- the quickstart over two nodes


@pytest.fixture(scope="module")
def few_steps(quickstart_overrides: list[str]) -> list[str]:
    """Return the arguments for a few steps of the quickstart, whose first rank trains and whose
    second one generates, without the output directory."""
    few = [
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ]
    few += ["data.train_batch_size=16", "trainer.target_val_acc=null", "trainer.save_freq=1"]
    few += ["resource_pools.train=1", "resource_pools.rollout=1"]
    return ["configs/quickstart.yaml", *quickstart_overrides, *few]


def process_of_rank(rank: int, argument: str) -> int:
    found = processes_with(f"RANK={rank}", argument)
    assert len(found) == 1, found
    return found[0]


def processes_with(variable: str, argument: str) -> list[int]:
    """Return the processes that run rlhf_mc with this argument and this variable."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # gone in the meantime
            continue
        runs = arguments[1:3] == [b"-m", b"rlhf_mc"] and any(
            argument.encode() in part for part in arguments
        )
        if runs and variable.encode() in environment:
            found.append(int(entry.name))
    return found


def interrupt(slurm: dict[str, str], few_steps: list[str], folder: Path) -> Job:
    """Run a few steps of the quickstart in two pools, each of one node. Kill the rank that
    generates in the first attempt, and signal the second."""
    # More than one GPU may be asked for; how many ranks a node has is NPROC's.
    env = {**slurm, "NPROC": "1", "MAX_RESTARTS": "1"}
    place = f"trainer.default_local_dir={folder / 'run'}"
    header = ["--nodes=2", f"--exclude=node[1-{FEW}]", "slurm/ppo_1node.sh"]
    job = Job(env, folder, [*header, *few_steps, place])
    job.until((folder / "run" / "global_step_1" / "manifest.json").exists)
    os.kill(process_of_rank(1, str(folder)), signal.SIGKILL)
    job.until(lambda: AFTER_CRASH in job.said())
    assert all(processes_with(variable, str(folder)) == [] for variable in ("RANK=0", "RANK=1")), (
        "none is left"
    )
    before = last_step(folder / "run")
    job.until(
        lambda: (job.logs / job.id / "attempt_1").exists() and last_step(folder / "run") > before
    )
    job.send("USR1")
    assert job.wait(500) == "COMPLETED 2", job.said()
    return job


@pytest.fixture(scope="module")
def interrupting(
    slurm: dict[str, str], few_steps: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Future[Job], Path]]:
    """Begin to interrupt a job. It waits half of its time, in which the 70B jobs run."""
    folder = tmp_path_factory.mktemp("interrupted")
    with ThreadPoolExecutor(1) as executor:
        yield executor.submit(interrupt, slurm, few_steps, folder), folder


@pytest.fixture(scope="module")
def interrupted(interrupting: tuple[Future[Job], Path]) -> tuple[Job, Path]:
    """Return the job that was interrupted, and its folder."""
    job, folder = interrupting
    return job.result(), folder


# ---------------------------------------------------------------- the 70B job, with a stand-in for
# the program

STAND_IN = f"""#!/usr/bin/env bash
# In place of the interpreter: does the launchers' work, but not the training.
if [[ "$1 $2" == "-m rlhf_mc" ]]; then
    echo "$RANK $WORLD_SIZE $LOCAL_RANK $(hostname) $SLURMD_NODENAME $MASTER_ADDR $MASTER_PORT $CUDA_VISIBLE_DEVICES" \\
        "${{IN_IMAGE:-none}} ${{NCCL_DEBUG_SUBSYS:-none}} | ${{*:3}}"
    [[ "$RANK" != 0 ]] || echo 0 >"$RLHF_MC_EXIT_CODE_FILE"
    exit 0
fi
exec {sys.executable} "$@"
"""  # noqa: E501


@pytest.fixture
def stand_in(
    slurm: dict[str, str], interrupting: tuple[Future[Job], Path], tmp_path: Path
) -> dict[str, str]:
    path = tmp_path / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    inputs_70b.write_inputs(tmp_path)
    return {**slurm, "PYTHON": str(path)}


DATA_PARALLEL = [f"actor.megatron.{size}_model_parallel_size=1" for size in ("tensor", "pipeline")]
DATA_PARALLEL += [
    "actor.megatron.virtual_pipeline_model_parallel_size=null",
    "actor.megatron.sequence_parallel=false",
]
DATA_PARALLEL += ["rollout.tensor_model_parallel_size=1"]
"""A layout for any number of ranks."""


APPTAINER = """#!/usr/bin/env bash
# In place of Apptainer: reads the options of `exec` as it does, and runs the program without a container, in a process
# to which it passes signals on. The variables with its prefix win over the image's.
trap 'kill -USR1 "$child"' USR1
trap 'kill -TERM "$child"' TERM
[[ "$1 $2" == "exec --nv" ]] || exit 64
shift 2
while [[ "$1" == --* ]]; do
    case $1 in
        --bind) [[ "$2" =~ ^/[^:]*:/[^:]*:r[ow]$ && -e "${2%%:*}" ]] || exit 65; shift 2 ;;
        --pwd) cd "$2" || exit 66; shift 2 ;;
        --no-home) shift ;;
        *) exit 67 ;;
    esac
done
export IN_IMAGE=$1 NCCL_DEBUG_SUBSYS=${APPTAINERENV_NCCL_DEBUG_SUBSYS:-of the image}
shift
"$@" &
child=$!
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
wait "$child"
"""  # noqa: E501


def apptainer_site(folder: Path) -> dict[str, str]:
    """Write a site file with Apptainer, and a stand-in for it. Return the environment that names
    them."""
    (folder / "bin").mkdir()
    (folder / "bin" / "apptainer").write_text(APPTAINER)
    (folder / "bin" / "apptainer").chmod(0o755)
    (folder / "image.sif").touch()
    lines = ["[container]", "runtime = apptainer", f"image = {folder}/image.sif"]
    lines += [f"mounts = {folder}/data:{folder}/data:ro", "options = --no-home"]
    lines += [
        "[launch]",
        f"python = {folder}/python",
        "[environment]",
        "NCCL_DEBUG_SUBSYS = INIT,NET",
    ]
    (folder / "site.ini").write_text("\n".join(lines))
    return {"PATH": f"{folder}/bin:{_PATH}", "PYTHON": "", "RLHF_MC_SITE": str(folder / "site.ini")}


@pytest.mark.parametrize(
    "header", [[], [f"--ntasks-per-node={GPUS}"]], ids=["torchrun", "a task per GPU, a container"]
)
def test_the_70b_job_starts_64_ranks_as_they_should_be(
    stand_in: dict[str, str], tmp_path: Path, header: list[str]
) -> None:
    overrides = inputs_70b.overrides(tmp_path)
    site = apptainer_site(tmp_path) if header else {}
    job = Job({**stand_in, **site}, tmp_path, [*header, "slurm/ppo_70b.sh", *overrides])
    assert job.wait(500) == "COMPLETED 0", job.said()
    lines = [path.read_text() for path in (job.logs / job.id / "attempt_0").glob("rank_*.log")]
    told = {int(line.split()[0]): line for line in lines}
    assert sorted(told) == list(range(64)) and len(lines) == 64
    nodes = sorted(
        {line.split()[4] for line in lines}, key=lambda name: int(name.removeprefix("node"))
    )
    assert len(nodes) == 8
    for rank, line in told.items():
        facts, _, arguments = line.strip().partition(" | ")
        world, local, host, node, master, port, devices, image, site_variable = facts.split()[1:]
        assert (image, site_variable) == (
            (f"{tmp_path}/image.sif", "INIT,NET") if site else ("none", "none")
        )
        assert (int(world), int(local), node) == (64, rank % GPUS, nodes[rank // GPUS])
        # only root can give a virtual node a name of its own
        assert host == node or os.getuid() != 0
        assert (master, port) == (nodes[0], str(20000 + int(job.id) % 10000))
        assert devices == ",".join(map(str, range(GPUS)))
        assert arguments == " ".join(["configs/ppo_70b.yaml", *overrides])


IS_PREEMPTED = f"""#!/usr/bin/env bash
# The program's part in a preemption, without training. In Python, as bash cannot handle a signal that was ignored.
if [[ "$1 $2" == "-m rlhf_mc" ]]; then
    exec {sys.executable} -c '
import os, pathlib, signal, sys, time
from rlhf_mc.runtime.parent_death import exit_with_launcher
exit_with_launcher()
def save_and_stop(*_):
    pathlib.Path(os.environ["RLHF_MC_EXIT_CODE_FILE"]).write_text("75")
    sys.exit(75)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, save_and_stop)
attempt = os.environ.get("SLURM_RESTART_COUNT", "")
parent = pathlib.Path(f"/proc/{{os.getppid()}}/comm").read_text().strip()
print("attempt", attempt, "has started under", parent, flush=True)
time.sleep(0 if attempt else 60)
pathlib.Path(os.environ["RLHF_MC_EXIT_CODE_FILE"]).write_text("0")
'
fi
exec {sys.executable} "$@"
"""  # noqa: E501


@pytest.mark.parametrize("how", ["preempted", "cancelled"])
def test_preempted_it_comes_back_and_cancelled_it_does_not(
    stand_in: dict[str, str], tmp_path: Path, how: str
) -> None:
    Path(stand_in["PYTHON"]).write_text(IS_PREEMPTED)
    site = apptainer_site(tmp_path) if how == "preempted" else {}
    parent = "bash" if site else "slurmstepd"  # the stand-in's interpreter
    header = [
        "--partition=preempt",
        "--nodes=2",
        ON_FEW,
        "--ntasks-per-node=2",
        "slurm/ppo_1node.sh",
        "configs/ppo_70b.yaml",
    ]
    job = Job(
        {**stand_in, **site}, tmp_path, [*header, *DATA_PARALLEL, *inputs_70b.overrides(tmp_path)]
    )
    job.until(lambda: job.said().count(f"attempt  has started under {parent}") == 4)
    if how == "cancelled":
        job.slurm("scancel", job.id)
        assert job.wait(500) == "CANCELLED 0", job.said()
        assert "not requeued" in job.said()
        return
    others = [
        "--partition=batch",
        f"--nodes={FEW}",
        ON_FEW,
        "--exclusive",
        f"--output={tmp_path}/other",
        "--wrap=sleep 1",
    ]
    job.slurm("sbatch", *others)
    assert job.wait(500) == "COMPLETED 1", job.said()
    assert job.said().count("attempt 1 has started") == 4


def test_a_node_that_sees_something_else_is_named(stand_in: dict[str, str], tmp_path: Path) -> None:
    other = f"""#!/usr/bin/env bash
if [[ "$*" == *"launch.preflight probe"* && "$SLURMD_NODENAME" == node3 ]]; then
    exec {sys.executable} "$@" actor.ppo_epochs=2
fi
exec {sys.executable} "$@"
"""
    Path(stand_in["PYTHON"]).write_text(other)
    job = Job(
        stand_in,
        tmp_path,
        [f"--nodes={FEW}", ON_FEW, "slurm/ppo_70b.sh", *inputs_70b.overrides(tmp_path)],
    )
    assert job.wait(500) == "FAILED 0", job.said()
    complaints = [line for line in job.said().splitlines() if line.startswith("preflight: ")]
    assert len(complaints) == 1, job.said()
    assert complaints[0].startswith("preflight: config differs on node node3: ")


def test_nodes_that_cannot_run_it_are_named(stand_in: dict[str, str], tmp_path: Path) -> None:
    """Check that the pre-flight reports a layout that the nodes do not give, and a missing
    interface, on every node."""
    header = ["--nodes=3", "slurm/ppo_70b.sh"]
    job = Job(
        {**stand_in, "RLHF_MC_SOCKET_IFNAME": "nosuch0"},
        tmp_path,
        [*header, *inputs_70b.overrides(tmp_path)],
    )
    assert job.wait(500) == "FAILED 0", job.said()
    complaints = [line for line in job.said().splitlines() if line.startswith("preflight: ")]
    assert len(complaints) == 2, job.said()
    assert re.match(
        r"preflight: nodes \w+, \w+, \w+: actor.megatron.tensor_model_parallel_size 8 x ",
        complaints[0],
    )
    assert complaints[0].endswith("(3 nodes x 8 ranks)")
    assert "RLHF_MC_SOCKET_IFNAME is nosuch0, and no such interface is up; up are " in complaints[1]
    assert not list((tmp_path / "run").glob(".preflight*"))


# ---------------------------------------------------------------- the interrupted job


def test_it_completes_over_two_nodes(interrupted: tuple[Job, Path]) -> None:
    job, folder = interrupted
    assert last_step(folder / "run") == STEPS
    assert (
        job.said().count(
            "preflight: 2 nodes see the same code, config, inputs and output directory"
        )
        == 3
    )
    assert "2 ranks on cpu" in job.said()
    assert "idle_t" in job.said(), "the console's share of the step in which training ranks wait"
    attempts = sorted((job.logs / job.id).iterdir())
    assert [path.name for path in attempts] == ["attempt_0", "attempt_1", "attempt_2"]
    for attempt in attempts:
        names = [path.name for path in attempt.glob("rank_*.log")]
        assert len(names) == 2
        assert {name.partition(".")[0] for name in names} == {"rank_0000", "rank_0001"}
        assert len({name.split(".")[1] for name in names}) == 2, "each pool is a node"
    assert not list((folder / "run").glob(".preflight*"))


def test_with_one_rank_killed_it_says_why_and_is_started_again(
    interrupted: tuple[Job, Path],
) -> None:
    job, _ = interrupted
    first = job.said().partition(AFTER_CRASH)[0]
    assert (
        "rlhf_mc: error on rank 0: lost contact with another rank in phase " in first
        or "Signal 9" in first
    )
    assert re.search(
        rf"the run ended with \d+; the ranks' logs are in {re.escape(str(job.logs))}", first
    )
    assert re.search(
        rf"{AFTER_CRASH}global_step_\d, and the start was the newest when it started", job.said()
    )


def test_signalled_it_saves_is_requeued_and_ends_with_the_same_weights(
    interrupted: tuple[Job, Path], few_steps: list[str], tmp_path: Path
) -> None:
    """Compare with the weights of the same two ranks, uninterrupted and without Slurm."""
    job, folder = interrupted
    said = job.said().partition(AFTER_CRASH)[2]  # all attempts': --open-mode=append
    assert said.index("asked to stop (SIGUSR1): the checkpoint of step") < said.rindex(
        "resumed after step"
    )
    assert said.count("resumed after step") == 2
    assert "the run was preempted: the job is requeued" in said
    done = forked.run_ranks(
        2, ["-m", "rlhf_mc", *few_steps, f"trainer.default_local_dir={tmp_path / 'run'}"]
    )
    assert done.returncode == 0, done.stderr
    expected, found = (
        load_file(path / "run" / "hf" / "model.safetensors") for path in (tmp_path, folder)
    )
    assert expected.keys() == found.keys()
    assert all(bool((expected[name] == found[name]).all()) for name in expected)
