"""The fields of the settings: their keys, and the one check of a value's type, choices and range,
which stand in the field's annotation (numbers.py has the ranges). No torch here.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.numbers import FREE_ON_RESUME, Range
from rlhf_mc.config.schema import Config, get_setting
from rlhf_mc.config.yaml_reader import yaml_text

_ANY_NAME = "NAME"
"""Stands for the name of a named section in dotted keys."""


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the types of a section's fields, without the marker FreeOnResume. Cached: a
    planner's search builds hundreds of configs."""
    return {name: _unmarked(hint) for name, hint in _marked_types(cls).items()}


@functools.cache
def _marked_types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _unmarked(hint: Any) -> Any:
    metadata = getattr(hint, "__metadata__", ())
    if FREE_ON_RESUME not in metadata:
        return hint
    others = [item for item in metadata if item != FREE_ON_RESUME]
    return Annotated[(hint.__origin__, *others)] if others else hint.__origin__


def is_free_on_resume(key: str) -> bool:
    """Return whether a setting is FreeOnResume, or in a section that is. key: of any version."""
    hint: Any = Config
    for name in key.split("."):
        is_section = dataclasses.is_dataclass(hint)
        hint = _marked_types(typing.cast(type, hint)).get(name) if is_section else None
        if FREE_ON_RESUME in getattr(hint, "__metadata__", ()):
            return True
    return False


@functools.cache
def leaf_hints() -> dict[str, Any]:
    """Return {dotted key: type} of all settings."""
    return {key: hint for key, hint, _ in _leaves(Config, None)}


def _leaves(cls: type, section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, type, value) of each setting in a section. section: None stands for any
    instance of the class; the values are None then, and a named section has the name _ANY_NAME."""
    for name, hint in field_types(cls).items():
        key = f"{prefix}{name}"
        value = None if section is None else getattr(section, name)
        if dataclasses.is_dataclass(hint):
            yield from _leaves(typing.cast(type, hint), value, f"{key}.")
        elif (named := named_section(hint)) is not None:
            for inner, inner_value in {_ANY_NAME: None}.items() if value is None else value.items():
                yield from _leaves(named, inner_value, f"{key}.{inner}.")
        else:
            yield key, hint, value


def named_section(hint: Any) -> type | None:
    """Return the class of the sections of a mapping of them by name; None for any other type."""
    args = typing.get_args(hint)
    is_mapping = typing.get_origin(hint) is dict and dataclasses.is_dataclass(args[1])
    return typing.cast(type, args[1]) if is_mapping else None


def check_values(cfg: Config) -> None:
    """Raise UserError for a number that is not in its range, or a reference (${...}) in a text."""
    for key, hint, value in _leaves(Config, cfg):
        bounds = number_range(hint)
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if bounds is not None and item is not None and (bound := bounds.violated_bound(item)):
                raise UserError(
                    f"{key} {'is' if item is value else 'has'} {item}; it must be {bound}"
                )
            if isinstance(item, str) and "${" in item:
                raise UserError(
                    f"{key} is {item!r}; references (${{...}}) are not replaced: write the value"
                )


def needs(cfg: Config, key: str, needed: str) -> str:
    """Return the problem of a setting whose value needs another setting."""
    return f"{key} is {yaml_text(get_setting(cfg, key))}; that needs {needed}"


@functools.cache
def number_range(hint: Any) -> Range | None:
    """Return the range of a number, or of the numbers of a list; None for other types."""
    if isinstance(hint, Range):
        return hint
    return next(filter(None, map(number_range, typing.get_args(hint))), None)


def choices(hint: Any) -> list[str]:
    """Return the values of a choice, or of a list of choices; an empty list for other types."""
    args = typing.get_args(hint)
    return (
        list(args)
        if typing.get_origin(hint) is Literal
        else [text for arg in args for text in choices(arg)]
    )


def convert(value: Any, hint: Any) -> Any:
    """Return the value converted to the type. Only int -> float, one string -> list of strings,
    list -> tuple and false -> "off" are converted. Raise TypeError for any other type."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is Annotated:
        return convert(value, args[0])
    if origin in (Union, types.UnionType):
        return (
            None
            if value is None
            else convert(value, next(arg for arg in args if arg is not type(None)))
        )
    if origin is Literal:
        if value is False and "off" in args:
            value = "off"  # YAML reads the word as false
        ok = value in args
    elif origin is list:
        items = [value] if isinstance(value, str) else value
        return [convert(item, args[0]) for item in _expect(items, list)]
    elif origin is tuple:
        if len(_expect(value, list)) != len(args):
            raise TypeError
        return tuple(convert(item, arg) for item, arg in zip(value, args, strict=True))
    elif origin is dict:
        ok = isinstance(value, dict) and _is_json(value)
    elif hint is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        ok = is_number and abs(value) <= sys.float_info.max
        value = float(value) if ok else value
    else:
        assert hint in (int, bool, str), (
            f"schema.py has a type that fields.py does not know: {hint}"
        )
        ok = type(value) is hint
    if not ok:
        raise TypeError
    return value


def _is_json(value: Any) -> bool:
    """Return whether JSON can represent the value: no dates, bytes or sets, and only strings as
    keys."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(item) for name, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (str, int, float, bool))


def explain_mistake(value: Any, hint: Any = str) -> str:
    """Return an explanation of a frequent mistake to append to the message, or an empty string."""
    wants = describe(hint)
    values = value if isinstance(value, list) else [value]
    if any(isinstance(item, str) and re.search(r"\$\{|\$[A-Za-z_]", item) for item in values):
        return "; references ($NAME, ${...}) are not replaced: write the value"
    if any(isinstance(item, bool) for item in values) and "a string" in wants:
        return "; yes, no, on, off, true and false are booleans in YAML: put it in quotes"
    if (
        isinstance(value, str)
        and re.fullmatch(r"[-+]?0\d+", value)
        and ("integer" in wants or "number" in wants)
    ):
        return "; a number does not begin with 0 (YAML 1.1 would read it as octal)"
    return ""


def _expect(value: Any, cls: type) -> Any:
    if not isinstance(value, cls):
        raise TypeError
    return value


def describe(hint: Any) -> str:
    """Return the values of the type in words, for messages."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is Annotated:
        return describe(args[0])
    if origin in (Union, types.UnionType):
        return f"{describe(next(arg for arg in args if arg is not type(None)))} or null"
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is list:
        return f"a list, each entry {describe(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}, each entry {describe(args[0])}"
    names = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}
    return "a mapping with string keys and JSON values" if origin is dict else names[hint]


def show(value: Any) -> str:
    """Return the value as a user would write it in YAML, preceded by its kind where needed."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kind = next(
        (
            name
            for cls, name in ((str, "string"), (dict, "mapping"), (list, "list"))
            if type(value) is cls
        ),
        "",
    )
    return (f"the {kind} " if kind else "") + shortened(repr(value))


def shortened(text: str) -> str:
    """Return the text, cut after 80 characters."""
    return text if len(text) <= 80 else text[:77] + "..."
