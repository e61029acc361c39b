"""The journal of observations, observations/step_<n>_<rank>.jsonl: the answers of a run's
environments and their times. A run that is resumed or replayed takes the answers from there. No
environment is called again, and batches, which depend on the time of an answer, are the same.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NamedTuple, TextIO

import msgspec

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.observability.sinks import best_effort
from rlhf_mc.rewards.results import FailureKind
from rlhf_mc.rewards.returned import MAX_FLOAT32
from rlhf_mc.run_files import OBSERVATIONS, Row, checked_line, checked_rows, observation_files
from rlhf_mc.runtime.console import print_line
from rlhf_mc.topology.consensus import gather_results, my_share

_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Crc32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_Float32 = Annotated[float, msgspec.Meta(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
_Iteration = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
"""Iteration of the engine's loop in a call, from 1. The limit is 28 hours of an idle engine: a
replay passes through all."""


class TurnId(NamedTuple):
    """Names a turn in a step. Any engine may have the conversation."""

    call: _Natural
    """Call of the engines in the step, from 0: rollouts, greedy responses, validation."""
    conversation: _Natural
    """Number of the response in the run; in the call for greedy responses and validation."""
    turn: _Natural
    """Index of the turn in the conversation."""


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An environment's answer to a turn, as the conversation gets it."""

    iteration: _Iteration
    """The answer came before this iteration's step."""
    token_ids: Sequence[_Natural] = ()
    """The observation, truncated to the room in the response; none after the last turn."""
    reward: _Float32 = 0.0
    info: Mapping[str, _Float32] = {}
    ends: bool = True
    """The conversation has ended."""
    failed: Sequence[FailureKind] = ()
    """Failed calls of the turn."""
    is_fatal: bool = False
    """The last failure has ended the conversation, which has the default score."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**53)] | None = None
    """Maximum length of the next turn, by an agent's request."""
    is_context: bool = False
    """The observation is a context of its own, which attends to nothing before it; without tokens:
    one that the response has no room for, so that it is truncated."""

    def __post_init__(self) -> None:
        if self.is_fatal and not (self.failed and self.ends):
            raise ValueError("is_fatal without a failure that ends the conversation")
        if self.is_context and not (self.token_ids or self.ends):
            raise ValueError("is_context without tokens")


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """A row of the journal."""


class TurnAnswer(_Row, frozen=True, tag="answer"):
    """The answer to a turn."""

    turn: TurnId
    digest: _Crc32
    """CRC-32 of the tokens of prompt and response up to the turn's end."""
    reply: Reply


class CallEnd(_Row, frozen=True, tag="call_end"):
    """The end of a call on an engine."""

    call: _Natural
    engine: _Natural
    iteration: _Iteration


