"""tools/prepare_data.py: rows in verl's schema, of public data sets and of files with any
columns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import prepare_data
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_mc.config.errors import UserError
from rlhf_mc.rewards.registry import RULE_OF_SOURCE, RULES

REPO = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("RLHF_MC_DATA", REPO.parent / "shared/data"))


def write_lines(path: Path, examples: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(example)}\n" for example in examples))
    return path


def run(command_line: list[str]) -> None:
    prepare_data.prepare(prepare_data.arguments(command_line))


def prepare(
    dataset: str, source: Path, output: Path, *arguments: str
) -> dict[str, list[dict[str, Any]]]:
    """Convert, and return the rows of each split."""
    run(["--dataset", dataset, "--input", str(source), "--output", str(output), *arguments])
    return {path.stem: pq.read_table(path).to_pylist() for path in sorted(output.glob("*.parquet"))}


def error_of(dataset: str, source: Path, *arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        prepare(dataset, source, source.parent / "refused", *arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def gsm8k_example(i: int) -> dict[str, str]:
    return {
        "question": f"What is {i} thousand?",
        "answer": f"Easy: <<{i}*1000={i}000>>.\n#### {i},000",
    }


# ---------------------------------------------------------------- public data sets


def test_gsm8k(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [gsm8k_example(i) for i in (1, 2, 3)])
    write_lines(tmp_path / "test.jsonl", [gsm8k_example(4)])
    rows = prepare("gsm8k", tmp_path, tmp_path / "out")
    assert {split: len(found) for split, found in rows.items()} == {"train": 3, "test": 1}
    row = rows["train"][1]
    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert row == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": (
                    "What is 2 thousand? Let's think step by step and output the final "
                    'answer after "####".'
                ),
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2000"},
        "extra_info": {
            "split": "train",
            "index": 1,
            "answer": "Easy: <<2*1000=2000>>.\n#### 2,000",
            "question": "What is 2 thousand?",
        },
    }


def test_rows_of_one_file_are_held_out(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "all.jsonl", [gsm8k_example(i) for i in range(1, 6)])
    rows = prepare("gsm8k", source, tmp_path / "out", "--test-rows", "2")
    truths = {
        split: [row["reward_model"]["ground_truth"] for row in found]
        for split, found in rows.items()
    }
    assert truths == {"train": ["1000", "2000", "3000"], "test": ["4000", "5000"]}
    assert list(prepare("gsm8k", source, tmp_path / "whole")) == ["train"]
    assert "--test-rows 5: must be below the 5 rows" in error_of(
        "gsm8k", source, "--test-rows", "5"
    )


def score_of(row: dict[str, Any], response: str) -> float:
    """Return the score of a response by the rule of the row's data source."""
    source = row["data_source"]
    truth = row["reward_model"]["ground_truth"]
    result = RULES[RULE_OF_SOURCE[source]].function(source, response, truth, row["extra_info"])
    return float(result["score"] if isinstance(result, dict) else result)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"We get $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"First $\boxed{1}$, then $x = \boxed{\{1, 2\}}$.", r"\{1, 2\}"),
        (r"The answer is $\boxed 7$ dollars.", "7"),
        (r"So $\fbox{3}$.", "3"),
    ],
)
def test_math(tmp_path: Path, solution: str, answer: str) -> None:
    example = {"problem": "What?", "level": "Level 1", "type": "Algebra", "solution": solution}
    (row,) = prepare("math", write_lines(tmp_path / "a.jsonl", [example]), tmp_path / "out")[
        "train"
    ]
    assert row["prompt"] == [
        {
            "role": "user",
            "content": (
                "What? Let's think step by step and output the final answer within \\boxed{}."
            ),
        }
    ]
    assert row["reward_model"] == {"style": "rule", "ground_truth": answer}
    assert (row["level"], row["type"], row["extra_info"]) == (
        "Level 1",
        "Algebra",
        {"split": "train", "index": 0},
    )
    assert score_of(row, solution.replace("\\boxed 7", "\\boxed{7}")) == 1.0


