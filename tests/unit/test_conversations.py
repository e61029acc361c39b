"""Conversations in the chat template and tokens of a reward model, against transformers' own rendering."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import DataConfig
from rlhf_mc.data.batch import Prompt
from rlhf_mc.data.conversations import ConversationTokenizer, conversation_batch
from rlhf_mc.data.prompts import load_prompts
from rlhf_mc.data.source import write_prompts

sys.path.append(str(Path(__file__).parents[1]))
from tiny import make_prompts, make_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|user|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)


@pytest.fixture
def template(tmp_path: Path) -> str:
    make_tokenizer(tmp_path)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return str(tmp_path / "template.jinja")


def prompt(*messages: dict[str, Any]) -> Prompt:
    return Prompt(0, np.array([1], np.int32), "a", None, {}, "data.train_files t.parquet", 7, messages)


def test_conversation_is_rendered_as_by_transformers(template: str, tmp_path: Path) -> None:
    own = ConversationTokenizer("reward_model", str(tmp_path), template)
    messages = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "no"},
    ]
    chat = [*messages, {"role": "assistant", "content": "2"}]
    expected = own.tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    found = own.tokens(prompt(*messages), "2")
    assert found.tolist() == expected and found[-1] == own.tokenizer.eos_token_id
    batch = conversation_batch([found, found[-1:]])
    assert batch.tokens.tolist() == [*expected, expected[-1]]
    assert batch.seq_lens.tolist() == [len(expected), 1] and batch.response_lens.tolist() == [1, 1]


def test_template_that_refuses_a_prompt_names_row_and_setting(template: str, tmp_path: Path) -> None:
    own = ConversationTokenizer("reward_model", str(tmp_path), template)
    with pytest.raises(UserError) as caught:
        own.text(prompt({"role": "system", "content": "be brief"}), "")
    assert str(caught.value) == (
        "data.train_files t.parquet, row 7: the chat template of reward_model.tokenizer_path refuses the prompt"
        " (no system role)"
    )


def test_tokenizer_without_template_or_files(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"^reward_model\.tokenizer_path .* no chat template; give one in reward_"):
        ConversationTokenizer("reward_model", str(tmp_path), None)
    (tmp_path / "t").write_text(" ")
    with pytest.raises(UserError, match=r"^reward_model\.chat_template_path .*: is empty"):
        ConversationTokenizer("reward_model", str(tmp_path), str(tmp_path / "t"))
    with pytest.raises(UserError, match=r"^reward_model\.tokenizer_path .*: no such directory"):
        ConversationTokenizer("reward_model", str(tmp_path / "none"), None)


def test_prompts_keep_their_messages_where_asked_for(tmp_path: Path) -> None:
    """Messages are those of the file, whatever the actor's template makes of them, with a string as one message."""
    tokenizer = make_tokenizer(tmp_path)
    files = [str(make_prompts(tmp_path / "a.parquet", 2, seed=0)), str(tmp_path / "b.parquet")]
    row = {"data_source": "arithmetic", "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 0}}
    write_prompts(files[1], [{**row, "prompt": "1+1="}])
    first, _, last = load_prompts(files, tokenizer, DataConfig(files), -1, with_messages=True)
    assert [message["role"] for message in first.messages] == ["user"]
    assert tokenizer.decode(first.token_ids) == f"<|user|>{first.messages[0]['content']}<|bot|>"
    assert last.messages == [{"role": "user", "content": "1+1="}]
    assert next(iter(load_prompts(files, tokenizer, DataConfig(files), -1))).messages == ()
