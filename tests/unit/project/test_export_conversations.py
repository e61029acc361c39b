"""tools/export_conversations.py: the samples of a run as messages, with their tokens as they were
drawn."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import export_conversations
import numpy as np
import pytest
import torch
from tiny import make_tokenizer, write_config

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import OBSERVED, Generation, Prompt, Responses, build_batch
from rlhf_mc.rewards.results import Episode, Score
from rlhf_mc.trainer.samples import write_samples

TEMPLATE = """\
{%- if tools %}{{ "<|im_start|>system\\n" }}
{{- messages[0].content if messages[0].role == "system" else "Help." }}
{{- "\\n<tools>" }}{% for tool in tools %}{{ "\\n" ~ (tool | tojson) }}{% endfor %}
{{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == "system" %}
{{- "<|im_start|>system\\n" ~ messages[0].content ~ "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{{- "<|im_start|>user" if messages[loop.index0 - 1].role != "tool" else "" }}
{{- "\\n<tool_response>\\n" ~ message.content ~ "\\n</tool_response>" }}
{{- "<|im_end|>\\n" if loop.last or messages[loop.index].role != "tool" else "" }}
{%- elif message.role != "system" %}
{{- "<|im_start|>" ~ message.role ~ "\\n" ~ message.content }}
{%- for call in message.tool_calls or () %}{{ "<tool_call>" ~ call.function.name }}{% endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{{- "<|im_start|>assistant\\n" if add_generation_prompt else "" }}"""
"""In the form of Qwen's: answers of tools are parts of one message of the user."""
TOOL = {"type": "function", "function": {"name": "add", "description": "{", "parameters": {}}}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?\n2+2?"}]
CALLS = 'hm<tool_call>{"name": "add"}</tool_call>'
ANSWERS = """
<|im_start|>user
<tool_response>
2
</tool_response>
<tool_response>
4
</tool_response><|im_end|>
<|im_start|>user
so?<|im_end|>
<|im_start|>assistant
"""

AGAIN = """
<|im_start|>user
sure?<|im_end|>
<|im_start|>assistant
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the samples of a run: an agent with tools, twice, one response that is cut off, one
    with a control token in a message, one whose second context continues its first turn, and one
    that is not trained on, since a tool has raised MaskSample."""
    root = tmp_path_factory.mktemp("run")
    tokenizer = make_tokenizer(root / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "model")
    write_config(root, "resolved_config.yaml", model={"path": str(root / "model")})

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    first = tokenizer.apply_chat_template(
        ASKED, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    prompt, *asked = ids(str(first))
    written_out = ids(ANSWERS.replace("so?", "so?<|im_end|>"))
    conversations = [
        [asked, ids(f"{CALLS}<|im_end|>"), ids(ANSWERS), ids("4<|im_end|>")],
        [asked, ids(f"{CALLS}<|im_end|>"), ids(ANSWERS), ids("4, of")],
        [asked, ids(f"{CALLS}<|im_end|>"), written_out, ids("4<|im_end|>")],
        [
            asked,
            ids("2<|im_end|>"),
            [prompt, *asked, *ids("2<|im_end|>"), *ids(AGAIN)],
            ids("4<|im_end|>"),
        ],
    ]
    rows: list[tuple[Prompt, Generation, Score]] = []
    for number, parts in enumerate([conversations[0], *conversations, conversations[0]]):
        bounds = [0, *itertools.accumulate(map(len, parts))]
        log_probs = [(-1.0, OBSERVED)[i % 2 == 0] for i, part in enumerate(parts) for _ in part]
        observations = [(bounds[i], bounds[i + 1]) for i in (0, 2)]
        failed: dict[Any, int] = {"masked": 1} if number == 5 else {}
        episode = Episode(
            [(0, 1.0)], {}, failed, None, 0.0, observations, contexts=[1] * (number == 4)
        )
        row = Prompt(number, np.array([prompt], np.int32), "sums", number // 2, messages=ASKED)
        generation = Generation(list(itertools.chain(*parts)), log_probs, True)
        rows.append((row, generation, Score(float(number > 0), episode=episode)))
    columns: Any = map(list, zip(*rows, strict=True))
    prompts, generations, scores = columns
    batch = build_batch(prompts, Responses.of(generations))
    ages = torch.arange(int(batch.response_lens.sum())).flip(0)
    batch = dataclasses.replace(batch, token_ages=ages // int(batch.response_lens[0]))
    responses = batch.responses()
    write_samples(root / "train_generations", 9, tokenizer, prompts, responses, scores, batch)
    return root


def written(root: Path, above: float) -> list[dict[str, Any]]:
    output = root / "out.jsonl"
    export_conversations.export(root, None, above, output)
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_conversations_above_a_score_are_messages(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, *contexts = written(root, 0.5)
    said = "3 conversations of 5 that score above 0.5, of 6 responses"
    assert said in capsys.readouterr().out
    talk = [
        *ASKED,
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "4"},
    ]
    assert [context["messages"] for context in contexts] == [talk[:3], talk]
    assert [len(context["prompt_ids"]) for context in contexts] == [1, 0]
    assert contexts[1]["response_mask"][-2:] == [1, 1]
    assert line["messages"] == [
        *ASKED,
        {"role": "assistant", "content": CALLS},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "4"},
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": "4"},
    ]
    assert line["tools"] == [TOOL] and (line["score"], line["step"]) == (1.0, 9)
    (sample, *_) = (root / "train_generations" / "9.jsonl").read_text().splitlines()
    wanted = json.loads(sample)["response_ids"]
    assert line["response_ids"] == wanted and len(line["prompt_ids"]) == 1
    mask = line["response_mask"]
    assert len(mask) == len(wanted) and [key for key, _ in itertools.groupby(mask)] == [0, 1, 0, 1]


def test_lines_name_row_and_weights(root: Path) -> None:
    """Check two responses to one row, whose tokens are drawn by weights of several steps."""
    first, second, *_ = written(root, -1)
    assert first["row"] == second["row"] and len(first["row"]) == 64
    assert first["weights_step"] < second["weights_step"] < 8
    rows = (root / "train_generations" / "9.jsonl").read_text().splitlines()
    assert len({json.loads(row)["row"] for row in rows}) == 3


def test_what_cannot_be_read_is_one_line(root: Path, tmp_path: Path) -> None:
    for run, samples, problem in (
        (tmp_path, None, "is no directory of a run (resolved_config.yaml is missing)"),
        (root, root / "model", "has no samples with tokens (trainer.rollout_data_dir)"),
    ):
        with pytest.raises(UserError) as caught:
            export_conversations.export(run, samples, 0.0, tmp_path / "out.jsonl")
        assert problem in str(caught.value)
    with pytest.raises(UserError, match="No such file"):
        export_conversations.export(root, None, 0.0, tmp_path / "none" / "out.jsonl")
