"""From YAML files and command-line overrides to a typed, checked Config, and back to plain values.

The settings are documented in schema.py. Checks of values are in checks.py.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.fields import (
    convert,
    describe,
    explain_mistake,
    field_types,
    leaf_hints,
    named_section,
    shortened,
    show,
)
from rlhf_mc.config.masking import masked_argument
from rlhf_mc.config.model_schema import (
    UNSPLIT,
    FrozenMegatronConfig,
    FsdpConfig,
    MegatronConfig,
)
from rlhf_mc.config.schema import Config, roles
from rlhf_mc.config.unknown import Hint, explain
from rlhf_mc.config.yaml_reader import parse_yaml, read_limited

VERL_WRAPPER = "actor_rollout_ref"
WRAPPED_SECTIONS = ("model", "actor", "ref", "rollout")
"""Sections that may be inside VERL_WRAPPER."""
_DEEPEST_BASE = 20
_DEEPEST_KEY = 16


class _Setting(NamedTuple):
    value: Any
    origin: str
    """The file or override that set it, for messages."""


def load_config(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    hint: Hint = lambda key: None,
) -> Config:
    """Return the config of a YAML file, the files that it inherits through `base:`, and
    `section.key=value` overrides, whose values are YAML. Later ones take precedence: bases in their
    order, the file itself, overrides in their order. Raise UserError, with a message of one line,
    for a mistake in any of them.

    source: the file; or a mapping of sections, as a file contains it, without `base`. hint: for the
    message on unknown keys; verl/table.py has one for verl's."""
    settings = _read(source, overrides, hint)
    path = "config" if isinstance(source, Mapping) else str(source)
    config = _build(Config, "", settings, None, path)
    assert isinstance(config, Config)
    for role, section in roles(config).items():
        if role != "actor":
            cls = type(section.megatron)
            prefix = f"{role}.fsdp_config."
            section.fsdp_config = _build(
                FsdpConfig, prefix, settings, config.actor.fsdp_config, path
            )
            if f"{role}.strategy" not in settings:
                section.strategy = config.actor.strategy
            actor = inherited_by(section.strategy, config)
            layout = _build(cls, f"{role}.megatron.", settings, actor, path)
            section.megatron = _build(
                cls, f"{role}.megatron.", settings, inherited_layout(layout, actor), path
            )
    return config


