"""rollout_correction.py by hand and against plain Python, the weights of accepted tokens, and the
settings."""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from config_files import validated

from rlhf_mc.algorithms.losses import aggregation_weights
from rlhf_mc.algorithms.rollout_correction import (
    accepted_tokens,
    geometric_means,
    importance_weights,
    mismatch_metrics,
)
from rlhf_mc.config.algorithm_schema import RolloutCorrectionConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import Generation, Prompt, Responses, build_batch
from rlhf_mc.trainer.advantages import corrected

LENS = torch.tensor([2, 1, 3])
RHO = [2.0, 0.5, 3.0, 1.0, 0.5, 0.25]
LOG_RATIO = torch.tensor(RHO).log()


def weights_of(
    log_ratio: torch.Tensor, lens: torch.Tensor, level: str, **settings: Any
) -> tuple[list[float], dict]:
    cfg = RolloutCorrectionConfig(rollout_is=level, **{"rollout_is_threshold": 2.5, **settings})
    weights, metrics = importance_weights(log_ratio, lens, cfg)
    return weights.tolist(), {
        key.removeprefix("rollout_is_"): value for key, value in metrics.items()
    }


def test_importance_weights_by_hand() -> None:
    assert weights_of(LOG_RATIO, LENS, "token")[0] == pytest.approx([2.0, 0.5, 2.5, 1.0, 0.5, 0.25])
    products = [1.0, 1.0, 2.5, 0.125, 0.125, 0.125]  # of 1, 3, 1/8
    assert weights_of(LOG_RATIO, LENS, "sequence")[0] == pytest.approx(products)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalized_weights_have_a_mean_of_1(level: str) -> None:
    found, metrics = weights_of(LOG_RATIO, LENS, level, rollout_is_batch_normalize=True)
    plain, plain_metrics = weights_of(LOG_RATIO, LENS, level)
    rows = range(6) if level == "token" else [1, 2, 5]  # one of each sequence
    assert statistics.mean(found[i] for i in rows) == pytest.approx(1.0)
    factor = metrics.pop("batch_norm_factor")
    assert found == pytest.approx([weight / factor for weight in plain])
    assert metrics == plain_metrics  # of the weights before they are divided


def test_weights_that_say_nothing_are_not_divided_by_their_mean() -> None:
    """Give every weight the bound e^-20: a division would make them 1, as if both policies
    agreed."""
    found, metrics = weights_of(
        torch.full((6,), -40.0), LENS, "token", rollout_is_batch_normalize=True
    )
    assert found == pytest.approx([math.exp(-20)] * 6)
    assert metrics["batch_norm_factor"] == 1.0


def test_weights_stay_finite_at_extreme_ratios() -> None:
    lens = torch.tensor([2, 1])
    found, _ = weights_of(
        torch.tensor([500.0, 500.0, -500.0]), lens, "sequence", rollout_is_threshold=1e5
    )
    assert found == pytest.approx([1e5, 1e5, math.exp(-20)])


