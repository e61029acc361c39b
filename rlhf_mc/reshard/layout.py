"""Where each block of each logical tensor lies in one process: for Hugging Face files, Megatron-Core and vLLM.

Arithmetic on shapes only. Which rank has which coordinates is topology's subject; how blocks move
from one layout to another is plan.py's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.families import SPLIT_DIMS, ModelShape, Param, padded_vocab_size, params_of

Box = tuple[tuple[int, int], ...]
"""[start, end) in each dimension."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a logical tensor and where it begins in a local tensor; no stride, no transposition."""

    tensor: str
    """Logical name, as in the Hugging Face checkpoint."""
    box: Box
    """The block, in the logical tensor."""
    local: str
    """Name of the tensor in this process."""
    offset: tuple[int, ...]
    """Where the block begins in it."""


@dataclass(frozen=True)
class Layout:
    """All that one process holds. Local elements that no piece covers are padding."""

    shapes: dict[str, tuple[int, ...]]
    """Local name -> local shape."""
    pieces: tuple[Piece, ...]

    def without(self, tensors: Collection[str]) -> Layout:
        """The same, less the pieces of these logical tensors."""
        return Layout(self.shapes, tuple(p for p in self.pieces if p.tensor not in tensors))


EMPTY = Layout({}, ())


def logical_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the Hugging Face checkpoint (no lm_head.weight when tied)."""
    sizes = shape.dims()
    shapes: dict[str, tuple[int, ...]] = {}
    for param, layer in _with_layers(params_of(shape), range(shape.num_layers)):
        for name, dims in param.hf.items():
            shapes[name.format(i=layer)] = tuple(sizes[d] for d in dims)
    return shapes


def hf_layout(shape: ModelShape, names: Collection[str] | None = None) -> Layout:
    """One process that holds every logical tensor, or those of `names`, whole and under its own name."""
    shapes = {n: s for n, s in logical_shapes(shape).items() if names is None or n in names}
    return whole_layout(shapes)


def whole_layout(shapes: dict[str, tuple[int, ...]]) -> Layout:
    """One process that holds tensors of these shapes whole."""
    pieces = (Piece(n, tuple((0, size) for size in s), n, (0,) * len(s)) for n, s in shapes.items())
    return Layout(shapes, tuple(pieces))


@functools.cache
def mcore_layout(
    shape: ModelShape, tp_rank: int, tp_size: int, layers: range, first: bool, last: bool, fused_norms: bool = False
) -> Layout:
    """One Megatron-Core rank: `layers` are its stage's layers (global numbers), `first` and `last` its place.

    q, k and v are interleaved: for each KV group the rows of its query heads, of its key, of its value.
    """
    check_mcore(shape, tp_size)
    groups = shape.num_kv_heads // tp_size
    places = {"layer"} | ({"first"} if first else set()) | ({"last"} if last else set())
    places |= {"last of several"} if last and not first else set()
    params = [p for p in params_of(shape) if p.place in places]
    shapes, pieces = {}, []
    for param, layer in _with_layers(params, layers):
        local = (param.mcore_fused or param.mcore) if fused_norms else param.mcore
        if _is_qkv(param):
            cuts = [(n, tp_rank * groups + g, shape.num_kv_heads) for g in range(groups) for n in param.hf]
        else:
            cuts = [(n, tp_rank, tp_size) for n in param.hf]
        vocab = padded_vocab_size(shape.vocab_size, tp_size)
        local = local.format(i=layer - layers.start)
        shapes[local], found = _join(param, shape, local, layer, cuts, vocab)
        pieces += found
    return Layout(shapes, tuple(pieces))


@functools.cache
def vllm_layout(shape: ModelShape, tp_rank: int, tp_size: int) -> Layout:
    """One vLLM rank: q of all its heads, then k, then v; KV heads are replicated where there are fewer than ranks."""
    check_vllm(shape, tp_size)
    kv_cut = tp_size if shape.num_kv_heads >= tp_size else shape.num_kv_heads
    params = [p for p in params_of(shape) if p.vllm]
    shapes, pieces = {}, []
    for param, layer in _with_layers(params, range(shape.num_layers)):
        assert param.vllm is not None
        cuts = [
            (n, tp_rank * kv_cut // tp_size, kv_cut) if "kv" in dims else (n, tp_rank, tp_size)
            for n, dims in param.hf.items()
        ]
        local = param.vllm.format(i=layer)
        shapes[local], found = _join(param, shape, local, layer, cuts, padded_vocab_size(shape.vocab_size, 1))
        pieces += found
    return Layout(shapes, tuple(pieces))


def check_mcore(shape: ModelShape, tp_size: int) -> None:
    """UserError if Megatron-Core cannot split this model over tp_size ranks."""
    _check_split("Megatron", shape, tp_size, _mcore_obstacle)


def check_vllm(shape: ModelShape, tp_size: int) -> None:
    """UserError if vLLM cannot split this model over tp_size ranks."""
    if shape.value_head:
        raise UserError("a model with a value head cannot be generated from; use the actor's model")
    _check_split("vLLM", shape, tp_size, _vllm_obstacle)


def _check_split(
    engine: str, shape: ModelShape, tp_size: int, obstacle: Callable[[ModelShape, int], str | None]
) -> None:
    if found := obstacle(shape, tp_size):
        works = ", ".join(str(n) for n in range(1, shape.num_heads + 1) if obstacle(shape, n) is None)
        raise UserError(f"tensor_model_parallel_size {tp_size} ({engine}): {found}; sizes that work: {works}")


def _mcore_obstacle(shape: ModelShape, tp_size: int) -> str | None:
    sizes = _split_sizes(shape) | {"num_key_value_heads": shape.num_kv_heads}
    return _indivisible(sizes, tp_size)


def _vllm_obstacle(shape: ModelShape, tp_size: int) -> str | None:
    kv = shape.num_kv_heads
    if kv % tp_size and tp_size % kv:
        return f"num_key_value_heads is {kv}, and neither is a multiple of the other"
    return _indivisible(_split_sizes(shape) | {"padded vocab_size": padded_vocab_size(shape.vocab_size, 1)}, tp_size)


def _split_sizes(shape: ModelShape) -> dict[str, int]:
    return {"num_attention_heads": shape.num_heads, "intermediate_size": shape.ffn_hidden_size}


def _indivisible(sizes: dict[str, int], tp_size: int) -> str | None:
    return next(
        (f"{what} is {size}, which {tp_size} does not divide" for what, size in sizes.items() if size % tp_size), None
    )


def _is_qkv(param: Param) -> bool:
    return any("kv" in dims for dims in param.hf.values())


def _with_layers(params: Sequence[Param], layers: range) -> Iterator[tuple[Param, int]]:
    """Each parameter with its layer's global number, layer by layer; those outside the layers with 0."""
    yield from ((p, layers.start) for p in params if p.place == "first")
    yield from ((p, layer) for layer in layers for p in params if p.place == "layer")
    yield from ((p, layers.start) for p in params if p.place.startswith("last"))


