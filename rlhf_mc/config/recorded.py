"""Settings and command of a run as its files and trackers record them: without the values of secrets. No torch here.

A setting of the schema is no secret (data.prompt_key names a column). The keyword arguments of a user's function or of
a chat template may hold one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from rlhf_mc.config.load import dotted_keys, mapping_keys, to_dict
from rlhf_mc.config.schema import Config

HIDDEN = "***"
"""In place of a secret."""
_SECRET = re.compile(r"(token|key|secret|password)$", re.IGNORECASE)
_WITHIN = re.compile(r"(token|key|secret|password)[\"']?\s*:", re.IGNORECASE)
"""A secret's name in an override whose value is a mapping."""


def recorded(cfg: Config) -> dict[str, Any]:
    """Return the config as plain values, without secrets."""
    return without_secrets(to_dict(cfg))


def without_secrets(settings: dict[str, Any]) -> dict[str, Any]:
    """Return resolved settings with HIDDEN for each keyword argument whose name ends in token, key, secret or password,
    in any case."""
    found = copy.deepcopy(settings)
    for setting in mapping_keys():
        *sections, name = setting.split(".")
        section: Any = found
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if name.endswith("kwargs") and isinstance(section, dict) and name in section:
            section[name] = _hidden(section[name])
    return found


def command_without_secrets(command: Sequence[str]) -> list[str]:
    """Return a command with HIDDEN for the value of each override whose key ends as a secret's, or whose value is a
    mapping with such a key."""
    return [_argument(argument) for argument in command]


def _hidden(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: HIDDEN if _SECRET.search(str(name)) else _hidden(inner) for name, inner in value.items()}
    return [_hidden(inner) for inner in value] if isinstance(value, list) else value


def _argument(argument: str) -> str:
    key, equals, value = argument.partition("=")
    is_secret = _SECRET.search(key) is not None and key not in dotted_keys()
    return f"{key}={HIDDEN}" if equals and (is_secret or _WITHIN.search(value)) else argument
