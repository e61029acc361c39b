"""Conversions of the verl settings whose value changes on the way to ours, or whose meaning depends
on other settings.

A converter takes verl's key, its value and all of verl's settings, and returns a Line, or None for
what the table says. table.yaml names it. Converters of layouts, turns and corrections are in files
of their own.
"""

from __future__ import annotations

import re
from typing import Any

from rlhf_mc.config.algorithm_schema import ESTIMATOR_NEEDS, SEQUENCE_LOSSES
from rlhf_mc.verl.keys import OFF, Line, Settings, number, renamed, same
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
_SINKS = ("console", "tensorboard", "wandb", "mlflow", "swanlab")


def kl_estimator(key: str, value: Any, verl: Settings) -> Line:
    name = (
        value.removesuffix("+")
        if isinstance(value, str) and key == "algorithm.kl_penalty"
        else value
    )
    ours = _KL.get(name, name) if isinstance(name, str) else name
    return same(key, ours, "" if ours == value else f"verl's {value}")


def estimator(key: str, value: Any, verl: Settings) -> Line:
    ours = _ESTIMATORS.get(value, value) if isinstance(value, str) else value
    return same(key, ours, "" if ours == value else f"verl's {value}")


def _listed(value: Any) -> list[Any]:
    """Return a list, or the one value as a list; null is no value."""
    return value if isinstance(value, list) else [] if value is None else [value]


def logger(key: str, value: Any, verl: Settings) -> Line:
    given = [str(name) for name in _listed(value)]
    left = [name for name in given if name not in _SINKS]
    sinks = [name for name in given if name in _SINKS]
    text = f"jsonl in place of {', '.join(left)}" if left else "and jsonl"
    return same(key, [*dict.fromkeys([*sinks, "jsonl"])], text)


def warmup_steps(key: str, value: Any, verl: Settings) -> Line:
    if value is None or (type(value) is int and value <= 0):
        return Line(
            "implied", "by lr_warmup_steps_ratio" if verl.get(f"{key}_ratio") else "no warm-up"
        )
    return same(key, value, "the first step has lr / lr_warmup_steps, in verl 0")


def warmup_ratio(key: str, value: Any, verl: Settings) -> Line:
    if value in OFF:
        return Line("implied", "no warm-up by ratio")
    if number(verl, key.removesuffix("_ratio")) > 0:
        return Line("not needed", f"{key.removesuffix('_ratio')} comes before it, in verl too")
    return same(key, value)


def min_lr(key: str, value: Any, verl: Settings) -> Line:
    return Line("implied", "0") if value is None else same(key, value)


def min_lr_ratio(key: str, value: Any, verl: Settings) -> Line:
    lr = verl.get(key.replace("min_lr_ratio", "lr"), 1e-5 if key.startswith("critic.") else 1e-6)
    if value in OFF:
        return Line("implied", "the decay ends at 0")
    if not isinstance(value, (int, float)) or not isinstance(lr, (int, float)):
        return Line("not supported", "it is not a number")
    return renamed(key.removesuffix("_ratio"), value * lr, f"{value} of {lr}")


def frequency(key: str, value: Any, verl: Settings) -> Line:
    return same(key, -1 if value is None or value in (0, False) else value)


def checkpoints_to_keep(key: str, value: Any, verl: Settings) -> Line:
    if value is None or number(verl, "trainer.save_freq", -1) < 1:
        return Line("implied", "all checkpoints are kept" if value is None else "nothing is saved")
    if (
        key == "trainer.max_critic_ckpt_to_keep"
        and uses_critic(verl)
        and "trainer.max_actor_ckpt_to_keep" in verl
    ):
        return Line("implied", "by max_actor_ckpt_to_keep: actor and critic are one checkpoint")
    return renamed("trainer.max_ckpt_to_keep", value, "actor and critic are one checkpoint")


def resume_from(key: str, value: Any, verl: Settings) -> Line:
    if value in OFF:
        return Line("implied", "none")
    if verl.get("trainer.resume_mode", "auto") != "resume_path":
        return Line("not needed", "trainer.resume_mode is not resume_path")
    return same(key, value, "a training checkpoint of rlhf_mc: verl's cannot be read")


def model_length(key: str, value: Any, verl: Settings) -> Line:
    longest = longest_sequence(verl)
    if value is None or (type(value) is int and value >= longest):
        return Line("implied", f"data.max_prompt_length + data.max_response_length, {longest}")
    return Line(
        "not supported",
        f"it is below data.max_prompt_length + data.max_response_length, {longest}: use a shorter "
        "response",
    )


def length(key: str, value: Any, verl: Settings) -> Line:
    data = (
        "data.max_prompt_length" if key == "rollout.prompt_length" else "data.max_response_length"
    )
    if value is None or value == number(verl, data, 512):
        return Line("implied", f"by {data}")
    return Line("not supported", f"use {data}, which is {number(verl, data, 512)}")


