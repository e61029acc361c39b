"""The planner's command: verdicts and their advice, for the shipped configs at full size. No weights are needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from published import LLAMA_3_70B, QWEN_25_05B
from test_shipped_configs import REPO

from rlhf_mc.planner.__main__ import main

GB = 10**9


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    """Return by name the override that sets a directory with config.json alone as the model."""
    found = {}
    for name, config, architecture in (("70b", LLAMA_3_70B, "Llama"), ("0.5b", QWEN_25_05B, "Qwen2")):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**config, "architectures": [f"{architecture}ForCausalLM"]}))
        found[name] = f"model.path={directory}"
    return found


def plan_70b(models: dict[str, str], *arguments: str) -> list[str]:
    return [str(REPO / "configs/ppo_70b.yaml"), models["70b"], "--nodes", "8", *arguments]


def test_70b_fits_as_its_config_says(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Compare with the figures in the config's comments."""
    assert main(plan_70b(models, "--json")) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert plan["fits"] and [len(ranks["ranks"]) for ranks in plan["ranks"]] == [16] * 4
    first = plan["ranks"][0]
    update = first["phases"]["update_actor"]
    state = sum(update[f"actor {part}"] for part in ("params", "grads", "optimizer"))
    assert state / GB == pytest.approx(27.2, abs=0.1)
    assert update["activations"] / GB == pytest.approx(28.5, abs=0.6)
    assert set(update) == {"actor params", "actor grads", "actor optimizer", "activations", "reserved"}
    assert first["vllm"]["weights"] / GB == pytest.approx(17.6, abs=0.1)
    assert first["vllm"]["kv_bytes_per_token"] == 2 * 80 * 128 * 2  # one of 8 KV heads
    assert set(first["phases"]["gen"]) == {"vLLM", "reserved"}


@pytest.mark.parametrize(
    ("overrides", "problem", "advice"),
    [
        (
            ["actor.ppo_max_token_len_per_gpu=32768"],
            "phase update_actor on ranks 0 to 15 takes",
            "actor.megatron.recompute_granularity=selective",
        ),
        (
            ["rollout.gpu_memory_utilization=0.2"],
            "leave 0.00 for keys and values",
            "rollout.gpu_memory_utilization=0.3",
        ),
        (["rollout.gpu_memory_utilization=1.0"], "phase gen on ranks 0 to 15", "rollout.gpu_memory_utilization=0.9"),
        (["rollout.free_cache_engine=false"], "largest part is vLLM", "rollout.free_cache_engine=true"),
    ],
)
def test_advice_makes_it_fit(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], overrides: list[str], problem: str, advice: str
) -> None:
    """Check the one line on standard error, and that the settings it names do make the run fit."""
    assert main(plan_70b(models, *overrides)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhf_mc: error: does not fit: ") and problem in line
    _, _, settings = line.partition("it fits with ")
    assert advice in settings
    assert main(plan_70b(models, *overrides, *settings.split())) == 0


def test_host_memory_and_checkpoints(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Compare with the figures in the config's comments."""
    assert main(plan_70b(models, "--json", "--host-memory", "1e12", "--storage-bandwidth", "10e9")) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    parts = plan["host_memory"]["parts"]
    offloads = sum(size for name, size in parts.items() if name.endswith((" params", " optimizer")))
    assert offloads / GB == pytest.approx(8 * 40, rel=0.03)
    assert parts["asynchronous save"] / GB == pytest.approx(8 * 31.8, rel=0.01)
    assert parts["export"] == 40 * GB  # 8 files of 5 GB
    storage = plan["storage"]
    assert storage["checkpoint"] / GB == pytest.approx(2 * 70.6 * 14, rel=0.01) and storage["checkpoints"] == 3
    assert storage["space"] == 3 * storage["checkpoint"] + storage["export"]
    assert storage["save"] == storage["checkpoint"] / 8 / 10e9 < storage["load"]


def test_host_memory_is_judged(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan_70b(models, "--host-memory", "600e9")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "GB of host memory of 600; the largest part is asynchronous save" in line
    assert line.endswith("it fits with trainer.async_save=false")
    assert main(plan_70b(models, "--host-memory", "600e9", "trainer.async_save=false")) == 0


def test_no_settings_are_enough(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan_70b(models, "--gpu", "16e9")) == 2
    assert capsys.readouterr().err.strip().endswith("use more GPUs, or larger tensor- or pipeline-parallel sizes")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "v100"], ("--gpu is 'v100'", "h100")),
        (["--gpu", "80"], ("--gpu is '80'", "80e9")),
        (["--nodes", "3"], ("does not divide the 24 processes",)),
        (["actor.megatron.pipeline_model_parallel_size=3"], ("pipeline_model_parallel_size",)),
        (["model.path=nowhere"], ("model.path: nowhere/config.json cannot be read",)),
    ],
)
def test_bad_input_is_one_line(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], arguments: list[str], words: tuple[str, ...]
) -> None:
    assert main(plan_70b(models, *arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhf_mc: error: ")
    for word in words:
        assert word in line


def test_table_of_one_gpu(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    config = str(REPO / "configs/ppo_qwen2.5_0.5b.yaml")
    assert main([config, models["0.5b"], "--gpus-per-node", "1", "--gpu", "a100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 0, GB of 85.9 on each device:"
    assert any(line.startswith("  update_actor") for line in lines)
    assert lines[-1].startswith("fits: the fullest phase is ")


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("trainer.save_freq=-1", "no training checkpoints (trainer.save_freq); an export has 1.0 GB"),
        ("trainer.max_ckpt_to_keep=null", "every save adds one"),
        ("trainer.max_ckpt_to_keep=1", "2 of them and an export take 28."),
    ],
)
def test_checkpoints_of_one_gpu(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], setting: str, text: str
) -> None:
    arguments = [str(REPO / "configs/ppo_qwen2.5_0.5b.yaml"), models["0.5b"], "--gpus-per-node", "1"]
    keeps = ["trainer.max_ckpt_to_keep=null"] if "save_freq" in setting else []
    assert main([*arguments, *keeps, setting]) == 0
    out = capsys.readouterr().out
    assert text in out
    assert "traffic: none, there is one rank" in out


def test_torch_is_not_imported() -> None:
    code = "import sys, rlhf_mc.planner.__main__; assert not {'torch', 'numpy', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)
