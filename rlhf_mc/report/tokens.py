"""The tokens of recorded responses as data: their texts, and the values by which the page colours
them. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_mc.report.charts import short
from rlhf_mc.report.run_reader import finite_or_none

MAX_STEPS = 3
"""Steps of a run whose responses are shown token by token: the first, a middle one and the last."""
MAX_TOKENS = 24_000
"""Tokens of all responses of a page."""
MAX_CHARACTERS = 40
"""Most characters of a token."""
_IN_SCALE = 0.95
"""Share of the values within the scale of the colours, so that a few extremes do not make all
others pale."""
_VALUES: Mapping[str, tuple[str, tuple[str, ...], float]] = {
    "advantage": ("advantage", ("advantages",), 0.0),
    "value": ("critic's value", ("values",), 0.0),
    "log_prob": ("log-prob", ("old_log_probs",), 0.0),
    "engine": ("log-prob, trainer's minus engine's", ("old_log_probs", "rollout_log_probs"), 0.001),
    "reference": ("log-prob, minus the reference's", ("old_log_probs", "ref_log_probs"), 0.001),
    "loss": ("in the actor's loss", ("loss",), 1.0),
}
"""By name: title; a column of samples.token_columns, or two whose difference it is; the least scale
of the colours."""


def shown_tokens(columns: Mapping[str, Sequence[Any]], most: int) -> dict[str, Any]:
    """Return {"text": of at most `most` tokens, "values": {name: values, None where not known}};
    empty without any. columns: as samples.token_columns has them. The loss is 1, -1 for tokens that
    are left out, None for an environment's."""
    texts = [str(text)[:MAX_CHARACTERS] for text in columns.get("text", ())[:most]]
    if not texts:
        return {}
    mask = columns["response_mask"]
    pairs = zip(mask, columns.get("loss_mask", mask), strict=True)
    loss = [None if sampled == 0 else -1 if in_loss == 0 else 1 for sampled, in_loss in pairs]
    numbers = {
        name: [finite_or_none(value) for value in column[:most]]
        for name, column in {**columns, "loss": loss}.items()
    }
    values = {}
    for name, (_, sources, _) in _VALUES.items():
        if all(source in numbers for source in sources):
            rows = zip(*(numbers[source] for source in sources), strict=True)
            values[name] = [None if None in row else short(row[0] - sum(row[1:])) for row in rows]
    return {"text": texts, "values": values}


def scales(shown: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the values that tokens of the page have: name, title, and the size of a value that has
    the strongest colour. shown: of `shown_tokens`."""
    entries = []
    for name, (title, _, least) in _VALUES.items():
        columns = [tokens["values"].get(name, ()) for tokens in shown if tokens]
        sizes = sorted(abs(value) for column in columns for value in column if value is not None)
        if sizes:
            usual = sizes[int(_IN_SCALE * (len(sizes) - 1))] or sizes[-1] or 1.0
            entries.append({"name": name, "title": title, "scale": short(max(usual, least))})
    return entries