def _join(
    param: Param, shape: ModelShape, local: str, layer: int, cuts: Sequence[tuple[str, int, int]], padded_vocab: int
) -> tuple[tuple[int, ...], list[Piece]]:
    """(local shape, pieces) of a parameter that joins `cuts` in order along the dimension that is split.

    A cut (name, index, count) is the index-th of count equal parts of the named tensor.
    """
    sizes = shape.dims()
    pieces, filled = [], 0
    for name, index, count in cuts:
        dims = param.hf[name]
        box = [(0, sizes[d]) for d in dims]
        offset = [0] * len(dims)
        axis = next((a for a, d in enumerate(dims) if d in SPLIT_DIMS), None)
        if axis is not None:
            size = padded_vocab if dims[axis] == "vocab" else sizes[dims[axis]]
            start, end = size * index // count, size * (index + 1) // count
            # Rows past the logical tensor's end are padding.
            box[axis] = (min(start, sizes[dims[axis]]), min(end, sizes[dims[axis]]))
            offset[axis] = filled
            filled += end - start
        if all(a < b for a, b in box):
            pieces.append(Piece(name.format(i=layer), tuple(box), local, tuple(offset)))
    local_shape = [sizes[d] for d in dims]
    if axis is not None:
        local_shape[axis] = filled
    return tuple(local_shape), pieces
