"""Make the tokenizer, the small model with a bad habit, and the prompts of
examples/guess_number.py, a guessing game.

    python tools/make_guessing_game.py --output runs/guessing [--seed 1]

The model (that of make_quickstart.py) guesses a number from 1 to 15 in four turns, and after each
is told whether the number is higher or lower. It is warmed up by supervised learning: first to
halve the numbers that are left, which finds every number, then mostly to count up, its habit, which
finds one of four. Greedy games then lose, and sampled ones win often enough for reinforcement
learning to find the better way from reward alone.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from rlhf_mc.runtime.tool import Parser, end_on_interrupt, whole_number

if __name__ == "__main__":
    end_on_interrupt()

import torch
import transformers
from make_quickstart import PEAK_LR, new_model, train_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.source import write_prompts
from rlhf_mc.runtime.exit_codes import exit_code

MOST = 15
TURNS = 4
QUESTION = f"1-{MOST}?"
HABIT_RATE = 0.75
"""Share of the guesses of the second part that count up."""
BATCH_SIZE = 64
STEPS = {"halve": 240, "habit": 60}
ROWS_OF_A_NUMBER = 32
MAX_START_ACCURACY = 0.5

Message = dict[str, str]


def guess_of(low: int, high: int, habit: bool) -> int:
    """Return a teacher's guess where the numbers from low to high are left."""
    return low if habit else (low + high) // 2


def game(rng: random.Random, part: str) -> tuple[list[Message], str]:
    """Return a game up to a random turn, and the teacher's guess in it. In the first part earlier
    guesses are random: the teacher's are learnt for any of them."""
    secret = rng.randint(1, MOST)
    low = 1
    high = MOST
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(rng.randrange(TURNS)):
        is_habit = rng.random() < HABIT_RATE
        guess = rng.randint(low, high) if part == "halve" else guess_of(low, high, is_habit)
        if guess == secret:
            break
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        hint = "higher" if guess < secret else "lower"
        messages += [
            {"role": "assistant", "content": str(guess)},
            {"role": "user", "content": hint},
        ]
    return messages, str(guess_of(low, high, part == "habit" and rng.random() < HABIT_RATE))


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[int]:
    """Return the tokens of a game, with the generation prompt."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def train(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
    """Train on the teacher's guesses of both parts."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LR / 2, betas=(0.9, 0.98), weight_decay=0.1
    )
    for part, steps in STEPS.items():
        for step in range(steps):
            rows = []
            for messages, guess in (game(rng, part) for _ in range(BATCH_SIZE)):
                answer = tokenizer(guess + tokenizer.eos_token, add_special_tokens=False)[
                    "input_ids"
                ]
                rows.append((encode(tokenizer, messages), list(answer)))
            length = max(len(prompt) + len(answer) for prompt, answer in rows)
            tokens = torch.tensor([[*p, *a] + [0] * (length - len(p) - len(a)) for p, a in rows])
            labels = torch.tensor(
                [[-100] * len(p) + a + [-100] * (length - len(p) - len(a)) for p, a in rows]
            )
            # a causal model: padding at the end changes nothing before
            loss = model(tokens, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if (step + 1) % 50 == 0:
                print(f"  {part:5s} step {step + 1:3d}  loss {loss.item():.3f}", flush=True)
        print(f"  {part:5s} greedy games won: {won(model, tokenizer):.1%}", flush=True)


@torch.no_grad()
def won(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Return the share of the numbers that greedy games find."""
    count = 0
    for secret in range(1, MOST + 1):
        messages = [{"role": "user", "content": QUESTION}]
        for _ in range(TURNS):
            prompt = torch.tensor([encode(tokenizer, messages)])
            tokens = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False
            )
            text = tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)
            if not text.isdecimal() or int(text) == secret:
                count += text == str(secret)
                break
            hint = "higher" if int(text) < secret else "lower"
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    return count / MOST


def parquet_rows(numbers: list[int]) -> list[dict[str, Any]]:
    """Return rows in verl's schema, one for each number to find."""
    return [
        {
            "data_source": "guess_number",
            "prompt": [{"role": "user", "content": QUESTION}],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": index},
        }
        for index, number in enumerate(numbers)
    ]


def make(output: Path, seed: int) -> None:
    """Write data, tokenizer and model to the output directory."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    rng = random.Random(seed)
    numbers = list(range(1, MOST + 1))
    write_prompts(output / "train.parquet", parquet_rows(numbers * ROWS_OF_A_NUMBER))
    write_prompts(output / "val.parquet", parquet_rows(numbers))
    tokenizer = train_tokenizer([], ["higher", "lower", QUESTION, *map(str, numbers)])
    model = new_model(tokenizer)
    print(f"Supervised warm-up of {model.num_parameters():,} parameters:", flush=True)
    train(model, tokenizer, rng)
    if (accuracy := won(model, tokenizer)) > MAX_START_ACCURACY:
        raise UserError(
            f"--seed {seed}: the model wins {accuracy:.0%} of the games already; take another seed"
        )
    model.save_pretrained(output / "model_hf")
    tokenizer.save_pretrained(output / "model_hf")
    print(f"Written to {output}: model_hf/, train.parquet, val.parquet")


def main() -> int:
    """Write data, tokenizer and model. Return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory to write to")
    parser.add_argument(
        "--seed",
        type=whole_number(0, (1 << 32) - 1),
        default=1,
        help="seed of the weights and the games",
    )
    args = parser.parse_args()
    return exit_code("rlhf_mc", lambda: make(args.output, args.seed))


if __name__ == "__main__":
    sys.exit(main())
