"""verl's settings of LoRA: FSDP's (model.lora_rank, ...) and Megatron's (model.lora.rank, ...)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_mc.config.model_schema import ALL_LINEAR
from rlhf_mc.verl import keys
from rlhf_mc.verl.keys import OFF, MappedSetting, Settings, not_supported, renamed
from rlhf_mc.verl.parallelism import is_fsdp

_OF_MEGATRON = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    **{f"linear_{name}": [f"{name}_proj"] for name in "qkv"},
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc1_gate": ["gate_proj"],
    "linear_fc1_up": ["up_proj"],
    "linear_fc2": ["down_proj"],
    "linear_q_proj": ["q_proj"],
    "linear_q_down_proj": ["q_a_proj"],
    "linear_q_up_proj": ["q_b_proj"],
    "linear_kv_down_proj": ["kv_a_proj_with_mqa"],
    "linear_kv_up_proj": ["kv_b_proj"],
}
"""Hugging Face names of Megatron's linear layers."""
_DEFAULT = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def has_adapters(verl: Settings) -> bool:
    """Return whether the actor has adapters. The reference is then the actor without them."""
    return any(keys.int_or_default(verl, f"model.lora{mark}rank") > 0 for mark in "._")


def adapters(key: str, value: Any, verl: Settings) -> MappedSetting:
    section, _, last = key.rpartition(".")
    is_megatron = section.endswith(".lora")
    name = last.removeprefix("lora_")
    ours = f"{'critic' if key.startswith('critic.') else 'actor'}.lora.{name}"
    if name == "target_modules" and value in OFF:
        if is_megatron:
            return renamed(ours, [ALL_LINEAR], "but for exclude_modules")
        return not_supported("it means PEFT's list for the model's family: name the modules")
    if name != "alpha" and value in OFF:
        return keys.implied("none")
    if name == "rank" and is_megatron == is_fsdp(verl):
        engine, other = ("FSDP", "lora_rank") if is_megatron else ("Megatron", "lora.rank")
        return not_supported(f"verl's {engine} engine does not read it: use model.{other}")
    rank = key.replace("adapter_path", "rank")
    if name == "adapter_path" and verl.get(rank) in OFF:
        return not_supported(f"give {rank} too, and alpha and modules, of its adapter_config.json")
    return renamed(ours, _names(value, is_megatron) if name.endswith("modules") else value)


def _names(modules: Any, is_megatron: bool) -> list[Any]:
    """Return Hugging Face's names of one or several modules; names that are not known stay."""
    known = {name: _OF_MEGATRON[name] for name in _OF_MEGATRON if is_megatron}
    listed = modules if isinstance(modules, list) else [modules]
    return [name for of in listed for name in known.get(str(of), [of])]


def adapter_defaults(verl: Settings, settings: Mapping[str, Any]) -> Iterator[MappedSetting]:
    """Yield the defaults of Megatron's LoRA. FSDP's are ours."""
    for role, model in (("actor", "model"), ("critic", "critic.model")):
        if f"{role}.lora.rank" in settings and verl.get(f"{model}.lora.rank") not in OFF:
            for name, value in (("alpha", 32), ("target_modules", _names(_DEFAULT, True))):
                if f"{role}.lora.{name}" not in settings:
                    yield keys.verl_default(f"{role}.lora.{name}", value, "of verl's Megatron LoRA")
