"""Requeue decisions of launch/slurm_job.sh, with stand-ins for Slurm's commands that give rare
answers; the pre-flight comparison; signals and exit codes of torchrun_1node.sh. On a real Slurm:
tests/system/test_slurm.py."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

from rlhf_mc.checkpoint import directory

pytestmark = pytest.mark.slow

STAND_INS = {
    "scontrol": """
if [[ "$1" == show ]]; then echo node1; exit; fi
echo "$*" >>requeues
[[ "$(wc -l <requeues)" -gt "${REQUEUE_FAILURES:-0}" ]]
""",
    # Answers in turn; the last one is repeated.
    "squeue": """head -n 1 answers; [[ "$(wc -l <answers)" -le 1 ]] || sed -i 1d answers""",
    "sleep": "true",
    "srun": """
echo "$*" >>steps
cd "$SLURM_SUBMIT_DIR"
while [[ "$1" == --* ]]; do shift; done
if [[ "${SIGNAL_AT_START:-}" && "$*" != *preflight* ]]; then kill -USR1 $PPID; kill -USR1 $$; fi
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=2
exec "$@"
""",
    "python": f"""
cd "$SLURM_SUBMIT_DIR"
case "$2" in
    launch.preflight)
        if [[ "$3" == probe && "${{SIGNAL_IN_PREFLIGHT:-}}" ]]; then kill "-$SIGNAL_IN_PREFLIGHT" $PPID; fi
        [[ -z "${{SIGNAL_IN_PREFLIGHT:-}}" ]] ;;
    launch.progress) exec {sys.executable} "$@" ;;
    *)  kill -TERM $$  # to every process of the step
        echo "the program has started as rank ${{RANK:-}}"
        [[ -z "${{REMOVES_RUN-}}" ]] || rm -r "$(dirname "$0")/run"
        if [[ -n "${{SAVES_STEP-}}" ]]; then
            {sys.executable} -c "from pathlib import Path; from rlhf_mc.checkpoint.directory import begin, commit
root = Path('$(dirname "$0")/run'); begin(root, $SAVES_STEP); commit(root, $SAVES_STEP, {{}}, 'first')"
        fi
        [[ -z "${{REPORTED_CODE-75}}" ]] || echo "${{REPORTED_CODE-75}}" >"$RLHF_MC_EXIT_CODE_FILE"
        exit "${{EXIT_CODE-75}}" ;;
