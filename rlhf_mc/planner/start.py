"""The comparison of a planned run with the memory there is, settings with which it fits, and the
check at a start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_mc.architectures.run_shapes import model_shapes
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config, to_dict
from rlhf_mc.config.roles import shares_weights, uses_critic
from rlhf_mc.config.schema import Config
from rlhf_mc.planner.host_memory import plan_host_memory
from rlhf_mc.planner.memory import Capacity, Phase, RankMemory, plan_memory, sum_by_name
from rlhf_mc.reshard.model_checks import check_layouts
from rlhf_mc.rollout.engines import engine_factory

GB = 10**9
KV_CACHE = "kv_cache"
HOST_MEMORY = "host_memory"


@dataclass(frozen=True)
class MemoryFit:
    """The result of the comparison of a plan with the memory there is."""

    problem: str | None
    """A sentence on the memory that is too small; None: the run fits."""
    phase: str
    """The fullest phase; KV_CACHE where the engine has too little memory in its share."""
    spare: float
    """Device memory that the fullest phase leaves, in bytes; negative where it does not fit."""


def planned_shapes(cfg: Config) -> dict[str, ModelShape]:
    """Return the shapes of the run's models, by role. Raise UserError if a config.json is not
    supported."""
    return {role: shape for role, (_, shape) in model_shapes(cfg).items()}


def plan_run(cfg: Config, shapes: Mapping[str, ModelShape], capacity: Capacity) -> list[RankMemory]:
    """Return the memory of each class of ranks. Raise UserError if the settings, or the shapes of
    its models, do not allow a run on this number of ranks."""
    check_config(cfg, capacity.num_ranks)
    check_layouts(cfg, shapes)
    engine_factory(cfg.rollout).check_layout(
        shapes["actor"], cfg.rollout.tensor_model_parallel_size
    )
    return plan_memory(cfg, shapes, capacity)


def check_fit(
    cfg: Config, shapes: Mapping[str, ModelShape], plan: Sequence[RankMemory], capacity: Capacity
) -> MemoryFit:
    """Compare a plan with the capacity: device memory, then the host memory of a node."""
    fit = _device_fit(cfg, plan, capacity)
    if fit.problem is not None or capacity.host_bytes is None:
        return fit
    host = plan_host_memory(cfg, shapes, plan, capacity.ranks_per_node)
    if host.total <= capacity.host_bytes:
        return fit
    largest = max(host.parts, key=lambda part: host.parts[part])
    problem = (
        f"node {host.node} needs {host.total / GB:.0f} GB of host memory of "
        f"{capacity.host_bytes / GB:.0f}; the largest"
        f" part is {largest}, {host.parts[largest] / GB:.0f} GB"
    )
    return MemoryFit(problem, HOST_MEMORY, fit.spare)


def approximations(cfg: Config, capacity: Capacity) -> str:
    """Return what a plan takes for something else, as the end of a line; empty where it takes
    nothing so."""
    texts = []
    if cfg.rollout.name == "custom":
        texts.append("the memory of the engine in rollout.custom_engine is taken as vLLM's")
    if capacity.cuda and not capacity.transformer_engine:
        texts.append(
            "activations are taken as those of Transformer Engine's layers, which are not "
            "installed here"
        )
    return "".join(f"; {text}" for text in texts)


def _device_fit(cfg: Config, plan: Sequence[RankMemory], capacity: Capacity) -> MemoryFit:
    """Compare the device memory of a plan with the capacity. On CPUs the ranks of a node share the
    memory of all of them."""
    ranks: Sequence[int]
    device_bytes = capacity.device_bytes
    if capacity.cuda:
        ranks, phase = max(
            ((alike.ranks, alike.fullest) for alike in plan), key=lambda entry: entry[1].total
        )
    else:
        ranks, phase = _fullest_node(plan, capacity.ranks_per_node)
        device_bytes *= len(ranks)
    spare = device_bytes - phase.total
    if spare < 0:
        largest = max(phase.parts, key=lambda part: phase.parts[part])
        problem = (
            f"phase {phase.name} on {rank_text(ranks)} takes {phase.total / GB:.1f} GB of "
            f"{device_bytes / GB:.1f}, {-spare / GB:.1f} too much; the largest part is {largest}, "
            f"{phase.parts[largest] / GB:.1f} GB"
        )
        return MemoryFit(problem, phase.name, spare)
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    for alike in plan:
        rollout = alike.rollout
        if rollout is None:
            continue
        needed = longest * rollout.kv_bytes_per_token
        if rollout.kv_cache < needed:
            key = "gpu_memory_utilization" if capacity.cuda else "cpu_kvcache_space_gb"
            problem = (
                f"rollout.{key} {getattr(cfg.rollout, key)} gives vLLM"
                f" {rollout.budget / GB:.1f} GB on {rank_text(alike.ranks)}: "
                f"{rollout.weights / GB:.1f} of weights and"
                f" {rollout.activations / GB:.1f} of activations leave "
                f"{max(rollout.kv_cache, 0) / GB:.2f} for keys"
                f" and values, and one sequence of {longest} tokens needs {needed / GB:.2f}"
            )
            return MemoryFit(problem, KV_CACHE, spare)
    return MemoryFit(None, phase.name, spare)


def _fullest_node(plan: Sequence[RankMemory], ranks_per_node: int) -> tuple[Sequence[int], Phase]:
    """Return the ranks of the node whose fullest phase takes most, and the phase with the bytes of
    all of them."""
    phases_by_rank = {rank: ranks.phases for ranks in plan for rank in ranks.ranks}
    nodes: list[tuple[Sequence[int], Phase]] = []
    for first in range(0, len(phases_by_rank), ranks_per_node):
        ranks = range(first, min(first + ranks_per_node, len(phases_by_rank)))
        for phases in zip(*(phases_by_rank[rank] for rank in ranks), strict=True):
            parts = sum_by_name(item for phase in phases for item in phase.parts.items())
            nodes.append((ranks, Phase(phases[0].name, parts)))
    return max(nodes, key=lambda node: node[1].total)


def fit_error(
    cfg: Config, shapes: Mapping[str, ModelShape], capacity: Capacity, fit: MemoryFit
) -> str:
    """Return one line on a run that does not fit: the memory that is too small, and settings with
    which the run fits."""
    settings = fitting_settings(
        cfg, fit.phase, capacity.cuda, lambda changes: _fits(cfg, shapes, capacity, changes)
    )
    advice = "use more GPUs, or larger tensor- or pipeline-parallel sizes"
    if cfg.actor.strategy == "fsdp2":
        advice = "use more GPUs, fsdp_config.offload_policy, or actor.strategy: megatron"
    if not capacity.cuda:
        advice = "use fewer ranks on a node, or one with more memory"
    if settings is not None:
        advice = f"it fits with {' '.join(settings)}"
    return f"does not fit: {fit.problem}; {advice}{approximations(cfg, capacity)}"


def _fits(
    cfg: Config, shapes: Mapping[str, ModelShape], capacity: Capacity, settings: Sequence[str]
) -> bool:
    try:
        changed = load_config(to_dict(cfg), settings)
        return (
            check_fit(changed, shapes, plan_run(changed, shapes, capacity), capacity).problem
            is None
        )
    except UserError:
        return False


def check_start(
    cfg: Config, shapes: Mapping[str, ModelShape], capacity: Capacity
) -> tuple[str, frozenset[str]]:
    """Return in one line whether the run fits, and RankMemory.staying. Raise UserError if the run
    does not fit and trainer.planner is "refuse"."""
    plan = plan_run(cfg, shapes, capacity)
    fit = check_fit(cfg, shapes, plan, capacity)
    if fit.problem is None:
        ranks = 1 if capacity.cuda else min(capacity.ranks_per_node, capacity.num_ranks)
        size = capacity.device_bytes * ranks
        share = (
            "of each GPU"
            if capacity.ranks_per_gpu == 1
            else f"of 1/{capacity.ranks_per_gpu} of each GPU"
        )
        where = share if capacity.cuda else "of a node"
        taken = size - fit.spare
        most = f"{fit.phase} takes most, {taken / GB:.1f} of the {size / GB:.1f} GB {where}"
        return f"memory as planned: {most}{approximations(cfg, capacity)}", plan[0].staying
    line = fit_error(cfg, shapes, capacity, fit)
    if cfg.trainer.planner == "refuse":
        raise UserError(f"{line}; with trainer.planner=warn it starts all the same")
    return f"warning: as planned it {line}", plan[0].staying


# ---------------------------------------------------------------- settings that make a run fit


def fitting_settings(
    cfg: Config, phase: str, cuda: bool, fits: Callable[[Sequence[str]], bool]
) -> list[str] | None:
    """Return settings that make the run fit: one sufficient change, else several of which each is
    needed; None: the list has no sufficient changes. cuda: on GPUs. fits: whether the config fits
    with these overrides."""
    roles = ["actor", "critic"] if uses_critic(cfg) else ["actor"]
    of_engine = list(_engine_changes(cfg, phase) if cuda else _engine_changes_on_cpu(cfg, phase))
    of_updates = (
        list(_update_changes(cfg, roles)) if phase in ("update_actor", "update_critic") else []
    )
    known = (list(_offload_changes(cfg, roles)) if cuda else []) + of_updates + of_engine
    if phase == HOST_MEMORY:
        known = list(_host_changes(cfg, roles))
    for settings in known:
        if fits(settings):
            return settings
    together: dict[str, str] = {}  # a later value of a key replaces an earlier one
    for settings in known:
        together |= {setting.partition("=")[0]: setting for setting in settings}
        if fits(list(together.values())):
            break
    else:
        return None
    for key in list(together):
        rest = [setting for other, setting in together.items() if other != key]
        if fits(rest):
            del together[key]
    return list(together.values())


# Each yields changes that reduce memory, from those that cost least time to those that cost most.


def _offload_changes(cfg: Config, roles: Sequence[str]) -> Iterator[list[str]]:
    if not cfg.rollout.free_cache_engine:
        yield ["rollout.free_cache_engine=true"]
    for part in ("grad", "optimizer", "param"):
        if part == "param" and shares_weights(cfg):
            continue  # the actor's weights are then the engine's too
        if unset := _unset(cfg, roles, f"{part}_offload", True):
            yield unset


def _host_changes(cfg: Config, roles: Sequence[str]) -> Iterator[list[str]]:
    if cfg.trainer.async_save:
        yield ["trainer.async_save=false"]
    for part in ("param", "optimizer"):
        if unset := _unset(cfg, roles, f"{part}_offload", False):
            yield unset


def _update_changes(cfg: Config, roles: Sequence[str]) -> Iterator[list[str]]:
    if (
        cfg.actor.megatron.tensor_model_parallel_size > 1
        and not cfg.actor.megatron.sequence_parallel
    ):
        yield _unset(cfg, roles, "sequence_parallel", True)
    if cfg.actor.megatron.recompute_granularity is None:
        yield _unset(cfg, roles, "recompute_granularity", "selective")
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    for divisor in (2, 4, 8):
        budgets = {role: getattr(cfg, role).ppo_max_token_len_per_gpu // divisor for role in roles}
        if min(budgets.values()) >= longest:
            yield [f"{role}.ppo_max_token_len_per_gpu={budget}" for role, budget in budgets.items()]
    if unset := _unset(cfg, roles, "recompute_granularity", "full"):
        yield unset


def _engine_changes(cfg: Config, phase: str) -> Iterator[list[str]]:
    share = cfg.rollout.gpu_memory_utilization
    for tenth in range(9, 1, -1):
        if tenth / 10 < share and phase != KV_CACHE:
            yield [f"rollout.gpu_memory_utilization={tenth / 10}"]
    for tenth in range(2, 10):
        if tenth / 10 > share and phase == KV_CACHE:
            yield [f"rollout.gpu_memory_utilization={tenth / 10}"]


def _engine_changes_on_cpu(cfg: Config, phase: str) -> Iterator[list[str]]:
    size = cfg.rollout.cpu_kvcache_space_gb
    for factor in (2, 4, 8):
        other = size * factor if phase == KV_CACHE else size // factor
        if other:
            yield [f"rollout.cpu_kvcache_space_gb={other}"]


def _unset(cfg: Config, roles: Sequence[str], name: str, value: str | bool) -> list[str]:
    """Return the overrides that give megatron.<name> this value for the roles that have another."""
    text = str(value).lower()
    return [
        f"{role}.megatron.{name}={text}"
        for role in roles
        if getattr(getattr(cfg, role).megatron, name) != value
    ]


def rank_text(ranks: Sequence[int]) -> str:
    """Return the ranks in words."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:3]))}, ...)"
