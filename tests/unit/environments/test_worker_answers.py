"""Hostile answers of environments: the rank gets plain data of a bounded size, or a reason, and no
neighbour fails."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import LostProcessError, UserError
from rlhf_mc.environments import pool as environment_pool
from rlhf_mc.environments.environment_worker import Key, Turn
from rlhf_mc.environments.pool import EnvironmentPool
from rlhf_mc.environments.protocol import StepResult
from rlhf_mc.rewards.results import Failure
from rlhf_mc.runtime import guard, worker_process

HOSTILE = """
import asyncio, collections, ctypes, enum, os, sys, threading, time
import numpy as np

class Role(str, enum.Enum):
    USER = "user"

class Runs(str):
    def __reduce__(self):
        return os.abort, ()
    def encode(self, *args):
        return b"\\xff"
    def __len__(self):
        return -1

class Number(float):
    def __float__(self):
        raise SystemExit("no number")

class Unreadable(Exception):
    def __str__(self):
        raise GeneratorExit

def forks():
    if os.fork() == 0:
        return "child"
    return "parent"

def message(role="user", content="hi", **further):
    return [{"role": role, "content": content, **further}]

def deep(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value

LONE = chr(0xD800)
"""
OBSERVATIONS = {
    "message(Role.USER, Runs('hi'), name=LONE)": [{"role": "user", "content": "hi", "name": "?"}],
    "[{**message(LONE)[0], LONE: LONE, 3: 'three', 'tool_calls': Role}]": [
        {"role": "?", "content": "hi", "?": "?"}
    ],
    "[collections.OrderedDict(message()[0])]": [{"role": "user", "content": "hi"}],
    "Runs(LONE)": "?",
    "'x' * 10**8": "xxxx...(truncated)...xxxx",
    "[7] * 10**6": [7] * 8,
    "()": "",
    "print('printed') or os.write(1, b'written') and 'hi'": "hi",
    "forks()": "parent",
}
REASONS = {
    "message(name='x' * 20_000_000)": "returned messages of more than 262,176 bytes",
    "message('', '') * 300_000": "returned messages of more than 262,176 bytes",
    "message('', '') * 20_000": "its answer has 320,090 bytes; at most 262,176 are allowed",
    "[2**70]": "its answer cannot be sent (can't serialize ints",
    "[np.int64(7)]": "an observation with int64 in it: no text, tokens or messages",
    "np.zeros(2)": "returned an observation of ndarray",
    "{1, 2}": "returned an observation of set",
    "b'7'": "returned an observation of bytes",
    "deep(10_000)": "an observation with list in it",
    "message(None)": "returned a message without a text as role and one as content",
    "(_ for _ in ()).throw(StopIteration(7))": (
        "raised RuntimeError: generator raised StopIteration"
    ),
    "next(iter(()))": "raised StopIteration: ",
    "exec('raise GeneratorExit')": "raised GeneratorExit: ",
    "exec('raise KeyboardInterrupt')": "raised KeyboardInterrupt: ",
    "exec('raise asyncio.CancelledError')": "raised CancelledError: ",
    "exec('raise Unreadable')": "raised Unreadable: (its text raises GeneratorExit)",
    "exec('raise Nameless')": "raised Nameless: ",
}
NUMBERS = {
    "np.float32(1), np.bool_(False), {}": None,
    "Number(), False, {}": "raised SystemExit: no number",
    "1.0, np.zeros(2), {}": "raised ValueError",
    "float('nan'), False, {}": "returned score: nan, expected a finite number",
    "1.0, False, {'x': 10**400}": "returned x: ",
    "1.0, False, {LONE: 1, 3: 2, 'text': LONE}": None,
    "1.0, False, [('x', 1)]": "an info of list, not a mapping",
}


def write(tmp_path: Path, text: str) -> EnvironmentConfig:
    path = tmp_path / "environment.py"
    path.write_text(HOSTILE + text)
    return EnvironmentConfig(
        str(path), timeout_seconds=30.0, max_observation_length=8, num_workers=1
    )


def answers(
    pool: EnvironmentPool, kinds: Sequence[str], seconds: float = 60.0
) -> list[StepResult | Failure | None]:
    """Return the answers to the first turn of conversations of these kinds, which begin at the same
    time."""
    for number, kind in enumerate(kinds):
        pool.submit(Turn((0, number), {"kind": kind}, "", []))
    taken: dict[Key, Any] = {}
    deadline = time.monotonic() + seconds
    while len(taken) < len(kinds) and time.monotonic() < deadline:
        taken |= pool.take(0.1)
    return [taken[0, number] for number in range(len(kinds))]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_answers_are_plain_data_or_a_reason(tmp_path: Path, kind: str) -> None:
    cfg = write(
        tmp_path,
        f"""
class Environment:
    def reset(self, row): self.kind = row["kind"]
    {kind} step(self, response): return eval(self.kind)
Unnamed = type("Unnamed", (type,), {{"__name__": property(lambda cls: exit())}})
class Nameless(Exception, metaclass=Unnamed): pass
""",
    )
    pool = EnvironmentPool(cfg)
    cases = {
        f"({text}, 1.0, False, {{}})": found for text, found in (OBSERVATIONS | REASONS).items()
    }
    cases |= {f"('', {text})": found for text, found in NUMBERS.items()}
    start = time.monotonic()
    found = answers(pool, [*cases])
    assert time.monotonic() - start < cfg.timeout_seconds, "no answer is waited for"
    assert len(pool._workers) == 1, "the process has not ended"
    pool.close()
    for (text, wanted), answer in zip(cases.items(), found, strict=True):
        if isinstance(answer, Failure):
            # Python's own rule for coroutines
            is_async = kind == "async def" and "next(iter" in text
            message = "raised RuntimeError: coroutine raised StopIteration" if is_async else wanted
            assert isinstance(message, str) and message in answer.problem, text
        else:
            assert isinstance(answer, StepResult) and text not in REASONS, text
            if wanted is None:
                assert set(answer.info) <= {"\\ud800", "3"} and type(answer.reward) is float
            else:
                assert answer.observation == wanted
            assert str(answer).isascii()


def test_the_call_that_blocks_a_process_is_named(tmp_path: Path) -> None:
    """Check a call within a module, and one that keeps the interpreter's lock."""
    cfg = write(
        tmp_path,
        """
class Environment:
    def reset(self, row): self.kind = row["kind"]
    async def sleep(self):
        time.sleep(60)  # 43
    async def wait(self):
        threading.Event().wait()  # 45
    def step(self, response):
        if self.kind == "lock":
            ctypes.PyDLL(None).sleep(60)  # 48
        return getattr(self, self.kind)()
""",
    )
    cfg.timeout_seconds = 0.3
    cfg.num_workers = 3
    pool = EnvironmentPool(cfg)
    wanted = ["43 in sleep", "45 in wait (threading.py:", "48 in step"]
    for answer, place in zip(answers(pool, ["sleep", "wait", "lock"]), wanted, strict=True):
        assert (
            isinstance(answer, Failure)
            and f"is blocked, at environment.py:{place}" in answer.problem
        )
    pool.close()


def test_a_coroutine_that_ignores_cancellation_fails_alone(tmp_path: Path) -> None:
    cfg = write(
        tmp_path,
        """
class Environment:
    def reset(self, row): self.kind = row["kind"]
    async def step(self, response):
        while self.kind == "ignores":
            try:
                await asyncio.sleep(60)
            except BaseException:
                pass
        await asyncio.sleep(0.4)
        if self.kind == "cancels":
            asyncio.current_task().cancel()
        return "", 1.0, True, {}
""",
    )
    cfg.timeout_seconds = 0.5
    pool = EnvironmentPool(cfg)
    ignoring, canceled, other = answers(pool, ["ignores", "cancels", ""])
    assert isinstance(canceled, Failure) and canceled.problem == "cancelled its own task"
    assert isinstance(ignoring, Failure) and ignoring.problem.startswith("no answer after 0.5 s (")
    assert other == StepResult("", 1.0, True, {})
    time.sleep(1.2)  # longer than the rank waits for a process that does not answer
    assert pool.take(0.1) == {} and len(pool._workers) == 1
    pool.close()


def test_calls_that_hang_take_no_thread_of_later_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a process of two threads whose calls hang: it ends once its conversations have."""
    monkeypatch.setattr(environment_pool, "MOST_THREADS", 4)
    cfg = write(
        tmp_path,
        """
class Environment:
    def reset(self, row): self.kind = row["kind"]
    def step(self, response):
        while self.kind == "hangs":
            time.sleep(60)
        return str(os.getpid()), 1.0, True, {}
""",
    )
    cfg.timeout_seconds = 0.3
    pool = EnvironmentPool(cfg)
    (first,) = pool._workers
    for kinds in (["hangs"], ["hangs"]):
        (failure,) = answers(pool, kinds)
        assert isinstance(failure, Failure) and failure.problem.startswith(
            "no answer after 0.3 s ("
        )
        assert pool._workers == [first]
        pool.end((0, 0))
    assert pool._workers == []
    cfg.timeout_seconds = 30.0
    assert isinstance(answers(pool, [""])[0], StepResult)
    pool.close()


def test_an_environment_that_cannot_be_closed_ends_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cfg = write(
        tmp_path,
        """
class Environment:
    def reset(self, row): self.kind = row["kind"]
    def step(self, response): return "", 1.0, True, {}
    @property
    def close(self):
        raise eval(self.kind)("not closed")
""",
    )
    pool = EnvironmentPool(cfg)
    for kind in ("OSError", "SystemExit", "KeyboardInterrupt"):
        assert answers(pool, [kind]) == [StepResult("", 1.0, True, {})]
        pool.end((0, 0))
    assert answers(pool, ["OSError"]) == [StepResult("", 1.0, True, {})] and len(pool._workers) == 1
    pool.close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_file_may_close_the_event_loop_in_which_it_is_imported(tmp_path: Path) -> None:
    cfg = write(
        tmp_path,
        """
loop = asyncio.get_event_loop()
loop.run_until_complete(asyncio.sleep(0))
loop.close()
class Environment:
    async def reset(self, row): pass
    async def step(self, response): return "", 1.0, True, {}
""",
    )
    pool = EnvironmentPool(cfg)
    assert answers(pool, [""]) == [StepResult("", 1.0, True, {})]
    pool.close()


def test_workers_are_by_the_cores_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    text = (
        "class Environment:\n    def reset(self, row): pass\n    def step(self, response): "
        "return '', 0.0, True, {}"
    )
    cfg = write(tmp_path, text)
    cfg.num_workers = None
    for num_cores, wanted in ((2, 1), (16, 2), (192, 4)):
        cores = set(range(num_cores))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: cores)
        pool = EnvironmentPool(cfg)
        answers(pool, [""] * (wanted + 1))
        assert len(pool._workers) == wanted
        pool.close()


def test_threads_and_descriptors_end_with_their_worker(tmp_path: Path) -> None:
    cfg = write(
        tmp_path,
        """
class Environment:
    def reset(self, row): pass
    def step(self, response): os._exit(3)
""",
    )
    pool = EnvironmentPool(cfg)
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    for _ in range(3):
        (answer,) = answers(pool, [""])
        assert (
            isinstance(answer, Failure)
            and answer.problem == "its worker process ended, with exit code 3"
        )
    pool.close()
    assert threading.active_count() < before[0] and len(os.listdir("/proc/self/fd")) < before[1]


@pytest.mark.parametrize(
    "text",
    [
        "class Environment:\n    def __init__(self): self.reset, self.step = (lambda row: None), "
        "self.answer\n"
        "    def answer(self, response): return '', 1.0, True, {}",
        "class Inner:\n    def reset(self, row): pass\n"
        "    def step(self, response, token_ids): return '', 1.0, True, {}\n"
        "class Environment:\n    def __init__(self): self.inner = Inner()\n"
        "    def __getattr__(self, name): return getattr(self.inner, name)",
    ],
)
def test_step_may_be_an_attribute_of_the_object(tmp_path: Path, text: str) -> None:
    pool = EnvironmentPool(write(tmp_path, text))
    assert answers(pool, [""]) == [StepResult("", 1.0, True, {})]
    pool.close()


WRITES = """
for fd in range(3, 4096):
    try: os.write(fd, {text})
    except OSError: pass
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("text", "message", "error"),
    [
        (
            "class Environment:\n    def __getattr__(self, name): raise OSError(name)",
            "raised OSError: reset",
            UserError,
        ),
        (
            "os.kill(os.getpid(), 9)",
            "its worker process ended, by SIGKILL (out of memory?)",
            LostProcessError,
        ),
        ("os.kill(os.getpid(), 40)", "its worker process ended, by signal 40", UserError),
        (WRITES.format(text=b"\0\0\0\1x"), "has sent no message that can be read", UserError),
        (WRITES.format(text=b"\x7f\0\0\7x"), "has sent no message that can be read", UserError),
        (
            "os.closerange(3, 4096); time.sleep(60)",
            "its worker process has closed the pipe",
            UserError,
        ),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str, error: type[UserError]
) -> None:
    monkeypatch.setattr(guard, "END_SECONDS", 0.3)
    before = threading.active_count()
    with pytest.raises(UserError) as caught:
        EnvironmentPool(write(tmp_path, text))
    assert message in str(caught.value) and type(caught.value) is error
    assert threading.active_count() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WRITES.format(text=b"\0\0\0\7x"), "has sent no message that can be read"),
        (
            "time.sleep(60)",
            (
                "not imported after 5 s (rollout.environment.timeout_seconds), at "
                "environment.py:39 in <module>"
            ),
        ),
    ],
)
def test_loading_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    """Check a process that stops within a message too."""
    monkeypatch.setattr(worker_process, "IMPORT_SECONDS", 5.0)
    cfg = write(tmp_path, text)
    cfg.timeout_seconds = 0.1
    with pytest.raises(UserError) as caught:
        EnvironmentPool(cfg)
    assert message in str(caught.value)
