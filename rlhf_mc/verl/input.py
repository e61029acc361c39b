"""Reads verl's settings: a YAML file, a shell script that starts verl, or `key=value` overrides in Hydra's syntax.

References between settings (${a.b}, ${oc.select:a.b,default}) are replaced. conversion.py makes our settings of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_mc.config.errors import UserError, error_reason
from rlhf_mc.config.load import flatten_settings
from rlhf_mc.config.yaml_reader import MOST_BYTES, parse_yaml
from rlhf_mc.verl.conversion import REFERENCES, Conversion, Given, convert
from rlhf_mc.verl.keys import plain_key
from rlhf_mc.verl.shell_script import read_script
from rlhf_mc.verl.shell_words import Word

ENV = "--env"
_BASES = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer", "_self_")
"""verl's own configs, whose defaults conversion.py knows. The configs of recipe/dapo have the same."""
_PROGRAMS = ("verl.trainer.main_ppo", "main_ppo.py", "dapo.main_dapo", "dapo.src.main_dapo", "main_dapo.py")
"""Ends of the words by which a command starts verl."""
_REFERENCE = re.compile(r"\$\{(?:(oc\.select|oc\.env):)?\s*(\.*)([\w.]+)\s*(?:,\s*((?:[^{}]|\{\})*))?\}")
_MOST_REFERENCES = 10
_COPIES = (*REFERENCES, ("critic.forward_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu"))
"""Settings whose default in verl is another setting, also those without a setting of ours."""
_HOME = re.compile(r"\$(?:HOME\b|\{HOME\})")
_NAMES = ("trainer.experiment_name", "trainer.project_name")
"""Settings that only name a run: an unresolved part of them becomes a plain word."""
_DIRECTORIES = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir", "hydra.run.dir")
"""Settings in which $(date) becomes a plain word."""
_FUNCTION = "custom_reward_function"
_SETTING = re.compile(
    r"(?<![\w./])[+~]{0,2}((?:actor_rollout_ref|algorithm|critic|custom_reward_function|data|global_profiler|ray_init|ray_kwargs"
    r"|reward|reward_model|trainer|transfer_queue)(?:\.[\w@/-]+)+)="
)


@dataclass
class Reading:
    """Settings of verl's by plain key, and what the report says besides."""

    settings: dict[str, Given] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    """(kind and subject; what was done)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables that were given."""

    def note(self, kind: str, subject: str, text: str) -> None:
        """Add a line to the report, once."""
        line = (f"{kind:<13}  {subject}", text)
        self.notes += [line] if line not in self.notes else []


def read_verl(source: str | None, overrides: Sequence[str], environment: Mapping[str, str] | None = None) -> Reading:
    """Return the settings of a YAML file or shell script (.sh, .bash, .slurm; None: no file) and of overrides, which
    replace the file's. ~key removes a setting, or a section. Raise UserError with the file and line of a mistake."""
    reading = Reading(environment=environment or {})
    given = reading.settings
    words = [(f"override {_shown(text)!r}", Word(0, text)) for text in overrides]
    if source is not None and source.endswith((".yaml", ".yml")):
        given.update((plain_key(key), Given(value, key)) for key, value in _yaml_settings(source))
    elif source is not None:
        words = [*((f"{source}, line {word.line}", word) for word in _script_words(source, reading)), *words]
    last = {_word_key(word.text): number for number, (_, word) in enumerate(words)}
    for number, (origin, word) in enumerate(words):
        key = _word_key(word.text)
        if word.problem is not None and last[key] != number:
            continue  # a later word replaces it
        if word.problem is not None and _names_only(key, word):
            reading.note("replaced", word.text, f"{_shown(word.problem)}; a plain word stands for it")
        elif word.problem is not None:
            way = f"{_way(word)}{', or' if word.variable else 'give'} {_shown(key)}=VALUE"
            raise UserError(f"{origin}: {_shown(key)}: {_shown(word.problem, 300)}; {way}")
        _apply(given, word.text, origin)
    reading.settings = _resolved(reading)
    _check_function(reading.settings)
    return reading


def _way(word: Word) -> str:
    return f"give {ENV} {word.variable}=VALUE" if word.variable else ""


def _names_only(key: str, word: Word) -> bool:
    return key in _NAMES or (key in _DIRECTORIES and str(word.problem).startswith("$(date"))


