"""The repository's root, for tests of its pages."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
