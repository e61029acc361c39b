"""losses.py and PPO's clipped surrogate: hand-computed numbers, a plain-Python reference,
gradients, and invariance to the split into micro-batches."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_mc.algorithms.kl import kl_estimate
from rlhf_mc.algorithms.losses import (
    ActorLossInputs,
    actor_loss,
    aggregation_weights,
    right_token_weights,
    value_loss,
)
from rlhf_mc.algorithms.policy_losses import PolicyLossInputs, Stats, vanilla
from rlhf_mc.data.batch import ragged_indices

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
SCALE = 8
CLIP = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0}
LENS = torch.tensor([3, 1, 7, 2, 5])
NUM_TOKENS = 18


def random_tokens(seed: int = 0, count: int = NUM_TOKENS) -> dict[str, torch.Tensor]:
    """Return per-token inputs, each [count], whose ratios fall on both sides of every clip."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(count, generator=g, dtype=torch.float64)

    old = -normal().abs()
    return {
        "log_probs": old + normal(0.8),
        "old_log_probs": old,
        "ref_log_probs": old + normal(0.3),
        "advantages": normal(),
        "entropy": normal().abs(),
        "values": normal(),
        "old_values": normal(),
        "returns": normal(),
    }


def policy_inputs(
    t: dict[str, torch.Tensor], weights: torch.Tensor, **settings: Any
) -> PolicyLossInputs:
    """Return inputs of a loss that does not look at sequences."""
    named = {name: t[name] for name in ("log_probs", "old_log_probs", "advantages")}
    sequence = torch.zeros(len(weights), dtype=torch.int64)
    return PolicyLossInputs(
        **named,
        weights=weights,
        sequence=sequence,
        num_sequences=1,
        **{"num_tokens": len(weights), **CLIP, **settings},
    )


def policy_loss(t: dict[str, torch.Tensor], weights: torch.Tensor) -> tuple[torch.Tensor, Stats]:
    return vanilla(policy_inputs(t, weights))


# Aggregation


def test_aggregation_weights_by_hand() -> None:
    lens = torch.tensor([3, 1])
    assert aggregation_weights(lens, "token-mean").tolist() == [0.25] * 4
    assert aggregation_weights(lens, "seq-mean-token-sum").tolist() == [0.5] * 4
    # 1 / (2 * 8)
    assert aggregation_weights(lens, "seq-mean-token-sum-norm", 8).tolist() == [0.0625] * 4
    # 1 / (2 * 3) three times, 1 / (2 * 1)
    assert aggregation_weights(lens, "seq-mean-token-mean").tolist() == pytest.approx(
        [1 / 6] * 3 + [0.5]
    )


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_weights_are_the_means_that_the_modes_name(mode: str) -> None:
    token_loss = random_tokens()["advantages"]
    sequences = [part.tolist() for part in token_loss.split(LENS.tolist())]
    expected = {
        "token-mean": sum(map(sum, sequences)) / NUM_TOKENS,
        "seq-mean-token-sum": sum(map(sum, sequences)) / len(sequences),
        "seq-mean-token-mean": sum(sum(s) / len(s) for s in sequences) / len(sequences),
        "seq-mean-token-sum-norm": sum(sum(s) / SCALE for s in sequences) / len(sequences),
    }[mode]
    assert (aggregation_weights(LENS, mode, SCALE) * token_loss).sum().item() == pytest.approx(
        expected, rel=1e-6
    )


# Policy


