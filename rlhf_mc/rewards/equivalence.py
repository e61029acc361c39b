"""Equivalence of two answers in LaTeX, by math-verify (on SymPy) in a process of its own.

Computer algebra may take forever, or stay inside one C function, where no signal handler of Python
runs. So the kernel kills the process once it has used up its processor time for a row, and the next
row starts another process. The limit is processor time and not wall-clock time, so that a busy
machine changes no score. The process starts with the first row that needs it, since importing SymPy
takes about two seconds.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe

from rlhf_mc.config.errors import UserError
from rlhf_mc.runtime.guard import GROUP_SIGNALS

LIMIT_SECONDS = 3.0
"""Processor time for one row. Half of the answers in tests/unit/rewards/math_answers.jsonl take
0.004 s, the slowest 0.13 s."""
LIMIT_BYTES = 4 << 30
"""Address space of the process: 9^{9^{9^9}} has more digits than fit into any memory."""

_DECIMALS = 12
"""Places to which a decimal is compared with a fraction or an irrational number."""


class Undecided(Exception):
    """A comparison that was not completed, for the reason in the message."""


class Comparison:
    """Compares answers, one at a time, in a child process that ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def same(self, answer: str, truth: str) -> bool:
        """Return whether the answers are equivalent. Raise Undecided if the comparison takes too
        long, UserError if math-verify cannot be imported."""
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it ended between two rows, so neither row is the cause
        connection = self._connection or self._start()
        try:
            connection.send((answer, truth))
            return bool(connection.recv())
        except (EOFError, OSError):
            raise Undecided(self._end()) from None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from rlhf_mc.rewards.equivalence import main\nmain({theirs.fileno()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": "0"},  # SymPy iterates over sets
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the parsers print warnings about answers
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._connection = ours
        try:
            problem = ours.recv()
        except (EOFError, OSError):
            problem = self._end()
        if problem is not None:
            self.close()
            raise UserError(
                f"the rule for MATH cannot use the package math-verify, which it needs: {problem}"
            )
        return ours

    def _end(self) -> str:
        """Wait for the ending process. Return its exit code, signal or used-up limit as text."""
        assert self._process is not None and self._connection is not None
        code = self._process.wait()
        self._connection.close()
        self._process = self._connection = None
        if code == -signal.SIGPROF:
            return f"more than {LIMIT_SECONDS:g} s of processor time"
        return (
            f"its process ended by {signal.Signals(-code).name}"
            if code < 0
            else f"its process exited with {code}"
        )


def main(descriptor: int) -> None:
    """Compare the answers that arrive, until the other end is closed. This is the child process's
    program."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    connection = Connection(descriptor)
    try:
        same = _load()
    except Exception as error:  # whatever an import may raise
        connection.send(f"{type(error).__name__}: {error}")
        return
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    connection.send(None)
    while True:
        try:
            answer, truth = connection.recv()
            # The timer's signal has no handler, so the kernel kills the process, whatever the
            # process is doing.
            signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
            result = same(answer, truth)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.send(result)
        except (EOFError, OSError):
            os._exit(0)


def _load():  # type: ignore[no-untyped-def]
    """Import math-verify and return the function that compares two answers."""
    import logging

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from sympy import Basic, I, Symbol
    from sympy.core import random

    logging.disable(logging.CRITICAL)
    kinds = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def parsed(text: str):  # type: ignore[no-untyped-def]
        return parse(rf"\boxed{{{text}}}", kinds, parsing_timeout=None, raise_on_error=False)

    def with_imaginary_unit(value):  # type: ignore[no-untyped-def]
        """Return the expression with the imaginary unit for i, which the parser leaves a symbol
        that is not real."""
        return value.subs(Symbol("i", real=False), I) if isinstance(value, Basic) else value

    def same(answer: str, truth: str) -> bool:
        # SymPy evaluates expressions at random points; the result must not depend on earlier rows
        random.seed(0)
        gold, given = (
            [with_imaginary_unit(expression) for expression in parsed(text)]
            for text in (truth, answer)
        )
        return bool(
            verify(gold, given, _DECIMALS, allow_set_relation_comp=True, timeout_seconds=None)
        )

    same(r"\frac{1}{2}", "0.5")  # the first use builds the parser's tables
    return same
