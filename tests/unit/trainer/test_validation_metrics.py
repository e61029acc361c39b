"""Statistics of a validation, against slow plain Python that draws one resample at a time, as verl
does."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from rlhf_mc.trainer.evaluate import Answer, validation_metrics


def answers(
    rows: list[list[float]], votes: list[list[str]] | None = None, source: str = "s"
) -> list[Answer]:
    """Return answers with these accuracies; the reward is twice the accuracy. rows: one list per
    prompt."""
    return [
        Answer(source, p, {"acc": acc, "reward": 2 * acc}, votes[p][i] if votes else None)
        for p, row in enumerate(rows)
        for i, acc in enumerate(row)
    ]


def bootstrap(accs: list[float], votes: list[str], k: int) -> dict[str, float]:
    """Return best, worst and maj of one prompt in plain Python."""
    np.random.seed(42)
    drawn: dict[str, list[float]] = {"best": [], "worst": [], "maj": []}
    for _ in range(1000):
        chosen = [int(i) for i in np.random.choice(len(accs), size=k, replace=True)]
        drawn["best"].append(max(accs[i] for i in chosen))
        drawn["worst"].append(min(accs[i] for i in chosen))
        # of equal counts the first one seen
        winner = Counter(votes[i] for i in chosen).most_common(1)[0][0]
        drawn["maj"].append(next(accs[i] for i in chosen if votes[i] == winner))
    found = {}
    for name, values in drawn.items():
        found[f"{name}@{k}/mean"] = float(np.mean(values))
        found[f"{name}@{k}/std"] = float(np.std(values))
    return found


@pytest.mark.parametrize("n", [2, 3, 8, 11])
def test_statistics_are_those_of_plain_python(n: int) -> None:
    rng = random.Random(n)
    rows = [[rng.choice((0.0, 1.0, 0.5)) for _ in range(n)] for _ in range(3)]
    votes = [[rng.choice("abc") for _ in row] for row in rows]
    found = validation_metrics(answers(rows, votes))
    sizes = [k for k in (2, 4, 8) if k < n] + [n]
    for k in sizes:
        by_prompt = [bootstrap(row, vote, k) for row, vote in zip(rows, votes, strict=True)]
        for name in by_prompt[0]:
            is_core = k == n and not name.startswith("worst")
            key = f"{'val-core' if is_core else 'val-aux'}/s/acc/{name}"
            assert found[key] == float(np.mean([one[name] for one in by_prompt])), key
    assert found[f"val-core/s/acc/mean@{n}"] == pytest.approx(np.mean(rows))
    assert found[f"val-aux/s/acc/std@{n}"] == pytest.approx(np.mean([np.std(row) for row in rows]))
    assert found[f"val-aux/s/reward/mean@{n}"] == pytest.approx(2 * np.mean(rows))


def test_one_response_has_a_mean_only() -> None:
    assert validation_metrics(answers([[1.0], [0.0]])) == {
        "val-aux/s/reward/mean@1": 1.0,
        "val-core/s/acc/mean@1": 0.5,
    }


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    row = [1.0, 0.0, 0.0, 1.0, 0.0]
    found = validation_metrics(answers([row]))
    for k in (2, 4, 5):
        subsets = list(itertools.combinations(row, k))
        assert found[f"val-aux/s/acc/pass@{k}"] == pytest.approx(
            sum(map(max, subsets)) / len(subsets)
        )
    assert not any("pass@" in key for key in found if "/reward/" in key)  # 0 and 2: no share


def test_no_pass_at_k_for_a_source_with_graded_accuracies(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Say so once; without the first prompt, pass@2 would be 0 over the second alone."""
    rows = [
        *answers([[1.0, 0.1], [0.0, 0.0]], source="graded"),
        *answers([[1.0, 0.0]], source="binary"),
    ]
    found = [validation_metrics(rows) for _ in range(2)][1]
    assert [key for key in found if "pass@" in key] == ["val-aux/binary/acc/pass@2"]
    [line] = capfd.readouterr().err.splitlines()
    assert "val-aux/graded/acc/pass@k is left out" in line


def test_sources_are_kept_apart_and_votes_are_optional() -> None:
    both = [*answers([[1.0, 1.0]], source="a/b"), *answers([[0.0, 1.0]], [["x", "y"]], source="c")]
    found = validation_metrics(both)
    assert found["val-core/a/b/acc/mean@2"] == 1.0 and found["val-core/c/acc/mean@2"] == 0.5
    assert "val-core/c/acc/maj@2/mean" in found and "val-core/a/b/acc/maj@2/mean" not in found
