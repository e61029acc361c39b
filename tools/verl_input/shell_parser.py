"""The syntax tree of a shell script, by shfmt. Limits keep the parser within a second for any
text."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_mc import json_files
from rlhf_mc.config.errors import UserError
from verl_input.shell_words import Node, node_line

_MOST_BYTES = 1 << 15
_DEEPEST = 100
_OPENING = r"[({\[]|(?:^|[;&|]|\b(?:then|else|do)\b)\s*(?:if|for|while|until|case)\b"
_CLOSING = r"[)}\]]|\b(?:fi|done|esac)\b"
_SECONDS = 20


def parsed(text: str) -> tuple[str, Node]:
    """Return a script and shfmt's syntax tree of it. A backslash that ends a comment is replaced in
    the script: shfmt continues the line after it, bash does not."""
    tree = _tree(text)
    source = bytearray(text.encode())
    for start in _continued_comments(tree):
        end = source.index(b"\n", start)
        source[source.rindex(b"\\", start, end)] = ord(" ")
    corrected = source.decode()
    return corrected, tree if corrected == text else _tree(corrected)


def _continued_comments(tree: Any) -> Iterator[int]:
    """Yield the offset of each comment that a backslash ends."""
    if isinstance(tree, list):
        for item in tree:
            yield from _continued_comments(item)
    elif isinstance(tree, dict):
        if "Hash" in tree and tree.get("Text", "").endswith("\\\n"):
            yield tree["Hash"]["Offset"]
        for item in tree.values():
            if isinstance(item, (dict, list)):
                yield from _continued_comments(item)


def _tree(text: str) -> Node:
    if len(text.encode()) > _MOST_BYTES:
        raise UserError(f"line 1: a script of more than {_MOST_BYTES >> 10} KiB")
    if line := _line_too_deep(text):
        raise UserError(
            f"line {line}: nested too deeply, more than {_DEEPEST} brackets or statements"
        )
    local = Path(sys.executable).with_name("shfmt")
    program = str(local) if local.exists() else shutil.which("shfmt")
    if program is None:
        raise UserError(
            "line 1: shfmt, which parses scripts, is not installed: pip install shfmt-py"
        )
    command = [program, "--to-json", "-ln", "bash"]
    try:
        done = subprocess.run(
            command, input=text.encode(), capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UserError("line 1: shfmt cannot parse it in time") from error
    except OSError as error:
        raise UserError(f"line 1: {program}: {error}") from error
    if done.returncode:
        match = re.match(
            r"(?:<standard input>:)?(\d+):\S*?:? (.*)", done.stderr.decode(errors="replace")
        )
        raise UserError(f"line {match[1]}: {match[2]}" if match else "line 1: nested too deeply")
    tree: Node = json_files.parse(done.stdout)
    return tree


def _line_too_deep(text: str) -> int | None:
    """Return the first line with more than _DEEPEST brackets open, or None. Those in quotes and
    comments count too: shfmt takes seconds for more than any script has."""
    depth = 0
    for bracket in re.finditer(f"({_OPENING})|{_CLOSING}", text, re.MULTILINE):
        depth = depth + 1 if bracket[1] else max(0, depth - 1)
        if depth > _DEEPEST:
            return text.count("\n", 0, bracket.start()) + 1
    return None


def written(tree: Any) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each literal part of a word."""
    if isinstance(tree, list):
        for item in tree:
            yield from written(item)
    elif isinstance(tree, dict):
        if tree.get("Type") in ("Lit", "SglQuoted"):
            yield node_line(tree), tree.get("Value", "")
        for item in tree.values():
            if isinstance(item, (dict, list)):
                yield from written(item)
