"""Rows of GSM8K's training set in its own format. RLHF_MC_DATA names the directory of its file.
Without the file the rows are generated."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

_DATA = Path(os.environ.get("RLHF_MC_DATA", Path(__file__).parents[2] / "shared/data"))
_FILE = _DATA / "gsm8k_train.jsonl"
SOURCE = "real" if _FILE.is_file() else "generated"


def gsm8k_lines(num_rows: int) -> list[str]:
    """Return the first rows as JSON lines. Generated rows have random questions of GSM8K's lengths
    (mean 235 characters, standard deviation 94)."""
    if SOURCE == "real":
        return _FILE.read_text(encoding="utf-8").splitlines()[:num_rows]
    rng = random.Random(3)
    lines = []
    for _ in range(num_rows):
        length = max(42, round(rng.gauss(235, 94)))
        question = "".join(
            rng.choice("abcdefghij klmnopqrs tuvwxyz 0123456789") for _ in range(length)
        )
        lines.append(json.dumps({"question": question, "answer": f"#### {rng.randrange(100)}"}))
    return lines
