"""The commands of a shell script, with the variables that it assigns replaced. Nothing is run.

The statements of the tree of shell_parser.py are followed: assignments, conditions, loops,
functions. Where a condition cannot be decided, each branch is followed, and a variable that then
differs has no value. The values of words are in shell_words.py, the reader of a verl script in
reading.py.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_mc.config.errors import UserError
from verl_input.shell_builtins import PRINTED, directory
from verl_input.shell_conditions import bracket_status, condition_status
from verl_input.shell_parser import parsed, written
from verl_input.shell_words import (
    Expander,
    Node,
    State,
    Unresolved,
    Variable,
    Word,
    matches,
    node_line,
)

_STEP = 400
"""Work counted for a statement, plus the bytes of its values."""
_MOST_SHOWN = 3
_NPU = "import torch_npu"
"""The test of verl's scripts for another kind of accelerator."""
_TAKEN = ("HOME", "PWD")
"""Variables that are taken from the environment."""


@dataclass
class Script:
    """The commands of a script."""

    commands: list[list[Word]] = field(default_factory=list)
    """Each command, without its assignments."""
    environment: dict[str, str] = field(default_factory=dict)
    """The variables of the environment that were read, with their values."""
    ended: str = ""
    """The reason why the script ends before its last line."""
    written: list[tuple[int, str]] = field(default_factory=list)
    """(line, text) of each literal part of a word, also in branches that are not taken."""


class _Exit(Exception):
    """The script, a function or a loop ends here."""


class _Return(_Exit):
    """A function ends."""


class _Break(_Exit):
    """A loop, or one pass of it (continue), ends."""


def read_script(text: str, path: str, environment: Mapping[str, str]) -> Script:
    """Return the commands of a script. environment: variables that are given, beside HOME and PWD.
    Raise UserError with the line of a mistake."""
    try:
        text = text.rstrip().removesuffix("\\") + "\n"
        text, tree = parsed(text)
        home = {name: os.environ[name] for name in _TAKEN if name in os.environ}
        given = {**home, "PWD": str(Path.cwd()), **environment}
        variables: dict[str, Variable] = {
            name: {"0": Word(0, value)} for name, value in given.items()
        }
        variables.update({name: {"0": Word(1, path)} for name in ("0", "BASH_SOURCE")})
        script = Script(written=[*written(tree)])
        arguments = [
            variables[name]["0"]
            for name in itertools.takewhile(given.__contains__, map(str, itertools.count(1)))
        ]
        run = _Interpreter(State(text.encode(), variables, arguments), script.commands, environment)
        try:
            run.statements(tree.get("Stmts", []))
        except _Exit as error:
            missing = ", ".join(f"--env {name}=VALUE" for name in sorted(run.state.missing))
            script.ended = f"the script ends in line {error.args[0]}" + (
                f"; it asks for {missing}" if missing else ""
            )
    except RecursionError as error:
        raise UserError(f"{path}: nested too deeply") from error
    except UserError as error:
        raise UserError(f"{path}, {error}") from error
    given[_NPU] = "taken to fail"
    script.environment = {name: given[name] for name in sorted(run.state.used)}
    return script


# ---------------------------------------------------------------- statements


