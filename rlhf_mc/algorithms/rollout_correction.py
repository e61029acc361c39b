"""The correction of a batch that was sampled by another distribution than the trainer's: importance weights, rejection,
and measures of the difference.

The engine that generates computes log-probs with other kernels and roundings than the trainer, and so samples from a
slightly different policy. rho = p_trainer / p_rollout of a sampled token, clamped to e^+-20. All tensors are of the
whole batch: [R] response tokens, sequence after sequence, of response_lens [S].
"""

from __future__ import annotations

import math

import torch

from rlhf_mc.algorithms.kl import LOG_RATIO_BOUND
from rlhf_mc.config.algorithm_schema import RejectionStatistic, RolloutCorrectionConfig


def importance_weights(
    log_ratio: torch.Tensor, response_lens: torch.Tensor, cfg: RolloutCorrectionConfig
) -> torch.Tensor:
    """Return min(rho, rollout_is_threshold) of each token: [R] float32. log_ratio: [R], log rho.

    rho of a token (rollout_is: token) is biased and has a low variance, that of its sequence, the product over its
    tokens (sequence), is unbiased. The bound limits the variance: truncated importance sampling (Ionides 2008; Espeholt
    et al. 2018, arXiv 1802.01561, section 4.1). With rollout_is_batch_normalize the mean is 1, over tokens or over
    sequences.
    """
    if cfg.rollout_is == "sequence":
        per_sequence = _exp(_sums(log_ratio.double(), response_lens)).clamp(max=cfg.rollout_is_threshold)
        mean = per_sequence.mean()
        weights = torch.repeat_interleave(per_sequence, response_lens)
    else:
        weights = _exp(log_ratio.double()).clamp(max=cfg.rollout_is_threshold)
        mean = weights.mean()
    return (weights / mean if cfg.rollout_is_batch_normalize else weights).float()


def kept_tokens(log_ratio: torch.Tensor, response_lens: torch.Tensor, cfg: RolloutCorrectionConfig) -> torch.Tensor:
    """Return the tokens that no criterion rejects: [R] bool.

    A criterion of rollout_rs rejects where its statistic exceeds its threshold: tokens one by one (token_*) or whole
    sequences by the sum, mean or maximum over their tokens (seq_*). The statistic of a token is k1 = log rho,
    k2 = (log rho)^2 / 2 or k3 = rho - 1 - log rho. The threshold x of k1 is meant as 1 / x <= rho <= x, or
    rollout_rs_threshold_lower <= rho <= x. The veto rejects each sequence with a token of rho below
    rollout_token_veto_threshold.
    """
    log_ratio = log_ratio.double()
    kept = torch.ones(len(log_ratio), dtype=torch.bool)
    for name, threshold in zip(cfg.rollout_rs, cfg.rollout_rs_threshold, strict=True):
        statistic = _statistic(name, log_ratio, response_lens)
        if name.endswith("k1"):
            lower = cfg.rollout_rs_threshold_lower or 1 / threshold
            kept &= (statistic >= math.log(lower)) & (statistic <= math.log(threshold))
        else:
            kept &= statistic <= threshold
    if cfg.rollout_token_veto_threshold is not None:
        lowest = _reduced(log_ratio, response_lens, "amin")
        veto = torch.tensor(cfg.rollout_token_veto_threshold, dtype=torch.float64).log()
        kept &= torch.repeat_interleave(lowest >= veto, response_lens)
    return kept


def mismatch_metrics(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, response_lens: torch.Tensor
) -> dict[str, float]:
    """Return measures of the difference between the trainer's log-probs [R] and those of the rollout [R].

    kl: mean over tokens of -log rho; k3_kl: of rho - 1 - log rho. Both estimate KL(rollout, trainer), in nats.
    {training,rollout}_ppl: perplexities exp(-mean log-prob of a sequence), averaged over sequences; log_ppl_diff and
    log_ppl_abs_diff: mean difference of their logarithms, trainer less rollout. chi2_token, chi2_seq: mean of rho^2 - 1
    over tokens and, with the product of rho, over sequences. pearson: correlation of the tokens' probabilities, 1 if
    all of them are the same.
    """
    trainer = log_probs.double()
    rollout = rollout_log_probs.double()
    log_ratio = trainer - rollout
    trainer_log_ppl = -_means(trainer, response_lens)
    rollout_log_ppl = -_means(rollout, response_lens)
    difference = trainer_log_ppl - rollout_log_ppl
    both = torch.stack([trainer.exp(), rollout.exp()])
    constant = bool((both.std(dim=1, correction=0) == 0).any())
    found = {
        "kl": -log_ratio.mean(),
        "k3_kl": _k3(log_ratio).mean(),
        "training_ppl": trainer_log_ppl.exp().mean(),
        "rollout_ppl": rollout_log_ppl.exp().mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "chi2_token": _exp(log_ratio).square().mean() - 1.0,
        "chi2_seq": _exp(_sums(log_ratio, response_lens)).square().mean() - 1.0,
        "pearson": torch.tensor(1.0) if constant else torch.corrcoef(both)[0, 1],
    }
    return {name: float(value) for name, value in found.items()}


def weight_metrics(weights: torch.Tensor) -> dict[str, float]:
    """Return mean, maximum, minimum and effective sample size of importance weights [R]. The last, the share of tokens
    that would have the same variance without weights, is mean(w)^2 / mean(w^2)."""
    wide = weights.double()
    return {
        "rollout_is_mean": float(wide.mean()),
        "rollout_is_max": float(wide.max()),
        "rollout_is_min": float(wide.min()),
        "rollout_is_eff_sample_size": float(wide.mean().square() / wide.square().mean()),
    }


def _statistic(name: RejectionStatistic, log_ratio: torch.Tensor, response_lens: torch.Tensor) -> torch.Tensor:
    """Return the statistic of a criterion, of each token or of each token's sequence: [R]."""
    level, _, kind = name.rpartition("_")
    # The sum and the mean of k1 are those of log rho, in which tokens of opposite signs cancel.
    each = {"k1": log_ratio, "k2": 0.5 * log_ratio.square(), "k3": _k3(log_ratio)}[kind]
    if level == "seq_sum":
        each = torch.repeat_interleave(_sums(each, response_lens), response_lens)
    elif level == "seq_mean":
        each = torch.repeat_interleave(_means(each, response_lens), response_lens)
    elif level == "seq_max":
        each = torch.repeat_interleave(_reduced(each, response_lens, "amax"), response_lens)
    return each


def _exp(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    clamped = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(clamped) - clamped


def _sums(x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(len(lens)).index_add(0, torch.repeat_interleave(lens), x)


def _means(x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    return _sums(x, lens) / lens


def _reduced(x: torch.Tensor, lens: torch.Tensor, how: str) -> torch.Tensor:
    start = x.new_zeros(len(lens))
    return start.scatter_reduce(0, torch.repeat_interleave(lens), x, how, include_self=False)
