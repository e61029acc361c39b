"""A config as text: commented YAML, in which each setting is below its documentation from
schema.py, and settings and command as files and trackers record them, without the values of
secrets. No torch here.

A setting of the schema is no secret (data.prompt_key names a column). The keyword arguments of a
user's function or of a chat template may hold one.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.fields import choices, describe, field_types
from rlhf_mc.config.load import dotted_keys, inherited_by, inherited_layout, to_dict
from rlhf_mc.config.masking import HIDDEN, SECRET, is_hidden, masked, masked_argument
from rlhf_mc.config.schema import Config, get_setting, roles
from rlhf_mc.config.yaml_reader import yaml_text

_LINE_LENGTH = 120
_INDENT = "  "


def commented_yaml(cfg: Config, values: dict[str, Any] | None = None) -> str:
    """Return the settings of the config as YAML, without those that a model inherits from the
    actor. `load_config` of this text gives an equal config. values: the config as plain values, if
    some are to differ."""
    plain = to_dict(cfg) if values is None else values
    return "\n".join(_section(cfg, plain, "", "", frozenset(_inherited_keys(cfg)))) + "\n"


def _inherited_keys(cfg: Config) -> Iterator[str]:
    """Yield each setting of a model's layout that has the value that the model inherits from the
    actor."""
    for role, section in roles(cfg).items():
        if role != "actor":
            actor = inherited_by(section.strategy, cfg)
            inherited = {
                "": {"strategy": cfg.actor.strategy},
                "fsdp_config.": vars(cfg.actor.fsdp_config),
                "megatron.": vars(inherited_layout(section.megatron, actor)),
            }
            yield from (
                f"{role}.{prefix}{name}"
                for prefix, values in inherited.items()
                for name, value in values.items()
                if get_setting(cfg, f"{role}.{prefix}{name}") == value
            )


def _section(
    section: Any, values: dict[str, Any], prefix: str, indent: str, left_out: Collection[str]
) -> list[str]:
    """Return the lines of a section (a dataclass instance), whose fields have the given plain
    values. prefix: of the dotted keys of its fields."""
    lines: list[str] = []
    for field in dataclasses.fields(section):
        key = f"{prefix}{field.name}"
        if key in left_out:
            continue
        lines += _comment(setting_doc(type(section), field.name), indent)
        value = values[field.name]
        inner = getattr(section, field.name)
        if dataclasses.is_dataclass(inner):
            within = _section(inner, value, f"{key}.", indent + _INDENT, left_out)
            lines += [f"{indent}{field.name}:{'' if within else ' {}'}", *within]
        elif isinstance(inner, dict) and any(map(dataclasses.is_dataclass, inner.values())):
            lines.append(f"{indent}{field.name}:")
            for name, named in inner.items():
                within = _section(
                    named, value[name], f"{key}.{name}.", indent + 2 * _INDENT, left_out
                )
                lines += [f"{indent}{_INDENT}{name}:", *within]
        else:
            lines += textwrap.indent(f"{field.name}: {yaml_text(value)}", indent).split("\n")
        lines += [""] if not indent else []
    return lines


def _comment(text: str, indent: str) -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(
        text, _LINE_LENGTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False
    )


def setting_doc(cls: type, name: str) -> str:
    """Return the docstring of a section's field, with the values of a choice that it does not
    list."""
    doc = field_docs(cls)[name]
    hint = field_types(cls)[name]
    if all(re.search(rf"(?<!\w){re.escape(choice)}(?!\w)", doc) for choice in choices(hint)):
        return doc
    values = describe(hint)
    return f"{doc} {values[0].upper()}{values[1:]}."


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a section's class, in one line."""
    docs = {}
    for part in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        (node,) = ast.parse(inspect.getsource(part)).body
        assert isinstance(node, ast.ClassDef)
        for field, doc in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(doc, ast.Expr)
                and isinstance(doc.value, ast.Constant)
            ):
                docs[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return docs


def recorded(cfg: Config) -> dict[str, Any]:
    """Return the config as plain values, without secrets."""
    settings: dict[str, Any] = without_secrets(to_dict(cfg))
    return settings


def without_secrets(value: Any, hides: bool = False) -> Any:
    """Return resolved settings, or another plain value, with each text masked (masking.py). With
    `hides`, and inside a mapping whose name ends in kwargs, each entry with the name of a secret,
    in any case, is HIDDEN."""
    if isinstance(value, list):
        return [without_secrets(inner, hides) for inner in value]
    if not isinstance(value, dict):
        return masked(value) if isinstance(value, str) else value
    entries = {}
    for name, inner in value.items():
        is_secret = hides and SECRET.search(str(name))
        entries[name] = (
            HIDDEN if is_secret else without_secrets(inner, hides or str(name).endswith("kwargs"))
        )
    return entries


def command_without_secrets(command: Sequence[str]) -> list[str]:
    """Return a command with each of its arguments masked."""
    return [masked_argument(argument, dotted_keys()) for argument in command]


def check_not_hidden(cfg: Config) -> None:
    """Raise UserError if a setting was taken from a record, which has no secrets."""
    for key, text in _texts("", to_dict(cfg)):
        if is_hidden(text):
            raise UserError(
                f"{key} is {text!r}, as a secret is recorded; give its value again (key=value on "
                "the command line)"
            )


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each text of plain values with its dotted key."""
    if isinstance(value, str):
        yield key, value
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, inner in pairs:
        yield from _texts(f"{key}.{name}".lstrip("."), inner)
