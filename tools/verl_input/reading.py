"""Reads verl's settings: a YAML file, a shell script that starts verl, or `key=value` overrides in
Hydra's syntax.

References between settings (${a.b}, ${oc.select:a.b,default}) are replaced.
rlhf_mc/verl/conversion.py makes our settings of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import flatten_settings
from rlhf_mc.config.yaml_reader import MOST_BYTES, parse_yaml
from rlhf_mc.verl.asynchronous import MODE, PROGRAMS
from rlhf_mc.verl.conversion import REFERENCES, VerlSetting
from rlhf_mc.verl.keys import plain_key
from rlhf_mc.verl.parallelism import engine_by_keys
from verl_input.config_files import BASES, Composition, read_text
from verl_input.shell_script import Script, read_script
from verl_input.shell_words import Word

ENV = "--env"
COMMAND = "--command"
STRATEGY = "--strategy"
_YAML = (".yaml", ".yml")
_PROGRAMS = (
    "verl.trainer.main_ppo",
    "main_ppo.py",
    "dapo.main_dapo",
    "dapo.src.main_dapo",
    "main_dapo.py",
    "one_step_off_policy.main_ppo",
    "fully_async_policy.fully_async_main",
)
"""Suffixes of the word that starts verl in a command."""
_REFERENCE = re.compile(
    r"\$\{(?:(oc\.select|oc\.env):)?\s*(\.*)([\w.]+)\s*(?:,\s*((?:[^{}]|\{\})*))?\}"
)
_MOST_REFERENCES = 10
_COPIES = (
    *REFERENCES,
    ("critic.forward_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu"),
)
"""Settings whose default in verl is another setting, also those without a setting of ours."""
_HOME = re.compile(r"\$(?:HOME\b|\{HOME\})")
_NAMES = ("trainer.experiment_name", "trainer.project_name")
"""Settings that only name a run: an unresolved part of them becomes a plain word."""
_DIRECTORIES = (
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "hydra.run.dir",
)
"""Settings in which $(date) becomes a plain word."""
_FUNCTION = "custom_reward_function"
_SETTING = re.compile(
    r"(?<![\w./])[+~]{0,2}((?:actor_rollout_ref|algorithm|critic|custom_reward_function|data|global_profiler|ray_init|ray_kwargs"
    r"|reward|reward_model|trainer|transfer_queue)(?:\.[\w@/-]+)+)="
)


@dataclass(frozen=True)
class Arguments:
    """A command line that names settings of verl's."""

    files: list[str]
    """A YAML file, a script, or both."""
    overrides: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of --env."""
    command: int | None = None
    """Number of the script's command, from 1 on; None: its one command."""
    strategy: str = "fsdp2"
    """The strategy of a run of FSDP: fsdp2 where it can be, or megatron."""


@dataclass
class Reading:
    """Settings of verl's by plain key, and what the report says besides."""

    settings: dict[str, VerlSetting] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    """(kind and subject; what was done)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables that were given."""
    engine: str | None = None
    """fsdp or megatron, by the config's name or by the keys of the files; None: by all keys."""

    def note(self, kind: str, subject: str, text: str) -> None:
        """Add a line to the report, once."""
        line = (f"{kind:<13}  {subject}", text)
        self.notes += [line] if line not in self.notes else []


