"""What launch/slurm_job.sh decides, with stand-ins for Slurm's commands, which answer as a real cluster seldom does;
what the pre-flight compares; which signals torchrun_1node.sh passes on. On a real Slurm: tests/system/test_slurm.py."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_mc.checkpoint import directory

ROOT = Path(__file__).parents[2]
STAND_INS = {
    "scontrol": """
if [[ "$1" == show ]]; then echo node1; exit; fi
echo "$*" >>requeues
[[ "$(wc -l <requeues)" -gt "${REFUSALS:-0}" ]]
""",
    # The first answer, and the last one ever after.
    "squeue": """head -n 1 answers; [[ "$(wc -l <answers)" -le 1 ]] || sed -i 1d answers""",
    "sleep": "true",
    "srun": """
cd "$SLURM_SUBMIT_DIR"
while [[ "$1" == --* ]]; do shift; done
if [[ "${AT_THE_START:-}" && "$*" != *preflight* ]]; then kill -USR1 $PPID; kill -USR1 $$; fi
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=2
exec "$@"
""",
    "python": f"""
cd "$SLURM_SUBMIT_DIR"
case "$2" in
    launch.preflight)
        if [[ "$3" == probe && "${{IN_PREFLIGHT:-}}" ]]; then kill "-$IN_PREFLIGHT" $PPID; fi
        [[ -z "${{IN_PREFLIGHT:-}}" ]] ;;
    launch.progress) exec {sys.executable} "$@" ;;
    *)  kill -TERM $$  # to every process of the step
        echo "the program has started as rank ${{RANK:-}}"
        [[ -z "${{BEGINS_ANEW-}}" ]] || rm -r "$(dirname "$0")/run"
        if [[ -n "${{SAVES-}}" ]]; then
            {sys.executable} -c "from pathlib import Path; from rlhf_mc.checkpoint.directory import begin, commit
root = Path('$(dirname "$0")/run'); begin(root, $SAVES); commit(root, $SAVES, {{}})"
        fi
        [[ -z "${{SAYS-75}}" ]] || echo "${{SAYS-75}}" >"$RLHF_MC_EXIT_CODE_FILE"
        exit "${{ENDS_WITH-75}}" ;;
