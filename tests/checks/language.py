"""Fail where code or documents use a private word in place of the field's standard term, where a
docstring does not begin as docs/style.md asks, and where one line assigns several values. Part of
`make checks`, which runs `python tests/checks/language.py` from the repository's root; arguments
restrict it to these files and directories.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".py", ".md", ".yaml", ".yml", ".sh", ".toml", ".sbatch")
SKIPPED = ("tests/checks/language.py",)
OUTPUTS = ("build", "runs")

TERMS: tuple[tuple[str, str], ...] = (
    (
        (
            r"put(s|ting)? (\w+ )?away|bring(s|ing)? (\w+ )?back|brought (\w+ "
            r")?back|(is|are|was|were) "
            r"away"
        ),
        "offload, onload",
    ),
    (r"residency|who is on the device", "device placement, offload schedule"),
    (r"(go|goes|going|went|gone) on\b", "resume, continue"),
    (r"giv(e|es|ing) way|gave way|to be continued", "preemption, requeue, EXIT_REQUEUE"),
    (r"beats?\b|whereabouts", "heartbeat, rank status"),
    (
        r"one memory|held twice|no longer the memory",
        "aliased weights, shared storage, redundant copy",
    ),
    (r"set(s|ting)? aside|damaged?|(is|are) whole\b", "quarantined, intact, corrupt"),
    (r"let(s|ting)? go\b|\bmeets?\b", "release, barrier"),
    (r"fillers?\b", "dummy micro-batch"),
    (r"predicting", "logit positions"),
    (r"blows?\b|(in|at) peace", "fault injection, uninterrupted run"),
    (r"(deal|deals|dealt|dealing) (\w+ )?out", "round-robin"),
    (r"queue[sd]? (\w+ )?again", "requeue"),
    (r"so many\b|in a row", "N consecutive, N"),
    (r"empt(y|ies) the memory", "resize the storage to 0; the views stay"),
    (r"strangers?\b|crowds?\b", "unauthenticated connection"),
    (r"time-outs?\b", "timeout"),
    (r"relay(s|ed|ing)?\b|busiest", "forward; max / mean"),
    (r"node's memory|memory of the node", "shared memory"),
    (r"deare(r|st)\b", "higher, highest cost"),
    (r"cut short", "truncated"),
    (r"(no|any|some)body\b", "no rank, another process"),
    (r"st(an|oo)d(s|ing)? still|signs? of life", "frozen, blocked; heartbeat, touch of the lock"),
    (r"count(s|ed)? on\b", "rely on"),
    (
        r"in silence|without a word|for ever\b|mend(s|ed|ing)?\b|befell",
        "silently, forever, fix, happen",
    ),
)
"""Pattern (case-insensitive, at a word's start) -> the standard terms to use instead."""
VAGUE_NAMES = frozenset(("found", "mine", "held", "fault", "remedy", "verdict", "asked", "singles"))
"""Names of variables and parameters that code of rlhf_mc/ does not use."""
QUESTIONS = frozenset(("what", "who", "whom", "whose", "where", "whether", "how", "why"))
"""Words that no docstring begins with, of a module, a class, an attribute or a function."""
NOT_VERBS = QUESTIONS | set(
    re.findall(
        r"\w+",
        "which when one ones the a an this that these those it its there of by as in on at to for "
        "from with without between until every each all any no nothing so such everything both",
    )
)
"""Words that the docstring of a function does not begin with: it begins with a verb ("Return",
"Build", "Raise")."""


def files(roots: list[str]) -> list[Path]:
    """Return the files to check: the given ones, and those below the given directories (default:
    the current one)."""
    found = []
    for root in map(Path, roots or ["."]):
        for directory, subdirectories, names in os.walk(root):
            subdirectories[:] = [
                name for name in subdirectories if not name.startswith(".") and name not in OUTPUTS
            ]
            found += [Path(directory, name) for name in names]
        found += [root] if root.is_file() else []
    return sorted(
        path for path in found if path.suffix in SUFFIXES and path.as_posix() not in SKIPPED
    )


def private_words(path: Path, text: str) -> Iterator[str]:
    """Yield a line for each private word."""
    for pattern, instead in TERMS:
        for found in re.finditer(
            rf"(?<![A-Za-z])(?:{pattern})", text.replace("_", " "), re.IGNORECASE
        ):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{path}:{line}: {' '.join(found[0].split())!r}; use: {instead}"


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.expr, bool]]:
    """Yield each docstring, and whether it is of a function that is called as one (not of a
    property)."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_called = is_function and not any(
            "property" in d or d.endswith(".setter") for d in decorators
        )
        for at, statement in enumerate(body):
            if isinstance(statement, ast.Expr) and isinstance(
                getattr(statement.value, "value", None), str
            ):
                yield statement.value, is_called and at == 0


def beginnings(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield a line for each docstring that begins with a word that it should not."""
    for docstring, is_called in docstrings(tree):
        text = str(getattr(docstring, "value", ""))
        first = re.match(r"\W*(\w+)", text)
        word = first[1] if first else ""
        if word.lower() in (NOT_VERBS if is_called else QUESTIONS):
            yield (
                f"{path}:{docstring.lineno}: a docstring begins with {word!r}; a function's begins "
                "with a verb"
            )


def joint_assignments(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield a line for each assignment of several values to several names that is not an exchange
    of them."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        for target in node.targets:
            if not isinstance(target, ast.Tuple):
                continue
            if {ast.unparse(t) for t in target.elts} & {ast.unparse(v) for v in node.value.elts}:
                continue
            yield (
                f"{path}:{node.lineno}: {ast.unparse(node)[:60]!r} assigns several values; give "
                "each a line"
            )


def vague_names(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield a line for each name in rlhf_mc/ that does not say what it is the name of."""
    if "rlhf_mc" not in path.parts:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_of"):
            yield (
                f"{path}:{node.lineno}: function {node.name!r}; use a verb, or a noun for what it "
                "returns"
            )
        name = (
            node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""
        )
        if name in VAGUE_NAMES:
            yield f"{path}:{node.lineno}: {name!r} says nothing of the value; name the value"


def main(roots: list[str]) -> int:
    """Print what is found, a line each. Return the exit code."""
    found: list[str] = []
    checked = files(roots)
    for path in checked:
        text = path.read_text(encoding="utf-8")
        found += private_words(path, text)
        if path.suffix == ".py":
            tree = ast.parse(text, str(path))
            found += beginnings(path, tree)
            found += joint_assignments(path, tree)
            found += vague_names(path, tree)
    print("\n".join(found) if found else f"language: {len(checked)} files, nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