def test_metrics_of_weights_by_hand() -> None:
    _, found = weights_of(LOG_RATIO, LENS, "token")  # 2, 1/2; 2.5 (of 3); 1, 1/2, 1/4
    squares = 4 + 0.25 + 6.25 + 1 + 0.25 + 0.0625
    means = [1.25, 2.5, 1.75 / 3]
    assert found == pytest.approx(
        {
            "mean": 6.75 / 6,
            "max": 2.5,
            "min": 0.25,
            "std": math.sqrt(squares / 6 - (6.75 / 6) ** 2),
            "eff_sample_size": (6.75 / 6) ** 2 / (squares / 6),
            "ratio_fraction_high": 1 / 6,
            "ratio_fraction_low": 1 / 6,  # below 1 / 2.5
            "seq_mean": statistics.mean(means),
            "seq_std": statistics.stdev(means),
            "seq_max": 2.5,
            "seq_min": 1.75 / 3,
            "seq_max_deviation": 1.5,
            "seq_fraction_high": 1 / 3,  # a mean of 3 before the bound
            "seq_fraction_low": 0.0,
        }
    )
    # 1, 2.5 (of 3) and 1/8, of 2, 1 and 3 tokens
    _, found = weights_of(LOG_RATIO, LENS, "sequence")
    squares = 2 * 1 + 6.25 + 3 / 64
    means = [1.0, 2.5, 0.125]
    assert found == pytest.approx(
        {
            "mean": 4.875 / 6,
            "max": 3.0,  # before the bound
            "min": 0.125,
            "std": math.sqrt(squares / 6 - (4.875 / 6) ** 2),
            "eff_sample_size": (4.875 / 6) ** 2 / (squares / 6),
            "ratio_fraction_high": 1 / 3,
            "ratio_fraction_low": 1 / 3,
            "seq_mean": statistics.mean(means),
            "seq_std": statistics.stdev(means),
            "seq_max": 2.5,
            "seq_min": 0.125,
            "seq_max_deviation": 1.5,
            "seq_fraction_high": 1 / 3,
            "seq_fraction_low": 1 / 3,
        }
    )
    _, found = weights_of(LOG_RATIO[:2], torch.tensor([2]), "token")
    assert found["seq_std"] == 0.0  # of one sequence


def test_geometric_means_by_hand() -> None:
    expected = [1.0, 1.0, 3.0, 0.5, 0.5, 0.5]
    assert geometric_means(torch.tensor(RHO), LENS).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "threshold", "accepted"),
    [
        ("token_k1", 2.1, [1, 1, 0, 1, 1, 0]),  # 1/2.1 to 2.1
        ("token_k2", 0.3, [1, 1, 0, 1, 1, 0]),  # ln(2)^2 / 2 = 0.24
        ("token_k3", 0.25, [0, 1, 0, 1, 1, 0]),  # 2: 0.307, 1/2: 0.193, 3: 0.90, 1/4: 0.64
        ("seq_sum_k1", 2.0, [1, 1, 0, 0, 0, 0]),  # products 1, 3, 1/8
        ("seq_sum_k2", 0.6, [1, 1, 0, 0, 0, 0]),  # 0.48, 0.60, 1.20
        ("seq_sum_k3", 0.6, [1, 1, 0, 0, 0, 0]),  # 0.5, 0.90, 0.83
        ("seq_mean_k1", 2.5, [1, 1, 0, 1, 1, 1]),  # geometric means 1, 3, 1/2
        ("seq_mean_k2", 0.3, [1, 1, 0, 0, 0, 0]),  # 0.24, 0.60, 0.40
        ("seq_mean_k3", 0.3, [1, 1, 0, 1, 1, 1]),  # 0.25, 0.90, 0.28
        ("seq_max_k2", 0.8, [1, 1, 1, 0, 0, 0]),  # 0.24, 0.60, 0.96
        ("seq_max_k3", 0.7, [1, 1, 0, 1, 1, 1]),  # 0.31, 0.90, 0.64
    ],
)
def test_rejection_by_hand(name: str, threshold: float, accepted: list[int]) -> None:
    cfg = RolloutCorrectionConfig(rollout_rs=[name], rollout_rs_threshold=[threshold])
    assert accepted_tokens(LOG_RATIO.double(), LENS, cfg)[0].int().tolist() == accepted


