"""A tool: a search over the passages of a parquet file, by BM25. A class of verl's BaseTool, with
the file

tools:
  - class_name: examples.search_tool.Search
    config: {path: passages.parquet, column: text, num_results: 3}

as rollout.environment.tool_config_path. The index is in the memory of each worker process, some 120
bytes for each word of each passage: a search over millions of them is a call of a server. The
package rank_bm25 has no index, and scores all passages for each query.
"""

import math
import re
from collections import Counter, defaultdict
from typing import Any

import pyarrow.parquet as pq
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_K1 = 1.2
_B = 0.75
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search an encyclopedia. Return the passages that fit best.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "Words to search for."}},
            "required": ["query"],
        },
    },
}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class Search(BaseTool):
    """An inverted index: the passages and counts of each word."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._passages = pq.read_table(config["path"])[config["column"]].to_pylist()
        counts = [Counter(_words(passage)) for passage in self._passages]
        mean = sum(map(Counter.total, counts)) / len(counts)
        self._index: dict[str, list[tuple[int, float]]] = defaultdict(list)
        """By word its passages, and what it adds to the score of each, but for the word's
        weight."""
        for number, words in enumerate(counts):
            scale = _K1 * (1 - _B + _B * words.total() / mean)
            for word, count in words.items():
                self._index[word].append((number, count * (_K1 + 1) / (count + scale)))

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema."""
        return OpenAIFunctionToolSchema.model_validate(_SCHEMA)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, float, dict]:
        """Search."""
        scores: Counter[int] = Counter()
        for word in set(_words(str(parameters["query"]))):
            found = self._index.get(word, [])
            weight = math.log(1 + (len(self._passages) - len(found) + 0.5) / (len(found) + 0.5))
            for number, score in found:
                scores[number] += weight * score
        best = sorted(scores, key=lambda number: (-scores[number], number))[
            : self.config.get("num_results", 3)
        ]
        text = "\n\n".join(f"({i + 1}) {self._passages[number]}" for i, number in enumerate(best))
        return ToolResponse(text=text or "nothing was found"), 0.0, {"found": len(scores)}