def test_policy_loss_by_hand() -> None:
    # ratio  A   -A r   -A clip(r)  L      dual clip (c = 3)
    # 1.5    1   -1.5   -1.3        -1.3   -        clipped above
    # 0.5    1   -0.5   -0.8        -0.5   -        not clipped: the maximum is the unclipped one
    # 0.5   -1    0.5    0.8         0.8   0.8      clipped below
    # 5     -1    5      1.3         5     3        dual clip
    # 1.25  -2    2.5    2.5         2.5   2.5      inside the range
    ratio = torch.tensor([1.5, 0.5, 0.5, 5.0, 1.25], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -2.0], dtype=torch.float64)
    old = torch.full_like(ratio, -1.0)
    log_probs = (old + ratio.log()).requires_grad_()
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0], dtype=torch.float64)
    t = {"log_probs": log_probs, "old_log_probs": old, "advantages": advantages}
    loss, stats = policy_loss(t, weights)
    assert loss.item() == pytest.approx(-1.3 - 5.0 + 80.0 + 3000.0 + 25000.0)
    assert stats["pg_loss"].item() == loss.item()
    assert stats["pg_clipfrac"].item() == pytest.approx(2 / 5)
    assert stats["pg_clipfrac_lower"].item() == pytest.approx(1 / 5)
    assert stats["ppo_kl"].item() == pytest.approx(-math.log(1.5 * 0.5 * 0.5 * 5.0 * 1.25) / 5)
    assert not any(value.requires_grad for value in stats.values())
    loss.backward()
    # d(-A r)/d log_prob = -A r where no clip holds, 0 where one does
    assert log_probs.grad.tolist() == pytest.approx([0.0, -5.0, 0.0, 0.0, 25000.0])


