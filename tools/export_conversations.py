"""Write the finished conversations of a run that score above a number as messages, one JSON object
a line, for supervised training.

    python tools/export_conversations.py RUN_DIR --above 0.5 --output FILE.jsonl [--samples DIR]

--samples is a directory of samples of the run; default: its trainer.rollout_data_dir, or else
RUN_DIR/train_generations, which has some responses of some steps. The tokenizer is that of
RUN_DIR/resolved_config.yaml.

A line has `messages`; `tools`, if there are any; `score`; `step`; `row`, a digest of the dataset's
row; `weights_step`, the step after which the weights drew the first token; and the tokens as they
were: `prompt_ids`, `response_ids`, and `response_mask` with 1 for drawn ones. Messages are found by
the texts that the chat template writes around contents. The model's are what it has drawn, calls of
tools included. Each context of an agent is a conversation; one that continues an earlier turn has
its messages again, with 0 in response_mask. Those with other texts, and ones that are cut off, are
left out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_mc.runtime.tool import Parser, end_on_interrupt, finite_number

if __name__ == "__main__":
    end_on_interrupt()

from transformers import PreTrainedTokenizerBase

from rlhf_mc import json_files
from rlhf_mc.config.errors import UserError, error_reason
from rlhf_mc.config.load import load_config
from rlhf_mc.data.tokenizer import load_tokenizer
from rlhf_mc.run_files import CONFIG_FILE, TRAIN_GENERATIONS, Row, read_rows
from rlhf_mc.runtime.exit_codes import exit_code

MARK = "\ue000"
"""Stands for a content in a rendered conversation."""
QUESTIONS = [("user", "assistant") * n + ("user",) for n in reversed(range(17))]
FIRST = [*(("system", *roles) for roles in QUESTIONS), *QUESTIONS]
"""Roles of the messages before the first turn; long ones first, for a text of several messages
looks like one of fewer too."""
LATER = [("tool",) * n + ("user",) * m for n in reversed(range(9)) for m in (2, 1, 0) if n or m]
"""Roles of the messages between two turns."""

CALL = {"type": "function", "id": "call00000", "function": {"name": "tool", "arguments": {}}}
KEYS = ("score", "step", "data_source", "row", "weights_step", "prompt_ids", "response_ids")


def contexts(row: Row) -> Iterator[Row]:
    """Yield a sample for each context: of a further one all tokens are those of the response."""
    observations = row.get("observations", [])
    starts = [0, *(observations[i][0] for i in row.get("contexts", []))]
    ends = [*starts[1:], len(row["response_ids"])]
    for start, end in zip(starts, ends, strict=True):
        within = [(a - start, b - start) for a, b in observations if start <= a < end]
        prompt = [] if start else row["prompt_ids"]
        tokens = row["response_ids"][start:end]
        yield {**row, "observations": within, "prompt_ids": prompt, "response_ids": tokens}


class Splitter:
    """Splits conversations into messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]) -> None:
        """arguments: of the chat template."""
        self._tokenizer = tokenizer
        self._arguments = arguments
        self._pattern = functools.cache(self._new_pattern)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {number: token.content for number, token in added if token.special}

    def line(self, row: Row) -> Row | None:
        """Return the line of a sample; None if it is not to be written."""
        num_before = len(row["prompt_ids"])
        mask = [0] * num_before + [1] * len(row["response_ids"])
        for start, end in row.get("observations", ()):
            mask[num_before + start : num_before + end] = [0] * (end - start)
        ids = iter([*row["prompt_ids"], *row["response_ids"]])
        messages: list[dict[str, str]] = []
        stop = tools = ""
        for is_drawn, group in itertools.groupby(mask):
            tokens = [next(ids) for _ in group]
            text = str(self._tokenizer.decode(tokens))
            if is_drawn:
                stop = self._special.get(tokens[-1], "")
                messages.append({"role": "assistant", "content": text.removesuffix(stop)})
                continue
            tools = tools or json.dumps(schemas(text))
            for roles in LATER if messages else FIRST:
                found = self._pattern(roles, stop, tools).fullmatch(text)
                contents = found.groups() if found else ()
                if found and not any(map("".join(contents).count, self._special.values())):
                    break
            else:
                return None
            pairs = zip(roles, contents, strict=True)
            messages += [{"role": role, "content": content} for role, content in pairs]
        if not (is_drawn and stop):
            return None
        given = json_files.parse(tools)
        parts = {"messages": messages, **({"tools": given} if given else {})}
        return {**parts, **{key: row[key] for key in KEYS}, "response_mask": mask[num_before:]}

    def _new_pattern(self, roles: tuple[str, ...], stop: str, tools: str) -> re.Pattern[str]:
        """Return the pattern of a text with messages of these roles between two turns. stop: end
        token of the turn before it; empty: the conversation begins with it. tools: as JSON."""
        calls = [CALL] * roles.count("tool")
        turn = {"role": "assistant", "content": MARK, **({"tool_calls": calls} if calls else {})}
        chat: list[dict[str, Any]] = [{"role": "user", "content": "."}, turn] if stop else []
        for role in roles:
            answer = {"tool_call_id": CALL["id"], "name": "tool"} if role == "tool" else {}
            chat.append({"role": role, "content": MARK, **answer})
        arguments = {**self._arguments, "tools": json_files.parse(tools) or None}
        try:
            rendered = self._tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True, **arguments
            )
        except Exception:  # a template is arbitrary code
            rendered = ""
        before, *between = str(rendered).split(MARK)[bool(stop) :] or [""]
        if len(between) != len(roles) or not all(between[:-1]):
            return re.compile("(?!)")
        parts = [f"(?>(.*?){re.escape(text)})" for text in between[:-1]]
        start = re.escape(before.rpartition(stop)[2] if stop else before)
        return re.compile(f"{start}{''.join(parts)}(.*){re.escape(between[-1])}", re.DOTALL)


