"""Arbitrary and corrupt files of prompts, parquet and JSONL, through the reader, a real tokenizer
and its chat template: each gives prompts or a UserError of one line."""

from __future__ import annotations

import datetime
import decimal
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing import corruptions, examples, success_or_user_error
from hypothesis import given
from hypothesis import strategies as st
from tiny import make_tokenizer
from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.schema import DataConfig
from rlhf_mc.data.prompts import load_prompts
from rlhf_mc.data.source import check_columns, needed_columns
from rlhf_mc.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

texts = st.text(max_size=20)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", ""]) | texts, "content": texts | st.none()},
    optional={"name": texts},
)
truths = st.fixed_dictionaries({"ground_truth": texts}, optional={"style": texts})
STRUCT = pa.struct([("ground_truth", pa.string())])
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])

COLUMNS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.string(), texts),
    (pa.large_string(), texts),
    (pa.dictionary(pa.int8(), pa.string()), texts),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float64(), st.floats()),
    (pa.float16(), st.floats(width=16)),
    (pa.bool_(), st.booleans()),
    (pa.binary(), st.binary(max_size=8)),
    (pa.null(), st.none()),
    (pa.timestamp("ns"), st.integers(-(2**63), 2**63 - 1)),
    (pa.timestamp("s", tz="Nowhere/Land"), st.integers(-(2**50), 2**50)),
    (pa.timestamp("s"), st.integers(-(2**50), 2**50)),
    (pa.duration("ns"), st.integers(-(2**63), 2**63 - 1)),
    (pa.date32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.time64("us"), st.integers(0, 86_399_999_999)),
    (pa.decimal128(20, 2), st.decimals(-1000, 1000, places=2).map(decimal.Decimal)),
    (MESSAGE, messages),
    (STRUCT, truths),
    (pa.list_(MESSAGE), st.lists(messages, max_size=3)),
    (pa.large_list(MESSAGE), st.lists(messages, max_size=2)),
    (pa.list_(pa.string()), st.lists(texts, max_size=2)),
    (pa.list_(pa.list_(MESSAGE)), st.lists(st.lists(messages, max_size=2), max_size=2)),
    (pa.map_(pa.string(), pa.string()), st.lists(st.tuples(texts, texts), max_size=2)),
    (
        pa.struct([("ground_truth", pa.timestamp("ns"))]),
        st.fixed_dictionaries({"ground_truth": st.integers(0, 10**18)}),
    ),
]
USUAL = {
    "prompt": (pa.list_(MESSAGE), st.lists(messages, min_size=1, max_size=3)),
    "data_source": (pa.string(), texts),
    "reward_model": (STRUCT, truths),
    "extra_info": (
        pa.struct([("index", pa.int64())]),
        st.fixed_dictionaries({"index": st.integers(0, 5)}),
    ),
}


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Draw a table of up to three rows. Each column has its usual type or any other, or is missing;
    some come twice."""
    num_rows = draw(st.integers(0, 3))
    names = []
    arrays = []
    for name, usual in [*USUAL.items(), ("prompt", None), ("other", None)]:
        choice = (
            draw(st.sampled_from(["usual", "usual", "usual", "any", "none"]))
            if usual
            else draw(st.sampled_from(["none", "none", "none", "any"]))
        )
        if choice == "none":
            continue
        kind, strategy = usual if choice == "usual" and usual else draw(st.sampled_from(COLUMNS))
        rows = draw(st.lists(strategy | st.none(), min_size=num_rows, max_size=num_rows))
        names.append(name)
        arrays.append(pa.array(rows, kind))
    return pa.Table.from_arrays(arrays, names=names)


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    make_tokenizer(directory)
    return load_tokenizer(str(directory))


def check(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    filter_overlong: bool = True,
    on_bad_row: Any = "error",
) -> None:
    cfg = DataConfig(
        train_files=[],
        max_prompt_length=30,
        filter_overlong_prompts=filter_overlong,
        on_bad_row=on_bad_row,
    )

    def read() -> Any:
        check_columns(str(path), needed_columns(cfg))

    success_or_user_error(read)
    prompts = success_or_user_error(lambda: load_prompts([str(path)], tokenizer, cfg, -1))
    for prompt in prompts or ():
        assert 0 < len(prompt.token_ids) <= 30
        repr(prompt)


@examples(250)
@given(table=tables(), filter_overlong=st.booleans())
def test_arbitrary_tables(
    directory: Path, tokenizer: PreTrainedTokenizerBase, table: pa.Table, filter_overlong: bool
) -> None:
    path = directory / "table.parquet"
    pq.write_table(table, path)
    check(path, tokenizer, filter_overlong)


def write_intact(directory: Path, compression: str) -> bytes:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i}+{i}="}],
            "data_source": "arithmetic",
            "reward_model": {"ground_truth": str(2 * i)},
            "extra_info": {"index": i, "when": datetime.date(2024, 1, 1)},
        }
        for i in range(20)
    ]
    pq.write_table(
        pa.Table.from_pylist(rows), directory / "intact.parquet", compression=compression
    )
    return (directory / "intact.parquet").read_bytes()


@examples(250)
@given(corrupt=corruptions(), compression=st.sampled_from(["none", "snappy"]))
def test_corrupt_files(
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    corrupt: Callable[[bytes], bytes],
    compression: str,
) -> None:
    path = directory / "corrupt.parquet"
    path.write_bytes(corrupt(write_intact(directory, compression)))
    check(path, tokenizer)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
ROW = {"prompt": "1+1=", "data_source": "arithmetic", "reward_model": {"ground_truth": "2"}}


@examples(150)
@given(
    changes=st.lists(
        st.dictionaries(st.sampled_from([*ROW, "extra_info"]), values, max_size=2), max_size=3
    ),
    corrupt=st.none() | corruptions(),
    on_bad_row=st.sampled_from(["error", "skip"]),
)
def test_arbitrary_lines(
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    changes: list[dict[str, Any]],
    corrupt: Callable[[bytes], bytes] | None,
    on_bad_row: str,
) -> None:
    """Check, with on_bad_row "skip", that the first row, which is good, is read whatever the others
    are."""
    path = directory / "lines.jsonl"
    data = "".join(f"{json.dumps({**ROW, **change})}\n" for change in [{}, *changes]).encode()
    path.write_bytes(corrupt(data) if corrupt else data)
    check(path, tokenizer, on_bad_row=on_bad_row)
    if corrupt is None:
        cfg = DataConfig(train_files=[], on_bad_row="skip", filter_overlong_prompts=True)
        assert load_prompts([str(path)], tokenizer, cfg, -1)[0].row == 0
