"""Placement of a model's weights, gradients and optimizer state on the ranks of its mesh: the
interface of the setting `strategy`.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from rlhf_mc.config.schema import MegatronConfig, OptimConfig
from rlhf_mc.models.gpt_model import PackedGPT
from rlhf_mc.models.optimizer import OptimizerPart
from rlhf_mc.topology.groups import ProcessGroups


class TrainingStrategy(abc.ABC):
    """This rank's part of a model. Before make_trainable it is frozen."""

    chunks: Sequence[PackedGPT]
    """The modules, one for each virtual pipeline chunk; none outside of the mesh."""
    optimizer: Any = None
    """In Megatron-Core's form: chained_optimizers, each with a torch optimizer, and their
    param_groups; None: frozen."""
    trained: Sequence[Any] = ()
    """Modules that the schedule runs in an update, one for each chunk."""
    buffered: Sequence[Any] = ()
    """Those of them with a buffer of gradients (DistributedDataParallel)."""

    def __init__(self, megatron: MegatronConfig, groups: ProcessGroups) -> None:
        self.megatron = megatron
        self.groups = groups

    @abc.abstractmethod
    def named_parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors of this rank that an optimizer updates, or that are frozen, by the
        names of reshard's layout."""

    @abc.abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """Return named_parameters in the model's type: views of them where they are."""

    @property
    @abc.abstractmethod
    def has_weights(self) -> bool:
        """True where `weights` are memory of the model, False where some are copies."""

    @abc.abstractmethod
    def make_trainable(
        self, optim: OptimConfig, frozen: Collection[str], reduces_early: bool
    ) -> None:
        """Add gradients and the optimizer, for all parameters but `frozen`. reduces_early:
        gradients are reduced during the backward pass."""

    @abc.abstractmethod
    def zero_grad(self) -> None:
        """Begin the passes of an update."""

    @abc.abstractmethod
    def end_passes(self) -> None:
        """End passes, with or without a gradient."""

    @abc.abstractmethod
    def grad_norm(self) -> float:
        """Return the norm of the gradient over all ranks, of all parameters once."""

    @abc.abstractmethod
    def step(self, clip_factor: float) -> None:
        """Multiply the gradients by clip_factor if that is in (0, 1), and update the parameters."""

    @abc.abstractmethod
    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradient of each trained parameter, float32, of its shape."""

    @abc.abstractmethod
    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients that stay until the optimizer step."""

    @abc.abstractmethod
    def optimizer_parts(self) -> list[OptimizerPart]:
        """Return this rank's part of the optimizer's state by parameter."""