def greedy(key: str, value: Any, verl: Settings) -> Line:
    temperature = verl.get("rollout.val_kwargs.temperature", 0)
    if value or not temperature:
        return Line(
            "implied",
            f"by rollout.val_kwargs.temperature, {temperature}"
            + ("" if temperature else ": greedy"),
        )
    return Line(
        "not supported", f"greedy, and val_kwargs.temperature is {temperature}: give one of the two"
    )


def val_temperature(key: str, value: Any, verl: Settings) -> Line:
    is_unclear = bool(value) and "rollout.val_kwargs.do_sample" not in verl
    return same(
        key, value, "verl's synchronous engine samples only with do_sample" if is_unclear else ""
    )


def val_sampling(key: str, value: Any, verl: Settings) -> Line:
    if not verl.get("rollout.val_kwargs.temperature", 0):
        return Line("not needed", "validation is greedy: rollout.val_kwargs.temperature is 0")
    return same(key, -1 if key.endswith("top_k") and value == 0 else value)


def rollout_name(key: str, value: Any, verl: Settings) -> Line | None:
    return (
        None
        if value in ("vllm", "custom")
        else same(key, "vllm", f"{value} in verl: another engine")
    )


def rollout_dtype(key: str, value: Any, verl: Settings) -> Line:
    dtype = verl.get("actor.megatron.dtype", "bfloat16")
    if value is None or value == dtype:
        return Line("implied", "by actor.megatron.dtype")
    return Line("not supported", f"vLLM's is that of the actor: actor.megatron.dtype, {dtype}")


def quantization(key: str, value: Any, verl: Settings) -> Line:
    if value in OFF:
        return Line("implied", "none")
    return same(key, value, "one scale per output channel, in verl one per block")


def truncation(key: str, value: Any, verl: Settings) -> Line | None:
    if value != "error" and verl.get("data.filter_overlong_prompts"):
        return Line("not needed", "overlong prompts are dropped: data.filter_overlong_prompts")
    return None


def generation_batch(key: str, value: Any, verl: Settings) -> Line:
    if value is None or value == number(verl, "data.train_batch_size", 1024):
        return Line("implied", "by data.train_batch_size")
    if verl.get("algorithm.filter_groups.enable"):
        return same(key, value)
    text = (
        "a step has data.train_batch_size prompts, as in verl's trainer v1; v0 trains on all of "
        "these"
    )
    return Line("not needed", text)


def group_metric(key: str, value: Any, verl: Settings) -> Line:
    if value != "seq_final_reward":
        return same(key, value)
    if not verl.get("algorithm.use_kl_in_reward"):
        return same(key, "seq_reward", "the same without algorithm.use_kl_in_reward")
    return Line(
        "not supported", "groups are chosen before the log-probs of the KL term: use seq_reward"
    )


def most_batches(key: str, value: Any, verl: Settings) -> Line:
    if type(value) is int and value <= 0:
        return same(
            key, 0, "at most one pass over the training prompts in a step, in verl no limit"
        )
    return same(key, value)


_VISION = re.compile(
    r"[-_.\d]vl\d*([-_./]|$)|llava|minicpm-?[ov]|[-_]omni|[-_]vision|glm-?4\.?[15]v", re.IGNORECASE
)
"""Names of models that read images."""


def model_path(key: str, value: Any, verl: Settings) -> Line | None:
    if not _VISION.search(str(value)):
        return None
    return Line(
        "not supported", f"{value} is a vision-language model by its name: prompts have text alone"
    )


def images(key: str, value: Any, verl: Settings) -> Line:
    """Refuse columns of images, unless verl's whole config names them and the model reads text."""
    has_all = {"data.image_key", "data.video_key"} <= verl.keys()
    if value is None or (has_all and not _VISION.search(str(verl.get("model.path")))):
        return Line("not needed", "the model reads text, and other columns are not read")
    return Line(
        "not supported", "prompts have text alone; remove it by '~' if the data has no such column"
    )


def clip_ratio(key: str, value: Any, verl: Settings) -> Line:
    if value == 0.2 or {"actor.clip_ratio_low", "actor.clip_ratio_high"} <= verl.keys():
        return Line("not needed", "verl reads clip_ratio_low and clip_ratio_high")
    return Line(
        "not supported",
        "verl itself reads clip_ratio_low and clip_ratio_high (0.2 by default): give these two",
    )


def save_contents(key: str, value: Any, verl: Settings) -> Line:
    frequency = number(verl, "trainer.save_freq", -1)
    if key == "actor.checkpoint.save_contents" and "hf_model" in _listed(value) and frequency > 0:
        return renamed(
            "trainer.export_freq", frequency, "hf_model; a checkpoint holds all that a resume needs"
        )
    return Line(
        "not needed",
        "a checkpoint holds all that a resume needs, and the last step exports the actor to hf/",
    )


