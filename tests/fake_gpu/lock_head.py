"""The Triton row kernels of benchmarks/gpu/head_kernels.py without a GPU: interpreted on the CPU
against the row functions of rlhf_mc/models/heads.py, or compiled for three GPUs. Run by lock.py in
the environment of requirements/gpu.txt; interpreted with TRITON_INTERPRET=1.

python tests/fake_gpu/lock_head.py {interpreted,compiled}
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "dist"))

import head_cases
import head_kernels
import torch
import torch.distributed as dist
import triton

from rlhf_mc.models import heads

TERMS = (("log-prob",), ("log-prob", "entropy"), ("entropy",))
VOCABULARIES = (130, 4096, 20_001)
"""Less than a block, a whole block of the gradient, and several with a part of one."""
TOKENS = 9
HIDDEN = 16
TEMPERATURE = 0.7
FACTORS = {torch.float32: 1.2, torch.bfloat16: 2.2}
ROUNDING = 3e-7
"""Errors of the kernels may be this multiple of heads.py's, and this part of the norm: three
roundings
of float32. Triton's interpreter truncates to bfloat16, where machine code rounds: `compiled` reads
that."""


def main() -> None:
    check = {"interpreted": interpreted, "compiled": compiled}[sys.argv[1]]
    check()


def interpreted() -> None:
    """Compare the errors of both against float64. Products of bfloat16 are float32, as on a GPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for dtype in (torch.float32, torch.bfloat16):
        largest: dict[str, tuple[float, float]] = {}
        for vocabulary in VOCABULARIES:
            for terms in TERMS:
                for key, (kernels, own) in errors(vocabulary, dtype, terms).items():
                    text = f"{dtype}, {vocabulary} columns, {terms}: {key} is off by {kernels:.1e}"
                    assert kernels <= FACTORS[dtype] * own + ROUNDING, (
                        f"{text} of its norm, heads.py's by {own:.1e}"
                    )
                    largest[key] = max(largest.get(key, (0.0, 0.0)), (kernels, own))
        texts = ", ".join(
            f"{key} {kernels:.1e} ({own:.1e})" for key, (kernels, own) in largest.items()
        )
        print(
            f"row kernels of the head, {str(dtype).removeprefix('torch.')} | off by {texts}; "
            "heads.py's in brackets"
        )
    dist.destroy_process_group()


def errors(
    vocabulary: int, dtype: torch.dtype, terms: tuple[str, ...]
) -> dict[str, tuple[float, float]]:
    """Return the errors of results and gradients by the kernels and by heads.py, over the norm of
    the
    exact ones."""
    draw = torch.Generator().manual_seed(vocabulary)
    ends = torch.tensor([0, vocabulary - 1])
    inputs: dict[str, Any] = {
        "hidden": torch.randn(TOKENS, HIDDEN, generator=draw).to(dtype),
        "weight": torch.randn(vocabulary, HIDDEN, generator=draw).to(dtype),
        "targets": torch.cat([ends, torch.randint(vocabulary, (TOKENS - 2,), generator=draw)]),
        "upstream": torch.randn(2, TOKENS, generator=draw),
        "temperature": TEMPERATURE,
        "tied": True,
        "chunk_logits": 4 * (vocabulary + 64),
        "terms": terms,
        "wide": dtype is torch.bfloat16,
    }
    own = head_cases.chunked_log_probs(**inputs)
    with (
        mock.patch.object(heads, "row_statistics", head_kernels.row_statistics),
        mock.patch.object(heads, "row_gradient", head_kernels.row_gradient),
    ):
        found = head_cases.chunked_log_probs(**inputs)
    states, weight = (inputs[key].double().requires_grad_() for key in ("hidden", "weight"))
    all_log_probs = (states @ weight.t() / TEMPERATURE).log_softmax(-1)
    exact = {
        "log-prob": all_log_probs.gather(1, inputs["targets"][:, None])[:, 0],
        "entropy": -(all_log_probs.exp() * all_log_probs).sum(-1),
    }
    sum(
        (u * exact[key]).sum()
        for u, key in zip(inputs["upstream"], exact, strict=True)
        if key in terms
    ).backward()
    exact = {key: value.detach() for key, value in exact.items() if key in terms}
    exact |= {"hidden": states.grad, "weight": weight.grad[: len(own["weight"])]}

    def error(of: dict[str, torch.Tensor], key: str) -> float:
        rows = of[key][: len(exact[key])]  # without padding
        return float((rows.double() - exact[key]).norm() / exact[key].norm())

    return {key: (error(found, key), error(own, key)) for key in exact}


def compiled() -> None:
    """Compile the kernels for 151,936 columns, and read their loads and registers."""
    from lock_tf32 import Compiled, Driver

    triton.runtime.driver.set_active(Driver())
    x = torch.zeros(2, 151_936)
    column = torch.zeros(2, 1)
    targets = torch.zeros(2, dtype=torch.int64)
    of_rows = (targets, column, column, column, column)
    for Driver.capability in (80, 90, 100):
        for name in ("_statistics", "_gradient"):
            kernel = Compiled(getattr(head_kernels, name))
            with mock.patch.object(head_kernels, name, kernel):
                if name == "_statistics":
                    head_kernels.row_statistics(x, targets, torch.zeros(4, 2), True)
                else:
                    head_kernels.row_gradient(x, *of_rows, column, torch.bfloat16)
            assert "ld.global.v4" in kernel.ptx, (
                f"{name}, sm_{Driver.capability}: loads are not of 16 bytes"
            )
            rounds = name == "_statistics" or re.search(r"cvt\.rn\.bf16", kernel.ptx)
            assert rounds, f"{name}, sm_{Driver.capability}: bfloat16 is not rounded to nearest"
            used = usage(kernel.cubin)
            assert "STACK:0" in used, (
                f"{name}, sm_{Driver.capability}: registers are spilled ({used})"
            )
            registers = re.findall(r"REG:(\d+)", used)[0]
            print(
                f"{name}, sm_{Driver.capability} | loads of 16 bytes, {registers} registers, none "
                "spilled"
            )


def usage(cubin: bytes) -> str:
    """Return the registers and the stack of the machine code."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tools / "cuobjdump", "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
