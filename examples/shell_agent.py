"""An agent with two tools, `ls` and `cat` of a small directory, which answers a question about the
files: a program that knows nothing of this trainer. The row's `extra_info.files` has the files by
name, and its ground truth the answer.

torchrun --nproc-per-node 8 -m rlhf_mc ... rollout.environment.name=openai \\
    rollout.environment.path=examples/shell_agent.py

The model gets no shell: a command that it writes is taken apart here. The process of the agent has
the key of the endpoint, with which a program of the model's could post a score of its own.
"""

import json
import shlex
from typing import Any

from openai import AsyncOpenAI, BadRequestError

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"arguments": {"type": "string", "description": "as in a shell"}},
                "required": ["arguments"],
            },
        },
    }
    for name, description in (("ls", "List files."), ("cat", "Print files."))
]


def shell(name: str, arguments: str, files: dict[str, str]) -> str:
    """Return the output of a command. arguments: JSON, as the model has drawn it."""
    try:
        names = shlex.split(json.loads(arguments)["arguments"]) or [*files]  # noqa: TID251
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{name}: {error!r}"
    lines = [f"{name}: {file}: no such file" for file in names if file not in files]
    found = [file for file in names if file in files]
    return "\n".join([*lines, *(found if name == "ls" else map(files.__getitem__, found))])


async def run(task: dict[str, Any], client_settings: dict[str, str]) -> dict[str, float]:
    """Let the model answer the row's question with the tools. Return 1 for the right answer."""
    settings = dict(client_settings)
    model = settings.pop("model")
    files = task["extra_info"].get("files") or {}
    messages: list[Any] = [
        {"role": "system", "content": "Answer with one word. Look at the files first."},
        *task["prompt"],
    ]
    num_calls = 0
    async with AsyncOpenAI(**settings) as client:
        while True:
            try:
                completion = await client.chat.completions.create(
                    model=model, messages=messages, tools=TOOLS
                )
            except BadRequestError as error:
                if error.code != "context_length_exceeded":
                    raise
                return {"score": 0.0, "calls": num_calls}
            turn = completion.choices[0].message
            if not turn.tool_calls:
                answer = (turn.content or "").strip()
                return {"score": float(answer == task["ground_truth"]), "calls": num_calls}
            messages.append(turn)
            for call in turn.tool_calls:
                num_calls += 1
                output = shell(call.function.name, call.function.arguments, files)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