class _JournalLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the file."""

    step: _Natural
    environment: _Crc32
    """Result of environment_digest."""
    row: TurnAnswer | CallEnd


def environment_digest(cfg: EnvironmentConfig, max_response_length: int) -> int:
    """Return the CRC-32 of the settings and files on which an answer depends beside the turn."""
    settings = asdict(cfg).items()
    paths = [path for key, path in settings if key.endswith("path") and path is not None]
    paths += filter(os.path.isfile, cfg.command or ())
    files = [Path(path).read_bytes() for path in paths]
    return zlib.crc32(b"\0".join([repr((cfg, max_response_length)).encode(), *files]))


class ObservationJournal:
    """This rank's part of the journal to write, and the answers of the present step from all ranks:
    of this run before it was killed, or of the run that it replays."""

    def __init__(
        self,
        root: Path | None,
        replayed: str | None,
        rank: int,
        environment: int,
        num_tokens: int,
        max_tokens: int,
    ) -> None:
        """root: the run's directory; None: nothing is written or read. replayed: trainer.replay.
        environment: result of environment_digest. num_tokens: size of the tokenizer. max_tokens:
        data.max_response_length."""
        self.step = 0
        self.is_replay = replayed is not None
        self._bounds = num_tokens, max_tokens
        self._root = root
        self._source = Path(replayed) if replayed is not None else root
        self.rank = rank
        self._environment = environment
        self._replies: dict[TurnId, dict[int, Reply]] = {}
        """Answers by turn and digest."""
        self._ends: dict[tuple[int, int], int] = {}
        """Last iteration of each call on each engine."""
        self._num_calls = 0
        self._file: TextIO | None = None
        """The step's file, open once this rank has written to it."""
        self._is_writable = True
        """False after a failed write: the rest of the step is not written, and warns once."""
        self._is_loaded = False

    def begin_step(self, step: int) -> None:
        """Forget the answers of the previous step."""
        self.step = step
        self._num_calls = 0
        self._file = None
        self._is_loaded = False
        self._is_writable = True

    def begin_call(self) -> int:
        """Return the number of the next call of the engines in the step. The first one reads the
        step's answers. Every rank must call it."""
        if not self._is_loaded and self._source is not None:
            self._load(self._source)
        self._num_calls += 1
        return self._num_calls - 1

    def _load(self, source: Path) -> None:
        """Read the answers of the step. Every rank must call it."""
        self._is_loaded = True
        files = observation_files(source)
        if self.is_replay and self.step > max((step for step, _ in files), default=0):
            raise UserError(
                f"trainer.replay: {source / OBSERVATIONS} has no step {self.step};"
                " leave trainer.replay out to continue from a checkpoint without it"
            )
        paths = [path for step, path in files if step == self.step]

        def read() -> list[_JournalLine]:
            return [line for i in my_share(len(paths)) for line in self._read(paths[i])]

        parts = gather_results(read, OBSERVATIONS)
        self._replies = defaultdict(dict)
        self._ends = {}
        for line in (line for part in parts for line in part):
            row = line.row
            if not self.is_replay and line.environment != self._environment:
                continue  # this run's environment would answer otherwise
            if isinstance(row, TurnAnswer):
                self._replies[row.turn][row.digest] = row.reply
            else:
                self._ends[row.call, row.engine] = row.iteration
        if self._replies:
            answers = f"{len(self._replies)} answers of environments are in {source / OBSERVATIONS}"
            print_line(f"step {self.step}: {answers}", rank_0_only=True)

    def replies(self, turn: TurnId) -> Mapping[int, Reply]:
        """Return the answers to a turn by digest. Runs that were killed may have left several."""
        return self._replies.get(turn, {})

    def num_answered(self, call: int) -> int:
        """Return the number of answered turns of a call."""
        return sum(turn.call == call for turn in self._replies)

    def last_iteration(self, call: int) -> int:
        """Return the last iteration of a call that has a row; 0: none."""
        answers = (replies for turn, replies in self._replies.items() if turn.call == call)
        of_answers = ([*replies.values()][-1].iteration for replies in answers)
        of_ends = (iteration for (number, _), iteration in self._ends.items() if number == call)
        return max([*of_answers, *of_ends], default=0)

    def record(self, *rows: TurnAnswer | CallEnd) -> None:
        """Write rows. After a failure the rest of the step is not written."""
        if self._root is None or not rows or not self._is_writable:
            return
        path = self._root / OBSERVATIONS / f"step_{self.step:06d}_{self.rank}.jsonl"
        lines = [
            msgspec.to_builtins(_JournalLine(self.step, self._environment, row)) for row in rows
        ]

        def append() -> None:
            if self._file is None:
                path.parent.mkdir(exist_ok=True)
                self._file = path.open("a", encoding="utf-8")
                self._file.write("\n")  # a killed process may have left the beginning of a line
            self._file.write("".join(map(checked_line, lines)))
            self._file.flush()

        self._is_writable = best_effort(OBSERVATIONS, append)

    def _read(self, path: Path) -> list[_JournalLine]:
        """Return the lines of a file. A line that no run has written so is left out with a warning:
        its answer comes from the environment. In a replay raise UserError, unless a killed process
        may have left it."""
        content = checked_rows(path)
        lines = []
        problems = dict.fromkeys(content.changed, "its checksum is wrong")
        for number, row in content.rows.items():
            try:
                lines.append(_line(row, self.step, *self._bounds))
            except (TypeError, KeyError, ValueError) as error:
                problems[number] = f"is no answer of this step ({type(error).__name__}: {error})"
        if problems and self.is_replay:
            first = min(problems)
            raise UserError(f"trainer.replay: {path}, line {first}: {problems[first]}")
        incomplete = "is incomplete (of a killed process, or corrupt)"
        problems |= dict.fromkeys(content.incomplete, incomplete)
        if problems:
            first = min(problems)
            others = f"; so are {len(problems) - 1} others" if len(problems) > 1 else ""
            print_line(f"warning: {path}, line {first}: {problems[first]}; it is left out{others}")
        return lines


def _line(row: Row, step: int, num_tokens: int, max_tokens: int) -> _JournalLine:
    """Return the line of a JSON object. Raise ValueError, TypeError or KeyError if it is not as
    `record` writes it in this step."""
    line = msgspec.convert(_upgraded(row) if "place" in row else row, _JournalLine)
    if line.step != step:
        raise ValueError(f"step is {line.step}")
    tokens = line.row.reply.token_ids if isinstance(line.row, TurnAnswer) else ()
    if len(tokens) > max_tokens or max(tokens, default=0) >= num_tokens:
        raise ValueError(f"token_ids is {repr(tokens)[:60]}")
    return line


def _upgraded(row: Row) -> Row:
    """Return a line of the first format, in which the end of a call is a reply to conversation -1,
    in the present one."""
    call, conversation, turn = row["place"]
    reply = {**row["reply"]}
    iteration = reply.pop("at")
    if conversation == -1:
        event = {"type": "call_end", "call": call, "engine": turn, "iteration": iteration}
    else:
        reply["iteration"] = iteration
        event = {"type": "answer", "turn": row["place"], "digest": row["digest"], "reply": reply}
    return {"step": row["step"], "environment": row["environment"], "row": event}
