"""TRL's PPO on the work of workload.py. vs_trl.py starts it, in the environment that has TRL.
Nothing of rlhf_mc is imported.

    python trl_ppo.py SETTINGS.json      # under torchrun: one process for each replica

Rank 0 prints one JSON object: seconds of each step, and of the generation in it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer
from trl_clock import Clock


class FunctionReward(torch.nn.Module):
    """A reward that costs nothing, in the form of a reward model: the share of even tokens."""

    base_model_prefix = "backbone"

    def __init__(self) -> None:
        super().__init__()
        self.backbone = lambda input_ids, **_: SimpleNamespace(
            hidden_states=[(input_ids % 2 == 0).float()[..., None]]
        )
        self.score = torch.nn.Identity()


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    world = int(os.environ["WORLD_SIZE"])
    local = settings["num_prompts"] // world
    micro = min(settings["micro_batch"], settings["mini_batch"] // world)
    transformers.utils.logging.disable_progress_bar()
    path = settings["model"]
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2)
    )
    value = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32, num_labels=1
    )
    args = PPOConfig(
        output_dir=settings["output"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=local // micro,
        num_mini_batches=settings["num_prompts"] // settings["mini_batch"],
        num_ppo_epochs=1,
        local_rollout_forward_batch_size=settings["rollout_batch"] or local,
        response_length=settings["longest"],
        stop_token="eos" if settings["has_end"] else None,
        total_episodes=settings["num_prompts"] * settings["steps"],
        num_sample_generations=0,
        learning_rate=1e-6,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=10**6,
        ddp_find_unused_parameters=False,
        seed=1,
    )
    clock = Clock(ppo_trainer, "batch_generation")
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=FunctionReward(),
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": settings["prompts"]}),
        callbacks=[clock],
    )
    # TRL would step once for all micro-batches of a batch, whatever the number of mini-batches.
    trainer.accelerator.gradient_accumulation_steps = settings["mini_batch"] // world // micro
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    if os.environ["RANK"] == "0":
        print(json.dumps({"steps": clock.steps, "generation": clock.generation}), flush=True)


if __name__ == "__main__":
    main()
