"""Two PPO steps in every layout: the same rollouts, losses, gradient norms and weights, and vLLM holds exactly
what the exported checkpoint says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from tiny import make_workspace, write_config

# (world, tp, pp, rollout TP); data-parallel size is what remains.
LAYOUTS = [
    (1, 1, 1, 1),
    (2, 2, 1, 1),
    (2, 2, 1, 2),
    (2, 1, 2, 1),
    (2, 1, 2, 2),
    (2, 1, 1, 1),
    (2, 1, 1, 2),
    (4, 2, 2, 1),
    (4, 2, 2, 2),
    (4, 2, 2, 4),
    (4, 2, 1, 1),
    (4, 2, 1, 2),
    (4, 2, 1, 4),
    (4, 1, 2, 1),
    (4, 1, 2, 2),
    (4, 1, 2, 4),
]

COMPARED = ("actor/loss", "actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "actor/entropy")


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="session")
def reference(pool: Any, workspace: Path) -> dict[str, Any]:
    """One process: what all layouts must reproduce."""
    config = write_config(workspace)
    result = pool(1).run(
        cases.two_steps,
        config_path=str(config),
        tp=1,
        pp=1,
        rollout_tp=1,
        overrides=[],
        export_to=str(workspace / "ref"),
    )[0]
    return {**result, "weights": cases.exported_weights(str(workspace / "ref"))}


@pytest.mark.parametrize(("world", "tp", "pp", "rollout_tp"), LAYOUTS)
def test_every_layout_trains_alike(
    pool: Any, reference: dict[str, Any], workspace: Path, world: int, tp: int, pp: int, rollout_tp: int
) -> None:
    export_to = workspace / f"out_{world}_{tp}_{pp}_{rollout_tp}"
    results = pool(world).run(
        cases.two_steps,
        config_path=str(workspace / "config.yaml"),
        tp=tp,
        pp=pp,
        rollout_tp=rollout_tp,
        overrides=[],
        export_to=str(export_to),
    )
    for rank, result in enumerate(results):
        assert result["different"] == [], f"rank {rank}: vLLM's weights are not the exported ones"
        assert result["digests"] == reference["digests"], f"rank {rank} drew other tokens"
        for step, (mine, wanted) in enumerate(zip(result["steps"], reference["steps"], strict=True), 1):
            assert mine["training/rollout_logprobs_diff_max"] < 1e-4
            for key in COMPARED:
                assert mine[key] == pytest.approx(wanted[key], rel=2e-4, abs=2e-6), f"rank {rank}, step {step}: {key}"
    weights = cases.exported_weights(str(export_to))
    assert weights.keys() == reference["weights"].keys()
    for name, wanted in reference["weights"].items():
        torch.testing.assert_close(weights[name], wanted, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_the_weights_moved(reference: dict[str, Any], workspace: Path) -> None:
    """The comparison above is of weights that training has changed."""
    start = cases.exported_weights(str(workspace / "model"))
    assert all(not torch.equal(start[name], weight) for name, weight in reference["weights"].items())
