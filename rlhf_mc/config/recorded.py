"""Settings and command of a run as its files and trackers record them: without the values of secrets. No torch here.

A setting of the schema is no secret (data.prompt_key names a column). The keyword arguments of a user's function or of
a chat template may hold one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import dotted_keys, mapping_keys, to_dict
from rlhf_mc.config.masking import HIDDEN, SECRET, is_hidden, masked, masked_argument
from rlhf_mc.config.schema import Config


def recorded(cfg: Config) -> dict[str, Any]:
    """Return the config as plain values, without secrets."""
    return without_secrets(to_dict(cfg))


def without_secrets(settings: dict[str, Any]) -> dict[str, Any]:
    """Return resolved settings with HIDDEN for each keyword argument with the name of a secret, in any case, and with
    every other text masked (masking.py)."""
    masked_settings: dict[str, Any] = _masked(settings)
    for setting in mapping_keys():
        *sections, name = setting.split(".")
        section: Any = masked_settings
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if name.endswith("kwargs") and isinstance(section, dict) and name in section:
            section[name] = _masked(section[name], hides=True)
    return masked_settings


def command_without_secrets(command: Sequence[str]) -> list[str]:
    """Return a command with each of its arguments masked."""
    return [masked_argument(argument, dotted_keys()) for argument in command]


def check_not_hidden(cfg: Config) -> None:
    """Raise UserError if a setting was taken from a record, which has no secrets."""
    for key, text in _texts("", to_dict(cfg)):
        if is_hidden(text):
            raise UserError(
                f"{key} is {text!r}, as a secret is recorded; give its value again (key=value on the command line)"
            )


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each text of plain values with its dotted key."""
    if isinstance(value, str):
        yield key, value
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        yield from _texts(f"{key}.{name}".lstrip("."), inner)


def _masked(value: Any, hides: bool = False) -> Any:
    """Return plain values with each text masked; with `hides` also HIDDEN for each entry with the name of a secret."""
    if isinstance(value, dict):
        return {n: HIDDEN if hides and SECRET.search(str(n)) else _masked(inner, hides) for n, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner, hides) for inner in value]
    return masked(value) if isinstance(value, str) else value
