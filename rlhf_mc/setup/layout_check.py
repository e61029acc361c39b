"""The layouts of every rank compared with Megatron-Core's models, in one process and without their
memory: each rank's modules are built on torch's meta device, over process groups in which
collectives do nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.models.gpt_model import DTYPES, assemble_model, named_parameters
from rlhf_mc.models.transformer_engine import uses_transformer_engine
from rlhf_mc.reshard.coverage import Coverage, split_axes, training_coverage
from rlhf_mc.reshard.layout import Layout
from rlhf_mc.reshard.placement import training_layouts
from rlhf_mc.topology.groups import ProcessGroups, build_role_groups, simulated_rank
from rlhf_mc.topology.mesh import Mesh, training_mesh


@dataclass
class CheckedRole:
    """A role whose layouts agree with its models on all ranks."""

    mesh: Mesh
    coverage: Coverage
    num_local: int = 0
    """Parameters of all ranks that were compared."""
    seconds: float = 0.0


def check_training_layouts(
    models: Mapping[str, tuple[ModelShape, MegatronConfig]], world: int
) -> dict[str, CheckedRole]:
    """Build the models of all roles on each of `world` simulated ranks. Raise UserError at the
    first parameter whose name, shape, type or sharding is not the layout's, or if the layouts do
    not cover the checkpoint.

    The modules are as this process builds them: on a CPU Megatron-Core's local layers. fp8 is left
    out: it changes no parameter."""
    models = {
        role: (shape, replace(megatron, fp8=None)) for role, (shape, megatron) in models.items()
    }
    meshes = {role: training_mesh(megatron, world) for role, (_, megatron) in models.items()}
    layouts = {
        role: training_layouts(shape, meshes[role], uses_transformer_engine())
        for role, (shape, _) in models.items()
    }
    axes = {role: split_axes(shape) for role, (shape, _) in models.items()}
    checked = {}
    for role, (shape, _) in models.items():
        start = time.perf_counter()
        checked[role] = CheckedRole(
            meshes[role], training_coverage(shape, meshes[role], layouts[role])
        )
        checked[role].seconds = time.perf_counter() - start
    for rank in range(world):
        with simulated_rank(rank, world):
            groups = build_role_groups(meshes)
            for role, (shape, megatron) in models.items():
                start = time.perf_counter()
                params = _parameters(shape, megatron, groups[role])
                layout = layouts[role][rank]
                if problem := _difference(params, layout, shape, megatron) or _other_split(
                    params, layout, axes[role]
                ):
                    raise UserError(f"{role}, rank {rank} ({_place(groups[role])}): {problem}")
                checked[role].num_local += len(params)
                checked[role].seconds += time.perf_counter() - start
    return checked


def _parameters(
    shape: ModelShape, megatron: MegatronConfig, groups: ProcessGroups
) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of all virtual pipeline chunks of a rank, on the meta device, by the
    layout's names."""
    with torch.device("meta"):
        return named_parameters(
            [assemble_model(shape, megatron, groups, chunk) for chunk in range(groups.mesh.vpp)]
        )


def _difference(
    params: Mapping[str, torch.nn.Parameter],
    layout: Layout,
    shape: ModelShape,
    megatron: MegatronConfig,
) -> str | None:
    """Return the first difference between a rank's parameters and its layout."""
    for name, param in params.items():
        dtype = torch.float32 if name in layout.float32 else DTYPES[megatron.dtype]
        size = layout.shapes.get(name)
        if size is None:
            return f"the layout lacks {name} {list(param.shape)} of Megatron-Core's model"
        if size != tuple(param.shape):
            return (
                f"{name} is {list(param.shape)} in Megatron-Core's model and {list(size)} in the "
                "layout"
            )
        if param.dtype != dtype:
            return (
                f"{name} is {param.dtype} in Megatron-Core's model, and megatron.dtype is "
                f"{megatron.dtype}"
            )
    missing = next((name for name in layout.shapes if name not in params), None)
    return (
        missing
        and f"Megatron-Core's model lacks {missing} {list(layout.shapes[missing])} of the layout"
    )


def _other_split(
    params: Mapping[str, torch.nn.Parameter], layout: Layout, axes: Mapping[str, int | None]
) -> str | None:
    """Return the first parameter that Megatron-Core does not split over tensor-parallel ranks along
    the layout's dimension (axes: by the checkpoint's tensor): a square matrix would have the same
    shape."""
    for shard in layout.shards:
        param = params[shard.local]
        dim = param.partition_dim if getattr(param, "tensor_model_parallel", False) else None  # type: ignore[attr-defined]
        if dim != axes[shard.tensor]:
            of_layout = f"{axes[shard.tensor]} in the layout (None: not split)"
            return (
                f"{shard.local} is split along dimension {dim} in Megatron-Core's model and "
                f"{of_layout}"
            )
    return None


def _place(groups: ProcessGroups) -> str:
    coordinate = groups.coordinate
    return (
        f"TP rank {coordinate.tp}, CP rank {coordinate.cp}, stage {coordinate.pp}, "
        f"DP rank {coordinate.dp}, EP rank {coordinate.ep}"
    )
