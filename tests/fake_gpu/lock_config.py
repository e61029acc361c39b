"""Build vLLM's own configuration of every shipped config, as a run would on one kind of GPU. Run by
lock.py in the environment of requirements/gpu.txt.

python tests/fake_gpu/lock_config.py {a100,h100,b200}
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODELS = {
    "grpo_deepseek_v3": "deepseek-v3",
    "grpo_glm_4.5": "glm-4.5",
    "grpo_glm_4.5_air": "glm-4.5-air",
    "grpo_gpt_oss_120b": "gpt-oss-120b",
    "grpo_qwen3_next_80b": "qwen3-next-80b-a3b",
    "grpo_kimi_k2": "kimi-k2",
    "grpo_mixtral_8x22b": "mixtral-8x22b",
    "grpo_qwen3_235b_a22b": "qwen3-235b-a22b",
    "grpo_qwen3_235b_lora": "qwen3-235b-a22b",
    "grpo_llama3_70b_lora": "llama-3-70b",
    "grpo_qwen3_8b_32k": "qwen3-8b",
    "ppo_70b": "llama-3-70b",
    "ppo_70b_8b_critic": "llama-3-70b",
    "ppo_qwen2.5_0.5b": "qwen2.5-0.5b",
    "ppo_qwen2.5_32b": "qwen2.5-32b",
    "ppo_qwen2.5_7b": "qwen2.5-7b",
    "ppo_qwen3_30b_a3b": "qwen3-30b-a3b",
    "ppo_sao_qwen3_30b_a3b": "qwen3-30b-a3b",
    "ppo_vapo_qwen2.5_32b": "qwen2.5-32b",
    "quickstart": "qwen2.5-0.5b",
    "quickstart_grpo": "qwen2.5-0.5b",
    "quickstart_turns": "qwen2.5-0.5b",
    "quickstart_agent": "qwen2.5-0.5b",
    "smollm2_grpo": "qwen2.5-0.5b",
    "smollm2_ppo": "qwen2.5-0.5b",
}
"""Shipped config -> the published model that stands for its model."""
EXTRA: dict[str, list[str]] = {
    "ppo_qwen2.5_7b": [
        "rollout.quantization=fp8 reshard.share_weights=false",
        "rollout.offload_cuda_graphs=false",
    ],
    "ppo_70b": [
        "trainer.deterministic=true",
        "rollout.enforce_eager=true rollout.free_cache_engine=false",
    ],
    "ppo_qwen2.5_0.5b": [
        "actor.megatron.dtype=float32 critic.megatron.dtype=float32 ref.megatron.dtype=float32"
    ],
}
"""Overrides with which a config is built once more."""


class Configured(Exception):
    """Raised where vLLM would start its engine: config is a VllmConfig."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def main() -> None:
    gpu = sys.argv[1]
    import lock_platform  # first: it hides this machine's GPUs

    from rlhf_mc.config.errors import NodeError
    from rlhf_mc.planner.gpus import GPUS

    lock_platform.pretend(gpu, GPUS[gpu].memory)
    names = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    assert names == sorted(MODELS), f"configs/ has {names}: name the model of each in MODELS"
    for name in names:
        for overrides in ("", *EXTRA.get(name, [])):
            try:
                config = vllm_config(name, overrides.split())
            except NodeError:
                assert gpu == "a100" and "fp8" in overrides, f"{name} {overrides} is refused"
                print(f"{name} {overrides} | refused: this GPU has no fp8", flush=True)
                continue
            check(name, overrides, config)
            print(f"{name} {overrides}".strip(), "|", ", ".join(facts(config)), flush=True)


