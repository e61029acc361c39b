"""Fusions that are on by default on GPUs compute the same gradients: activations with their gate,
bias and an expert's weight; a weight's gradient added to main_grad inside the matrix product. So
does the padding for fp8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fusion_cases
import pytest
from model_cases import Job
from test_family_models import transformers_results
from test_models import ALL, SMALL, batch, checkpoints
from tiny import make_checkpoint

from rlhf_mc.data.batch import RaggedBatch

pytestmark = pytest.mark.dist
__all__ = ["batch", "checkpoints"]


@pytest.fixture(scope="session")
def models(checkpoints: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("fusions")
    more = {
        family: str(make_checkpoint(root / family, family, num_hidden_layers=2))
        for family in FAMILIES
    }
    return {**checkpoints, **more}


FAMILIES = ("gemma", "qwen3_moe")
SPLIT = {"sequence_parallel": True}


def check(
    results: list[tuple[set[str], dict[Job, Any]]], expected: set[str], batch: RaggedBatch
) -> None:
    """Compare every job on every rank with autograd, and the names of the fused functions that
    ran."""
    for names, grads in results:
        assert names == expected
        for job, (_, got) in grads.items():
            wanted = transformers_results(job.checkpoint, batch, job)[1]
            assert got.keys() == wanted.keys()
            for name, want in wanted.items():
                error = float((got[name] - want).abs().max() / want.abs().max())
                assert error < 1e-4, f"{job}, {name}: off by {error:.1e} of the largest"


@pytest.mark.parametrize(
    ("world", "family", "expected", "settings"),
    [
        (1, "qwen2_tied", "swiglu", {}),
        (1, "llama_biases", "bias_swiglu", {}),
        (1, "gemma", "geglu", {}),
        (1, "qwen3_moe", "weighted_swiglu", {}),
        (2, "qwen2_tied", "swiglu", SPLIT),
        (2, "qwen3_moe", "weighted_swiglu", SPLIT),
    ],
)
def test_fused_activations(
    pool: Any,
    models: dict[str, str],
    batch: RaggedBatch,
    world: int,
    family: str,
    expected: str,
    settings: dict[str, Any],
) -> None:
    jobs = [Job(models[family], "actor", "token-mean", SMALL, ALL)]
    results = pool(world).run(
        fusion_cases.gradients,
        kind="activations",
        jobs=jobs,
        tp=world,
        pp=1,
        batch=batch,
        **settings,
    )
    check(results, {expected}, batch)


@pytest.mark.parametrize(
    ("world", "tp", "pp", "family", "settings"),
    [
        (1, 1, 1, "qwen2_tied", {"recompute_granularity": "full"}),
        (1, 1, 1, "qwen3_moe", {}),
        (2, 2, 1, "llama_biases", {}),
        (2, 2, 1, "qwen2_tied", SPLIT),
        (2, 1, 2, "qwen2_tied", {}),
        # The second replica runs dummy micro-batches where it has none left.
        (2, 1, 1, "qwen2_untied", {}),
    ],
)
def test_fused_accumulation(
    pool: Any,
    models: dict[str, str],
    batch: RaggedBatch,
    world: int,
    tp: int,
    pp: int,
    family: str,
    settings: dict[str, Any],
) -> None:
    """Accumulate over several micro-batches, with tied embeddings, a value head, and heads.py's
    output layer."""
    roles = ("actor",) if family == "qwen3_moe" else ("actor", "critic")
    jobs = [Job(models[family], role, "token-mean", SMALL, ALL) for role in roles]
    results = pool(world).run(
        fusion_cases.gradients,
        kind="accumulation",
        jobs=jobs,
        tp=tp,
        pp=pp,
        batch=batch,
        **settings,
    )
    check(results, {"wgrad_gemm_accum_fp32"}, batch)


@pytest.mark.parametrize(("world", "tp", "pp"), [(1, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_fused_accumulation_leaves_frozen_tensors_alone(
    pool: Any, models: dict[str, str], batch: RaggedBatch, world: int, tp: int, pp: int
) -> None:
    patterns = ("model.embed_tokens.*", "model.layers.0.*", "model.layers.2.self_attn.[qkv]_proj.*")
    job = Job(models["qwen2_tied"], "actor", "token-mean", SMALL, ALL)
    wanted = transformers_results(job.checkpoint, batch, job)[1]
    results = pool(world).run(
        fusion_cases.partly_frozen_gradients, job=job, patterns=patterns, tp=tp, pp=pp, batch=batch
    )
    for got in results:
        frozen = {name for name, grad in got.items() if grad.isnan().any()}
        assert {Path(name).suffix for name in frozen} == {".weight", ".bias"} and 5 < len(
            frozen
        ) < len(got) / 2
        for name in got.keys() - frozen:
            error = float((got[name] - wanted[name]).abs().max() / wanted[name].abs().max())
            assert error < 1e-4, f"{name}: off by {error:.1e} of the largest"


@pytest.mark.parametrize(
    ("world", "family", "settings"), [(1, "qwen3_moe", {}), (2, "qwen2_tied", SPLIT)]
)
def test_padding_for_fp8(
    pool: Any,
    models: dict[str, str],
    batch: RaggedBatch,
    world: int,
    family: str,
    settings: dict[str, Any],
) -> None:
    """Pad the micro-batches, of at most 32 tokens, to 128 tokens, or 64 on each of two ranks."""
    jobs = [Job(models[family], "actor", "token-mean", SMALL, ALL)]
    results = pool(world).run(
        fusion_cases.padded_gradients, jobs=jobs, tp=world, batch=batch, multiple=128, **settings
    )
    check([(set(), grads) for grads in results], set(), batch)
