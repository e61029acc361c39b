"""Convert a public data set to train.parquet and val.parquet, for data.train_files and data.val_files.

    python tools/prepare_data.py --dataset gsm8k --input DIR_or_FILE.jsonl --output DIR

GSM8K: a directory has train.jsonl and test.jsonl (or gsm8k_train.jsonl and gsm8k_test.jsonl), with one {"question",
"answer"} per line; test becomes val.parquet. The last --val-rows rows of a single file become val.parquet.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.parquet import write_prompts
from rlhf_mc.rewards.gsm8k import extract_answer

INSTRUCTION = 'Let\'s think step by step and output the final answer after "#### ".'


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file. Raise UserError for the first line without a question and an answer."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    examples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            example = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not valid JSON ({error})") from error
        if not isinstance(example, dict) or not {"question", "answer"} <= set(example):
            raise UserError(f"{path}, line {number}: expected an object with 'question' and 'answer'")
        if extract_answer(example["answer"]) is None:
            raise UserError(f"{path}, line {number}: the answer does not end in '#### NUMBER'")
        examples.append(example)
    return examples


def gsm8k_rows(examples: list[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    """Return the rows of the parquet file of a split, in verl's schema."""
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{example['question']} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": extract_answer(example["answer"])},
            "extra_info": {"split": split, "index": index, **{k: example[k] for k in ("question", "answer")}},
        }
        for index, example in enumerate(examples)
    ]


def read_splits(source: Path, val_rows: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the examples for training and for validation."""
    if source.is_dir():
        prefix = "gsm8k_" if (source / "gsm8k_train.jsonl").is_file() else ""
        return read_jsonl(source / f"{prefix}train.jsonl"), read_jsonl(source / f"{prefix}test.jsonl")
    examples = read_jsonl(source)
    if not 0 < val_rows < len(examples):
        raise UserError(f"--val-rows {val_rows}: must be at least 1 and below the {len(examples)} rows of {source}")
    return examples[:-val_rows], examples[-val_rows:]


def main() -> None:
    """Convert as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=["gsm8k"], required=True)
    parser.add_argument("--input", type=Path, required=True, help="directory with train and test, or one JSONL file")
    parser.add_argument("--output", type=Path, required=True, help="directory for train.parquet and val.parquet")
    parser.add_argument("--val-rows", type=int, default=500, help="single file: rows held out from its end")
    args = parser.parse_args()
    splits = zip(("train", "val"), read_splits(args.input, args.val_rows), strict=True)
    for split, examples in splits:
        if not examples:
            raise UserError(f"{args.input}: no rows for {split}")
        path = args.output / f"{split}.parquet"
        write_prompts(path, gsm8k_rows(examples, split))
        print(f"{path}: {len(examples)} rows")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
