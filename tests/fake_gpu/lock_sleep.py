"""vLLM's own sleep (cumem.py, sleep_mode_backend.py, Worker, Executor, EngineCore) under our
engine's order of calls, with CPU memory in place of its allocator's. Run by test_vllm_sleep.py, and
by lock.py in the environment of requirements/gpu.txt.

python tests/fake_gpu/lock_sleep.py
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from rlhf_mc.patching import replaced

from rlhf_mc.rollout import vllm_patches  # noqa: F401  # isort: skip  (it sets what vllm reads when it is imported)
import vllm
from vllm import device_allocator
from vllm.device_allocator import cumem
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.gpu_worker import Worker

from rlhf_mc.data.batch import NOTHING
from rlhf_mc.rollout.base import KV_CACHE, WEIGHTS, Request, Sampling
from rlhf_mc.rollout.vllm_engine import VLLMEngine
from rlhf_mc.rollout.vllm_options import sampling_params

DEVICE = torch.device("cuda", 0)
UNMAPPED = 0xFF
"""Every byte of memory that is not mapped, and of memory after it has been mapped anew: NaN in
float types."""


class Device:
    """The memory that vLLM's allocator maps and unmaps."""

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.mapped: set[int] = set()
        self.errors: list[str] = []
        """Errors that CUDA's driver would print: memory that is unmapped twice."""
        self.pools: list[Pool] = []
        """Those in use, the innermost last."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are mapped."""
        return sum(self.memory[address].nbytes for address in self.mapped)

    def map(self, device: int, size: int, address: int, chunk: int) -> None:
        assert address not in self.mapped
        self.memory[address][:] = UNMAPPED
        self.mapped.add(address)

    def unmap(self, device: int, size: int, address: int, chunk: int) -> None:
        if address not in self.mapped:
            self.errors.append(f"{size} bytes are unmapped twice")
            return
        self.memory[address][:] = UNMAPPED
        self.mapped.discard(address)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        assert {target, source} & self.mapped, "a copy from or to memory that is not mapped"
        ctypes.memmove(target, source, num_bytes)

    def tensor(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in the pool in use, or of other memory where there is none."""
        size = int(np.prod(shape)) * dtype.itemsize
        if not self.pools:
            return torch.zeros(shape, dtype=dtype)
        return torch.from_numpy(self.pools[-1].allocate(size)).view(dtype).reshape(shape)


class Allocator:
    """Stands for torch's CUDAPluggableAllocator over vLLM's functions."""

    device: Device

    def __init__(self, library: str, malloc: str, free: str) -> None:
        self._allocator = self


class Pool:
    """Stands for torch's MemPool: segments of one tensor each, which stay until the pool is trimmed
    or dropped."""

    callbacks: tuple[Callable[..., Any], Callable[..., Any]]

    def __init__(self, allocator: Allocator) -> None:
        self.id = (0, 1)
        self.device = allocator.device
        self.segments: dict[int, int] = {}

    def allocate(self, size: int) -> np.ndarray:
        memory = np.empty(size, np.uint8)
        address = memory.ctypes.data
        self.device.memory[address] = memory
        self.device.map(0, size, address, 0)
        self.callbacks[0]((0, size, address, 0))
        self.segments[address] = size
        return memory

    def free(self, tensor: torch.Tensor) -> None:
        """Do as torch after the last reference to a tensor: its segment stays."""
        self.segments[tensor.data_ptr()] = 0

    def snapshot(self) -> list[dict[str, int]]:
        known = cumem.CuMemAllocator.get_instance().pointer_to_data
        return [
            {"address": address, "allocated_size": size}
            for address, size in self.segments.items()
            if address in known
        ]

    def __del__(self) -> None:
        for segment in self.snapshot():
            self.device.unmap(*self.callbacks[1](segment["address"]))


class OnDevice(TorchFunctionMode):
    """Takes the memory of a new tensor on DEVICE from the stand-in."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") != DEVICE or function not in (torch.zeros, torch.empty):
            return function(*args, **kwargs)
        shape = args if isinstance(args[0], int) else tuple(args[0])
        tensor = self.device.tensor(shape, kwargs.get("dtype", torch.float32))
        return tensor.zero_() if function is torch.zeros else tensor


