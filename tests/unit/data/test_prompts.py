"""Parquet rows to tokenised prompts with a real tokenizer, and the resumable order."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import DataConfig
from rlhf_mc.data.batch import Prompt
from rlhf_mc.data.order import PromptOrder, check_batch
from rlhf_mc.data.prompts import load_prompts
from rlhf_mc.data.source import write_prompts
from rlhf_mc.data.tokenizer import load_tokenizer
from rlhf_mc.runtime.preemption import SIGNALS

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system messages "
    "here') }}{% endif %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}{% if "
    "add_generation_prompt %}<assistant>{% endif %}{% if shout %}!{% endif %}{% if tools %}{{ "
    "tools }}{% endif %}"
)
SPECIAL = ["<bos>", "<end>", "<user>", "<assistant>", "<unk>"]


def save_tokenizer(path: Path, template: str | None = TEMPLATE, eos: str | None = "<end>") -> Path:
    """Save a tokenizer of one token per character, with <bos> before texts encoded with special
    tokens."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *map(chr, range(32, 127))])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    core.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, unk_token="<unk>", bos_token="<bos>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(path))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(save_tokenizer(tmp_path / "tokenizer")))


@pytest.fixture
def plain_tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(save_tokenizer(tmp_path / "plain", template=None)))


def make_row(content: str = "2+2=", truth: str = "4", **extra: Any) -> dict[str, Any]:
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", **extra},
    }


