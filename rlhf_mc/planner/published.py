"""--model of the planner and of tools/check_layouts.py: a model in place of the config's, which
need not be downloaded. models/ has the config.json of published models, with the keys that matter
here."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from pathlib import Path

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config
from rlhf_mc.config.roles import uses_critic
from rlhf_mc.config.schema import get_setting, reward_models, teacher_paths
from rlhf_mc.verl.table import key_hint

MODELS = Path(__file__).parent / "models"
PUBLISHED = tuple(sorted(path.parent.name for path in MODELS.glob("*/config.json")))
_CONFIG = "config.json"
_NAMES = f"a directory with {_CONFIG}, that file, or one of {', '.join(PUBLISHED)}"


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Add --model to a command line."""
    parser.add_argument(
        "--model", metavar="MODEL", help=f"the model to plan in place of model.path: {_NAMES}"
    )


def with_model(source: str, overrides: Sequence[str], model: str | None) -> list[str]:
    """Return the overrides, and those that set the model that --model gives: for the actor, and for
    each other role whose path is the actor's. Raise UserError if a model that it does not replace
    has no config.json."""
    cfg = load_config(source, overrides, key_hint)
    critic = ["critic.model_path"] if uses_critic(cfg) and cfg.critic.model_path is not None else []
    others = [f"{role}.model_path" for role in (*reward_models(cfg), *teacher_paths(cfg))]
    keys = ["model.path", *critic, *others]
    paths = {key: Path(get_setting(cfg, key)) for key in keys}
    replaced = [key for key in keys if model is not None and paths[key] == paths["model.path"]]
    for key in keys:
        if key not in replaced and not (path := paths[key] / _CONFIG).exists():
            advice = f"to plan without it, give --model: {_NAMES}"
            if key != "model.path":
                advice = (
                    f"--model replaces model.path alone: give {key}=DIRECTORY, such as "
                    f"{MODELS}/{PUBLISHED[0]}"
                )
            raise UserError(f"{key}: {path} cannot be read; {advice}")
    if model is None:
        return list(overrides)
    return [*overrides, *(f"{key}={json.dumps(str(_model_directory(model)))}" for key in replaced)]


def _model_directory(model: str) -> Path:
    """Return the directory with the config.json that --model means."""
    name = model.lower()
    path = Path(model)
    if name in PUBLISHED:
        return MODELS / name
    if (path / _CONFIG).is_file():
        return path
    if path.name == _CONFIG and path.is_file():
        return path.parent
    near = difflib.get_close_matches(path.name.lower(), PUBLISHED, cutoff=0.4)
    meant = f" (near: {', '.join(near)})" if near and not path.exists() else ""
    raise UserError(f"--model is {model!r}{meant}; it must be {_NAMES}")
