"""Fail if a file, a function or a folder has more in it than a reader can take in, if two modules
of the package, or two of its public classes, have one name, or if all exceptions are caught without
a reason. Part of `make checks`, run from the repository's root."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = "rlhf_mc"
ROOTS = (PACKAGE, "tools")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
"""Lines of code: without blank lines, comments and docstrings."""
MAX_FOLDER_FILES = 22
"""Python files in a folder of the package, without those in its subfolders."""
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
BROAD = ("Exception", "BaseException")
SPECIAL_FILES = ("__init__", "__main__")
"""Modules that each package may have."""


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that have code, without docstrings."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def oversized(path: Path, tree: ast.Module, lines: set[int]) -> list[str]:
    """Return one line for the file and one for each function in it that is over its limit. lines:
    those that have code."""
    problems = []
    if len(lines) > MAX_FILE_LINES:
        problems.append(
            f"{path}: {len(lines)} lines of code; at most {MAX_FILE_LINES} (one subject a file)"
        )
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            last = node.end_lineno or node.lineno
            length = sum(node.lineno <= line <= last for line in lines)
            if length > MAX_FUNCTION_LINES:
                problems.append(
                    f"{path}:{node.lineno}: {node.name}() has {length} lines of code; at most "
                    f"{MAX_FUNCTION_LINES}"
                )
    return problems


def crowded_folders(paths: Iterable[Path]) -> list[str]:
    """Return one line for each folder with more files than its limit."""
    return [
        f"{folder}: {count} files; at most {MAX_FOLDER_FILES} (join what is one subject)"
        for folder, count in Counter(path.parent for path in paths).items()
        if count > MAX_FOLDER_FILES
    ]


def broad_excepts(path: Path, tree: ast.Module, lines: list[str]) -> list[str]:
    """Return one line for each `except` of every exception without its reason in a comment, at the
    end of the line or on the next one."""
    return [
        f"{path}:{node.lineno}: name the exceptions, or say in a comment here why all are caught"
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and getattr(node.type, "id", "BaseException" if node.type is None else "") in BROAD
        and "  # " not in lines[node.lineno - 1]
        and not lines[node.lineno].lstrip().startswith("# ")
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
    code = {path: code_lines(sources[path], trees[path]) for path in files}
    problems = crowded_folders(path for path in files if path.parts[0] == PACKAGE)
    for path in files:
        problems += oversized(path, trees[path], code[path])
        problems += broad_excepts(path, trees[path], sources[path].splitlines())
    problems += shared_names({path: trees[path] for path in files if path.parts[0] == PACKAGE})
    total = sum(len(code[path]) for path in files if path.parts[0] == PACKAGE)
    print(
        "\n".join(problems)
        if problems
        else f"structure: {len(files)} files, {total:,} lines of code in {PACKAGE}; all is right"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
