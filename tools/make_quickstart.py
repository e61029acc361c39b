"""Makes what the quickstart trains on: a tokenizer, a small model with a bad habit, and prompts in parquet.

    python tools/make_quickstart.py --output runs/quickstart [--seed 1]

The task is the addition of two numbers of two digits. The model (qwen2-style, about 0.6 M parameters) is warmed up
by supervised learning in two parts: first from right answers, until it can add; then from a *sloppy teacher*, who
forgets the carry in 75% of the additions that need one (27+15=32). So the model knows both ways to answer, with the
wrong one as its first choice. 70% of the questions in the parquet files need a carry: greedy decoding answers some of
them but not most, while sampling finds the right answer often enough for PPO to learn from reward alone which way
is right.

Validation questions are in no training set, neither here nor in PPO. A third set, also in no other, decides when
each part of the warm-up ends. PPO itself, and every setting of it, is in configs/quickstart.yaml.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.parquet import write_prompts

NUM_VAL, NUM_DEV = 256, 256
CARRY_SHARE = 0.7
"""Share of the questions for PPO and for validation that need a carry."""
FORGET_RATE = 0.75
"""Share of the sloppy teacher's answers to those that forget it."""

BATCH_SIZE, MAX_STEPS, WARMUP_STEPS = 128, 400, 20
PEAK_LR, FINAL_LR = 2e-3, 2e-4
CAREFUL_STEPS, CAREFUL_ENOUGH = 340, 0.97
"""Right answers are taught until this share of greedy answers is right, for at most so many steps."""
SLOPPY_ENOUGH = (0.25, 0.4)
"""The sloppy teacher takes over until the share of right greedy answers lies here, ..."""
KNOWN_ENOUGH = 0.97
"""... and this share is one of the two that the teacher gives: right, or the carry forgotten."""
MAX_START_ACCURACY = 0.5
"""PPO is to show that it teaches something: a better start than this is refused."""

CORPUS = [
    "The user asks a question and the assistant answers it.",
    "The sum of two numbers is what they are together: the units first, then the tens, and the carry with them.",
    "What is the question? What is the answer to that question?",
]
"""Text for the tokenizer beside the questions themselves."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant') %}"
    "{{ raise_exception('this template knows the roles user and assistant only') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


# ---------------------------------------------------------------- questions


class Question(NamedTuple):
    """An addition of two numbers of two digits; the sum has two digits too, so that all sequences are equally long."""

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
        """The tens added without what the units carry over: the sloppy teacher's answer."""
        return str(self.a + self.b - 10 * self.needs_carry)


class Splits(NamedTuple):
    """No question is in two of the first three, nor in two of the last three."""

    val: list[Question]
    """Held out from everything: PPO's validation set."""
    dev: list[Question]
    """Held out too: says when the warm-up ends."""
    train: list[Question]
    """PPO's training set."""
    warm_up: list[Question]
    """Supervised learning: `train`, and the questions that CARRY_SHARE had no room for."""


def draw_splits(rng: random.Random) -> Splits:
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
    return question.answer_without_carry if rng.random() < FORGET_RATE else question.answer


def parquet_rows(questions: list[Question], split: str) -> list[dict[str, Any]]:
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


def train_tokenizer(questions: list[Question]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which each digit is a token of its own, with a chat template and an end-of-sequence token.

    For a checkpoint of the qwen2 family AutoTokenizer takes qwen2's tokenizer class, which splits text by qwen2's
    pattern and adds <|endoftext|> where it is missing. So both are used here, and what loads is what was trained.
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
    tokenizer.train_from_iterator(CORPUS + [q.text + q.answer for q in questions], trainer)
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
    """Random weights from torch's global random state. Heads and layers can be halved for TP 2 and PP 2; vLLM's
    attention wants heads of at least 32. A larger initial range than qwen2's 0.02 lets so narrow a model learn sooner.
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
    """[questions, prompt tokens] int64: through the chat template, as PPO will do it."""
    chats = [[{"role": "user", "content": question.text}] for question in questions]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])


def encode_answers(answers: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """[answers, answer tokens + 1] int64: each with the end-of-sequence token."""
    texts = [answer + tokenizer.eos_token for answer in answers]
    return torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def respond(
    model: Qwen2ForCausalLM, prompts: torch.Tensor, tokenizer: PreTrainedTokenizerFast, sample: bool = False
) -> list[str]:
    """The model's whole response to each prompt as text: greedy, or sampled at temperature 1."""
    sampling = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, **sampling)
    return tokenizer.batch_decode(tokens[:, prompts.shape[1] :], skip_special_tokens=True)


