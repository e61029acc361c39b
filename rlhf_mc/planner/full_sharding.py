"""FSDP2: the state of a model whose parameters are sharded over ranks, and what is gathered and
reduced in its passes, as torch's fully_shard does (torch/distributed/fsdp/_fully_shard).

Of each parameter a rank holds ceil(n / d) of the n rows, with padding on the last ranks. A layer is
gathered for its forward pass, and for its backward pass if it was freed. Embedding, last norm and
head are the root's, which stays gathered during a pass. Each backward pass of a micro-batch reduces
gradients in float32; their replicas (HSDP) are reduced in the last one."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import Config, layouts, roles
from rlhf_mc.planner.collectives import Collective
from rlhf_mc.planner.model_state import ITEMSIZES, ModelState
from rlhf_mc.planner.rank_layouts import layout_at
from rlhf_mc.reshard.freeze import frozen_parameters, frozen_tensors
from rlhf_mc.topology.mesh import Coordinate, Mesh

_FLOAT32 = 4
_MOMENTS = 2
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Units:
    """Elements of a rank's shards, by what is gathered together."""

    root: int
    layers: tuple[int, ...]
    pinned: int
    """Elements of all shards in page-locked memory, each in a block of a power of two (torch's
    CachingHostAllocator.h)."""

    @property
    def total(self) -> int:
        """Elements of all shards."""
        return self.root + sum(self.layers)


@dataclass(frozen=True)
class FullySharded:
    """A model under FSDP2."""

    world: int
    """Ranks that hold the model."""
    ranks: int
    """Ranks over which each parameter is sharded; the other ranks have replicas of the shards
    (HSDP)."""
    frees_layers: bool
    """Layers are freed after their forward pass (reshard_after_forward)."""
    on_host: bool
    """State and optimizer step are on the host (offload_policy)."""
    itemsize: int
    """Bytes of an element of the type in which the model computes."""
    whole: int
    """Bytes of correction biases, which each rank has whole."""
    all: Units
    trained: Units

    @property
    def state(self) -> ModelState:
        """The bytes on a rank: of what is trained the parameters are the float32 main parameters,
        and gradients and Adam's moments are float32 too."""
        trained = self.trained.total * _FLOAT32
        kept = (self.all.total - self.trained.total) * self.itemsize + self.whole
        return ModelState(trained + kept, trained, _MOMENTS * trained)

    @property
    def narrowed(self) -> float:
        """The bytes of the copy of the main parameters, in the type in which the model computes,
        that a weight update or an export reads."""
        copied = self.all if self.on_host else self.trained
        return float(copied.total * self.itemsize * (self.on_host or self.itemsize < _FLOAT32))

    @property
    def host_bytes(self) -> float:
        """The bytes of the state in host memory."""
        if not self.on_host:
            return 0.0
        frozen = (self.all.pinned - self.trained.pinned) * self.itemsize
        # The blocks of the weights as they were read, which torch keeps, and the copy of an update.
        narrow = (self.trained.pinned + self.trained.total) * self.itemsize
        kept = frozen + narrow * (self.itemsize < _FLOAT32)
        return float(2 * self.trained.pinned * _FLOAT32 + kept + self.state.optimizer)

    @property
    def grads(self) -> float:
        """The bytes of reduced gradients on the device in an update. Of a state on the host they
        are those of replicas: until all micro-batches are summed, and then all of a pass until it
        ends (torch's _partial_reduce_output and _all_reduce_state)."""
        return float(self.state.grads * (not self.on_host or self.world > self.ranks))

    def copied(self, micro_batches: int, is_update: bool) -> float:
        """Return the bytes that a pass copies between host and device: shards for each gather, and
        reduced gradients."""
        if not self.on_host:
            return 0.0
        of_root, of_layers = self._gathers(micro_batches, is_update)
        shards = of_root * self.all.root + of_layers * sum(self.all.layers)
        reductions = 1 if self.world > self.ranks else micro_batches
        gradients = reductions * self.state.grads * is_update
        return shards * self.state.params / self.all.total + gradients

    def _gathers(self, micro_batches: int, is_update: bool) -> tuple[int, int]:
        """Return how often a pass gathers root and layers. Without a backward pass, what is not
        freed stays for the next micro-batch."""
        of_layers = micro_batches if is_update or self.frees_layers else 1
        of_root = micro_batches if is_update else 1
        return of_root, of_layers * (1 + (is_update and self.frees_layers))

    @property
    def gathered(self) -> float:
        """The bytes of whole parameters from the first layer of a pass to its last: of the root,
        and of layers that are not freed."""
        kept = 0 if self.frees_layers else sum(self.all.layers)
        return float(self.ranks * self.itemsize * (self.all.root + kept))

    @property
    def gathered_at_layer(self) -> float:
        """Besides: of the layer that computes and the next; that one is gathered in a buffer."""
        layers = 2 if self.frees_layers else 1
        return float(self.ranks * self.itemsize * layers * max(self.all.layers))

    @property
    def gradients_at_layer(self) -> float:
        """The bytes of gradients that are not reduced in a layer's backward pass: of the output
        layer, as of the root, of the layer, and its float32 copy that is being reduced."""
        layer = max(self.trained.layers)
        elements = (self.trained.root + layer) * self.itemsize + layer * _FLOAT32
        return float(self.ranks * elements)

    @property
    def at_start(self) -> float:
        """The bytes before there are activations: of the root and of the first layer twice, as
        they are gathered and as parameters."""
        return float(2 * self.ranks * self.itemsize * (self.all.root + max(self.all.layers)))

    @property
    def at_end(self) -> float:
        """The bytes of whole parameters and gradients when no activations are left: of the root,
        and its float32 gradients that are being reduced."""
        sizes = self.all.root * self.itemsize + self.trained.root * (self.itemsize + _FLOAT32)
        return float(self.ranks * sizes)

    def collectives(self, rank: int, micro_batches: int, is_update: bool) -> list[Collective]:
        """Return the collectives of a pass on this rank."""
        first = rank // self.ranks * self.ranks
        shards = tuple(range(first, first + self.ranks))
        replicas = tuple(range(rank % self.ranks, self.world, self.ranks))
        of_root, of_layers = self._gathers(micro_batches, is_update)
        elements = of_root * self.all.root + of_layers * sum(self.all.layers)
        calls = of_root + of_layers * len(self.all.layers)
        gathered = self.ranks * elements * self.itemsize
        collectives = [Collective("parameters", "all_gather", shards, gathered, calls)]
        if is_update:
            size = self.trained.total * _FLOAT32
            calls = 1 + len(self.trained.layers)
            whole = micro_batches * self.ranks * size
            collectives += [
                Collective("gradients", "reduce_scatter", shards, whole, micro_batches * calls),
                Collective("gradients", "all_reduce", replicas, size, calls),
            ]
        return [item for item in collectives if len(item.group) > 1]


