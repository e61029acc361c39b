"""Layouts: the shards of each logical tensor in the local tensors of one process, for Hugging Face
files and Megatron-Core, and the parts that the layout of a rollout engine is built of
(rollout/vllm_layout.py).

Arithmetic on shapes only. placement.py builds the layouts of all ranks; plan.py plans the moves
between two layouts.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from rlhf_mc.architectures.parameters import model_params
from rlhf_mc.architectures.rows import SPLIT_DIMS, Param, StagePlacement
from rlhf_mc.architectures.spec import ModelShape, padded_vocab_size
from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.ranges import Range, even_ranges, interleaved_ranges

Box = tuple[tuple[int, int], ...]
"""[start, end) in each dimension."""


def volume(box: Box) -> int:
    """Return the number of elements of a block."""
    return math.prod(end - start for start, end in box)


def intersection(a: Box, b: Box) -> Box | None:
    """Return the block that two blocks of one tensor have in common; None if they are disjoint."""
    common = []
    for (first, last), (start, end) in zip(a, b, strict=True):
        if last <= start or end <= first:
            return None
        common.append((max(first, start), min(last, end)))
    return tuple(common)


def box_text(box: Box) -> str:
    """Return a block as messages name it."""
    return "[" + ", ".join(f"{start}:{end}" for start, end in box) + "]"


class Stack(str):
    """Name of one tensor [experts, ...] that stands for the tensors of a layer's experts."""

    before: str
    """Part of the tensors' names before the number of the expert."""
    after: str

    def __new__(cls, before: str, after: str) -> Stack:
        name = super().__new__(cls, f"{before}*{after}")
        name.before = before
        name.after = after
        return name

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.before, self.after

    def member(self, expert: int) -> str:
        """Return the name of one of the tensors."""
        return f"{self.before}{expert}{self.after}"


class Half(str):
    """Name of every second row of each expert of a tensor [experts, rows, ...]."""

    tensor: str
    first: int
    """The first of the rows: 0 or 1."""

    def __new__(cls, tensor: str, first: int) -> Half:
        name = super().__new__(cls, f"{tensor}[:, {first}::2]")
        name.tensor = tensor
        name.first = first
        return name

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]
        return self.tensor, self.first


def name_in_layer(pattern: str, layer: int) -> str:
    """Return a name in which `{i}` is the layer; with `{e}`, the expert, the stack of all of
    them."""
    if "{e}" not in pattern:
        return pattern.format(i=layer)
    return Stack(*(part.format(i=layer) for part in pattern.split("{e}")))


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous block of a logical tensor, and its offset in a local tensor. Shards are neither
    strided nor transposed."""

    tensor: str
    """Logical tensor, as in the Hugging Face checkpoint."""
    box: Box
    """The block, in the logical tensor."""
    local: str
    """The tensor in this process."""
    offset: tuple[int, ...]
    """Offset of the block in the local tensor. If the local tensor stacks experts and the block is
    of one of them, the offset begins with that index and is longer than the box."""

    def indices(self) -> range:
        """Return the range of the local stack's members that it covers."""
        (start, end), *_ = self.box
        return range(self.offset[0], self.offset[0] + end - start)

    def unstack(self) -> Iterator[Shard]:
        """Yield the shard as shards of single tensors, one per expert."""
        if not isinstance(self.tensor, Stack):
            yield self
            return
        _, *box = self.box
        for expert, index in zip(range(*self.box[0]), self.indices(), strict=True):
            tensor = self.tensor.member(expert)
            if isinstance(self.local, Stack):
                yield Shard(tensor, tuple(box), self.local.member(index), self.offset[1:])
            else:
                yield Shard(tensor, tuple(box), self.local, (index, *self.offset[1:]))

    def for_experts(self, start: int) -> Shard:
        """Return the shard of as many experts, from this one."""
        box = ((start, start + self.box[0][1] - self.box[0][0]), *self.box[1:])
        # dataclasses.replace takes twice as long
        return Shard(self.tensor, box, self.local, self.offset)

    def local_offset(self, block: Box) -> tuple[int, ...]:
        """Return the local offset of a part of the shard's block."""
        lead = len(self.offset) - len(self.box)
        dims = zip(self.offset[lead:], block, self.box, strict=True)
        return (*self.offset[:lead], *[start + part[0] - whole[0] for start, part, whole in dims])


