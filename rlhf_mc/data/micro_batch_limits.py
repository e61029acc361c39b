"""The limit of a micro-batch in each pass over a batch. No torch here."""

from __future__ import annotations

from rlhf_mc.config.roles import PASSES
from rlhf_mc.config.schema import Config, get_setting, reward_models
from rlhf_mc.data.balance import Limit, Sequences


def micro_batch_limits(cfg: Config) -> dict[str, Limit]:
    """Return the limit of a micro-batch by phase: the pass's token budget or, without actor.use_dynamic_bsz, its number
    of sequences, by default the actor's. Phases of models that the run does not have never ask for theirs."""
    limits: dict[str, Limit] = {}
    for phase, settings in {**PASSES, **{role: f"{role}.forward" for role in reward_models(cfg)}}.items():
        limits[phase] = get_setting(cfg, f"{settings}_max_token_len_per_gpu")
        if not cfg.actor.use_dynamic_bsz:
            size = get_setting(cfg, f"{settings}_micro_batch_size_per_gpu") or cfg.actor.ppo_micro_batch_size_per_gpu
            assert size is not None, "config/checks.py ensures it"
            limits[phase] = Sequences(size)
    return limits
