"""The prompts of a dataset, kept compactly on every rank. prompts.py makes them of parquet rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import pyarrow as pa

from rlhf_mc.data.batch import Prompt


@dataclass(frozen=True)
class FilePrompts:
    """The P prompts of one file."""

    tokens: np.ndarray
    """[T] int32: their tokens, end to end."""
    lens: np.ndarray
    """[P] int32: tokens of each."""
    rows: np.ndarray
    """[P] int32: the row of each in the table."""
    table: pa.Table
    """The file's rows: data source, `reward_model`, and `extra_info` where the file has it."""
    source_key: str
    """Column of the data source."""
    texts: Sequence[str]
    """Texts of the first prompts."""
    name: str
    """The setting and the file, for messages."""


class Prompts(Sequence[Prompt]):
    """The prompts of all files, in order. A Prompt is made when it is read: as Python objects 400,000 prompts of 200
    tokens take about 4 GB on every rank, as vectors and Arrow tables a fifth of that."""

    def __init__(self, files: Sequence[FilePrompts]) -> None:
        self._files = files
        self._starts = [np.cumsum(file.lens, dtype=np.int64) - file.lens for file in files]
        self._firsts = [0, *np.cumsum([len(file.lens) for file in files]).tolist()]

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self._prompt(i) for i in range(len(self))[index]]
        return self._prompt(range(len(self))[index])

    def _prompt(self, index: int) -> Prompt:
        number = bisect_right(self._firsts, index) - 1
        file = self._files[number]
        place = index - self._firsts[number]
        start = self._starts[number][place]
        (row,) = file.table.slice(file.rows[place], 1).to_pylist()
        return Prompt(
            index=index,
            token_ids=file.tokens[start : start + file.lens[place]].tolist(),
            text=file.texts[place] if place < len(file.texts) else "",
            data_source=row[file.source_key],
            ground_truth=row["reward_model"]["ground_truth"],
            extra_info=row.get("extra_info") or {},
            file=file.name,
            row=int(file.rows[place]),
        )
