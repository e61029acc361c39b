"""The correction of a batch for the difference between vLLM's policy and the trainer's, with its metrics. The
arithmetic is in algorithms/rollout_correction.py.
"""

from __future__ import annotations

from rlhf_mc.algorithms.rollout_correction import importance_weights, kept_tokens, mismatch_metrics
from rlhf_mc.config.algorithm_schema import RolloutCorrectionConfig
from rlhf_mc.data.batch import RaggedBatch


def corrected(batch: RaggedBatch, cfg: RolloutCorrectionConfig) -> tuple[RaggedBatch, dict[str, float]]:
    """Return the batch with importance weights and kept tokens, as far as the settings ask for them, and metrics, which
    there are without any setting too. With bypass_mode there is nothing to compare."""
    if cfg.bypass_mode:
        return batch, {}
    assert batch.old_log_probs is not None
    lens = batch.response_lens
    metrics = mismatch_metrics(batch.old_log_probs, batch.rollout_log_probs, lens)
    log_ratio = batch.old_log_probs - batch.rollout_log_probs
    if cfg.rollout_is is not None:
        weights, found = importance_weights(log_ratio, lens, cfg)
        metrics |= found
        batch = batch.with_fields(is_weights=weights)
    if cfg.rollout_rs or cfg.rollout_token_veto_threshold is not None:
        kept, found = kept_tokens(log_ratio, lens, cfg)
        metrics |= found
        batch = batch.with_fields(kept=kept)
    return batch, {f"rollout_corr/{name}": value for name, value in metrics.items()}
