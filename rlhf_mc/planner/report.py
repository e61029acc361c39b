"""The verdict on a plan, and its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mc.config.roles import uses_critic
from rlhf_mc.config.schema import Config
from rlhf_mc.planner.host_memory import NodeMemory
from rlhf_mc.planner.memory import Phase, RankMemory
from rlhf_mc.planner.storage import Storage
from rlhf_mc.planner.traffic import Traffic

GB = 10**9
KV_CACHE = "kv_cache"
HOST_MEMORY = "host_memory"


@dataclass(frozen=True)
class MemoryFit:
    """The verdict on a plan."""

    problem: str | None
    """A sentence on the memory that is too small; None: the run fits."""
    phase: str
    """The fullest phase; KV_CACHE where the engine has too little memory in its share."""
    spare: float
    """Device memory that the fullest phase leaves, in bytes; negative where it does not fit."""


def memory_fit(
    cfg: Config, plan: Sequence[RankMemory], device_bytes: int, cuda: bool = True, ranks_per_node: int = 1
) -> MemoryFit:
    """Return the verdict on a plan. cuda: of a run on GPUs, each with device_bytes; otherwise the ranks of a node share
    the memory of all of them."""
    ranks: Sequence[int]
    if cuda:
        ranks, phase = max(((alike.ranks, alike.fullest) for alike in plan), key=lambda found: found[1].total)
    else:
        ranks, phase = _fullest_node(plan, ranks_per_node)
        device_bytes *= len(ranks)
    spare = device_bytes - phase.total
    if spare < 0:
        largest = max(phase.parts, key=lambda part: phase.parts[part])
        problem = (
            f"phase {phase.name} on {_ranks(ranks)} takes {phase.total / GB:.1f} GB of {device_bytes / GB:.1f},"
            f" {-spare / GB:.1f} too much; the largest part is {largest}, {phase.parts[largest] / GB:.1f} GB"
        )
        return MemoryFit(problem, phase.name, spare)
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    for alike in plan:
        rollout = alike.rollout
        needed = longest * rollout.kv_bytes_per_token
        if rollout.kv_cache < needed:
            key = "gpu_memory_utilization" if cuda else "cpu_kvcache_space_gb"
            problem = (
                f"rollout.{key} {getattr(cfg.rollout, key)} gives vLLM"
                f" {rollout.budget / GB:.1f} GB on {_ranks(alike.ranks)}: {rollout.weights / GB:.1f} of weights and"
                f" {rollout.activations / GB:.1f} of activations leave {max(rollout.kv_cache, 0) / GB:.2f} for keys"
                f" and values, and one sequence of {longest} tokens needs {needed / GB:.2f}"
            )
            return MemoryFit(problem, KV_CACHE, spare)
    return MemoryFit(None, phase.name, spare)


def _fullest_node(plan: Sequence[RankMemory], ranks_per_node: int) -> tuple[Sequence[int], Phase]:
    """Return the ranks of the node whose fullest phase takes most, and that phase with the bytes of all of them."""
    of_rank = {rank: ranks.phases for ranks in plan for rank in ranks.ranks}
    found: list[tuple[Sequence[int], Phase]] = []
    for first in range(0, len(of_rank), ranks_per_node):
        ranks = range(first, min(first + ranks_per_node, len(of_rank)))
        for phases in zip(*(of_rank[rank] for rank in ranks), strict=True):
            parts: dict[str, float] = {}
            for part, size in (item for phase in phases for item in phase.parts.items()):
                parts[part] = parts.get(part, 0.0) + size
            found.append((ranks, Phase(phases[0].name, parts)))
    return max(found, key=lambda node: node[1].total)


def with_host(fit: MemoryFit, host: NodeMemory, node_bytes: float) -> MemoryFit:
    """Return the verdict on a plan that must also fit the host memory of a node."""
    if fit.problem is not None or host.total <= node_bytes:
        return fit
    largest = max(host.parts, key=lambda part: host.parts[part])
    problem = (
        f"node {host.node} needs {host.total / GB:.0f} GB of host memory of {node_bytes / GB:.0f}; the largest part is"
        f" {largest}, {host.parts[largest] / GB:.0f} GB"
    )
    return MemoryFit(problem, HOST_MEMORY, fit.spare)


def table(cfg: Config, plan: Sequence[RankMemory], device_bytes: int) -> str:
    """Return the text of a plan: for each class of ranks its phases, each with the bytes of its parts."""
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    lines = []
    for ranks in plan:
        lines.append(f"{_ranks(ranks.ranks)}, GB of {device_bytes / GB:.1f} on each device:")
        for phase in ranks.phases:
            parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in phase.parts.items() if size >= GB / 20)
            lines.append(f"  {phase.name:<16} {phase.total / GB:6.1f}   {parts}")
        rollout = ranks.rollout
        cache = max(rollout.kv_cache, 0.0)
        count = cache / rollout.kv_bytes_per_token / longest
        lines.append(
            f"  vLLM: weights {rollout.weights / GB:.1f}, an engine step {rollout.activations / GB:.1f}, keys and"
            f" values {cache / GB:.1f}: {count:.0f} sequences of {longest} tokens"
        )
    return "\n".join(lines)


def traffic_table(transfers: Sequence[Traffic]) -> str:
    """Return the text of the traffic of a step: a line for each phase."""
    if not transfers:
        return "traffic: none, there is one rank"
    lines = [
        "traffic of a step, max over ranks of the GB received in the node, from other nodes; by purpose: in | from"
    ]
    for phase in dict.fromkeys(transfer.phase for transfer in transfers):
        mine = [transfer for transfer in transfers if transfer.phase == phase]
        sides = [
            _by_purpose([(t.name, t.intra_node) for t in mine]),
            _by_purpose([(t.name, t.inter_node) for t in mine]),
        ]
        totals = "".join(f" {sum(side.values()) / GB:8.1f}" for side in sides)
        texts = [
            ", ".join(f"{name} {size / GB:.1f}" for name, size in side.items() if size >= GB / 20) for side in sides
        ]
        lines.append(f"  {phase:<16}{totals}   {' | '.join(texts) if texts[1] else texts[0]}")
    return "\n".join(lines)


def host_table(host: NodeMemory, storage: Storage) -> str:
    """Return the text of host memory and files: a line for each."""
    is_offload = {name: name.endswith((" params", " optimizer")) for name in host.parts}
    sizes = _by_purpose([("offloads" if is_offload[name] else name, size) for name, size in host.parts.items()])
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in sizes.items() if size >= GB / 20)
    lines = [f"host memory of node {host.node}, GB: {host.total / GB:.1f}: {parts}"]
    if storage.checkpoints == 0:
        lines.append(f"no training checkpoints (trainer.save_freq); an export has {storage.export / GB:.1f} GB")
        return "\n".join(lines)
    space = "every save adds one"
    if storage.space is not None:
        space = f"{storage.checkpoints} of them and an export take {storage.space / GB:.1f}"
    times = f"at least {storage.save:.0f} s to save, {storage.load:.0f} s to verify and load"
    lines.append(f"training checkpoint {storage.checkpoint / GB:.1f} GB, {times}; {space}")
    return "\n".join(lines)


def _by_purpose(sizes: Sequence[tuple[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for name, size in sizes:
        totals[name] = totals.get(name, 0.0) + size
    return totals


def as_json(plan: Sequence[RankMemory], fit: MemoryFit, transfers: Sequence[Traffic]) -> dict[str, Any]:
    """Return the plan as plain data, in bytes."""
    return {
        "fits": fit.problem is None,
        "problem": fit.problem,
        "fullest_phase": fit.phase,
        "spare_bytes": fit.spare,
        "ranks": [
            {
                "ranks": list(ranks.ranks),
                "phases": {phase.name: dict(phase.parts) for phase in ranks.phases},
                "rollout": {**vars(ranks.rollout), "kv_cache": ranks.rollout.kv_cache},
            }
            for ranks in plan
        ],
        "traffic": [dict(vars(transfer)) for transfer in transfers],
    }


def remedy(cfg: Config, phase: str, cuda: bool, fits: Callable[[Sequence[str]], bool]) -> list[str] | None:
    """Return settings that make the run fit: one change that is enough alone, else changes of which each is needed;
    None: no changes of the list are enough. cuda: on GPUs. fits: whether the config with these overrides does."""
    roles = ["actor", "critic"] if uses_critic(cfg) else ["actor"]
    of_engine = list(_engine_settings(cfg, phase) if cuda else _engine_settings_on_cpu(cfg, phase))
    of_updates = list(_remedies_of_updates(cfg, roles)) if phase in ("update_actor", "update_critic") else []
    known = (list(_offloads(cfg, roles)) if cuda else []) + of_updates + of_engine
    if phase == HOST_MEMORY:
        known = list(_remedies_of_host(cfg, roles))
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


def _offloads(cfg: Config, roles: Sequence[str]) -> Iterator[list[str]]:
    if not cfg.rollout.free_cache_engine:
        yield ["rollout.free_cache_engine=true"]
    for part in ("grad", "optimizer", "param"):
        if part == "param" and cfg.reshard.share_weights:
            continue  # the actor's weights are then the engine's too
        if unset := _unset(cfg, roles, f"{part}_offload", True):
            yield unset


def _remedies_of_host(cfg: Config, roles: Sequence[str]) -> Iterator[list[str]]:
    if cfg.trainer.async_save:
        yield ["trainer.async_save=false"]
    for part in ("param", "optimizer"):
        if unset := _unset(cfg, roles, f"{part}_offload", False):
            yield unset


def _remedies_of_updates(cfg: Config, roles: Sequence[str]) -> Iterator[list[str]]:
    if cfg.actor.megatron.tensor_model_parallel_size > 1 and not cfg.actor.megatron.sequence_parallel:
        yield _unset(cfg, roles, "sequence_parallel", True)
    if cfg.actor.megatron.recompute_granularity is None:
        yield _unset(cfg, roles, "recompute_granularity", "selective")
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    budgets = {role: getattr(cfg, role).ppo_max_token_len_per_gpu // 2 for role in roles}
    if cfg.actor.use_dynamic_bsz and min(budgets.values()) >= longest:
        yield [f"{role}.ppo_max_token_len_per_gpu={budget}" for role, budget in budgets.items()]
    if unset := _unset(cfg, roles, "recompute_granularity", "full"):
        yield unset


def _engine_settings(cfg: Config, phase: str) -> Iterator[list[str]]:
    share = cfg.rollout.gpu_memory_utilization
    for tenth in range(9, 1, -1):
        if tenth / 10 < share and phase != KV_CACHE:
            yield [f"rollout.gpu_memory_utilization={tenth / 10}"]
    for tenth in range(2, 10):
        if tenth / 10 > share and phase == KV_CACHE:
            yield [f"rollout.gpu_memory_utilization={tenth / 10}"]


def _engine_settings_on_cpu(cfg: Config, phase: str) -> Iterator[list[str]]:
    size = cfg.rollout.cpu_kvcache_space_gb
    for factor in (2, 4, 8):
        other = size * factor if phase == KV_CACHE else size // factor
        if other:
            yield [f"rollout.cpu_kvcache_space_gb={other}"]


def _unset(cfg: Config, roles: Sequence[str], name: str, value: str | bool) -> list[str]:
    """Return the overrides that give megatron.<name> this value for the roles that have another."""
    text = str(value).lower()
    return [f"{role}.megatron.{name}={text}" for role in roles if getattr(getattr(cfg, role).megatron, name) != value]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:3]))}, ...)"
