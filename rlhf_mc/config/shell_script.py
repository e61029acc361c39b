"""The words of one command in a shell script, with the variables that the script assigns replaced. Nothing is run.

Read are assignments (NAME=value, export, +=, arrays), "$NAME", "${NAME:-default}", "${NAME[@]}" and "$((...))" of
integers. A word that depends on anything else, such as $(command) or a variable assigned under a condition, is
unresolved, with the reason. The reader of a verl script is verl.py.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from rlhf_mc.config.errors import UserError

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARATIONS = ("export", "declare", "local", "readonly")
_OPENS = ("if", "for", "while", "until", "case")
_CLOSES = ("fi", "done", "esac")
_BRACES = ("{", "}")
_INSIDE = ("then", "else", "elif", "do", "!")
_ARGUMENTS = ("$@", "$*", "${@}", "${@:1}")
_KEPT = ("HOME",)
"""Variables that are kept as they are written."""
_OPERATORS: dict[type, object] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Word:
    """One word of a command."""

    line: int
    text: str
    """The word; an unresolved part is left out."""
    problem: str | None = None
    """The reason why the word cannot be resolved; None: it is resolved."""


@dataclass
class _Part:
    """A piece of a word: text, or an expansion that begins with $."""

    text: str
    quoted: bool
    is_expansion: bool = False


@dataclass
class _Raw:
    """A word before expansion."""

    line: int
    parts: list[_Part] = field(default_factory=list)
    array: list[_Raw] | None = None
    """The words of NAME=( ... )."""

    def literal(self) -> str:
        """Return the text before the first expansion."""
        out = ""
        for part in self.parts:
            if part.is_expansion:
                break
            out += part.text
        return out


def commands(text: str, path: str) -> Iterator[list[Word]]:
    """Yield each command of a script, without its assignments, in the order of the lines. Raise UserError if a quote
    or a bracket is not closed."""
    variables: dict[str, list[Word]] = {}
    depth = 0
    for raw, follows in _Lexer(text, path).commands():
        rest = list(raw)
        while rest and rest[0].literal() in (*_OPENS, *_CLOSES, *_BRACES, *_INSIDE):
            word = rest.pop(0).literal()
            depth = max(0, depth + (word in (*_OPENS, "{")) - (word in (*_CLOSES, "}")))
        is_declaration = bool(rest) and rest[0].literal() in _DECLARATIONS
        rest = rest[is_declaration:]
        while rest and (found := _ASSIGNMENT.match(rest[0].literal())):
            _assign(variables, found, rest.pop(0), follows or depth > 0)
        if rest and not is_declaration:
            yield [word for item in rest for word in _expand(item, variables)]


def _assign(variables: dict[str, list[Word]], found: re.Match[str], raw: _Raw, is_conditional: bool) -> None:
    name, plus = found.groups()
    if is_conditional:
        reason = f"${name} is assigned under a condition, in line {raw.line}"
        variables[name] = [Word(raw.line, "", reason)]
        return
    older = variables.get(name, []) if plus else []
    if raw.array is not None:
        variables[name] = [*older, *(word for item in raw.array for word in _expand(item, variables))]
        return
    value = _Raw(raw.line, [_Part(part.text, True, part.is_expansion) for part in raw.parts])
    words = _expand(value, variables)
    problem = next((word.problem for word in (*older, *words) if word.problem), None)
    text = "".join(word.text for word in older) + " ".join(word.text for word in words)[found.end() :]
    variables[name] = [Word(raw.line, text, problem)]


# ---------------------------------------------------------------- expansion


def _expand(raw: _Raw, variables: dict[str, list[Word]]) -> list[Word]:
    """Return the words that a word becomes: none for "$@", several for an array or for text with spaces."""
    fields = [""]
    problem: str | None = None
    has_text = False
    is_list = any(part.is_expansion and (part.text in _ARGUMENTS or "[@]" in part.text) for part in raw.parts)
    for part in raw.parts:
        if not part.is_expansion:
            fields[-1] += part.text
            has_text = has_text or bool(part.text) or not is_list  # "" is a word, and "$@" without arguments none
            continue
        if part.text in _ARGUMENTS:
            continue
        words = _value(part.text, raw.line, variables)
        problem = problem or next((word.problem for word in words if word.problem), None)
        values = [word.text for word in words]
        if not part.quoted:
            values = [piece for value in values for piece in value.split()] if values else []
        has_text = has_text or (part.quoted and "[@]" not in part.text)
        for number, value in enumerate(values):
            fields += [""] if number else []
            fields[-1] += value
    return [Word(raw.line, text, problem) for text in fields if text or has_text or problem]


def _value(text: str, line: int, variables: dict[str, list[Word]]) -> list[Word]:
    """Return the value of an expansion: one word, or those of an array."""
    if text.startswith("$(("):
        return [_arithmetic(text[3:-2], line, variables)]
    inner = text[2:-1] if text.startswith("${") else text[1:]
    inner = inner.removesuffix("[@]").removesuffix("[*]")
    found = _NAME.match(inner) or re.match(r"\d+", inner)
    name, rest = (found[0], inner[found.end() :]) if found and not text.startswith("$(") else ("", inner)
    if name in _KEPT and name not in variables:
        return [Word(line, text)]
    value = variables.get(name)
    if name and not rest:
        return value if value is not None else [Word(line, "", f"${name} is not assigned before")]
    if name and (rest.startswith((":-", "-", ":=", "="))):
        if value is not None and (any(word.text or word.problem for word in value) or rest[0] != ":"):
            return value
        default = rest.lstrip(":")[1:]
        default = default[1:-1] if default[:1] == default[-1:] and default[:1] in ("'", '"') else default
        if '"' in default:
            return [Word(line, "", f"{text} is not evaluated")]
        ((raw,), _) = next(_Lexer(f'"{default}"', "").commands())
        raw.line = line
        return _expand(raw, variables)
    return [Word(line, "", f"{text} is not evaluated")]


def _arithmetic(expression: str, line: int, variables: dict[str, list[Word]]) -> Word:
    """Return the value of $((expression)): integers, names, + - * / % and brackets."""
    problems: list[str] = []

    def replaced(found: re.Match[str]) -> str:
        (word, *_) = _value(f"${found[1]}", line, variables)
        problems.extend([word.problem] if word.problem else [])
        return word.text or "0"

    written = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", replaced, expression)
    if problems:
        return Word(line, "", problems[0])
    try:
        return Word(line, str(_integer(ast.parse(written.strip(), mode="eval").body)))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return Word(line, "", f"$(({expression})) is not evaluated")


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_integer(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        compute = _OPERATORS[type(node.op)]
        assert callable(compute)
        return int(compute(_integer(node.left), _integer(node.right)))
    raise ValueError


# ---------------------------------------------------------------- words


class _Lexer:
    """Splits a script into commands of words."""

    def __init__(self, text: str, path: str) -> None:
        self._text = text
        self._path = path
        self._at = 0

    def commands(self) -> Iterator[tuple[list[_Raw], bool]]:
        """Yield the words of each command, and whether it follows && or ||."""
        words: list[_Raw] = []
        follows = False
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in "\n;|&":
                if words:
                    yield words, follows
                    words = []
                    follows = False
                follows = follows or self._text[self._at : self._at + 2] in ("&&", "||")
                self._at += 1
            elif not self._skip_blank(char):
                word = self._word()
                words += [word] if word is not None else []
        if words:
            yield words, follows

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _skip_blank(self, char: str) -> bool:
        """Skip a space, a continued line, a comment or a redirection. Return whether there was one."""
        if char in " \t\r":
            self._at += 1
        elif self._text.startswith(("\\\n", "\\\r\n"), self._at):
            self._at = self._text.index("\n", self._at) + 1
        elif char == "#":
            end = self._text.find("\n", self._at)
            self._at = len(self._text) if end < 0 else end
        elif found := re.compile(r"\d*[<>]+&?[ \t]*").match(self._text, self._at):
            self._at = found.end()
            if "<<" in found[0]:
                raise UserError(f"{self._path}, line {self._line()}: a here-document (<<) is not read")
            self._word()
        else:
            return False
        return True

    def _word(self) -> _Raw | None:
        """Read one word."""
        word = _Raw(self._line())
        while self._at < len(self._text) and (char := self._text[self._at]) not in " \t\r\n;|&<>":
            if char == "'":
                end = self._close("'", self._at + 1)
                word.parts.append(_Part(self._text[self._at + 1 : end], True))
                self._at = end + 1
            elif char == '"':
                self._double_quoted(word)
            elif char in "$`":
                word.parts.append(self._expansion(quoted=False))
            elif char == "\\":
                if self._text.startswith(("\\\n", "\\\r\n"), self._at):
                    break
                word.parts.append(_Part(self._text[self._at + 1 : self._at + 2], True))
                self._at += 2
            elif char == "(" and _ASSIGNMENT.fullmatch(word.literal()):
                word.array = self._array()
            else:
                word.parts.append(_Part(char, False))
                self._at += 1
        return word if word.parts else None

    def _double_quoted(self, word: _Raw) -> None:
        line = self._line()
        self._at += 1
        word.parts.append(_Part("", True))
        while self._at < len(self._text) and (char := self._text[self._at]) != '"':
            if char in "$`":
                word.parts.append(self._expansion(quoted=True))
            elif char == "\\" and self._text[self._at + 1 : self._at + 2] in ("$", "`", '"', "\\", "\n"):
                following = self._text[self._at + 1]
                word.parts.append(_Part("" if following == "\n" else following, True))
                self._at += 2
            else:
                word.parts.append(_Part(char, True))
                self._at += 1
        if self._at >= len(self._text):
            raise UserError(f'{self._path}, line {line}: " is not closed')
        self._at += 1

    def _expansion(self, quoted: bool) -> _Part:
        """Read $NAME, ${...}, $(...), $((...)) or `...`."""
        start = self._at
        if self._text[start] == "`":
            end = self._close("`", start + 1) + 1
        elif self._text.startswith(("${", "$("), start):
            end = self._bracketed(start + 1)
        else:
            found = re.compile(r"\$([A-Za-z_]\w*|[@*#?$!0-9-])").match(self._text, start)
            if found is None:  # a $ by itself
                self._at += 1
                return _Part("$", quoted)
            end = found.end()
        self._at = end
        return _Part(self._text[start:end], quoted, True)

    def _bracketed(self, start: int) -> int:
        """Return the position after the bracket that closes the one at `start`."""
        opened = self._text[start]
        closed = {"{": "}", "(": ")"}[opened]
        depth = 0
        for at in range(start, len(self._text)):
            depth += {opened: 1, closed: -1}.get(self._text[at], 0)
            if depth == 0:
                return at + 1
        raise UserError(f"{self._path}, line {self._line()}: {opened} is not closed")

    def _array(self) -> list[_Raw]:
        line = self._line()
        self._at += 1
        words = []
        while self._at < len(self._text) and (char := self._text[self._at]) != ")":
            if char == "\n":
                self._at += 1
            elif not self._skip_blank(char):
                word = self._array_word()
                words += [word] if word is not None else []
        if self._at >= len(self._text):
            raise UserError(f"{self._path}, line {line}: ( is not closed")
        self._at += 1
        return words

    def _array_word(self) -> _Raw | None:
        """Read one word, which a closing bracket ends."""
        end = re.compile(
            r"""(?:[^\s()'"$`\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|\$\(\([^)]*\)\)|\$\{[^}]*\}|\$\w*|`[^`]*`)+"""
        )
        found = end.match(self._text, self._at)
        if found is None:
            self._at += 1
            return None
        inner = _Lexer(found[0], self._path)
        word = inner._word()
        if word is not None:
            word.line = self._line()
        self._at = found.end()
        return word

    def _close(self, quote: str, start: int) -> int:
        end = self._text.find(quote, start)
        if end < 0:
            raise UserError(f"{self._path}, line {self._line()}: {quote} is not closed")
        return end
