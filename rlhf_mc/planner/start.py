"""The plan of a run that is about to start: whether it fits, as trainer.planner wants it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_mc.architectures.run_shapes import model_shapes
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config, to_dict
from rlhf_mc.config.schema import Config
from rlhf_mc.planner.host_memory import plan_host_memory
from rlhf_mc.planner.memory import RankMemory, plan_memory
from rlhf_mc.planner.report import GB, MemoryFit, memory_fit, remedy, with_host
from rlhf_mc.reshard.model_checks import check_layouts
from rlhf_mc.rollout.engines import engine_factory


@dataclass(frozen=True)
class Capacity:
    """The number of ranks, and the memory of each."""

    num_ranks: int
    device_bytes: int
    """Memory of each GPU, or an equal share of the memory of a node for each of its ranks."""
    cuda: bool = True
    ranks_per_node: int = 8
    host_bytes: float | None = None
    """Host memory of each node with GPUs; None: it is not judged."""


def planned_shapes(cfg: Config) -> dict[str, ModelShape]:
    """Return the shapes of the run's models, by role. Raise UserError if a config.json is not supported."""
    return {role: shape for role, (_, shape) in model_shapes(cfg).items()}


def plan_run(cfg: Config, shapes: Mapping[str, ModelShape], capacity: Capacity) -> list[RankMemory]:
    """Return the memory of each class of ranks. Raise UserError if the settings, or the shapes of its models, do
    not allow a run on this number of ranks."""
    check_config(cfg, capacity.num_ranks)
    check_layouts(cfg, shapes)
    engine_factory(cfg.rollout).check_layout(shapes["actor"], cfg.rollout.tensor_model_parallel_size)
    return plan_memory(cfg, shapes, capacity.num_ranks, capacity.device_bytes, capacity.cuda, capacity.ranks_per_node)


def check_fit(
    cfg: Config, shapes: Mapping[str, ModelShape], plan: Sequence[RankMemory], capacity: Capacity
) -> MemoryFit:
    """Return the verdict on a plan."""
    fit = memory_fit(cfg, plan, capacity.device_bytes, capacity.cuda, capacity.ranks_per_node)
    if capacity.host_bytes is None:
        return fit
    host = plan_host_memory(cfg, shapes, plan, capacity.ranks_per_node)
    return with_host(fit, host, capacity.host_bytes)


def fit_error(cfg: Config, shapes: Mapping[str, ModelShape], capacity: Capacity, fit: MemoryFit) -> str:
    """Return one line on a run that does not fit: the memory that is too small, and settings with which the run
    fits."""
    settings = remedy(cfg, fit.phase, capacity.cuda, lambda changes: _fits(cfg, shapes, capacity, changes))
    advice = "use more GPUs, or larger tensor- or pipeline-parallel sizes"
    if not capacity.cuda:
        advice = "use fewer ranks on a node, or one with more memory"
    if settings is not None:
        advice = f"it fits with {' '.join(settings)}"
    return f"does not fit: {fit.problem}; {advice}"


def _fits(cfg: Config, shapes: Mapping[str, ModelShape], capacity: Capacity, settings: Sequence[str]) -> bool:
    try:
        changed = load_config(to_dict(cfg), settings)
        return check_fit(changed, shapes, plan_run(changed, shapes, capacity), capacity).problem is None
    except UserError:
        return False


def check_start(cfg: Config, shapes: Mapping[str, ModelShape], capacity: Capacity) -> str:
    """Return the verdict in one line. Raise UserError if the run does not fit and trainer.planner is "refuse"."""
    plan = plan_run(cfg, shapes, capacity)
    fit = check_fit(cfg, shapes, plan, capacity)
    if fit.problem is None:
        ranks = 1 if capacity.cuda else min(capacity.ranks_per_node, capacity.num_ranks)
        size = capacity.device_bytes * ranks
        where = "of each GPU" if capacity.cuda else "of a node"
        taken = size - fit.spare
        return f"memory as planned: {fit.phase} takes most, {taken / GB:.1f} of the {size / GB:.1f} GB {where}"
    line = fit_error(cfg, shapes, capacity, fit)
    if cfg.trainer.planner == "refuse":
        raise UserError(f"{line}; with trainer.planner=warn it starts all the same")
    return f"WARNING: as planned it {line}"
