"""Teachers of distillation: frozen models that give log-probs of the tokens that the actor has
drawn, and of their own most probable tokens. The loss is in algorithms/distillation.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlhf_mc import platform
from rlhf_mc.algorithms.kl import kl_estimate
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import TeacherModelConfig
from rlhf_mc.data.batch import Prompt, RaggedBatch, with_prompts
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.heads import teacher_head
from rlhf_mc.trainer.token_budget import my_micro_batches


@dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher of the run."""

    role: str
    """Its section of the config, and the name of its phase."""
    section: TeacherModelConfig
    engine: ModelEngine
    budget: int
    """A rank's tokens of a micro-batch."""

    def rows(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Return the sequences that it scores. prompts: of each sequence."""
        key = self.section.key
        return torch.tensor([i for i, p in enumerate(prompts) if key in (None, p.data_source)])

    def batch(self, batch: RaggedBatch, prompts: Sequence[Prompt]) -> RaggedBatch:
        """Return the sequences that it reads in place of those of its rows."""
        given = [p.token_ids if p.teacher_ids is None else p.teacher_ids for p in prompts]
        return batch if self.section.prompt_key is None else with_prompts(batch, given)

    def score(
        self, batch: RaggedBatch, vocab_size: int, temperature: float, k: int
    ) -> tuple[np.ndarray, torch.Tensor]:
        """Return the sequences that this rank scores, in ascending order, and top_log_probs of
        their drawn tokens [tokens, 1 + 2 k] on the host. Each sequence is one rank's.
        vocab_size: of the student. Every rank must call it.

        Vocabularies may be padded to other sizes: a token that the teacher lacks is read as its
        last one, and one that the student lacks has probability 0."""
        engine = self.engine
        common = min(vocab_size, engine.shape.vocab_size)
        batch = replace(batch, tokens=batch.tokens.clamp(max=common - 1))
        micro_batches = my_micro_batches(engine, batch, self.budget)
        share = np.array(sorted(i for indices in micro_batches for i in indices), np.int64)
        own = batch.select(torch.from_numpy(share))
        of_teacher = teacher_head(common, temperature, k)
        is_scored = torch.zeros_like(own.rollout_log_probs, device=platform.device()).bool()

        def head(model: object, states: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            if engine.groups.coordinate.tp == 0 and micro.packed.context.rank == 0:
                is_scored[micro.response_index] = True
            return of_teacher(model, states, micro)

        for indices in micro_batches:  # in place: the list may say how many ranks share it
            indices[:] = np.searchsorted(share, indices).tolist()
        scores = engine.my_scores(own, micro_batches, head, columns=1 + 2 * k)
        firsts = own.response_lens.cumsum(0) - own.response_lens
        return share[is_scored.cpu()[firsts].numpy()], scores.cpu()[is_scored.cpu()]

    def metrics(
        self, scores: torch.Tensor, rollout_log_probs: torch.Tensor, step: int, k: int
    ) -> dict[str, float]:
        """Return the metrics of its tokens. scores: log-prob, and probability of the k most
        probable tokens, [tokens, 2]; rollout_log_probs: [tokens]. Raise UserError if one is not
        finite."""
        if not scores.isfinite().all():
            key = "model_path" if self.section.source is None else "source"
            model = f"{self.role}.{key}: {getattr(self.section, key)}"
            raise UserError(f"{model}: a log-prob is not finite in step {step}")
        name = f"distillation/{self.role.rpartition('.')[2]}"
        kl = kl_estimate(rollout_log_probs, scores[:, 0], "k1").mean()
        metrics = {f"{name}/num_tokens": float(len(scores)), f"{name}/kl": float(kl)}
        if k:
            metrics[f"{name}/top_mass"] = float(scores[:, 1].mean())
        return metrics


def check_taught(prompts: Sequence[Prompt], keys: Collection[str | None]) -> None:
    """Raise UserError for the first prompt whose data source is none of the teachers' keys."""
    for prompt in prompts:
        if prompt.data_source not in keys:
            named = ", ".join(sorted(map(repr, keys)))
            raise UserError(
                f"{prompt.where}: no teacher for the data source {prompt.data_source!r}; those of "
                f"distillation.teacher_models have the keys {named}"
            )
