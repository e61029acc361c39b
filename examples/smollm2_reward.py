"""The reward of the task of tools/make_smollm2.py: 1 for a right answer, else 0.

A number may stand in a sentence: the last one of the response counts. Asked for the bare number
alone, the untrained model is never paid, and learns nothing. JSON must be the whole response.
"""

import re

from rlhf_mc import json_files


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None
) -> float:
    """Return the score of one response."""
    if data_source == "smollm2/json":
        return float(_json(solution_str) == json_files.parse(ground_truth))
    numbers = re.findall(r"\d+", solution_str.replace(",", ""))
    return float(numbers[-1:] == [ground_truth])


def _json(text: str) -> object:
    try:
        return json_files.parse(text)
    except ValueError:
        return None
