"""A process without vLLM, or with another version: everything but the engine works, and a run ends
with one line. On a GPU nothing needs vLLM's modules for CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

pytestmark = pytest.mark.slow

OF_ENGINES = {
    f"rlhf_mc.rollout.vllm_{name}"
    for name in (
        "derived",
        "engine",
        "fp8",
        "options",
        "parameters",
        "patches",
        "scheduler",
        "tools",
    )
} | {f"rlhf_mc.rollout.sglang_{name}" for name in ("engine", "patches")}
WITHOUT_VLLM = f"""
import importlib, json, pkgutil, sys
sys.modules["vllm"] = None
import rlhf_mc
names = {{module.name for module in pkgutil.walk_packages(rlhf_mc.__path__, "rlhf_mc.")}} - {OF_ENGINES!r}
for name in sorted(names):
    importlib.import_module(name)
print(json.dumps(sorted(names)))

from rlhf_mc.config.errors import UserError
from rlhf_mc.rollout.engines import ENGINES
for folder in sys.argv[1:]:
    sys.path.insert(0, folder)
    sys.modules.pop("vllm", None)
    try:
        ENGINES["vllm"].check_installation()
    except UserError as error:
        print(error)
    sys.path.remove(folder)
"""  # noqa: E501
ON_GPU = """
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

from rlhf_mc.config.errors import UserError
from rlhf_mc.rollout.engines import ENGINES
try:
    ENGINES["vllm"].check_installation()
except UserError as error:
    print(error)
"""  # noqa: E501


def lines_of(program: str, *arguments: str) -> list[str]:
    """Return the lines that a Python program prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout.splitlines()


BUILDS = {
    '__version__ = "0.31.0"': (
        "vLLM 0.31.0 is installed; needed is 0.32.0, whose internals the trainer uses"
    ),
    "import libvllm": "vLLM 0.32.0 is needed, and its import fails: No module named 'libvllm'",
}
"""The source of a vLLM, and the error of a run with it."""


def test_all_other_modules_are_imported_without_vllm_and_a_run_ends_with_one_line(
    tmp_path: Path,
) -> None:
    for number, source in enumerate(BUILDS):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vllm.py").write_text(source)
    imported, *errors = lines_of(
        WITHOUT_VLLM, *(str(tmp_path / str(number)) for number in range(len(BUILDS)))
    )
    assert {"rlhf_mc.trainer.loop", "rlhf_mc.models.engine", "rlhf_mc.rollout.base"} <= set(
        json.loads(imported)
    )
    assert errors == [f"rollout: {message}" for message in BUILDS.values()]


def test_on_a_gpu_vllms_modules_for_cpus_are_not_imported_and_its_build_for_cpus_is_one_line() -> (
    None
):
    wrong_build = (
        "this vLLM computes on cpu, and the trainer on cuda; install vLLM's build for cuda"
    )
    patches = ["maybe_untie_word_embeddings", "on_cpu imports them"]
    assert lines_of(ON_GPU) == [*patches, f"rollout: {wrong_build}"]
