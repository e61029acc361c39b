"""The correction of a batch that was sampled by another distribution than the trainer's: importance
weights, rejection, and measures of the difference.

The engine that generates computes log-probs with other kernels and roundings than the trainer, and
so samples from a slightly different policy. rho = p_trainer / p_rollout of a sampled token, clamped
to e^+-20. All tensors are of the whole batch, which every rank has: [R] response tokens, sequence
after sequence, of response_lens [S]. Metrics have verl's names and formulas, without
"rollout_corr/".
"""

from __future__ import annotations

import math

import torch

from rlhf_mc.algorithms.kl import LOG_RATIO_BOUND
from rlhf_mc.config.algorithm_schema import RejectionStatistic, RolloutCorrectionConfig

SMALLEST_MEAN = 1e-8
"""Weights of a smaller mean are not divided by it; verl's constant. At the bound e^-20 a weight
says nothing."""


def importance_weights(
    log_ratio: torch.Tensor, response_lens: torch.Tensor, cfg: RolloutCorrectionConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return min(rho, rollout_is_threshold) of each token: [R] float32, and metrics. log_ratio:
    [R], log rho.

    rho of a token (rollout_is: token) is biased and has a low variance. rho of its sequence
    (sequence), the product over its tokens, is unbiased. The bound limits the variance: truncated
    importance sampling (Ionides 2008; Espeholt et al. 2018, arXiv 1802.01561, section 4.1). With
    rollout_is_batch_normalize the mean is 1, over tokens or over sequences, unless it is below
    1e-8.
    """
    of_sequence = cfg.rollout_is == "sequence"
    log_rho = log_ratio.double()
    if of_sequence:
        log_rho = torch.segment_reduce(log_rho, "sum", lengths=response_lens)
    rho = _exp(log_rho)
    bounded = rho.clamp(max=cfg.rollout_is_threshold)
    weights = torch.repeat_interleave(bounded, response_lens) if of_sequence else bounded
    metrics = _weight_metrics(rho, bounded, weights, response_lens, cfg)
    if cfg.rollout_is_batch_normalize:
        mean = float(bounded.mean())
        factor = mean if mean > SMALLEST_MEAN else 1.0
        metrics["rollout_is_batch_norm_factor"] = factor
        weights = weights / factor
    return weights.float(), metrics


def weights_of_micro_batch(
    log_ratio: torch.Tensor,
    sequence: torch.Tensor,
    num_sequences: int,
    cfg: RolloutCorrectionConfig,
    is_geometric: bool,
) -> torch.Tensor:
    """Return the weights of `importance_weights` without rollout_is_batch_normalize, for tokens [r]
    of whole sequences: [r] float32. sequence: [r] int64, number of each token's sequence of
    num_sequences. is_geometric: their `geometric_means`. No device waits for the host."""

    def sums(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(num_sequences).index_add(0, sequence, x)[sequence]

    log_rho = log_ratio.double()
    log_rho = sums(log_rho) if cfg.rollout_is == "sequence" else log_rho
    weights = _exp(log_rho).clamp(max=cfg.rollout_is_threshold).float()
    if is_geometric:
        logs = weights.double().log()
        weights = (sums(logs) / sums(torch.ones_like(logs))).exp().float()
    return weights


def _weight_metrics(
    rho: torch.Tensor,
    bounded: torch.Tensor,
    weights: torch.Tensor,
    response_lens: torch.Tensor,
    cfg: RolloutCorrectionConfig,
) -> dict[str, float]:
    """Return metrics of importance weights before they are divided by their mean.

    rho and bounded, rho with its upper bound: [R], or [S] with rollout_is: sequence. weights: the
    latter of each token, [R]. mean, std and eff_sample_size, which is mean(w)^2 / mean(w^2), are
    over tokens. max and min of a sequence's rho are those before the bound. ..._fraction_{high,low}
    are the shares of rho, and of its mean in a sequence, above the threshold and below its
    reciprocal.
    """
    of_sequence = cfg.rollout_is == "sequence"
    extremes = rho if of_sequence else bounded
    seq_rho, seq = (
        x if of_sequence else torch.segment_reduce(x, "mean", lengths=response_lens)
        for x in (rho, bounded)
    )
    high = cfg.rollout_is_threshold
    low = 1 / high
    metrics = {
        "mean": weights.mean(),
        "max": extremes.max(),
        "min": extremes.min(),
        "std": weights.std(correction=0),
        "eff_sample_size": weights.mean().square() / weights.square().mean(),
        "ratio_fraction_high": (rho > high).double().mean(),
        "ratio_fraction_low": (rho < low).double().mean(),
        "seq_mean": seq.mean(),
        "seq_std": seq.std() if len(seq) > 1 else 0.0,
        "seq_max": seq.max(),
        "seq_min": seq.min(),
        "seq_max_deviation": (seq - 1.0).abs().max(),
        "seq_fraction_high": (seq_rho > high).double().mean(),
        "seq_fraction_low": (seq_rho < low).double().mean(),
    }
    return {f"rollout_is_{name}": float(value) for name, value in metrics.items()}


def geometric_means(weights: torch.Tensor, response_lens: torch.Tensor) -> torch.Tensor:
    """Return the geometric mean of the weights [R] over each token's sequence: [R] float32."""
    means = torch.segment_reduce(weights.double().log(), "mean", lengths=response_lens).exp()
    return torch.repeat_interleave(means, response_lens).float()


def accepted_tokens(
    log_ratio: torch.Tensor, response_lens: torch.Tensor, cfg: RolloutCorrectionConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the tokens that no criterion rejects: [R] bool, and metrics of each statistic, and the
    shares of tokens, and of sequences with such, that it rejects, and that all criteria reject.

    A criterion of rollout_rs rejects where its statistic exceeds its threshold: tokens one by one
    (token_*) or whole sequences by the sum, mean or maximum over their tokens (seq_*). The
    statistic of a token is k1 = -log rho, k2 = (log rho)^2 / 2 or k3 = rho - 1 - log rho, with log
    rho clamped to +-20. The threshold x of k1 is meant as 1 / x <= rho <= x, or
    rollout_rs_threshold_lower <= rho <= x. The veto rejects each sequence with a token of rho below
    rollout_token_veto_threshold."""
    log_ratio = log_ratio.double()
    accepted = torch.ones(len(log_ratio), dtype=torch.bool)
    metrics: dict[str, float] = {}
    for name, threshold in zip(cfg.rollout_rs, cfg.rollout_rs_threshold, strict=True):
        statistic, of_sequences = _statistic(name, log_ratio, response_lens)
        low = -math.inf
        high = threshold
        if name.endswith("k1"):
            low = -math.log(threshold)
            high = -math.log(cfg.rollout_rs_threshold_lower or 1 / threshold)
        passed = (statistic >= low) & (statistic <= high)
        accepted &= passed
        prefix = f"rollout_rs_{name}"
        judged = statistic if name.startswith("token") else of_sequences
        metrics |= _statistic_metrics(prefix, statistic, of_sequences, judged, (low, high))
        metrics |= _masked_fractions(prefix, passed, response_lens)
    if cfg.rollout_token_veto_threshold is not None:
        lowest = torch.segment_reduce(log_ratio, "min", lengths=response_lens)
        veto = torch.tensor(cfg.rollout_token_veto_threshold, dtype=torch.float64).log()
        accepted &= torch.repeat_interleave(lowest >= veto, response_lens)
    return accepted, metrics | _masked_fractions("rollout_rs", accepted, response_lens)


def _masked_fractions(
    prefix: str, accepted: torch.Tensor, response_lens: torch.Tensor
) -> dict[str, float]:
    """Return the shares of tokens that are rejected, and of sequences with such a token."""
    masked = (~accepted).double()
    in_sequences = torch.segment_reduce(masked, "max", lengths=response_lens)
    return {
        f"{prefix}_masked_fraction": float(masked.mean()),
        f"{prefix}_seq_masked_fraction": float(in_sequences.mean()),
    }


def mismatch_metrics(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, response_lens: torch.Tensor
) -> dict[str, float]:
    """Return measures of the difference between the log-probs of the trainer [R] and of the rollout
    [R].

    kl: mean over tokens of -log rho; k3_kl: of rho - 1 - log rho. Both estimate KL(rollout,
    trainer), in nats. {training,rollout}_log_ppl: -mean log-prob of a sequence, averaged over
    sequences; _ppl: of its exponential, the perplexity. log_ppl_diff: the difference of the former,
    trainer less rollout; ppl_ratio: the ratio of the latter. chi2_token, chi2_seq: mean of rho^2 -
    1 over tokens and, with the product of rho, over sequences.
    """
    trainer = log_probs.double()
    rollout = rollout_log_probs.double()
    log_ratio = trainer - rollout
    log_ppl = -torch.segment_reduce(trainer, "mean", lengths=response_lens)
    rollout_log_ppl = -torch.segment_reduce(rollout, "mean", lengths=response_lens)
    difference = log_ppl - rollout_log_ppl
    metrics = {
        "kl": -log_ratio.mean(),
        "k3_kl": _k3(log_ratio).mean(),
        "training_ppl": log_ppl.exp().mean(),
        "training_log_ppl": log_ppl.mean(),
        "rollout_ppl": rollout_log_ppl.exp().mean(),
        "rollout_log_ppl": rollout_log_ppl.mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": _exp(log_ratio).square().mean() - 1.0,
        "chi2_seq": _exp(torch.segment_reduce(log_ratio, "sum", lengths=response_lens))
        .square()
        .mean()
        - 1.0,
    }
    return {name: float(value) for name, value in metrics.items()}


def _statistic(
    name: RejectionStatistic, log_ratio: torch.Tensor, response_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the statistic of a criterion, of each token or of each token's sequence: [R]; and of
    sequences: [S], for token_* their means."""
    level, _, kind = name.rpartition("_")
    clamped = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # In the sum and the mean of k1, which is -log rho, tokens of opposite signs cancel.
    per_token = {"k1": -clamped, "k2": 0.5 * clamped.square(), "k3": _k3(clamped)}[kind]
    if level == "token":
        return per_token, torch.segment_reduce(per_token, "mean", lengths=response_lens)
    reduced = torch.segment_reduce(per_token, level.removeprefix("seq_"), lengths=response_lens)
    return torch.repeat_interleave(reduced, response_lens), reduced


def _statistic_metrics(
    prefix: str,
    statistic: torch.Tensor,
    of_sequences: torch.Tensor,
    judged: torch.Tensor,
    bounds: tuple[float, float],
) -> dict[str, float]:
    """Return metrics of a criterion's statistic of tokens [R] and of sequences [S]. judged: the one
    of both that is compared with the bounds. std is of the statistic clamped to them."""
    low, high = bounds
    metrics = {
        "mean": statistic.mean(),
        "max": statistic.max(),
        "min": statistic.min(),
        "std": statistic.clamp(low, high).std(correction=0),
        "fraction_high": (judged > high).double().mean(),
        "fraction_low": (judged < low).double().mean(),
        "seq_mean": of_sequences.mean(),
        "seq_std": of_sequences.std() if len(of_sequences) > 1 else 0.0,
        "seq_max": of_sequences.max(),
        "seq_min": of_sequences.min(),
        "seq_max_deviation": of_sequences.abs().max(),
        "seq_fraction_high": (of_sequences > high).double().mean(),
        "seq_fraction_low": (of_sequences < low).double().mean(),
    }
    return {f"{prefix}_{name}": float(value) for name, value in metrics.items()}


def _exp(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    clamped = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(clamped) - clamped
