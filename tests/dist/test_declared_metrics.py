"""A metric that is not declared ends the run of a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from workers import Workers

from rlhf_mc.config.schema import Config, DataConfig, ModelConfig, TrainerConfig
from rlhf_mc.observability.sinks import build_sinks
from rlhf_mc.topology.consensus import on_every_rank

pytestmark = pytest.mark.dist


def log_of_one_step(directory: str, key: str) -> None:
    """Log a metric as a run does."""
    trainer = TrainerConfig(default_local_dir=directory, logger=["jsonl"])
    config = Config(data=DataConfig(train_files=[]), model=ModelConfig(path=""), trainer=trainer)
    sinks = on_every_rank(lambda: build_sinks(0, config, 1, None, "a-run"))
    on_every_rank(lambda: sinks.log(1, {key: 1.0}))
    on_every_rank(sinks.close)


def test_an_undeclared_metric_is_refused(pool: Callable[[int], Workers], tmp_path: Path) -> None:
    arguments = {"directory": str(tmp_path)}
    pool(1).run(log_of_one_step, **arguments, key="actor/ppo_kl")
    assert '"actor/ppo_kl": 1.0' in (tmp_path / "metrics.jsonl").read_text()
    ((ok, error),) = pool(1).outcomes(log_of_one_step, **arguments, key="actor/unheard_of")
    assert not ok and error[1] == "not declared in metrics.yaml: actor/unheard_of"
