"""Conversions of verl's rejection of tokens and sequences: statistics and thresholds in one string
each, with commas. And of what else deals with the difference between rollout and trainer, and of
the losses of routers.

verl's k1 is log(1 / rho), and its bounds "lower_upper" bound 1 / rho. Ours bound rho.
"""

from __future__ import annotations

import re
from typing import Any

from rlhf_mc.verl.keys import (
    OFF,
    MappedSetting,
    Settings,
    implied,
    not_needed,
    not_supported,
    renamed,
    same,
)

_SECTION = "algorithm.rollout_correction"
_EARLIER = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Statistics by their names in earlier versions of verl."""
_NUMBER = re.compile(r"\d+(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)


def rejection_statistics(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert rollout_rs: a list, each statistic once."""
    if value in OFF:
        return implied("none")
    return same(key, _statistics(value))


def rejection_thresholds(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert rollout_rs_threshold: one number for each statistic. verl's one number holds for all
    of them."""
    names = _statistics(verl.get(f"{_SECTION}.rollout_rs"))
    if value in OFF or not names:
        return _unused(value)
    specs = _specs(value, names)
    if len(specs) != len(names) or not all(
        _is_threshold(*pair) for pair in zip(names, specs, strict=True)
    ):
        return not_supported(
            f"expected a number, or lower_upper for ..._k1, for each of {', '.join(names)}"
        )
    if len(_lower_bounds(names, specs)) > 1:
        return not_supported(
            "the ..._k1 statistics have one lower bound: rollout_rs_threshold_lower"
        )
    text = "bounds of rho; verl's are of 1 / rho" if "_" in str(value) else ""
    return same(key, [_upper(spec) for spec in specs], text)


def rejection_lower_threshold(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert rollout_rs_threshold_lower, which earlier versions of verl have, as a bound of
    rho."""
    used = _statistics(verl.get(f"{_SECTION}.rollout_rs"))
    return same(key, value) if used and value not in OFF else _unused(value)


def _unused(value: Any) -> MappedSetting:
    return implied("none") if value in OFF else not_needed(f"{_SECTION}.rollout_rs is off")


def rejection_lower_bound(verl: Settings) -> float | None:
    """Return the lower bound of rho of the ..._k1 statistics that verl's thresholds contain, or
    None."""
    names = _statistics(verl.get(f"{_SECTION}.rollout_rs"))
    bounds = _lower_bounds(names, _specs(verl.get(f"{_SECTION}.rollout_rs_threshold"), names))
    return next(iter(bounds), None)


def _statistics(value: Any) -> list[str]:
    if value in OFF:
        return []
    return [_EARLIER.get(name, name) for name in dict.fromkeys(_items(value))]


def _items(value: Any) -> list[str]:
    listed = (
        value.split(",")
        if isinstance(value, str)
        else value
        if isinstance(value, list)
        else [value]
    )
    return [text for item in listed if (text := str(item).strip())]


def _specs(value: Any, names: list[str]) -> list[str]:
    specs = [] if value in OFF else _items(value)
    return specs * len(names) if len(specs) == 1 else specs


def _is_threshold(name: str, spec: str) -> bool:
    """Return whether a threshold is a number above 0, or two of them for a ..._k1 statistic."""
    numbers = spec.split("_")
    right = len(numbers) == 1 or (len(numbers) == 2 and name.endswith("_k1"))
    return right and all(_NUMBER.fullmatch(number) and float(number) > 0 for number in numbers)


def _upper(spec: str) -> float:
    """Return the upper bound of rho, or the threshold of another statistic."""
    lower, pair, _ = spec.partition("_")
    return 1 / float(lower) if pair else float(lower)


def _lower_bounds(names: list[str], specs: list[str]) -> set[float | None]:
    """Return the lower bounds of rho of the ..._k1 statistics; None: 1 / the upper bound."""
    bounds: set[float | None] = set()
    for name, spec in zip(names, specs, strict=False):
        if name.endswith("_k1") and _is_threshold(name, spec):
            _, pair, upper = spec.partition("_")
            bound = 1 / float(upper) if pair else None
            is_reciprocal = bound is not None and abs(bound * _upper(spec) - 1) < 1e-9
            bounds.add(None if is_reciprocal else bound)
    return bounds


def truncated_weights(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Convert the upper bound of the importance weights."""
    if value is None and verl.get(f"{_SECTION}.rollout_is") in OFF:
        return implied("none")
    if not isinstance(value, str):
        return None
    try:
        return same(key, float(value))
    except ValueError:
        lower, _, upper = value.partition("_")
        text = (
            f"IcePop's bounds; set rollout_is_threshold to {upper}, and leave out other tokens by "
            f"rollout_rs [token_k1], rollout_rs_threshold [{upper}] and rollout_rs_threshold_lower "
            f"{lower}"
        )
        return not_supported(f"{value}: {text}")


def router_replay(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Return the line of the actor's router_replay.mode; None where verl replays nothing."""
    mode = (
        {"R2": "recompute", "R3": "rollout"}.get(str(value)) if key.startswith("actor.") else None
    )
    return None if mode is None else renamed("algorithm.router_replay", mode, f"verl's {value}")


def router_balance(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert a coefficient of the losses of routers, or the rate of their biases."""
    section, _, name = key.rpartition(".")
    if value in OFF:
        return implied("off")
    if name != "moe_aux_loss_coeff":
        return renamed(f"actor.{name}", value)
    if verl.get(f"{section}.moe_router_load_balancing_type", "none") == "none":  # as verl sets it
        return not_needed("moe_router_load_balancing_type is none")
    return renamed(f"actor.{name}", value, "of each sequence, in verl of each packed micro-batch")