esac
""",  # noqa: E501
}


def write_checkpoint(root: Path, step: int) -> None:
    """Write an empty checkpoint that counts."""
    directory.begin(root, step)
    directory.commit(root, step, {}, "first")


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """Write the stand-ins. Return their directory, where they record the requests."""
    for name, body in STAND_INS.items():
        path = tmp_path / name
        path.write_text(f'#!/usr/bin/env bash\ncd "$(dirname "$0")"\n{body}')
        path.chmod(0o755)
    (tmp_path / "answers").write_text("RUNNING\n")
    return tmp_path


def attempt(slurm: Path, number: int = 0, **settings: str) -> tuple[int, str, int]:
    """Run one attempt of a job. Return its exit code, its output, and its number of requeue
    requests."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    env |= {
        "PATH": f"{slurm}:{env['PATH']}",
        "PYTHON": str(slurm / "python"),
        "LOG_ROOT": str(slurm / "logs"),
    }
    env |= {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node1"}
    env |= {
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURMD_NODENAME": "node1",
    }
    env |= {"SLURM_RESTART_COUNT": str(number), **settings}
    command = [
        ROOT / "launch/slurm_job.sh",
        "configs/ppo_70b.yaml",
        f"trainer.default_local_dir={slurm / 'run'}",
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    requests = slurm / "requeues"
    requeues = len(requests.read_text().splitlines()) if requests.exists() else 0
    requests.unlink(missing_ok=True)
    return done.returncode, done.stdout + done.stderr, requeues


def test_busy_controller_is_asked_again(slurm: Path) -> None:
    (slurm / "answers").write_text("\n\nRUNNING\n")
    code, output, requeues = attempt(slurm, REQUEUE_FAILURES="2")
    assert (code, requeues) == (75, 3), output
    (slurm / "answers").write_text("\n")  # repeated
    code, output, requeues = attempt(slurm, REQUEUE_FAILURES="9")
    assert (code, requeues) == (75, 5) and "Slurm does not requeue the job" in output
    (slurm / "answers").write_text("\nCOMPLETING\n")
    code, output, requeues = attempt(slurm)
    assert (code, requeues) == (75, 0) and "the job is being ended" in output


def test_requeues_end_without_new_checkpoints(slurm: Path) -> None:
    assert [attempt(slurm, number)[2] for number in (0, 1)] == [1, 1]
    for step in (9, 10):
        write_checkpoint(slurm / "run", step)
    shutil.copytree(slurm / "run/global_step_9", slurm / "run/global_step_99")  # does not count
    (slurm / "run" / "global_step_11.tmp").mkdir()  # does not count
    assert [attempt(slurm, number)[2] for number in (2, 3)] == [1, 1]
    code, output, requeues = attempt(slurm, 4)
    assert (code, requeues) == (2, 0)
    assert "two consecutive attempts wrote no checkpoint newer than global_step_10" in output


@pytest.mark.parametrize(
    "when",
    [{"SIGNAL_IN_PREFLIGHT": "USR1"}, {"SIGNAL_IN_PREFLIGHT": "TERM"}, {"SIGNAL_AT_START": "yes"}],
    ids=str,
)
def test_signal_before_the_program_starts_requeues(slurm: Path, when: dict[str, str]) -> None:
    code, output, requeues = attempt(slurm, **when)
    assert (code, requeues) == (75, 1), output
    assert "the program has started" not in output


def test_rank_variables_in_the_environment_are_ignored(slurm: Path) -> None:
    code, output, _ = attempt(slurm, RANK="5", WORLD_SIZE="6", SLURM_NTASKS_PER_NODE="2")
    assert code == 75 and "the program has started as rank 0\n" in output
    assert (
        slurm / "logs/7/attempt_0/rank_0000.node1.log"
    ).read_text() == "the program has started as rank 0\n"


@pytest.mark.parametrize(
    ("reported", "expected"), [("0", 0), ("", 1)], ids=["finished", "not finished"]
)
def test_exit_code_0_without_a_report_is_no_success(
    slurm: Path, reported: str, expected: int
) -> None:
    code, output, requeues = attempt(slurm, EXIT_CODE="0", REPORTED_CODE=reported)
    assert (code, requeues) == (expected, 0), output
    assert ("every rank ended with 0, but the run has not finished" in output) == (expected == 1)


def test_crashed_run_restarts_after_new_checkpoints_up_to_the_limit(slurm: Path) -> None:
    crash = {"EXIT_CODE": "1", "REPORTED_CODE": "", "MAX_RESTARTS": "2"}
    code, output, requeues = attempt(slurm, 0, **crash, SAVES_STEP="1")
    assert (code, requeues) == (1, 1)
    assert (
        "the run crashed after global_step_1, and the start was the newest when it started: the "
        "job is requeued"
    ) in output
    code, output, requeues = attempt(slurm, 1, **crash)
    assert (code, requeues) == (
        1,
        0,
    ) and "not requeued: this attempt has written no checkpoint (the newest is gl" in output
    assert attempt(slurm, 2, **crash, SAVES_STEP="2")[2] == 1
    code, output, requeues = attempt(slurm, 3, **crash, SAVES_STEP="3")
    assert (code, requeues) == (
        1,
        0,
    ) and "not requeued: it has been restarted 2 times after a crash" in output


def test_checkpoints_moved_away_are_no_progress(slurm: Path) -> None:
    write_checkpoint(slurm / "run", 9)
    crash = {"EXIT_CODE": "1", "REPORTED_CODE": "", "MAX_RESTARTS": "2", "REMOVES_RUN": "yes"}
    code, output, requeues = attempt(slurm, 0, **crash)
    assert (code, requeues) == (
        1,
        0,
    ) and "this attempt has written no checkpoint (the newest is the start)" in output
    assert attempt(slurm, 1, **{**crash, "REMOVES_RUN": ""}, SAVES_STEP="1")[2] == 1


def test_every_step_runs_in_the_sites_container(slurm: Path) -> None:
    """Check the pre-flight's steps, the training and the listing of checkpoints with pyxis, which
    srun alone enters."""
    (slurm / "image.sqsh").touch()
    site = (
        f"[container]\nruntime = pyxis\nimage = {slurm}/image.sqsh\n[launch]\npython = "
        f"{slurm}/python\n"
    )
    (slurm / "site.ini").write_text(
        f"{site}srun_options = --mpi=none\n[environment]\nNCCL_IB_HCA = a,b\n"
    )
    code, output, requeues = attempt(
        slurm, RLHF_MC_SITE=str(slurm / "site.ini"), PYTHON="", SLURM_NTASKS_PER_NODE="2"
    )
    assert (code, requeues) == (75, 1), output
    steps = [line.partition(" launch/") for line in (slurm / "steps").read_text().splitlines()]
    one = "--nodes=1 --ntasks=1 --ntasks-per-node=1"
    programs = [
        "python.sh -m launch.preflight",
        "python.sh -m launch.preflight",
        "slurm_rank.sh",
        "python.sh -m launch.prog",
    ]
    tasks = [
        one,
        one,
        "--nodes=1 --ntasks=2 --ntasks-per-node=2 --cpus-per-task=1 --kill-on-bad-exit=1",
        one,
    ]
    container = f"--container-image={slurm}/image.sqsh --container-name=rlhf_mc_7"
    container += (
        f" --container-mounts={ROOT}:{ROOT},{slurm}/logs:{slurm}/logs --container-workdir={ROOT}"
    )
    options = (
        f"--cpu-bind=none --mpi=none {container} --no-container-entrypoint "
        "--container-env=NCCL_IB_HCA"
    )
    assert [options_of for options_of, _, _ in steps] == [f"{options} {task}" for task in tasks]
    assert all(
        program.startswith(name) for (_, _, program), name in zip(steps, programs, strict=True)
    )


@pytest.mark.parametrize(
    ("settings", "expected", "why"),
    [
        ({"EXIT_CODE": "1", "REPORTED_CODE": "1"}, 1, "MAX_RESTARTS is 0"),
        (
            {"EXIT_CODE": "1", "REPORTED_CODE": "2", "MAX_RESTARTS": "1"},
            2,
            "the same error would come again",
        ),
        (
            {"EXIT_CODE": "1", "REPORTED_CODE": "130", "MAX_RESTARTS": "1"},
            130,
            "it was interrupted",
        ),
        ({"EXIT_CODE": "0", "REPORTED_CODE": ""}, 1, "MAX_RESTARTS is 0"),
        ({"MAX_RESTARTS": "often"}, 2, "MAX_RESTARTS is often; it must be a number of restarts"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_reason_against_a_restart_is_printed(
    slurm: Path, settings: dict[str, str], expected: int, why: str
) -> None:
    code, output, requeues = attempt(slurm, SAVES_STEP="1", **settings)
    assert (code, requeues) == (expected, 0), output
    assert why in output


def test_ending_job_is_not_restarted(slurm: Path) -> None:
    (slurm / "answers").write_text("COMPLETING\n")
    code, output, requeues = attempt(
        slurm, EXIT_CODE="1", REPORTED_CODE="", MAX_RESTARTS="1", SAVES_STEP="1"
    )
    assert (code, requeues) == (1, 0) and "not requeued: the job is being ended" in output


def test_newest_checkpoint_is_found_without_torch() -> None:
    program = "import sys, launch.progress; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=500).returncode == 0


def preflight(folder: Path, *arguments: str, node: str = "a") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.preflight", arguments[0], str(folder), *arguments[1:]]
    env = {**os.environ, "SLURMD_NODENAME": node}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)


def test_preflight_compares_the_nodes(tmp_path: Path) -> None:
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "config.json").write_text("{}")
    for node in ("a", "b"):
        settings = [
            f"trainer.default_local_dir={tmp_path}/run",
            f"reward_model.model_path={tmp_path}/reward",
        ]
        settings += ["actor.ppo_epochs=2"] if node == "b" else []
        done = preflight(tmp_path, "probe", "configs/ppo_70b.yaml", *settings, node=node)
        assert done.returncode == 0, done.stderr
        (tmp_path / "reward" / "config.json").write_text('{"other": 1}')
    done = preflight(tmp_path, "compare", "2")
    assert done.returncode == 1
    for subject in ("config", f"reward_model.model_path ({tmp_path}/reward)"):
        assert f"preflight: {subject} differs on node b: " in done.stderr
    assert not list((tmp_path / "run").glob(".preflight*"))


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("ppo_70b.sh", "", "configs/ppo_70b.yaml"),
        ("ppo_70b.sh", "trainer.seed=2", "configs/ppo_70b.yaml trainer.seed=2"),
        ("ppo_1node.sh", "trainer.seed=2", "configs/ppo_qwen2.5_0.5b.yaml trainer.seed=2"),
        ("ppo_1node.sh", "my.yaml trainer.seed=2", "my.yaml trainer.seed=2"),
    ],
)
def test_sbatch_scripts_add_their_config_unless_another_is_given(
    script: str, arguments: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "launch").mkdir()
    body = tmp_path / "launch" / "slurm_job.sh"
    body.write_text('#!/usr/bin/env bash\necho "$@"\n')
    body.chmod(0o755)
    env = {**os.environ, "SLURM_SUBMIT_DIR": str(tmp_path)}
    command = ["bash", ROOT / "slurm" / script, *arguments.split()]
    assert (
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=500).stdout
        == f"{expected}\n"
    )