def write_table(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def data_config(**settings: Any) -> DataConfig:
    return DataConfig(train_files=[], **settings)


def rendered(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the characters of a prompt's tokens."""
    return "".join(tokenizer.convert_ids_to_tokens(prompt.token_ids.tolist()))


def error_of(files: list[str], tokenizer: PreTrainedTokenizerBase, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_prompts(files, tokenizer, data_config(**settings), -1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- rows to prompts


def test_chat_messages(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "new" / "train.parquet"
    write_prompts(path, [make_row("2+2=", "4", index=0), make_row("10-3=", "7", index=1)])
    first, second = load_prompts([str(path)], tokenizer, data_config(), -1)
    assert rendered(second, tokenizer) == "<user>10-3=<end><assistant>"
    assert [tokenizer.convert_ids_to_tokens(i) for i in second.token_ids.tolist()] == [
        "<user>", "1", "0", "-", "3", "=", "<end>", "<assistant>",
    ]  # fmt: skip
    assert second.token_ids.dtype == np.int32
    assert (first.index, second.index) == (0, 1)
    assert (second.data_source, second.ground_truth) == ("arithmetic", "7")
    assert second.extra_info == {"split": "train", "index": 1}


def test_tokens_match_apply_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    path = write_table(tmp_path / "a.parquet", [{**make_row(), "prompt": messages}])
    (prompt,) = load_prompts([path], tokenizer, data_config(), -1)
    assert prompt.token_ids.tolist() == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def test_control_tokens_in_messages_are_text(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that a prompt without a template, which is the whole text, keeps them."""
    text = "a<end><assistant>4"
    path = write_table(tmp_path / "a.parquet", [{**make_row(), "prompt": text}])
    for one, wanted in (
        (tokenizer, ["<user>", *text, "<end>", "<assistant>"]),
        (plain_tokenizer, None),
    ):
        (prompt,) = load_prompts([path], one, data_config(), -1)
        tokens = one.convert_ids_to_tokens(prompt.token_ids.tolist())
        assert tokens == (wanted or ["<bos>", "a", "<end>", "<assistant>", "4"])


def test_template_arguments(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_table(tmp_path / "a.parquet", [make_row()])
    (prompt,) = load_prompts(
        [path], tokenizer, data_config(apply_chat_template_kwargs={"shout": True}), -1
    )
    assert rendered(prompt, tokenizer) == "<user>2+2=<end><assistant>!"


def test_prompts_of_rows_with_tools_have_them(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [
        {**make_row(), "agent_name": name}
        for name in (None, "tool_agent", "single_turn_agent", "mine")
    ]
    settings = {"apply_chat_template_kwargs": {"tools": [{"T": 1}]}}
    path = write_table(tmp_path / "a.parquet", rows[:3])
    read = load_prompts([path], tokenizer, data_config(**settings), -1, with_messages=True)
    assert [rendered(prompt, tokenizer)[-1] for prompt in read] == ["]", "]", ">"]
    assert [prompt.agent_name for prompt in read] == [None, "tool_agent", "single_turn_agent"]
    bad = write_table(tmp_path / "b.parquet", rows)
    assert "row 3: column 'agent_name' is 'mine'; known: tool_agent" in error_of(
        [bad], tokenizer, **settings
    )


def test_plain_string_is_a_user_message_with_a_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_table(tmp_path / "a.parquet", [{**make_row(), "prompt": "1+1="}])
    (chat,) = load_prompts([path], tokenizer, data_config(), -1)
    assert rendered(chat, tokenizer) == "<user>1+1=<end><assistant>"
    (plain,) = load_prompts([path], plain_tokenizer, data_config(), -1)
    assert plain_tokenizer.convert_ids_to_tokens(plain.token_ids.tolist()) == [
        "<bos>",
        "1",
        "+",
        "1",
        "=",
    ]


def test_chat_messages_need_a_template(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_table(tmp_path / "a.parquet", [make_row()])
    assert "no chat template" in error_of([path], plain_tokenizer)


def test_other_columns_and_no_extra_info(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    row = {"question": "1", "source": "x", "reward_model": {"ground_truth": 1.5}}
    path = write_table(tmp_path / "a.parquet", [row])
    (prompt,) = load_prompts(
        [path], tokenizer, data_config(prompt_key="question", reward_fn_key="source"), -1
    )
    assert (prompt.data_source, prompt.ground_truth, prompt.extra_info) == ("x", 1.5, {})


def test_several_files_and_max_samples(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    files = [
        write_table(tmp_path / f"{k}.parquet", [make_row(f"{k}{i}") for i in range(3)])
        for k in "ab"
    ]
    for max_samples, want in [(-1, 6), (4, 4), (3, 3), (2, 2), (100, 6)]:
        prompts = load_prompts(files, tokenizer, data_config(), max_samples)
        assert [p.index for p in prompts] == list(range(want))
        assert [rendered(p, tokenizer)[6:8] for p in prompts] == [
            "a0",
            "a1",
            "a2",
            "b0",
            "b1",
            "b2",
        ][:want]


def test_overlong_prompts(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    contents = ["1", "12345", "123456", "12"]  # each with three tokens of the template
    path = write_table(tmp_path / "a.parquet", [make_row(c) for c in contents])
    message = error_of([path], tokenizer, max_prompt_length=8)
    assert "row 2: the prompt has 9 tokens, more than data.max_prompt_length 8" in message
    assert path in message
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(
            [path], tokenizer, data_config(max_prompt_length=8, filter_overlong_prompts=True), -1
        )
    assert [rendered(p, tokenizer)[6:-16] for p in prompts] == ["1", "12345", "12"], (
        "8 tokens still fit"
    )
    assert [p.index for p in prompts] == [0, 1, 2], "counted after filtering"
    assert "1 of 4 prompts dropped" in caplog.text
    assert "all 4 prompts are longer" in error_of(
        [path], tokenizer, max_prompt_length=3, filter_overlong_prompts=True
    )


def test_prompts_of_teachers(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Read columns by data source: of a row's teacher without one, no prompt."""
    rows = [{**make_row(str(i)), "hint": f"{i}!", "data_source": "ab"[i % 2]} for i in range(3)]
    path = write_table(tmp_path / "a.parquet", rows)
    columns: list[Mapping[str | None, str]] = [{"a": "hint"}, {None: "hint"}, {"b": "prompt"}]
    texts = ["0!", None, "2!"], ["0!", "1!", "2!"], [None, "1", None]
    for by_source, wanted in zip(columns, texts, strict=True):
        read = load_prompts([path], tokenizer, data_config(), -1, teacher_columns=by_source)
        kept = read.without([1])
        assert [rendered(p, tokenizer)[6:-16] for p in kept] == ["0", "2"]
        for prompt, text in zip(read, wanted, strict=True):
            ids = prompt.teacher_ids
            found = None if ids is None else "".join(tokenizer.convert_ids_to_tokens(ids.tolist()))
            assert found == (None if text is None else f"<user>{text}<end><assistant>"), text
        for prompt, same in zip(kept, (read[0], read[2]), strict=True):
            assert np.array_equal(prompt.teacher_ids, same.teacher_ids)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "no column 'hint'; its columns are data_source, prompt"),
        ({"hint": None}, "column 'hint' is null, expected chat messages or a non-empty string"),
        ({"hint": []}, "column 'hint' is [], expected chat messages"),
        ({"hint": "123456"}, "the prompt has 9 tokens, more than data.max_prompt_length 8; raise"),
    ],
)
def test_bad_prompt_of_a_teacher_names_its_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], message: str
) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{**make_row(), "hint": "1"}, {**make_row(), **row}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in rows))
    columns: Mapping[str | None, str] = {None: "hint"}
    with pytest.raises(UserError) as caught:
        cfg = data_config(max_prompt_length=8)
        load_prompts([str(path)], tokenizer, cfg, -1, teacher_columns=columns)
    assert f"{path}, row 1 (line 2), the teacher's prompt: {message}" in str(caught.value)
    for settings in ({"on_bad_row": "skip"}, {"filter_overlong_prompts": True}):
        cfg = data_config(max_prompt_length=8, **settings)
        if ("overlong" in str(settings)) == ("tokens" in message):
            assert len(load_prompts([str(path)], tokenizer, cfg, -1, teacher_columns=columns)) == 1


