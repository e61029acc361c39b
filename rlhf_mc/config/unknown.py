"""Messages for keys that schema.py does not have: the replacement of a verl or renamed key, or the most similar key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_MOST_NAMED = 10
_NEAR = 0.75
"""Minimum similarity (difflib's ratio) of a misspelled name to the known one."""
_COMMON_NAMES = {"name", "path", "n", "type", "shuffle", "temperature", "dtype", "freeze"}
"""Last parts of keys that mean different things in different sections."""
_WRAPPERS = ("actor_rollout_ref", "reward", "config")
"""verl's sections that contain sections of schema.py."""

_INSTEAD = {
    "reward_model.enable": "use reward_model.model_path (null: no reward model)",
    "reward_model.model.path": "use reward_model.model_path",
    "overlong_buffer.enable": "use reward.overlong_buffer.len (0: no penalty)",
    "reward_model.overlong_buffer.len": "use reward.overlong_buffer.len",
    "reward_model.overlong_buffer.penalty_factor": "use reward.overlong_buffer.penalty_factor",
    "overlong_buffer.log": "the penalty is always logged: leave it out",
    "critic.model.path": "use critic.model_path",
    "critic.model.tokenizer_path": "the critic reads the actor's tokens: model.tokenizer_path",
    "ref.model.path": "the reference starts from model.path",
    "actor.clip_ratio": "use actor.clip_ratio_low and actor.clip_ratio_high",
    **dict.fromkeys(
        ("critic.use_dynamic_bsz", "ref.log_prob_use_dynamic_bsz", "rollout.log_prob_use_dynamic_bsz"),
        "use actor.use_dynamic_bsz (one switch for all passes)",
    ),
    "actor.grad_clip": "use actor.optim.clip_grad",
    "critic.grad_clip": "use critic.optim.clip_grad",
    "actor.strategy": "models are trained by Megatron-Core: leave it out",
    "critic.strategy": "models are trained by Megatron-Core: leave it out",
    "ref.strategy": "models are run by Megatron-Core: leave it out",
    "reward_model.strategy": "models are run by Megatron-Core: leave it out",
    "rollout.name": "vLLM generates: leave it out",
    "rollout.mode": "vLLM generates in the training processes: leave it out",
    "rollout.dtype": "vLLM's is that of the actor: actor.megatron.dtype",
    "rollout.top_k": "responses are sampled from the full distribution: leave it out",
    "rollout.top_p": "responses are sampled from the full distribution: leave it out",
    "rollout.do_sample": "use rollout.temperature, and rollout.val_kwargs.temperature (0: greedy)",
    "val_kwargs.do_sample": "use rollout.val_kwargs.temperature (0: greedy)",
    "rollout.prompt_length": "use data.max_prompt_length",
    "rollout.response_length": "use data.max_response_length",
    "rollout.load_format": "vLLM's weights come from the actor: leave it out",
    "trainer.nnodes": "torchrun or srun says how many processes there are: leave it out",
    "trainer.n_gpus_per_node": "torchrun or srun says how many processes there are: leave it out",
    "trainer.project_name": "what a run writes goes to trainer.default_local_dir: leave it out",
    "trainer.experiment_name": "what a run writes goes to trainer.default_local_dir: leave it out",
    "trainer.default_hdfs_dir": "what a run writes goes to trainer.default_local_dir: leave it out",
    "trainer.max_actor_ckpt_to_keep": "use trainer.max_ckpt_to_keep (actor and critic are one checkpoint)",
    "trainer.max_critic_ckpt_to_keep": "use trainer.max_ckpt_to_keep (actor and critic are one checkpoint)",
    "trainer.balance_batch": "batches are always balanced: leave it out",
    "data.filter_overlong_prompts_workers": "the ranks filter in parallel, each a share of the rows: leave it out",
    "model.custom_chat_template": "write the template to a file: data.chat_template_path",
    "data.val_batch_size": "all validation prompts are generated at once: leave it out",
    "data.tokenizer": "use model.tokenizer_path",
    "trainer.max_skipped_updates_in_a_row": "it is now trainer.max_consecutive_skipped_updates",
    "model.use_remove_padding": "sequences are always packed: leave it out",
    "model.enable_gradient_checkpointing": "use actor.megatron.recompute_granularity",
}
"""Replacements of verl's keys and of renamed ones, or the reason why none is needed. The keys are without
actor_rollout_ref."""

_LAST_NAMES = {
    "context_parallel_size": "context parallelism is not supported: attention takes whole sequences. For long ones use "
    "tensor_model_parallel_size with sequence_parallel, and recompute_granularity",
    "ulysses_sequence_parallel_size": "it is not supported: attention takes whole sequences. For long ones use "
    "megatron.tensor_model_parallel_size with sequence_parallel",
    "lora_rank": "LoRA is not supported",
    "trust_remote_code": "code of a checkpoint is never run: leave it out",
    "lr_warmup_steps_ratio": "use optim.lr_warmup_steps, a number of PPO steps",
    "warmup_style": "use optim.lr_decay_style",
    "min_lr_ratio": "use optim.min_lr",
}
"""Replacements of keys that several of verl's sections have, by their last part."""

_SECTIONS = {
    "fsdp_config": "models are trained by Megatron-Core, not FSDP: see the megatron section",
    "filter_groups": "dynamic sampling is not supported: leave it out",
    "ray_init": "there is no Ray: leave it out",
    "ray_kwargs": "there is no Ray: leave it out",
    "reward_manager": "a function of custom_reward_function.path is called by its form: leave it out",
    "hybrid_engine": "training and generation always share their processes: leave it out",
}


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
    wrapped = len(parts) > 1 and parts[0] in _WRAPPERS
    inner = parts[1:] if wrapped else parts
    for start in range(len(inner)):
        if (found := _INSTEAD.get(".".join(inner[start:]))) is not None:
            return found
    section = next((part for part in parts if part in _SECTIONS), None)
    if section is not None:
        return _SECTIONS[section]
    if parts[-1] in _LAST_NAMES:
        return _LAST_NAMES[parts[-1]]
    near = _nearest(parts, known) or (_nearest(inner, known) if wrapped else None)
    return (
        f"the nearest known key is {near!r}"
        if near
        else "no known key is similar (rlhf_mc/config/schema.py lists them)"
    )


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
        if close and (_are_near(parts[-1], flat[close].rsplit(".", 1)[-1]) or len(parts) == 2):
            return flat[close]
        if close := _closest(parts[-1], list(last)):
            return last[close]
    elsewhere = [key for key in known if key.rsplit(".", 1)[-1] == parts[-1]]
    return elsewhere[0] if len(elsewhere) == 1 and parts[-1] not in _COMMON_NAMES else None


def _closest(word: str, words: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word[:100], words, n=1, cutoff=_NEAR)), None)


def _are_near(word: str, other: str) -> bool:
    return bool(_closest(word, [other]))