def in_launcher(command: str, **variables: str) -> list[str]:
    """Return the lines that a command prints after launch/env.sh with no other variables than
    these."""
    script = f"set -euo pipefail; ulimit -S -n 200; source launch/env.sh; {command}"
    env = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


def test_launchers_raise_the_limit_on_open_files() -> None:
    soft, hard = in_launcher("ulimit -S -n; ulimit -H -n")
    assert soft == hard != "200"
    refusal = (
        'ulimit() { [[ "$*" != "-S -n "* ]] || { echo no >&2; return 1; }; builtin ulimit "$@"; }'
    )
    refused = in_launcher(f"{refusal}; source launch/env.sh; ulimit -S -n")
    assert refused == [hard]  # quietly


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ["", ""]),
        ({"RLHF_MC_SOCKET_IFNAME": "eth0"}, ["eth0", "=eth0"]),
        ({"RLHF_MC_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib"}, ["eth0", "ib"]),
    ],
    ids=["none", "both", "set already"],
)
def test_launchers_pass_the_sites_interface_on(
    variables: dict[str, str], expected: list[str]
) -> None:
    command = 'echo "${GLOO_SOCKET_IFNAME:-}"; echo "${NCCL_SOCKET_IFNAME:-}"'
    assert in_launcher(command, **variables) == expected


CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "",
}


def test_launchers_keep_compiled_kernels_on_the_node() -> None:
    names = ["RLHF_MC_CACHE", *CACHES]
    command = "; ".join(f'printenv {name} || echo "not exported"' for name in names)
    root, *others = in_launcher(command, HOME="/shared/home")
    checksum = subprocess.check_output(["cksum", ROOT / "requirements/gpu.txt"], text=True).split()[
        0
    ]
    assert root == f"/tmp/rlhf_mc_{os.getuid()}/{checksum}"
    assert others == [f"{root}/{inner}".rstrip("/") for inner in CACHES.values()]
    assert in_launcher(command, RLHF_MC_CACHE="/scratch")[:3] == [
        "/scratch",
        "/scratch/triton",
        "/scratch/inductor",
    ]
    chosen = {name: f"/mine/{name}" for name in names}
    assert in_launcher(command, **chosen) == list(chosen.values())


def test_launchers_end_a_process_at_once_after_an_error_of_nccl() -> None:
    from torch.distributed.elastic.agent.server import local_elastic_agent

    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    assert in_launcher(f"env | grep {name}") == [f"{name}=3"]
    assert in_launcher(f"env | grep {name}", **{name: "1"}) == [f"{name}=1"]
    # torchrun overrides torch's default.
    assert f'"{name}", str(1)' in " ".join(inspect.getsource(local_elastic_agent).split())


SIGNAL_WAITER = """
import pathlib, signal
signal.alarm(600)  # no process is left behind
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
print("ready", flush=True)
pathlib.Path("got").write_text(signal.Signals(signal.sigwait([signal.SIGTERM, signal.SIGUSR1])).name)
"""  # noqa: E501


def replace_program(folder: Path, program: str) -> dict[str, str]:
    """Write a program that replaces rlhf_mc for processes started in the folder. Return their
    environment."""
    (folder / "rlhf_mc").mkdir()
    (folder / "rlhf_mc" / "__init__.py").touch()
    (folder / "rlhf_mc" / "__main__.py").write_text(program)
    return {**os.environ, "NPROC": "1", "PYTHON": sys.executable}


def test_torchrun_1node_takes_0_without_a_report_for_no_success(tmp_path: Path) -> None:
    env = replace_program(tmp_path, "import os\nos._exit(0)\n")
    command = [ROOT / "launch/torchrun_1node.sh", "x.yaml"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 1 and "has not finished" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_torchrun_1node_uses_the_users_exit_code_file(tmp_path: Path) -> None:
    program = (
        "import os, pathlib\nassert not (said := "
        "pathlib.Path(os.environ['RLHF_MC_EXIT_CODE_FILE'])).exists()\n"
    )
    env = {
        **replace_program(tmp_path, program + "said.write_text('0')\n"),
        "RLHF_MC_EXIT_CODE_FILE": str(tmp_path / "code"),
    }
    (tmp_path / "code").write_text("75\n")  # of an earlier run
    command = [ROOT / "launch/torchrun_1node.sh", "x.yaml"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
    )
    assert (done.returncode, (tmp_path / "code").read_text()) == (0, "0"), done.stderr
    assert "has not finished" not in done.stderr


def test_torchrun_1node_forwards_usr1(tmp_path: Path) -> None:
    env = replace_program(tmp_path, SIGNAL_WAITER)
    process = subprocess.Popen(
        [ROOT / "launch/torchrun_1node.sh", "x.yaml"],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        process.wait(500)
    finally:
        process.kill()
    assert (tmp_path / "got").read_text() == "SIGUSR1"
