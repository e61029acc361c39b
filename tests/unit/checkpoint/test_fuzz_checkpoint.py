"""Corrupt training checkpoints: files truncated, changed, deleted or swapped, also before the
manifest was written, so that the checksums match. Each difference is detected and reported in one
line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from fuzzing import corruptions, examples, success_or_user_error
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from rlhf_mc.checkpoint import directory
from rlhf_mc.checkpoint.dcp_metadata import read_metadata
from rlhf_mc.checkpoint.training_state import (
    CONFIG,
    STATE,
    reading_state,
    stored_config,
    stored_origin,
)
from rlhf_mc.config.errors import UserError

pytestmark = pytest.mark.slow

STEP = 3
METADATA = ".metadata"
FILES = ("__0_0.distcp", METADATA, STATE, CONFIG)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def no_retry_delay() -> Iterator[None]:
    """Retry failed reads without a delay."""
    seconds, directory._AGAIN_SECONDS = directory._AGAIN_SECONDS, 0.0
    yield
    directory._AGAIN_SECONDS = seconds


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def intact() -> dict[str, bytes]:
    """Return the files of a checkpoint, without its manifest."""
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2, 3]), [])
    state = {
        "step": STEP,
        "loop": {
            "position": {"step": STEP, "accuracy": 0.5},
            "kl_controller": {},
            "consecutive_skipped_updates": {},
        },
        "models": {"actor": {"shape": {"num_layers": 2}, "dtype": "float32", "progress": {}}},
        "versions": {},
        "inputs": {},
        "run_id": "first",
    }
    config = {
        "trainer": {"resume_from_path": None, "seed": 1},
        "data": {"train_files": ["a.parquet"]},
    }
    return {
        "__0_0.distcp": bytes(range(256)) * 8,
        METADATA: pickle.dumps(Metadata({"actor.weight.x": tensor})),
        STATE: json.dumps(state).encode(),
        CONFIG: yaml.safe_dump(config).encode(),
    }


def write_checkpoint(root: Path, files: dict[str, bytes]) -> Path:
    """Write a checkpoint of these files with a matching manifest. Return its directory."""
    for path in root.iterdir():
        shutil.rmtree(path)
    path = directory.begin(root, STEP)
    sums = {name: directory.write_bytes(path / name, data) for name, data in files.items()}
    directory.commit(root, STEP, sums, "first")
    return directory.final_path(root, STEP)


def read(path: Path) -> None:
    """Read everything that a resume reads before the tensors."""
    directory.verify(path)
    with reading_state(path):
        state = directory.read_json(path / STATE)
        state["loop"], state["models"]
        stored_origin(path)
    stored_config(path)
    read_metadata(path / METADATA)


def test_intact_checkpoint_can_be_read(root: Path, intact: dict[str, bytes]) -> None:
    read(write_checkpoint(root, intact))


@examples(200)
@given(
    name=st.sampled_from(FILES),
    kind=st.sampled_from(["corrupt", "corrupt", "corrupt", "delete", "directory", "swap", "link"]),
    corrupt=corruptions(),
)
def test_differences_from_the_manifest_are_detected(
    root: Path, intact: dict[str, bytes], name: str, kind: str, corrupt: Callable[[bytes], bytes]
) -> None:
    path = write_checkpoint(root, intact)
    file = path / name
    changed = True
    if kind == "corrupt":
        file.write_bytes(corrupt(intact[name]))
        changed = corrupt(intact[name]) != intact[name]
    elif kind == "swap":
        other = path / FILES[FILES.index(name) - 1]
        os.rename(other, path / "x")
        os.rename(file, other)
        os.rename(path / "x", file)
    else:
        file.unlink()
        if kind == "directory":
            file.mkdir()
        elif kind == "link":
            file.symlink_to(path)
    try:
        read(path)
        assert not changed
    except directory.CorruptCheckpoint as error:
        assert changed and "\n" not in str(error)


@examples(150)
@given(corrupt=corruptions())
def test_corrupt_manifests(
    root: Path, intact: dict[str, bytes], corrupt: Callable[[bytes], bytes]
) -> None:
    path = write_checkpoint(root, intact)
    manifest = path / directory.MANIFEST
    before = json.loads(manifest.read_bytes())
    manifest.write_bytes(corrupt(manifest.read_bytes()))
    try:
        read(path)
        assert json.loads(manifest.read_bytes()) == before
    except UserError as error:
        assert "\n" not in str(error) and str(path) in str(error)


@examples(150)
@given(name=st.sampled_from([METADATA, STATE, CONFIG]), corrupt=corruptions())
def test_files_corrupted_before_their_checksums(
    root: Path, intact: dict[str, bytes], name: str, corrupt: Callable[[bytes], bytes]
) -> None:
    path = write_checkpoint(root, {**intact, name: corrupt(intact[name])})
    success_or_user_error(lambda: read(path))
