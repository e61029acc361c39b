"""LoRA (arXiv 2106.09685): adapters A [r, in] and B [out, r] of linear layers W [out, in], which
compute W x + (alpha / r) B A x and of which A and B alone are trained. Rows of the table of
parameters, under PEFT's names. No torch here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rlhf_mc.architectures.rows import HF, Param
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.model_schema import ALL_LINEAR, LoraConfig

A = ".lora_A"
B = ".lora_B"
RANK = "rank"
"""The dimension that A and B share. It is never split."""
_WITHOUT_ADAPTERS = {"experts", "one", "vocab"}
"""Dimensions of matrices that have no adapters: routers, gates, embeddings and heads."""


@dataclass(frozen=True)
class Lora:
    """The adapters of a model."""

    rank: int
    alpha: float
    modules: tuple[str, ...]
    """The linear layers that have adapters: Hugging Face names within a layer, experts as {e}."""

    @property
    def scale(self) -> float:
        """The factor of B A x."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class AdapterRows:
    """The rows of an adapter beside that of its weight, which may have several Hugging Face
    tensors (q, k and v), each with an A and a B."""

    weight: Param
    a: Param
    """The A of all tensors, one after another."""
    b: Param
    """The B of all tensors: row i is of the weight's row i. Rows of a tensor without an adapter are
    zero, and in no checkpoint."""


def adapter_rows(params: Iterable[Param], lora: Lora) -> list[AdapterRows]:
    """Return the rows of the adapters of these parameters."""
    return [rows for param in params if (rows := _adapter(param, lora)) is not None]


def adapter_name(weight: str, part: str) -> str:
    """Return the name of the A or the B (`part`) of a weight, in Hugging Face's names with
    ".weight", which an expert's number may follow in Megatron-Core's."""
    return weight.replace(".weight", part)


def adapter_names(weight: str) -> list[str]:
    """Return the Hugging Face names of the A and the B of a weight."""
    return [f"{adapter_name(weight, part)}.weight" for part in (A, B)]


def is_a(name: str) -> bool:
    """Return whether a Hugging Face name is of an A."""
    return name.endswith(f"{A}.weight")


def weight_name(adapter: str) -> str:
    """Return the Hugging Face name of the weight of an A or B."""
    return adapter.replace(f"{A}.weight", ".weight").replace(f"{B}.weight", ".weight")


def _adapter(param: Param, lora: Lora) -> AdapterRows | None:
    hf = {tensor: dims for tensor, dims in param.hf.items() if _module(tensor) in lora.modules}
    if not hf or not _can_have_adapter(param):
        return None

    def row(part: str, dims: Sequence[tuple[str, ...]], **more: object) -> Param:
        tensors = (f"{adapter_name(tensor, part)}.weight" for tensor in hf)
        return replace(
            param,
            hf=dict(zip(tensors, dims, strict=True)),
            mcore=adapter_name(param.mcore, part),
            mcore_te=param.mcore_te and adapter_name(param.mcore_te, part),
            engine=None,
            **more,  # type: ignore[arg-type]
        )

    b_rows = tuple(
        replace(rows, tensor=f"{adapter_name(rows.tensor, B)}.weight") for rows in param.rows
    )
    return AdapterRows(
        param,
        row(A, [(RANK, of) for _, of in hf.values()], rows=(), kv_heads=0),
        row(B, [(out, RANK) for out, _ in hf.values()], rows=b_rows),
    )


def _module(tensor: str) -> str:
    """Return the module of a tensor within its layer; "" of a bias."""
    name = tensor.removeprefix(HF)
    return name.removesuffix(".weight") if name.endswith(".weight") else ""


def _can_have_adapter(param: Param) -> bool:
    dims = [set(dims) for dims in param.hf.values()]
    return param.kind is not None and all(
        len(names) == 2 and not names & _WITHOUT_ADAPTERS for names in dims
    )


def choose_modules(key: str, settings: LoraConfig, params: Iterable[Param]) -> Lora:
    """Return the adapters that the settings `key` choose among these parameters. Raise UserError
    for a name that is of no linear layer, or if none is left."""
    linear = [_module(name) for row in params if _can_have_adapter(row) for name in row.hf]
    linear = list(dict.fromkeys(linear))

    def matching(setting: str, names: Sequence[str]) -> set[str]:
        matched: set[str] = set()
        for name in names:
            chosen = {m for m in linear if name in (m, ALL_LINEAR) or m.endswith(f".{name}")}
            if not chosen:
                known = list(dict.fromkeys(module.rpartition(".")[2] for module in linear))
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise UserError(
                    f"{key}.{setting}: {name!r} is no linear layer that can have an adapter; the "
                    f"nearest is {nearest!r}, and all are {', '.join(known)}"
                )
            matched |= chosen
        return matched

    chosen = matching("target_modules", settings.target_modules)
    chosen -= matching("exclude_modules", settings.exclude_modules)
    if not chosen:
        raise UserError(
            f"{key}.exclude_modules leaves none of target_modules; at least one linear layer must "
            "have an adapter"
        )
    modules = tuple(module for module in linear if module in chosen)
    return Lora(settings.rank, settings.alpha, modules)
