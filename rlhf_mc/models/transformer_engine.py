"""Transformer Engine: present and whole, or absent; its attention kernel; its fp8 products.
Programs import it here before Megatron-Core, whose files take an ImportError for absence, each by
itself, and pass other errors on.

With fp8, parameters stay in bfloat16, so weight update, optimizer and checkpoints do not change.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import itertools
import logging
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from rlhf_mc import platform
from rlhf_mc.config.errors import NodeError, first_line
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.patching import Patch
from rlhf_mc.reshard.model_checks import FP8_MULTIPLES

_log = logging.getLogger(__name__)

LARGEST_GRADIENT_ERROR = 0.1
"""Error of the gradients of Transformer Engine's attention, relative to their norms, beyond which
it is not used."""
_TESTED_LENGTHS = (1, 190, 64, 257)
"""Tokens of the packed sequences on which its gradients are tested."""


@functools.cache
def uses_transformer_engine() -> bool:
    """Return True for layers of Transformer Engine (on GPUs, where it is installed), False for
    Megatron-Core's local layers. Raise NodeError if it is installed and cannot be imported."""
    return import_transformer_engine() and platform.use_cuda()


def import_transformer_engine() -> bool:
    """Import Transformer Engine; return False where it is not installed. Raise NodeError if it is
    installed and cannot be imported. On a CPU an ImportError counts as absence, as it does for
    Megatron-Core."""
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    try:
        if platform.use_cuda():
            _load_cudnn_of_torch()
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        if isinstance(error, ImportError) and not platform.use_cuda():
            return False
        cuda = f" and CUDA {torch.version.cuda}" if torch.version.cuda else ""
        raise NodeError(
            f"Transformer Engine is installed and cannot be imported ({type(error).__name__}: "
            f"{first_line(error)}); build it for torch {torch.__version__}{cuda}, or uninstall it "
            "(pip uninstall transformer_engine): Megatron-Core's local layers then take its place"
        ) from error
    return True


def _load_cudnn_of_torch() -> None:
    """Load all libraries of the cuDNN that torch is installed with. Transformer Engine names them
    without a path, and would get the system's: on a machine with both it attended with cuDNN 9.14,
    whose gradients of heads of more than 128 dimensions are wrong."""
    with contextlib.suppress(OSError):  # another package has loaded the system's
        for library in sorted(
            (Path(torch.__file__).parents[1] / "nvidia/cudnn/lib").glob("libcudnn*.so.*")
        ):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def has_packed_attention(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    dims: tuple[int, int],
    cp_comm_type: str | None = None,
    softmax_type: str = "vanilla",
) -> bool:
    """Return True where Transformer Engine has an attention kernel for packed sequences on this
    GPU, cuDNN's from Hopper on or flash-attn's if it is installed, whose gradients are right
    (`_gradient_error`). Neither takes float32 nor every head size, nor sinks (softmax_type
    "learnable") in Transformer Engine 2.11.

    Without one Transformer Engine would unpack the sequences, pad them to the longest, and store
    all scores.
    num_heads, num_kv_heads: of one rank. dims: of a key and of a value. cp_comm_type: of context
    parallelism; None: without it."""
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
            head_dim_qk=dims[0],
            head_dim_v=dims[1],
            attn_mask_type="padding_causal",
            core_attention_bias_shape=None,
            core_attention_bias_requires_grad=False,
            context_parallel=cp_comm_type is not None,
            cp_comm_type=cp_comm_type or "p2p",
            softmax_type=softmax_type,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    )
    sequences = (
        f"packed sequences in {str(dtype).removeprefix('torch.')} with heads of {dims[0]} "
        "dimensions"
    )
    if not (flash or fused):
        problem = f"has no attention kernel for {sequences}"
    elif (error := _gradient_error(dtype, num_heads, num_kv_heads, dims)) > LARGEST_GRADIENT_ERROR:
        problem = (
            f"has gradients of attention that are wrong by {error:.1g} times their norm for "
            f"{sequences}"
        )
    else:
        return True
    _log.warning(
        f"Transformer Engine {problem} on {torch.cuda.get_device_name()} (cuDNN "
        f"{torch.backends.cudnn.version()});"
        " torch's attention takes its place, one call for each run of equally long sequences"
    )
    return False


