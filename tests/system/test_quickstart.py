"""The quickstart as `make quickstart` runs it, in another directory: the model learns, and all
results are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pyarrow.parquet as pq
import pytest
import torch
from runs import VARIES
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_mc.observability.catalog import undeclared

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
ACCURACY = "val-core/arithmetic/acc/mean@1"


@pytest.fixture(scope="module")
def run_dir(quickstart_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quickstart")
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "rlhf_mc"]
    command += ["configs/quickstart.yaml", *quickstart_overrides]
    command += [f"trainer.default_local_dir={out}", "trainer.export_freq=5"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return out


def test_pools_have_the_bits_of_a_rank_that_trains_and_generates(
    quickstart_overrides: list[str], tmp_path: Path
) -> None:
    """Run two steps with a training rank and a rollout rank, from a Megatron checkpoint, and on one
    rank with what --print-config prints: metrics and exported weights are equal to the last bit."""
    config = str(ROOT / "configs/quickstart.yaml")
    given = ["-m", "rlhf_mc", config, *quickstart_overrides, "trainer.total_training_steps=2"]
    one = f"trainer.default_local_dir={tmp_path / 'one'}"
    printed = forked.run([*given, one, "--print-config"])
    (tmp_path / "printed.yaml").write_text(printed.stdout)
    in_pools = ["resource_pools.train=1", "resource_pools.rollout=1"]
    in_pools.append(f"trainer.default_local_dir={tmp_path / 'pools'}")
    found = []
    for name, done in (
        ("one", forked.run(["-m", "rlhf_mc", f"{tmp_path}/printed.yaml"])),
        ("pools", forked.run_ranks(2, [*given, *in_pools])),
    ):
        assert done.returncode == 0, done.stderr[-4000:]
        out = tmp_path / name
        assert json.loads((out / "success.json").read_text())["step"] == 2
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        varying = (*VARIES, "reshard/", "memory/")
        metrics = [{k: v for k, v in row.items() if not k.startswith(varying)} for row in rows]
        found.append((metrics, (out / "hf" / "model.safetensors").read_bytes()))
    assert len(found[0][0]) == 3 and found[0] == found[1]


@pytest.mark.parametrize(
    ("layers", "mode", "steps", "least"),
    [(None, "k1", 5, 0.8), ([0, 3], "forward_kl_topk", 30, 0.75)],
    ids=["4 layers, k1", "2 of 4 layers, forward KL"],
)
def test_a_student_learns_from_the_trained_model_alone(
    run_dir: Path,
    quickstart_made: Path,
    quickstart_overrides: list[str],
    tmp_path: Path,
    layers: list[int] | None,
    mode: str,
    steps: int,
    least: float,
) -> None:
    """Start from the quickstart's model before training, or from some of its layers."""
    start = []
    if layers is not None:
        model = AutoModelForCausalLM.from_pretrained(quickstart_made / "model_hf")
        model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in layers])
        model.config.num_hidden_layers = len(layers)
        model.config.layer_types = model.config.layer_types[: len(layers)]
        model.save_pretrained(tmp_path / "model")
        AutoTokenizer.from_pretrained(quickstart_made / "model_hf").save_pretrained(
            tmp_path / "model"
        )
        start = [f"model.path={tmp_path / 'model'}", "model.dist_checkpointing_path=null"]
        start.append("actor.optim.lr=1e-3")
    loss = "distillation.distillation_loss"
    given = [str(ROOT / "configs/quickstart.yaml"), *quickstart_overrides, *start]
    given += [f"trainer.default_local_dir={tmp_path}", f"trainer.total_training_steps={steps}"]
    given.append(f"trainer.test_freq={steps}")
    given += ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.use_kl_in_reward=false"]
    given += ["distillation.enabled=true", f"{loss}.loss_mode={mode}"]
    given += [f"distillation.teacher_models.t.model_path={run_dir / 'hf'}"]
    given += [
        f"{loss}.use_task_rewards=false",
        f"{loss}.use_policy_gradient={mode == 'k1'}".lower(),
    ]
    done = forked.run(["-m", "rlhf_mc", *given])
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    accuracies = [row[ACCURACY] for row in rows if ACCURACY in row]
    assert accuracies[0] <= 0.5 and accuracies[-1] >= least, accuracies
    assert rows[-1]["distillation/t/kl"] < rows[1]["distillation/t/kl"] / 2


@pytest.fixture(scope="module")
def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_accuracy_rises_from_below_half_to_nine_tenths(rows: list[dict[str, float]]) -> None:
    accuracies = [row[ACCURACY] for row in rows if ACCURACY in row]
    assert rows[0]["step"] == 0 and accuracies[0] == rows[0][ACCURACY] <= 0.5
    assert accuracies[-1] >= 0.9


def test_generator_and_trainer_agree_at_every_step(rows: list[dict[str, float]]) -> None:
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert max(row["training/rollout_logprobs_diff_max"] for row in rows[1:]) < 1e-4


def test_health_rules_are_silent(run_dir: Path) -> None:
    """Leave out the rules on the machine, which other programs use too."""
    events = [json.loads(line) for line in (run_dir / "health.jsonl").read_text().splitlines()]
    warned = {event["rule"] for event in events if event["action"] != "note"}
    assert warned <= {"throughput_falling", "memory_near_limit"}, events


def test_all_results_are_written(
    run_dir: Path, quickstart_made: Path, rows: list[dict[str, float]]
) -> None:
    assert json.loads((run_dir / "success.json").read_text())["step"] == len(rows) - 1
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("critic/score/mean")) == len(rows) - 1
    assert (run_dir / "export" / "global_step_5" / "model.safetensors").is_file()  # export_freq
    samples = list((run_dir / "generations").glob("*.jsonl"))
    assert len(samples) >= 2 and all('"output": ' in path.read_text() for path in samples)
    train, val = (pq.read_table(quickstart_made / f"{name}.parquet") for name in ("train", "val"))
    assert train.num_rows > val.num_rows > 0
    assert undeclared({key for row in rows for key in row} - {"step", "run_id"}) == []


def test_transformers_loads_the_trained_actor_and_gets_the_same_accuracy(
    run_dir: Path, quickstart_made: Path, rows: list[dict[str, float]]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf", dtype=torch.float32)
    val = pq.read_table(quickstart_made / "val.parquet").to_pylist()
    texts = [
        tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        for row in val
    ]
    # All prompts have the same number of tokens.
    ids = tokenizer(texts, add_special_tokens=False, return_tensors="pt")["input_ids"]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False
    )
    answers = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    right = sum(
        answer == row["reward_model"]["ground_truth"]
        for answer, row in zip(answers, val, strict=True)
    )
    last = [row[ACCURACY] for row in rows if ACCURACY in row][-1]
    assert right / len(val) == pytest.approx(last, abs=1.5 / len(val))
