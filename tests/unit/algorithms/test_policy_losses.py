"""The policy losses of policy_losses.py: hand-worked sequences, slow plain-Python versions with
their gradients, and no dependence on the split into micro-batches. PPO's clipped surrogate is in
test_losses.py."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from rlhf_mc.algorithms.losses import aggregation_weights
from rlhf_mc.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs, covariances
from rlhf_mc.config.algorithm_schema import SELECTING_LOSSES, LossMode, PolicyLossConfig
from rlhf_mc.config.schema import ActorConfig
from rlhf_mc.data.batch import RaggedBatch, ragged_indices
from rlhf_mc.trainer import update

LENS = torch.tensor([3, 1, 7, 2, 5])
SETTINGS = PolicyLossConfig(
    clip_cov_ratio=0.2, clip_cov_lb=-0.5, clip_cov_ub=0.5, kl_cov_ratio=0.2, ppo_kl_coef=0.3
)
LOW = 0.2
HIGH = 0.3
CLIP_C = 1.5
TAU_POS = 1.3
TAU_NEG = 2.0


def test_every_loss_can_be_set() -> None:
    assert {*POLICY_LOSSES, "custom"} == set(get_args(LossMode))


def test_losses_that_select_tokens_are_listed() -> None:
    """Compare with the settings: a selection reads old log-probs before the update."""
    assert set(SELECTING_LOSSES) == {n for n, loss in POLICY_LOSSES.items() if loss.selection}


def mini_batch(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the per-token fields of a mini-batch, float64. Ratios are on both sides of every
    clip."""
    g = torch.Generator().manual_seed(seed)
    count = int(LENS.sum())
    old = -torch.randn(count, generator=g, dtype=torch.float64).abs()
    advantages = torch.randn(count, generator=g, dtype=torch.float64)
    selection = POLICY_LOSSES[name].selection
    fields = {
        "log_probs": (old + 0.5 * torch.randn(count, generator=g, dtype=torch.float64)).clamp(
            max=-0.01
        ),
        "old_log_probs": old,
        "advantages": advantages,
        "weights": aggregation_weights(LENS, "seq-mean-token-mean").double(),
        "sequence": torch.repeat_interleave(LENS),
    }
    if selection is not None:
        fields["selected"] = selection(
            old, advantages, SETTINGS, torch.Generator().manual_seed(seed)
        )
    return fields


def inputs_of(fields: dict[str, torch.Tensor], **changed: Any) -> PolicyLossInputs:
    sizes = {"num_tokens": int(LENS.sum()), "num_sequences": len(LENS)}
    clips = {
        "clip_low": LOW,
        "clip_high": HIGH,
        "clip_c": CLIP_C,
        "kl_coef": 0.3,
        "tau_pos": TAU_POS,
        "tau_neg": TAU_NEG,
    }
    return PolicyLossInputs(**{**fields, **sizes, **clips, **changed})


