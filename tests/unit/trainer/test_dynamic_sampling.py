"""algorithm.filter_groups: which groups are kept, how many batches a step draws, and the settings
that go together."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from config_files import load, validated

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import Generation, Prompt, RaggedBatch, Responses, build_batch
from rlhf_mc.rewards.results import Score
from rlhf_mc.rollout.base import KV_CACHE, WEIGHTS, Request
from rlhf_mc.rollout.work_sharing import ResponseLengths
from rlhf_mc.runtime.preemption import StopRequested, StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer.pool import generate, rollout, sampling
from rlhf_mc.trainer.pool.group_pool import GroupPool
from rlhf_mc.trainer.pool.rollout import (
    SampledGroups,
    TooFewGroups,
    differ,
    filtered_rollout,
    metric_values,
)
from rlhf_mc.trainer.scores import normalised_parts, sample_mask
from rlhf_mc.trainer.step_report import equal_groups_ratio
from rlhf_mc.trainer.step_state import StepState, begin_step

FILTER = "algorithm.filter_groups"
ON = ("algorithm.adv_estimator=grpo", "rollout.n=2", f"{FILTER}.enable=true")


def test_responses_differ_exactly() -> None:
    third = torch.tensor(0.1)
    values = torch.stack([third, third, third, third, third, third + 1e-7]).view(2, 3)
    assert differ(values).tolist() == [False, True]
    assert values[0].double().numpy().std() >= 0 and differ(torch.zeros(0, 2)).tolist() == []


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("acc", [1.0, 0.5, 0.2, 0.0]),
        ("score", [0.5, 0.5, 0.2, 0.0]),
        ("seq_reward", [3, 1, 0.2, -1]),
    ],
)
def test_metrics(metric: Any, expected: list[float]) -> None:
    scores = [
        Score(0.5, {"custom": 0.5}, {"acc": 1.0}).plus("reward_model", 3.0).plus("overlong", -0.5),
        Score(0.5, {"custom": 0.25, "f1": 0.25}).plus("reward_model", 0.5),
        Score(0.2, {"default_score": 0.2}, failure="timeout").plus("overlong", -1.0),
        Score(0.0).plus("reward_model", -1.0),
    ]
    assert metric_values(scores, metric).tolist() == pytest.approx(expected)
    if metric == "acc":
        assert [score.accuracy for score in scores] == expected, (
            "one accuracy, here and in validation"
        )


def batch_of(prompts: Sequence[Prompt], scores: Sequence[float]) -> RaggedBatch:
    responses = [
        Generation([10 + i] * (i % 2 + 1), [-1.0] * (i % 2 + 1), True) for i in range(len(prompts))
    ]
    return build_batch(prompts, Responses.of(responses)).with_fields(scores=torch.tensor(scores))


def groups_of(first: int, scores: Sequence[float]) -> tuple[list[Prompt], RaggedBatch, list[Score]]:
    prompts = [
        Prompt(first + i // 2, np.array([first + i // 2], np.int32), "mine", None)
        for i in range(len(scores))
    ]
    return prompts, batch_of(prompts, scores), [Score(score, {"custom": score}) for score in scores]


def test_groups_that_differ_are_kept_in_order() -> None:
    groups = SampledGroups(2, "score")
    groups.add(*groups_of(0, [0, 1, 1, 1, 1, 0]))
    groups.add(*groups_of(3, [0, 0]))
    groups.add(*groups_of(4, [0, 0, 0, 2, 3, 0]))
    assert (groups.num_kept, groups.num_drawn) == (4, 7)
    assert groups.dropped == Counter({0.0: 2, 1.0: 1})
    prompts, batch, scores = groups.first(3)
    assert [prompt.index for prompt in prompts] == [0, 0, 2, 2, 5, 5]
    assert [score.score for score in scores] == [0, 1, 1, 0, 0, 2]
    assert batch.scores is not None and batch.scores.tolist() == [0, 1, 1, 0, 0, 2]
    assert batch.responses() == [[10], [11, 11], [14], [15, 15], [12], [13, 13]]
    # of dropped groups no tokens are held
    assert [found.num_sequences for found in groups.batches] == [4, 4]
    assert len(groups.scores) == len(groups.sources) == 14


@pytest.mark.parametrize("reads_parts", [False, True])
def test_groups_that_differ_in_a_part_are_kept_for_gdpo(reads_parts: bool) -> None:
    """Draw three groups of equal accuracies: the second differs in the format alone, the third in
    the penalty of long responses alone."""
    prompts, batch, _ = groups_of(0, [1.0] * 6)
    parts = [
        {"math": 2.0, "format": 0.5},
        {"math": 2.0, "format": 0.5},
        {"math": 2.0, "format": 0.5},
        {"math": 2.0, "format": 0.0},
        {"math": 2.0, "format": 0.5, "overlong": -0.5},
        {"math": 2.0, "format": 0.5, "overlong": 0.0},
    ]
    scores = [Score(sum(of.values()), of, {"acc": 1.0}) for of in parts]
    mixture = SimpleNamespace(training=lambda _: {"math": 2.0, "format": 0.5})
    every = torch.ones(6, dtype=torch.bool)
    found = normalised_parts(mixture, prompts, scores, 2, True, every)  # type: ignore[arg-type]
    half = math.sqrt(0.5)  # each part's distance from the mean of two, over their deviation
    assert found.tolist() == pytest.approx(
        [0.0, 0.0, 0.5 * half, -0.5 * half, -half, half], rel=1e-5
    )
    centred = normalised_parts(mixture, prompts, scores, 2, False, every)  # type: ignore[arg-type]
    assert centred.tolist() == [0.0, 0.0, 0.25, -0.25, -0.25, 0.25]
    groups = SampledGroups(2, "acc")
    groups.add(prompts, batch.with_fields(decoupled_scores=found) if reads_parts else batch, scores)
    assert groups.num_kept == (2 if reads_parts else 0)


def test_masked_responses_are_out_of_their_groups() -> None:
    """Check groups of three: one that differs in a masked response alone, one that differs, one
    that is masked whole; and parts of the score, which equal those of the other responses alone."""
    prompts = [Prompt(i // 3, np.array([i // 3], np.int32), "mine", None) for i in range(9)]
    numbers = [1.0, 1.0, 9.0, 0.0, 9.0, 2.0, 9.0, 8.0, 7.0]
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 0, 0, 0]).bool()
    batch = batch_of(prompts, numbers).with_fields(sample_mask=mask)
    scores = [Score(score, {"math": score, "odd": score % 2}) for score in numbers]
    groups = SampledGroups(3, "score")
    groups.add(prompts, batch, scores)
    assert groups.num_kept == 1 and [prompt.index for prompt in groups.prompts] == [1] * 3
    assert groups.dropped == Counter({1.0: 1, math.inf: 1})
    assert groups.batches[0].sample_mask is not None
    assert groups.batches[0].sample_mask.tolist() == [True, False, True]
    assert equal_groups_ratio(batch, 3) == pytest.approx(2 / 3)
    cfg = SimpleNamespace(data=SimpleNamespace(train_batch_size=2))
    assert "(the others have one value: 1 in 1, masked in 1)" in rollout._progress(cfg, groups, 1)  # type: ignore[arg-type]
    mixture = SimpleNamespace(training=lambda _: {"math": 1.0, "odd": 0.5})
    parts = normalised_parts(mixture, prompts, scores, 3, True, mask)  # type: ignore[arg-type]
    rows = [0, 1, 3, 5]
    alone = normalised_parts(
        mixture,  # type: ignore[arg-type]
        [prompts[i] for i in rows],
        [scores[i] for i in rows],
        2,
        True,
        torch.ones(4, dtype=torch.bool),
    )
    assert parts[rows].tolist() == alone.tolist() and alone.any()
    assert not parts[~mask].any()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.adv_estimator=gae"], [1, 1, 0, 1, 1, 1]),
        (["algorithm.adv_estimator=grpo"], [1, 1, 0, 0, 1, 1]),
        (["algorithm.adv_estimator=gae", "algorithm.overlong_filtering=true"], [0, 1, 0, 1, 1, 1]),
        (["algorithm.adv_estimator=grpo", "algorithm.overlong_filtering=true"], [0, 0, 0, 0, 1, 1]),
        (["algorithm.adv_estimator=remax"], [1, 1, 0, 1, 0, 0]),
    ],
)
def test_samples_that_are_masked(
    config_file: Path, overrides: list[str], expected: list[int]
) -> None:
    """Check three groups of two: a truncated response, one that is masked, and a masked greedy
    response."""
    cfg = load(config_file, "rollout.n=2", *overrides)
    prompts = [Prompt(i // 2, np.array([i // 2], np.int32), "mine", None) for i in range(6)]
    batch = batch_of(prompts, [0.0] * 6)
    batch = replace(batch, finished=torch.tensor([0, 1, 1, 1, 1, 1]).bool())
    is_masked = torch.tensor([0, 0, 1, 0, 0, 0, 0, 0, 1]).bool()
    if cfg.algorithm.adv_estimator != "remax":
        is_masked = is_masked[:6]
    assert sample_mask(cfg, batch, is_masked).int().tolist() == expected


class Drawing:
    """Stands for the phases: each batch of prompts has the given scores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, batches: list[list[float]]) -> None:
        self.batches = batches
        self.recorded: dict[str, Any] = {}
        self.drawn = 0
        for name in ("sample_groups", "await_rewards", "reward_metrics", "record_samples"):
            monkeypatch.setattr(rollout, name, getattr(self, name))

    def sample_groups(
        self, run: Any, state: StepState, needed: int
    ) -> tuple[list[Prompt], RaggedBatch, str]:
        self.drawn += 1
        return *groups_of(10 * self.drawn, self.batches[self.drawn - 1])[:2], "scores to come"

    def await_rewards(self, run: Any, state: Any, prompts: Any, batch: Any, stream: str) -> Any:
        assert stream == "scores to come"
        return batch, [Score(score, {"custom": score}) for score in batch.scores.tolist()]

    def reward_metrics(self, sources: list[str], scores: list[Score]) -> dict[str, float]:
        self.recorded["all"] = (len(sources), [score.score for score in scores])
        return {}

    def record_samples(
        self, run: Any, state: Any, prompts: Any, batch: Any, scores: list[Score]
    ) -> None:
        self.recorded["trained on"] = [score.score for score in scores]


