"""Console lines of the program."""

import io
import sys

import pytest

from rlhf_mc.runtime.console import print_line


def test_line_has_a_prefix_and_goes_to_stderr_by_default(capsys):
    print_line("one")
    print_line("two", sys.stdout)
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == ("rlhf_mc: one\n", "rlhf_mc: two\n")


@pytest.mark.parametrize("rank, printed", [("0", "rlhf_mc: one\n"), ("1", "")])
def test_rank_0_only(rank, printed, capsys, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    print_line("one", rank_0_only=True)
    assert capsys.readouterr().err == printed


class FullStream(io.StringIO):
    """Stream to a full disk."""

    def flush(self):
        raise OSError(28, "No space left on device")


def test_full_or_closed_stream_raises_nothing():
    closed = io.StringIO()
    closed.close()
    print_line("one", closed)
    print_line("one", FullStream())