def number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def slow(name: str, fields: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Return loss and shares of clipped tokens, token by token. The loss is differentiable in
    log_probs."""
    old, advantages, weights = (
        fields[key].tolist() for key in ("old_log_probs", "advantages", "weights")
    )
    log_probs = list(fields["log_probs"])
    selected = fields["selected"].tolist() if "selected" in fields else []
    where = fields["sequence"].tolist()
    terms = []
    upper = 0
    lower = 0
    for t, log_prob in enumerate(log_probs):
        a = advantages[t]
        log_ratio = log_prob - old[t]
        mine = [u for u in range(len(where)) if where[u] == where[t]]
        ratio = log_ratio.exp()
        if name == "gspo":
            mean = sum(float(log_probs[u].detach()) - old[u] for u in mine) / len(mine)
            ratio = math.exp(mean) * (log_prob - log_prob.detach()).exp()
        clipped = min(max(float(ratio.detach()), 1 - LOW), 1 + HIGH)
        if name in ("vanilla", "gspo", "clip_cov"):
            loss = (
                -a * ratio if -a * float(ratio.detach()) >= -a * clipped else number(-a * clipped)
            )
            upper += -a * clipped > -a * float(ratio.detach())
            if name == "vanilla" and a < 0 and float(loss.detach()) > -a * CLIP_C:
                loss = number(-a * CLIP_C)
                lower += 1
            if name == "clip_cov" and selected[t]:
                loss = number(0.0)
        elif name == "kl_cov":
            loss = -a * ratio + (0.3 * log_ratio.abs() if selected[t] else 0.0)
        elif name == "sapo":
            tau = TAU_POS if a > 0 else TAU_NEG
            loss = -a * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
        elif name == "cispo":
            loss = -a * clipped * log_prob
            upper += clipped != float(ratio.detach())
        elif name == "gpg":
            loss = -a * log_prob
        elif name in ("sao", "dppo_tv", "dppo_kl"):
            r = float(ratio.detach())
            inside = (
                1 - LOW <= r <= 1 + HIGH if name == "sao" else in_trust_region(name, a, r, old[t])
            )
            bound = math.inf if name == "sao" else CLIP_C
            loss = -a * min(r, bound) * log_prob if inside else number(0.0)
            upper += not inside
            lower += inside and r > bound
        else:
            kept = []
            for u in mine:
                x = log_probs[u] - old[u]
                if advantages[u] > 0 and float(x.detach()) > HIGH:
                    x = number(HIGH)
                elif advantages[u] < 0 and float(x.detach()) < -LOW:
                    x = number(-LOW)
                kept.append(x)
            upper += a > 0 and float(log_ratio.detach()) > HIGH
            lower += a < 0 and float(log_ratio.detach()) < -LOW
            loss = -sum(advantages[u] for u in mine) / len(mine) * (sum(kept) / len(kept)).exp()
        terms.append(weights[t] * loss)
    counts = {"pg_clipfrac": upper / len(where), "pg_clipfrac_lower": lower / len(where)}
    if selected:
        counts["pg_clipfrac"] = sum(selected) / len(where)
    return sum(terms), counts


def in_trust_region(name: str, advantage: float, ratio: float, old_log_prob: float) -> bool:
    """Return the mask of DPPO's equation 12, with a threshold for each side."""
    q = math.exp(old_log_prob)
    p = q * ratio
    divergence = abs(q - p)
    if name == "dppo_kl":
        others = math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        divergence = q * math.log(q / p) + (1 - q) * others
    return not (
        (advantage > 0 and ratio > 1 and divergence > HIGH)
        or (advantage < 0 and ratio < 1 and divergence > LOW)
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_loss_and_gradient_match_plain_python(name: str, seed: int) -> None:
    fields = mini_batch(name, seed)
    gradients = []
    for compute in (lambda f: POLICY_LOSSES[name].function(inputs_of(f)), lambda f: slow(name, f)):
        log_probs = fields["log_probs"].clone().requires_grad_()
        loss, stats = compute({**fields, "log_probs": log_probs})
        loss.backward()
        gradients.append((loss.item(), log_probs.grad.tolist(), stats))
    (loss, gradient, stats), (expected_loss, expected_gradient, counts) = gradients
    assert loss == pytest.approx(expected_loss, abs=1e-12)
    assert gradient == pytest.approx(expected_gradient, abs=1e-12)
    for key, expected in counts.items():
        assert float(stats.get(key, 0.0)) == pytest.approx(expected), key
    assert float(stats["pg_loss"]) == loss
    assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        # r is 2, 0.5, 1.25, 100, 0.76, 0.76, 1.25
        ("sao", [False, False, True, False, False, False, True]),
        # p - q is 0.4, -0.3, 0.1, 0.0099, -0.24, -0.24, 0.2
        ("dppo_tv", [False, False, True, True, False, True, True]),
        # D is 0.382, 0.192, 0.020, 0.0095, 0.243, 0.243, 3.18
        ("dppo_kl", [False, True, True, True, False, True, False]),
    ],
)
def test_masks_of_tokens_by_hand(name: str, inside: list[bool]) -> None:
    """Compare the tokens of a gradient at clip_low 0.2 and clip_high 0.3. sao leaves out tokens
    whatever the advantage is; dppo only where the advantage pulls away from the old policy."""
    old = torch.tensor([0.4, 0.6, 0.4, 0.0001, 0.99, 0.99, 0.8]).double().log()
    new = torch.tensor([0.8, 0.3, 0.5, 0.01, 0.75, 0.75, 1.0]).double().log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0]).double()
    fields = {
        "log_probs": new,
        "old_log_probs": old,
        "advantages": advantages,
        "weights": torch.ones(7).double(),
        "sequence": torch.zeros(7, dtype=torch.int64),
    }
    loss, stats = POLICY_LOSSES[name].function(inputs_of(fields, clip_c=2.5, num_tokens=7))
    (gradient,) = torch.autograd.grad(loss, new)
    ratio = (new.detach() - old).exp()
    expected = -advantages * (ratio if name == "sao" else ratio.clamp(max=2.5))
    torch.testing.assert_close(gradient, torch.where(torch.tensor(inside), expected, 0.0))
    assert float(stats["pg_clipfrac"]) == pytest.approx(inside.count(False) / 7)
    lower = 0.0 if name == "sao" else 1 / 7
    assert float(stats.get("pg_clipfrac_lower", 0.0)) == pytest.approx(lower)


