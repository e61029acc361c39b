"""strategy fsdp2: torch's fully_shard. Each parameter is sharded by rows over neighbouring ranks,
and gathered layer by layer in the model's type. Of a model that is trained, the shards are float32:
the optimizer's main parameters. Gradients are reduced in float32 after each micro-batch and summed
in the shards: whole gradients, which one reduction for all micro-batches would need, do not fit.
Replicas of the shards sum theirs once, in the last micro-batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.model_schema import FsdpConfig, fsdp_config
from rlhf_mc.config.schema import MegatronConfig, OptimConfig
from rlhf_mc.models.expert_parts import CORRECTION_BIAS
from rlhf_mc.models.gpt_model import DTYPES, PackedGPT, assemble_model, enable_input_gradients
from rlhf_mc.models.optimizer import OptimizerPart, optimizer_parts
from rlhf_mc.models.strategies.strategy import TrainingStrategy
from rlhf_mc.topology.consensus import gather_objects
from rlhf_mc.topology.groups import ProcessGroups


class FsdpStrategy(TrainingStrategy):
    """Some rows of each parameter, and all of the correction biases, which no gradient reaches."""

    def __init__(self, shape: ModelShape, megatron: MegatronConfig, groups: ProcessGroups) -> None:
        super().__init__(megatron, groups)
        fsdp = fsdp_config(megatron)
        assert fsdp is not None
        self._dtype = DTYPES[megatron.dtype]
        self._device = torch.device("cpu") if fsdp.offload_policy else platform.device()
        self.chunks = []
        if groups.is_member:
            with _parameters_on_meta():
                model = assemble_model(shape, megatron, groups)
            model.requires_grad_(False)
            _shard(model, groups, self._dtype, fsdp)
            model._apply(self._zeros)
            self.chunks = [model]
        self._has_run = False
        self._find_shards()

    def _zeros(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor at its place, of zeros if it has no values."""
        device = self._device if isinstance(tensor, DTensor) else platform.device()
        return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    def _find_shards(self) -> None:
        """Note the parameters, and this rank's rows of each that has some."""
        named = dict(self.chunks[0].named_parameters()) if self.chunks else {}
        self._parameters: dict[str, Any] = named
        self._shards = {}
        for name, param in named.items():
            rows = param.detach() if name.endswith(CORRECTION_BIAS) else param._local_tensor
            if rows.numel():
                self._shards[name] = rows.detach().requires_grad_(param.requires_grad)

    def named_parameters(self) -> Mapping[str, torch.Tensor]:
        return self._shards

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: rows.data if name.endswith(CORRECTION_BIAS) else rows.data.to(self._dtype)
            for name, rows in self._shards.items()
        }

    @property
    def has_weights(self) -> bool:
        has_type = self.optimizer is None or self._dtype == torch.float32
        return has_type and self._device.type == platform.device().type

    def make_trainable(
        self, optim: OptimConfig, frozen: Collection[str], reduces_early: bool
    ) -> None:
        # fully_shard fixes the types of shards and messages in the first pass.
        assert not self._has_run, "make_trainable comes before the first pass"
        # A rank without rows of a parameter must know that it is frozen.
        frozen = frozenset().union(*gather_objects(frozenset(frozen)))
        for name, param in self._parameters.items():
            param.requires_grad_(name not in frozen and not name.endswith(CORRECTION_BIAS))
        for model in self.chunks:
            model._apply(lambda t: t.float() if t.requires_grad else t)
            model.no_sync = functools.partial(_within_replicas, model)
        self._find_shards()
        groups: list[dict[str, Any]] = [
            {"params": [], "wd_mult": 0.0},
            {"params": [], "wd_mult": 1.0},
        ]
        for name, rows in self._shards.items():
            if rows.requires_grad:
                decays = rows.dim() > 1 and not name.endswith(".bias")
                groups[decays]["params"].append(rows)
        adam = torch.optim.AdamW(groups, optim.lr, optim.betas, optim.eps, fused=True)
        part = SimpleNamespace(optimizer=adam)
        self.optimizer = SimpleNamespace(chained_optimizers=[part], param_groups=adam.param_groups)
        self.trained = self.chunks

    def _trained_shards(self) -> Iterator[tuple[str, torch.Tensor, Any]]:
        """Yield (name, this rank's rows, the parameter) of each trained parameter."""
        for name, rows in self._shards.items():
            if rows.requires_grad:
                yield name, rows, self._parameters[name]

    def zero_grad(self) -> None:
        for param in self._parameters.values():
            param.grad = None
        for rows in self._shards.values():
            rows.grad = None

    def end_passes(self) -> None:
        self._has_run = True
        # What a forward pass has gathered and kept would be stale after a step. Without a backward
        # pass torch also keeps the order of the layers, of every micro-batch.
        self.chunks[0].reset_iter_state()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (
            (name, param.grad.to_local())
            for name, _, param in self._trained_shards()
            if param.grad is not None
        )

    def grad_norm(self) -> float:
        grads = [grad for _, grad in self.gradients()]
        total = sum_of_squares(grads, self._device).to(platform.device())
        # Over the replicas of the shards too, which must clip alike to the last bit.
        dist.all_reduce(total, group=self.groups.members)
        mesh = self.groups.mesh
        return float((total * (mesh.shards / mesh.world)).sqrt())

    def step(self, clip_factor: float) -> None:
        for _, rows, param in self._trained_shards():
            rows.grad = param.grad.to_local()
        grads = [grad for _, grad in self.gradients()]
        if 0.0 < clip_factor < 1.0 and grads:
            torch._foreach_mul_(grads, clip_factor)
        self.optimizer.chained_optimizers[0].optimizer.step()
        self.zero_grad()

    def gradient_bytes(self) -> int:
        return sum(rows.nbytes for _, rows, _ in self._trained_shards())

    def optimizer_parts(self) -> list[OptimizerPart]:
        parts = optimizer_parts(self.optimizer, self._shards)
        if self._dtype == torch.float32:
            return parts
        return [
            replace(part, state={**part.state, "main": self._shards[part.local].detach().view(-1)})
            for part in parts
        ]


