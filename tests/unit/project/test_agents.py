"""AGENTS.md, the page for coding assistants: each of its lines names a command, a page, a file of a
run, a setting or a metric, and all that it names exists. Links are tested with those of the other
pages."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys

import pytest
from documents import ROOT

from rlhf_mc import run_files
from rlhf_mc.command_line import HELP
from rlhf_mc.config.load import dotted_keys
from rlhf_mc.observability.catalog import undeclared
from rlhf_mc.runtime.exit_codes import EXIT_ERROR, EXIT_REQUEUE, EXIT_USER_ERROR
from rlhf_mc.runtime.tool import EXIT_INTERRUPTED

PAGE = (ROOT / "AGENTS.md").read_text()
ITEMS = [
    " ".join(item.split())
    for item in re.findall(r"^(?:- |\d+\. )(.*(?:\n +.*)*)", PAGE, re.MULTILINE)
]
QUOTED = re.findall(r"`([^`]+)`", PAGE)
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FILES = {value for value in vars(run_files).values() if isinstance(value, str)}
PROGRAMS = ("make ", "python ", "torchrun ", "launch/", "sbatch ")


def commands() -> list[list[str]]:
    return [shlex.split(text.partition(" > ")[0]) for text in QUOTED if text.startswith(PROGRAMS)]


def is_named(text: str) -> bool:
    """Return whether a quoted text is a command, or the name of something that exists."""
    if text.startswith(PROGRAMS) or text.rstrip("/") in FILES or text in dotted_keys():
        return True
    return "/" in text and undeclared([text]) == []


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= 60 and len(ITEMS) > 20


@pytest.mark.parametrize("item", ITEMS)
def test_each_line_names_something_that_exists(item: str) -> None:
    quoted = re.findall(r"`([^`]+)`", item)
    assert "](" in item or any(map(is_named, quoted))
    assert [
        text for text in quoted if not is_named(text) and not text.startswith(("rlhf_mc: ", "'~"))
    ] == []


def test_exit_codes_are_those_of_the_program() -> None:
    codes = [int(code) for code in re.findall(r"^- (\d+):", PAGE, re.MULTILINE)]
    assert codes == [0, EXIT_ERROR, EXIT_USER_ERROR, EXIT_REQUEUE, EXIT_INTERRUPTED]
    assert codes == [int(code) for code in re.findall(r"^  (\d+) +", HELP, re.MULTILINE)]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_words_of_commands_exist(words: list[str]) -> None:
    """Check targets, programs, scripts, configs and settings."""
    if words[0] == "make":
        assert set(words[1:]) <= TARGETS
    for word in words:
        if re.match(r"(launch|slurm|tools|configs|tests)/", word):
            assert (ROOT / word).is_file(), word
        if re.match(r"\w+\.[\w.]+=", word):
            assert word.partition("=")[0] in dotted_keys(), word
    if "-m" in words:
        assert importlib.util.find_spec(words[words.index("-m") + 1]) is not None


def programs() -> list[tuple[list[str], set[str]]]:
    """Return the programs that have a help text, and the options that the page gives to each."""
    options: dict[tuple[str, ...], set[str]] = {}
    for words in commands():
        start = words.index("-m") if "-m" in words else 1
        program = words[start : start + 2] if "-m" in words else words[start : start + 1]
        if words[0] in ("python", "torchrun") and not program[0].startswith("tests/"):
            given = {word for word in words[start + len(program) :] if word.startswith("--")}
            options.setdefault(tuple(program), set()).update(given)
    return [(list(program), given) for program, given in options.items()]


@pytest.mark.parametrize(
    ("program", "options"),
    [
        pytest.param(
            program,
            options,
            id=program[-1],
            marks=pytest.mark.slow if "check_layouts" in program[0] else (),
        )
        for program, options in programs()
    ],
)
def test_programs_have_the_options(program: list[str], options: set[str]) -> None:
    """Ask each program for its help text."""
    done = subprocess.run(
        [sys.executable, *program, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert [option for option in options if option not in done.stdout] == []
