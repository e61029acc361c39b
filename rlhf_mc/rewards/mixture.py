"""The parts of a response's score and their weights, by data source: reward.mixture, or its
default. Neither torch nor numpy is imported.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import CustomRewardFunctionConfig, RewardConfig
from rlhf_mc.rewards.registry import RULE_OF_SOURCE, RULES, WITHOUT_RULE, match_source
from rlhf_mc.rewards.results import (
    CUSTOM,
    DEFAULT,
    ENVIRONMENT,
    FUNCTIONS,
    OVERLONG,
    REMOTE,
    RewardRow,
)

RESERVED = (OVERLONG, DEFAULT, "num_failed", "num_truncated")
"""Names in the metrics of what is no part of a mixture."""
OTHERS = "*"
"""Key of reward.mixture for the data sources that it does not list."""


class Mixture:
    """The weights of the parts of each data source's score."""

    def __init__(
        self,
        custom: CustomRewardFunctionConfig,
        reward: RewardConfig,
        models: Mapping[str, str] | None = None,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        """Raise UserError for an unknown part, a weight that is no number, or a part that is set up
        and never used. models: the parts of the run's reward models, each with the setting of the
        model's path. environment: the rewards of one of the user's own replace the default, those
        of tools are added to it."""
        environment = environment or EnvironmentConfig()
        self._models = dict(models or {})
        for part, key in self._models.items():
            if part in (*FUNCTIONS, *RESERVED):
                raise UserError(
                    f"{key}: {part!r} is the name of another part of the score (docs/rewards.md)"
                )
        self._weights = {
            source: _checked_weights(source, parts, self._models)
            for source, parts in reward.mixture.items()
        }
        self._math_rule = reward.math_rule
        functions = {
            CUSTOM: ("custom_reward_function.path", custom.path is not None),
            REMOTE: ("reward.remote.url", reward.remote.url is not None),
            ENVIRONMENT: ("rollout.environment", environment.is_set),
        }
        self._tools = {ENVIRONMENT: 1.0} if environment.has_tools else {}
        self._set = [
            part for part, (_, is_set) in functions.items() if is_set and part not in self._tools
        ]
        available = {
            **functions,
            "reward_model": ("reward_model.model_path", False),
            **{part: (key, True) for part, key in self._models.items()},
        }
        if len(self._models) > 1 and not self._weights:
            raise UserError(
                f"{' and '.join(self._models.values())} are set and reward.mixture is empty; weigh"
                f" {' and '.join(self._models)} in reward.mixture"
            )
        if len(self._set) > 1 and not self._weights:
            raise UserError(
                f"{' and '.join(functions[part][0] for part in self._set)} are both set and "
                "reward.mixture is empty; weigh both in reward.mixture"
            )
        used = self.listed_parts
        for part, (key, is_set) in available.items():
            if part in used and not is_set:
                raise UserError(
                    f"reward.mixture has the part {part!r} and {key} is null; set it, or leave the "
                    "part out"
                )
        for part, (key, is_set) in available.items():
            # Where all parts are reward models, validation is by the default.
            validates = part not in self._models and any(
                map(self.is_by_models, self._weights.values())
            )
            if self._weights and is_set and part not in {*used, *self._tools} and not validates:
                raise UserError(
                    f"{key} is set and no data source of reward.mixture has the part {part!r}; it "
                    "would never be used"
                )

    @property
    def listed_parts(self) -> frozenset[str]:
        """The parts that reward.mixture lists."""
        return frozenset(part for parts in self._weights.values() for part in parts)

    @property
    def sources(self) -> frozenset[str]:
        """The data sources that reward.mixture lists."""
        return frozenset(self._weights) - {OTHERS}

    def training(self, data_source: str) -> Mapping[str, float]:
        """Return the weights of the parts of a training score; empty if nothing scores the data
        source."""
        listed = self._listed(data_source)
        if listed is None and self._models and not self._weights:
            return dict.fromkeys(self._models, 1.0) | self._tools
        return self._default(data_source) if listed is None else listed

    def validation(self, data_source: str) -> Mapping[str, float]:
        """Return the weights of the functions that score a validation response: the weights of
        training, or the default where training has reward models alone."""
        listed = self._listed(data_source) or {}
        return self.functions(listed) or self._default(data_source)

    def functions(self, parts: Mapping[str, float]) -> Mapping[str, float]:
        """Return the parts that functions compute: all but the parts of reward models."""
        return {part: weight for part, weight in parts.items() if part not in self._models}

    def is_by_models(self, parts: Mapping[str, float]) -> bool:
        """Return whether reward models compute all of these parts."""
        return bool(parts) and not self.functions(parts)

    def _listed(self, data_source: str) -> Mapping[str, float] | None:
        return self._weights.get(data_source, self._weights.get(OTHERS))

    def _default(self, data_source: str) -> Mapping[str, float]:
        if self._set:
            return {self._set[0]: 1.0} | self._tools
        rule = match_source(RULE_OF_SOURCE, data_source)
        return (
            {} if rule is None else {self._math_rule if rule == "math" else rule: 1.0} | self._tools
        )


def _checked_weights(source: str, parts: Any, models: Iterable[str]) -> Mapping[str, float]:
    where = f"reward.mixture: {source!r}"
    if not isinstance(parts, dict) or not parts:
        raise UserError(f"{where} is {parts!r}; it must be a mapping {{part: weight}}")
    known = dict.fromkeys((*RULES, CUSTOM, REMOTE, ENVIRONMENT, "reward_model", *models))
    for part, weight in parts.items():
        if part not in known:
            raise UserError(f"{where} has the unknown part {part!r}; known: {', '.join(known)}")
        if (
            isinstance(weight, bool)
            or not isinstance(weight, (int, float))
            or not math.isfinite(weight)
        ):
            raise UserError(
                f"{where}: the weight of {part!r} is {weight!r}; it must be a finite number"
            )
    return {part: float(weight) for part, weight in parts.items()}


def check_sources(listed: Iterable[str], sources: Collection[str]) -> None:
    """Raise UserError for a data source that reward.mixture lists and no row has. sources: of the
    rows."""
    for source in sorted(set(listed) - set(sources)):
        near = difflib.get_close_matches(source, sources, n=1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"the rows have {', '.join(map(repr, sorted(sources)[:8]))}"
        )
        raise UserError(
            "reward.mixture: no row of data.train_files or data.val_files has the data source "
            f"{source!r}; {hint}"
        )


def row_problem(row: RewardRow) -> str | None:
    """Return why the parts cannot score the row, whatever the response is, or None."""
    if not row.parts:
        if module := match_source(WITHOUT_RULE, row.data_source):
            return (
                "no reward rule for this data source; verl has one in "
                f"verl/utils/reward_score/{module}: with verl installed, point "
                "custom_reward_function.path to a file with the line `from verl.utils.reward_score "
                "import default_compute_score` and set custom_reward_function.name to "
                "default_compute_score"
            )
        return (
            f"no reward rule for this data source; known: {', '.join(RULE_OF_SOURCE)}; for others "
            "set custom_reward_function.path, reward.remote.url or reward.mixture"
        )
    for part in row.parts:
        rule = RULES.get(part)
        if rule is None or not rule.needs_truth:
            continue
        if row.ground_truth is None:
            return (
                f"reward_model.ground_truth is null; the rule {part} needs an answer to compare "
                "with"
            )
        if not str(row.ground_truth).strip():
            return (
                f"reward_model.ground_truth is empty; the rule {part} needs an answer to compare "
                "with"
            )
        if not rule.can_read(row.ground_truth):
            truth = repr(row.ground_truth)[:60]
            return (
                f"reward_model.ground_truth is {truth}; it must be {rule.reads} for the rule {part}"
            )
    return None
