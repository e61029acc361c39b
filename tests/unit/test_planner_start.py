"""The planner's verdict on a run that starts: one line, an error where trainer.planner is "refuse"."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from published import QWEN_25_05B
from test_shipped_configs import REPO

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config
from rlhf_mc.config.schema import Config
from rlhf_mc.planner.start import Capacity, check_start

GB = 10**9
SHORT = tuple(
    f"{key}={tokens}"
    for tokens, keys in (
        (2048, ("actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu")),
        (4096, ("critic.forward_max_token_len_per_gpu", "rollout.log_prob_max_token_len_per_gpu")),
        (4096, ("ref.log_prob_max_token_len_per_gpu",)),
    )
    for key in keys
)
"""Budgets for a small device."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_25_05B, "architectures": ["Qwen2ForCausalLM"]}))
    return f"model.path={tmp_path}"


def config(model: str, *overrides: str) -> Config:
    return load_config(str(REPO / "configs/ppo_qwen2.5_0.5b.yaml"), [model, *SHORT, *overrides])


@pytest.mark.parametrize(
    ("capacity", "where"),
    [(Capacity(1, 80 * GB), "of each GPU"), (Capacity(1, 80 * GB, cuda=False), "that each rank has on its node")],
)
def test_one_line_where_it_fits(model: str, capacity: Capacity, where: str) -> None:
    line = check_start(config(model), capacity)
    assert re.fullmatch(rf"memory as planned: (gen|update_\w+) takes most, [\d.]+ of the 80\.0 GB {where}", line)


def test_refused_or_warned(model: str) -> None:
    """Check that both lines name the memory and settings with which the run fits."""
    capacity = Capacity(1, 22 * GB)
    with pytest.raises(UserError) as error:
        check_start(config(model), capacity)
    refused = str(error.value)
    assert refused.startswith("does not fit: phase ") and refused.endswith(
        "; with trainer.planner=warn it starts all the same"
    )
    warned = check_start(config(model, "trainer.planner=warn"), capacity)
    assert warned.startswith("WARNING: as planned it does not fit: ")
    for line in (refused, warned):
        found = re.search(r"it fits with ([^;]+)", line)
        assert found is not None
        settings = found.group(1).split()
        assert check_start(config(model, *settings), capacity).startswith("memory as planned")


def test_cpu_has_its_own_settings(model: str) -> None:
    """Check that on a CPU nothing is gained by an offload, and the KV cache is named."""
    cfg = config(model, "rollout.cpu_kvcache_space_gb=40")
    with pytest.raises(UserError, match=r"largest part is vLLM, .* it fits with rollout\.cpu_kvcache_space_gb=\d+;"):
        check_start(cfg, Capacity(1, 45 * GB, cuda=False))
    with pytest.raises(UserError, match="use fewer ranks on a node, or one with more memory"):
        check_start(config(model), Capacity(1, 2 * GB, cuda=False))