esac
""",
}


def write_checkpoint(root: Path, step: int) -> None:
    """Write an empty checkpoint that counts."""
    directory.begin(root, step)
    directory.commit(root, step, {})


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """The folder of the stand-ins, where they keep what they were asked."""
    for name, body in STAND_INS.items():
        path = tmp_path / name
        path.write_text(f'#!/usr/bin/env bash\ncd "$(dirname "$0")"\n{body}')
        path.chmod(0o755)
    (tmp_path / "answers").write_text("RUNNING\n")
    return tmp_path


def attempt(slurm: Path, number: int = 0, **settings: str) -> tuple[int, str, int]:
    """One attempt of a job: its exit code, what it said, and how often it asked to be requeued."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    env |= {"PATH": f"{slurm}:{env['PATH']}", "PYTHON": str(slurm / "python"), "LOG_ROOT": str(slurm / "logs")}
    env |= {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node1"}
    env |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "2", "SLURM_NODEID": "0", "SLURMD_NODENAME": "node1"}
    env |= {"SLURM_RESTART_COUNT": str(number), **settings}
    command = [ROOT / "launch/slurm_job.sh", "configs/ppo_70b.yaml", f"trainer.default_local_dir={slurm / 'run'}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    requeues = slurm / "requeues"
    asked = len(requeues.read_text().splitlines()) if requeues.exists() else 0
    requeues.unlink(missing_ok=True)
    return done.returncode, done.stdout + done.stderr, asked


def test_a_busy_controller_is_asked_again(slurm: Path) -> None:
    (slurm / "answers").write_text("\n\nRUNNING\n")
    code, said, asked = attempt(slurm, REFUSALS="2")
    assert (code, asked) == (75, 3), said
    (slurm / "answers").write_text("\n")  # for ever
    code, said, asked = attempt(slurm, REFUSALS="9")
    assert (code, asked) == (75, 5) and "Slurm does not requeue the job" in said
    (slurm / "answers").write_text("\nCOMPLETING\n")
    code, said, asked = attempt(slurm)
    assert (code, asked) == (75, 0) and "the job is being ended" in said


def test_where_no_checkpoint_comes_the_job_is_not_queued_again_for_ever(slurm: Path) -> None:
    assert [attempt(slurm, number)[2] for number in (0, 1)] == [1, 1]
    for step in (9, 10):
        write_checkpoint(slurm / "run", step)
    shutil.copytree(slurm / "run/global_step_9", slurm / "run/global_step_99")  # does not count
    (slurm / "run" / "global_step_11.tmp").mkdir()  # does not count
    assert [attempt(slurm, number)[2] for number in (2, 3)] == [1, 1]
    code, said, asked = attempt(slurm, 4)
    assert (code, asked) == (2, 0)
    assert "two consecutive attempts wrote no checkpoint newer than global_step_10" in said


@pytest.mark.parametrize("when", [{"IN_PREFLIGHT": "USR1"}, {"IN_PREFLIGHT": "TERM"}, {"AT_THE_START": "yes"}], ids=str)
def test_signalled_before_the_program_has_started_it_is_queued_again(slurm: Path, when: dict[str, str]) -> None:
    code, said, asked = attempt(slurm, **when)
    assert (code, asked) == (75, 1), said
    assert "the program has started" not in said


def test_a_rank_left_in_the_environment_is_not_taken_for_the_tasks(slurm: Path) -> None:
    code, said, _ = attempt(slurm, RANK="5", WORLD_SIZE="6", SLURM_NTASKS_PER_NODE="2")
    assert code == 75 and "the program has started as rank 0\n" in said
    assert (slurm / "logs/7/attempt_0/rank_0000.node1.log").read_text() == "the program has started as rank 0\n"


@pytest.mark.parametrize(("says", "expected"), [("0", 0), ("", 1)], ids=["finished", "not finished"])
def test_exit_code_0_alone_is_no_success(slurm: Path, says: str, expected: int) -> None:
    code, said, asked = attempt(slurm, ENDS_WITH="0", SAYS=says)
    assert (code, asked) == (expected, 0), said
    assert ("every rank ended with 0, but the run has not finished" in said) == (expected == 1)


def test_a_crashed_run_is_started_again_after_a_new_checkpoint_and_so_often(slurm: Path) -> None:
    crash = {"ENDS_WITH": "1", "SAYS": "", "MAX_RESTARTS": "2"}
    code, said, asked = attempt(slurm, 0, **crash, SAVES="1")
    assert (code, asked) == (1, 1)
    assert (
        "the run crashed after global_step_1, and the start was the newest when it started: the job is requeued" in said
    )
    code, said, asked = attempt(slurm, 1, **crash)
    assert (code, asked) == (1, 0) and "not requeued: this attempt has written no checkpoint (the newest is gl" in said
    assert attempt(slurm, 2, **crash, SAVES="2")[2] == 1
    code, said, asked = attempt(slurm, 3, **crash, SAVES="3")
    assert (code, asked) == (1, 0) and "not requeued: it has been restarted 2 times after a crash" in said


def test_checkpoints_that_another_run_has_moved_away_are_no_progress(slurm: Path) -> None:
    write_checkpoint(slurm / "run", 9)
    crash = {"ENDS_WITH": "1", "SAYS": "", "MAX_RESTARTS": "2", "BEGINS_ANEW": "yes"}
    code, said, asked = attempt(slurm, 0, **crash)
    assert (code, asked) == (1, 0) and "this attempt has written no checkpoint (the newest is the start)" in said
    assert attempt(slurm, 1, **{**crash, "BEGINS_ANEW": ""}, SAVES="1")[2] == 1


@pytest.mark.parametrize(
    ("settings", "expected", "why"),
    [
        ({"ENDS_WITH": "1", "SAYS": "1"}, 1, "MAX_RESTARTS is 0"),
        ({"ENDS_WITH": "1", "SAYS": "2", "MAX_RESTARTS": "1"}, 2, "the same error would come again"),
        ({"ENDS_WITH": "1", "SAYS": "130", "MAX_RESTARTS": "1"}, 130, "it was interrupted"),
        ({"ENDS_WITH": "0", "SAYS": ""}, 1, "MAX_RESTARTS is 0"),
        ({"MAX_RESTARTS": "often"}, 2, "MAX_RESTARTS is often; it must be a number of restarts"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_why_a_run_is_not_started_again(slurm: Path, settings: dict[str, str], expected: int, why: str) -> None:
    code, said, asked = attempt(slurm, SAVES="1", **settings)
    assert (code, asked) == (expected, 0), said
    assert why in said


def test_a_job_that_is_being_ended_is_not_started_again(slurm: Path) -> None:
    (slurm / "answers").write_text("COMPLETING\n")
    code, said, asked = attempt(slurm, ENDS_WITH="1", SAYS="", MAX_RESTARTS="1", SAVES="1")
    assert (code, asked) == (1, 0) and "not requeued: the job is being ended" in said


def test_newest_checkpoint_is_found_without_torch() -> None:
    program = "import sys, launch.progress; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60).returncode == 0


def preflight(folder: Path, *arguments: str, node: str = "a") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.preflight", arguments[0], str(folder), *arguments[1:]]
    env = {**os.environ, "SLURMD_NODENAME": node}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def test_the_preflight_compares_what_the_nodes_left(tmp_path: Path) -> None:
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "config.json").write_text("{}")
    for node in ("a", "b"):
        settings = [f"trainer.default_local_dir={tmp_path}/run", f"reward_model.model_path={tmp_path}/reward"]
        settings += ["actor.ppo_epochs=2"] if node == "b" else []
        done = preflight(tmp_path, "probe", "configs/ppo_70b.yaml", *settings, node=node)
        assert done.returncode == 0, done.stderr
        (tmp_path / "reward" / "config.json").write_text('{"other": 1}')
    done = preflight(tmp_path, "compare", "2")
    assert done.returncode == 1
    for subject in ("config", f"reward_model.model_path ({tmp_path}/reward)"):
        assert f"preflight: {subject} differs on node b: " in done.stderr
    assert not list((tmp_path / "run").glob(".preflight*"))


RANK = """
import pathlib, signal
signal.alarm(60)  # it is not to stay behind
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
print("ready", flush=True)
pathlib.Path("got").write_text(signal.Signals(signal.sigwait([signal.SIGTERM, signal.SIGUSR1])).name)
"""


def with_program(folder: Path, program: str) -> dict[str, str]:
    """Put a program in rlhf_mc's place for what is started in the folder. Return the environment to start it in."""
    (folder / "rlhf_mc").mkdir()
    (folder / "rlhf_mc" / "__init__.py").touch()
    (folder / "rlhf_mc" / "__main__.py").write_text(program)
    return {**os.environ, "NPROC": "1", "PYTHON": sys.executable}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("os._exit(0)", 1),
        ("said.write_text('0'); sys.exit(0)", 0),
        ("said.write_text('75'); sys.exit(75)", 75),
    ],
    ids=["0 without a word", "finished", "stopped"],
)
def test_the_launcher_of_one_node_ends_with_the_programs_code(tmp_path: Path, body: str, expected: int) -> None:
    program = f"import os, pathlib, sys\nsaid = pathlib.Path(os.environ['RLHF_MC_EXIT_CODE_FILE'])\n{body}\n"
    env = with_program(tmp_path, program)
    command = [ROOT / "launch/torchrun_1node.sh", "x.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == expected, done.stderr
    assert ("has not finished" in done.stderr) == (body == "os._exit(0)")
    assert "Traceback" not in done.stderr


def test_the_launcher_of_one_node_leaves_the_code_where_the_user_wants_it(tmp_path: Path) -> None:
    program = "import os, pathlib\nassert not (said := pathlib.Path(os.environ['RLHF_MC_EXIT_CODE_FILE'])).exists()\n"
    env = {
        **with_program(tmp_path, program + "said.write_text('0')\n"),
        "RLHF_MC_EXIT_CODE_FILE": str(tmp_path / "code"),
    }
    (tmp_path / "code").write_text("75\n")  # of an earlier run
    command = [ROOT / "launch/torchrun_1node.sh", "x.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90)
    assert (done.returncode, (tmp_path / "code").read_text()) == (0, "0"), done.stderr


def test_torchrun_passes_usr1_on(tmp_path: Path) -> None:
    env = with_program(tmp_path, RANK)
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
        process.wait(30)
    finally:
        process.kill()
    assert (tmp_path / "got").read_text() == "SIGUSR1"
