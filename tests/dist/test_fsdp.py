"""strategy fsdp2 computes what Megatron-Core's distributed optimizer does, to rounding: log-probs,
values, gradients, their norm and the weights after two steps, of every family, with replicas of
the shards, uneven rows, context parallelism, recomputed layers and shared prompts."""

from __future__ import annotations

from typing import Any

import fsdp_cases
import pytest
import torch
from fsdp_cases import Case
from gpu_parts.engines import token_batch
from test_family_models import DENSE, EXPERTS, HYBRID
from tiny import make_checkpoint

from rlhf_mc.data.batch import RaggedBatch

pytestmark = pytest.mark.dist

PROMPT_LENS = (3, 8, 4, 4, 4, 2, 6, 5)
RESPONSE_LENS = (6, 1, 11, 5, 7, 9, 3, 4)
FAMILIES = {"tied": {"tied": True}, "untied": {"tied": False}} | DENSE | HYBRID | EXPERTS


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a checkpoint of each family."""
    root = tmp_path_factory.mktemp("fsdp")
    for name, extra in FAMILIES.items():
        make_checkpoint(root / name, **{"num_hidden_layers": 2, **extra})
    return {name: str(root / name) for name in FAMILIES}


@pytest.fixture(scope="session")
def batch() -> RaggedBatch:
    """Return random tokens, and what the critic's loss reads. Two sequences have one prompt."""
    empty = token_batch(32, PROMPT_LENS, RESPONSE_LENS)
    starts = empty.seq_lens.cumsum(0) - empty.seq_lens
    empty.tokens[starts[4] : starts[4] + 4] = empty.tokens[starts[3] : starts[3] + 4]
    noise = torch.randn(2, sum(RESPONSE_LENS), generator=torch.Generator().manual_seed(6))
    return empty.with_fields(values=noise[0], returns=noise[1], numbers=torch.arange(8) + 20)


def check(pool: Any, world: int, cases: list[Case], batch: RaggedBatch, bound: float) -> None:
    for of_rank in pool(world).run(fsdp_cases.all_outcomes, cases=cases, batch=batch):
        for case, (wanted, found) in zip(cases, of_rank, strict=True):
            close(case, "scores", wanted.scores, found.scores, bound)
            assert found.stats == pytest.approx(wanted.stats, rel=bound, abs=bound), case
            assert found.norms == pytest.approx(wanted.norms, rel=bound), case
            assert wanted.norms[0] > 0
            for kind in ("weights",) if case.distributed else ("gradients", "weights"):
                pairs = getattr(wanted, kind), getattr(found, kind)
                assert pairs[0].keys() == pairs[1].keys()
                for name, tensor in pairs[0].items():
                    close(case, f"{kind} {name}", tensor, pairs[1][name], bound)


def close(case: Case, what: str, wanted: torch.Tensor, found: torch.Tensor, bound: float) -> None:
    difference = float((wanted.float() - found.float()).abs().max())
    assert difference <= bound * max(1e-3, float(wanted.abs().max())), (case, what, difference)


@pytest.mark.parametrize("world", [2])
def test_every_family(
    pool: Any, checkpoints: dict[str, str], batch: RaggedBatch, world: int
) -> None:
    check(
        pool, world, [Case(path, distributed=False) for path in checkpoints.values()], batch, 1e-4
    )


@pytest.mark.parametrize("world", [4])
def test_layouts(pool: Any, checkpoints: dict[str, str], batch: RaggedBatch, world: int) -> None:
    """Check replicas of the shards (HSDP), rows that four ranks do not share evenly (the value
    head's one row), and context parallelism, also with the routers' losses, correction biases and
    replayed experts."""
    tied, untied, biased = (checkpoints[name] for name in ("tied", "untied", "glm4_moe"))
    cases = [
        Case(tied, shards=2, budget=16),
        Case(untied, shards=1),
        Case(untied, shards=2, sharding={"reshard_after_forward": False}),
        Case(untied, "critic"),
        Case(untied, cp=2),
        Case(biased, routers=True, cp=2),
    ]
    check(pool, world, cases, batch, 1e-4)
    check(pool, 1, [Case(untied, "critic")], batch, 1e-4)


@pytest.mark.parametrize("world", [2])
def test_settings(pool: Any, checkpoints: dict[str, str], batch: RaggedBatch, world: int) -> None:
    """Check what changes the passes: offload, recomputed layers, frozen tensors, the routers'
    losses, replayed experts and bfloat16 among it."""
    tied, untied, experts = (checkpoints[name] for name in ("tied", "untied", "qwen3_moe"))
    cases = [
        Case(experts, sharding={"offload_policy": True}),
        Case(untied, "critic", freeze=("model.*",)),
        Case(tied, megatron={"recompute_granularity": "full"}),
        Case(experts, megatron={"recompute_granularity": "selective"}),
        Case(tied, megatron={"share_prompts": False}),
        Case(tied, freeze=("model.embed_tokens.*", "model.layers.0.*")),
        Case(experts, routers=True),
    ]
    check(pool, world, cases, batch, 1e-4)
    bfloat16 = [Case(path, megatron={"dtype": "bfloat16"}) for path in (tied, experts)]
    check(pool, world, bfloat16, batch, 2e-2)
