"""What is set up around Megatron-Core's models. Models themselves are built in tests/dist."""

from __future__ import annotations

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name

from rlhf_mc import platform
from rlhf_mc.models.build import _add_random_state


def test_every_random_state_that_a_layer_enters_is_there() -> None:
    """Transformer Engine's linear layers enter one as soon as there are any: their own, or that of experts."""
    with platform.megatron():
        tracker = get_cuda_rng_tracker()
        tracker.reset()
        for _ in range(2):  # by each role
            _add_random_state()
        with tracker.fork():
            pass
        with tracker.fork(get_expert_parallel_rng_tracker_name()):
            pass
