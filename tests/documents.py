"""The repository's root and the texts of its pages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def joined(text: str) -> str:
    """Return the text with each command of several lines in one."""
    return re.sub(r" \\\n +", " ", text)