class HostBuffer:
    """Stands for vLLM's page-locked memory that a GPU reads."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> torch.Tensor:
        return self.cpu[:n]


@contextlib.contextmanager
def simulated() -> Iterator[Device]:
    """Let vLLM's allocator work on a Device while the body runs."""
    device = Device()
    Allocator.device = device

    @contextlib.contextmanager
    def use_mem_pool(pool: Pool) -> Iterator[None]:
        device.pools.append(pool)
        try:
            yield
        finally:
            device.pools.pop()

    def init_module(malloc: Any, free: Any) -> None:
        Pool.callbacks = (malloc, free)

    gpu = SimpleNamespace(
        is_cuda_alike=lambda: True,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        is_cpu=lambda: False,
    )
    replacements: list[tuple[Any, str, Any]] = [
        (cumem, "cumem_available", True),
        (cumem, "init_module", init_module),
        (cumem, "python_create_and_map", device.map),
        (cumem, "python_unmap_and_release", device.unmap),
        (cumem, "lib_name", "stand-in"),
        (cumem, "libcudart", SimpleNamespace(cudaMemcpy=device.copy)),
        (cumem, "current_platform", gpu),
        (cumem, "PIN_MEMORY", False),
        (cumem, "current_alloc_conf", lambda: ""),
        (cumem.CuMemAllocator, "instance", None),
        (cumem.atexit, "register", lambda function: None),
        (device_allocator, "current_platform", gpu),
        (gpu_worker, "current_platform", gpu),
        (buffer_utils, "UvaBuffer", HostBuffer),
        (buffer_utils, "NonUvaBuffer", HostBuffer),
        (torch.cuda.memory, "CUDAPluggableAllocator", Allocator),
        (torch.cuda.memory, "MemPool", Pool),
        (torch.cuda.memory, "use_mem_pool", use_mem_pool),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.accelerator, "synchronize", lambda device=None: None),
        (torch.accelerator, "empty_cache", lambda: None),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "get_memory_info", lambda: (2**30 - device.num_bytes, 2**30)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(replaced(owner, name, replacement))
        stack.enter_context(OnDevice(device))
        yield device


class StandInWorker:
    """vLLM's worker of a GPU as far as it sleeps, with a model of two parameters and a buffer."""

    sleep = Worker.sleep
    wake_up = Worker.wake_up
    _save_sleep_parameters = Worker._save_sleep_parameters
    _maybe_get_memory_pool_context = Worker._maybe_get_memory_pool_context

    def __init__(self, shared: torch.Tensor) -> None:
        """Build as Worker's load_model, initialize_from_config and compile_or_warm_up_model. shared
        becomes a parameter."""
        self.model_config = SimpleNamespace(
            enable_cumem_allocator=True,
            enable_nccl_comm_suspend=False,
            sleep_preserve_parameter_names=None,
        )
        self.vllm_config = SimpleNamespace(model_config=self.model_config)
        self.sleep_mode_backend = CuMemBackend()
        self._sleep_saved_buffers: dict[str, torch.Tensor] = {}
        self._sleep_saved_parameters: dict[str, torch.Tensor] = {}
        self._sleep_saved_draft_buffers: dict[str, torch.Tensor] = {}
        device = Allocator.device
        model = torch.nn.Module()
        config = SimpleNamespace(reasoning_config=None, speculative_config=None)
        self.requests = RequestState(4, 64, 64, 0, 100, DEVICE)
        with self._maybe_get_memory_pool_context("weights"):
            model.own = torch.nn.Parameter(
                device.tensor((1000,), torch.float32), requires_grad=False
            )
            model.shared = torch.nn.Parameter(
                device.tensor((1000,), torch.float32), requires_grad=False
            )
            pool = device.pools[-1]
            pool.free(model.shared)
            model.shared.data = shared  # as vllm_patches.use_storage
            model.register_buffer(
                "rotary", device.tensor((50,), torch.float32).fill_(0.5), persistent=False
            )
            pool.free(torch.zeros(5000, device=DEVICE))  # such as the weights before a quantization
            self.sampler = Sampler(config, 4, 100, DEVICE, self.requests, "processed_logprobs")
        with self._maybe_get_memory_pool_context("runtime"):
            self.runtime = torch.zeros(300, device=DEVICE).fill_(3.0)
            with self._maybe_get_memory_pool_context("kv_cache"):
                self.kv_cache = torch.zeros(4000, device=DEVICE)
        with cumem.CuMemAllocator.get_instance().cudagraph_pool():
            (graphs, _), *_ = cumem.CuMemAllocator.get_instance().allocator_and_pools["cudagraph"]
            device.pools.append(graphs)  # as torch's capture_begin
            self.graphs = torch.zeros(200, device=DEVICE).fill_(4.0)
            device.pools.pop()
        self.model_runner = SimpleNamespace(model=model)

    def get_draft_model(self) -> None:
        return None

    def synchronize_device(self) -> None:
        pass

    def shutdown(self) -> None:
        """Do as Worker.shutdown and the engine's end: drop the pools."""
        del self.model_runner, self.sampler, self.runtime, self.kv_cache, self.graphs
        cumem.CuMemAllocator.get_instance().release_pools()
        gc.collect()


