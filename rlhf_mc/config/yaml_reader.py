"""PyYAML's safe loader with fewer implicit types and limits of size.

1e-6 is a number; 020, 1:30 and dates are strings; a duplicate key is an error, and so are
aliases that expand beyond the limits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from rlhf_mc.config.errors import UserError

MOST_BYTES = 1 << 18
"""Maximum size of one file: far more than all settings with comments, and read in seconds."""
_MOST_NODES = 20_000
_DEEPEST = 32


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    """Replaces PyYAML's own resolvers."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    (
        "bool",
        r"(yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)\Z",
        "yYnNtTfFoO",
    ),
    ("null", r"(~|null|Null|NULL|)\Z", "~nN\0"),
    # No setting has longer numbers, and Python takes quadratic time for them.
    ("int", r"[-+]?(0|[1-9][0-9_]{0,40}|0x[0-9a-fA-F]{1,16}|0b[01]{1,64})\Z", "-+0123456789"),
    (
        "float",
        r"([-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z",
        "-+.0123456789",
    ),
    ("merge", r"<<\Z", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), ["" if c == "\0" else c for c in _first]
    )


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that _Loader would take for a number or the like."""


for _character, _resolvers in _Loader.yaml_implicit_resolvers.items():
    for _resolver in _resolvers:
        _Dumper.add_implicit_resolver(*_resolver, [_character])


def yaml_text(value: Any) -> str:
    """Return the value (plain lists, mappings and scalars) as YAML that `parse_yaml` reads back."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("...\n").rstrip("\n")


def yaml_document(tree: Mapping[str, Any]) -> str:
    """Return sections of settings as a YAML file, in their order."""
    return yaml.dump(
        dict(tree), Dumper=_Dumper, default_flow_style=False, width=100, sort_keys=False
    )


def parse_yaml(text: str | bytes, origin: str) -> Any:
    """Return the value of one YAML document. Raise UserError with `origin` and the line if it is
    not valid."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        reason = (
            getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be parsed"
        )
        raise UserError(f"{origin}: not valid YAML: {where}{reason}") from error
    except RecursionError as error:
        raise UserError(f"{origin}: not valid YAML: nested too deeply") from error
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        AttributeError,
    ) as error:  # an explicit tag on a value of another kind
        raise UserError(
            f"{origin}: not valid YAML: {' '.join(str(error).split())[:100]}"
        ) from error
    finally:
        if loader is not None:
            loader.dispose()


def read_limited(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a config or script. Raise OSError if it cannot be read, UserError if it
    has more than MOST_BYTES."""
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UserError(f"{path}: more than {MOST_BYTES >> 10} KiB; is it a config or a script?")
    return content


def _check_size(root: yaml.Node) -> None:
    """Raise YAMLError if the tree, with aliases written out, exceeds the limits, as it does when an
    anchor contains itself."""
    nodes = [(root, 0)]
    for node, depth in nodes:  # grows
        if depth > _DEEPEST or len(nodes) > _MOST_NODES:
            limit = f"more than {_MOST_NODES} values or {_DEEPEST} levels, aliases written out"
            raise yaml.constructor.ConstructorError(None, None, limit, node.start_mark)
        for child in node.value if isinstance(node, yaml.CollectionNode) else ():
            parts = child if isinstance(child, tuple) else (child,)
            nodes += [(part, depth + 1) for part in parts]
