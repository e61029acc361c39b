"""Random states that Megatron-Core's models need. The models themselves are built in tests/dist."""

from __future__ import annotations

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name

from rlhf_mc.models.megatron_patches import add_random_states, megatron_calls


def test_random_states_of_dense_and_expert_layers_exist() -> None:
    """Enter the random states that Transformer Engine's linear layers enter: the default one and that of experts."""
    with megatron_calls():
        tracker = get_cuda_rng_tracker()
        tracker.reset()
        for _ in range(2):  # once per role
            add_random_states()
        with tracker.fork():
            pass
        with tracker.fork(get_expert_parallel_rng_tracker_name()):
            pass
