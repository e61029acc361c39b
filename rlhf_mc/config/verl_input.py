"""Reads verl's settings: a YAML file, a shell script that starts verl, or `key=value` overrides in Hydra's syntax.

References between settings (${a.b}, ${oc.select:a.b,default}) are replaced. What the settings become is in verl.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_mc.config.errors import UserError, reason_of
from rlhf_mc.config.shell_script import Word, commands
from rlhf_mc.config.verl import Conversion, Given, convert
from rlhf_mc.config.verl_keys import plain_key
from rlhf_mc.config.yaml_reader import MOST_BYTES, parse_yaml

_BASES = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer", "_self_")
"""verl's own configs, whose defaults verl.py knows. Those of recipe/dapo have the same."""
_PROGRAMS = ("verl.trainer.main_ppo", "main_ppo.py", "dapo.main_dapo", "dapo.src.main_dapo", "main_dapo.py")
"""Ends of the words by which a command starts verl."""
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*(\.*)([\w.]+)\s*(?:,\s*((?:[^{}]|\{\})*))?\}")
_MOST_REFERENCES = 10


def read_verl(source: str | None, overrides: Sequence[str]) -> dict[str, Given]:
    """Return the settings of a YAML file or shell script (.sh, .bash, .slurm; None: no file) and of overrides, which
    replace the file's. ~key removes a setting, or a section. Raise UserError with the file and line of a mistake."""
    given: dict[str, Given] = {}
    words = [(f"override {text!r}", Word(0, text)) for text in overrides]
    if source is not None and source.endswith((".yaml", ".yml")):
        given = {plain_key(key): Given(value, key) for key, value in _leaves(parse_yaml(_text(source), source), source)}
    elif source is not None:
        words = [*((f"{source}, line {word.line}", word) for word in _script_words(source)), *words]
    last = {_key_of(word.text): number for number, (_, word) in enumerate(words)}
    for number, (origin, word) in enumerate(words):
        key = _key_of(word.text)
        if word.problem is not None and last[key] != number:
            continue  # a later word replaces it
        if word.problem is not None:
            reason = f"{_shown(word.text)}...: {_shown(word.problem)}"
            raise UserError(f"{origin}: {reason}; give the setting as an override: {_shown(key)}=VALUE")
        _apply(given, word.text, origin)
    return _resolved(given)


def converted_arguments(arguments: Sequence[str]) -> Conversion:
    """Return our settings for a file or script of verl's and overrides, or for overrides alone. Raise UserError for a
    mistake in them."""
    is_file = bool(arguments) and "=" not in arguments[0] and not arguments[0].startswith("~")
    return convert(read_verl(arguments[0] if is_file else None, arguments[is_file:]))


def _shown(text: str) -> str:
    """Return a text for a message: in one line, and not long."""
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:77]}..."


def _key_of(word: str) -> str:
    return plain_key(word.partition("=")[0])


def _apply(given: dict[str, Given], word: str, origin: str) -> None:
    """Apply one override."""
    written, equals, text = word.partition("=")
    key = plain_key(written)
    if written.startswith("~"):
        removed = [name for name in given if name == key or name.startswith(f"{key}.")]
        if not removed:
            raise UserError(f"{origin}: there is no setting {_shown(key)} to remove")
        for name in removed:
            del given[name]
        return
    if not equals or not re.fullmatch(r"\+{0,2}[\w.@/-]+", written):
        raise UserError(f"{origin}: {word!r}: expected key=value, as Hydra reads it")
    value = parse_yaml(text, origin) if text else ""
    sections = _leaves(value, origin, f"{written}.") if isinstance(value, dict) and value else [(written, value)]
    for name, inner in sections:
        given[plain_key(name)] = Given(inner, name.lstrip("+"))


# ---------------------------------------------------------------- files


def _text(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: {reason_of(error)}") from error
    if len(content) > MOST_BYTES:
        raise UserError(f"{path}: more than {MOST_BYTES >> 10} KiB; is it a config or a script?")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file") from error


def _leaves(tree: Any, origin: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting of nested sections with its dotted key. An empty section is a setting."""
    if not isinstance(tree, dict):
        raise UserError(f"{origin}: expected sections (data:, actor_rollout_ref:, ...), found {tree!r}"[:200])
    for name, value in tree.items():
        if not prefix and name == "defaults":
            _check_bases(value, origin)
        elif isinstance(value, dict) and value:
            yield from _leaves(value, origin, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _check_bases(bases: Any, origin: str) -> None:
    for base in bases if isinstance(bases, list) else [bases]:
        if base not in _BASES:
            raise UserError(f"{origin}: defaults: {base!r} is not read; put its settings into this file")


def _script_words(path: str) -> list[Word]:
    """Return the overrides of the one command in a script that starts verl."""
    found: list[list[Word]] = []
    for words in commands(_text(path), path):
        texts = [word.text for word in words]
        at = next((i for i, text in enumerate(texts) if text.endswith(_PROGRAMS)), None)
        if at is not None:
            found.append(words[at + 1 :])
    if len(found) != 1:
        what = "no command" if not found else f"{len(found)} commands"
        raise UserError(f"{path}: {what} with `-m verl.trainer.main_ppo` or `-m recipe.dapo.main_dapo`; expected one")
    overrides = []
    rest = iter(found[0])
    for word in rest:
        option, equals, value = word.text.partition("=")
        if not option.startswith("-"):
            overrides.append(word)
            continue
        if not equals:
            value = next((following.text for following in rest), "")
        if option in ("--config-name", "-cn") and value.removesuffix(".yaml") not in _BASES:
            raise UserError(
                f"{path}, line {word.line}: {option} {_shown(value)} is not read; convert that file, with the rest"
            )
        if option not in ("--config-name", "-cn", "--config-path", "-cp"):
            raise UserError(f"{path}, line {word.line}: option {_shown(option)} is not known")
    return overrides


# ---------------------------------------------------------------- references


def _resolved(given: Mapping[str, Given]) -> dict[str, Given]:
    """Replace references between settings. A setting that refers to one that is absent, without a default, is left
    out: it has verl's default, as the other has."""
    out: dict[str, Given] = {}
    for key, item in given.items():
        value = item.value
        for _ in range(_MOST_REFERENCES):
            if not isinstance(value, str) or not _REFERENCE.search(value):
                break
            value = _replaced(value, item.written, given)
        if value is not _ABSENT:
            out[key] = Given(value, item.written)
    return out


_ABSENT = object()


def _replaced(value: str, written: str, given: Mapping[str, Given]) -> Any:
    """Replace the references of a value once. A value that is one reference takes the type of the other setting."""
    found = _REFERENCE.fullmatch(value)
    if found is not None:
        return _lookup(found, written, given)
    parts = {match[0]: _lookup(match, written, given) for match in _REFERENCE.finditer(value)}
    if any(part is _ABSENT for part in parts.values()):
        return _ABSENT
    for reference, part in parts.items():
        value = value.replace(reference, str(part))
    return value


def _lookup(found: re.Match[str], written: str, given: Mapping[str, Given]) -> Any:
    dots, name, default = found.groups()
    if dots:
        name = ".".join([*written.split(".")[: -len(dots)], name])
    item = given.get(plain_key(name))
    if item is not None:
        return item.value
    return parse_yaml(default, written) if default is not None else _ABSENT
