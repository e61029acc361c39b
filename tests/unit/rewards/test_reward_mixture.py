"""Mixtures of rewards by data source, forms of a user's function, and what happens to a response
without a score."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_files import load
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import (
    CustomRewardFunctionConfig,
    OverlongBufferConfig,
    RewardConfig,
)
from rlhf_mc.data.batch import Prompt
from rlhf_mc.rewards.manager import RewardManager, ScoreStream
from rlhf_mc.rewards.mixture import Mixture, check_sources
from rlhf_mc.rewards.results import Score, overlong_penalty, penalize_overlong, reward_metrics
from rlhf_mc.setup.scorable import check_mixture, print_special_tokens

Build = Callable[..., RewardManager]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Return build(body, name, reward_kwargs, **reward settings), which builds the manager of a
    function."""
    managers = []

    def make(
        body: str = "",
        name: str = "compute_score",
        kwargs: Any = None,
        skip_special_tokens: bool = True,
        **reward: Any,
    ) -> RewardManager:
        path = tmp_path / "reward.py"
        path.write_text(textwrap.dedent(body))
        custom = CustomRewardFunctionConfig(
            str(path) if body else None, name, kwargs or {}, skip_special_tokens
        )
        managers.append(RewardManager(custom, RewardConfig(**reward)))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


MODEL = {"reward_model": "reward_model.model_path"}
MODELS = {
    "helpful": "reward_models.helpful.model_path",
    "harmless": "reward_models.harmless.model_path",
}


def prompts(count: int, source: str = "mine", truth: Any = "4") -> list[Prompt]:
    return [
        Prompt(i, np.array([1], np.int32), source, truth, {}, "data.train_files t.parquet", 10 + i)
        for i in range(count)
    ]


# ---------------------------------------------------------------- mixtures


@pytest.mark.parametrize("skips", [True, False])
def test_rules_and_functions_see_the_special_tokens_that_they_read(
    build: Build,
    config_file: Path,
    capfd: pytest.CaptureFixture[str],
    skips: bool,
) -> None:
    tags = ("<think>", "</think>", "<end>")
    core = Tokenizer(
        models.WordLevel({text: i for i, text in enumerate([*tags, "a", "#### 4"])}, unk_token="a")
    )
    core.add_special_tokens([*tags])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    manager = build(
        "def compute_score(solution_str, **row): return float(solution_str.count('<'))",
        skip_special_tokens=skips,
        mixture={"*": {"custom": 1.0, "think_format": 0.1, "gsm8k_flexible": 0.01}},
    )
    stream = ScoreStream(manager, tokenizer, prompts(2))
    stream.submit({0: [0, 3, 1, 4, 2], 1: [0, 3, 1, 2]})  # the second one has no answer
    count = 0.0 if skips else 3.0
    custom = {"custom": count}
    assert stream.collect()[0].parts == {**custom, "think_format": 0.1, "gsm8k_flexible": 0.01}
    assert stream.collect()[1].parts == {**custom, "think_format": 0.0, "gsm8k_flexible": 0.0}
    settings = (
        "custom_reward_function.path=reward.py",
        f"custom_reward_function.skip_special_tokens={skips}".lower(),
    )
    print_special_tokens(load(config_file, *settings), manager, tokenizer)
    lines = capfd.readouterr().err.splitlines()
    assert "think_format gets responses with the special tokens <think>, </think>" in lines[0]
    assert len(lines) == 1 + skips and (
        not skips or "custom_reward_function.skip_special_tokens=false" in lines[1]
    )


def test_score_is_the_weighted_sum_of_its_parts(build: Build) -> None:
    manager = build(
        "def compute_score(solution_str, **row): return {'score': 10.0, 'acc': 0.25, 'length': "
        "len(solution_str)}",
        mixture={
            "openai/gsm8k": {"gsm8k_strict": 1.0, "gsm8k_flexible": 0.5, "gsm8k_format": 0.1},
            "*": {"custom": 0.1, "think_format": -1},
        },
    )
    rows = prompts(1, "openai/gsm8k") + prompts(1, "mine", None)
    manager.check(rows)
    first, second = manager.submit(rows, ["4\n#### 5", "<think>a</think>b"]).result()
    assert (
        first.parts == {"gsm8k_strict": 0.0, "gsm8k_flexible": 0.0, "gsm8k_format": 0.1}
        and first.score == 0.1
    )
    assert first.accuracy == 0.0, "of the first part that judges the answer"
    assert second == Score(
        0.0, {"custom": 1.0, "think_format": -1.0}, {"acc": 0.25, "length": 17.0}
    )
    metrics = reward_metrics(["openai/gsm8k", "mine"], [first, second])
    assert (
        metrics["reward/openai/gsm8k/gsm8k_format"]
        == metrics["critic/score/openai/gsm8k/mean"]
        == 0.1
    )
    assert (
        metrics["reward/mine/think_format"] == -1.0 and metrics["reward_extra/mine/length"] == 17.0
    )
    assert metrics["reward/num_failed"] == 0


