"""Steps that change the modules which Megatron-Core has built, each beside the block that needs it.
gpt_model.STEPS has all of them in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.topology.groups import ProcessGroups


@dataclass(frozen=True)
class Assembly:
    """The modules of a rank, or of one of its virtual pipeline chunks, and what they are built
    from."""

    model: Any
    """A gpt_model.PackedGPT."""
    shape: ModelShape
    megatron: MegatronConfig
    groups: ProcessGroups
    layers: range
    """Global numbers of the layers."""
    is_first: bool
    """The modules begin the model."""
    is_last: bool
    """The modules end the model."""


AssemblyStep = Callable[[Assembly], None]
"""A change of an assembly where it is needed. Its docstring ends with the reason: the behaviour of
Megatron-Core's modules that the model cannot use."""
