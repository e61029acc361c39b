"""A process without vLLM, or with another version: everything but the engine works, and a run ends with one line. On a
GPU nothing needs vLLM's modules for CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
OF_VLLM = {f"rlhf_mc.rollout.vllm_{name}" for name in ("engine", "fp8", "parameters", "patches")}
IMPORT_ALL = f"""
import importlib, json, pkgutil, sys
sys.modules["vllm"] = None
import rlhf_mc
names = {{module.name for module in pkgutil.walk_packages(rlhf_mc.__path__, "rlhf_mc.")}} - {OF_VLLM!r}
for name in sorted(names):
    importlib.import_module(name)
print(json.dumps(sorted(names)))
"""
IMPORT_ENGINE = """
from rlhf_mc.config.errors import UserError
from rlhf_mc.setup.build import _import_vllm
try:
    _import_vllm()
except UserError as error:
    print(error)
"""
PATCH_ON_GPU = """
import sys
import torch
torch.cuda.is_available = lambda: True
OF_CPU = ["distributed.device_communicators.cpu_communicator", "model_executor.layers.fused_moe.experts.cpu_moe",
          "v1.worker.cpu_model_runner", "v1.worker.cpu_worker"]
sys.modules.update({f"vllm.{name}": None for name in OF_CPU})
from rlhf_mc.rollout import vllm_patches
vllm_patches.patch()
print(*(patch.name for patch in vllm_patches.EVERYWHERE))
try:
    vllm_patches.on_cpu()
except ImportError:
    print("on_cpu imports them")
"""


def output_of(program: str, *path: Path) -> str:
    """Return what a Python program prints. `path` comes first in its search path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, REPO]))}
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_all_other_modules_are_imported_without_vllm() -> None:
    imported = json.loads(output_of(IMPORT_ALL))
    assert {"rlhf_mc.trainer.loop", "rlhf_mc.models.engine", "rlhf_mc.rollout.base"} <= set(imported)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('__version__ = "0.31.0"', "vLLM 0.31.0 is installed; needed is 0.32.0, whose internals the trainer uses"),
        ("import libvllm", "vLLM 0.32.0 is needed, and its import fails: No module named 'libvllm'"),
    ],
    ids=["another version", "no import"],
)
def test_a_run_ends_with_one_line(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "vllm.py").write_text(source)
    assert output_of(IMPORT_ENGINE, tmp_path) == f"rollout: {message}\n"


def test_a_build_for_another_device_is_one_line() -> None:
    on_gpu = "import torch\ntorch.cuda.is_available = lambda: True\n"
    message = "this vLLM computes on cpu, and the trainer on cuda; install vLLM's build for cuda"
    assert output_of(on_gpu + IMPORT_ENGINE) == f"rollout: {message}\n"


def test_modules_for_cpus_are_not_imported_on_a_gpu() -> None:
    assert output_of(PATCH_ON_GPU) == "maybe_untie_word_embeddings\non_cpu imports them\n"
