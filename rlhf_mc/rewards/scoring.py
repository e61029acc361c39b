"""Scores of rows: for each row the parts of its score, by built-in rules and the user's own
function, and their sum. Neither torch nor numpy is imported, so that a worker process (worker.py)
starts fast.

This is the boundary to the user's code: its result becomes a Score, its exception a Failure of one
line.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.masking import cut
from rlhf_mc.config.reward_schema import CustomRewardFunctionConfig, RewardConfig
from rlhf_mc.rewards.mixture import row_problem
from rlhf_mc.rewards.registry import RULES, RewardFunction
from rlhf_mc.rewards.remote import RemoteReward
from rlhf_mc.rewards.results import (
    CUSTOM,
    ENVIRONMENT,
    FUNCTIONS,
    REMOTE,
    Failure,
    RewardRow,
    Score,
)
from rlhf_mc.rewards.returned import MAX_FLOAT32, checked, refuse
from rlhf_mc.runtime.user_function import describe_error, load_attribute

Done = Callable[[int, Score | Failure], None]
"""Callback for each row, with its index among the given rows."""
ROW_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""Arguments of a function that takes all rows of a worker in one call, as of verl's batch reward
manager."""
_NO_SCORE = "no score after {} s (reward.timeout_seconds)"


@dataclass(frozen=True)
class CustomFunction:
    """A user's function, or the object of a user's class."""

    function: RewardFunction
    is_async: bool
    is_batched: bool
    """It takes lists (BATCH_ARGUMENTS) and returns one score for each row."""
    kwargs: Mapping[str, Any]
    """Further arguments of each call."""


def load_reward_function(cfg: CustomRewardFunctionConfig) -> CustomFunction:
    """Return the function of cfg.path, or an object of its class. Raise UserError if the file is
    missing, if importing it or building the object raises, or if the name is not defined or cannot
    be called with a row's arguments."""
    where = f"custom_reward_function.path {cfg.path}"
    name = cfg.name
    function = load_attribute(
        "custom_reward_function", str(cfg.path), name, " (custom_reward_function.name)"
    )
    kwargs = cfg.reward_kwargs
    if inspect.isclass(function):
        try:
            function = function(**kwargs)
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            raise UserError(
                f"{where}: building the object of {name} raised {describe_error(error)}"
            ) from error
        kwargs = {}
    if not callable(function):
        raise UserError(f"{where}: {name!r} is not a function but {type(function).__name__}")
    is_batched = _check_signature(function, where, name, kwargs)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
    return CustomFunction(function, is_async, is_batched, kwargs)


def _check_signature(
    function: RewardFunction, where: str, name: str, kwargs: Mapping[str, Any]
) -> bool:
    """Return whether the function takes lists. Raise UserError if it can be called in neither
    form."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have no signature; the first call shows whether it works
        return False
    is_batched = "solution_strs" in signature.parameters
    arguments = BATCH_ARGUMENTS if is_batched else ROW_ARGUMENTS
    try:
        signature.bind(**dict.fromkeys(arguments), **kwargs)
    except TypeError as error:
        raise UserError(
            f"{where}: {name}{signature} cannot be called as"
            f" {name}({', '.join(f'{argument}=' for argument in (*arguments, *kwargs))}): {error}"
        ) from error
    return is_batched


def custom_score_name(cfg: CustomRewardFunctionConfig) -> str:
    """Return the name of the user's function or of the rules, for messages."""
    return "reward rule" if cfg.path is None else f"custom_reward_function {cfg.name} of {cfg.path}"