def _gradient_error(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, dims: tuple[int, int]
) -> float:
    """Return the error of Transformer Engine's gradients of q, k and v relative to their norms, the
    largest of the three, on random packed sequences, against torch's attention in float32. Rounding
    to bfloat16 gives 0.003.

    cuDNN has had kernels whose outputs are right and whose gradients are not: TransformerEngine
    issues 3333 and 2186, cudnn-frontend pull request 462, and heads of 256 dimensions on an H200
    (docs/gpu.md)."""
    from transformer_engine.pytorch.attention import DotProductAttention

    draw = torch.Generator(platform.device()).manual_seed(0)
    tokens = sum(_TESTED_LENGTHS)
    ends = torch.tensor(
        [0, *itertools.accumulate(_TESTED_LENGTHS)], dtype=torch.int32, device=platform.device()
    )
    q, k, v, grad = (
        torch.randn(tokens, *size, generator=draw, device=platform.device(), dtype=dtype)
        for size in (
            (num_heads, dims[0]),
            *((num_kv_heads, dim) for dim in dims),
            (num_heads, dims[1]),
        )
    )
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    attention = DotProductAttention(
        num_heads,
        dims,
        num_gqa_groups=num_kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )
    out = attention(
        *inputs,
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(_TESTED_LENGTHS),
        max_seqlen_kv=max(_TESTED_LENGTHS),
    )
    out.backward(grad.reshape(out.shape))
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    for parts in zip(*(x.split(_TESTED_LENGTHS) for x in (*exact, grad.float())), strict=True):
        queries, keys, values, of_output = (x.transpose(0, 1) for x in parts)
        keys, values = (
            x.repeat_interleave(num_heads // num_kv_heads, dim=0) for x in (keys, values)
        )
        scaled_dot_product_attention(queries, keys, values, is_causal=True).backward(
            of_output, retain_graph=True
        )
    errors = [
        (computed.grad.float() - right.grad).norm() / right.grad.norm()
        for computed, right in zip(inputs, exact, strict=True)
        if computed.grad is not None and right.grad is not None
    ]
    return max(float(error) for error in errors)


def place_by_rank(cu_seqlens: torch.Tensor, num_tokens: int, cp_size: int) -> torch.Tensor:
    """Return for each token of packed sequences its place among the tokens of context-parallel rank
    0, of rank 1, ...: [num_tokens] int64. cu_seqlens: [sequences + 1] int32, of padded lengths
    (models/context_parallel.py)."""
    token = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True)
    start = cu_seqlens[sequence]
    length = (cu_seqlens[sequence + 1] - start) // (2 * cp_size)
    chunk = (token - start) // length
    rank = torch.minimum(chunk, 2 * cp_size - 1 - chunk)
    index = start // cp_size + (chunk >= cp_size) * length + (token - start) % length
    return (rank * (num_tokens // cp_size) + index).long()


def _to_sequences(
    x: torch.Tensor, cu_seqlens: torch.Tensor, chunk_ids: torch.Tensor, cp_size: int
) -> torch.Tensor:
    if x.is_cuda:  # the stream of the exchange reads what another one has allocated
        x.record_stream(torch.cuda.current_stream())
    return x.index_select(0, place_by_rank(cu_seqlens, len(x), cp_size))


def _to_ranks(x: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int) -> torch.Tensor:
    return torch.empty_like(x).index_copy_(0, place_by_rank(cu_seqlens, len(x), cp_size), x)


def patches() -> tuple[Patch, ...]:
    """Return the patches of Transformer Engine, tested with 2.11: of the order of tokens around an
    all-to-all."""
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    reason = (
        "the host reads the bounds of each chunk of each sequence, four times in each pass of a "
        "layer"
    )
    return (
        Patch(
            context_parallel, "reorder_seq_chunks_after_a2a_before_attn_thd", _to_sequences, reason
        ),
        Patch(context_parallel, "reorder_seq_chunks_before_a2a_after_attn_thd", _to_ranks, reason),
    )


_FORMATS = {"tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
"""Recipe -> format of Megatron-Core's TransformerConfig. hybrid: gradients in e5m2, whose range one
scale for a whole tensor needs."""


_AVAILABLE = {
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""Recipe -> Transformer Engine's function that says whether GPU and CUDA have it."""


def check_fp8(section: str, megatron: MegatronConfig) -> None:
    """Raise UserError if this process cannot multiply in fp8 as the settings of a model
    ({section}.fp8) ask."""
    if megatron.fp8 is None:
        return
    key = f"{section}.fp8 is {megatron.fp8!r}"
    if not uses_transformer_engine():
        raise NodeError(
            f"{key}; fp8 needs Transformer Engine, which is not installed: install it, or set it "
            "to null"
        )
    import transformer_engine.pytorch as te

    is_available, reason = getattr(te, _AVAILABLE[megatron.fp8])(return_reason=True)
    if not is_available:
        raise NodeError(f"{key}, which this GPU does not run ({reason})")


def fp8_settings(megatron: MegatronConfig) -> dict[str, Any]:
    """Return the settings of TransformerConfig for fp8.

    No recipe has a state: scales are computed from the values themselves. With delayed scaling they
    would come from earlier steps, which no checkpoint here holds, and be reduced over all ranks,
    which other models share."""
    if megatron.fp8 is None:
        return {}
    return {"fp8": _FORMATS[megatron.fp8], "fp8_recipe": megatron.fp8}


def token_multiple(megatron: MegatronConfig) -> int:
    """Return the number of which the tokens of a micro-batch must be a multiple."""
    per_rank = 1 if megatron.fp8 is None else FP8_MULTIPLES[megatron.fp8]
    return per_rank * (megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1)
