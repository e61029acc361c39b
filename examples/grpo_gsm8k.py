"""GRPO on GSM8K, from a Hugging Face checkpoint such as Qwen2.5-0.5B-Instruct, on one node of 8
GPUs.

python tools/prepare_data.py --dataset gsm8k --input DIR --output data/gsm8k
    (once; DIR has GSM8K's files)
torchrun --nproc-per-node 8 examples/grpo_gsm8k.py --model DIR [--data data/gsm8k] \
    [section.key=value ...]

The same command resumes a run that was interrupted. Batch sizes, learning rate and KL term are
those of verl's example of GRPO on the Megatron back end,
examples/grpo_trainer/run_qwen2-7b_math_megatron.sh.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from rlhf_mc.api import Trainer

ACCURACY = "val-core/openai/gsm8k/acc/mean@1"


def config(model: Path, data: Path) -> dict[str, Any]:
    """Return the sections that differ from the defaults."""
    return {
        "model": {"path": str(model)},
        "data": {
            "train_files": str(data / "train.parquet"),
            "val_files": str(data / "test.parquet"),
            "train_batch_size": 1024,  # prompts per step: 7 steps per epoch
            "max_prompt_length": 512,  # the longest question of GSM8K fits
            "max_response_length": 1024,
        },
        "algorithm": {"adv_estimator": "grpo"},  # no critic
        "rollout": {"n": 5},  # responses of a prompt, which are compared with each other
        "actor": {
            "ppo_mini_batch_size": 256,  # prompts per optimizer step: 4 optimizer steps per batch
            "use_kl_loss": True,
            "kl_loss_coef": 0.001,
            "kl_loss_type": "low_var_kl",
            "optim": {"lr": 1e-6},
        },
        "trainer": {
            "default_local_dir": "runs/grpo_gsm8k",
            "total_epochs": 15,
            "val_before_train": True,
            "test_freq": 5,  # greedy accuracy on the test questions
            "save_freq": 20,
            "max_ckpt_to_keep": 2,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="Hugging Face checkpoint: a directory"
    )
    parser.add_argument(
        "--data", type=Path, default=Path("data/gsm8k"), help="output of tools/prepare_data.py"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="other settings")
    arguments = parser.parse_args()
    for step in Trainer(config(arguments.model, arguments.data), arguments.overrides):
        if ACCURACY in step.metrics and os.environ.get("RANK", "0") == "0":
            print(
                f"step {step.number}: {step.metrics[ACCURACY]:.1%} of the test questions",
                flush=True,
            )


if __name__ == "__main__":
    main()
