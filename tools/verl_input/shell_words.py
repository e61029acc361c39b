"""The value of a word of a shell script: quotes, variables, $((...)), and $(...) of a few commands.
Nothing is run.

The words come from shfmt's syntax tree. A part that cannot be known, such as $(date), becomes a
plain word with a problem. Statements are in shell_script.py."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_mc.config.errors import UserError

MOST_WORK = 1 << 22
"""Bytes of values and statements that a script may take in all: a variable that doubles itself ends
there."""
Node = Mapping[str, Any]
_INTEGER = re.compile(r"\s*-?(?:(0[0-7]{0,18})|[1-9]\d{0,17})\s*")
"""An integer; the group is one in octal."""
_BRACES = re.compile(r"(?<!\\)\{[^{}\\]*(?:,|\.\.)[^{}\\]*\}")
"""Braces that bash expands to several words."""


@dataclass(frozen=True)
class Word:
    """A resolved word, or one with the reason why it cannot be resolved."""

    line: int
    """0: a variable of the environment."""
    text: str
    """The word; a part that is not resolved is a plain word here."""
    problem: str | None = None
    """The reason why the word cannot be resolved; None: it is resolved."""
    variable: str | None = None
    """The variable whose value would resolve it."""


Variable = dict[str, Word]
"""The elements of an array by index. A scalar has the element 0."""


class Unresolved(Exception):
    """An arithmetic expression has no value; the argument is a word with the problem."""


@dataclass
class State:
    """Variables and arguments at a point of the script."""

    source: bytes
    variables: dict[str, Variable]
    arguments: list[Word] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Variables of the environment that were read."""
    missing: set[str] = field(default_factory=set)
    """Variables that are not set, or have an empty default, and were tested with -z or -n; and
    the next argument of the script, if their number was read."""
    work: list[int] = field(default_factory=lambda: [MOST_WORK])
    """The rest of MOST_WORK, shared by all copies."""

    def spend(self, amount: int, line: int) -> None:
        """Count work. Raise UserError at the limit."""
        self.work[0] -= amount
        if self.work[0] < 0:
            raise UserError(
                f"line {line}: the values of the script's variables grow beyond {MOST_WORK >> 20} "
                "MiB"
            )

    def shown(self, node: Node) -> str:
        """Return the script's text of a node."""
        return self.source[node["Pos"]["Offset"] : node["End"]["Offset"]].decode()


def node_line(node: Node) -> int:
    """Return the line in which a node begins."""
    return int(node["Pos"]["Line"])


