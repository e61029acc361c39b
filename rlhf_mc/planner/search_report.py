"""The choices of a search as a table, as plain data, and the best of them as a config file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_mc.config.errors import UserError, error_reason
from rlhf_mc.config.load import nest_settings
from rlhf_mc.config.schema import Config
from rlhf_mc.config.yaml_reader import yaml_document
from rlhf_mc.planner.lengths import Lengths
from rlhf_mc.planner.search import EQUAL, Choice
from rlhf_mc.planner.times_report import times_json

_COLUMNS = (
    "rank",
    "step s",
    "tokens/s/GPU",
    "GB left",
    "TP",
    "PP",
    "chunks",
    "EP",
    "rollout TP",
    "update tokens",
    "other tokens",
    "recompute",
    "offload",
    "vLLM",
    "sequences",
)


def search_table(choices: Sequence[Choice], lengths: Lengths) -> str:
    """Return the table, the best choice first."""
    rows = [_COLUMNS, *(_row(number, choice) for number, choice in enumerate(choices, 1))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    about = (
        f"plans that fit, by the lower bound of a step with prompts of {lengths.prompt:g} and responses of"
        f" {lengths.response:g} tokens (those within {EQUAL:.0%}: by less offload and recomputation):"
    )
    return "\n".join([about, *lines])


def _row(number: int, choice: Choice) -> tuple[str, ...]:
    cfg = choice.cfg
    actor = cfg.actor.megatron
    offloads = [name for name in ("grad", "optimizer", "param") if getattr(actor, f"{name}_offload")]
    return (
        str(number),
        f"{choice.times.seconds:.1f}",
        f"{choice.times.tokens_per_gpu:.0f}",
        f"{choice.spare / 1e9:.1f}",
        str(actor.tensor_model_parallel_size),
        str(actor.pipeline_model_parallel_size),
        str(actor.virtual_pipeline_model_parallel_size or 1),
        str(actor.expert_model_parallel_size),
        str(cfg.rollout.tensor_model_parallel_size),
        *(_micro_batches(cfg) if cfg.actor.use_dynamic_bsz else ("", "")),
        actor.recompute_granularity or "none",
        "+".join(offloads) or "none",
        f"{cfg.rollout.gpu_memory_utilization:g}",
        str(choice.times.sequences_at_a_time),
    )


def _micro_batches(cfg: Config) -> tuple[str, str]:
    return str(cfg.actor.ppo_max_token_len_per_gpu), str(cfg.rollout.log_prob_max_token_len_per_gpu)


def search_json(choices: Sequence[Choice], lengths: Lengths) -> list[dict[str, Any]]:
    """Return the choices as plain data: settings by dotted key, bytes, seconds."""
    return [
        {
            "settings": dict(choice.settings),
            "spare_bytes": choice.spare,
            "fullest_phase": choice.phase,
            "times": times_json(choice.times, lengths),
        }
        for choice in choices
    ]


def check_new_file(path: str) -> None:
    """Raise UserError if a config cannot be written to this path: it exists, or its directory does not."""
    if os.path.lexists(path):
        raise UserError(f"--write: {path} exists; name a new file, or remove it")
    if not Path(path).parent.is_dir():
        raise UserError(f"--write: {path}: no directory {Path(path).parent}; create it")


def write_config(path: str, command: str, settings: Mapping[str, Any], choice: Choice) -> None:
    """Write the user's settings with the chosen ones as a new config file. command: the one that was run. Raise
    UserError if it cannot be written."""
    head = f"# Written by: {command}\n# Settings of the planner's search replace those of its config.\n"
    text = f"{head}\n{yaml_document(nest_settings({**settings, **choice.settings}))}"
    try:
        with Path(path).open("x") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"--write: {path} cannot be written ({error_reason(error)})") from error
