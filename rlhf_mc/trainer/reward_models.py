"""Reward models: frozen models whose scores of responses are parts of the training score. A model
reads the actor's tokens, or conversations of its own chat template and tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.roles import longest_sequence
from rlhf_mc.config.schema import Config, reward_models, score_part
from rlhf_mc.data.batch import Prompt, RaggedBatch
from rlhf_mc.data.conversations import ConversationTokenizer, conversation_batch
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.heads import value_head
from rlhf_mc.topology.consensus import gather_results
from rlhf_mc.trainer.token_budget import my_micro_batches


@dataclass(frozen=True)
class RewardModel:
    """A reward model of the run."""

    role: str
    """Its section of the config, and the name of its phase."""
    path: str
    engine: ModelEngine
    budget: int
    """A rank's tokens of a micro-batch."""
    conversations: ConversationTokenizer | None
    """Makes the tokens that the model reads; None: it reads the actor's."""

    @property
    def part(self) -> str:
        """The name of its part of the score, in reward.mixture and the metrics."""
        return score_part(self.role)

    @property
    def max_tokens(self) -> int:
        """The most tokens of a conversation; of a longer one the last are read, with the end of the
        response."""
        limit = longest_sequence(self.budget, self.engine.groups.mesh.cp)
        return min(self.engine.shape.max_position_embeddings, limit)


def conversation_tokenizers(cfg: Config) -> dict[str, ConversationTokenizer]:
    """Return by role the tokenizers of the reward models that do not read the actor's tokens."""
    return {
        role: ConversationTokenizer(role, model.tokenizer_path, model.chat_template_path)
        for role, model in reward_models(cfg).items()
        if model.tokenizer_path is not None
    }


def score(
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    batch: RaggedBatch,
    indices: Sequence[int],
) -> tuple[torch.Tensor, int]:
    """Return the model's scores of the sequences `indices`, [S] float32 with 0 for the others, and
    the number of conversations that lost their first tokens. Raise UserError if a conversation
    cannot be rendered. Every rank of its mesh must call it.

    tokenizer: the actor's. prompts: of each sequence of the batch."""
    values = torch.zeros(batch.num_sequences)
    if not indices:
        return values, 0
    num_truncated = 0
    if model.conversations is not None:
        responses = batch.responses()
        pairs = [(prompts[i], responses[i]) for i in indices]
        sequences, num_truncated = _conversations(model, tokenizer, pairs)
    else:
        sequences = batch.select(indices)
    values[list(indices)] = score_sequences(model.engine, sequences, model.budget)
    return values, num_truncated


def _conversations(
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[Prompt, list[int]]],
) -> tuple[RaggedBatch, int]:
    """Return the conversations of (prompt, response of the actor's tokens), each of its last
    `model.max_tokens` tokens, and the number of longer ones. Each rank renders a share: every rank
    of the mesh must call it."""
    conversations = model.conversations
    assert conversations is not None
    of_model = model.engine.groups
    world = of_model.mesh.world
    max_tokens = model.max_tokens

    def share() -> list[np.ndarray]:
        my_pairs = pairs[of_model.rank - of_model.mesh.first :: world]
        texts = tokenizer.batch_decode(
            [response for _, response in my_pairs], skip_special_tokens=True
        )
        return [
            conversations.tokens(prompt, text)
            for (prompt, _), text in zip(my_pairs, texts, strict=True)
        ]

    read: list[np.ndarray] = [np.zeros(0, np.int32)] * len(pairs)
    for r, part in enumerate(gather_results(share, group=of_model.members)):
        read[r::world] = part
    num_truncated = sum(len(tokens) > max_tokens for tokens in read)
    groups = [prompt.index for prompt, _ in pairs]
    return conversation_batch([tokens[-max_tokens:] for tokens in read], groups), num_truncated


def score_sequences(engine: ModelEngine, batch: RaggedBatch, budget: int) -> torch.Tensor:
    """Return a reward model's score of each sequence, its value at the last token: [S] float32, on
    every rank."""
    micro_batches = my_micro_batches(engine, batch, budget)
    return engine.score(batch, micro_batches, value_head, per_sequence=True)
