"""rollout.quantization: what vLLM holds after a weight update, and training with it. On a CPU vLLM
has kernels of torch for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fp8_rollout_cases
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, make_workspace, write_config

QUANTIZED = ("qkv_proj.weight", "o_proj.weight", "gate_up_proj.weight", "down_proj.weight")


@pytest.mark.parametrize("world", [2])
def test_an_update_quantizes_in_place(pool: Any, tmp_path: Path, world: int) -> None:
    """Write two models, one after the other, then the first again."""
    first, second = (make_checkpoint(tmp_path / str(i), num_hidden_layers=2) for i in range(2))
    file = second / "model.safetensors"
    save_file(
        {name: tensor.roll(1, -1) for name, tensor in load_file(file).items()},
        file,
        {"format": "pt"},
    )
    results = pool(world).run(
        fp8_rollout_cases.update_and_generate,
        checkpoints=[str(path) for path in (first, second, first)],
        prompts=[[5, 6, 7, 8], [9, 10]],
    )
    for updates in results:
        assert updates[0]["addresses"] == updates[1]["addresses"] == updates[2]["addresses"]
        for update in updates:
            scales = [name for name in update["held"] if name.endswith("weight_scale")]
            assert len(scales) == 2 * len(QUANTIZED)
            for name, written in update["written"].items():
                held = update["held"][name]
                if not name.endswith(QUANTIZED):
                    assert torch.equal(held.float(), written), name
                    continue
                assert held.dtype == torch.float8_e4m3fn
                scale = update["held"][f"{name}_scale"]
                # Three bits of mantissa; below 2^-6 the numbers are 2^-9 apart.
                bound = written.abs() / 16 + scale / 2**10
                assert ((held.t().float() * scale - written).abs() <= bound).all(), name
        assert updates[0]["responses"] != updates[1]["responses"]
        assert updates[0]["responses"] == updates[2]["responses"]
        assert all(r.log_probs[0] < 0 for r in updates[0]["responses"])
    for name in (  # whose ranks have parts of each channel
        "model.layers.0.self_attn.o_proj.weight_scale",
        "model.layers.1.mlp.down_proj.weight_scale",
    ):
        assert torch.equal(*(updates[0]["held"][name] for updates in results)), name


@pytest.mark.parametrize("world", [2])
def test_training_in_one_type_and_generating_in_another(
    pool: Any, tmp_path: Path, world: int
) -> None:
    """Check that log-probs differ by more than in bfloat16, and by less than the bound, beyond
    which a run ends."""
    config = str(write_config(make_workspace(tmp_path), actor={"ppo_epochs": 1}))
    overrides = [
        "actor.megatron.dtype=bfloat16",
        "critic.megatron.dtype=bfloat16",
        f"rollout.tensor_model_parallel_size={world}",
        "reshard.share_weights=false",
        "reshard.verify=always",
    ]
    means = []
    for more in ([], ["rollout.quantization=fp8"]):
        results = pool(world).run(
            fp8_rollout_cases.steps, config_path=config, overrides=[*overrides, *more]
        )
        assert len({str(steps[-1]["actor/loss"]) for steps in results}) == 1
        means.append(results[0][0]["training/rollout_logprobs_diff_mean"])
    in_bfloat16, in_fp8 = means
    assert 0 < 3 * in_bfloat16 < in_fp8 < 0.3


def test_a_build_without_kernels_is_one_line(pool: Any, tmp_path: Path) -> None:
    checkpoint = str(make_checkpoint(tmp_path / "model"))
    ((ok, value),) = pool(1).outcomes(
        fp8_rollout_cases.build_without_kernels, checkpoint=checkpoint
    )
    assert not ok and value[0] == "UserError", value
    assert value[1].startswith(
        "rollout.quantization is 'fp8'; vLLM says: Failed to find a kernel that can implement"
    )
    assert value[1].endswith("set it to null") and "\n" not in value[1]
