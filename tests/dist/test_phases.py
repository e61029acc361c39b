"""Settings that change which phases of a step do something, by the loop itself on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import torch
from tiny import make_workspace, write_config


def test_while_the_critic_warms_up_the_actor_stays(pool: Any, tmp_path: Path) -> None:
    make_workspace(tmp_path)
    result = cases.run_two_steps(
        pool(1), write_config(tmp_path), (1, 1, 1), tmp_path / "out", ["trainer.critic_warmup=1"]
    )[0]
    first, second = result["steps"]
    assert "actor/loss" not in first and "actor/loss" in second
    assert first["critic/grad_norm"] > 0 and second["critic/values/mean"] != first["critic/values/mean"]
    result = cases.run_two_steps(
        pool(1), tmp_path / "config.yaml", (1, 1, 1), tmp_path / "still", ["trainer.critic_warmup=2"]
    )[0]
    start, still = (cases.exported_weights(str(tmp_path / name)) for name in ("model", "still"))
    moved = cases.exported_weights(str(tmp_path / "out"))
    assert all(torch.equal(start[name], still[name]) for name in start)
    assert any(not torch.equal(start[name], moved[name]) for name in start)