@pytest.mark.parametrize(
    ("mixture", "words"),
    [
        (
            {"a": {"gsm8k": 1}},
            ("'a' has the unknown part 'gsm8k'", "gsm8k_strict", "custom", "reward_model"),
        ),
        ({"a": {"math": "1"}}, ("the weight of 'math' is '1'", "finite number")),
        ({"a": {"math": True}}, ("the weight of 'math' is True",)),
        ({"a": {"math": float("nan")}}, ("the weight of 'math' is nan",)),
        ({"a": {}}, ("'a' is {}", "{part: weight}")),
        ({"a": "math"}, ("'a' is 'math'", "{part: weight}")),
        ({"a": {"custom": 1, "remote": 1}}, ("part 'remote'", "reward.remote.url is null")),
        ({"a": {"reward_model": 1}}, ("part 'reward_model'", "reward_model.model_path is null")),
        ({"a": {"math": 1}}, ("custom_reward_function.path is set", "never be used")),
    ],
)
def test_mixture_that_cannot_be_used(mixture: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        Mixture(CustomRewardFunctionConfig(path="r.py"), RewardConfig(mixture=mixture))
    for word in ("reward.mixture", *words):
        assert word in str(caught.value)


def test_reward_model_scores_training_and_functions_score_validation() -> None:
    custom = CustomRewardFunctionConfig(path="r.py")
    alone = Mixture(custom, RewardConfig(), MODEL)
    assert alone.training("a") == {"reward_model": 1.0} and alone.validation("a") == {"custom": 1.0}
    mixture = {"a": {"math": 2, "reward_model": 3}, "*": {"reward_model": 1}}
    both = Mixture(custom, RewardConfig(mixture=mixture), MODEL)
    assert both.training("a") == {"math": 2.0, "reward_model": 3.0} and both.validation("a") == {
        "math": 2.0
    }
    assert both.training("b") == {"reward_model": 1.0} and both.validation("b") == {"custom": 1.0}


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("math_dapo", "math_dapo"),
        ("math", "math_dapo"),
        ("math_dapo_reasoning", "math_dapo"),
        ("aime", "math_dapo"),
        ("aime_2025", "math_dapo"),
        ("numina_cn_k12", "numina"),
        ("lighteval/MATH", "math"),
        ("openai/gsm8k", "gsm8k_strict"),
    ],
)
def test_rule_of_a_data_source(source: str, rule: str) -> None:
    assert Mixture(CustomRewardFunctionConfig(), RewardConfig()).training(source) == {rule: 1.0}
    strings = Mixture(CustomRewardFunctionConfig(), RewardConfig(math_rule="math_string"))
    assert strings.validation(source) == {"math_string" if rule == "math" else rule: 1.0}


def test_rules_of_verl_score_rows(build: Build) -> None:
    manager = build(math_rule="math_string")
    rows = [
        *prompts(1, "aime2024"),
        *prompts(1, "aime2024"),
        *prompts(1, "numina_olympiads"),
        *prompts(1, "lighteval/MATH"),
    ]
    manager.check(rows)
    scores = manager.submit(rows, ["Answer: 4", "4", "The answer is 8/2.", r"\boxed{8/2}"]).result()
    assert [row.score for row in scores] == [1.0, -1.0, 1.0, 0.0]
    assert [row.accuracy for row in scores] == [1.0, 0.0, 1.0, 0.0]
    assert [row.pred for row in scores] == ["4", "[INVALID]", "8/2.", "8/2"]


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("codecontests", "prime_code"),
        ("hiyouga/geometry3k", "geo3k"),
        ("searchR1_nq", "search_r1_like_qa_em"),
    ],
)
def test_source_with_a_rule_in_verl_alone_names_the_function(
    build: Build, source: str, module: str
) -> None:
    with pytest.raises(UserError) as caught:
        build().check(prompts(1, source))
    for word in (
        "row 10",
        f"verl/utils/reward_score/{module}",
        "custom_reward_function.path",
        "default_compute_score",
    ):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rule", ["math", "gsm8k_strict", "math_dapo", "exact_match"])
