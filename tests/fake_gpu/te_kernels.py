"""Transformer Engine without its compiled libraries: its own Python files run, and each kernel is a
function that checks shapes and returns tensors of the right shapes. This module stands for
transformer_engine_torch.

A kernel that has no function here raises NotImplementedError where it is called. Kernels in Triton
are not launched."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

FP8_MULTIPLES = {
    "Float8CurrentScalingQuantizer": 16,
    "Float8BlockQuantizer": 128,
    "MXFP8Quantizer": 32,
}
"""Quantizer of a recipe -> the number of which the rows of a product's operands must be a
multiple."""


class _Unused:
    """Stands for modules and kernels: any attribute, item and result of it is itself, and it keeps
    no argument."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


def install(directory: Path) -> None:
    """Import Transformer Engine from a directory of its Python files, with this module as its
    compiled one."""
    sys.path.append(str(directory))
    sys.modules["transformer_engine_torch"] = sys.modules[__name__]
    # Of these its files import kernels and types, which are not used.
    triton = _Unused()
    vars(triton).update(__version__="3.4.0", cdiv=lambda a, b: -(-a // b))
    vars(triton).update(next_power_of_2=lambda n: 1 << (n - 1).bit_length())
    absent = dict.fromkeys(
        ("triton.language", "triton.language.standard", "onnx", "onnxscript"), _Unused()
    )
    absent["triton"] = triton
    sys.modules.update(absent)
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it loads no libraries
    package = ModuleType("transformer_engine")
    package.__path__ = [str(directory / "transformer_engine")]
    sys.modules["transformer_engine"] = package
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    del sys.modules["transformer_engine"]
    importlib.import_module("transformer_engine.pytorch")
    sys.modules["transformer_engine"].common = common
    # It has taken all names of this module, and looks up others in its own.
    importlib.import_module("transformer_engine.pytorch.cpp_extensions").__getattr__ = __getattr__
    importlib.import_module("transformer_engine.pytorch.triton.permutation")
    utils = importlib.import_module(
        "transformer_engine.pytorch.attention.dot_product_attention.utils"
    )
    choose = utils.get_attention_backend

    def get_attention_backend(params: Any) -> Any:
        params.qkv_type = torch.Tensor  # it knows no fake tensors
        return choose(params)

    utils.get_attention_backend = get_attention_backend
    # Compares numbers, which fake kernels do not compute.
    importlib.import_module("rlhf_mc.models.transformer_engine")._gradient_error = lambda *_: 0.0
    del os.environ["NVTE_PROJECT_BUILDING"]
    for name in absent:
        del sys.modules[name]


class _Constants(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = len(vars(cls))
        setattr(cls, name, value)
        return value


def __getattr__(name: str) -> Any:
    """Return a class of constants, or a kernel that is not implemented."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        value: Any = _Constants(name, (), {})
    else:

        def value(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"Transformer Engine's kernel {name}")

    globals()[name] = value
    return value


class DType(metaclass=_Constants):
    """Names of Transformer Engine's types."""


class FP8FwdTensors:
    """Indices of the tensors of a forward pass."""

    GEMM1_INPUT, GEMM1_WEIGHT, GEMM1_OUTPUT, GEMM2_INPUT, GEMM2_WEIGHT, GEMM2_OUTPUT = range(6)
    GEMM3_INPUT, GEMM3_WEIGHT, GEMM3_OUTPUT = range(6, 9)


class FP8BwdTensors:
    """Indices of the tensors of a backward pass."""

    GRAD_OUTPUT1, GRAD_INPUT1, GRAD_OUTPUT2, GRAD_INPUT2, GRAD_OUTPUT3, GRAD_INPUT3 = range(6)


class FP8TensorMeta:
    """Scales of delayed scaling."""


TYPES = {
    DType.kFloat32: torch.float32,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat16: torch.float16,
}


def get_cudnn_version() -> int:
    """Return cuDNN 9.14."""
    return 91400


def get_cublasLt_version() -> int:
    """Return cuBLAS 13.1."""
    return 130100


def get_num_cublas_streams() -> int:
    """Return the number of streams of grouped products."""
    return 4


def get_fused_attn_backend(training: bool, q_type: Any, *_: Any) -> Any:
    """Return cuDNN's attention, which takes 16-bit types, on Hopper and later."""
    backends = sys.modules[__name__].NVTE_Fused_Attn_Backend
    is_short = q_type in (DType.kBFloat16, DType.kFloat16)
    return backends.NVTE_F16_arbitrary_seqlen if is_short else backends.NVTE_No_Backend


def _check_devices(*tensors: Any) -> None:
    for x in tensors:
        assert not isinstance(x, torch.Tensor) or x.is_cuda or not x.numel(), (
            f"a tensor of the CPU: {tuple(x.shape)}"
        )


def _matrix(operand: Any) -> tuple[int, int]:
    """Return the size of an operand as a matrix. Check what fp8 products ask of it."""
    transpose = getattr(operand, "_transpose", None)
    # its own size() is of other dimensions, where it has three
    if transpose is not None and operand._data is None:
        size = (math.prod(transpose.shape[1:]), transpose.shape[0])
    else:
        size = (math.prod(operand.size()[:-1]), operand.size()[-1])
    if getattr(operand, "_quantizer", None) is not None:
        assert size[0] % 16 == 0 and size[1] % 16 == 0, f"{size} are no multiples of 16"
    return size


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """Return a quantized tensor."""
    _check_devices(tensor)
    rows = math.prod(tensor.shape[:-1])
    multiple = FP8_MULTIPLES[type(quantizer).__name__]
    assert tensor.shape[-1] % min(multiple, 16) == 0, (
        f"{type(quantizer).__name__}: {tuple(tensor.shape)}"
    )
    assert rows % min(multiple, 32) == 0, f"{type(quantizer).__name__}: {rows} rows"
    return (
        quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if output is None
        else output
    )


def bgrad_quantize(tensor: torch.Tensor, quantizer: Any) -> Any:
    """Return the gradient of the bias and the quantized gradient."""
    return tensor.new_empty(tensor.shape[-1]), quantize(tensor, quantizer)


def split_quantize(
    tensor: torch.Tensor, splits: list[int], quantizers: list[Any], **_: Any
) -> list[Any]:
    """Return the quantized parts of a tensor."""
    return [
        quantize(part, quantizer)
        for part, quantizer in zip(tensor.split(splits), quantizers, strict=True)
    ]


def fp8_transpose(data: torch.Tensor, dtype: Any, *, out: Any = None) -> torch.Tensor:
    """Return the transpose of the bytes of a quantized tensor."""
    _check_devices(data, out)
    return data.new_empty(data.shape[-1], *data.shape[:-1]) if out is None else out


def generic_gemm(
    a: Any, transpose_a: bool, b: Any, transpose_b: bool, out: Any, quantizer: Any, out_type: Any,
    bias: Any,
    bias_type: Any, gelu: bool, gelu_in: Any, grad: bool, *_: Any, extra_output: Any = None,
    **__: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return a product of matrices, and the gradient of the bias."""
    _check_devices(a, b, out, bias)
    size_a = _matrix(a)
    size_b = _matrix(b)
    assert size_a[transpose_a] == size_b[not transpose_b], (
        f"{size_a} {transpose_a} times {size_b} {transpose_b}"
    )
    columns = size_a[not transpose_a]
    shape = [size_b[1] if transpose_b else size_b[0], columns]
    if out is None:
        dtype = TYPES[out_type] if out_type is not None else a.dtype
        leading = shape[:1] if transpose_b else b.size()[:-1]
        out = torch.empty(*leading, columns, dtype=dtype, device="cuda:0")
    assert out.numel() == math.prod(shape), f"{tuple(out.shape)} for {shape}"
    bias_grad = None
    if grad and bias is not None:
        bias_grad = torch.empty(size_b[1], dtype=bias.dtype, device="cuda:0")
    return out, bias_grad, gelu_in, extra_output


def te_general_grouped_gemm(
    a: list[Any], transpose_a: bool, b: list[Any], transpose_b: bool, out: Any, out_type: Any,
    splits: Any, bias: Any,
    *_: Any,
) -> Any:  # fmt: skip
    """Check the products of a group."""
    assert len(a) == len(b), (len(a), len(b))
    for one, other in zip(a, b, strict=True):
        _check_devices(one, other)
        assert one.size()[transpose_a] == other.size()[not transpose_b], (one.size(), other.size())
    return bias


def rmsnorm_fwd(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: Any, quantizer: Any, out_type: Any,
    *_: Any
) -> list[Any]:  # fmt: skip
    """Return the normalized tensor, no mean, and the reciprocal of the root mean square."""
    _check_devices(x, weight)
    assert x.shape[-1] == weight.numel(), (x.shape, weight.shape)
    if out is None:
        out = torch.empty_like(x, dtype=TYPES.get(out_type, x.dtype))
        out = out if quantizer is None else quantize(out, quantizer)
    return [out, None, x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)]


def rmsnorm_bwd(
    grad: torch.Tensor, x: torch.Tensor, rsigma: Any, weight: torch.Tensor, *_: Any
) -> list[torch.Tensor]:
    """Return the gradients of the input and of the weight."""
    _check_devices(grad, x, rsigma, weight)
    assert grad.shape == x.shape, (grad.shape, x.shape)
    return [torch.empty_like(x), torch.empty_like(weight)]


def fused_attn_fwd(max_q: int, max_kv: int, training: bool, *rest: Any) -> list[torch.Tensor]:
    """Return the output of attention of packed sequences, and what its backward pass needs."""
    cu_q, cu_kv, q, k, v = rest[8:13]
    _check_devices(cu_q, cu_kv, q, k, v)
    assert cu_q.dtype == cu_kv.dtype == torch.int32 and q.dim() == 3, (cu_q.dtype, q.shape)
    assert (q.shape[2], k.shape[:2]) == (k.shape[2], v.shape[:2]) and q.shape[1] % k.shape[
        1
    ] == 0, (
        q.shape,
        k.shape,
        v.shape,
    )
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    context = [q.new_empty(*q.shape[:2], 1, dtype=torch.float32), q.new_empty(2, dtype=torch.int64)]
    return [out, *context] if training else [out]


def fused_attn_bwd(*args: Any) -> list[Any]:
    """Return the gradients of queries, keys and values."""
    cu_q, cu_kv, q, k, v, out, grad = args[11:18]
    _check_devices(cu_q, cu_kv, q, k, v, out, grad)
    assert out.shape == grad.shape, (out.shape, grad.shape)
    return [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None]


def thd_read_half_tensor(x: torch.Tensor, cu_seqlens: torch.Tensor, half: int) -> torch.Tensor:
    """Return one half of the tokens of each sequence."""
    _check_devices(x, cu_seqlens)
    assert cu_seqlens.dtype == torch.int32 and half in (0, 1), (cu_seqlens.dtype, half)
    dim = x.dim() - 3
    return x.narrow(dim, 0, x.shape[dim] // 2).clone()


def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens: torch.Tensor, is_packed: bool, size: int
) -> torch.Tensor:
    """Return the log-sum-exps of the second half of each sequence."""
    _check_devices(lse, cu_seqlens)
    assert is_packed and size * 2 == lse.shape[-1], (size, lse.shape)
    return lse.new_empty(lse.shape[0], size)


def thd_second_half_lse_correction(
    lse: torch.Tensor, step: torch.Tensor, cu_seqlens: Any, is_packed: bool
) -> None:
    """Check the log-sum-exps of all tokens and of the second half of each sequence."""
    _check_devices(lse, step, cu_seqlens)
    assert is_packed and lse.shape[-1] == 2 * step.shape[-1], (lse.shape, step.shape)


def thd_out_correction(
    out: torch.Tensor, step: torch.Tensor, lse: torch.Tensor, lse_step: torch.Tensor,
    cu_seqlens: Any, half: bool,
    is_packed: bool,
) -> None:  # fmt: skip
    """Check the output of all tokens and of one step."""
    _check_devices(out, step, lse, lse_step, cu_seqlens)
    assert out.shape[0] == step.shape[0] * (1 + half), (out.shape, step.shape)


def thd_grad_correction(
    grad: torch.Tensor, step: torch.Tensor, cu_seqlens: Any, first: str, second: str
) -> None:
    """Check the gradient of all tokens and of one step."""
    _check_devices(grad, step, cu_seqlens)
    assert grad.shape[-2:] == step.shape[-2:], (grad.shape, step.shape)


rotated: set[int] = set()
"""Numbers of context-parallel ranks for which tokens were rotated."""


def fused_rope_forward(x: torch.Tensor, freqs: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return the rotated tensor."""
    _check_devices(x, freqs, *rest)
    rotated.add(rest[4])
    return torch.empty_like(x, memory_format=torch.contiguous_format)


fused_rope_backward = fused_rope_forward


def _on_lists(chunk: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], *_: Any) -> None:
    _check_devices(flag, *(x for tensors in lists for x in tensors))
    assert len({len(tensors) for tensors in lists}) == 1, [len(tensors) for tensors in lists]


multi_tensor_adam: Callable[..., None] = _on_lists
multi_tensor_scale: Callable[..., None] = _on_lists


def multi_tensor_l2norm(
    chunk: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors, and no norms of each."""
    _on_lists(chunk, flag, lists)
    return flag.new_empty(1, dtype=torch.float32), flag.new_empty(0, dtype=torch.float32)
