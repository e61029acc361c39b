"""The settings of the section profile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlhf_mc.config.numbers import Count, Range


@dataclass
class ProfileConfig:
    """Profiles of single steps: traces, and a table of each phase's seconds by rank (docs/profiling.md). They change no
    number of the training."""

    steps: list[Count] = field(default_factory=list)
    """Steps to profile, the first is 1. In these steps every rank measures each phase: its own work, and its waiting
    for others. The table goes to the console and to profile/step_<n>/phases.json. []: none."""
    ranks: list[Annotated[int, Range(0, 1_000_000)]] | None = field(default_factory=lambda: [0])
    """Ranks that also write a Chrome trace, profile/step_<n>/rank_<r>.json.gz. Tracing slows a rank down. []: none, for
    times without this. null: all ranks."""
    contents: list[Literal["memory", "shapes", "stack"]] = field(default_factory=list)
    """Further contents of the traces. memory: allocations; on GPUs also the allocator's history of the step, in
    rank_<r>_memory.pickle. shapes: of the operators' inputs. stack: lines of Python code; much slower."""
