"""Lines for the person who runs the program."""

import io
import sys

import pytest

from rlhf_mc.runtime.console import say


def test_a_line_has_the_program_before_it_and_goes_to_standard_error_or_the_given_stream(capsys):
    say("one")
    say("two", sys.stdout)
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == ("rlhf_mc: one\n", "rlhf_mc: two\n")


@pytest.mark.parametrize("rank, printed", [("0", "rlhf_mc: one\n"), ("1", "")])
def test_only_rank_0_prints_where_asked(rank, printed, capsys, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    say("one", rank_0_only=True)
    assert capsys.readouterr().err == printed


class FullStream(io.StringIO):
    """As a file on a full disk."""

    def flush(self):
        raise OSError(28, "No space left on device")


def test_a_full_or_closed_stream_is_no_error():
    closed = io.StringIO()
    closed.close()
    say("one", closed)
    say("one", FullStream())
