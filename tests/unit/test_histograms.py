"""Histograms of response lengths, and which responses of a step are kept."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from config_files import MINIMAL

from rlhf_mc.config.load import load_config
from rlhf_mc.run_files import keep_up_to
from rlhf_mc.trainer.samples import MAX_BINS, histogram, length_edges, record_histograms, some_of_each_prompt


@pytest.mark.parametrize(("longest", "width"), [(1, 1), (4, 1), (64, 1), (65, 2), (1000, 16), (32768, 512)])
def test_bins_have_one_width_and_hold_every_length(longest: int, width: int) -> None:
    edges = length_edges(longest)
    assert {b - a for a, b in itertools.pairwise(edges)} == {width}
    assert len(edges) - 1 <= MAX_BINS and edges[0] == 0 and edges[-2] < longest <= edges[-1]
    lengths = torch.arange(1, longest + 1)
    counts = histogram(lengths, edges)["counts"]
    assert len(counts) == len(edges) - 1 and sum(counts) == longest
    assert counts[0] == min(width, longest) and counts[-1] == longest - edges[-2]


def test_a_length_on_an_edge_is_below_it() -> None:
    assert histogram(torch.tensor([2, 2, 3, 4]), [0, 2, 4]) == {"edges": [0, 2, 4], "counts": [2, 2]}


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


def test_kept_responses_are_of_different_prompts_first() -> None:
    assert some_of_each_prompt(6, 2, 2) == [0, 2]
    assert some_of_each_prompt(6, 2, 5) == [0, 2, 4, 1, 3]
    assert some_of_each_prompt(6, 2, 99) == [0, 2, 4, 1, 3, 5]
    assert some_of_each_prompt(6, 2, 0) == []