def test_hellaswag(tmp_path: Path) -> None:
    example = {
        "ind": 4,
        "activity_label": "Removing ice from car",
        "ctx_a": "[header] How to start [title] A man is seen.",
        "ctx_b": "then, the Man",
        "ctx": "...",
        "endings": [" , walks  [substeps] away.", "sits.", "runs."],
        "label": "2",
    }
    write_lines(tmp_path / "train.jsonl", [example, {**example, "label": "0"}])
    pq.write_table(pa.Table.from_pylist([example]), tmp_path / "validation-00000-of-00001.parquet")
    write_lines(tmp_path / "test.jsonl", [{**example, "label": ""}])
    rows = prepare("hellaswag", tmp_path, tmp_path / "out")
    assert {split: len(found) for split, found in rows.items()} == {"train": 2, "validation": 1}
    row = rows["train"][0]
    assert (
        row["prompt"][0]["content"]
        == "Removing ice from car: How to start. A man is seen. Then, the man"
    )
    assert row["reward_model"] == {
        "style": "model",
        "eval": "multiple_choice",
        "ground_truth": 2,
        "choices": [", walks  away.", "sits.", "runs."],
    }
    assert row["extra_info"]["choices"] == row["reward_model"]["choices"]
    assert [score_of(row, response) for response in ("2", "The man runs.", "sits")] == [
        1.0,
        1.0,
        0.0,
    ]
    assert (row["data_source"], row["ability"], row["ind"]) == ("Rowan/hellaswag", "nlp", 4)
    bad = write_lines(tmp_path / "bad.jsonl", [example, {**example, "label": "3"}])
    assert (
        "bad.jsonl, line 2: field 'label' is '3', expected the number of one of 3 endings"
        in error_of("hellaswag", bad)
    )


def test_full_hh_rlhf(tmp_path: Path) -> None:
    example = {
        "prompt": "\n\nHuman: Hi\n\nAssistant:",
        "response": " Hello",
        "chosen": " Hello",
        "rejected": " No",
    }
    (row,) = prepare(
        "full_hh_rlhf", write_lines(tmp_path / "a.jsonl", [example]), tmp_path / "out"
    )["train"]
    assert row == {
        "prompt": [{"role": "user", "content": "\n\nHuman: Hi\n\nAssistant:"}],
        "chosen": " Hello",
        "rejected": " No",
        "data_source": "Dahoas/full-hh-rlhf",
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": " Hello"},
        "extra_info": {"split": "train", "index": 0},
    }


@pytest.mark.slow
def test_the_real_gsm8k(tmp_path: Path) -> None:
    """Convert gsm8k_train.jsonl and gsm8k_test.jsonl of $RLHF_MC_DATA; each reference answer scores
    1."""
    if not (DATA / "gsm8k_train.jsonl").is_file():
        pytest.skip(f"no gsm8k_train.jsonl in {DATA} (set RLHF_MC_DATA)")
    rows = prepare("gsm8k", DATA, tmp_path)
    assert {split: len(found) for split, found in rows.items()} == {"train": 7473, "test": 1319}
    for row in (*rows["train"], *rows["test"]):
        assert score_of(row, row["extra_info"]["answer"]) == 1.0, row


# ---------------------------------------------------------------- any columns


def test_columns(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
    ]
    source = write_lines(
        tmp_path / "a.jsonl",
        [
            {"messages": "3+3?", "meta": {"answer": "6", "src": "arithmetic"}, "level": 1},
            {"messages": chat, "meta": {"answer": "4", "src": "arithmetic"}, "level": 2},
        ],
    )
    columns = ["prompt=messages", "ground_truth=meta.answer", "data_source=meta.src"]
    rows = prepare(
        "jsonl", source, tmp_path / "out", "--columns", *columns, "--instruction", "Think."
    )
    first, second = rows["train"]
    assert first["prompt"] == [{"role": "user", "content": "3+3? Think."}]
    assert second["prompt"] == [*chat[:-1], {"role": "user", "content": "2+2? Think."}]
    assert first["data_source"] == "arithmetic"
    assert first["reward_model"] == {"style": "rule", "ground_truth": "6"}
    assert first["extra_info"] == {"level": 1, "split": "train", "index": 0}


