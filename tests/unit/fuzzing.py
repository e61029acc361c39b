"""What the fuzz tests share: how many examples, how files are damaged, and what may come of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rlhf_mc.config.errors import UserError

TIMES = int(os.environ.get("RLHF_MC_FUZZ_TIMES", "1"))
"""The number of examples is multiplied by it, and they are drawn at random; 1: always the same ones."""


def examples(count: int) -> settings:
    """Return the settings for so many examples, each within half a minute."""
    return settings(
        max_examples=count * TIMES,
        derandomize=TIMES == 1,
        database=None,
        deadline=30_000,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )


def success_or_user_error(action: Callable[[], Any]) -> Any:
    """Return the action's result, or None after a UserError of one line. Nothing else may be raised."""
    try:
        return action()
    except UserError as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < 5_000, message
        return None


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Return ways to damage the bytes of a file: cut short, bytes changed, some taken out, put in, or all replaced."""
    kind = draw(st.sampled_from(["cut", "flip", "delete", "insert", "replace"]))
    places = draw(st.lists(st.floats(0, 1), min_size=1, max_size=4))
    junk = draw(st.binary(min_size=1, max_size=20))

    def damage(data: bytes) -> bytes:
        at = [int(place * len(data)) for place in places]
        if kind == "cut":
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

    return damage


def restore(directory: Path, files: dict[str, bytes]) -> None:
    """Give the directory these files and no others."""
    for path in directory.iterdir():
        if path.name not in files:
            path.unlink()
    for name, data in files.items():
        (directory / name).write_bytes(data)