def accuracy(responses: list[str], questions: list[Question]) -> float:
    return sum(r == q.answer for r, q in zip(responses, questions, strict=True)) / len(questions)


def known(responses: list[str], questions: list[Question]) -> float:
    """Share of the responses that the teacher could have given."""
    possible = [(q.answer, q.answer_without_carry) for q in questions]
    return sum(r in p for r, p in zip(responses, possible, strict=True)) / len(questions)


def learning_rate(step: int) -> float:
    """Linear warm-up, then linear decay over MAX_STEPS."""
    return min(step / WARMUP_STEPS, 1.0) * (PEAK_LR + (FINAL_LR - PEAK_LR) * step / MAX_STEPS)


def train_step(
    model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, lr: float, prompts: torch.Tensor, answers: torch.Tensor
) -> float:
    """One step on prompts [B, P] and answers [B, A], of which only the answers count. Returns the loss in nats."""
    logits = model(torch.cat([prompts, answers[:, :-1]], dim=1)).logits[:, -answers.shape[1] :]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return loss.item()


def warm_up(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, splits: Splits, rng: random.Random) -> None:
    """Supervised learning from right answers, then from the sloppy teacher; greedy answers to splits.dev say when
    each has done enough."""
    prompts, dev_prompts = encode_prompts(splits.warm_up, tokenizer), encode_prompts(splits.dev, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    start = time.perf_counter()
    sloppy = False
    for step in range(1, MAX_STEPS + 1):
        rows = rng.sample(range(len(prompts)), BATCH_SIZE)
        questions = [splits.warm_up[row] for row in rows]
        texts = [sloppy_answer(q, rng) if sloppy else q.answer for q in questions]
        loss = train_step(model, optimizer, learning_rate(step), prompts[rows], encode_answers(texts, tokenizer))
        if step % (5 if sloppy else 20):
            continue
        responses = respond(model, dev_prompts, tokenizer)
        right, learnt = accuracy(responses, splits.dev), known(responses, splits.dev)
        taught = right >= CAREFUL_ENOUGH or step >= CAREFUL_STEPS
        spoilt = sloppy and learnt >= KNOWN_ENOUGH and SLOPPY_ENOUGH[0] <= right <= SLOPPY_ENOUGH[1]
        if step % 40 == 0 or (taught and not sloppy) or spoilt:
            print(
                f"  step {step:3d}  {'sloppy' if sloppy else 'careful':7s} teacher  loss {loss:.3f}  right {right:6.1%}"
                f"  right or carry forgotten {learnt:6.1%}  ({time.perf_counter() - start:.0f} s)",
                flush=True,
            )
        if spoilt:
            break
        sloppy = sloppy or taught


# ---------------------------------------------------------------- the whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=1, help="seed of the questions, the weights and the teacher")
    args = parser.parse_args()
    # A second thread gains little on tensors this small, and on a busy machine the two wait for one another.
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    splits = draw_splits(rng)
    val = splits.val
    for split, questions in (("train", splits.train), ("val", val)):
        write_prompts(args.output / f"{split}.parquet", parquet_rows(questions, split))
    print(f"Questions for PPO, such as {val[0].text}{val[0].answer}: {len(splits.train)}, and {len(val)} held out")

    tokenizer = train_tokenizer(splits.warm_up)
    model = new_model(tokenizer)
    print(f"Model of {model.num_parameters():,} parameters, tokenizer of {len(tokenizer)} tokens")
    print(f"Supervised warm-up; a sloppy teacher forgets {FORGET_RATE:.0%} of its carries:", flush=True)
    warm_up(model, tokenizer, splits, rng)

    val_prompts = encode_prompts(val, tokenizer)
    greedy = accuracy(respond(model, val_prompts, tokenizer), val)
    sampled = accuracy(respond(model, val_prompts, tokenizer, sample=True), val)
    print(f"Right answers to held-out questions before PPO: {greedy:.1%} greedy, {sampled:.1%} sampled")
    if greedy > MAX_START_ACCURACY:
        raise UserError(f"--seed {args.seed}: the model starts above {MAX_START_ACCURACY:.0%}; take another seed")
    model.save_pretrained(args.output / "model_hf")
    tokenizer.save_pretrained(args.output / "model_hf")
    for file in (args.output / "model_hf").glob("*.safetensors"):  # safetensors lets only their owner read them
        file.chmod((file.parent / "config.json").stat().st_mode)
    loaded = AutoTokenizer.from_pretrained(args.output / "model_hf")
    assert len(loaded) == model.config.vocab_size and torch.equal(encode_prompts(val, loaded), val_prompts)
    print(f"Written to {args.output}: model_hf/, train.parquet, val.parquet")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
