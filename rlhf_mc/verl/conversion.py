"""From the settings of a verl run to ours, with a report on each: what keeps its name, what is
renamed, what rlhf_mc does anyway, what is not needed, and what is not supported.

A setting that schema.py has under the same name passes, and load.py checks its value. table.yaml
has the others, and the converters of values. verl's files and command lines are read in
tools/verl_input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_mc.config.algorithm_schema import SEQUENCE_LOSSES
from rlhf_mc.config.load import dotted_keys, mapping_keys, value_problem
from rlhf_mc.config.masking import any_name
from rlhf_mc.config.schema import Config, DataConfig, ModelConfig, TrainerConfig, get_setting
from rlhf_mc.config.unknown import nearest_key
from rlhf_mc.config.yaml_reader import yaml_text
from rlhf_mc.verl import table
from rlhf_mc.verl.adapters import adapter_defaults, has_adapters
from rlhf_mc.verl.asynchronous import async_defaults, nodes_and_processes
from rlhf_mc.verl.correction import rejection_lower_bound
from rlhf_mc.verl.keys import (
    OFF,
    Kind,
    MappedSetting,
    Settings,
    implied,
    not_needed,
    not_supported,
    renamed,
    same,
    verl_default,
)
from rlhf_mc.verl.multi_turn import MULTI_TURN, TOOL_PATHS, turn_defaults
from rlhf_mc.verl.parallelism import (
    ASKED_STRATEGY,
    layout_defaults,
    layout_hints,
    named_engine,
)
from rlhf_mc.verl.values import OF_SEQUENCES, TEACHERS, uses_critic

VERL = "0.10.0.dev of 2026-08-22"
"""The version of verl whose defaults are written out, as in its generated ppo_megatron_trainer and
ppo_trainer."""

_BUDGET = "actor.ppo_max_token_len_per_gpu"
_CORRECTION = "algorithm.rollout_correction."
_SWITCHES: dict[str, tuple[str, ...]] = {
    "reward_model.sandbox_fusion.": ("reward_model.sandbox_fusion.url",),
    "reward_model.reward_manager.module.": ("reward_model.reward_manager.module.path",),
    "reward_model.": ("reward_model.enable",),
    MULTI_TURN: (f"{MULTI_TURN}enable", *TOOL_PATHS),
    **{
        f"{model}.{part}": (f"{model}.lora{mark}rank", f"{model}.lora{mark}adapter_path")
        for model in ("model", "critic.model")
        for part in ("lora.", "lora_", "target_modules", "exclude_modules")
        for mark in ("." if part == "lora." else "_")
    },
    "model.tiled_mlp.": ("model.tiled_mlp.enabled",),
    "model.mtp.": ("model.mtp.enable",),
    "critic.model.tiled_mlp.": ("critic.model.tiled_mlp.enabled",),
    "critic.model.mtp.": ("critic.model.mtp.enable",),
    "distillation.": ("distillation.enabled",),
    "rollout.mtp": ("model.mtp.enable",),
    "algorithm.filter_groups.": ("algorithm.filter_groups.enable",),
    "algorithm.pf_ppo.": ("algorithm.use_pf_ppo",),
    _CORRECTION: tuple(
        _CORRECTION + name
        for name in ("rollout_is", "rollout_rs", "rollout_token_veto_threshold", "bypass_mode")
    ),
}
"""Sections that have no effect while their switches are off."""
_REFERENCE_LAYOUT = ("ref.megatron.", "ref.fsdp_config.", "ref.veomni.", "ref.ulysses_")
_REWARD_FUNCTIONS = tuple(
    f"reward_model.{name}"
    for name in (
        "reward_manager",
        "reward_kwargs",
        "reward_loop",
        "sandbox",
        "overlong_buffer",
        "launch_reward_fn",
    )
)
"""Settings of reward_model that belong to reward functions."""

DEFAULTS: tuple[tuple[str, Any, str], ...] = (
    ("rollout.tensor_model_parallel_size", 2, "ours: 1"),
    ("rollout.free_cache_engine", True, "ours: false"),
    ("actor.kl_loss_type", "low_var_kl", "ours: k3, which is not clipped at 10"),
)
"""verl's defaults that differ from ours."""
REFERENCES: tuple[tuple[str, str], ...] = (
    ("rollout.log_prob_max_token_len_per_gpu", "actor.ppo_max_token_len_per_gpu"),
    ("ref.log_prob_max_token_len_per_gpu", "actor.ppo_max_token_len_per_gpu"),
    ("critic.forward_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"),
    ("reward_model.forward_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu"),
    ("critic.loss_agg_mode", "actor.loss_agg_mode"),
    ("critic.loss_scale_factor", "actor.loss_scale_factor"),
)
"""Settings whose default in verl is another setting."""


