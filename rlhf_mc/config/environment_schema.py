"""The settings of an environment, with which a response is a conversation of several turns. No
torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlhf_mc.config.numbers import Count, Number, PositiveSeconds, Range, Tokens

TOOL_AGENT = "tool_agent"
SINGLE_TURN_AGENT = "single_turn_agent"
"""The values of a row's `agent_name`: with tools, and without."""


@dataclass
class EnvironmentConfig:
    """A user-defined environment, which answers each turn of a response with an observation."""

    path: str | None = None
    """Python file that defines the environment (docs/environments.md); null: none, each response is
    one turn."""
    name: str = "Environment"
    """Name of its class. Each conversation has an object. openai: an agent that speaks to an OpenAI
    endpoint, the function `run` of path, or command (docs/environments.md, "Agents")."""
    command: list[str] | None = None
    """Program of an agent, with its arguments."""
    other_sampling: Literal["refuse", "ignore"] = "refuse"
    """An agent's request with other sampling parameters than the run's is refused, or they are
    ignored, counted in reward_extra/<data_source>/ignored_parameters."""
    rewritten_history: Literal["new_context", "refuse"] = "new_context"
    """An agent's request that does not continue the conversation's messages (a rewritten history, a
    sub-agent, a parallel request) begins a new context within the response, or is refused."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class's constructor; of an agent's function."""
    first_observation: bool = False
    """`reset` returns the first observation, which follows the row's prompt before the first turn.
    The prompt is then rendered without the generation prompt."""
    function_tool_path: str | None = None
    """Python file whose functions are tools that the model may call, in place of an environment of
    your own (docs/environments.md, "Tools")."""
    tool_config_path: str | None = None
    """YAML file of tools in verl's format: class_name, config and tool_schema of each. Both files
    may be given."""
    format: str = "hermes"
    """Format of tool calls in turns of the model: gpt-oss, or a name of vLLM's tool parsers, such
    as hermes, glm45, llama3_json, qwen3_coder, deepseek_v3 and kimi_k2."""
    max_parallel_calls: Count = 1
    """Tool calls of a turn that are run, at the same time; further ones are left out."""
    max_turns: Count = 16
    """Turns of a conversation, which ends with the last one."""
    max_tokens_per_turn: Tokens | None = None
    """Largest number of tokens that the model draws in a turn; null: as data.max_response_length
    allows, which bounds the tokens of a conversation, observations included."""
    max_observation_length: Annotated[int, Range(1, 100_000_000)] = 8192
    """Largest length of an observation, and of each tool's, in characters; in tokens where the
    environment returns tokens. A longer one is truncated."""
    truncate: Literal["left", "right", "middle"] = "middle"
    """Part of a longer observation that is left out."""
    skip_special_tokens: bool = True
    """The text of a turn, as `step` gets it, has no special tokens; false: it has them, the end
    token too."""
    split_special_tokens: bool = True
    """Control tokens that an observation's text has written out stay text, as in messages; false:
    they are those tokens, for an environment that writes the marks of the chat template itself."""
    timeout_seconds: PositiveSeconds = 60.0
    """Time limit of the environment's answer to a turn, and of each tool call."""
    num_workers: Annotated[int, Range(1, 1_024)] | None = None
    """Worker processes per rank, each with many conversations at a time. One that an environment
    ends or blocks is replaced, and its other conversations are begun again. null: the machine's
    cores per rank, at most 4."""
    default_observation: str | None = None
    """Observation where the environment raises, exceeds timeout_seconds, returns something else
    than it should, or ends its worker process: a text, with the marks and control tokens that the
    chat template would add. {error} is replaced by the reason, whose control tokens stay text.
    null: the conversation ends with default_score."""
    default_score: Number = 0.0
    """Score by the environment of a conversation that ends because the environment failed."""

    @property
    def has_tools(self) -> bool:
        """The model may call tools."""
        return self.function_tool_path is not None or self.tool_config_path is not None

    @property
    def is_agent(self) -> bool:
        """The environment is an agent."""
        return self.name == "openai"

    @property
    def has_contexts(self) -> bool:
        """A response may have several contexts."""
        return self.is_agent and self.rewritten_history == "new_context"

    @property
    def begins(self) -> bool:
        """The environment gives an observation before the first turn."""
        return self.first_observation or self.is_agent

    @property
    def is_set(self) -> bool:
        """A response is a conversation."""
        return self.path is not None or self.command is not None or self.has_tools
