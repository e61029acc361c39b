"""Fail if a file or a function is longer than a reader can take in, if two modules of the package,
or two of its public classes, have one name, or if all exceptions are caught without a reason. Part
of `make checks`, run from the repository's root."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

PACKAGE = "rlhf_mc"
ROOTS = (PACKAGE, "tools")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 100
BROAD = ("Exception", "BaseException")
SPECIAL_FILES = ("__init__", "__main__")
"""Modules that each package may have."""


def oversized(path: Path, tree: ast.Module, num_lines: int) -> list[str]:
    """Return one line for the file and one for each function in it that is over its limit."""
    problems = []
    if num_lines > MAX_FILE_LINES:
        problems.append(f"{path}: {num_lines} lines; at most {MAX_FILE_LINES} (one subject a file)")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                problems.append(
                    f"{path}:{node.lineno}: {node.name}() has {length} lines; at most "
                    f"{MAX_FUNCTION_LINES}"
                )
    return problems


def broad_excepts(path: Path, tree: ast.Module, lines: list[str]) -> list[str]:
    """Return one line for each `except` of every exception without its reason in a comment."""
    return [
        f"{path}:{node.lineno}: name the exceptions, or say in a comment here why all are caught"
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and getattr(node.type, "id", "BaseException" if node.type is None else "") in BROAD
        and not re.search(r"(^|  )# ", "\n".join(lines[node.lineno - 1 : node.lineno + 1]).replace("\n" + " " * (node.col_offset + 4), "\n"), re.M)
    ]


def shared_names(trees: Mapping[Path, ast.Module]) -> list[str]:
    """Return one line for each name of several modules, and of several public classes."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, tree in trees.items():
        if path.stem not in SPECIAL_FILES:
            places["module", path.stem].append(str(path))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places["class", node.name].append(f"{path}:{node.lineno}")
    return [
        f"{' and '.join(where)}: one {kind} name, {name!r}, for {len(where)} things"
        for (kind, name), where in places.items()
        if len(where) > 1
    ]


def main() -> int:
    """Print what is wrong, one line each. Return the exit code."""
    files = sorted(path for root in ROOTS for path in Path(root).rglob("*.py"))
    if not files:
        print(f"structure: no Python file under {' '.join(ROOTS)}", file=sys.stderr)
        return 1
    sources = {path: path.read_text() for path in files}
    trees = {path: ast.parse(source, str(path)) for path, source in sources.items()}
    problems = [
        line
        for path in files
        for lines in [sources[path].splitlines()]
        for line in (
            *oversized(path, trees[path], len(lines)),
            *broad_excepts(path, trees[path], lines),
        )
    ] + shared_names({path: tree for path, tree in trees.items() if path.parts[0] == PACKAGE})
    print(
        "\n".join(problems)
        if problems
        else f"structure: {len(files)} files, sizes and names are right"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