@pytest.mark.parametrize(
    ("name", "lower", "upper", "accepted"),
    [
        ("token_k1", 0.4, 3.5, [1, 1, 1, 1, 1, 0]),  # 2, 1/2; 3; 1, 1/2, 1/4
        ("token_k1", 0.6, 2.5, [1, 0, 0, 1, 0, 0]),
        ("seq_sum_k1", 0.1, 2.5, [1, 1, 0, 1, 1, 1]),  # products 1, 3, 1/8
        ("seq_mean_k1", 0.6, 3.5, [1, 1, 1, 0, 0, 0]),  # geometric means 1, 3, 1/2
    ],
)
def test_bounds_of_a_ratio_may_differ(
    name: str, lower: float, upper: float, accepted: list[int]
) -> None:
    cfg = RolloutCorrectionConfig(
        rollout_rs=[name], rollout_rs_threshold=[upper], rollout_rs_threshold_lower=lower
    )
    assert accepted_tokens(LOG_RATIO.double(), LENS, cfg)[0].int().tolist() == accepted


def test_statistics_are_clamped() -> None:
    """Check the sum of a token at the bound and one that outweighs its excess, and the largest
    k2."""
    log_ratio = torch.tensor([-25.0, 20.5, 30.0])
    lens = torch.tensor([2, 1])
    cfg = RolloutCorrectionConfig(
        rollout_rs=["seq_sum_k1", "token_k2"], rollout_rs_threshold=[1.2, 201.0]
    )
    accepted, found = accepted_tokens(log_ratio, lens, cfg)
    assert accepted.tolist() == [True, True, False]
    assert found["rollout_rs_seq_sum_k1_max"] == 0.0 and found["rollout_rs_token_k2_max"] == 200.0


def test_every_criterion_must_keep_a_token() -> None:
    cfg = RolloutCorrectionConfig(
        rollout_rs=["token_k1", "seq_sum_k1"], rollout_rs_threshold=[3.5, 2.0]
    )
    assert accepted_tokens(LOG_RATIO, LENS, cfg)[0].int().tolist() == [1, 1, 0, 0, 0, 0]
    veto = RolloutCorrectionConfig(rollout_token_veto_threshold=0.4)
    assert accepted_tokens(LOG_RATIO, LENS, veto)[0].int().tolist() == [1, 1, 1, 0, 0, 0]


def test_metrics_of_rejection_by_hand() -> None:
    cfg = RolloutCorrectionConfig(
        rollout_rs=["token_k1", "seq_mean_k3"], rollout_rs_threshold=[2.5, 0.3]
    )
    _, found = accepted_tokens(LOG_RATIO, LENS, cfg)
    # k1 is -log rho; of rho 3 and 1/4 it is outside. k3 is 0.31, 0.19; 0.90; 0, 0.19, 0.64.
    means = [0.0, -math.log(3), math.log(2)]
    k3 = [
        (1 - math.log(2) + math.log(2) - 0.5) / 2,
        2 - math.log(3),
        (math.log(2) - 0.5 + math.log(4) - 0.75) / 3,
    ]
    assert found == pytest.approx(
        {
            "rollout_rs_token_k1_mean": -math.log(2 * 0.5 * 3 * 0.5 * 0.25) / 6,
            "rollout_rs_token_k1_max": math.log(4),
            "rollout_rs_token_k1_min": -math.log(3),
            "rollout_rs_token_k1_std": statistics.pstdev(
                [-math.log(r) for r in (2, 0.5, 2.5, 1, 0.5, 0.4)]
            ),
            "rollout_rs_token_k1_fraction_high": 1 / 6,
            "rollout_rs_token_k1_fraction_low": 1 / 6,
            "rollout_rs_token_k1_seq_mean": statistics.mean(means),
            "rollout_rs_token_k1_seq_std": statistics.stdev(means),
            "rollout_rs_token_k1_seq_max": math.log(2),
            "rollout_rs_token_k1_seq_min": -math.log(3),
            "rollout_rs_token_k1_seq_max_deviation": math.log(3),
            "rollout_rs_token_k1_seq_fraction_high": 0.0,
            "rollout_rs_token_k1_seq_fraction_low": 1 / 3,
            "rollout_rs_token_k1_masked_fraction": 2 / 6,
            "rollout_rs_token_k1_seq_masked_fraction": 2 / 3,
            "rollout_rs_seq_mean_k3_mean": (2 * k3[0] + k3[1] + 3 * k3[2]) / 6,
            "rollout_rs_seq_mean_k3_max": k3[1],
            "rollout_rs_seq_mean_k3_min": k3[0],
            "rollout_rs_seq_mean_k3_std": statistics.pstdev(
                [k3[0], k3[0], 0.3, k3[2], k3[2], k3[2]]
            ),
            "rollout_rs_seq_mean_k3_fraction_high": 1 / 3,  # of sequences
            "rollout_rs_seq_mean_k3_fraction_low": 0.0,
            "rollout_rs_seq_mean_k3_seq_mean": statistics.mean(k3),
            "rollout_rs_seq_mean_k3_seq_std": statistics.stdev(k3),
            "rollout_rs_seq_mean_k3_seq_max": k3[1],
            "rollout_rs_seq_mean_k3_seq_min": k3[0],
            "rollout_rs_seq_mean_k3_seq_max_deviation": k3[1],
            "rollout_rs_seq_mean_k3_seq_fraction_high": 1 / 3,
            "rollout_rs_seq_mean_k3_seq_fraction_low": 0.0,
            "rollout_rs_seq_mean_k3_masked_fraction": 1 / 6,
            "rollout_rs_seq_mean_k3_seq_masked_fraction": 1 / 3,
            "rollout_rs_masked_fraction": 2 / 6,
            "rollout_rs_seq_masked_fraction": 2 / 3,
        }
    )
    _, found = accepted_tokens(
        LOG_RATIO, LENS, RolloutCorrectionConfig(rollout_token_veto_threshold=0.4)
    )
    assert found == pytest.approx(
        {"rollout_rs_masked_fraction": 0.5, "rollout_rs_seq_masked_fraction": 1 / 3}
    )