def full_sharding(
    cfg: Config, role: str, shape: ModelShape, mesh: Mesh, cuda: bool = True
) -> FullySharded | None:
    """Return a role's model under FSDP2 on the ranks of the mesh; None: its strategy is
    Megatron's."""
    layout = layouts(cfg)[role]
    if layout.fsdp is None:
        return None
    freeze = getattr(roles(cfg)[role], "freeze", None)
    patterns = None if freeze is None else tuple(freeze)
    units = _units(role, shape, patterns, mesh.shards, cuda)
    fsdp = layout.fsdp
    return FullySharded(
        mesh.world,
        mesh.shards,
        fsdp.reshard_after_forward,
        fsdp.offload_policy and cuda,
        ITEMSIZES[layout.dtype],
        *units,
    )


@functools.lru_cache(maxsize=64)
def _units(
    role: str, shape: ModelShape, freeze: tuple[str, ...] | None, ranks: int, cuda: bool
) -> tuple[int, Units, Units]:
    """Return the bytes that each rank has whole, the units of all parameters, and of those that are
    trained. freeze: patterns of tensors that are not trained; None: the model is never trained."""
    layout = layout_at(shape, Mesh(1, 1, 1), Coordinate(0, 0, 0), cuda)
    sizes = {name: size for name, size in layout.shapes.items() if name not in layout.float32}
    whole = sum(math.prod(layout.shapes[name]) * _FLOAT32 for name in layout.float32)
    frozen: Collection[str] = sizes
    if freeze is not None:
        frozen = frozen_parameters(frozen_tensors(f"{role}.freeze", freeze, shape), layout)
    trained = {name: size for name, size in sizes.items() if name not in frozen}
    return (
        whole,
        _sharded(sizes, shape.num_layers, ranks),
        _sharded(trained, shape.num_layers, ranks),
    )


def _sharded(sizes: Mapping[str, tuple[int, ...]], num_layers: int, ranks: int) -> Units:
    """Return the units of parameters, given by name and shape."""
    units = [0] * (num_layers + 1)
    pinned = 0
    for name, (rows, *row) in sizes.items():
        layer = _LAYER.match(name)
        unit = num_layers if layer is None else int(layer[1])
        elements = math.ceil(rows / ranks) * math.prod(row)
        units[unit] += elements
        pinned += 1 << (elements - 1).bit_length()
    return Units(units[num_layers], tuple(units[:num_layers]), pinned)
