"""Settings and command of a run as its files and trackers record them: without the values of
secrets. No torch here.

A setting of the schema is no secret (data.prompt_key names a column). The keyword arguments of a
user's function or of a chat template may hold one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import dotted_keys, to_dict
from rlhf_mc.config.masking import HIDDEN, SECRET, is_hidden, masked, masked_argument
from rlhf_mc.config.schema import Config


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
