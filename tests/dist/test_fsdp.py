"""strategy fsdp2 computes what Megatron-Core's distributed optimizer does, to rounding: log-probs,
values, gradients, their norm and the weights after three steps, of every family, with replicas of
the shards, uneven rows, context parallelism, recomputed layers and shared prompts."""

from __future__ import annotations

from pathlib import Path
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

PROMPT_LENS = (3, 8, 4, 4, 4)
RESPONSE_LENS = (6, 1, 11, 5, 7)
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
    """Return random tokens, with random values in the fields that the losses read. Two sequences
    have one prompt."""
    empty = token_batch(32, PROMPT_LENS, RESPONSE_LENS)
    starts = empty.seq_lens.cumsum(0) - empty.seq_lens
    empty.tokens[starts[4] : starts[4] + 4] = empty.tokens[starts[3] : starts[3] + 4]
    noise = torch.randn(5, sum(RESPONSE_LENS), generator=torch.Generator().manual_seed(6))
    return empty.with_fields(
        old_log_probs=-3.5 + 0.3 * noise[0],
        ref_log_probs=-3.5 + 0.3 * noise[1],
        advantages=noise[2],
        values=noise[3],
        returns=noise[4],
    )


def check(pool: Any, world: int, cases: list[Case], batch: RaggedBatch, bound: float) -> None:
    for of_rank in pool(world).run(fsdp_cases.all_outcomes, cases=cases, batch=batch):
        for case, (wanted, found) in zip(cases, of_rank, strict=True):
            close(case, "scores", wanted.scores, found.scores, bound)
            assert found.stats == pytest.approx(wanted.stats, rel=bound, abs=bound), case
            assert found.norms == pytest.approx(wanted.norms, rel=bound), case
            assert wanted.norms[0] > 0
            for kind in ("gradients", "weights"):
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
    check(pool, world, [Case(path) for path in checkpoints.values()], batch, 2e-3)