@dataclass(frozen=True)
class Layout:
    """The shards and local tensors of one process. Local elements that no shard covers are padding.

    The experts of a layer are planned as one tensor: `stacked` and `stacked_shapes` have their
    Stack, with the experts as first dimension. `shards` and `shapes` have every tensor by its own
    name."""

    stacked_shapes: dict[str, tuple[int, ...]]
    """Local tensor -> its shape."""
    stacked: tuple[Shard, ...]
    float32: frozenset[str] = frozenset()
    """Local tensors that are float32 whatever the type of the model."""
    zero: frozenset[str] = frozenset()
    """Local tensors without shards, which must be zero."""
    contiguous: frozenset[str] = frozenset()
    """Stacks whose tensors, one for each expert, lie one after another in memory: the stack is a
    view of them."""

    @functools.cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The shards of single tensors."""
        return tuple(itertools.chain.from_iterable(shard.unstack() for shard in self.stacked))

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Local name -> shape, of whole single tensors."""
        indices: dict[Stack, set[int]] = {}
        for shard in self.stacked:
            if isinstance(shard.local, Stack):
                indices.setdefault(shard.local, set()).update(shard.indices())
        shapes: dict[str, tuple[int, ...]] = {}
        for local, size in self.stacked_shapes.items():
            if isinstance(local, Stack):
                shapes.update((local.member(i), size[1:]) for i in sorted(indices[local]))
            elif isinstance(local, Half):
                shapes[local.tensor] = (size[0], 2 * size[1], *size[2:])
            else:
                shapes[local] = size
        return shapes

    @functools.cached_property
    def by_local(self) -> dict[str, list[Shard]]:
        """Local tensor -> its shards."""
        shards: dict[str, list[Shard]] = {}
        for shard in self.stacked:
            shards.setdefault(shard.local, []).append(shard)
        return shards

    def itemsize(self, local: str, itemsize: int) -> int:
        """Return the bytes of an element of a local tensor. itemsize: of the type of the model."""
        return 4 if local in self.float32 else itemsize

    def without(self, tensors: Collection[str]) -> Layout:
        """Return the layout without the shards of these logical tensors. It has no stacks, so it
        can only be planned with layouts that have none."""
        return Layout(self.shapes, tuple(p for p in self.shards if p.tensor not in tensors))


EMPTY = Layout({}, ())


RankLayout = Callable[[ModelShape, int, int], Layout]
"""The layout of a rank of a rollout engine: of (shape, tensor-parallel rank, tensor-parallel
size)."""


