"""Files of prompts: JSONL, columns that may be absent, bad rows, truncation, templates from a file,
files with sampling weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_prompts import data_config, make_row, rendered, save_tokenizer, write_table
from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import CustomRewardFunctionConfig, RewardConfig
from rlhf_mc.config.schema import Config, ModelConfig, TrainerConfig
from rlhf_mc.data import tokenise
from rlhf_mc.data.batch import Prompt
from rlhf_mc.data.order import PromptOrder, check_weights, draws_of_files
from rlhf_mc.data.prompts import load_prompts
from rlhf_mc.data.source import check_columns, needed_columns, scored_by_rule
from rlhf_mc.data.tokenizer import load_tokenizer
from rlhf_mc.rewards.manager import RewardManager
from rlhf_mc.setup.scorable import scorable
from rlhf_mc.trainer.pool.generate import sampling_seeds


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(save_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return str(path)


def error_of(
    path: str, tokenizer: PreTrainedTokenizerBase, by_rule: bool = True, **settings: Any
) -> str:
    with pytest.raises(UserError) as caught:
        load_prompts([path], tokenizer, data_config(**settings), -1, by_rule=by_rule)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- JSONL, columns


def contents(prompts: Iterable[Prompt]) -> list[str]:
    """Return all fields of the prompts: vectors have no equality of their own."""
    return [repr(prompt) for prompt in prompts]


def test_jsonl_gives_the_prompts_of_parquet(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [make_row(f"{i}+{i}=", str(2 * i), index=i) for i in range(5)]
    lines = write_lines(tmp_path / "a.jsonl", [*rows[:2], "", *rows[2:]])
    table = write_table(tmp_path / "a.parquet", rows)
    cfg = data_config()
    check_columns(lines, needed_columns(cfg))
    ours, theirs = (list(load_prompts([file], tokenizer, cfg, 4)) for file in (lines, table))
    assert contents(replace(p, file="") for p in ours) == contents(
        replace(p, file="") for p in theirs
    )
    assert len(ours) == 4 and ours[0].file == f"data.train_files {lines}"


def test_values_of_a_json_line_keep_their_types(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Parquet has one type per field; lines of JSONL are independent."""
    rows = [
        {**make_row(), "reward_model": {"ground_truth": 4}, "extra_info": {"a": 1}},
        {**make_row(), "reward_model": {"ground_truth": ["4", 4.5]}, "extra_info": {"b": [None]}},
    ]
    first, second = load_prompts(
        [write_lines(tmp_path / "a.jsonl", rows)], tokenizer, data_config(), -1
    )
    assert (first.ground_truth, first.extra_info) == (4, {"a": 1})
    assert (second.ground_truth, second.extra_info) == (["4", 4.5], {"b": [None]})


