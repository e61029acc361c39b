"""Settings for GPUs: ignored on a CPU with one line, kept on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import load

from rlhf_mc import platform
from rlhf_mc.setup.gpu_settings import for_this_device

SETTINGS = (
    "rollout.free_cache_engine=true",
    "rollout.offload_cuda_graphs=false",
    "rollout.gpu_memory_utilization=0.6",
    "rollout.enforce_eager=true",
    "actor.megatron.fp8=blockwise",
    "ref.megatron.fp8=null",
)


def test_one_line_names_all_on_a_cpu(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "use_cuda", lambda: False)
    cfg = load(config_file, *SETTINGS)
    assert for_this_device(cfg) == load(config_file)
    (line,) = capsys.readouterr().err.splitlines()
    names = ("free_cache_engine", "offload_cuda_graphs", "gpu_memory_utilization", "enforce_eager")
    named = ", ".join(
        [*(f"rollout.{name}" for name in names), "actor.megatron.fp8", "critic.megatron.fp8"]
    )
    assert line.startswith("rlhf_mc: on a CPU these settings") and f": {named}" in line
    assert "ref.megatron" not in line
    for_this_device(load(config_file))
    assert capsys.readouterr().err == ""


def test_a_gpu_keeps_them(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    cfg = load(config_file, *SETTINGS)
    assert for_this_device(cfg) is cfg