def logical_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of the Hugging Face checkpoint (no lm_head.weight when
    tied)."""
    sizes = shape.dims()
    shapes: dict[str, tuple[int, ...]] = {}
    # All parameters of one expert precede the next expert's, as in the models' own order.
    for (layer, stage), group in itertools.groupby(
        _model_params(shape), lambda pair: (pair[1], pair[0].stage)
    ):
        params = [param for param, _ in group]
        for expert in range(shape.num_experts if stage == "expert" else 1):
            for param in params:
                for name, dims in param.hf.items():
                    shapes[name.format(i=layer, e=expert)] = tuple(sizes[d] for d in dims)
    return shapes


@functools.cache
def correction_biases(shape: ModelShape) -> frozenset[str]:
    """Return the correction biases of the routers: without a gradient, float32 whatever the model's
    type."""
    return frozenset(
        name.format(i=layer)
        for param, layer in _model_params(shape)
        if param.is_correction_bias
        for name in param.hf
    )


def hf_layout(shape: ModelShape, names: Collection[str] | None = None) -> Layout:
    """Return the layout of a process with every logical tensor, or only the tensors `names`,
    unsharded and under the checkpoint's names."""
    sizes = shape.dims()
    wanted = None if names is None else frozenset(names)
    shapes: dict[str, tuple[int, ...]] = {}
    shards: list[Shard] = []
    for param, layer in _model_params(shape):
        for pattern, dims in param.hf.items():
            name = name_in_layer(pattern, layer)
            size = tuple(sizes[d] for d in dims)
            if name in shapes:
                continue  # the replica of a tied embedding
            if isinstance(name, Stack):
                size = (shape.num_experts, *size)
                experts = range(shape.num_experts)
                chosen = [e for e in experts if wanted is None or name.member(e) in wanted]
                runs = list(_runs(chosen))
            else:
                runs = [(0, size[0])] if wanted is None or name in wanted else []
            if runs:
                shapes[name] = size
            rest = tuple((0, length) for length in size[1:])
            shards += [
                Shard(name, (run, *rest), name, (run[0], *(0 for _ in rest))) for run in runs
            ]
    return Layout(shapes, tuple(shards))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ascending numbers as ranges [start, end) of consecutive numbers."""
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        consecutive = [number for _, number in run]
        yield consecutive[0], consecutive[-1] + 1


def whole_layout(shapes: dict[str, tuple[int, ...]]) -> Layout:
    """Return the layout of a process that holds tensors of these shapes unsharded."""
    shards = (Shard(n, tuple((0, size) for size in s), n, (0,) * len(s)) for n, s in shapes.items())
    return Layout(shapes, tuple(shards))


@functools.cache
def mcore_layout(
    shape: ModelShape,
    tp_rank: int,
    tp_size: int,
    layers: range,
    first: bool,
    last: bool,
    transformer_engine: bool = False,
    *,
    ep_rank: int = 0,
    ep_size: int = 1,
) -> Layout:
    """Return the layout of a Megatron-Core rank. layers: global numbers of its stage's layers;
    first, last: whether the stage is the first or the last; transformer_engine: whether the layers
    are Transformer Engine's.

    Rows of q, k and v are interleaved: for each KV group the rows of its query heads, and those of
    their gates, its key and its value. They are split evenly over the ranks. With more ranks than
    KV groups a rank has part of a group, and no row is replicated. Of a layer's experts, the rank
    holds the ep_rank-th of ep_size equal ranges. Each expert is split over the tensor-parallel
    ranks.
    """
    check_mcore(shape, tp_size, ep_size=ep_size)
    experts = range(shape.num_experts // ep_size)
    if ep_rank > 0:  # all shards but the experts' are the first rank's
        first_rank = mcore_layout(
            shape, tp_rank, tp_size, layers, first, last, transformer_engine, ep_size=ep_size
        )
        start = ep_rank * len(experts)
        return replace(
            first_rank,
            stacked=tuple(
                p.for_experts(start) if isinstance(p.tensor, Stack) else p
                for p in first_rank.stacked
            ),
        )
    stages = {"layer", "expert"} | ({"first"} if first else set()) | ({"last"} if last else set())
    stages |= {"last_if_not_first"} if last and not first else set()
    vocab = padded_vocab_size(shape.vocab_size, tp_size)
    params = []
    for param in (p for p in model_params(shape) if p.stage in stages):
        if param.rows:
            groups = param.kv_heads or tp_size
            ranges = interleaved_ranges(param.rows, groups, tp_rank, tp_size)
        else:
            ranges = even_ranges(param, shape, tp_rank, tp_size, vocab)
        local = (param.mcore_te or param.mcore) if transformer_engine else param.mcore
        params.append(local_param(param, shape, local, ranges, experts))
    return layout_of_layers(shape, params, layers)


Obstacle = tuple[str, str]
"""(the size that is not divisible, the logical tensor that cannot be split)."""


@functools.cache
def tensor_with(dim: str, shape: ModelShape) -> str:
    """Return the first logical tensor, of the first expert, that has this dimension."""
    for param, layer in _model_params(shape):
        for name, dims in param.hf.items():
            if dim in dims:
                return name.format(i=layer, e=0)
    raise AssertionError(dim)


def check_mcore(shape: ModelShape, tp_size: int, *, ep_size: int = 1) -> None:
    """Raise UserError if Megatron-Core cannot split this model over tp_size ranks, and its experts
    over ep_size times tp_size ranks."""

    def obstacle(parts: int) -> Obstacle | None:
        uneven = indivisible(split_sizes(shape), parts)
        return uneven or kv_obstacle(shape, parts) or _uneven_rows(shape, parts)

    check_split("tensor_model_parallel_size", "Megatron", shape, tp_size, obstacle)
    if not shape.num_experts:
        if ep_size > 1:
            raise UserError(
                f"expert_model_parallel_size {ep_size} (Megatron): a {shape.family} model has no "
                "experts"
            )
        return
    experts = [("num_experts", shape.num_experts, tensor_with("expert_ffn", shape))]
    check_split(
        "expert_model_parallel_size",
        "Megatron",
        shape,
        ep_size,
        functools.partial(indivisible, experts),
    )


def check_split(
    key: str, engine: str, shape: ModelShape, size: int, obstacle: Callable[[int], Obstacle | None]
) -> None:
    """Raise UserError, which lists the sizes that work, if there is an obstacle to this size."""
    if problem := obstacle(size):
        what, tensor = problem
        most = max(shape.num_experts, min(size for _, size, _ in split_sizes(shape)))
        works = ", ".join(str(n) for n in range(1, most + 1) if obstacle(n) is None)
        tensor = f"{tensor} {list(logical_shapes(shape)[tensor])}"
        raise UserError(f"{key} {size} ({engine}): {what} ({tensor}); sizes that work: {works}")


def kv_obstacle(shape: ModelShape, tp_size: int) -> Obstacle | None:
    """Return the obstacle where neither the number of KV heads nor the number of ranks is a
    multiple of the other."""
    for param in model_params(shape):
        kv = param.kv_heads
        if kv and kv % tp_size and tp_size % kv:
            what = f"num_key_value_heads is {kv}, and neither is a multiple of the other"
            return what, tensor_with("kv", shape)
    return None


def _uneven_rows(shape: ModelShape, tp_size: int) -> Obstacle | None:
    what = "the number of rows of q, k and v together"
    joint = (param for param in model_params(shape) if param.kv_heads)
    rows = {sum(part.size * part.heads for part in param.rows) for param in joint}
    return indivisible([(what, size, tensor_with("q", shape)) for size in rows], tp_size)


def split_sizes(shape: ModelShape) -> list[tuple[str, int, str]]:
    """Return the sizes that the number of ranks must divide in any engine, as `indivisible` takes
    them."""
    sizes = dict.fromkeys(size for block in shape.blocks for size in block.split_sizes())
    return [(key, size, tensor_with(dim, shape)) for key, size, dim in sizes]


def indivisible(sizes: Sequence[tuple[str, int, str]], parts: int) -> Obstacle | None:
    """Return an obstacle for the first of (name, size, a tensor) whose size is no multiple of
    `parts`."""
    broken = ((what, size, tensor) for what, size, tensor in sizes if size % parts)
    return next(
        (
            (f"{what} is {size}, which {parts} does not divide", tensor)
            for what, size, tensor in broken
        ),
        None,
    )


def _occurrences(
    shape: ModelShape, params: Sequence[Param], layers: range
) -> Iterator[tuple[int, int]]:
    """Yield (index of a parameter, global number of its layer) in the model's order; parameters
    outside the layers have the number of the first layer."""
    by_stage: dict[tuple[StagePlacement, int | None], list[int]] = {}
    for index, param in enumerate(params):
        by_stage.setdefault((param.stage, param.kind), []).append(index)
    kinds = shape.layer_kinds
    stages: list[tuple[StagePlacement, int | None, int]] = [("first", None, layers.start)]
    for layer in layers:
        stages += [("layer", kinds[layer], layer), ("expert", kinds[layer], layer)]
    stages += [("last", None, layers.start), ("last_if_not_first", None, layers.start)]
    for stage, kind, layer in stages:
        yield from ((index, layer) for index in by_stage.get((stage, kind), ()))


def _model_params(shape: ModelShape) -> Iterator[tuple[Param, int]]:
    """Yield the parameters of all layers, in the model's order, each with the number of its
    layer."""
    params = model_params(shape)
    for index, layer in _occurrences(shape, params, range(shape.num_layers)):
        yield params[index], layer


@dataclass(frozen=True)
class LocalParam:
    """One parameter in one process."""

    param: Param
    local: str
    """Local name, as in Param."""
    size: tuple[int, ...]
    """Local shape."""
    shards: tuple[Shard, ...]
    """Shards of the parameter, with names as in Param."""
    is_float32: bool
    """The parameter is float32 whatever the type of the model."""
    half: int | None = None
    """The first row of a Half."""


def layout_of_layers(shape: ModelShape, params: Sequence[LocalParam], layers: range) -> Layout:
    """Return the layout of a process that holds in each of these layers the parameters of the
    layer's kind. The process numbers the layers from 0."""
    shapes = {}
    shards = []
    float32: set[str] = set()
    for index, layer in _occurrences(shape, [param.param for param in params], layers):
        param = params[index]
        local = name_in_layer(param.local, layer - layers.start)
        if param.half is not None:
            local = Half(local, param.half)
        shapes[local] = param.size
        shards += [
            Shard(name_in_layer(p.tensor, layer), p.box, local, p.offset) for p in param.shards
        ]
        float32 |= {local} if param.is_float32 else set()
    return Layout(shapes, tuple(shards), frozenset(float32))


