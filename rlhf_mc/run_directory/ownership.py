"""trainer.default_local_dir belongs to one run, whose id is in run.json there, in the metrics, the
checkpoints and the exports. Another run that begins there first moves all files of the earlier run
to earlier_runs/<its id>/. The last file of a run is its success marker.

One rank alone calls these functions, with the directory locked.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlhf_mc import durable, json_files, run_files
from rlhf_mc.checkpoint import directory
from rlhf_mc.config.errors import UserError
from rlhf_mc.health.monitor import keep_events_up_to
from rlhf_mc.observability.sinks import TENSORBOARD_DIR
from rlhf_mc.observability.trackers import MLFLOW_DIR, SWANLAB_DIR, WANDB_DIR
from rlhf_mc.run_directory.lock import Owner
from rlhf_mc.runtime.console import print_line

EARLIER = "earlier_runs"
HF = "hf"
EXPORT = "export"
VALIDATION = "validation"
_OUTPUTS = (
    run_files.SUCCESS_FILE,
    run_files.METRICS_FILE,
    run_files.HISTOGRAMS_FILE,
    run_files.HEALTH_FILE,
    run_files.JOURNAL_FILE,
    run_files.OBSERVATIONS,
    TENSORBOARD_DIR,
    WANDB_DIR,
    MLFLOW_DIR,
    SWANLAB_DIR,
    run_files.GENERATIONS,
    run_files.TRAIN_GENERATIONS,
    VALIDATION,
    "training.png",  # of earlier versions
    run_files.REPORT,
    run_files.CONFIG_FILE,
    run_files.STARTS_FILE,
    run_files.ADJUSTMENTS_FILE,
    run_files.PROFILE,
    HF,
    EXPORT,
    run_files.NONFINITE_FILE.format("*"),
    "global_step_*",
)
"""Files of a run, beside run.json. Other files in the directory (a quickstart's models and data,
logs) stay there."""
_MOVING = "is_moving_away"
"""Set in run.json until all files of the run have been moved."""
_JOB = "slurm_job"
_RESTARTS = "slurm_restarts"
"""Slurm's job id and restart count of the process that began the run."""
_OURS = (f"{run_files.RUN_FILE}*", f"global_step_*/{directory.MANIFEST}")
"""Files by which a directory is known to be of a run of rlhf_mc."""
_MOST_NAMED = 5
_ID = re.compile(r"\w[\w.-]*")


