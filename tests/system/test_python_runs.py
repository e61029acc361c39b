"""Runs from Python: leaving the loop. The examples are in test_examples.py."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest

pytestmark = pytest.mark.system


def test_leaving_the_loop_closes_the_run_and_the_program_resumes_it(quickstart_made: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""
from rlhf_mc.api import Trainer

def reward(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))

def first(number):
    trainer = Trainer(
        {{
            "data": {{"train_batch_size": 8, "max_prompt_length": 16, "max_response_length": 4}},
            "model": {{"path": "{quickstart_made}/model_hf"}},
            "actor": {{"ppo_mini_batch_size": 8, "megatron": {{"dtype": "float32"}}}},
            "trainer": {{"default_local_dir": "{tmp_path}/run", "save_freq": 1, "logger": []}},
        }},
        prompts=["1+1=", "2+2=", "3+3=", "4+4="] * 4,
        reward=reward,
    )
    for step in trainer:
        print("step", step.number, len(step.prompts), step.batch.num_sequences)
        if step.number == number:
            break
    assert trainer.run is None

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
