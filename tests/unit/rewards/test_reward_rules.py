"""The built-in reward rules: GSM8K, arithmetic, MATH, and the process that compares answers of
MATH."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_mc.config.errors import UserError
from rlhf_mc.rewards import equivalence, text_rules, verl_rules
from rlhf_mc.rewards import math as math_rule


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(__file__).with_name(name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("so 9 * 2 = 18\n#### 18", "18", 1.0),
        ("#### 18", "19", 0.0),
        ("the answer is 18", "18", 0.0),  # right, but not in the asked form
        ("####18", "18", 0.0),
        ("#### -3", "-3", 1.0),
        ("#### 70,000", "70000", 1.0),
        ("#### 70000", "70,000", 1.0),
        ("#### 70000", 70000, 1.0),
        ("#### 3.5", "3.5", 1.0),
        ("#### 5 no, #### 18", "18", 1.0),  # the last one counts
        ("#### 18 no, #### 5", "18", 0.0),
        ("#### 18 dollars", "18", 1.0),
        ("#### $18", "18", 0.0),  # as verl's strict rule
        ("#### 18.", "18", 0.0),  # as verl's strict rule
        ("#### 18" + " and" * 100, "18", 0.0),  # not at the end
        ("", "18", 0.0),
    ],
)
def test_gsm8k_rule(response: str, truth: Any, score: float) -> None:
    assert text_rules.gsm8k_strict("openai/gsm8k", response, truth) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("12", 1.0),
        (" 12\n", 1.0),
        ("012", 0.0),
        ("12 ", 1.0),
        ("12.", 0.0),
        ("1 2", 0.0),
        ("", 0.0),
    ],
)
def test_arithmetic_rule(response: str, score: float) -> None:
    assert text_rules.exact_match("arithmetic", response, "12") == score
    assert text_rules.exact_match("arithmetic", response, 12) == score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("so 9 * 2 = 18\n#### 18", "18", 1.0),
        ("the answer is 18", "18", 1.0),
        ("the answer is $70,000.", "70000", 1.0),
        ("18 or 19", "18", 0.0),  # the last one counts
        ("it is -3.5 degrees", "-3.5", 1.0),
        ("18.0", "18", 0.0),
        ("no number", "18", 0.0),
        ("", "18", 0.0),
    ],
)
def test_gsm8k_flexible_rule(response: str, truth: Any, score: float) -> None:
    assert text_rules.gsm8k_flexible("openai/gsm8k", response, truth) == score


def test_exact_match_accepts_any_of_several_answers() -> None:
    for truth in (["Paris", "paris"], {"target": ["Paris"]}):
        assert text_rules.exact_match("nq", " Paris\n", truth) == 1.0
        assert text_rules.exact_match("nq", "In Paris", truth) == 0.0


@pytest.mark.parametrize(
    ("response", "truth", "score", "accuracy"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0, 1.0),
        ("the tower", "Eiffel tower", 2 / 3, 0.0),  # precision 1, recall 1/2
        # the article is dropped, words count as often as they occur
        ("a b b", "b b b c", 4 / 6, 0.0),
        ("Lyon", ["Paris", "lyon"], 1.0, 1.0),  # the best of several
        ("", "Paris", 0.0, 0.0),
        ("the", "a", 1.0, 1.0),  # both empty after normalisation
    ],
)
def test_f1_rule(response: str, truth: Any, score: float, accuracy: float) -> None:
    assert text_rules.f1("squad", response, truth) == {
        "score": pytest.approx(score),
        "acc": accuracy,
    }


@pytest.mark.parametrize(
    ("response", "choice"),
    [
        ("C", "C"),
        (" (C)\n", "C"),
        ("2", "2"),
        ("Answer: C", "C"),
        ("**Answer:** (C) because", "C"),
        ("A is wrong, so the answer is C.", "C"),
        ("option B? No: the answer is D", "D"),
        (r"\boxed{C}", "C"),
        (r"\boxed{\text{C}}", "C"),
        ("answer: A but \\boxed{C}", "C"),
        ("The answer is Canada", None),
        ("A plane", None),
        ("", None),
    ],
)
def test_choice_of_a_response(response: str, choice: str | None) -> None:
    assert text_rules.extract_choice(response) == choice


def test_multiple_choice_counts_labels_from_0() -> None:
    for truth in ("C", "2", 2):
        assert [
            text_rules.multiple_choice("hellaswag", r, truth) for r in ("C", "2", "B", "3")
        ] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("he sits on the chair.", 1.0),
        ("He sits down on a chair and reads", 1.0),
        ("He runs away.", 0.0),
        ("he", 0.0),  # as near to both
        ("something else", 0.0),
        ("The answer is B", 1.0),  # a choice by letter comes first
    ],
)
def test_multiple_choice_by_the_nearest_text(response: str, score: float) -> None:
    choices = {"choices": ["He runs away", "He sits on a chair"]}
    assert text_rules.multiple_choice("Rowan/hellaswag", response, 1, choices) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think>b", 1.0),
        (" <think>\n</think> b", 1.0),
        ("a</think>b", 1.0),  # the template has opened it
        ("<think>a</think> ", 0.0),
        ("<think>a", 0.0),
        ("b<think>a</think>b", 0.0),
        ("<think>a</think><think>a</think>b", 0.0),
        ("b", 0.0),
    ],
)
def test_think_format(response: str, score: float) -> None:
    assert text_rules.think_format("any", response, None) == score


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{5}", "5"),
        (r"first \boxed{1}, then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}} done", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{a\boxed{b}c}", "b"),  # the last one opened
        (r"\boxed{1} and \boxed{2", "1"),  # the last one closed
        (r"\fbox{7}", "7"),
        ("no box", None),
        (r"\boxed{never closed", None),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        # an escaped brace closes nothing
        (r"\boxed{\left\{ x \right.} or so", r"\left\{ x \right."),
        (r"} \boxed{3} }", "3"),
        (r"\boxed {4}", "4"),
    ],
)
def test_last_boxed(text: str, inside: str | None) -> None:
    assert math_rule.last_boxed(text) == inside


@pytest.mark.slow
def test_math_answers() -> None:
    """Check the rule's scores on pairs of answers to competition problems, as models and references
    write them, including its known mistakes: those whose score is not is_equal."""
    rows = rows_of("math_answers.jsonl")
    wrong = [
        row
        for row in rows
        if math_rule.compute_score(
            "lighteval/MATH", rf"So it is $\boxed{{{row['answer']}}}$.", row["reference"]
        )["score"]
        != row["score"]
    ]
    assert len(rows) > 900 and wrong == []


def test_rules_of_verl_give_its_verdicts() -> None:
    """verl's files gave the verdicts (2026-08)."""
    rows = rows_of("verl_answers.jsonl")
    for rule in ("math_string", "math_dapo"):
        of_rule = [row for row in rows if row["rule"] == rule]
        assert len({row["is_right"] for row in of_rule}) == 2
        for row in of_rule:
            found = getattr(verl_rules, rule)("", row["response"], row["ground_truth"])
            right = float(row["is_right"])
            assert found == (
                {"score": 2 * right - 1, "acc": right} if rule == "math_dapo" else right
            ), row


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}. Answer: 3", r"\frac{1}{2}"),
        ("Answer: 3\nAnswer: 0.5\n", "0.5"),
        ("The answer is 0.5. It is positive.", "0.5"),
        ("The answers are 1, 2", "1, 2"),
        ("0.5", None),
        ("The answer is", None),
    ],
)
def test_numina_answer(response: str, answer: str | None) -> None:
    assert verl_rules.numina_answer(response) == answer
    assert verl_rules.numina("numina_olympiads", response, "1/2")["score"] == float(
        answer in ("0.5", r"\frac{1}{2}")
    )


