"""The step count of optimizers that keep it by group, as Transformer Engine's and Apex's Adam
do."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from rlhf_mc.models.optimizer import adam_steps, set_adam_steps


class CountsByGroup(torch.optim.Optimizer):
    """An optimizer of another package than torch."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def test_count_by_group() -> None:
    main = torch.zeros(3)
    inner = CountsByGroup([main])
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])
    assert adam_steps(optimizer) == 0
    set_adam_steps(optimizer, 7)
    assert adam_steps(optimizer) == 7
    # a "step" there would be a third moment to TE
    assert inner.state[main].keys() == {"exp_avg", "exp_avg_sq"}
    set_adam_steps(optimizer, 0)
    assert adam_steps(optimizer) == 0
    assert not inner.state