def sum_of_squares(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum over all elements of these tensors of the device."""
    # On a CPU torch sums a tensor's squares one after another in float32: the norm of 150e6
    # elements would be 2 % too small.
    parts = [part for tensor in tensors for part in tensor.view(-1).split(1 << 20)]
    norms = torch._foreach_norm([torch.zeros((), device=device), *parts])
    return torch.stack(norms).square().sum()


@contextlib.contextmanager
def _within_replicas(model: Any) -> Iterator[None]:
    """Let micro-batches sum no gradients over the replicas of the shards."""
    model.set_requires_all_reduce(False)
    yield
    model.set_requires_all_reduce(True)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let modules keep their parameters on "meta", where they take no memory. Buffers stay."""

    def hook(module: Any, name: str, param: torch.nn.Parameter | None) -> Any:
        if param is None or param.is_meta:
            return None
        return torch.nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _shard(model: PackedGPT, groups: ProcessGroups, dtype: torch.dtype, fsdp: FsdpConfig) -> None:
    """Shard the layers of a model, and the rest of it as one."""
    offload = CPUOffloadPolicy(platform.use_cuda()) if fsdp.offload_policy else OffloadPolicy()
    settings: dict[str, Any] = {
        "offload_policy": offload,
        "mesh": _device_mesh(groups),
        # Rotary angles are float32 whatever the type of the model.
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
        "ignored_params": {
            param for name, param in model.named_parameters() if name.endswith(CORRECTION_BIAS)
        },
    }
    for layer in model.decoder.layers:
        fully_shard(layer, reshard_after_forward=fsdp.reshard_after_forward, **settings)
    # Where the head alone is trained, torch reduces its gradient by a hook of the states.
    enable_input_gradients(model)
    # The head reads the output layer's weight after the forward pass.
    fully_shard(model, reshard_after_forward=False, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
            # An expert without tokens has a gradient on other ranks alone.
            module.set_reduce_scatter_unused_params(True)


def _device_mesh(groups: ProcessGroups) -> DeviceMesh:
    """Return the mesh of (replicas, shards), or of the shards alone where they are all ranks."""
    kind = platform.device().type
    mesh = groups.mesh
    if mesh.shards == mesh.world:
        return DeviceMesh.from_group(groups.sharding[1], kind)
    ranks = torch.tensor(mesh.ranks).view(-1, mesh.shards)
    names = ("replicas", "shards")
    return DeviceMesh.from_group(list(groups.sharding), kind, mesh=ranks, mesh_dim_names=names)
