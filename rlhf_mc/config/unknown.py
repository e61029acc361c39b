"""Messages for keys that schema.py does not have: what stands for a setting of an earlier version, what verl/keys.py
says of a verl key, or the most similar key.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections.abc import Sequence

from rlhf_mc.verl.keys import plain_key, rename_hint, split_patterns

_MOST_NAMED = 10
_NEAR = 0.75
"""Minimum similarity (difflib's ratio) of a misspelled name to the known one."""
_COMMON_NAMES = {"name", "path", "n", "type", "shuffle", "temperature", "dtype", "freeze"}
"""Last parts of keys that mean different things in different sections."""
_WRAPPERS = ("actor_rollout_ref", "reward", "config")
"""verl's sections that contain sections of schema.py."""

REMOVED: dict[str, str] = {
    "trainer.max_skipped_updates_in_a_row trainer.max_consecutive_skipped_updates": "it is 3: leave it out",
    "{ref,reward_model,reward_models.*}.megatron.{recompute_granularity,use_distributed_optimizer,overlap_grad_reduce,"
    "grad_offload,optimizer_offload}": "it does nothing for a model that is never trained: leave it out",
    "*.use_dynamic_bsz *.log_prob_use_dynamic_bsz": "micro-batches are always by token budget: leave it out",
    "*micro_batch_size *micro_batch_size_per_gpu": (
        "use ..._max_token_len_per_gpu, the tokens of a micro-batch: that number of sequences times"
        " (data.max_prompt_length + data.max_response_length)"
    ),
    "critic.enable": "algorithm.adv_estimator decides whether there is a critic: leave it out",
    "critic.shuffle": "the critic's mini-batches are shuffled as the actor's: use actor.shuffle",
    "trainer.rollout_data_save_freq": "trainer.rollout_data_dir has every step: leave it out",
    "trainer.log_train_freq": "it is every 10 steps; trainer.log_train_generations says how many (0: none)",
    "algorithm.custom_estimator.name": "the function's name is `estimate`: leave it out",
    "actor.policy_loss.custom_loss.name": "the function's name is `policy_loss`: leave it out",
    "rollout.custom_engine.name": "the class's name is `Engine`: leave it out",
    "algorithm.custom_estimator.needs_{critic,group,greedy_baseline}": (
        "use algorithm.custom_estimator.needs, a list of critic, group and greedy_baseline"
    ),
    "reward.on_error": "use reward.default_score: null ends the run, a number is the score",
    "health.responses health.responses.*": (
        "list the rule in health.disable, health.note, health.warn, health.stop or health.roll_back; for fixed_kl_coef"
        " give health.kl_coef"
    ),
    "health.ppo_kl_min": "it is a third of health.ppo_kl_max: leave it out",
    "health.grad_norm_min": "it is a quarter of health.grad_norm_max: leave it out",
    "health.entropy_collapse": "it is a tenth of health.entropy_min: leave it out",
    "health.reward_window": "it is 5 times health.window: leave it out",
    "health.grad_norm_growth": "it is 10; health.disable may list grad_norm_growing",
    "health.entropy_drop": "it is 0.5; health.disable may list entropy_falling",
    "health.vf_clipfrac_max": "it is 0.05; health.disable may list vf_clipfrac_high",
    "health.explained_variance_min": "it is 0; health.disable may list explained_variance_low",
    "health.saturated_share": "it is 0.99; health.disable may list reward_saturated",
    "health.equal_groups_max": "it is 0.9; health.disable may list equal_groups",
    "health.throughput_min": "it is 0.5; health.disable may list throughput_falling",
    "health.idle_share_max": "it is 0.1; health.disable may list replicas_unbalanced",
    "health.memory_max": "it is 0.95; health.disable may list memory_near_limit",
}
"""Settings of earlier versions, by patterns as in verl/keys.py, and what stands for each."""


def explain(unknown: Sequence[tuple[str, str]], known: Sequence[str]) -> str:
    """Return one line on all unknown keys. unknown: (file or override, key) of each."""
    if len(unknown) == 1:
        origin, key = unknown[0]
        return f"{origin}: unknown key {key!r}; {_replacement(key, known)}"
    origins = {origin for origin, _ in unknown}
    where = f"{origins.pop()}: " if len(origins) == 1 else ""
    listed = [
        f"{key!r}{'' if where else f' ({origin})'}: {_replacement(key, known)}" for origin, key in unknown[:_MOST_NAMED]
    ]
    more = [f"and {len(unknown) - _MOST_NAMED} more"] if len(unknown) > _MOST_NAMED else []
    return f"{where}{len(unknown)} unknown keys: {'; '.join([*listed, *more])}"


def _replacement(key: str, known: Sequence[str]) -> str:
    parts = key.lstrip("+~").split(".")
    name = ".".join(parts)
    if name in known:
        return (
            "a key with dots is for the command line; in a file sections are nested"
            if name == key
            else f"write it without {key[: -len(name)]!r}: {name}"
        )
    if (hint := _removal_hint(name) or rename_hint(plain_key(name))) is not None:
        return hint
    near = nearest_key(name, known)
    return (
        f"the nearest known key is {near!r}"
        if near
        else "no known key is similar (rlhf_mc/config/schema.py lists them)"
    )


def is_removed(key: str) -> bool:
    """Return whether the key was a setting of an earlier version."""
    return _removal_hint(key) is not None


@functools.cache
def _removal_hint(key: str) -> str | None:
    """Return what stands for a setting of an earlier version, or None."""
    key = plain_key(key)
    return next(
        (
            hint
            for patterns, hint in REMOVED.items()
            for one in split_patterns(patterns)
            if fnmatch.fnmatchcase(key, one)
        ),
        None,
    )


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Return the known key that is most similar to one of verl's or a misspelled one, or None."""
    parts = key.split(".")
    is_inside = len(parts) > 1 and parts[0] in _WRAPPERS
    return _nearest(parts, known) or (_nearest(parts[1:], known) if is_inside else None)


def _nearest(parts: Sequence[str], known: Sequence[str]) -> str | None:
    """Return the most similar known key, or None. Keys of the same or a similarly spelled section come first, then a
    key of another section with the same last part, if there is only one."""
    name = ".".join(parts)
    if name in known:
        return name
    sections = list(dict.fromkeys(key.split(".")[0] for key in known))
    section = parts[0] if parts[0] in sections else _closest(parts[0], sections)
    if section is not None:
        rest = {key.split(".", 1)[1]: key for key in known if key.startswith(f"{section}.")}
        same_name = [inside for inside in rest if inside.rsplit(".", 1)[-1] == parts[-1]]
        if len(same_name) == 1:
            return rest[same_name[0]]
        flat = {inside.replace(".", "_"): key for inside, key in rest.items()}
        last = {inside.rsplit(".", 1)[-1]: key for inside, key in rest.items()}
        # Whole names are compared, as a section may be missing; a long common section does not make two keys similar.
        close = _closest("_".join(parts[1:]), list(flat))
        if close and (_closest(parts[-1], [flat[close].rsplit(".", 1)[-1]]) or len(parts) == 2):
            return flat[close]
        if close := _closest(parts[-1], list(last)):
            return last[close]
    elsewhere = [key for key in known if key.rsplit(".", 1)[-1] == parts[-1]]
    return elsewhere[0] if len(elsewhere) == 1 and parts[-1] not in _COMMON_NAMES else None


def _closest(word: str, words: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word[:100], words, n=1, cutoff=_NEAR)), None)
