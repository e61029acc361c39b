"""The conditions of a shell script: [ ... ] and [[ ... ]]. A test of a file is not decided."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence

from verl_input.shell_words import Expander, Node, Word, matches

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def bracket_status(expander: Expander, nodes: Sequence[Node]) -> bool | None:
    """Return the result of [ ... ], None if it is not known."""
    expander.unset_is_empty = any(
        (node.get("Parts") or [{}])[0].get("Value") in ("-z", "-n") for node in nodes
    )
    try:
        words = [word for node in nodes for word in expander.fields(node)]
    finally:
        expander.unset_is_empty = False
    if words and words[-1].text == "]":
        words.pop()
    return _tested(expander, words)


def _tested(expander: Expander, words: list[Word]) -> bool | None:
    texts = [word.text for word in words]
    for op in ("-o", "-a"):
        if op in texts:
            i = texts.index(op)
            rest = words[i + 1 :]
            return _joined(
                op == "-a",
                _tested(expander, words[:i]),
                functools.partial(_tested, expander, rest),
            )
    if texts[:1] == ["!"]:
        status = _tested(expander, words[1:])
        return None if status is None else not status
    if any(word.problem for word in words):
        return None
    if len(words) == 2:
        return _unary(expander, texts[0], words[1])
    if len(words) == 3:
        return _compared(texts[0], texts[1], texts[2], False)
    return bool(texts and texts[0]) if len(words) < 2 else None


def _unary(expander: Expander, op: str, word: Word) -> bool | None:
    if op in ("-z", "-n"):
        expander.state.missing |= {word.variable} if word.variable and not word.text else set()
        return (word.text == "") == (op == "-z")
    if op == "-v":
        return expander.lookup(word.text) is not None
    return None  # files are not looked at


def condition_status(expander: Expander, node: Node) -> bool | None:
    """Return the result of [[ ... ]], None if it is not known."""
    kind = node["Type"]
    op = node.get("Op")
    if kind == "ParenTest":
        return condition_status(expander, node["X"])
    if op in ("&&", "||"):
        return _joined(
            op == "&&",
            condition_status(expander, node["X"]),
            lambda: condition_status(expander, node["Y"]),
        )
    if op == "!":
        status = condition_status(expander, node["X"])
        return None if status is None else not status
    expander.unset_is_empty = kind == "Word" or op in ("-z", "-n")
    try:
        sides = [
            expander.text(side)
            for side in ([node] if kind == "Word" else [node["X"], node.get("Y")])
            if side
        ]
    finally:
        expander.unset_is_empty = False
    if any(side.problem for side in sides):
        return None
    if len(sides) == 1:
        return _unary(expander, op or "-n", sides[0])
    return _compared(sides[0].text, str(op), sides[1].text, True)


def _joined(is_and: bool, first: bool | None, second: Callable[[], bool | None]) -> bool | None:
    """Return first && second() or first || second(), with None for a status that is not known."""
    if first is not None and first != is_and:
        return first
    other = second()
    if first is None and other is not None and other != is_and:
        return other
    return None if first is None else other


def _compared(left: str, op: str, right: str, has_patterns: bool) -> bool | None:
    if op in ("=", "==", "!="):
        return (matches(left, right) if has_patterns else left == right) == (op != "!=")
    if op in _NUMBERS and all(re.fullmatch(r"-?\d{1,18}", side) for side in (left, right)):
        return _NUMBERS[op](int(left), int(right))
    return None
