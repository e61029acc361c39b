"""Conversions of the verl settings whose value changes on the way to ours, or whose meaning depends
on other settings.

A converter takes verl's key, its value and all of verl's settings, and returns a MappedSetting, or
None for what the table says. table.yaml names it. Converters of layouts, turns and corrections
are in files of their own.
"""

from __future__ import annotations

import re
from typing import Any

from rlhf_mc.config.algorithm_schema import ESTIMATOR_NEEDS, SEQUENCE_LOSSES
from rlhf_mc.verl.asynchronous import async_mode, updates_of_step
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
)
from rlhf_mc.verl.parallelism import longest_sequence


def uses_critic(verl: Settings) -> bool:
    """Return whether verl's run has a critic: its advantage estimator needs one."""
    estimator = str(verl.get("algorithm.adv_estimator", "gae"))
    needs = ESTIMATOR_NEEDS.get(_ESTIMATORS.get(estimator, estimator))
    return needs is not None and needs.critic


# ---------------------------------------------------------------- converters

_KL = {
    "kl": "k1",
    "mse": "k2",
    "k3": "low_var_kl",
    "k3+": "low_var_kl+",
    "kl+": "k1+",
    "mse+": "k2",
    "k2+": "k2",
}
"""verl's KL estimators by another name here. Its k3 is clipped at 10, and k2 has the gradient of
k2+."""
_ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
"""verl's estimators by another name here: the same numbers, computed in another way."""
OF_SEQUENCES = "seq-mean-token-mean"
"""The aggregation of losses of sequences, which verl's code fixes, whatever its loss_agg_mode."""
TEACHERS = "distillation.teacher_models."
_SINKS = ("console", "tensorboard", "wandb", "mlflow", "swanlab")


def kl_estimator(key: str, value: Any, verl: Settings) -> MappedSetting:
    name = (
        value.removesuffix("+")
        if isinstance(value, str) and key == "algorithm.kl_penalty"
        else value
    )
    ours = _KL.get(name, name) if isinstance(name, str) else name
    return same(key, ours, "" if ours == value else f"verl's {value}")


def _has_no_rewards(verl: Settings) -> bool:
    is_read = verl.get("distillation.distillation_loss.use_task_rewards", True)
    return bool(verl.get("distillation.enabled")) and not is_read


def estimator(key: str, value: Any, verl: Settings) -> MappedSetting:
    ours = _ESTIMATORS.get(value, value) if isinstance(value, str) else value
    needs = ESTIMATOR_NEEDS.get(ours)
    is_one = int_or_default(verl, "rollout.n", 1) < 2
    if needs is not None and (needs.critic or (needs.group and is_one)) and _has_no_rewards(verl):
        return same(key, "reinforce_plus_plus", f"in place of {value}: no loss reads it")
    if ours == "gdpo":
        return not_supported(
            "verl's rewards are numbers of the reward function (gdpo_reward_keys), here they are "
            "the parts of reward.mixture"
        )
    return same(key, ours, "" if ours == value else f"verl's {value}")


def _listed(value: Any) -> list[Any]:
    """Return a list, or the one value as a list; null is no value."""
    return value if isinstance(value, list) else [] if value is None else [value]


def logger(key: str, value: Any, verl: Settings) -> MappedSetting:
    given = [str(name) for name in _listed(value)]
    left = [name for name in given if name not in _SINKS]
    sinks = [name for name in given if name in _SINKS]
    text = f"jsonl in place of {', '.join(left)}" if left else "and jsonl"
    return same(key, [*dict.fromkeys([*sinks, "jsonl"])], text)


