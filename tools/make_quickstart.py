"""Make the quickstart's tokenizer, small model with a bad habit, and prompts in parquet.

    python tools/make_quickstart.py --output runs/quickstart [--seed 1]

The task is the addition of two numbers of two digits. The model (qwen2-style, about 0.6 M
parameters) is warmed up
by supervised learning in two parts: first from right answers, until it can add; then from a *sloppy
teacher*, who forgets the carry in 75% of the additions that need one (27+15=32). The model then
knows both answers, and prefers the wrong one. 70% of the questions in the parquet files need a
carry. Greedy decoding answers few of those correctly, while sampling finds the right answer often
enough for PPO to learn it from reward alone.

Validation questions are in no training set, neither here nor in PPO. A third held-out set decides
when each part of the warm-up ends. The settings of PPO are in configs/quickstart.yaml.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_mc.runtime.tool import Parser, end_on_interrupt, whole_number

if __name__ == "__main__":
    end_on_interrupt()

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.source import write_prompts
from rlhf_mc.runtime.exit_codes import exit_code

NUM_VAL = 256
NUM_DEV = 256
CARRY_SHARE = 0.7
"""Share of the questions for PPO and for validation that need a carry."""
FORGET_RATE = 0.75
"""Share of these questions for which the sloppy teacher forgets the carry."""

BATCH_SIZE = 128
MAX_STEPS = 400
WARMUP_STEPS = 20
PEAK_LR = 2e-3
FINAL_LR = 2e-4
MAX_CAREFUL_STEPS = 340
CAREFUL_ACCURACY = 0.97
"""The first part ends at this greedy accuracy, or after MAX_CAREFUL_STEPS steps."""
SLOPPY_ACCURACY = (0.25, 0.4)
SLOPPY_KNOWN = 0.97
"""The second part ends once the greedy accuracy is in the range SLOPPY_ACCURACY, and this share of
the greedy answers is one that the sloppy teacher gives: right, or with the carry forgotten."""
MAX_START_ACCURACY = 0.5
"""A model that starts above this is refused, since PPO could show too little."""

CORPUS = [
    "The user asks a question and the assistant answers it.",
    (
        "The sum of two numbers is what they are together: the units first, then the tens, and the "
        "carry with them."
    ),
    "What is the question? What is the answer to that question?",
]
"""Text for the tokenizer, in addition to the questions."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ('user', 'assistant') %}{{ "
    "raise_exception('this template knows the roles user and assistant only') }}{% endif %}<|{{ "
    "message.role }}|>{{ message.content }}{% if message.role == 'assistant' %}<|end|>{% endif "
    "%}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


# ---------------------------------------------------------------- questions


