"""The one exception that means "what the user gave is wrong"."""

from __future__ import annotations


class UserError(ValueError):
    """A wrong setting, file or function of the user's. Its message is one clear line:
    which key, row, tensor or rank; what was found; what would be right. The entry point prints
    that line alone, without a stack, and every rank exits with a non-zero code."""
