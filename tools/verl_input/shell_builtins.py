"""The commands of a shell script that print a text: their output, computed without running them.
Which command runs is decided in shell_script.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from verl_input.shell_words import Expander, Word


def directory(words: Expander) -> str:
    """Return the directory that the script is in: its variable PWD, or the root."""
    return (words.lookup("PWD") or {"0": Word(0, "/")})["0"].text


def _echo(words: Expander, command: list[Word]) -> tuple[str, Word]:
    unknown = next((word for word in command if word.problem), command[0])
    texts = (word.text for word in command[1:] if word.text not in ("-n", "-e"))
    return " ".join(texts), unknown


def _pwd(words: Expander, command: list[Word]) -> tuple[str, Word]:
    value = words.lookup("PWD") or {"0": command[0]}
    return value["0"].text, value["0"]


def _basename(words: Expander, command: list[Word]) -> tuple[str, Word]:
    names = [word for word in command[1:] if not word.text.startswith("--")] or command
    name = os.path.basename(names[0].text.rstrip("/"))
    suffix = names[1].text if len(names) > 1 else ""
    return name.removesuffix(suffix) if name != suffix else name, names[0]


def _dirname(words: Expander, command: list[Word]) -> tuple[str, Word]:
    path = command[-1].text.rstrip("/")
    return os.path.dirname(path) or ("/" if path.startswith("/") else "."), command[-1]


def _realpath(words: Expander, command: list[Word]) -> tuple[str, Word]:
    return os.path.normpath(os.path.join(directory(words), command[-1].text)), command[-1]


PRINTED: Mapping[str, Callable[[Expander, list[Word]], tuple[str, Word]]] = {
    "echo": _echo,
    "pwd": _pwd,
    "basename": _basename,
    "dirname": _dirname,
    "realpath": _realpath,
}
"""Command -> function that returns its output, and the word whose problem makes that unknown."""
