"""Distributions over the responses of a step, in histograms.jsonl: a mean and an extreme in metrics.jsonl do not show
how many responses are cut off, or that there are two kinds of lengths.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_mc.config.schema import Config
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.observability.run_files import HISTOGRAMS_FILE
from rlhf_mc.observability.sinks import view

MAX_BINS = 64


def record_histograms(cfg: Config, rank: int, run_id: str, step: int, batch: RaggedBatch) -> None:
    """Add the step's histogram of response lengths to histograms.jsonl. Any rank may call it; rank 0 writes. Like a
    view it cannot fail the run."""
    if rank == 0:
        lengths = histogram(batch.response_lens, length_edges(cfg.data.max_response_length))
        row = {"step": step, "run_id": run_id, "response_length": lengths}
        view(HISTOGRAMS_FILE, lambda: _append(Path(cfg.trainer.default_local_dir) / HISTOGRAMS_FILE, row))


def length_edges(longest: int) -> list[int]:
    """Return the edges of at most MAX_BINS bins of one width for lengths in tokens from 1 to `longest`, the same in
    every step: bin i holds the lengths above edges[i], up to edges[i + 1]."""
    width = -(-longest // MAX_BINS)
    return list(range(0, longest + width, width))


def histogram(lengths: torch.Tensor, edges: Sequence[int]) -> dict[str, list[int]]:
    """Return {"edges", "counts"} of lengths in tokens; [S] integers from 1 to edges[-1]."""
    bins = torch.bucketize(lengths, torch.tensor(edges[1:], dtype=lengths.dtype))
    return {"edges": list(edges), "counts": torch.bincount(bins, minlength=len(edges) - 1).tolist()}


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