def run_with(
    config_file: Path, *overrides: str, num_prompts: int = 6
) -> tuple[Any, StepState, StopRequests]:
    sizes = ("data.train_batch_size=2", "data.gen_batch_size=3", "actor.ppo_mini_batch_size=1")
    cfg = load(config_file, *ON, *sizes, *overrides)
    run = SimpleNamespace(config=cfg, train_prompts=[None] * num_prompts, group_pool=GroupPool())
    return run, begin_step(4, RankStatus()), StopRequests(cfg.trainer)


def test_batches_are_drawn_until_enough_groups_differ(
    monkeypatch: pytest.MonkeyPatch, config_file: Path
) -> None:
    drawing = Drawing(monkeypatch, [[0, 0, 1, 1, 0, 1], [0, 1, 2, 2, 3, 4], []])
    run, state, stop = run_with(config_file)
    prompts, batch = filtered_rollout(run, state, stop)
    assert drawing.drawn == 2
    assert [prompt.index for prompt in prompts] == [12, 12, 20, 20]
    assert batch.scores is not None and batch.scores.tolist() == drawing.recorded["trained on"] == [
        0,
        1,
        0,
        1,
    ]
    assert drawing.recorded["all"] == (12, [0, 0, 1, 1, 0, 1, 0, 1, 2, 2, 3, 4])
    assert state.metrics == {
        "train/num_gen_batches": 2,
        "train/dropped_groups_ratio": 3 / 6,
        "train/surplus_groups_ratio": 1 / 6,
    }