class StandInExecutor:
    """vLLM's executor of one worker as far as it sleeps."""

    sleep = Executor.sleep
    wake_up = Executor.wake_up
    is_sleeping = Executor.is_sleeping

    def __init__(self, worker: StandInWorker) -> None:
        self.sleeping_tags: set[str] = set()
        self.driver_worker = SimpleNamespace(worker=worker)

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        getattr(self.driver_worker.worker, method)(**kwargs)


class StandInCore:
    """vLLM's engine without scheduler as far as it sleeps."""

    sleep = EngineCore.sleep
    wake_up = EngineCore.wake_up

    def __init__(self, executor: StandInExecutor) -> None:
        self.model_executor = executor
        self.is_paused = False

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        self.is_paused = True

    def resume_scheduler(self) -> None:
        self.is_paused = False

    def shutdown(self) -> None:
        self.model_executor.driver_worker.worker.shutdown()


def built(shared: torch.Tensor) -> tuple[VLLMEngine, StandInCore, StandInWorker]:
    """Return our engine over vLLM's own code of sleep."""
    worker = StandInWorker(shared)
    executor = StandInExecutor(worker)
    core = StandInCore(executor)
    llm_engine = SimpleNamespace(
        sleep=core.sleep, wake_up=core.wake_up, model_executor=executor, engine_core=core
    )
    llm = SimpleNamespace(llm_engine=llm_engine)
    llm.sleep = lambda **kwargs: vllm.LLM.sleep(llm, **kwargs)
    llm.wake_up = lambda tags=None: vllm.LLM.wake_up(llm, tags)
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._llm = llm
    engine.awake = frozenset({WEIGHTS, KV_CACHE})
    engine._buffers = {}
    engine._layout = SimpleNamespace(zero=frozenset())
    return engine, core, worker


def lost(tensor: torch.Tensor) -> bool:
    """Return True if no byte of a tensor is what it was before its memory was unmapped."""
    return bool((tensor.contiguous().view(torch.uint8) == UNMAPPED).all())


