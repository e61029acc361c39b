"""The site file (launch/site_settings.py, launch/site.sh): what the launchers run with it, and a
line for each mistake. Within a Slurm job: tests/system/test_slurm.py. Also what the image leaves
out (.dockerignore)."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "launch" / "site.example.ini"


def settings(command: str, file: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "RLHF_MC_SITE": str(file), **variables}
    program = [sys.executable, ROOT / "launch" / "site_settings.py", command]
    return subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)


def sourced(file: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command after launch/env.sh."""
    env = {"PATH": os.environ["PATH"], "RLHF_MC_SITE": str(file), **variables}
    script = f"set -euo pipefail; source launch/env.sh; {command}"
    return subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500
    )


def write(folder: Path, text: str) -> Path:
    """Write a site file; IMAGE in the text is a file that exists."""
    (folder / "image.sqsh").touch()
    file = folder / "site.ini"
    file.write_text(text.replace("IMAGE", str(folder / "image.sqsh")))
    return file


def test_example_has_every_key_and_gives_the_options_of_pyxis(tmp_path: Path) -> None:
    text = (
        EXAMPLE.read_text().replace("/shared", str(tmp_path)).replace("modules = cuda/13.0\n", "")
    )
    for name in ("models", "data", "runs", "images"):
        (tmp_path / name).mkdir()
    (tmp_path / "images" / "rlhf_mc.sqsh").touch()
    (tmp_path / "site.ini").write_text(text)
    command = (
        'printf "%s\\n" "${site_srun[@]}" "$PYTHON" "$NCCL_IB_HCA" "$GLOO_SOCKET_IFNAME" '
        '"${#site_wrapper[@]}"'
    )
    done = sourced(tmp_path / "site.ini", command, SLURM_JOB_ID="7", NCCL_DEBUG="INFO")
    assert done.returncode == 0, done.stderr
    mounts = [f"{tmp_path}/{name}:{tmp_path}/{name}" for name in ("models", "data", "runs")]
    # the logs' folder is in the third
    mounts = [f"{mounts[0]}:ro", f"{mounts[1]}:ro", mounts[2], f"{ROOT}:{ROOT}"]
    assert done.stdout.splitlines() == [
        "--mpi=none",
        f"--container-image={tmp_path}/images/rlhf_mc.sqsh",
        "--container-name=rlhf_mc_7",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={ROOT}",
        "--no-container-entrypoint",
        "--container-env=RLHF_MC_SOCKET_IFNAME,NCCL_IB_HCA,MELLANOX_VISIBLE_DEVICES,NCCL_DEBUG,LOG_ROOT",
        "--no-container-mount-home",
        "/opt/venv/bin/python",
        "mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_6,mlx5_7,mlx5_8,mlx5_9",
        "eth0",
        "0",
    ]
    shown = settings("check", tmp_path / "site.ini", NCCL_DEBUG="INFO")
    assert (
        shown.returncode == 0
        and "(the environment has this value; the file has WARN)" in shown.stdout
    )
    sections = re.findall(
        r'^    "(\w+)": \(([^)]*)\)',
        (ROOT / "launch" / "site_settings.py").read_text(),
        re.MULTILINE,
    )
    keys = [key for _, names in sections for key in re.findall(r'"(\w+)"', names)]
    assert len(keys) == 7 and all(
        re.search(rf"^{key} =", EXAMPLE.read_text(), re.MULTILINE) for key in keys
    )


def test_apptainer_is_a_command_before_the_programs(tmp_path: Path) -> None:
    (tmp_path / "apptainer").write_text("#!/bin/sh\n")
    (tmp_path / "apptainer").chmod(0o755)
    text = (
        "[container]\nruntime = apptainer\nimage = IMAGE\nmounts = "
        f"{tmp_path}\n[environment]\nA = 1,2\nB = $HOST"
    )
    file = write(tmp_path, text)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = (
        'echo "${site_wrapper[@]}"; echo "$APPTAINERENV_A $A $APPTAINERENV_B $PYTHON '
        '$RLHF_MC_CONTAINER"'
    )
    done = sourced(file, command, **path, A="3", HOST="h", LOG_ROOT="/logs")
    binds = f"--bind {tmp_path}:{tmp_path}:rw --bind {ROOT}:{ROOT}:rw --bind /logs:/logs:rw"
    wrapper = f"apptainer exec --nv {binds} --pwd {ROOT} {tmp_path}/image.sqsh"
    assert done.stdout.splitlines() == [wrapper, "3 3 h python3 apptainer"], done.stderr
    (tmp_path / "apptainer").unlink()
    done = sourced(file, "echo started", HOST="h")
    assert (done.returncode, done.stdout) == (2, "")
    assert "runtime apptainer: there is no such command on" in done.stderr