@pytest.mark.parametrize(
    ("scores", "drawn", "kept"),
    [([[1, 1, 1, 1, 1, 1]], 334, 0), ([[1, 0, 1, 1, 1, 1], *[[1] * 6] * 999], 335, 1)],
)
def test_a_constant_reward_ends_the_step_whatever_the_bound(
    monkeypatch: pytest.MonkeyPatch,
    config_file: Path,
    capsys: pytest.CaptureFixture[str],
    scores: list[list[float]],
    drawn: int,
    kept: int,
) -> None:
    drawing = Drawing(monkeypatch, scores * 1000)
    run, state, stop = run_with(
        config_file, f"{FILTER}.max_num_gen_batches=1000000000", num_prompts=6
    )
    with pytest.raises(TooFewGroups) as caught:
        filtered_rollout(run, state, stop)
    assert drawing.drawn == drawn, "1000 groups, three a batch"
    assert f"in {drawn} batches {kept} of {3 * drawn} groups" in str(caught.value)
    assert (
        "the last ones have brought none for so long that more will not help: use prompts"
        in str(caught.value)
    )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (drawn - 1) // 10
    assert lines[0] == (
        f"rlhf_mc: step 4: in 10 batches {kept} of 30 groups have responses that differ in acc "
        f"(the others have one value: 1 in {30 - kept}), and data.train_batch_size is 2; it draws "
        "on"
    )


