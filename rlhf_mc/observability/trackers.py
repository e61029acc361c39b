"""The experiment trackers of trainer.logger: Weights & Biases, MLflow and SwanLab. Each library is imported when its
tracker is built and not before. What a tracker writes to disk is in trainer.default_local_dir.

A resumed run continues the tracker's own run. Trackers cannot take steps back: steps that were logged before the resume
and are repeated after it keep their first values there (metrics.jsonl has the last ones).
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhf_mc import durable
from rlhf_mc.config.errors import UserError

TRACKERS_FILE = "trackers.json"
"""In the run's directory: {"run_id": id, tracker: {"id": the tracker's own id of the run, "last_step": n}}."""
WANDB_DIR = "wandb"
MLFLOW_DIR = "mlruns"
SWANLAB_DIR = "swanlog"
_LOGIN_SECONDS = 60
"""Longest wait for the user's answer where W&B asks for a key on a terminal."""
_MLFLOW_BATCH = 100
"""Parameters in one request; MLflow allows no more. Metrics are fewer than the 1000 of a request."""
_MLFLOW_TEXT = 6000
"""Characters of a parameter; MLflow allows no more."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows."""

    directory: Path
    run_id: str
    project: str
    """trainer.project_name."""
    name: str
    """trainer.experiment_name, or that of the directory."""
    settings: Mapping[str, Any]
    """The resolved config, nested."""


class Tracker(Protocol):
    """A connection to a tracker's server, or to its files."""

    id: str
    """The tracker's own id of the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log finite numbers."""

    def close(self) -> None:
        """Flush and end the tracker's run."""


class TrackerSink:
    """A sink that logs each step once to a tracker. Values that are not finite are left out: what trackers make of them
    differs, down to an error."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        """name: a key of TRACKERS."""
        self._name = name
        self._run = run
        earlier = self._progress().get(name, {})
        self._last_step: int = earlier.get("last_step", -1)
        self._tracker = TRACKERS[name](run, earlier.get("id"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step <= self._last_step:
            return
        numbers = {key: float(value) for key, value in metrics.items()}
        self._tracker.log(step, {key: value for key, value in numbers.items() if math.isfinite(value)})
        self._last_step = step
        progress = {
            **self._progress(),
            "run_id": self._run.run_id,
            self._name: {"id": self._tracker.id, "last_step": step},
        }
        durable.replace(self._run.directory / TRACKERS_FILE, json.dumps(progress).encode())

    def close(self) -> None:
        self._tracker.close()

    def _progress(self) -> dict[str, Any]:
        """Return the content of TRACKERS_FILE; empty if it is missing, unreadable or of another run."""
        try:
            content = json.loads((self._run.directory / TRACKERS_FILE).read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return content if isinstance(content, dict) and content.get("run_id") == self._run.run_id else {}


class WandbTracker:
    """Weights & Biases, with the run's id as its id. WANDB_* variables count, such as WANDB_MODE=offline."""

    def __init__(self, run: TrackedRun, earlier_id: str | None) -> None:
        import wandb

        self.id = earlier_id or run.run_id
        self._teardown: Callable[[], None] = wandb.teardown
        settings: dict[str, Any] = {"login_timeout": _LOGIN_SECONDS}
        if "WANDB_CONSOLE" not in os.environ:
            settings["console"] = "off"  # the rank's output stays as it is
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=self.id,
            resume="allow",
            config=dict(run.settings),
            dir=os.environ.get("WANDB_DIR", str(run.directory)),
            settings=wandb.Settings(**settings),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # waits until W&B's own process has written everything


class MlflowTracker:
    """MLflow at MLFLOW_TRACKING_URI, otherwise files in the run's directory."""

    def __init__(self, run: TrackedRun, earlier_id: str | None) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = f"file://{(run.directory / MLFLOW_DIR).resolve()}"
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        # A server that does not answer holds the step up, by default for many minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric: Callable[..., Any] = Metric
        self._client = MlflowClient(tracking_uri=uri)
        if earlier_id is None:
            experiment = self._client.get_experiment_by_name(run.project)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
            tags = {"rlhf_mc.run_id": run.run_id}
            self.id: str = self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
            params = [Param(key, str(value)[:_MLFLOW_TEXT]) for key, value in flattened(run.settings)]
            for first in range(0, len(params), _MLFLOW_BATCH):
                self._client.log_batch(self.id, params=params[first : first + _MLFLOW_BATCH])
        else:
            self.id = earlier_id
            self._client.update_run(self.id, status="RUNNING")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [self._metric(mlflow_name(key), value, now, step) for key, value in metrics.items()]
        self._client.log_batch(self.id, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self.id)


class SwanlabTracker:
    """SwanLab, with the run's id as its id. SWANLAB_* variables count, such as SWANLAB_MODE=offline."""

    def __init__(self, run: TrackedRun, earlier_id: str | None) -> None:
        os.environ.setdefault("SWANLAB_INTERACTIVE", "false")  # a question on a terminal would have no end
        os.environ.setdefault("SWANLAB_TERMINAL_PROXY_TYPE", "none")  # the rank's output stays as it is
        import swanlab

        self.id = earlier_id or run.run_id
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=self.id,
            resume="allow",
            config=dict(run.settings),
            log_dir=os.environ.get("SWANLAB_LOG_DIR", str(run.directory / SWANLAB_DIR)),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[TrackedRun, str | None], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanlabTracker,
}
"""By the names of trainer.logger, which are those of the libraries. The second argument is the tracker's id of the run
where an earlier start has logged to it."""


def check_loggers(names: Sequence[str]) -> None:
    """Raise UserError if a tracker in trainer.logger has no package here."""
    for name in names:
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            package = "mlflow-skinny" if name == "mlflow" else name
            raise UserError(f"trainer.logger: {name} is not installed: pip install {package}, or leave {name} out")


def mlflow_name(key: str) -> str:
    """Return the name of a metric in MLflow: "@" is written as _at_, as verl does, and another character that MLflow
    does not allow as _."""
    return re.sub(r"[^\w\-./ :]", "_", key.replace("@", "_at_"), flags=re.ASCII)


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting with its dotted key."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
