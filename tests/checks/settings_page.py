"""Write docs/settings.md from the dataclasses of the settings, rlhf_mc/config/schema.py.

python tests/checks/settings_page.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from checks.wrap import wrapped

from rlhf_mc.config.fields import (
    choices,
    describe,
    field_types,
    is_free_on_resume,
    named_section,
    number_range,
)
from rlhf_mc.config.numbers import Range
from rlhf_mc.config.printing import field_docs
from rlhf_mc.config.schema import Config, DataConfig, ModelConfig, TrainerConfig
from rlhf_mc.config.unread import DEPENDENCES
from rlhf_mc.config.yaml_reader import yaml_text

PATH = Path(__file__).parents[2] / "docs" / "settings.md"
HEAD = """\
# Settings

A config is a YAML file of sections; `base: other.yaml` inherits another file. `section.key=value`
on the command line replaces a setting, and its value is YAML. An unknown key is an error that names
the nearest known one. `python -m rlhf_mc CONFIG.yaml --print-config` prints the settings of a
config, with the text below each. Names are verl's where the meaning is the same
([from_verl.md](from_verl.md)).

"Free on a resume.": a change of the setting alters no step by itself, and a resume does not list it
among the settings that differ from the checkpoint's.

`python tests/checks/settings_page.py` writes this page from `rlhf_mc/config/schema.py`.
"""
DEPENDENT = """\
## Settings that are read with others alone

Where one of these is set and not read, a line at the start names it. Those that do not fit together
are errors.
"""
NAME = "NAME"
"""Stands for the name of a named section."""


def page() -> str:
    """Return the text of the page."""
    config = Config(DataConfig([]), ModelConfig(""), TrainerConfig(""))
    sections: dict[str, Any] = {}
    lines = [HEAD]
    for key, section, doc in _sections("", config):
        lines += _section(key, section, doc, sections)
    lines += [DEPENDENT, "| with | settings |", "|---|---|"]
    lines += [
        f"| {_escaped(row.condition)} | {', '.join(f'`{key}`' for key in row.keys)} |"
        for row in DEPENDENCES
    ]
    return wrapped("\n".join(lines).rstrip() + "\n")


def _section(key: str, section: Any, doc: str, sections: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a section and the sections within it. doc: of the field that has the
    section. sections: those whose settings the page has, by key, to which the section is added."""
    cls = type(section)
    yield f"{'##' if '.' not in key.removesuffix(f'.{NAME}') else '###'} {key}\n"
    if (
        known := next((key for key, other in sections.items() if isinstance(other, cls)), None)
    ) is not None:
        yield f"{_escaped(doc)} {_as_in(section, sections[known], known)}\n"
        return
    sections[key] = section
    yield f"{_escaped(' '.join((inspect.getdoc(cls) or '').split()))}\n"
    rows = [
        _row(key, field, section)
        for field in dataclasses.fields(section)
        if f"{key}.{field.name}" not in _names(key, section)
    ]
    yield from (
        ["| setting | values | default | meaning |", "|---|---|---|---|", *rows, ""] if rows else []
    )
    for inner in _sections(f"{key}.", section):
        yield from _section(*inner, sections)


def _sections(prefix: str, section: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, section, doc of its field) of each section in a section, a named one with
    NAME."""
    for field in dataclasses.fields(section):
        named = named_section(field_types(type(section))[field.name])
        doc = field_docs(type(section))[field.name]
        if named is not None:
            required = {
                other.name: ""
                for other in dataclasses.fields(named)
                if other.default is other.default_factory is dataclasses.MISSING
            }
            yield f"{prefix}{field.name}.{NAME}", named(**required), doc
        elif dataclasses.is_dataclass(getattr(section, field.name)):
            yield f"{prefix}{field.name}", getattr(section, field.name), doc


def _names(key: str, section: Any) -> set[str]:
    """Return the keys of the sections in a section, without NAME."""
    return {inner.removesuffix(f".{NAME}") for inner, *_ in _sections(f"{key}.", section)}


def _as_in(section: Any, known: Any, key: str) -> str:
    """Return in words how the settings of a section differ from the known ones of another, which
    has the key."""
    names = [field.name for field in dataclasses.fields(known)]
    missing = [f"`{name}`" for name in names if not hasattr(section, name)]
    other = [
        name
        for name in names
        if hasattr(section, name) and getattr(section, name) != getattr(known, name)
    ]
    values = [f"`{name}` is `{yaml_text(getattr(section, name))}`" for name in other]
    without = f", without {', '.join(missing)}" if missing else ""
    defaults = f" By default {', '.join(values)}." if values else ""
    return f"The settings are those of [{key}](#{key.replace('.', '')}){without}.{defaults}"


def _row(key: str, field: dataclasses.Field[Any], section: Any) -> str:
    hint = field_types(type(section))[field.name]
    is_required = (
        field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
    default = "required" if is_required else f"`{_text(getattr(section, field.name))}`"
    doc = _escaped(field_docs(type(section))[field.name])
    doc += " Free on a resume." if is_free_on_resume(f"{key}.{field.name}") else ""
    return f"| `{key}.{field.name}` | {_values(hint)} | {default} | {doc} |"


def _escaped(text: str) -> str:
    """Return the text with links to pages, and with the characters escaped that Markdown would
    read."""
    return re.sub(r"\bdocs/([\w/]+\.md)", r"[\1](\1)", re.sub(r"([|<*])", r"\\\1", text))


def _text(value: Any) -> str:
    has_lines = isinstance(value, str) and "\n" in value
    return (
        json.dumps(value)
        if has_lines
        else yaml_text(list(value) if isinstance(value, tuple) else value)
    )


def _values(hint: Any) -> str:
    """Return the values of a setting in words."""
    is_null = type(None) in typing.get_args(hint)
    inner = next(arg for arg in typing.get_args(hint) if arg is not type(None)) if is_null else hint
    text = ", ".join(f"`{choice}`" for choice in choices(inner)) or re.sub(
        r"\ban? (finite )?", "", describe(inner)
    )
    text = f"list of {text}" if choices(inner) and typing.get_origin(inner) is list else text
    limits = number_range(inner)
    bounds = "" if limits is None else f", {_bounds(limits)}"
    return f"{text}{bounds}{' or `null`' if is_null else ''}"


def _bounds(limits: Range) -> str:
    also = "" if limits.also is None else f"{limits.also} or "
    low, high = (
        f"{bound:,.0f}" if bound == int(bound) and bound < 1e10 else f"{bound:g}"
        for bound in (limits.low, limits.high)
    )
    return (
        f"{also}{'above ' if limits.open else ''}{low} to {'below ' if limits.open else ''}{high}"
    )


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