def read_settings(source: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings, by dotted key, that `load_config` of these arguments finds in files and
    overrides: without defaults."""
    return {
        key: setting.value for key, setting in _read(source, overrides, lambda key: None).items()
    }


def nest_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key as the mapping of sections that a file contains."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, name = key.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return tree


def flatten_settings(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of nested sections with its dotted key. An empty section is a leaf."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def to_dict(cfg: Config) -> dict[str, Any]:
    """Return the resolved config as plain dicts, lists and scalars. The output of `yaml.safe_dump`
    for it can be loaded."""
    return typing.cast(dict[str, Any], _plain(dataclasses.asdict(cfg)))


def dotted_keys() -> list[str]:
    """Return every setting as section.key, in the order of schema.py. NAME is the name of a named
    section."""
    return list(leaf_hints())


def mapping_keys() -> list[str]:
    """Return the settings that are free-form mappings."""
    return [key for key, hint in leaf_hints().items() if typing.get_origin(hint) is dict]


# ---------------------------------------------------------------- reading


def value_problem(key: str, value: Any) -> str | None:
    """Return why a setting cannot have this value, or None."""
    hint = leaf_hints()[key]
    try:
        convert(value, hint)
    except TypeError:
        return f"found {show(value)}, expected {describe(hint)}"
    return None


def _read(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str], hint: Hint
) -> dict[str, _Setting]:
    reading = _Reading()
    if isinstance(source, str | Path):
        settings = reading.file(Path(source), ())
    else:
        settings = reading.flatten(source, "config")
    for override in overrides:
        _merge(settings, reading.override(override))
    if reading.unknown:
        raise UserError(explain(reading.unknown, dotted_keys(), hint))
    return settings


class _Reading:
    """Files and overrides of one config, and their unknown keys, which one message lists."""

    def __init__(self) -> None:
        self.unknown: list[tuple[str, str]] = []
        """(file or override, key)."""
        self._files: dict[Path, dict[str, _Setting]] = {}
        """Settings of the files that were read so far, with the settings of their bases: files may
        share a base."""

    def file(self, path: Path, parents: tuple[Path, ...]) -> dict[str, _Setting]:
        """Return the settings of a file merged into the settings of its bases. parents: the chain
        of files that inherit from it."""
        by = f" (base of {parents[-1]})" if parents else ""
        real = _resolved(path)
        if real in map(_resolved, parents):
            raise UserError(
                f"{path}: base: is circular: {' -> '.join(str(p) for p in (*parents, path))}"
            )
        if len(parents) > _DEEPEST_BASE:
            raise UserError(f"{path}: base: more than {_DEEPEST_BASE} files deep")
        if real not in self._files:
            tree = _read_tree(path, by)
            bases = tree.pop("base", [])
            bases = [bases] if isinstance(bases, str) else bases
            if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
                raise UserError(
                    f"{path}: base: expected a file name or a list of them, found {show(bases)}"
                )
            settings: dict[str, _Setting] = {}
            for base in bases:
                _merge(settings, self.file(path.parent / base, (*parents, path)))
            _merge(settings, self._sections(tree, str(path)))
            self._files[real] = settings
        return dict(self._files[real])

    def override(self, override: str) -> dict[str, _Setting]:
        """Return the setting of an override `section.key=value`."""
        key, equals, text = override.partition("=")
        origin = f"override {shortened(repr(masked_argument(override, dotted_keys())))}"
        if not equals or not key.strip():
            raise UserError(f"{origin}: expected section.key=value")
        parts = key.strip().split(".")
        if len(parts) > _DEEPEST_KEY:
            raise UserError(
                f"{origin}: a key of {len(parts)} parts; no setting has more than {_DEEPEST_KEY}"
            )
        value = parse_yaml(text, origin)
        for part in reversed(parts):
            value = {part: value}
        return self._sections(value, origin)

    def _sections(self, tree: Mapping[Any, Any], origin: str) -> dict[str, _Setting]:
        """Return the top level of a file or override as {dotted key: setting}. Some sections may be
        inside actor_rollout_ref, as verl has them."""
        wrapped = tree.get(VERL_WRAPPER)
        if not isinstance(wrapped, dict):
            return self.flatten(tree, origin)
        settings = self.flatten({name: tree[name] for name in tree if name != VERL_WRAPPER}, origin)
        known = {name: value for name, value in wrapped.items() if name in WRAPPED_SECTIONS}
        for key, setting in self.flatten(known, origin, wrapper=f"{VERL_WRAPPER}.").items():
            if key in settings:
                raise UserError(f"{origin}: {key} is given twice, with and without {VERL_WRAPPER}")
            settings[key] = setting
        others = {name: value for name, value in wrapped.items() if name not in known}
        self.unknown += [(origin, leaf) for leaf, _ in flatten_settings(others, f"{VERL_WRAPPER}.")]
        return settings

    def flatten(
        self,
        tree: Mapping[Any, Any],
        origin: str,
        cls: type = Config,
        prefix: str = "",
        wrapper: str = "",
    ) -> dict[str, _Setting]:
        """Return a tree of sections as {dotted key: setting}. Record the keys that schema.py does
        not have, after `wrapper`."""
        hints = field_types(cls)
        settings: dict[str, _Setting] = {}
        for name, value in tree.items():
            key = f"{prefix}{name}"
            hint = hints.get(name)
            if hint is None:
                self.unknown += [
                    (origin, leaf) for leaf, _ in flatten_settings({f"{wrapper}{key}": value})
                ]
            elif (named := named_section(hint)) is not None:
                for inner, section in self._names(key, value, origin):
                    settings |= self.flatten(section, origin, named, f"{key}.{inner}.", wrapper)
            elif not dataclasses.is_dataclass(hint):
                settings[key] = _Setting(value, origin)
            elif isinstance(value, dict) or value is None:  # None: an empty section
                settings |= self.flatten(
                    value or {}, origin, typing.cast(type, hint), f"{key}.", wrapper
                )
            else:
                raise UserError(
                    f"{origin}: {key}: expected a section of settings, found {show(value)}"
                )
        return settings

    def _names(self, key: str, value: Any, origin: str) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yield the named sections of a mapping."""
        if not isinstance(value, dict | None):
            raise UserError(f"{origin}: {key}: expected sections by name, found {show(value)}")
        for name, section in (value or {}).items():
            if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z]\w{0,60}", name, re.ASCII)):
                raise UserError(
                    f"{origin}: {key}: the name {name!r} is not of letters, digits and _, a letter "
                    "first"
                )
            if not isinstance(section, dict | None):
                raise UserError(
                    f"{origin}: {key}.{name}: expected a section of settings, found {show(section)}"
                )
            yield name, section or {}


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError):  # too long, a null character, a circle of links
        return path


