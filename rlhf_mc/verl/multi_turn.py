"""Conversions of verl's settings of turns, tools and agent loops to those of
rollout.environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhf_mc.verl.keys import (
    OFF,
    MappedSetting,
    Settings,
    implied,
    not_needed,
    not_supported,
    renamed,
    verl_default,
)

MULTI_TURN = "rollout.multi_turn."
TOOL_PATHS = (f"{MULTI_TURN}tool_config_path", f"{MULTI_TURN}function_tool_path")
_OURS = "rollout.environment."
_SIDES = {"left": "right", "right": "left", "middle": "middle"}
"""The part that verl keeps, and the part that is left out here."""
_FORMATS = {"glm": "glm45", "kimi": "kimi_k2", "minimax": "minimax_m2", "seed": "seed_oss"}
"""verl's names of formats that vLLM names otherwise."""
_TURNS = ("max_user_turns", "max_assistant_turns", "max_turns")
"""The first one counts observations: the model has one more turn after the last."""
_ENVIRONMENT = "run it as an environment: docs/from_verl.md, Agent loops and interactions"


def has_tools(verl: Settings) -> bool:
    """Return whether verl's run has tools."""
    return any(verl.get(path) not in OFF for path in TOOL_PATHS)


def multi_turn(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Return the line of a setting of multi_turn."""
    name = key.removeprefix(MULTI_TURN)
    if name == "enable":
        return not_needed("a run with tools has turns")
    if value in OFF:
        return implied("nothing is given")
    if name == "interaction_config_path":
        return not_supported(_ENVIRONMENT)
    if name in ("use_inference_chat_template", "tokenization_sanity_check_mode"):
        return not_needed("what the model has drawn is never rendered again")
    if not has_tools(verl):
        return not_needed("without tools a response has one turn")
    if name in _TURNS:
        bounds = [verl.get(MULTI_TURN + bound) for bound in _TURNS]
        turns = [bound + (i == 0) for i, bound in enumerate(bounds) if type(bound) is int and bound]
        return renamed(f"{_OURS}max_turns", min(turns, default=value), "turns of the model")
    if name == "tool_response_truncate_side":
        return renamed(
            f"{_OURS}truncate", _SIDES.get(value, value), "the part that is left out, in verl kept"
        )
    if name == "max_tool_response_length":
        return renamed(f"{_OURS}max_observation_length", value)
    if key in TOOL_PATHS:
        return renamed(
            _OURS + name,
            value,
            "rewards of tools are added to the score; verl leaves that to its function",
        )
    if name == "format":
        return renamed(_OURS + name, _FORMATS.get(value, value))
    return renamed(_OURS + name, value) if name == "max_parallel_calls" else None


def agent(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Return the line of a setting of agent."""
    name = key.removeprefix("rollout.agent.")
    if name == "default_agent_loop" and value in ("tool_agent", "single_turn_agent"):
        return implied(
            "with tools all rows have them but those with the agent_name single_turn_agent"
        )
    if name in ("default_agent_loop", "agent_loop_config_path") and value not in OFF:
        return not_supported(_ENVIRONMENT)
    return None


def tools_of_data(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Return the outcome of the tools in verl's prompts. Their default is the rollout's tools."""
    if value in OFF or value == verl.get(MULTI_TURN + key.removeprefix("data.")):
        return implied("prompts have the tools of the rollout")
    return not_supported(
        f"prompts have the tools of {MULTI_TURN}{key.removeprefix('data.')}, which are others"
    )


def turn_defaults(verl: Settings, given: Settings) -> Iterator[MappedSetting]:
    """Yield verl's defaults of settings of tools that were not given."""
    if not has_tools(verl):
        return
    for name, value, text in (
        ("max_turns", 1_000_000, "verl has no bound; ours: 16"),
        ("max_observation_length", 256, "ours: 8192"),
    ):
        if _OURS + name not in given:
            yield verl_default(_OURS + name, value, text)
