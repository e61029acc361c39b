"""verl's layouts: settings of its Megatron sections whose value changes, what FSDP's settings
become, and the defaults of each model's layout. Numbers that are trained do not depend on any of
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlhf_mc.config.model_schema import TRAINING_ONLY
from rlhf_mc.config.roles import tokens_on_rank
from rlhf_mc.verl.keys import (
    OFF,
    MappedSetting,
    Settings,
    implied,
    int_or_default,
    not_needed,
    not_supported,
    renamed,
    same,
    verl_default,
)

_VERL_MEGATRON: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "param_offload": False,
    "grad_offload": False,
    "optimizer_offload": False,
    "use_distributed_optimizer": True,
    "recompute_granularity": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "dtype": "bfloat16",
}
"""Settings of megatron that a role inherits from the actor here, with verl's defaults for actor and
critic. verl's reference has the actor's sizes and offload, and this type."""
FULL = "full"
ASKED_STRATEGY = "--strategy"
"""The user's choice for a run of FSDP, among verl's settings: fsdp2 or megatron."""
_SHARDS_MORE = re.compile(r"(actor|critic|ref)\..*(model|expert)_parallel_size$")
_OWN = {"critic": tuple(_VERL_MEGATRON), "ref": ("dtype",)}
"""Settings that a role of verl's does not inherit from the actor."""


def is_fsdp(verl: Settings) -> bool:
    """Return whether verl trains with FSDP, as it does unless its settings name Megatron."""
    return (named_engine(verl) or engine_by_keys(verl)) != "megatron"


def fsdp_obstacle(verl: Settings) -> str | None:
    """Return why a run of FSDP gets Megatron's layout; None: it stays FSDP2."""
    if verl.get(ASKED_STRATEGY) == "megatron":
        return f"by {ASKED_STRATEGY} megatron"
    for key in ("model.lora_rank", "critic.model.lora_rank"):
        if int_or_default(verl, key) > 0:
            return f"{key} is {verl[key]}, and fsdp2 has no LoRA"
    for key, value in verl.items():
        if _SHARDS_MORE.match(key) and type(value) is int and value > 1:
            return f"{key} is {value}, which fsdp2 does not have"
    return None


def is_fsdp2(verl: Settings) -> bool:
    """Return whether the run becomes one of FSDP2."""
    return is_fsdp(verl) and fsdp_obstacle(verl) is None


def without_roles_layouts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of ours without the layouts of the other roles: they then follow the
    actor's."""
    layout = (*_VERL_MEGATRON, "sequence_parallel", "dynamic_context_parallel", "cp_comm_type")
    not_of_layout = ("dtype", "use_distributed_optimizer")

    def is_layout(key: str) -> bool:
        role, _, name = key.partition(".megatron.")
        return role != "actor" and name in layout and name not in not_of_layout

    return {key: value for key, value in settings.items() if not is_layout(key)}


def named_engine(verl: Settings) -> str | None:
    """Return the engine that a setting names, or None."""
    return verl.get("model_engine") or verl.get("actor.model_engine") or verl.get("actor.strategy")


def engine_by_keys(keys: Iterable[str]) -> str:
    """Return megatron if the sections of models are Megatron's alone, else fsdp."""
    names = set(keys)
    is_megatron = any(".megatron." in key for key in names) and not any(
        ".fsdp" in key for key in names
    )
    return "megatron" if is_megatron else "fsdp"


def layout_defaults(
    verl: Settings, settings: Mapping[str, Any], roles: list[str]
) -> Iterator[MappedSetting]:
    """Yield verl's defaults of each model's layout that differ from what the model would have here.
    settings: ours. roles: the models besides the actor."""
    if is_fsdp(verl):
        yield from _fsdp_defaults(verl, settings, roles)
    else:
        for key in (f"{role}.megatron.{name}" for role in roles for name in _OWN.get(role, ())):
            name = key.rpartition(".")[2]
            default = _VERL_MEGATRON[name]
            if key not in settings and settings.get(f"actor.megatron.{name}", default) != default:
                yield verl_default(key, default, "ours: the actor's")
    for role in ("actor", *roles):
        key = f"{role}.megatron.sequence_parallel"
        if (
            key not in settings
            and int_or_default(settings, f"{role}.megatron.tensor_model_parallel_size", 1) > 1
        ):
            yield verl_default(key, True, "ours: false" if role == "actor" else "ours: the actor's")


