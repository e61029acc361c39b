"""Inputs that are rejected before training starts or that end a phase: the same single line on
every rank, which names the error. Settings by themselves: tests/unit/config/test_validate.py; exit
codes: tests/system/test_cli.py."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, make_prompts, make_tokenizer, make_workspace, write_config

from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.rewards.results import Score
from rlhf_mc.trainer.skipped_updates import _find_not_finite

pytestmark = pytest.mark.dist

WORLD = 2


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("good"))


@pytest.fixture
def workspace(good: Path, tmp_path: Path) -> Path:
    """Return a copy of the workspace that a test may change."""
    return Path(shutil.copytree(good, tmp_path / "workspace"))


def common_error(outcomes: list[tuple[bool, Any]]) -> str:
    """Return the one-line message of the UserError that every rank has raised."""
    for rank, (ok, value) in enumerate(outcomes):
        assert not ok, f"rank {rank} found nothing wrong"
        assert value[0] in ("UserError", "NodeError"), f"rank {rank}: {value[2]}"
    messages = {value[1] for _, value in outcomes}
    assert len(messages) == 1, messages
    message = messages.pop()
    assert "\n" not in message, message
    return str(message)


def error_of_building(pool: Any, workspace: Path, **sections: Any) -> str:
    return common_error(
        pool(WORLD).outcomes(cases.try_to_build, directory=str(workspace), sections=sections)
    )


def layout(tp: int = 1, pp: int = 1) -> dict[str, Any]:
    return {"megatron": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"data": {"max_prompt_length": 3}},
            ["data.train_files ", "train.parquet, row 0", "tokens", "data.max_prompt_length 3"],
        ),
        ({"data": {"train_batch_size": 32}}, ["data.train_batch_size is 32", "24"]),
        ({"model": {"path": "/nowhere/model"}}, ["model.path /nowhere/model: no such directory"]),
        (
            {"model": {"dist_checkpointing_path": "/nowhere/mcore"}},
            ["model.dist_checkpointing_path: /nowhere/mcore", "not a Megatron checkpoint"],
        ),
        ({"custom_reward_function": {"path": "/nowhere/r.py"}}, ["/nowhere/r.py", "no such file"]),
        ({"custom_reward_function": {"name": "score"}}, ["reward.py", "no function 'score'"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_settings_that_do_not_fit_data_or_files(
    pool: Any, good: Path, sections: dict[str, Any], words: list[str]
) -> None:
    message = error_of_building(pool, good, **sections)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("model", "sections", "words"),
    [
        (
            {"num_attention_heads": 6, "num_kv_heads": 3, "hidden_size": 192},
            {"actor": layout(tp=2)},
            [
                "tensor_model_parallel_size 2",
                "Megatron",
                "num_key_value_heads is 3",
                "model.layers.0.self_attn.k_proj.weight [96, 192]",
                "sizes that work: 1, 3, 6",
                "(actor.megatron: TP 2 x PP 1)",
            ],
        ),
        (
            {"num_attention_heads": 3, "num_kv_heads": 3, "hidden_size": 96},
            {"actor": layout(tp=2)},
            ["heads is 3"],
        ),
        (
            {"num_attention_heads": 6, "num_kv_heads": 3, "hidden_size": 192},
            {"ref": layout(tp=2)},
            [
                "tensor_model_parallel_size 2",
                "num_key_value_heads is 3",
                "(ref.megatron: TP 2 x PP 1)",
            ],
        ),
        ({"hidden_size": 64}, {}, ["head dimension 16", "vLLM", "32", "(rollout: TP 1)"]),
    ],
    ids=[
        "kv-heads-by-tp",
        "heads-by-tp",
        "ref-kv-heads-by-tp",
        "head-dim-16",
    ],
)
def test_models_that_cannot_be_split_or_generated_from(
    pool: Any, workspace: Path, model: dict[str, Any], sections: dict[str, Any], words: list[str]
) -> None:
    shutil.rmtree(workspace / "model")
    make_checkpoint(workspace / "model", **model)
    message = error_of_building(pool, workspace, **sections)
    for word in words:
        assert word in message


# ---------------------------------------------------------------- files


def _drop_column(workspace: Path) -> None:
    path = workspace / "train.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["prompt"]), path)


def _no_rows(workspace: Path) -> None:
    path = workspace / "train.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), path)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _edit_tensors(workspace: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = workspace / "model" / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _gpt2(workspace: Path) -> None:
    (workspace / "model" / "config.json").write_text(
        json.dumps(
            {"model_type": "gpt2", "n_embd": 128, "n_head": 4, "n_layer": 4, "vocab_size": 263}
        )
    )


def _no_eos(workspace: Path) -> None:
    # Null, not absent: transformers replaces a missing entry by the family's usual token.
    _edit_json(workspace / "model" / "tokenizer_config.json", eos_token=None)


def _more_tokens(workspace: Path) -> None:
    tokenizer = make_tokenizer(workspace / "model")
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(50)])
    tokenizer.save_pretrained(workspace / "model")


NORM = "model.norm.weight"
LONGROPE = {
    "type": "longrope",
    "factor": 2.0,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
}
CORRUPT: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no parquet": (lambda w: (w / "train.parquet").unlink(), ["train.parquet", "no such file"]),
    "no val parquet": (
        lambda w: (w / "val.parquet").unlink(),
        ["data.val_files ", "val.parquet: no such file"],
    ),
    "corrupt parquet": (
        lambda w: _truncate(w / "train.parquet"),
        ["train.parquet", "not a readable parquet file"],
    ),
    "no column": (_drop_column, ["train.parquet", "no column 'prompt'", "data_source, ability"]),
    "no rows": (_no_rows, ["train.parquet", "no rows"]),
    "another architecture": (_gpt2, ["config.json", "model_type is 'gpt2'", "llama, qwen2"]),
    "no config": (
        lambda w: (w / "model" / "config.json").unlink(),
        ["model.path: ", "config.json", "cannot be read"],
    ),
    "truncated weights": (
        lambda w: _truncate(w / "model" / "model.safetensors"),
        ["model.safetensors", "truncated or corrupt"],
    ),
    "no weights": (
        lambda w: (w / "model" / "model.safetensors").unlink(),
        ["model.safetensors", "only safetensors"],
    ),
    "no tensor": (lambda w: _edit_tensors(w, lambda t: t.pop(NORM)), [NORM, "missing"]),
    "tensor of another size": (
        lambda w: _edit_json(w / "model" / "config.json", intermediate_size=256),
        ["mlp.gate_proj.weight", "(192, 128)", "(256, 128)"],
    ),
    "tensor of another model": (
        lambda w: _edit_tensors(w, lambda t: t.update({"model.layers.9.extra": t[NORM].clone()})),
        ["model.layers.9.extra", "no part of the qwen2 model"],
    ),
    "tensor outside of the model": (
        lambda w: _edit_tensors(w, lambda t: t.update({"v_head.weight": t[NORM].clone()})),
        ["model.path: ", "v_head.weight", "no part of the qwen2 model"],
    ),
    "rope that is not supported": (
        lambda w: _edit_json(w / "model" / "config.json", rope_parameters=LONGROPE),
        [
            "model.path: ",
            "config.json: rope_parameters.rope_type is 'longrope'; supported: default, linear",
        ],
    ),
    "no end token": (_no_eos, ["tokenizer", "end-of-sequence"]),
    "tokenizer of another model": (_more_tokens, ["model.tokenizer_path", "tokens", "vocab_size"]),
    "reward raises at import": (
        lambda w: (w / "reward.py").write_text("import no_such_module\n"),
        ["reward.py", "ModuleNotFoundError", "no_such_module"],
    ),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_inputs(pool: Any, workspace: Path, name: str) -> None:
    corrupt, words = CORRUPT[name]
    corrupt(workspace)
    message = error_of_building(pool, workspace)
    for word in words:
        assert word in message


def _last_output_is_nan(tensors: dict[str, Any]) -> None:
    tensors["model.layers.1.self_attn.o_proj.weight"][:, -1] = torch.nan


@pytest.mark.parametrize("role", ["actor", "critic", "reward_model"])
def test_nonfinite_weights_on_one_rank(pool: Any, workspace: Path, role: str) -> None:
    """Use TP 2, where only rank 1 holds the last columns."""
    name = "model"
    if role != "actor":
        name = role
        shutil.copytree(workspace / "model", workspace / name)
        path = workspace / name / "model.safetensors"
        save_file(
            load_file(path) | {"score.weight": torch.ones(1, 128)}, path, metadata={"format": "pt"}
        )
    path = workspace / name / "model.safetensors"
    tensors = load_file(path)
    _last_output_is_nan(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    sections: dict[str, Any] = {"actor": layout(tp=2)}
    if role != "actor":
        sections[role] = {"model_path": str(workspace / name)}
    message = error_of_building(pool, workspace, **sections)
    assert (
        f"{path}: model.layers.1.self_attn.o_proj.weight has values that are not finite (NaN or "
        "infinite): 128"
    ) in message


def test_read_error_on_one_rank_is_raised_on_all(pool: Any, workspace: Path) -> None:
    outcomes = pool(WORLD).outcomes(
        cases.build_where_a_read_fails, directory=str(workspace), failing_rank=1
    )
    assert f"{workspace / 'model'}: a tensor cannot be read (I/O error)" in common_error(outcomes)


def test_vllm_missing_on_one_rank_is_reported_by_all(pool: Any, workspace: Path) -> None:
    outcomes = pool(WORLD).outcomes(
        cases.build_where_vllm_is_absent, directory=str(workspace), failing_rank=1
    )
    assert "rollout: vLLM 0.32.0 is needed" in common_error(outcomes)


@pytest.mark.parametrize("role", ["critic", "reward_model"])
def test_config_of_a_model_with_value_head_is_checked_too(
    pool: Any, workspace: Path, role: str
) -> None:
    shutil.copytree(workspace / "model", workspace / role)
    _edit_json(workspace / role / "config.json", partial_rotary_factor=0.5)
    message = error_of_building(pool, workspace, **{role: {"model_path": str(workspace / role)}})
    assert (
        f"{role}.model_path" in message
        and "config.json: partial_rotary_factor is 0.5; only 1" in message
    )


def test_unknown_data_source(pool: Any, workspace: Path) -> None:
    make_prompts(workspace / "train.parquet", 24, seed=1)
    path = workspace / "train.parquet"
    table = pq.read_table(path)
    names = ["arithmetic"] * 7 + ["riddles"] + ["arithmetic"] * 16
    pq.write_table(
        table.set_column(table.schema.get_field_index("data_source"), "data_source", [names]), path
    )
    message = error_of_building(pool, workspace, custom_reward_function={"path": None})
    assert (
        "train.parquet, row 7 " in message
        and "'riddles'" in message
        and "custom_reward_function.path" in message
    )


# ---------------------------------------------------------------- during a step

BAD_ROW = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] == 3:
        {statement}
    return 1.0
"""


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("raise KeyError('no\\nanswer')", ["raised KeyError", "reward.py:4"]),
        ("return float('nan')", ["returned nan", "finite"]),
        ("return 'good'", ["returned 'good'", "expected a number"]),
        ("return {'accuracy': 1.0}", ["without 'score'"]),
    ],
    ids=["raises", "nan", "text", "no-score"],
)
def test_reward_function_failing_on_one_row_ends_every_rank(
    pool: Any, workspace: Path, statement: str, words: list[str]
) -> None:
    """Distribute rows round-robin over the ranks: only rank 1 scores row 3."""
    (workspace / "reward.py").write_text(BAD_ROW.format(statement=statement))
    outcomes = pool(WORLD).outcomes(
        cases.score_fixed_responses, directory=str(workspace), num_prompts=6
    )
    message = common_error(outcomes)
    for word in [*words, "row 3", "'arithmetic'", "reward.py"]:
        assert word in message


