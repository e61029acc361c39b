"""The console's table of a run's start: roles, layouts, and the memory of each on a rank. All
numbers are of the built engines and the plan of the weight update, not the planner's."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from rlhf_mc import platform
from rlhf_mc.config.roles import prompts_in_flight, reference_is_actor
from rlhf_mc.config.schema import layouts
from rlhf_mc.models.engine import ModelEngine, RankShare
from rlhf_mc.models.transformer_engine import uses_transformer_engine
from rlhf_mc.runtime.console import COLUMNS, write_line
from rlhf_mc.topology.consensus import gather_objects
from rlhf_mc.trainer.run import Run

_TITLES = ("tp", "cp", "pp", "dp", "ep", "params", "weights", "gradients", "optimizer")
_WIDTHS = (3, 3, 4, 4, 3, 7, 9, 9, 9)
ROLE_WIDTH = COLUMNS - sum(_WIDTHS) - len(_WIDTHS)


@dataclass(frozen=True)
class ModelRow:
    """A role, or the rollout, whose engines are its data-parallel replicas."""

    role: str
    layout: tuple[str, str, str, str, str]
    """Sizes of tensor, context, pipeline (stages x virtual chunks), data and expert parallel."""
    shares: Sequence[RankShare]
    """By rank."""


def show_start(run: Run) -> None:
    """Print the table on rank 0, if trainer.logger has "console". Every rank must call it."""
    lines = start_lines(run)
    if "console" in run.config.trainer.logger and run.groups.rank == 0:
        first, *others = lines
        write_line("\n".join([f"rlhf_mc: {first}", *others]), sys.stdout)


def start_lines(run: Run) -> list[str]:
    """Return the size of the run, a row for each role, and notes. Every rank must call it."""
    world = dist.get_world_size()
    engines = run.rollout.groups
    summary = gather_objects(run.rollout.summary)[engines[0][0]]
    tp = run.config.rollout.tensor_model_parallel_size
    rows = [_row(engine) for engine in run.models()]
    rollout = gather_objects(RankShare(run.rollout.num_parameters, run.rollout.weight_bytes))
    rows.append(ModelRow("rollout", (str(tp), "1", "1", str(len(engines)), "-"), rollout))
    return [
        f"{world} ranks on {platform.device().type}; {len(run.train_prompts)} prompts, "
        f"{run.schedule.total_steps} steps at most",
        *table(rows),
        *notes([run.weight_sync.summary, summary, *_precisions(run), *_unshared(run)]),
        *notes(in_flight(run)),
    ]


def _row(engine: ModelEngine) -> ModelRow:
    """Return the row of a model. Every rank must call it."""
    mesh = engine.groups.mesh
    pp = f"{mesh.pp}x{mesh.vpp}" if mesh.vpp > 1 else str(mesh.pp)
    sizes = (str(mesh.tp), str(mesh.cp), pp, str(mesh.dp), str(mesh.ep))
    return ModelRow(engine.name, sizes, gather_objects(engine.rank_share()))


def _precisions(run: Run) -> list[str]:
    """Return for each precision and use of sequence parallelism the roles that have it, and the
    reference where it is no model."""
    layers = "Transformer Engine" if uses_transformer_engine() else "Megatron-Core's local"
    roles: dict[str, list[str]] = {}
    for engine in run.models():
        megatron = layouts(run.config)[engine.name]
        kind = f"{megatron.dtype}{', sequence parallel' if megatron.sequence_parallel else ''}"
        roles.setdefault(kind, []).append(engine.name)
    reference = "; reference: the actor without its adapters"
    return [
        f"{layers} layers; "
        + "; ".join(f"{kind}: {', '.join(names)}" for kind, names in roles.items())
        + (reference if reference_is_actor(run.config) else "")
    ]


def _unshared(run: Run) -> list[str]:
    """Return the roles that cannot compute a prompt once for all its responses, if there are
    any."""
    roles = [
        engine.name
        for engine in run.models()
        if engine.shares_prompts and engine.groups.mesh.cp > 1 and not engine.groups.mesh.dynamic_cp
    ]
    line = "a prompt is computed for each response, since context_parallel_size is fixed: "
    return [line + ", ".join(roles)] if roles else []


def in_flight(run: Run) -> list[str]:
    """Return the responses that a rollout begins and those that the engines hold at a time, where
    it begins more than a step trains on. By Megatron-RL's law a rollout runs ahead of training by
    at most held / (prompts x n) - 1 batches: what is begun beyond that waits."""
    cfg = run.config
    begun = prompts_in_flight(cfg) * cfg.rollout.n
    of_step = cfg.data.train_batch_size * cfg.rollout.n
    if begun == of_step:
        return []
    at_a_time = len(run.rollout.groups) * cfg.rollout.max_num_seqs
    line = (
        f"{prompts_in_flight(cfg)} prompts in flight: {begun} responses, {begun / of_step:.1f} "
        f"batches; the engines hold {at_a_time} at a time, {at_a_time / of_step:.1f} batches"
    )
    if begun <= max(at_a_time, of_step):
        return [line]
    useful = max(cfg.data.train_batch_size, at_a_time // cfg.rollout.n)
    return [f"{line}: above {useful}, rollout.prompts_in_flight begins what has to wait"]


def table(rows: Sequence[ModelRow]) -> list[str]:
    """Return header and rows, of at most 80 columns: of each number the largest of all ranks."""
    lines = [_line("a rank holds", _TITLES)]
    for row in rows:
        most = [
            max(getattr(share, name) for share in row.shares)
            for name in ("weights", "gradients", "optimizer")
        ]
        moved = {name for share in row.shares for name in share.offloaded}
        cells = [
            format_bytes(num_bytes) + ("*" if name in moved else "") if num_bytes else "-"
            for name, num_bytes in zip(("params", "grads", "optimizer"), most, strict=True)
        ]
        count = max(share.num_parameters for share in row.shares)
        lines.append(_line(row.role, (*row.layout, _format_count(count), *cells)))
    if any(share.offloaded for row in rows for share in row.shares):
        lines.append("  * on the device in the phases that need it, else offloaded to the host")
    return lines


def notes(texts: Sequence[str]) -> list[str]:
    """Return the texts as indented lines of at most 80 columns."""
    wrapper = textwrap.TextWrapper(
        COLUMNS,
        initial_indent="  ",
        subsequent_indent="    ",
        break_on_hyphens=False,
        break_long_words=True,
    )
    return [line for text in texts for line in wrapper.wrap(text)]


def _line(role: str, cells: Sequence[str]) -> str:
    role = role if len(role) <= ROLE_WIDTH else ".." + role[2 - ROLE_WIDTH :]
    parts = [
        role.ljust(ROLE_WIDTH),
        *(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True)),
    ]
    return " ".join(parts).rstrip()


def format_bytes(num_bytes: float) -> str:
    """Return bytes in at most 8 characters, as the planner counts them: a GB is 10^9."""
    for unit, unit_size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.9995 * unit_size:
            amount = num_bytes / unit_size
            digits = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
            return f"{amount:.{digits}f} {unit}"
    return f"{num_bytes:.0f} B"


def _format_count(number: int) -> str:
    """Return a number in at most 6 characters."""
    for unit, unit_size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * unit_size:
            return f"{number / unit_size:.{2 if number < 9.995 * unit_size else 1}f}{unit}"
    return str(number)
