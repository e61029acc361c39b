"""Environment variables that a setting of the user demands."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rlhf_mc.config.errors import UserError


def demand_variables(reason: str, variables: Mapping[str, Sequence[str]]) -> None:
    """Set each variable to the first of its values unless the environment has one of them. Raise
    UserError where it has another value.

    reason: the setting that demands them."""
    for name, values in variables.items():
        value = os.environ.setdefault(name, values[0])
        if value.lower() not in map(str.lower, values):
            raise UserError(
                f"{reason}: the environment variable {name} is {value!r}; unset it, or set it to "
                f"{' or '.join(values)}"
            )
