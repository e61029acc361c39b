"""Checks that take about a second, before torch is imported and before a rank waits for another.
Each rank makes them by itself. build.py makes the checks that need weights, tokenizer, rows or a
GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from rlhf_mc.architectures.run_shapes import balances_experts, model_shapes, router_replay
from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError, error_prefix
from rlhf_mc.config.paths import check_present
from rlhf_mc.config.printing import check_not_hidden
from rlhf_mc.config.roles import num_teacher_tokens
from rlhf_mc.config.schema import Config, layouts, teacher_paths
from rlhf_mc.data.source import check_columns, needed_columns, scored_by_rule
from rlhf_mc.observability.trackers import check_loggers
from rlhf_mc.reshard.model_checks import check_layout, check_length
from rlhf_mc.rewards.remote import RemoteReward
from rlhf_mc.rollout.engines import engine_factory


def world_size() -> int:
    """Return the number of ranks that torchrun or srun has started; 1 without them. Raise UserError
    if the environment variable is not a number."""
    text = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"the environment variable WORLD_SIZE is {text!r}; it must be the number of ranks"
        )
    return int(text)


def check_early(cfg: Config, world: int) -> None:
    """Raise UserError if the settings, the files that they name, or a config.json show that the run
    cannot start on `world` ranks."""
    check_config(cfg, world)
    check_not_hidden(cfg)
    if cfg.reward.remote.url is not None:
        RemoteReward(cfg.reward.remote, cfg.reward.timeout_seconds)
    check_present(cfg)
    check_loggers(cfg.trainer.logger)
    _check_models(cfg)
    for key, files in (
        ("data.train_files", cfg.data.train_files),
        ("data.val_files", cfg.data.val_files),
    ):
        for file in files:
            with error_prefix(f"{key} {file}:"):
                check_columns(file, needed_columns(cfg.data, scored_by_rule(cfg, key)))
    _check_environment()


def _check_environment() -> None:
    """Raise UserError if this is a rank and the environment lacks the address of rank 0."""
    if "RANK" not in os.environ:
        return
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise UserError(
            f"RANK is set in the environment, and {' and '.join(missing)} not; torchrun and "
            "launch/slurm_job.sh set them, and without RANK the run has one process"
        )


def _check_models(cfg: Config) -> None:
    """Raise UserError if a config.json is of an unsupported model, or of one that the layouts
    cannot shard."""
    roles = model_shapes(cfg)
    for role, (key, shape) in roles.items():
        megatron = layouts(cfg)[role]
        with _in_section(f"{role}.megatron", key):
            check_layout(shape, megatron, role)
    key, actor = roles["actor"]
    check_length(key, actor, cfg.data)
    k = num_teacher_tokens(cfg)
    for key, shape in (roles["actor"], *(roles[role] for role in teacher_paths(cfg))):
        if k > shape.vocab_size:
            raise UserError(
                f"distillation.distillation_loss.topk is {k}; the vocabulary of {key} has "
                f"{shape.vocab_size} tokens"
            )
    balances_experts(cfg, actor)
    router_replay(cfg, actor)
    if cfg.rollout.name == "custom":
        return  # its file may import torch
    with _in_section("rollout", "model.path"):
        engine_factory(cfg.rollout).check_layout(actor, cfg.rollout.tensor_model_parallel_size)


@contextlib.contextmanager
def _in_section(section: str, model: str) -> Iterator[None]:
    """Add to a UserError inside the section of the setting that it begins with, and the setting of
    its model."""
    try:
        yield
    except UserError as error:
        has_section = str(error).startswith((f"{section}.", "config.json"))
        raise UserError(f"{error if has_section else f'{section}.{error}'} ({model})") from None