def warmup_steps(key: str, value: Any, verl: Settings) -> MappedSetting:
    if value is None or (type(value) is int and value <= 0):
        return implied("by lr_warmup_steps_ratio" if verl.get(f"{key}_ratio") else "no warm-up")
    updates = updates_of_step(verl)
    text = "the first step has lr / lr_warmup_steps, in verl 0"
    if type(value) is int and updates > 1:
        return same(key, -(-value // updates), f"verl's {value} updates, {updates} a step; {text}")
    return same(key, value, text)


def decay_steps(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    style = verl.get(key.replace("lr_decay_steps", "lr_decay_style"))
    return not_needed("the learning rate is constant") if style in (None, "constant") else None


def warmup_ratio(key: str, value: Any, verl: Settings) -> MappedSetting:
    if value in OFF:
        return implied("no warm-up by ratio")
    if int_or_default(verl, key.removesuffix("_ratio")) > 0:
        return not_needed(f"{key.removesuffix('_ratio')} comes before it, in verl too")
    return same(key, value)


def min_lr(key: str, value: Any, verl: Settings) -> MappedSetting:
    return implied("0") if value is None else same(key, value)


def min_lr_ratio(key: str, value: Any, verl: Settings) -> MappedSetting:
    lr = verl.get(key.replace("min_lr_ratio", "lr"), 1e-5 if key.startswith("critic.") else 1e-6)
    if value in OFF:
        return implied("the decay ends at 0")
    if not isinstance(value, (int, float)) or not isinstance(lr, (int, float)):
        return not_supported("it is not a number")
    return renamed(key.removesuffix("_ratio"), value * lr, f"{value} of {lr}")


def frequency(key: str, value: Any, verl: Settings) -> MappedSetting:
    return same(key, -1 if value is None or value in (0, False) else value)


def checkpoints_to_keep(key: str, value: Any, verl: Settings) -> MappedSetting:
    if value is None or int_or_default(verl, "trainer.save_freq", -1) < 1:
        return implied("all checkpoints are kept" if value is None else "nothing is saved")
    if (
        key == "trainer.max_critic_ckpt_to_keep"
        and uses_critic(verl)
        and "trainer.max_actor_ckpt_to_keep" in verl
    ):
        return implied("by max_actor_ckpt_to_keep: actor and critic are one checkpoint")
    return renamed("trainer.max_ckpt_to_keep", value, "actor and critic are one checkpoint")


def resume_from(key: str, value: Any, verl: Settings) -> MappedSetting:
    if value in OFF:
        return implied("none")
    if verl.get("trainer.resume_mode", "auto") != "resume_path":
        return not_needed("trainer.resume_mode is not resume_path")
    return same(key, value, "a training checkpoint of rlhf_mc: verl's cannot be read")


def model_length(key: str, value: Any, verl: Settings) -> MappedSetting:
    longest = longest_sequence(verl)
    if value is None or (type(value) is int and value >= longest):
        return implied(f"data.max_prompt_length + data.max_response_length, {longest}")
    return not_supported(
        f"it is below data.max_prompt_length + data.max_response_length, {longest}: use a shorter "
        "response"
    )


def length(key: str, value: Any, verl: Settings) -> MappedSetting:
    data = (
        "data.max_prompt_length" if key == "rollout.prompt_length" else "data.max_response_length"
    )
    if value is None or value == int_or_default(verl, data, 512):
        return implied(f"by {data}")
    return not_supported(f"use {data}, which is {int_or_default(verl, data, 512)}")


def greedy(key: str, value: Any, verl: Settings) -> MappedSetting:
    temperature = verl.get("rollout.val_kwargs.temperature", 0)
    if value or not temperature:
        return implied(
            f"by rollout.val_kwargs.temperature, {temperature}"
            + ("" if temperature else ": greedy")
        )
    return not_supported(
        f"greedy, and val_kwargs.temperature is {temperature}: give one of the two"
    )


def val_temperature(key: str, value: Any, verl: Settings) -> MappedSetting:
    is_unclear = bool(value) and "rollout.val_kwargs.do_sample" not in verl
    return same(
        key, value, "verl's synchronous engine samples only with do_sample" if is_unclear else ""
    )


def val_sampling(key: str, value: Any, verl: Settings) -> MappedSetting:
    if not verl.get("rollout.val_kwargs.temperature", 0):
        return not_needed("validation is greedy: rollout.val_kwargs.temperature is 0")
    return same(key, -1 if key.endswith("top_k") and value == 0 else value)


_OF_VLLM = re.compile(r"(?i)moe|a\d+b\b|gpt.?oss|mixtral|deepseek.v|gemma|qwen3.(5|next)")
"""Names of models that SGLang's engine does not take here."""


def rollout_name(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    if value in ("vllm", "custom"):
        return None
    of_vllm = [name for name in verl if _is_of_vllm(name, verl[name])]
    if value == "sglang" and not of_vllm:
        return same(key, "sglang", "or vllm, which generates with every family")
    reason = f"{value} in verl: another engine"
    return same(key, "vllm", f"{reason}, without {of_vllm[0]}" if of_vllm else reason)


def _is_of_vllm(name: str, value: Any) -> bool:
    if name.endswith(("expert_model_parallel_size", "expert_parallel_size")):
        return value not in (None, 1)
    is_model = name == "model.path" and _OF_VLLM.search(str(value)) is not None
    return is_model or (name == "rollout.quantization" and value not in OFF)


def rollout_dtype(key: str, value: Any, verl: Settings) -> MappedSetting:
    dtype = verl.get("actor.megatron.dtype", "bfloat16")
    if value is None or value == dtype:
        return implied("by actor.megatron.dtype")
    return not_supported(f"vLLM's is that of the actor: actor.megatron.dtype, {dtype}")


def quantization(key: str, value: Any, verl: Settings) -> MappedSetting:
    if value in OFF:
        return implied("none")
    return same(key, value, "one scale per output channel, in verl one per block")


def truncation(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    if value != "error" and verl.get("data.filter_overlong_prompts"):
        return not_needed("overlong prompts are dropped: data.filter_overlong_prompts")
    return None


def generation_batch(key: str, value: Any, verl: Settings) -> MappedSetting:
    is_stream = async_mode(verl) == "fully_async"
    if is_stream or value in (None, int_or_default(verl, "data.train_batch_size", 1024)):
        return implied("by data.train_batch_size")
    if verl.get("algorithm.filter_groups.enable"):
        return same(key, value)
    text = (
        "a step has data.train_batch_size prompts, as in verl's trainer v1; v0 trains on all of "
        "these"
    )
    return not_needed(text)


def group_metric(key: str, value: Any, verl: Settings) -> MappedSetting:
    if value != "seq_final_reward":
        return same(key, value)
    if not verl.get("algorithm.use_kl_in_reward"):
        return same(key, "seq_reward", "the same without algorithm.use_kl_in_reward")
    return not_supported("groups are chosen before the log-probs of the KL term: use seq_reward")


def most_batches(key: str, value: Any, verl: Settings) -> MappedSetting:
    if type(value) is int and value <= 0:
        return same(
            key, 0, "at most one pass over the training prompts in a step, in verl no limit"
        )
    return same(key, value)


_VISION = re.compile(
    r"[-_.\d]vl\d*([-_./]|$)|llava|minicpm-?[ov]|[-_]omni|[-_]vision|glm-?4\.?[15]v", re.IGNORECASE
)
"""Names of models that read images."""


def model_path(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    if not _VISION.search(str(value)):
        return None
    return not_supported(f"{value} is a vision-language model by its name: prompts have text alone")


def images(key: str, value: Any, verl: Settings) -> MappedSetting:
    """Refuse columns of images, unless verl's whole config names them and the model reads text."""
    has_all = {"data.image_key", "data.video_key"} <= verl.keys()
    if value is None or (has_all and not _VISION.search(str(verl.get("model.path")))):
        return not_needed("the model reads text, and other columns are not read")
    return not_supported("prompts have text alone; remove it by '~' if the data has no such column")


def clip_ratio(key: str, value: Any, verl: Settings) -> MappedSetting:
    if value == 0.2 or {"actor.clip_ratio_low", "actor.clip_ratio_high"} <= verl.keys():
        return not_needed("verl reads clip_ratio_low and clip_ratio_high")
    return not_supported(
        "verl itself reads clip_ratio_low and clip_ratio_high (0.2 by default): give these two"
    )


def save_contents(key: str, value: Any, verl: Settings) -> MappedSetting:
    frequency = int_or_default(verl, "trainer.save_freq", -1)
    if key == "actor.checkpoint.save_contents" and "hf_model" in _listed(value) and frequency > 0:
        return renamed(
            "trainer.export_freq", frequency, "hf_model; a checkpoint holds all that a resume needs"
        )
    return not_needed(
        "a checkpoint holds all that a resume needs, and the last step exports the actor to hf/"
    )


def dist_checkpoint(key: str, value: Any, verl: Settings) -> MappedSetting:
    path = verl.get("actor.megatron.dist_checkpointing_path")
    uses = key.replace("dist_checkpointing_path", "use_dist_checkpointing")
    if value in OFF or not verl.get(uses):
        return implied("weights are read from the safetensors of model.path")
    if key == "actor.megatron.dist_checkpointing_path":
        return renamed(
            "model.dist_checkpointing_path", value, "written by tools/convert_hf_to_mcore.py"
        )
    if key == "actor.megatron.use_dist_checkpointing" and path:
        return implied("by model.dist_checkpointing_path")
    if key.startswith("ref.") and path and verl.get("ref.megatron.dist_checkpointing_path") == path:
        return implied("the reference starts from the actor's weights")
    return not_supported(
        "only the actor and the reference start from a Megatron checkpoint, the same one"
    )


def max_positions(key: str, value: Any, verl: Settings) -> MappedSetting:
    longest = longest_sequence(verl)
    if type(value) is int and value >= longest:
        return not_needed(
            "config.json's must hold prompt and response, and is checked at the start"
        )
    return not_supported(
        f"it is below data.max_prompt_length + data.max_response_length, {longest}"
    )


def reference_model(key: str, value: Any, verl: Settings) -> MappedSetting:
    if value in (None, verl.get("model.path")):
        return implied("the reference starts from model.path")
    return not_supported("the reference starts from model.path")


def critic_enable(key: str, value: Any, verl: Settings) -> MappedSetting:
    needs = uses_critic(verl)
    if value is None or bool(value) == needs:
        return implied("by algorithm.adv_estimator")
    return not_supported(
        f"algorithm.adv_estimator {'needs a' if needs else 'does not use a'} critic"
    )


def critic_shuffle(key: str, value: Any, verl: Settings) -> MappedSetting:
    if value is None or bool(value) == bool(verl.get("actor.shuffle")):
        return implied("by actor.shuffle")
    return not_supported("the critic's mini-batches are shuffled as the actor's: actor.shuffle")


def overlong(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    if key.endswith(".max_resp_len"):
        if value == int_or_default(verl, "data.max_response_length", 512):
            return implied("by data.max_response_length")
        return not_supported("it is data.max_response_length")
    if key.endswith(".enable") and value:
        return implied(
            "by reward.overlong_buffer.len; the penalty is part of training scores alone"
        )
    if not verl.get(f"{key.rpartition('.')[0]}.enable"):
        return not_needed("there is no overlong buffer: enable is false")
    return None


def aggregation(key: str, value: Any, verl: Settings) -> MappedSetting:
    loss = verl.get("actor.policy_loss.loss_mode")
    if loss not in SEQUENCE_LOSSES or value == OF_SEQUENCES:
        return same(key, value)
    return renamed(
        key,
        OF_SEQUENCES,
        f"verl's {loss} too; its entropy and KL losses have {value}, here this one",
    )


def function_name(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    return implied("compute_score") if value is None else None


def adaptive(key: str, value: Any, verl: Settings) -> MappedSetting | None:
    # verl's coefficient of the KL loss is constant.
    if value == "adaptive" and not verl.get("algorithm.use_kl_in_reward"):
        return not_needed("algorithm.use_kl_in_reward is false")
    return None


def reward_workers(key: str, value: Any, verl: Settings) -> MappedSetting:
    return not_needed("it is per rank here, and changes only the speed: reward.num_workers")


def reward_enable(key: str, value: Any, verl: Settings) -> MappedSetting:
    return implied("by reward_model.model_path" if value else "there is no reward model")


def input_tokenizer(key: str, value: Any, verl: Settings) -> MappedSetting:
    path = verl.get("reward_model.model.path")
    if value is None:
        return implied("the reward model reads the actor's tokens")
    if path is None:
        return not_supported("it needs reward_model.model.path")
    return renamed(
        "reward_model.tokenizer_path", path, "the reward model's own; verl's key is the actor's"
    )


def profile_ranks(key: str, value: Any, verl: Settings) -> MappedSetting:
    if not verl.get("actor.profiler.enable"):
        return not_needed("actor.profiler.enable is off")
    if verl.get("actor.profiler.all_ranks"):
        return implied("actor.profiler.all_ranks is true")
    return renamed("profile.ranks", value)


def all_profile_ranks(key: str, value: Any, verl: Settings) -> MappedSetting:
    return renamed("profile.ranks", None, "null: all") if value else implied("by the list of ranks")


def profile_contents(key: str, value: Any, verl: Settings) -> MappedSetting:
    ours = [name for name in _listed(value) if name not in ("cpu", "cuda")]
    if not ours or not (verl.get("global_profiler.steps") and verl.get("actor.profiler.enable")):
        return implied("none beside the operators" if not ours else "nothing is profiled")
    return renamed("profile.contents", ours)


def teacher(key: str, value: Any, verl: Settings) -> MappedSetting:
    name, _, rest = key.removeprefix(TEACHERS).partition(".")
    if verl.get(f"{TEACHERS}{name}.model_path") in OFF:
        return not_needed("there is no such teacher: its model_path is null")
    if rest == "inference.tensor_model_parallel_size":
        ours = f"{TEACHERS}{name}.megatron.tensor_model_parallel_size"
        return renamed(ours, value, "of the training engine, which scores")
    if rest == "inference.temperature" and value != verl.get("rollout.temperature", 1.0):
        return not_supported("it is rollout.temperature")
    if rest.startswith("inference.") or rest == "num_replicas":
        return not_needed("the training engine scores, on all of its ranks")
    return implied("all rows") if rest == "key" and value is None else same(key, value)
