"""The settings of the reward (functions, endpoint, reward model, the parts of the score) and of
distillation. schema.py has the other sections. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlhf_mc.config.algorithm_schema import KLLossType
from rlhf_mc.config.model_schema import FrozenMegatronConfig, FsdpConfig, Pool, Strategy
from rlhf_mc.config.numbers import (
    Count,
    Number,
    Positive,
    PositiveOrZero,
    PositiveSeconds,
    Range,
    Tokens,
)


@dataclass
class CustomRewardFunctionConfig:
    """A user-defined reward function in place of the built-in rules."""

    path: str | None = None
    """Python file that defines the function; null: the built-in rule of the row's data_source."""
    name: str = "compute_score"
    """Name of the function: compute_score(data_source, solution_str, ground_truth, extra_info=None)
    returns a float or {"score": float, ...}. It may be async, take all rows of a worker in one call
    (data_sources, solution_strs, ground_truths, extra_infos), or be a class with such a __call__,
    of which each worker makes one object."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class's constructor, or of each call of the function."""
    skip_special_tokens: bool = True
    """Responses are decoded without special tokens; false: with them, the end token too."""


@dataclass
class RewardModelConfig:
    """A frozen reward model. Its score of a response is the output of its value head at the last
    token."""

    model_path: str | None = None
    """Hugging Face checkpoint of a sequence classifier with one label. It replaces the reward
    functions in training, unless reward.mixture weighs both; validation uses the reward functions.
    null: no reward model."""
    tokenizer_path: str | None = None
    """Directory of the model's own tokenizer, often model_path. The prompt's messages and the text
    of the response are then rendered by its chat template, and the score is the value at the last
    token. null: the model reads the actor's tokens and has the actor's vocabulary."""
    chat_template_path: str | None = None
    """File with a chat template (Jinja), used in place of the tokenizer's; null: the
    tokenizer's."""
    forward_max_token_len_per_gpu: Tokens = 32768
    """Token budget of one micro-batch. With tokenizer_path, longer sequences lose their first
    tokens."""
    pool: Pool = "train"
    """As ref.pool."""
    strategy: Strategy = "megatron"
    """As actor.strategy. Left out: the actor's."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    """As actor.fsdp_config, from which it inherits."""
    megatron: FrozenMegatronConfig = field(default_factory=FrozenMegatronConfig)
    """As critic.megatron, for the reward model."""


NAMED = "reward_models"
"""The section of the reward models that have a name."""
TEACHERS = "distillation.teacher_models"
"""The section of the teachers."""


def unnamed(key: str) -> str:
    """Return the key, or the section, of a named model's setting with reward_model, or
    teacher_model of a teacher, in place of section and name; other keys as they are."""
    for section, one in ((NAMED, "reward_model"), (TEACHERS, "teacher_model")):
        if key.startswith(f"{section}."):
            name = key.removeprefix(f"{section}.")
            return f"{one}.{name.partition('.')[2]}".rstrip(".")
    return key


@dataclass
class OverlongBufferConfig:
    """A penalty on long responses, in training: DAPO's soft overlong punishment (arXiv 2503.14476,
    equation 13)."""

    len: Annotated[int, Range(0, 10_000_000)] = 0
    """Tokens before data.max_response_length over which the penalty rises from 0 to penalty_factor;
    0: no penalty."""
    penalty_factor: Positive = 1.0
    """Penalty of a response of data.max_response_length tokens."""


@dataclass
class RemoteRewardConfig:
    """An HTTP endpoint that scores responses: the part `remote` of the score. It must be the same
    for all ranks."""

    url: str | None = None
    """Address of the endpoint, with user:password@ if it asks for them. With api openai the base,
    such as http://host:8000/v1; null: none."""
    api: Literal["http", "openai"] = "http"
    """http: each request is the JSON of a reward function's arguments and `prompt`; the answer is a
    number or {"score": number, ...}. openai: a chat completion of `model`; the last number of its
    reply is the score."""
    model: str | None = None
    """openai: name of the model."""
    template: str = (
        "Question: {prompt}\n\nReference answer: {ground_truth}\n\nAnswer: {response}\n\n"
        "Rate the answer from 0 (wrong) to 1 (right). Reply with the number alone."
    )
    """openai: the user's message. {prompt}, {ground_truth} and {response} are replaced."""
    api_key_env: str | None = None
    """Environment variable with the key that is sent as Authorization: Bearer; null: no key."""
    timeout_seconds: PositiveSeconds = 60.0
    """Time limit of each request, up to the last byte of its answer. reward.timeout_seconds limits
    the requests of a response together."""
    max_retries: Annotated[int, Range(0, 1_000)] = 3
    """Repetitions of a request that gets no answer, or an HTTP status for overload (429, 503,
    ...)."""
    max_concurrency: Annotated[int, Range(1, 10_000)] = 32
    """Requests of one worker at a time."""


