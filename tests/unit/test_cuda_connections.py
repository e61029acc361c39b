"""CUDA_DEVICE_MAX_CONNECTIONS: set before torch is imported, where a model is tensor parallel."""

from __future__ import annotations

import logging
import os

import pytest

from rlhf_mc.runtime.cuda_connections import set_cuda_connections

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("tensor_parallel", "before", "after", "warned"),
    [
        (1, None, None, False),
        (1, "8", "8", False),
        (2, None, "1", False),
        (8, "1", "1", False),
        (2, "8", "8", True),
    ],
)
def test_value(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tensor_parallel: int,
    before: str | None,
    after: str | None,
    warned: bool,
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    with caplog.at_level(logging.WARNING):
        set_cuda_connections(tensor_parallel)
    assert os.environ.get(NAME) == after
    assert (f"{NAME} is {before}, which is used" in caplog.text) == warned
