"""The GPU branches of training, scoring, offload, checkpoint and weight update, executed on fake
CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from documents import ROOT
from fake_cases import CASES, TE_CASES, Report
from fake_checks import (
    KNOWN_WAITS,
    NOT_SHOWN,
    PAGEABLE_COPIES,
    WITHOUT_ENTRY,
    mismatches,
    without_kernel,
)

pytestmark = pytest.mark.slow

Run = Callable[[str, int], Report]
ALL = {**CASES, **TE_CASES}
RUNS = [(name, rank) for name, case in ALL.items() for rank in case.ranks]
DENSE = [
    (name, rank)
    for name, rank in RUNS
    if "num_experts_per_tok" not in ALL[name].config and not ALL[name].on_host
]
PASSES = ("score", "gradient")


@pytest.fixture(scope="module")
def report(on_fake_gpu: Callable[..., Any]) -> Run:
    """Return report(case, rank), which runs each once."""
    reports: dict[tuple[str, int], Report] = {}

    def get(name: str, rank: int) -> Report:
        if (name, rank) not in reports:
            case = ALL[name]
            reports[name, rank] = on_fake_gpu(
                "fake_steps", "run", case, rank, transformer_engine=case.transformer_engine
            )
        return reports[name, rank]

    return get


@pytest.fixture(scope="module")
def cuda_types(on_fake_gpu: Callable[..., Any]) -> dict[str, frozenset[str]]:
    return on_fake_gpu("fake_checks", "cuda_types")


@pytest.mark.parametrize(("name", "rank"), RUNS)
def test_a_step_completes(report: Run, name: str, rank: int) -> None:
    assert report(name, rank).operators


@pytest.mark.parametrize(("name", "rank"), DENSE)
def test_no_dense_micro_batch_waits(report: Run, name: str, rank: int) -> None:
    assert waits_of_passes(report(name, rank)) == []


@pytest.mark.parametrize(("name", "rank"), [run for run in RUNS if ALL[run[0]].cp > 1])
def test_no_layer_compares_offsets_of_sequences(report: Run, name: str, rank: int) -> None:
    """Under context parallelism Transformer Engine would compare them in each layer, and wait for
    the device where they are two tensors."""
    assert not [
        types
        for operator, types in report(name, rank).operators
        if operator == "aten.equal.default"
    ]


def test_a_layer_of_experts_waits_for_its_numbers_of_tokens(report: Run) -> None:
    for name, selections in {"experts": 2, "experts, Transformer Engine": 0}.items():
        passes = {"score": 1, "gradient": ALL[name].steps}  # over two micro-batches each
        for what, times in {"Event.synchronize": 1, "masked_select": selections}.items():
            for phase, count in passes.items():
                wait = (phase, what, "models/gpt_model.py:PackedGPT.forward")
                assert report(name, 0).waits[wait] == times * count * 2 * ALL[name].layers


@pytest.mark.parametrize("name", TE_CASES)
def test_an_optimizer_step_of_transformer_engine_waits_once(report: Run, name: str) -> None:
    for rank in TE_CASES[name].ranks:
        waits = {
            key[1:]: times
            for key, times in report(name, rank).waits.items()
            if key[0] == "optimizer_step"
        }
        norm = ("item", "models/strategies/distributed_optimizer.py:MegatronStrategy.grad_norm")
        assert waits == {norm: TE_CASES[name].steps}


def test_all_waits_and_copies_from_pageable_memory_are_known(report: Run) -> None:
    """Compare the places with the lists of fake_checks.py, both ways: a place that waits no more is
    to be removed."""
    reports = [report(*run) for run in RUNS]
    assert {key for one in reports for key in one.waits} == KNOWN_WAITS.keys()
    assert {key for one in reports for key in one.pageable} == PAGEABLE_COPIES.keys()
    once = [key for key, (times, _) in KNOWN_WAITS.items() if times]
    assert {one.waits[key] for one in reports for key in once} <= {0, 1}


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if len(case.ranks) > 1])
def test_collectives_match(report: Run, name: str) -> None:
    assert mismatches({rank: report(name, rank).collectives for rank in ALL[name].ranks}) == []


def test_cuda_has_a_kernel_for_every_operator(
    report: Run, cuda_types: dict[str, frozenset[str]]
) -> None:
    operators = frozenset().union(*(report(*run).operators for run in RUNS))
    assert without_kernel(operators, cuda_types) == ([], set())
    assert not WITHOUT_ENTRY.keys() & cuda_types.keys()


def test_the_page_says_what_is_not_shown() -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    section = page.partition("## Executed on fake CUDA devices\n")[2].partition("\n## ")[0]
    assert [
        line.removeprefix("- ") for line in section.splitlines() if line.startswith("- ")
    ] == list(NOT_SHOWN)


# ---------------------------------------------------------------- planted faults


@pytest.fixture(scope="module")
def faulty(on_fake_gpu: Callable[..., Any]) -> Callable[..., Report]:
    """Return faulty(case, rank, *faults): the report of a case with faults."""
    return lambda name, rank, *faults: on_fake_gpu(
        "fake_steps", "run", replace(CASES[name], faults=faults), rank
    )


def test_a_cpu_index_is_found(faulty: Callable[..., Report]) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"index_select.*at models/pipeline\.py.*tensors of the CPU and of",
    ):
        faulty("llama", 0, "cpu_index")


def test_a_dot_a_read_and_a_copy_are_found(
    faulty: Callable[..., Report], cuda_types: dict[str, frozenset[str]]
) -> None:
    """Check that operators, waits and copies each have the fault of their own."""
    found = faulty("llama", 0, "integer_dot", "read_in_micro_batch", "pageable_copy")
    unsupported, _ = without_kernel(found.operators, cuda_types)
    assert unsupported == ["aten.dot.default of ('int64', 'int64')"]
    assert {what for _, what, _ in waits_of_passes(found)} == {"item"}
    copies = found.pageable.keys() - PAGEABLE_COPIES.keys()
    assert {phase for phase, _ in copies} == set(PASSES)


def test_an_additional_collective_is_found(report: Run, faulty: Callable[..., Report]) -> None:
    other = faulty("gemma", 1, "additional_collective")
    ranks = {0: report("gemma", 0).collectives, 1: other.collectives}
    assert len(mismatches(ranks)) == 1


def waits_of_passes(report: Report) -> list[tuple[str, str, str]]:
    """Return the waits of the passes over micro-batches."""
    return [key for key in report.waits if key[0] in PASSES]
