"""Agreement of vLLM and the trainer: the same parameters, tied or not, and the same log-probs.
Otherwise the run ends with an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import rollout_cases
import torch
from safetensors.torch import load_file, save_file
from test_convert import to_hf, to_mcore
from tiny import make_checkpoint, make_workspace, write_config
from transformers import AutoModelForCausalLM


def add_head(checkpoint: Path, change: float) -> torch.Tensor:
    """Add a language-model head to a tied checkpoint: the embedding times 1 + change. Return the
    head."""
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"] * (1 + change)
    save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})
    return head


@pytest.mark.parametrize(
    ("world", "tp", "pp", "rollout_tp", "change"),
    [(1, 1, 1, 1, 0.0), (2, 1, 2, 2, 0.5)],
)
def test_tied_checkpoint_with_its_own_head(
    pool: Any, tmp_path: Path, world: int, tp: int, pp: int, rollout_tp: int, change: float
) -> None:
    """Check that both engines tie an equal head and untie a different one, and agree from the first
    rollout on."""
    make_workspace(tmp_path, num_hidden_layers=2)
    head = add_head(tmp_path / "model", change)
    config = write_config(tmp_path)
    overrides = ["reshard.verify=always"]
    for result in cases.run_two_steps(
        pool(world), config, (tp, pp, rollout_tp), tmp_path / "out", overrides
    ):
        assert result["different"] == []
        for metrics in result["steps"]:
            assert metrics["training/rollout_logprobs_diff_max"] < 1e-4
    exported = cases.exported_weights(str(tmp_path / "out"))
    assert ("lm_head.weight" in exported) == (change != 0)
    if change:
        assert not torch.equal(exported["lm_head.weight"], head)  # trained


@pytest.mark.parametrize("change", [0.0, 0.5])
def test_converters_keep_the_head_of_a_tied_checkpoint(tmp_path: Path, change: float) -> None:
    source = make_checkpoint(tmp_path / "source", num_hidden_layers=1)
    add_head(source, change)
    assert to_mcore(source, tmp_path / "mcore").returncode == 0
    assert to_hf(tmp_path / "mcore", tmp_path / "back").returncode == 0
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("source", "back")
    )
    tokens = torch.arange(4, 16)[None]
    assert torch.equal(before(tokens).logits, after(tokens).logits)
    assert ("lm_head.weight" in load_file(tmp_path / "back" / "model.safetensors")) == (change != 0)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("agree"))


@pytest.fixture(scope="module")
def checkpoint(workspace: Path) -> Path:
    return workspace / "model"


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_bias": False}, "qkv_proj.bias is (128,) in the engine, absent in the weight update"),
        ({"o_bias": True}, "o_proj.bias is absent in the engine, (128,) in the weight update"),
        (
            {"ffn_hidden_size": 256},
            (
                "model.layers.0.mlp.gate_up_proj.weight is (192, 128) in the engine, "
                "(256, 128) in the weight update"
            ),
        ),
    ],
)
def test_parameters_that_no_weight_update_writes_are_rejected(
    pool: Any, checkpoint: Path, changes: dict[str, Any], message: str, world: int
) -> None:
    for ok, error in pool(world).outcomes(
        rollout_cases.build_with, checkpoint=str(checkpoint), rollout_tp=world, **changes
    ):
        assert not ok and error[0] == "UserError", error
        assert message in error[1] and str(checkpoint) in error[1] and "\n" not in error[1]


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("from_step", [1, 2])
def test_differing_log_probs_end_the_run_at_first_and_warn_later(
    pool: Any, workspace: Path, world: int, from_step: int
) -> None:
    """Check the message on every rank; in the first step it ends the run before an update."""
    outcomes = pool(world).outcomes(
        rollout_cases.steps_with_wrong_vllm_weights,
        config_path=str(write_config(workspace)),
        from_step=from_step,
    )
    for ok, result in outcomes:
        assert ok == (from_step == 2), result
        (line,) = result if ok else [result[1]]
        assert line == (outcomes[0][1][0] if ok else outcomes[0][1][1])
        assert (
            "the log-probs of the engine (rollout) and of the trainer differ" in line
            and "\n" not in line
        )
        assert "trainer.max_rollout_logprob_diff allows 0.001 and 0.01 (float32" in line
        assert ("warning: " in line) == ok and ("reshard.verify=always" in line) != ok
