"""The record of vLLM's sources (tests/fake_gpu/lock_sources.py) is of the installed build."""

from __future__ import annotations

from pathlib import Path

import lock_sources
import pytest


def test_the_installed_build_is_the_recorded_one() -> None:
    assert lock_sources.differences(lock_sources.installed()) == []


def test_every_name_that_the_engine_uses_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lock_sources.missing() == []
    monkeypatch.setattr(
        lock_sources, "used", lambda: {"vllm.v1.outputs:SamplerOutput", "vllm.v1.outputs:Another"}
    )
    assert lock_sources.missing() == ["vllm.v1.outputs:Another"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def changed(a, b):\n    # another comment\n\n    return a + b\n", None),
        (
            "def changed(a, b):\n    return a - b\n",
            "vllm.module:changed has another source than the recorded one",
        ),
        (
            "def changed(a, *, b):\n    return a + b\n",
            "vllm.module:changed takes (a, *, b), recorded is (a, b)",
        ),
    ],
)
def test_a_change_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: str | None
) -> None:
    monkeypatch.setattr(lock_sources, "targets", lambda: [("vllm.module", "changed")])
    monkeypatch.setattr(lock_sources, "RECORD", tmp_path / "record.json")
    module = tmp_path / "module.py"
    module.write_text("def changed(a, b):\n    # a comment\n    return a + b\n")
    lock_sources.record(tmp_path)
    module.write_text(text)
    assert lock_sources.differences(tmp_path) == ([] if line is None else [line])
    module.write_text("")
    with pytest.raises(LookupError, match=r"vllm\.module has no changed"):
        lock_sources.differences(tmp_path)