def test_text_far_too_long_is_not_tokenised(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    """Check the bound of 4 * 16 characters a token: the longest entry, <assistant>, has 11, and
    counts as 16."""
    texts = ["1" * (4 * 16 * 9 + 1), "<assistant>" * 8, "1" * 8, "1" * 9]
    path = write_table(tmp_path / "a.parquet", [{**make_row(), "prompt": text} for text in texts])
    message = error_of([path], plain_tokenizer, max_prompt_length=9)
    assert (
        "row 0: the prompt has 577 characters, too many for data.max_prompt_length 9; raise that"
        in message
    )
    with caplog.at_level(logging.WARNING):
        settings = data_config(max_prompt_length=9, filter_overlong_prompts=True)
        prompts = load_prompts([path], plain_tokenizer, settings, -1)
    assert [rendered(p, plain_tokenizer) for p in prompts] == [
        f"<bos>{text}" for text in texts[1:3]
    ], "nine tokens each, the first in 88 characters"
    assert "2 of 4 prompts dropped" in caplog.text


ENDLESS_LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize(
    "body",
    [
        ENDLESS_LOOP,
        "{{ 7 ** (9 ** (messages | length + 8)) }}",
        "{% macro f() %}{% for i in range(99999) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
    ],
)
def test_endless_template_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    """Block preemption.py's signals, and run a second thread that could receive the timer's
    signal."""
    monkeypatch.setattr("rlhf_mc.data.tokenizer.LIMIT_SECONDS", 0.5)
    tokenizer = load_tokenizer(
        str(
            save_tokenizer(
                tmp_path / "endless", "{% if messages[0].content == 'go' %}" + body + "{% endif %}x"
            )
        )
    )
    path = write_table(tmp_path / "a.parquet", [make_row("1"), make_row("go")])
    before = signal.getsignal(signal.SIGVTALRM)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()
    try:
        message = error_of([path], tokenizer)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        done.set()
    assert message.startswith(f"data.train_files {path}, row 1: the tokenizer's chat template ")
    assert (
        "has not ended after 0.5 s of processor time" in message
        or "maximum recursion depth" in message
    )
    assert (
        signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
        and signal.getsignal(signal.SIGVTALRM) == before
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ messages.x.y }}", "has no attribute"),
        ("{% for i in range(9999999) %}{% endfor %}", "Range too big"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_failing_template_names_the_row(tmp_path: Path, body: str, words: str) -> None:
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path / "bad", body)))
    message = error_of([write_table(tmp_path / "a.parquet", [make_row()])], tokenizer)
    assert (
        "row 0: the tokenizer's chat template refuses the prompt (" in message and words in message
    )


