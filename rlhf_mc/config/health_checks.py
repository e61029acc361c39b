"""Checks of the health settings together with others. No torch."""

from __future__ import annotations

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.health_schema import HealthConfig, rolls_back
from rlhf_mc.config.roles import uses_critic, uses_reference
from rlhf_mc.config.schema import Config, MegatronConfig, layouts


def check_health(cfg: Config) -> None:
    """Raise UserError for bounds in the wrong order, and for a response that the run cannot carry out."""
    health = cfg.health
    _check_order(health)
    if rolls_back(health) and cfg.trainer.save_freq < 1:
        raise UserError(
            f"health.responses.{_rule_with(health, 'roll_back')} is roll_back; that needs checkpoints: "
            f"trainer.save_freq of at least 1 (now {cfg.trainer.save_freq})"
        )
    if health.enable and health.responses.kl_explosion == "fixed_kl_coef":
        if health.kl_coef is None:
            raise UserError("health.responses.kl_explosion is fixed_kl_coef; that needs a coefficient: health.kl_coef")
        if not uses_reference(cfg):
            raise UserError(
                "health.responses.kl_explosion is fixed_kl_coef; that needs a KL term: algorithm.use_kl_in_reward or "
                "actor.use_kl_loss: true"
            )
    if health.out_of_memory == "halve_tokens":
        _check_halving(cfg)


def _rule_with(health: HealthConfig, response: str) -> str:
    return next(name for name, value in vars(health.responses).items() if value == response)


def _check_order(health: HealthConfig) -> None:
    pairs = (
        ("ppo_kl_min", "ppo_kl_max"),
        ("ppo_kl_max", "ppo_kl_explosion"),
        ("grad_norm_min", "grad_norm_max"),
        ("entropy_collapse", "entropy_min"),
    )
    for low, high in pairs:
        least = getattr(health, low)
        most = getattr(health, high)
        if least > most:
            raise UserError(f"health.{low} is {least:g}, above health.{high}, which is {most:g}")


def _check_halving(cfg: Config) -> None:
    setting = "health.out_of_memory is halve_tokens"
    if not cfg.actor.use_dynamic_bsz:
        raise UserError(f"{setting}; that needs a token budget: actor.use_dynamic_bsz: true")
    for role in ("actor", "critic") if uses_critic(cfg) else ("actor",):
        for key, value, wanted in _conditions(layouts(cfg)[role]):
            if value != wanted:
                raise UserError(
                    f"{setting}; that needs {role}.megatron.{key}: {str(wanted).lower()} (now {value}), since no rank "
                    "may wait for another within an update"
                )


def _conditions(megatron: MegatronConfig) -> list[tuple[str, object, object]]:
    """Return (setting, its value, the value with which a rank computes its gradients without another)."""
    return [
        ("tensor_model_parallel_size", megatron.tensor_model_parallel_size, 1),
        ("pipeline_model_parallel_size", megatron.pipeline_model_parallel_size, 1),
        ("expert_model_parallel_size", megatron.expert_model_parallel_size, 1),
        ("overlap_grad_reduce", megatron.overlap_grad_reduce, False),
    ]
