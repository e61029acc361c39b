"""Settings of the advantage estimator, the critic and the losses: what must go together, and a
user's own functions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from config_files import load, validated
from documents import ROOT

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import absent_roles, has_old_log_prob_pass, uses_critic
from rlhf_mc.setup.custom_functions import load_estimator, load_policy_loss
from rlhf_mc.trainer.update import entropy_coeff, step_generator

GROUPS = ("algorithm.adv_estimator=grpo", "rollout.n=4")
ONE_UPDATE = ("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "actor.ppo_epochs=1")
CORRECTION = "algorithm.rollout_correction"
AGENT = ("rollout.environment.name=openai", "rollout.environment.path=agent.py")


@pytest.mark.parametrize(
    "read_by",
    [
        ("actor.ppo_epochs=2",),
        ("actor.ppo_mini_batch_size=4",),
        ("algorithm.use_kl_in_reward=true",),
        ("actor.use_kl_loss=true", "algorithm.kl_ctrl.type=adaptive"),
        (f"{CORRECTION}.rollout_rs=[token_k1]", f"{CORRECTION}.rollout_rs_threshold=[2.0]"),
        (f"{CORRECTION}.rollout_token_veto_threshold=1e-4",),
        (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_batch_normalize=true"),
        ("actor.policy_loss.loss_mode=clip_cov",),
        ("actor.policy_loss.loss_mode=kl_cov",),
        # an update splits the contexts of a sequence
        (f"{CORRECTION}.rollout_is=sequence", *AGENT),
    ],
)
def test_old_log_probs_have_a_pass_where_they_are_read(
    config_file: Path, read_by: tuple[str, ...]
) -> None:
    assert has_old_log_prob_pass(load(config_file, *ONE_UPDATE, *read_by), "off")
    bypass = f"{CORRECTION}.bypass_mode=true"
    assert not has_old_log_prob_pass(load(config_file, *ONE_UPDATE, *read_by, bypass), "off")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        GROUPS,
        (f"{CORRECTION}.rollout_is=sequence",),
        (f"{CORRECTION}.rollout_is=token", *AGENT),
        ("actor.use_kl_loss=true", "actor.policy_loss.loss_mode=gspo"),
        (f"{CORRECTION}.rollout_is_batch_normalize=true",),  # not read without rollout_is
    ],
)
def test_one_update_computes_its_old_log_probs(
    config_file: Path, overrides: tuple[str, ...]
) -> None:
    cfg = load(config_file, *ONE_UPDATE, *overrides)
    assert not has_old_log_prob_pass(cfg, "off") and not has_old_log_prob_pass(cfg, "rollout")
    assert has_old_log_prob_pass(cfg, "recompute")


@pytest.mark.parametrize(
    ("overrides", "absent"),
    [
        ((), ["ref", "reward_model"]),
        (GROUPS, ["critic", "ref", "reward_model"]),
        ((*GROUPS, "actor.use_kl_loss=true"), ["critic", "reward_model"]),
        (("algorithm.adv_estimator=remax",), ["critic", "ref", "reward_model"]),
        (
            (*GROUPS, "critic.ppo_mini_batch_size=1", "critic.ppo_max_token_len_per_gpu=1"),
            ["critic", "ref", "reward_model"],
        ),
        (
            ("algorithm.adv_estimator=custom", "algorithm.custom_estimator.path=a.py"),
            ["critic", "ref", "reward_model"],
        ),
        (
            (
                "algorithm.adv_estimator=custom",
                "algorithm.custom_estimator.path=a.py",
                "algorithm.custom_estimator.needs=critic",
            ),
            ["ref", "reward_model"],
        ),
    ],
)
def test_models_of_a_run(config_file: Path, overrides: tuple[str, ...], absent: list[str]) -> None:
    cfg = validated(config_file, *overrides)
    assert absent_roles(cfg) == absent
    assert uses_critic(cfg) == ("critic" not in absent)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("algorithm.adv_estimator=rloo",),
            "algorithm.adv_estimator is rloo, which compares the responses of a prompt; rollout.n "
            "is 1; it must be at least 2",
        ),
        (
            ("algorithm.adv_estimator=gae_turn",),
            "algorithm.adv_estimator is gae_turn, of the turns of conversations; that needs "
            "rollout.environment",
        ),
        (
            ("algorithm.adv_estimator=maxrl", "rollout.n=4", "algorithm.use_kl_in_reward=true"),
            "algorithm.adv_estimator is maxrl, whose rewards must be 0 or more",
        ),
        (
            ("algorithm.adv_estimator=gdpo", "rollout.n=4", "algorithm.use_kl_in_reward=true"),
            "algorithm.adv_estimator is gdpo, which reads the parts of the score alone",
        ),
        (
            (*GROUPS, "critic.model_path=x"),
            "critic.model_path is x and algorithm.adv_estimator is grpo",
        ),
        (
            (*GROUPS, "trainer.critic_warmup=2"),
            "trainer.critic_warmup is 2 and algorithm.adv_estimator is grpo",
        ),
        (("algorithm.adv_estimator=custom",), "algorithm.custom_estimator.path is null; set both"),
        (("algorithm.custom_estimator.path=a.py",), "algorithm.adv_estimator is gae and"),
        (
            ("algorithm.custom_estimator.needs=[group]",),
            "algorithm.custom_estimator.needs is ['group'] and algorithm.adv_estimator is gae",
        ),
        (
            ("actor.policy_loss.loss_mode=custom",),
            "actor.policy_loss.custom_loss.path is null; set both",
        ),
        (
            ("actor.policy_loss.loss_mode=sao",),
            "actor.policy_loss.loss_mode is sao, whose ratio is to the engine's policy; that needs "
            "algorithm.rollout_correction.bypass_mode: true",
        ),
        (
            ("actor.policy_loss.loss_mode=gspo",),
            "actor.loss_agg_mode is token-mean; it must be seq-mean-token-mean",
        ),
        (
            ("actor.loss_scale_factor=3",),
            "actor.loss_scale_factor is 3; that needs actor.loss_agg_mode seq-mean-token-sum-norm",
        ),
        (
            ("actor.policy_loss.clip_cov_lb=6",),
            "actor.policy_loss.clip_cov_lb is 6.0; it must be below clip_cov_ub",
        ),
    ],
)
def test_contradictions_are_refused(
    config_file: Path, overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        validated(config_file, *overrides)


def test_entropy_coefficient_is_annealed_to_its_end(config_file: Path) -> None:
    actor = load(config_file, "actor.entropy_coeff=0.4", "actor.entropy_coeff_end=0.1").actor
    assert [entropy_coeff(actor, step, 4) for step in (1, 2, 3, 4)] == pytest.approx(
        [0.4, 0.3, 0.2, 0.1]
    )
    assert entropy_coeff(actor, 1, 1) == 0.4 and entropy_coeff(actor, 9, 4) == pytest.approx(0.1)
    constant = load(config_file, "actor.entropy_coeff=0.4").actor
    assert entropy_coeff(constant, 4, 4) == 0.4


def test_draws_are_a_function_of_seed_and_step() -> None:
    def first(seed: int, step: int) -> int:
        return int(torch.randint(1 << 40, (1,), generator=step_generator(seed, step)))

    assert first(1, 2) == first(1, 2)
    assert len({first(1, 2), first(1, 3), first(2, 2), first(2, 1)}) == 4


# A user's own functions


def example(function: str) -> str:
    """Return the Python block of docs/extending.md that defines the function."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$",
        (ROOT / "docs" / "extending.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return next(block for block in blocks if f"def {function}(" in block)


def estimator_settings(path: Path, *more: str) -> list[str]:
    return ["algorithm.adv_estimator=custom", f"algorithm.custom_estimator.path={path}", *more]


def loss_settings(path: Path) -> list[str]:
    return ["actor.policy_loss.loss_mode=custom", f"actor.policy_loss.custom_loss.path={path}"]


def test_functions_of_the_page_are_accepted(config_file: Path, tmp_path: Path) -> None:
    for name in ("estimate", "policy_loss"):
        (tmp_path / f"{name}.py").write_text(example(name))
    algorithm = load(config_file, *estimator_settings(tmp_path / "estimate.py")).algorithm
    assert load_estimator(algorithm).__name__ == "estimate"
    actor = load(config_file, *loss_settings(tmp_path / "policy_loss.py")).actor
    found = load_policy_loss(actor)
    assert found.function.__name__ == "policy_loss" and found.selection is None


ESTIMATE = "from rlhf_mc.algorithms.estimators import Estimate\ndef estimate(inputs):\n    "


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "return inputs.rewards",
            "returned Tensor; it must return rlhf_mc.algorithms.estimators.Estimate",
        ),
        (
            "return Estimate(inputs.scores)",
            "returned advantages of shape (4,); it must be the rewards' shape, (10,)",
        ),
        ("return Estimate(inputs.rewards.double())", "returned advantages of torch.float64"),
        ("return Estimate(inputs.rewards, 3)", "returned returns of shape int"),
        ("return Estimate(inputs.rewards + inputs.values)", "raised TypeError: "),
        ("raise SystemExit(0)", "raised SystemExit: 0 (mine.py:3)"),
        ("return 1 / 0", "raised ZeroDivisionError: division by zero (mine.py:3)"),
    ],
)
def test_estimators_that_return_something_else_are_refused(
    config_file: Path, tmp_path: Path, body: str, words: str
) -> None:
    (tmp_path / "mine.py").write_text(ESTIMATE + body)
    algorithm = load(config_file, *estimator_settings(tmp_path / "mine.py")).algorithm
    with pytest.raises(
        UserError,
        match=(
            r"^algorithm\.custom_estimator\.path .*mine\.py: estimate(, called with| raised "
            r"SystemExit)"
        ),
    ) as caught:
        load_estimator(algorithm)
    assert words in str(caught.value)


