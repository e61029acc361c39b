"""Everything that lets SGLang 0.5.23 run inside this process: environment variables, stand-ins for
compiled packages that a CPU does not have, and what is replaced while an engine is built. Import
before sglang. The import raises UserError if SGLang is missing or of another version.
"""

from __future__ import annotations

import os

from rlhf_mc import platform

# SGLang reads these when it is imported, or later.
if not platform.use_cuda():
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0"  # read, and used by sgl_kernel alone
# An engine's context has some tokens more than a sequence, and the model's positions end before.
os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"  # the trainer's parts differ
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers  # noqa: F401  (it looks for torchvision, before there is a stand-in)

from rlhf_mc import torch_patches
from rlhf_mc.config.errors import UserError, first_line
from rlhf_mc.machine.check import TESTED_VERSIONS
from rlhf_mc.machine.facts import installed_version
from rlhf_mc.patching import replaced

INSTALL = "pip install -e '.[sglang]', on a CPU pip install --no-deps -r requirements/sglang.txt"
STAND_INS = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
"""Modules that files of SGLang's import, for models of images."""


class StandIn(ModuleType):
    """A module that can be imported and not used: its attributes are classes that do nothing."""

    __path__: list[str] = []

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # a signature has one of them as a default value
        return type(name, (), dict.fromkeys(("BICUBIC", "BILINEAR", "LANCZOS")))


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Let SGLang be imported on a CPU, where torchvision's build for GPUs cannot be, and SGLang's
    kernels have no wheel. Where a package is installed, it is used.

    sgl_kernel's stand-in stays: modules that are imported later ask for it too. It has none of the
    kernels, and SGLang then computes by torch."""
    added: dict[str, ModuleType] = {}
    if not platform.use_cuda():
        if importlib.util.find_spec("sgl_kernel") is None:
            sys.modules["sgl_kernel"] = StandIn("sgl_kernel")
        if importlib.util.find_spec("torchvision") is None:
            added = {name: StandIn(name) for name in STAND_INS}
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


_found = installed_version("sglang")
if _found != TESTED_VERSIONS["sglang"]:
    raise UserError(
        f"rollout.name is sglang, and {f'SGLang {_found}' if _found else 'no SGLang'} is "
        f"installed; needed is {TESTED_VERSIONS['sglang']}, whose scheduler the trainer drives: "
        f"{INSTALL}"
    )
if platform.ranks_per_gpu() > 1:
    raise UserError(f"{platform.RANKS_PER_GPU} is for rollout.name vllm, not sglang: unset it")
if not platform.use_cuda():
    torch_patches.disable_compilation()
logging.getLogger("sglang").setLevel(logging.ERROR)
try:
    with stand_ins():
        import sglang.srt.distributed.parallel_state as sglang_state
        import sglang.srt.managers.scheduler as sglang_scheduler
        import sglang.srt.managers.tp_worker as sglang_worker
        import sglang.srt.model_loader.loader as sglang_loader
    if platform.use_cuda():
        from torch_memory_saver import torch_memory_saver

        # its other mode is chosen by LD_PRELOAD before the process starts
        torch_memory_saver.hook_mode = "torch"
except ImportError as error:
    raise UserError(f"rollout.name is sglang, and its import fails: {error}; {INSTALL}") from None


@contextlib.contextmanager
def tensor_parallel_groups(groups: Sequence[Sequence[int]]) -> Iterator[None]:
    """Let SGLang build its groups of the given ranks, in the given order, while the body runs.

    Targets: sglang.srt.distributed.parallel_state.GroupCoordinator, torch.distributed's
    get_world_size and new_group, and broadcast_pyobj of tp_worker, which numbers ranks within the
    engine and its source within the world; the seed is equal on all ranks.
    Reason: SGLang takes all ranks of torch.distributed for those of one engine. Every group is
    built for each engine; torch sorts the ranks of a group, and their order is the order of the
    shards. Where engines have ranks of their own, the others build no SGLang, and new_group would
    wait for them."""
    size = len(groups[0])
    is_pool = len(groups) * size < dist.get_world_size()
    coordinator = sglang_state.GroupCoordinator
    world_size = dist.get_world_size
    make_group = dist.new_group

    def of_each_engine(group_ranks: Sequence[Sequence[int]], **kwargs: Any) -> Any:
        ranks = [[engine[place] for place in places] for engine in groups for places in group_ranks]
        kwargs["use_message_queue_broadcaster"] = False  # each rank drives its own engine
        return coordinator(group_ranks=ranks, **kwargs)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.update(sort_ranks=False, use_local_synchronization=is_pool)
        return make_group(*args, **kwargs)

    with (
        replaced(sglang_state, "GroupCoordinator", of_each_engine),
        replaced(
            dist, "get_world_size", lambda group=None: size if not group else world_size(group)
        ),
        replaced(dist, "new_group", new_group),
        replaced(sglang_worker, "broadcast_pyobj", lambda seeds, *args, **kwargs: seeds),
    ):
        yield


def destroy_groups() -> None:
    """Destroy SGLang's groups. torch.distributed's world stays: it is the trainer's."""
    sglang_state.destroy_model_parallel()
    if sglang_state._WORLD is not None:
        sglang_state._WORLD.destroy()
    sglang_state._WORLD = None


