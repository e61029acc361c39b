"""Resuming from a checkpoint: bit-exact on the same layout; in another layout with the same models
and optimizers, and the same metrics up to rounding."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pyarrow.parquet as pq
import pytest
import resume_cases
import torch
from runs import VARIES
from safetensors.torch import load_file
from tiny import make_workspace, write_config
from transformers import AutoModelForSequenceClassification

from rlhf_mc.run_files import SUCCESS_FILE

ROOT = Path(__file__).parents[2]
STEPS = 4
SAVED = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "trainer": {
        "total_training_steps": STEPS,
        "save_freq": SAVED,
        "test_freq": 2,
        "critic_warmup": 1,
    },
    "actor": {"ppo_epochs": 1, "optim": {"lr_decay_style": "linear"}},
    "critic": {"optim": {"lr_decay_style": "cosine"}},
}
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank, bfloat16": (1, ["dtype=bfloat16"]),
    "one rank": (1, []),
    "TP 2": (2, ["tensor_model_parallel_size=2"]),
    "DP 2": (2, []),
    "CP 2": (2, ["context_parallel_size=2"]),
    "DP 2, shared prompts": (2, ["share_prompts=true", "dtype=bfloat16"]),
    "PP 2 of 2 chunks": (
        2,
        ["pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2"],
    ),
    "TP 4 of 2 KV heads": (4, ["tensor_model_parallel_size=4"]),
    "TP 2 x DP 2": (4, ["tensor_model_parallel_size=2"]),
}
LAYOUTS["FSDP2"] = (2, ["actor.strategy=fsdp2"])
LAYOUTS["FSDP2, bfloat16"] = (2, ["actor.strategy=fsdp2", "dtype=bfloat16"])
"""Number of ranks, settings of actor.megatron, or with their whole name."""
POOLS = "pools of one rank"
LAYOUTS[POOLS] = (2, ["dtype=bfloat16"])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(make_workspace(tmp_path_factory.mktemp("resume")), **SETTINGS)


class UninterruptedRuns:
    """Uninterrupted runs by layout, each run once."""

    def __init__(self, pool: Any, config: Path, root: Path) -> None:
        self.pool = pool
        self.config = config
        self.root = root
        self._results: dict[str, list[dict[str, Any]]] = {}

    def directory(self, layout: str) -> Path:
        return self.root / layout.replace(" ", "_")

    def results(self, layout: str) -> list[dict[str, Any]]:
        if layout not in self._results:
            self._results[layout] = self.train(layout, self.directory(layout), [])
        return self._results[layout]

    def train(
        self, layout: str, directory: Path, overrides: list[str], record_at: int = SAVED
    ) -> list[dict[str, Any]]:
        world, settings = LAYOUTS[layout]
        overrides = [
            *overrides,
            *(s if s.startswith("actor.") else f"actor.megatron.{s}" for s in settings),
            *(("resource_pools.train=1", "resource_pools.rollout=1") if layout == POOLS else ()),
            f"trainer.default_local_dir={directory}",
        ]
        results: list[dict[str, Any]] = self.pool(world).run(
            resume_cases.train,
            config_path=str(self.config),
            overrides=overrides,
            record_at=record_at,
        )
        return results

    def resumed(self, source: str, layout: str, directory: Path) -> list[dict[str, Any]]:
        self.results(source)
        return self.train(layout, directory, resume_from(self.directory(source), SAVED))


def resume_from(run: Path, step: int) -> list[str]:
    return [
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={run / f'global_step_{step}'}",
    ]


@pytest.fixture(scope="module")
def runs(pool: Any, config: Path, tmp_path_factory: pytest.TempPathFactory) -> UninterruptedRuns:
    return UninterruptedRuns(pool, config, tmp_path_factory.mktemp("whole"))


def metrics(run: Path) -> dict[int, dict[str, float]]:
    """Return the metrics by step, after the saved one, without timings and memory."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith(VARIES)} for row in rows]
    return {row["step"]: row for row in rows if row["step"] > SAVED}


