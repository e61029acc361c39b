"""Teachers of distillation: frozen models that give log-probs of the tokens that the actor has
drawn, and of their own most probable tokens. The loss is in algorithms/distillation.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

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
    ) -> torch.Tensor:
        """Return this rank's part of top_log_probs of the drawn tokens, 0 elsewhere: [R, 1 + 2 k]
        on the device. vocab_size: of the student. Every rank must call it.

        Vocabularies may be padded to other sizes: a token that the teacher lacks is read as its
        last one, and one that the student lacks has probability 0."""
        common = min(vocab_size, self.engine.shape.vocab_size)
        batch = replace(batch, tokens=batch.tokens.clamp(max=common - 1)).contexts()
        micro_batches = my_micro_batches(self.engine, batch, self.budget)
        head = teacher_head(common, temperature, k)
        return self.engine.my_scores(batch, micro_batches, head, columns=1 + 2 * k)

    def metrics(
        self, scores: torch.Tensor, rollout_log_probs: torch.Tensor, step: int
    ) -> dict[str, float]:
        """Return the metrics of its tokens. scores: of top_log_probs, [tokens, 1 + 2 k];
        rollout_log_probs: [tokens]. Raise UserError if a log-prob is not finite."""
        if not scores.isfinite().all():
            name = "model_path" if self.section.source is None else "source"
            model = f"{self.role}.{name}: {getattr(self.section, name)}"
            raise UserError(f"{model}: a log-prob is not finite in step {step}")
        name = f"distillation/{self.role.rpartition('.')[2]}"
        kl = kl_estimate(rollout_log_probs, scores[:, 0], "k1").mean()
        metrics = {f"{name}/num_tokens": float(len(scores)), f"{name}/kl": float(kl)}
        if k := scores.shape[1] // 2:
            metrics[f"{name}/top_mass"] = float(scores[:, 1 + k :].exp().sum(1).mean())
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


def teacher_top(
    batch: RaggedBatch, micro: MicroBatch
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Return the teacher's most probable tokens [r, k] int64 at the positions of a micro-batch that
    this rank has, and their log-probs [r, k], on the device; None twice without forward_kl_topk. At
    those of observations, of which it has scored none, any k tokens. The host does not wait for the
    copy."""
    if batch.teacher_top is None:
        return None, None
    rows = batch.teacher_top.index_select(0, torch.from_numpy(micro.own_rows))
    k = rows.shape[1] // 2
    of_observed = torch.cat([torch.arange(k), torch.full((k,), -20.0)])
    num_observed = len(micro.targets) - len(rows)
    rows = torch.cat([rows, of_observed.expand(num_observed, 2 * k)])
    tokens, log_probs = platform.to_device([rows])[0].chunk(2, 1)
    return tokens.long(), log_probs
