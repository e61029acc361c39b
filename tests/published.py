"""The shapes of published models that the package has, and the 70B plan, for tests."""

from __future__ import annotations

import json
from typing import Any

from documents import ROOT

from rlhf_mc.planner.published import MODELS, PUBLISHED

CONFIGS: dict[str, dict[str, Any]] = {
    name: json.loads((MODELS / name / "config.json").read_text()) for name in PUBLISHED
}
LLAMA_3_70B = CONFIGS["llama-3-70b"]
QWEN_3_30B_A3B = CONFIGS["qwen3-30b-a3b"]
PLAN_70B = [str(ROOT / "configs/ppo_70b.yaml"), "--model", "llama-3-70b", "--nodes", "8"]
"""Arguments of the planner."""


def model_path(name: str) -> str:
    """Return the override that sets a directory with config.json alone as the model."""
    return f"model.path={MODELS / name}"
