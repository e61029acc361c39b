"""RewardManager: the built-in rules by data source, the user's reward functions, worker processes
and errors."""

from __future__ import annotations

import datetime
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import is_running, kill, wait_until

from rlhf_mc.config.errors import LostProcessError, UserError
from rlhf_mc.config.reward_schema import CustomRewardFunctionConfig, RewardConfig
from rlhf_mc.data.batch import Prompt
from rlhf_mc.rewards.manager import RewardManager
from rlhf_mc.rewards.registry import RULE_OF_SOURCE, RULES
from rlhf_mc.rewards.results import Episode, reward_metrics
from rlhf_mc.runtime import work, worker_process


@pytest.fixture(autouse=True)
def close_managers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the managers that a test has built."""
    managers: list[RewardManager] = []
    initialize = RewardManager.__init__

    def recorded_init(self: RewardManager, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        managers.append(self)

    monkeypatch.setattr(RewardManager, "__init__", recorded_init)
    yield
    for manager in managers:
        manager.close()


def score(
    manager: RewardManager, prompts: Sequence[Prompt], responses: Sequence[str]
) -> list[dict[str, float]]:
    """Return each response's score and the further numbers of its reward function."""
    return [
        {"score": row.score, **row.extra} for row in manager.submit(prompts, responses).result()
    ]


def make_prompt(
    index: int = 0, data_source: str = "mine", truth: Any = "4", **extra: Any
) -> Prompt:
    return Prompt(index, np.array([1], np.int32), data_source, truth, extra)


# ---------------------------------------------------------------- the manager with the built-in
# rules


def test_manager_uses_the_rule_of_each_row() -> None:
    manager = RewardManager(CustomRewardFunctionConfig(), RewardConfig())
    prompts = [
        make_prompt(0, "arithmetic", "4"),
        make_prompt(1, "openai/gsm8k", "4"),
        make_prompt(2, "lighteval/MATH"),
    ]
    manager.check(prompts)
    scores = manager.submit(prompts, ["4", "4", r"\boxed{4}"]).result()
    assert [row.score for row in scores] == [row.accuracy for row in scores] == [1.0, 0.0, 1.0]
    assert [row.parts for row in scores] == [
        {"exact_match": 1.0},
        {"gsm8k_strict": 0.0},
        {"math": 1.0},
    ]


@pytest.mark.slow
def test_endless_comparison_is_stopped_at_its_time_limit() -> None:
    """Include the power of an integer, during which Python handles no signal."""
    manager = RewardManager(CustomRewardFunctionConfig(), RewardConfig())
    prompts = [make_prompt(i, "lighteval/MATH", "x+x") for i in range(4)]
    responses = [r"\boxed{2x}", r"\boxed{9^{9^{9^9}}}", r"\boxed{x^2}", r"\boxed{x \cdot 2}"]
    try:
        rows = score(manager, prompts, responses)
        assert [row["score"] for row in rows] == [1.0, 0.0, 0.0, 1.0]
        assert [row["undecided"] for row in rows] == [0.0, 1.0, 0.0, 0.0]
    finally:
        manager.close()


def test_unknown_data_source_is_found_before_training() -> None:
    manager = RewardManager(CustomRewardFunctionConfig(), RewardConfig())
    with pytest.raises(UserError) as caught:
        manager.check([make_prompt(0, "arithmetic"), make_prompt(17, "openai/gsm9k")])
    message = str(caught.value)
    for word in ("row 17", "'openai/gsm9k'", "custom_reward_function.path", *RULE_OF_SOURCE):
        assert word in message


def test_missing_ground_truth_is_found_before_training() -> None:
    with pytest.raises(UserError, match=r"row 3 .*ground_truth is null"):
        RewardManager(CustomRewardFunctionConfig(), RewardConfig()).check(
            [make_prompt(3, "arithmetic", None)]
        )


