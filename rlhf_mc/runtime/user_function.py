"""Loading of a user's own function from a Python file that a section of the settings names: a
reward function, an advantage estimator, a policy loss.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.masking import one_line

MOST_ERROR_CHARACTERS = 1000
"""Length of the text of a user's exception in a message."""
_class_name: Callable[[type], str] = type.__dict__["__name__"].__get__
"""Return the name of a class, whatever its metaclass does."""


def load_attribute(section: str, path: str, name: str, hint: str = "") -> Any:
    """Return what the Python file `path`, the setting {section}.path, defines as `name`. Raise
    UserError if the file is missing, if importing it raises, or, with the hint, if it does not
    define the name."""
    attribute = getattr(load_file(f"{section}.path", path), name, None)
    if attribute is None:
        raise UserError(f"{section}.path {path}: has no function {name!r}{hint}")
    return attribute


def load_file(setting: str, path: str) -> ModuleType:
    """Return the module of a Python file. Raise UserError if the file is missing, or if importing
    it raises."""
    where = f"{setting} {path}"
    if not os.path.isfile(path):
        raise UserError(f"{where}: no such file")
    module_name = _module_name(setting.rpartition(".")[0].replace(".", "_"), path)
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{where}: not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look the module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        raise UserError(f"{where}: importing it raised {describe_error(error)}") from error
    return module


def _module_name(section: str, path: str) -> str:
    """Return the name of a file's module: that of the file, so that a spawned process can import
    it, unless another module has it. The directory of the file becomes the last one in which
    modules are looked for."""
    directory, file = os.path.split(os.path.abspath(path))
    name = os.path.splitext(file)[0]
    if directory not in sys.path:
        sys.path.append(directory)
    importlib.invalidate_caches()
    with contextlib.suppress(ImportError, ValueError):  # a dotted name; a module without a spec
        spec = importlib.util.find_spec(name)
        if (
            spec is not None
            and spec.origin is not None
            and os.path.realpath(spec.origin) == os.path.realpath(path)
        ):
            return name
    return f"rlhf_mc_{section}_{name}"


def load_function(section: str, path: str, name: str) -> Callable[[Any], Any]:
    """Return a function of one argument, as load_attribute does. Raise UserError also if it cannot
    be called so."""
    where = f"{section}.path {path}"
    function: Callable[[Any], Any] = load_attribute(section, path, name)
    if not callable(function):
        raise UserError(f"{where}: {name!r} is not a function but {type(function).__name__}")
    try:
        signature = inspect.signature(function)
        signature.bind(None)
    except ValueError:  # some built-ins have no signature; the first call shows whether it works
        pass
    except TypeError as error:
        raise UserError(
            f"{where}: {name}{signature} cannot be called as {name}(inputs): {error}"
        ) from error

    @functools.wraps(function)
    def call(inputs: Any) -> Any:
        try:
            return function(inputs)
        except SystemExit as error:  # it would end the rank, or a program that uses the Python API
            raise UserError(f"{where}: {name} raised {describe_error(error)}") from error

    return call


def describe_error(error: BaseException) -> str:
    """Return an exception as one line, with the file and line where it was raised."""
    frames = list(traceback.walk_tb(error.__traceback__))
    line = (
        f" ({os.path.basename(frames[-1][0].f_code.co_filename)}:{frames[-1][1]})" if frames else ""
    )
    try:
        text = str(error)
    except BaseException as second:  # the user's own class may raise anything
        text = f"(its text raises {_class_name(type(second))})"
    return f"{_class_name(type(error))}: {one_line(text, MOST_ERROR_CHARACTERS)}{line}"
