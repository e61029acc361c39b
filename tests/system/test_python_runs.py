"""Runs from Python: leaving the loop. The examples are in test_examples.py."""

from __future__ import annotations

import time
from pathlib import Path

import forked
import pytest

pytestmark = pytest.mark.system

PROGRAM = """
import os
from rlhf_mc.api import Trainer

def reward(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))

def trainer():
    return Trainer(
        {{
            "data": {{"train_batch_size": 8, "max_prompt_length": 16, "max_response_length": 4}},
            "model": {{"path": "{model}"}},
            "actor": {{"ppo_mini_batch_size": 8, "megatron": {{"dtype": "float32"}}}},
            "trainer": {{"default_local_dir": "{run}", "save_freq": 1, "logger": []}},
        }},
        prompts=["1+1=", "2+2=", "3+3=", "4+4="] * 4,
        reward=reward,
    )
"""


def test_leaving_the_loop_closes_the_run_and_the_program_resumes_it(
    quickstart_made: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        PROGRAM.format(model=quickstart_made / "model_hf", run=tmp_path / "run")
        + """
def first(number):
    ppo = trainer()
    for step in ppo:
        print("step", step.number, len(step.prompts), step.batch.num_sequences)
        if step.number == number:
            break
    assert ppo.run is None

if __name__ == "__main__":
    first(1)
    first(3)
"""
    )
    done = forked.run([str(program)])
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("step ")] == [
        "step 1 8 8",
        "step 2 8 8",
        "step 3 8 8",
    ]
    assert not (tmp_path / "run" / "hf").exists()


def test_an_exception_on_one_rank_ends_the_run(quickstart_made: Path, tmp_path: Path) -> None:
    """Rank 0 raises in the body of the loop, and would wait for rank 1, which waits in the next
    step."""
    program = tmp_path / "program.py"
    program.write_text(
        PROGRAM.format(model=quickstart_made / "model_hf", run=tmp_path / "run")
        + """
if __name__ == "__main__":
    for step in trainer():
        if os.environ["RANK"] == "0":
            raise KeyError("a mistake of the program")
"""
    )
    started = time.monotonic()
    done = forked.run_ranks(2, [str(program)])
    assert done.returncode != 0 and time.monotonic() - started < 60
    assert "this rank has left the loop after step 1, and another continues" in done.stderr
    assert "KeyError: 'a mistake of the program'" in done.stderr
