"""Learning rates of a run, step by step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.models.optimizer import learning_rate_schedule


def learning_rates(optim: OptimConfig, total_steps: int) -> list[float]:
    """Return the learning rate of each step, and the one that a further step would have."""
    optimizer = SimpleNamespace(param_groups=[{}])
    schedule = learning_rate_schedule(optimizer, optim, total_steps)
    out = []
    for _ in range(total_steps + 1):
        out.append(optimizer.param_groups[0]["lr"])
        schedule.step(increment=1)
    return out


@pytest.mark.parametrize("min_lr", [0.0, 0.1])
@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 7, 8])
def test_min_lr_is_reached_after_the_last_step(warmup: int, style: str, min_lr: float) -> None:
    optim = OptimConfig(lr=1.0, min_lr=min_lr, lr_warmup_steps=warmup, lr_decay_style=style)
    rates = learning_rates(optim, total_steps=8)
    assert all(rate > min_lr for rate in rates[:8]), rates  # the last step still learns
    assert rates[8] == pytest.approx(min_lr, abs=1e-12)
    assert rates[:warmup] == pytest.approx([(s + 1) / warmup for s in range(warmup)])
    peak = max(warmup, 1)
    assert rates[peak - 1] == 1.0
    assert rates[peak - 1 :] == sorted(rates[peak - 1 :], reverse=True)
    assert len(set(rates[peak - 1 :])) == len(rates) - peak + 1  # each lower than the one before


def test_learning_rates_by_hand() -> None:
    linear = OptimConfig(lr=1.0, lr_warmup_steps=2, lr_decay_style="linear")
    assert learning_rates(linear, 5) == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])
    assert learning_rates(OptimConfig(lr=1.0, lr_decay_style="linear"), 4) == pytest.approx(
        [1, 0.75, 0.5, 0.25, 0]
    )
    by_ratio = OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.5, lr_decay_style="linear")
    assert learning_rates(by_ratio, 4) == learning_rates(linear, 4)
    assert learning_rates(OptimConfig(lr=1.0, lr_warmup_steps=2), 3) == pytest.approx(
        [0.5, 1.0, 1.0, 1.0]
    )
