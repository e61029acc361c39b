"""The rollout engines that rollout.name selects. Neither torch nor an engine is imported here."""

from __future__ import annotations

import functools

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.config.user_function import describe_error, load_attribute
from rlhf_mc.rollout.base import EngineFactory
from rlhf_mc.rollout.vllm_layout import VLLM

ENGINES: dict[str, EngineFactory] = {"vllm": VLLM()}
"""Built-in engines by the value of rollout.name."""


def engine_factory(cfg: RolloutConfig) -> EngineFactory:
    """Return the factory of the run's rollout engine. Raise UserError if the user's cannot be loaded, or lacks a part
    of EngineFactory."""
    if cfg.name != "custom":
        return ENGINES[cfg.name]
    assert cfg.custom_engine.path is not None, "config/checks.py ensures it"
    return _custom_engine(cfg.custom_engine.path, cfg.custom_engine.name)


@functools.cache
def _custom_engine(path: str, name: str) -> EngineFactory:
    section = "rollout.custom_engine"
    where = f"{section}.path {path}: {name}"
    try:
        factory: EngineFactory = load_attribute(section, path, name)()
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{where}() raised {describe_error(error)}") from error
    wanted = ("title", "layout", "check_layout", "check_installation", "check_model", "build")
    if missing := [part for part in wanted if not hasattr(factory, part)]:
        raise UserError(f"{where} lacks {', '.join(missing)} of rlhf_mc.rollout.base.EngineFactory")
    return factory
