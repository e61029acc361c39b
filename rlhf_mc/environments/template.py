"""The tokens of an observation: text as it is, chat messages as the chat template adds them to a conversation. What the
model has drawn is never rendered or tokenised again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.tokenizer import render
from rlhf_mc.environments.protocol import Observation
from rlhf_mc.rewards.results import Failure
from rlhf_mc.runtime.console import print_line

_BEFORE = ({"role": "user", "content": "."}, {"role": "assistant", "content": "."})
"""Messages before an observation; the difference that the template makes does not depend on them."""


class ObservationTokenizer:
    """Makes tokens of observations."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int], arguments: Mapping[str, Any]
    ) -> None:
        """arguments: of the chat template."""
        self._tokenizer = tokenizer
        self._stop = frozenset(stop_token_ids)
        self._arguments = arguments
        self._is_checked = False

    def tokens(self, observation: Observation, turn: Sequence[int]) -> list[int]:
        """Return the tokens that follow a turn's, with the generation prompt after messages. Raise Failure if the chat
        template refuses the messages, or if a conversation without them is not the beginning of one with them."""
        if isinstance(observation, str):
            return self._tokens(observation)
        messages = [one for one in observation if isinstance(one, dict)]
        if len(messages) < len(observation) or not messages:
            return [token for token in observation if isinstance(token, int)]
        before = self._rendered(_BEFORE, False)
        after = self._rendered([*_BEFORE, *messages], True)
        # What the template adds after the end token of a response (a line break) belongs to the observation.
        end = max((i for i, token in enumerate(before) if token in self._stop), default=len(before))
        if after[: end + 1] != before[: end + 1]:
            raise Failure("invalid", "the chat template renders a response differently once an observation follows")
        return after[end + (turn[-1] in self._stop) if end < len(before) else end :]

    def check(
        self, prompt: Sequence[Mapping[str, Any]], turn: str, observation: Observation, tokens: Sequence[int]
    ) -> None:
        """Warn, the first time, if the rendering of the whole conversation does not end with the observation's tokens.
        prompt: its messages. turn: the text of the first one."""
        if self._is_checked or not prompt or not isinstance(observation, list) or isinstance(observation[0], int):
            return
        self._is_checked = True
        whole = self._rendered([*prompt, {"role": "assistant", "content": turn}, *observation], True)
        if whole[-len(tokens) :] != list(tokens):
            texts = [self._tokenizer.decode(part) for part in (tokens, whole[-len(tokens) :])]
            print_line(
                f"warning: rollout.environment: the chat template adds an observation as {texts[0]!r}, and a rendering"
                f" of the whole conversation ends with {texts[1]!r}; the model is trained on the former"
            )

    def _rendered(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> list[int]:
        try:
            text = render(self._tokenizer, messages, self._arguments, "an observation", add_generation_prompt)
        except UserError as error:
            raise Failure("invalid", str(error)) from error
        return self._tokens(text)

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
