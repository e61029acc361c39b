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
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
_find_spec = importlib.util.find_spec
# TRL would import this project's vLLM, a version that it does not know; it generates by transformers.
importlib.util.find_spec = lambda name, *args: None if name.split(".")[0] == "vllm" else _find_spec(name, *args)

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Times of steps, and of the generation in each."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.generation: list[float] = []
        self.last = 0.0
        self.in_generation = 0.0
        original = GRPOTrainer._generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.in_generation += time.perf_counter() - start

        GRPOTrainer._generate = timed

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.last = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.steps.append(now - self.last)
        self.generation.append(self.in_generation)
        self.last = now
        self.in_generation = 0.0


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    world = int(os.environ["WORLD_SIZE"])
    transformers.utils.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    scores = importlib.util.spec_from_file_location("reward", settings["reward"])
    reward = importlib.util.module_from_spec(scores)
    scores.loader.exec_module(reward)

    def reward_function(completions: Any, data_source: Any, answer: Any, **_: Any) -> list[float]:
        texts = [one[0]["content"] for one in completions]
        return [reward.compute_score(*row) for row in zip(data_source, texts, answer, strict=True)]

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
        beta=0.001,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        ddp_find_unused_parameters=False,
        seed=settings["seed"],
    )
    clock = Clock()
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
