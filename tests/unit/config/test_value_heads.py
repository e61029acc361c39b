"""Checks of checkpoints used as a reward model or as the critic's starting point."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import RewardModelConfig
from rlhf_mc.config.schema import Config, DataConfig, ModelConfig, TrainerConfig
from rlhf_mc.data.conversations import ConversationTokenizer
from rlhf_mc.data.tokenizer import load_tokenizer
from rlhf_mc.setup.value_heads import reward_model_checkpoint, token_checkpoint

sys.path.append(str(Path(__file__).parents[2]))
from tiny import make_reward_model, make_tokenizer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("good"))


@pytest.fixture
def directory(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "model")
    return tmp_path / "model"


def config(directory: Path, longest: int = 64) -> Config:
    return Config(
        data=DataConfig(train_files=[], max_prompt_length=longest - 10, max_response_length=10),
        model=ModelConfig(path=""),
        trainer=TrainerConfig(default_local_dir=""),
        reward_model=RewardModelConfig(model_path=str(directory)),
    )


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_classifier_of_one_label_is_a_reward_model(directory: Path) -> None:
    tokenizer = load_tokenizer(str(directory))
    reader = reward_model_checkpoint(config(directory), "reward_model", tokenizer, None)
    assert reader.directory == directory and "score.weight" in reader.names
    (directory / "tokenizer.json").unlink()  # then there is no tokenizer to compare
    reward_model_checkpoint(config(directory), "reward_model", tokenizer, None)
    edit_tensors(directory, lambda t: t.update({"score.bias": torch.zeros(1)}))
    reward_model_checkpoint(config(directory), "reward_model", tokenizer, None)


def test_critic_may_start_without_a_value_head(directory: Path) -> None:
    tokenizer = load_tokenizer(str(directory))
    data = config(directory).data
    edit_tensors(directory, lambda t: t.pop("score.weight"))
    token_checkpoint("critic.model_path", str(directory), data, tokenizer)
    edit_tensors(directory, lambda t: t.update({"score.weight": torch.zeros(2, 128)}))
    with pytest.raises(UserError, match=r"^critic\.model_path .*score\.weight has 2 rows"):
        token_checkpoint("critic.model_path", str(directory), data, tokenizer)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("score.weight"), ("no tensor score.weight", "classifier of one label")),
        (
            lambda t: t.update({"score.weight": t["score.weight"].repeat(3, 1)}),
            ("score.weight has 3 rows", "classifier of 3 labels"),
        ),
        (
            lambda t: t.update({"score.bias": torch.tensor([0.5])}),
            ("score.bias is [0.5]", "must be 0"),
        ),
        (
            lambda t: t.update({"norm.weight": t.pop("model.norm.weight")}),
            ("model.norm.weight is missing",),
        ),
    ],
    ids=["no head", "three labels", "bias", "names without prefix"],
)
def test_tensors_that_do_not_fit_are_rejected(
    directory: Path, edit: Any, words: tuple[str, ...]
) -> None:
    edit_tensors(directory, edit)
    with pytest.raises(UserError) as caught:
        reward_model_checkpoint(
            config(directory), "reward_model", load_tokenizer(str(directory)), None
        )
    for word in (str(directory), *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tokenizer_or_length_that_does_not_fit_is_rejected(directory: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "other")
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(UserError, match=r"its tokenizer has '<new>' as None, the actor's as \d+"):
        reward_model_checkpoint(config(directory), "reward_model", tokenizer, None)
    tokenizer.add_tokens([f"<new{i}>" for i in range(10)])
    with pytest.raises(
        UserError, match=r"vocab_size is 266, the tokenizer \(the actor's\) has 274 tokens"
    ):
        reward_model_checkpoint(config(directory), "reward_model", tokenizer, None)
    with pytest.raises(
        UserError, match="max_position_embeddings is 128, fewer than the 129 tokens"
    ):
        reward_model_checkpoint(
            config(directory, longest=129), "reward_model", load_tokenizer(str(directory)), None
        )


def test_reward_model_with_its_own_tokenizer(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Give a vocabulary or a chat template that is not the actor's, which needs
    reward_model.tokenizer_path."""
    actor = make_tokenizer(tmp_path / "actor")
    actor.add_tokens(["<new>"])
    capsys.readouterr()
    cfg = config(directory, longest=129)  # the actor's tokens do not count
    cfg.reward_model.tokenizer_path = str(directory)
    own = ConversationTokenizer("reward_model", str(directory), None)
    assert reward_model_checkpoint(cfg, "reward_model", actor, own).directory == directory
    with pytest.raises(UserError, match=f"set reward_model.tokenizer_path to {directory}"):
        reward_model_checkpoint(config(directory), "reward_model", actor, None)
    own.tokenizer.add_tokens([f"<new{i}>" for i in range(10)])
    words = r"vocab_size is 266, the tokenizer \(reward_model.tokenizer_path\) has 274 tokens"
    with pytest.raises(UserError, match=words):
        reward_model_checkpoint(cfg, "reward_model", actor, own)
    actor = load_tokenizer(str(directory))
    actor.chat_template = "another"
    assert not capsys.readouterr().err.count("warning")
    reward_model_checkpoint(config(directory), "reward_model", actor, None)
    assert (
        "it reads the actor's chat template, and has another; set reward_model.tokenizer_path"
        in (capsys.readouterr().err)
    )