SOLUTION = "She sold 48/2 = 24 clips in May. She sold 48+24 = 72 clips altogether.\n#### 72"


@pytest.mark.parametrize(
    ("rule", "read", "refused"),
    [
        (
            "gsm8k_strict",
            [54, 54.0, Decimal("54.00"), 1e-5, Decimal("1E-7"), "1,234", " -3.5 "],
            ["$54", "54 clips", True, SOLUTION],
        ),
        ("gsm8k_flexible", [54, 54.0, "1,234", "-3.5"], ["$54", "18.", "fifty", SOLUTION]),
        (
            "math",
            [54, 54.0, r"\frac{1}{2}", r"\boxed{5}", "$54", r"so \boxed{72}. It is"],
            [r"\frac{1", r"\text{}", SOLUTION],
        ),
        (
            "math_string",
            [54.0, r"\frac12", "(1,2)"],
            [r"\boxed{5}", "The answer is 72", r"so \boxed{72}. It is", SOLUTION],
        ),
        (
            "math_dapo",
            [54.0, "$54$", r"\boxed{5}", "1,000"],
            ["x\n" * 60, "x" * 400, r"so \boxed{72}. It is", SOLUTION],
        ),
        ("numina", [54.0, "1/2", "x is odd", "D. None of these"], ["Answer: 5", SOLUTION]),
        (
            "exact_match",
            [54.0, "$54", ["a", 5.0], {"target": ["a"]}, SOLUTION],
            [[], [""], [["a"]], {"a": 1}, [None]],
        ),
        ("f1", [54.0, "Paris", ["Paris", "Lyon"]], [{"text": ["Paris"]}, [{"text": "Paris"}]]),
        ("multiple_choice", ["C", 2, 2.0, "2"], ["c", "(C)", "Paris", 10, True]),
    ],
)
def test_ground_truths_that_no_answer_equals_are_found_before_training(
    rule: str, read: list[Any], refused: list[Any]
) -> None:
    """Check lists, dicts and values that are not finite of every rule, too."""
    manager = RewardManager(CustomRewardFunctionConfig(), RewardConfig(mixture={"*": {rule: 1.0}}))
    manager.check([make_prompt(i, "mine", truth) for i, truth in enumerate(read)])
    several = rule in ("exact_match", "f1")
    for truth in (
        *refused,
        math.nan,
        math.inf,
        {"a": "b"},
        b"5",
        *([] if several else [["5"], {"target": ["5"]}]),
    ):
        with pytest.raises(
            UserError, match=rf"row 3 .*ground_truth is .*; it must be .* for the rule {rule}"
        ):
            manager.check([make_prompt(3, "mine", truth)])


@pytest.mark.parametrize(
    ("rule", "response"),
    [
        ("gsm8k_strict", "#### 54"),
        ("gsm8k_flexible", "it is 54"),
        ("exact_match", "54"),
        ("f1", "54"),
    ]
    + [(rule, r"Answer: 54 \boxed{54}") for rule in ("math", "math_string", "numina")]
    + [("math_dapo", "Answer: 54")],
)
@pytest.mark.parametrize("truth", [54, 54.0, Decimal("54.00"), "54"])
def test_a_float_that_is_a_whole_number_is_read_as_an_integer(
    rule: str, response: str, truth: Any
) -> None:
    assert RULES[rule]._is_right(response, truth)
    assert RULES["multiple_choice"]._is_right("C", 2.0)


# ---------------------------------------------------------------- a user's function


def custom(
    tmp_path: Path, body: str, name: str = "compute_score", reward: RewardConfig | None = None
) -> RewardManager:
    path = tmp_path / "reward.py"
    path.write_text(textwrap.dedent(body))
    return RewardManager(
        CustomRewardFunctionConfig(path=str(path), name=name), reward or RewardConfig()
    )


