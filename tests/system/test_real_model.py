"""A language model that someone else trained, as `make real-model` does it, with smaller batches:
its exported weights answer through plain transformers, and through vLLM alone, as the validation
said."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import forked
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_mc.config.load import load_config

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]


def load_program(path: Path) -> ModuleType:
    """Import a program without running it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make model and task."""
    out = tmp_path_factory.mktemp("smollm2")
    done = forked.run([str(ROOT / "tools" / "make_smollm2.py"), "--output", str(out)])
    assert done.returncode == 0, done.stderr[-4000:]
    assert (
        "134,515,008 parameters. What is the capital of France? The capital of France is Paris."
        in done.stdout
    )
    return out


def greedy(model: Any, tokenizer: Any, prompts: list[list[int]], longest: int) -> list[str]:
    """Return transformers' greedy responses."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest, do_sample=False
        )
        texts.append(str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)))
    return texts


def test_two_steps_and_their_export(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = [
        f"model.path={made}/model_hf",
        f"data.train_files={made}/train.parquet",
        f"data.val_files={made}/val.parquet",
        "data.val_max_samples=8",
        "data.train_batch_size=2",
        "actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=2",
        "trainer.save_freq=-1",
        "trainer.max_ckpt_to_keep=null",
        f"trainer.default_local_dir={run}",
        f"trainer.validation_data_dir={tmp_path}/val",
    ]
    done = forked.run_ranks(
        2, ["-m", "rlhf_mc", str(ROOT / "configs" / "smollm2_grpo.yaml"), *changes]
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["actor/grad_norm"] < 100 and row["actor/kl_loss"] < 0.1 for row in rows)

    validated = [
        json.loads(line) for line in (tmp_path / "val" / "2.jsonl").read_text().splitlines()
    ]
    texts = [row["output"] for row in validated]
    longest = load_config(str(ROOT / "configs" / "smollm2_grpo.yaml"), []).data.max_response_length
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    prompts = [
        tokenizer(row, add_special_tokens=False)["input_ids"]
        for row in prompt_texts(made, len(texts))
    ]
    model = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    assert greedy(model, tokenizer, prompts, longest) == texts
    del model

    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    program = [
        str(Path(__file__).with_name("vllm_alone.py")),
        str(run / "hf"),
        str(tmp_path / "prompts.json"),
    ]
    alone = subprocess.run(
        [sys.executable, *program, str(longest)], capture_output=True, text=True, check=False
    )
    assert alone.returncode == 0, alone.stderr[-4000:]
    assert json.loads(alone.stdout.splitlines()[-1]) == texts


def prompt_texts(made: Path, count: int) -> list[str]:
    """Return the validation prompts as the model's own template writes them."""
    import pyarrow.parquet as pq

    tokenizer = AutoTokenizer.from_pretrained(made / "model_hf")
    rows = pq.read_table(made / "val.parquet").to_pylist()[:count]
    chats = [[{key: m[key] for key in ("role", "content")} for m in row["prompt"]] for row in rows]
    return [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for chat in chats
    ]


def test_reward_pays_exact_answers() -> None:
    score = load_program(ROOT / "examples" / "smollm2_reward.py").compute_score
    assert score("smollm2/sums", "23 + 45 = 68.", "68") == 1
    assert score("smollm2/sums", "The answer is 1,068", "1068") == 1
    assert [score("smollm2/sums", text, "68") for text in ("68 or 69", "no", "", "168", "6 8")] == [
        0
    ] * 5
    facts = json.dumps({"name": "Ben", "red": 10, "blue": 20})
    assert score("smollm2/json", '{"blue": 20,\n "name": "Ben", "red": 10}', facts) == 1
    for text in (
        f"Here: {facts}",
        facts[:-1],
        '{"name": "Ben", "red": "10", "blue": 20}',
        "[]",
        "NaN",
        "[" * 9999,
    ):
        assert score("smollm2/json", text, facts) == 0


def test_held_out_questions_are_in_no_training_row() -> None:
    sys.path.append(str(ROOT / "tools"))
    import make_smollm2

    taken: set[str] = set()
    val = make_smollm2.draw_rows(random.Random(1), 100, "val", taken)
    train = make_smollm2.draw_rows(random.Random(2), 500, "train", taken)
    asked = {row["prompt"][-1]["content"] for row in val}
    assert len(asked) == 100 and not asked & {row["prompt"][-1]["content"] for row in train}
    assert {row["ability"] for row in val} == {"sums", "products", "json"}