def read_arguments(arguments: Arguments) -> Reading:
    """Return the settings of a YAML file, of a script and of overrides; later sources replace
    earlier ones. ~key removes a setting, or a section. Raise UserError with the file and line of a
    mistake."""
    reading = Reading(environment=arguments.environment)
    given = reading.settings
    configs = [file for file in arguments.files if file.endswith(_YAML)]
    scripts = [file for file in arguments.files if file not in configs]
    if len(configs) > 1 or len(scripts) > 1:
        raise UserError(
            f"{', '.join(arguments.files)}: expected one YAML file, one script, or one of each"
        )
    overrides = [(f"override {_shown(text)!r}", Word(0, text)) for text in arguments.overrides]
    config = configs[0] if configs else None
    words: list[tuple[str, Word]] = []
    composition = Composition()
    program = ""
    if scripts:
        program, of_script, option = _script_words(scripts[0], reading, arguments.command)
        words = [(f"{scripts[0]}, line {word.line}", word) for word in of_script]
        config = config or _named_config(option, scripts[0], composition)
        if config is not None:
            reading.note(
                "config",
                config,
                "in place of the script's" if configs else "the script's --config-name",
            )
    if config is not None:
        texts = [word.text.lstrip("+").partition("=") for _, word in (*words, *overrides)]
        composition.choices = {
            key: name for key, _, name in texts if "@" in key or key == "model_engine"
        }
        composition.read(config)
        given.update(
            (plain_key(key), VerlSetting(value, key)) for key, value in composition.settings.items()
        )
    modes = [mode for name, mode in PROGRAMS.items() if name in program]
    given.update((MODE, VerlSetting(mode, program)) for mode in modes)
    all_words = [*words, *overrides]
    for part in (range(len(words)), range(len(words), len(all_words))):
        for number in part:
            origin, word = all_words[number]
            name = word.text.partition("=")[0].lstrip("+")
            if "@" not in name or name not in composition.choices:
                _add_word(
                    reading, origin, word, [later.text for _, later in all_words[number + 1 :]]
                )
        if arguments.files and reading.engine is None:
            reading.engine = engine_by_keys(given)
    reading.settings = _resolved(reading)
    reading.engine = composition.engine() or reading.engine
    _check_function(reading.settings)
    return reading


def _add_word(reading: Reading, origin: str, word: Word, later: Sequence[str]) -> None:
    """Apply one word, unless its value is not known or no YAML and a later word replaces it."""
    key = _word_key(word.text)
    is_replaced = any(
        _word_key(text) == key or (text.startswith("~") and key.startswith(f"{_word_key(text)}."))
        for text in later
    )
    try:
        if word.problem is not None and not is_replaced:
            if not _names_only(key, word):
                way = f"{_way(word)}{', or' if word.variable else 'give'} {_shown(key)}=VALUE"
                raise UserError(f"{origin}: {_shown(key)}: {_shown(word.problem, 300)}; {way}")
            reading.note(
                "replaced", word.text, f"{_shown(word.problem)}; a plain word stands for it"
            )
        _apply(reading.settings, word.text, origin)
    except UserError:
        if not is_replaced or word.text.startswith("~"):
            raise
        reading.settings[key] = VerlSetting(None, word.text.partition("=")[0])


def _way(word: Word) -> str:
    return f"give {ENV} {word.variable}=VALUE" if word.variable else ""


def _names_only(key: str, word: Word) -> bool:
    return key in _NAMES or (key in _DIRECTORIES and str(word.problem).startswith("$(date"))


def _check_function(given: Mapping[str, VerlSetting]) -> None:
    """Raise UserError if a reward function is named without its file: the built-in rules would
    decide."""
    for section in (_FUNCTION, f"reward.{_FUNCTION}"):
        name = given.get(f"{section}.name")
        path = given.get(f"{section}.path")
        is_named = name is not None and name.value not in (None, "", "compute_score")
        if name is not None and is_named and (path is None or path.value in (None, "")):
            raise UserError(
                f"{name.written}={name.value} without {section}.path: give the function's file, or "
                f"~{section}"
            )


def split_arguments(arguments: Sequence[str]) -> Arguments:
    """Return files, overrides and options. Raise UserError if a variable of --env is not set."""
    rest: list[str] = []
    environment: dict[str, str] = {}
    command = None
    strategy = "fsdp2"
    following = iter(arguments)
    for argument in following:
        option, equals, text = argument.partition("=")
        if option not in (ENV, COMMAND, STRATEGY):
            rest.append(argument)
            continue
        text = text if equals else next(following, "")
        if option == STRATEGY:
            if text not in ("fsdp2", "megatron"):
                raise UserError(f"{STRATEGY} {text!r}: expected fsdp2 or megatron")
            strategy = text
            continue
        if option == COMMAND:
            if not re.fullmatch("[1-9][0-9]{0,8}", text):
                raise UserError(f"{COMMAND} {text!r}: expected the number of a command, from 1 on")
            command = int(text)
            continue
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"\w+", name):
            raise UserError(f"{ENV} {text!r}: expected {ENV} NAME=VALUE, or {ENV} NAME")
        if not equals and name not in os.environ:
            raise UserError(f"{ENV} {name}: the environment has no {name}; give {ENV} {name}=VALUE")
        environment[name] = value if equals else os.environ[name]
    is_file = [not argument.startswith(("~", "+")) and "=" not in argument for argument in rest]
    num_files = next((number for number, of_file in enumerate(is_file) if not of_file), len(rest))
    return Arguments(rest[:num_files], rest[num_files:], environment, command, strategy)


