"""The report of runs: what it reads of finished, unfinished, corrupt and old directories, and what
it puts in the page. tests/system/test_report_page.py looks at the page in a browser.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import report_runs
from documents import ROOT

from rlhf_mc import run_files
from rlhf_mc.config.errors import UserError
from rlhf_mc.report import charts as report_charts
from rlhf_mc.report.charts import axis_limits, charts, curves, length_histograms, marks, phase_times
from rlhf_mc.report.page import read_runs, render_page, write_report
from rlhf_mc.report.run_reader import MAX_SAMPLE_STEPS, read_run
from rlhf_mc.run_directory import lock as run_lock
from rlhf_mc.run_files import STALE_SECONDS, read_rows

TOOL = ROOT / "tools" / "report.py"


def data_in(page: str) -> dict[str, Any]:
    """Return what the page's script draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_runs.write_run(tmp_path_factory.mktemp("runs") / "a", num_steps=40)


def lock(root: Path, seconds_ago: float = 0.0, **changes: object) -> None:
    """Write the lock of this process, with changes."""
    path = root / run_files.LOCK_FILE
    path.write_text(json.dumps({**vars(run_lock.Owner.this_process()), **changes}))
    then = path.stat().st_mtime - seconds_ago
    os.utime(path, (then, then))


# ---------------------------------------------------------------- reading


def test_whole_run_is_read(root: Path) -> None:
    run = read_run(root)
    assert (run.state, run.state_text) == ("finished", "finished after step 40: all steps are done")
    assert (run.run_id, run.last_step, len(run.rows), run.problems) == ("a", 40, 41, [])
    assert list(run.validation) == list(run.training) == [0, 8, 16, 24, 32, 40]
    sample = run.validation[8][1]
    assert sample.prompt == "<|user|>What is 4 + 4?\nAnswer briefly.<|assistant|>"
    answer = [("response", "At step 8: 8\n\nDone.")]
    assert (sample.turns, sample.ground_truth, sample.score) == (answer, "8", 0.0)
    assert run.training[8][0].turns == [
        ("response", "8 </script><b>"),
        ("observation", "right"),
        ("response", "end"),
    ]
    assert run.config["actor"]["optim"]["lr"] == 1e-6 and list(run.phases) == [3]


def test_states_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 7}\n')
    assert read_run(tmp_path).state == "died"
    lock(tmp_path)
    assert (read_run(tmp_path).state, read_run(tmp_path).state_text) == (
        "running",
        "running; the last logged step is 7",
    )
    lock(tmp_path, pid=2**22 + 1)
    assert read_run(tmp_path).state == "died"
    lock(tmp_path, host="elsewhere")
    assert read_run(tmp_path).state == "running"
    lock(tmp_path, host="elsewhere", seconds_ago=STALE_SECONDS + 9)
    assert read_run(tmp_path).state == "died"
    for how, state in (
        ("stopped", "stopped"),
        ("failed", "failed"),
        ("left", "stopped"),
        ("finished", "finished"),
    ):
        row = {"after_step": 0, "end": {"how": how, "step": 7, "text": "because"}}
        (tmp_path / "starts.jsonl").write_text(json.dumps(row) + "\n")
        assert (read_run(tmp_path).state, read_run(tmp_path).state_text) == (
            state,
            f"{state} after step 7: because",
        )
    (tmp_path / "starts.jsonl").unlink()
    (tmp_path / "success.json").write_text("{}")
    assert read_run(tmp_path).state == "finished", "a run of an earlier version"