def test_row_without_a_score_has_the_default_score_on_every_rank(
    pool: Any, workspace: Path
) -> None:
    (workspace / "reward.py").write_text(BAD_ROW.format(statement="raise KeyError"))
    settings = {"default_score": -1.0}
    for rows in pool(WORLD).run(
        cases.score_fixed_responses, directory=str(workspace), num_prompts=6, **settings
    ):
        assert [row.score for row in rows] == [1.0, 1.0, 1.0, -1.0, 1.0, 1.0]
        assert [row.failure for row in rows] == [None, None, None, "raised", None, None]


def test_reward_function_failing_on_an_absent_row_is_accepted(pool: Any, workspace: Path) -> None:
    (workspace / "reward.py").write_text(BAD_ROW.format(statement="raise KeyError"))
    for rows in pool(WORLD).run(
        cases.score_fixed_responses, directory=str(workspace), num_prompts=3
    ):
        assert rows == [Score(1.0, {"custom": 1.0})] * 3


def test_nonfinite_kl_ends_an_adaptive_run(pool: Any, workspace: Path) -> None:
    outcomes = pool(WORLD).outcomes(
        cases.step_with_nan_reference, config_path=str(write_config(workspace))
    )
    message = common_error(outcomes)
    assert message.startswith("algorithm.kl_ctrl.type adaptive: the KL of step 1 is nan; of ")
    tokens, rest = message.split("; of ")[1].split(" tokens ")
    assert rest.endswith(
        f"the actor's log-probs are not finite for 0 and the reference's for {tokens}"
    )


