"""The groups of several steps (trainer/group_pool.py), their settings, and the metrics of older weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from config_files import load, validated

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import prompts_in_flight
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.data.batch import NOTHING, Generation, Prompt, Responses, build_batch
from rlhf_mc.trainer.group_pool import Group, GroupPool, drop_stale, load_groups, must_end
from rlhf_mc.trainer.logprob_check import Difference
from rlhf_mc.trainer.pooled_rollout import off_policy_metrics

PROMPT = Prompt(3, np.array([1, 2], np.int32), "", None)
CORRECTION = "algorithm.rollout_correction.rollout_is=token"


def new_group(position: int) -> Group:
    return Group(position, PROMPT, [5, 6], [NOTHING] * 2, []).restarted()


def begun_group(position: int = 7) -> Group:
    """Return a group that steps 3 and 4 have generated: two tokens and none, then one more and two."""
    group = new_group(position).continued([Generation([10, 11], [-0.5, -0.25], False), NOTHING], 2)
    responses = [Generation([10, 11, 12], [-0.5, -0.25, -2.0], True), Generation([13, 14], [-1.0, -1.5], False)]
    return group.continued(responses, 3)


def test_each_token_has_the_version_of_its_weights() -> None:
    group = begun_group()
    assert [each.tolist() for each in group.versions] == [[2, 2, 3], [3, 3]]
    assert group.first_version == 2 and new_group(0).first_version is None
    assert group.has_ended(8).tolist() == [True, False] and group.has_ended(2).tolist() == [True, True]
    assert group.restarted().first_version is None and group.restarted().responses == [NOTHING] * 2


@pytest.mark.parametrize("max_tokens", [8, 2, 1])
def test_the_state_of_a_checkpoint(max_tokens: int) -> None:
    """Check that responses longer than a lower limit are cut."""
    pool = GroupPool()
    pool.groups = [begun_group(), new_group(9)]
    pool.num_drawn = 12
    state = json.loads(json.dumps(pool.copy().state_dict()))
    assert state["positions"] == [7, 9] and state["num_drawn"] == 12
    first, second = load_groups(state, [new_group(7), new_group(9)], max_tokens)
    assert second.responses == [NOTHING] * 2 and second.position == 9
    for one, whole, versions in zip(first.responses, begun_group().responses, first.versions, strict=True):
        assert one.token_ids == whole.token_ids[:max_tokens] and one.log_probs == whole.log_probs[:max_tokens]
        assert one.finished == (whole.finished and len(whole.token_ids) <= max_tokens)
        assert len(versions) == len(one.token_ids)
    assert first.versions[0].tolist() == [2, 2, 3][:max_tokens]


def test_an_empty_pool_has_a_state() -> None:
    state = json.loads(json.dumps(GroupPool().state_dict()))
    assert load_groups(state, [], 8) == []


@pytest.mark.parametrize(("version", "kept", "has_to_end"), [(3, True, False), (4, True, True), (5, False, True)])
def test_a_group_spans_at_most_the_threshold(version: int, kept: bool, has_to_end: bool) -> None:
    """Check a group whose oldest token is of version 2, where three versions are allowed: 2, 3 and 4."""
    groups = [begun_group(), new_group(8)]
    drop = RolloutConfig(max_off_policy_threshold=3, max_off_policy_strategy="drop")
    wait = RolloutConfig(max_off_policy_threshold=3, max_off_policy_strategy="wait")
    assert drop_stale(groups, version, drop) == (groups if kept else groups[1:])
    assert drop_stale(groups, version, wait) == groups
    assert must_end(groups, version, wait).tolist() == [has_to_end, False]
    assert not must_end(groups, version, drop).any()


def test_metrics_of_older_weights() -> None:
    responses = [Generation([1] * 4, [-1.0] * 4, True), Generation([1] * 2, [-1.0] * 2, True)]
    batch = build_batch([PROMPT] * 2, Responses.of(responses))
    batch = batch.with_fields(token_ages=torch.tensor([3, 1, 1, 0, 2, 2], dtype=torch.int32))
    metrics = off_policy_metrics(batch)
    prefix = "training/off_policy"
    assert [metrics[f"{prefix}/trajectory_spans/{kind}"] for kind in ("mean", "max", "min")] == [2.5, 4, 1]
    assert [metrics[f"{prefix}/trajectory_staleness/{kind}"] for kind in ("mean", "max", "min")] == [1, 2, 0]
    assert [metrics[f"{prefix}/trajectory_staleness_worst/{kind}"] for kind in ("mean", "max", "min")] == [2.5, 3, 2]
    assert [metrics[f"{prefix}/token_share/age_{age}"] for age in range(4)] == pytest.approx(
        [1 / 6, 1 / 3, 1 / 3, 1 / 6]
    )
    batch = batch.with_fields(old_log_probs=torch.tensor([-9.0, -1.0, -1.0, -1.5, -9.0, -9.0]))
    assert Difference.from_batch(batch) == Difference(0.5, 0.5, 0.5), "of the tokens of the trained weights alone"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("rollout.tail_batching=true", "rollout.partial_rollout=true", CORRECTION),
            "rollout.tail_batching and rollout.partial_rollout are true; set one of them",
        ),
        (
            ("rollout.partial_rollout=true",),
            "rollout.partial_rollout is true, which trains on tokens of older weights; that needs"
            " algorithm.rollout_correction.rollout_is",
        ),
        (("rollout.prompts_in_flight=2048",), "that needs rollout.tail_batching or rollout.partial_rollout: true"),
        (
            ("rollout.tail_batching=true", "rollout.prompts_in_flight=8"),
            "rollout.prompts_in_flight is 8; it must be at least data.train_batch_size, 32",
        ),
        (
            (
                "rollout.tail_batching=true",
                "algorithm.filter_groups.enable=true",
                "algorithm.adv_estimator=grpo",
                "rollout.n=2",
            ),
            "rollout.tail_batching is true and algorithm.filter_groups.enable is true; set one of them, or",
        ),
    ],
)
def test_settings_that_do_not_go_together(config_file: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError) as caught:
        validated(config_file, *overrides)
    assert words in str(caught.value)


def test_prompts_in_flight(config_file: Path) -> None:
    size = "data.train_batch_size=10"
    assert prompts_in_flight(load(config_file, size, "rollout.tail_batching=true")) == 13
    assert prompts_in_flight(load(config_file, size, "rollout.partial_rollout=true")) == 20
    assert prompts_in_flight(load(config_file, size, "rollout.prompts_in_flight=11")) == 11