def assembled(results: list[dict[str, Any]], when: str) -> dict[str, np.ndarray]:
    """Return the whole tensors, as bytes of the elements, from all ranks' blocks. Replicas of a
    block must agree."""
    out: dict[str, np.ndarray] = {}
    for result in results:
        for key, shape, box, data in result[when]:
            slices = tuple(slice(*side) for side in box)
            size = data.size // int(np.prod([end - start for start, end in box]))
            data = data.reshape(*(end - start for start, end in box), size)
            whole, filled = (
                out.setdefault(key + part, np.zeros((*shape, size), np.uint8))
                for part in ("", " is filled")
            )
            assert not filled[slices].any() or (whole[slices] == data).all(), key
            whole[slices] = data
            filled[slices] = 1
    assert all(tensor.all() for key, tensor in out.items() if key.endswith(" is filled"))
    return out


@pytest.mark.parametrize(
    "layout",
    ["one rank, bfloat16", "TP 2", "DP 2", "CP 2", "DP 2, shared prompts", "FSDP2, bfloat16"],
)
def test_resume_on_same_layout_is_bit_exact(
    runs: UninterruptedRuns, tmp_path: Path, layout: str
) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "earlier"}')
    (tmp_path / SUCCESS_FILE).write_text("an earlier run's")
    resumed = runs.resumed(layout, layout, tmp_path)
    whole = runs.results(layout)
    assert not any(rank["marked_at_start"] for rank in resumed) and all(
        rank["marked"] for rank in resumed
    )
    run_id = json.loads((tmp_path / "run.json").read_text())["run_id"]
    assert json.loads((tmp_path / SUCCESS_FILE).read_text()) == {"run_id": run_id, "step": 4}
    assert whole[0]["steps"] == [1, 2, 3, 4] and resumed[0]["steps"] == [3, 4]
    assert sorted(metrics(tmp_path)) == [3, 4]
    assert metrics(tmp_path) == metrics(runs.directory(layout))
    # The actor's schedule counts its own 3 updates, the first of them a warm-up of 1, and decays to
    # 0 after the last.
    rates = [row["actor/lr"] / 5e-3 for row in metrics(tmp_path).values()]
    assert rates == pytest.approx([2 / 3, 1 / 3])
    for mine, theirs in zip(resumed, whole, strict=True):
        for when in ("then", "last"):
            assert [b[:3] for b in mine[when]] == [b[:3] for b in theirs[when]]
            assert all((a[3] == b[3]).all() for a, b in zip(mine[when], theirs[when], strict=True))


@pytest.mark.parametrize(
    ("source", "layout"),
    [(POOLS, "one rank, bfloat16"), ("one rank, bfloat16", POOLS)],
)
def test_resume_in_pools_and_out_of_them_is_bit_exact(
    runs: UninterruptedRuns, tmp_path: Path, source: str, layout: str
) -> None:
    resumed = runs.resumed(source, layout, tmp_path)
    whole = runs.results("one rank, bfloat16")
    assert all(rank["marked"] and rank["steps"] == [3, 4] for rank in resumed)
    for directory in (tmp_path, runs.directory(source)):
        for step, row in metrics(runs.directory("one rank, bfloat16")).items():
            other = metrics(directory)[step]
            assert all(other[key] == row[key] for key in row if not key.startswith("reshard/"))
    for when in ("then", "last"):
        mine, theirs = (assembled(results, when) for results in (resumed, whole))
        assert mine.keys() == theirs.keys()
        assert all((mine[key] == theirs[key]).all() for key in mine)
    if layout == POOLS:
        assert resumed[1]["last"] == [], "a rank of the rollout pool holds no weight"