def test_loading_start_is_running_and_a_roll_back_is_no_end(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')

    def state(how: str, process: int) -> str:
        row = {
            "after_step": 0,
            "process": process,
            "end": {"how": how, "step": 7, "text": "because"},
        }
        report_runs.write_lines(tmp_path / "starts.jsonl", [row])
        return read_run(tmp_path).state

    mine = os.getpid()
    assert state("rolled back", mine) == "died"
    lock(tmp_path)
    assert state("rolled back", mine) == "running", "it loads the earlier checkpoint"
    assert state("failed", mine + 1) == state("stopped", mine + 1) == "running", (
        "another start, which loads"
    )
    assert state("failed", mine) == "failed" and state("finished", mine) == "finished", (
        "it writes its last files"
    )


def test_line_separators_within_a_text_cut_no_line(tmp_path: Path) -> None:
    folder = tmp_path / "train_generations"
    folder.mkdir()
    (tmp_path / "run.json").write_text("{}")
    row = json.dumps(
        {"input": "a\u2028b", "output": "c\u0085d\x1ee", "gts": "", "score": 1}, ensure_ascii=False
    )
    (folder / "4.jsonl").write_text(f"{row}\n{row[:20]}\n{row}")
    run = read_run(tmp_path)
    assert [(sample.prompt, sample.turns[0][1]) for sample in run.training[4]] == [
        ("a\u2028b", "c\u0085d\x1ee")
    ] * 2
    assert (
        "train_generations/4.jsonl: 1 of 3 lines cannot be read and are left out: line 2"
        in run.problems
    )
    assert list(read_rows(folder / "4.jsonl")) == []
    whole = json.dumps({"step": 1, "text": "a\u2028b"}, ensure_ascii=False) + "\n"
    (tmp_path / "health.jsonl").write_text(whole + whole[:9])
    assert [line for line, _ in read_rows(tmp_path / "health.jsonl")] == [whole]


def test_cut_lines_and_unreadable_files_are_named_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "a": 1}\n{"step": 2, "a"\n{"step": 2, "a": 3}\n{"no": 1}\n\xff\n{"step": 1, '
        b'"a": 5}\n{"step": 3, '
    )
    (tmp_path / "histograms.jsonl").mkdir()
    (tmp_path / "profile" / "step_1").mkdir(parents=True)
    (tmp_path / "profile" / "step_1" / "phases.json").write_text("[1")
    run = read_run(tmp_path)
    assert [(row["step"], row["a"]) for row in run.rows] == [(1, 5), (2, 3)]
    assert (
        run.problems[0]
        == "metrics.jsonl: 4 of 7 lines cannot be read and are left out: line 2, 5, 7"
    )
    assert any(text.startswith("starts.jsonl has no start") for text in run.problems)
    assert any(
        text.startswith("profile/step_1/phases.json cannot be read") for text in run.problems
    )
    assert "4 of 7 lines" in render_page([run])


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ((), "is empty: no run has written there"),
        (
            ("a.txt", "b.txt"),
            (
                "is no directory of a run: it has none of metrics.jsonl, starts.jsonl and "
                "run.json, but a"
            ),
        ),
    ],
)
def test_directory_without_a_run_is_one_line(
    tmp_path: Path, files: tuple[str, ...], problem: str
) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=re.escape(f"{tmp_path} {problem}")):
        read_run(tmp_path)


def test_missing_directory_and_file_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"nowhere cannot be read as the directory of a run: No such file"
    ):
        read_run(tmp_path / "nowhere")
    with pytest.raises(
        UserError, match="cannot be read as the directory of a run: Not a directory"
    ):
        read_run(TOOL)


def test_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "x"}')
    page = render_page([read_run(tmp_path)])
    assert "metrics.jsonl has no rows yet" in page
    (drawn,) = data_in(page)["runs"]
    assert (
        drawn["curves"] == {"steps": [], "metrics": {}, "group": 1}
        and data_in(page)["charts"] == []
    )


# ---------------------------------------------------------------- what is drawn


def test_curves_hold_the_logged_numbers() -> None:
    rows = [
        {"step": 1, "run_id": "x", "a": 0.123456789, "b": None},
        {"step": 2, "a": 2.0, "b": 3, "c": float("inf")},
    ]
    assert curves(rows) == {
        "steps": [1, 2],
        "metrics": {"a": [0.12346, 2], "b": [None, 3]},
        "group": 1,
    }


def test_long_curves_keep_their_extremes() -> None:
    rows = [{"step": step, "a": 5.0} for step in range(3000)]
    rows[1232]["a"] = -100.0
    rows[1234]["a"] = 100.0
    found = curves(rows)
    assert (
        len(found["steps"]) == len(found["metrics"]["a"]) <= report_charts.MAX_POINTS
        and found["group"] == 6
    )
    at = found["metrics"]["a"].index(-100)
    assert found["metrics"]["a"][at + 1] == 100, "in the order in which they come"
    assert found["steps"][at] <= 1232 <= 1234 <= found["steps"][at + 1]


def test_charts_take_what_is_logged(root: Path) -> None:
    found = {
        chart["id"]: chart["keys"]
        for chart in charts(list(data_in(render_page([read_run(root)]))["metrics"]))
    }
    assert found["accuracy"] == [
        f"val-core/{source}/acc/mean@1" for source in sorted(report_runs.SOURCES)
    ]
    assert found["reward"][0] == "critic/score/mean" and len(found["reward"]) == 4
    assert found["mfu"] == ["perf/mfu/actor", "perf/mfu/critic"]
    assert charts(["critic/score/mean", "critic/score/x/mean", "y"]) == [
        {"id": "reward", "title": "Reward", "keys": ["critic/score/mean"]}
    ], "one source is the whole"