class _Fields:
    """The words that one word expands to, as they are built."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.done: list[Word] = []
        self.last: Word | None = None

    def add(self, word: Word) -> None:
        """Append text to the last word."""
        last = self.last or Word(self.line, "")
        problem = last if last.problem else word
        self.last = replace(
            last, text=last.text + word.text, problem=problem.problem, variable=problem.variable
        )

    def end(self) -> None:
        """End the last word."""
        self.done += [self.last] if self.last is not None else []
        self.last = None

    def add_split(self, word: Word, separators: str) -> None:
        """Append text that the characters of $IFS separate into words."""
        blanks = "".join(char for char in separators if char in " \t\n")
        marks = "".join(char for char in separators if char not in blanks)
        text = word.text.lstrip(blanks) if blanks else word.text
        if text != word.text:
            self.end()
        space = f"[{blanks}]*" if blanks else ""
        between = [f"{space}[{re.escape(marks)}]{space}"] * bool(marks) + [f"[{blanks}]+"] * bool(
            blanks
        )
        pieces = re.split("|".join(between), text) if between else [text]
        for number, piece in enumerate(pieces):
            if number:
                self.end()
            if piece or number < len(pieces) - 1:
                self.add(replace(word, text=piece))
        if word.problem and not text:
            self.add(word)


class Expander:
    """Expands words in a state. substitute: returns the output of the statements of $(...), or
    None."""

    def __init__(self, state: State, substitute: Callable[[list[Node]], Word | None]) -> None:
        self.state = state
        self.substitute = substitute
        self.unset_is_empty = False
        """Inside [ -z ] and [ -n ], which test for a variable that is not set."""

    # ------------------------------------------------------------ words

    def fields(self, word: Node, quoted: bool = False) -> list[Word]:
        """Return the words that a word expands to. quoted: spaces in values do not separate."""
        out = _Fields(node_line(word) if "Pos" in word else 0)
        for part in word.get("Parts", []):
            self._part(part, quoted, False, out)
        out.end()
        self.state.spend(sum(len(field.text) + 32 for field in out.done), out.line)
        return out.done

    def text(self, word: Node | None, line: int = 0) -> Word:
        """Return a word as one text, as in an assignment."""
        return self._joined(self.fields(word, quoted=True) if word else [], line)

    def _joined(self, words: list[Word], line: int, separator: Word | None = None) -> Word:
        joined = _Fields(line)
        for number, item in enumerate(words):
            if number:
                joined.add(separator or Word(line, " "))
            joined.add(item)
        return joined.last or Word(line, "")

    def _separators(self) -> Word:
        """Return $IFS."""
        return (self.lookup("IFS") or {"0": Word(1, " \t\n")})["0"]

    def _part(self, part: Node, quoted: bool, in_quotes: bool, out: _Fields) -> None:
        kind = part["Type"]
        if kind == "Lit":
            escaped = r"\\([$`\"\\\n])" if in_quotes else r"(?s)\\(.)"
            text = re.sub(escaped, lambda match: match[1].strip("\n"), part["Value"])
            braces = None if quoted or in_quotes else _BRACES.search(part["Value"])
            out.add(Word(out.line, text, f"{braces[0]} is not expanded" if braces else None))
        elif kind == "SglQuoted":
            text = part.get("Value", "")
            names = {"n": "\n", "t": "\t"}
            text = (
                re.sub(r"\\(.)", lambda match: names.get(match[1], match[1]), text)
                if part.get("Dollar")
                else text
            )
            out.add(Word(out.line, text))
        elif kind == "DblQuoted":
            parts = part.get("Parts", [])
            if not (len(parts) == 1 and parts[0]["Type"] == "ParamExp" and _is_list(parts[0], "@")):
                out.add(Word(out.line, ""))
            for inner in parts:
                self._part(inner, True, True, out)
        else:
            values = self._values(part, quoted or in_quotes)
            if (quoted or in_quotes) and part["Type"] == "ParamExp" and _is_list(part, "*"):
                ifs = self._separators()
                values = [self._joined(values, out.line, replace(ifs, text=ifs.text[:1]))]
            for number, value in enumerate(values):
                if number:
                    out.end()
                if quoted or in_quotes:
                    out.add(value)
                else:
                    out.add_split(value, self._separators().text)
                self.state.spend(len(value.text), out.line)

    def _values(self, part: Node, quoted: bool) -> list[Word]:
        line = node_line(part)
        if part["Type"] == "ParamExp":
            return self._parameter(part, quoted)
        if part["Type"] == "ArithmExp":
            try:
                return [Word(line, str(self.integer(part["X"])))]
            except Unresolved as error:
                return [error.args[0]]
        output = self.substitute(part.get("Stmts", [])) if part["Type"] == "CmdSubst" else None
        shown = " ".join(self.state.shown(part).split())
        name = re.search(r"\w+", shown)
        plain = name[0] if name else "value"
        return [output or Word(line, plain, f"{shown} is not evaluated")]

    # ------------------------------------------------------------ variables

    def lookup(self, name: str) -> Variable | None:
        """Return a variable, or None if it is not set."""
        state = self.state
        if name in ("@", "*"):
            return {str(number): word for number, word in enumerate(state.arguments, 1)}
        if name == "#":
            state.missing.add(str(len(state.arguments) + 1))
            return {"0": Word(1, str(len(state.arguments)))}
        is_argument = name.isdigit() and 0 < int(name) <= len(state.arguments)
        value = {"0": state.arguments[int(name) - 1]} if is_argument else state.variables.get(name)
        if value is not None and any(word.line == 0 for word in value.values()):
            state.used.add(name)
        return value

    def _parameter(self, node: Node, quoted: bool) -> list[Word]:
        name = node["Param"]["Value"]
        value = self.lookup(name)
        index = self.index(node["Index"]) if node.get("Index") else None
        if node.get("Excl"):
            if index in ("@", "*"):
                return [Word(node_line(node), key) for key in value or {}]
            name = value["0"].text if value and "0" in value else name
            value = (
                self.lookup(name)
                if not (value and any(word.problem for word in value.values()))
                else value
            )
        is_list = _is_list(node)
        values = None
        if value is not None and is_list:
            values = list(value.values())
        elif value is not None:
            key = index or "0"
            key = str(len(value) + int(key)) if re.fullmatch(r"-\d+", key) else key
            values = [value[key]] if key in value else None
        if node.get("Length"):
            return self._length(node, values, is_list)
        return self._with_default(node, name, values, is_list, quoted)

    def index(self, node: Node) -> str:
        """Return the index of an element of an array."""
        if node["Type"] == "Word":
            return self.text(node).text
        try:
            return str(self.integer(node))
        except Unresolved:
            return self.state.shown(node)

    def _length(self, node: Node, values: list[Word] | None, is_list: bool) -> list[Word]:
        bad = next((word for word in values or [] if word.problem), None)
        if bad is not None:
            return [bad]
        size = len(values or []) if is_list else len(values[0].text if values else "")
        return [Word(node_line(node), str(size))]

    def _with_default(
        self, node: Node, name: str, values: list[Word] | None, is_list: bool, quoted: bool
    ) -> list[Word]:
        """Return the values after ${NAME:-default} and the like, or after the other operators."""
        expression = node.get("Exp")
        op = expression["Op"] if expression else ""
        word = expression.get("Word") if expression else None
        is_given = values is not None and (
            ":" not in op or any(item.text or item.problem for item in values)
        )
        is_given = is_given and not (is_list and not values)
        line = node_line(node)
        if op in ("-", ":-", "=", ":=", "+", ":+") and is_given == ("+" in op):
            fields = [self.text(word, line)] if quoted else self.fields(word) if word else []
            if op in ("-", ":-"):
                fields = [
                    item if item.text else replace(item, variable=item.variable or name)
                    for item in fields
                ]
            if "=" in op:
                self.state.variables[name] = {"0": self.text(word, line)}
            return fields
        if op in ("+", ":+"):
            return []
        if values is None and not is_list:
            if self.unset_is_empty:
                self.state.missing.add(name)
                return [Word(line, "")]
            return [Word(line, name, f"${name} is not set", name)]
        return self._changed(node, values or [])

    def _changed(self, node: Node, values: list[Word]) -> list[Word]:
        """Return the values after ${NAME#pattern}, ${NAME/a/b}, ${NAME:1:2} and ${NAME^^}."""
        if any(word.problem for word in values):
            return values
        if slice_ := node.get("Slice"):
            return self._sliced(slice_, values, _is_list(node), node["Param"]["Value"] in "@*")
        replacement = node.get("Repl")
        expression = node.get("Exp")
        if replacement:
            pattern = self.text(replacement["Orig"])
            other = self.text(replacement.get("With"))
            count = 0 if replacement.get("All") else 1
            regex = fnmatch.translate(pattern.text).removesuffix(r"\Z")
            bad = next((word for word in (pattern, other) if word.problem), None)
            return [
                bad
                or replace(word, text=re.sub(regex, lambda _: other.text, word.text, count=count))
                for word in values
            ]
        if not expression:
            return values
        op = expression["Op"]
        cases = {"^^": str.upper, ",,": str.lower, "^": lambda text: text[:1].upper() + text[1:]}
        if op in cases:
            return [replace(word, text=cases[op](word.text)) for word in values]
        if op in ("#", "##", "%", "%%"):
            pattern = self.text(expression.get("Word"))
            self.state.spend(sum(len(word.text) ** 2 >> 2 for word in values), node_line(node))
            return [
                pattern if pattern.problem else replace(w, text=_trimmed(w.text, op, pattern.text))
                for w in values
            ]
        if op in ("?", ":?", ":-", "-", ":=", "="):
            return values
        return [Word(node_line(node), "value", f"{self.state.shown(node)} is not evaluated")]

    def _sliced(
        self, node: Node, values: list[Word], is_list: bool, is_arguments: bool
    ) -> list[Word]:
        try:
            start = self.integer(node["Offset"]) - is_arguments
            length = self.integer(node["Length"]) if node.get("Length") else None
        except Unresolved as error:
            return [error.args[0]]
        end = None if length is None else start + length if length >= 0 else length
        if is_list:
            return values[max(start, 0) : end]
        return [replace(word, text=word.text[start:end]) for word in values]

    # ------------------------------------------------------------ integers

    def integer(self, node: Node) -> int:
        """Return the value of an arithmetic expression. Raise Unresolved."""
        kind = node["Type"]
        if kind == "ParenArithm":
            return self.integer(node["X"])
        if kind == "Word":
            word = self.text(node, node_line(node))
            if word.problem is None and re.fullmatch(r"[A-Za-z_]\w*", word.text):
                variable = self.lookup(word.text) or {}
                word = variable.get("0") or Word(
                    word.line, word.text, f"${word.text} is not set", word.text
                )
            if word.problem is None and (digits := _INTEGER.fullmatch(word.text)):
                return int(word.text, 8 if digits[1] else 10)
            raise Unresolved(word if word.problem else self._not_evaluated(node))
        if kind == "UnaryArithm" and node["Op"] in ("-", "+", "!") and not node.get("Post"):
            value = self.integer(node["X"])
            return {"-": -value, "+": value, "!": int(not value)}[node["Op"]]
        op = node.get("Op")
        if kind == "UnaryArithm" and op in ("++", "--"):
            return self._assigned(node, 1 if op == "++" else -1)
        if kind != "BinaryArithm":
            raise Unresolved(self._not_evaluated(node))
        if op == "?":
            branches = node["Y"]
            return self.integer(branches["X"] if self.integer(node["X"]) else branches["Y"])
        if op in ("+=", "-="):
            return self._assigned(node, self.integer(node["Y"]) * (1 if op == "+=" else -1))
        if op == "=":
            return self._assigned(node, self.integer(node["Y"]), from_zero=True)
        left = self.integer(node["X"])
        right = self.integer(node["Y"])
        try:
            value = int(_ARITHMETIC[str(op)](left, right))
        except (KeyError, ArithmeticError, ValueError):
            raise Unresolved(self._not_evaluated(node)) from None
        if abs(value) >= 1 << 63:
            raise Unresolved(self._not_evaluated(node))
        return value

    def _assigned(self, node: Node, change: int, from_zero: bool = False) -> int:
        """Change a variable. Return its new value, or the older one for i++."""
        name = self.text(node["X"]).text
        older = 0 if from_zero else self.integer(node["X"])
        self.state.variables[name] = {"0": Word(node_line(node), str(older + change))}
        return older if node.get("Post") else older + change

    def _not_evaluated(self, node: Node) -> Word:
        return Word(node_line(node), "value", f"$(({self.state.shown(node)})) is not evaluated")


def _quotient(left: int, right: int) -> int:
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _quotient,
    "%": lambda left, right: left - right * _quotient(left, right),
    "**": lambda left, right: left**right if 0 <= right < 64 else 1 << 64,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "&&": lambda left, right: bool(left) and bool(right),
    "||": lambda left, right: bool(left) or bool(right),
}


def _is_list(node: Node, which: str = "@*") -> bool:
    """Return whether an expansion has all elements of an array, or all arguments."""
    parts = (node.get("Index") or {}).get("Parts", [])
    return node["Param"]["Value"] in which or any(part.get("Value", "-") in which for part in parts)


def matches(text: str, pattern: str) -> bool:
    """Return whether a text matches a pattern of the shell."""
    return fnmatch.fnmatchcase(text, pattern)


def _trimmed(text: str, op: str, pattern: str) -> str:
    """Return a text without the shortest (#, %) or longest (##, %%) start or end that matches."""
    ends: Iterable[int] = range(len(text) + 1)
    ends = ends if op in ("#", "%%") else reversed(range(len(text) + 1))
    for end in ends:
        if op[0] == "#" and matches(text[:end], pattern):
            return text[end:]
        if op[0] == "%" and matches(text[end:], pattern):
            return text[:end]
    return text