def test_nonfinite_update_message_names_the_cause() -> None:
    """Check the message for nonfinite weights, for a nonfinite batch, and for neither."""
    batch = RaggedBatch(
        tokens=torch.arange(4),
        prompt_lens=torch.tensor([2]),
        response_lens=torch.tensor([2]),
        rollout_log_probs=torch.zeros(2),
        finished=torch.ones(1, dtype=torch.bool),
    )
    good = {"a": torch.ones(2)}
    bad = {"a": torch.ones(2), "b": torch.tensor([1.0, torch.inf])}
    with_nan = batch.with_fields(
        old_log_probs=torch.zeros(2), ref_log_probs=torch.tensor([torch.nan, 0.0])
    )
    for params, mini, words in (
        (good, batch, "weights and batch are finite, so .* try a smaller critic.optim.lr"),
        (
            good,
            with_nan,
            (
                r"weights are finite, and of the batch these have values that are not: "
                r"ref_log_probs "
                r"\(1\)$"
            ),
        ),
        (
            bad,
            with_nan,
            (
                r"the model's weights are not finite \(b on rank 0\): resume from an earlier "
                r"checkpoint$"
            ),
        ),
    ):
        engine = SimpleNamespace(name="critic", params=params, groups=SimpleNamespace(members=None))
        message = _find_not_finite(engine, mini)  # type: ignore[arg-type]
        assert re.search(words, message), message
        assert ("optim.lr" in message) == (params is good and mini is batch)