def test_empty_ground_truth_is_found_before_training(build: Build, rule: str) -> None:
    with pytest.raises(
        UserError, match=rf"row 10 .*ground_truth is empty; the rule {rule} needs an answer"
    ):
        build(mixture={"mine": {rule: 1}}).check(prompts(1, truth=" "))


def test_source_of_the_mixture_that_no_row_has() -> None:
    check_sources(["a"], ["a", "b"])
    with pytest.raises(
        UserError,
        match=r"reward\.mixture: no row .* source 'openai/gsm8K'; did you mean 'openai/gsm8k'\?",
    ):
        check_sources(["a", "openai/gsm8K"], ["a", "openai/gsm8k"])
    with pytest.raises(UserError, match=r"source 'xyz'; the rows have 'a', 'openai/gsm8k'"):
        check_sources(["a", "xyz"], ["openai/gsm8k", "a"])
    assert Mixture(
        CustomRewardFunctionConfig(), RewardConfig(mixture={"a": {"math": 1}, "*": {"math": 1}})
    ).sources == {"a"}


def test_sources_are_those_of_training_and_validation() -> None:
    read: list[Any] = [prompts(3, "a"), prompts(2, "b")]
    check_mixture({"a", "b"}, *read)
    check_mixture(set(), *read)
    with pytest.raises(
        UserError, match=r"no row of data\.train_files or data\.val_files has the data source 'ab'"
    ):
        check_mixture({"ab", "b"}, *read)


def test_several_reward_models_are_weighed_in_the_mixture() -> None:
    custom = CustomRewardFunctionConfig()
    mixture = {"a": {"math": 1, "helpful": 0.7, "harmless": -0.3}, "*": {"helpful": 1}}
    both = Mixture(custom, RewardConfig(mixture=mixture), MODELS)
    assert both.training("a") == mixture["a"] and both.validation("a") == {"math": 1.0}
    assert both.training("b") == {"helpful": 1.0} and both.validation("openai/gsm8k") == {
        "gsm8k_strict": 1.0
    }
    assert Mixture(custom, RewardConfig(), {"helpful": "h"}).training("a") == {"helpful": 1.0}


def test_rewards_of_tools_are_added_to_the_default() -> None:
    """Check the rewards of an environment of the user's own too, which are the default."""
    tools = EnvironmentConfig(function_tool_path="t.py")
    custom = CustomRewardFunctionConfig()
    rule = {"gsm8k_strict": 1.0}
    assert Mixture(custom, RewardConfig(), environment=tools).training("openai/gsm8k") == rule | {
        "environment": 1.0
    }
    left_out = Mixture(custom, RewardConfig(mixture={"*": rule}), environment=tools)
    assert left_out.training("openai/gsm8k") == left_out.validation("openai/gsm8k") == rule
    own = Mixture(custom, RewardConfig(), environment=EnvironmentConfig("e.py"))
    assert own.training("openai/gsm8k") == {"environment": 1.0}


