"""The times of a step as text and as plain data."""

from __future__ import annotations

from typing import Any

from rlhf_mc.planner.lengths import Lengths
from rlhf_mc.planner.times import StepTimes

NO_TIMES = "no times: of a GPU that is given by its bytes no rates are known"


def times_table(times: StepTimes, lengths: Lengths) -> str:
    """Return the text: each phase with its lower bound, its share of the step, and its parts."""
    lines = [
        f"lower bounds of a step's times, for prompts of {lengths.prompt:g} and responses of {lengths.response:g}"
        f" tokens ({times.sequences_at_a_time} sequences at a time in each engine):"
    ]
    for phase in times.phases:
        parts = ", ".join(f"{name} {_text(seconds)}" for name, seconds in phase.parts.items() if seconds > 0)
        lines.append(f"  {phase.name:<16} {_text(phase.seconds):>9} {phase.seconds / times.seconds:5.0%}   {parts}")
    lines.append(
        f"  step             {_text(times.seconds):>9}        {times.tokens_per_gpu:.0f} tokens/s on each GPU,"
        f" {times.tokens_per_gpu * times.world:.0f} in all; pipeline bubble {times.bubble_share:.1%}"
    )
    return "\n".join(lines)


def times_json(times: StepTimes, lengths: Lengths) -> dict[str, Any]:
    """Return the times as plain data, in seconds."""
    return {
        "prompt_length": lengths.prompt,
        "response_length": lengths.response,
        "sequences_at_a_time": times.sequences_at_a_time,
        "phases": {phase.name: dict(phase.parts) for phase in times.phases},
        "shares": {phase.name: phase.seconds / times.seconds for phase in times.phases},
        "step_seconds": times.seconds,
        "tokens_per_second": times.tokens_per_gpu * times.world,
        "tokens_per_second_per_gpu": times.tokens_per_gpu,
        "bubble_share": times.bubble_share,
    }


def _text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