def test_gspo_and_geo_mean_by_hand() -> None:
    # Sequence 0: log-ratios 0.4 and -0.2, mean 0.1, A 1. Sequence 1: log-ratio -0.5, A -2.
    fields = {
        "log_probs": torch.tensor([-0.6, -1.2, -1.5], dtype=torch.float64, requires_grad=True),
        "old_log_probs": torch.full((3,), -1.0, dtype=torch.float64),
        "advantages": torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64),
        "weights": torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64),
        "sequence": torch.tensor([0, 0, 1]),
    }
    sizes = {"num_tokens": 3, "num_sequences": 2}
    loss, stats = POLICY_LOSSES["gspo"].function(inputs_of(fields, **sizes))
    # s is e^0.1 = 1.105, inside the range; e^-0.5 = 0.607, clipped to 0.8: the loss 2 * 0.8 is the
    # larger one.
    assert loss.item() == pytest.approx(0.5 * -math.exp(0.1) + 0.5 * 1.6)
    assert float(stats["pg_clipfrac"]) == pytest.approx(1 / 3)
    loss, stats = POLICY_LOSSES["geo_mean"].function(inputs_of(fields, **sizes))
    # 0.4 is clipped to 0.3: the mean is 0.05. -0.5 is clipped to -0.2.
    assert loss.item() == pytest.approx(0.5 * -math.exp(0.05) + 0.5 * 2 * math.exp(-0.2))
    assert (float(stats["pg_clipfrac"]), float(stats["pg_clipfrac_lower"])) == pytest.approx(
        (1 / 3, 1 / 3)
    )


