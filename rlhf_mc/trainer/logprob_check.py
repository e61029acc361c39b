"""The check that the rollout engine and the trainer compute the same model: after each rollout
their log-probs of the sampled tokens are compared. A trainer that disagrees with the engine would
learn from samples of another distribution.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.health.conditions import TAIL

logger = logging.getLogger(__name__)

DEFAULT_BOUND = {"float32": 1e-3, "bfloat16": 0.1, "fp8": 0.3}
"""Default of trainer.max_rollout_logprob_diff by the type in which the less exact engine
multiplies.

On a CPU, models of 4 to 24 layers with random weights and 10,000 tokens each had means of 6e-7 in
float32 and of 0.006 to 0.04 in bfloat16 (99th percentiles to 0.14, largest differences to 0.54).
Wrong rotary angles, a layer without attention and a head of zeros had means of 0.4 to 0.8 in
bfloat16, and 99th percentiles of 1.6 to 2.5. With vLLM in fp8 models of 4 to 24 layers had means of
0.09 to 0.15 where bfloat16 had 0.010 to 0.017."""
WORST = 3
"""Number of tokens that a message names."""


@dataclass(frozen=True)
class Difference:
    """Statistics of |trainer's log-prob - engine's| over a batch's response tokens."""

    mean: float
    p99: float
    """The 99th percentile: the k-th smallest difference, k = 0.99 x the number of tokens, rounded
    down, at least 1."""
    max: float

    @classmethod
    def from_batch(cls, batch: RaggedBatch) -> Difference | None:
        """Return the statistics of the tokens sampled with the trained weights; None: all tokens
        are of older weights. They are NaN if a log-prob is NaN."""
        differences = token_differences(batch)
        if batch.token_ages is not None:
            differences = differences[batch.token_ages == 0]
        if not len(differences):
            return None
        p99 = differences.kthvalue(max(1, int(0.99 * len(differences)))).values
        return cls(float(differences.mean()), float(p99), float(differences.max()))


def token_differences(batch: RaggedBatch) -> torch.Tensor:
    """Return |trainer's log-prob - engine's| of each response token: [R] float64."""
    assert batch.old_log_probs is not None
    return (batch.old_log_probs.double() - batch.rollout_log_probs.double()).abs()


@dataclass
class LogProbCheck:
    """The check of each rollout of a run. Every rank has the whole batch, so all ranks raise
    together."""

    bound: float
    """Bound of the mean, at temperature 1."""
    temperature: float
    """Both engines divide the logits, and so the differences, by it."""
    dtype: str
    """A key of DEFAULT_BOUND, for messages."""
    token_text: Callable[[int], str]
    is_first: bool = True
    """No token of the trained weights has been compared since the process started."""
    has_warned: bool = False

    @property
    def mean_bound(self) -> float:
        """The bound of the mean at the run's temperature."""
        return self.bound / self.temperature

    def check(self, batch: RaggedBatch, step: int) -> None:
        """Raise UserError if the difference exceeds the bounds in the first rollout with a token of
        the trained weights. Of later ones the first that does is a warning with its worst tokens;
        the health rule rollout_mismatch counts them."""
        gap = Difference.from_batch(batch)
        problem = self._not_finite(batch) or (None if gap is None else self._exceeded(batch, gap))
        if problem is not None and self.is_first:
            raise UserError(
                f"step {step}: {problem}; check that config.json means the same to vLLM and to "
                "Megatron-Core (rope scaling, a tied or untied lm_head), and that the weights "
                "arrive (reshard.verify=always)"
            )
        self.is_first = self.is_first and gap is None
        if problem is not None and not self.has_warned:
            self.has_warned = True
            logger.warning("warning: step %d: %s", step, problem)

    def _not_finite(self, batch: RaggedBatch) -> str | None:
        """Return a description of log-probs that are not finite; None if all are."""
        assert batch.old_log_probs is not None
        engines = {
            "Megatron-Core (trainer)": batch.old_log_probs,
            "vLLM (rollout)": batch.rollout_log_probs,
        }
        for engine, log_probs in engines.items():
            broken = ~log_probs.isfinite()
            if broken.any():
                return (
                    f"{int(broken.sum())} of {len(broken)} log-probs of {engine} are not finite; "
                    f"the first: {self._token(batch, int(broken.nonzero()[0]))}"
                )
        return None

    def _exceeded(self, batch: RaggedBatch, gap: Difference) -> str | None:
        """Return a description of a difference above the bounds; None if it is within them."""
        mean = self.mean_bound
        tail = TAIL * mean
        if gap.mean <= mean and gap.p99 <= tail:
            return None
        differences = token_differences(batch)
        num_compared = len(differences)
        if batch.token_ages is not None:
            num_compared = int((batch.token_ages == 0).sum())
            differences = differences.where(batch.token_ages == 0, 0.0)
        worst = "; ".join(
            self._token(batch, i)
            for i in differences.topk(min(WORST, num_compared)).indices.tolist()
        )
        return (
            "the log-probs of the engine (rollout) and of the trainer differ by "
            f"{gap.mean:.3g} on average and by {gap.p99:.3g} at the 99th percentile of "
            f"{num_compared} tokens, where trainer.max_rollout_logprob_diff allows {mean:.3g} and "
            f"{tail:.3g} ({self.dtype}, temperature {self.temperature:g}); the worst: {worst}"
        )

    def _token(self, batch: RaggedBatch, index: int) -> str:
        """Return a description of the index-th sampled token: its position, its text and both
        log-probs."""
        assert batch.old_log_probs is not None
        ends = batch.response_lens.cumsum(0)
        row = int(torch.searchsorted(ends, index, right=True))
        position = index - int(ends[row] - batch.response_lens[row])
        token = int(batch.drawn_tokens[index])
        sampled = float(batch.rollout_log_probs[index])
        scored = float(batch.old_log_probs[index])
        where = f"response {row}, position {position}, token {token} {self.token_text(token)!r}"
        return f"{where}: {sampled:.4g} by the engine, {scored:.4g} by the trainer"
