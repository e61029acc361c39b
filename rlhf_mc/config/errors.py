"""The exceptions that are reported by their message alone: a mistake of the user's, or ranks that have not joined."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator


class UserError(ValueError):
    """A wrong setting, file or function of the user's. Its message is one clear line:
    which key, row, tensor or rank; what was found; what would be right. The entry point prints
    that line alone, without a stack, and every rank exits with a non-zero code."""


class NodeError(UserError):
    """A UserError about a file on this node: another node may find it in order, so each reports its own."""


class JoinError(Exception):
    """Not all ranks of the run have found each other."""

    def __init__(self, message: str, speaks: bool) -> None:
        """speaks: whether this rank prints the message, which is the same on all ranks."""
        super().__init__(message)
        self.speaks = speaks


def reason_of(error: OSError) -> str:
    """Return the system's words for the error and, where it tells of a limit, which one and what would be right."""
    match error.errno:
        case errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            hint = f"; this process may have {limit} files and connections open: raise that (ulimit -n)"
        case errno.ENFILE:
            hint = "; the machine has as many files open as it may: raise that (sysctl fs.file-max)"
        case errno.ENOSPC | errno.EDQUOT:
            hint = "; free some space, or give another directory"
        case errno.EFBIG:
            hint = "; the largest file allowed is smaller: raise that (ulimit -f)"
        case _:
            hint = ""
    return f"{error.strerror or error}{hint}"


@contextlib.contextmanager
def disk_errors(subject: str = "") -> Iterator[None]:
    """Raise a UserError in place of an OSError that is raised inside: the subject, the system's words, the file."""
    try:
        yield
    except OSError as error:
        prefix = f"{subject}: " if subject else ""
        file = f" ({error.filename})" if error.filename else ""
        raise UserError(f"{prefix}{reason_of(error)}{file}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or the error's type if it has no message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def is_shortage(error: OSError) -> bool:
    """Return whether this process or machine has run out of something, so that the file itself may be in order."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@contextlib.contextmanager
def about(key: str) -> Iterator[None]:
    """Put the setting's key before the message of a UserError that is raised inside and does not begin with it."""
    try:
        yield
    except UserError as error:
        if not str(error).startswith(key):
            error.args = (f"{key} {error}",)
        raise