@dataclass
class RewardConfig:
    """The parts of a response's score, and the processes that run the reward functions."""

    num_workers: Annotated[int, Range(1, 1_024)] = 1
    """Worker processes per rank. They score the rank's share of the responses while the log-prob
    passes run. Each imports the user's file. At least 1, so that a function that exits or blocks
    does not exit or block a rank."""
    timeout_seconds: PositiveSeconds = 300.0
    """Time limit of the score of each response (of the whole call, for a function that takes all
    rows in one), and of the import of the user's file, which has at least 60 s."""
    mixture: dict[str, Any] = field(default_factory=dict)
    """Parts of the score and their weights by data source: {data_source: {part: weight}}; "*"
    stands for all others. A part is the name of a rule (docs/rewards.md), custom, remote,
    reward_model, or a name of reward_models. {}: one part of weight 1, which is the reward model,
    else the user's function or the endpoint, else the rule of the data source."""
    math_rule: Literal["math", "math_string"] = "math"
    """Rule of the data sources of MATH that mixture does not list. math: math-verify compares the
    answers. math_string: verl's comparison of strings."""
    default_score: Number | None = None
    """Score of a response that cannot be scored, with a warning and a count in the metrics: its
    function raises, exits, takes longer than timeout_seconds, or returns no finite number; or its
    data source has no rule. null: the run ends with a line that names file and row."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    """Penalty on long responses, the part `overlong` of the score."""
    remote: RemoteRewardConfig = field(default_factory=RemoteRewardConfig)
    """An HTTP endpoint that scores responses."""


@dataclass
class TeacherModelConfig:
    """A frozen teacher, whose log-probs of the student's tokens are computed as the reference's, at
    the rollout's temperature. It reads the actor's tokens, and needs the actor's tokenizer."""

    model_path: str | None = None
    """Hugging Face checkpoint of the teacher; null: the model of source."""
    source: Literal["actor", "ref"] | None = None
    """Self-distillation, in place of model_path: the actor's present weights, with its adapters and
    without router replay; or the reference's, which are its first ones, without adapters."""
    prompt_key: str | None = None
    """Column of the teacher's prompt for the student's responses, in the form of data.prompt_key,
    such as one with a solution or feedback; null: the student's prompt."""
    key: str | None = None
    """Data source whose rows the teacher scores; null, of the only teacher: all rows."""
    log_prob_max_token_len_per_gpu: Tokens = 16384
    """Token budget of one micro-batch of the teacher's pass."""
    pool: Pool = "train"
    """As ref.pool."""
    strategy: Strategy = "megatron"
    """As actor.strategy. Left out: the actor's."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    """As actor.fsdp_config, from which it inherits."""
    megatron: FrozenMegatronConfig = field(default_factory=FrozenMegatronConfig)
    """As critic.megatron, for the teacher."""


DistillationLossMode = Literal[KLLossType, "forward_kl_topk"]


@dataclass
class DistillationLossConfig:
    """The distillation loss of a drawn token (docs/algorithms.md)."""

    loss_mode: DistillationLossMode = "k3"
    """forward_kl_topk: KL(teacher, student) over the teacher's topk most probable tokens. Others:
    an estimate of KL(student, teacher) from the drawn token, as actor.kl_loss_type."""
    topk: Count = 32
    """forward_kl_topk: tokens at each position."""
    use_task_rewards: bool = True
    """Train on the rewards too; false: on the distillation loss alone, with coefficient 1."""
    distillation_loss_coef: PositiveOrZero = 1.0
    """Coefficient of the distillation loss beside the rewards."""
    use_policy_gradient: bool = False
    """Subtract the distillation loss from the token's advantage, without a gradient through it;
    false: it is a term of the actor's loss."""
    loss_max_clamp: Positive | None = None
    """Bound of the absolute value of a token's distillation loss; null: none."""
    log_prob_min_clamp: Annotated[float, Range(-1e6, 0, open=True)] | None = None
    """forward_kl_topk: lower bound of the log-probs of both; null: none."""


@dataclass
class DistillationConfig:
    """On-policy distillation: the actor, the student, learns from teachers' log-probs of the tokens
    that it has drawn."""

    enabled: bool = False
    """Build the teachers and train on the distillation loss."""
    distillation_loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)
    """The distillation loss."""
    teacher_models: dict[str, TeacherModelConfig] = field(default_factory=dict)
    """Teachers by name."""
