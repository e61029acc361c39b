"""Models and GPUs on which vLLM cannot generate in fp8."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.rollout.vllm_limits import check_dtype, check_kernels

SIZES: dict[str, Any] = {
    "vocab_size": 270,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def check(family: str = "qwen2", quantization: Any = "fp8", **sizes: Any) -> None:
    shape = ModelShape.from_hf_config(AutoConfig.for_model(family, **SIZES, **sizes).to_dict())
    check_kernels(shape, RolloutConfig(quantization=quantization))


def test_delta_nets_without_a_kernel_on_a_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = EXPERTS | {"shared_expert_intermediate_size": 64, "tie_word_embeddings": False}
    check("qwen3_next", None, **sizes)
    with pytest.raises(
        UserError,
        match=r"^model.path: linear_key_head_dim 32 and linear_value_head_dim 128; vLLM's",
    ):
        check("qwen3_next", None, **sizes, linear_key_head_dim=32)
    shape = ModelShape.from_hf_config(
        AutoConfig.for_model("qwen3_next", **SIZES, **sizes).to_dict()
    )
    check_dtype(shape, "bfloat16")
    with pytest.raises(
        UserError, match=r"^actor.megatron.dtype is 'float32'; vLLM's CPU gated delta net takes bf"
    ):
        check_dtype(shape, "float32")
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    check_dtype(shape, "float32")
    check("qwen3_next", None, **sizes, linear_key_head_dim=32)


def test_experts_are_refused() -> None:
    check()
    check("qwen3_moe", None, **EXPERTS)
    with pytest.raises(
        UserError,
        match=r"^model.path: a mixture-of-experts model, and rollout.quantization is 'fp8'",
    ):
        check("qwen3_moe", **EXPERTS)


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        (
            (8, 0),
            (
                "rollout.quantization is 'fp8'; this GPU has compute capability 8.0, and fp8 needs "
                "8.9: set it to null"
            ),
        ),
        ((8, 9), None),
        ((10, 0), None),
    ],
)
def test_older_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], message: str | None
) -> None:
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    check(quantization=None)
    if message is None:
        check()
        return
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        check()
