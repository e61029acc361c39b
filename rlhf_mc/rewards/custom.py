"""The user's own reward function. scoring.py calls it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import CustomRewardFunctionConfig
from rlhf_mc.config.user_function import describe_error, load_attribute
from rlhf_mc.rewards.registry import RewardFunction

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
    function = load_attribute("custom_reward_function", str(cfg.path), name)
    kwargs = cfg.reward_kwargs
    if inspect.isclass(function):
        try:
            function = function(**kwargs)
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            raise UserError(f"{where}: building the object of {name} raised {describe_error(error)}") from error
        kwargs = {}
    if not callable(function):
        raise UserError(f"{where}: {name!r} is not a function but {type(function).__name__}")
    is_batched = _check_signature(function, where, name, kwargs)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    return CustomFunction(function, is_async, is_batched, kwargs)


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
