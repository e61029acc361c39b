"""Write docs/internals/tests.md from the docstrings of the tests' files.

python tests/checks/tests_page.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "internals" / "tests.md"
HEAD = """\
# Promises and the tests that hold them

`tests/unit/` has the folders of `rlhf_mc/`, so the tests of a module are found by its path; those
of programs and pages are in `launch/` and `project/`. [architecture.md](../architecture.md#tests)
says what the layers are. `python tests/checks/tests_page.py` writes this page from the docstrings
of the files.
"""


def page() -> str:
    """Return the text of the page."""
    lines = [HEAD]
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    for folder in sorted({path.parent for path in files}):
        lines += [f"## {folder.relative_to(ROOT).as_posix()}\n", "| file | promise |", "|---|---|"]
        lines += [f"| `{path.name}` | {promise(path)} |" for path in files if path.parent == folder]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def promise(path: Path) -> str:
    """Return the first sentence of a file's docstring, as text of a table."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    assert text, f"{path} has no docstring: what does it promise?"
    sentence = re.split(r"(?<=[.:])\s+(?=[A-Z])", text)[0]
    return re.sub(r"([|<*])", r"\\\1", sentence)


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
