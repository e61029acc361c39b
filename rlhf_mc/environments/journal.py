"""The journal of observations, observations/step_<n>_<rank>.jsonl: what the environments of a run have answered, and
when. A run that is resumed or replayed takes the answers from there: no environment is called again, and batches, which
the time of an answer decides, are the same.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO, get_args

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.observability.sinks import best_effort
from rlhf_mc.rewards.results import FailureKind
from rlhf_mc.rewards.returned import MAX_FLOAT32
from rlhf_mc.run_files import OBSERVATIONS, Row, checked_line, checked_rows, observation_files
from rlhf_mc.runtime.console import print_line
from rlhf_mc.topology.consensus import gather_results, my_share


@dataclass(frozen=True)
class Reply:
    """An environment's answer to a turn, as the conversation gets it."""

    at: int
    """Iteration of the engine's loop in the call, from 1, before whose step the answer came."""
    token_ids: Sequence[int] = ()
    """The observation, as far as it fits; none after the last turn."""
    reward: float = 0.0
    info: Mapping[str, float] = field(default_factory=dict)
    ends: bool = True
    """The conversation has ended."""
    failed: Sequence[FailureKind] = ()
    """The calls of the turn that have failed."""
    is_fatal: bool = False
    """The last failure has ended the conversation, which has the default score."""


Place = tuple[int, int, int]
"""Names a turn in a step: the call of the engines, from 0 (rollouts, greedy responses, validation); the number of the
conversation, which is that of the response in the run, or in the call for greedy responses and validation; the turn,
from 0. Any engine may have the conversation."""
END = -1
"""In place of the conversation: the row is of the end of the call on the engine `turn`."""
_MOST_ITERATIONS = 10_000_000
"""Iterations of a call up to which an answer may come: 28 hours of an idle engine. A replay passes through all."""


def environment_digest(cfg: EnvironmentConfig, max_response_length: int) -> int:
    """Return the CRC-32 of what an answer depends on beside the turn, as far as it is known: settings and files."""
    paths = [path for key, path in asdict(cfg).items() if key.endswith("path") and path is not None]
    parts = [repr((cfg, max_response_length)).encode(), *(Path(path).read_bytes() for path in paths)]
    return zlib.crc32(b"\0".join(parts))