def _fsdp_defaults(
    verl: Settings, settings: Mapping[str, Any], roles: list[str]
) -> Iterator[MappedSetting]:
    if is_fsdp2(verl) and "actor.strategy" not in settings:
        yield verl_default("actor.strategy", "fsdp2", "verl's fsdp; ours: megatron")
    for key in list(settings) if is_fsdp2(verl) else ():
        is_size = key.endswith(".megatron.tensor_model_parallel_size")
        if is_size and int_or_default(settings, key, 1) > 1:
            role = key.removesuffix(".megatron.tensor_model_parallel_size")
            yield verl_default(f"{role}.strategy", "megatron", f"for {key}; ours: the actor's")
    actor = "actor.megatron.recompute_granularity"
    critic = "critic.megatron.recompute_granularity"
    if actor not in settings:
        yield verl_default(actor, FULL, "verl's enable_gradient_checkpointing is true; ours: null")
    if "critic" in roles and critic not in settings and settings.get(actor, FULL) != FULL:
        yield verl_default(
            critic, FULL, "verl's enable_gradient_checkpointing is true; ours: the actor's"
        )
    freed = "actor.megatron.grad_offload"
    if freed not in settings and not is_fsdp2(verl):
        yield verl_default(freed, True, "FSDP has no gradients outside the update; ours: false")