def test_custom_function_gets_the_row_and_may_return_more_numbers(tmp_path: Path) -> None:
    manager = custom(
        tmp_path,
        """
        from dataclasses import dataclass

        @dataclass
        class Result:
            value: float

        def mine(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
            assert data_source == "mine" and ground_truth is None
            right = solution_str == extra_info["want"]
            return {"score": Result(0.5).value, "acc": right, "pred": solution_str, "length": len(solution_str)}
        """,  # noqa: E501
        name="mine",
    )
    prompts = [make_prompt(truth=None, want="a"), make_prompt(truth=None, want="b")]
    manager.check(prompts)
    scores = score(manager, prompts, ["a", "ccc"])
    assert scores == [
        {"score": 0.5, "acc": 1.0, "length": 1.0},
        {"score": 0.5, "acc": 0.0, "length": 3.0},
    ]
    assert all(type(value) is float for row in scores for value in row.values())


MASKS = "from rlhf_mc.rewards.results import MaskSample\n"


@pytest.mark.parametrize(
    "body",
    [
        """
def compute_score(solution_str, **row):
    if solution_str == "dead":
        raise MaskSample("the sandbox\\n died")
    return 1.0
""",
        """
class SandboxDied(MaskSample): ...

async def compute_score(solution_str, **row):
    if solution_str == "dead":
        raise SandboxDied("the sandbox\\n died")
    return 1.0
""",
        """
def compute_score(solution_strs, **rows):
    return [MaskSample("the sandbox\\n died") if x == "dead" else 1.0 for x in solution_strs]
""",
    ],
)
def test_a_function_masks_its_response(
    tmp_path: Path, body: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check that the run continues without reward.default_score, and that the means of the scores
    leave the response out."""
    manager = custom(tmp_path, MASKS + body)
    prompts = [make_prompt() for _ in range(3)]
    scores = manager.submit(prompts, ["fine", "dead", "fine"]).result()
    assert [(row.score, row.is_masked) for row in scores] == [(1, False), (0, True), (1, False)]
    name = "SandboxDied" if "SandboxDied" in body else "MaskSample"
    assert f"raised {name}: the sandbox died; it scores 0" in capfd.readouterr().err
    metrics = reward_metrics(["mine"] * 3, scores)
    assert metrics["critic/score/mine/mean"] == metrics["critic/score/mine/min"] == 1.0
    assert metrics["reward/mine/num_failed/masked"] == metrics["reward/num_failed"] == 1
    assert reward_metrics(["mine"], scores[1:2])["critic/score/mine/mean"] == 0.0


def test_a_masked_conversation_stays_masked_where_its_score_fails(tmp_path: Path) -> None:
    manager = custom(tmp_path, "def compute_score(**row):\n    raise ValueError")
    episode = Episode([(0, 1.0)], {}, {"masked": 1}, None, 0.0)
    pending = manager.submit([make_prompt()], ["a"], episodes=[episode])
    assert [(row.failure, row.is_masked) for row in pending.result()] == [("masked", True)]


@pytest.mark.parametrize("name", ["mine too", "json"])
def test_functions_of_the_file_go_to_a_spawned_process(tmp_path: Path, name: str) -> None:
    """Check a file with the name of another module too, which it does not replace."""
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent("""
        import json, multiprocessing, os
        from concurrent.futures import ProcessPoolExecutor

        def count(text):
            return len(json.loads(text))

        def compute_score(solution_str, **row):
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                return pool.submit(count if __name__ == "mine too" else len, solution_str).result()
        """)
    )
    manager = RewardManager(
        CustomRewardFunctionConfig(path=str(tmp_path / f"{name}.py")), RewardConfig()
    )
    assert score(manager, [make_prompt()], ["[7]"]) == [{"score": 3.0 if name == "json" else 1.0}]


@pytest.mark.parametrize(
    "expression", ["1", "True", "1.0", "numpy.float32(1)", "numpy.int64(1)", "numpy.bool_(True)"]
)
def test_custom_function_may_return_any_number(tmp_path: Path, expression: str) -> None:
    manager = custom(tmp_path, f"import numpy\ndef compute_score(**row): return {expression}\n")
    assert score(manager, [make_prompt()], ["4"]) == [{"score": 1.0}]


def test_custom_function_cannot_change_the_row(tmp_path: Path) -> None:
    manager = custom(
        tmp_path, "def compute_score(extra_info, **row): return extra_info.pop('bonus')\n"
    )
    prompt = make_prompt(bonus=2.0)
    assert score(manager, [prompt, prompt], ["", ""]) == [{"score": 2.0}, {"score": 2.0}]


def test_async_functions_run_concurrently(tmp_path: Path) -> None:
    """Let each call wait until all 20 have begun."""
    manager = custom(
        tmp_path,
        """
        import asyncio
        begun = 0
        async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            global begun
            begun += 1
            while begun < 20:
                await asyncio.sleep(0.01)
            return float(solution_str)
        """,
        reward=RewardConfig(1),
    )
    scores = score(manager, [make_prompt(i) for i in range(20)], [str(i) for i in range(20)])
    assert scores == [{"score": float(i)} for i in range(20)], "in the order of the responses"


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "return 1 / (ground_truth - 4)",
            ("raised ZeroDivisionError: division by zero", "reward.py:3"),
        ),
        (
            "raise ValueError('first line\\nsecond line')",
            ("raised ValueError: first line second line",),
        ),
        ("raise SystemExit(0)", ("raised SystemExit: 0", "reward.py:3")),
        ("raise KeyboardInterrupt", ("raised KeyboardInterrupt", "reward.py:3")),
        ("import asyncio; raise asyncio.CancelledError", ("raised CancelledError",)),
        ("import os, atexit; atexit.register(os._exit, 0); return None", ("returned None",)),
        ("return float('nan')", ("returned nan, expected a finite number",)),
        ("return 1e39", ("returned 1e+39, expected a finite number (of 32 bits)",)),
        ("return 10**400", ("expected a number", "too large")),
        ("return float('-inf')", ("returned -inf, expected a finite number",)),
        ("return None", ("returned None, expected a number",)),
        (
            "return type('N', (float,), {'__float__': lambda self: exit(7)})(1.0)",
            ("raised SystemExit: 7",),
        ),
        ("return '1.0'", ("returned '1.0', expected a number",)),
        ("return [1.0]", ("returned [1.0], expected a number",)),
        ("return {'acc': 1.0}", ("without 'score'", "['acc']")),
        ("return {'score': None}", ("returned score: None, expected a number",)),
        (
            "return {'score': 1.0, 'acc': float('nan')}",
            ("returned acc: nan, expected a finite number",),
        ),
    ],
)
def test_custom_function_that_fails_names_the_row(
    tmp_path: Path, kind: str, body: str, words: tuple[str, ...]
) -> None:
    manager = custom(
        tmp_path,
        f"""
        {kind} compute_score(data_source, solution_str, ground_truth, extra_info=None):
            if solution_str == "fine": return 0.0
            {body}
        """.strip(),
    )
    with pytest.raises(UserError) as caught:
        score(manager, [make_prompt(6, truth=4), make_prompt(17, truth=4)], ["fine", "bad"])
    message = str(caught.value)
    assert "\n" not in message
    for word in (*words, "row 17", "data_source 'mine'", "compute_score", "reward.py"):
        assert word in message


@pytest.mark.parametrize(
    ("body", "name", "words"),
    [
        (
            "import no_such_module_at_all\n",
            "compute_score",
            ("importing it raised ModuleNotFoundError", "reward.py:1"),
        ),
        (
            "import sys\nsys.exit(0)\n",
            "compute_score",
            ("importing it raised SystemExit: 0", "reward.py:2"),
        ),
        (
            "raise KeyboardInterrupt\n",
            "compute_score",
            ("importing it raised KeyboardInterrupt", "reward.py:1"),
        ),
        (
            "import os\nos._exit(0)\n",
            "compute_score",
            ("importing it failed: its worker process ended, with exit code 0",),
        ),
        ("def compute_score(:\n", "compute_score", ("importing it raised SyntaxError",)),
        (
            "def other(): pass\n",
            "compute_score",
            ("has no function 'compute_score' (custom_reward_function.name)",),
        ),
        ("compute_score = 3\n", "compute_score", ("'compute_score' is not a function but int",)),
        (
            "def compute_score(solution_str): return 1\n",
            "compute_score",
            ("cannot be called", "data_source"),
        ),
    ],
)
def test_custom_file_that_cannot_be_used(
    tmp_path: Path, body: str, name: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        custom(tmp_path, body, name)
    message = str(caught.value)
    assert "\n" not in message
    for word in (*words, str(tmp_path / "reward.py")):
        assert word in message


def test_custom_file_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        RewardManager(CustomRewardFunctionConfig(path=str(tmp_path / "nowhere.py")), RewardConfig())
    (tmp_path / "reward.txt").write_text("def compute_score(**row): return 1\n")
    with pytest.raises(UserError, match=r"must end in \.py"):
        RewardManager(CustomRewardFunctionConfig(path=str(tmp_path / "reward.txt")), RewardConfig())


@pytest.mark.parametrize("before", ["", "asyncio.get_event_loop().close()"])
def test_what_an_async_function_keeps_works_in_each_call(tmp_path: Path, before: str) -> None:
    """Check a lock that is bound to the event loop once a call waits for it, and a task in the
    background; also where the file closes the loop in which it is imported."""
    manager = custom(
        tmp_path,
        f"""
        import asyncio
        {before}
        one = asyncio.Semaphore(1)
        ticks = 0
        task = None

        async def tick():
            global ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        async def compute_score(solution_str, **row):
            global task
            task = task or asyncio.create_task(tick())
            async with one:
                await asyncio.sleep(0.01)
            return {{"score": 1.0, "ticks": ticks, "has_ended": task.done()}}
        """,
    )
    prompts = [make_prompt(i) for i in range(3)]
    first = score(manager, prompts, ["4"] * 3)
    time.sleep(0.5)
    second = score(manager, prompts, ["4"] * 3)
    assert (
        not any(row["has_ended"] for row in second)
        and len({row["score"] for row in first + second}) == 1
    )
    assert second[0]["ticks"] > first[-1]["ticks"] + 10, "it runs between the calls"


def test_async_function_that_ignores_its_cancellation_fails_alone(tmp_path: Path) -> None:
    manager = custom(
        tmp_path,
        """
        import asyncio
        async def compute_score(solution_str, **row):
            while solution_str == "ignores":
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    pass
            return 1.0
        """,
        reward=RewardConfig(1, 0.5, default_score=-1.0),
    )
    process = manager._workers[0]._process
    for _ in range(2):
        scores = score(manager, [make_prompt(0), make_prompt(1)], ["ignores", "4"])
        assert scores == [{"score": -1.0}, {"score": 1.0}]
    assert manager._workers[0]._process is process, "it has not been replaced"


def test_scores_of_a_worker_are_plain_data(tmp_path: Path) -> None:
    """Check an answer whose class would run code where it is unpickled, a name that is "score" but
    for a blank, and a date of a row, which stays one."""
    manager = custom(
        tmp_path,
        """
        import os
        class Runs(str):
            def __reduce__(self):
                return os.abort, ()
        def compute_score(solution_str, extra_info, **row):
            return {"score": extra_info["date"].year, "pred": Runs(solution_str), Runs("n"): 1, "score ": 7}
        """,  # noqa: E501
    )
    prompts = [make_prompt(date=datetime.date(2026, 1, 1))] * 3
    scores = manager.submit(prompts, ["4", chr(0xD800), "4" * 10**6]).result()
    assert [(row.score, type(row.pred), dict(row.extra)) for row in scores] == [
        (2026.0, str, {"n": 1.0})
    ] * 3
    assert [row.pred for row in scores[:2]] == ["4", "?"] and len(scores[2].pred or "") < 5000


# ---------------------------------------------------------------- worker processes


@pytest.fixture
def in_workers(tmp_path: Path) -> Callable[..., RewardManager]:
    """Return in_workers(body, num_workers, timeout), which builds a manager of the function."""

    def make(body: str, num_workers: int = 1, timeout: float = 60.0) -> RewardManager:
        return custom(tmp_path, body, reward=RewardConfig(num_workers, timeout))

    return make


BY_LENGTH = """
import os
def compute_score(solution_str, extra_info, **row):
    return {"score": len(solution_str) / 7, "place": extra_info["place"], "pid": os.getpid()}
"""


@pytest.mark.parametrize(("num_workers", "processes"), [(1, 1), (2, 2), (9, 5)])
@pytest.mark.slow
def test_workers_give_the_same_scores(
    in_workers: Callable[..., RewardManager], num_workers: int, processes: int
) -> None:
    prompts = [make_prompt(i, place=i) for i in range(5)]
    responses = ["a" * (i + 1) for i in range(5)]
    manager = in_workers(BY_LENGTH, num_workers)
    first, second = (score(manager, prompts, responses) for _ in range(2))
    assert first == second, "workers are kept"
    pids = {row.pop("pid") for row in first}
    assert len(pids) == processes and os.getpid() not in pids
    assert first == [{"score": (i + 1) / 7, "place": i} for i in range(5)]
    assert score(manager, [], []) == []


def test_workers_apply_the_rules_without_torch(in_workers: Callable[..., RewardManager]) -> None:
    manager = RewardManager(CustomRewardFunctionConfig(), RewardConfig())
    prompts = [make_prompt(0, "arithmetic", "4"), make_prompt(1, "openai/gsm8k", "4")]
    assert [row["score"] for row in score(manager, prompts, ["4", "4"])] == [1.0, 0.0]
    manager.close()
    manager = in_workers(
        "import sys\ndef compute_score(**row): return bool({'torch', 'numpy'} & set(sys.modules))\n"
    )
    assert score(manager, [make_prompt()], [""]) == [{"score": 0.0}]


def test_reward_function_can_terminate_its_children(
    in_workers: Callable[..., RewardManager],
) -> None:
    """Terminate a program and a fork, although the rank blocks these signals and its workers ignore
    them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        manager = in_workers(
            "import os, signal, subprocess, time\n"
            "def compute_score(**row):\n"
            "    program = subprocess.Popen(['sleep', '600'])\n"
            "    ready, says_ready = os.pipe()\n"
            "    fork = os.fork()\n"
            "    if fork == 0:\n"
            "        os.write(says_ready, b'x'); time.sleep(600); os._exit(0)\n"
            "    os.read(ready, 1)\n"
            "    program.terminate(); os.kill(fork, signal.SIGTERM)\n"
            "    start = time.monotonic()\n"
            "    program.wait(); os.waitpid(fork, 0)\n"
            "    return time.monotonic() - start\n"
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR1})
    assert score(manager, [make_prompt()], [""])[0]["score"] < 300