@contextlib.contextmanager
def use_storage(storage: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let parameters become the tensors of `storage` by their names while the body builds a model;
    all others keep memory of their own, and are zero.

    Target: sglang.srt.model_loader.loader.initialize_dummy_weights.
    Reason: a reshard writes the weights, and the memory must be in place where SGLang would load:
    before it measures memory or captures graphs, which hold addresses."""

    def initialize(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        for name, param in model.named_parameters():
            tensor = storage.get(name)
            if tensor is None or tensor.shape != param.shape:  # the engine refuses the shape
                param.data.zero_()
            else:
                assert tensor.dtype == param.dtype, name
                param.data = tensor

    with replaced(sglang_loader, "initialize_dummy_weights", initialize):
        yield


class SteppedScheduler(sglang_scheduler.Scheduler):
    """SGLang's scheduler without its sockets: its caller adds requests and takes the results."""

    running_batch: Any
    last_batch: Any

    def __init__(self, arguments: Any) -> None:
        """Build the scheduler and its model. Raise UserError with SGLang's reason where it cannot,
        as without memory for a KV cache."""
        try:
            super().__init__(arguments, SimpleNamespace(nccl_port=0))
        except ValueError as error:
            message = f"rollout.name is sglang, and SGLang says: {first_line(error)}"
            raise UserError(message) from error

    def init_ipc_channels(self, port_args: Any) -> None:
        """Make no sockets: what the scheduler sends goes nowhere."""
        nowhere = SimpleNamespace(send_output=lambda *args: None)
        self.ipc_channels = SimpleNamespace(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=nowhere,
            send_to_detokenizer=nowhere,
            send_metrics_from_scheduler=None,
        )
        self.load_snapshot_writer = None
        self.recv_from_tokenizer = None

    def init_output_streamer(self) -> None:
        """Make no messages of tokens."""
        self.output_streamer = SimpleNamespace(stream_output=lambda *args, **kwargs: None)

    @torch.inference_mode()
    def step(self) -> list[Any]:
        """Compute the next batch. Return its requests; without a batch, none."""
        plan = self.get_next_batch_to_run(self.running_batch, self.last_batch)
        self.running_batch = plan.running_batch
        batch = plan.batch_to_run
        self.last_batch = batch
        if batch is None:
            return []
        requests = list(batch.reqs)
        sampler = self.tp_worker.model_runner.sampler
        # on the host, so that a draw does not wait for the device
        sampler.rows = np.array([int(r.rid) for r in requests]), batch.seq_lens_cpu.numpy()
        self.process_batch_result(batch, self.run_batch(batch))
        return requests
