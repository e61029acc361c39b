"""Variables of CUDA that are set before torch is imported, where a model needs them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_mc.runtime.cuda_environment import forbid_tf32, set_cuda_connections

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
TF32 = "NVIDIA_TF32_OVERRIDE"
TRITON = "TRITON_F32_DEFAULT"


@pytest.mark.parametrize(
    ("function", "argument", "name", "before", "after", "warned"),
    [
        (set_cuda_connections, 1, QUEUES, None, None, False),
        (set_cuda_connections, 1, QUEUES, "8", "8", False),
        (set_cuda_connections, 2, QUEUES, None, "1", False),
        (set_cuda_connections, 8, QUEUES, "1", "1", False),
        (set_cuda_connections, 2, QUEUES, "8", "8", True),
        (forbid_tf32, ["bfloat16"], TF32, None, None, False),
        (forbid_tf32, ["bfloat16"], TF32, "1", "1", False),
        (forbid_tf32, ["bfloat16", "float32"], TF32, None, "0", False),
        (forbid_tf32, ["float32"], TF32, "0", "0", False),
        (forbid_tf32, ["float32"], TF32, "1", "1", True),
        (forbid_tf32, ["bfloat16"], TRITON, None, None, False),
        (forbid_tf32, ["bfloat16", "float32"], TRITON, None, "ieee", False),
        (forbid_tf32, ["float32"], TRITON, "tf32x3", "tf32x3", True),
    ],
)
def test_value(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: Callable[[Any], None],
    argument: Any,
    name: str,
    before: str | None,
    after: str | None,
    warned: bool,
) -> None:
    for variable in (QUEUES, TF32, TRITON):
        monkeypatch.setenv(variable, "")  # restored at the end, also where it was not set
        monkeypatch.delenv(variable)
    if before is not None:
        monkeypatch.setenv(name, before)
    with caplog.at_level(logging.WARNING):
        function(argument)
    assert os.environ.get(name) == after
    assert (f"{name} is {before}, which is used" in caplog.text) == warned