def _read_tree(path: Path, by: str) -> dict[Any, Any]:
    """Return the top level of a file. by: words for messages that name the file that inherits from
    it."""
    try:
        if not path.is_file():
            what = "not a file" if path.exists() else "no such file"
            raise UserError(f"config file {path}: {what}{by}" + explain_mistake(str(path)))
        text = read_limited(path)
    except OSError as error:
        raise UserError(f"config file {path}: cannot be read ({error.strerror}){by}") from error
    tree = parse_yaml(text, str(path))
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise UserError(
            f"{path}: expected sections (data:, model:, ...) at the top level, found {show(tree)}"
        )
    return tree


def _merge(settings: dict[str, _Setting], newer: dict[str, _Setting]) -> None:
    """Replace settings by newer ones. Free-form mappings are merged."""
    for key, setting in newer.items():
        older = settings.get(key)
        if older is not None and isinstance(older.value, dict) and isinstance(setting.value, dict):
            setting = _Setting({**older.value, **setting.value}, setting.origin)
        settings[key] = setting


def _build(
    cls: type, prefix: str, settings: Mapping[str, _Setting], default: Any, path: str
) -> Any:
    """Return an instance of a section. Settings that are left out are taken from `default`; None:
    from the class."""
    hints = field_types(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        hint = hints[field.name]
        fallback = getattr(default, field.name) if default is not None else _field_default(field)
        if dataclasses.is_dataclass(hint):
            start = None if fallback is dataclasses.MISSING else fallback
            values[field.name] = _build(typing.cast(type, hint), f"{key}.", settings, start, path)
        elif (named := named_section(hint)) is not None:
            names = dict.fromkeys(
                other.removeprefix(f"{key}.").partition(".")[0]
                for other in settings
                if other.startswith(f"{key}.")
            )
            values[field.name] = {
                name: _build(named, f"{key}.{name}.", settings, None, path) for name in names
            }
        elif key in settings:
            values[field.name] = _convert_setting(key, settings[key], hint)
        elif fallback is dataclasses.MISSING:
            raise UserError(f"{path}: required key {key!r} is missing ({describe(hint)})")
        else:
            values[field.name] = fallback
    return cls(**values)


def inherited_by(strategy: str, cfg: Config) -> MegatronConfig:
    """Return the actor's layout without what a role of this strategy cannot have."""
    actor = cfg.actor.megatron
    alike = strategy == cfg.actor.strategy or strategy == "megatron"
    return actor if alike else dataclasses.replace(actor, **UNSPLIT)


def inherited_layout(layout: FrozenMegatronConfig, actor: MegatronConfig) -> FrozenMegatronConfig:
    """Return the settings that a role with the parallel sizes of `layout` inherits from the actor,
    in layout's class: all but those of a split that the role does not have."""
    inherited = type(layout)(**{name: getattr(actor, name) for name in vars(layout)})
    if layout.tensor_model_parallel_size == 1:
        inherited.sequence_parallel = False
    if layout.context_parallel_size != actor.context_parallel_size:
        inherited.dynamic_context_parallel = False
        inherited.cp_comm_type = None
    if layout.pipeline_model_parallel_size != actor.pipeline_model_parallel_size:
        inherited.virtual_pipeline_model_parallel_size = None
        inherited.num_layers_in_first_pipeline_stage = (
            inherited.num_layers_in_last_pipeline_stage
        ) = None
    return inherited


def _field_default(field: dataclasses.Field[Any]) -> Any:
    return (
        field.default_factory()
        if field.default_factory is not dataclasses.MISSING
        else field.default
    )


def _convert_setting(key: str, setting: _Setting, hint: Any) -> Any:
    try:
        return convert(setting.value, hint)
    except TypeError as error:
        raise UserError(
            f"{setting.origin}: {key}: found {show(setting.value)}, expected {describe(hint)}"
            + explain_mistake(setting.value, hint)
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
