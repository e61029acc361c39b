"""The comparison of a run of FSDP2 with Megatron's quickest layout for the same machine."""

from __future__ import annotations

from rlhf_mc.config.errors import UserError
from rlhf_mc.planner.gpus import Machine
from rlhf_mc.planner.lengths import Lengths
from rlhf_mc.planner.search import EQUAL, search
from rlhf_mc.planner.search_space import Settings
from rlhf_mc.planner.start import Capacity


def compare_with_megatron(
    settings: Settings, machine: Machine, capacity: Capacity, lengths: Lengths, seconds: float
) -> str:
    """Return a line on Megatron's quickest layout for a run of FSDP2. settings: the user's.
    seconds: the lower bound of a step of FSDP2."""
    others = {
        key: value
        for key, value in settings.items()
        if not key.endswith(".strategy") and ".fsdp_config." not in key
    }
    try:
        (best,) = search(others, machine, capacity, lengths, 1, keeps_split=True)
    except UserError as error:
        return f"fsdp2 takes {seconds:.1f} s a step at least; of Megatron's layouts, {error}"
    layout = best.cfg.actor.megatron
    sizes = {
        "TP": layout.tensor_model_parallel_size,
        "CP": layout.context_parallel_size,
        "PP": layout.pipeline_model_parallel_size,
        "EP": layout.expert_model_parallel_size,
    }
    text = " ".join(f"{name} {size}" for name, size in sizes.items())
    ratio = seconds / best.times.seconds
    speed = f"{ratio:.2f} times as fast" if ratio > 1 + EQUAL else "not faster"
    return (
        f"Megatron's quickest layout, {text}, is {speed}: {best.times.seconds:.1f} s a step by "
        f"the lower bound, fsdp2 {seconds:.1f} s"
    )