def vllm_config(name: str, overrides: list[str]) -> Any:
    """Return the VllmConfig with which a run of the config would start vLLM on rank 0."""
    import torch
    from vllm.v1.engine.llm_engine import LLMEngine

    from rlhf_mc.architectures.spec import ModelShape
    from rlhf_mc.config.load import load_config
    from rlhf_mc.json_files import read
    from rlhf_mc.patching import replaced
    from rlhf_mc.planner.published import MODELS as PUBLISHED
    from rlhf_mc.rollout.engines import ENGINES
    from rlhf_mc.runtime.cuda_environment import forbid_tf32

    model = PUBLISHED / MODELS[name]
    cfg = load_config(str(ROOT / "configs" / f"{name}.yaml"), [*overrides, f"model.path={model}"])
    shape = ModelShape.from_hf_config(read(model / "config.json"))
    ranks = list(range(cfg.rollout.tensor_model_parallel_size))
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE=str(len(ranks)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    forbid_tf32([cfg.actor.megatron.dtype])

    def start(self: Any, vllm_config: Any, **kwargs: Any) -> None:
        raise Configured(vllm_config)

    torch.use_deterministic_algorithms(cfg.trainer.deterministic)
    with replaced(LLMEngine, "__init__", start):
        try:
            ENGINES["vllm"].check_installation()
            ENGINES["vllm"].check_model(shape, cfg.rollout)
            ENGINES["vllm"].build(cfg, shape, [ranks], 0, {})
        except Configured as configured:
            return configured.config
    raise AssertionError(f"{name}: vLLM's engine was built without LLMEngine")


def check(name: str, overrides: str, config: Any) -> None:
    """Raise AssertionError unless vLLM has made of its arguments what
    docs/internals/gpu_readings.md says."""
    from rlhf_mc.config.load import load_config

    cfg = load_config(str(ROOT / "configs" / f"{name}.yaml"), overrides.split())
    rollout = cfg.rollout
    model = config.model_config
    is_bfloat16 = cfg.actor.megatron.dtype == "bfloat16"
    graphs = "NONE" if rollout.enforce_eager else "FULL_AND_PIECEWISE"
    fused = False if cfg.trainer.deterministic or rollout.tensor_model_parallel_size == 1 else None
    expected = {
        "model runner 2": (config.use_v2_model_runner, True),
        "dtype": (str(model.dtype), f"torch.{cfg.actor.megatron.dtype}"),
        "type of the logits": (str(model.head_dtype), "torch.float32"),
        "sleep": (model.enable_sleep_mode, rollout.free_cache_engine),
        "allocator of sleep": (model.enable_cumem_allocator, rollout.free_cache_engine),
        "graphs offloaded": (
            model.sleep_mode_offload_cudagraph,
            rollout.free_cache_engine and rollout.offload_cuda_graphs,
        ),
        "log-probs": (model.logprobs_mode, "processed_logprobs"),
        "noise in float64": (model.use_fp64_gumbel, False),
        "processors of logits": (model.logits_processors, None),
        "speculative decoding": (config.speculative_config, None),
        "CUDA graphs": (config.compilation_config.cudagraph_mode.name, graphs),
        "experts": (config.kernel_config.moe_backend, "triton"),
        "returned experts": (config.aux_output_config.enable_return_routed_experts, model.is_moe),
        "quantization": (model.quantization, rollout.quantization and "fp8_per_channel"),
        "sequences at a time": (config.scheduler_config.max_num_seqs, rollout.max_num_seqs),
        "prefix cache": (config.cache_config.enable_prefix_caching, True),
        "worker": (config.parallel_config.worker_cls, "vllm.v1.worker.gpu_worker.Worker"),
        "executor": (config.parallel_config.distributed_executor_backend, "external_launcher"),
    }
    if fused is not None:
        expected["FlashInfer's all-reduce"] = (
            bool(config.compilation_config.pass_config.fuse_allreduce_rms),
            fused,
        )
    if not is_bfloat16:
        expected["attention"] = (attention(config), "TRITON_ATTN")
        expected["Triton's float32"] = (os.environ.get("TRITON_F32_DEFAULT"), "ieee")
    wrong = {what: pair for what, pair in expected.items() if pair[0] != pair[1]}
    assert not wrong, f"{name} {overrides}: vLLM's configuration has, and should have: {wrong}"


def attention(config: Any) -> str:
    """Return vLLM's name of the attention that it selects."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = config.model_config
    with set_current_vllm_config(config):
        return str(
            get_attn_backend(
                model.get_head_size(), model.dtype, config.cache_config.cache_dtype
            ).get_name()
        )


def facts(config: Any) -> Iterator[str]:
    """Yield what differs between GPUs and configs."""
    compilation = config.compilation_config
    yield f"attention {attention(config)}"
    sizes = compilation.cudagraph_capture_sizes or []
    yield (
        f"graphs {compilation.cudagraph_mode.name} of {len(sizes)} sizes up to "
        f"{max(sizes, default=0)}"
    )
    yield f"asynchronous scheduling {config.scheduler_config.async_scheduling}"
    yield f"fused all-reduce {bool(compilation.pass_config.fuse_allreduce_rms)}"


if __name__ == "__main__":
    main()
