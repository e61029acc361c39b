"""Functions that the ranks run in test_parts.py and test_faults.py, and the faults of the
latter."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pkgutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpu_parts import catalog
from gpu_parts.report import Report, Result
from gpu_parts.sizes import SMALL, Sizes

from rlhf_mc.patching import replaced
from rlhf_mc.reshard.weight_sync import WeightSync

LEAST = SMALL._replace(
    checksum_elements=(1, 1003),
    families={"qwen2": {}},
    vocabulary=1000,
    head_tokens=16,
    copy_bytes=1 << 20,
    matmul=64,
)
"""Sizes for parts that end with their first failure, or that are quick in any case."""


def run(name: str, sizes: Sizes = SMALL) -> Result:
    """Run a part on this rank."""
    report = Report()
    part = catalog.find(name)
    torch.use_deterministic_algorithms(part.deterministic)
    try:
        with report.verdict():
            part.function()(report, sizes)
    finally:
        torch.use_deterministic_algorithms(False)
    return report.result


def operations_of(name: str) -> list[str]:
    """Run a part on this rank. Return its all-reduces and weight updates, in order."""
    calls: list[str] = []

    def recorded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: calls.append(name) or original(*args, **kwargs)  # type: ignore[func-returns-value]

    with (
        replaced(dist, "all_reduce", recorded("all_reduce", dist.all_reduce)),
        replaced(WeightSync, "run", recorded("WeightSync.run", WeightSync.run)),
    ):
        run(name, LEAST)
    return calls


@dataclass(frozen=True)
class Fault:
    """A function that is replaced by a wrong one while a part runs."""

    part: str
    owner: str
    """Module of the function, or module:class."""
    name: str
    replacement: Callable[[Any], Any]
    """The original -> the wrong function."""
    reason: str
    """Part of the reason that the part gives."""
    sizes: Sizes = LEAST


def run_with(fault: str) -> Result:
    """Run the fault's part with the fault on this rank."""
    case = FAULTS[fault]
    owner = pkgutil.resolve_name(case.owner)
    with replaced(owner, case.name, case.replacement(getattr(owner, case.name))):
        return run(case.part, case.sizes)


def _counted_seeds(original: Callable[..., Any]) -> Callable[..., Any]:
    calls = itertools.count()
    return lambda seed, *args: original(seed + next(calls), *args)


def _nothing(original: Any) -> Any:
    return lambda *args, **kwargs: None


def _false(original: Any) -> Any:
    return lambda: False


def _no_range(original: Any) -> Any:
    """Return a named_range that names nothing."""
    return lambda name: contextlib.nullcontext()


def _scaled(factor: float) -> Callable[[Any], Any]:
    return lambda original: lambda *args, **kwargs: original(*args, **kwargs) * factor


def _at_temperature_1(original: Any) -> Any:
    """Return a head (model, states, targets, vocab_size, temperature) that ignores the
    temperature."""
    return lambda *args: original(*args[:4], 1.0)


def _with_read(original: Any) -> Any:
    """Return a head that lets the host read one number."""

    def head(*args: Any) -> Any:
        out = original(*args)
        out.sum().item()
        return out

    return head


def _unordered(original: Any) -> Any:
    """Return a checksum that does not depend on the order of the words."""
    return lambda blocks: original(blocks)[:1].repeat(2)


def _without_rank_0(original: Any) -> Any:
    """Return a sum that leaves the first rank out."""
    import torch.distributed as dist

    return lambda tensor: original(tensor * (dist.get_rank() != 0))


def _returns_at_once(original: Any) -> Any:
    """Return a subprocess.run whose process ends well where it should wait for a collective."""
    return lambda command, **kwargs: subprocess.CompletedProcess(
        command, 0, f"waiting {time.time()}\n", ""
    )