def test_tools_run_in_the_container_too(tmp_path: Path) -> None:
    """Check launch/tool.sh without a container, with Apptainer, and as a step of srun with
    pyxis."""
    for name, body in (
        ("srun", 'echo "srun $1 $2 ${*: -4:1}"; exec "${@: -3}"'),
        ("apptainer", 'echo run; exec "${@: -3}"'),
    ):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    program = ["-c", "import os, rlhf_mc; print(os.environ.get('PYTHONPATH'))"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    for runtime, expected in (
        ("", ["None"]),
        ("apptainer", ["run", str(ROOT)]),
        ("pyxis", ["srun --nodes=1 --ntasks=1 --no-container-entrypoint", str(ROOT)]),
    ):
        file = write(
            tmp_path, f"[container]\nruntime = {runtime}\nimage = IMAGE\n" if runtime else ""
        )
        command = [ROOT / "launch" / "tool.sh", *program]
        env["RLHF_MC_SITE"] = str(file)
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
        )
        assert done.stdout.splitlines() == expected, done.stderr


def test_without_a_site_file_nothing_is_set(tmp_path: Path) -> None:
    if (ROOT / "site.ini").exists():
        pytest.skip("this repository has a site file")
    command = (
        'echo "${#site_srun[@]} ${#site_wrapper[@]} ${RLHF_MC_CONTAINER-unset} '
        '${PYTHONNOUSERSITE-unset}"'
    )
    for file in (Path(), Path("/dev/null")):
        done = sourced(
            file if file.is_absolute() else Path(""),
            command,
            **({} if file.is_absolute() else {"RLHF_MC_SITE": ""}),
        )
        assert done.stdout == "0 0 unset unset\n", done.stderr


def test_modules_are_loaded_first(tmp_path: Path) -> None:
    file = write(tmp_path, "[launch]\nmodules = a/1 b\n")
    module = (
        'module() { [[ "$*" == "load a/1 b" && -z "${unset}" ]] && export LOADED=$*; }; '
        "export -f module; "
    )
    script = f'{module} set -euo pipefail; source launch/env.sh; echo "$LOADED $-"'
    env = {"PATH": os.environ["PATH"], "RLHF_MC_SITE": str(file)}
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500
    )
    assert re.fullmatch(r"load a/1 b \w*e\w*u\w*\n", done.stdout), done.stderr
    done = sourced(write(tmp_path, "[launch]\nmodules = c\n"), "echo started")
    assert (done.returncode, done.stdout) == (
        2,
        "",
    ) and "site: error: [launch] modules: this shell" in done.stderr


