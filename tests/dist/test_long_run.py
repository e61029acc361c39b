"""Six steps of the quickstart on one process and, with its rollouts, on four: the same scores and
the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import long_run_cases
import pytest

pytestmark = pytest.mark.dist

STEPS = 6
CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
TP_2 = ["actor.megatron.tensor_model_parallel_size=2"]


@pytest.fixture(scope="module")
def alone(
    pool: Any, quickstart_overrides: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """Run on one process. Return (directory of the recorded rollouts and the exported weights,
    scores)."""
    out = tmp_path_factory.mktemp("alone")
    [(scores, _)] = pool(1).run(
        long_run_cases.run_steps,
        config_path=CONFIG,
        overrides=[*quickstart_overrides, f"trainer.default_local_dir={out}"],
        steps=STEPS,
        export_to=str(out),
        record_to=str(out / "rollouts"),
    )
    return out, scores


def test_four_processes_learn_like_one(
    alone: tuple[Path, Any], pool: Any, quickstart_overrides: list[str], tmp_path: Path
) -> None:
    out, wanted = alone
    results = pool(4).run(
        long_run_cases.run_steps,
        config_path=CONFIG,
        overrides=[*quickstart_overrides, *TP_2, f"trainer.default_local_dir={tmp_path}"],
        steps=STEPS,
        export_to=str(tmp_path),
        replay_from=str(out / "rollouts"),
    )
    # actor and critic
    assert all(models == (2, 0) for _, models in results), "the next run has less memory"
    assert all(scores == wanted for scores, _ in results)
    assert wanted[-1] > wanted[0] + 0.2
    start = cases.exported_weights(quickstart_overrides[0].partition("=")[2])
    one = cases.exported_weights(str(out))
    four = cases.exported_weights(str(tmp_path))
    for name, weight in one.items():
        distance = float((four[name] - weight).norm() / (weight - start[name]).norm())
        # Observed: 1e-4, and 1e-3 for the bias of the keys, whose gradient is zero up to rounding.
        assert distance < 5e-3, f"{name}: {distance:.1e} of its total change apart"
