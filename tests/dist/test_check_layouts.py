"""tools/check_layouts.py as a command: the lines of a config, and one line for what is wrong."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import forked
import pytest
from tiny import make_checkpoint, write_config

pytestmark = pytest.mark.dist

TOOL = Path(__file__).parents[2] / "tools" / "check_layouts.py"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("layouts")
    make_checkpoint(directory / "model")
    (directory / "model" / "model.safetensors").unlink()  # config.json is enough
    write_config(directory)
    return directory


def check(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [str(TOOL), str(workspace / "config.yaml"), *arguments, "--gpus-per-node", "4"]
    )


def test_every_role_and_vllm_have_a_line(workspace: Path) -> None:
    sizes = [f"actor.megatron.{kind}_model_parallel_size=2" for kind in ("tensor", "pipeline")]
    model = ["model.path=nowhere", "--model", str(workspace / "model")]
    done = check(workspace, *sizes, *model, "rollout.tensor_model_parallel_size=2", "--nodes", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["actor", "critic", "ref", "rollout"]
    for line in lines[:3]:
        assert re.search(
            r": TP 2 x PP 2 x DP 2: \d+ parameters of 8 ranks agree with the layouts; .* tensors",
            line,
        )
    assert re.search(
        r": 4 engines of TP 2: \d+ parameters of 2 ranks agree with the layouts", lines[3]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "argument --nodes: '0' is no whole number from 1 to 10000"),
        (
            ["--nodes", "1", "actor.megatron.tensor_model_parallel_size=3"],
            "tensor_model_parallel_size 3",
        ),
        (["--nodes", "1", "model.path=nowhere"], "model.path: nowhere/config.json cannot be read"),
        (["--nodes", "1", "--model", "qwen"], "--model is 'qwen'"),
    ],
)
def test_mistake_is_one_line(workspace: Path, arguments: list[str], message: str) -> None:
    done = check(workspace, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert ": error: " in line and message in line


WRONG_NAME = f"""
import runpy
from dataclasses import replace
from rlhf_mc.reshard import layout
from rlhf_mc.rollout import vllm_layout
{{change}}
runpy.run_path({str(TOOL)!r}, run_name="__main__")
"""
WRONG_MEGATRON = """
rows = layout.model_params
layout.model_params = lambda shape: [
    replace(row, mcore=row.mcore.replace("fc2", "fc3")) for row in rows(shape)
]
"""
WRONG_VLLM = """
rows = vllm_layout.engine_params
vllm_layout.engine_params = lambda shape: [
    replace(row, engine=row.engine.replace("o_proj", "out_proj")) for row in rows(shape)
]
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            WRONG_MEGATRON,
            "actor, rank 0 (TP rank 0, CP rank 0, stage 0, DP rank 0, EP rank 0): the layout lacks"
            " decoder.layers.0.mlp.linear_fc2.weight",
        ),
        (
            WRONG_VLLM,
            "rank 0 of an engine: the rollout engine's model is not the trainer's: "
            "model.layers.0.self_attn.o_proj.weight is (",
        ),
    ],
)
def test_wrong_name_is_one_line(workspace: Path, tmp_path: Path, change: str, message: str) -> None:
    program = tmp_path / "wrong_name.py"
    program.write_text(WRONG_NAME.format(change=change))
    done = forked.run(
        [str(program), str(workspace / "config.yaml"), "--nodes", "1", "--gpus-per-node", "1"]
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert ": error: " in line and message in line