def test_checkpoint_is_exported_on_one_rank(runs: UninterruptedRuns, tmp_path: Path) -> None:
    """Compare with the run's own export after its last step. The critic is exported as a sequence
    classifier."""
    results = runs.results("TP 2")
    run = runs.directory("TP 2")
    tool = str(ROOT / "tools" / "convert_mcore_to_hf.py")
    checkpoint = str(run / f"global_step_{STEPS}")
    for role in ("actor", "critic"):
        done = forked.run(
            [tool, "--checkpoint", checkpoint, "--output", str(tmp_path / role), "--role", role]
        )
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1), done.stderr
    exported = {path.name: path.read_bytes() for path in (run / "hf").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "actor").iterdir()} == exported
    assert json.loads(exported["run.json"])["step"] == STEPS
    critic = load_file(tmp_path / "critic" / "model.safetensors")
    wanted = assembled(results, "last")
    names = {
        key.removeprefix("critic.weight.") for key in wanted if key.startswith("critic.weight.")
    }
    assert critic.keys() == {name for name in names if not name.endswith(" is filled")}
    for name, tensor in critic.items():
        assert (
            tensor.view(torch.uint8).numpy().ravel() == wanted[f"critic.weight.{name}"].ravel()
        ).all(), name
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert classifier.config.num_labels == 1
    assert torch.equal(
        classifier.score.weight, critic["score.weight"].to(classifier.score.weight.dtype)
    )


def test_checkpoint_is_exported_in_several_files_on_two_ranks(
    runs: UninterruptedRuns, tmp_path: Path
) -> None:
    """Compare with the run's own export after its last step."""
    runs.results("one rank, bfloat16")
    run = runs.directory("one rank, bfloat16")
    tool = str(ROOT / "tools" / "convert_mcore_to_hf.py")
    paths = ["--checkpoint", str(run / f"global_step_{STEPS}"), "--output", str(tmp_path / "hf")]
    done = forked.run_ranks(2, [tool, *paths, "--max-shard-gb", "0.0004"])
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    files = sorted((tmp_path / "hf").glob("model-*.safetensors"))
    whole = load_file(run / "hf" / "model.safetensors")
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 2 and len(files) % 2 == 1, "one rank has no last file to write"
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_export_errors_are_one_line(runs: UninterruptedRuns, tmp_path: Path) -> None:
    runs.results("one rank, bfloat16")
    tool = str(ROOT / "tools" / "convert_mcore_to_hf.py")
    whole = runs.directory("one rank, bfloat16") / f"global_step_{STEPS}"
    corrupt = shutil.copytree(whole, tmp_path / "corrupt")
    os.truncate(corrupt / "__0_0.distcp", 1000)
    for checkpoint, options, words in (
        (corrupt, [], "__0_0.distcp: corrupt"),
        (whole, ["--hf-path", str(tmp_path / "nowhere")], "nowhere: no such directory"),
        (runs.config.parent / "model", ["--role", "actor"], "are for a run's global_step_N"),
    ):
        done = forked.run(
            [tool, "--checkpoint", str(checkpoint), "--output", str(tmp_path / "out"), *options]
        )
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, (
            done.stderr
        )
    assert not (tmp_path / "out").exists()


def test_file_modes_follow_the_umask(runs: UninterruptedRuns, tmp_path: Path) -> None:
    runs.results("TP 2")
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    wanted = {kind: (tmp_path / kind).stat().st_mode for kind in ("directory", "file")}
    found = [*runs.directory("TP 2").rglob("*")]
    assert any(path.suffix == ".safetensors" for path in found)
    for path in found:
        assert path.stat().st_mode == wanted["directory" if path.is_dir() else "file"], path


