"""CUDA devices without a GPU, on a CPU build of torch: tensors on "cuda" are fake tensors, which
have a shape and a type but no memory; tensors on the CPU are real. fake_device.py has the mode that
records what the code does.

The order matters: build_guard, load_guard before torch is imported, replace_driver before rlhf_mc
and Megatron-Core.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path
from typing import Any, NamedTuple

GUARD = Path(__file__).with_name("guard.cpp")
PACKAGE = str(Path(__file__).parents[2] / "rlhf_mc")
MEMORY = 80 << 30
CAPABILITY = (9, 0)


def compiler() -> str | None:
    """Return the path of a C++ compiler, or None."""
    return next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)


def build_guard(library: Path) -> None:
    """Compile guard.cpp against the installed torch."""
    torch_path = Path(importlib.util.find_spec("torch").origin).parent
    includes = [f"-I{torch_path / part}" for part in ("include", "include/torch/csrc/api/include")]
    libraries = [
        f"-L{torch_path / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        f"-Wl,-rpath,{torch_path / 'lib'}",
    ]
    command = [
        compiler(),
        "-shared",
        "-fPIC",
        "-O0",
        "-std=c++20",
        *includes,
        str(GUARD),
        "-o",
        str(library),
        *libraries,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def load_guard(library: Path) -> None:
    """Load the compiled guard, and let torch use it."""
    assert "torch" not in sys.modules, "torch asks once whether there is a GPU"
    ctypes.CDLL(str(library)).install_guard()


class DeviceMix(RuntimeError):
    """An operator was given tensors of the CPU and of the GPU."""


class Collective(NamedTuple):
    """A call of torch.distributed on one rank."""

    kind: str
    ranks: tuple[int, ...]
    """The ranks of the group."""
    tensors: tuple[tuple[str, int], ...]
    """Type and number of elements of each tensor."""
    peer: int | None = None
    """The rank at the other end of a point-to-point message."""


current: Any = None
"""The FakeCuda whose body runs."""


def wait(what: str) -> None:
    """Record that the host waits for the device."""
    if current is not None:
        current.waits[current.phase, what, place()] += 1


def place() -> str:
    """Return the innermost function of rlhf_mc that is being executed, as
    "models/engine.py:ModelEngine.score". "autograd" on a thread of autograd, which has no frames of
    the caller, "tests" in the tests' own code."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "autograd" if threading.current_thread() is not threading.main_thread() else "tests"
    return f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_code.co_qualname}"