# ---------------------------------------------------------------- bad files and rows


def test_bad_files(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    missing = str(tmp_path / "nowhere.parquet")
    assert error_of([missing], tokenizer) == f"data.train_files {missing}: no such file"
    good = write_table(tmp_path / "good.parquet", [make_row(str(i) * 50) for i in range(100)])
    broken = tmp_path / "broken.parquet"
    content = Path(good).read_bytes()
    for corrupt in (
        b"",
        b"not parquet at all",
        content[:-20],
        content[:4] + b"\xff" * 300 + content[304:],
    ):
        broken.write_bytes(corrupt)
        assert error_of([good, str(broken)], tokenizer).startswith(
            f"data.train_files {broken}: not a readable parquet file"
        )
    empty = str(tmp_path / "empty.parquet")
    pq.write_table(pq.read_table(good).slice(0, 0), empty)
    assert error_of([empty], tokenizer) == f"data.train_files {empty}: no rows"


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_missing_column(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, column: str) -> None:
    row = make_row()
    del row[column]
    path = write_table(tmp_path / "a.parquet", [row])
    assert (
        error_of([path], tokenizer)
        == f"data.train_files {path}: no column {column!r}; its columns are {', '.join(row)}"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": None}, "'prompt' is null"),
        ({"prompt": []}, "'prompt' is []"),
        ({"prompt": [{"role": "user", "content": None}]}, "expected a role and a text content"),
        ({"prompt": [{"role": None, "content": "1"}]}, "expected a role and a text content"),
        (
            {"images": [{"bytes": b"png"}]},
            "column 'images' is not read: prompts and models are of text alone; drop",
        ),
        ({"videos": ["a.mp4"]}, "column 'videos' is not read"),
        (
            {"tools": '[{"type": "function"}]'},
            "column 'tools' is not read: the tools of all rows are those of",
        ),
        (
            {"prompt": [{"role": "system", "content": "1"}]},
            "refuses the prompt (no system messages here)",
        ),
        ({"data_source": None}, "'data_source' is null, expected a string"),
        ({"reward_model": None}, "'reward_model' has no field 'ground_truth'"),
    ],
)
def test_bad_row_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, change: dict[str, Any], words: str
) -> None:
    others = {**dict.fromkeys(change), **make_row()}
    path = write_table(tmp_path / "a.parquet", [others, others, {**others, **change}])
    message = error_of([path], tokenizer)
    assert message.startswith(f"data.train_files {path}, row 2: ")
    assert words in message


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("prompt", 3, "'prompt' is 3"),
        ("prompt", "", "'prompt' is ''"),
        ("reward_model", {"style": "rule"}, "no field 'ground_truth'"),
        ("extra_info", "text", "'extra_info' is not a struct but str"),
    ],
)
def test_column_of_another_type(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, column: str, value: Any, words: str
) -> None:
    path = write_table(tmp_path / "a.parquet", [{**make_row(), column: value}])
    assert words in error_of([path], tokenizer)


def test_rows_to_write_must_be_complete(tmp_path: Path) -> None:
    row = make_row()
    del row["ability"]
    with pytest.raises(AssertionError, match="row 1"):
        write_prompts(tmp_path / "a.parquet", [make_row(), row])


# ---------------------------------------------------------------- tokenizer


def tokenizer_error(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bad_tokenizers(tmp_path: Path) -> None:
    assert "no such directory" in tokenizer_error(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no tokenizer" in tokenizer_error(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert "holds no tokenizer" in tokenizer_error(tmp_path / "empty")
    assert "no end-of-sequence token" in tokenizer_error(
        save_tokenizer(tmp_path / "no_eos", eos=None)
    )
    cut = save_tokenizer(tmp_path / "cut")
    (cut / "tokenizer.json").write_text((cut / "tokenizer.json").read_text()[:200])
    assert "tokenizer.json: not valid JSON" in tokenizer_error(cut)


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path / "remote")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "evil.Evil"]}
    settings["tokenizer_class"] = "Evil"
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    try:
        load_tokenizer(str(path))
    except UserError as error:
        assert "cannot be loaded" in str(error)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- order


