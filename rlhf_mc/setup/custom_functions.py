"""The advantage estimator and the policy loss of a run: built-in ones (algorithms/), or the user's
own functions, which are called with a small example before the run starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlhf_mc.algorithms.estimators import (
    ADVANTAGE_ESTIMATORS,
    Estimate,
    EstimatorFunction,
    EstimatorInputs,
    token_rewards,
)
from rlhf_mc.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossFunction,
    PolicyLossInputs,
)
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import estimator_needs
from rlhf_mc.config.schema import ActorConfig, AlgorithmConfig
from rlhf_mc.runtime.user_function import describe_error, load_function


def load_estimator(algorithm: AlgorithmConfig) -> EstimatorFunction:
    """Return the run's advantage estimator. Raise UserError if the user's cannot be loaded, or if
    it does not return what it should for a small example."""
    if algorithm.adv_estimator != "custom":
        return ADVANTAGE_ESTIMATORS[algorithm.adv_estimator]
    section = "algorithm.custom_estimator"
    custom = algorithm.custom_estimator
    assert custom.path is not None, "config/checks.py ensures it"
    function: EstimatorFunction = load_function(section, custom.path, "estimate")
    inputs = _example_inputs(algorithm)
    where = f"{section}.path {custom.path}: estimate, called with an example of 4 responses,"
    estimate = _called(function, inputs, where)
    if problem := _estimate_problem(estimate, inputs, estimator_needs(algorithm).critic):
        raise UserError(f"{where} {problem}")
    return function


def load_policy_loss(actor: ActorConfig) -> PolicyLoss:
    """Return the run's policy loss. Raise UserError as load_estimator does."""
    if actor.policy_loss.loss_mode != "custom":
        return POLICY_LOSSES[actor.policy_loss.loss_mode]
    section = "actor.policy_loss.custom_loss"
    custom = actor.policy_loss.custom_loss
    assert custom.path is not None, "config/checks.py ensures it"
    function: PolicyLossFunction = load_function(section, custom.path, "policy_loss")
    log_probs = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    inputs = PolicyLossInputs(
        log_probs=log_probs,
        old_log_probs=torch.tensor([-1.1, -0.4, -2.0]),
        advantages=torch.tensor([1.0, 1.0, -0.5]),
        weights=torch.full((3,), 1 / 3),
        sequence=torch.tensor([0, 0, 1]),
        num_tokens=3,
        num_sequences=2,
        clip_low=actor.clip_ratio_low,
        clip_high=actor.clip_ratio_high,
        clip_c=actor.clip_ratio_c,
        kl_coef=actor.policy_loss.ppo_kl_coef,
        tau_pos=actor.policy_loss.tau_pos,
        tau_neg=actor.policy_loss.tau_neg,
    )
    where = f"{section}.path {custom.path}: policy_loss, called with an example of 3 tokens,"
    result = _called(function, inputs, where)
    if problem := _loss_problem(result):
        raise UserError(f"{where} {problem}")
    return PolicyLoss(function)


def _called(function: Callable[[Any], Any], inputs: object, where: str) -> object:
    """Return the result of the user's function for the example. Raise UserError if it raises."""
    try:
        return function(inputs)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{where} raised {describe_error(error)}") from error


def _loss_problem(result: object) -> str | None:
    """Return in words what is wrong with the result of a policy loss, or None."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        return "returned no pair of a scalar loss and a dict of statistics"
    loss, stats = result
    if not isinstance(loss, torch.Tensor) or loss.shape != () or not loss.requires_grad:
        return (
            "returned a loss that is not a scalar tensor with a gradient: a sum over "
            "inputs.weights * token losses"
        )
    for name, value in stats.items():
        if not isinstance(value, torch.Tensor) or value.shape != () or value.requires_grad:
            return (
                f"returned the statistic {name!r}, which is not a scalar tensor without a gradient"
            )
    return None


def _example_inputs(algorithm: AlgorithmConfig) -> EstimatorInputs:
    """Return the inputs of two prompts with two responses each, of 3, 1, 2 and 4 tokens."""
    needs = estimator_needs(algorithm)
    response_lens = torch.tensor([3, 1, 2, 4])
    scores = torch.tensor([1.0, 0.0, 0.5, 0.5])
    return EstimatorInputs(
        rewards=token_rewards(scores, None, 0.0, response_lens),
        response_lens=response_lens,
        scores=scores,
        group=torch.tensor([0, 0, 1, 1]),
        values=torch.full((10,), 0.25) if needs.critic else None,
        greedy_scores=torch.tensor([1.0, 1.0, 0.0, 0.0]) if needs.greedy_baseline else None,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        gae_lambda_value=algorithm.gae_lambda_value,
        gae_lambda_policy=algorithm.gae_lambda_policy,
        length_adaptive_alpha=algorithm.length_adaptive_alpha,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
    )


def _estimate_problem(estimate: object, inputs: EstimatorInputs, needs_returns: bool) -> str | None:
    """Return in words what is wrong with the result of an estimator, or None."""
    if not isinstance(estimate, Estimate):
        return (
            f"returned {type(estimate).__name__}; it must return "
            "rlhf_mc.algorithms.estimators.Estimate"
        )
    if needs_returns and estimate.returns is None:
        return (
            "returned no returns; with a critic in custom_estimator.needs it must, as the critic "
            "learns them"
        )
    for name, values in (("advantages", estimate.advantages), ("returns", estimate.returns)):
        if values is None and name == "returns":
            continue
        if not isinstance(values, torch.Tensor) or values.shape != inputs.rewards.shape:
            shape = (
                tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            )
            return (
                f"returned {name} of shape {shape}; it must be the rewards' shape, "
                f"{tuple(inputs.rewards.shape)}"
            )
        if values.dtype != inputs.rewards.dtype:
            return (
                f"returned {name} of {values.dtype}; it must be the rewards' type, "
                f"{inputs.rewards.dtype}"
            )
    return None
