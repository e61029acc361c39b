"""Messages for keys that schema.py does not have: the hint of the caller, or the most similar
key."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

Hint = Callable[[str], str | None]
"""Returns what to do with a key that schema.py does not have, or None."""

_MOST_NAMED = 10
_NEAR = 0.75
"""Minimum similarity (difflib's ratio) of a misspelled name to the known one."""
_COMMON_NAMES = {"name", "path", "n", "type", "shuffle", "temperature", "dtype", "freeze"}
"""Last parts of keys that mean different things in different sections."""
_WRAPPERS = ("actor_rollout_ref", "reward", "config")
"""verl's sections that contain sections of schema.py."""


def explain(unknown: Sequence[tuple[str, str]], known: Sequence[str], hint: Hint) -> str:
    """Return one line on all unknown keys. unknown: (file or override, key) of each."""
    if len(unknown) == 1:
        origin, key = unknown[0]
        return f"{origin}: unknown key {key!r}; {_replacement(key, known, hint)}"
    origins = {origin for origin, _ in unknown}
    where = f"{origins.pop()}: " if len(origins) == 1 else ""
    listed = [
        f"{key!r}{'' if where else f' ({origin})'}: {_replacement(key, known, hint)}"
        for origin, key in unknown[:_MOST_NAMED]
    ]
    more = [f"and {len(unknown) - _MOST_NAMED} more"] if len(unknown) > _MOST_NAMED else []
    return f"{where}{len(unknown)} unknown keys: {'; '.join([*listed, *more])}"


def _replacement(key: str, known: Sequence[str], hint: Hint) -> str:
    parts = key.lstrip("+~").split(".")
    name = ".".join(parts)
    if name in known:
        return (
            "a key with dots is for the command line; in a file sections are nested"
            if name == key
            else f"write it without {key[: -len(name)]!r}: {name}"
        )
    if name in ("actor.pool", "critic.pool"):
        return (
            f"the {parts[0]} trains, so it is on the ranks of resource_pools.train; only frozen "
            "models have a pool"
        )
    if (advice := hint(name)) is not None:
        return advice
    near = nearest_key(name, known)
    return (
        f"the nearest known key is {near!r}"
        if near
        else "no known key is similar (rlhf_mc/config/schema.py lists them)"
    )


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Return the known key that is most similar to one of verl's or a misspelled one, or None."""
    parts = key.split(".")
    is_inside = len(parts) > 1 and parts[0] in _WRAPPERS
    return _nearest(parts, known) or (_nearest(parts[1:], known) if is_inside else None)


def _nearest(parts: Sequence[str], known: Sequence[str]) -> str | None:
    """Return the most similar known key, or None. Keys of the same or a similarly spelled section
    come first, then a key of another section with the same last part, if there is only one."""
    name = ".".join(parts)
    if name in known:
        return name
    sections = list(dict.fromkeys(key.split(".")[0] for key in known))
    section = parts[0] if parts[0] in sections else _closest(parts[0], sections)
    if section is not None:
        rest = {key.split(".", 1)[1]: key for key in known if key.startswith(f"{section}.")}
        same_name = [inside for inside in rest if inside.rsplit(".", 1)[-1] == parts[-1]]
        if len(same_name) == 1:
            return rest[same_name[0]]
        flat = {inside.replace(".", "_"): key for inside, key in rest.items()}
        last = {inside.rsplit(".", 1)[-1]: key for inside, key in rest.items()}
        # Whole names are compared, as a section may be missing; a long common section does not make
        # two keys similar.
        close = _closest("_".join(parts[1:]), list(flat))
        if close and (_closest(parts[-1], [flat[close].rsplit(".", 1)[-1]]) or len(parts) == 2):
            return flat[close]
        if close := _closest(parts[-1], list(last)):
            return last[close]
    elsewhere = [key for key in known if key.rsplit(".", 1)[-1] == parts[-1]]
    return elsewhere[0] if len(elsewhere) == 1 and parts[-1] not in _COMMON_NAMES else None


def _closest(word: str, words: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word[:100], words, n=1, cutoff=_NEAR)), None)