class ObservationJournal:
    """The journal that this rank writes, and the answers of the present step in the journal of all ranks: of this run
    before it was killed, or of the run that it replays."""

    def __init__(
        self, root: Path | None, replayed: str | None, rank: int, environment: int, num_tokens: int, max_tokens: int
    ) -> None:
        """root: the run's directory; None: nothing is written or read. replayed: trainer.replay. environment: CRC-32 of
        the environment. num_tokens: of the tokenizer. max_tokens: data.max_response_length."""
        self._bounds = num_tokens, max_tokens
        self.is_replay = replayed is not None
        self._root = root
        self._source = Path(replayed) if replayed is not None else root
        self._rank = rank
        self._environment = environment
        self._replies: dict[Place, dict[int, Reply]] = {}
        self._file: TextIO | None = None
        """Of the step, once this rank has written to it."""
        self._is_writable = True
        """No row of the step has failed: after one that has, each further one would be a warning."""
        self.step = 0
        self._is_loaded = False

    def begin_step(self, step: int) -> None:
        """Forget the answers of the step before."""
        self._file = None
        self.step = step
        self._is_loaded = False
        self._is_writable = True

    def load(self) -> None:
        """Read the answers of the step, at its first call of the engines. Every rank must call it."""
        if self._is_loaded or self._source is None:
            return
        self._is_loaded = True
        steps = observation_files(self._source)
        if self.is_replay and self.step > max((step for step, _ in steps), default=0):
            raise UserError(
                f"trainer.replay: {self._source / OBSERVATIONS} has no step {self.step}; leave trainer.replay out to"
                " continue from a checkpoint without it"
            )
        files = [path for step, path in steps if step == self.step]
        parts = gather_results(
            lambda: [row for i in my_share(len(files)) for row in self._read(files[i])], OBSERVATIONS
        )
        self._replies = defaultdict(dict)
        for place, digest, environment, reply in (row for part in parts for row in part):
            # Answers of another environment are not those that this one would give.
            if self.is_replay or environment == self._environment:
                self._replies[place][digest] = reply
        if num := sum(place[1] != END for place in self._replies):
            line = f"step {self.step}: {num} answers of environments are in {self._source / OBSERVATIONS}"
            print_line(line, rank_0_only=True)

    def of_call(self, call: int) -> dict[Place, Reply]:
        """Return the last answer to each turn of a call."""
        return {place: [*one.values()][-1] for place, one in self._replies.items() if place[0] == call}

    def at(self, place: Place) -> Mapping[int, Reply]:
        """Return the answers to a turn by the CRC-32 of the tokens of prompt and response up to it. There may be
        several, of runs that were killed."""
        return self._replies.get(place, {})

    def record(self, answers: Mapping[tuple[Place, int], Reply]) -> None:
        """Write answers by their turns, with the digests that `at` has. Where that fails, the step's further ones are
        not written."""
        if self._root is None or not answers or not self._is_writable:
            return
        path = self._root / OBSERVATIONS / f"step_{self.step:06d}_{self._rank}.jsonl"
        text = ""
        for (place, digest), reply in answers.items():
            row = {"step": self.step, "place": place, "digest": digest, "environment": self._environment}
            text += checked_line({**row, "reply": asdict(reply)})

        def append() -> None:
            if self._file is None:
                path.parent.mkdir(exist_ok=True)
                self._file = path.open("a", encoding="utf-8")
                self._file.write("\n")  # a killed process may have left the beginning of a row
            self._file.write(text)
            self._file.flush()

        self._is_writable = best_effort(OBSERVATIONS, append)

    def _read(self, path: Path) -> list[tuple[Place, int, int, Reply]]:
        """Return place, digest, environment and reply of each row of a file. A row that is not as a run has written it
        is left out with a warning: its answer comes from the environment. In a replay raise UserError, unless a killed
        process may have left it."""
        lines = checked_rows(path)
        rows = []
        problems = dict.fromkeys(lines.changed, "its checksum is wrong")
        for number, row in lines.rows.items():
            try:
                rows.append(_checked(row, self.step, *self._bounds))
            except (TypeError, KeyError, ValueError) as error:
                problems[number] = f"is no answer of this step ({type(error).__name__}: {error})"
        if problems and self.is_replay:
            raise UserError(f"trainer.replay: {path}, line {min(problems)}: {problems[min(problems)]}")
        problems |= dict.fromkeys(lines.incomplete, "is incomplete (of a killed process, or corrupt)")
        if problems:
            more = f"; so are {len(problems) - 1} others" if len(problems) > 1 else ""
            print_line(f"warning: {path}, line {min(problems)}: {problems[min(problems)]}; it is left out{more}")
        return rows


def _checked(row: Row, step: int, num_tokens: int, max_tokens: int) -> tuple[Place, int, int, Reply]:
    """Return place, digest, environment and reply of a row. Raise ValueError, TypeError or KeyError if it is not as
    `record` writes it in this step."""
    place = row["place"]
    reply = Reply(**row["reply"])
    for name, value, wanted in (
        ("step", row["step"], _is_int(row["step"], step, step)),
        ("place", place, all(_is_int(one, least) for one, least in zip(place, (0, END, 0), strict=True))),
        ("digest", row["digest"], _is_int(row["digest"], most=2**32 - 1)),
        ("environment", row["environment"], _is_int(row["environment"], most=2**32 - 1)),
        ("at", reply.at, _is_int(reply.at, most=_MOST_ITERATIONS)),
        ("token_ids", reply.token_ids, isinstance(reply.token_ids, list) and len(reply.token_ids) <= max_tokens),
        ("token_ids", reply.token_ids, all(_is_int(token, most=num_tokens - 1) for token in reply.token_ids)),
        ("reward", reply.reward, _is_number(reply.reward)),
        ("info", reply.info, isinstance(reply.info, dict) and all(map(_is_number, reply.info.values()))),
        ("ends", reply.ends, type(reply.ends) is bool and type(reply.is_fatal) is bool),
        ("failed", reply.failed, isinstance(reply.failed, list) and {*reply.failed} <= {*get_args(FailureKind)}),
        ("is_fatal", reply.is_fatal, bool(reply.failed and reply.ends) or not reply.is_fatal),
    ):
        if not wanted:
            raise ValueError(f"{name} is {repr(value)[:60]}")
    return tuple(place), row["digest"], row["environment"], reply


def _is_int(value: Any, least: int = 0, most: int = 2**53) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_FLOAT32
