"""Parts of tools/gpu_check.py on fake CUDA devices: their code runs, and what they compare is not
judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gpu_parts.catalog import PARTS, TE

pytestmark = pytest.mark.slow

NOT_EXECUTED = {
    "timeouts": "it starts processes",
    "lost_ranks": "it starts processes",
    "layouts": "vLLM",
    **dict.fromkeys(
        ("models_float32", "models_bfloat16", "models_te", "models_te_float32"),
        "a move to a fake device separates the tied weights of transformers' model",
    ),
    "deterministic": "it is `resume`, whose bits no fake device compares",
    "synchronisations": "torch's profiler needs CUPTI",
    "profile": "the same, and the allocator's history",
    "quickstart": "vLLM",
    "sleep": "vLLM",
    "sleep_graphs": "vLLM",
    "aliased_weights": "vLLM",
    "sglang": "SGLang",
    "sglang_sleep": "SGLang",
    "experts": "vLLM",
    "step_speed": "vLLM",
}
"""Part -> the reason for which no fake device runs it."""


@pytest.mark.parametrize("name", [part.name for part in PARTS if part.name not in NOT_EXECUTED])
def test_part_runs(on_fake_gpu: Callable[..., Any], name: str) -> None:
    (part,) = [part for part in PARTS if part.name == name]
    on_fake_gpu("fake_parts", "run", name, transformer_engine=TE in part.needs)


def test_parts_that_do_not_run_are_of_the_catalog() -> None:
    assert NOT_EXECUTED.keys() <= {part.name for part in PARTS}
