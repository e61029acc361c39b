"""Rows of the table of parameters, of which each block of a layer has some. parameters.py has those
of a whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

SPLIT_DIMS = frozenset(
    {
        *(
            "q",
            "gated_q",
            "kv",
            "heads",
            "keys_values",
            "values",
            "ffn",
            "expert_ffn",
            "shared_ffn",
            "vocab",
        ),
        *("linear_qkvz", "linear_qkv", "linear_ba", "linear_heads", "linear_values"),
    }
)
"""Dimensions that tensor parallelism splits. A tensor has at most one of them; a tensor with none
is replicated."""

StagePlacement = Literal["first", "layer", "expert", "last", "last_if_not_first"]
"""The pipeline stage that holds a parameter: the first, the last, or the stage of its layer;
`expert`: the stage of its layer, one parameter per expert."""


@dataclass(frozen=True)
class HeadRows:
    """Rows of a Hugging Face tensor: `size` rows of each of `heads` heads, which begin `stride`
    rows apart."""

    tensor: str
    start: int
    size: int
    stride: int
    heads: int


@dataclass(frozen=True)
class Param:
    """One parameter. In names, `{i}` is the layer and `{e}` the expert: global indices in Hugging
    Face names, indices local to the rank in the names of an engine."""

    stage: StagePlacement
    hf: Mapping[str, tuple[str, ...]]
    """Hugging Face tensors that it concatenates along their split dimension, in order -> dimensions
    of each."""
    mcore: str
    """Name in Megatron-Core's local layer spec."""
    engine: str | Mapping[str, str] | None = None
    """vLLM's parameter that has its tensors, and those of other rows with the same name, or tensor
    -> that of each; None: each tensor has a parameter of its own name and rows. vLLM stacks a
    layer's experts in one tensor."""
    mcore_te: str | None = None
    """Name in the Transformer Engine layer spec, which fuses norms with the next linear layer and
    has one module for the experts of a layer; None: as `mcore`."""
    rows: tuple[HeadRows, ...] = ()
    """The rows that a rank has of its heads, in order; none: its part of each tensor in turn."""
    kv_heads: int = 0
    """The KV heads of which it has queries, keys and values; 0: it has others."""
    kind: int | None = None
    """Index in ModelShape.kinds of the layers that have it; None: it is outside the layers."""
    engine_alternates: bool = False
    """vLLM's parameter has the rows of its two tensors in turn."""
    engine_float32: bool = False
    """vLLM's parameter is float32 whatever the type of the model, since it computes with it so."""
    is_correction_bias: bool = False
    """It is a router's correction bias: without a gradient, and float32 whatever the type of the
    model."""


HF = "model.layers.{i}."
MC = "decoder.layers.{i}."


def norm(hf: str, mcore: str, fused_with: str | None = None, dim: str = "hidden") -> Param:
    """Return the weight of a norm. fused_with: the linear layer whose module has it in the
    Transformer Engine layer spec."""
    te = MC + fused_with + ".layer_norm_weight" if fused_with else None
    return Param("layer", {f"{HF}{hf}.weight": (dim,)}, f"{MC}{mcore}.weight", mcore_te=te)


def linear(
    mcore: str,
    hf: Mapping[str, tuple[str, ...]],
    bias: bool,
    engine: str | Mapping[str, str] | None = None,
    rows: Sequence[HeadRows] = (),
    **more: Any,
) -> list[Param]:
    """Return the weight and the bias of a linear layer. hf: its modules -> (output, input)
    dimension of each. engine, rows: as in Param, of modules; more: other fields of Param."""
    engines = dict.fromkeys(hf, engine) if isinstance(engine, str) else engine or {}
    return [
        Param(
            "layer",
            {f"{HF}{module}.{kind}": dims[:num_dims] for module, dims in hf.items()},
            f"{MC}{mcore}.{kind}",
            {f"{HF}{module}.{kind}": f"{HF}{name}.{kind}" for module, name in engines.items()}
            or None,
            rows=tuple(replace(part, tensor=f"{HF}{part.tensor}.{kind}") for part in rows),
            **more,
        )
        for kind, num_dims in (("weight", None), ("bias", 1))[: 1 + bias]
    ]