@pytest.mark.parametrize(
    ("source", "layout"),
    [
        ("TP 2", "one rank"),
        ("DP 2", "PP 2 of 2 chunks"),
        ("DP 2", "CP 2"),
        ("CP 2", "one rank"),
        ("DP 2", "TP 4 of 2 KV heads"),
        ("DP 2", "FSDP2"),
    ],
)
def test_resume_in_another_layout_keeps_models_and_metrics(
    runs: UninterruptedRuns, tmp_path: Path, source: str, layout: str
) -> None:
    resumed = runs.resumed(source, layout, tmp_path)
    then = assembled(resumed, "then")
    saved = assembled(runs.results(source), "then")
    assert then.keys() == saved.keys()
    assert sum(".exp_avg_sq." in key for key in then) > 20 and any(
        ".weight.score" in key for key in then
    )
    assert all((then[key] == saved[key]).all() for key in then)
    curve = metrics(tmp_path)
    original = metrics(runs.directory(source))
    for step in (3, 4):
        for key in (
            "critic/score/mean",
            "actor/loss",
            "critic/vf_loss",
            "actor/grad_norm",
            "critic/values/mean",
        ):
            assert curve[step][key] == pytest.approx(original[step][key], rel=2e-4, abs=2e-6), (
                step,
                key,
            )
    next_layout = {"TP 4 of 2 KV heads": "TP 2 x DP 2", "FSDP2": "TP 2"}.get(layout)
    if next_layout is not None:  # resumes from the checkpoint after the last step
        loaded = runs.train(
            next_layout, tmp_path / "loaded", resume_from(tmp_path, STEPS), record_at=STEPS
        )
        then = assembled(loaded, "then")
        saved = assembled(resumed, "last")
        assert then.keys() == saved.keys() and all((then[key] == saved[key]).all() for key in then)


@pytest.mark.parametrize(
    ("source", "layout"),
    [("FSDP2, bfloat16", "one rank, bfloat16"), ("DP 2, shared prompts", "FSDP2, bfloat16")],
)
def test_shards_of_bfloat16_weights_are_saved_and_read_whole(
    runs: UninterruptedRuns, tmp_path: Path, source: str, layout: str
) -> None:
    """Check that weights, main parameters and moments are the saved ones to the last bit."""
    then = assembled(runs.resumed(source, layout, tmp_path), "then")
    saved = assembled(runs.results(source), "then")
    assert any(".main." in key for key in then) and then.keys() == saved.keys()
    assert all((then[key] == saved[key]).all() for key in then)


def test_draws_by_file_weights_continue_after_a_resume(
    pool: Any, config: Path, tmp_path: Path
) -> None:
    """Resume with two weighted files: prompts and responses are those of the uninterrupted run. The
    second file has 5 prompts and 6 of each step's 8 draws, so that its
    passes begin within a step."""
    files = [config.parent / "train.parquet", config.parent / "val.parquet"]
    settings = [
        f"data.train_files=[{files[0]},{files[1]}]",
        "data.train_file_weights=[1,3]",
        "trainer.test_freq=-1",
    ]
    settings += [
        "algorithm.adv_estimator=grpo",
        "trainer.critic_warmup=0",
        "algorithm.use_kl_in_reward=false",
    ]
    settings += [
        "algorithm.kl_ctrl.type=fixed",
        "trainer.val_before_train=false",
        "trainer.total_training_steps=3",
    ]

    def generations(name: str, *overrides: str) -> dict[int, list[dict[str, Any]]]:
        """Return the rows of each step that a run trains."""
        outputs = [
            f"trainer.default_local_dir={tmp_path / name}",
            f"trainer.rollout_data_dir={tmp_path / name / 'rows'}",
        ]
        arguments = [*settings, *overrides, *outputs]
        pool(1).run(
            resume_cases.train, config_path=str(config), overrides=arguments, record_at=SAVED
        )
        found = (tmp_path / name / "rows").glob("*.jsonl")
        return {
            int(path.stem): [json.loads(line) for line in path.read_text().splitlines()]
            for path in found
        }

    whole = generations("whole")
    start = tmp_path / "whole" / f"global_step_{SAVED}"
    resumed = generations(
        "resumed", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={start}"
    )
    assert sorted(whole) == [1, 2, 3] and resumed == {3: whole[3]}
    of_second = [row["prompt"][0]["content"] for row in pq.read_table(files[1]).to_pylist()]
    for rows in whole.values():
        prompts = [row["input"] for row in rows[::2]]  # two responses of each
        assert sum(any(content in prompt for content in of_second) for prompt in prompts) == 6
