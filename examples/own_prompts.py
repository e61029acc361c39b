"""PPO on prompts and a reward from this program, step by step, on the quickstart's small model.

make quickstart                                          (once: it makes the model)
python examples/own_prompts.py  (or torchrun --nproc-per-node 2 ...)
"""

import argparse
import os
from typing import Any

from rlhf_mc.api import Trainer


def short_and_even(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    """Reward an even number, and a short answer a little."""
    digits = solution_str.strip()
    is_even = digits.isdecimal() and int(digits) % 2 == 0
    return {"score": float(is_even) - 0.01 * len(digits), "acc": float(is_even)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quickstart", default="runs/quickstart", help="what `make quickstart` has made"
    )
    parser.add_argument("--output", default="runs/own_prompts")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    trainer = Trainer(
        {
            "data": {"train_batch_size": 32, "max_prompt_length": 16, "max_response_length": 8},
            "model": {"path": f"{arguments.quickstart}/model_hf"},
            "actor": {
                "ppo_mini_batch_size": 16,
                "optim": {"lr": 3e-4},
                "megatron": {"dtype": "float32"},
            },
            "critic": {"optim": {"lr": 1e-3}},
            "rollout": {"n": 2},
            "trainer": {
                "default_local_dir": arguments.output,
                "total_training_steps": arguments.steps,
                "logger": [],
            },
        },
        prompts=[f"{a}+{b}=" for a in range(10, 30) for b in range(10, 30)],
        reward=short_and_even,
    )
    for step in trainer:
        if os.environ.get("RANK", "0") == "0":
            decode = trainer.run.tokenizer.decode  # while the steps run there is a run
            question = decode(step.prompts[0].token_ids)
            answer = decode(step.batch.responses()[0])
            score = step.metrics["critic/score/mean"]
            print(f"step {step.number}: mean score {score:.3f}; to {question!r} it says {answer!r}")


if __name__ == "__main__":
    main()