@pytest.mark.parametrize(
    ("models", "mixture", "words"),
    [
        (MODELS, {}, "reward_models.helpful.model_path and reward_models.harmless.model_path are "
                     "set and reward.mixture"
         " is empty; weigh helpful and harmless in reward.mixture"),
        (MODELS, {"a": {"helpful": 1, "harmles": 1}}, ("'a' has the unknown part 'harmles'; known: "
                                                      "gsm8k_strict")),
        (MODELS, {"a": {"helpful": 1}}, "reward_models.harmless.model_path is set and no data "
                                        "source of reward.mixture"
         " has the part 'harmless'"),
        (MODELS, {"a": {"helpful": float("inf"), "harmless": 1}}, "'a': the weight of 'helpful' is "
                                                                  "inf; it must be a"
         " finite number"),
        (MODELS, {"a": {"helpful": 1, "harmless": 1, "reward_model": 1}}, "the part 'reward_model' "
                                                                          "and"
         " reward_model.model_path is null"),
        ({"math": "reward_models.math.model_path"}, {}, ("reward_models.math.model_path: 'math' is "
                                                        "the name of another")),
        ({"overlong": "reward_models.overlong.model_path"}, {}, ("'overlong' is the name of "
                                                                 "another "
                                                                "part of the score")),
    ],
)  # fmt: skip
def test_reward_models_that_cannot_be_mixed(models: Any, mixture: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        Mixture(CustomRewardFunctionConfig(), RewardConfig(mixture=mixture), models)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_responses_for_the_reward_model_alone_need_no_worker() -> None:
    manager = RewardManager(CustomRewardFunctionConfig(), RewardConfig(), MODEL)
    manager.check(prompts(1, truth=None))
    assert [
        row.plus("reward_model", 0.5).score for row in manager.submit(prompts(2), ["", ""]).result()
    ] == [0.5, 0.5]
    assert manager._workers == []
    mixture = {"mine": {"helpful": 1, "harmless": 1}}
    manager = RewardManager(CustomRewardFunctionConfig(), RewardConfig(mixture=mixture), MODELS)
    assert (
        manager.submit(prompts(1, truth=None), [""]).result() == [Score(0.0)]
        and manager._workers == []
    )


def test_worker_leaves_out_the_parts_of_reward_models() -> None:
    mixture = {"openai/gsm8k": {"gsm8k_strict": 1, "helpful": 1, "harmless": 1}}
    manager = RewardManager(CustomRewardFunctionConfig(), RewardConfig(mixture=mixture), MODELS)
    (score,) = manager.submit(prompts(1, "openai/gsm8k"), ["#### 4"]).result()
    manager.close()
    assert score.parts == {"gsm8k_strict": 1.0}
    assert score.plus("helpful", 0.5).plus("harmless", -0.25).score == 1.25


def test_ground_truth_that_is_no_choice_is_found_before_training(build: Build) -> None:
    with pytest.raises(
        UserError, match=r"t\.parquet, row 11 .*ground_truth is 'Paris'; it must be a letter A-Z"
    ):
        build().check(prompts(1, "hellaswag", "3") + prompts(2, "hellaswag", "Paris")[1:])


def test_overlong_penalty_is_a_part_of_the_score() -> None:
    """Follow equation 13 of DAPO's paper at both ends of the buffer and between them."""
    penalties = [overlong_penalty(length, 20, 4, 1.0) for length in (1, 16, 17, 18, 20, 21)]
    assert penalties == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    scores = [Score(1.0, {"math": 1.0}), Score(-2.0, {"default_score": -2.0}, failure="timeout")]
    first, second = penalize_overlong(scores, [18, 20], 20, OverlongBufferConfig(4, 2.0))
    assert (
        first.score == 0.0
        and first.parts == {"math": 1.0, "overlong": -1.0}
        and second == scores[1]
    )


# ---------------------------------------------------------------- forms of a user's function


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_batched_function_gets_all_rows_of_a_worker(build: Build, kind: str) -> None:
    manager = build(
        f"""
        {kind} compute_score(data_sources, solution_strs, ground_truths, extra_infos, scale):
            assert data_sources == ["mine"] * 3 and ground_truths == ["4"] * 3 and extra_infos == [{{}}] * 3
            return [{{"score": scale * float(text), "rows": len(solution_strs)}} for text in solution_strs]
        """,  # noqa: E501
        kwargs={"scale": 2},
    )
    rows = manager.submit(prompts(3), ["1", "2", "3"]).result()
    assert [(row.score, row.extra) for row in rows] == [(2.0 * n, {"rows": 3.0}) for n in (1, 2, 3)]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_class_keeps_its_state(build: Build, kind: str) -> None:
    manager = build(
        f"""
        class Judge:
            def __init__(self, start):
                self.calls = start
            {kind} __call__(self, data_source, solution_str, ground_truth, extra_info=None):
                self.calls += 1
                return self.calls
        """,
        name="Judge",
        kwargs={"start": 5},
    )
    assert [
        row.score for _ in range(2) for row in manager.submit(prompts(2), ["", ""]).result()
    ] == [6, 7, 8, 9]


@pytest.mark.parametrize(
    ("body", "kwargs", "words"),
    [
        (
            "class compute_score:\n def __init__(self, a): pass\n",
            {},
            "building the object of compute_score raised",
        ),
        ("class compute_score: pass\n", {}, "is not a function but compute_score"),
        (
            "def compute_score(**row): pass\n",
            {"extra_info": 1},
            "multiple values for keyword argument 'extra_info'",
        ),
        (
            "def compute_score(solution_strs): pass\n",
            {},
            "cannot be called as compute_score(data_sources=,",
        ),
    ],
)
def test_form_that_cannot_be_called(
    build: Build, body: str, kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        build(body, kwargs=kwargs)
    assert words in str(caught.value) and "reward.py" in str(caught.value)


def test_plain_function_may_run_an_event_loop(build: Build) -> None:
    manager = build(
        "import asyncio\ndef compute_score(**row): return asyncio.run(asyncio.sleep(0, 1.0))\n"
    )
    assert manager.submit(prompts(1), [""]).result()[0].score == 1.0


# ---------------------------------------------------------------- responses without a score

BAD = """
import asyncio, os, sys, time
{kind} compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        {statement}
    return 1.0
"""
BAD_BATCH = """
import os, time
def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    if "bad" in solution_strs:
        {statement}
    return [1.0] * len(solution_strs)
"""


@pytest.mark.parametrize(
    ("kind", "statement", "failure"),
    [
        ("def", "raise ValueError", "raised"),
        ("def", "sys.exit(0)", "raised"),
        ("def", "return '1.0'", "invalid"),
        ("def", "return float('nan')", "invalid"),
        ("def", "os._exit(0)", "exited"),
        ("def", "time.sleep(1000)", "timeout"),
        ("async def", "raise ValueError", "raised"),
        ("async def", "await asyncio.sleep(1000)", "timeout"),
    ],
)
@pytest.mark.slow
def test_default_score_is_counted_and_logged(
    build: Build, capfd: pytest.CaptureFixture[str], kind: str, statement: str, failure: str
) -> None:
    manager = build(
        BAD.format(kind=kind, statement=statement),
        timeout_seconds=1.5 if failure == "timeout" else 60.0,
        default_score=-2.0,
    )
    scores = manager.submit(prompts(4), ["fine", "bad", "fine", "fine"]).result()
    assert [row.score for row in scores] == [1.0, -2.0, 1.0, 1.0]
    assert [row.failure for row in scores] == [None, failure, None, None]
    assert scores[1].plus("reward_model", 5.0).score == -2.0
    [line] = capfd.readouterr().err.splitlines()
    for word in (
        "warning",
        "compute_score",
        "t.parquet, row 11 (data_source 'mine')",
        "it scores -2",
        "1 such",
    ):
        assert word in line
    metrics = reward_metrics(["mine"] * 4, scores)
    assert metrics["reward/num_failed"] == metrics[f"reward/mine/num_failed/{failure}"] == 1
    assert metrics["reward/mine/default_score"] == -0.5 and metrics["reward/mine/custom"] == 0.75


@pytest.mark.parametrize(
    ("statement", "failures", "words"),
    [
        ("return [1.0] * 2", ["invalid"] * 3, "returned 2 scores for 3 responses"),
        ("return 1.0", ["invalid"] * 3, "returned 1.0, expected a list of 3 scores"),
        ("return '123'", ["invalid"] * 3, "returned '123', expected a list of 3 scores"),
        (
            "raise KeyError(1)",
            ["raised"] * 3,
            "the call for this row and 2 others raised KeyError: 1",
        ),
        ("return [1.0, None, 1.0]", [None, "invalid", None], "returned None, expected a number"),
        ("os._exit(0)", ["exited"] * 3, "its worker process ended, with exit code 0"),
        ("time.sleep(1000)", ["timeout"] * 3, "no score after 1.5 s (reward.timeout_seconds)"),
    ],
)
@pytest.mark.slow
def test_batched_function_that_fails(
    build: Build,
    capfd: pytest.CaptureFixture[str],
    statement: str,
    failures: list[str | None],
    words: str,
) -> None:
    limit = 1.5 if "sleep" in statement else 60.0
    manager = build(BAD_BATCH.format(statement=statement), default_score=0.0, timeout_seconds=limit)
    assert [row.failure for row in manager.submit(prompts(3), ["", "bad", ""]).result()] == failures
    assert words in capfd.readouterr().err.splitlines()[0]
    assert [row.score for row in manager.submit(prompts(1), [""]).result()] == [1.0]


def test_batched_function_that_fails_ends_the_run_by_default(build: Build) -> None:
    manager = build(BAD_BATCH.format(statement="return [1.0] * 2"))
    with pytest.raises(
        UserError, match=r"reward\.py: .*t\.parquet, row 10 .*: returned 2 scores for 3 responses"
    ):
        manager.submit(prompts(3), ["", "bad", ""]).result()


def test_rows_without_a_rule_get_the_default_score(
    build: Build, capfd: pytest.CaptureFixture[str]
) -> None:
    manager = build(default_score=0.5)
    rows = prompts(2, "riddles") + prompts(1, "arithmetic")
    manager.check(rows)
    [line] = capfd.readouterr().err.splitlines()
    assert (
        "2 prompts score reward.default_score 0.5; data.train_files t.parquet, row 10 (data_source "
        "'riddles')"
    ) in line
    scores = manager.submit(rows, ["4", "4", "4"]).result()
    assert [(row.score, row.failure) for row in scores] == [
        (0.5, "no_rule"),
        (0.5, "no_rule"),
        (1.0, None),
    ]
