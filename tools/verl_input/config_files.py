"""verl's YAML files, composed of others as Hydra does: the `defaults:` of each, with config groups
and packages.

A file that is not there is left out if it is verl's own, whose defaults rlhf_mc/verl/conversion.py
knows.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_mc.config.errors import UserError, error_reason
from rlhf_mc.config.load import flatten_settings
from rlhf_mc.config.yaml_reader import parse_yaml, read_limited

_RUNS = ("ppo", "dapo", "one_step_off_ppo", "fully_async_ppo")
BASES = tuple(f"{run}{engine}trainer" for run in _RUNS for engine in ("_", "_megatron_"))
"""verl's own configs, and those of recipe/dapo, which have the same defaults. Those of asynchronous
programs differ by rlhf_mc/verl/asynchronous.py."""
_OF_VERL = re.compile(
    r"(?:actor|critic|ref)/(?:\w+_)?(?:actor|critic|ref)|model_engine/\w+|data/legacy_data|rollout/rollout"
    r"|model/hf_model|reward/reward|algorithm/rollout_correction|distillation/distillation|profiler/profiler"
    r"|transfer_queue/transfer_queue|legacy_reward_impl|(?:optim|engine)/\w+"
)
"""Parts of verl's own configs."""
_PACKAGE = re.compile(r"(?m)\A(?:#.*\n|\s*\n)*?#\s*@package\s+(\S+)")
_CHOICE = re.compile(r"\$\{(\w+)\}")
_MOST_FILES = 100


def read_text(path: str) -> str:
    """Return the text of a config or script. Raise UserError if it is none."""
    shown = path if len(path) < 300 else f"{path[:300]}..."
    try:
        content = read_limited(path)
    except OSError as error:
        raise UserError(f"{shown}: {error_reason(error)}") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file") from error


@dataclass
class Composition:
    """Settings of a YAML file and of the files in its `defaults:`."""

    choices: dict[str, str] = field(default_factory=dict)
    """Chosen file by config group, as on verl's command line: `model_engine`,
    `actor@actor_rollout_ref.actor`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Value by dotted key. An empty section is a setting."""
    bases: list[str] = field(default_factory=list)
    """Configs of BASES that are not there."""
    _directory: Path = Path()
    _num_files: int = 0

    def read(self, path: str) -> None:
        """Read a file. Raise UserError for a mistake in it, or a part that is not there."""
        self._directory = Path(path).parent
        self._add_file(Path(path), "", "", "", 0)

    def engine(self) -> str | None:
        """Return the engine of verl's own configs: megatron or fsdp; None: none of them is used."""
        names = [*self.bases, *filter(None, [self.choices.get("model_engine")])]
        if not names:
            return None
        return "megatron" if "megatron" in names[-1] else "fsdp"

    def _add(self, name: str, package: str, outer: str | None, by: str, depth: int) -> None:
        """Add the file of a config group by its name, such as actor/dp_actor. outer: the package
        relative to which the file's header (# @package) is read; None: the header is ignored."""
        path = self._directory / f"{name}.yaml"
        if os.path.isfile(path):
            self._add_file(path, posixpath.dirname(name), package, outer, depth)
        elif name in BASES:
            self.bases.append(name)
        elif not _OF_VERL.fullmatch(name):
            raise UserError(
                f"{by}: defaults: {name}.yaml is not in {self._directory}; put its settings into "
                "this file"
            )

    def _add_file(
        self, path: Path, group: str, package: str, outer: str | None, depth: int
    ) -> None:
        self._num_files += 1
        if self._num_files > _MOST_FILES:
            raise UserError(
                f"{path}: defaults: more than {_MOST_FILES} files; does one name itself?"
            )
        text = read_text(str(path))
        tree = parse_yaml(text, str(path)) if text.strip() else {}
        if tree is None and depth:
            tree = {}
        if not isinstance(tree, dict):
            raise UserError(
                f"{path}: expected sections (data:, actor_rollout_ref:, ...), found {tree!r}"[:200]
            )
        if outer is not None and (header := _PACKAGE.match(text)) and header[1] != "_group_":
            package = _inside(outer, header[1])
        defaults = tree.pop("defaults", None) or []
        entries = list(defaults) if isinstance(defaults, list) else [defaults]
        entries += ["_self_"] * ("_self_" not in entries)
        for key, name in _pairs(entries):
            if key.startswith("override "):
                self.choices.setdefault(key.removeprefix("override ").strip(), str(name))
        for entry in entries:
            if entry == "_self_":
                self._merge(tree, package)
                continue
            if isinstance(entry, str):
                name, _, to = entry.partition("@")
                self._add(
                    _join(group, name),
                    _inside(package, to),
                    None if to else package,
                    str(path),
                    depth + 1,
                )
                continue
            if not isinstance(entry, dict) or len(entry) != 1:
                raise UserError(
                    f"{path}: defaults: expected a name, or `group: name`, found {entry!r}"[:200]
                )
            ((key, value),) = _pairs([entry])
            if not key.startswith("override "):
                self._add_choice(key, value, group, package, str(path), depth)

    def _add_choice(
        self, key: str, value: Any, group: str, package: str, by: str, depth: int
    ) -> None:
        """Add the files of `group@package: name`, or of a list of names."""
        inner, separator, to = key.removeprefix("optional ").strip().partition("@")
        outer = None if separator else package
        package = _inside(package, to if separator else inner.strip("./").replace("/", "."))
        choice = _join(group, inner) + (f"@{package}" if separator else "")
        name = self.choices.get(choice, value)
        if isinstance(name, str):
            self.choices[choice] = name
        for item in name if isinstance(name, list) else [name]:
            if item is None or item == "null":
                continue
            chosen = _CHOICE.sub(lambda match: self.choices.get(match[1], match[0]), str(item))
            file = _join(group, f"{inner}/{chosen}")
            if not key.startswith("optional ") or os.path.isfile(self._directory / f"{file}.yaml"):
                self._add(file, package, outer, by, depth + 1)

    def _merge(self, tree: Mapping[str, Any], package: str) -> None:
        """Merge the settings of a file over the present ones."""
        sections = {above for key in self.settings for above in _above(key)}
        for name, value in flatten_settings(tree):
            key = f"{package}.{name}" if package else name
            if key in sections and value == {}:
                continue
            for above in _above(key):
                self.settings.pop(above, None)
            for inner in (
                [other for other in self.settings if other.startswith(f"{key}.")]
                if key in sections
                else ()
            ):
                del self.settings[inner]
            self.settings[key] = value


def _above(key: str) -> Iterator[str]:
    """Yield the sections that a key is in."""
    parts = key.split(".")
    return (".".join(parts[:number]) for number in range(1, len(parts)))


def _pairs(entries: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of the entries that are mappings."""
    for entry in entries:
        if isinstance(entry, dict):
            yield from ((str(key), value) for key, value in entry.items())


def _join(group: str, name: str) -> str:
    """Return a name relative to a group; one that begins with / is not."""
    return posixpath.normpath(posixpath.join(group, name)).removesuffix(".yaml").lstrip("/")


def _inside(package: str, inner: str) -> str:
    """Return a package inside another; _global_ is not inside."""
    if inner.startswith("_global_"):
        return inner.removeprefix("_global_").lstrip(".")
    parts = [part for part in (package, "" if inner in ("_here_", "_group_") else inner) if part]
    return ".".join(parts)
