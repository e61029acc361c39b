"""Replacement of attributes of other libraries. The patches themselves are in torch_patches.py,
models/megatron_patches.py, rollout/vllm_patches.py and sglang_patches.py, one file per library;
rollout/vllm_parameters.py replaces vLLM's groups while it builds a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

MISSING: Any = object()
"""Stands for an attribute that its owner does not define (a class may inherit it)."""


@dataclass(frozen=True)
class Patch:
    """One attribute of a library that is replaced for the lifetime of the process."""

    owner: Any
    """Module or class."""
    name: str
    """Name of the attribute."""
    replacement: Any
    reason: str
    """The behaviour of the original that the program cannot use. A test fails when the original no
    longer has it."""
    original: Any = field(init=False)
    """The attribute before the patch; MISSING where the owner does not define it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "original", vars(self.owner).get(self.name, MISSING))

    @property
    def target(self) -> str:
        """The dotted path of the attribute."""
        owner = self.owner
        path = (
            f"{owner.__module__}.{owner.__qualname__}"
            if isinstance(owner, type)
            else owner.__name__
        )
        return f"{path}.{self.name}"


def apply(patches: Iterable[Patch]) -> None:
    """Replace the attributes. A second call changes nothing."""
    for patch in patches:
        setattr(patch.owner, patch.name, patch.replacement)


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace one attribute while the body runs; MISSING removes it."""
    before = vars(owner).get(name, MISSING)
    _set(owner, name, replacement)
    try:
        yield
    finally:
        _set(owner, name, before)


def _set(owner: Any, name: str, value: Any) -> None:
    if value is not MISSING:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)
