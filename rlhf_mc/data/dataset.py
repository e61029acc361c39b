"""The prompts of a dataset, stored compactly on every rank. prompts.py makes them from rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np

from rlhf_mc.data.batch import Prompt
from rlhf_mc.data.source import AGENT, EXTRA, REFERENCE, Rows
from rlhf_mc.data.tokenise import chat_messages

NO_SOURCE = "unknown"
"""The data source of rows that have none, in metrics. Only a function of the user's own scores
them."""
_READ_TOGETHER = 1024
"""Rows that an iteration over prompts reads at once: each takes 2 kB meanwhile."""


@dataclass(frozen=True)
class FilePrompts:
    """The P prompts of one file."""

    tokens: np.ndarray
    """[T] int32: their tokens, end to end."""
    lens: np.ndarray
    """[P] int32: tokens of each, with its teacher's."""
    rows: np.ndarray
    """[P] int32: the row of each in the file."""
    teacher_lens: np.ndarray
    """[P] int32: the tokens at the end of each that are its teacher's prompt; 0: the same one."""
    source: Rows
    """The file's rows: data source, `reward_model` and `extra_info`, where the file has them."""
    source_key: str
    """Column of the data source."""
    name: str
    """The setting and the file, for messages."""
    messages_key: str | None = None
    """Column of the prompt, if prompts are to have their messages."""

    def without(self, indices: Collection[int]) -> FilePrompts:
        """Return the prompts without those at these indices."""
        remaining = np.setdiff1d(np.arange(len(self.lens)), list(indices))
        remains = np.repeat(np.isin(np.arange(len(self.lens)), remaining), self.lens)
        columns = {n: getattr(self, n)[remaining] for n in ("lens", "rows", "teacher_lens")}
        return replace(self, tokens=self.tokens[remains], **columns)


class Prompts(Sequence[Prompt]):
    """The prompts of all files, in order. A Prompt is made when it is read: as Python objects
    400,000 prompts of 200 tokens take about 4 GB on every rank, as vectors and Arrow tables a fifth
    of that."""

    def __init__(self, files: Sequence[FilePrompts]) -> None:
        self._files = files
        self._starts = [np.cumsum(file.lens, dtype=np.int64) - file.lens for file in files]
        self._firsts = [0, *np.cumsum([len(file.lens) for file in files]).tolist()]

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @property
    def file_sizes(self) -> list[int]:
        """Number of prompts of each file."""
        return [len(file.lens) for file in self._files]

    def without(self, indices: Collection[int]) -> Prompts:
        """Return the prompts without these; the others get new indices."""
        ends = zip(self._files, self._firsts, self._firsts[1:], strict=False)
        return Prompts(
            [
                file.without({i - first for i in indices if first <= i < end})
                for file, first, end in ends
            ]
        )

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return list(self._read(range(len(self))[index]))
        return self.select([range(len(self))[index]])[0]

    def __iter__(self) -> Iterator[Prompt]:
        return self._read(range(len(self)))

    def _read(self, indices: range) -> Iterator[Prompt]:
        for start in range(0, len(indices), _READ_TOGETHER):
            yield from self.select(indices[start : start + _READ_TOGETHER])

    def select(self, indices: Sequence[int]) -> list[Prompt]:
        """Return the prompts of these indices, each from 0. The rows of each file are read
        together."""
        indices_by_file: dict[int, list[int]] = {}
        for index in indices:
            indices_by_file.setdefault(bisect_right(self._firsts, index) - 1, []).append(index)
        prompts: dict[int, Prompt] = {}
        for number, wanted in indices_by_file.items():
            file = self._files[number]
            rows = file.source.rows(
                [int(file.rows[index - self._firsts[number]]) for index in wanted]
            )
            prompts.update(
                (index, self._prompt(number, index, row))
                for index, row in zip(wanted, rows, strict=True)
            )
        return [prompts[index] for index in indices]

    def _prompt(self, number: int, index: int, row: Mapping[str, Any]) -> Prompt:
        """Return the prompt of a row of file `number`."""
        file = self._files[number]
        i = index - self._firsts[number]
        start = self._starts[number][i]
        end = start + file.lens[i]
        own_end = end - file.teacher_lens[i]
        row_number = int(file.rows[i])
        messages: Sequence[Mapping[str, Any]] = ()
        if file.messages_key is not None:
            messages = chat_messages(
                row[file.messages_key], f"{file.name}, row {row_number}", file.messages_key
            )
        return Prompt(
            index=index,
            token_ids=file.tokens[start:own_end],
            data_source=row.get(file.source_key, NO_SOURCE),
            ground_truth=row.get(REFERENCE, {}).get("ground_truth"),
            extra_info=row.get(EXTRA) or {},
            file=file.name,
            row=row_number,
            messages=messages,
            agent_name=row.get(AGENT),
            teacher_ids=file.tokens[own_end:end] if own_end < end else None,
        )
