"""The outcomes of verl's settings (MappedSetting), and verl's keys without the sections around
ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["same", "renamed", "implied", "not needed", "default", "not supported"]
OFF: tuple[Any, ...] = (None, False, 0, "", "null", {}, [])
"""Values that switch a feature off."""


@dataclass(frozen=True)
class MappedSetting:
    """The outcome of one of verl's settings: a line of the report."""

    kind: Kind
    text: str = ""
    """The reason, or what has changed."""
    ours: str | None = None
    """Our key; None: there is nothing to set."""
    value: Any = None
    """Our value."""


Settings = Mapping[str, Any]
"""verl's settings by key, without actor_rollout_ref."""


def implied(text: str) -> MappedSetting:
    """Return the outcome of a setting that holds here anyway."""
    return MappedSetting("implied", text)


def not_needed(text: str) -> MappedSetting:
    """Return the outcome of a setting that has nothing to change here."""
    return MappedSetting("not needed", text)


def not_supported(text: str) -> MappedSetting:
    """Return the outcome of a setting that is refused."""
    return MappedSetting("not supported", text)


def verl_default(key: str, value: Any, text: str) -> MappedSetting:
    """Return the outcome of one of verl's defaults that differs from ours."""
    return MappedSetting("default", text, key, value)


def same(key: str, value: Any, text: str = "") -> MappedSetting:
    """Return the outcome of a setting that keeps its name."""
    return MappedSetting("same", text, key, value)


def renamed(key: str, value: Any, text: str = "") -> MappedSetting:
    """Return the outcome of a setting that has another name here."""
    return MappedSetting("renamed", text, key, value)


def int_or_default(verl: Settings, key: str, default: int = 0) -> int:
    """Return a number of verl's settings, or the default where it is null, absent or no number."""
    value = verl.get(key)
    return value if type(value) is int else default


def plain_key(key: str) -> str:
    """Return verl's key without Hydra's + and without the sections that contain sections of
    ours."""
    name = key.lstrip("+~").removeprefix("actor_rollout_ref.")
    inner = name.removeprefix("reward.")
    sections = (
        "custom_reward_function",
        "reward_model",
        "reward_manager",
        "reward_kwargs",
        "sandbox_fusion",
    )
    if inner.partition(".")[0] not in sections:
        return name
    return (
        inner
        if inner.startswith(("custom_reward_function", "reward_model"))
        else f"reward_model.{inner}"
    )