@pytest.mark.parametrize("answer", ["", " ", r"\ ", r"\text{}"])
def test_empty_answer_is_never_right(answer: str) -> None:
    for truth in (answer, "", " ", r"\boxed{}"):
        assert (
            math_rule.compute_score("lighteval/MATH", rf"\boxed{{{answer}}}", truth)["score"] == 0.0
        )


LONG_RESPONSES = {
    "boxes": lambda n: "\\boxed{" * n,
    "boxes, then one that is closed": lambda n: "\\boxed{" * n + "5}",
    "closed boxes": lambda n: "\\boxed{1}" * n,
    "box without its brace": lambda n: "\\boxed" + " " * n + "\\boxed" * n,
    "braces": lambda n: "{" * n,
    "closing braces": lambda n: "\\boxed{" + "}" * n,
    "nested braces": lambda n: "\\boxed{" + "{" * n + "}" * n + "}",
    "digits": lambda n: "1" * n + "x",
    "digits and commas": lambda n: "1,234" * n + "x",
    "commas": lambda n: "," * n + "x",
    "marks": lambda n: "#### " * n,
    "mark and digits": lambda n: "#### " + "1" * n,
    "spaces": lambda n: "x" + " \t" * n + "x",
    "equals and spaces": lambda n: "x=" + " \t" * n + "=",
    "carets": lambda n: "^ " * n,
    "fractions": lambda n: "\\frac{1" * n,
    "texts": lambda n: "5\\text{" * n,
    "unclosed text": lambda n: "\\text{" + "a" * n,
    "backslashes": lambda n: "\\" * n,
}