def test_dead_worker_is_distinguished_from_a_slow_one(
    in_workers: Callable[..., RewardManager],
) -> None:
    """Leave a child of the worker alive, which must not hide the worker's end."""
    manager = in_workers(
        "import os, signal, subprocess\n"
        "def compute_score(**row):\n"
        "    if os.fork() == 0:\n"
        "        os.execvp('sleep', ['sleep', '3'])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with pytest.raises(UserError, match="its worker process ended, by SIGKILL"):
        score(manager, [make_prompt()], [""])


WAITS_FOR_FILE = """
import os, time
def compute_score(solution_str, **row):
    while not os.path.exists(solution_str):
        time.sleep(0.01)
    time.sleep(0.1)  # each score is sent by itself
    return 1.0
"""


def test_rows_with_a_score_are_counted_as_work(
    in_workers: Callable[..., RewardManager], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rlhf_mc.rewards.manager._COUNT_SECONDS", 0.01)
    manager = in_workers(WAITS_FOR_FILE)
    files = [tmp_path / f"may_score_{i}" for i in range(4)]
    pending = manager.submit([make_prompt(i) for i in range(4)], [str(file) for file in files])
    waiting = threading.Thread(target=pending.result)
    waiting.start()

    def counts() -> list[tuple[int, int, str]]:
        return [(piece.done, piece.total, piece.unit) for piece in work.current()]

    assert wait_until(lambda: counts() == [(0, 4, "responses")])
    for file in files[:2]:
        file.touch()
    assert wait_until(lambda: counts() == [(2, 4, "responses")])
    for file in files[2:]:
        file.touch()
    waiting.join()
    assert work.current() == ()


def test_rank_continues_while_workers_score(
    in_workers: Callable[..., RewardManager], tmp_path: Path
) -> None:
    """Submit a row that can be scored only afterwards."""
    manager = in_workers(WAITS_FOR_FILE)
    before = time.perf_counter()
    pending = manager.submit([make_prompt()], [str(tmp_path / "may_score")])
    submitted = time.perf_counter()
    hidden = pending.seconds_until(submitted + 100.0)
    assert 100.0 <= hidden <= 100.0 + submitted - before, "as long as the rank did something else"
    (tmp_path / "may_score").touch()
    assert [row.score for row in pending.result()] == [1.0]
    after = time.perf_counter()
    assert 0.0 < pending.seconds_until(after + 1000.0) <= after - before, (
        "as long as the workers scored"
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("while True: pass", ("no score after 1.5 s (reward.timeout_seconds), at reward.py:5 in",)),
        ("time.sleep(1000)", ("no score after 1.5 s (reward.timeout_seconds), at reward.py:5 in",)),
        ("os.kill(os.getpid(), 9)", ("its worker process ended, by SIGKILL (out of memory?)",)),
        (
            "[os.write(i, b'\\0\\0\\0\\1x') for i in range(3, 4096)"
            " if 'socket' in os.path.realpath(f'/proc/self/fd/{i}')]",
            ("no message that can be read",),
        ),
        ("os._exit(0)", ("its worker process ended, with exit code 0",)),
        ("os._exit(3)", ("its worker process ended, with exit code 3",)),
        ("raise KeyError(1)", ("raised KeyError: 1 (reward.py:5)",)),
        ("return None", ("returned None, expected a number",)),
    ],
)
@pytest.mark.slow
def test_row_that_a_worker_cannot_score_is_a_one_line_error(
    in_workers: Callable[..., RewardManager], body: str, words: tuple[str, ...]
) -> None:
    manager = in_workers(
        "import os, time\ndef compute_score(solution_str, **row):\n  if solution_str == 'fine': "
        "return 0.5\n"
        f"  if solution_str == 'bad':\n    {body}\n",
        timeout=1.5 if body.startswith(("while", "time")) else 60.0,
    )
    with pytest.raises(UserError) as caught:
        score(manager, [make_prompt(6), make_prompt(17), make_prompt(18)], ["fine", "bad", "fine"])
    assert isinstance(caught.value, LostProcessError) == ("kill" in body), (
        "another attempt may succeed"
    )
    message = str(caught.value)
    assert "\n" not in message
    for word in (*words, "row 17", "data_source 'mine'", "compute_score", "reward.py"):
        assert word in message
    assert score(manager, [make_prompt()], ["fine"]) == [{"score": 0.5}], "by a new worker"


def test_endless_import_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "IMPORT_SECONDS", 0.1)
    with pytest.raises(
        UserError,
        match=r"reward\.py: not imported after 2 s \(reward\.timeout_seconds\), at reward\.py:2 in",
    ):
        custom(tmp_path, "import time\ntime.sleep(1000)\n", reward=RewardConfig(1, 2.0))


