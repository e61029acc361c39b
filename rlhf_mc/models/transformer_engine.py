"""Transformer Engine: present and whole, or absent, and whether it has an attention kernel. It is imported here before
Megatron-Core, whose files take an ImportError for absence, each by itself, and pass other errors on.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging

import torch

from rlhf_mc import platform
from rlhf_mc.config.errors import NodeError, first_line

_log = logging.getLogger(__name__)


@functools.cache
def uses_transformer_engine() -> bool:
    """Return True for layers of Transformer Engine (on GPUs, where it is installed), False for Megatron-Core's local
    layers. Raise NodeError if it is installed and cannot be imported."""
    return import_transformer_engine() and platform.use_cuda()


def import_transformer_engine() -> bool:
    """Import Transformer Engine; return False where it is not installed. Raise NodeError if it is installed and cannot
    be imported. On a CPU an ImportError counts as absence, as it does for Megatron-Core."""
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        if isinstance(error, ImportError) and not platform.use_cuda():
            return False
        cuda = f" and CUDA {torch.version.cuda}" if torch.version.cuda else ""
        raise NodeError(
            f"Transformer Engine is installed and cannot be imported ({type(error).__name__}: {first_line(error)});"
            f" build it for torch {torch.__version__}{cuda}, or uninstall it (pip uninstall transformer_engine):"
            " Megatron-Core's local layers then take its place"
        ) from error
    return True


@functools.cache
def has_packed_attention(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Return True where Transformer Engine has an attention kernel for packed sequences on this GPU: cuDNN's, from
    Hopper on, or that of flash-attn, if it is installed. Neither takes float32 nor every head size.

    Otherwise Transformer Engine would unpack the sequences, pad them to the longest, and store all scores.
    num_heads, num_kv_heads: of one rank."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    flash, _, fused, *_ = utils.get_attention_backend(
        utils.AttentionParams(
            qkv_dtype=dtype,
            qkv_layout="thd_thd_thd",
            batch_size=2,
            num_heads=num_heads,
            num_gqa_groups=num_kv_heads,
            max_seqlen_q=1024,
            max_seqlen_kv=1024,
            head_dim_qk=head_dim,
            head_dim_v=head_dim,
            attn_mask_type="padding_causal",
            core_attention_bias_shape=None,
            core_attention_bias_requires_grad=False,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    )
    if not (flash or fused):
        _log.warning(
            "Transformer Engine has no attention kernel for packed sequences in"
            f" {str(dtype).removeprefix('torch.')} with heads of {head_dim} dimensions on"
            f" {torch.cuda.get_device_name()}; torch's attention takes its place, one call for each run of equally long"
            " sequences"
        )
    return bool(flash or fused)
