"""Random states that Megatron-Core's models need. The models themselves are built in tests/dist."""

from __future__ import annotations

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name

from rlhf_mc import platform
from rlhf_mc.models.build import _add_random_state


def test_random_states_of_dense_and_expert_layers_exist() -> None:
    """Enter the random states that Transformer Engine's linear layers enter: the default one and that of experts."""
    with platform.megatron():
        tracker = get_cuda_rng_tracker()
        tracker.reset()
        for _ in range(2):  # once per role
            _add_random_state()
        with tracker.fork():
            pass
        with tracker.fork(get_expert_parallel_rng_tracker_name()):
            pass
