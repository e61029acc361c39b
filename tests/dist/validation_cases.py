"""Functions that the ranks run in test_validation.py."""

from __future__ import annotations

from cases import built_run

from rlhf_mc.trainer import loop


def fit(config_path: str, overrides: list[str]) -> bool:
    """Run the whole loop."""
    with built_run(config_path, overrides) as run:
        return loop.fit(run)
