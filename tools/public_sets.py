"""The rows of public data sets in verl's schema: one function per set, from an example to a row.
Prompts are as in verl's examples/data_preprocess, character for character. prepare_data.py reads
the examples and writes the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.rewards.math import last_boxed

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."

Row = dict[str, Any]
MakeRow = Callable[[Row, str, int], Row | None]
"""(example, split, index) -> row, or None for an example that the set leaves out. Raises UserError
for one that cannot be used."""


@dataclass(frozen=True)
class PublicSet:
    """A data set: its name on the Hugging Face Hub, which is also its data_source, and its
    splits."""

    hub: str
    hub_config: str | None
    splits: tuple[str, ...]
    make_row: MakeRow


def read_text(example: Row, name: str) -> str:
    """Return a field that must be a non-empty string. Raise UserError if it is not."""
    value = example.get(name)
    if not isinstance(value, str) or not value.strip():
        shown = "missing" if name not in example else "null" if value is None else repr(value)[:60]
        raise UserError(f"field {name!r} is {shown}, expected a text")
    return value


def without(example: Row, *names: str) -> Row:
    """Return the other fields of an example: like verl's scripts, rows keep them as columns."""
    return {name: value for name, value in example.items() if name not in names}


def user_message(text: str) -> list[dict[str, str]]:
    """Return the prompt of one user message."""
    return [{"role": "user", "content": text}]


def gsm8k_row(example: Row, split: str, index: int) -> Row:
    """Return the row of a GSM8K example {question, answer}."""
    question = read_text(example, "question")
    answer = read_text(example, "answer")
    number = re.search(r"#### (-?[0-9.,]+)", answer)
    if number is None:
        raise UserError("the answer does not end in '#### NUMBER'")
    return {
        **without(example, "question", "answer"),
        "data_source": "openai/gsm8k",
        "prompt": user_message(f"{question} {GSM8K_INSTRUCTION}"),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def math_row(example: Row, split: str, index: int) -> Row:
    """Return the row of a MATH example {problem, solution, level, type}."""
    problem = read_text(example, "problem")
    return {
        **without(example, "problem", "solution"),
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": user_message(f"{problem} {MATH_INSTRUCTION}"),
        "ability": "math",
        "reward_model": {
            "style": "rule",
            "ground_truth": boxed_answer(read_text(example, "solution")),
        },
        "extra_info": {"split": split, "index": index},
    }


def boxed_answer(solution: str) -> str:
    r"""Return the answer of a solution: as in verl, what follows the last "\boxed " up to a dollar
    sign if there is one, else the content of the last \boxed{...}."""
    if "\\boxed " in solution:
        answer: str | None = solution.rpartition("\\boxed ")[2].partition("$")[0]
    else:
        answer = last_boxed(solution)
    if answer is None or not answer.strip():
        raise UserError("the solution has no \\boxed{...}")
    return answer


def hellaswag_row(example: Row, split: str, index: int) -> Row | None:
    """Return the row of a HellaSwag example, or None if it has no label (as in the test split). The
    ground
    truth is the number of the right choice."""
    label = example.get("label")
    if label is None or label == "":
        return None
    choices = example.get("endings")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise UserError("field 'endings' is not a list of texts")
    if not str(label).isdecimal() or int(label) >= len(choices):
        raise UserError(
            f"field 'label' is {label!r}, expected the number of one of {len(choices)} endings"
        )
    ctx_b = example.get("ctx_b") or ""
    context = (
        f"{read_text(example, 'ctx_a')} {ctx_b.capitalize() if isinstance(ctx_b, str) else ctx_b}"
    )
    choices = [without_brackets(choice) for choice in choices]
    return {
        **example,
        "data_source": "Rowan/hellaswag",
        "prompt": user_message(
            without_brackets(f"{read_text(example, 'activity_label')}: {context}")
        ),
        "ability": "nlp",
        "reward_model": {
            "style": "model",
            "eval": "multiple_choice",
            "ground_truth": int(label),
            "choices": choices,
        },
        "extra_info": {"split": split, "index": index, "choices": choices},
    }


def without_brackets(text: str) -> str:
    """Return the text without the bracketed marks of WikiHow, such as [header]; " [title]" ends a
    sentence."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def full_hh_rlhf_row(example: Row, split: str, index: int) -> Row:
    """Return the row of a full-hh-rlhf example {prompt, response, ...}. A reward model scores it:
    the ground truth is the response of the data set, which no rule compares with."""
    return {
        **without(example, "response"),
        "data_source": "Dahoas/full-hh-rlhf",
        "prompt": user_message(read_text(example, "prompt")),
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": read_text(example, "response")},
        "extra_info": {"split": split, "index": index},
    }


SETS = {
    "gsm8k": PublicSet("openai/gsm8k", "main", ("train", "test"), gsm8k_row),
    "math": PublicSet("DigitalLearningGmbH/MATH-lighteval", None, ("train", "test"), math_row),
    "hellaswag": PublicSet("Rowan/hellaswag", None, ("train", "validation", "test"), hellaswag_row),
    "full_hh_rlhf": PublicSet("Dahoas/full-hh-rlhf", None, ("train", "test"), full_hh_rlhf_row),
}
