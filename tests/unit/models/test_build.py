"""Random states that Megatron-Core's models need. The models themselves are built in tests/dist."""

from __future__ import annotations

import re
from pathlib import Path

import megatron.core
from megatron.core.tensor_parallel import random as mcore_random

from rlhf_mc.models.megatron_patches import add_random_states, megatron_calls

NAME = re.compile(r"get_\w+_rng_tracker_name|_[A-Z_]+_RNG_TRACKER_NAME")


def test_every_random_state_that_megatron_names_exists() -> None:
    """Enter each random state whose name the source of Megatron-Core reads, Transformer Engine's
    layers included."""
    (root,) = megatron.core.__path__
    read = {name for path in Path(root).rglob("*.py") for name in NAME.findall(path.read_text())}
    found = {getattr(mcore_random, name, name) for name in read}
    states = {name() if callable(name) else name for name in found}
    assert {"model-parallel-rng", "expert-parallel-rng", "data-parallel-rng"} <= states
    with megatron_calls():
        tracker = mcore_random.get_cuda_rng_tracker()
        tracker.reset()
        for _ in range(2):  # once per role
            add_random_states()
        for state in states:
            with tracker.fork(state):
                pass