def check_levels() -> str:
    """Check what each level of a sleep keeps, and what each wake restores."""
    shared = torch.full((1000,), 7.0)
    with simulated() as device:
        engine, core, worker = built(shared)
        model = worker.model_runner.model
        pool = cumem.CuMemAllocator.get_instance()
        tags = sorted(data.tag for data in pool.pointer_to_data.values())
        assert set(tags) == {"weights", "runtime", "kv_cache", "cudagraph"}
        sizes = [data.handle[1] for data in pool.pointer_to_data.values() if data.tag == "weights"]
        assert sizes.count(4000) == 1 and 20_000 not in sizes, (
            "memory that is freed while loading stays"
        )
        penalties = worker.sampler.penalties_state.output_bin_counts
        before = device.num_bytes
        addresses = [
            tensor.data_ptr()
            for tensor in (model.own, model.rotary, worker.kv_cache, worker.graphs)
        ]
        model.own.fill_(1.0)
        for _ in range(2):
            engine.sleep()
            assert device.num_bytes == 0 and core.is_paused and engine.awake == frozenset()
            engine.wake_up(WEIGHTS)
            assert lost(model.own) and lost(penalties), "level 2 keeps weights"
            assert bool((model.rotary == 0.5).all()) and bool((model.shared == 7.0).all())
            assert bool((worker.runtime == 3.0).all()) and bool((worker.graphs == 4.0).all())
            assert device.num_bytes == before - worker.kv_cache.nbytes and core.is_paused
            model.own.fill_(2.0)  # the weight update
            engine.wake_up(KV_CACHE)
            assert (
                device.num_bytes == before and not core.is_paused and bool((model.own == 2.0).all())
            )
            assert lost(worker.kv_cache)
        tensors = (model.own, model.rotary, worker.kv_cache, worker.graphs)
        assert addresses == [tensor.data_ptr() for tensor in tensors]
        # A sleep after the weights alone were awake, as after an update without a generation.
        engine.sleep()
        engine.wake_up(WEIGHTS)
        engine.sleep()
        assert device.num_bytes == 0
        engine.wake_up(WEIGHTS)
        engine.wake_up(KV_CACHE)
        model.own.fill_(2.0)
        engine._llm.sleep(level=1)
        assert lost(model.own)
        engine._llm.wake_up()
        assert bool((model.own == 2.0).all()) and lost(worker.kv_cache), (
            "level 1 keeps the weights alone"
        )
        assert not device.errors
        del tensors, penalties
        engine.close()
        assert device.num_bytes == 0 and not device.errors and not pool.pointer_to_data
    return (
        "level 2 keeps buffers, runtime, graphs, shared weights; it discards weights, KV cache, "
        "the sampler's buffers"
    )


def check_close() -> str:
    """Close an engine while it sleeps, with its weights awake, and as vLLM would without the wake
    of our `close`."""
    for parts in ([], [WEIGHTS], [WEIGHTS, KV_CACHE]):
        with simulated() as device:
            engine, _, _ = built(torch.zeros(1000))
            engine.sleep()
            for part in parts:
                engine.wake_up(part)
            engine.close()
            assert device.num_bytes == 0 and not device.errors, parts
            built(torch.zeros(1000))  # vLLM asserts that its allocator holds nothing
    with simulated() as device:
        engine, core, _ = built(torch.zeros(1000))
        engine.sleep()
        core.shutdown()
        assert device.errors, (
            "vLLM frees sleeping memory without an error: VLLMEngine.close need not wake it"
        )
    return "all memory is freed, asleep or awake; another engine can be built"


def parameters(temperature: float, seed: int) -> vllm.SamplingParams:
    """Return a request's parameters as VLLMEngine gives them to vLLM on a GPU, and as vLLM then
    completes them for a model with penalties in its generation_config.json."""
    request = Request(0, np.zeros(4, np.int32), seed, NOTHING)
    given = sampling_params(Sampling(temperature, 32, (2, 3)), request, draws_itself=True)
    given.update_from_generation_config(
        {"eos_token_id": [5, 6], "repetition_penalty": 1.3}, eos_token_id=5
    )
    return given


READERS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.1},
    {"frequency_penalty": 0.1},
    {"presence_penalty": 0.1},
    {"logit_bias": {3: 1.0}},
    {"allowed_token_ids": [3]},
    {"min_tokens": 2},
    {"logprob_token_ids": [3]},
)
"""Options of a request for which vLLM reads buffers that a sleep of level 2 discards."""


def check_options() -> str:
    """Check that no request of ours reads the sampler's buffers, which a sleep discards."""
    with simulated():
        _, _, worker = built(torch.zeros(1000))
        sampler = worker.sampler

        def reads(request: vllm.SamplingParams) -> bool:
            sampler.add_request(0, request)
            return bool(
                sampler.needs_logits_processing[0]
                or sampler.logprob_token_ids_state.num_token_ids.np[0]
            )

        # another temperature is processed too, and reads page-locked memory alone
        for temperature in (1.0, 0.0):
            assert not reads(parameters(temperature, 2**63 - 1))
        for options in READERS:
            assert reads(vllm.SamplingParams(stop_token_ids=[2], **options)), options
    return (
        f"no request of ours has one of the {len(READERS)} options that read what a sleep discards"
    )


CHECKS = {
    "sleep and wake": check_levels,
    "close": check_close,
    "options of requests": check_options,
}


def main() -> None:
    for name, check in CHECKS.items():
        print(f"{name} | {check()}", flush=True)


if __name__ == "__main__":
    main()
