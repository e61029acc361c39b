"""The conditions of a shell script: [ ... ] and [[ ... ]]. A test of a file is not decided."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence

from rlhf_mc.verl.shell_words import Expander, Node, Word, matches

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


class Conditions:
    """Decides conditions over the words of an Expander."""

    def __init__(self, words: Expander) -> None:
        self.words = words

    def bracket(self, nodes: Sequence[Node]) -> bool | None:
        """Return the result of [ ... ], None if it is not known."""
        self.words.unset_is_empty = any((node.get("Parts") or [{}])[0].get("Value") in ("-z", "-n") for node in nodes)
        try:
            words = [word for node in nodes for word in self.words.fields(node)]
        finally:
            self.words.unset_is_empty = False
        if words and words[-1].text == "]":
            words.pop()
        return self._tested(words)

    def _tested(self, words: list[Word]) -> bool | None:
        texts = [word.text for word in words]
        for op in ("-o", "-a"):
            if op in texts:
                at = texts.index(op)
                rest = words[at + 1 :]
                return _joined(op == "-a", self._tested(words[:at]), functools.partial(self._tested, rest))
        if texts[:1] == ["!"]:
            status = self._tested(words[1:])
            return None if status is None else not status
        if any(word.problem for word in words):
            return None
        if len(words) == 2:
            return self._unary(*texts)
        if len(words) == 3:
            return _compared(texts[0], texts[1], texts[2], False)
        return bool(texts and texts[0]) if len(words) < 2 else None

    def _unary(self, op: str, text: str) -> bool | None:
        if op in ("-z", "-n"):
            return (text == "") == (op == "-z")
        if op == "-v":
            return self.words.lookup(text) is not None
        return None  # files are not looked at

    def condition(self, node: Node) -> bool | None:
        """Return the result of [[ ... ]], None if it is not known."""
        kind = node["Type"]
        op = node.get("Op")
        if kind == "ParenTest":
            return self.condition(node["X"])
        if op in ("&&", "||"):
            return _joined(op == "&&", self.condition(node["X"]), lambda: self.condition(node["Y"]))
        if op == "!":
            status = self.condition(node["X"])
            return None if status is None else not status
        self.words.unset_is_empty = kind == "Word" or op in ("-z", "-n")
        try:
            sides = [
                self.words.text(side) for side in ([node] if kind == "Word" else [node["X"], node.get("Y")]) if side
            ]
        finally:
            self.words.unset_is_empty = False
        if any(side.problem for side in sides):
            return None
        if len(sides) == 1:
            return self._unary(op or "-n", sides[0].text)
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
