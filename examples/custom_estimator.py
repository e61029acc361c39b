"""An advantage estimator of your own, without a critic, on the quickstart's additions.

make quickstart  (once: it makes model and questions)
python examples/custom_estimator.py [section.key=value ...]  (or torchrun --nproc-per-node 2 ...)

A run of the command line takes this file as well:
python -m rlhf_mc configs/quickstart_grpo.yaml algorithm.adv_estimator=custom \
    algorithm.custom_estimator.path=examples/custom_estimator.py \
    algorithm.custom_estimator.needs=[group]
"""

import os
import sys
from pathlib import Path

import torch

from rlhf_mc.algorithms.estimators import Estimate, EstimatorInputs
from rlhf_mc.api import Trainer

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "quickstart_grpo.yaml"


def estimate(inputs: EstimatorInputs) -> Estimate:
    """Return A_i = mean over the prompt's other responses j of sign(score_i - score_j), for each
    token of response i.

    It lies between -1 and 1 and sums to 0 over a prompt's responses. Only the order of the scores
    counts: the scale of a reward model's scores has no effect."""
    same_prompt = inputs.group[:, None] == inputs.group[None, :]
    wins = torch.sign(inputs.scores[:, None] - inputs.scores[None, :]) * same_prompt
    advantages = wins.sum(dim=1) / (same_prompt.sum(dim=1) - 1)
    return Estimate(inputs.per_token(advantages))


def main() -> None:
    overrides = [
        "algorithm.adv_estimator=custom",
        f"algorithm.custom_estimator.path={__file__}",
        # it compares responses; no critic, no greedy baseline
        "algorithm.custom_estimator.needs=[group]",
        "trainer.default_local_dir=runs/custom_estimator",
        "trainer.logger=[jsonl]",
    ]
    for step in Trainer(CONFIG, [*overrides, *sys.argv[1:]]):
        if os.environ.get("RANK", "0") == "0":
            score, largest = (
                step.metrics[key] for key in ("critic/score/mean", "critic/advantages/max")
            )
            print(
                f"step {step.number}: mean score {score:.3f}, largest advantage {largest:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
