"""The profile of a step: the table, the settings, traces that cannot be written, and its cost."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from config_files import MINIMAL

from rlhf_mc import platform
from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config
from rlhf_mc.observability import phase_work
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.observability.phase_table import COLUMNS, REST, RankTimes, as_json, as_text, with_rest
from rlhf_mc.observability.profile import Trace
from rlhf_mc.rewards.manager import ScoreStream
from rlhf_mc.rewards.results import Score
from rlhf_mc.runtime.work import count


def rank(work: float, waiting: float = 0.0, **others: object) -> RankTimes:
    """Return the times of a rank with one phase, gen."""
    times = RankTimes(
        "n1", False, {"gen": work + waiting, "step": work + waiting}, {"gen": waiting}
    )
    return dataclasses.replace(times, **others)


def amounts(**counts: float) -> dict[str, dict[str, float]]:
    return {"gen": counts}


@pytest.mark.parametrize(
    ("ranks", "others"),
    [
        (
            [
                rank(1.0, 0.3, amounts=amounts(tokens=3900)),
                rank(1.3, amounts=amounts(tokens=5120), host="n2"),
            ],
            "the other waited for rank 1 (host n2): tokens 5120 against 3900",
        ),
        (
            [
                rank(1.0, 0.5),
                rank(1.5, amounts=amounts(responses=3, file_seconds=0.4)),
                rank(1.0, 0.5),
            ],
            (
                "the others waited for rank 1 (host n1): responses 3 against 0, file_seconds 0.40 "
                "against 0.00"
            ),
        ),
        ([rank(1.0, 0.5), rank(1.5)], "the other waited for rank 1 (host n1)"),
    ],
)
def test_table_has_the_work_of_the_slowest_rank(ranks: list[RankTimes], others: str) -> None:
    table = as_json(7, ranks)
    assert (table["step"], table["ranks"], table["hosts"]) == (
        7,
        len(ranks),
        [r.host for r in ranks],
    )
    gen = table["phases"]["gen"]
    assert gen["slowest"] == 1 and table["phases"]["step"]["slowest"] is None, (
        "the step consists of the others"
    )
    assert gen["seconds"] == [r.seconds["gen"] for r in ranks] and gen["waiting"] == [
        r.waiting["gen"] for r in ranks
    ]
    assert " ".join(line.strip() for line in as_text(7, ranks)).endswith(f"gen: {others}")


@pytest.mark.parametrize(
    "ranks", [[rank(1.0)], [rank(1.0, 0.09), rank(1.09)], [rank(0.005, 0.015), rank(0.02)]]
)
def test_balanced_ranks_have_no_slowest(ranks: list[RankTimes]) -> None:
    assert as_json(1, ranks)["phases"]["gen"]["slowest"] is None
    assert not [line for line in as_text(1, ranks) if "waited for" in line]


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 9, 4096])
def test_table_fits_80_columns(num_ranks: int) -> None:
    names = [
        "update_weights",
        "save_checkpoint",
        "reward_models.a_model_of_a_long_name",
        "between_phases",
        "step",
    ]
    ranks = [
        RankTimes(
            "host-of-a-long-name.cluster.example",
            r == 0,
            dict.fromkeys(names, 1234.5 + r),
            {name: float(num_ranks - r) for name in names},
        )
        for r in range(num_ranks)
    ]
    lines = as_text(123456, ranks)
    assert [line for line in lines if len(line) > COLUMNS] == []
    assert len(lines) >= 2 + len(names)
    if num_ranks > 8:
        assert any(f"(rank {num_ranks - 1})" in line and "(rank 0)" in line for line in lines)


def test_waiting_for_reward_functions_is_counted() -> None:
    """Count it in each phase that waits, such as a validation."""
    pending = SimpleNamespace(
        result=lambda: time.sleep(0.05) or [Score(0.5)],
        names=SimpleNamespace(limit=list),
        is_busy=False,
    )
    rewards = SimpleNamespace(
        submit=lambda *args: pending,
        parts=lambda *args: {},
        special_tokens={},
        needs_prompts=False,
        is_batched=False,
        scores_together=False,
    )
    tokenizer = SimpleNamespace(
        batch_decode=lambda rows, skip_special_tokens: [""] * len(rows), added_tokens_decoder={}
    )
    stream = ScoreStream(rewards, tokenizer, [SimpleNamespace()])  # type: ignore[arg-type,list-item]
    stream.submit({0: [2]})
    with phase_work.recorded() as work, phase_work.observed("testing"):
        assert stream.collect() == [Score(0.5)]
    assert 0.05 <= work.amounts["testing"]["reward_seconds"] < 5


def test_rest_is_the_time_of_no_phase() -> None:
    times = RankTimes(
        "n1",
        False,
        {"gen": 1.0, "adv": 0.5, "step": 1.75},
        {"gen": 0.25, "whole": 0.5, "step": 0.25},
        {"gen": {"tokens": 5.0}, "whole": {"tokens": 5.0, "file_seconds": 0.125}},
    )
    rest = with_rest(times, "whole", 2.0)
    assert rest.seconds[REST] == 0.5 and rest.waiting[REST] == 0.25
    assert rest.amounts[REST] == {"tokens": 0.0, "file_seconds": 0.125}


def test_amounts_and_phases_are_of_a_profile() -> None:
    timer = PhaseTimer()
    count(tokens=1)
    with timer.phase("gen"):
        count(tokens=2)
    with phase_work.recorded() as work, timer.phase("step"), timer.phase("gen"):
        count(tokens=3)
        count(tokens=4, responses=1)
    count(tokens=5)
    assert work.amounts["gen"] == work.amounts["step"] == {"tokens": 7, "responses": 1}
    assert dict(work.waiting) == {"gen": 0, "step": 0, phase_work.WHOLE: 0}


def test_a_phase_that_raises_leaves_the_next_ones_alone() -> None:
    timer = PhaseTimer()
    with phase_work.recorded() as work:
        with contextlib.suppress(MemoryError), timer.phase("first"):
            raise MemoryError
        with timer.phase("second"):
            count(tokens=1)
    assert work.amounts.keys() == {"second", phase_work.WHOLE}


def test_ranges_cost_nothing_without_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that torch's profiler is not called: a step has some 15 phases, a micro-batch 5
    ranges."""
    monkeypatch.setattr(platform, "record_function", None)
    with PhaseTimer().phase("gen"), platform.named_range("forward"):
        pass
    with pytest.raises(TypeError), platform.recorded_ranges(), platform.named_range("forward"):
        pass


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let this process write files of at most `size` bytes, as on a disk that fills up."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def trace() -> Trace:
    recorded = Trace(["memory", "shapes", "stack"])
    recorded.start()
    with platform.recorded_ranges(), platform.named_range("mine"):
        torch.ones(64, 64) @ torch.ones(64, 64)
    return recorded


