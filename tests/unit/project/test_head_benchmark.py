"""benchmarks/gpu/head.py at a small size: reads and writes of the logits as the head's code has
them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "gpu"))

import head

SMALL = ["--columns", "600", "--tokens", "50", "--rounds", "1", "--copy-bytes", "1000000"]


@pytest.mark.parametrize("chunk", [50, 20], ids=["one chunk", "three, the last one smaller"])
def test_passes_over_the_logits(
    chunk: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Count in float32: the product's write, amax, sub_, exp_, sum; with entropy exp's copy, mul_
    and its sum too. Backward the product's write, sub_, exp_, and a read by each of two
    products."""
    monkeypatch.setattr(head.heads, "CHUNK_LOGITS", chunk * 600)
    figures = head.main(["--hidden", "8", "16", *SMALL])
    assert list(figures) == [8, 16]
    passes = {"forward passes": 7, "forward, entropy passes": 11, "backward passes": 7}
    for of_size in figures.values():
        assert {key: of_size["A"][key] for key in passes} == pytest.approx(passes)
        assert all(value > 0 for value in of_size["A"].values())
    out = capsys.readouterr().out
    assert ("B is left out" in out) == (head.head_kernels is None)
    assert (
        out.count("a read or write of the logits") == 2 and out.count("hidden gradient in 4") == 2
    )


def test_a_variant_takes_the_place_of_the_heads_row_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let B be A with another name, and with a wrong gradient: both are compared with A."""
    right = head.heads.row_gradient
    wrong = head.SimpleNamespace(
        row_statistics=head.heads.row_statistics,
        row_gradient=lambda *args: -right(*args),
        STATISTICS_PASSES=1.0,
        GRADIENT_PASSES=1.5,
    )
    monkeypatch.setattr(head, "head_kernels", wrong)
    figures = head.main(["--hidden", "8", *SMALL])[8]
    assert figures["B"]["log-probs error"] == figures["B"]["entropy error"] == 0
    assert figures["B"]["hidden gradient error"] > 0 and figures["B"]["weight gradient error"] > 0
    # Beside the kernel's own: the product's write, and backward a read by each of two products.
    assert figures["B"]["forward, entropy passes"] == pytest.approx(2.0)
    assert figures["B"]["backward passes"] == pytest.approx(4.5)
