"""Functions that the ranks run in test_prompts_once.py: the same passes with each prompt computed
once for its responses and without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from gpu_parts.engines import Job
from model_cases import log_probs_and_gradients

from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models import gpt_model, pipeline


def compare(
    checkpoint: str,
    batch: RaggedBatch,
    budget: int,
    role: str = "actor",
    in_float64: bool = False,
    **layout: Any,
) -> tuple[float, float, tuple[float, str], int]:
    """Return the largest differences between the passes with shared prompts and without: of a
    log-prob or an entropy (an actor's); of a statistic of the loss, relative where above 1; of a
    gradient, relative to the largest of its tensor, whose name follows. And return how many
    micro-batches have shared prompts.

    in_float64: the results alone, and the buffers of gradients, are in float32."""
    count = [0]
    everything = tuple(range(batch.num_sequences))
    job = Job(checkpoint, role, "token-mean", budget, everything)  # type: ignore[arg-type]

    def passes(share: bool) -> Any:
        return log_probs_and_gradients(
            [job], batch=batch, entropies=True, share_prompts=share, **layout
        )[job]

    def watched(*args: Any) -> Any:
        micro = original(*args)
        count[0] += micro.packed.shared is not None
        return micro

    original: Callable[..., Any] = pipeline.pack_micro_batch
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(pipeline, "pack_micro_batch", watched))
        if in_float64:
            layout["dtype"] = "float64"
            stack.enter_context(mock.patch.dict(gpt_model.DTYPES, float64=torch.float64))
            stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        own_scores, stats, grads = passes(False)
        assert count[0] == 0
        other_scores, other_stats, other_grads = passes(True)
    scores = [float((a - b).abs().max()) for a, b in zip(own_scores, other_scores, strict=True)]
    assert other_stats.pop("computed_tokens") < 1.0
    assert stats.keys() == other_stats.keys() and grads.keys() == other_grads.keys()
    of_stats = max(abs(stats[key] - other_stats[key]) / max(1, abs(stats[key])) for key in stats)
    of_grads = {
        key: float((other_grads[key] - grad).abs().max() / grad.abs().max().clamp_min(1e-12))
        for key, grad in grads.items()
    }
    worst = max(of_grads, key=of_grads.__getitem__)
    return max(scores, default=0.0), of_stats, (of_grads[worst], worst), count[0]
