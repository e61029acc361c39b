"""logprob_check.py: bounds on the difference between vLLM's and the trainer's log-probs, and the
messages."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.trainer.logprob_check import Difference, LogProbCheck
from rlhf_mc.trainer.step_report import difference_metrics

LOG_PROB_METRICS = {
    f"training/rollout_logprobs_diff_{statistic}" for statistic in ("mean", "p99", "max")
}


def make_batch(differences: list[float], lens: list[int] | None = None) -> RaggedBatch:
    """Return a batch of response tokens with these differences of log-probs, split into responses
    of lengths `lens`. Prompts have two tokens. Response token i of a sequence is 100 + i.
    """
    lens = lens or [len(differences)]
    rollout = torch.full((len(differences),), -1.0)
    return RaggedBatch(
        tokens=torch.tensor([t for n in lens for t in (1, 2, *range(100, 100 + n))]),
        prompt_lens=torch.full((len(lens),), 2),
        response_lens=torch.tensor(lens),
        rollout_log_probs=rollout,
        finished=torch.ones(len(lens), dtype=torch.bool),
        old_log_probs=rollout + torch.tensor(differences),
    )


def make_check(bound: float = 0.1, temperature: float = 1.0) -> LogProbCheck:
    return LogProbCheck(bound, temperature, "bfloat16", lambda token: f"<{token}>\n")


def test_first_rollout_beyond_the_bound_is_a_one_line_error() -> None:
    batch = make_batch([0.0, 0.1, -3.0, 0.0, 1.5, 0.3], lens=[2, 4])
    with pytest.raises(UserError) as caught:
        make_check().check(batch, step=7)
    line = str(caught.value)
    assert "\n" not in line
    for part in (
        "step 7: ",
        "the engine (rollout)",
        "the trainer differ",
        "0.817 on average",
        "of 6 tokens",
        "trainer.max_rollout_logprob_diff allows 0.1 and 1 (bfloat16",
        "; the worst: response 1, position 0, token 100 '<100>\\n': -1 by the engine, -4 by the "
        "trainer; ",
        "; response 1, position 2, token 102 ",
        "reshard.verify=always",
    ):
        assert part in line, line


@pytest.mark.parametrize(
    ("differences", "passes"),
    [
        ([0.05] * 200, True),
        ([0.11] * 200, False),  # the mean
        ([0.0] * 990 + [9.0] * 10, True),  # 1%, mean 0.09
        ([0.0] * 970 + [1.5] * 30, False),  # more than 1%, mean 0.045
        ([0.01, 0.0, 0.02, 0.3], True),
        ([-0.11], False),
    ],
)
def test_mean_and_99th_percentile_are_bounded(differences: list[float], passes: bool) -> None:
    if passes:
        make_check().check(make_batch(differences), 1)
        return
    with pytest.raises(UserError):
        make_check().check(make_batch(differences), 1)


def test_single_outlier_token_is_accepted() -> None:
    """Allow for bfloat16, in which a token near a routing boundary may take another expert."""
    make_check().check(make_batch([0.0] * 400 + [30.0]), 1)


@pytest.mark.parametrize(("temperature", "passes"), [(1.0, False), (0.5, True), (2.0, False)])
def test_bound_applies_at_temperature_1(temperature: float, passes: bool) -> None:
    """Scale the difference by the temperature: at 0.5 the same logits give twice the difference of
    log-probs."""
    check = make_check(temperature=temperature)
    batch = make_batch([0.15] * 10)
    if passes:
        check.check(batch, 1)
    else:
        with pytest.raises(UserError, match=f"temperature {temperature:g}"):
            check.check(batch, 1)


def test_the_first_later_rollout_beyond_the_bound_warns(caplog: pytest.LogCaptureFixture) -> None:
    check = make_check()
    check.check(make_batch([0.0] * 4), 1)
    with caplog.at_level(logging.WARNING):
        check.check(make_batch([0.0] * 4), 2)
        assert caplog.text == ""
        check.check(make_batch([5.0] * 4), 3)
        check.check(make_batch([5.0] * 4), 4)
    assert (
        "warning: step 3: the log-probs of the engine" in caplog.text
        and "step 4" not in caplog.text
    )


def test_the_check_stays_open_until_a_token_of_the_trained_weights_is_compared() -> None:
    """Take a batch that older weights have drawn alone: it says nothing about the engine's present
    weights."""
    check = make_check()
    older = replace(make_batch([5.0] * 4), token_ages=torch.tensor([1, 2, 1, 1]))
    assert Difference.from_batch(older) is None
    assert difference_metrics(older).keys() & LOG_PROB_METRICS == set()
    check.check(older, 1)
    assert check.is_first
    mixed = replace(make_batch([0.0, 5.0, 0.0, 0.0]), token_ages=torch.tensor([0, 1, 1, 2]))
    assert difference_metrics(mixed).keys() >= LOG_PROB_METRICS
    with pytest.raises(UserError, match=r"step 2: the log-probs .* of 1 tokens"):
        check.check(replace(make_batch([5.0] * 4), token_ages=torch.tensor([1, 2, 0, 1])), 2)
    check.check(mixed, 3)
    assert not check.is_first


@pytest.mark.parametrize(
    ("field", "engine"), [("old_log_probs", "Megatron-Core"), ("rollout_log_probs", "vLLM")]
)
def test_nonfinite_log_probs_are_named(field: str, engine: str) -> None:
    batch = make_batch([0.0] * 4)
    getattr(batch, field)[2] = torch.nan
    with pytest.raises(
        UserError, match=rf"1 of 4 log-probs of {engine}.* not finite; the first: .*position 2"
    ):
        make_check().check(batch, 1)


def test_difference_statistics() -> None:
    found = Difference.from_batch(make_batch([i / 100 for i in range(200)]))
    assert found is not None
    assert found.mean == pytest.approx(0.995, abs=1e-6)
    assert found.p99 == pytest.approx(1.97, abs=1e-6)
    assert found.max == pytest.approx(1.99, abs=1e-6)