def local_param(
    param: Param, shape: ModelShape, local: str, ranges: Sequence[Range], experts: range
) -> LocalParam:
    """Return the parameter that concatenates `ranges` along the split dimension, or the first; for
    experts, their stack."""
    sizes = shape.dims()
    stacks = param.stage == "expert"
    shards = []
    filled = 0
    dims = next(iter(param.hf.values()))
    axis = next((a for a, d in enumerate(dims) if d in SPLIT_DIMS), 0)
    for name, (start, end) in ranges:
        if name not in param.hf:  # rows of an adapter that is not there
            filled += end - start
            continue
        dims = param.hf[name]
        box = [(0, sizes[d]) for d in dims]
        offset = [0] * len(dims)
        axis = next((a for a, d in enumerate(dims) if d in SPLIT_DIMS), 0)
        # Rows past the logical tensor's end are padding.
        box[axis] = (min(start, sizes[dims[axis]]), min(end, sizes[dims[axis]]))
        offset[axis] = filled
        filled += end - start
        if stacks:
            box.insert(0, (experts.start, experts.stop))
            offset.insert(0, 0)
        if all(a < b for a, b in box):
            shards.append(Shard(name, tuple(box), local, tuple(offset)))
    local_shape = [sizes[d] for d in dims]
    local_shape[axis] = filled
    size = (len(experts), *local_shape) if stacks else tuple(local_shape)
    return LocalParam(param, local, size, tuple(shards), param.is_correction_bias)