def _shown(text: str, most: int = 80) -> str:
    """Return a text for a message: in one line, and not long."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _word_key(word: str) -> str:
    return plain_key(word.partition("=")[0])


def _apply(given: dict[str, VerlSetting], word: str, origin: str) -> None:
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
        raise UserError(
            f"{origin}: a space after the backslash ends the command here; remove the space"
        )
    if not equals or not re.fullmatch(r"\+{0,2}[\w.@/-]+", written):
        raise UserError(f"{origin}: {_shown(word)!r}: expected key=value, as Hydra reads it")
    value = parse_yaml(text, f"{origin}: {_shown(key)}") if text else ""
    for name, inner in flatten_settings({written: value}):
        given[plain_key(name)] = VerlSetting(inner, name.lstrip("+"))


# ---------------------------------------------------------------- files


def _script_words(
    path: str, reading: Reading, number: int | None
) -> tuple[str, list[Word], _ConfigOption]:
    """Return the program of the command in a script that starts verl, its overrides, and its
    config."""
    script = read_script(read_text(path), path, reading.environment)
    commands = [words for words in map(_arguments, script.commands) if words is not None]
    program, *words = commands[_chosen(path, script, commands, number)]
    for command in script.commands:
        if command[0].text in ("source", "."):
            reading.note(
                "not read",
                command[-1].text,
                f"line {command[0].line} sources it; give its variables by {ENV}",
            )
    for name, value in script.environment.items():
        reading.note(
            "environment",
            f"{name}: {value}",
            "given" if name in reading.environment else "of this process",
        )
    overrides, option = _without_options(words, path)
    given = {_word_key(word.text) for word in overrides}
    for line, text in script.written:
        for key in _SETTING.findall(text):
            if plain_key(key) not in given:
                reading.note(
                    "not given",
                    key,
                    f"line {line} has it, but the command that starts verl does not get it",
                )
    return program.text, overrides, option


def _chosen(path: str, script: Script, commands: list[list[Word]], number: int | None) -> int:
    """Return the index of the command to convert: the one of --command, or the only one."""
    if len(commands) == 1 and number is None:
        return 0
    if number is not None and number <= len(commands):
        return number - 1
    program = "with `-m verl.trainer.main_ppo` or another program of docs/from_verl.md"
    if commands:
        lines = ", ".join(str(words[0].line) for words in commands)
        raise UserError(
            f"{path}: {len(commands)} commands (lines {lines}) {program}; choose one by {COMMAND} "
            f"1 to {len(commands)}"
        )
    others = {
        words[i + 1].text
        for words in script.commands
        for i, word in enumerate(words[:-1])
        if word.text == "-m"
    }
    ended = f"; {script.ended}" if script.ended else ""
    ended = f"; it starts {_shown(', '.join(sorted(others)))}" if others and not ended else ended
    raise UserError(f"{path}: no command {program}; expected one{ended}")


def _arguments(words: list[Word]) -> list[Word] | None:
    """Return verl's program and the words after it, or None if the command does not start it."""
    texts = [word.text for word in words]
    for i, text in enumerate(texts):
        if text.endswith(_PROGRAMS) and (
            texts[i - 1] == "-m" or any("python" in other for other in texts[:i])
        ):
            return words[i:]
    return None


@dataclass(frozen=True)
class _ConfigOption:
    """The config of a command."""

    line: int = 0
    name: str | None = None
    """Value of --config-name."""
    path: str | None = None
    """Value of --config-path or --config-dir."""


