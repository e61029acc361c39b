"""Coverage of checkpoints by the layouts of all ranks, and what is said of layouts that are
wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from families import shape_of

from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.coverage import rollout_coverage, training_coverage
from rlhf_mc.reshard.layout import Layout, Shard, logical_shapes
from rlhf_mc.reshard.placement import rollout_layouts, training_layouts
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology.mesh import Mesh

MESHES = [
    Mesh(1, 1, 1),
    Mesh(4, 2, 1),
    Mesh(4, 2, 2),
    Mesh(8, 4, 2),
    Mesh(4, 1, 2, vpp=2),
    Mesh(8, 2, 2, cp=2),
]


@pytest.mark.parametrize(
    ("family", "mesh"),
    [(family, mesh) for family in ("llama", "qwen2", "gemma") for mesh in MESHES]
    + [("qwen3_moe", mesh) for mesh in (*MESHES, Mesh(8, 2, 2, ep=2), Mesh(8, 2, 1, ep=4, cp=2))],
    ids=str,
)
@pytest.mark.parametrize("value_head", [False, True])
def test_layouts_cover_the_checkpoint(family: str, mesh: Mesh, value_head: bool) -> None:
    shape = replace(shape_of(family, num_hidden_layers=4), value_head=value_head)
    found = training_coverage(shape, mesh, training_layouts(shape, mesh))
    sizes = logical_shapes(shape).values()
    assert (found.num_tensors, found.num_elements) == (len(sizes), sum(map(math.prod, sizes)))
    assert found.num_held >= found.num_elements * (1 if shape.has_experts else mesh.replicas)
    assert mesh.world > 1 or found.num_held == found.num_elements


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layouts_of_vllm_cover_the_checkpoint(tp: int) -> None:
    shape = shape_of("qwen3_moe")  # 2 KV heads: with TP 4 two ranks hold each
    found = rollout_coverage(
        shape, tp, rollout_layouts(shape, [range(tp), range(tp, 2 * tp)], vllm_layout)
    )
    assert (
        found.num_tensors == len(logical_shapes(shape)) and found.num_held >= 2 * found.num_elements
    )


def without(layout: Layout, name: str) -> Layout:
    """Return the layout without a tensor, and without its shards."""
    shapes = {local: size for local, size in layout.stacked_shapes.items() if local != name}
    return Layout(shapes, tuple(shard for shard in layout.stacked if shard.local != name))


def changed(layout: Layout, name: str, **fields: Any) -> Layout:
    """Return the layout with other fields in the first shard of a tensor."""
    first = next(shard for shard in layout.stacked if shard.local == name)
    return Layout(
        layout.stacked_shapes,
        tuple(replace(s, **fields) if s is first else s for s in layout.stacked),
    )


def added(layout: Layout, shard: Shard) -> Layout:
    return Layout({**layout.stacked_shapes, shard.local: (6, 6)}, (*layout.stacked, shard))


ROUTER = "decoder.layers.0.mlp.router.weight"
PROJ = "decoder.layers.0.self_attention.linear_proj.weight"
OUT = "model.layers.0.self_attn.o_proj.weight"
SIZE = "[6, 12]"


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda layout: without(layout, PROJ),
            f"{OUT} {SIZE}: [0:6, 0:6] is held 1 times instead of 2",
        ),
        (
            lambda layout: without(layout, ROUTER),
            "model.layers.0.mlp.gate.weight [4, 6]: [0:4, 0:6] is held 3 times",
        ),
        (
            lambda layout: changed(layout, PROJ, box=((0, 6), (5, 11))),
            f"{OUT} {SIZE}: [0:6, 5:11] is held 1 times",
        ),
        (
            lambda layout: changed(layout, PROJ, offset=(0, 1)),
            f"rank 0: a block of {PROJ} is outside of [6, 6]",
        ),
        (
            lambda layout: changed(layout, PROJ, box=((0, 6), (0, 5))),
            f"rank 0: 6 of 36 elements of {PROJ} have no source",
        ),
        (
            lambda layout: changed(layout, PROJ, tensor="model.layers.0.extra"),
            f"{OUT} {SIZE}: [0:6, 0:6] is held 1 times instead of 2",
        ),
        (
            lambda layout: added(layout, Shard("extra", ((0, 6), (0, 6)), "x", (0, 0))),
            "extra is no tensor of the model",
        ),
        (
            lambda layout: added(layout, Shard(OUT, ((0, 6), (0, 6)), PROJ, (0, 0))),
            f"rank 0: blocks of {PROJ} overlap",
        ),
    ],
)
def test_wrong_layout_of_one_rank(break_it: Callable[[Layout], Layout], message: str) -> None:
    shape = shape_of("qwen3_moe")
    mesh = Mesh(4, 2, 1)
    right = training_layouts(shape, mesh)
    with pytest.raises(UserError) as error:
        training_coverage(shape, mesh, [break_it(right[0]), *right[1:]])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 6), (0, 6)), ((0, 6), (5, 11))], "[0:6, 0:6] and [0:6, 5:11] overlap"),
        ([((0, 6), (0, 6)), ((0, 6), (6, 12))], None),
    ],
)
def test_wrong_layout_of_all_ranks(boxes: list[Any], message: str | None) -> None:
    shape = shape_of("qwen3_moe")
    mesh = Mesh(2, 2, 1)
    layouts = [
        changed(layout, PROJ, box=box)
        for layout, box in zip(training_layouts(shape, mesh), boxes, strict=True)
    ]
    if message is None:
        training_coverage(shape, mesh, layouts)
        return
    with pytest.raises(UserError) as error:
        training_coverage(shape, mesh, layouts)
    assert message in str(error.value)


def test_tensor_that_no_rank_holds() -> None:
    shape = shape_of("qwen3_moe")
    layouts = [without(layout, PROJ) for layout in training_layouts(shape, Mesh(1, 1, 1))]
    with pytest.raises(
        UserError, match=r"o_proj.weight \[6, 12\]: 72 of 72 elements are on no rank"
    ):
        training_coverage(shape, Mesh(1, 1, 1), layouts)