def test_estimator_with_a_critic_must_return_returns(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ESTIMATE + "return Estimate(inputs.rewards - inputs.values)")
    needs = "algorithm.custom_estimator.needs=critic"
    algorithm = load(config_file, *estimator_settings(tmp_path / "mine.py", needs)).algorithm
    with pytest.raises(
        UserError, match=r"returned no returns; with a critic in custom_estimator\.needs it must"
    ):
        load_estimator(algorithm)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "return inputs.log_probs.sum()",
            "returned no pair of a scalar loss and a dict of statistics",
        ),
        (
            "return inputs.advantages.sum(), {}",
            "returned a loss that is not a scalar tensor with a gradient",
        ),
        (
            "return inputs.log_probs, {}",
            "returned a loss that is not a scalar tensor with a gradient",
        ),
        ("return inputs.result(-inputs.log_probs)[0], {'a': 1.0}", "returned the statistic 'a'"),
        (
            "return inputs.result(-inputs.log_probs)[0], {'a': inputs.log_probs.sum()}",
            "without a gradient",
        ),
        ("raise SystemExit(0)", "raised SystemExit: 0 (mine.py:2)"),
        ("raise KeyError('x')", "raised KeyError: 'x' (mine.py:2)"),
    ],
)
def test_losses_that_return_something_else_are_refused(
    config_file: Path, tmp_path: Path, body: str, words: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def policy_loss(inputs):\n    {body}")
    actor = load(config_file, *loss_settings(tmp_path / "mine.py")).actor
    with pytest.raises(
        UserError,
        match=(
            r"^actor\.policy_loss\.custom_loss\.path .*mine\.py: policy_loss(, called| raised "
            r"SystemExit)"
        ),
    ) as caught:
        load_policy_loss(actor)
    assert words in str(caught.value)


def test_functions_that_exit_later_are_named(config_file: Path, tmp_path: Path) -> None:
    """Exit in the second call: the first one is the example's."""
    ends = "    calls.append(0)\n    if len(calls) > 1: sys.exit(0)\n    return "
    for name, result in (
        ("estimate", "Estimate(inputs.rewards)"),
        ("policy_loss", "(inputs.log_probs.sum(), {})"),
    ):
        imports = f"import sys\n{ESTIMATE.partition('def')[0]}"
        (tmp_path / f"{name}.py").write_text(
            f"{imports}calls = []\ndef {name}(inputs):\n{ends}{result}\n"
        )
    estimator = load_estimator(
        load(config_file, *estimator_settings(tmp_path / "estimate.py")).algorithm
    )
    policy_loss = load_policy_loss(
        load(config_file, *loss_settings(tmp_path / "policy_loss.py")).actor
    ).function
    for function, words in (
        (estimator, "estimate.py: estimate"),
        (policy_loss, "policy_loss.py: policy_loss"),
    ):
        with pytest.raises(UserError, match=f"path .*{words} raised SystemExit: 0 ") as caught:
            function(None)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_functions_that_cannot_be_called_are_refused(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def estimate(rewards, values): ...\npolicy_loss = 3")
    with pytest.raises(
        UserError, match=r"estimate\(rewards, values\) cannot be called as estimate\(inputs\)"
    ):
        load_estimator(load(config_file, *estimator_settings(tmp_path / "mine.py")).algorithm)
    with pytest.raises(UserError, match="'policy_loss' is not a function but int"):
        load_policy_loss(load(config_file, *loss_settings(tmp_path / "mine.py")).actor)