def replace_driver() -> None:
    """Replace the parts of torch that ask the driver, or that fake tensors do not have."""
    import torch
    import torch._dynamo  # imports what a build for CUDA has, once replaced below
    from torch._subclasses import fake_tensor

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def record(self, *_: Any) -> None: ...
        def wait(self, *_: Any) -> None: ...
        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            wait("Event.synchronize")

        def elapsed_time(self, other: Any) -> float:
            return 1.0

    class Stream:
        cuda_stream = 0
        device = torch.device("cuda", 0)

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def wait_stream(self, _: Any) -> None: ...
        def wait_event(self, _: Any) -> None: ...
        def record_event(self, event: Any = None) -> Any:
            return event or Event()

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def synchronize(self) -> None:
            wait("Stream.synchronize")

    class Generator(torch.Generator):
        """Stands for a generator of either device."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls)

    torch.Generator = Generator
    stream = Stream()
    random_state = torch.zeros(16, dtype=torch.uint8)
    properties = types.SimpleNamespace(
        total_memory=MEMORY,
        name="fake H100",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=132,
    )
    cudart = types.SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: current.locked.add(address) or 0,
        cudaHostUnregister=lambda address: current.locked.discard(address) or 0,
    )
    results = {
        **dict.fromkeys(
            ("_lazy_init", "_lazy_call", "set_device", "empty_cache", "set_stream", "manual_seed")
        ),
        **dict.fromkeys(("manual_seed_all", "set_rng_state", "set_per_process_memory_fraction")),
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), 0),
        **dict.fromkeys(("current_stream", "default_stream"), stream),
        **dict.fromkeys(
            ("is_current_stream_capturing", "get_sync_debug_mode", "set_sync_debug_mode"), False
        ),
        "device_count": 8,
        "mem_get_info": (MEMORY // 2, MEMORY),
        "get_device_capability": CAPABILITY,
        "get_device_name": "fake H100",
        "get_device_properties": properties,
        "cudart": cudart,
    }
    cuda = torch.cuda
    for name, result in results.items():
        setattr(cuda, name, lambda *_, result=result, **__: result)
    torch.accelerator.current_stream = cuda.current_stream
    cuda.memory_allocated = cuda.memory_reserved = lambda *_: current.memory.live
    cuda.max_memory_allocated = cuda.max_memory_reserved = lambda *_: current.memory.peak
    cuda.reset_peak_memory_stats = lambda *_: current.memory.reset_peak()
    cuda.Stream = Stream
    cuda.Event = Event
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.synchronize = lambda *_: wait("synchronize")
    cuda.nccl.version = lambda: (2, 29, 0)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.memory._record_memory_history = (
        lambda *_, **__: None
    )
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: random_state.clone()
    cuda.random.set_rng_state = cuda.set_rng_state
    cuda.default_generators = (
        types.SimpleNamespace(get_state=random_state.clone, set_state=lambda _: None),
    )
    for name, result in {
        "_cuda_getDevice": 0,
        "_cuda_setDevice": None,
        "_cuda_exchangeDevice": 0,
        "_cuda_maybeExchangeDevice": 0,
        "_cuda_getDeviceCount": 1,
        "_cuda_isCurrentStreamCapturing": False,
        "_cuda_getCurrentRawStream": 0,
    }.items():
        setattr(torch._C, name, lambda *_, result=result: result)
    torch.version.cuda = torch.version.cuda or "13.0"
    torch._dynamo.config.disable = True
    torch.Tensor.record_stream = lambda self, stream: None
    # torch.tensor(..., device="cuda") is a tensor of the CPU that is copied
    torch._C._set_only_lift_cpu_tensors(True)
    fake_tensor.FakeTensorMode.avoid_device_init = True
    fake_tensor.init_gpu_context = lambda device: None
    _let_storages_be_fake()


def _let_storages_be_fake() -> None:
    """Give the storages of fake tensors a device and an address, let modules move fake parameters,
    and let torch.tensor read fake scalars."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    storage = torch.UntypedStorage
    real_device = storage.device.__get__
    real_address = storage.data_ptr
    real_tensor_address = torch.Tensor.data_ptr

    def is_fake(self: Any) -> bool:
        return current is not None and real_device(self).type == "meta"

    storage.device = property(
        lambda self: torch.device("cuda", 0) if is_fake(self) else real_device(self)
    )
    resize = storage.resize_

    def resize_counted(self: Any, size: int) -> Any:
        if is_fake(self):
            current.memory.resize(self, size)
        return resize(self, size)

    storage.resize_ = resize_counted
    storage.data_ptr = lambda self: self._cdata if is_fake(self) else real_address(self)

    def address(self: Any) -> int:
        if isinstance(self, FakeTensor):
            return self.untyped_storage()._cdata * 512 + self.storage_offset() * self.element_size()
        return real_tensor_address(self)

    torch.Tensor.data_ptr = address

    swap = torch.utils.swap_tensors

    def swap_fake(first: Any, second: Any) -> None:
        """Swap although the mode holds weak references to the tensors. As where a real parameter is
        moved, its attributes stay."""
        references = weakref.getweakrefs
        weakref.getweakrefs = lambda x: [] if isinstance(x, torch.Tensor) else references(x)
        try:
            swap(first, second)
        finally:
            weakref.getweakrefs = references
        for name, value in vars(second).items():
            vars(first).setdefault(name, value)

    torch.utils.swap_tensors = swap_fake

    def type_name(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, FakeTensor) and not args and not kwargs and self.device.type == "cuda":
            names = {
                torch.float32: "Float",
                torch.float16: "Half",
                torch.bfloat16: "BFloat16",
                torch.float64: "Double",
            }
            return f"torch.cuda.{names.get(self.dtype, str(self.dtype)[6:].title())}Tensor"
        return real_type(self, *args, **kwargs)

    real_type = torch.Tensor.type
    torch.Tensor.type = type_name

    make = torch.tensor

    def read(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [read(x) for x in value]
        return value.item() if isinstance(value, FakeTensor) else value

    torch.tensor = lambda data, *args, **kwargs: make(
        read(data) if isinstance(data, list | tuple) else data, *args, **kwargs
    )


def start(library: Path, transformer_engine: Path | None = None) -> None:
    """Prepare a new process for fake CUDA devices. transformer_engine: directory of its Python
    files, or None."""
    os.environ.pop("RLHF_MC_DEVICE", None)
    load_guard(library)
    replace_driver()
    if transformer_engine is not None:
        importlib.import_module("te_kernels").install(transformer_engine)


def call(module: str, function: str, *args: Any) -> Any:
    """Call a function of a module that imports torch."""
    found = importlib.import_module(module)
    gc.freeze()  # cases collect garbage: a second each time with the libraries' objects
    return getattr(found, function)(*args)
