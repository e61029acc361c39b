"""Prompts computed once for all their responses: the same losses and gradients as without in each
family, and the same log-probs too in each layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replay_cases
import sharing_cases
import torch
from gpu_parts.engines import token_batch
from test_family_models import DENSE, EXPERTS, HYBRID, workspaces
from test_router_replay import LAYOUTS, checkpoints
from tiny import make_checkpoint

from rlhf_mc.checkpoint.hf_format import HFReader
from rlhf_mc.data.batch import RaggedBatch, concatenate

__all__ = ["checkpoints", "workspaces"]

pytestmark = pytest.mark.dist

BUDGET = 200


def grouped_batch(
    vocab: int, groups: Sequence[tuple[int, Sequence[int]]], has_observations: bool = False
) -> RaggedBatch:
    """Return sequences with the fields that the losses read: for each group (tokens of its prompt,
    those of its responses). has_observations: of a response's tokens, the first and every third one
    is of an observation, but not the last."""
    parts = []
    for number, (prompt_len, lens) in enumerate(groups):
        batch = token_batch(vocab, [prompt_len] * len(lens), lens, seed=number)
        prompt = batch.tokens[:prompt_len].clone()
        starts = batch.seq_lens.cumsum(0) - batch.seq_lens
        for start in starts.tolist():
            batch.tokens[start : start + prompt_len] = prompt
        parts.append(batch)
    batch = concatenate(parts)
    if has_observations:
        marks = [
            [*[False] * prompt, *(i % 3 > 0 or i == length - 1 for i in range(length))]
            for prompt, lens in groups
            for length in lens
        ]
        num_drawn = torch.tensor([sum(of_row) for of_row in marks])
        batch = replace(
            batch,
            response_mask=torch.tensor([mark for of_row in marks for mark in of_row]),
            observation_lens=batch.response_lens - num_drawn,
            response_lens=num_drawn,
            rollout_log_probs=torch.zeros(int(num_drawn.sum())),
        )
    noise = torch.randn(5, len(batch.rollout_log_probs), generator=torch.Generator().manual_seed(6))
    return batch.with_fields(
        old_log_probs=noise[0] - 5,
        ref_log_probs=noise[1] - 5,
        advantages=noise[2],
        values=noise[3],
        returns=noise[4],
    )


# Responses of one token, a prompt of one, a group of one, equally long sequences of two groups.
GROUPS = [(12, (6, 1, 11, 6)), (12, (6, 3)), (1, (4, 1)), (7, (5,)), (21, (2, 2, 9))]


@pytest.fixture(scope="session")
def batch(workspaces: dict[str, Path]) -> RaggedBatch:
    """Return a batch with the edge cases of groups."""
    config = json.loads((workspaces["qwen3"] / "model" / "config.json").read_text())
    return grouped_batch(config["vocab_size"], GROUPS, has_observations=True)


def check(
    workers: Any, directory: Path, batch: RaggedBatch, budget: int = BUDGET, **settings: Any
) -> None:
    """Compare the passes with shared prompts and without on each rank."""
    # Of A_log and dt_bias the gradient is a sum over all tokens in which most cancels.
    most = 1e-6 if settings.get("in_float64") else 3e-4
    for rank, (scores, stats, grads, shared) in enumerate(
        workers.run(
            sharing_cases.compare,
            checkpoint=str(directory / "model"),
            batch=batch,
            budget=budget,
            **settings,
        )
    ):
        assert shared > 0
        assert scores < most / 10, f"{directory.name}, rank {rank}: log-probs off by {scores:.1e}"
        assert stats < most / 10, f"{directory.name}, rank {rank}: statistics off by {stats:.1e}"
        assert grads[0] < most, f"{directory.name}, rank {rank}: gradient off by {grads}"


@pytest.mark.parametrize("family", [*DENSE, *HYBRID, *EXPERTS])
def test_each_family(
    pool: Any, workspaces: dict[str, Path], batch: RaggedBatch, family: str
) -> None:
    """Compare a critic in float64. test_layouts has actors."""
    check(pool(1), workspaces[family], batch, role="critic", in_float64=True, tp=1, pp=1)


LAYOUTS_OF_FAMILIES = {
    ("qwen3", "gemma", "qwen3_5_text"): [
        (2, {"tp": 2, "pp": 1}),
        (2, {"tp": 1, "pp": 2}),
        (2, {"tp": 1, "pp": 1}),
        (4, {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute_granularity": "selective"}),
        (4, {"tp": 2, "pp": 1, "sequence_parallel": True, "recompute_granularity": "full"}),
    ],
    ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"): [
        (4, {"tp": 1, "pp": 2, "ep": 2}),
        (4, {"tp": 2, "pp": 1, "ep": 2, "sequence_parallel": True}),
        (2, {"tp": 1, "pp": 1, "ep": 2, "recompute_granularity": "full"}),
    ],
}
"""Families -> (number of ranks, layout)."""


@pytest.mark.parametrize(
    ("family", "world", "layout"),
    [
        (family, *layout)
        for families, layouts in LAYOUTS_OF_FAMILIES.items()
        for family in families
        for layout in layouts
    ],
)
def test_layouts(
    pool: Any,
    workspaces: dict[str, Path],
    batch: RaggedBatch,
    family: str,
    world: int,
    layout: dict[str, Any],
) -> None:
    check(pool(world), workspaces[family], batch, budget=120, **layout)


@pytest.mark.parametrize(
    ("family", "world", "layout"), [("qwen3", 2, {}), ("qwen3_moe", 4, {"ep": 2})]
)
def test_virtual_stages(
    pool: Any, tmp_path: Path, batch: RaggedBatch, family: str, world: int, layout: dict[str, int]
) -> None:
    settings = {**DENSE, **EXPERTS}[family]
    make_checkpoint(tmp_path / "model", **{**settings, "num_hidden_layers": 4})
    check(pool(world), tmp_path, batch, budget=120, tp=1, pp=2, vpp=2, **layout)


@pytest.mark.parametrize(
    ("world", "groups", "budget"),
    [
        pytest.param(2, [(12, (6, 1, 11, 6))], BUDGET, id="fewer groups than replicas"),
        pytest.param(1, [(12, (6, 1, 11, 6, 3)), (9, (3, 4))], 25, id="a group above the budget"),
    ],
)
def test_a_group_is_split(
    pool: Any, workspaces: dict[str, Path], world: int, groups: Any, budget: int
) -> None:
    config = json.loads((workspaces["qwen3"] / "model" / "config.json").read_text())
    batch = grouped_batch(config["vocab_size"], groups)
    check(pool(world), workspaces["qwen3"], batch, budget, tp=1, pp=1)


@pytest.mark.parametrize("name", ["sequence parallel", "experts, pipeline"])
def test_routers_count_a_prompt_for_each_of_its_responses(
    pool: Any, checkpoints: dict[str, str], name: str
) -> None:
    """Compare losses of the routers, correction biases, and passes that replay given experts, or
    those that a pass has recorded."""
    checkpoints = {model: checkpoints[model] for model in ("qwen3_moe", "glm4_moe")}
    vocab = HFReader(checkpoints["qwen3_moe"]).shape().vocab_size
    groups = [(8, (3, 2, 4)), (5, (4, 4)), (9, (1, 2, 1, 2))]
    batch = grouped_batch(vocab, groups).with_fields(numbers=torch.arange(9) + 20)
    draw = np.random.default_rng(3)
    choices = {}
    for model, checkpoint in checkpoints.items():
        shape = HFReader(checkpoint).shape()

        def experts(tokens: int, shape: Any = shape) -> np.ndarray:
            size = (tokens, len(shape.expert_layers), shape.num_experts)
            return draw.random(size).argsort(-1)[..., : shape.experts_per_token].astype(np.uint8)

        prompts = [experts(length) for length, _ in groups]
        choices[model] = [
            np.concatenate([prompt, experts(length - 1)])
            for prompt, (_, lens) in zip(prompts, groups, strict=True)
            for length in lens
        ]
    world, layout, settings = LAYOUTS[name]
    common = {"checkpoints": checkpoints, "batch": batch, "layout": layout, **settings}
    found = [
        pool(world).run(
            replay_cases.record_and_replay, choices=choices, share_prompts=shares, **common
        )
        for shares in (False, True)
    ]
    for rank in range(world):
        for model in checkpoints:
            (recorded, replayed), (shared_record, shared_replay) = (
                ranks[rank][model] for ranks in found
            )
            assert shared_replay[1] == pytest.approx(replayed[1], rel=1e-5)
            assert all(np.array_equal(shared_replay[2][n], x) for n, x in replayed[2].items())
            for a, b in zip(
                (*recorded, replayed[0]), (*shared_record, shared_replay[0]), strict=True
            ):
                assert float((a[0] - b[0]).abs().max()) < 1e-5
                for tensor, grad in a[1].items():
                    most = 1e-4 * max(np.abs(grad).max(), 1e-12)
                    assert np.abs(b[1][tensor] - grad).max() < most, (model, tensor)


def test_differing_choices_of_a_prompt_are_counted(pool: Any, checkpoints: dict[str, str]) -> None:
    """Let the engine have chosen other experts for half of the prompt's tokens of one of two
    responses, and the same ones in another order for the rest."""
    shape = HFReader(checkpoints["qwen3_moe"]).shape()
    batch = grouped_batch(shape.vocab_size, [(8, (3, 2))])
    batch = batch.with_fields(numbers=torch.arange(2) + 20)
    size = (int(batch.seq_lens.max()), len(shape.expert_layers), shape.experts_per_token)
    first = np.broadcast_to(np.array([1, 0], np.uint8), size)
    choices = [first[: length - 1].copy() for length in batch.seq_lens.tolist()]
    choices[1][:4] = [0, 1]
    choices[1][4:8] = [0, 2]
    (found,) = pool(1).run(
        replay_cases.record_and_replay,
        checkpoints={"qwen3_moe": checkpoints["qwen3_moe"]},
        batch=batch,
        choices={"qwen3_moe": choices},
        layout=(1, 1),
        share_prompts=True,
    )
    _, (results, _, _) = found["qwen3_moe"]
    assert results[3] == 0.5
