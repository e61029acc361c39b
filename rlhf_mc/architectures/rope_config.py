"""The rotary settings of config.json, in the spellings of all versions of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_mc.architectures.hf_config import ROTATED, flag, is_number, refused, size

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Supported types of rotary scaling -> the numbers that each requires."""
_MAY_HAVE = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
"""Optional keys of yarn, which the other types ignore."""
_ROPE_KEYS = {
    *(
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "finetuned",
    ),
    *(key for keys in _NEEDS.values() for key in keys),
    *_MAY_HAVE,
}
ROPE_TYPES = tuple(_NEEDS)


def rope(
    config: Mapping[str, Any], default_theta: float = 10000.0
) -> tuple[float, dict[str, Any] | None]:
    """Return (theta, scaling or None), as transformers and vLLM both read them.

    transformers 5 has both in `rope_parameters`. Earlier versions have `rope_theta` and
    `rope_scaling`, in which the first versions named the type `type`. The returned scaling has
    `rope_type` and only the keys that the type reads. "dynamic" does not scale up to
    max_position_embeddings, which no sequence exceeds here."""
    key, given = rope_dict(config)
    theta = given.get("rope_theta", config.get("rope_theta", default_theta))
    if not is_number(theta) or theta <= 0:
        raise refused("rope_theta", theta, "expected a positive number")
    if "rope_theta" in given and config.get("rope_theta", theta) not in (theta, None):
        raise refused(
            "rope_theta", config["rope_theta"], f"{key}.rope_theta is {theta}; keep one of them"
        )
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _NEEDS:
        raise refused(f"{key}.rope_type", kind, f"supported: {', '.join(ROPE_TYPES)}")
    if given.get("type", kind) != kind:
        raise refused(
            f"{key}.type", given["type"], f"{key}.rope_type is {kind!r}; keep one of them"
        )
    for name in sorted(given.keys() - _ROPE_KEYS):
        shown = name if name.isidentifier() else repr(name)
        raise refused(f"{key}.{shown}", given[name], f"a {kind} rope has no such key")
    return float(theta), None if kind == "default" else _scaling(config, key, kind, given)


def rotary_fraction(config: Mapping[str, Any], default: float) -> float:
    """Return partial_rotary_factor, which is in the rotary settings or at top level. default: of
    the family, whose heads are rotated whole if it is 1. Raise UserError for a value that
    transformers and vLLM do not both support."""
    name = "partial_rotary_factor"
    key, given = rope_dict(config)
    values = {f"{key}.{name}": given.get(name), name: config.get(name)}
    for where, value in values.items():
        whole = f"only 1 is supported: {ROTATED.reason}"
        if value is not None and default == 1.0 and value != 1:
            raise refused(where, value, whole)
        if value is not None and not (is_number(value) and 0 < value <= 1):
            raise refused(where, value, "expected a number above 0 and at most 1")
    fractions = {value for value in values.values() if value is not None}
    if len(fractions) > 1:
        raise refused(name, config[name], f"{key}.{name} is {given[name]}; keep one of them")
    return float(fractions.pop()) if fractions else default


def rope_dict(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (key, value) of the rotary settings."""
    ropes = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    for key, value in ropes.items():
        if not isinstance(value, Mapping):
            raise refused(key, value, "expected an object with rope_type")
    if len(ropes) == 2 and ropes["rope_scaling"] != ropes["rope_parameters"]:
        raise refused(
            "rope_scaling",
            ropes["rope_scaling"],
            "rope_parameters differs from it; keep one of them",
        )
    key, value = next(iter(ropes.items()), ("rope_parameters", {}))
    return key, dict(value)


def without_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without the sections of rotary embeddings of images, whose three
    positions are one and the same in a text."""
    key, given = rope_dict(config)
    plain = {name: x for name, x in given.items() if not name.startswith("mrope_")}
    return {**config, key: plain} if plain else dict(config)


def _scaling(
    config: Mapping[str, Any], key: str, kind: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    def checked_number(name: str, least: float = 0.0) -> Any:
        value: Any = given.get(name)
        if not is_number(value) or value < least or value == 0:
            expected = f"a number of at least {least:g}" if least else "a positive number"
            raise refused(f"{key}.{name}", value, f"a {kind} rope needs {expected}")
        return value

    out: dict[str, Any] = {"rope_type": kind}
    for name in _NEEDS[kind]:
        out[name] = checked_number(name, 1.0 if name == "factor" else 0.0)
    if kind == "linear" and not isinstance(out["factor"], float):
        raise refused(
            f"{key}.factor", out["factor"], f"vLLM requires a float; write {out['factor']}.0"
        )
    if kind == "llama3" and out["low_freq_factor"] >= out["high_freq_factor"]:
        raise refused(
            f"{key}.low_freq_factor", out["low_freq_factor"], "expected less than high_freq_factor"
        )
    if kind in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = _original_length(config, key, given)
    if kind == "yarn":
        out |= {name: checked_number(name) for name in _MAY_HAVE[:2] if name in given}
        out |= {
            name: checked_number(name) for name in _MAY_HAVE[2:5] if given.get(name) is not None
        }
        if "truncate" in given:
            out["truncate"] = flag(given, "truncate", prefix=f"{key}.")
        end = out["factor"] * out["original_max_position_embeddings"]
        if end < size(config, "max_position_embeddings"):
            raise refused(
                f"{key}.factor",
                out["factor"],
                f"times original_max_position_embeddings it is {end:g}, vLLM's maximum position, "
                f"and max_position_embeddings is {config['max_position_embeddings']}",
            )
    return out


def _original_length(config: Mapping[str, Any], key: str, given: Mapping[str, Any]) -> int:
    """Return the maximum length before scaling. The key at top level overrides the key of the
    rotary settings."""
    name = "original_max_position_embeddings"
    if config.get(name) is not None:
        return size(config, name)
    return (
        size(given, name, prefix=f"{key}.")
        if name in given
        else size(config, "max_position_embeddings")
    )
