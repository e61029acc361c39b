"""Transformer Engine as a package that is absent, or installed and broken. Its layers themselves need a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rlhf_mc import platform
from rlhf_mc.config.errors import NodeError
from rlhf_mc.models.transformer_engine import import_transformer_engine, uses_transformer_engine

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a package of the name whose import runs the given code."""

    def install(code: str) -> None:
        package = tmp_path / "transformer_engine" / "pytorch"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").write_text(code)
        (package / "__init__.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
            monkeypatch.delitem(sys.modules, name)

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with GPUs may have it")
def test_a_machine_without_it_uses_local_layers() -> None:
    assert not import_transformer_engine()
    assert not uses_transformer_engine()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise OSError('libcudnn.so.9: cannot open shared object file')", r"OSError: libcudnn.so.9: cannot open"),
        ("raise FileNotFoundError('Could not find shared object file')", "FileNotFoundError: Could not find"),
        ("raise RuntimeError('Found empty `transformer-engine` meta package')", "RuntimeError: Found empty"),
        ("assert False, 'package version mismatch.\\nFound 2.10'", r"AssertionError: package version mismatch\.\)"),
    ],
)
def test_a_broken_one_is_one_line(install: Install, code: str, reason: str) -> None:
    install(code)
    with pytest.raises(NodeError, match=reason) as caught:
        import_transformer_engine()
    message = str(caught.value)
    assert "\n" not in message
    assert f"build it for torch {torch.__version__}" in message and "pip uninstall transformer_engine" in message


def test_an_import_error_matters_only_on_a_gpu(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("raise ImportError('undefined symbol: _ZN3c10')")
    assert not import_transformer_engine()
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    with pytest.raises(NodeError, match="ImportError: undefined symbol"):
        import_transformer_engine()