def test_mismatch_metrics_match_plain_python() -> None:
    g = torch.Generator().manual_seed(0)
    rollout = -torch.rand(6, generator=g)
    trainer = rollout + 0.3 * torch.randn(6, generator=g)
    found = mismatch_metrics(trainer, rollout, LENS)
    a = trainer.tolist()
    b = rollout.tolist()
    ratio = [x - y for x, y in zip(a, b, strict=True)]
    sequences = [(0, 2), (2, 3), (3, 6)]
    log_ppl = [[-statistics.mean(x[i:j]) for i, j in sequences] for x in (a, b)]
    gaps = [x - y for x, y in zip(*log_ppl, strict=True)]
    expected = {
        "kl": -statistics.mean(ratio),
        "k3_kl": statistics.mean(math.exp(x) - 1 - x for x in ratio),
        "training_ppl": statistics.mean(map(math.exp, log_ppl[0])),
        "rollout_ppl": statistics.mean(map(math.exp, log_ppl[1])),
        "training_log_ppl": statistics.mean(log_ppl[0]),
        "rollout_log_ppl": statistics.mean(log_ppl[1]),
        "log_ppl_diff": statistics.mean(gaps),
        "log_ppl_abs_diff": statistics.mean(map(abs, gaps)),
        "log_ppl_diff_max": max(gaps),
        "log_ppl_diff_min": min(gaps),
        "ppl_ratio": statistics.mean(map(math.exp, gaps)),
        "chi2_token": statistics.mean(math.exp(2 * x) for x in ratio) - 1,
        "chi2_seq": statistics.mean(math.exp(2 * sum(ratio[i:j])) for i, j in sequences) - 1,
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_equal_log_probs_differ_in_nothing() -> None:
    same = torch.full((6,), -0.7)
    found = mismatch_metrics(same, same, LENS)
    ones = {"training_ppl": math.exp(0.7), "rollout_ppl": math.exp(0.7), "ppl_ratio": 1.0}
    logs = {"training_log_ppl": 0.7, "rollout_log_ppl": 0.7}
    assert found == pytest.approx({**dict.fromkeys(found, 0.0), **ones, **logs})


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_weights_of_accepted_tokens_are_those_of_a_batch_without_the_others(mode: str) -> None:
    # sequences of 1, 0 and 2 accepted tokens
    accepted = torch.tensor([True, False, False, True, False, True])
    weights = aggregation_weights(LENS, mode, 8, accepted)
    assert torch.equal(weights[~accepted], torch.zeros(3))
    assert torch.equal(weights[accepted], aggregation_weights(torch.tensor([1, 2]), mode, 8))
    assert torch.equal(
        aggregation_weights(LENS, mode, 8, torch.zeros(6, dtype=torch.bool)), torch.zeros(6)
    )
    everything = torch.ones(6, dtype=torch.bool)
    assert torch.equal(
        aggregation_weights(LENS, mode, 8, everything), aggregation_weights(LENS, mode, 8)
    )


SECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"{SECTION}.rollout_rs=[token_k1]",), "rollout_rs has 1 statistics and"),
        (
            (f"{SECTION}.rollout_rs=[token_k1]", f"{SECTION}.rollout_rs_threshold=[0.5]"),
            "rollout_rs_threshold of token_k1 is 0.5; it bounds a ratio and must be above 1",
        ),
        (
            (f"{SECTION}.rollout_rs_threshold_lower=0.5",),
            "rollout_rs_threshold_lower is 0.5, a bound of the ..._k1 statistics",
        ),
        (
            (f"{SECTION}.bypass_mode=true", f"{SECTION}.rollout_is=token"),
            "bypass_mode is true and algorithm.rollout_correction.rollout_is set",
        ),
        ((f"{SECTION}.rollout_is_threshold=0",), "rollout_is_threshold is 0.0; it must be above 0"),
    ],
)
def test_contradictions_are_refused(
    config_file: Path, overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        validated(config_file, *overrides)


def test_icepop_is_a_weight_and_a_rejection_with_two_bounds() -> None:
    """Compare with M(rho) of arXiv 2510.18855: rho within the bounds, else 0."""
    log_ratio = torch.tensor([0.4, 0.51, 1.0, 4.9, 5.1, 30.0]).log()
    weights, _ = importance_weights(
        log_ratio, LENS, RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=5.0)
    )
    cfg = RolloutCorrectionConfig(
        rollout_rs=["token_k1"], rollout_rs_threshold=[5.0], rollout_rs_threshold_lower=0.5
    )
    accepted, _ = accepted_tokens(log_ratio, LENS, cfg)
    assert (weights * accepted).tolist() == pytest.approx([0, 0.51, 1.0, 4.9, 0, 0], rel=1e-6)


def test_masked_responses_are_out_of_weights_and_metrics() -> None:
    """Compare with the batch of the other responses, bit for bit."""
    lens = [2, 3, 1]
    prompts = [Prompt(0, np.array([5], np.int32), "", None)] * 3
    batch = build_batch(
        prompts, Responses.of([Generation([9] * n, [-1.0] * n, True) for n in lens])
    )
    batch = batch.with_fields(
        old_log_probs=batch.rollout_log_probs + torch.tensor([0.1, 0.7, 5.0, -6.0, 2.0, -0.3])
    )
    cfg = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_batch_normalize=True,
        rollout_rs=["seq_max_k2"],
        rollout_rs_threshold=[0.1],
    )
    masked = batch.with_fields(sample_mask=torch.tensor([True, False, True]))
    found, metrics = corrected(masked, cfg)
    alone, wanted = corrected(batch.select([0, 2]), cfg)
    assert metrics == wanted
    for name in ("is_weights", "loss_mask"):
        values, others = (getattr(x, name).tolist() for x in (found, alone))
        assert [*values[:2], *values[5:]] == others and values[2:5] == [0, 0, 0]
    assert corrected(batch.with_fields(sample_mask=torch.zeros(3).bool()), cfg)[1] == {}