CONTAINER = "[container]\nruntime = pyxis\nimage = IMAGE\n"
BAD = {
    "[contaner]\n": "unknown section [contaner] (did you mean container?)",
    "[launch]\nmodule = a\n": "[launch] has no key module (did you mean modules?)",
    "[launch]\nmodules =\n": "[launch] modules is empty; give a value, or leave the line out",
    "[launch]\npython = a\npython = b\n": "option 'python' in section 'launch' already exists",
    "python = a\n": "File contains no section headers.",
    "[launch]\npython = $NO_SUCH/python\n": (
        "[launch] python: the environment has no variable NO_SUCH"
    ),
    "[launch]\nsrun_options = --ntasks=3\n": (
        "[launch] srun_options: the launchers set --ntasks themselves"
    ),
    "[launch]\nsrun_options = --container-image=x\n": (
        "[launch] srun_options: --container-image belongs to [container]"
    ),
    "[launch]\nsrun_options = mpi=none\n": (
        "[launch] srun_options begins with 'mpi=none'; an option begins with -"
    ),
    "[launch]\nsrun_options = --comment='x\n": "[launch] srun_options: no closing quotation",
    "[container]\nruntime = pyxis\n": (
        "[container] needs image; without a container leave the section out"
    ),
    "[container]\nruntime = docker\nimage = x\n": (
        "[container] runtime is 'docker'; it must be one of pyxis, apptainer"
    ),
    "[container]\nruntime = pyxis\nimage = my.sqsh\n": (
        "[container] image is 'my.sqsh'; the path of a file must"
    ),
    "[container]\nruntime = pyxis\nimage = /no/such.sqsh\n": (
        "[container] image /no/such.sqsh does not exist on "
    ),
    f"{CONTAINER}mounts = data\n": (
        "[container] mounts: 'data'; write SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro"
    ),
    f"{CONTAINER}mounts = /tmp,/usr\n": "[container] mounts: '/tmp,/usr'; write SOURCE",
    f"{CONTAINER}mounts = /no/such\n": "[container] mounts: /no/such does not exist on ",
    f"{CONTAINER}options = --network=x\n": "[container] options: --network is no option of pyxis",
    f"{CONTAINER}options = --container-mounts=/a\n": (
        "[container] options: --container-mounts: it is the key mounts"
    ),
    "[container]\nruntime = apptainer\nimage = IMAGE\noptions = --cleanenv\n": (
        "--cleanenv would hide the launcher's"
    ),
    "[environment]\nRANK = 0\n": "[environment] RANK: the launchers set it themselves",
    "[environment]\nPYTHON = x\n": (
        "[environment] PYTHON: the launchers set it themselves; it is [launch] python"
    ),
    "[environment]\nPATH = /x\n": (
        "[environment] PATH is set on every node; a module or the image changes it"
    ),
    "[environment]\nA-B = 1\n": "[environment] 'A-B' is no name of a variable",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: BAD[text][:50])
def test_mistake_is_one_line(text: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    done = settings("check", file)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"site: error: {file}: ") and BAD[text] in done.stderr


def test_mistake_stops_the_launchers_before_anything_is_started(tmp_path: Path) -> None:
    file = write(tmp_path, "[launch]\nmodule = a\n")
    line = f"site: error: {file}: [launch] has no key module (did you mean modules?)\n"
    env = {
        **os.environ,
        "RLHF_MC_SITE": str(file),
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    for launcher in ("slurm_job.sh", "torchrun_1node.sh"):
        done = subprocess.run(
            [ROOT / "launch" / launcher, "x.yaml"],
            env=env,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    env["RLHF_MC_SITE"] = str(write(tmp_path, CONTAINER))
    command = [ROOT / "launch" / "torchrun_1node.sh", "x.yaml"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert (
        done.returncode == 2
        and "[container] runtime pyxis starts containers by srun" in done.stderr
    )
    assert "no such file" in settings("check", tmp_path / "none.ini").stderr.lower()
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")  # an older one
    (tmp_path / "python3").chmod(0o755)
    done = sourced(EXAMPLE, "echo started", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (
        2,
        "",
    ) and "python3 of version 3.7 or later" in done.stderr


def test_site_file_is_read_by_old_interpreters() -> None:
    """Check the syntax for Python 3.7, and that no method of later versions is called."""
    text = (ROOT / "launch" / "site_settings.py").read_text()
    tree = ast.parse(text, feature_version=(3, 7))
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert imported <= sys.stdlib_module_names
    assert not re.search(r"removeprefix|removesuffix|shlex\.join|math\.prod|:=|\bmatch ", text)


def ignored(path: str) -> bool:
    """Return whether .dockerignore leaves a path out: one of its patterns is the path or a folder
    of it."""
    lines = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert not any(line.startswith("!") or "?" in line for line in lines), (
        "this function knows no such pattern"
    )
    parts = path.split("/")
    heads = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    for line in lines:
        pattern = re.escape(line).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, head) for head in heads):
            return True
    return False


def test_image_has_every_tracked_file_and_nothing_of_the_host() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    tracked = listed.stdout.splitlines()
    assert len(tracked) > 100 and [path for path in tracked if ignored(path)] == []
    copied = re.findall(r"^COPY (?!--from)(\S+) ", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert "." in copied and all((ROOT / path).exists() and not ignored(path) for path in copied)
    for path in (
        ".git/HEAD",
        ".venv/bin/python",
        "site.ini",
        "data/gsm8k/train.parquet",
        "models/a/b",
        "runs/x",
    ):
        assert ignored(path), path
    assert (
        ignored("rlhf_mc/data/__pycache__/a.pyc")
        and ignored(".mypy_cache/x")
        and ignored("ppo_70b-7.log")
    )