def prompt_order(
    num_prompts: int, batch_size: int, seed: int = 7, shuffle: bool = True
) -> PromptOrder:
    return PromptOrder(
        DataConfig([], train_batch_size=batch_size, shuffle=shuffle), [num_prompts], seed
    )


def batches(order: PromptOrder, count: int, position: int = 0) -> tuple[list[list[int]], int]:
    """Return the prompts of the next `count` batches, and the position after them."""
    found = []
    for _ in range(count):
        positions = order.next_batch(position)
        found.append(order.indices(positions))
        position = positions.stop
    return found, position


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_epoch_takes_every_prompt_at_most_once(shuffle: bool) -> None:
    order = prompt_order(23, 5, shuffle=shuffle)
    assert order.batches_per_epoch == 4
    drawn, _ = batches(order, 12)
    for epoch in range(3):
        prompts = [*chain(*drawn[4 * epoch : 4 * epoch + 4])]
        assert len(prompts) == len(set(prompts)) == 20
        assert set(prompts) <= set(range(23))
        assert (prompts == list(range(20))) is not shuffle


def test_order_depends_on_seed_and_epoch() -> None:
    drawn = {seed: batches(prompt_order(20, 5, seed), 8)[0] for seed in (1, 2)}
    epochs = [[*chain(*drawn[seed][first : first + 4])] for seed, first in ((1, 0), (1, 4), (2, 0))]
    assert all(sorted(prompts) == list(range(20)) for prompts in epochs)
    assert epochs[0] != epochs[1] and epochs[0] != epochs[2]


def test_order_of_a_position_is_independent_of_earlier_ones() -> None:
    """Draw as a resumed run does: neither earlier calls nor the global random state matter."""
    order = prompt_order(23, 5, 3)
    starts = [23 * epoch + 5 * batch for epoch in range(3) for batch in range(4)]
    np.random.seed(0)
    backward = [order.indices(order.next_batch(start)) for start in reversed(starts)]
    assert batches(order, 12)[0] == backward[::-1]


@pytest.mark.parametrize("size", [8, 12, 16, 24, 32, 48])
def test_another_batch_size_continues_at_the_same_prompt(size: int) -> None:
    """Check three batches of 16 of 96 prompts: no size repeats one of them, or passes over the
    prompts after them."""
    first, position = batches(prompt_order(96, 16), 3)
    order = prompt_order(96, size)
    rest, position = batches(order, 48 // size, position)
    prompts = [*chain(*first, *rest)]
    assert len(prompts) == len(set(prompts)) and prompts == order.indices(range(len(prompts)))
    assert order.next_batch(position).start == 96, "the next batch begins the next epoch"


@pytest.mark.parametrize(("num_prompts", "size"), [(96, 16), (100, 16), (23, 5)])
def test_positions_without_the_remainder_of_each_epoch(num_prompts: int, size: int) -> None:
    order = prompt_order(num_prompts, size)
    count = order.batches_per_epoch * size
    positions = [order.position(i) for i in range(3 * count)]
    assert [order.num_before(position) for position in positions] == list(range(3 * count))
    assert all(position % num_prompts < count for position in positions)
    numbers = [order.batch_at(position) for position in positions[::size]]
    assert [number for number, _ in numbers] == list(range(3 * order.batches_per_epoch))
    assert all(order.next_batch(batch.start) == batch for _, batch in numbers)


def test_batch_larger_than_the_data() -> None:
    with pytest.raises(
        UserError, match=r"data\.train_batch_size is 5; there are only 4 training prompts"
    ):
        check_batch(DataConfig([], train_batch_size=5), 4)
    with pytest.raises(
        UserError, match=r"data\.gen_batch_size is 6; there are only 5 training prompts"
    ):
        check_batch(DataConfig([], train_batch_size=5, gen_batch_size=6), 5)
    check_batch(DataConfig([], train_batch_size=4), 4)
    assert sorted(prompt_order(4, 4).indices(range(36, 40))) == [0, 1, 2, 3]
