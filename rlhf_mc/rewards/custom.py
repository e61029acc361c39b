"""Loading of a user's own reward function from a Python file. scoring.py calls it."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import CustomRewardFunctionConfig
from rlhf_mc.rewards.rules import RewardFunction

ROW_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""Arguments of a function that takes all rows of a worker in one call, as of verl's batch reward manager."""


@dataclass(frozen=True)
class CustomFunction:
    """A user's function, or the object of a user's class."""

    function: RewardFunction
    is_async: bool
    is_batched: bool
    """It takes lists (BATCH_ARGUMENTS) and returns one score for each row."""
    kwargs: Mapping[str, Any]
    """Further arguments of each call."""


def load_reward_function(cfg: CustomRewardFunctionConfig) -> CustomFunction:
    """Return the function of cfg.path, or an object of its class. Raise UserError if the file is missing, if importing
    it or building the object raises, or if the name is not defined or cannot be called with a row's arguments."""
    where = f"custom_reward_function.path {cfg.path}"
    name = cfg.name
    found = getattr(_module(str(cfg.path), where), name, None)
    kwargs = cfg.reward_kwargs
    if found is None:
        raise UserError(f"{where}: has no function {name!r} (custom_reward_function.name)")
    if inspect.isclass(found):
        try:
            found = found(**kwargs)
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            raise UserError(f"{where}: building the object of {name} raised {describe_error(error)}") from error
        kwargs = {}
    if not callable(found):
        raise UserError(f"{where}: {name!r} is not a function but {type(found).__name__}")
    is_batched = _check_signature(found, where, name, kwargs)
    is_async = inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None))  # noqa: B004
    return CustomFunction(found, is_async, is_batched, kwargs)


def _module(path: str, where: str) -> Any:
    """Import a Python file."""
    if not os.path.isfile(path):
        raise UserError(f"{where}: no such file")
    module_name = f"rlhf_mc_custom_reward_{os.path.splitext(os.path.basename(path))[0]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{where}: not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look the module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # as in load_reward_function
        raise UserError(f"{where}: importing it raised {describe_error(error)}") from error
    return module


def _check_signature(function: RewardFunction, where: str, name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether the function takes lists. Raise UserError if it can be called in neither form."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have no signature; the first call shows whether it works
        return False
    is_batched = "solution_strs" in signature.parameters
    arguments = BATCH_ARGUMENTS if is_batched else ROW_ARGUMENTS
    try:
        signature.bind(**dict.fromkeys(arguments), **kwargs)
    except TypeError as error:
        raise UserError(
            f"{where}: {name}{signature} cannot be called as"
            f" {name}({', '.join(f'{argument}=' for argument in (*arguments, *kwargs))}): {error}"
        ) from error
    return is_batched


def describe_error(error: BaseException) -> str:
    """Return an exception as one line, with the file and line where it was raised."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    line = f" ({os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno})" if frame is not None else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{line}"
