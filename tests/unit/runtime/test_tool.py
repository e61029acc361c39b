"""Ctrl-C, unread output and numbers on the command line of the planner and of the tools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from config_files import REPO

HOOK = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""
WORK = """
import os, signal
from rlhf_mc.runtime.tool import end_on_interrupt
end_on_interrupt()
try:
    os.kill(os.getpid(), signal.SIGINT)
finally:
    print("cleaned")
"""
PLANNER = ["-m", "rlhf_mc.planner"]


def python(
    tmp_path: Path, *arguments: str, stdout: int = subprocess.PIPE, **env: str
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    paths = os.pathsep.join([str(tmp_path), str(REPO)])
    env = {**os.environ, "INTERRUPT_AT": "", "PYTHONUNBUFFERED": "", **env, "PYTHONPATH": paths}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=env, cwd=REPO, stdout=stdout, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("program", "module"),
    [
        (PLANNER, "rlhf_mc.config.errors"),
        (["tools/check_layouts.py"], "torch"),
        (["tools/gpu_check.py"], "gpu_parts.catalog"),
        (["tools/convert_hf_to_mcore.py"], "rlhf_mc.checkpoint.convert"),
        (["tools/convert_mcore_to_hf.py"], "rlhf_mc.checkpoint.convert"),
        (["tools/make_quickstart.py"], "torch"),
        (["tools/prepare_data.py"], "pyarrow"),
        (["tools/report.py"], "rlhf_mc.report.page"),
        (["tools/from_verl.py"], "rlhf_mc.config.load"),
    ],
)
def test_ctrl_c_in_an_import_is_one_line(tmp_path: Path, program: list[str], module: str) -> None:
    ended = python(tmp_path, *program, INTERRUPT_AT=module)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "rlhf_mc: interrupted\n")


def test_ctrl_c_at_work_cleans_up(tmp_path: Path) -> None:
    ended = python(tmp_path, "-c", WORK)
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        130,
        "cleaned\n",
        "rlhf_mc: interrupted\n",
    )
    other_rank = python(tmp_path, "-c", WORK, RANK="1")
    assert (other_rank.returncode, other_rank.stderr) == (130, "")


@pytest.mark.parametrize(
    ("program", "argument", "text"),
    [
        *(
            ([*PLANNER, "x"], name, "9" * 20)
            for name in ("--nodes", "--gpus-per-node", "--top", "--mean-prompt-length")
        ),
        ([*PLANNER, "x"], "--nodes", "0"),
        ([*PLANNER, "x"], "--nodes", "²"),
        ([*PLANNER, "x"], "--host-memory", "nan"),
        ([*PLANNER, "x"], "--storage-bandwidth", "inf"),
        (["tools/prepare_data.py"], "--test-rows", "-1"),
    ],
)
def test_numbers_out_of_range_are_one_line(
    tmp_path: Path, program: list[str], argument: str, text: str
) -> None:
    ended = python(tmp_path, *program, argument, text)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert f"error: argument {argument}: '{text}' is no " in line


UNREAD = """
from rlhf_mc.runtime.tool import end_on_interrupt
end_on_interrupt()
import os, sys
from rlhf_mc.runtime.exit_codes import exit_code
def write(text):
    print(text)
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b"-")
"""


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ([*PLANNER, "--help"], 0),
        (["tools/from_verl.py", "--help"], 0),
        (["-c", f"{UNREAD}sys.exit(exit_code('rlhf_mc', lambda: print('-' * 100_000)))"], 141),
        (["-c", f"{UNREAD}print('-' * 100_000)"], 141),
    ],
    ids=["planner", "tool", "in exit_code", "outside"],
)
def test_unread_output_ends_a_tool_quietly(tmp_path: Path, program: list[str], code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = python(tmp_path, *program, stdout=writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (code, "")


def test_a_closed_output_ends_a_tool_quietly(tmp_path: Path) -> None:
    closed = (
        "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    ended = python(tmp_path, "-c", closed, "-c", f"{UNREAD}print('text')")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_another_broken_pipe_is_an_error(tmp_path: Path) -> None:
    ended = python(tmp_path, "-c", f"{UNREAD}sys.exit(exit_code('rlhf_mc', lambda: write('text')))")
    assert (ended.returncode, ended.stdout) == (1, "text\n")
    assert "BrokenPipeError" in ended.stderr.splitlines()[-1]
