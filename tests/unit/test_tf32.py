"""NVIDIA_TF32_OVERRIDE: set before torch is imported, where a model is float32."""

from __future__ import annotations

import logging
import os

import pytest

from rlhf_mc.runtime.tf32 import forbid_tf32

NAME = "NVIDIA_TF32_OVERRIDE"


@pytest.mark.parametrize(
    ("dtypes", "before", "after", "warned"),
    [
        (["bfloat16"], None, None, False),
        (["bfloat16"], "1", "1", False),
        (["bfloat16", "float32"], None, "0", False),
        (["float32"], "0", "0", False),
        (["float32"], "1", "1", True),
    ],
)
def test_value(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtypes: list[str],
    before: str | None,
    after: str | None,
    warned: bool,
) -> None:
    monkeypatch.setenv(NAME, before or "")
    if before is None:
        monkeypatch.delenv(NAME)
    with caplog.at_level(logging.WARNING):
        forbid_tf32(dtypes)
    assert os.environ.get(NAME) == after
    assert (f"{NAME} is {before}, which is used" in caplog.text) == warned
