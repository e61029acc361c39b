"""The declarations of metrics: which keys each one stands for, and that every one is complete."""

from __future__ import annotations

import re

import pytest

from rlhf_mc.observability.catalog import SECTIONS, find, undeclared
from rlhf_mc.observability.catalog.metric import Metric

METRICS = [metric for section in SECTIONS for metric in section.metrics]


@pytest.mark.parametrize(
    ("key", "declared_as"),
    [
        ("actor/ppo_kl", "actor/ppo_kl"),
        ("critic/skipped", "{actor,critic}/skipped"),
        ("critic/score/mean", "critic/score/{mean,max,min}"),
        ("critic/score/openai/gsm8k/mean", "critic/score/<data_source>/{mean,max,min}"),
        ("val-core/openai/gsm8k/acc/maj@16/std", "val-core/<data_source>/acc/maj@N/{mean,std}"),
        ("val-aux/math/reward/worst@2/mean", "val-aux/<data_source>/<name>/{mean@N"),
        ("reward/math/num_failed/timeout", "reward/<data_source>/num_failed/{raised"),
        ("reward/math/length", "reward/<data_source>/<part>"),
        ("reward/num_failed", "reward/num_failed"),
        ("memory/reward_models.big_offloaded_gb", "memory/{actor,"),
    ],
)
def test_a_key_has_its_most_specific_declaration(key: str, declared_as: str) -> None:
    found = find(key)
    assert found is not None and found.keys.startswith(declared_as)


@pytest.mark.parametrize(
    "key", ["actor/ppo", "actor/ppo_kl2", "actor/my_statistic", "critic/score/", "val-core/gsm8k/acc/mean@", "loss"]
)
def test_other_keys_are_undeclared(key: str) -> None:
    assert undeclared([key, "actor/loss"]) == [key]


def test_each_metric_has_its_texts_and_one_row_of_the_page() -> None:
    for metric in METRICS:
        texts = (metric.keys, metric.meaning, metric.unit, metric.reduction)
        assert all(texts), metric.keys
        assert not any(re.search(r"[|\n]", text) for text in (*texts, metric.watch_for)), metric.keys
    keys = [metric.keys for metric in METRICS]
    assert len(set(keys)) == len(keys)


def test_a_character_with_a_meaning_in_patterns_stands_for_itself() -> None:
    metric = Metric("timing_s/models.<name> a+b", "", "", "")
    assert metric.matches("timing_s/models.x") and metric.matches("a+b")
    assert not metric.matches("timing_s/modelsXx") and not metric.matches("aab")