@pytest.mark.parametrize("seed", range(3))
def test_policy_loss_matches_plain_python(seed: int) -> None:
    t = random_tokens(seed, count=200)
    loss, stats = policy_loss(t, t["entropy"])
    total = 0.0
    clipped = 0
    lower = 0
    kl = 0.0
    rows = zip(
        *(t[k].tolist() for k in ("log_probs", "old_log_probs", "advantages", "entropy")),
        strict=True,
    )
    for log_prob, old, advantage, weight in rows:
        r = math.exp(log_prob - old)
        a = -advantage * r
        b = -advantage * min(max(r, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"])
        token = max(a, b)
        clipped += b > a
        if advantage < 0 and token > -advantage * CLIP["clip_c"]:
            lower += 1
            token = -advantage * CLIP["clip_c"]
        total += weight * token
        kl += old - log_prob
    assert clipped and lower  # the input reaches every branch
    assert loss.item() == pytest.approx(total)
    assert stats["pg_clipfrac"].item() == pytest.approx(clipped / 200)
    assert stats["pg_clipfrac_lower"].item() == pytest.approx(lower / 200)
    assert stats["ppo_kl"].item() == pytest.approx(kl / 200)


def test_first_epoch_gradient_is_the_policy_gradient() -> None:
    t = random_tokens()
    log_probs = t["old_log_probs"].clone().requires_grad_()
    weights = aggregation_weights(LENS, "token-mean").double()
    loss, stats = policy_loss({**t, "log_probs": log_probs}, weights)
    assert (
        stats["pg_clipfrac"].item()
        == stats["pg_clipfrac_lower"].item()
        == stats["ppo_kl"].item()
        == 0.0
    )
    assert loss.item() == pytest.approx(-t["advantages"].mean().item(), rel=1e-6)
    loss.backward()
    torch.testing.assert_close(log_probs.grad, -weights * t["advantages"])


def test_policy_loss_stays_finite_at_extreme_log_ratios() -> None:
    log_probs = torch.tensor([0.0, 0.0, -1000.0, -1000.0], requires_grad=True)
    old = torch.tensor([-1000.0, -1000.0, 0.0, 0.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, _ = policy_loss(
        {"log_probs": log_probs, "old_log_probs": old, "advantages": advantages}, torch.ones(4)
    )
    loss.backward()
    assert math.isfinite(loss.item())
    assert torch.isfinite(log_probs.grad).all()


# Value


def test_value_loss_by_hand() -> None:
    # v, v_old, R (e = 0.5): clip(v)   (v-R)^2   (clip-R)^2   0.5 max
    # 2, 0, 1:               0.5       1         0.25         0.5
    # 2, 0, 2:               0.5       0         2.25         1.125   the clip raised it
    # 0.25, 0, 1:            0.25      0.5625    0.5625       0.28125
    values = torch.tensor([2.0, 2.0, 0.25], requires_grad=True)
    weights = torch.tensor([1.0, 10.0, 100.0])
    loss, stats = value_loss(
        values, torch.zeros(3), torch.tensor([1.0, 2.0, 1.0]), weights, num_tokens=3, cliprange=0.5
    )
    assert loss.item() == pytest.approx(0.5 + 11.25 + 28.125)
    assert stats["vf_loss"].item() == loss.item()
    assert stats["vf_clipfrac"].item() == pytest.approx(1 / 3)
    assert stats["vpred_mean"].item() == pytest.approx(4.25 / 3)
    assert not any(value.requires_grad for value in stats.values())
    loss.backward()
    # weight * (v - R), 0 where the clip holds
    assert values.grad.tolist() == pytest.approx([1.0, 0.0, -75.0])


@pytest.mark.parametrize("seed", range(3))
def test_value_loss_matches_plain_python(seed: int) -> None:
    t = random_tokens(seed, count=200)
    loss, stats = value_loss(
        t["values"], t["old_values"], t["returns"], t["entropy"], num_tokens=200, cliprange=0.4
    )
    total = 0.0
    clipped = 0
    rows = zip(
        *(t[k].tolist() for k in ("values", "old_values", "returns", "entropy")), strict=True
    )
    for v, old, ret, weight in rows:
        a = (v - ret) ** 2
        b = (min(max(v, old - 0.4), old + 0.4) - ret) ** 2
        clipped += b > a
        total += weight * 0.5 * max(a, b)
    assert 0 < clipped < 200
    assert loss.item() == pytest.approx(total)
    assert stats["vf_clipfrac"].item() == pytest.approx(clipped / 200)


# Actor loss


def actor_inputs(
    t: dict[str, torch.Tensor], weights: torch.Tensor, *optional: str, **settings: Any
) -> ActorLossInputs:
    policy = policy_inputs(t, weights, **{"num_tokens": NUM_TOKENS, **settings})
    return ActorLossInputs(policy, weights, **{name: t[name] for name in optional})


def test_actor_loss_is_the_sum_of_its_terms() -> None:
    t = random_tokens()
    weights = aggregation_weights(LENS, "seq-mean-token-mean").double()
    policy, _ = policy_loss(t, weights)
    kl = (weights * kl_estimate(t["log_probs"], t["ref_log_probs"], "k2")).sum()
    loss, stats = actor_loss(
        actor_inputs(t, weights, "entropy", "ref_log_probs"),
        vanilla,
        entropy_coeff=0.1,
        kl_loss_coef=0.5,
        kl_loss_type="k2",
    )
    expected = policy - 0.1 * (weights * t["entropy"]).sum() + 0.5 * kl
    assert loss.item() == pytest.approx(expected.item())
    assert stats["loss"].item() == loss.item()
    assert stats["pg_loss"].item() == pytest.approx(policy.item())
    assert stats["kl_loss"].item() == pytest.approx(kl.item())
    # over tokens, in every mode
    assert stats["entropy"].item() == pytest.approx(t["entropy"].mean().item())
    assert stats["entropy_loss"].item() == pytest.approx((weights * t["entropy"]).sum().item())
    assert not any(value.requires_grad for value in stats.values())


def test_actor_loss_without_the_optional_terms_is_the_policy_loss() -> None:
    t = random_tokens()
    weights = aggregation_weights(LENS, "token-mean").double()
    plain, stats = actor_loss(actor_inputs(t, weights), vanilla)
    assert plain.item() == stats["pg_loss"].item()
    assert "entropy" not in stats and "kl_loss" not in stats
    t["entropy"].requires_grad_()
    t["log_probs"].requires_grad_()
    logged, stats = actor_loss(actor_inputs(t, weights, "entropy"), vanilla)
    assert logged.item() == plain.item() and "entropy" in stats
    logged.backward()
    assert t["entropy"].grad is None  # a coefficient of 0 costs no backward pass


@pytest.mark.parametrize("accuracies", [[1.0, 0.0, 2.0, 0.99, 1.0], [0.0, 0.5, -1.0, 0.0, 0.0]])
@pytest.mark.parametrize("has_rejected", [False, True])
def test_language_model_loss_is_the_mean_over_the_tokens_of_right_responses(
    accuracies: list[float], has_rejected: bool
) -> None:
    """Compare loss and gradient with sums over each response by VAPO's definition in float64."""
    t = random_tokens(seed=3)
    loss_mask = torch.arange(NUM_TOKENS) % 4 != 1 if has_rejected else None
    weights = aggregation_weights(LENS, "seq-mean-token-mean").double()
    rights = right_token_weights(torch.tensor(accuracies), LENS, loss_mask).double()
    t["log_probs"].requires_grad_()
    inputs = replace(actor_inputs(t, weights), right_weights=rights)
    loss, stats = actor_loss(inputs, vanilla, positive_nll_coef=0.1)
    (gradient,) = torch.autograd.grad(loss, t["log_probs"])
    counted = [
        place
        for place, sequence in enumerate(torch.repeat_interleave(LENS).tolist())
        if accuracies[sequence] >= 1 and (loss_mask is None or bool(loss_mask[place]))
    ]
    nll = -sum(t["log_probs"][place] for place in counted) / max(len(counted), 1)
    expected = policy_loss(t, weights)[0] + 0.1 * nll
    (expected_gradient,) = torch.autograd.grad(expected, t["log_probs"])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=0)
    assert stats["positive_nll"].item() == pytest.approx(float(nll), rel=1e-6)
    assert bool(counted) == any(x >= 1 for x in accuracies)


@pytest.mark.parametrize("coefficient", ["entropy_coeff", "kl_loss_coef", "positive_nll_coef"])
def test_coefficient_without_its_input_is_rejected(coefficient: str) -> None:
    inputs = actor_inputs(random_tokens(), torch.ones(NUM_TOKENS))
    with pytest.raises(AssertionError):
        actor_loss(inputs, vanilla, **{coefficient: 0.1})


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_loss_gradients_against_finite_differences(kind: str) -> None:
    t = random_tokens(seed=4)
    weights = aggregation_weights(LENS, "token-mean").double()
    for name in ("log_probs", "entropy", "values"):
        t[name].requires_grad_()

    def actor(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        inputs = actor_inputs(
            {**t, "log_probs": log_probs, "entropy": entropy}, weights, "entropy", "ref_log_probs"
        )
        coefs: dict[str, Any] = {"entropy_coeff": 0.3, "kl_loss_coef": 0.7, "kl_loss_type": kind}
        return actor_loss(inputs, vanilla, **coefs)[0]

    def critic(values: torch.Tensor) -> torch.Tensor:
        return value_loss(
            values, t["old_values"], t["returns"], weights, num_tokens=NUM_TOKENS, cliprange=0.4
        )[0]

    assert torch.autograd.gradcheck(actor, (t["log_probs"], t["entropy"]))
    assert torch.autograd.gradcheck(critic, (t["values"],))


# Invariance to the split into micro-batches

SPLITS = [
    [[0, 1, 2, 3, 4]],
    [[0], [1], [2], [3], [4]],
    [[4, 1], [2, 0, 3]],
    [[2], [], [3, 4, 0, 1]],  # a dummy micro-batch adds nothing
]


def summed_over_micro_batches(
    mode: str, split: list[list[int]]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the gradient of both losses in a small model's parameters, accumulated over
    micro-batches as a trainer does, and the summed statistics. Log-probs, entropy and values come
    from shared parameters, so that the gradient depends on the order of the tokens.
    """
    t = random_tokens(seed=7)
    features = torch.randn(
        NUM_TOKENS, 4, generator=torch.Generator().manual_seed(8), dtype=torch.float64
    )
    parameters = torch.full((4, 3), 0.2, dtype=torch.float64, requires_grad=True)
    weights = aggregation_weights(LENS, mode, SCALE).double()
    rights = right_token_weights(torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]), LENS).double()
    totals: dict[str, float] = {}
    for micro_batch in split:
        at = torch.from_numpy(ragged_indices(LENS.numpy(), np.array(micro_batch, dtype=np.int64)))
        shift, entropy, values = (features[at] @ parameters).unbind(1)
        micro = {name: value[at] for name, value in t.items()}
        micro |= {"log_probs": micro["log_probs"] + shift, "entropy": entropy.square()}
        actor, actor_stats = actor_loss(
            # clip_c is low, so that some of the few tokens reach it.
            replace(
                actor_inputs(micro, weights[at], "entropy", "ref_log_probs", clip_c=1.2),
                right_weights=rights[at],
            ),
            vanilla,
            positive_nll_coef=0.4,
            entropy_coeff=0.3,
            kl_loss_coef=0.7,
        )
        critic, critic_stats = value_loss(
            values,
            micro["old_values"],
            micro["returns"],
            weights[at],
            num_tokens=NUM_TOKENS,
            cliprange=0.4,
        )
        (actor + critic).backward()
        for name, value in (actor_stats | critic_stats).items():
            totals[name] = totals.get(name, 0.0) + value.item()
    assert parameters.grad is not None
    return parameters.grad, totals


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("split", SPLITS[1:], ids=["singles", "uneven", "with_empty"])
def test_loss_statistics_and_gradient_do_not_depend_on_the_split(
    mode: str, split: list[list[int]]
) -> None:
    whole_gradient, whole = summed_over_micro_batches(mode, SPLITS[0])
    gradient, totals = summed_over_micro_batches(mode, split)
    assert whole_gradient.abs().min() > 1e-3
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-12, atol=1e-12)
    assert totals == pytest.approx(whole, rel=1e-6)
    assert min(whole["pg_clipfrac"], whole["pg_clipfrac_lower"], whole["vf_clipfrac"]) > 0


def test_aggregation_modes_give_different_gradients() -> None:
    """Guard the test above, which would pass with any weights of the same sum."""
    gradients = [summed_over_micro_batches(mode, SPLITS[0])[0] for mode in MODES]
    assert all(
        (gradients[i] - gradients[j]).abs().max() > 1e-3 for i, j in ((0, 1), (0, 2), (1, 2))
    )


def test_loss_on_observations_is_their_mean_cross_entropy() -> None:
    """Compare with the definition in float64 over two micro-batches, loss and gradient: the
    normaliser is the number of tokens of observations, whatever that of the drawn ones is."""
    t = random_tokens()
    weights = aggregation_weights(LENS, "token-mean").double()
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(7, 11, generator=g, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (7,), generator=g)
    observed = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    plain = actor_loss(ActorLossInputs(policy_inputs(t, weights), weights), vanilla)[0]
    total = torch.zeros((), dtype=torch.float64)
    stat = 0.0
    for drawn, seen in ((slice(0, 4), slice(0, 5)), (slice(4, 18), slice(5, 7))):
        part = {name: x[drawn] for name, x in t.items()}
        inputs = ActorLossInputs(
            replace(policy_inputs(part, weights[drawn]), num_tokens=18),
            weights[drawn],
            observed_log_probs=observed[seen],
            num_observed=7,
        )
        loss, stats = actor_loss(inputs, vanilla, env_loss_coef=0.3)
        total = total + loss
        stat += float(stats["env_loss"])
    wanted = torch.nn.functional.cross_entropy(logits, targets)
    assert float(total) == pytest.approx(float(plain + 0.3 * wanted), rel=1e-12)
    assert stat == pytest.approx(float(wanted), rel=1e-12)
    (found,) = torch.autograd.grad(total, logits, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(0.3 * wanted, logits)[0])
