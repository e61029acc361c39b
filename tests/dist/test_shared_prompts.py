"""Prompts that several ranks tokenise together: the same prompts and errors as in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import prompt_cases
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_bad_input import common_error
from tiny import make_tokenizer, make_workspace, write_config

from rlhf_mc.config.errors import UserError

WORLDS = (2, 4)


def row(number: int, length: int = 3, **changes: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"{number}".ljust(length, "+")}],
        "data_source": "arithmetic",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": number},
        **changes,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    make_tokenizer(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("world", WORLDS)
def test_prompts_do_not_depend_on_the_number_of_ranks(
    pool: Any, tmp_path: Path, model: str, world: int
) -> None:
    """Load files with too long prompts, with fewer rows than ranks, and with none that fits."""
    files = [
        write(tmp_path / "many.parquet", [row(i, 3 + i % 11) for i in range(37)]),
        write(tmp_path / "one.parquet", [row(100)]),
        write(tmp_path / "none.parquet", [row(i, 50) for i in range(5)]),
        write(tmp_path / "few.parquet", [row(200 + i) for i in range(3)]),
        str(tmp_path / "lines.jsonl"),
    ]
    (tmp_path / "lines.jsonl").write_text(
        "".join(f"{json.dumps(row(300 + i))}\n" for i in range(7))
    )
    for settings in (
        {"max_prompt_length": 10, "filter_overlong_prompts": True},
        {"max_prompt_length": 10, "filter_overlong_prompts": True, "max_samples": 20},
        {"max_prompt_length": 10, "truncation": "left", "on_bad_row": "skip"},
    ):
        alone = prompt_cases.load(files, model, **settings)
        assert [prompt.index for prompt in alone] == list(range(len(alone)))
        for mine in pool(world).run(prompt_cases.load, files=files, model=model, **settings):
            assert [repr(prompt) for prompt in mine] == [repr(prompt) for prompt in alone]


def utf8_error(rows: list[dict[str, Any]], column: str, bad: int) -> pa.Table:
    """Return the rows as a table in which one value of a column is not UTF-8."""
    table = pa.Table.from_pylist(rows)
    texts = [b"\xff" if i == bad else b"text" for i in range(len(rows))]
    return table.set_column(
        table.column_names.index(column), column, pa.array(texts).view(pa.string())
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("rows in the middle", "first.parquet, row 13: column 'reward_model' has no field"),
        (
            "too long",
            "first.parquet, row 21: the prompt has 52 tokens, more than data.max_prompt_length 30",
        ),
        ("column before rows", "first.parquet: column 'data_source' of type string cannot be read"),
        (
            "first column before second",
            "first.parquet: column 'prompt' of type string cannot be read",
        ),
        ("first file before second", "first.parquet, row 39: column 'reward_model' has no field"),
        ("missing file", "second.parquet: no such file"),
        ("no rows", "first.parquet: no rows"),
    ],
)
def test_first_error_is_that_of_one_process(
    pool: Any, tmp_path: Path, model: str, world: int, case: str, words: str
) -> None:
    rows = [row(i) for i in range(40)]
    first = tmp_path / "first.parquet"
    files = [str(first)]
    bad = {"reward_model": None}
    if case == "rows in the middle":
        write(first, [row(i, **(bad if i in (13, 14, 35) else {})) for i in range(40)])
    elif case == "too long":
        write(first, [row(i, 50 if i in (21, 38) else 3) for i in range(40)])
    elif case == "column before rows":
        pq.write_table(
            utf8_error([row(i, **(bad if i == 0 else {})) for i in range(40)], "data_source", 38),
            first,
        )
    elif case == "first column before second":
        table = utf8_error(rows, "data_source", 2)
        texts = [b"\xff" if i == 39 else b"text" for i in range(40)]
        pq.write_table(table.set_column(0, "prompt", pa.array(texts).view(pa.string())), first)
    elif case == "no rows":
        pq.write_table(pa.Table.from_pylist(rows).slice(0, 0), first)
    else:
        write(first, rows if case == "missing file" else [*rows[:39], row(39, **bad)])
        files.append(str(tmp_path / "second.parquet"))
    with pytest.raises(UserError) as alone:
        prompt_cases.load(files, model, max_prompt_length=30)
    assert words in str(alone.value)
    outcomes = pool(world).outcomes(
        prompt_cases.load, files=files, model=model, max_prompt_length=30
    )
    assert common_error(outcomes) == str(alone.value)


def test_files_of_ranks_that_differ(pool: Any, tmp_path: Path, model: str) -> None:
    write(tmp_path / "0.parquet", [row(i) for i in range(5)])
    write(tmp_path / "1.parquet", [row(i) for i in range(4)])
    files = [str(tmp_path / "{rank}.parquet")]
    outcomes = pool(2).outcomes(prompt_cases.load, files=files, model=model)
    assert all(not ok and "5 rows on rank 0 and 4 on rank 1" in value[1] for ok, value in outcomes)
    (tmp_path / "1.parquet").unlink()
    message = common_error(pool(2).outcomes(prompt_cases.load, files=files, model=model))
    assert message == f"data.train_files {tmp_path}/1.parquet: no such file"


def test_first_responses_of_a_validation_are_written(pool: Any, tmp_path: Path) -> None:
    make_workspace(tmp_path)
    written, _ = pool(2).run(
        prompt_cases.validation_samples, config_path=str(write_config(tmp_path))
    )
    questions = [
        row["prompt"][0]["content"] for row in pq.read_table(tmp_path / "val.parquet").to_pylist()
    ]
    assert [json.loads(line)["input"] for line in written.splitlines()] == [
        questions[i] for i in (0, 0, 1)
    ]
