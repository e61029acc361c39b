"""The journal of the groups that each step has generated, rollouts.jsonl, and its replay:
trainer.replay lets a run in another layout take the decisions of an earlier one, which depend on
the number of engines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import depends_on_time
from rlhf_mc.config.schema import Config
from rlhf_mc.observability.sinks import append_line
from rlhf_mc.run_files import JOURNAL_FILE, checked_line, checked_rows
from rlhf_mc.runtime.console import print_line
from rlhf_mc.trainer.pool.group_pool import Group


@dataclass(frozen=True)
class StepGroups:
    """The groups of one step: a row of the journal. With algorithm.filter_groups a step may have
    several."""

    step: int
    positions: Sequence[int]
    """Position of each group that the step has generated, in the run's order of prompts."""
    lens: Sequence[Sequence[int]]
    """Tokens of each of its responses at the end of the step."""
    taken: Sequence[int]
    """Positions of the groups that the step has trained on."""


class RolloutJournal:
    """The journal of a run, which rank 0 writes, and the one that the run replays. The same on
    every rank."""

    def __init__(self, cfg: Config) -> None:
        """Raise UserError if the journal of trainer.replay cannot be replayed."""
        self._path = Path(cfg.trainer.default_local_dir) / JOURNAL_FILE
        self._settings = {
            "seed": cfg.trainer.seed,
            "train_batch_size": cfg.data.train_batch_size,
            "n": cfg.rollout.n,
            "max_response_length": cfg.data.max_response_length,
            "partial_rollout": cfg.rollout.partial_rollout,
            "one_step_off": cfg.rollout.one_step_off,
        }
        least = 1 if cfg.algorithm.filter_groups.enable else cfg.data.train_batch_size
        self._num_taken = range(least, cfg.data.train_batch_size + 1)
        self._replayed: dict[int, list[StepGroups]] | None = None
        if cfg.trainer.replay is not None and depends_on_time(cfg.rollout):
            self._replayed = self._read(Path(cfg.trainer.replay) / JOURNAL_FILE)

    def _read(self, path: Path) -> dict[int, list[StepGroups]]:
        """Return the rows of a journal by step. An incomplete one, of a killed run, is left out."""
        lines = checked_rows(path)
        for number in lines.incomplete:
            print_line(
                f"warning: trainer.replay: {path}, line {number}: is incomplete; it is left out",
                rank_0_only=True,
            )
        if lines.changed:
            raise UserError(
                f"trainer.replay: {path}, line {lines.changed[0]}: its checksum is wrong"
            )
        rows = lines.rows
        if not rows:
            raise UserError(
                f"trainer.replay: {path} has no rows; a run writes it with rollout.tail_batching "
                "or partial_rollout"
            )
        by_step: dict[int, list[StepGroups]] = defaultdict(list)
        for number, row in rows.items():
            other = {key: row.pop(key, False) for key in self._settings}
            if other != self._settings:
                raise UserError(
                    f"trainer.replay: {path} is of a run with {_words(other)}; this run has "
                    f"{_words(self._settings)}"
                )
            try:
                groups = StepGroups(**row)
            except TypeError:
                raise UserError(
                    f"trainer.replay: {path} is no journal of rollouts: it has other fields"
                ) from None
            if (num_taken := len(groups.taken)) not in self._num_taken:
                raise UserError(
                    f"trainer.replay: {path}, line {number}: taken has {num_taken} groups; this "
                    f"run trains on {self._num_taken[-1]}"
                )
            by_step[groups.step].append(groups)
        return dict(by_step)

    @property
    def is_replayed(self) -> bool:
        """The run takes the decisions of another one."""
        return self._replayed is not None

    def replayed(self, step: int, rollout: int) -> StepGroups:
        """Return the groups of a rollout of the step, from 0, in the run that is replayed. Raise
        UserError if its journal ends before. A step may be repeated, after a roll-back."""
        assert self._replayed is not None
        if len(self._replayed.get(step, ())) <= rollout:
            raise UserError(
                f"trainer.replay: the journal has no step {step}: it has {min(self._replayed)} to "
                f"{max(self._replayed)}; leave trainer.replay out to continue from a checkpoint "
                "without it"
            )
        return self._replayed[step][rollout]

    def record(self, step: int, groups: Sequence[Group], taken: Sequence[Group]) -> None:
        """Write the row of a step, before its updates. Rank 0 calls it by itself."""
        lens = [[len(response.token_ids) for response in group.responses] for group in groups]
        row = StepGroups(
            step, [group.position for group in groups], lens, [group.position for group in taken]
        )
        append_line(self._path, checked_line({**asdict(row), **self._settings}))


def check_replayed(row: StepGroups, groups: Sequence[Group]) -> None:
    """Raise UserError unless the responses have the lengths of the journal."""
    for group, lens in zip(groups, row.lens, strict=True):
        for i, (response, wanted) in enumerate(zip(group.responses, lens, strict=True)):
            if len(response.token_ids) != wanted:
                raise UserError(
                    f"trainer.replay: step {row.step}, {group.prompt.where}: response {i} "
                    f"has {len(response.token_ids)} tokens and {wanted} in the journal; the runs "
                    "have drawn other tokens: are model, data, settings and versions those of that "
                    "run?"
                )


def _words(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())
