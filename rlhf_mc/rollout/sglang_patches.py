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
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers  # noqa: F401  (it looks for torchvision, before there is a stand-in)

from rlhf_mc import torch_patches
from rlhf_mc.config.errors import UserError
from rlhf_mc.machine.check import TESTED_VERSIONS
from rlhf_mc.patching import replaced

INSTALL = "pip install --no-deps -r requirements/sglang.txt"
STAND_INS = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
"""Modules that files of SGLang's import, for models of images."""


class StandIn(ModuleType):
    """A module that can be imported and not used: its attributes are classes without content."""

    __path__: list[str] = []

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        modes = dict.fromkeys(("BICUBIC", "BILINEAR", "LANCZOS"))
        return type(name, (), {"__new__": _refuse, **modes})


def _refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(f"SGLang calls {cls.__name__}, which its CPU installation does not have")


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Let SGLang be imported on a CPU, where torchvision's build for GPUs cannot be, and SGLang's
    kernels have no wheel. Where a package is installed, it is used.

    sgl_kernel's stand-in stays: modules that are imported later ask for it too. It has none of the
    kernels, and SGLang then computes by torch."""
    if platform.use_cuda():
        yield
        return
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = StandIn("sgl_kernel")
    missing = importlib.util.find_spec("torchvision") is None
    added = {name: StandIn(name) for name in STAND_INS if missing}
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def _check_version() -> None:
    wanted = TESTED_VERSIONS["sglang"]
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"rollout.name is sglang, and SGLang {wanted} is not installed: {INSTALL}"
        ) from None
    if found != wanted:
        raise UserError(
            f"rollout.name is sglang; SGLang {found} is installed; needed is {wanted}, whose "
            f"scheduler the trainer drives: {INSTALL}"
        )


_check_version()
if not platform.use_cuda():
    torch_patches.disable_compilation()
logging.getLogger("sglang").setLevel(logging.ERROR)
try:
    with stand_ins():
        import sglang.srt.distributed.parallel_state as sglang_state
        import sglang.srt.managers.scheduler as sglang_scheduler
        import sglang.srt.managers.tp_worker as sglang_worker
        import sglang.srt.model_loader.loader as sglang_loader
except ImportError as error:
    raise UserError(f"rollout.name is sglang, and its import fails: {error}; {INSTALL}") from None


@contextlib.contextmanager
def tensor_parallel_groups(groups: Sequence[Sequence[int]]) -> Iterator[None]:
    """Let SGLang build its groups of the given ranks, in the given order, while the body runs.

    Targets: sglang.srt.distributed.parallel_state.init_model_parallel_group and init_world_group,
    torch.distributed.get_world_size and new_group, and broadcast_pyobj of tp_worker, which numbers
    ranks within the engine and its source within the world; the seed is equal on all ranks.
    Reason: SGLang takes all ranks of torch.distributed for those of one engine. Every group is
    built for each engine; torch sorts the ranks of a group, and their order is the order of the
    shards. Where engines have ranks of their own, the others build no SGLang, and new_group would
    wait for them."""
    size = len(groups[0])
    is_pool = len(groups) * size < dist.get_world_size()
    world_size = dist.get_world_size
    new_group = functools.partial(
        dist.new_group, sort_ranks=False, use_local_synchronization=is_pool
    )
    init_group = sglang_state.init_model_parallel_group

    def of_engine(group: Any = None) -> int:
        return size if group is None else int(world_size(group))

    def init_for_each(group_ranks: Any, *args: Any, **kwargs: Any) -> Any:
        ranks = [[engine[place] for place in places] for engine in groups for places in group_ranks]
        kwargs["use_message_queue_broadcaster"] = False  # nothing is broadcast
        return init_group(ranks, *args, **kwargs)

    def init_world(ranks: Any, local_rank: int, backend: str, **kwargs: Any) -> Any:
        return init_for_each(
            [ranks],
            local_rank,
            backend,
            use_pynccl=False,
            use_custom_allreduce=False,
            use_mscclpp=False,
            use_torch_symm_mem_allreduce=False,
            group_name="world",
        )

    def new_group_of(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "use_local_synchronization": is_pool})

    with (
        replaced(sglang_state, "init_model_parallel_group", init_for_each),
        replaced(sglang_state, "init_world_group", init_world),
        replaced(dist, "get_world_size", of_engine),
        replaced(dist, "new_group", new_group_of),
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
    def step(self, begin: Callable[[list[Any]], None]) -> list[Any]:
        """Compute the next batch, and call `begin` with its requests before. Return them; without
        a batch, none."""
        plan = self.get_next_batch_to_run(self.running_batch, self.last_batch)
        self.running_batch = plan.running_batch
        batch = plan.batch_to_run
        self.last_batch = batch
        if batch is None:
            return []
        requests = list(batch.reqs)
        begin(requests)
        self.process_batch_result(batch, self.run_batch(batch))
        return requests