def test_phase_times_stack_up_to_the_step() -> None:
    row = {
        "timing_s/step": 10.0,
        "timing_s/gen": 6.0,
        "timing_s/adv": 1.0,
        "timing_s/reward_hidden": 5.0,
    }
    found = phase_times(
        [{"step": 1, **row}, {"step": 2, **row, "timing_s/testing": 4.0}, {"step": 3}]
    )
    assert found == {
        "steps": [[1, 1], [2, 2]],
        "phases": {"gen": [6, 6], "adv": [1, 1], "testing": [0, 4], "other": [3, 3]},
    }
    profiled = phase_times([{"step": 1, **row, "timing_s/write_profile": 9.0}])["phases"]
    assert profiled["other"] == [3] and profiled["write_profile"] == [9]
    grouped = phase_times([{"step": step, "timing_s/step": float(step)} for step in range(1, 601)])
    assert (
        len(grouped["steps"]) == 120
        and grouped["steps"][0] == [1, 5]
        and grouped["phases"]["other"][0] == 3
    )


def test_many_runs_share_the_room_of_a_page() -> None:
    rows = [{"step": step, **{f"m{i}": 0.1 for i in range(300)}} for step in range(2)]
    assert axis_limits([rows] * 2) == (report_charts.MAX_POINTS, report_charts.MAX_BARS)
    points, bars = axis_limits([rows] * 100)
    assert 100 * 300 * points <= report_charts.MAX_NUMBERS and bars == 30
    long = [{"step": step, "timing_s/step": 1.0 + step / 7} for step in range(400)]
    assert len(curves(long, points)["steps"]) <= points
    assert len(phase_times(long, bars)["steps"]) <= bars


def test_length_histograms_are_shares_of_merged_bins() -> None:
    histogram = {"edges": list(range(65)), "counts": [1] * 64}
    rows = [{"step": step, "response_length": histogram} for step in (1, 2)]
    other = {"step": 0, "response_length": {"edges": [0, 9], "counts": [1]}}
    found = length_histograms([other, *rows])
    assert found["steps"] == [[1, 1], [2, 2]] and found["edges"] == list(range(0, 65, 2))
    assert found["shares"] == [[0.03125] * 32] * 2
    assert length_histograms([]) == {"steps": [], "edges": [], "shares": []}


def test_marks_are_resumes_failures_and_adjustments(root: Path, tmp_path: Path) -> None:
    assert [(mark["step"], mark["kind"]) for mark in marks(read_run(root))] == [
        (180, "failure"),
        (400, "resume"),
    ]
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
    (tmp_path / "nonfinite_step_4.json").write_text("[]")
    change = {"setting": "kl_coef", "value": 0.1, "after_step": 6, "reason": "KL"}
    (tmp_path / "adjustments.jsonl").write_text(json.dumps(change) + "\n")
    found = [(mark["step"], mark["kind"]) for mark in marks(read_run(tmp_path))]
    assert found == [(4, "failure"), (6, "adjustment"), (9, "failure")]


# ---------------------------------------------------------------- the page


def test_page_needs_nothing_else_and_escapes_what_it_shows(root: Path) -> None:
    page = render_page([read_run(root)])
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:|//)", page)
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "<script>alert(1)</script>" not in page and "&lt;script&gt;alert(1)" in page
    assert (
        page.count("</script>") == 2
        and data_in(page)["runs"][0]["samples"]["training"]["8"][0]["score"] == 0.5
    )
    assert 20_000 < len(page) < 200_000


def test_two_runs_are_compared(root: Path, tmp_path: Path) -> None:
    other = report_runs.write_run(tmp_path / "a", num_steps=20, lr=3e-6, health=False)
    page = render_page([read_run(root), read_run(other)])
    assert re.search(
        r"<code>actor.optim.lr</code></th><td class=\"text\">1e-06</td><td "
        r"class=\"text\">3e-06</td>",
        page,
    )
    assert [run["name"] for run in data_in(page)["runs"]] == [str(root), str(other)], (
        "the same name in two places"
    )
    meaning = data_in(page)["metrics"]["actor/ppo_kl"]
    assert "old log-prob" in meaning["meaning"] and meaning["unit"] == "nats"