@pytest.mark.parametrize(
    ("most", "num_prompts", "drawn"), [(1, 60, 1), (2, 60, 2), (0, 6, 2), (0, 8, 2), (0, 9, 3)]
)
def test_too_few_groups_is_one_line(
    monkeypatch: pytest.MonkeyPatch, config_file: Path, most: int, num_prompts: int, drawn: int
) -> None:
    drawing = Drawing(monkeypatch, [[0, 0, 1, 1, 1, 0], *[[1, 1, 1, 1, 1, 1]] * 5])
    run, state, stop = run_with(
        config_file, f"{FILTER}.max_num_gen_batches={most}", num_prompts=num_prompts
    )
    with pytest.raises(TooFewGroups) as caught:
        filtered_rollout(run, state, stop)
    assert drawing.drawn == drawn
    message = str(caught.value)
    others = {1: "0 in 1, 1 in 1", 2: "1 in 4, 0 in 1", 3: "1 in 7, 0 in 1"}[drawn]
    assert message.startswith(
        f"step 4: in {drawn} batches 1 of {3 * drawn} groups have responses that differ in acc "
        f"(the others have one value: {others}), and data.train_batch_size is 2; "
        f"{FILTER}.max_num_gen_batches is {most}"
    )
    assert ("raise it" in message) == (most > 0) and "\n" not in message


def test_stop_is_noticed_between_batches(
    monkeypatch: pytest.MonkeyPatch, config_file: Path
) -> None:
    drawing = Drawing(monkeypatch, [[1, 1, 1, 1, 1, 1]] * 9)
    run, state, stop = run_with(config_file, num_prompts=27)
    monkeypatch.setattr(stop, "check", lambda: stop_after(drawing, 2))
    with pytest.raises(StopRequested):
        filtered_rollout(run, state, stop)
    assert drawing.drawn == 2


def stop_after(drawing: Drawing, count: int) -> None:
    if drawing.drawn == count:
        raise StopRequested("SIGTERM")


class ThreePrompts:
    file_sizes = (3,)

    def select(self, indices: Sequence[int]) -> list[Prompt]:
        return [Prompt(index, np.array([index], np.int32), "", None) for index in indices]