@pytest.mark.parametrize("name", ["geo_mean", "vanilla"])
def test_geo_mean_weighs_a_sequence_by_the_geometric_mean(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the loss with ratios and weights of tokens: the product of both is the ratio to
    vLLM's policy."""
    log_ratio = torch.tensor([0.1, 0.2, -0.1])
    weights = torch.tensor([0.5, 2.0, 0.25])
    mini = RaggedBatch(
        tokens=torch.zeros(5, dtype=torch.int64),
        prompt_lens=torch.tensor([1, 1]),
        response_lens=torch.tensor([2, 1]),
        rollout_log_probs=torch.zeros(3),
        finished=torch.ones(2, dtype=torch.bool),
    ).with_fields(
        old_log_probs=torch.full((3,), -1.0),
        advantages=torch.tensor([1.0, 1.0, -2.0]),
        is_weights=weights,
    )
    log_probs = -1.0 + log_ratio
    monkeypatch.setattr(update, "log_probs_and_entropy", lambda *_: (log_probs, torch.ones(3)))
    cfg = ActorConfig(loss_agg_mode="seq-mean-token-mean")
    terms = update.ActorTerms(POLICY_LOSSES[name], 0.0, 0.0, 1, torch.Generator())
    micro = SimpleNamespace(
        targets=torch.zeros(3, dtype=torch.int64), response_index=torch.arange(3)
    )
    micro.all_results = lambda own: own
    loss, _ = update.actor_objective(mini, cfg, 8, 1.0, terms)(None, torch.zeros(3, 1, 1), micro)
    if name == "geo_mean":
        expected = [-math.exp(0.15) * math.sqrt(0.5 * 2.0), 2.0 * math.exp(-0.1) * 0.25]
    else:
        # e^0.2 is clipped to 1.2
        expected = [-(math.exp(0.1) * 0.5 + 1.2 * 2.0) / 2, 2.0 * math.exp(-0.1) * 0.25]
    assert loss.item() == pytest.approx(sum(expected) / 2)


def test_gradient_of_gspo_is_that_of_its_sequence_ratio() -> None:
    """Compare with the gradient of -A s through s itself; equal as a sequence's advantages are
    equal."""
    fields = mini_batch("gspo")
    fields["advantages"] = torch.tensor([1.0, -0.5, 0.3, -2.0, 0.7], dtype=torch.float64)[
        fields["sequence"]
    ]
    log_probs = fields["log_probs"].requires_grad_()
    inputs = inputs_of(fields, clip_low=1.0, clip_high=100.0)
    POLICY_LOSSES["gspo"].function(inputs)[0].backward()
    found = log_probs.grad.clone()
    log_probs.grad = None
    ratio = inputs.sequence_means(inputs.log_ratio).exp()
    (inputs.weights * -inputs.advantages * ratio).sum().backward()
    torch.testing.assert_close(found, log_probs.grad)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gspo_caps_the_log_ratio_of_a_sequence_at_10(advantage: float) -> None:
    """Check that a ratio beyond e^10 is e^10 without a gradient. The log-ratios are not clamped one
    by one."""
    old = torch.full((6,), -60.0, dtype=torch.float64)
    log_probs = (
        old + torch.tensor([50.0, 50.0, 24.0, 0.0, 0.0, -1.0], dtype=torch.float64)
    ).requires_grad_()
    fields = {
        "log_probs": log_probs,
        "old_log_probs": old,
        "advantages": torch.full((6,), advantage, dtype=torch.float64),
        "weights": torch.ones(6, dtype=torch.float64),
        "sequence": torch.tensor([0, 0, 1, 1, 1, 2]),
    }
    inputs = inputs_of(fields, num_tokens=6, num_sequences=3, clip_low=1.0, clip_high=1e9)
    loss, _ = POLICY_LOSSES["gspo"].function(inputs)
    loss.backward()
    near = math.exp(8)
    far = math.exp(-1)
    assert loss.item() == pytest.approx(-advantage * (2 * math.exp(10) + 3 * near + far))
    assert log_probs.grad.tolist() == pytest.approx(
        [0.0, 0.0, *[-advantage * near] * 3, -advantage * far]
    )


def test_gspo_is_exact_at_unlikely_tokens() -> None:
    """Catch a ratio that is rounded to the log-prob's precision: clip ranges of GSPO are about
    3e-4."""
    old = torch.full((4,), -300.0)
    log_probs = (old + 2**-12).requires_grad_()  # 2.4e-4; float32 numbers near 300 are 3e-5 apart
    ones = {
        "advantages": torch.ones(4),
        "weights": torch.full((4,), 0.25),
        "sequence": torch.tensor([0, 0, 0, 1]),
    }
    mean = {
        "log_probs": log_probs,
        "old_log_probs": old - torch.tensor([0.0, 0.0, 2**-13, 0.0]),
        **ones,
    }
    loss, _ = POLICY_LOSSES["gspo"].function(inputs_of(mean, num_tokens=4, num_sequences=2))
    ratios = [math.exp((2 * 2**-12 + 2**-12 + 2**-13) / 3)] * 3 + [math.exp(2**-12)]
    assert -loss.item() - 1 == pytest.approx(sum(ratios) / 4 - 1, abs=2e-7)


SPLITS = [[[0], [1], [2], [3], [4]], [[4, 1], [2, 0, 3]], [[2], [], [3, 4, 0, 1]]]


@pytest.mark.parametrize("split", SPLITS, ids=["singles", "uneven", "with_empty"])
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_gradient_and_statistics_do_not_depend_on_the_split(
    name: str, split: list[list[int]]
) -> None:
    fields = mini_batch(name)

    def summed(micro_batches: list[list[int]]) -> tuple[torch.Tensor, dict[str, float]]:
        log_probs = fields["log_probs"].clone().requires_grad_()
        totals: dict[str, float] = {}
        for micro_batch in micro_batches:
            at = torch.from_numpy(
                ragged_indices(LENS.numpy(), np.array(micro_batch, dtype=np.int64))
            )
            micro = {key: value[at] for key, value in {**fields, "log_probs": log_probs}.items()}
            loss, stats = POLICY_LOSSES[name].function(inputs_of(micro))
            loss.backward()
            for key, value in stats.items():
                totals[key] = totals.get(key, 0.0) + float(value)
        return log_probs.grad, totals

    gradient, totals = summed([[0, 1, 2, 3, 4]])
    split_gradient, split_totals = summed(split)
    assert gradient.abs().sum() > 0
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-12, atol=1e-15)
    assert split_totals == pytest.approx(totals)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_losses_stay_finite_at_extreme_log_ratios(name: str) -> None:
    fields = mini_batch(name)
    count = int(LENS.sum())
    fields["old_log_probs"] = torch.where(torch.arange(count) % 2 == 0, 0.0, -1000.0).double()
    fields["log_probs"] = (-1000.0 - fields["old_log_probs"]).requires_grad_()
    loss, _ = POLICY_LOSSES[name].function(inputs_of(fields))
    loss.backward()
    assert loss.isfinite() and fields["log_probs"].grad.isfinite().all()


