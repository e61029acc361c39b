"""Fail if a file or a function is longer than a reader can take in. Part of `make checks`, which runs
`python tools/check_size.py rlhf_mc tools`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 100


def oversized(path: Path) -> list[str]:
    """Return one line for the file and one for each function in it that is over its limit."""
    source = path.read_text()
    found = []
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        found.append(f"{path}: {num_lines} lines; at most {MAX_FILE_LINES} (one subject a file)")
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name}() has {num_lines} lines; at most {MAX_FUNCTION_LINES}")
    return found


def main(roots: list[str]) -> int:
    """Print what is over a limit, one line each. Return the exit code."""
    files = sorted(path for root in roots for path in Path(root).rglob("*.py"))
    if not files:
        print(f"check_size: no Python file under {' '.join(roots)}", file=sys.stderr)
        return 1
    found = [line for path in files for line in oversized(path)]
    print("\n".join(found) if found else f"check_size: {len(files)} files, none over the limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["rlhf_mc", "tools"]))