class _Interpreter:
    """Follows the statements of a script in one state."""

    def __init__(self, state: State, commands: list[list[Word]], given: Mapping[str, str]) -> None:
        self.state = state
        self.commands = commands
        self.given = given
        self.words = Expander(state, self._substitute)
        self.functions: dict[str, Node] = {}
        self.output: list[str] | None = None
        """Inside $(...): what has been printed."""
        self.local: dict[str, Variable | None] | None = None
        """Local variables of the function, with their values outside of it; None outside a
        function."""

    def statements(self, nodes: Sequence[Node]) -> bool | None:
        """Follow statements. Return whether the last succeeds, None if that is not known."""
        status: bool | None = True
        for node in nodes:
            status = self._statement(node)
        return status

    def _statement(self, node: Node) -> bool | None:
        command = node.get("Cmd")
        if command is None:
            return True
        self.state.spend(_STEP, node_line(node))
        method = getattr(self, f"_do_{command['Type']}", None)
        status = method(command) if method is not None else None
        return None if status is None else status != bool(node.get("Negated"))

    def _do_Block(self, node: Node) -> bool | None:
        return self.statements(node.get("Stmts", []))

    def _do_Subshell(self, node: Node) -> bool | None:
        try:
            return self._copy().statements(node.get("Stmts", []))
        except _Exit:
            return None

    def _do_TimeClause(self, node: Node) -> bool | None:
        return self._statement(node.get("Stmt") or {})

    def _do_FuncDecl(self, node: Node) -> bool:
        self.functions[node["Name"]["Value"]] = node["Body"]
        return True

    def _do_BinaryCmd(self, node: Node) -> bool | None:
        first = node["X"]
        second = node["Y"]
        op = node["Op"]
        if op not in ("&&", "||"):
            for part in (first, second):
                self._do_Subshell({"Stmts": [part]})
            return None
        status = self._statement(first)
        if status is None:
            self._fork([[second], []], first)
            return None
        return self._statement(second) if status == (op == "&&") else status

    def _do_IfClause(self, node: Node) -> bool | None:
        condition = node.get("Cond")
        if not condition:
            return self.statements(node["Then"])
        status = self.statements(condition)
        start = node["Position"] if "Position" in node else node["Pos"]
        branches = [node["Then"], []]
        if "Else" in node:
            branches[1] = [
                {"Cmd": {**node["Else"], "Type": "IfClause"}, "Pos": start, "End": node["End"]}
            ]
        if status is None:
            self._fork(branches, condition[0], condition[-1])
            return None
        return self.statements(branches[not status])

    def _do_CaseClause(self, node: Node) -> bool | None:
        word = self.words.text(node["Word"], node_line(node))
        items = node.get("Items", [])
        if word.problem is not None:
            self._fork([*(item.get("Stmts", []) for item in items), []], node["Word"])
            return None
        for item in items:
            if any(
                matches(word.text, self.words.text(pattern).text) for pattern in item["Patterns"]
            ):
                return self.statements(item.get("Stmts", []))
        return True

    def _do_ForClause(self, node: Node) -> bool | None:
        loop = node["Loop"]
        if loop["Type"] != "WordIter":
            self._c_style(loop, node["Do"])
            return None
        items = loop.get("Items")
        given = (word for item in items or () for word in self.words.fields(item))
        for word in self.state.arguments if items is None else [*given]:
            self.state.variables[loop["Name"]["Value"]] = {"0": word}
            if not self._pass(node["Do"]):
                break
        return None

    def _c_style(self, loop: Node, body: list[Node]) -> None:
        try:
            if loop.get("Init"):
                self.words.integer(loop["Init"])
            while loop.get("Cond") is None or self.words.integer(loop["Cond"]):
                self.state.spend(_STEP, node_line(loop))
                if not self._pass(body):
                    break
                if loop.get("Post"):
                    self.words.integer(loop["Post"])
        except Unresolved:
            self._fork([body, []], loop)

    def _do_WhileClause(self, node: Node) -> None:
        until = bool(node.get("Until"))
        while (status := self.statements(node["Cond"])) is not None and status != until:
            if not self._pass(node["Do"]):
                return
        if status is None:
            self._fork([node["Do"], []], node["Cond"][0], node["Cond"][-1])

    def _pass(self, body: list[Node]) -> bool:
        """Follow one pass of a loop. Return whether another may follow."""
        try:
            self.statements(body)
        except _Break as error:
            return bool(error.args[0] == "continue")
        return True

    # ------------------------------------------------------------ undecided branches

    def _copy(self) -> _Interpreter:
        other = copy.copy(self)
        other.state = replace(self.state, variables=dict(self.state.variables))
        other.words = Expander(other.state, other._substitute)
        return other

    def _fork(self, branches: list[list[Node]], first: Node, last: Node | None = None) -> None:
        """Follow each branch by itself. A variable that differs then, and is not given, has no
        value."""
        outcomes: list[dict[str, Variable]] = []
        for branch in branches:
            other = self._copy()
            try:
                other.statements(branch)
            except (_Return, _Break):
                pass
            except _Exit:
                continue
            outcomes.append(other.state.variables)
            self.state.spend(20 * len(other.state.variables), node_line(first))
        line = node_line(first)
        if not outcomes:
            raise _Exit(line)
        condition = " ".join(
            self.state.shown({"Pos": first["Pos"], "End": (last or first)["End"]}).split()
        )
        condition = condition[:80].rstrip("; ")
        variable = self._unknown(first)
        for name in dict.fromkeys(name for outcome in outcomes for name in outcome):
            values = [
                [word.problem or word.text for word in outcome[name].values()]
                if name in outcome
                else None
                for outcome in outcomes
            ]
            if all(texts == values[0] for texts in values):
                self.state.variables[name] = outcomes[0][name]
                continue
            named = list(
                dict.fromkeys(
                    "not set" if texts is None else repr(" ".join(texts))[:60] for texts in values
                )
            )
            listed = " or ".join(named[:_MOST_SHOWN])
            problem = (
                f"${name} is {listed}, by the condition `{condition}` in line {line}, which is not "
                "decided"
            )
            self._set(name, {"0": Word(line, name, problem, variable or name)})

    def _unknown(self, tree: Any) -> str | None:
        """Return the first variable in a condition that has no value."""
        name = (tree.get("Param") or {}).get("Value", "") if isinstance(tree, dict) else ""
        if name.isidentifier():
            value = self.state.variables.get(name)
            bad = (
                next((word for word in value.values() if word.problem), None)
                if value
                else Word(0, "", "", name)
            )
            if bad is not None:
                return bad.variable or name
        for item in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(item, (dict, list)) and (inner := self._unknown(item)):
                return inner
        return None

    def _set(self, name: str, value: Variable) -> None:
        """Assign a variable. One that has no value takes the value that was given for it, if there
        is one."""
        problem = next((word for word in value.values() if word.problem), None)
        if problem is not None and name in self.given:
            self.state.variables[name] = {"0": Word(0, self.given[name])}
            return
        if problem is not None:
            value = {
                key: replace(word, variable=word.variable or name) for key, word in value.items()
            }
        self.state.variables[name] = value

    # ------------------------------------------------------------ commands

    def _do_CallExpr(self, node: Node) -> bool | None:
        assigns = node.get("Assigns", [])
        arguments = node.get("Args", [])
        if not arguments:
            for assign in assigns:
                self._assign(assign)
            return True
        name = self.words.text(arguments[0]).text
        if name in ("[", "test"):
            return bracket_status(self.words, arguments[1:])
        words = [word for item in arguments for word in self.words.fields(item)]
        if not words:
            return True
        if name in self.functions:
            return self._call(name, words[1:])
        if name in ("true", "false"):
            return name == "true"
        if name in PRINTED:
            return self._print(*PRINTED[name](self.words, words))
        builtin = getattr(self, f"_run_{name}", None)
        if builtin is not None:
            status: bool | None = builtin(words)
            return status
        if "python" in name and [word.text for word in words[1:]] == ["-c", _NPU]:
            self.state.used.add(_NPU)
            return False
        if self.output is not None:
            raise Unresolved(words[0])
        self.commands.append(words)
        return True if name == ":" else None

    def _assign(self, node: Node) -> None:
        name = node["Name"]["Value"]
        line = node_line(node)
        older = (
            dict(self.state.variables.get(name, {}))
            if node.get("Append") or node.get("Index")
            else {}
        )
        if "Array" in node:
            value = dict(older)
            for item in node["Array"].get("Elems", []):
                key = self.words.index(item["Index"]) if item.get("Index") else None
                for word in (
                    [self.words.text(item.get("Value"), line)]
                    if key
                    else self.words.fields(item["Value"])
                ):
                    value[str(len(value)) if key is None else key] = word
            self._set(name, value)
            return
        key = self.words.index(node["Index"]) if node.get("Index") else "0"
        word = self.words.text(node.get("Value"), line)
        parts = (node.get("Value") or {}).get("Parts") or [{}]
        if (
            parts[0].get("Type") == "Lit"
            and re.match(r"~(/|\Z)", word.text)
            and (home := self.words.lookup("HOME"))
        ):
            word = replace(word, text=home["0"].text + word.text[1:])
        if node.get("Append") and key in older:
            bad = older[key] if older[key].problem else word
            word = Word(line, older[key].text + word.text, bad.problem, bad.variable)
        self.state.spend(len(word.text), line)
        self._set(name, {**older, key: word})

    def _do_DeclClause(self, node: Node) -> bool:
        arguments = node.get("Args", [])
        options = "".join(
            self.words.text(arg.get("Value"), 0).text for arg in arguments if "Name" not in arg
        )
        is_local = node["Variant"]["Value"] not in ("export", "readonly") and "g" not in options
        local = self.local if is_local else None
        for assign in (arg for arg in arguments if "Name" in arg):
            name = assign["Name"]["Value"]
            if local is not None and name not in local:
                local[name] = self.state.variables.get(name)
                if assign.get("Naked"):
                    self.state.variables.pop(name, None)
            if not assign.get("Naked"):
                self._assign(assign)
        return True

    def _do_TestClause(self, node: Node) -> bool | None:
        return condition_status(self.words, node["X"])

    def _do_ArithmCmd(self, node: Node) -> bool | None:
        try:
            return bool(self.words.integer(node["X"]))
        except Unresolved:
            return None

    def _call(self, name: str, words: list[Word]) -> bool | None:
        """Follow a function, after which its local variables have their values from before."""
        arguments, self.state.arguments = self.state.arguments, words
        local, self.local = self.local, {}
        try:
            return self._statement(self.functions[name])
        except _Return:
            return None
        finally:
            self.state.arguments = arguments
            restored = {**self.state.variables, **self.local}
            self.state.variables = {
                key: value for key, value in restored.items() if value is not None
            }
            self.local = local

    def _substitute(self, nodes: Sequence[Node]) -> Word | None:
        """Return the output of the statements of $(...), or None if it is not known."""
        other = self._copy()
        other.output = []
        try:
            other.statements(nodes)
        except (_Exit, Unresolved):
            return None
        return (
            Word(node_line(nodes[0]), "".join(other.output).rstrip("\n")) if nodes else Word(0, "")
        )

    def _print(self, text: str, word: Word) -> bool:
        if self.output is not None:
            if word.problem:
                raise Unresolved(word)
            self.output.append(f"{text}\n")
        return True

    def _run_cd(self, words: list[Word]) -> bool:
        to = (
            words[-1] if len(words) > 1 else (self.words.lookup("HOME") or {"0": Word(0, "~")})["0"]
        )
        path = os.path.normpath(os.path.join(directory(self.words), to.text))
        self.state.variables["PWD"] = {"0": replace(to, text=path)}
        return True

    def _run_set(self, words: list[Word]) -> bool:
        texts = [word.text for word in words]
        if "--" in texts:
            self.state.arguments = words[texts.index("--") + 1 :]
        return True

    def _run_shift(self, words: list[Word]) -> bool:
        count = int(words[1].text) if len(words) > 1 and words[1].text.isdecimal() else 1
        self.state.arguments = self.state.arguments[count:]
        return True

    def _run_unset(self, words: list[Word]) -> bool:
        for word in words[1:]:
            self.state.variables.pop(word.text, None)
        return True

    def _run_read(self, words: list[Word]) -> None:
        for word in words[1:]:
            if word.text.isidentifier():
                self._set(
                    word.text,
                    {"0": Word(word.line, word.text, f"${word.text} is read in line {word.line}")},
                )

    def _run_exit(self, words: list[Word]) -> bool:
        raise _Exit(words[0].line)

    def _run_return(self, words: list[Word]) -> bool:
        raise _Return

    def _run_break(self, words: list[Word]) -> bool:
        raise _Break(words[0].text)

    _run_continue = _run_break
