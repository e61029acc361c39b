"""Loading of a user's own reward function from a Python file. scoring.py calls it."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from rlhf_mc.config.errors import UserError

RewardFunction = Callable[..., Any]
"""compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float or {"score": float, ...}"""


def load_reward_function(path: str, name: str) -> RewardFunction:
    """Return the function `name` of the Python file `path`. Raise UserError if the file is missing, if importing it
    raises, or if the name is not defined or cannot be called with the arguments of a RewardFunction."""
    where = f"custom_reward_function.path {path}"
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
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        raise UserError(f"{where}: importing it raised {describe_error(error)}") from error
    function = getattr(module, name, None)
    if function is None:
        raise UserError(f"{where}: has no function {name!r} (custom_reward_function.name)")
    if not callable(function):
        raise UserError(f"{where}: {name!r} is not a function but {type(function).__name__}")
    _check_signature(function, where, name)
    return function


def _check_signature(function: RewardFunction, where: str, name: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have no signature; the first call shows whether it works
        return
    try:
        signature.bind(data_source="", solution_str="", ground_truth="", extra_info={})
    except TypeError as error:
        raise UserError(
            f"{where}: {name}{signature} cannot be called as"
            f" {name}(data_source=, solution_str=, ground_truth=, extra_info=): {error}"
        ) from error


def describe_error(error: BaseException) -> str:
    """Return an exception as one line, with the file and line where it was raised."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    line = f" ({os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno})" if frame is not None else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{line}"
