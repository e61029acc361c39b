"""Exceptions that are reported by their message, without a stack trace."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator

from rlhf_mc.config.masking import cut, masked


class UserError(ValueError):
    """A mistake in a setting, a file or a user-defined function. The message is one line: the key,
    row, tensor or rank, the value that was found, and the values that are allowed. The entry point
    prints only this line, and every rank exits with a non-zero code. It has no secrets, and the
    length of a text that is cut."""

    def __init__(self, message: object = "") -> None:
        super().__init__(cut(masked(str(message))))


class NodeError(UserError):
    """A UserError about a file on this node. Other nodes may have the file, so each node reports
    its own error."""


class LostProcessError(UserError):
    """A process of the user's code was killed, for memory perhaps. It is reported as a UserError
    is, with the exit code of other errors: the next attempt may succeed."""


class JoinError(Exception):
    """Not all ranks of the run have joined."""

    def __init__(self, message: str, prints: bool) -> None:
        """Make the error with a message that is the same on all ranks. prints: this rank prints
        it."""
        super().__init__(message)
        self.prints = prints


def error_reason(error: OSError) -> str:
    """Return the system's message for the error and, if a limit was reached, which limit and how to
    raise it."""
    match error.errno:
        case errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            hint = (
                f"; this process may have {limit} files and connections open: raise that (ulimit "
                "-n)"
            )
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
    """Raise UserError in place of an OSError that is raised inside:
    `<subject>: <reason> (<file>)`."""
    try:
        yield
    except OSError as error:
        prefix = f"{subject}: " if subject else ""
        file = f" ({error.filename})" if error.filename else ""
        raise UserError(f"{prefix}{error_reason(error)}{file}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or the error's type if it has no message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def is_shortage(error: OSError) -> bool:
    """Return whether the process or machine is out of descriptors or memory, so that the file may
    be intact."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@contextlib.contextmanager
def error_prefix(key: str) -> Iterator[None]:
    """Prefix the message of a UserError that is raised inside with the setting's key, unless it
    begins with it."""
    try:
        yield
    except UserError as error:
        if not str(error).startswith(key):
            error.args = (f"{key} {error}",)
        raise
