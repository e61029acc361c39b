"""The texts of a plan: tables, plain data for JSON, a comparison of FSDP2 with Megatron, and the
best choice of a search as a config file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_mc.config.errors import UserError, disk_errors
from rlhf_mc.config.load import nest_settings
from rlhf_mc.config.schema import Config
from rlhf_mc.config.yaml_reader import yaml_document
from rlhf_mc.planner.gpus import Machine
from rlhf_mc.planner.host_memory import NodeMemory
from rlhf_mc.planner.lengths import Lengths
from rlhf_mc.planner.measured import Expected
from rlhf_mc.planner.memory import Capacity, RankMemory, sum_by_name
from rlhf_mc.planner.search import EQUAL, PlannedSettings, describe_ranks, search
from rlhf_mc.planner.search_space import Settings
from rlhf_mc.planner.start import GB, MemoryFit, rank_text
from rlhf_mc.planner.storage import Storage
from rlhf_mc.planner.times import StepTimes
from rlhf_mc.planner.traffic import Traffic
from rlhf_mc.topology.mesh import role_mesh

NO_TIMES = "no times: of a GPU that is given by its bytes no rates are known"


def table(cfg: Config, plan: Sequence[RankMemory], device_bytes: int) -> str:
    """Return the text of a plan: for each class of ranks its phases, each with the bytes of its
    parts."""
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    lines = []
    for ranks in plan:
        lines.append(f"{rank_text(ranks.ranks)}, GB of {device_bytes / GB:.1f} on each device:")
        for phase in ranks.phases:
            lines.append(f"  {phase.name:<16} {phase.total / GB:6.1f}   {_gigabytes(phase.parts)}")
        rollout = ranks.rollout
        if rollout is None:
            continue
        cache = max(rollout.kv_cache, 0.0)
        count = cache / rollout.kv_bytes_per_token / longest
        lines.append(
            f"  vLLM: weights {rollout.weights / GB:.1f}, an engine step "
            f"{rollout.activations / GB:.1f}, keys and"
            f" values {cache / GB:.1f}: {count:.0f} sequences of {longest} tokens"
        )
    return "\n".join(lines)


def traffic_table(transfers: Sequence[Traffic]) -> str:
    """Return the text of the traffic of a step: a line for each phase."""
    if not transfers:
        return "traffic: none, there is one rank"
    lines = [
        (
            "traffic of a step, max over ranks of the GB received in the node, from other nodes; "
            "by purpose: in | from"
        )
    ]
    for phase in dict.fromkeys(transfer.phase for transfer in transfers):
        of_phase = [transfer for transfer in transfers if transfer.phase == phase]
        sides = [
            sum_by_name((transfer.name, transfer.intra_node) for transfer in of_phase),
            sum_by_name((transfer.name, transfer.inter_node) for transfer in of_phase),
        ]
        totals = "".join(f" {sum(side.values()) / GB:8.1f}" for side in sides)
        texts = [_gigabytes(side) for side in sides]
        lines.append(f"  {phase:<16}{totals}   {' | '.join(texts) if texts[1] else texts[0]}")
    return "\n".join(lines)


def host_table(host: NodeMemory, storage: Storage) -> str:
    """Return the text of host memory and files: a line for each."""
    is_offload = {name: name.endswith((" params", " optimizer", " state")) for name in host.parts}
    sizes = sum_by_name(
        ("offloads" if is_offload[name] else name, size) for name, size in host.parts.items()
    )
    lines = [f"host memory of node {host.node}, GB: {host.total / GB:.1f}: {_gigabytes(sizes)}"]
    if storage.checkpoints == 0:
        lines.append(
            "no training checkpoints (trainer.save_freq, save_minutes); an export has "
            f"{storage.export / GB:.1f} GB"
        )
        return "\n".join(lines)
    space = "every save adds one"
    if storage.space is not None:
        space = f"{storage.checkpoints} of them and an export take {storage.space / GB:.1f}"
    times = f"at least {storage.save:.0f} s to save, {storage.load:.0f} s to verify and load"
    lines.append(f"training checkpoint {storage.checkpoint / GB:.1f} GB, {times}; {space}")
    return "\n".join(lines)


def times_table(times: StepTimes, expected: Expected, lengths: Lengths) -> str:
    """Return the table: for each phase its lower bound, the bound's share of the total, the
    expected time and its kind, the parts of the bound, and the expected overheads."""
    lines = [
        f"times of a step, for prompts of {lengths.prompt:g} and responses of {lengths.response:g} "
        f"tokens ({times.sequences_at_a_time} sequences at a time in each engine), and the parts "
        "of the lower bounds:",
        f"{'':17}{'lower bound':>12} {'':>5} {'expected':>10}",
    ]
    for phase, to_expect in zip(times.phases, expected.times.phases, strict=True):
        parts = _durations(phase.parts)
        new = {
            name: seconds for name, seconds in to_expect.parts.items() if name not in phase.parts
        }
        more = f"; expected: {_durations(new)}" if any(new.values()) else ""
        lines.append(
            f"  {phase.name:<16} {_duration(phase.total):>9}  {phase.total / times.seconds:5.0%}"
            f" {_duration(to_expect.total):>10} {expected.kinds[phase.name]:<13} {parts}{more}"
        )
    least = times.tokens_per_gpu
    reached = expected.times.tokens_per_gpu
    lines.append(
        f"  step             {_duration(times.seconds):>9}        "
        f"{_duration(expected.times.seconds):>10} {expected.kind:<13} tokens/s on each GPU: "
        f"{least:.0f} (bound), {reached:.0f} ({expected.kind}); pipeline bubble "
        f"{times.bubble_share:.1%} of the bound"
    )
    if times.overlaps:
        lines.append(
            "  pools wait        "
            + ", ".join(
                f"{pool} {1 - seconds / max(times.pool_seconds.values()):.0%}"
                for pool, seconds in times.pool_seconds.items()
            )
            + " of the longer of generation and training, by the bounds"
        )
    lines.append(f"expected: the factors of {expected.source}")
    return "\n".join(lines)


def _durations(parts: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {_duration(seconds)}" for name, seconds in parts.items() if seconds > 0
    )


def _gigabytes(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / GB:.1f}" for name, size in sizes.items() if size >= GB / 20)


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.1f} s"
        if seconds >= 10
        else f"{seconds * 1000:.0f} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )


def as_json(
    plan: Sequence[RankMemory], fit: MemoryFit, transfers: Sequence[Traffic]
) -> dict[str, Any]:
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
                "rollout": ranks.rollout
                and {**vars(ranks.rollout), "kv_cache": ranks.rollout.kv_cache},
            }
            for ranks in plan
        ],
        "traffic": [
            {key: x for key, x in vars(transfer).items() if key != "buckets"}
            for transfer in transfers
        ],
    }


def times_json(times: StepTimes, lengths: Lengths, expected: Expected | None) -> dict[str, Any]:
    """Return the lower bounds as plain data, in seconds, and below "expected" the times to expect
    with their kinds."""
    text = {
        "prompt_length": lengths.prompt,
        "response_length": lengths.response,
        "sequences_at_a_time": times.sequences_at_a_time,
        "phases": {phase.name: dict(phase.parts) for phase in times.phases},
        "shares": {phase.name: phase.total / times.seconds for phase in times.phases},
        "step_seconds": times.seconds,
        "tokens_per_second": times.tokens_per_gpu * times.world,
        "tokens_per_second_per_gpu": times.tokens_per_gpu,
        "bubble_share": times.bubble_share,
    }
    if expected is None:
        return text
    kinds = {"kind": expected.kind, "kinds": dict(expected.kinds), "source": expected.source}
    return {**text, "expected": {**times_json(expected.times, lengths, None), **kinds}}


# ---------------------------------------------------------------- a search


def search_table(choices: Sequence[PlannedSettings], lengths: Lengths) -> str:
    """Return the table, the best choice first."""
    cells = [_cells(number, choice) for number, choice in enumerate(choices, 1)]
    rows = [list(cells[0]), *(list(of_choice.values()) for of_choice in cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        for row in rows
    ]
    title = (
        f"plans that fit, by the lower bound of a step with prompts of {lengths.prompt:g} and "
        f"responses of {lengths.response:g} tokens (those within {EQUAL:.0%}: by less offload and "
        "recomputation):"
    )
    sources = {
        f"expected: {expected.kind}, the factors of {expected.source}"
        for expected in (c.expected for c in choices)
        if expected
    }
    return "\n".join([title, *lines, *sorted(sources)])


def _cells(number: int, choice: PlannedSettings) -> dict[str, str]:
    """Return the row of a choice, by the titles of the columns."""
    cfg = choice.cfg
    actor = cfg.actor.megatron
    offloads = [
        name for name in ("grad", "optimizer", "param") if getattr(actor, f"{name}_offload")
    ]
    expected = choice.expected
    return {
        "rank": str(number),
        "step s": f"{choice.times.seconds:.1f}",
        "tokens/s/GPU": f"{choice.times.tokens_per_gpu:.0f}",
        "expected": f"{expected.times.tokens_per_gpu:.0f}" if expected else "",
        "GB left": f"{choice.fit.spare / 1e9:.1f}",
        "ranks": describe_ranks(cfg, choice.times.world),
        "TP": str(actor.tensor_model_parallel_size),
        "CP": str(actor.context_parallel_size),
        "PP": str(actor.pipeline_model_parallel_size),
        "chunks": str(actor.virtual_pipeline_model_parallel_size or 1),
        "EP": str(actor.expert_model_parallel_size),
        "rollout TP": str(cfg.rollout.tensor_model_parallel_size),
        "update tokens": str(cfg.actor.ppo_max_token_len_per_gpu),
        "other tokens": str(cfg.rollout.log_prob_max_token_len_per_gpu),
        "recompute": actor.recompute_granularity or "none",
        "offload": "+".join(offloads) or "none",
        "vLLM": f"{cfg.rollout.gpu_memory_utilization:g}",
        "sequences": str(choice.times.sequences_at_a_time),
    }


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
    mesh = role_mesh(best.cfg, "actor", best.times.world)
    ratio = seconds / best.times.seconds
    speed = f"{ratio:.2f} times as fast" if ratio > 1 + EQUAL else "not faster"
    return (
        f"Megatron's quickest layout, {mesh}, is {speed}: {best.times.seconds:.1f} s a step by "
        f"the lower bound, fsdp2 {seconds:.1f} s"
    )


def search_json(choices: Sequence[PlannedSettings], lengths: Lengths) -> list[dict[str, Any]]:
    """Return the choices as plain data: settings by dotted key, bytes, seconds."""
    return [
        {
            "settings": dict(choice.settings),
            "spare_bytes": choice.fit.spare,
            "fullest_phase": choice.fit.phase,
            "times": times_json(choice.times, lengths, choice.expected),
        }
        for choice in choices
    ]


def check_new_file(path: str) -> None:
    """Raise UserError if a config cannot be written to this path: it exists, or its directory does
    not."""
    if os.path.lexists(path):
        raise UserError(f"--write: {path} exists; name a new file, or remove it")
    if not Path(path).parent.is_dir():
        raise UserError(f"--write: {path}: no directory {Path(path).parent}; create it")


def write_config(
    path: str, command: str, settings: Mapping[str, Any], choice: PlannedSettings
) -> None:
    """Write the user's settings with the chosen ones as a new config file. command: the one that
    was run. Raise UserError if it cannot be written."""
    head = (
        f"# Written by: {command}\n# Settings of the planner's search replace those of its "
        "config.\n"
    )
    text = f"{head}\n{yaml_document(nest_settings({**settings, **choice.settings}))}"
    with disk_errors(f"--write: {path} cannot be written"), Path(path).open("x") as file:
        file.write(text)
