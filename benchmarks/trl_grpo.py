"""TRL's GRPO on the task of tools/make_smollm2.py. vs_trl.py starts it, in the environment that has
TRL.

    python trl_grpo.py SETTINGS.json      # under torchrun: one process for each replica

Rank 0 prints one JSON object, with seconds, mean reward and tokens of each step, and writes the
trained model.
"""

# ruff: noqa: E402 (vLLM is hidden from TRL before TRL is imported)

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
_find_spec = importlib.util.find_spec
# TRL would import this project's vLLM, a version that it does not know; it generates by
# transformers.
importlib.util.find_spec = lambda name, *args: (
    None if name.split(".")[0] == "vllm" else _find_spec(name, *args)
)

import torch
import transformers
from datasets import Dataset
from plain_transformers import load_reward
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_clock import Clock


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    world = int(os.environ["WORLD_SIZE"])
    transformers.utils.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    compute_score = load_reward(settings["reward"])

    def reward_function(completions: Any, data_source: Any, answer: Any, **_: Any) -> list[float]:
        texts = [one[0]["content"] for one in completions]
        return [compute_score(*row) for row in zip(data_source, texts, answer, strict=True)]

    args = GRPOConfig(
        output_dir=settings["output"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=settings["sequences"] // world // settings["micro_batch"],
        num_generations=settings["n"],
        max_completion_length=settings["longest"],
        max_steps=settings["steps"],
        beta=settings["beta"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        ddp_find_unused_parameters=False,
        seed=settings["seed"],
    )
    clock = Clock(GRPOTrainer, "_generate")
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward_function,
        args=args,
        train_dataset=Dataset.from_list(settings["rows"]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    if os.environ["RANK"] == "0":
        trainer.model.save_pretrained(Path(settings["output"]) / "hf")
        tokenizer.save_pretrained(Path(settings["output"]) / "hf")
        log = [row for row in trainer.state.log_history if "reward" in row]
        result = {"steps": clock.steps, "generation": clock.generation}
        print(json.dumps(result | {"reward": [row["reward"] for row in log]}), flush=True)


if __name__ == "__main__":
    main()