def test_worker_ignores_signals_to_the_process_group(
    in_workers: Callable[..., RewardManager],
) -> None:
    """Check also that the kernel ends it before others where memory runs out."""
    own = "open('/proc/self/oom_score_adj').read()"
    manager = in_workers(
        f"import time\ndef compute_score(**row): time.sleep(0.3); return int({own})\n"
    )
    pending = manager.submit([make_prompt()], [""])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.killpg(manager._workers[0]._process._process.pid, number)
    assert [row.score for row in pending.result()] == [1000]


STARTS_OTHERS = """
import os, pathlib, subprocess, time
def note():
    with open({file!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
def compute_score(solution_str, **row):
    note()
    for detaches in (False, True):
        if os.fork() == 0:
            if detaches:
                os.setsid()
                if os.fork() != 0:
                    os._exit(0)
            note()
            time.sleep(120)
    subprocess.Popen(["sh", "-c", "echo $$ >> {file}; setsid sleep 120 & echo $! >> {file}; wait"])
    while len(pathlib.Path({file!r}).read_text().split()) < 5:
        time.sleep(0.01)
    if solution_str == "exits":
        os._exit(3)
    while solution_str == "hangs":
        pass
    return 1.0
"""
"""A function that leaves a child, a detached grandchild, and a program with a detached child."""
RANK = """
import sys
from rlhf_mc.rewards.worker import Worker
from rlhf_mc.rewards.results import RewardRow, Score
from rlhf_mc.config.reward_schema import CustomRewardFunctionConfig, RewardConfig
worker = Worker(CustomRewardFunctionConfig(path=sys.argv[1]), RewardConfig(timeout_seconds=float(sys.argv[3])))
worker.load()
print(worker._process._process.pid, flush=True)
worker.score([RewardRow('', '', sys.argv[2], '', {}, {'custom': 1.0})], lambda row, failure: Score(0.0))
print("scored", flush=True)
if sys.argv[4] == "closes":
    worker.close()
print("done", flush=True)
sys.stdin.read()
"""  # noqa: E501


