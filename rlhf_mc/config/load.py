"""From YAML files and command-line overrides to a typed, checked Config, and back to plain values.

What the settings are and mean is in schema.py; which values go together is in validate.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

import yaml

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import Config, MegatronConfig, layouts
from rlhf_mc.config.validate import validate as validate

_RENAMED = {
    "reward_model.enable": "reward_model.model_path (null: no reward model)",
    "reward_model.model.path": "reward_model.model_path",
    "actor.clip_ratio": "actor.clip_ratio_low and actor.clip_ratio_high",
    **dict.fromkeys(
        ("critic.use_dynamic_bsz", "ref.log_prob_use_dynamic_bsz", "rollout.log_prob_use_dynamic_bsz"),
        "actor.use_dynamic_bsz (one switch for all passes)",
    ),
}
"""verl's keys that have no single counterpart of the same name, and what takes their place."""

_NOT_SUPPORTED = {
    "context_parallel_size": "context parallelism is not supported: attention takes whole sequences. For long ones use "
    "tensor_model_parallel_size with sequence_parallel, and recompute_granularity",
}
"""verl's keys, by their last name, for what this program does not do; and what there is instead."""


class _Setting(NamedTuple):
    value: Any
    origin: str
    """The file or override that set it, for messages."""


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, what it inherits through `base:`, and `section.key=value` overrides (values are YAML).

    Later wins: bases in their order, the file itself, the overrides in their order.
    UserError, in one line, for anything wrong.
    """
    settings = _read_file(Path(path), ())
    for override in overrides:
        _merge(settings, _read_override(override))
    config = _build(Config, "", settings, None, path)
    assert isinstance(config, Config)
    for role in layouts(config).keys() - {"actor"}:
        getattr(config, role).megatron = _layout_like_the_actors(role, config.actor.megatron, settings, path)
    return config


def to_dict(cfg: Config) -> dict[str, Any]:
    """The resolved config as plain dicts, lists and scalars: `yaml.safe_dump` of it can be loaded again."""
    return typing.cast(dict[str, Any], _plain(dataclasses.asdict(cfg)))


def dotted_keys() -> list[str]:
    """Every setting as section.key, in the order of schema.py."""
    return list(_leaf_hints())


# ---------------------------------------------------------------- reading


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but 1e-6 is a number (as in YAML 1.2) and a key given twice is an error."""

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


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parse_yaml(text: str | bytes, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be parsed"
        raise UserError(f"{origin}: not valid YAML: {where}{reason}") from error


def _read_file(path: Path, parents: tuple[Path, ...]) -> dict[str, _Setting]:
    """The file's settings on top of those of its bases; `parents` are the files that led here."""
    by = f" (base of {parents[-1]})" if parents else ""
    if path.resolve() in [parent.resolve() for parent in parents]:
        raise UserError(f"{path}: base: goes in a circle: {' -> '.join(str(p) for p in (*parents, path))}")
    if not path.is_file():
        raise UserError(f"config file {path}: no such file{by}")
    tree = _parse_yaml(path.read_bytes(), str(path))
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected sections (data:, model:, ...) at the top level, found {_show(tree)}")
    bases = tree.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{path}: base: expected a file name or a list of them, found {_show(bases)}")
    settings: dict[str, _Setting] = {}
    for base in bases:
        _merge(settings, _read_file(path.parent / base, (*parents, path)))
    _merge(settings, _flatten(tree, Config, "", str(path)))
    return settings


def _read_override(override: str) -> dict[str, _Setting]:
    key, equals, text = override.partition("=")
    origin = f"override {override!r}"
    if not equals or not key.strip():
        raise UserError(f"{origin}: expected section.key=value")
    value = _parse_yaml(text, origin)
    for part in reversed(key.strip().split(".")):
        value = {part: value}
    return _flatten(value, Config, "", origin)


def _flatten(tree: Mapping[Any, Any], cls: type, prefix: str, origin: str) -> dict[str, _Setting]:
    """A tree of sections as {dotted key: setting}; every key must be one of schema.py's."""
    hints = typing.get_type_hints(cls)
    settings: dict[str, _Setting] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        hint = hints.get(name)
        if hint is None:
            raise UserError(f"{origin}: {_unknown_key(_first_leaf(key, value))}")
        if not dataclasses.is_dataclass(hint):
            settings[key] = _Setting(value, origin)
        elif isinstance(value, dict) or value is None:  # None: a section header with nothing under it
            settings.update(_flatten(value or {}, typing.cast(type, hint), f"{key}.", origin))
        else:
            raise UserError(f"{origin}: {key}: a section of settings, found {_show(value)}")
    return settings


def _merge(settings: dict[str, _Setting], newer: dict[str, _Setting]) -> None:
    """Newer settings replace older ones; a free-form mapping keeps the older one's other entries."""
    for key, setting in newer.items():
        older = settings.get(key)
        if older is not None and isinstance(older.value, dict) and isinstance(setting.value, dict):
            setting = _Setting({**older.value, **setting.value}, setting.origin)
        settings[key] = setting


# ---------------------------------------------------------------- unknown keys


def _first_leaf(key: str, value: Any) -> str:
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def _unknown_key(key: str) -> str:
    parts = key.lstrip("+").split(".")
    suffixes = [".".join(parts[i:]) for i in range(len(parts))]
    for suffix in suffixes:
        if suffix in _RENAMED:
            return f"unknown key {key!r}; use {_RENAMED[suffix]}"
    if suffixes[-1] in _NOT_SUPPORTED:
        return f"unknown key {key!r}; {_NOT_SUPPORTED[suffixes[-1]]}"
    return f"unknown key {key!r}; the nearest known key is {_nearest(suffixes)!r}"


def _nearest(suffixes: Sequence[str]) -> str:
    """The known key that ends a longer path (verl's), else one of the same last name, else of the closest spelling."""
    known = dotted_keys()
    for suffix in suffixes:
        if suffix in known:
            return suffix
    same_name = [key for key in known if key.rsplit(".", 1)[-1] == suffixes[-1]]
    return difflib.get_close_matches(suffixes[0], same_name or known, n=1, cutoff=0.0)[0]


# ---------------------------------------------------------------- types


def _leaf_hints(cls: type = Config, prefix: str = "") -> dict[str, Any]:
    """{dotted key: its type}."""
    out: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            out |= _leaf_hints(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = hint
    return out


def _build(cls: type, prefix: str, settings: Mapping[str, _Setting], default: Any, path: str) -> Any:
    """An instance of a section; what is not set comes from `default` (an instance, or None: the class's own)."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        key, hint = f"{prefix}{field.name}", hints[field.name]
        fallback = getattr(default, field.name) if default is not None else _field_default(field)
        if dataclasses.is_dataclass(hint):
            start = None if fallback is dataclasses.MISSING else fallback
            values[field.name] = _build(typing.cast(type, hint), f"{key}.", settings, start, path)
        elif key in settings:
            values[field.name] = _convert_setting(key, settings[key], hint)
        elif fallback is dataclasses.MISSING:
            raise UserError(f"{path}: required key {key!r} is missing ({_describe(hint)})")
        else:
            values[field.name] = fallback
    return cls(**values)


def _layout_like_the_actors(
    role: str, actor: MegatronConfig, settings: Mapping[str, _Setting], path: str
) -> MegatronConfig:
    """A role's layout: what is not set is the actor's, save what belongs to a split that the role does not have."""
    own: MegatronConfig = _build(MegatronConfig, f"{role}.megatron.", settings, actor, path)
    start = dataclasses.replace(actor)
    if own.tensor_model_parallel_size == 1:
        start.sequence_parallel = False
    if own.pipeline_model_parallel_size != actor.pipeline_model_parallel_size:
        start.virtual_pipeline_model_parallel_size = None
        start.num_layers_in_first_pipeline_stage = start.num_layers_in_last_pipeline_stage = None
    layout: MegatronConfig = _build(MegatronConfig, f"{role}.megatron.", settings, start, path)
    return layout


def _field_default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _convert_setting(key: str, setting: _Setting, hint: Any) -> Any:
    try:
        return _convert(setting.value, hint)
    except TypeError as error:
        raise UserError(f"{setting.origin}: {key}: found {_show(setting.value)}, expected {_describe(hint)}") from error


def _convert(value: Any, hint: Any) -> Any:
    """`value` as `hint` says; TypeError where it is something else. No guessing: only int -> float,
    one string -> list of strings, and list -> tuple are converted."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else _convert(value, next(arg for arg in args if arg is not type(None)))
    if origin is Literal:
        ok = value in args
    elif origin is list:
        items = [value] if isinstance(value, str) else value
        return [_convert(item, args[0]) for item in _expect(items, list)]
    elif origin is tuple:
        if len(_expect(value, list)) != len(args):
            raise TypeError
        return tuple(_convert(item, arg) for item, arg in zip(value, args, strict=True))
    elif origin is dict:
        ok = isinstance(value, dict) and all(isinstance(name, str) for name in value)
    elif hint is float:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        value = float(value) if ok else value
    else:
        assert hint in (int, bool, str), f"schema.py has a type that load.py does not know: {hint}"
        ok = type(value) is hint
    if not ok:
        raise TypeError
    return value


def _expect(value: Any, cls: type) -> Any:
    if not isinstance(value, cls):
        raise TypeError
    return value


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return f"{_describe(next(arg for arg in args if arg is not type(None)))} or null"
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is list:
        return f"a list, each entry {_describe(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}, each entry {_describe(args[0])}"
    names = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}
    return "a mapping" if origin is dict else names[hint]


def _show(value: Any) -> str:
    """The value as a user would write it, and its kind where that is not plain to see."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kind = next((name for cls, name in ((str, "string"), (dict, "mapping"), (list, "list")) if type(value) is cls), "")
    text = repr(value)
    return (f"the {kind} " if kind else "") + (text if len(text) <= 80 else text[:77] + "...")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
