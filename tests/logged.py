"""The messages of a logger in ranks that tests share, where pytest's caplog does not reach."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def messages_of(logger: logging.Logger) -> Iterator[list[str]]:
    """Yield the list of the messages that the logger gets while the body runs."""
    handler = _Messages()
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)
