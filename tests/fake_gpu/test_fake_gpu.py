"""The GPU branches of the training and of the weight update, executed on fake CUDA devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_cases import CASES, Report
from fake_checks import mismatches

pytestmark = pytest.mark.slow

DENSE = [name for name, case in CASES.items() if "num_experts" not in case.config]
SCORES_AND_GRADIENTS = ("score", "gradient")


@pytest.fixture(scope="module")
def report(on_fake_gpu: Callable[..., Any]) -> Callable[[str, int], Report]:
    """Return report(case, rank), which runs each once."""
    reports: dict[tuple[str, int], Report] = {}

    def get(name: str, rank: int) -> Report:
        if (name, rank) not in reports:
            reports[name, rank] = on_fake_gpu("fake_steps", "run", CASES[name], rank)
        return reports[name, rank]

    return get


@pytest.fixture(scope="module")
def faulty(on_fake_gpu: Callable[..., Any]) -> Callable[..., Report]:
    """Return faulty(fault, case, rank): the report of a case with a fault."""
    return lambda fault, name, rank=0: on_fake_gpu("fake_steps", "run", replace(CASES[name], fault=fault), rank)


def waits_of_passes(report: Report) -> Counter[tuple[str, str, str]]:
    """Return the waits of the passes over micro-batches, large and small ones."""
    return Counter({key: n for key, n in report.waits.items() if key[0].startswith(SCORES_AND_GRADIENTS)})


@pytest.mark.parametrize("name", CASES)
def test_a_step_completes(name: str, report: Callable[[str, int], Report]) -> None:
    for rank in CASES[name].ranks:
        assert report(name, rank).operators


@pytest.mark.parametrize("name", DENSE)
def test_no_dense_micro_batch_waits(name: str, report: Callable[[str, int], Report]) -> None:
    for rank in CASES[name].ranks:
        assert not waits_of_passes(report(name, rank))


@pytest.mark.parametrize("name", CASES)
def test_no_pass_copies_from_pageable_memory(name: str, report: Callable[[str, int], Report]) -> None:
    for rank in CASES[name].ranks:
        assert not [key for key in report(name, rank).pageable if key[0].startswith(SCORES_AND_GRADIENTS)]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.world > 1])
def test_collectives_match(name: str, report: Callable[[str, int], Report]) -> None:
    assert mismatches({rank: report(name, rank).collectives for rank in CASES[name].ranks}) == []


def test_a_cpu_index_is_found(faulty: Callable[..., Report]) -> None:
    with pytest.raises(RuntimeError, match=r"index\.Tensor at models/engine\.py.*tensors of the CPU and of the GPU"):
        faulty("cpu_index", "llama")


def test_a_read_in_a_micro_batch_is_found(faulty: Callable[..., Report]) -> None:
    assert any(what == "item" for _, what, _ in waits_of_passes(faulty("read_in_micro_batch", "llama")))


def test_a_pageable_copy_is_found(faulty: Callable[..., Report]) -> None:
    assert any(phase == "score" for phase, _ in faulty("pageable_copy", "llama").pageable)


def test_a_missing_collective_is_found(faulty: Callable[..., Report]) -> None:
    ranks = {rank: faulty("missing_collective", "gemma", rank).collectives for rank in (0, 1)}
    assert len(mismatches(ranks)) == 1
