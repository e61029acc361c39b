"""PPO from Python: a config, prompts and a reward function in; the steps of the run out. examples/
has complete programs, docs/python_api.md explains them.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from rlhf_mc import durable, json_files
from rlhf_mc.config.errors import UserError, disk_errors
from rlhf_mc.config.load import load_config
from rlhf_mc.config.schema import Config
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.session import session
from rlhf_mc.setup.early_checks import check_early, world_size
from rlhf_mc.verl.table import key_hint

if TYPE_CHECKING:  # torch is imported once the environment is set
    from rlhf_mc.trainer.loop import Step
    from rlhf_mc.trainer.run import Run

INPUTS = "python"
"""Directory in trainer.default_local_dir for what was given as Python objects."""
Prompts = Iterable[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]]
"""Each prompt is a text, a list of chat messages, or a row with the columns of a prompt file. A
Dataset of the library `datasets` is such rows."""
Reward = Callable[..., Any]
"""compute_score(data_source, solution_str, ground_truth, extra_info=None), as
custom_reward_function: plain, async, batched, or a class."""


class Trainer:
    """One run. Iterating over it trains, one step at a time:

        for step in Trainer("configs/quickstart.yaml", reward=my_reward):
            print(step.number, step.metrics["critic/score/mean"])

    Every process of torchrun or srun runs the same program; without a launcher the run has one
    process. All ranks must leave the loop after the same step. A process has one run at a time, and
    under a launcher only one."""

    _has_joined = False

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        overrides: Sequence[str] = (),
        *,
        prompts: Prompts | None = None,
        val_prompts: Prompts | None = None,
        reward: Reward | None = None,
    ) -> None:
        """Read the config and write prompts and reward function to trainer.default_local_dir. Raise
        UserError for a mistake in any of them.

        config: a YAML file, or a mapping of its sections. overrides: "section.key=value". prompts,
        val_prompts: in place of data.train_files and data.val_files. reward: in place of
        custom_reward_function.path; it runs in processes of its own, so that its copy there (by
        cloudpickle) is what counts."""
        given = [*(["data.train_files=[]"] if prompts is not None else []), *overrides]
        self.config: Config = load_config(config, given, key_hint)
        self.run: Run | None = None
        """Models, engine and prompts while the steps run, else None."""
        directory = Path(self.config.trainer.default_local_dir) / INPUTS
        with disk_errors(f"trainer.default_local_dir: {directory}"):
            if prompts is not None:
                self.config.data.train_files = [_write_prompts(directory, "prompts", prompts)]
            if val_prompts is not None:
                self.config.data.val_files = [_write_prompts(directory, "val_prompts", val_prompts)]
            if reward is not None:
                self.config.custom_reward_function.path = _write_reward(directory, reward)
                self.config.custom_reward_function.name = "compute_score"

    def __iter__(self) -> Iterator[Step]:
        """Join the other ranks, build the run or resume it, and yield each step once it is logged.
        After the last step the trained actor is exported. Leaving the loop earlier ends the run
        without an export; the same program resumes it from its last checkpoint
        (trainer.save_freq)."""
        # the launcher's store still has the keys of the first rendezvous
        if Trainer._has_joined and world_size() > 1:
            raise UserError(
                "a second run in the same processes: start one program for each run under torchrun "
                "or srun"
            )
        check_early(self.config, world_size())
        Trainer._has_joined = True
        status = RankStatus()
        stop = StopRequests(self.config.trainer)
        with session(self.config, status, stop) as run:
            from rlhf_mc.trainer.loop import steps

            self.run = run
            try:
                yield from steps(run, status, stop)
            except GeneratorExit:  # the caller has left the loop: close, as after the last step
                return
            finally:
                self.run = None

    def fit(self, callbacks: Sequence[Callable[[Step], object]] = ()) -> None:
        """Train to the end. Each callback is called with each step, on every rank."""
        for step in self:
            for callback in callbacks:
                callback(step)


def _write_prompts(directory: Path, name: str, prompts: Prompts) -> str:
    """Write prompts as JSON lines. Return the path, which contains a hash of the content: every
    rank may write it. Raise UserError if a prompt cannot be written."""
    lines = []
    for i, prompt in enumerate(prompts):
        row = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        try:
            lines.append(json_files.readable_text(row))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{name}: prompt {i} is not text, messages or a row of plain values: {error}"
            ) from None
    if not lines:
        raise UserError(f"{name} is empty")
    return _write(directory, name, ".jsonl", ("\n".join(lines) + "\n").encode())


def _write_reward(directory: Path, reward: Reward) -> str:
    """Write a Python file that defines compute_score as the given object. Return its path. Raise
    UserError if it cannot be pickled."""
    if not callable(reward):
        raise UserError(f"reward is {reward!r}; it must be a function or a class")
    try:
        pickled = cloudpickle.dumps(reward)
    except Exception as error:  # pickling runs the code of the user's classes
        raise UserError(
            f"reward {getattr(reward, '__name__', reward)!r} cannot be pickled: {error}"
        ) from error
    code = (
        f'"""{getattr(reward, "__qualname__", type(reward).__name__)}, from Python '
        '(rlhf_mc/api.py)."""\n'
        f"import cloudpickle\n\ncompute_score = cloudpickle.loads({pickled!r})\n"
    )
    return _write(directory, "reward", ".py", code.encode())


def _write(directory: Path, name: str, suffix: str, content: bytes) -> str:
    path = directory / f"{name}_{hashlib.sha256(content).hexdigest()[:12]}{suffix}"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        # other ranks write the same file
        staging = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        durable.write(staging, content)
        staging.replace(path)
    return str(path.resolve())