def _check_function(given: Mapping[str, Given]) -> None:
    """Raise UserError if a reward function is named without its file: the built-in rules would decide."""
    for section in (_FUNCTION, f"reward.{_FUNCTION}"):
        name = given.get(f"{section}.name")
        path = given.get(f"{section}.path")
        is_named = name is not None and name.value not in (None, "", "compute_score")
        if name is not None and is_named and (path is None or path.value in (None, "")):
            raise UserError(
                f"{name.written}={name.value} without {section}.path: give the function's file, or ~{section}"
            )


def converted_arguments(arguments: Sequence[str]) -> Conversion:
    """Return our settings for a file or script of verl's and overrides, or for overrides alone. --env NAME=VALUE gives
    a variable of the script, and --env NAME takes it from the environment. Raise UserError for a mistake in them."""
    rest, environment = split_environment(arguments)
    is_file = bool(rest) and "=" not in rest[0] and not rest[0].startswith("~")
    reading = read_verl(rest[0] if is_file else None, rest[is_file:], environment)
    conversion = convert(reading.settings)
    conversion.notes = reading.notes
    return conversion


def split_environment(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments without --env, and the variables that it gives. Raise UserError if one is not set."""
    rest: list[str] = []
    environment: dict[str, str] = {}
    following = iter(arguments)
    for argument in following:
        if argument != ENV and not argument.startswith(f"{ENV}="):
            rest.append(argument)
            continue
        text = argument.partition("=")[2] if argument != ENV else next(following, "")
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"\w+", name):
            raise UserError(f"{ENV} {text!r}: expected {ENV} NAME=VALUE, or {ENV} NAME")
        if not equals and name not in os.environ:
            raise UserError(f"{ENV} {name}: the environment has no {name}; give {ENV} {name}=VALUE")
        environment[name] = value if equals else os.environ[name]
    return rest, environment


def _shown(text: str, most: int = 80) -> str:
    """Return a text for a message: in one line, and not long."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _word_key(word: str) -> str:
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
    if written and not written.strip():
        raise UserError(f"{origin}: a space after the backslash ends the command here; remove the space")
    if not equals or not re.fullmatch(r"\+{0,2}[\w.@/-]+", written):
        raise UserError(f"{origin}: {_shown(word)!r}: expected key=value, as Hydra reads it")
    value = parse_yaml(text, f"{origin}: {_shown(key)}") if text else ""
    for name, inner in flatten_settings({written: value}):
        given[plain_key(name)] = Given(inner, name.lstrip("+"))


# ---------------------------------------------------------------- files


def _text(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{_shown(path, 300)}: {error_reason(error)}") from error
    if len(content) > MOST_BYTES:
        raise UserError(f"{path}: more than {MOST_BYTES >> 10} KiB; is it a config or a script?")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file") from error


def _yaml_settings(path: str) -> Iterator[tuple[str, Any]]:
    """Return each setting of a YAML file with its dotted key. An empty section is a setting."""
    tree = parse_yaml(_text(path), path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected sections (data:, actor_rollout_ref:, ...), found {tree!r}"[:200])
    bases = tree.pop("defaults", [])
    for base in bases if isinstance(bases, list) else [bases]:
        if base not in _BASES:
            raise UserError(f"{path}: defaults: {base!r} is not read; put its settings into this file")
    return flatten_settings(tree)


def _script_words(path: str, reading: Reading) -> list[Word]:
    """Return the overrides of the one command in a script that starts verl."""
    script = read_script(_text(path), path, reading.environment)
    commands = [words for words in map(_arguments, script.commands) if words is not None]
    if len(commands) != 1:
        lines = ", ".join(str(words[0].line) for words in commands if words)
        what = f"{len(commands)} commands (lines {lines})" if commands else "no command"
        others = {
            words[at + 1].text for words in script.commands for at, word in enumerate(words[:-1]) if word.text == "-m"
        }
        ended = f"; {script.ended}" if script.ended and not commands else ""
        ended = f"; it starts {_shown(', '.join(sorted(others)))}" if others and not commands and not ended else ended
        raise UserError(
            f"{path}: {what} with `-m verl.trainer.main_ppo` or `-m recipe.dapo.main_dapo`; expected one{ended}"
        )
    for words in script.commands:
        if words[0].text in ("source", "."):
            reading.note("not read", words[-1].text, f"line {words[0].line} sources it; give its variables by {ENV}")
    for name, value in script.environment.items():
        reading.note("environment", f"{name}: {value}", "given" if name in reading.environment else "of this process")
    overrides = _without_options(commands[0], path)
    given = {_word_key(word.text) for word in overrides}
    for line, text in script.written:
        for key in _SETTING.findall(text):
            if plain_key(key) not in given:
                reading.note("not given", key, f"line {line} has it, but the command that starts verl does not get it")
    return overrides


def _arguments(words: list[Word]) -> list[Word] | None:
    """Return the words after verl's program, or None if the command does not start it."""
    texts = [word.text for word in words]
    for at, text in enumerate(texts):
        if text.endswith(_PROGRAMS) and (texts[at - 1] == "-m" or any("python" in other for other in texts[:at])):
            return words[at + 1 :]
    return None


def _without_options(words: list[Word], path: str) -> list[Word]:
    overrides = []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.text.partition("=")
        if not option.startswith("-"):
            overrides.append(word)
            continue
        value_word = word if equals else next(rest, word)
        if value_word.problem:
            raise UserError(
                f"{path}, line {word.line}: {option}: {_shown(value_word.problem, 300)}; {_way(value_word)}"
            )
        value = value if equals else value_word.text
        if option in ("--config-name", "-cn") and value.removesuffix(".yaml") not in _BASES:
            raise UserError(
                f"{path}, line {word.line}: {option} {_shown(value)} is not read; convert that file, with the rest"
            )
        if option not in ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd"):
            raise UserError(f"{path}, line {word.line}: option {_shown(option)} is not known")
    return overrides


# ---------------------------------------------------------------- references


def _resolved(reading: Reading) -> dict[str, Given]:
    """Replace references between settings. A setting that takes the value of one that is absent, as verl's own default
    does, is left out, and the report says so."""
    out: dict[str, Given] = {}
    for key, item in reading.settings.items():
        value = _with_home(item.value, item.written, reading)
        for _ in range(_MOST_REFERENCES):
            if not isinstance(value, str) or not _REFERENCE.search(value):
                break
            value = _replaced(value, item.written, reading)
        if isinstance(value, str) and _REFERENCE.search(value):
            raise UserError(f"{item.written}: {_shown(value)}: more than {_MOST_REFERENCES} references in turn")
        if value is _ABSENT:
            reading.note("default", item.written, f"{_shown(str(item.value))} is not given: verl's default of both")
        else:
            out[key] = Given(value, item.written)
    return out


_ABSENT = object()


def _with_home(value: Any, written: str, reading: Reading) -> Any:
    """Return a value with $HOME replaced."""
    if isinstance(value, list):
        return [_with_home(item, written, reading) for item in value]
    home = reading.environment.get("HOME", os.environ.get("HOME"))
    if not isinstance(value, str) or home is None or not _HOME.search(value):
        return value
    reading.note("environment", f"HOME: {home}", "given" if "HOME" in reading.environment else "of this process")
    return _HOME.sub(lambda _: home, value)


def _replaced(value: str, written: str, reading: Reading) -> Any:
    """Replace the references of a value once. A value that is one reference takes the type of the other setting."""
    if (whole := _REFERENCE.fullmatch(value)) is not None:
        return _lookup(whole, written, reading)
    out = value
    for match in _REFERENCE.finditer(value):
        part = _lookup(match, written, reading)
        if part is _ABSENT:
            raise _absent(match, written)
        out = out.replace(match[0], str(part))
        if len(out) > MOST_BYTES:
            raise UserError(f"{written}: the references in it grow beyond {MOST_BYTES >> 10} KiB")
    return out


def _lookup(match: re.Match[str], written: str, reading: Reading) -> Any:
    """Return the value of a reference; _ABSENT: the setting's own default in verl is the same."""
    kind, dots, name, default = match.groups()
    if kind == "oc.env":
        known = {**{n: os.environ[n] for n in ("HOME",) if n in os.environ}, **reading.environment}
        if name not in known and default is None:
            raise UserError(f"{written}: {match[0]}: give --env {name}=VALUE, or --env {name}")
        reading.note("environment", f"{name}: {known.get(name, default)}", f"for {written}")
        return known[name] if name in known else parse_yaml(default, written)
    if dots:
        name = ".".join([*written.split(".")[: -len(dots)], name])
    item = reading.settings.get(plain_key(name))
    if item is not None:
        return item.value
    if default is not None:
        return parse_yaml(default, written)
    source = plain_key(name)
    if (
        kind == "oc.select"
        or source.split(".")[-1] == written.split(".")[-1]
        or (plain_key(written), source) in _COPIES
    ):
        return _ABSENT
    raise _absent(match, written)


def _absent(match: re.Match[str], written: str) -> UserError:
    name = match[3]
    if "." in name:
        return UserError(f"{written}: {match[0]}: {name} is not given; give {name}=VALUE, or {written}=VALUE")
    return UserError(
        f"{written}: {match[0]} is no setting of verl's; of a variable of the shell give the value: {written}=VALUE"
    )
