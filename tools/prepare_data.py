"""Convert a data set to parquet files in verl's schema, for data.train_files and data.val_files.

    python tools/prepare_data.py --dataset gsm8k --input DIR_or_FILE --output DIR
    python tools/prepare_data.py --dataset math --from-hub --output DIR
    python tools/prepare_data.py --dataset jsonl --input FILE.jsonl \\
        --columns prompt=question ground_truth=answer \\
        --data-source openai/gsm8k --output DIR

The input is a JSONL or parquet file, or a directory with a file for each split: train.jsonl,
gsm8k_train.jsonl, train-00000-of-00001.parquet, ..., in it or in its main/ or data/. The output is
train.parquet and test.parquet (for hellaswag validation.parquet too). A single file is the train
split; --test-rows holds out its last rows for test.

--dataset jsonl takes any columns. --columns names the ones of prompt (a text, or chat messages),
ground_truth, data_source and ability where the data has them; `a.b` is the field b of a. The other
columns become extra_info. Without ground_truth or data_source the output has no such column, and
needs a reward function of your own.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_mc.runtime.tool import Parser, end_on_interrupt, whole_number

if __name__ == "__main__":
    end_on_interrupt()

import pyarrow as pa
import pyarrow.parquet as pq
from public_sets import SETS, MakeRow, PublicSet, Row, user_message

from rlhf_mc import json_files
from rlhf_mc.config.errors import UserError, error_reason
from rlhf_mc.data.source import write_prompts
from rlhf_mc.runtime.exit_codes import exit_code

Examples = Iterable[tuple[str, Any]]
"""(place, example): the place is file and line, for messages. An example that cannot be read is a
UserError."""
MAPPED = ("prompt", "ground_truth", "data_source", "ability")


# ---------------------------------------------------------------- examples


def read_file(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the examples of a JSONL or parquet file. Raise UserError if the file cannot be read."""
    try:
        if path.suffix == ".parquet":
            rows = pq.read_table(path).to_pylist()
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows))
        elif path.suffix in (".jsonl", ".json"):
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield f"{path}, line {number}", parsed(line)
        else:
            raise UserError(f"{path}: the name of an input ends in .jsonl or .parquet")
    except OSError as error:
        raise UserError(f"{path}: {error_reason(error)}") from error
    except pa.ArrowException as error:
        raise UserError(
            f"{path}: not a readable parquet file ({' '.join(str(error).split())[:300]})"
        ) from error


def parsed(line: bytes) -> Any:
    """Return the object of a line, or the UserError that names its mistake."""
    try:
        example = json_files.parse(line)
    except ValueError as error:
        return UserError(f"not valid JSON ({error})")
    return (
        example
        if isinstance(example, dict)
        else UserError(f"expected an object, found {repr(example)[:60]}")
    )


def local_splits(
    source: Path, dataset: str, splits: Sequence[str], test_rows: int
) -> dict[str, Examples]:
    """Return the examples of each split that the file or directory has. Raise UserError if it has
    none."""
    if not source.is_dir():
        examples = list(read_file(source))
        if not 0 <= test_rows < max(1, len(examples)):
            raise UserError(
                f"--test-rows {test_rows}: must be below the {len(examples)} rows of {source}"
            )
        kept = len(examples) - test_rows
        return {"train": examples[:kept], **({"test": examples[kept:]} if test_rows else {})}
    if test_rows:
        raise UserError(
            f"--test-rows {test_rows}: only of a single file, and {source} is a directory"
        )
    examples_by_split: dict[str, Examples] = {}
    for split in splits:
        pattern = re.compile(rf"({dataset}[_-])?{split}(-\d+-of-\d+)?\.(jsonl|json|parquet)")
        files = next(
            (
                files
                for folder in (source, source / "main", source / "data")
                if (
                    files := sorted(
                        path for path in folder.glob("*") if pattern.fullmatch(path.name)
                    )
                )
            ),
            [],
        )
        if files:
            examples_by_split[split] = [example for path in files for example in read_file(path)]
    if "train" not in examples_by_split:
        raise UserError(
            f"{source}: no file of the train split (train.jsonl, {dataset}_train.jsonl, "
            "train.parquet)"
        )
    return examples_by_split