@dataclass(frozen=True)
class VerlSetting:
    """A setting of verl's as the user gave it."""

    value: Any
    written: str
    """The key as it was written."""


@dataclass
class Conversion:
    """Settings of ours, and a report."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Value by section.key, in the order of schema.py."""
    report: list[tuple[str, MappedSetting]] = field(default_factory=list)
    """(verl's key as written, or our key for a default; outcome)."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """Notes of the reader, printed before the report: (kind and subject, action)."""
    nodes: int = 1
    processes: int = 8
    """Processes per node."""
    hints: list[tuple[str, str]] = field(default_factory=list)
    """Hints printed before the report: (subject, advice)."""

    def refused(self) -> list[tuple[str, MappedSetting]]:
        """Return the lines of the settings that are not supported."""
        return [(key, line) for key, line in self.report if line.kind == "not supported"]

    def text(self) -> str:
        """Return the report, one line for each setting, by kind."""
        order: tuple[Kind, ...] = (
            "not supported",
            "default",
            "renamed",
            "same",
            "implied",
            "not needed",
        )
        lines = [f"{subject}: {text}" for subject, text in self.notes]
        for kind in order:
            for key, line in self.report:
                if line.kind == kind:
                    lines.append(f"{kind:<13}  {key}{_outcome(key, line)}")
        return "\n".join([*(f"{subject}: {text}" for subject, text in self.hints), *lines])

    def yaml(self, source: str) -> str:
        """Return a config for load_config, with the command that runs it as a comment."""
        run = f"torchrun --standalone --nproc-per-node {self.processes} -m rlhf_mc THIS_FILE"
        if self.nodes > 1:
            run = f"sbatch --nodes {self.nodes} slurm/ppo_2nodes.sh THIS_FILE"
        lines = [
            f"# Converted from {source} (docs/from_verl.md). To run it: {run}",
            *_nested(self.settings),
        ]
        return "\n".join(lines) + "\n"


def _outcome(key: str, line: MappedSetting) -> str:
    """Return the rest of a line of the report: our setting, and the reason."""
    shown = ""
    if line.ours is not None and line.kind == "renamed":
        shown = f" -> {line.ours}: {yaml_text(line.value)}"
    elif line.ours is not None:
        shown = f": {yaml_text(line.value)}"
    return (
        f"{shown}  ({line.text})"
        if line.text and shown
        else shown + (f": {line.text}" if line.text else "")
    )


def convert(
    given: Mapping[str, VerlSetting], engine: str | None = None, strategy: str = "fsdp2"
) -> Conversion:
    """Return our settings for verl's. given: verl's settings without actor_rollout_ref, with
    references replaced. engine: fsdp or megatron, where no setting names it. strategy: of a run of
    FSDP, fsdp2 or megatron."""
    verl = {key: item.value for key, item in given.items()}
    verl[ASKED_STRATEGY] = strategy
    if engine is not None and named_engine(verl) is None:
        verl["model_engine"] = engine
    nodes, processes = nodes_and_processes(verl)
    result = Conversion(nodes=nodes, processes=processes)
    settings: dict[str, Any] = {}
    for key, item in given.items():
        line = _line(key, item.value, verl)
        ours = any_name(str(line.ours))
        if ours in dotted_keys() and (problem := value_problem(ours, line.value)):
            line = not_supported(problem)
        result.report.append((item.written, line))
        if line.ours is not None:
            _put(settings, line.ours, line.value)
    for line in _defaults(verl, settings):
        assert line.ours is not None
        result.report.append((line.ours, line))
        settings[line.ours] = line.value
    defaults = ("verl's defaults", f"those of version {VERL}")
    result.hints += [defaults, *layout_hints(verl, settings), *_reward_hints(verl)]
    result.settings = dict(sorted(settings.items(), key=lambda setting: _place(setting[0])))
    return result


def _place(key: str) -> tuple[int, str, int]:
    """Return the place of a setting in schema.py; settings of one teacher are together."""
    place = dotted_keys().index(any_name(key))
    if not key.startswith(TEACHERS):
        return place, "", 0
    first = dotted_keys().index(f"{TEACHERS}NAME.model_path")
    return first, key.removeprefix(TEACHERS).partition(".")[0], place


def _put(settings: dict[str, Any], key: str, value: Any) -> None:
    """Set a setting of ours. A key inside a free-form mapping becomes an entry of it."""
    mapping = _enclosing_mapping(key)
    if mapping is None:
        settings[key] = value
        return
    *path, last = key.removeprefix(f"{mapping}.").split(".")
    inner = settings.setdefault(mapping, {})
    for part in path:
        inner = inner.setdefault(part, {})
    inner[last] = value


def _enclosing_mapping(key: str) -> str | None:
    """Return the free-form mapping of ours that the key is inside, or None."""
    return next((name for name in mapping_keys() if key.startswith(f"{name}.")), None)


def _line(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Return the outcome of one setting."""
    if (absent := _absent_section(key, verl)) is not None:
        return absent
    known = dotted_keys()
    rows = list(table.find_rows(key))
    convert_value = next((row.convert for row in rows if row.convert is not None), None)
    line = convert_value(key, value, verl) if convert_value is not None else None
    if line is not None and (line.ours is None or any_name(line.ours) in known):
        return line
    if key in known or _enclosing_mapping(key) is not None:
        return same(key, value)
    row = next((row for row in rows if row.kind is not None), None)
    if row is None or row.kind is None:
        if value in (None, {}, []):
            return implied("nothing is given")
        near = nearest_key(key, known)
        hint = f"; the nearest of ours is {near}" if near else ""
        return not_supported(f"no setting of verl's that is known here{hint}")
    if row.kind == "renamed":
        if value is None:
            return implied("null")
        if row.text in known:
            return renamed(row.text, value)
        return not_supported(f"it would be {row.text}")
    if row.kind == "not supported" and any(_equal(value, off) for off in row.values):
        return implied("off")
    if row.kind == "implied" and not any(_equal(value, known) for known in row.values):
        return not_supported(f"{yaml_text(value)}: {row.text}")
    return MappedSetting(row.kind, row.text)