@pytest.mark.parametrize(
    ("response", "limit", "end"),
    [
        ("returns", 60.0, "closes"),
        ("returns", 60.0, "is killed"),
        ("returns", 60.0, "exits"),
        ("hangs", 600.0, "is killed"),
        ("hangs", 2.0, "times out"),
        ("exits", 60.0, "worker exits"),
    ],
)
@pytest.mark.slow
def test_processes_that_a_function_has_started_end_with_its_worker(
    tmp_path: Path, response: str, limit: float, end: str
) -> None:
    """End the worker, or its rank, in each way. While a function hangs, its worker cannot check
    whether its rank
    lives."""
    noted = tmp_path / "pids"
    (tmp_path / "reward.py").write_text(STARTS_OTHERS.format(file=str(noted)))
    command = [sys.executable, "-c", RANK, str(tmp_path / "reward.py"), response, str(limit), end]
    rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None and rank.stdin is not None
    pids = [int(rank.stdout.readline())]
    try:
        if limit < 100:
            assert [rank.stdout.readline() for _ in range(2)] == ["scored\n", "done\n"]
        wait_until(lambda: noted.exists() and len(noted.read_text().split()) == 5, seconds=30)
        pids += map(int, noted.read_text().split())
        if end == "is killed":
            assert all(map(is_running, pids))
            rank.kill()
        elif end == "exits":
            rank.stdin.close()
        wait_until(lambda: not any(map(is_running, pids)), seconds=30)  # they sleep for 120
        assert [pid for pid in pids if is_running(pid)] == []
    finally:
        for pid in (rank.pid, *pids):
            if is_running(pid):
                kill(pid)
        rank.wait()
        rank.stdin.close()
        rank.stdout.close()
