"""The clock of trl_ppo.py and trl_grpo.py. It runs in the environment that has TRL."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback


class Clock(TrainerCallback):
    """Times of steps, and of the generation in each."""

    def __init__(self, owner: Any, name: str) -> None:
        """Time the generation by replacing the function `name` of a module or class."""
        self.steps: list[float] = []
        self.generation: list[float] = []
        self.last = 0.0
        self.in_generation = 0.0
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.in_generation += time.perf_counter() - start

        setattr(owner, name, timed)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.last = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.steps.append(now - self.last)
        self.generation.append(self.in_generation)
        self.last = now
        self.in_generation = 0.0