def dist_checkpoint(key: str, value: Any, verl: Settings) -> Line:
    path = verl.get("actor.megatron.dist_checkpointing_path")
    uses = key.replace("dist_checkpointing_path", "use_dist_checkpointing")
    if value in OFF or not verl.get(uses):
        return Line("implied", "weights are read from the safetensors of model.path")
    if key == "actor.megatron.dist_checkpointing_path":
        return renamed(
            "model.dist_checkpointing_path", value, "written by tools/convert_hf_to_mcore.py"
        )
    if key == "actor.megatron.use_dist_checkpointing" and path:
        return Line("implied", "by model.dist_checkpointing_path")
    if key.startswith("ref.") and path and verl.get("ref.megatron.dist_checkpointing_path") == path:
        return Line("implied", "the reference starts from the actor's weights")
    return Line(
        "not supported",
        "only the actor and the reference start from a Megatron checkpoint, the same one",
    )


def max_positions(key: str, value: Any, verl: Settings) -> Line:
    longest = longest_sequence(verl)
    if type(value) is int and value >= longest:
        return Line(
            "not needed", "config.json's must hold prompt and response, and is checked at the start"
        )
    return Line(
        "not supported", f"it is below data.max_prompt_length + data.max_response_length, {longest}"
    )


def reference_model(key: str, value: Any, verl: Settings) -> Line:
    if value in (None, verl.get("model.path")):
        return Line("implied", "the reference starts from model.path")
    return Line("not supported", "the reference starts from model.path")


def critic_enable(key: str, value: Any, verl: Settings) -> Line:
    needs = uses_critic(verl)
    if value is None or bool(value) == needs:
        return Line("implied", "by algorithm.adv_estimator")
    return Line(
        "not supported",
        f"algorithm.adv_estimator {'needs a' if needs else 'does not use a'} critic",
    )


def critic_shuffle(key: str, value: Any, verl: Settings) -> Line:
    if value is None or bool(value) == bool(verl.get("actor.shuffle")):
        return Line("implied", "by actor.shuffle")
    return Line(
        "not supported", "the critic's mini-batches are shuffled as the actor's: actor.shuffle"
    )


def overlong(key: str, value: Any, verl: Settings) -> Line | None:
    if key.endswith(".max_resp_len"):
        if value == number(verl, "data.max_response_length", 512):
            return Line("implied", "by data.max_response_length")
        return Line("not supported", "it is data.max_response_length")
    if key.endswith(".enable") and value:
        return Line(
            "implied", "by reward.overlong_buffer.len; the penalty is part of training scores alone"
        )
    if not verl.get(f"{key.rpartition('.')[0]}.enable"):
        return Line("not needed", "there is no overlong buffer: enable is false")
    return None


def aggregation(key: str, value: Any, verl: Settings) -> Line:
    loss = verl.get("actor.policy_loss.loss_mode")
    if loss not in SEQUENCE_LOSSES or value == OF_SEQUENCES:
        return same(key, value)
    return renamed(
        key,
        OF_SEQUENCES,
        f"verl's {loss} too; its entropy and KL losses have {value}, here this one",
    )


def function_name(key: str, value: Any, verl: Settings) -> Line | None:
    return Line("implied", "compute_score") if value is None else None


def adaptive(key: str, value: Any, verl: Settings) -> Line | None:
    # verl's coefficient of the KL loss is constant.
    if value == "adaptive" and not verl.get("algorithm.use_kl_in_reward"):
        return Line("not needed", "algorithm.use_kl_in_reward is false")
    return None


def reward_workers(key: str, value: Any, verl: Settings) -> Line:
    return Line("not needed", "it is per rank here, and changes only the speed: reward.num_workers")


def reward_enable(key: str, value: Any, verl: Settings) -> Line:
    return Line("implied", "by reward_model.model_path" if value else "there is no reward model")


def input_tokenizer(key: str, value: Any, verl: Settings) -> Line:
    path = verl.get("reward_model.model.path")
    if value is None:
        return Line("implied", "the reward model reads the actor's tokens")
    if path is None:
        return Line("not supported", "it needs reward_model.model.path")
    return renamed(
        "reward_model.tokenizer_path", path, "the reward model's own; verl's key is the actor's"
    )


def profile_ranks(key: str, value: Any, verl: Settings) -> Line:
    if not verl.get("actor.profiler.enable"):
        return Line("not needed", "actor.profiler.enable is off")
    if verl.get("actor.profiler.all_ranks"):
        return Line("implied", "actor.profiler.all_ranks is true")
    return renamed("profile.ranks", value)


def all_profile_ranks(key: str, value: Any, verl: Settings) -> Line:
    return (
        renamed("profile.ranks", None, "null: all")
        if value
        else Line("implied", "by the list of ranks")
    )


def profile_contents(key: str, value: Any, verl: Settings) -> Line:
    ours = [name for name in _listed(value) if name not in ("cpu", "cuda")]
    if not ours or not (verl.get("global_profiler.steps") and verl.get("actor.profiler.enable")):
        return Line("implied", "none beside the operators" if not ours else "nothing is profiled")
    return renamed("profile.contents", ours)