def _without_options(words: list[Word], path: str) -> tuple[list[Word], _ConfigOption]:
    overrides = []
    config = _ConfigOption()
    rest = iter(words)
    for word in rest:
        option, equals, value = word.text.partition("=")
        if not option.startswith("-"):
            overrides.append(word)
            continue
        value_word = word if equals else next(rest, word)
        if value_word.problem:
            raise UserError(
                f"{path}, line {word.line}: {option}: {_shown(value_word.problem, 300)}; "
                f"{_way(value_word)}"
            )
        value = value if equals else value_word.text
        if option in ("--config-name", "-cn"):
            config = replace(config, line=word.line, name=value.removesuffix(".yaml"))
        elif option in ("--config-path", "-cp", "--config-dir", "-cd"):
            config = replace(config, line=word.line, path=value)
        else:
            raise UserError(f"{path}, line {word.line}: option {_shown(option)} is not known")
    return overrides, config


def _named_config(option: _ConfigOption, script: str, composition: Composition) -> str | None:
    """Return the file of --config-name and --config-path; None: none, or verl's own, which is then
    a base."""
    if option.name is None:
        return None
    folders = [base / (option.path or "") for base in (Path(), Path(script).parent)]
    file = next(
        (
            folder / f"{option.name}.yaml"
            for folder in folders
            if os.path.isfile(folder / f"{option.name}.yaml")
        ),
        None,
    )
    if file is None and option.name not in BASES:
        raise UserError(
            f"{script}, line {option.line}: --config-name: {_shown(option.name)}.yaml is not in "
            f"{_shown(' or '.join(dict.fromkeys(map(str, folders))), 200)}; give the file before "
            "the script"
        )
    composition.bases += [option.name] if file is None else []
    return None if file is None else str(file)


# ---------------------------------------------------------------- references


def _resolved(reading: Reading) -> dict[str, VerlSetting]:
    """Replace references between settings. A setting that takes the value of one that is absent, as
    verl's own default does, is left out, and the report says so."""
    out: dict[str, VerlSetting] = {}
    for key, item in reading.settings.items():
        value = _resolved_value(item, reading, _MOST_REFERENCES)
        if value is _ABSENT:
            reading.note(
                "default",
                item.written,
                f"{_shown(str(item.value))} is not given: verl's default of both",
            )
        else:
            out[key] = VerlSetting(value, item.written)
    return out


def _resolved_value(item: VerlSetting, reading: Reading, rest: int) -> Any:
    """Return the value of a setting without references. rest: references that may follow one
    another."""
    value = _with_home(item.value, item.written, reading)
    if not isinstance(value, str) or not _REFERENCE.search(value):
        return value
    if not rest:
        raise UserError(
            f"{item.written}: {_shown(value)}: more than {_MOST_REFERENCES} references in turn"
        )
    return _replaced(value, item.written, reading, rest - 1)


_ABSENT = object()


def _with_home(value: Any, written: str, reading: Reading) -> Any:
    """Return a value with $HOME replaced."""
    if isinstance(value, list):
        return [_with_home(item, written, reading) for item in value]
    home = reading.environment.get("HOME", os.environ.get("HOME"))
    if not isinstance(value, str) or home is None or not _HOME.search(value):
        return value
    reading.note(
        "environment",
        f"HOME: {home}",
        "given" if "HOME" in reading.environment else "of this process",
    )
    return _HOME.sub(lambda _: home, value)


def _replaced(value: str, written: str, reading: Reading, rest: int) -> Any:
    """Replace the references of a value. A value that is one reference takes the type of the other
    setting."""
    if (whole := _REFERENCE.fullmatch(value)) is not None:
        return _lookup(whole, written, reading, rest)
    out = value
    for match in _REFERENCE.finditer(value):
        part = _lookup(match, written, reading, rest)
        if part is _ABSENT:
            raise _absent(match, written)
        out = out.replace(match[0], str(part))
        if len(out) > MOST_BYTES:
            raise UserError(f"{written}: the references in it grow beyond {MOST_BYTES >> 10} KiB")
    return out


def _lookup(match: re.Match[str], written: str, reading: Reading, rest: int) -> Any:
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
        return _resolved_value(item, reading, rest)
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
        return UserError(
            f"{written}: {match[0]}: {name} is not given; give {name}=VALUE, or {written}=VALUE"
        )
    return UserError(
        f"{written}: {match[0]} is no setting of verl's; of a variable of the shell give the "
        f"value: {written}=VALUE"
    )
