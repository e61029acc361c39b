"""Shared by the fuzz tests: the number of examples, the corruption of files, and the outcomes that
are allowed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rlhf_mc.config.errors import UserError

TIMES = int(os.environ.get("RLHF_MC_FUZZ_TIMES", "1"))
"""Factor of the number of examples. Above 1 the examples are drawn at random, at 1 they are always
the same."""


def examples(count: int) -> settings:
    """Return the settings for `count` examples, each with a deadline of 30 s."""
    return settings(
        max_examples=count * TIMES,
        derandomize=TIMES == 1,
        database=None,
        deadline=30_000,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )


def success_or_user_error(action: Callable[[], Any]) -> Any:
    """Return the action's result, or None if it raises a UserError of one line. Any other error
    fails the test."""
    try:
        return action()
    except UserError as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < 5_000, message
        return None


@st.composite
def corruptions(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Draw a function that corrupts the bytes of a file: it truncates them, flips, deletes or
    inserts some, or
    replaces all.
    """
    kind = draw(st.sampled_from(["truncate", "flip", "delete", "insert", "replace"]))
    places = draw(st.lists(st.floats(0, 1), min_size=1, max_size=4))
    junk = draw(st.binary(min_size=1, max_size=20))

    def corrupt(data: bytes) -> bytes:
        at = [int(place * len(data)) for place in places]
        if kind == "truncate":
            return data[: at[0]]
        if kind == "replace":
            return junk
        if kind == "insert":
            return data[: at[0]] + junk + data[at[0] :]
        if kind == "delete":
            return data[: at[0]] + data[at[0] + len(junk) :]
        out = bytearray(data)
        for place, byte in zip(at, junk, strict=False):
            if place < len(out):
                out[place] ^= byte or 1
        return bytes(out)

    return corrupt


def restore(directory: Path, files: dict[str, bytes]) -> None:
    """Leave these files in the directory and no others."""
    for path in directory.iterdir():
        if path.name not in files:
            path.unlink()
    for name, data in files.items():
        (directory / name).write_bytes(data)