def test_batches_of_a_step_have_other_prompts_and_seeds(
    monkeypatch: pytest.MonkeyPatch, config_file: Path
) -> None:
    """Check too that weights are updated where vLLM has slept since the weight update of the
    step."""
    calls: list[Any] = []
    run, _, _ = run_with(config_file, "data.gen_batch_size=2")
    run.train_prompts = ThreePrompts()
    run.rollout = SimpleNamespace(awake={WEIGHTS, KV_CACHE}, groups=[[0]])
    run.rollout_pool = None
    run.has_rollout_pool = False
    run.offload_schedule = SimpleNamespace(phase=lambda *args: contextlib.nullcontext())
    run.stop_token_ids = ()
    run.response_lengths = ResponseLengths()
    run.environments = run.rewards = run.tokenizer = None
    run.journal = SimpleNamespace(is_replayed=False)
    run.actor = SimpleNamespace(replay=None)
    monkeypatch.setattr(generate, "update_weights", lambda run, timer: calls.append("weights"))

    def record(engine: Any, requests: Sequence[Request], *args: Any) -> dict[int, Generation]:
        calls.append(
            (tuple(int(one.prompt[0]) for one in requests[::2]), [one.seed for one in requests])
        )
        return {request.number: Generation([2], [-1.0], True) for request in requests}

    monkeypatch.setattr(generate, "generate_responses", record)
    monkeypatch.setattr(
        generate,
        "exchange_responses",
        lambda own, engines, count: Responses.of([own[i] for i in range(count)]),
    )
    monkeypatch.setattr(
        sampling, "ScoreStream", lambda *args: SimpleNamespace(submit=lambda *args, **kwargs: None)
    )
    state = begin_step(3, RankStatus(), num_prompts=7 * 3)
    for awake in ({WEIGHTS, KV_CACHE}, {WEIGHTS, KV_CACHE}, set()):
        run.rollout.awake = awake
        sampling.sample_groups(run, state, 2)
    assert state.num_prompts == 10 * 3, "a batch of each epoch, whose third prompt fills none"
    batches = [call for call in calls if call != "weights"]
    assert [call if call == "weights" else "" for call in calls] == ["", "", "weights", ""]
    assert len({prompts for prompts, _ in batches}) > 1
    seeds = [seed for _, found in batches for seed in found]
    assert len(seeds) == len(set(seeds)) == 12  # of three prompts, so that some are drawn again


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("data.gen_batch_size=64",),
            f"data.gen_batch_size is 64; that needs {FILTER}.enable: true",
        ),
        (
            (f"{FILTER}.enable=true",),
            (
                f"{FILTER}.enable is true, which compares the responses of a prompt; rollout.n is "
                "1; it must be at least 2"
            ),
        ),
        (
            (*ON, f"{FILTER}.max_num_gen_batches=2", "data.gen_batch_size=15"),
            (
                f"{FILTER}.max_num_gen_batches 2 x data.gen_batch_size 15 = 30 is fewer prompts "
                "than data.train_batch_size"
            ),
        ),
        (
            (*ON, f"{FILTER}.max_num_gen_batches=-1"),
            f"{FILTER}.max_num_gen_batches is -1; it must be 0 or more",
        ),
        (
            (*ON, "reward_model.model_path=rm"),
            f"{FILTER}.metric is acc, which reward functions give, and the reward model alone "
            "scores the responses; it must be seq_reward",
        ),
        (
            (
                *ON,
                f"{FILTER}.metric=score",
                "reward_model.model_path=rm",
                "reward.mixture={a: {reward_model: 1.0}}",
            ),
            "alone scores the responses of the data source 'a'; it must be seq_reward",
        ),
        (
            (*ON, "actor.optim.lr_decay_style=cosine"),
            f"actor.optim.lr_decay_style is cosine and {FILTER}.enable is true: how many steps "
            "trainer.total_epochs has then depends on the dropped groups; set "
            "trainer.total_training_steps",
        ),
        ((*ON, "actor.entropy_coeff_end=0.1"), "actor.entropy_coeff_end is 0.1 and"),
    ],
)
def test_contradictions_are_refused(
    config_file: Path, overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        validated(config_file, *overrides)


def test_other_metrics_are_refused_by_name(config_file: Path) -> None:
    with pytest.raises(
        UserError, match=r"'seq_final_reward', expected one of acc, score, seq_reward"
    ):
        load(config_file, f"{FILTER}.metric=seq_final_reward")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (f"{FILTER}.max_num_gen_batches=1", "data.gen_batch_size=32"),
        (f"{FILTER}.metric=seq_reward", "reward_model.model_path=rm"),
        ("reward_model.model_path=rm", "reward.mixture={a: {reward_model: 1.0, length: 1.0}}"),
        ("actor.optim.lr_decay_style=cosine", "trainer.total_training_steps=9"),
        ("critic.optim.lr_decay_style=cosine",),  # there is no critic
    ],
)
def test_settings_that_go_together(config_file: Path, overrides: tuple[str, ...]) -> None:
    assert validated(config_file, *ON, *overrides).algorithm.filter_groups.enable
