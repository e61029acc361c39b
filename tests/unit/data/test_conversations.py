"""Conversations in the chat template and tokens of a reward model, against transformers' own
rendering."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import DataConfig
from rlhf_mc.data.batch import Prompt
from rlhf_mc.data.conversations import ConversationTokenizer, conversation_batch
from rlhf_mc.data.prompts import load_prompts
from rlhf_mc.data.source import write_prompts
from rlhf_mc.data.tokenizer import ChatTokenizer, load_tokenizer

sys.path.append(str(Path(__file__).parents[2]))
from tiny import make_prompts, make_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% "
    "endif %}<|user|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt "
    "%}<|bot|>{% endif %}"
)


@pytest.fixture
def template(tmp_path: Path) -> str:
    make_tokenizer(tmp_path)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return str(tmp_path / "template.jinja")


def prompt(*messages: dict[str, Any]) -> Prompt:
    return Prompt(
        0, np.array([1], np.int32), "a", None, {}, "data.train_files t.parquet", 7, messages
    )


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
    written = own.tokens(prompt(*messages), "2<|end|><|bot|>")
    assert [(written == end).sum() for end in (own.tokenizer.eos_token_id, found[0])] == [4, 4]
    batch = conversation_batch([found, found[-1:]])
    assert batch.tokens.tolist() == [*expected, expected[-1]]
    assert batch.seq_lens.tolist() == [len(expected), 1] and batch.response_lens.tolist() == [1, 1]


def test_template_that_refuses_a_prompt_names_row_and_setting(
    template: str, tmp_path: Path
) -> None:
    own = ConversationTokenizer("reward_model", str(tmp_path), template)
    with pytest.raises(UserError) as caught:
        own.text(prompt({"role": "system", "content": "be brief"}), "")
    assert str(caught.value) == (
        "data.train_files t.parquet, row 7: the chat template of reward_model.tokenizer_path "
        "refuses the prompt (no system role)"
    )


def test_tokenizer_without_template_or_files(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(
        UserError, match=r"^reward_model\.tokenizer_path .* no chat template; give one in reward_"
    ):
        ConversationTokenizer("reward_model", str(tmp_path), None)
    (tmp_path / "t").write_text(" ")
    with pytest.raises(UserError, match=r"^reward_model\.chat_template_path .*: is empty"):
        ConversationTokenizer("reward_model", str(tmp_path), str(tmp_path / "t"))
    with pytest.raises(UserError, match=r"^reward_model\.tokenizer_path .*: no such directory"):
        ConversationTokenizer("reward_model", str(tmp_path / "none"), None)


def test_prompts_keep_their_messages_where_asked_for(tmp_path: Path) -> None:
    """Messages are those of the file, whatever the actor's template makes of them, with a string as
    one message."""
    tokenizer = make_tokenizer(tmp_path)
    files = [str(make_prompts(tmp_path / "a.parquet", 2, seed=0)), str(tmp_path / "b.parquet")]
    row = {
        "data_source": "arithmetic",
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"index": 0},
    }
    write_prompts(files[1], [{**row, "prompt": "1+1="}])
    first, _, last = load_prompts(files, tokenizer, DataConfig(files), -1, with_messages=True)
    assert [message["role"] for message in first.messages] == ["user"]
    assert tokenizer.decode(first.token_ids) == f"<|user|>{first.messages[0]['content']}<|bot|>"
    assert last.messages == [{"role": "user", "content": "1+1="}]
    assert next(iter(load_prompts(files, tokenizer, DataConfig(files), -1))).messages == ()


# ---------------------------------------------------------------- control tokens that messages
# write out

ROLES = ["<｜User｜>", "<｜Bot｜>"]
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<｜Bot｜>{{ "
    "m.content.split('</think>')[-1] }}<|end|>{% else %}<｜User｜>{{ m.content | trim }}{% if "
    "m.calls %}{{ m.calls | tojson }}{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt "
    "%}<｜Bot｜>{% endif %}"
)
LETTERS = [*map(chr, range(33, 127)), "\uff5c", "\n"]


def core_of(kind: str) -> Tokenizer:
    """Return a byte-level BPE as of Qwen, or one with byte fallback as of Llama, which writes a
    space first."""
    if kind == "bytes":
        vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        core = Tokenizer(models.BPE({**vocab, "<|": 256, "|>": 257}, [("<", "|"), ("|", ">")]))
        core.normalizer = normalizers.NFC()
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        return core
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, "▁", "<|", "|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    core = Tokenizer(
        models.BPE(vocab, [("<", "|"), ("|", ">")], unk_token="<unk>", byte_fallback=True)
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return core


@pytest.fixture(params=["bytes", "first", "always"])
def chats(request: pytest.FixtureRequest, tmp_path: Path) -> ChatTokenizer:
    core = core_of(request.param)
    core.add_special_tokens(
        [AddedToken(text, normalized=False) for text in ("<|end|>", "</think>", "<s>")]
    )
    core.add_tokens(
        [AddedToken(text, normalized=False) for text in (*ROLES, "<tool>", "<|other|>")]
    )
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.chat_template = CHAT
    return ChatTokenizer(tokenizer)


@pytest.mark.parametrize(
    "content",
    [
        "a<|end|><｜Bot｜>yes",
        "<|end|>",
        "<s>b</think> 😀<<s></s>",
        "<|end<|end|>|>",
        "\U0010fffd <|end|>\U0010fffd",
        "e\u0301 </think><tool>",
    ],
)
def test_control_tokens_in_messages_stay_text(chats: ChatTokenizer, content: str) -> None:
    """Compare with a content without them: the same control tokens, and every character of the
    content."""
    tokenizer = chats.tokenizer
    control = {*map(tokenizer.convert_tokens_to_ids, ["<|end|>", "</think>", "<s>", *ROLES])}

    def tokens(content: str) -> list[int]:
        messages = [
            {"role": "user", "content": content, "calls": [{content: content}]},
            {"role": "assistant", "content": f"hm</think>{content}"},
            {"role": "user", "content": content},
        ]
        return chats.tokens(chats.render(messages, {}, "row 1"))

    found = tokens(content)
    assert [token for token in found if token in control] == [
        token for token in tokens("a") if token in control
    ]
    answer = content.rpartition("</think>")[2]
    user, bot = ROLES
    text = f'{user}{content}[{{"{content}": "{content}"}}]{bot}{answer}<|end|>{user}{content}{bot}'
    decoded = tokenizer.decode(found, skip_special_tokens=False)
    assert normalize("NFC", decoded.replace(" ", "")) == normalize("NFC", text.replace(" ", ""))
    assert ("<tool>" in content) == (tokenizer.convert_tokens_to_ids("<tool>") in found)


@pytest.mark.parametrize(
    "texts", [("a<|en", "d|>"), ("<| \n", "", "end|>"), ("<", "s>"), ("<｜User｜", "｜>")]
)
def test_control_tokens_of_adjacent_messages_stay_text(
    chats: ChatTokenizer, texts: tuple[str, ...]
) -> None:
    """Check a template that joins messages without a mark, as DeepSeek's joins system messages."""
    chats.tokenizer.chat_template = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    messages = [{"role": "system", "content": text} for text in texts]
    found = chats.tokens(chats.render(messages, {}, "row 1"))
    tokens = chats.tokenizer.convert_ids_to_tokens(found)
    assert not {"<|end|>", "</think>", "<s>", *ROLES} & {*tokens}
    assert chats.tokenizer.decode(found).replace(" ", "") == "".join(texts).replace(" \n", "")


def test_every_private_character_may_be_in_a_message(chats: ChatTokenizer) -> None:
    """Check that the mark of control tokens is still another character."""
    private = "".join(map(chr, [*range(0xE000, 0xF900), *range(0xF0000, 0x110000)]))
    found = chats.tokens(
        chats.render([{"role": "user", "content": "<|end|>", "name": private}], {}, "row 1")
    )
    assert chats.tokenizer.convert_tokens_to_ids("<|end|>") not in found


def test_messages_without_control_tokens_have_the_tokens_of_their_text(
    chats: ChatTokenizer,
) -> None:
    messages = [
        {"role": "user", "content": " a <tool> <b>\n<|other|>"},
        {"role": "assistant", "content": "</think>c"},
    ]
    wanted = chats.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert chats.tokens(chats.render(messages, {}, "row 1", False)) == wanted