def _of_other_layers(original: Any) -> Any:
    """Return an engine_layouts that names the parameters of Transformer Engine's layers."""
    from rlhf_mc.reshard.placement import training_layouts

    return lambda engine: training_layouts(engine.shape, engine.groups.mesh, True)


def _other_theta(original: Any) -> Any:
    """Return the steps with other frequencies."""
    from rlhf_mc.models.gpt_model import set_rope

    def change(at: Any) -> None:
        other = dataclasses.replace(at.shape, rope_theta=3 * at.shape.rope_theta)
        set_rope(dataclasses.replace(at, shape=other))

    return [change if step is set_rope else step for step in original]


def _never_the_same(original: Any) -> Any:
    """Return a backward pass whose gradients are larger at each call."""
    calls = []

    def backward(engine: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(engine, *args, **kwargs)
        calls.append(None)
        for param in engine.named_parameters().values():
            param.main_grad.mul_(1.0 + 1e-4 * len(calls))
        return out

    return backward


def _zeros(original: Any) -> Any:
    """Return a HostBuffers.copies that copies nothing."""
    return lambda buffers, blocks: [torch.zeros_like(block.data, device="cpu") for block in blocks]


def _new_memory(original: Any) -> Any:
    """Return a HostArena.views that forgets the values."""
    return lambda arena, sizes: [torch.zeros(size, dtype=torch.uint8) for size in sizes]


def _without_last_copy(original: Any) -> Any:
    """Return a Plan.for_rank without the last of the rank's copies."""

    def for_rank(plan: Any, rank: int) -> Any:
        found = original(plan, rank)
        return dataclasses.replace(found, copies=found.copies[:-1])

    return for_rank


def _next_experts(original: Any) -> Any:
    """Return a RoutedExperts.take whose choices are other experts than vLLM's."""
    return lambda record, *args: (original(record, *args) + 1) % 4


def _larger_log_probs(original: Any) -> Any:
    """Return a head (log-probs, entropies) whose log-probs are 2 % larger, and so their
    gradients."""

    def head(*args: Any) -> Any:
        log_probs, entropy = original(*args)
        return 1.02 * log_probs, entropy

    return head


def _by_sigterm(original: Any) -> Any:
    """Return the first of the signals of a part that loses ranks, with another number."""
    return {"killed": signal.SIGTERM}


_HEADS = "rlhf_mc.models.heads"
_ENGINE = "rlhf_mc.models.engine:ModelEngine"
_SYNC = "rlhf_mc.reshard.weight_sync:WeightSync"

FAULTS = {
    "a product of 2 % more": Fault(
        "machine", "torch", "mm", _scaled(1.02), "a bfloat16 product is off by"
    ),
    "a checksum without order": Fault(
        "checksums",
        "gpu_parts.torch_parts",
        "checksum",
        _unordered,
        "not the sums of its 8-byte words",
    ),
    "a sum without a rank": Fault(
        "process_groups",
        "gpu_parts.torch_parts",
        "sum_over_ranks",
        _without_rank_0,
        "sum_over_ranks: another sum",
    ),
    "a plan of a fifth more": Fault(
        "planned_memory",
        "gpu_parts.planner_parts:Activations",
        "update_peak",
        _scaled(1.2),
        "none: update takes",
    ),
    "no timeout": Fault(
        "timeouts",
        "subprocess",
        "run",
        _returns_at_once,
        "that the other ranks missed has returned",
    ),
    "a rank that is not killed": Fault(
        "lost_ranks",
        "gpu_parts.lost_rank_parts",
        "SIGNALS",
        _by_sigterm,
        "killed: the process of rank 0 ended with -15",
    ),
    "a layout with larger gradients": Fault(
        "layouts",
        "rlhf_mc.trainer.update",
        "log_probs_and_entropy",
        _larger_log_probs,
        "dp, step 1: actor/grad_norm is ",
    ),
    "scores without temperature": Fault(
        "models_float32", _HEADS, "log_probs", _at_temperature_1, "qwen2_actor: log_prob error"
    ),
    "training without temperature": Fault(
        "models_float32",
        "rlhf_mc.trainer.update",
        "log_probs_and_entropy",
        _at_temperature_1,
        "qwen2_actor: gradient error",
    ),
    "names of other layers": Fault(
        "models_float32",
        "gpu_parts.engines",
        "engine_layouts",
        _of_other_layers,
        "parameters differ from the layout",
    ),
    "other rotary frequencies": Fault(
        "models_bfloat16",
        "rlhf_mc.models.gpt_model",
        "STEPS",
        _other_theta,
        "qwen2_actor: gradient error",
    ),
    "local layers": Fault(
        "models_te",
        "gpu_parts.model_parts",
        "uses_transformer_engine",
        _false,
        "the layers are not Transformer Engine's",
        LEAST._replace(families={}),
    ),
    "local layers in float32": Fault(
        "models_te_float32",
        "gpu_parts.model_parts",
        "uses_transformer_engine",
        _false,
        "the layers are not Transformer Engine's",
        LEAST._replace(families={}),
    ),
    "log-probs of 1 % more": Fault(
        "heads_152k", _HEADS, "log_probs", _scaled(1.01), "float32 log_prob: off by"
    ),
    "a load without tensors": Fault(
        "resume",
        "rlhf_mc.checkpoint.training_state",
        "read_tensors",
        _nothing,
        "loaded tensors differ",
    ),
    "gradients that vary": Fault(
        "deterministic", _ENGINE, "backward", _never_the_same, "step 3 differs in"
    ),
    "a save of zeros": Fault(
        "async_save",
        "rlhf_mc.checkpoint.training_tensors:HostBuffers",
        "copies",
        _zeros,
        "tensors are not as at the beginning of the save",
    ),
    "an error that is not known": Fault(
        "out_of_memory", "rlhf_mc.platform", "is_out_of_memory", _nothing, "can't allocate memory"
    ),
    "an arena that forgets": Fault(
        "offload",
        "rlhf_mc.models.offload:HostArena",
        "views",
        _new_memory,
        "tensors have other bits",
    ),
    "no update": Fault(
        "weight_update", _SYNC, "run", _nothing, "qwen3: UserError: reshard.verify: "
    ),
    "a plan that lacks a block": Fault(
        "weight_update",
        "rlhf_mc.reshard.plan:Plan",
        "for_rank",
        _without_last_copy,
        "not written completely",
    ),
    "a read in each micro-batch": Fault(
        "synchronisations",
        _HEADS,
        "log_probs",
        _with_read,
        "score: the host waits 1 times per micro-batch",
    ),
    "experts that the engine has not chosen": Fault(
        "experts",
        "rlhf_mc.rollout.routed_experts:RoutedExperts",
        "take",
        _next_experts,
        "qwen3_moe: UserError: step 1: the log-probs of the engine",
    ),
    "a step that does nothing": Fault(
        "throughput", _ENGINE, "train_step", _nothing, "its work has not been done or waited for"
    ),
    "ranges without a name": Fault(
        "profile", "rlhf_mc.platform", "named_range", _no_range, "the trace lacks"
    ),
    "commands that do nothing": Fault(
        "quickstart",
        "gpu_parts.rollout_parts",
        "_run",
        _nothing,
        "the run has not written success.json",
    ),
    "other seeds in each call": Fault(
        "sleep",
        "rlhf_mc.trainer.pool.strategies",
        "sampling_seeds",
        _counted_seeds,
        "other tokens after the sleep",
    ),
    "zeros in vLLM, aliased": Fault(
        "aliased_weights", _SYNC, "run", _nothing, "log-probs of the engine (rollout)"
    ),
    "zeros in vLLM": Fault(
        "step_speed", _SYNC, "run", _nothing, "log-probs of the engine (rollout)"
    ),
}
"""Name -> fault. All are on one rank."""