def test_phases_by_rank_say_who_was_waited_for(root: Path) -> None:
    page = render_page([read_run(root)])
    rows = re.findall(r'<th scope="row">(gen|update_actor)</th>(.*?)</tr>', page, re.DOTALL)
    found = {name: re.findall(r">([^<]*)</td>", row) for name, row in rows}
    assert found["gen"] == ["0", "4.100", "3.650", "0.900", "4.100", "3.200 + 0.900"]
    assert found["update_actor"] == ["alike", "2.500", "2.500", "0.001", "2.499", "2.500"]


def test_samples_are_of_some_steps(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 99}\n')
    for step in range(100):
        report_runs.write_samples(tmp_path, step)
    kept = data_in(render_page([read_run(tmp_path)]))["runs"][0]["samples"]["validation"]
    assert len(kept) == MAX_SAMPLE_STEPS and {"0", "99"} <= set(kept)
    assert list(read_run(tmp_path, 1).training) == [99]


def test_tokens_have_the_values_that_are_recorded(root: Path) -> None:
    data = data_in(render_page([read_run(root)]))
    assert [(value["name"], value["scale"]) for value in data["tokens"]] == [
        ("advantage", 2), ("value", 0.7), ("log_prob", 3), ("engine", 0.25), ("reference", 2),
        ("loss", 1)
    ]  # fmt: skip
    kept = data["runs"][0]["samples"]["training"]
    assert [step for step, samples in kept.items() if samples[0]["tokens"]] == ["0", "16", "40"]
    first, own = kept["16"]
    assert (
        first["tokens"]["text"][:4] == ["16", " </script>", "<b>", "\n"] and first["length"] == 900
    )
    values = first["tokens"]["values"]
    assert values["engine"] == [0, 0, -0.25, 0, None, 0, 0, 0] and values["reference"][5] == -2
    assert values["loss"] == [1, 1, -1, 1, None, 1, 1, 1] and values["advantage"][-1] is None
    assert own["tokens"]["values"] == {"advantage": [1, -1], "loss": [1, 1]}


def test_page_of_many_long_responses_is_small(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    folder = tmp_path / "train_generations"
    folder.mkdir()
    columns = {name: [-1.234567] * 3000 for name in report_runs.TOKENS} | {
        "text": ["x" * 99] * 3000
    }
    for step in range(1, 5):
        report_runs.write_lines(
            folder / f"{step}.jsonl", [{"input": "a", "tokens": columns, "length": 3000}] * 20
        )
    data = data_in(render_page([read_run(tmp_path)]))
    samples = [one for step in data["runs"][0]["samples"]["training"].values() for one in step]
    lengths = [len(one["tokens"]["text"]) for one in samples if one["tokens"]]
    assert lengths == [500] * 48 and len(json.dumps(data)) < 3_000_000
    data = data_in(render_page([read_run(tmp_path, 1)] * 100))
    assert (
        sum(
            len(one["tokens"]["text"])
            for run in data["runs"]
            for one in run["samples"]["training"]["4"]
        )
        == 8000
    )


# ---------------------------------------------------------------- the tool


@pytest.mark.slow
def test_tool(root: Path, tmp_path: Path) -> None:
    """Write the page, with a program that does not import torch; refuse an empty directory in
    one line."""
    code = (
        "import sys, runpy; sys.argv = sys.argv[1:]; sys.path.insert(0, "
        f"{str(TOOL.parents[1])!r})\n"
    )
    code += (
        f"try: runpy.run_path({str(TOOL)!r}, run_name='__main__')\nfinally: print('torch' in "
        "sys.modules)"
    )
    command = [sys.executable, "-c", code, "report.py"]
    output = tmp_path / "made" / "page.html"
    done = subprocess.run(
        [*command, str(root), "--output", str(output)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [str(output), "False"],
    )
    assert output.read_text().startswith("<!DOCTYPE html>")
    (tmp_path / "empty").mkdir()
    done = subprocess.run([*command, str(tmp_path / "empty")], capture_output=True, text=True)
    message = f"rlhf_mc: error: {tmp_path / 'empty'} is empty: no run has written there\n"
    assert (done.returncode, done.stderr) == (2, message)
    assert list((tmp_path / "empty").iterdir()) == []


def test_page_that_cannot_be_written_is_one_line(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write the report .*page\.html: "):
        write_report(read_runs([root]), tmp_path / "file" / "page.html")
    assert socket.gethostname() not in render_page([read_run(root)]), (
        "the hosts are those of the run"
    )
