"""Import every module of vLLM that a run on GPUs uses, and ours that use vLLM. Run by lock.py in
the environment of requirements/gpu.txt.

python tests/fake_gpu/lock_imports.py
"""

from __future__ import annotations

import importlib

import lock_platform

MODULES = """
    vllm._C_stable_libtorch vllm._moe_C_stable_libtorch vllm._custom_ops vllm.cumem_allocator
    vllm.vllm_flash_attn
    vllm.compilation.backends vllm.compilation.cuda_graph vllm.compilation.cudagraph_pool
    vllm.device_allocator.alloc_conf vllm.device_allocator.cumem
    vllm.device_allocator.sleep_mode_backend
    vllm.distributed.device_communicators.cuda_communicator
    vllm.distributed.device_communicators.custom_all_reduce
    vllm.distributed.device_communicators.flashinfer_all_reduce
    vllm.distributed.device_communicators.pynccl
    vllm.distributed.device_communicators.symm_mem
    vllm.model_executor.determinism.batch_invariant
    vllm.model_executor.kernels.linear.scaled_mm.cutlass
    vllm.model_executor.layers.fused_moe.oracle.unquantized
    vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method
    vllm.model_executor.layers.quantization.online.fp8
    vllm.model_executor.model_loader.reload.layerwise
    vllm.model_executor.models.gemma vllm.model_executor.models.llama
    vllm.model_executor.models.mistral
    vllm.model_executor.models.qwen2 vllm.model_executor.models.qwen3
    vllm.model_executor.models.qwen3_moe
    vllm.v1.attention.backends.flash_attn vllm.v1.attention.backends.flashinfer
    vllm.v1.attention.backends.triton_attn
    vllm.v1.engine.core vllm.v1.executor.uniproc_executor
    vllm.v1.sample.ops.topk_topp_sampler vllm.v1.sample.sampler
    vllm.v1.worker.gpu.model_runner vllm.v1.worker.gpu.sample.gumbel
    vllm.v1.worker.gpu.sample.logprob
    vllm.v1.worker.gpu.sample.sampler vllm.v1.worker.gpu.sample.states
    vllm.v1.worker.gpu_model_runner vllm.v1.worker.gpu_worker
    flashinfer flashinfer.comm
    rlhf_mc.rollout.vllm_engine rlhf_mc.rollout.vllm_fp8 rlhf_mc.rollout.vllm_patches
"""
"""Not rlhf_mc.rollout.vllm_parameters, which is for layouts without an engine and imports
Megatron-Core."""


def main() -> None:
    lock_platform.pretend("h100", 80 << 30)
    modules = MODULES.split()
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise AssertionError(
                f"{module} is not imported: {type(error).__name__}: {error}"
            ) from error
    from vllm.device_allocator.cumem import cumem_available

    assert cumem_available, "vLLM's allocator of sleep cannot be loaded"
    print(f"modules imported | {len(modules)}")


if __name__ == "__main__":
    main()