CALL = {
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": [None, {"c": 2}]}},
}
OTHER_CALL = {"type": "function", "function": {"name": "find", "arguments": {"city": "Bern"}}}
CONVERSATION = [
    {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "2?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL, OTHER_CALL]},
    {"role": "tool", "content": [{"type": "text", "text": "3"}]},
]


@pytest.mark.parametrize("file", ["a.jsonl", "a.parquet"])
def test_messages_have_texts_and_no_nulls(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Check fields that parquet fills in all rows and in all calls, beside a column of empty
    lists."""
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ "
        "c.function.arguments | tojson }}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template + "{% endfor %}{% endfor %}")
    rows = [{**make_row(), "prompt": CONVERSATION, "images": [], "tools": None}]
    path = (write_lines if file == "a.jsonl" else write_table)(tmp_path / file, rows)
    (prompt,) = load_prompts([path], tokenizer, data_config(), -1, with_messages=True)
    user, call, tool = prompt.messages
    assert (user["content"], call["content"], tool["content"]) == ("1+2?", "", "3")
    assert call["tool_calls"] == [CALL, OTHER_CALL] and "tool_calls" not in user
    assert rendered(prompt, tokenizer) == '1+2?{"a": 1, "b": [null, {"c": 2}]}{"city": "Bern"}3'


def test_columns_that_may_be_absent(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "1+1="}]
    for path in (
        write_lines(tmp_path / "a.jsonl", rows),
        write_table(tmp_path / "a.parquet", rows),
    ):
        (prompt,) = load_prompts([path], tokenizer, data_config(), -1, by_rule=False)
        assert (prompt.data_source, prompt.ground_truth, prompt.extra_info) == ("unknown", None, {})
        assert "no column 'data_source'" in error_of(path, tokenizer)
        with pytest.raises(UserError, match="no column 'data_source'"):
            check_columns(path, needed_columns(data_config()))
        check_columns(path, needed_columns(data_config(), by_rule=False))


def test_who_needs_the_columns_of_rules() -> None:
    cfg = Config(data_config(), ModelConfig(""), trainer=TrainerConfig(""))
    keys = ("data.train_files", "data.val_files")
    assert [scored_by_rule(cfg, key) for key in keys] == [True, True]
    cfg.reward_model.model_path = "model"
    assert [scored_by_rule(cfg, key) for key in keys] == [False, True]
    cfg.custom_reward_function.path = "reward.py"
    assert [scored_by_rule(cfg, key) for key in keys] == [False, False]


# ---------------------------------------------------------------- bad rows

BAD = [
    (
        {"images": ["a.png"]},
        "column 'images' is not read: prompts and models are of text alone; drop this column",
    ),
    (
        {"tools": [{"type": "function"}]},
        "column 'tools' is not read: the tools of all rows are those of",
    ),
    (
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
        "expected a role and a text",
    ),
    ({"prompt": None}, "column 'prompt' is null"),
    ({"prompt": []}, "column 'prompt' is []"),
    ({"prompt": ""}, "column 'prompt' is ''"),
    ({"prompt": " "}, "column 'prompt' is ' '"),
    ({"prompt": [{"role": "user", "content": " "}]}, "whose messages are all empty"),
    ({"prompt": [["user", "1"]]}, "column 'prompt' has the message ['user', '1']"),
    (
        {"prompt": {"role": "user", "content": "1"}},
        "column 'prompt' is {'role': 'user', 'content': '1'}",
    ),
    (
        {"prompt": [{"role": "user", "content": [{"text": "1"}]}]},
        "expected a role and a text content",
    ),
    (
        {"prompt": [{"role": "system", "content": "1"}]},
        "refuses the prompt (no system messages here)",
    ),
    ({"reward_model": None}, "column 'reward_model' has no field 'ground_truth'"),
    ({"data_source": 3}, "column 'data_source' is 3, expected a string"),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_a_bad_line_is_named_or_skipped(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, Any],
    words: str,
) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", ["", make_row("1"), {**make_row("2"), **change}, make_row("3")]
    )
    message = error_of(path, tokenizer)
    assert message.startswith(f"data.train_files {path}, row 1 (line 3): ") and words in message
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts([path], tokenizer, data_config(on_bad_row="skip"), -1)
    assert [(p.index, p.row, rendered(p, tokenizer)) for p in prompts] == [
        (0, 0, "<user>1<end><assistant>"),
        (1, 2, "<user>3<end><assistant>"),
    ]
    assert (
        f"data.train_files {path}: 1 of 3 rows skipped (data.on_bad_row): row 1 (line 3): "
        in caplog.text
    )
    assert words in caplog.text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON ("),
        ("[]", "expected an object, found []"),
        ("[" * 100_000, "not valid JSON ("),
        (
            '{"prompt": "1", "data_source": "arithmetic"}',
            "no column 'reward_model'; its columns are prompt, data_source",
        ),
        (
            '{"prompt": "\\ud800", "data_source": "a", "reward_model": {"ground_truth": 1}}',
            "cannot be tokenised",
        ),
    ],
)
def test_a_line_that_is_no_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, line: str, words: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [make_row("1"), line])
    message = error_of(path, tokenizer)
    assert message.startswith(f"data.train_files {path}, row 1 (line 2): ") and words in message
    (prompt,) = load_prompts([path], tokenizer, data_config(on_bad_row="skip"), -1)
    assert prompt.row == 0


def test_the_first_line_may_be_bad(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["{", make_row("1")])
    check_columns(path, needed_columns(data_config()))
    assert error_of(path, tokenizer).startswith(
        f"data.train_files {path}, row 0 (line 1): not valid JSON"
    )
    (prompt,) = load_prompts([path], tokenizer, data_config(on_bad_row="skip"), -1)
    assert prompt.row == 1


def test_bad_rows_alone(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_lines(tmp_path / "a.jsonl", [make_row("12345678"), make_row("1" * 600), "{"])
    message = error_of(
        path, tokenizer, on_bad_row="skip", filter_overlong_prompts=True, max_prompt_length=9
    )
    assert (
        "all 2 prompts are longer than data.max_prompt_length 9 tokens, and 1 bad rows are skipped"
        in message
    )
    assert error_of(str(tmp_path / "no.jsonl"), tokenizer).endswith("no.jsonl: no such file")
    empty = write_lines(tmp_path / "empty.jsonl", [""])
    assert error_of(empty, tokenizer) == f"data.train_files {empty}: no rows"


def test_rows_that_no_rule_can_score(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [make_row(str(i)) for i in range(6)]
    rows[2]["data_source"] = "mine"
    rows[4]["reward_model"]["ground_truth"] = None
    rows[5]["prompt"] = None
    files = [
        write_lines(tmp_path / "a.jsonl", rows[:1]),
        write_lines(tmp_path / "b.jsonl", rows[1:]),
    ]
    prompts = load_prompts(files, tokenizer, data_config(on_bad_row="skip"), -1)
    rewards = RewardManager(CustomRewardFunctionConfig(), RewardConfig())
    with pytest.raises(UserError) as caught:
        scorable(rewards, prompts, "error", training=True)
    assert str(caught.value).startswith(
        f"data.train_files {files[1]}, row 1 (data_source 'mine'): no r"
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        kept = scorable(rewards, prompts, "skip", training=True)
    assert [(p.index, rendered(p, tokenizer)[6], p.row) for p in kept] == [
        (0, "0", 0),
        (1, "1", 0),
        (2, "3", 2),
    ]
    assert kept.file_sizes == [1, 2]
    assert (
        "2 of 5 prompts skipped (data.on_bad_row): " in caplog.text
        and "ground_truth is null" in caplog.text
    )
    with pytest.raises(
        UserError, match=r"all 1 prompts are skipped \(data.on_bad_row\): .*c.jsonl, row 0 .*'mine'"
    ):
        path = write_lines(tmp_path / "c.jsonl", rows[2:3])
        scorable(
            rewards, load_prompts([path], tokenizer, data_config(), -1), "skip", training=False
        )
    rewards.close()


# ---------------------------------------------------------------- lengths, template


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "56<end><assistant>"), ("right", "<user>123"), ("middle", "<user>1<end><assistant>")],
)
def test_truncation(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    caplog: pytest.LogCaptureFixture,
    side: str,
    text: str,
) -> None:
    path = write_table(tmp_path / "a.parquet", [make_row("1"), make_row("123456")])
    with caplog.at_level(logging.WARNING):
        short, long = load_prompts(
            [path], tokenizer, data_config(max_prompt_length=4, truncation=side), -1
        )
    assert (rendered(short, tokenizer), rendered(long, tokenizer)) == (
        "<user>1<end><assistant>",
        text,
    )
    assert len(long.token_ids) == 4
    assert "1 of 2 prompts truncated to 4 tokens" in caplog.text


def test_truncation_to_odd_lengths() -> None:
    """Compare with verl: the first limit // 2 tokens and the last limit - limit // 2."""
    tokens = list(range(10))
    assert tokenise.truncated(tokens, 5, "middle") == [0, 1, 7, 8, 9]
    assert tokenise.truncated(tokens, 1, "middle") == [9]


def test_template_from_a_file(tmp_path: Path) -> None:
    plain = str(save_tokenizer(tmp_path / "plain", template=None))
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    table = write_table(tmp_path / "a.parquet", [make_row("1+1=")])
    tokenizer = load_tokenizer(plain, chat_template_path=str(template))
    (prompt,) = load_prompts([table], tokenizer, data_config(), -1)
    assert rendered(prompt, tokenizer) == "[user]1+1="
    template.write_text(" \n")
    with pytest.raises(
        UserError,
        match=r"data.chat_template_path .*chat.jinja: is empty; expected a Jinja template",
    ):
        load_tokenizer(plain, chat_template_path=str(template))
    template.write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"chat.jinja: not a text in UTF-8"):
        load_tokenizer(plain, chat_template_path=str(template))
    with pytest.raises(
        UserError, match=r"data.chat_template_path /nowhere: cannot be read \(No such file"
    ):
        load_tokenizer(plain, chat_template_path="/nowhere")


# ---------------------------------------------------------------- sampling weights


@pytest.mark.parametrize(
    "weights", [[1.0], [3.0, 1.0], [0.5, 0.25, 0.25], [0.1, 0.7, 1e-3], [1 / 3, 2 / 3]]
)
def test_draws_follow_the_weights(weights: list[float]) -> None:
    counts = draws_of_files(weights, 0, 3000)
    assert (counts.sum(axis=1) == np.arange(3001)).all()
    assert (np.diff(counts, axis=0) >= 0).all()
    shares = np.array(weights) / sum(weights)
    assert np.abs(counts - np.arange(3001)[:, None] * shares).max() <= len(weights) / 2 + 0.01
    assert (draws_of_files(weights, 1000, 1010) == counts[1000:1011]).all()


@pytest.mark.parametrize("shuffle", [False, True])
def test_weighted_order(shuffle: bool) -> None:
    """Check that each file is passed over completely before one of its prompts comes again, at its
    own pace, and that a step's prompts are a function of the step alone."""

    def order(seed: int) -> PromptOrder:
        cfg = data_config(train_batch_size=8, train_file_weights=[1.0, 3.0], shuffle=shuffle)
        return PromptOrder(cfg, [5, 40], seed)

    starts = range(0, 240, 8)
    steps = [order(7).indices(order(7).next_batch(start)) for start in starts]
    assert [order(7).indices(order(7).next_batch(start)) for start in reversed(starts)] == steps[
        ::-1
    ]
    assert order(7).indices(range(240)) == [i for drawn in steps for i in drawn], (
        "the batch size changes no position"
    )
    assert order(7).epoch_length == 40 and order(7).next_batch(36) == range(36, 44)
    for drawn in steps:
        assert sum(i < 5 for i in drawn) == 2
    small = [i for drawn in steps for i in drawn if i < 5]
    large = [i for drawn in steps for i in drawn if i >= 5]
    assert all(sorted(small[k : k + 5]) == list(range(5)) for k in range(0, 60, 5))
    assert all(sorted(large[k : k + 40]) == list(range(5, 45)) for k in range(0, 160, 40))
    assert (small[:5] == small[5:10]) is not shuffle
    assert (large[:40] == list(range(5, 45))) is not shuffle
    assert (order(8).indices(range(8)) != order(7).indices(range(8))) is shuffle


def test_weights_of_settings() -> None:
    cfg = data_config(train_batch_size=4, train_file_weights=[1.0, 1.0], shuffle=False)
    cfg.train_files = ["a", "b"]
    assert PromptOrder(cfg, [3, 3], 1).indices(range(4)) == [0, 3, 1, 4]
    with pytest.raises(
        UserError, match=r"data.train_file_weights: there are no prompts of b to draw"
    ):
        check_weights(cfg, [3, 0])
    cfg.train_file_weights = []
    check_weights(cfg, [3, 0])
    assert PromptOrder(cfg, [3, 3], 1).indices(range(4)) == [0, 1, 2, 3]


def test_a_prompt_that_is_drawn_twice_has_other_seeds() -> None:
    prompts = [Prompt(i, np.array([1], np.int32), "", None) for i in (4, 7, 4)]
    seeds = sampling_seeds(1, 0, 3, prompts, 2)
    assert len(set(seeds)) == 6
    assert seeds[:4] == sampling_seeds(1, 0, 3, prompts[:2], 2)
    assert seeds[4:] == sampling_seeds(1, 0, 3, prompts[:1], 4)[2:]