def _equal(value: Any, other: Any) -> bool:
    """Return whether two values are equal; true is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _absent_section(key: str, verl: Settings) -> MappedSetting | None:
    """Return the outcome of a setting of a model or feature that verl's run does not have, or
    None."""
    if key.startswith("critic.") and key != "critic.enable" and not uses_critic(verl):
        return not_needed(
            f"algorithm.adv_estimator {verl.get('algorithm.adv_estimator')} has no critic"
        )
    if key.startswith(_REFERENCE_LAYOUT) and has_adapters(verl):
        return not_needed("the reference is the actor without its adapters")
    for section, switches in _SWITCHES.items():
        is_inside = key.startswith(section) and key not in switches
        is_inside = is_inside and not (
            section == "reward_model." and key.startswith(_REWARD_FUNCTIONS)
        )
        if is_inside and all(verl.get(switch) in OFF for switch in switches):
            return not_needed(f"{switches[0]} is off")
    return None


# ---------------------------------------------------------------- verl's defaults


def our_default(key: str) -> Any:
    """Return the default of a setting that may be left out."""
    return get_setting(Config(DataConfig([]), ModelConfig(""), TrainerConfig("")), key)


def _defaults(verl: Settings, settings: Mapping[str, Any]) -> Iterator[MappedSetting]:
    """Yield verl's defaults that differ from ours, for settings that were not given."""
    yield from async_defaults(verl, settings)
    for key, value, text in DEFAULTS:
        if key not in settings and (key != "actor.kl_loss_type" or verl.get("actor.use_kl_loss")):
            yield verl_default(key, value, text)
    loss = settings.get("actor.policy_loss.loss_mode")
    if loss in SEQUENCE_LOSSES and "actor.loss_agg_mode" not in settings:
        yield verl_default(
            "actor.loss_agg_mode", OF_SEQUENCES, f"verl's {loss} has no other; ours: token-mean"
        )
    roles = _roles(verl)
    models = [role for role in roles if role != "ref" or not has_adapters(verl)]
    yield from layout_defaults(verl, settings, models)
    yield from adapter_defaults(verl, settings)
    yield from turn_defaults(verl, settings)
    for key in [key for key in settings if key.startswith(TEACHERS)]:
        if key.endswith(".model_path") and (budget := settings.get(_BUDGET)):
            ours = key.replace("model_path", "log_prob_max_token_len_per_gpu")
            yield verl_default(ours, budget, f"as {_BUDGET}")
    for key, source in REFERENCES:
        is_used = key.startswith(("rollout.", *(f"{role}." for role in roles)))
        if (
            is_used
            and key not in settings
            and source in settings
            and settings[source] != our_default(key)
        ):
            yield verl_default(
                key, settings[source], f"as {source}; ours: {yaml_text(our_default(key))}"
            )
    lower = f"{_CORRECTION}rollout_rs_threshold_lower"
    if f"{_CORRECTION}rollout_rs_threshold" in settings and lower not in settings:
        bound = rejection_lower_bound(verl)
        if bound is not None:
            yield verl_default(lower, bound, "of rollout_rs_threshold")
    path = settings.get("reward_model.model_path")
    if (
        "reward_model" in roles
        and path is not None
        and "reward_model.model.input_tokenizer" not in verl
    ):
        text = "it reads conversations in its own chat template; ours: the actor's tokens"
        yield verl_default("reward_model.tokenizer_path", path, text)
    if settings.get("custom_reward_function.path") is None and "reward.math_rule" not in settings:
        text = (
            "verl's comparison of strings; ours: math, which finds more answers equal "
            "(docs/rewards.md)"
        )
        yield verl_default("reward.math_rule", "math_string", text)
    if settings.get("actor.megatron.param_offload"):
        yield verl_default(
            "reshard.share_weights", False, "weights that vLLM shares cannot be offloaded"
        )
    if "trainer.default_local_dir" not in settings:
        project = verl.get("trainer.project_name") or "verl_examples"
        path = f"checkpoints/{project}/{verl.get('trainer.experiment_name') or 'gsm8k'}"
        yield verl_default("trainer.default_local_dir", path, "of project_name and experiment_name")


