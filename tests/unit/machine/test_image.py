"""The image is complete without Apex (Dockerfile, requirements/apex.sh), with stand-ins for pip and
for the image's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

from rlhf_mc.machine import facts
from rlhf_mc.machine.facts import Library

PIP = """#!/bin/sh
echo "$@" >>"$(dirname "$0")/calls"
case "$1" in
wheel) [ "$BUILD" = works ] && touch "$6/apex-0.1.whl" ;;
esac
"""
PYTHON = """#!/bin/sh
case "$2" in
*sys.prefix*) dirname "$0" ;;
*) [ "$IMPORT" = works ] ;;
esac
"""


def build_image(folder: Path, **variables: str) -> tuple[str, list[str], Library]:
    """Run both commands of apex.sh, as the Dockerfile does. Return the last line of the build, the
    calls of pip, and Apex as --check reads it."""
    for name, text in {"pip": PIP, "python": PYTHON}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    env = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "BUILD": "works",
        "IMPORT": "works",
        **variables,
    }
    for command in ("build", "install"):
        arguments = [ROOT / "requirements/apex.sh", command, folder / "apex"]
        done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return (
        done.stdout.splitlines()[-1],
        [call.split()[0] for call in calls],
        facts.apex.__wrapped__(),
    )


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give --check an environment without Apex."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(facts, "imported", lambda package, code: (Library(None), ""))
    monkeypatch.delenv("APEX", raising=False)


def test_apex_is_installed_by_default(tmp_path: Path) -> None:
    last, calls, library = build_image(tmp_path)
    assert (last, calls, library) == (
        "apex: installed; the image is complete",
        ["wheel", "install"],
        Library(None),
    )


@pytest.mark.parametrize(
    ("variables", "expected_calls", "reason"),
    [
        ({"BUILD": "fails"}, ["wheel"], "its build failed when the image was built"),
        (
            {"IMPORT": "fails"},
            ["wheel", "install", "uninstall"],
            "it was built with the image, but cannot be imported",
        ),
        ({"APEX": "0"}, [], "the image was built with APEX=0"),
    ],
    ids=["build fails", "import fails", "left out"],
)
def test_image_without_apex_says_so(
    tmp_path: Path, variables: dict[str, str], expected_calls: list[str], reason: str
) -> None:
    last, calls, library = build_image(tmp_path, **variables)
    assert last.startswith(f"apex: not installed: {reason}; the image is complete without it")
    assert (calls, library) == (expected_calls, Library(None, reason))


def test_apex_is_the_last_stage_and_no_other_needs_it() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = re.findall(
        r"^FROM (\S+)(?: AS (\S+))?\n((?:(?!FROM ).*\n)*)", dockerfile, re.MULTILINE
    )
    assert [name for _, name, _ in stages] == [
        "python",
        "locked",
        "transformer-engine",
        "complete",
        "apex",
        "",
    ]
    base, _, last = stages[-1]
    assert base == "complete" and "apex.sh install" in last
    assert not any(
        "apex" in text for _, name, text in stages if name in ("python", "locked", "complete")
    )
    assert "ENTRYPOINT" in stages[3][2] and "ARG APEX=1\n" in stages[4][2]