def new_id() -> str:
    """Return a unique id: the time, and six random hexadecimal digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"


def owner(root: Path) -> str | None:
    """Return the id of the run that the directory belongs to; None if there is no run, or one
    without an id."""
    run_id = _read(root).get("run_id")
    return run_id if isinstance(run_id, str) and _ID.fullmatch(run_id) else None


def claim(root: Path, run_id: str, begins_after: int, resumed_from: Path | None) -> None:
    """Record in run.json that the directory belongs to the run. resumed_from: the checkpoint of
    another directory, of step `begins_after`, that the run begins with."""
    record: dict[str, Any] = {"run_id": run_id, "begins_after_step": begins_after}
    if resumed_from is not None:
        record["resumed_from"] = str(resumed_from)
    if (process := Owner.this_process()).job:
        record |= {_JOB: process.job, _RESTARTS: process.restarts}
    _write(root, record)


def is_of_requeued_job(root: Path) -> bool:
    """Return whether this Slurm job began the run in the directory, before a requeue."""
    process = Owner.this_process()
    record = _read(root)
    is_same = bool(process.job) and record.get(_JOB) == process.job
    return is_same and record.get(_RESTARTS) in range(process.restarts)


def clear_success(root: Path) -> None:
    """Remove the success marker of a run that resumes, before anything else is written. (The marker
    of an earlier run is moved with that run's files.)"""
    (root / run_files.SUCCESS_FILE).unlink(missing_ok=True)


def write_success(root: Path, run_id: str, step: int) -> None:
    """Write the success marker atomically and durably. step: the last step of the run. Only rank 0
    calls it, after every other file of the run is written. A run without the marker has not
    finished, whatever the exit codes of its processes."""
    content = json.dumps({"run_id": run_id, "step": step}) + "\n"
    durable.replace(root / run_files.SUCCESS_FILE, content.encode())


def has_run(root: Path) -> bool:
    """Return whether the directory has files of a run, beside those of validations without
    training."""
    return (root / run_files.RUN_FILE).exists() or any(
        path.name != VALIDATION for path in _outputs(root)
    )


def move_away(root: Path, inputs: Iterable[tuple[str, Path]]) -> Path | None:
    """Move all files of the earlier run to a directory of their own. Return that directory, or None
    if there are no files. `finish_moving` completes an interrupted move. Raise UserError if the new
    run reads one of the files, or if they are of another program: a run of ours writes run.json
    before all others.

    inputs: (setting, file) of everything that the new run reads."""
    if not has_run(root):
        return None
    outputs = list(_outputs(root))
    if not any(path for pattern in _OURS for path in root.glob(pattern)):
        listed = ", ".join(path.name for path in outputs[:_MOST_NAMED])
        raise UserError(
            f"{root}: {listed} {'are' if len(outputs) > 1 else 'is'} of no run of rlhf_mc "
            f"({run_files.RUN_FILE} is missing), and would be mixed with this run's files; give "
            "another trainer.default_local_dir"
        )
    run_id = owner(root) or _id_without_file(root, outputs)
    for setting, path in inputs:
        inside = next(
            (output for output in outputs if path.resolve().is_relative_to(output.resolve())), None
        )
        if inside is not None:
            raise UserError(
                f"{setting}: {path} is of {inside}, a file of the earlier run {run_id} in this "
                "directory, which would be moved away when another run begins here; give another "
                "trainer.default_local_dir"
            )
    _write(root, {**_read(root), "run_id": run_id, _MOVING: True})
    return _move(root)


def finish_moving(root: Path) -> Path | None:
    """Complete an interrupted `move_away`. Return the directory of the moved files; None if none
    was interrupted."""
    return _move(root) if _read(root).get(_MOVING) else None


def _move(root: Path) -> Path:
    record = _read(root)
    target = root / EARLIER / (owner(root) or new_id())
    target.mkdir(parents=True, exist_ok=True)
    for path in _outputs(root):
        os.rename(path, directory.free_name(target / path.name))
    record.pop(_MOVING)
    _write(target, record)
    (root / run_files.RUN_FILE).unlink()
    durable.sync(root)
    return target


def drop_later(root: Path, step: int) -> list[str]:
    """Remove the generations, histograms, groups and health events of later steps, which the run
    repeats, and quarantine its exports of later steps. Return one line for each quarantined
    export."""
    for name, keep in (
        (run_files.HISTOGRAMS_FILE, run_files.keep_up_to),
        (run_files.JOURNAL_FILE, run_files.keep_up_to),
        (run_files.HEALTH_FILE, keep_events_up_to),
    ):
        if (root / name).exists():
            keep(root / name, step)
    for name in (run_files.GENERATIONS, run_files.TRAIN_GENERATIONS):
        for path in (root / name).glob("*.jsonl"):
            if path.stem.isdecimal() and int(path.stem) > step:
                path.unlink()
    lines = []
    for path in (root / HF, *(root / EXPORT).glob("global_step_*")):
        exported = _read(path).get("step")
        if isinstance(exported, int) and exported > step and "." not in path.name:
            quarantined = directory.quarantine(path)
            lines.append(
                f"{path} is of step {exported}, later than {step}; quarantined as "
                f"{quarantined.name}"
            )
    return lines


def drop_observations(root: Path, first: int, last: float) -> None:
    """Remove the observations of these steps."""
    for step, path in run_files.observation_files(root):
        if first <= step <= last:
            path.unlink()


def _outputs(root: Path) -> Iterator[Path]:
    for pattern in _OUTPUTS:
        yield from sorted(root.glob(pattern))
    for name in (HF, EXPORT):
        yield from sorted(root.glob(f"{name}{directory.QUARANTINED}*"))


def _id_without_file(root: Path, outputs: Iterable[Path]) -> str:
    """Return the id of a run without run.json: the id in its checkpoints, or the time of its last
    output as one."""
    for step in directory.steps_with_checkpoint(root):
        with contextlib.suppress(UserError):  # corrupt, or of another version
            return directory.read_manifest(directory.final_path(root, step)).run_id
    last = max((path.stat().st_mtime for path in outputs), default=0.0)
    return f"unnamed-{time.strftime('%Y%m%d-%H%M%S', time.localtime(last))}"


def _read(root: Path) -> dict[str, Any]:
    """Return the content of run.json; an empty dict if it is missing. One that is no JSON object is
    quarantined."""
    path = root / run_files.RUN_FILE
    try:
        content = json_files.read(path)
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        print_line(
            f"warning: {path} is corrupt ({error}); it is quarantined as "
            f"{directory.quarantine(path).name}"
        )
        return {}
    return content


def _write(root: Path, record: dict[str, Any]) -> None:
    durable.replace(
        root / run_files.RUN_FILE, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()
    )
