"""A reward function of your own, as a function and as a class, in PPO on the quickstart's
additions.

make quickstart  (once: it makes model and questions)
python examples/custom_reward.py [section.key=value ...]  (or torchrun --nproc-per-node 2 ...)

A run of the command line takes this file as well:
python -m rlhf_mc configs/quickstart.yaml custom_reward_function.path=examples/custom_reward.py
"""

import os
import sys
from pathlib import Path
from typing import Any

from rlhf_mc.api import Trainer

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    """Return the share of right digits as the score, and whether all are right as the accuracy."""
    pairs = zip(solution_str, ground_truth, strict=False)
    right = sum(digit == wanted for digit, wanted in pairs)
    return {
        "score": right / max(len(solution_str), len(ground_truth)),
        "acc": float(solution_str == ground_truth),
    }


class TensFirst:
    """A class: each worker process makes one object, from custom_reward_function.reward_kwargs."""

    def __init__(self, tens: float = 0.5) -> None:
        self.weights = (tens, 1.0 - tens)

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> dict[str, float]:
        """Return the weights of the right digits. Further numbers, here `tens`, are logged as
        metrics."""
        is_right = [
            digit == wanted for digit, wanted in zip(solution_str, ground_truth, strict=False)
        ]
        score = sum(weight * right for weight, right in zip(self.weights, is_right, strict=False))
        return {
            "score": score,
            "acc": float(solution_str == ground_truth),
            "tens": float(is_right[:1] == [True]),
        }


def main() -> None:
    overrides = [
        f"custom_reward_function.path={__file__}",
        "custom_reward_function.name=TensFirst",  # compute_score is the default
        "custom_reward_function.reward_kwargs.tens=0.7",
        "trainer.default_local_dir=runs/custom_reward",
        "trainer.logger=[jsonl]",
    ]
    for step in Trainer(CONFIG, [*overrides, *sys.argv[1:]]):
        if os.environ.get("RANK", "0") == "0":
            score = step.metrics["critic/score/mean"]
            tens = step.metrics["reward_extra/arithmetic/tens"]
            print(f"step {step.number}: mean score {score:.3f}, right tens {tens:.1%}", flush=True)


if __name__ == "__main__":
    main()