# Selections


def test_covariances_by_hand() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -3.0])  # mean -2
    found = covariances(log_probs, torch.tensor([3.0, 0.0, 0.0]))  # mean 1
    assert found.tolist() == [2.0, 0.0, 1.0]


def test_kl_cov_selects_the_highest_covariances() -> None:
    g = torch.Generator().manual_seed(0)
    old = torch.randn(40, generator=g)
    advantages = torch.randn(40, generator=g)
    selection = POLICY_LOSSES["kl_cov"].selection
    assert selection is not None
    chosen = selection(old, advantages, PolicyLossConfig(kl_cov_ratio=0.1), g)
    ranked = covariances(old, advantages).argsort(descending=True)[:4]
    assert sorted(chosen.nonzero()[:, 0].tolist()) == sorted(ranked.tolist())
    # at least one
    assert selection(old, advantages, PolicyLossConfig(kl_cov_ratio=1e-4), g).sum() == 1


def test_clip_cov_draws_from_the_band_by_the_generator_alone() -> None:
    g = torch.Generator().manual_seed(0)
    old = torch.randn(400, generator=g)
    advantages = torch.randn(400, generator=g)
    settings = PolicyLossConfig(clip_cov_ratio=0.02, clip_cov_lb=0.1, clip_cov_ub=0.9)
    selection = POLICY_LOSSES["clip_cov"].selection
    assert selection is not None

    def draw(seed: int) -> torch.Tensor:
        return selection(old, advantages, settings, torch.Generator().manual_seed(seed))

    chosen = draw(1)
    found = covariances(old, advantages)
    assert chosen.sum() == 8 and ((found[chosen] > 0.1) & (found[chosen] < 0.9)).all()
    assert torch.equal(chosen, draw(1)) and not torch.equal(chosen, draw(2))
    none_inside = PolicyLossConfig(clip_cov_lb=1000.0, clip_cov_ub=2000.0)
    assert selection(old, advantages, none_inside, g).sum() == 0
