"""Fail if a file, a function, a folder or the package has more in it than a reader can take in, if
two modules of the package, or two of its public classes, have one name, if all exceptions are
caught without a reason, or if a model is tested for a family or a trait outside of architectures/
and models/. Part of `make checks`, run from the repository's root."""

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
ARCHITECTURES = Path(PACKAGE, "architectures")
NAMES_FAMILIES = Path(PACKAGE, "rollout/vllm_patches.py")
"""Patches one of vLLM's models."""
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
"""Lines of code: without blank lines, comments and docstrings."""
MAX_FOLDER_FILES = 22
"""Python files in a folder of the package, without those in its subfolders."""
MAX_PACKAGE_LINES = 38_500
"""Lines of code in the package. A feature raises this limit and the next by what it was granted."""
MAX_SETTINGS = 284
"""Rows of SETTINGS: a key that several roles have is one."""
SETTINGS = Path("docs/settings.md")
"""Generated from the schema; tests/unit/project/test_documents.py compares it."""
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


def block_traits(trees: Mapping[Path, ast.Module]) -> set[str]:
    """Return what tells one model from another: names of families; fields of the blocks' classes,
    without the sizes that ModelShape has too, as ".field"; and the classes, as "Class()"."""
    names: set[str] = set()
    shared: set[str] = set()
    for path, tree in trees.items():
        for node in tree.body if path.parent == ARCHITECTURES else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAMILIES":
                names |= {ast.literal_eval(key) for key in getattr(node.value, "keys", ())}
            if not isinstance(node, ast.ClassDef):
                continue
            if {ast.unparse(base) for base in node.bases} & {"Mixer", "FeedForward"}:
                fields = (part for part in node.body if isinstance(part, ast.AnnAssign))
                names |= {f".{ast.unparse(part.target)}" for part in fields}
                names.add(f"{node.name}()")
            elif node.name in ("ModelShape", "Mixer", "FeedForward", "LayerBlock"):
                members = (getattr(part, "name", getattr(part, "target", "")) for part in node.body)
                shared |= {
                    f".{member if isinstance(member, str) else ast.unparse(member)}"
                    for member in members
                }
    return names - shared


def tested_traits(path: Path, tree: ast.Module, traits: set[str]) -> list[str]:
    """Return one line for each condition on a family or on a trait of a block."""
    if path.parts[1] in ("architectures", "models") or path == NAMES_FAMILIES:
        return []
    conditions: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            conditions.append(node.test)
        elif isinstance(node, ast.comprehension):
            conditions += node.ifs
        elif isinstance(node, ast.BoolOp | ast.Compare | ast.Match):
            conditions.append(node)
    lines: set[tuple[int, str]] = set()
    for part in (part for condition in conditions for part in ast.walk(condition)):
        name = {ast.Attribute: ".{0.attr}", ast.Name: "{0.id}()", ast.Constant: "{0.value}"}
        text = name.get(type(part), "").format(part)
        if text in traits:
            lines.add((getattr(part, "lineno", 0), text))
    return [
        f"{path}:{line}: a condition on {name!r}; ask the block (docs/internals/recipes.md)"
        for line, name in sorted(lines)
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
    traits = block_traits(trees)
    for path in files:
        if path.parts[0] == PACKAGE:
            problems += tested_traits(path, trees[path], traits)
    problems += shared_names({path: trees[path] for path in files if path.parts[0] == PACKAGE})
    total = sum(len(code[path]) for path in files if path.parts[0] == PACKAGE)
    if total > MAX_PACKAGE_LINES:
        problems.append(f"{PACKAGE}: {total:,} lines of code; at most {MAX_PACKAGE_LINES:,}")
    settings = sum(line.startswith("| `") for line in SETTINGS.read_text().splitlines())
    if settings > MAX_SETTINGS:
        problems.append(f"{SETTINGS}: {settings} settings; at most {MAX_SETTINGS}")
    print(
        "\n".join(problems)
        if problems
        else f"structure: {len(files)} files, {total:,} lines of code in {PACKAGE}, {settings} "
        "settings; all is right"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
