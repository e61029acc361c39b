"""Directories of training checkpoints: commit, list, verify, quarantine and delete. The content of
the files is decided in training_state.py and training_tensors.py.

A checkpoint is written to global_step_N.tmp. Its last file, manifest.json, lists every other file
with its size and SHA-256. The directory is then renamed to global_step_N. Directories with another
name or without a manifest are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlhf_mc import durable, json_files
from rlhf_mc.config.errors import UserError, error_reason, is_shortage
from rlhf_mc.runtime.work import working

MANIFEST = "manifest.json"
FORMAT = 3
"""Version of the checkpoint format."""
_NAME = re.compile(r"global_step_(\d+)")
QUARANTINED = ".quarantined"
"""Suffix of a quarantined directory's name, followed by a number."""
_AGAIN_SECONDS = 1.0
T = TypeVar("T")


class CorruptCheckpoint(UserError):
    """A checkpoint whose files are not those that were written."""


@dataclass(frozen=True)
class FileDigest:
    """Size and SHA-256 of a file, as the manifest lists them."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json, without its own checksum."""

    step: int
    run_id: str
    """Run that wrote the checkpoint."""
    files: dict[str, FileDigest]


def final_path(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint of a step."""
    return root / f"global_step_{step}"


def staging_path(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint of a step while it is written."""
    return root / f"global_step_{step}.tmp"


def steps_with_checkpoint(root: Path) -> list[int]:
    """Return the steps whose directory has a manifest of that step, ascending. Their files are not
    verified."""
    return sorted(step for path, step in _named(root) if _why_ignored(path, step) is None)


def ignored(root: Path) -> list[str]:
    """Return one line for each directory that has a checkpoint's name, but no checkpoint of that
    step."""
    reasons = ((path, _why_ignored(path, step)) for path, step in sorted(_named(root)))
    return [f"{path} {reason}; it is ignored" for path, reason in reasons if reason]


def check_names(root: Path) -> None:
    """Raise UserError if a checkpoint whose directory is not named by its step is later than all
    that are: a run would repeat trained steps, or begin anew."""
    newest = max(steps_with_checkpoint(root), default=-1)
    for path, step in sorted(_named(root)):
        named_step = _recorded_step(path) if _why_ignored(path, step) else None
        if named_step is not None and named_step > newest:
            raise UserError(
                f"{path} is a checkpoint of step {named_step}, and no later one is named by its "
                f"step; rename it to {final_path(root, named_step).name}, or move it to another "
                "directory"
            )


def _named(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield each directory that is named like a checkpoint, with the step of its name."""
    matches = ((path, _NAME.fullmatch(path.name)) for path in root.glob("global_step_*"))
    return ((path, int(match[1])) for path, match in matches if match)


def _why_ignored(path: Path, step: int) -> str | None:
    if not (path / MANIFEST).is_file():
        return f"has no {MANIFEST}"
    if (recorded_step := _recorded_step(path)) not in (None, step):
        return f"is a checkpoint of step {recorded_step}"
    right = final_path(path.parent, step).name
    return None if path.name == right else f"is not named {right}"


def _recorded_step(path: Path) -> int | None:
    """Return the step of a checkpoint's manifest; None if it is missing, corrupt or of a newer
    program, which is reported if the checkpoint is chosen."""
    try:
        return read_manifest(path).step
    except UserError:
        return None


# ---------------------------------------------------------------- writing


def begin(root: Path, step: int) -> Path:
    """Make an empty staging directory, without the files of an earlier attempt. Return it."""
    path = staging_path(root, step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def write_json(path: Path, content: Any) -> FileDigest:
    """Write the content as JSON and sync the file. Return its digest."""
    data = (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
    return write_bytes(path, data)


def write_bytes(path: Path, data: bytes) -> FileDigest:
    """Write and sync the file. Return its digest."""
    durable.write(path, data)
    return FileDigest(len(data), hashlib.sha256(data).hexdigest())


def digest_file(path: Path) -> FileDigest:
    """Return the digest of a file. hashlib releases the interpreter lock meanwhile."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileDigest(file.tell(), digest.hexdigest())


def commit(root: Path, step: int, files: Mapping[str, FileDigest], run_id: str) -> None:
    """Write the manifest and rename the staging directory. One rank calls it, after all ranks have
    synced their files."""
    path = staging_path(root, step)
    for name, file in files.items():
        num_bytes = (path / name).stat().st_size if (path / name).is_file() else None
        if num_bytes != file.num_bytes:
            raise UserError(
                f"{path / name}: written by another rank, but here it "
                f"{'is missing' if num_bytes is None else 'differs'}; trainer.default_local_dir "
                "must be one directory that all nodes share"
            )
    listed = {
        name: {"bytes": file.num_bytes, "sha256": file.sha256}
        for name, file in sorted(files.items())
    }
    body = {"format": FORMAT, "step": step, "run_id": run_id, "files": listed}
    write_json(path / MANIFEST, {**body, "sha256": _checksum(body)})
    durable.sync(path)
    if final_path(root, step).exists():  # not of this run, which resumes from the newest intact one
        quarantine_step(root, step)
    os.rename(path, final_path(root, step))
    durable.sync(root)


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def remove(root: Path, step: int) -> None:
    """Delete a checkpoint, its manifest first."""
    path = final_path(root, step)
    with contextlib.suppress(FileNotFoundError):
        (path / MANIFEST).unlink()
    shutil.rmtree(path, ignore_errors=True)


def discard(root: Path, step: int) -> None:
    """Delete the staging directory of a checkpoint that could not be written."""
    shutil.rmtree(staging_path(root, step), ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Delete the staging directories of an earlier process."""
    for path in root.glob("global_step_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def quarantine_step(root: Path, step: int) -> Path:
    """Quarantine the checkpoint of a step. Return its new name."""
    return quarantine(final_path(root, step))


def quarantine(path: Path) -> Path:
    """Rename a file or directory to <name>.quarantined<n>, which is ignored. Return its new
    name."""
    names = (path.with_name(f"{path.name}{QUARANTINED}{n}") for n in itertools.count(1))
    new = next(name for name in names if not name.exists())
    os.rename(path, new)
    return new


def free_name(path: Path) -> Path:
    """Return the path or, if it exists, the first free path with a number appended."""
    names = itertools.chain(
        [path], (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    )
    return next(name for name in names if not os.path.lexists(name))


def to_remove(
    steps: Sequence[int], keep_last: int | None, others: Collection[int | None]
) -> list[int]:
    """Return the steps of complete checkpoints to delete: all but the last `keep_last` (None: keep
    all) and the others to keep."""
    if keep_last is None:
        return []
    return [step for step in sorted(steps)[:-keep_last] if step not in others]


# ---------------------------------------------------------------- reading


def read_manifest(path: Path) -> Manifest:
    """Return a checkpoint's manifest. Raise UserError if it is missing or of another version,
    CorruptCheckpoint if it is not the one that was written."""
    try:
        if not retry_once(path.is_dir):
            raise UserError(f"{path}: no such directory")
        if not retry_once((path / MANIFEST).is_file):
            raise UserError(
                f"{path}: not a complete training checkpoint ({MANIFEST} is "
                f"missing){_other_format(path)}"
            )
        content = retry_once(lambda: json_files.read(path / MANIFEST))
        version = content["format"]
        checksum = content.pop("sha256")
        if isinstance(version, int) and version != FORMAT:
            raise UserError(
                f"{path}: written by another version of the program (format {version}, not "
                f"{FORMAT})"
            )
        if checksum != _checksum(content):
            raise ValueError("its checksum is wrong")
        files = {
            name: FileDigest(int(digest["bytes"]), str(digest["sha256"]))
            for name, digest in content["files"].items()
        }
        if any(name != os.path.basename(name) for name in files):
            raise ValueError("a file outside the directory is named")
        return Manifest(int(content["step"]), str(content["run_id"]), files)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path / MANIFEST}: corrupt ({error})") from error
    except OSError as error:
        raise _unreadable(path / MANIFEST, error) from error


def retry_once(read: Callable[[], T]) -> T:
    """Return the result of `read`, which is called a second time after an OSError: a checkpoint is
    not corrupt because a file server fails over."""
    try:
        return read()
    except OSError:
        time.sleep(_AGAIN_SECONDS)
        return read()


def _other_format(path: Path) -> str:
    """Return a hint to the right setting if the directory is a checkpoint of another format, else
    an empty string."""
    if (path / "metadata.json").is_file():
        return "; Megatron checkpoints of weights alone are given as model.dist_checkpointing_path"
    if (path / "actor").is_dir():
        return (
            "; verl's checkpoints are not read: export the weights with verl.model_merger, and "
            "give them as model.path"
        )
    if (path / "config.json").is_file():
        return "; Hugging Face checkpoints are given as model.path"
    return ""


def verify(path: Path) -> None:
    """Read every file of the checkpoint once, spread over the ranks. Raise CorruptCheckpoint on
    every rank if the size or checksum of a file differs from the manifest. Every rank must call
    it."""
    # here, since launch/progress.py lists checkpoints without importing torch
    import torch.distributed as dist

    from rlhf_mc.topology.consensus import on_every_rank

    rank = dist.get_rank()
    world = dist.get_world_size()
    files = on_every_rank(lambda: read_manifest(path).files)
    by_size = sorted(files, key=lambda name: (-files[name].num_bytes, name))
    on_every_rank(lambda: _check(path, {name: files[name] for name in by_size[rank::world]}))


def _check(directory: Path, files: Mapping[str, FileDigest]) -> None:
    num_bytes = sum(expected.num_bytes for expected in files.values())
    with working("verifying", num_bytes / 2**20, "MiB") as work:
        for name, expected in files.items():
            _check_file(directory / name, expected)
            work.advance(expected.num_bytes / 2**20)


def _check_file(path: Path, expected: FileDigest) -> None:
    try:
        status = retry_once(path.stat)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpoint(f"{path}: corrupt (not a file)")
        size = status.st_size
        if size != expected.num_bytes:
            raise CorruptCheckpoint(
                f"{path}: corrupt ({size} bytes instead of {expected.num_bytes})"
            )
        if retry_once(lambda: digest_file(path)).sha256 != expected.sha256:
            raise CorruptCheckpoint(f"{path}: corrupt (its checksum differs from the manifest)")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    """Return CorruptCheckpoint, or UserError if this process is out of descriptors or memory: the
    file may be intact."""
    return (UserError if is_shortage(error) else CorruptCheckpoint)(
        f"{path}: cannot be read ({error_reason(error)})"
    )


def read_file(path: Path) -> bytes:
    """Return a file's content. Raise the error of `_unreadable` if it cannot be read."""
    try:
        return retry_once(lambda: json_files.read_bytes(path))
    except OSError as error:
        raise _unreadable(path, error) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a verified JSON file. Raise CorruptCheckpoint if it is no JSON
    object."""
    data = read_file(path)
    try:
        content = json_files.parse(data)
    except ValueError as error:
        raise CorruptCheckpoint(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise CorruptCheckpoint(f"{path}: corrupt (no JSON object)")
    return content
