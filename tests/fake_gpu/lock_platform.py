"""vLLM's build for GPUs on a machine without one: what it asks the driver about the GPU is answered
here. Import before vllm and rlhf_mc.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # vLLM then takes Triton without a driver

import torch

CAPABILITIES = {"a100": (8, 0), "h100": (9, 0), "b200": (10, 0)}
"""Compute capability by the planner's name of a GPU."""
NAMES = {"a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3", "b200": "NVIDIA B200"}
"""The driver's names of these GPUs."""


def pretend(gpu: str, memory: int) -> None:
    """Let torch and vLLM say that each device is a GPU of this kind. memory: its bytes. Nothing can
    be computed."""
    capability = CAPABILITIES[gpu]
    properties = SimpleNamespace(
        name=NAMES[gpu],
        major=capability[0],
        minor=capability[1],
        total_memory=memory,
        multi_processor_count=132,
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 8,
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "get_device_name": NAMES[gpu],
        "current_stream": None,
        "set_stream": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    torch.accelerator.current_device_index = lambda: 0

    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Platform(NonNvmlCudaPlatform):
        """Answers without NVML, which needs a driver."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return NAMES[gpu]

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return f"GPU-{device_id}"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return memory

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

    vllm.platforms._current_platform = Platform()
