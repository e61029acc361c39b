"""Tensors of a training checkpoint: written by a thread through Megatron-Core's dist_checkpointing,
and read.

Megatron-Core's own writers are processes; PlannedSave (models/megatron_patches.py) says why they
are not used. A thread does the same work, since writing and hashing release the interpreter lock,
and it ends with its rank.
"""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from rlhf_mc import durable, platform
from rlhf_mc.checkpoint.dcp_metadata import read_metadata
from rlhf_mc.checkpoint.directory import CorruptCheckpoint, FileDigest, digest_file, write_bytes
from rlhf_mc.checkpoint.training_blocks import Block
from rlhf_mc.config.errors import UserError, error_reason, first_line
from rlhf_mc.models.megatron_patches import PlannedSave, megatron_calls, write_bucket
from rlhf_mc.models.offload import HostArena
from rlhf_mc.runtime.work import working
from rlhf_mc.topology.consensus import all_ranks, gather_objects, on_every_rank, on_rank_0

METADATA = ".metadata"
"""File of dist_checkpointing with the place of each block."""
COMMON = "common.pt"
"""File of dist_checkpointing with the state that is not tensors, which is empty."""
BACKEND = "metadata.json"
"""File of dist_checkpointing with the name of the format."""
_ASK_SECONDS = 1.0
"""Maximum time that a rank that still writes delays a collective: far below the timeout of
collectives, which a slow disk may exceed."""


class HostBuffers:
    """Host copies of blocks, so that training may change the blocks while the copies are written.
    The memory is reused by later saves, since an allocation costs more than the copy."""

    def __init__(self) -> None:
        self._arena = HostArena("trainer.async_save")

    def copies(self, blocks: Sequence[Block]) -> list[torch.Tensor]:
        """Return a copy of each block, in their order. The copies of the call before are
        overwritten."""
        views = self._arena.views([block.data.nbytes for block in blocks])
        copies = [
            view.view(block.data.dtype).view(block.data.shape).copy_(block.data, non_blocking=True)
            for view, block in zip(views, blocks, strict=True)
        ]
        platform.synchronize()
        return copies


