"""A prompt and its response as one conversation, in a chat template and tokens of their own: what a
reward model reads that has another tokenizer than the actor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import Prompt, RaggedBatch
from rlhf_mc.data.tokenizer import ChatText, ChatTokenizer, load_tokenizer


class ConversationTokenizer:
    """Renders and tokenises conversations."""

    def __init__(self, section: str, path: str, chat_template_path: str | None) -> None:
        """Load the tokenizer of `section`.tokenizer_path. Raise UserError if it cannot be loaded or
        has no chat template."""
        self.key = f"{section}.tokenizer_path"
        template_key = f"{section}.chat_template_path"
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(
            path, self.key, chat_template_path, template_key
        )
        if self.tokenizer.chat_template is None:
            raise UserError(
                f"{self.key} {path}: the tokenizer has no chat template; give one in {template_key}"
            )
        self._chats = ChatTokenizer(self.tokenizer)

    def text(self, prompt: Prompt, response: str) -> ChatText:
        """Return the rendered conversation. Raise UserError, naming the prompt's row, if the
        template fails."""
        messages = [*prompt.messages, {"role": "assistant", "content": response}]
        return self._chats.render(
            messages, {}, prompt.where, False, f"the chat template of {self.key}"
        )

    def tokens(self, prompt: Prompt, response: str) -> np.ndarray:
        """Return the tokens of the rendered conversation, at least one, int32. The text has the
        special tokens."""
        tokens = self._chats.tokens(self.text(prompt, response))
        if not tokens:
            raise UserError(
                f"{prompt.where}: the chat template of {self.key} gives a text without tokens"
            )
        return np.array(tokens, np.int32)


def conversation_batch(
    conversations: Sequence[np.ndarray], groups: Sequence[int] = ()
) -> RaggedBatch:
    """Return the conversations, each [tokens] int32, as a batch for scores of sequences: the
    response is the last token of each, and of its group (by number, if given) the prompt is what
    all begin with."""
    lens = np.array([len(tokens) for tokens in conversations], dtype=np.int64)
    prompt_lens = lens - 1
    firsts: dict[int, int] = {}
    shared: dict[int, int] = {}
    for i, group in enumerate(groups):
        first = conversations[firsts.setdefault(group, i)]
        size = min(len(first), len(conversations[i]))
        differs = np.append(first[:size] != conversations[i][:size], True)
        shared[group] = min(shared.get(group, size - 1), size - 1, int(differs.argmax()))
    for i, group in enumerate(groups):
        prompt_lens[i] = shared[group] or prompt_lens[i]
    is_last = np.zeros(lens.sum(), np.bool_)
    is_last[lens.cumsum() - 1] = True
    return RaggedBatch(
        tokens=torch.from_numpy(np.concatenate(conversations)),
        prompt_lens=torch.from_numpy(prompt_lens),
        response_lens=torch.ones(len(lens), dtype=torch.int64),
        rollout_log_probs=torch.zeros(len(lens)),
        finished=torch.ones(len(lens), dtype=torch.bool),
        observation_lens=torch.from_numpy(lens - prompt_lens - 1),
        response_mask=torch.from_numpy(is_last),
    )
