"""kl.py, token rewards, whitening and GAE against hand-computed numbers and plain-Python reference
implementations. The other estimators are in test_estimators.py."""

import math
import statistics

import pytest
import torch

from rlhf_mc.algorithms.estimators import gae, token_rewards, whiten
from rlhf_mc.algorithms.kl import KLController, kl_estimate, mean_sequence_kl


def random_responses(
    seed: int, num_responses: int = 7
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rewards and values of all tokens, and the lengths of the responses, of which one is
    1."""
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 13, (num_responses,), generator=g)
    lens[1] = 1
    rewards, values = torch.randn(2, int(lens.sum()), generator=g, dtype=torch.float64)
    return rewards, values, lens


# kl.py


def test_kl_estimates_by_hand() -> None:
    log_probs = torch.tensor([-1.0, -2.0])
    ref = torch.tensor([-1.5, -1.0])  # d = -0.5, 1
    assert kl_estimate(log_probs, ref, "k1").tolist() == [0.5, -1.0]
    assert kl_estimate(log_probs, ref, "k2").tolist() == [0.125, 0.5]
    # e^-0.5 + 0.5 - 1 = 0.106531, e - 2 = 0.718282
    assert kl_estimate(log_probs, ref, "k3").tolist() == pytest.approx(
        [0.106531, 0.718282], abs=1e-6
    )


def test_kl_estimates_stay_finite_at_extreme_log_ratios() -> None:
    log_probs = torch.tensor([0.0, -500.0])
    ref = torch.tensor([-500.0, 0.0])  # d clamped to -20, 20
    assert kl_estimate(log_probs, ref, "k1").tolist() == [20.0, -20.0]
    assert kl_estimate(log_probs, ref, "k2").tolist() == [200.0, 200.0]
    # e^-20 + 20 - 1 = 19, e^20 - 21 = 485165174.4
    assert kl_estimate(log_probs, ref, "k3").tolist() == pytest.approx(
        [19.0, 485165174.4], rel=1e-6
    )
    assert kl_estimate(log_probs, ref, "low_var_kl").tolist() == [10.0, 10.0]


def test_low_var_kl_is_k3_up_to_10_and_has_no_gradient_beyond() -> None:
    # k3 is 0.1487, 2.0498, 8.6825, 9.8637 and, of 2.7, 11.18
    ref = torch.tensor([0.5, -3.0, 2.5, 2.6])
    assert torch.equal(
        kl_estimate(torch.zeros(4), ref, "low_var_kl"), kl_estimate(torch.zeros(4), ref, "k3")
    )
    log_probs = torch.zeros(2, requires_grad=True)
    kl_estimate(log_probs, torch.tensor([2.7, 2.6]), "low_var_kl").sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad[0] == 0 and log_probs.grad[1] == pytest.approx(
        1 - math.exp(2.6), rel=1e-6
    )


def test_kl_estimates_under_verls_names() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -3.0])
    ref = torch.tensor([-1.5, -1.0, 2.0])
    assert kl_estimate(log_probs, ref, "abs").tolist() == [0.5, 1.0, 5.0]
    assert torch.equal(kl_estimate(log_probs, ref, "kl"), kl_estimate(log_probs, ref, "k1"))
    assert torch.equal(kl_estimate(log_probs, ref, "mse"), kl_estimate(log_probs, ref, "k2"))


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl", "kl", "abs"])
def test_plus_has_the_value_of_the_estimator_and_the_gradient_of_k2(kind: str) -> None:
    ref = torch.tensor([-1.5, -1.0, 2.0], dtype=torch.float64)
    log_probs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    found = kl_estimate(log_probs, ref, f"{kind}+")
    assert found.tolist() == pytest.approx(kl_estimate(log_probs, ref, kind).tolist())
    found.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx((log_probs - ref).tolist())


@pytest.mark.parametrize("kind", ["k1+", "k3+", "low_var_kl+", "kl+", "abs+"])
def test_plus_pulls_a_token_back_from_beyond_the_clamp(kind: str) -> None:
    ref = torch.tensor([-1.0, -3000.0])
    log_probs = torch.tensor([-3000.0, -1.0], requires_grad=True)
    found = kl_estimate(log_probs, ref, kind)
    # not rounded by 2999^2 / 2
    assert torch.equal(found, kl_estimate(log_probs, ref, kind.removesuffix("+")))
    found.sum().backward()
    assert log_probs.grad.tolist() == [-2999.0, 2999.0]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl", "abs"])
def test_kl_estimate_gradient(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    log_probs = torch.randn(6, generator=g, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(6, generator=g, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: kl_estimate(a, b, kind), (log_probs, ref))


def test_k1_and_k3_are_unbiased_and_k2_nearly() -> None:
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(50, generator=g, dtype=torch.float64)
    policy = logits.log_softmax(0)
    ref = (logits + 0.1 * torch.randn(50, generator=g, dtype=torch.float64)).log_softmax(0)
    exact = (policy.exp() * (policy - ref)).sum().item()
    expectation = {
        kind: (policy.exp() * kl_estimate(policy, ref, kind)).sum().item()
        for kind in ("k1", "k2", "k3")
    }
    assert expectation["k1"] == pytest.approx(exact, rel=1e-9)
    assert expectation["k3"] == pytest.approx(exact, rel=1e-9)
    assert expectation["k2"] == pytest.approx(exact, rel=0.1)


def test_mean_sequence_kl_averages_tokens_then_sequences() -> None:
    kl = torch.tensor([1.0, 2.0, 3.0, 10.0])
    # (2 + 10) / 2; over all tokens it would be 4
    assert mean_sequence_kl(kl, torch.tensor([3, 1])) == 6.0


def test_adaptive_controller_by_hand() -> None:
    controller = KLController(value=0.1, target=0.5, horizon=1000)
    controller.update(0.55, n_sequences=100)  # error 0.1: 0.1 * (1 + 0.1 * 0.1) = 0.101
    assert controller.value == pytest.approx(0.101)
    controller.update(5.0, n_sequences=500)  # error 9, clipped to 0.2: 0.101 * 1.1 = 0.1111
    assert controller.value == pytest.approx(0.1111)
    controller.update(-1.0, n_sequences=1000)  # error -3, clipped to -0.2: 0.1111 * 0.8 = 0.08888
    assert controller.value == pytest.approx(0.08888)
    # n / horizon counts as 1, else the factor would be -19
    controller.update(0.0, n_sequences=100_000)
    assert controller.value == pytest.approx(0.071104)


def test_adaptive_controller_rejects_nan() -> None:
    controller = KLController(value=0.1, target=0.5, horizon=1000)
    with pytest.raises(AssertionError):
        controller.update(math.nan, 10)
    assert controller.value == 0.1


def test_controllers_resume_from_their_state() -> None:
    before = KLController(value=0.1, target=0.5, horizon=1000)
    before.update(1.0, 250)
    resumed = KLController(value=0.1, target=0.5, horizon=1000)
    resumed.load_state_dict(before.state_dict())
    before.update(0.2, 250)
    resumed.update(0.2, 250)
    assert resumed.value == before.value != 0.1

    fixed = KLController(0.3)
    fixed.update(100.0, 1000)
    assert fixed.state_dict() == {"value": 0.3}
    fixed.load_state_dict(before.state_dict())
    assert fixed.value == 0.3  # the config's, not the checkpoint's


# estimators.py


def test_whiten_by_hand() -> None:
    # Mean 3, variance (4 + 1 + 9) / 2 = 7: (1 - 3) / sqrt(7), (2 - 3) / sqrt(7), (6 - 3) / sqrt(7).
    found = whiten(torch.tensor([1.0, 2.0, 6.0]))
    torch.testing.assert_close(
        found, torch.tensor([-0.755929, -0.377964, 1.133893]), atol=1e-6, rtol=0
    )
    assert whiten(torch.tensor([5.0])).tolist() == [0.0]
    assert whiten(torch.empty(0)).tolist() == []


@pytest.mark.parametrize("seed", range(3))
def test_whitened_tokens_have_mean_0_and_deviation_1(seed: int) -> None:
    whitened = whiten(random_responses(seed)[0]).tolist()
    assert statistics.mean(whitened) == pytest.approx(0.0, abs=1e-12)
    assert statistics.stdev(whitened) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7371, -12.34, 1e-3, 300_000.7])
def test_equal_tokens_whiten_to_exactly_zero(value: float) -> None:
    """Catch the rounding error of the float32 mean, which 1 / sqrt(1e-8) amplifies to 0.01 and
    more."""
    for num_tokens in (3, 1000, 114_321):
        whitened = whiten(torch.full((num_tokens,), value))
        assert whitened.dtype == torch.float32
        assert torch.equal(whitened, torch.zeros(num_tokens)), (
            f"{num_tokens} tokens: {whitened.abs().max()}"
        )


def test_token_rewards_by_hand() -> None:
    scores = torch.tensor([1.0, -2.0])
    lens = torch.tensor([2, 3])
    kl = torch.tensor([0.1, 0.2, 0.3, 0.0, 0.4])
    assert token_rewards(scores, None, 0.5, lens).tolist() == [0, 1, 0, 0, -2]
    torch.testing.assert_close(
        token_rewards(scores, kl, 0.5, lens), torch.tensor([-0.05, 0.9, -0.15, 0.0, -2.2])
    )
    turn_rewards = torch.tensor([0.25, 0.0, -3.0, 0.0, 0.0])
    assert token_rewards(scores, None, 0.5, lens, turn_rewards).tolist() == [0.25, 0.75, -3, 0, 1]


def test_gae_by_hand() -> None:
    # Gamma 0.9, lam 0.5, and a second response, of one token:
    #   t=2: delta = 1 - 0.4                    = 0.6      A = 0.6
    #   t=1: delta = 0 + 0.9 * 0.4 - 0.2        = 0.16     A = 0.16 + 0.45 * 0.6  = 0.43
    #   t=0: delta = -0.1 + 0.9 * 0.2 - 0.5     = -0.42    A = -0.42 + 0.45 * 0.43 = -0.2265
    rewards = torch.tensor([-0.1, 0.0, 1.0, 7.0])
    values = torch.tensor([0.5, 0.2, 0.4, 5.0])
    advantages, returns = gae(rewards, values, torch.tensor([3, 1]), gamma=0.9, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([-0.2265, 0.43, 0.6, 2.0]))
    torch.testing.assert_close(returns, torch.tensor([0.2735, 0.63, 1.0, 7.0]))
    assert values.tolist() == pytest.approx([0.5, 0.2, 0.4, 5.0])  # as they were


def reference_gae(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Return one response's advantages and returns by the definition: A_t = sum_k (gamma lam)^k
    delta_{t+k}."""
    v = [*values, 0.0]
    deltas = [reward + gamma * v[t + 1] - v[t] for t, reward in enumerate(rewards)]
    advantages = [
        sum((gamma * lam) ** j * d for j, d in enumerate(deltas[t:])) for t in range(len(deltas))
    ]
    return advantages, [a + value for a, value in zip(advantages, values, strict=True)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("seed", range(3))
def test_gae_matches_the_definition(seed: int, gamma: float, lam: float) -> None:
    rewards, values, lens = random_responses(seed)
    found = [x.split(lens.tolist()) for x in gae(rewards, values, lens, gamma, lam)]
    given = zip(rewards.split(lens.tolist()), values.split(lens.tolist()), *found, strict=True)
    for reward, value, advantages, returns in given:
        expected = reference_gae(reward.tolist(), value.tolist(), gamma, lam)
        assert advantages.tolist() == pytest.approx(expected[0], abs=1e-12)
        assert returns.tolist() == pytest.approx(expected[1], abs=1e-12)


def test_gae_with_gamma_and_lam_1_returns_rewards_to_go() -> None:
    rewards = torch.tensor([0.0, -1.0, 3.0])
    values = torch.tensor([0.25, -4.0, 8.0])
    _, returns = gae(rewards, values, torch.tensor([3]), gamma=1.0, lam=1.0)
    assert returns.tolist() == [2.0, 2.0, 3.0]  # for any values
