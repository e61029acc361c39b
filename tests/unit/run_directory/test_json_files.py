"""JSON files of a run directory and of models that are no JSON, or no regular files: one line or a
fresh start, never a stack trace or an endless wait.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from rlhf_mc import json_files
from rlhf_mc.checkpoint import directory
from rlhf_mc.checkpoint.hf_format import read_config
from rlhf_mc.checkpoint.megatron_format import checkpoint_dtype
from rlhf_mc.config.errors import UserError, disk_errors
from rlhf_mc.data.batch import Prompt
from rlhf_mc.health.adjustments import Adjustments
from rlhf_mc.report.run_reader import live_owner
from rlhf_mc.rewards.results import Score
from rlhf_mc.run_directory import lock, ownership
from rlhf_mc.run_files import (
    HEALTH_FILE,
    LOCK_FILE,
    METRICS_FILE,
    RUN_FILE,
    json_objects_and_bad_lines,
    steps_logged,
)
from rlhf_mc.setup.build import stop_token_ids
from rlhf_mc.trainer.samples import write_samples

DEEP = "[" * 100_000


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def nested(path: Path) -> None:
    path.write_text(DEEP)


@pytest.fixture(params=[nested, os.mkfifo], ids=["nested", "fifo"])
def spoil(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """Return the function that makes a file that is no JSON file."""
    return request.param  # type: ignore[no-any-return]


def take(root: Path) -> None:
    lock.Lock(root).take()


def manifest(root: Path) -> None:
    directory.read_manifest(root)


def stop_tokens(root: Path) -> None:
    stop_token_ids(str(root), SimpleNamespace(eos_token_id=0), 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        (LOCK_FILE, take),
        (directory.MANIFEST, manifest),
        ("loop.json", lambda root: directory.read_json(root / "loop.json")),
        ("config.json", read_config),
        ("generation_config.json", stop_tokens),
        ("metadata.json", checkpoint_dtype),
        ("adjustments.jsonl", lambda root: Adjustments(root).load()),
    ],
)
def test_each_file_is_refused_by_one_line(
    tmp_path: Path,
    spoil: Callable[[Path], None],
    name: str,
    read: Callable[[Path], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory, "_AGAIN_SECONDS", 0.0)
    spoil(tmp_path / name)
    for other in (".metadata", "common.pt"):
        (tmp_path / other).touch()
    with pytest.raises(UserError) as error:
        read(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("name", [METRICS_FILE, HEALTH_FILE])
def test_a_nested_line_is_no_row(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(f'{{"step": 1}}\n{DEEP}\n{{"step": 2}}\n')
    assert steps_logged(path) == [1, 2]
    assert json_objects_and_bad_lines(path) == ([{"step": 1}, {"step": 2}], [2])


@pytest.mark.parametrize(
    ("own", "listed", "words"),
    [
        (2, [3, 8], "generation_config.json: eos_token_id is 8; the model's vocab_size is 8"),
        (2, -1, "generation_config.json: eos_token_id is -1; the model's"),
        (9, None, "^the tokenizer's eos_token is 9; the model's vocab_size is 8"),
        (2, True, "eos_token_id is True; expected a token's number"),
    ],
)
def test_end_tokens_are_in_the_vocabulary(
    tmp_path: Path, own: int, listed: Any, words: str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    with pytest.raises(UserError, match=words):
        stop_token_ids(str(tmp_path), SimpleNamespace(eos_token_id=own), 8)  # type: ignore[arg-type]


def test_the_report_takes_no_spoilt_lock(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    spoil(tmp_path / "run.lock")
    assert live_owner(tmp_path / "run.lock") is None


def test_corrupt_run_file_is_quarantined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / RUN_FILE).write_text(DEEP)
    assert ownership.finish_moving(tmp_path) is None and ownership.owner(tmp_path) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"rlhf_mc: warning: {tmp_path / RUN_FILE} is corrupt (brackets are nested too deep);"
        " it is quarantined as run.json.quarantined1"
    )
    os.mkfifo(tmp_path / RUN_FILE)
    with pytest.raises(UserError, match=r"^not a regular file \(.*run.json\)$"), disk_errors():
        ownership.owner(tmp_path)
    ownership.claim(tmp_path, "new", 0, None)
    assert ownership.owner(tmp_path) == "new"


@pytest.mark.parametrize("text", ["plain", "über \u2028", "\ud800", 'a "\udcff\\" b'])
def test_readable_text_is_utf8_of_the_same_value(text: str) -> None:
    line = json_files.readable_text({"gts": text})
    assert json.loads(line.encode()) == {"gts": text}
    assert "über" not in text or "über" in line


def test_a_lone_surrogate_is_written_with_the_samples(tmp_path: Path) -> None:
    tokenizer: Any = SimpleNamespace(
        batch_decode=lambda rows, skip_special_tokens: ["text"] * len(rows)
    )
    prompts = [
        Prompt(0, np.array([1], np.int32), "mine", "\ud800"),
        Prompt(1, np.array([1], np.int32), "mine", "good"),
    ]
    write_samples(tmp_path, 3, tokenizer, prompts, [[1], [2]], [Score(0.0), Score(1.0)])
    rows = [
        json.loads(line) for line in (tmp_path / "3.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["gts"] for row in rows] == ["\ud800", "good"]
