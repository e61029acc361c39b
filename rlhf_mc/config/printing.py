"""A config as commented YAML: every setting with its value, below its documentation from schema.py."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any

from rlhf_mc.config.load import to_dict
from rlhf_mc.config.schema import Config
from rlhf_mc.config.yaml_reader import yaml_text

_LINE_LENGTH = 120
_INDENT = "  "


def commented_yaml(cfg: Config, values: dict[str, Any] | None = None) -> str:
    """Return all settings of the config as YAML. `load_config` of this text gives an equal config. values: the config
    as plain values, if some are to differ."""
    return "\n".join(_section(cfg, to_dict(cfg) if values is None else values, "")) + "\n"


def _section(section: Any, values: dict[str, Any], indent: str) -> list[str]:
    """Return the lines of a section (a dataclass instance), whose fields have the given plain values."""
    lines: list[str] = []
    docs = field_docs(type(section))
    for field in dataclasses.fields(section):
        lines += textwrap.wrap(
            docs[field.name], _LINE_LENGTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        value = values[field.name]
        inner = getattr(section, field.name)
        if dataclasses.is_dataclass(inner):
            lines += [f"{indent}{field.name}:", *_section(inner, value, indent + _INDENT)]
        elif isinstance(inner, dict) and any(map(dataclasses.is_dataclass, inner.values())):
            lines.append(f"{indent}{field.name}:")
            for name, named in inner.items():
                lines += [f"{indent}{_INDENT}{name}:", *_section(named, value[name], indent + 2 * _INDENT)]
        else:
            lines += textwrap.indent(f"{field.name}: {yaml_text(value)}", indent).split("\n")
        lines += [""] if not indent else []
    return lines


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a section's class, in one line."""
    (node,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef)
    docs = {}
    for field, doc in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            docs[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return docs
