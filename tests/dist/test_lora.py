"""LoRA: adapters train as the weights W + s B A of a full model would, in each family and layout,
and leave the base and its results as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lora_cases
import pytest
import torch
from gpu_parts.engines import Job
from gpu_parts.reference import Reference, by_checkpoint_names
from test_family_models import DENSE, EXPERTS, HYBRID, family_batch, workspaces

from rlhf_mc.data.batch import RaggedBatch

__all__ = ["family_batch", "workspaces"]

pytestmark = pytest.mark.dist

RANK, ALPHA = 3, 12.0


def check(
    workers: Any,
    workspace: Path,
    batch: RaggedBatch,
    directory: Path,
    layout: dict[str, int],
    lora: dict[str, Any] | None = None,
    **megatron: Any,
) -> None:
    """Compare every rank's log-probs with transformers' of the exported model, and its gradients
    with A's = s B^T dW and B's = s dW A^T of transformers' gradients dW."""
    checkpoint = str(workspace / "model")
    results = workers.run(
        lora_cases.train_adapters,
        checkpoint=checkpoint,
        role="actor",
        lora={"rank": RANK, "alpha": ALPHA, **(lora or {})},
        batch=batch,
        directory=str(directory),
        layout=layout,
        **megatron,
    )
    merged = Reference(str(directory))
    start = Reference(checkpoint)
    with torch.no_grad():
        wanted = merged.log_probs(batch)[0]
        base = start.log_probs(batch)[0]
    every = tuple(range(batch.num_sequences))
    kind = merged.model.config.model_type
    job = Job(str(directory), "actor", "token-mean", 24, every)
    full = by_checkpoint_names(merged.gradients(batch, job)[1], kind)
    for rank, result in enumerate(results):
        assert (result["scores"] - wanted).abs().max() < 2e-5, rank
        assert (result["reference"] - base).abs().max() < 2e-5, rank
        # B = 0 computes what the base computes
        assert torch.equal(result["zero"], result["reference"]), rank
        before, after = result["before"], result["after"]
        adapters = result["adapters"]
        assert adapters and not any("embed" in name for name in adapters)
        for name, tensor in before.items():
            changed = not torch.equal(tensor, after[name])
            assert changed == (name in adapters), f"rank {rank}, {name}"
            assert torch.equal(tensor, result["reread"][name]), name
        total = 0.0
        for name in adapters:
            module, part, _ = name.rsplit(".", 2)
            gradient = full[f"{module}.weight"]
            other = before[f"{module}.lora_{'B' if part == 'lora_A' else 'A'}.weight"]
            want = other.T @ gradient if part == "lora_A" else gradient @ other.T
            want *= ALPHA / RANK
            total += float(want.square().sum())
            got = result["gradients"][name]
            error = float((got - want).abs().max() / want.abs().max().clamp_min(1e-12))
            assert error < 2e-4, f"rank {rank}, {name}: off by {error:.1e} of the largest"
        assert result["grad_norm"] == pytest.approx(total**0.5, rel=1e-4)


@pytest.mark.parametrize("world", [1])
@pytest.mark.parametrize("family", [*DENSE, *HYBRID, *EXPERTS])
def test_adapters_have_the_gradients_of_the_merged_weights(
    pool: Any,
    workspaces: dict[str, Path],
    family_batch: RaggedBatch,
    tmp_path: Path,
    world: int,
    family: str,
) -> None:
    check(pool(world), workspaces[family], family_batch, tmp_path, {})


SEQUENCE_PARALLEL = {"sequence_parallel": True}
SOME = {"target_modules": ["q_proj", "v_proj", "up_proj"]}


@pytest.mark.parametrize(
    ("world", "family", "layout", "settings"),
    [
        (2, "qwen3", {"tp": 2}, {}),
        (2, "qwen3", {"tp": 2}, SEQUENCE_PARALLEL | {"recompute_granularity": "full"}),
        (2, "qwen3", {"tp": 2}, {"lora": SOME}),
        (2, "qwen3", {"pp": 2}, {"lora": SOME, "recompute_granularity": "selective"}),
        (2, "gemma", {"cp": 2}, {"lora": {"exclude_modules": ["o_proj", "down_proj"]}}),
        (2, "qwen3_5", {"tp": 2}, SEQUENCE_PARALLEL),
        (2, "qwen3_5", {"tp": 2}, {}),
        (2, "deepseek_v3", {"tp": 2}, SEQUENCE_PARALLEL),
        (2, "deepseek_v3", {"ep": 2}, {}),
        (2, "gpt_oss", {"tp": 2}, SEQUENCE_PARALLEL),
        (2, "glm4_moe", {"pp": 2}, {}),
        # more ranks than KV heads
        (4, "qwen3", {"tp": 4}, SEQUENCE_PARALLEL | {"lora": SOME}),
        (4, "qwen3_moe", {"tp": 2, "ep": 2}, SEQUENCE_PARALLEL),
        (4, "mixtral", {"ep": 2, "cp": 2}, {}),
    ],
)
def test_adapters_in_every_layout(
    pool: Any,
    workspaces: dict[str, Path],
    family_batch: RaggedBatch,
    tmp_path: Path,
    world: int,
    family: str,
    layout: dict[str, int],
    settings: dict[str, Any],
) -> None:
    check(pool(world), workspaces[family], family_batch, tmp_path, layout, **settings)
