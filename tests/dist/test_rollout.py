"""The engine's KV cache, and chunked prefill: if a batch's prompts exceed max_num_batched_tokens,
vLLM splits prompts into chunks. The responses must be those of unchunked prompts. Real GSM8K
prompts need chunks at the default rollout settings."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import forked
import pytest
import rollout_cases
import torch
import yaml
from gsm8k import SOURCE, gsm8k_lines
from tiny import make_checkpoint

from rlhf_mc.config.schema import RolloutConfig

MAX_MODEL_LEN = 72
UNCHUNKED = 8192
CHUNKED = (72, 75, 88, 131)
"""Values of max_num_batched_tokens that split the prompts at different places, up to several
prompts of one step."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("rollout"), num_hidden_layers=2))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [
        [rng.randrange(4, 260) for _ in range(rng.randrange(3, MAX_MODEL_LEN - 8))]
        for _ in range(24)
    ]


@pytest.fixture(scope="module")
def lines(pool: Any, checkpoint: str, prompts: list[list[int]]) -> tuple[str, str]:
    """Return an engine's line at the start, and its error where new weights come during a
    request."""
    (found,) = pool(1).run(
        rollout_cases.update_during_a_request,
        checkpoint=checkpoint,
        max_model_len=MAX_MODEL_LEN,
        prompt=prompts[0],
    )
    summary, message = found
    return summary, message


def test_update_fails_if_the_prefix_cache_is_kept(lines: tuple[str, str]) -> None:
    assert "did not reset its prefix cache" in lines[1]


def test_the_line_at_start_gives_the_kv_cache(lines: tuple[str, str]) -> None:
    line, _ = lines
    found = re.fullmatch(
        r"KV cache: 0\.07 GB, for (\d+) tokens: ([\d.]+) sequences of 72 tokens; "
        "attention by CPU_ATTN",
        line,
    )
    assert found is not None, line
    tokens, sequences = map(float, found.groups())
    assert tokens == pytest.approx(sequences * MAX_MODEL_LEN, rel=1e-3)


@pytest.mark.parametrize(
    ("num_bytes", "reason"),
    [
        (
            1 << 19,
            (
                r"To serve at least one request with the model's max seq len \(1000\), .* KV cache "
                r"is "
                r"needed.*"
            ),
        ),
        (0, "No available memory for the cache blocks"),
    ],
)
def test_a_kv_cache_that_holds_no_sequence_is_one_line(
    pool: Any, tmp_path: Path, num_bytes: int, reason: str
) -> None:
    checkpoint = str(make_checkpoint(tmp_path / "model", max_position_embeddings=1024))
    ((ok, value),) = pool(1).outcomes(
        rollout_cases.build_with_kv_cache_of,
        num_bytes=num_bytes,
        checkpoint=checkpoint,
        max_model_len=1000,
    )
    assert not ok and value[0] == "UserError", value
    assert re.fullmatch(
        rf"rollout.cpu_kvcache_space_gb 1: vLLM says: {reason}; raise rollout.cpu_kvcache_space_gb "
        r"or "
        "rollout.tensor_model_parallel_size, or lower data.max_prompt_length or "
        "data.max_response_length",
        value[1],
    ), value[1]


@pytest.mark.parametrize(("world", "budgets"), [(1, CHUNKED), (2, (88,))], ids=["TP 1", "TP 2"])
def test_chunked_prefill_samples_the_same_responses(
    pool: Any, checkpoint: str, prompts: list[list[int]], world: int, budgets: tuple[int, ...]
) -> None:
    unchunked, *chunked = pool(world).run(
        rollout_cases.generate,
        checkpoint=checkpoint,
        rollout_tp=world,
        max_model_len=MAX_MODEL_LEN,
        prompts=prompts,
        temperature=1.0,
        budgets=(UNCHUNKED, *budgets),
    )[0]
    # sampled, each with its own seed
    assert len({tuple(r.token_ids) for r in unchunked}) == len(prompts)
    for responses in chunked:
        assert [r.token_ids for r in responses] == [r.token_ids for r in unchunked]
        for mine, reference in zip(responses, unchunked, strict=True):
            torch.testing.assert_close(
                torch.tensor(mine.log_probs), torch.tensor(reference.log_probs), atol=1e-5, rtol=0
            )


ROOT = Path(__file__).parents[2]
NUM_PROMPTS = 64
NUM_VAL = 64


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a config of one step at default rollout settings over GSM8K's prompts."""
    directory = tmp_path_factory.mktemp("gsm8k")
    make_checkpoint(directory / "model", num_hidden_layers=2, max_position_embeddings=1024)
    (directory / "all.jsonl").write_text(
        "\n".join(gsm8k_lines(NUM_PROMPTS + NUM_VAL)), encoding="utf-8"
    )
    command = [str(ROOT / "tools" / "prepare_data.py"), "--dataset", "gsm8k"]
    command += ["--input", f"{directory}/all.jsonl"]
    command += ["--output", str(directory), "--test-rows", str(NUM_VAL)]
    done = forked.run(command)
    assert done.returncode == 0, done.stderr
    tree = {
        "data": {
            "train_files": f"{directory}/train.parquet",
            "val_files": f"{directory}/test.parquet",
            "train_batch_size": NUM_PROMPTS,
            "max_prompt_length": 1000,
            "max_response_length": 16,
        },
        "model": {"path": f"{directory}/model"},
        "actor": {"ppo_mini_batch_size": NUM_PROMPTS, "megatron": {"dtype": "float32"}},
        "rollout": {"val_kwargs": {"temperature": 1.0}},
        "trainer": {"default_local_dir": f"{directory}/run", "total_training_steps": 1},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(tree))
    return directory


@pytest.mark.parametrize("source", [SOURCE])
def test_gsm8k_at_default_rollout_settings(pool: Any, gsm8k: Path, source: str) -> None:
    """Check that the engine needs chunked prefill. That any number of processes samples the same
    tokens: test_layouts.py."""
    (result,) = pool(1).run(rollout_cases.gsm8k_step, config_path=str(gsm8k / "config.yaml"))
    assert result["prompt_tokens"] > RolloutConfig().max_num_batched_tokens
    assert result["metrics"]["training/rollout_logprobs_diff_max"] < 1e-4
    assert result["samples"].count("\n") == 8