def with_exact_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory whose storage ends with it, of a contiguous one on the
    host; others as they are. The memory lives as long as the result.

    Megatron-Core copies every tensor on the host that is a part of a larger storage before the
    write begins (filesystem_async.py), and torch.save would write all of the storage."""
    size = tensor.untyped_storage().nbytes()
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.nbytes in (0, size):
        return tensor
    memory = tensor.detach().view(-1).view(torch.uint8).numpy()
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


class TensorWriter:
    """Write of the tensors of one checkpoint, by a thread."""

    def __init__(
        self,
        blocks: Sequence[Block],
        directory: Path,
        buffers: HostBuffers | None,
        others: Mapping[str, Callable[[Path], None]] = MappingProxyType({}),
    ) -> None:
        """Plan the write and start it. buffers: destination of copies of the blocks; None: the
        blocks themselves are written, and must not change until `wait` returns. others: further
        files of this rank, by name, and the function that writes each. Every rank must call it."""
        self._directory = directory
        self._others = others
        written = [block for block in blocks if block.is_writer]
        data = [block.data for block in written] if buffers is None else buffers.copies(written)
        data = [with_exact_storage(tensor) for tensor in data]
        strategy = PlannedSave()
        with megatron_calls():
            strategy.async_save(_sharded(written, data), str(directory))
        self._num_bytes = sum(tensor.nbytes for tensor in data)
        self._writer = strategy.writer
        self._plan = strategy.plan
        self._files: dict[str, FileDigest] = {}
        self._results: list[Any] = []
        self._error: UserError | None = None
        if buffers is None:
            # a thread has its own current stream, which waits for none of this one's work
            platform.synchronize()
        self._thread = threading.Thread(target=self._write, name="checkpoint writer", daemon=True)
        self._thread.start()

    def is_done(self, seconds: float = 0.0) -> bool:
        """Return whether this rank has written its blocks, or failed. Wait at most `seconds` for
        it."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for all ranks, in collectives that are short even if a disk is slow. Raise UserError
        on every rank if one could not write. Every rank must call it."""
        with working(total=self._num_bytes / 2**20, unit="MiB") as work:
            while not all_ranks(self.is_done(_ASK_SECONDS)):
                written = [Path(file) for file, *_ in self._writer.write_buckets]
                work.done = sum(file.stat().st_size for file in written if file.exists()) / 2**20
        on_every_rank(self._raise_error)

    def finish(self) -> dict[str, FileDigest]:
        """Wait as `wait` and write the metadata files. Return this rank's files."""
        self.wait()
        results = gather_objects(self._results)
        on_rank_0(lambda: self._write_metadata(results), f"{self._directory}: cannot be written")
        return self._files

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        try:
            for number, (file, name, (loose, tensors)) in enumerate(self._writer.write_buckets):
                # Tensors on a GPU are copied to the host one at a time.
                bucket = (file, name, (loose, ((item, tensor.cpu()) for item, tensor in tensors)))
                outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
                pending: queue.Queue[int] = queue.Queue()
                pending.put(number)
                write_bucket(
                    [self._writer.transforms], number, bucket, outcome, pending, use_fsync=True
                )
                _, written = outcome.get()
                if isinstance(written, Exception):
                    raise written
                self._results += written
                self._files[name] = digest_file(Path(file))
            for name, write in self._others.items():
                write(self._directory / name)
                durable.sync(self._directory / name)
                self._files[name] = digest_file(self._directory / name)
        except Exception as error:  # raised by `finish` in the main thread
            self._error = UserError(f"{self._directory}: cannot be written: {_reason(error)}")

    def _write_metadata(self, results: list[Any]) -> None:
        # The plan of each rank is needed only by writers that cache plans, and is most of the file.
        vars(self._plan).pop("all_local_plans", None)
        self._writer.finish(self._plan, results)
        common = io.BytesIO()
        torch.save({}, common)
        self._files[COMMON] = write_bytes(self._directory / COMMON, common.getvalue())
        save_config(CheckpointingConfig("torch_dist", 1), str(self._directory))
        for name in (METADATA, BACKEND):
            # torch syncs the first before Python's buffer is flushed, and Megatron-Core does not
            # sync the second.
            durable.sync(self._directory / name)
            self._files[name] = digest_file(self._directory / name)


def read_tensors(blocks: Sequence[Block], directory: Path) -> None:
    """Read the blocks into their storage. Raise UserError if the files do not hold them. Every rank
    must call it."""
    on_every_rank(lambda: _check_holds(directory, blocks))
    with megatron_calls(), working("reading tensors"):
        try:
            state = _sharded(blocks, [block.data for block in blocks])
            dist_checkpointing.load(state, str(directory), validate_access_integrity=False)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise CorruptCheckpoint(
                f"{directory}: cannot be read back ({_reason(cause)})"
            ) from error


def _check_holds(directory: Path, blocks: Sequence[Block]) -> None:
    stored = read_metadata(directory / METADATA).state_dict_metadata
    missing = next((block.key for block in blocks if block.key not in stored), None)
    if missing is not None:
        raise UserError(
            f"{directory}: holds no {missing}; the run that wrote it trained other parts of the "
            "models"
        )


def _sharded(blocks: Sequence[Block], data: Sequence[torch.Tensor]) -> dict[str, ShardedTensor]:
    """Return the blocks as ShardedTensors without a regular grid (axis_fragmentations), so that
    blocks may have any shape."""
    return {
        f"{block.key} {block.box}": ShardedTensor(
            key=block.key,
            data=tensor,
            dtype=tensor.dtype,
            local_shape=tuple(tensor.shape),
            global_shape=block.global_shape,
            global_offset=tuple(start for start, _ in block.box),
            axis_fragmentations=None,
        )
        for block, tensor in zip(blocks, data, strict=True)
    }


def _reason(error: BaseException) -> str:
    """Return the reason of the OSError that caused the error, if there is one: torch's own message
    is about its archive."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return error_reason(cause)
        cause = cause.__cause__ or cause.__context__
    return first_line(error)
