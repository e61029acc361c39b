"""The console while a phase lasts: in a file and on a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import sys
import termios
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import wait_until

from rlhf_mc.observability.phase_progress import PhaseProgress, phase_line, phase_progress
from rlhf_mc.runtime import console, work
from rlhf_mc.runtime.console import print_line, write
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.runtime.work import Work, counted, share_done, working


def status_of(phases: list[str], entered: list[float], **fields: object) -> RankStatus:
    return RankStatus(phases=phases, entered=entered, **fields)  # type: ignore[arg-type]


def generating(
    seconds: float, done: float = 115, tokens: int = 62000, last: float | None = None
) -> str:
    """Return the line of a generation that has run for so long."""
    status = status_of(
        ["start", "fit", "step", "gen"], [0.0, 50.0, 90.0, 100.0], step=12, total_steps=300
    )
    if last is not None:
        status.last_seconds["gen"] = last
    responses = Work("", 256, "responses", done, tokens, start=100.0)
    return phase_line(status, [responses], 100.0 + seconds, 3.0, 80)


def test_generation_has_rate_and_time_left() -> None:
    assert generating(20) == "step 12/300 gen 44% 115/256 responses, 3.10k tok/s, 0:20, 0:25 left"


def test_time_left_of_a_generation_is_that_of_the_last_one_until_it_is_over() -> None:
    assert generating(20, done=0, last=32).endswith(
        "0% 0/256 responses, 3.10k tok/s, 0:20, 0:12 left"
    )
    assert generating(20, done=128, last=10).endswith("0:20, 0:20 left")
    assert generating(20, done=0).endswith("3.10k tok/s, 0:20")


def test_uncounted_phase_shows_its_time() -> None:
    status = status_of(["start", "import"], [0.0, 1.0])
    assert phase_line(status, [], 32.0, 3.0, 80) == "start import 0:31"
    status.last_seconds["import"] = 40.0
    assert phase_line(status, [], 32.0, 3.0, 80) == "start import 0:31, 0:09 left"


def test_piece_inside_another_is_a_unit_of_it() -> None:
    minis = Work("", 8, "mini-batches", 3)
    assert share_done([minis, Work("", 16, "micro-batches", 4)]) == 3.25 / 8
    assert share_done([Work("starting vLLM", 0, "")]) is None
    status = status_of(["start", "update_actor"], [0.0, 0.0], step=1, total_steps=2)
    minis.start = 0.0
    line = phase_line(status, [minis, Work("", 16, "micro-batches", 4, start=9.0)], 13.0, 3.0, 80)
    assert line == "step 1/2 update_actor 40% 3/8 mini-batches, 4.3 s each, 0:13, 0:19 left"


def test_name_of_the_work_and_no_work_of_an_outer_phase() -> None:
    status = status_of(["start", "setup"], [0.0, 5.0])
    rows = Work("tokenising a.parquet", 1000, "rows", 250, start=6.0)
    assert phase_line(status, [rows], 11.0, 3.0, 80) == (
        "start setup: tokenising a.parquet 25% 250/1000 rows, 50.0/s, 0:05, 0:15 left"
    )
    status.enter("offload")
    status.entered[-1] = 6.5
    assert phase_line(status, [rows], 11.0, 3.0, 80) == "start offload 0:04"


def test_short_phase_leaves_the_line_to_the_one_around_it() -> None:
    status = status_of(
        ["start", "fit", "step", "ref"], [0.0, 1.0, 10.0, 18.0], step=2, total_steps=3
    )
    assert (
        phase_line(status, [Work("", 4, "micro-batches", 2, start=18.0)], 20.0, 3.0, 80)
        == "step 2/3 0:10"
    )
    assert phase_line(status_of(["start"], [0.0]), [], 2.0, 3.0, 80) == ""


@given(
    columns=st.integers(20, 200),
    name=st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=120),
    total=st.integers(0, 10**9),
    part=st.floats(0, 1),
    seconds=st.floats(3, 1e7),
    last=st.none() | st.floats(0, 1e7),
    tokens=st.integers(0, 10**12),
)
def test_line_fits_and_keeps_phase_and_last_measure(
    columns: int,
    name: str,
    total: int,
    part: float,
    seconds: float,
    last: float | None,
    tokens: int,
) -> None:
    status = status_of(["start", "gen"], [0.0, 0.0], step=12345, total_steps=20000)
    status.last_seconds = {} if last is None else {"gen": last}
    piece = Work(name, total, "responses", part * total, tokens, start=0.0)
    line = phase_line(status, [piece], seconds, 3.0, columns)
    assert len(line) <= columns
    if columns >= 50:
        assert line.startswith("step 12345/20000 gen")
        assert ":" in line


def test_counted_is_current_work_until_it_is_left() -> None:
    seen = []
    with working("reading"):
        for _ in counted("ab", 2, "files"):
            seen.append([(piece.name, piece.done) for piece in work.current()])
        rest = counted("ab", 2, "files")
        next(rest)
        rest.close()
    assert seen == [[("reading", 0), ("", 0)], [("reading", 0), ("", 1)]]
    assert work.current() == ()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_file_gets_a_line_after_ten_silent_seconds_and_no_carriage_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(console.time, "monotonic", clock)
    monkeypatch.setattr(console, "_last_line", 0.0)
    stream = io.StringIO()
    status = status_of(["start", "setup"], [0.0, 0.0])
    progress = PhaseProgress(status, stream, clock)
    for second in range(1, 31):
        clock.now = float(second)
        if second == 15:
            write("another line", stream)
        progress.tick()
    assert stream.getvalue() == "  start setup 0:10\nanother line\n  start setup 0:25\n"
    status.entered[-1] = 34.0  # another phase, which is short
    clock.now = 36.0
    status.phases[:] = ["start", "offload"]
    status.entered[0] = 34.0
    progress.tick()
    assert stream.getvalue().count("\n") == 3


class FullStream(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_full_disk_ends_neither_the_thread_nor_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_mc.observability.phase_progress.TICK_SECONDS", 0.01)
    monkeypatch.setattr(console, "_last_line", -100.0)
    progress = PhaseProgress(status_of(["start", "gen"], [-100.0, -100.0]), FullStream())
    progress.start()
    time.sleep(0.1)
    assert progress._thread.is_alive()
    progress.close()
    assert not progress._thread.is_alive()


def terminal_output(monkeypatch: pytest.MonkeyPatch, columns: int, body) -> str:
    """Return what the body writes to standard output and error, which are a terminal of that
    width."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    monkeypatch.setenv("COLUMNS", str(columns))
    with os.fdopen(terminal, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        body(stream)
        output = b""
        while not output.endswith(b"END\r\n"):
            output += os.read(controller, 65536)
    os.close(controller)
    return output.decode()


def screen(output: str) -> list[str]:
    """Return the lines that the output leaves on a terminal which is wide enough."""
    lines = []
    for text in output.split("\n"):
        shown: list[str] = []
        for part in text.removesuffix("\r").split("\r"):
            before, clear, after = part.partition("\x1b[K")
            shown[: len(before)] = before
            if clear:
                shown[len(before) :] = after
        lines.append("".join(shown).rstrip())
    return lines


def test_terminal_has_one_line_that_is_rewritten_and_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = status_of(["start", "fit", "gen"], [0.0, 0.0, 0.0], step=1, total_steps=20)
    clock = Clock()

    def body(stream) -> None:
        progress = PhaseProgress(status, stream, clock)
        for clock.now in (5.0, 6.0, 7.0):
            progress.tick()
            if clock.now == 6.0:
                print_line("warning: a line")
        progress.close()
        print_line("END")

    output = terminal_output(monkeypatch, 40, body)
    assert output.count("\n") == 2
    assert "step 1/20 gen 0:05" in output and "step 1/20 gen 0:07" in output
    assert screen(output) == ["rlhf_mc: warning: a line", "rlhf_mc: END", ""]


def test_other_output_overwrites_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    status = status_of(["start", "fit", "gen"], [0.0, 0.0, 0.0], step=3, total_steps=10)
    clock = Clock()

    def body(stream) -> None:
        progress = PhaseProgress(status, stream, clock)
        for clock.now in (2.0, 3.0):
            progress.tick()
            stream.write(f"a line of a reward function, {clock.now:.0f}\n")
        progress.tick()
        progress.close()
        print_line("END")

    lines = screen(terminal_output(monkeypatch, 80, body))
    assert lines == [
        "a line of a reward function, 2",
        "a line of a reward function, 3",
        "rlhf_mc: END",
        "",
    ]


def test_terminal_of_no_columns_is_treated_as_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    status = status_of(["start", "setup"], [0.0, 0.0])
    monkeypatch.setattr(console, "_last_line", 0.0)

    def body(stream) -> None:
        progress = PhaseProgress(status, stream, lambda: 12.0)
        progress.tick()
        progress.close()
        print_line("END")

    monkeypatch.setattr(console.time, "monotonic", lambda: 12.0)
    assert terminal_output(monkeypatch, 0, body) == "  start setup 0:12\r\nrlhf_mc: END\r\n"


def test_thread_shows_a_phase_that_is_stuck_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_mc.observability.phase_progress.TICK_SECONDS", 0.05)
    status = RankStatus()
    shown: list[None] = []
    tick = PhaseProgress.tick
    monkeypatch.setattr(PhaseProgress, "tick", lambda self: shown.append(tick(self)))

    def body(stream) -> None:
        with phase_progress(status):
            status.enter("import")
            num_shown = len(shown)
            assert wait_until(lambda: len(shown) > num_shown + 1)
        print_line("END")

    output = terminal_output(monkeypatch, 80, body)
    assert "start import 0:" in output
    assert screen(output) == ["rlhf_mc: END", ""]


def test_unwanted_progress_is_silent(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = console.last_line()
    with phase_progress(RankStatus(entered=[-100.0]), wanted=False):
        time.sleep(0.01)
    assert capsys.readouterr().out == "" and console.last_line() == before
