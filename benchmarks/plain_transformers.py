"""Plain transformers beside the trainers of vs_trl.py: the passes of a GRPO step over packed
sequences, and the greedy accuracy of a trained model on held-out questions.

    python plain_transformers.py accuracy MODEL_DIR SETTINGS.json
    torchrun plain_transformers.py passes MODEL_DIR SETTINGS.json

Rank 0 prints one JSON object.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def load_reward(path: str) -> Callable[..., float]:
    """Return compute_score of a file."""
    spec = importlib.util.spec_from_file_location("reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., float] = module.compute_score
    return function


def prompts(tokenizer: Any, rows: list[dict[str, Any]]) -> list[list[int]]:
    """Return the token ids of the rows' prompts in the model's own chat template."""
    chats = [row["prompt"] for row in rows]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, settings: dict[str, Any]) -> float:
    """Return the mean score of greedy responses to the held-out rows."""
    compute_score = load_reward(settings["reward"])
    scores = []
    for row, prompt in zip(settings["val"], prompts(tokenizer, settings["val"]), strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=settings["longest"],
            do_sample=False,
        )
        text = tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)
        scores.append(compute_score(row["data_source"], text, row["answer"]))
    return sum(scores) / len(scores)


def packed(settings: dict[str, Any], world: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's micro-batches of a step: token ids and positions, [1, tokens] each. All
    sequences have the mean length of the step's."""
    length = round(settings["tokens"] / settings["sequences"])
    count = settings["sequences"] // world
    per_batch = max(1, settings["packed"] // length)
    sizes = [min(per_batch, count - start) for start in range(0, count, per_batch)]
    positions = torch.arange(length)
    return [
        (torch.randint(1000, 40000, (1, size * length)), positions.repeat(size)[None])
        for size in sizes
    ]


def passes(model: Any, settings: dict[str, Any]) -> list[float]:
    """Return the seconds of each repetition of a step's passes: the reference's forward pass, and
    the actor's with its gradient. All ranks take part: they share the machine."""
    batches = packed(settings, dist.get_world_size())
    seconds = []
    for _ in range(settings["repetitions"] + 1):  # the first one warms up
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        for tokens, positions in batches:
            inputs = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
            with torch.no_grad():
                model(**inputs)
            logits = model(**inputs).logits
            torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def main() -> None:
    what, directory, settings_path = sys.argv[1:]
    settings = json.loads(Path(settings_path).read_text())
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if what == "accuracy":
        print(json.dumps(accuracy(model, AutoTokenizer.from_pretrained(directory), settings)))
        return
    dist.init_process_group("gloo")
    seconds = passes(model, settings)
    if os.environ["RANK"] == "0":
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
