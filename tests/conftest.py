"""Fixtures that tests of several folders share."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import forked
import pytest
from config_files import MINIMAL
from lanes import pytest_addoption, pytest_runtestloop  # noqa: F401
from workers import Workers

ROOT = Path(__file__).parents[1]

# A shell starts a background job with SIGINT ignored, and the programs that tests interrupt would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    """Start the server of forked.py with the first file whose tests use it: it imports while pytest
    collects, and all lanes use it."""
    option = parent.config.option
    if option.lanes > 1 and not option.collectonly and file_path.parent.name in ("dist", "system"):
        capture = parent.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # of the warnings of the libraries
        forked.context()
        capture.suspend_global_capture()


@pytest.fixture(scope="session")
def quickstart_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make what `make quickstart` makes before PPO starts: model, Megatron checkpoint, prompts.
    Tests only read it. It takes 45 s of processor time, so the first lane that needs it makes it
    for all."""
    out = tmp_path_factory.getbasetemp() / "quickstart_made"
    complete = out.with_suffix(".complete")
    with open(out.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            ["make_quickstart.py", "--output", str(out)],
            [
                "convert_hf_to_mcore.py",
                "--hf-path",
                f"{out}/model_hf",
                "--output",
                f"{out}/model_mcore",
            ],
        ):
            if not complete.exists():
                done = forked.run([str(ROOT / "tools" / command[0]), *command[1:]])
                assert done.returncode == 0, (
                    f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
                )
        complete.touch()
    return out


@pytest.fixture(scope="session")
def quickstart_overrides(quickstart_made: Path) -> list[str]:
    """Return the overrides with which configs/quickstart.yaml reads quickstart_made."""
    return [
        f"model.path={quickstart_made}/model_hf",
        f"model.dist_checkpointing_path={quickstart_made}/model_mcore",
        f"data.train_files={quickstart_made}/train.parquet",
        f"data.val_files={quickstart_made}/val.parquet",
    ]


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Workers]]:
    """Return pool(world): the workers of that world size, started at its first use and kept for the
    session, or until a rank of them has ended."""
    started: dict[int, Workers] = {}

    def get(world: int) -> Workers:
        if world in started and not started[world].is_usable:
            started.pop(world).close()
        if world not in started:
            started[world] = Workers(world)
        return started[world]

    yield get
    for workers in started.values():
        workers.close()


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path
