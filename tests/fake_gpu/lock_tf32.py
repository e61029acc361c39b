"""Compile the Triton kernels of vLLM that multiply float32 matrices for a GPU, and read the
instructions of their products. Run by lock.py in the environment of requirements/gpu.txt.

python tests/fake_gpu/lock_tf32.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import lock_platform
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from rlhf_mc.patching import replaced
from rlhf_mc.runtime.cuda_environment import forbid_tf32

VARIABLE = "TRITON_F32_DEFAULT"


class Driver(DriverBase):
    """Lets Triton compile for a GPU of compute capability 9.0, or another one, without a driver."""

    capability = 90

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Stands for a kernel of Triton: a launch compiles it and keeps its PTX and machine code."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.ptx = ""
        self.cubin = b""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            # they are not keyed by the environment; Triton's files are
            self._kernel.device_caches.clear()
            asm = self._kernel.run(*args, grid=grid, warmup=True, **kwargs).asm
            self.ptx = asm["ptx"]
            self.cubin = asm["cubin"]

        return launch


def main() -> None:
    lock_platform.pretend("h100", 80 << 30)
    triton.runtime.driver.set_active(Driver())
    for name, compile_ptx in (("attention", attention_ptx), ("experts", experts_ptx)):
        for Driver.capability in (80, 90, 100):
            os.environ.pop(VARIABLE, None)
            default = types_of_products(compile_ptx(torch.float32))
            assert default == {"tf32"}, f"{name}: Triton's default for float32 is now {default}"
            forbid_tf32(["float32"])
            assert types_of_products(compile_ptx(torch.float32)) == set(), (
                f"{name}: tf32 in spite of {VARIABLE}"
            )
            assert types_of_products(compile_ptx(torch.bfloat16)) == {"bf16"}, (
                f"{name}: not in bfloat16"
            )
            print(
                f"{name}, sm_{Driver.capability} | tf32 by default; with {VARIABLE}=ieee float32",
                flush=True,
            )


def types_of_products(ptx: str) -> set[str]:
    """Return the types of the matrices that the tensor cores multiply."""
    instructions = re.findall(r"\b(?:wgmma\.mma_async|mma|tcgen05\.mma)\S*", ptx)
    return {kind for instruction in instructions for kind in re.findall(r"tf32|bf16", instruction)}


def attention_ptx(dtype: torch.dtype) -> str:
    """Return the PTX of vLLM's attention for a prompt of 64 tokens with 8 heads over 2 KV heads."""
    from vllm.v1.attention.ops import triton_unified_attention as attention

    queries = torch.zeros(64, 8, 64, dtype=dtype)
    cache = torch.zeros(10, 16, 2, 64, dtype=dtype)
    lengths = torch.tensor([64], dtype=torch.int32)
    with replaced(
        attention, "kernel_unified_attention", Compiled(attention.kernel_unified_attention)
    ):
        attention.unified_attention(
            q=queries,
            k=cache,
            v=cache,
            out=torch.empty_like(queries),
            cu_seqlens_q=torch.tensor([0, 64], dtype=torch.int32),
            max_seqlen_q=64,
            seqused_k=lengths,
            max_seqlen_k=64,
            softmax_scale=0.125,
            causal=True,
            window_size=(-1, -1),
            block_table=torch.zeros(1, 10, dtype=torch.int32),
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        return attention.kernel_unified_attention.ptx


def experts_ptx(dtype: torch.dtype) -> str:
    """Return the PTX of vLLM's product of 64 tokens with the weights of 4 experts."""
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.triton_utils import tl

    blocks = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    with replaced(fused_moe, "fused_moe_kernel", Compiled(fused_moe.fused_moe_kernel)):
        fused_moe.invoke_fused_moe_triton_kernel(
            A=torch.zeros(64, 128, dtype=dtype),
            B=torch.zeros(4, 256, 128, dtype=dtype),
            C=torch.zeros(64, 1, 256, dtype=dtype),
            A_scale=None,
            B_scale=None,
            topk_weights=None,
            sorted_token_ids=torch.zeros(128, dtype=torch.int32),
            expert_ids=torch.zeros(8, dtype=torch.int32),
            num_tokens_post_padded=torch.zeros(1, dtype=torch.int32),
            mul_routed_weight=False,
            top_k=1,
            config=blocks,
            compute_type=tl.float32 if dtype == torch.float32 else tl.bfloat16,
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
        )
        return fused_moe.fused_moe_kernel.ptx


if __name__ == "__main__":
    main()
