"""Writes the tensors of a training checkpoint through Megatron-Core's dist_checkpointing, at once or in a thread while
training goes on, and reads them back.

Megatron-Core's own writers are processes: forked from one that has threads (vLLM's, gloo's), with a spawned manager
beside them, and all of them outlive a rank that is killed. A thread does the same work, since writing and checksums let
go of the interpreter, and is gone with its rank.
"""

from __future__ import annotations

import inspect
import io
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from rlhf_mc import durable, platform
from rlhf_mc.checkpoint.dcp_metadata import read_metadata
from rlhf_mc.checkpoint.directory import CorruptCheckpoint, FileDigest, digest_file, write_bytes
from rlhf_mc.checkpoint.training_blocks import Block
from rlhf_mc.config.errors import UserError, first_line, reason_of
from rlhf_mc.topology.consensus import gather_objects, on_every_rank, on_rank_0

METADATA, COMMON, BACKEND = ".metadata", "common.pt", "metadata.json"
"""Files of dist_checkpointing: where each block lies, the state that is not tensors (none), the format's name."""
_ASK_SECONDS = 1.0
"""How long a rank that still writes lets the others wait for an answer. Far below any collective's time-out, which a
slow disk may well exceed."""


_write_bucket = inspect.unwrap(FileSystemWriterAsync.write_preloaded_data)
"""Without its decorator, which turns the garbage collector off: right in a process of its own, not in a thread."""


class HostBuffers:
    """Memory of the host that blocks are copied to, so that training may change them while they are written. It is
    kept from one save to the next: fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    def copies(self, blocks: Sequence[Block]) -> list[torch.Tensor]:
        """One copy for each block, in their order."""
        kept = {}
        for block in blocks:
            at = (block.key, block.box, block.data.dtype)
            buffer = self._buffers.get(at)
            if buffer is None:
                buffer = platform.host_bytes(block.data.nbytes).view(block.data.dtype).view(block.data.shape)
            kept[at] = buffer.copy_(block.data, non_blocking=True)
        platform.synchronize()
        self._buffers = kept
        return list(kept.values())


class TensorWriter:
    """The tensors of one checkpoint on their way to the disk."""

    def __init__(self, blocks: Sequence[Block], directory: Path, buffers: HostBuffers | None) -> None:
        """Plans the write and starts it. buffers None: the blocks' own memory is written, and must stay what it is
        until `wait` returns. Every rank must call it."""
        self._directory = directory
        mine = [block for block in blocks if block.is_mine]
        data = [block.data for block in mine] if buffers is None else buffers.copies(mine)
        strategy = _Strategy()
        with platform.megatron():
            strategy.async_save(_sharded(mine, data), str(directory))
        self._writer, self._plan = strategy.writer, strategy.plan
        self._files: dict[str, FileDigest] = {}
        self._results: list[Any] = []
        self._error: UserError | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint writer", daemon=True)
        self._thread.start()

    def is_done(self, seconds: float = 0.0) -> bool:
        """Whether this rank has written its part, or failed, now or within so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits for all ranks, in collectives that are short however slow a rank's disk is. Every rank must call it."""
        while not all(gather_objects(self.is_done(_ASK_SECONDS))):
            pass

    def finish(self) -> dict[str, FileDigest]:
        """Waits for all ranks, and completes what dist_checkpointing calls a checkpoint. Returns this rank's files.
        UserError, on every rank, where one could not write. Every rank must call it."""
        self.wait()
        on_every_rank(self._raise_error)
        results = gather_objects(self._results)
        on_rank_0(lambda: self._write_metadata(results), f"{self._directory}: cannot be written")
        return self._files

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        try:
            for number, (file, name, (loose, tensors)) in enumerate(self._writer.write_buckets):
                # One tensor of a GPU at a time comes to the host; what is there already stays where it is.
                bucket = (file, name, (loose, ((item, tensor.cpu()) for item, tensor in tensors)))
                outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
                pending: queue.Queue[int] = queue.Queue()
                pending.put(number)
                _write_bucket([self._writer.transforms], number, bucket, outcome, pending, use_fsync=True)
                _, written = outcome.get()
                if isinstance(written, Exception):
                    raise written
                self._results += written
                self._files[name] = digest_file(Path(file))
        except Exception as error:  # whatever it is, the rank's own thread must hear of it
            self._error = UserError(f"{self._directory}: cannot be written: {_reason(error)}")

    def _write_metadata(self, results: list[Any]) -> None:
        # What each rank planned helps a writer that goes on from it alone, and is most of the file.
        vars(self._plan).pop("all_local_plans", None)
        self._writer.finish(self._plan, results)
        common = io.BytesIO()
        torch.save({}, common)
        self._files[COMMON] = write_bytes(self._directory / COMMON, common.getvalue())
        save_config(CheckpointingConfig("torch_dist", 1), str(self._directory))
        for name in (METADATA, BACKEND):
            # torch syncs the one before it has left Python's buffer, and Megatron-Core never does the other.
            durable.sync(self._directory / name)
            self._files[name] = digest_file(self._directory / name)


class _Strategy(TorchDistSaveShardedStrategy):
    """dist_checkpointing's plan for the files, without its processes: one file a rank, written by a thread of ours."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        # Its place for the writers' results is a queue of a process of its own, made when it is first asked for.
        filesystem_async._results_queue = queue.SimpleQueue()

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> AsyncRequest:
        """Keeps what is planned, instead of handing out what would write it."""
        self.writer, self.plan = writer, planned[1]
        return AsyncRequest(None, (), [])


def read_tensors(blocks: Sequence[Block], directory: Path) -> None:
    """Fills the blocks' own memory. UserError where the files do not hold them. Every rank must call it."""
    on_every_rank(lambda: _check_holds(directory, blocks))
    with platform.megatron():
        try:
            state = _sharded(blocks, [block.data for block in blocks])
            dist_checkpointing.load(state, str(directory), validate_access_integrity=False)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise CorruptCheckpoint(f"{directory}: cannot be read back ({_reason(cause)})") from error


def _check_holds(directory: Path, blocks: Sequence[Block]) -> None:
    stored = read_metadata(directory / METADATA).state_dict_metadata
    missing = next((block.key for block in blocks if block.key not in stored), None)
    if missing is not None:
        raise UserError(f"{directory}: holds no {missing}; the run that wrote it trained other parts of the models")


def _sharded(blocks: Sequence[Block], data: Sequence[torch.Tensor]) -> dict[str, ShardedTensor]:
    """The blocks as dist_checkpointing takes them: no regular grid (axis_fragmentations), so any cut will do."""
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
    """What the disk said, where it is behind it: torch's own words are of its archive's inside."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return reason_of(behind)
        behind = behind.__cause__ or behind.__context__
    return first_line(error)
