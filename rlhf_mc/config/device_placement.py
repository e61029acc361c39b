"""The device placement of each phase: what the offload schedule establishes and the planner counts.
No torch here."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_mc.config.reward_schema import unnamed

UNCHANGED = None
"""Row of a phase that needs nothing on the device: the placement stays."""
ROLES = ("actor", "critic", "ref", "rollout", "reward_model")

# fmt: off
TABLE: dict[str, tuple[str, str, str, str, str] | None] = {
    #                  actor               critic              reference rollout engine      scorer
    "update_weights": ("params",           "",                 "",       "weights",          ""),
    "gen":            ("",                 "",                 "",       "weights kv_cache", ""),
    "testing":        ("",                 "",                 "",       "weights kv_cache", ""),
    "reward":          UNCHANGED,
    "old_log_prob":   ("params",           "",                 "",       "",                 ""),
    "ref":            ("",                 "",                 "params", "",                 ""),
    "reward_model":   ("",                 "",                 "",       "",              "params"),
    "teacher_model":  ("",                 "",                 "",       "",              "params"),
    "values":         ("",                 "params",           "",       "",                 ""),
    "sum_log_probs":   UNCHANGED,
    "adv":             UNCHANGED,
    "update_critic":  ("",                 "params grads",     "",       "",                 ""),
    "update_actor":   ("params grads",     "",                 "",       "",                 ""),
    "load_checkpoint":("params optimizer", "params optimizer", "",       "",                 ""),
    "save_checkpoint":("params optimizer", "params optimizer", "",       "",                 ""),
    "export":         ("params",           "",                 "",       "",                 ""),
}
# fmt: on
"""The parts that each phase needs on the device. All others are offloaded if the settings allow it:
params, grads and optimizer by
{actor,critic,ref,reward_model}.megatron.{param,grad,optimizer}_offload, both parts of the rollout
engine by rollout.free_cache_engine. An update brings the optimizer state for each of its steps
(Offload.optimizer_step); it stays between them where the planner finds room. Each of reward_models
and each teacher has a phase of its own, in which it is the scorer. Weights that the engine shares
with the actor (reshard.share_weights) stay on the device: the actor's params then cannot be
offloaded, and the engine's sleep skips them."""

Row = Mapping[str, frozenset[str]]


def parts_on_device(phase: str, shared: Mapping[str, str] | None = None) -> Row | None:
    """Return the parts that the phase needs on the device, by role; None for UNCHANGED. The phase
    of a reward model or a teacher is named after its role, and needs that model.
    shared: shared_models of config/roles.py."""
    row = TABLE[unnamed(phase)]
    if row is None:
        return None
    is_scoring = unnamed(phase) in ("reward_model", "teacher_model")
    roles = (*ROLES[:-1], phase if is_scoring else ROLES[-1])
    parts = {role: frozenset(names.split()) for role, names in zip(roles, row, strict=True)}
    for role, other in (shared or {}).items():
        if role in parts:
            parts[other] |= parts.pop(role)
    return parts