def _reward_hints(verl: Settings) -> Iterator[tuple[str, str]]:
    """Yield what to do for the data sources that verl scores and no rule here."""
    if verl.get("custom_reward_function.path") in OFF:
        yield (
            "note: rewards",
            "no rule scores codecontests, apps, codeforces, taco (in verl prime_code.py), "
            "hiyouga/geometry3k (geo3k.py) and searchR1_* (search_r1_like_qa_em.py). For them, set "
            "custom_reward_function.path to a function of your own, or to a file with the line "
            "`from verl.utils.reward_score import default_compute_score`, and "
            "custom_reward_function.name to default_compute_score",
        )


def _roles(verl: Settings) -> list[str]:
    """Return the models of verl's run besides the actor."""
    present = {
        "critic": uses_critic(verl),
        "ref": bool(verl.get("actor.use_kl_loss") or verl.get("algorithm.use_kl_in_reward")),
        "reward_model": bool(verl.get("reward_model.enable")),
    }
    return [role for role, is_present in present.items() if is_present]


# ---------------------------------------------------------------- output


def _nested(settings: Mapping[str, Any]) -> list[str]:
    """Return settings by dotted key as lines of nested YAML."""
    lines = []
    above: list[str] = []
    for key, value in settings.items():
        *sections, name = key.split(".")
        common = 0
        while common < min(len(above), len(sections)) and above[common] == sections[common]:
            common += 1
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(common, len(sections))]
        lines.append(f"{'  ' * len(sections)}{name}: {yaml_text(value)}")
        above = sections
    return lines
