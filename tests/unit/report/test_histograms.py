"""Histograms of response lengths; which responses of a step are kept, and their tokens."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from config_files import MINIMAL
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_mc.config.load import load_config
from rlhf_mc.data.batch import OBSERVED, Generation, Prompt, Responses, build_batch
from rlhf_mc.run_files import keep_up_to
from rlhf_mc.trainer.samples import (
    MAX_BINS,
    MAX_TOKENS,
    histogram,
    length_edges,
    record_histograms,
    some_of_each_prompt,
    token_columns,
    token_texts,
)


@pytest.mark.parametrize(
    ("longest", "width"), [(1, 1), (4, 1), (64, 1), (65, 2), (1000, 16), (32768, 512)]
)
def test_bins_have_one_width_and_hold_every_length(longest: int, width: int) -> None:
    edges = length_edges(longest)
    assert {b - a for a, b in itertools.pairwise(edges)} == {width}
    assert len(edges) - 1 <= MAX_BINS and edges[0] == 0 and edges[-2] < longest <= edges[-1]
    lengths = torch.arange(1, longest + 1)
    counts = histogram(lengths, edges)["counts"]
    assert len(counts) == len(edges) - 1 and sum(counts) == longest
    assert counts[0] == min(width, longest) and counts[-1] == longest - edges[-2]


def test_a_length_on_an_edge_is_below_it() -> None:
    assert histogram(torch.tensor([2, 2, 3, 4]), [0, 2, 4]) == {
        "edges": [0, 2, 4],
        "counts": [2, 2],
    }


def test_rows_of_steps_and_of_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "given.yaml").write_text(MINIMAL)
    overrides = [f"trainer.default_local_dir={tmp_path}", "data.max_response_length=3"]
    cfg = load_config(str(tmp_path / "given.yaml"), overrides)
    batch: Any = SimpleNamespace(response_lens=torch.tensor([1, 3, 3]))
    path = tmp_path / "histograms.jsonl"
    for step in (1, 2):
        record_histograms(cfg, 0, "a", step, batch)
        record_histograms(cfg, 1, "a", step, batch)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lengths = {"edges": [0, 1, 2, 3], "counts": [1, 0, 2]}
    assert rows == [{"step": step, "run_id": "a", "response_length": lengths} for step in (1, 2)]
    with path.open("a") as file:
        file.write('{"step": 3, "run')
    keep_up_to(path, 1)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]
    path.unlink()
    path.mkdir()
    record_histograms(cfg, 0, "a", 2, batch)
    assert "histograms.jsonl cannot be written" in capsys.readouterr().err


def test_some_kept_responses_are_to_one_prompt() -> None:
    assert some_of_each_prompt(6, 1, 2) == some_of_each_prompt(6, 2, 2) == [0, 1]
    assert some_of_each_prompt(12, 6, 10) == [0, 1, 2, 3, 6, 7, 8, 9, 4, 5]
    assert some_of_each_prompt(6, 2, 99) == [0, 1, 2, 3, 4, 5]
    assert some_of_each_prompt(6, 2, 0) == []


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes, then words with their space, then an end token."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def pieces_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that decodes as those of SentencePiece: the space of the first token is
    left out."""
    vocab = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3, "<0xC3>": 4, "<0xA9>": 5, ".": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_token_texts_are_the_text_of_the_response() -> None:
    tokenizer = bytes_tokenizer()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = "".join(
        piece
        for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("é\n😀a")
    )
    ids = [*(alphabet.index(letter) for letter in symbols), len(alphabet)]
    assert token_texts(tokenizer, ids) == ["", "é", "\n", "", "", "", "😀", "a", "<|end|>"]
    assert token_texts(tokenizer, ids[:5]) == ["", "é", "\n", "", "\ufffd"], (
        "cut within a character"
    )
    assert token_texts(pieces_tokenizer(), [1, 2, 3, 1, 4, 5, 6]) == [
        "the",
        " cat",
        "s",
        " the",
        "",
        "é",
        ".",
    ]
    assert token_texts(tokenizer, []) == []


def test_token_columns_are_those_of_each_response() -> None:
    prompts = [Prompt(i, np.array([1], np.int32), "source", None) for i in range(3)]
    turns = Generation([3, 1, 2, 3], [-0.5, OBSERVED, OBSERVED, -0.25], True)
    responses = [
        Generation([1, 2], [-1.0, -2.0], True),
        turns,
        Generation([3] * 600, [-0.1] * 600, False),
    ]
    batch = build_batch(prompts, Responses.of(responses))
    values = torch.arange(604) / 3
    values[1] = float("nan")
    batch = batch.with_fields(values=values, loss_mask=torch.arange(604) != 2)
    short, observed, long = token_columns(pieces_tokenizer(), batch)
    assert short == {
        **{"text": ["the", " cat"], "response_mask": [1, 1], "rollout_log_probs": [-1.0, -2.0]},
        **{"values": [0.0, None], "loss_mask": [1, 1]},
    }
    assert observed["text"] == ["s", " the", " cat", "s"] and observed["response_mask"] == [
        1,
        0,
        0,
        1,
    ]
    assert observed["rollout_log_probs"] == [-0.5, None, None, -0.25]
    assert observed["values"] == [0.666667, None, None, 1.0] and observed["loss_mask"] == [
        0,
        None,
        None,
        1,
    ]
    assert {len(column) for column in long.values()} == {MAX_TOKENS} and long["values"][
        0
    ] == 1.333333
    assert long["rollout_log_probs"][0] == -0.1
