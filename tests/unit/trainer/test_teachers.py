"""Teachers of distillation in steps that do not update the actor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rlhf_mc.trainer.log_probs import teacher_log_probs


def test_teachers_do_not_score_while_the_critic_alone_is_trained() -> None:
    config = SimpleNamespace(trainer=SimpleNamespace(critic_warmup=2))
    run: Any = SimpleNamespace(config=config, teachers=["one"])
    state: Any = SimpleNamespace(step=2)
    batch: Any = object()
    assert teacher_log_probs(run, state, [], batch) is batch
