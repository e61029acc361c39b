"""The layouts of all ranks, for the training mesh and for the rollout groups. layout.py has the
layout of one rank, topology/mesh.py the coordinates of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.reshard.layout import EMPTY, Layout, RankLayout, Stack, mcore_layout
from rlhf_mc.topology.mesh import Coordinate, Mesh


def training_layouts(
    shape: ModelShape, mesh: Mesh, transformer_engine: bool = False
) -> list[Layout]:
    """Return the layout on each rank of the mesh of a Megatron-Core model, or of its rows where the
    mesh shards them. transformer_engine: the layers are Transformer Engine's."""
    known: dict[tuple[Coordinate, int], Layout] = {}
    layouts = []
    for place, rank in enumerate(mesh.ranks):
        # Replicas share one Layout object, for which make_plan plans once.
        coordinate = replace(mesh.coordinate(rank), dp=0, cp=0)
        key = coordinate, place % mesh.shards
        if key not in known:
            layout = training_layout(shape, mesh, coordinate, transformer_engine)
            known[key] = layout if mesh.shards == 1 else row_shard(layout, key[1], mesh.shards)
        layouts.append(known[key])
    return layouts


def row_shard(layout: Layout, part: int, parts: int) -> Layout:
    """Return the part-th of `parts` shards of a layout's tensors by rows, as torch's fully_shard
    has them: of n rows ceil(n / parts) each, the last ones fewer or none. Tensors without rows are
    left out; of float32 ones (correction biases) each shard has all rows."""
    shapes = {}
    shards = []
    for local, size in layout.stacked_shapes.items():
        of_local = layout.by_local.get(local, [])
        if local in layout.float32:
            shapes[local] = size
            shards += of_local
            continue
        axis = 1 if isinstance(local, Stack) else 0
        most = -(-size[axis] // parts)
        start, end = (min(bound * most, size[axis]) for bound in (part, part + 1))
        if start == end:
            continue
        shapes[local] = (*size[:axis], end - start, *size[axis + 1 :])
        for shard in of_local:
            assert len(shard.offset) == len(shard.box), shard
            first = shard.offset[axis]
            box = list(shard.box)
            low = max(start, first)
            high = min(end, first + box[axis][1] - box[axis][0])
            if low >= high:
                continue
            box[axis] = (box[axis][0] + low - first, box[axis][0] + high - first)
            offset = (*shard.offset[:axis], low - start, *shard.offset[axis + 1 :])
            shards.append(replace(shard, box=tuple(box), offset=offset))
    return replace(layout, stacked_shapes=shapes, stacked=tuple(shards))


def training_layout(
    shape: ModelShape, mesh: Mesh, coordinate: Coordinate, transformer_engine: bool
) -> Layout:
    """Return the layout of the ranks at a coordinate."""
    chunks = []
    for chunk, layers in enumerate(mesh.chunk_layers(shape.num_layers, coordinate.pp)):
        first = coordinate.pp == 0 and chunk == 0
        last = coordinate.pp == mesh.pp - 1 and chunk == mesh.vpp - 1
        experts = {"ep_rank": coordinate.ep, "ep_size": mesh.ep}
        chunks.append(
            mcore_layout(
                shape, coordinate.tp, mesh.tp, layers, first, last, transformer_engine, **experts
            )
        )
    return chunks[0] if mesh.vpp == 1 else _concatenated(chunks)


def chunk_prefix(chunk: int, num_chunks: int) -> str:
    """Return the prefix of the parameter names of a virtual pipeline chunk; empty if the rank has
    one chunk."""
    return f"chunk{chunk}." if num_chunks > 1 else ""


def _concatenated(chunks: Sequence[Layout]) -> Layout:
    """Return the layout of a rank with several virtual pipeline chunks."""
    shapes = {}
    shards = []
    float32: set[str] = set()
    for number, layout in enumerate(chunks):
        prefix = chunk_prefix(number, len(chunks))
        names = {
            local: Stack(prefix + local.before, local.after)
            if isinstance(local, Stack)
            else f"{prefix}{local}"
            for local in layout.stacked_shapes
        }
        shapes.update({names[local]: size for local, size in layout.stacked_shapes.items()})
        shards += [replace(shard, local=names[shard.local]) for shard in layout.stacked]
        float32 |= {names[local] for local in layout.float32}
    return Layout(shapes, tuple(shards), frozenset(float32))


def with_contiguous_experts(layouts: Sequence[Layout], mesh: Mesh) -> list[Layout]:
    """Return the training layouts of ranks whose experts lie in the distributed optimizer's buffer,
    in the order of models/expert_parts.ascending_in_buffer. Ranks that share a Layout share the
    result.

    The stacks are contiguous where the buffer has no padding: the start of a tensor is padded to 64
    elements, and the end of a bucket to 128 and to equal shards of its ranks. Without expert
    parallelism the buffer has all tensors."""
    multiple = math.lcm(128, mesh.replicas // mesh.ep)

    def marked(layout: Layout) -> Layout:
        stacks = frozenset(name for name in layout.stacked_shapes if isinstance(name, Stack))
        members = stacks if mesh.ep > 1 else layout.stacked_shapes.keys() - layout.float32
        sizes = (math.prod(layout.stacked_shapes[name][name in stacks :]) for name in members)
        fits = all(size % multiple == 0 for size in sizes)
        return replace(layout, contiguous=stacks) if stacks and fits else layout

    return _changed(layouts, marked)


def _changed(layouts: Sequence[Layout], change: Callable[[Layout], Layout]) -> list[Layout]:
    """Return the changed layouts. Ranks that share a Layout share the result."""
    known = {id(layout): change(layout) for layout in {id(x): x for x in layouts}.values()}
    return [known[id(layout)] for layout in layouts]


def rollout_layouts(
    shape: ModelShape, engine_ranks: Sequence[Sequence[int]], layout: RankLayout
) -> list[Layout]:
    """Return each rank's layout of the rollout engines, EMPTY on ranks before the first one of an
    engine. engine_ranks: the ranks of each engine, in the order of its TP ranks."""
    by_rank = {
        rank: layout(shape, tp_rank, len(ranks))
        for ranks in engine_ranks
        for tp_rank, rank in enumerate(ranks)
    }
    return [by_rank.get(rank, EMPTY) for rank in range(max(by_rank) + 1)]


def split_layouts(
    layouts: Sequence[Layout], tensors: Collection[str]
) -> tuple[list[Layout], list[Layout]]:
    """Return the layouts without the shards of these logical tensors, and with these alone. Ranks
    that share a Layout share the results."""

    def part(is_chosen: bool) -> list[Layout]:
        def change(layout: Layout) -> Layout:
            shards = (p for p in layout.stacked if (p.tensor in tensors) == is_chosen)
            return replace(layout, stacked=tuple(shards))

        return _changed(layouts, change)

    return part(False), part(True)