def test_columns_that_the_data_does_not_have(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "Hi"}])
    (row,) = prepare("jsonl", source, tmp_path / "out")["train"]
    assert set(row) == {"prompt", "ability", "extra_info"}
    (row,) = prepare("jsonl", source, tmp_path / "named", "--data-source", "mine")["train"]
    assert row["data_source"] == "mine"
    assert error_of("jsonl", source, "--columns", "prompt=question") == (
        f"{source}, line 1: no column 'question'; its columns are prompt"
    )
    assert "--columns answer=a: expected NAME=COLUMN" in error_of(
        "jsonl", source, "--columns", "answer=a"
    )


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "?", "answer": "no number"}', "the answer does not end in '#### NUMBER'"),
        ('{"question": null, "answer": "#### 1"}', "field 'question' is null, expected a text"),
        ('{"question": " ", "answer": "#### 1"}', "field 'question' is ' ', expected a text"),
        ('{"answer": "#### 1"}', "field 'question' is missing, expected a text"),
        ("[1]", "expected an object, found [1]"),
        ('{"question": "?', "not valid JSON ("),
        ("\udcff", "not valid JSON ("),
    ],
)
def test_a_bad_row_is_named_or_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    good = json.dumps(gsm8k_example(1))
    source = tmp_path / "a.jsonl"
    source.write_text(f"{good}\n\n{line}\n{good}\n", errors="surrogateescape")
    assert error_of("gsm8k", source).startswith(f"{source}, line 3: {words}")
    rows = prepare("gsm8k", source, tmp_path / "out", "--on-bad-row", "skip")["train"]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert "train.parquet: 2 rows, 1 bad rows skipped" in capsys.readouterr().out


def test_bad_files(tmp_path: Path) -> None:
    assert (
        error_of("gsm8k", tmp_path / "none.jsonl")
        == f"{tmp_path}/none.jsonl: No such file or directory"
    )
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    assert "not a readable parquet file" in error_of("gsm8k", tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("question,answer\n")
    assert "ends in .jsonl or .parquet" in error_of("gsm8k", tmp_path / "a.csv")
    (tmp_path / "empty").mkdir()
    assert "no file of the train split" in error_of("gsm8k", tmp_path / "empty")
    (tmp_path / "b.jsonl").write_text("\n")
    assert "no rows for train (0 skipped)" in error_of("gsm8k", tmp_path / "b.jsonl")
    mixed = write_lines(tmp_path / "c.jsonl", [{"prompt": "1", "a": 1}, {"prompt": "2", "a": "x"}])
    assert "each column needs values of one type (" in error_of("jsonl", mixed)


def test_the_hub_needs_the_datasets_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        UserError,
        match=r"--from-hub needs the datasets library, which is not installed: pip install",
    ):
        run(["--dataset", "gsm8k", "--from-hub", "--output", str(tmp_path)])


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load by a stand-in for the datasets library, which has these rows for these arguments
    alone."""
    calls = []

    class Library:
        @staticmethod
        def load_dataset(*arguments: Any) -> dict[str, list[dict[str, str]]]:
            calls.append(arguments)
            if arguments[0] != "openai/gsm8k":
                raise ConnectionError("no\nnetwork")
            return {"test": [gsm8k_example(2)], "train": [gsm8k_example(1)], "other": []}

    monkeypatch.setitem(sys.modules, "datasets", Library)
    run(["--dataset", "gsm8k", "--from-hub", "--output", str(tmp_path)])
    assert calls == [("openai/gsm8k", "main")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.parquet", "train.parquet"]
    with pytest.raises(
        UserError, match=re.escape("--from-hub x/y: cannot be loaded (ConnectionError: no network)")
    ):
        run(["--dataset", "gsm8k", "--from-hub", "x/y", "--output", str(tmp_path)])


def test_the_program_reports_an_error_in_one_line(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"question": "?", "answer": "no number"}])
    command = [
        sys.executable,
        "tools/prepare_data.py",
        "--dataset",
        "gsm8k",
        "--input",
        str(source),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == f"rlhf_mc: error: {source}, line 1: the answer does not end in '#### NUMBER'\n"
    )
