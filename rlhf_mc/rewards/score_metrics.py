"""Metrics of a step's scores by data source. docs/metrics.md lists the keys."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from rlhf_mc.rewards.results import Score


def reward_metrics(data_sources: Sequence[str], scores: Sequence[Score]) -> dict[str, float]:
    """Return of each data source: score (mean, max, min), mean contribution of each part of the score, mean of each
    further number that a reward function returned, and the failures by kind. data_sources, scores: one entry per
    response."""
    by_source: dict[str, list[Score]] = defaultdict(list)
    for source, score in zip(data_sources, scores, strict=True):
        by_source[source].append(score)
    metrics: dict[str, float] = {"reward/num_failed": sum(score.failure is not None for score in scores)}
    for source, found in sorted(by_source.items()):
        values = [score.score for score in found]
        metrics[f"critic/score/{source}/mean"] = sum(values) / len(values)
        metrics[f"critic/score/{source}/max"] = max(values)
        metrics[f"critic/score/{source}/min"] = min(values)
        for part, total in _sums(score.parts.items() for score in found).items():
            metrics[f"reward/{source}/{part}"] = total / len(found)
        times = Counter(name for score in found for name in score.extra)
        for name, total in _sums(score.extra.items() for score in found).items():
            metrics[f"reward_extra/{source}/{name}"] = total / times[name]
        for kind, count in sorted(Counter(score.failure for score in found if score.failure).items()):
            metrics[f"reward/{source}/num_failed/{kind}"] = count
    return metrics


def _sums(rows: Iterable[Iterable[tuple[str, float]]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for row in rows:
        for name, value in row:
            sums[name] += value
    return sums
