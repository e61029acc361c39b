"""Products of matrices in fp8 by Transformer Engine: where they run, and what they ask of a micro-batch. Parameters
stay in bfloat16, so weight update, optimizer and checkpoints do not change.
"""

from __future__ import annotations

from typing import Any

from rlhf_mc.config.errors import NodeError
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.models.checks import FP8_MULTIPLES
from rlhf_mc.models.transformer_engine import uses_transformer_engine

_FORMATS = {"tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
"""Recipe -> format of Megatron-Core's TransformerConfig. hybrid: gradients in e5m2, whose range one scale for a whole
tensor needs."""
_AVAILABLE = {
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""Recipe -> Transformer Engine's function that says whether GPU and CUDA have it."""


def check_fp8(section: str, megatron: MegatronConfig) -> None:
    """Raise UserError if this process cannot multiply in fp8 as the settings of a model ({section}.fp8) ask."""
    if megatron.fp8 is None:
        return
    key = f"{section}.fp8 is {megatron.fp8!r}"
    if not uses_transformer_engine():
        raise NodeError(f"{key}; fp8 needs Transformer Engine, which is not installed: install it, or set it to null")
    import transformer_engine.pytorch as te

    is_available, reason = getattr(te, _AVAILABLE[megatron.fp8])(return_reason=True)
    if not is_available:
        raise NodeError(f"{key}, which this GPU does not run ({reason})")


def fp8_settings(megatron: MegatronConfig) -> dict[str, Any]:
    """Return the settings of TransformerConfig for fp8.

    No recipe has a state: scales are computed from the values themselves. With delayed scaling they would come from
    earlier steps, which no checkpoint here holds, and be reduced over all ranks, which other models share."""
    if megatron.fp8 is None:
        return {}
    return {"fp8": _FORMATS[megatron.fp8], "fp8_recipe": megatron.fp8}


def token_multiple(megatron: MegatronConfig) -> int:
    """Return the number of which the tokens of a micro-batch must be a multiple."""
    per_rank = 1 if megatron.fp8 is None else FP8_MULTIPLES[megatron.fp8]
    return per_rank * (megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1)
