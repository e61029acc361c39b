"""Wrap the prose of the pages at one width: paragraphs and items of lists. Headings, tables and
code stay.

python tests/checks/wrap.py [PAGE ...]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WIDTH = 100
PAGES = sorted([ROOT / "README.md", ROOT / "AGENTS.md", *(ROOT / "docs").rglob("*.md")])
_MARK = re.compile(r"( *)([-*] |\d+\. )")
"""Beginning of an item of a list."""
_FENCE = re.compile(r" *```")
_KEPT = re.compile(r"$|#|!\[| *\||    ")
"""Beginning of a line that is no prose: empty, heading, picture, table, code."""


def wrapped(text: str) -> str:
    """Return a page with its prose wrapped. Text in backticks is not broken."""
    lines = text.split("\n")
    result: list[str] = []
    while lines:
        line = lines.pop(0)
        if _FENCE.match(line):
            result.append(line)
            while lines and not _FENCE.match(lines[0]):
                result.append(lines.pop(0))
            result += lines[:1]
            del lines[:1]
        elif _KEPT.match(line):
            result.append(line)
        else:
            mark = _MARK.match(line)
            start = mark[0] if mark else re.match(" *", line)[0]  # type: ignore[index]
            paragraph = [line.removeprefix(start)]
            while lines and not (
                _MARK.match(lines[0]) or _FENCE.match(lines[0]) or _KEPT.match(lines[0].lstrip())
            ):
                paragraph.append(lines.pop(0).strip())
            result += _filled(" ".join(paragraph), start)
    return "\n".join(result)


def _filled(text: str, start: str) -> Iterator[str]:
    """Yield the lines of a paragraph. start: of its first line; the others are indented as far."""
    line = start
    for word in re.findall(r"(?:`[^`]*`|\S)+", text):
        if line != start and len(line) + 1 + len(word) > WIDTH:
            yield line
            line = " " * len(start) + word
        else:
            line += word if line == start else f" {word}"
    yield line


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else PAGES:
        path.write_text(wrapped(path.read_text(encoding="utf-8")), encoding="utf-8")
