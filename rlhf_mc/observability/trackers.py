"""The experiment trackers of trainer.logger: Weights & Biases, MLflow and SwanLab. Each library is
imported when its tracker is built and not before. What a tracker writes to disk is in
trainer.default_local_dir.

A resumed run continues the tracker's own run. Steps that a tracker has, and that are repeated after
a resume, keep their first values there (metrics.jsonl has the last ones). All ranks wait for rank
0, so that the start and the end of a tracker have a time limit: a library may wait for a server for
minutes.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rlhf_mc.config.errors import UserError
from rlhf_mc.run_files import flattened

WANDB_DIR = "wandb"
MLFLOW_DIR = "mlruns"
SWANLAB_DIR = "swanlog"
START_SECONDS = 30.0
"""Longest start of a tracker, without the import of its library. W&B's own limits, which say more,
are shorter."""
CLOSE_SECONDS = 60.0
"""Longest end of a tracker. W&B's own limit, which also holds at the exit of the process, is
shorter."""
_ENVIRONMENT = {
    # A server that does not answer holds the step up, by default for many minutes.
    "mlflow": {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"},
    # A question on a terminal would have no end; and the rank's output stays as it is.
    "swanlab": {"SWANLAB_INTERACTIVE": "false", "SWANLAB_TERMINAL_PROXY_TYPE": "none"},
}
"""By tracker: defaults of environment variables, which its library reads when it is imported."""
_MLFLOW_RUN_ID = "rlhf_mc.run_id"
_MLFLOW_LAST_STEP = "rlhf_mc.last_step"
"""Tags of a run in MLflow, by which a resumed run finds it."""
_MLFLOW_PARAMS = 100
_MLFLOW_METRICS = 1000
"""Parameters and metrics in one request; MLflow allows no more."""
_MLFLOW_TEXT = 6000
_MLFLOW_KEY = 250
"""Characters of a parameter's value and of a key; MLflow allows no more."""
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows."""

    directory: Path
    run_id: str
    project: str
    """trainer.project_name."""
    name: str
    """trainer.experiment_name, or the name of the directory."""
    settings: Mapping[str, Any]
    """The resolved config, nested."""


class Tracker(Protocol):
    """A connection to a tracker's server, or to its files."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log finite numbers, unless the tracker has the step."""

    def close(self) -> None:
        """Flush and end the tracker's run."""


class TrackerSink:
    """A sink that logs the steps to a tracker. Values that are not finite are left out: what
    trackers make of them differs, down to an error."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        """Start the tracker. Raise TimeoutError if it takes longer than START_SECONDS, or the
        library's own error. name: a key of TRACKERS."""
        for variable, value in _ENVIRONMENT.get(name, {}).items():
            os.environ.setdefault(variable, value)
        importlib.import_module(name)
        self._tracker = within(START_SECONDS, lambda: TRACKERS[name](run))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {key: float(value) for key, value in metrics.items()}
        self._tracker.log(
            step, {key: value for key, value in numbers.items() if math.isfinite(value)}
        )

    def close(self) -> None:
        """End the tracker's run. Raise TimeoutError if that takes longer than CLOSE_SECONDS."""
        within(CLOSE_SECONDS, self._tracker.close)


class WandbTracker:
    """Weights & Biases, with the run's id as its id. WANDB_* variables count, such as
    WANDB_MODE=offline."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._teardown: Callable[[], None] = wandb.teardown
        settings: dict[str, Any] = {
            # for the user's answer where W&B asks for a key on a terminal
            "login_timeout": START_SECONDS - 5,
            "init_timeout": START_SECONDS - 5,
            "finish_timeout": CLOSE_SECONDS - 10,
        }
        if "WANDB_CONSOLE" not in os.environ:
            settings["console"] = "off"  # the rank's output stays as it is
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            config=dict(run.settings),
            dir=os.environ.get("WANDB_DIR", str(run.directory)),
            settings=wandb.Settings(**settings),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # otherwise the row waits for the next step
        self._run.log(dict(metrics), step=step, commit=True)

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # waits until W&B's own process has written everything


class MlflowTracker:
    """MLflow at MLFLOW_TRACKING_URI, otherwise files in the run's directory."""

    def __init__(self, run: TrackedRun) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = f"file://{(run.directory / MLFLOW_DIR).resolve()}"
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._metric: Callable[..., Any] = Metric
        self._tag: Callable[..., Any] = RunTag
        self._last_step = -1
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        )
        started = self._client.search_runs(
            [experiment_id], f"tags.`{_MLFLOW_RUN_ID}` = '{run.run_id}'"
        )
        if started:
            self._id: str = started[0].info.run_id
            self._last_step = int(started[0].data.tags.get(_MLFLOW_LAST_STEP, -1))
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {_MLFLOW_RUN_ID: run.run_id}
        new = self._client.create_run(experiment_id, run_name=run.name, tags=tags)
        self._id = new.info.run_id
        params = [
            Param(mlflow_name(key), str(value)[:_MLFLOW_TEXT])
            for key, value in flattened(run.settings)
        ]
        for first in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MLFLOW_PARAMS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step <= self._last_step:
            return
        now = int(time.time() * 1000)
        rows = [self._metric(mlflow_name(key), value, now, step) for key, value in metrics.items()]
        tags = [self._tag(_MLFLOW_LAST_STEP, str(step))]
        for first in range(0, len(rows), _MLFLOW_METRICS):
            self._client.log_batch(
                self._id, metrics=rows[first : first + _MLFLOW_METRICS], tags=tags
            )

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanlabTracker:
    """SwanLab, with the run's id as its id. SWANLAB_* variables count, such as
    SWANLAB_MODE=offline."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            config=dict(run.settings),
            log_dir=os.environ.get("SWANLAB_LOG_DIR", str(run.directory / SWANLAB_DIR)),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanlabTracker,
}
"""By the names of trainer.logger, which are the libraries' names."""


def check_loggers(names: Sequence[str]) -> None:
    """Raise UserError if a tracker in trainer.logger has no package here."""
    for name in names:
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            package = "mlflow-skinny" if name == "mlflow" else name
            raise UserError(
                f"trainer.logger: {name} is not installed: pip install {package}, or leave {name} "
                "out"
            )


def within(seconds: float, call: Callable[[], _Result]) -> _Result:
    """Return what `call` returns, or raise what it raises. Raise TimeoutError after the given time;
    the call then continues in its thread, which does not keep the process from ending."""
    future: Future[_Result] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised by the future's result in the main thread
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name="tracker").start()
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        if future.done():
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from None


def mlflow_name(key: str) -> str:
    """Return the name of a metric or parameter in MLflow, at most 250 characters: "@" is written as
    _at_, as verl does, and another character that MLflow does not allow as _, as are an empty part
    of the path and dots that begin one. If anything but "@" was changed, 8 digits of the key's hash
    follow, so that different keys stay different."""
    wanted = key.replace("@", "_at_")
    allowed = re.sub(r"[^\w\-./ :]", "_", wanted, flags=re.ASCII)
    name = "/".join(re.sub(r"^\.+", "_", part) or "_" for part in allowed.split("/"))
    if name == wanted and len(name) <= _MLFLOW_KEY:
        return name
    digits = hashlib.sha256(key.encode()).hexdigest()[:8]
    return f"{name[: _MLFLOW_KEY - 9]}_{digits}"
