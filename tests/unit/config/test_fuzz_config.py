"""Arbitrary config files and overrides: each gives a valid config or a UserError of one line."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import corruptions, examples, success_or_user_error
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mc.config.checks import check_config
from rlhf_mc.config.load import dotted_keys, load_config, to_dict

pytestmark = pytest.mark.slow

REPO = Path(__file__).resolve().parents[3]
SHIPPED = [path.read_bytes() for path in sorted((REPO / "configs").glob("**/*.yaml"))]
MINIMAL = {
    "data.train_files": "train.parquet",
    "data.train_batch_size": 8,
    "actor.ppo_mini_batch_size": 4,
    "model.path": "model",
    "trainer.default_local_dir": "run",
}

numbers = st.one_of(
    st.integers(-3, 2000),
    st.integers(),
    st.floats(),
    st.sampled_from([2**31, 2**63, 10**30, 10**400, 1e-320, 1e308]),
)
scalars = st.one_of(
    st.none(), st.booleans(), numbers, st.text(max_size=8), st.dates(), st.binary(max_size=4),
    st.sampled_from(["020", "1:30", "yes", "~", "${oc.env:HOME}", "$HOME/x",
                     "a/../b", "model", "k1", "<<", "="]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3),
    max_leaves=8,
)
keys = st.one_of(
    st.sampled_from(dotted_keys()),
    st.sampled_from(
        ["actor", "rollout.name", "actor_rollout_ref.actor.lr", "base", "actor.ppo_epoch", ""]
    ),
    st.text(max_size=12),
)
FRAGMENTS = [
    "&a ", "*a", "[", "]", "{", "}", ": ", "? ", "- ", "<<: ", ", ", "\n", "\n  ", " ", "x", "0",
    "1_", "'", "|\n", "%",
    "!!int ", "!!float ", "!!bool ", "!!null ", "!!set ", "!!omap ", "!!pairs ", "!!timestamp ",
    "!!binary ", "!x ",
    "actor", "data", "train_files", "base", "---", "9" * 400, "1e999", ".inf", "-0x1", "0b",
    "1:2:3", "._", "+.e1",
]  # fmt: skip
raw = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join) | st.text(
    "0123456789abez._-+:,#&*!?|>'\"%@`[]{}<~=\\\n\t \x00é$", max_size=30
)


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "config.yaml"


def check(path: Path, overrides: list[str], world: int) -> None:
    def load() -> Any:
        cfg = load_config(str(path), overrides)
        check_config(cfg, world)
        return cfg

    cfg = success_or_user_error(load)
    if cfg is not None:
        path.write_text(yaml.safe_dump(to_dict(cfg)))
        assert load_config(str(path)) == cfg


def nested(settings: dict[str, Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        inside = tree
        for section in sections:
            if not isinstance(inside.get(section), dict):
                inside[section] = {}
            inside = inside[section]
        inside[name] = value
    return tree


@examples(200)
@given(settings=st.dictionaries(keys, values, max_size=4), world=st.sampled_from([1, 2, 6, 64]))
def test_arbitrary_trees(path: Path, settings: dict[str, Any], world: int) -> None:
    path.write_text(yaml.dump(nested({**MINIMAL, **settings})))
    check(path, [], world)


@examples(200)
@given(
    overrides=st.lists(
        st.tuples(keys, values.map(lambda v: yaml.dump(v, default_flow_style=True)) | raw),
        max_size=3,
    )
)
def test_arbitrary_overrides(path: Path, overrides: list[tuple[str, str]]) -> None:
    path.write_text(yaml.safe_dump(nested(MINIMAL)))
    check(path, [f"{key}={value}" for key, value in overrides], 2)


@examples(150)
@given(override=st.text(max_size=40))
def test_overrides_of_any_text(path: Path, override: str) -> None:
    path.write_text(yaml.safe_dump(nested(MINIMAL)))
    check(path, [override], 2)


@examples(300)
@given(text=st.one_of(raw.map(str.encode), st.binary(max_size=60)))
def test_files_of_any_bytes(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    check(path, [], 2)


@examples(60)
@given(text=st.sampled_from(SHIPPED), corrupt=corruptions())
def test_corrupt_configs(path: Path, text: bytes, corrupt: Any) -> None:
    path.write_bytes(corrupt(text))
    check(path, [], 64)
