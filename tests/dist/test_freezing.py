"""Freezing: frozen tensors stay bit-exact on every rank, and the others have the gradient that they
have without freezing."""

from __future__ import annotations

from typing import Any

import freeze_cases
import pytest
import torch
from model_cases import Job, logical_tensors
from test_models import ALL, SMALL, Reference, batch, checkpoints

from rlhf_mc.data.batch import RaggedBatch

pytestmark = pytest.mark.dist
__all__ = ["batch", "checkpoints", "logical_tensors"]

EMBEDDING = ("model.embed_tokens.*", "model.layers.0.*", "model.layers.2.self_attn.[qkv]_proj.*")

BEFORE_MLP = ("model.embed_tokens.*", "model.layers.0.self_attn.*", "model.layers.0.*layernorm.*")
"""All that comes before the first layer's MLP, whose input then requires no gradient of its own."""


@pytest.mark.parametrize(
    ("world", "tp", "pp", "role", "patterns", "sequences", "settings"),
    [
        (1, 1, 1, "actor", EMBEDDING, ALL, {"recompute_granularity": "full"}),
        (
            1,
            1,
            1,
            "actor",
            BEFORE_MLP,
            ALL,
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        ),
        (1, 1, 1, "critic", ("model.*",), ALL, {"use_distributed_optimizer": True}),
        # The first stage trains nothing; the embedding is tied to the output layer of the second.
        (
            2,
            1,
            2,
            "actor",
            ("model.embed_tokens.*", "model.layers.[01].*"),
            ALL,
            {"use_distributed_optimizer": True},
        ),
        (2, 1, 2, "critic", ("model.*",), ALL, {}),
        (2, 2, 1, "actor", EMBEDDING, ALL, {"sequence_parallel": True}),
        # One sequence: the second replica runs a dummy micro-batch.
        (2, 1, 1, "critic", ("model.*",), (0,), {}),
    ],
)
def test_frozen_tensors_stay_and_others_have_their_gradient(
    pool: Any,
    checkpoints: dict[str, str],
    batch: RaggedBatch,
    world: int,
    tp: int,
    pp: int,
    role: Any,
    patterns: tuple[str, ...],
    sequences: tuple[int, ...],
    settings: dict[str, Any],
) -> None:
    checkpoint = checkpoints["qwen2_tied"]
    results = pool(world).run(
        freeze_cases.train_step_with_frozen_tensors,
        checkpoint=checkpoint,
        role=role,
        patterns=patterns,
        tp=tp,
        pp=pp,
        batch=batch,
        sequences=sequences,
        **settings,
    )
    # The gradient is taken after the step, with the updated weights.
    model = Reference(checkpoint)
    after = results[0]["after"]
    model.model.load_state_dict(
        {name: x for name, x in after.items() if name != "score.weight"}, strict=False
    )
    if role == "critic":
        model.score.data.copy_(after["score.weight"])
    _, wanted = model.gradients(batch, Job(checkpoint, role, "token-mean", SMALL, sequences))
    for rank, result in enumerate(results):
        frozen = result["tensors"]
        assert 0 < len(frozen) < len(after)
        for name, start in result["before"].items():
            assert torch.equal(start, result["after"][name]) == (name in frozen), (
                f"rank {rank}, {name}"
            )
        assert result["step"] == (pytest.approx(1e-2), False)
        if settings.get("use_distributed_optimizer"):
            continue  # each rank holds only its shard of the gradient
        for name, got in result["gradients_after"].items():
            if name in frozen:
                assert got.isnan().all(), f"rank {rank}, {name}"
                continue
            error = float((got - wanted[name]).abs().max() / wanted[name].abs().max())
            assert error < 1e-4, f"rank {rank}, {name}: off by {error:.1e} of the largest"
    if pp == 2:
        assert [result["trains_here"] == 0 for result in results] == [True, False]


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"dtype": "float32"}, {"sequence_parallel": True}]
)
def test_frozen_weights_need_no_batched_matmul(
    pool: Any, checkpoints: dict[str, str], batch: RaggedBatch, world: int, settings: dict[str, Any]
) -> None:
    """Catch torch.matmul expanding a frozen weight once per token: it makes a batched product of
    [T, 1, hidden] and the weight if the strides look transposed, as they do after a tensor-parallel
    embedding.
    """
    patterns = ("model.embed_tokens.*", "model.layers.[02].*")
    for rank, products in enumerate(
        pool(world).run(
            freeze_cases.matrix_products,
            checkpoint=checkpoints["qwen2_tied"],
            tp=2,
            batch=batch,
            patterns=patterns,
            **settings,
        )
    ):
        # four in each layer, and the head
        assert len(products["frozen"]) > 4 * 4, f"rank {rank}: {products['frozen']}"
        assert products["frozen"] == products["trainable"], f"rank {rank}"
        batched = [product for seen in products.values() for product in seen if "bmm" in product[0]]
        assert not batched, f"rank {rank}: {batched}"