def schemas(text: str) -> list[Any]:
    """Return the schemas of tools that a text has as JSON."""
    found = []
    for start in re.finditer(r'\{"type": ?"function"', text):
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.JSONDecoder().raw_decode(text, start.start())[0])
    return found


def export(root: Path, samples: Path | None, above: float, output: Path) -> None:
    """Write the conversations, and print their number. Raise UserError if there are none to
    read."""
    if not (root / CONFIG_FILE).is_file():
        raise UserError(f"{root}: is no directory of a run ({CONFIG_FILE} is missing)")
    cfg = load_config(root / CONFIG_FILE)
    samples = samples or Path(cfg.trainer.rollout_data_dir or root / TRAIN_GENERATIONS)
    paths = sorted(samples.glob("*.jsonl"), key=lambda path: (len(path.name), path.name))
    rows = [row for path in paths for _, row in read_rows(path)]
    if not all("response_ids" in row for row in rows) or not rows:
        raise UserError(f"{samples}: has no samples with tokens (trainer.rollout_data_dir)")
    path = cfg.model.tokenizer_path or cfg.model.path
    tokenizer = load_tokenizer(path, "model.path", cfg.data.chat_template_path)
    splitter = Splitter(tokenizer, cfg.data.apply_chat_template_kwargs)
    good = [row for row in rows if row["failure"] is None and row["score"] > above]
    all_contexts = [context for row in good for context in contexts(row)]
    lines = [line for line in map(splitter.line, all_contexts) if line is not None]
    try:
        output.write_text("".join(f"{json_files.readable_text(line)}\n" for line in lines), "utf-8")
    except OSError as error:
        raise UserError(f"{output}: {error_reason(error)}") from error
    number = f"{len(lines)} conversations of {len(all_contexts)} that score above {above:g}"
    print(f"{output}: {number}, of {len(rows)} responses")


def main() -> int:
    """Write the file. Return the exit code."""
    parser = Parser(__doc__)
    score = finite_number(-1e38, "points, such as 0.5")
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--above", required=True, type=score, metavar="SCORE")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.jsonl")
    parser.add_argument("--samples", type=Path, metavar="DIR")
    args = parser.parse_args()
    return exit_code("rlhf_mc", lambda: export(args.run, args.samples, args.above, args.output))


if __name__ == "__main__":
    sys.exit(main())
