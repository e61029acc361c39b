"""The list of the parts, in the order in which they run, and what each needs. No torch here."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """One part of the check: a function `name` of the module gpu_parts.<module>."""

    name: str
    module: str
    about: str
    """One line for --list."""
    needs: tuple[str, ...] = ()
    """Names of NEEDS."""
    hides: tuple[str, ...] = ()
    """Modules that cannot be imported while the part runs, although they are installed."""
    deterministic: bool = False
    """The part runs with deterministic algorithms alone, as with trainer.deterministic."""
    exact_float32: bool = False
    """The part compares with float32 products, so none may be in TF32."""
    seconds: int = 300
    """Time limit, imports included."""
    rank_0_only: bool = False
    """The part starts the ranks of its own, so it runs on the first rank alone."""

    def function(self) -> Callable[..., None]:
        """Import and return the part's function (report, sizes) -> None."""
        function: Callable[..., None] = getattr(
            importlib.import_module(f"gpu_parts.{self.module}"), self.name
        )
        return function


TE = "transformer_engine"
VLLM = ("vllm",)
NEEDS = {
    "cuda": "it needs a GPU",
    "ranks": "it needs two ranks or more (torchrun --nproc-per-node 2)",
    "own_gpu": "it measures speed, and ranks share a GPU here (RLHF_MC_RANKS_PER_GPU)",
    "vllm": "vLLM is not installed",
    "sglang": "SGLang is not installed",
    TE: "Transformer Engine is not installed",
}
"""Need of a part -> the reason for skipping it."""

PARTS = (
    Part(
        "machine",
        "torch_parts",
        "device, versions; a matrix product, copies, and their rates",
        seconds=120,
    ),
    Part(
        "checksums", "torch_parts", "checksums of the weight update on the device against the CPU"
    ),
    Part(
        "process_groups",
        "torch_parts",
        "objects over gloo, sums and point-to-point messages on the device, groups",
    ),
    Part(
        "timeouts",
        "torch_parts",
        "a collective that a rank misses ends within its timeout",
        ("ranks",),
    ),
    Part(
        "lost_ranks",
        "lost_rank_parts",
        "a rank is killed, or stopped: the others end and name it",
        ("ranks",),
    ),
    Part(
        "models_float32",
        "model_parts",
        "models against transformers in float32, local layers",
        hides=(TE,),
        exact_float32=True,
    ),
    Part(
        "models_bfloat16",
        "model_parts",
        "models against transformers in bfloat16, local layers",
        hides=(TE,),
        exact_float32=True,
    ),
    Part(
        "models_te",
        "model_parts",
        "models against transformers in bfloat16, Transformer Engine",
        (TE,),
        exact_float32=True,
    ),
    Part(
        "models_te_float32",
        "model_parts",
        "models against transformers in float32, Transformer Engine",
        (TE,),
        exact_float32=True,
    ),
    Part(
        "heads_152k",
        "head_parts",
        "log-probs at vocabulary 152k: values, gradients, memory, speed",
        exact_float32=True,
    ),
    Part(
        "resume",
        "training_parts",
        "two steps, save, load, the same third step: how far from the same bits",
    ),
    Part(
        "deterministic",
        "training_parts",
        "the same with trainer.deterministic: the same bits",
        deterministic=True,
    ),
    Part("async_save", "training_parts", "a save in the background while parameters change"),
    Part(
        "out_of_memory",
        "memory_parts",
        "a rank runs out of memory: the update is repeated with half the tokens",
    ),
    Part(
        "offload",
        "memory_parts",
        "offload at 95 % of the device memory: bits, and rates against a pinned copy",
    ),
    Part(
        "planned_memory",
        "planner_parts",
        "the planner's bytes of a 0.5B model's state and activations",
    ),
    Part(
        "weight_update",
        "memory_parts",
        "the weight update of 8B models against one copy on the device",
    ),
    Part("synchronisations", "speed_parts", "waits for the device per micro-batch"),
    Part(
        "throughput",
        "speed_parts",
        "tokens per second and share of peak FLOP/s of a 0.5B model",
        ("own_gpu",),
    ),
    Part(
        "profile",
        "profile_parts",
        "the profile of a step: named ranges, kernels, history of the allocator",
    ),
    Part(
        "quickstart",
        "rollout_parts",
        "the quickstart by its own commands",
        VLLM,
        seconds=1200,
        rank_0_only=True,
    ),
    Part(
        "sleep",
        "rollout_parts",
        "vLLM's sleep: memory released, the same tokens afterwards",
        VLLM,
    ),
    Part(
        "sleep_graphs",
        "rollout_parts",
        "the same, with the memory of CUDA graphs on the host",
        ("cuda", *VLLM),
    ),
    Part(
        "aliased_weights",
        "rollout_parts",
        "weights that vLLM and the trainer share, under CUDA graphs",
        VLLM,
    ),
    Part(
        "experts",
        "rollout_parts",
        "models with experts: vLLM's choices are replayed",
        VLLM,
        seconds=900,
    ),
    Part(
        "sglang",
        "rollout_parts",
        "weights that SGLang and the trainer share, under CUDA graphs",
        ("sglang",),
    ),
    Part(
        "sglang_sleep",
        "rollout_parts",
        "SGLang's sleep: memory released, the same tokens afterwards",
        ("cuda", "sglang"),
    ),
    Part(
        "layouts",
        "layout_parts",
        "whole PPO steps in every kind of layout against one rank",
        ("ranks", *VLLM),
        hides=(TE,),
        exact_float32=True,
        seconds=900,
    ),
    Part(
        "step_speed",
        "rollout_parts",
        "tokens per second by phase of a PPO step of a 0.5B model",
        ("own_gpu", *VLLM),
        seconds=600,
    ),
)


def find(name: str) -> Part:
    """Return the part of this name. Raise KeyError if there is none."""
    return {part.name: part for part in PARTS}[name]


def missing(part: Part, device: str, world: int) -> str:
    """Return the reason for which a part is skipped; empty if it can run."""
    has: dict[str, Any] = {
        "cuda": lambda: device == "cuda",
        "ranks": lambda: world > 1,
        "own_gpu": lambda: device == "cpu" or os.environ.get("RLHF_MC_RANKS_PER_GPU", "1") == "1",
        "vllm": lambda: importlib.util.find_spec("vllm") is not None,
        "sglang": lambda: importlib.util.find_spec("sglang") is not None,
        # Without a GPU its layers are not used, and its libraries cannot be loaded.
        TE: lambda: device == "cuda" and importlib.util.find_spec(TE) is not None,
    }
    return "; ".join(NEEDS[need] for need in part.needs if not has[need]())
