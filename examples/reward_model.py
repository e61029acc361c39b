"""A reward model trained on preference pairs, then PPO with it under an adaptive KL coefficient.

make quickstart  (once: it makes the policy and the questions)
python examples/reward_model.py                          (one process: the reward model, then PPO)
torchrun --nproc-per-node 2 examples/reward_model.py \
    --reward-model runs/reward_model/model  (PPO alone)

The policy adds two numbers and often forgets the carry. Of two answers the larger is preferred,
right or wrong. The reward model learns this rule, and PPO raises its scores, by carries first. The
controller adapts the coefficient of the KL penalty, so that the policy stays as near to the initial
one as target_kl says.
"""

import argparse
import os
import random
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_mc.api import Trainer

EPOCH = 5
"""Steps in which PPO answers each question once. Means over an epoch do not depend on the order of
the questions."""
TARGET_KL = 0.1
"""In nats: mean over the tokens of a response, then over responses."""


class Pair(NamedTuple):
    """A question with each of two answers, in the chat template and with the end token."""

    chosen: str
    rejected: str


def make_pairs(file: Path, tokenizer: Any, rng: random.Random) -> list[Pair]:
    """Return for each question of a prompt file two random answers, of which the larger is
    preferred."""
    pairs = []
    for row in pq.read_table(file).to_pylist():
        question = tokenizer.apply_chat_template(
            row["prompt"], tokenize=False, add_generation_prompt=True
        )
        rejected, chosen = sorted(rng.sample(range(10, 100), 2))
        pairs.append(
            Pair(*(f"{question}{answer}{tokenizer.eos_token}" for answer in (chosen, rejected)))
        )
    return pairs


def margins(model: Any, tokenizer: Any, pairs: list[Pair]) -> torch.Tensor:
    """Return score(chosen) - score(rejected): [pairs]. A score is the model's output at the end
    token."""
    texts = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    inputs = tokenizer(
        texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt"
    )
    scores = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]
    chosen, rejected = scores.chunk(2)
    return chosen - rejected


def train_reward_model(quickstart: Path, output: Path, seed: int) -> None:
    """Train a sequence classifier of one label by the Bradley-Terry loss, -log sigmoid(margin). It
    starts from the policy. Write it with the policy's tokenizer, as reward_model.model_path reads
    it."""
    transformers.utils.logging.disable_progress_bar()
    # it warns that the new head is not in the checkpoint
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model_hf")
    model = AutoModelForSequenceClassification.from_pretrained(
        quickstart / "model_hf", num_labels=1, dtype=torch.float32
    )
    pairs = make_pairs(quickstart / "train.parquet", tokenizer, rng)
    held_out = make_pairs(quickstart / "val.parquet", tokenizer, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=60)
    for _ in range(60):
        loss = -torch.nn.functional.logsigmoid(
            margins(model, tokenizer, rng.sample(pairs, 64))
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        accuracy = (margins(model, tokenizer, held_out) > 0).float().mean()
    print(
        f"reward model: it prefers the right answer of {accuracy:.1%} of {len(held_out)} held-out "
        "pairs",
        flush=True,
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def config(
    quickstart: Path, reward_model: Path, output: Path, num_steps: int, seed: int
) -> dict[str, Any]:
    """Return the sections of PPO that differ from the defaults."""
    return {
        "model": {"path": str(quickstart / "model_hf")},
        "reward_model": {"model_path": str(reward_model)},
        # it starts from the reward model
        "critic": {"model_path": str(reward_model), "optim": {"lr": 1e-3}},
        "data": {
            "train_files": str(quickstart / "train.parquet"),
            "val_files": str(quickstart / "val.parquet"),
            "train_batch_size": 256,
            "max_prompt_length": 16,
            "max_response_length": 4,
        },
        "algorithm": {
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 3.0, "target_kl": TARGET_KL, "horizon": 500},
        },
        "actor": {
            "ppo_mini_batch_size": 64,
            "optim": {"lr": 1e-4},
            "megatron": {"dtype": "float32"},
        },
        "trainer": {
            "default_local_dir": str(output),
            "total_training_steps": num_steps,
            # the actor does not change yet: the first epoch has the initial policy's scores
            "critic_warmup": EPOCH,
            "logger": ["jsonl"],
            "seed": seed,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quickstart",
        type=Path,
        default=Path("runs/quickstart"),
        help="what `make quickstart` made",
    )
    parser.add_argument(
        "--reward-model", type=Path, help="one that this program has trained; default: train it"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/reward_model"))
    parser.add_argument("--steps", type=int, default=30, help="of PPO")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="other settings")
    arguments = parser.parse_args()

    reward_model = arguments.reward_model or arguments.output / "model"
    if arguments.reward_model is None:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            sys.exit("error: --reward-model is needed on several ranks; one process trains it")
        train_reward_model(arguments.quickstart, reward_model, arguments.seed)

    sections = config(
        arguments.quickstart,
        reward_model,
        arguments.output / "ppo",
        arguments.steps,
        arguments.seed,
    )
    scores: list[float] = []
    kls: list[float] = []
    for step in Trainer(sections, arguments.overrides):
        scores.append(step.metrics["critic/score/mean"])
        kls.append(step.metrics["actor/reward_kl_penalty"])
        if os.environ.get("RANK", "0") == "0" and step.number % EPOCH == 0:
            coefficient = step.metrics["actor/reward_kl_penalty_coeff"]
            print(
                f"steps {step.number - EPOCH + 1} to {step.number}: mean score "
                f"{fmean(scores[-EPOCH:]):.2f}, KL {fmean(kls[-EPOCH:]):.3f} (target {TARGET_KL}), "
                f"its coefficient {coefficient:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