def layout_hints(verl: Settings, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (subject, what to do) where a layout cannot be converted."""
    if not is_fsdp(verl) or "actor.megatron.tensor_model_parallel_size" in settings:
        return
    chooses = "With `--nodes N --gpus-per-node N --gpu h100` tools/from_verl.py"
    if (obstacle := fsdp_obstacle(verl)) is None:
        text = (
            f"FSDP stays FSDP2. {chooses} says whether it fits, and whether Megatron's layout is "
            f"faster, which {ASKED_STRATEGY} megatron takes"
        )
    else:
        text = (
            f"FSDP becomes tensor and pipeline parallelism, of size 1 if none is given ({obstacle})"
            f". {chooses} chooses them by the planner's search"
        )
    yield "note: layout", text


def _num_ranks(verl: Settings) -> int:
    """Return verl's GPUs that hold models."""
    nodes = int_or_default(verl, "trainer.nnodes", 1)
    return nodes * int_or_default(verl, "trainer.n_gpus_per_node", 8)


# ---------------------------------------------------------------- micro-batches


def is_dynamic(key: str, verl: Settings) -> bool:
    """Return whether verl's micro-batches of the pass that the key belongs to are by token
    budget."""
    role = key.partition(".")[0]
    switch = (
        f"{role}.log_prob_use_dynamic_bsz"
        if role in ("rollout", "ref")
        else f"{role}.use_dynamic_bsz"
    )
    switches = (switch, "critic.use_dynamic_bsz") if role == "reward_model" else (switch,)
    values = [
        value
        for switch in (*switches, "actor.use_dynamic_bsz")
        if (value := verl.get(switch)) is not None
    ]
    return bool(values and values[0])


def longest_sequence(verl: Settings) -> int:
    return int_or_default(verl, "data.max_prompt_length", 512) + int_or_default(
        verl, "data.max_response_length", 512
    )


def micro_batch(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert a number of sequences to the tokens of as many of the longest ones."""
    if value is None or is_dynamic(key, verl):
        return implied("micro-batches are by token budget")
    if type(value) is not int:
        return not_supported("it is not an integer")
    name = key.partition("micro_batch_size")[0]
    name = "reward_model.forward_" if name == "reward_model." else name
    longest = tokens_on_rank(longest_sequence(verl), context_size(key, verl))
    return renamed(
        f"{name}max_token_len_per_gpu", value * longest, f"{value} sequences of {longest} tokens"
    )


def token_budget(key: str, value: Any, verl: Settings) -> MappedSetting:
    if not is_dynamic(key, verl):
        return not_needed("use_dynamic_bsz is off: the number of sequences is converted")
    return same(key, value)


def dynamic(key: str, value: Any, verl: Settings) -> MappedSetting:
    if value:
        return implied("micro-batches are by token budget")
    return not_needed(
        "a number of sequences is converted to a token budget; no number depends on it"
    )


def micro_batch_of_all(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert a micro-batch size of verl's first versions: the sequences of all GPUs together."""
    ranks = _num_ranks(verl)
    is_used = value not in OFF and not is_dynamic(key, verl)
    if is_used and (type(value) is not int or value % ranks):
        return not_supported(f"it is no multiple of the {ranks} GPUs: use {key}_per_gpu")
    return micro_batch(key, value // ranks if is_used else None, verl)


# ---------------------------------------------------------------- converters


def gradient_checkpointing(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert enable_gradient_checkpointing, which verl reads with FSDP alone."""
    if not is_fsdp(verl):
        return not_needed(
            "Megatron's is megatron.override_transformer_config.recompute_granularity, in verl too"
        )
    role = "critic" if key.startswith("critic.") else "actor"
    return renamed(f"{role}.megatron.recompute_granularity", FULL if value else None)


def fsdp_offload(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert param_offload, optimizer_offload and offload_policy of FSDP, and VeOmni's of the same
    meaning."""
    role = key.partition(".")[0]
    section, _, name = key.rpartition(".")
    if name in ("offload_policy", "enable_fsdp_offload"):
        of_actor = ("actor.fsdp_config.offload_policy", "actor.veomni.enable_fsdp_offload")
        inherits = role in ("critic", "ref") and any(map(verl.get, of_actor))
        if is_fsdp2(verl) and (value or inherits):
            return renamed(f"{role}.fsdp_config.offload_policy", bool(value))
        return renamed(f"{role}.megatron.param_offload", value=True) if value else implied("off")
    if name in TRAINING_ONLY and role not in ("actor", "critic"):
        return not_needed("it does nothing for a model that is never trained")
    policies = (f"{section}.offload_policy", f"{section}.enable_fsdp_offload")
    if is_fsdp2(verl) and any(map(verl.get, policies)):
        return not_needed("offload_policy has all on the host")
    return renamed(f"{role}.megatron.{name}", bool(value))


def fsdp_setting(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert fsdp_size and reshard_after_forward."""
    name = key.rpartition(".")[2]
    if not is_fsdp2(verl):
        return not_needed("it is of FSDP, and changes speed or memory alone")
    if name == "fsdp_size" and not 0 < int_or_default(verl, key) < _num_ranks(verl):
        value = -1
    return renamed(f"{key.partition('.')[0]}.fsdp_config.{name}", value)


def strategy(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert the engine that a setting names, which is of all models here."""
    if not is_fsdp(verl):
        return implied("Megatron-Core")
    if (obstacle := fsdp_obstacle(verl)) is not None:
        return not_needed(f"models are trained by Megatron-Core: {obstacle}")
    return renamed("actor.strategy", "fsdp2", "of all models")


def ulysses(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert Ulysses' sequence parallelism, which is context parallelism. A token budget is of one
    rank in both."""
    if value in (None, 1):
        return implied("off")
    if not is_fsdp(verl):
        return not_needed("it is of FSDP")
    role = key.partition(".")[0]
    return renamed(f"{role}.megatron.context_parallel_size", value)


def context_size(key: str, verl: Settings) -> int:
    """Return the ranks that share each sequence in a role's passes, by Ulysses or by context
    parallelism."""
    role = key.partition(".")[0]
    ulysses_keys = [
        f"{section}ulysses_sequence_parallel_size" for section in ("", "fsdp_config.", "fsdp.")
    ]
    names = ulysses_keys if is_fsdp(verl) else ["megatron.context_parallel_size"]
    sizes = (
        verl.get(f"{of}.{name}")
        for of in ([role] if role == "critic" else [role, "actor"])
        for name in names
    )
    return next((size for size in sizes if type(size) is int), 1)


def main_dtype(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Return the line of the type in which FSDP keeps or reduces a trained model's tensors."""
    if key.startswith("ref.") or value not in ("bf16", "bfloat16"):
        return None  # as the table has it
    text = f"main parameters, gradients and Adam's state are float32, in verl {value}"
    return implied(text)


def in_override(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    """Return the line of a layout setting of Megatron-Core that repeats the one of `megatron`."""
    section, _, name = key.partition(".override_transformer_config.")
    default = _VERL_MEGATRON.get(name, True)
    if value == verl.get(f"{section}.{name}", default):
        return implied(f"by megatron.{name}")
    return None


def virtual_chunks(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert virtual_pipeline_model_parallel_size: 1 is none."""
    return same(key, None if value == 1 else value)


def sequence_parallel(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert sequence_parallel, which needs tensor parallelism."""
    if _size(key, "tensor_model_parallel_size", verl) == 1:
        return implied("no effect where the tensor-parallel size is 1")
    return same(key, value)


def dynamic_context(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert dynamic_context_parallel. verl's sizes are up to all replicas, here up to
    context_parallel_size."""
    size = _size(key, "context_parallel_size", verl)
    if value and (size == 1 or size & (size - 1)):
        return not_supported(
            "it needs context_parallel_size, the largest size, as a power of two from 2 on"
        )
    return same(key, value)


def expert_parallel(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert expert_model_parallel_size. Here the tensor-parallel ranks shard experts too."""
    tp = _size(key, "tensor_model_parallel_size", verl)
    ranks = int_or_default(verl, key, 1) * _size(key, "expert_tensor_parallel_size", verl, tp)
    if ranks % tp and ranks > tp:
        return not_supported(
            f"experts are over {ranks} ranks, no multiple of the tensor-parallel size, {tp}"
        )
    text = (
        ""
        if ranks == int_or_default(verl, key, 1) * tp
        else f"experts are sharded over the {tp} tensor-parallel ranks too"
    )
    return same(key, max(1, ranks // tp), text)


def expert_tensor(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Convert expert_tensor_parallel_size. Here it is the tensor-parallel size."""
    sharded = "experts are sharded over the tensor-parallel ranks too"
    if value in (None, _size(key, "tensor_model_parallel_size", verl)):
        return implied(sharded)
    return not_needed(f"{sharded}; expert_model_parallel_size is converted to as many shards")


def _size(key: str, name: str, verl: Settings, default: int = 1) -> int:
    """Return a parallel size of the role of `key`. The reference's is the actor's where it is not
    given."""
    role = key.partition(".")[0]
    if role == "ref" and verl.get(f"ref.megatron.{name}") is None:
        role = "actor"
    return int_or_default(verl, f"{role}.megatron.{name}", default)