def hub_splits(name: str, config: str | None, splits: Sequence[str]) -> dict[str, Examples]:
    """Return the examples of each split of a data set on the Hugging Face Hub, read by the
    `datasets` library."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "--from-hub needs the datasets library, which is not installed: pip install datasets, "
            "or give --input"
        ) from error
    try:
        loaded = datasets.load_dataset(name, config)
    except Exception as error:  # the library raises errors of many kinds
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"--from-hub {name}: cannot be loaded ({type(error).__name__}: {reason})"
        ) from error
    return {
        split: [
            (f"{name} {split}, row {number}", dict(row)) for number, row in enumerate(loaded[split])
        ]
        for split in splits
        if split in loaded
    }


# ---------------------------------------------------------------- any columns


def column_map(pairs: Sequence[str]) -> dict[str, str]:
    """Return {column of verl's schema: column of the input} of arguments such as
    prompt=question."""
    columns = {"prompt": "prompt"}
    for pair in pairs:
        name, equals, column = pair.partition("=")
        if name not in MAPPED or not equals or not column:
            raise UserError(
                f"--columns {pair}: expected NAME=COLUMN, with a NAME of {', '.join(MAPPED)}"
            )
        columns[name] = column
    return columns


def value_at(example: Row, path: str) -> Any:
    """Return the value of a column, or of a field of it: `a.b`. Raise UserError if the example does
    not have it."""
    value: Any = example
    for name in [path] if path in example else path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise UserError(
                f"no column {path!r}; its columns are {', '.join(example)[:300] or 'none'}"
            )
        value = value[name]
    return value


def mapped_row(columns: dict[str, str], data_source: str | None, instruction: str) -> MakeRow:
    """Return the function that makes a row of an example by the column map. data_source: the same
    for all rows."""

    def make_row(example: Row, split: str, index: int) -> Row:
        values = {name: value_at(example, column) for name, column in columns.items()}
        row: Row = {"prompt": messages(values["prompt"], columns["prompt"], instruction)}
        if data_source is not None or "data_source" in values:
            row["data_source"] = values.get("data_source", data_source)
        row["ability"] = values.get("ability", "")
        if "ground_truth" in values:
            if values["ground_truth"] is None:
                raise UserError(
                    f"column {columns['ground_truth']!r} is null, expected a reference answer"
                )
            row["reward_model"] = {"style": "rule", "ground_truth": values["ground_truth"]}
        taken = {
            column if column in example else column.partition(".")[0] for column in columns.values()
        }
        rest = {name: value for name, value in example.items() if name not in taken}
        row["extra_info"] = {**rest, "split": split, "index": index}
        return row

    return make_row


def messages(prompt: Any, column: str, instruction: str) -> list[Row]:
    """Return a prompt as chat messages, with the instruction at the end of the last. Raise
    UserError if it is neither a text nor messages."""
    chat = user_message(prompt) if isinstance(prompt, str) and prompt else prompt
    if not isinstance(chat, list) or not chat:
        raise UserError(
            f"column {column!r} is {repr(prompt)[:60]}, expected a text or chat messages"
        )
    for message in chat:
        fields = message if isinstance(message, dict) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise UserError(
                f"column {column!r} has the message {repr(message)[:60]}, expected role and content"
            )
    if instruction:
        chat = [*chat[:-1], {**chat[-1], "content": f"{chat[-1]['content']} {instruction}"}]
    return chat


# ---------------------------------------------------------------- rows


def convert(
    examples: Examples, make_row: MakeRow, split: str, skip: bool
) -> tuple[list[Row], int, int]:
    """Return the rows of a split, how many examples could not be used, and how many the data set
    leaves out. Raise UserError, naming its place, for the first that cannot be used, unless
    `skip`."""
    rows: list[Row] = []
    num_bad = num_left_out = 0
    for place, example in examples:
        try:
            if isinstance(example, UserError):
                raise example
            row = make_row(example, split, len(rows))
        except UserError as error:
            if not skip:
                raise UserError(f"{place}: {error}") from None
            num_bad += 1
            continue
        if row is None:
            num_left_out += 1
        else:
            rows.append(row)
    return rows, num_bad, num_left_out


def write_split(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows; a column that a row lacks is null. Raise UserError if a column has values of
    several types, or the file cannot be written."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        write_prompts(path, [{name: row.get(name) for name in names} for row in rows])
    except OSError as error:
        raise UserError(f"{path}: {error_reason(error)}") from error
    except (pa.ArrowException, OverflowError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{path}: cannot be written; each column needs values of one type ({reason})"
        ) from error


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--dataset", choices=[*SETS, "jsonl"], required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", type=Path, help="file, or directory with a file for each split")
    source.add_argument(
        "--from-hub", nargs="?", const="", metavar="NAME", help="load by the datasets library"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="directory for train.parquet and test.parquet"
    )
    parser.add_argument(
        "--test-rows",
        type=whole_number(0, 1 << 40),
        default=0,
        help="single file: rows held out from its end",
    )
    parser.add_argument(
        "--columns", nargs="*", default=[], metavar="NAME=COLUMN", help="jsonl: the columns to take"
    )
    parser.add_argument("--data-source", help="jsonl: data_source of all rows")
    parser.add_argument(
        "--instruction",
        default="",
        help="jsonl: text that is appended to each prompt, after a space",
    )
    parser.add_argument(
        "--on-bad-row",
        choices=["error", "skip"],
        default="error",
        help="a row that cannot be used: end, or skip it",
    )
    args = parser.parse_args(argv)
    if args.dataset != "jsonl" and (args.columns or args.data_source or args.instruction):
        parser.error("--columns, --data-source and --instruction are for --dataset jsonl")
    if args.dataset == "jsonl" and args.from_hub == "":
        parser.error("--from-hub needs a NAME for --dataset jsonl")
    return args


def prepare(args: argparse.Namespace) -> None:
    """Convert as the arguments say. Raise UserError for an input that cannot be used."""
    if args.dataset == "jsonl":
        make_row = mapped_row(column_map(args.columns), args.data_source, args.instruction)
        chosen = PublicSet("", None, ("train", "validation", "test"), make_row)
    else:
        chosen = SETS[args.dataset]
    if args.input is not None:
        splits = local_splits(args.input, args.dataset, chosen.splits, args.test_rows)
    else:
        splits = hub_splits(args.from_hub or chosen.hub, chosen.hub_config, chosen.splits)
    skip = args.on_bad_row == "skip"
    for split, (rows, num_bad, num_left_out) in {
        split: convert(examples, chosen.make_row, split, skip) for split, examples in splits.items()
    }.items():
        source = args.input or args.from_hub or chosen.hub
        if not rows and split == "train":
            raise UserError(f"{source}: no rows for {split} ({num_bad} skipped)")
        if rows:
            write_split(args.output / f"{split}.parquet", rows)
        place = args.output / f"{split}.parquet" if rows else f"{source}, {split}"
        skipped = f", {num_bad} bad rows skipped" if num_bad else ""
        left_out = f", {num_left_out} without a label left out" if num_left_out else ""
        print(f"{place}: {len(rows)} rows{skipped}{left_out}")


def main() -> int:
    """Convert as the command line says. Return the exit code."""
    args = arguments()
    return exit_code("rlhf_mc", lambda: prepare(args))


if __name__ == "__main__":
    sys.exit(main())
