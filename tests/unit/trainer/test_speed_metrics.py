"""Metrics of a step: milliseconds per token, FLOPs utilization, lengths by data source, differences
of log-probs."""

from __future__ import annotations

import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlhf_mc import platform
from rlhf_mc.architectures.operations import forward_flops
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.observability.catalog import undeclared
from rlhf_mc.trainer import step_report
from rlhf_mc.trainer.step_report import difference_metrics, response_lengths_by_source

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


@pytest.fixture
def batch() -> RaggedBatch:
    """Return responses of 2, 3 and 5 tokens after prompts of 4 each."""
    lens = torch.tensor([2, 3, 5])
    return RaggedBatch(
        tokens=torch.zeros(22, dtype=torch.int64),
        prompt_lens=torch.tensor([4, 4, 4]),
        response_lens=lens,
        rollout_log_probs=torch.zeros(10),
        finished=torch.ones(3, dtype=torch.bool),
    )


def test_milliseconds_per_token(batch: RaggedBatch) -> None:
    found = step_report.per_token_metrics(
        batch, 25, {"timing_s/gen": 0.5, "timing_s/update_actor": 1.1, "timing_s/testing": 9.0}
    )
    assert found == pytest.approx(
        {"timing_per_token_ms/gen": 20.0, "timing_per_token_ms/update_actor": 50.0}
    )
    assert undeclared(found) == []
    assert step_report.per_token_metrics(batch, 0, {"timing_s/gen": 0.5}) == {}, (
        "a step of earlier steps' responses"
    )


def test_mfu_is_flops_per_rank_and_second_over_the_peak(
    batch: RaggedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = ModelShape.from_hf_config(QWEN2)
    critic = ModelShape.from_hf_config(QWEN2, value_head=True)
    groups = SimpleNamespace(mesh=SimpleNamespace(world=4))
    monkeypatch.setattr(step_report, "peak_flops", {"bfloat16": 1e9}.__getitem__)
    cfg = SimpleNamespace(
        actor=SimpleNamespace(ppo_epochs=2, megatron=SimpleNamespace(dtype="bfloat16")),
        critic=SimpleNamespace(ppo_epochs=None),
    )
    seconds = {
        "timing_s/update_actor": 0.5,
        "timing_s/update_critic": 0.25,
        "timing_s/old_log_prob": 0.125,
    }
    engines = (
        SimpleNamespace(shape=actor, groups=groups),
        SimpleNamespace(shape=critic, groups=groups),
    )
    found = step_report.utilization_metrics(*engines, cfg, batch, seconds)
    of_actor, of_critic = (
        2 * 3 * forward_flops(shape, [6, 7, 9], 10).total for shape in (actor, critic)
    )
    assert found == pytest.approx(
        {
            "perf/mfu/actor": of_actor / 0.5 / 4e9,
            "perf/mfu/actor_infer": of_actor / 6 / 0.125 / 4e9,  # a forward pass of one epoch
            "perf/mfu/critic": of_critic / 0.25 / 4e9,
        }
    )
    assert undeclared(found) == []
    del seconds["timing_s/update_actor"]  # trainer.critic_warmup
    assert step_report.utilization_metrics(engines[0], None, cfg, batch, seconds).keys() == {
        "perf/mfu/actor_infer"
    }


def test_the_peak_of_a_gpu_is_that_of_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    monkeypatch.setattr(step_report, "measured_flops", lambda dtype, size: 1.0)
    for name, expected in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA GeForce RTX 3070", 1.0)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        step_report.peak_flops.cache_clear()
        assert step_report.peak_flops("float32") == expected
    step_report.peak_flops.cache_clear()


def test_no_memory_to_measure_leaves_the_mfu_out(
    batch: RaggedBatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(dtype: torch.dtype, size: int) -> float:
        raise error

    monkeypatch.setattr(platform, "use_cuda", lambda: False)
    monkeypatch.setattr(step_report, "measured_flops", fail)
    cfg = SimpleNamespace(actor=SimpleNamespace(megatron=SimpleNamespace(dtype="float32")))
    actor = SimpleNamespace(groups=SimpleNamespace(mesh=SimpleNamespace(world=1)))
    step_report.peak_flops.cache_clear()
    error: Exception = torch.OutOfMemoryError("CUDA out of memory")
    for _ in range(2):
        assert (
            step_report.utilization_metrics(actor, None, cfg, batch, {"timing_s/old_log_prob": 1.0})
            == {}
        )
    assert capsys.readouterr().err.count("no memory to measure") == 1
    step_report.peak_flops.cache_clear()
    error = RuntimeError("another error")
    with pytest.raises(RuntimeError, match="another error"):
        step_report.peak_flops("float32")


@pytest.mark.skipif(platform.use_cuda(), reason="of a CPU")
def test_the_peak_of_a_cpu_is_measured_once() -> None:
    """Check the order of magnitude: a core has between 0.5 and 500 GFLOP/s."""
    step_report.peak_flops.cache_clear()
    rate = step_report.peak_flops("float32")
    assert 0.5e9 < rate < 500e9 * torch.get_num_threads()
    assert step_report.peak_flops("float32") == rate


def test_lengths_by_data_source(batch: RaggedBatch) -> None:
    found = response_lengths_by_source(batch, ["openai/gsm8k", "math", "openai/gsm8k"], limit=5)
    assert (
        found["response_length/math/mean"] == 3.0
        and found["response_length/math/clip_ratio"] == 0.0
    )
    of_gsm8k = {
        name: found[f"response_length/openai/gsm8k/{name}"]
        for name in ("mean", "max", "min", "clip_ratio")
    }
    assert of_gsm8k == {"mean": 3.5, "max": 5.0, "min": 2.0, "clip_ratio": 0.5}
    assert len(found) == 8 and undeclared(found) == []


def test_differences_of_probabilities_match_plain_python(batch: RaggedBatch) -> None:
    g = torch.Generator().manual_seed(0)
    rollout = -torch.rand(10, generator=g)
    trainer = rollout + 0.3 * torch.randn(10, generator=g)
    found = difference_metrics(
        replace(batch, rollout_log_probs=rollout).with_fields(old_log_probs=trainer)
    )
    a, b = torch.stack([trainer, rollout]).double().exp().tolist()
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    expected = {
        "rollout_probs_diff_max": max(gaps),
        "rollout_probs_diff_mean": statistics.mean(gaps),
        "rollout_probs_diff_std": statistics.pstdev(gaps),
        "rollout_actor_probs_pearson_corr": statistics.correlation(a, b),
    }
    assert {name: found[f"training/{name}"] for name in expected} == pytest.approx(expected)
    # the mean of the ten probabilities is not exactly one of them
    constant = torch.full((10,), -0.7)
    same = difference_metrics(
        replace(batch, rollout_log_probs=constant).with_fields(old_log_probs=trainer)
    )
    assert same["training/rollout_actor_probs_pearson_corr"] == 1.0
    assert undeclared(found) == []