def test_trace_that_does_not_fit_on_the_disk_is_an_error_and_leaves_no_file(
    trace: Trace, tmp_path: Path
) -> None:
    with largest_file(2000), pytest.raises(OSError, match="no room for the trace"):
        trace.write(tmp_path / "step_1" / "rank_0.json.gz")
    assert list((tmp_path / "step_1").iterdir()) == []


def test_trace_has_what_contents_ask_for(trace: Trace, tmp_path: Path) -> None:
    trace.write(tmp_path / "rank_0.json.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0.json.gz"]
    events = json.loads(gzip.decompress((tmp_path / "rank_0.json.gz").read_bytes()))["traceEvents"]
    named = {event["name"]: event for event in events if "name" in event}
    assert {"mine", "aten::mm", "[memory]"} <= named.keys()
    assert named["aten::mm"]["args"]["Input Dims"] == [[64, 64], [64, 64]]
    assert any("test_profile.py" in name for name in named), "a line of Python code"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": [0, 4]}, "profile.ranks has 4; a run of 4 processes has ranks 0 to 3"),
        (
            {"contents": ["memory"]},
            "profile.contents is [memory]; that needs profile.steps, which is empty",
        ),
        (
            {"steps": [3], "ranks": [], "contents": ["shapes"]},
            "profile.contents is [shapes]; that needs traces, and profile.ranks is empty",
        ),
    ],
)
def test_settings_that_do_nothing_are_refused(settings: dict[str, list[int]], message: str) -> None:
    with pytest.raises(UserError) as error:
        check_config(load_config({**yaml.safe_load(MINIMAL), "profile": settings}), 4)
    assert str(error.value) == message


def test_all_ranks_and_no_rank_can_be_traced() -> None:
    for ranks in ([], [3], None):
        check_config(
            load_config({**yaml.safe_load(MINIMAL), "profile": {"steps": [3], "ranks": ranks}}), 4
        )
