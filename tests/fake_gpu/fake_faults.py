"""Faults that the tests plant in rlhf_mc, each a context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import fake_steps
import torch
import torch.distributed as dist

from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models import pipeline


def _replaced_head(change: Callable[[torch.Tensor], None]) -> AbstractContextManager[Any]:
    """Call `change` with the states of each micro-batch."""
    original = pipeline.states_at

    def states_at(*args: Any) -> torch.Tensor:
        states = original(*args)
        change(states)
        return states

    return mock.patch.object(pipeline, "states_at", states_at)


def integer_dot() -> AbstractContextManager[Any]:
    """Compute torch.dot of int64 vectors, for which CUDA has no kernel."""
    return _replaced_head(lambda states: torch.dot(*2 * [states.new_ones(4, dtype=torch.int64)]))


def cpu_index() -> AbstractContextManager[Any]:
    """Index a CUDA tensor by one of the CPU: torch.index_select raises on a GPU."""
    return _replaced_head(lambda states: states.index_select(0, torch.tensor([0])))


def read_in_micro_batch() -> AbstractContextManager[Any]:
    """Read a number in each micro-batch."""
    return _replaced_head(lambda states: states.sum().item())


def pageable_copy() -> AbstractContextManager[Any]:
    """Copy a vector from pageable memory in each micro-batch."""
    return _replaced_head(lambda states: torch.arange(4).to("cuda:0", non_blocking=True))


@contextlib.contextmanager
def additional_collective() -> Iterator[None]:
    """Add a reduction, which the other ranks do not call."""
    original = fake_steps.with_targets

    def reduce_besides(batch: RaggedBatch, scores: torch.Tensor) -> RaggedBatch:
        dist.all_reduce(torch.zeros(1, device="cuda:0"))
        return original(batch, scores)

    with mock.patch.object(fake_steps, "with_targets", reduce_besides):
        yield