class Scorer:
    """Scores rows in this process. Its only state is the user's function, and the event loop, to
    which what an async function keeps is bound: locks, sessions of HTTP clients."""

    def __init__(self, custom: CustomRewardFunctionConfig, reward: RewardConfig) -> None:
        self._runner = asyncio.Runner()
        self._runner.get_loop()  # the current one of the user's file too
        self._custom = None if custom.path is None else load_reward_function(custom)
        if self._runner.get_loop().is_closed():  # by the user's file
            self._runner = asyncio.Runner()
        self._remote = (
            None
            if reward.remote.url is None
            else RemoteReward(reward.remote, reward.timeout_seconds)
        )
        self._limit = reward.timeout_seconds

    @property
    def scores_together(self) -> bool:
        """Rows are scored concurrently or in one call, not one after the other."""
        return self._custom is not None and (self._custom.is_async or self._custom.is_batched)

    @property
    def is_batched(self) -> bool:
        """The user's function takes all rows in one call."""
        return self._custom is not None and self._custom.is_batched

    def score(
        self, receive: Callable[[], Sequence[RewardRow]], done: Done, progress: Callable[[], None]
    ) -> NoReturn:
        """Score the rows that `receive` returns, until it raises. Call `done` for each. Before,
        call `progress` for each answer of the remote endpoint."""
        if self._custom is not None and self._custom.is_async:
            self._runner.run(self._score_in_loop(receive, done, progress))
        while True:
            rows = receive()
            from_remote = {}
            if self._remote is not None:
                from_remote = self._runner.run(self._ask_endpoint(rows, progress))
            _run_at_once(self._score_all(rows, from_remote, done))

    async def _score_in_loop(
        self, receive: Callable[[], Sequence[RewardRow]], done: Done, progress: Callable[[], None]
    ) -> NoReturn:
        """Score as `score` does, in one event loop, which runs between the calls too."""
        while True:
            rows = await asyncio.to_thread(receive)
            await self._score_all(rows, await self._ask_endpoint(rows, progress), done)

    async def _ask_endpoint(
        self, rows: Sequence[RewardRow], progress: Callable[[], None]
    ) -> dict[int, Any]:
        """Return the remote endpoint's answers by row."""
        indices = [i for i, row in enumerate(rows) if REMOTE in row.parts]
        if self._remote is None or not indices:
            return {}
        answers = await self._remote.score([rows[i] for i in indices], progress)
        return dict(zip(indices, answers, strict=True))

    async def _score_all(
        self, rows: Sequence[RewardRow], from_remote: dict[int, Any], done: Done
    ) -> None:
        """Score the rows. from_remote: the endpoint's answers by row."""
        from_batch: dict[int, Any] = {}
        if self._custom is not None and self._custom.is_batched:
            from_batch = await self._call_batched(self._custom, rows)

        async def score_one(i: int, row: RewardRow) -> None:
            try:
                outcome: Score | Failure = await self._score_one(
                    row, from_batch.get(i), from_remote.get(i)
                )
            except Failure as failure:
                outcome = failure
            except UserError:
                raise
            except BaseException as error:  # the user's own number class
                outcome = Failure("raised", f"raised {describe_error(error)}")
            done(i, outcome)

        if self._custom is not None and self._custom.is_async:
            await asyncio.gather(*(score_one(i, row) for i, row in enumerate(rows)))
        else:
            for i, row in enumerate(rows):
                await score_one(i, row)

    async def _score_one(self, row: RewardRow, from_batch: Any, from_remote: Any) -> Score:
        """Return the weighted sum of the row's parts. from_batch, from_remote: the result of the
        batched function and of the remote endpoint for the row, or a Failure."""
        if problem := row_problem(row):
            raise Failure("no_rule", problem)
        parts: dict[str, float] = {}
        extra: dict[str, float] = {}
        pred = None
        for part, weight in row.parts.items():
            if part not in FUNCTIONS:
                continue  # a reward model's, which the trainer adds
            named = None
            if part == CUSTOM:
                returned = await self._call_custom(row, from_batch)
                result = checked(returned)
                named = returned.get("pred") if isinstance(returned, dict) else None
            elif part == REMOTE:
                result = dict(_raised(from_remote))
            elif part == ENVIRONMENT:
                assert row.episode is not None
                result = {**row.episode.info, "score": row.episode.score}
            else:
                result = _apply_rule(part, row)
                answer = RULES[part].answer
                named = None if answer is None else answer(row.response) or ""
            if pred is None and named is not None:
                pred = _text(named)
            parts[part] = weight * result.pop("score")
            extra = result | extra
        total = sum(parts.values())
        if not abs(total) <= MAX_FLOAT32:
            raise Failure(
                "invalid", f"the weighted sum of its parts is {total}, expected a finite number"
            )
        if row.episode is None:
            return Score(total, parts, extra, pred)
        episode = row.episode.weighted(row.parts.get(ENVIRONMENT, 0.0))
        return Score(total, parts, extra, pred, episode.failure, episode)

    async def _call_custom(self, row: RewardRow, from_batch: Any) -> Any:
        custom = self._custom
        assert custom is not None
        if custom.is_batched:
            return _raised(from_batch)
        try:
            result = custom.function(**row.arguments(CUSTOM), **custom.kwargs)
        except Failure:  # MaskSample
            raise
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            raise Failure("raised", f"raised {describe_error(error)}") from error
        return await awaited(result, self._limit, _NO_SCORE) if custom.is_async else result

    async def _call_batched(
        self, custom: CustomFunction, rows: Sequence[RewardRow]
    ) -> dict[int, Any]:
        """Return the result of each row that has the part CUSTOM, by index: what the function
        returned, or the Failure of the whole call."""
        indices = [i for i, row in enumerate(rows) if CUSTOM in row.parts]
        columns = zip(*(rows[i].arguments(CUSTOM).values() for i in indices), strict=True)
        if not indices:
            return {}
        try:
            arguments = dict(zip(BATCH_ARGUMENTS, map(list, columns), strict=True))
            results = custom.function(**arguments, **custom.kwargs)
            if custom.is_async:
                results = await awaited(results, self._limit, _NO_SCORE)
            results = score_list(results, len(indices))
        except Failure as failure:
            return dict.fromkeys(indices, failure)
        except BaseException as error:  # as in _call_custom
            problem = (
                f"the call for this row and {len(indices) - 1} others raised "
                f"{describe_error(error)}"
            )
            return dict.fromkeys(indices, Failure("raised", problem))
        return dict(zip(indices, results, strict=True))