class Question(NamedTuple):
    """An addition of two numbers of two digits. The sum has two digits too, so that all sequences
    have one length."""

    a: int
    b: int

    @property
    def text(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def needs_carry(self) -> bool:
        return self.a % 10 + self.b % 10 >= 10

    @property
    def answer_without_carry(self) -> str:
        """Sum without the carry of the units: the sloppy teacher's answer."""
        return str(self.a + self.b - 10 * self.needs_carry)


class Splits(NamedTuple):
    """The sets of questions. `val`, `dev` and `warm_up` are disjoint, and `train` is a part of
    `warm_up`."""

    val: list[Question]
    """PPO's validation set."""
    dev: list[Question]
    """Held out too: decides when a part of the warm-up ends."""
    train: list[Question]
    """PPO's training set."""
    warm_up: list[Question]
    """Supervised learning: `train`, and the questions left over by CARRY_SHARE."""


def draw_splits(rng: random.Random) -> Splits:
    """Draw the sets from all additions."""
    every = [Question(a, b) for a in range(10, 90) for b in range(10, 100 - a)]
    rng.shuffle(every)
    with_carry = [q for q in every if q.needs_carry]
    others = [q for q in every if not q.needs_carry]
    num_others = round(len(with_carry) * (1 - CARRY_SHARE) / CARRY_SHARE)
    questions = with_carry + others[:num_others]
    rng.shuffle(questions)
    train = questions[NUM_VAL + NUM_DEV :]
    return Splits(
        val=questions[:NUM_VAL],
        dev=questions[NUM_VAL : NUM_VAL + NUM_DEV],
        train=train,
        warm_up=train + others[num_others:],
    )


def sloppy_answer(question: Question, rng: random.Random) -> str:
    """Return the sloppy teacher's answer."""
    return question.answer_without_carry if rng.random() < FORGET_RATE else question.answer


def parquet_rows(questions: list[Question], split: str) -> list[dict[str, Any]]:
    """Return the rows of the parquet file of a split, in verl's schema."""
    return [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": question.text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, question in enumerate(questions)
    ]


# ---------------------------------------------------------------- tokenizer and model


def train_tokenizer(
    questions: list[Question], words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with a token for each digit, a chat template and an
    end-of-sequence token.

    AutoTokenizer loads a qwen2 checkpoint's tokenizer with qwen2's class, which splits text by
    qwen2's pattern and adds a missing <|endoftext|>. Both are used here, so that the loaded
    tokenizer equals the trained one.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [*CORPUS, *(q.text + q.answer for q in questions), *words], trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Build the model, with random weights from torch's global random state.

    Heads and layers can be split for TP 2 and PP 2. vLLM's attention needs a head size of at least
    32. With a larger initializer range than qwen2's 0.02 a narrow model learns faster.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config).float()


# ---------------------------------------------------------------- supervised learning


def encode_prompts(questions: list[Question], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return the prompts, [questions, prompt tokens] int64, through the chat template as in PPO."""
    chats = [[{"role": "user", "content": question.text}] for question in questions]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])


def encode_answers(answers: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return the answers, [answers, answer tokens + 1] int64, each with the end-of-sequence
    token."""
    texts = [answer + tokenizer.eos_token for answer in answers]
    return torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def respond(
    model: Qwen2ForCausalLM,
    prompts: torch.Tensor,
    tokenizer: PreTrainedTokenizerFast,
    sample: bool = False,
) -> list[str]:
    """Return the model's response to each prompt as text: greedy, or sampled at temperature 1."""
    sampling = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    tokens = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, **sampling
    )
    return tokenizer.batch_decode(tokens[:, prompts.shape[1] :], skip_special_tokens=True)


def accuracy(responses: list[str], questions: list[Question]) -> float:
    """Return the share of right responses."""
    return sum(r == q.answer for r, q in zip(responses, questions, strict=True)) / len(questions)


def known(responses: list[str], questions: list[Question]) -> float:
    """Return the share of the responses that the sloppy teacher could give."""
    possible = [(q.answer, q.answer_without_carry) for q in questions]
    return sum(r in p for r, p in zip(responses, possible, strict=True)) / len(questions)


def learning_rate(step: int) -> float:
    """Return the learning rate of a step: linear warm-up, then linear decay over MAX_STEPS."""
    return min(step / WARMUP_STEPS, 1.0) * (PEAK_LR + (FINAL_LR - PEAK_LR) * step / MAX_STEPS)


def train_step(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    lr: float,
    prompts: torch.Tensor,
    answers: torch.Tensor,
) -> float:
    """Take one optimizer step on prompts [B, P] and answers [B, A]. Return the loss over the
    answers' tokens, in
    nats."""
    logits = model(torch.cat([prompts, answers[:, :-1]], dim=1)).logits[:, -answers.shape[1] :]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return loss.item()


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, splits: Splits, rng: random.Random
) -> None:
    """Train on right answers, then on the sloppy teacher's. Greedy answers to splits.dev decide
    when each part ends."""
    prompts = encode_prompts(splits.warm_up, tokenizer)
    dev_prompts = encode_prompts(splits.dev, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    start = time.perf_counter()
    sloppy = False
    for step in range(1, MAX_STEPS + 1):
        rows = rng.sample(range(len(prompts)), BATCH_SIZE)
        questions = [splits.warm_up[row] for row in rows]
        texts = [sloppy_answer(q, rng) if sloppy else q.answer for q in questions]
        loss = train_step(
            model, optimizer, learning_rate(step), prompts[rows], encode_answers(texts, tokenizer)
        )
        if step % (5 if sloppy else 20):
            continue
        responses = respond(model, dev_prompts, tokenizer)
        right = accuracy(responses, splits.dev)
        learnt = known(responses, splits.dev)
        careful_done = right >= CAREFUL_ACCURACY or step >= MAX_CAREFUL_STEPS
        sloppy_done = (
            sloppy and learnt >= SLOPPY_KNOWN and SLOPPY_ACCURACY[0] <= right <= SLOPPY_ACCURACY[1]
        )
        if step % 40 == 0 or (careful_done and not sloppy) or sloppy_done:
            print(
                f"  step {step:3d}  {'sloppy' if sloppy else 'careful':7s} teacher  loss "
                f"{loss:.3f}  right {right:6.1%}"
                f"  right or carry forgotten {learnt:6.1%}  ({time.perf_counter() - start:.0f} s)",
                flush=True,
            )
        if sloppy_done:
            break
        sloppy = sloppy or careful_done


# ---------------------------------------------------------------- main


def main() -> int:
    """Write data, tokenizer and model. Return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory to write to")
    parser.add_argument(
        "--seed",
        type=whole_number(0, (1 << 32) - 1),
        default=1,
        help="seed of the questions, the weights and the teacher",
    )
    args = parser.parse_args()
    return exit_code("rlhf_mc", lambda: make(args.output, args.seed))


def make(output: Path, seed: int) -> None:
    """Write data, tokenizer and model to the output directory."""
    # A second thread gains little on such small tensors, and on a busy machine the threads wait for
    # one another.
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    rng = random.Random(seed)

    splits = draw_splits(rng)
    val = splits.val
    for split, questions in (("train", splits.train), ("val", val)):
        write_prompts(output / f"{split}.parquet", parquet_rows(questions, split))
    print(
        f"Questions for PPO, such as {val[0].text}{val[0].answer}: {len(splits.train)}, and "
        f"{len(val)} held out"
    )

    tokenizer = train_tokenizer(splits.warm_up)
    model = new_model(tokenizer)
    print(f"Model of {model.num_parameters():,} parameters, tokenizer of {len(tokenizer)} tokens")
    print(
        f"Supervised warm-up; a sloppy teacher forgets {FORGET_RATE:.0%} of its carries:",
        flush=True,
    )
    warm_up(model, tokenizer, splits, rng)

    val_prompts = encode_prompts(val, tokenizer)
    greedy = accuracy(respond(model, val_prompts, tokenizer), val)
    sampled = accuracy(respond(model, val_prompts, tokenizer, sample=True), val)
    print(
        f"Right answers to held-out questions before PPO: {greedy:.1%} greedy, {sampled:.1%} "
        "sampled"
    )
    if greedy > MAX_START_ACCURACY:
        raise UserError(
            f"--seed {seed}: the model starts above {MAX_START_ACCURACY:.0%}; take another seed"
        )
    model.save_pretrained(output / "model_hf")
    tokenizer.save_pretrained(output / "model_hf")
    # safetensors lets only the owner read them
    for file in (output / "model_hf").glob("*.safetensors"):
        file.chmod((file.parent / "config.json").stat().st_mode)
    loaded = AutoTokenizer.from_pretrained(output / "model_hf")
    assert len(loaded) == model.config.vocab_size and torch.equal(
        encode_prompts(val, loaded), val_prompts
    )
    print(f"Written to {output}: model_hf/, train.parquet, val.parquet")


if __name__ == "__main__":
    sys.exit(main())