@pytest.mark.parametrize("kind", LONG_RESPONSES)
@pytest.mark.slow
def test_long_response_is_scored_in_linear_time(kind: str) -> None:
    """Score texts as a whole response and inside a box. Four times the length takes four times the
    time, with a wide margin; a quadratic rule takes sixteen times.
    """

    def seconds(length: int) -> float:
        text = LONG_RESPONSES[kind](length)
        best = math.inf
        for _ in range(3):
            start = time.process_time()
            text_rules.gsm8k_strict("openai/gsm8k", text, "5")
            math_rule.compute_score("lighteval/MATH", text, "5")
            math_rule.compute_score("lighteval/MATH", f"\\boxed{{{text}}}", "5")
            text_rules.gsm8k_flexible("openai/gsm8k", text, "5")
            text_rules.f1("squad", text, "5")
            text_rules.multiple_choice("hellaswag", text, "2")
            text_rules.think_format("any", text, None)
            verl_rules.math_string("lighteval/MATH", f"\\boxed{{{text}}}", "5")
            verl_rules.math_dapo("math_dapo", f"Answer: {text}", "5")
            verl_rules.numina("numina_olympiads", f"Answer: {text}", "5")
            best = min(best, time.process_time() - start)
        return best

    assert seconds(4 * 30_000) < 10 * seconds(30_000) + 0.05


@pytest.mark.slow
def test_dead_comparison_process_is_replaced() -> None:
    comparison = equivalence.Comparison()
    for _ in range(2):
        assert comparison.same("2x", "x+x")
        assert comparison._process is not None
        comparison._process.kill()
        comparison._process.wait()
    comparison.close()


def test_missing_math_verify_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(
        UserError, match=r"rule for MATH cannot use the package math-verify.*ImportError: not here"
    ):
        equivalence.Comparison().same("x", "y")


def test_formats() -> None:
    assert [
        text_rules.boxed_format("", text, None) for text in (r"\boxed{1}", r"\boxed{1", "1")
    ] == [1.0, 0.0, 0.0]
    assert [text_rules.gsm8k_format("", text, None) for text in ("#### 1", "####1", "#### x")] == [
        1.0,
        0.0,
        0.0,
    ]


def test_math_without_a_box_scores_0() -> None:
    assert math_rule.compute_score("lighteval/MATH", "5", "5") == {"score": 0.0, "undecided": 0.0}