async def awaited(result: Awaitable[Any], limit: float | None, problem: str) -> Any:
    """Return what a user's coroutine returns within `limit` seconds (None: in any time). Raise
    Failure if it raises, or takes longer: `problem` with the limit in place of {}. A coroutine that
    ignores its cancellation continues."""

    async def outcome() -> tuple[Any, BaseException | None]:
        try:
            return await result, None
        except BaseException as error:
            # as in _call_custom; a task would raise it in the event loop
            return None, error

    task = asyncio.create_task(outcome())
    try:
        done, _ = await asyncio.wait({task}, timeout=limit)
    except asyncio.CancelledError:  # the program ends the call
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise Failure("timeout", problem.format(f"{limit:g}"))
    if task.cancelled():
        raise Failure("raised", "cancelled its own task")
    value, error = task.result()
    if error is None:
        return value
    if isinstance(error, Failure):
        raise error
    raise Failure("raised", f"raised {describe_error(error)}") from error


def _text(named: Any) -> str:
    """Return an answer as a plain text, cut, with marks in place of what is not Unicode."""
    return cut(str.encode(str(named), "utf-8", "replace").decode("utf-8"))


def _run_at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits. There is no event loop, so that the user's function may run
    one of its own."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("the coroutine has waited")


def _raised(result: Any) -> Any:
    """Return a result that was computed before, or raise it if it is a Failure."""
    if isinstance(result, Failure):
        raise result
    return result


def _apply_rule(part: str, row: RewardRow) -> dict[str, float]:
    """Return the result of a built-in rule. The score of a rule that compares with the ground truth
    is the accuracy, unless the rule returns one."""
    rule = RULES[part]
    try:
        result = checked(rule.function(**row.arguments(part)))
    except UserError:
        raise
    except Exception as error:
        # a rule parses text that a model has chosen; its libraries raise anything
        raise Failure("raised", f"the rule {part} raised {describe_error(error)}") from error
    return {"acc": result["score"], **result} if rule.needs_truth else result


def score_list(results: Any, count: int) -> list[Any]:
    """Return a batched function's results, one for each row."""
    if isinstance(results, (str, bytes, dict)) or not hasattr(results, "__iter__"):
        refuse("", results, f"expected a list of {count} scores")
    scores = list(results)
    if len(scores) != count:
        raise Failure("invalid", f"returned {len(scores)} scores for {count} responses")
    return scores
