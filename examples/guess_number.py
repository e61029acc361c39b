"""An environment of several turns: guess a number from 1 to 15 in at most four guesses. The reward
is 1 for the number.

python tools/make_guessing_game.py --output runs/guessing  (once: it makes model and prompts)
python examples/guess_number.py [section.key=value ...]  (or torchrun --nproc-per-node 2 ...)

A run of the command line takes this file as well:
python -m rlhf_mc configs/quickstart_turns.yaml
"""

import os
import sys
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "quickstart_turns.yaml"

FEWEST = 1
MOST = 15


class Environment:
    """One game."""

    def __init__(self, num_guesses: int = 4) -> None:
        self._left = num_guesses
        self._secret = 0

    def reset(self, row: dict[str, Any]) -> None:
        """Begin a game about the row's number."""
        self._secret = int(row["ground_truth"])

    def step(self, response: str) -> tuple[list[dict[str, str]], float, bool, dict[str, float]]:
        """Answer a guess."""
        self._left -= 1
        text = response.strip()
        is_number = text.isdecimal()
        guess = int(text) if is_number else 0
        if guess == self._secret:
            return [], 1.0, True, {"guesses_left": self._left}
        hint = "higher" if guess < self._secret else "lower"
        content = hint if is_number else f"a number from {FEWEST} to {MOST}"
        return (
            [{"role": "user", "content": content}],
            0.0,
            self._left == 0,
            {"guesses_left": self._left},
        )


def main() -> None:
    from rlhf_mc.api import Trainer  # not in the worker processes, which need no torch

    overrides = [f"rollout.environment.path={__file__}", "trainer.logger=[jsonl]"]
    for step in Trainer(CONFIG, [*overrides, *sys.argv[1:]]):
        if os.environ.get("RANK", "0") == "0":
            score = step.metrics["critic/score/mean"]
            turns = step.metrics["num_turns/mean"]
            print(f"step {step.number}: games won {score:.1%}, guesses {turns:.2f}", flush=True)


if __name__ == "__main__":
    main()
