"""The conversion of verl's settings: its published Megatron examples, each kind of answer, and its
scripts."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import from_verl
import pytest
from from_verl import converted_arguments
from verl_input.reading import Arguments, Reading, read_arguments

from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import dotted_keys, load_config, nest_settings
from rlhf_mc.config.schema import Config, get_setting
from rlhf_mc.planner.gpus import parse_gpu
from rlhf_mc.planner.start import Capacity, check_fit, plan_run, planned_shapes
from rlhf_mc.verl.conversion import DEFAULTS, VERL, Conversion, VerlSetting, convert, our_default
from rlhf_mc.verl.keys import plain_key

DEFAULTS_OF_VERL = Path(__file__).with_name("verl_defaults")
"""verl's complete configs, as keys and values."""
EXAMPLES = Path(__file__).with_name("verl_examples")
"""verl's published Megatron examples as keys and values, with the place and the commit of each.
other_settings.txt has the settings of those that are not there as a whole."""


def read_verl(
    source: str | None, overrides: Sequence[str], environment: Mapping[str, str] | None = None
) -> Reading:
    """Return the settings of a YAML file or shell script (None: no file) and of overrides."""
    files = [] if source is None else [source]
    return read_arguments(Arguments(files, list(overrides), dict(environment or {})))


def example(name: str) -> dict[str, Any]:
    """Return the settings of a file of EXAMPLES by verl's key, with the values that verl's parser
    reads."""
    words = [
        line
        for line in (EXAMPLES / f"{name}.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    return {item.written: item.value for item in read_verl(None, words).settings.values()}


PPO_MATH = example("ppo_qwen2_7b_math_gsm8k")
WHOLE_RUNS = sorted(path.stem for path in EXAMPLES.glob("*.txt") if path.stem != "other_settings")


def converted(settings: dict[str, Any]) -> Conversion:
    return convert({plain_key(key): VerlSetting(value, key) for key, value in settings.items()})


def line_of(key: str, value: Any, **others: Any) -> tuple[str, str | None, Any]:
    """Return (kind, our key, our value) of one setting of verl's; others: `section__name` =
    value."""
    settings = {name.replace("__", "."): other for name, other in others.items()}
    (line,) = (line for name, line in converted({**settings, key: value}).report if name == key)
    return line.kind, line.ours, line.value


def loaded(conversion: Conversion, path: Path) -> Config:
    """Return the config that load_config and validate accept."""
    path.write_text(conversion.yaml("a test"))
    cfg = load_config(str(path))
    check_config(cfg, conversion.nodes * conversion.processes)
    return cfg


@pytest.mark.parametrize("name", WHOLE_RUNS)
def test_published_example_loads(name: str, tmp_path: Path) -> None:
    settings = example(name)
    conversion = converted(settings)
    assert conversion.refused() == []
    cfg = loaded(conversion, tmp_path / "ours.yaml")
    given = [key for key, line in conversion.report if line.kind != "default"]
    assert given == list(settings), "each setting has one line"
    plain = {plain_key(key): value for key, value in settings.items()}
    assert cfg.model.path == plain["model.path"]
    assert (
        cfg.actor.megatron.tensor_model_parallel_size
        == plain["actor.megatron.tensor_model_parallel_size"]
    )
    assert cfg.trainer.logger == ["console", "wandb", "jsonl"]
    assert cfg.trainer.project_name == plain["trainer.project_name"]
    assert cfg.trainer.experiment_name == plain["trainer.experiment_name"]
    assert (
        cfg.trainer.default_local_dir
        == f"checkpoints/{plain['trainer.project_name']}/{plain['trainer.experiment_name']}"
    )
    assert conversion.processes == plain["trainer.n_gpus_per_node"]


def test_every_setting_of_the_other_examples_is_supported_or_refused_by_name() -> None:
    in_whole_runs = {key for name in WHOLE_RUNS for key in example(name)}
    others = example("other_settings")
    assert len(others) > 80 and not in_whole_runs & others.keys()
    lines = dict(converted({"algorithm.adv_estimator": "gae", **others}).report)
    assert [key for key in others if "known here" in lines[key].text] == []
    assert "known here" in converted({"actor_rollout_ref.actor.frobnicate": 1}).report[0][1].text


def test_defaults_of_verl_are_written_out(tmp_path: Path) -> None:
    """Check the roles whose layout is not given: in verl they do not inherit the actor's."""
    cfg = loaded(converted(PPO_MATH), tmp_path / "ours.yaml")
    assert cfg.actor.ppo_max_token_len_per_gpu == 4 * (1024 + 512) and cfg.rollout.free_cache_engine
    assert cfg.actor.megatron.sequence_parallel
    assert (
        cfg.critic.megatron.tensor_model_parallel_size,
        cfg.critic.megatron.pipeline_model_parallel_size,
    ) == (1, 1)
    kl = converted(
        {"algorithm.adv_estimator": "gae", "actor_rollout_ref.actor.use_kl_loss": True}
    ).settings
    assert (kl["actor.kl_loss_type"], kl["rollout.tensor_model_parallel_size"]) == ("low_var_kl", 2)
    for key, value, _ in DEFAULTS:
        assert our_default(key) != value, "a default that does not differ"


def test_moe_example() -> None:
    settings = converted(example("grpo_qwen3moe_30b_96gb")).settings
    assert settings["reshard.share_weights"] is False, "as the actor is offloaded"
    assert (
        settings["reward.overlong_buffer.len"],
        settings["reward.overlong_buffer.penalty_factor"],
    ) == (4096, 1.0)
    assert settings["actor.optim.lr_warmup_steps"] == 10
    assert settings["actor.ppo_max_token_len_per_gpu"] == 10240, "micro-batches are by token budget"


def defaults(name: str) -> list[str]:
    """Return verl's defaults as overrides: megatron.txt, or those of FSDP where they differ."""
    lines = {
        file: (DEFAULTS_OF_VERL / f"{file}.txt").read_text().splitlines()
        for file in ("megatron", "fsdp")
    }
    words = {file: [line for line in lines[file] if not line.startswith("#")] for file in lines}
    words["megatron"].append("actor_rollout_ref.rollout.name=vllm")  # verl has no default for it
    if name == "megatron":
        return words[name]
    of_megatron = (
        ".megatron.",
        ".strategy=",
        "lr_warmup_init",
        "_decay_",
        "_incr_style",
        "weight_decay_incr",
    )
    return [
        word for word in words["megatron"] if not any(part in word for part in of_megatron)
    ] + words[name]


@pytest.mark.parametrize("name", ["megatron", "fsdp"])
def test_verls_complete_config_is_converted(name: str, tmp_path: Path) -> None:
    files = (
        "data.train_files",
        "data.val_files",
        "actor_rollout_ref.model.path",
        "critic.model.path",
    )
    words = [
        *defaults(name),
        *(f"{key}=a" for key in files),
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
    ]
    conversion = converted_arguments(words)
    assert conversion.refused() == []
    assert len({key for key, line in conversion.report if line.kind != "default"}) == len(
        {plain_key(word.partition("=")[0]) for word in words}
    ), "each setting has a line"
    assert ("verl's defaults", "those of version 0.10.0.dev of 2026-08-22") in conversion.hints
    assert VERL.split()[0] in (DEFAULTS_OF_VERL / f"{name}.txt").read_text().splitlines()[0]
    loaded(conversion, tmp_path / "ours.yaml")


NAMES_AND_FILES = (
    "data.val_files",
    "trainer.async_save",
    "trainer.experiment_name",
    "trainer.log_val_generations",
    "trainer.logger",
    "trainer.project_name",
    "reshard.bucket_megabytes",
    "critic.model_path",
)
"""Settings whose defaults differ from verl's, and which change nothing that is computed or are
files."""
OF_ACTOR = "actor_rollout_ref.actor"
OF_EXPERTS = f"{OF_ACTOR}.megatron.override_transformer_config"
LARGE = [
    f"{OF_ACTOR}.megatron.{text}"
    for text in (
        "tensor_model_parallel_size=4",
        "pipeline_model_parallel_size=2",
        "expert_model_parallel_size=2",
        "param_offload=True",
        "grad_offload=True",
        "optimizer_offload=True",
        "override_transformer_config.recompute_granularity=full",
        "override_transformer_config.num_layers_in_first_pipeline_stage=3",
    )
]
KL = [
    f"{OF_ACTOR}.use_kl_loss=True",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=2",
]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("megatron", [*LARGE, *KL]),
        ("megatron", [*LARGE, "algorithm.use_kl_in_reward=True"]),
        ("megatron",
         [f"{OF_ACTOR}.strategy=megatron", f"{OF_ACTOR}.loss_agg_mode=seq-mean-token-sum",
                      f"{OF_ACTOR}.ppo_max_token_len_per_gpu=9000",
                      f"{OF_ACTOR}.use_dynamic_bsz=True"]),
        ("megatron",
         [f"{OF_ACTOR}.strategy=megatron", f"{OF_ACTOR}.ppo_epochs=2", f"{OF_ACTOR}.shuffle=True",
                      f"{OF_ACTOR}.ppo_mini_batch_size=128",
                      "critic.ppo_max_token_len_per_gpu=8000"]),
        ("fsdp",
         [*KL, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"]),
        ("fsdp", ["critic.model.path=m", f"{OF_ACTOR}.ulysses_sequence_parallel_size=2",
                  f"{OF_ACTOR}.ppo_micro_batch_size_per_gpu=4",
                  "critic.ppo_micro_batch_size_per_gpu=8"]),
        ("fsdp", [*KL, f"{OF_ACTOR}.fsdp_config.param_offload=True",
                  "actor_rollout_ref.ref.fsdp_config.param_offload=True",
                  "actor_rollout_ref.model.enable_gradient_checkpointing=False"]),
        ("fsdp", [*KL, "actor_rollout_ref.model.lora_rank=8"]),
        ("fsdp", ["critic.model.path=m", "critic.model.lora_rank=8"]),
        ("megatron", [*LARGE, *KL, "actor_rollout_ref.model.lora.rank=8"]),
        ("megatron", [f"{OF_ACTOR}.strategy=megatron", "critic.model.lora.rank=8"]),
    ],
)  # fmt: skip
def test_settings_left_out_have_verls_defaults(name: str, given: list[str], tmp_path: Path) -> None:
    """Compare with a config in which all of verl's defaults are written out."""
    always = [
        "data.train_files=[a]",
        "actor_rollout_ref.model.path=m",
        "trainer.default_local_dir=d",
    ]
    configs = []
    for words in (always, [*defaults(name), *always]):
        conversion = converted_arguments([*words, *given])
        assert conversion.refused() == []
        (tmp_path / "ours.yaml").write_text(conversion.yaml("a test"))
        configs.append(load_config(str(tmp_path / "ours.yaml")))
    cfg, with_defaults = configs
    unused = () if KL[0] in given else ("actor.kl_loss_type", "ref.log_prob_max_token_len_per_gpu")
    of_actor = ["critic.ppo_mini_batch_size", "critic.ppo_epochs"]  # null is the actor's
    for key in of_actor:
        assert get_setting(with_defaults, key) in (
            None,
            get_setting(cfg, key.replace("critic", "actor")),
        )
    skipped = {*NAMES_AND_FILES, *unused, *of_actor}
    differing = {
        key: (get_setting(cfg, key), get_setting(with_defaults, key))
        for key in dotted_keys()
        if key not in skipped
        and "NAME" not in key
        and get_setting(cfg, key) != get_setting(with_defaults, key)
    }
    assert differing == {}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("algorithm.kl_penalty", "kl", ("same", "algorithm.kl_penalty", "k1")),
        ("algorithm.kl_penalty", "mse", ("same", "algorithm.kl_penalty", "k2")),
        ("actor_rollout_ref.actor.kl_loss_type", "k3",
         ("same", "actor.kl_loss_type", "low_var_kl")),
        ("actor_rollout_ref.actor.clip_ratio", 0.2, ("not needed", None, None)),
        ("actor_rollout_ref.actor.clip_ratio", 0.1, ("not supported", None, None)),
        ("actor_rollout_ref.actor.grad_clip", 0.5, ("renamed", "actor.optim.clip_grad", 0.5)),
        ("critic.grad_clip", 0.5, ("renamed", "critic.optim.clip_grad", 0.5)),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", -1, ("implied", None, None)),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", 0.1,
         ("same", "actor.optim.lr_warmup_steps_ratio", 0.1)),
        ("actor_rollout_ref.actor.optim.min_lr_ratio", 0.1,
         ("renamed", "actor.optim.min_lr", 1e-7)),
        ("actor_rollout_ref.actor.optim.min_lr_ratio", "x", ("not supported", None, None)),
        ("trainer.logger", 1, ("same", "trainer.logger", ["jsonl"])),
        ("actor_rollout_ref.actor.optim.override_optimizer_config", {}, ("implied", None, None)),
        ("actor_rollout_ref.actor.megatron.context_parallel_size", 2,
         ("same", "actor.megatron.context_parallel_size", 2)),
        ("critic.megatron.context_parallel_size", 2,
         ("same", "critic.megatron.context_parallel_size", 2)),
        ("actor_rollout_ref.ref.megatron.override_transformer_config.cp_comm_type", "a2a",
         ("renamed", "ref.megatron.cp_comm_type", "a2a")),
        ("actor_rollout_ref.actor.megatron.dynamic_context_parallel", True,
         ("not supported", None, None)),
        ("actor_rollout_ref.actor.megatron.dynamic_context_parallel", False,
         ("same", "actor.megatron.dynamic_context_parallel", False)),
        ("actor_rollout_ref.actor.megatron.sequence_parallel", True, ("implied", None, None)),
        ("actor_rollout_ref.actor.megatron.expert_tensor_parallel_size", 4,
         ("not needed", None, None)),
        ("actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size", 1,
         ("same", "actor.megatron.virtual_pipeline_model_parallel_size", None)),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity",
         "full",
         ("renamed", "actor.megatron.recompute_granularity", "full")),
        ("actor_rollout_ref.ref.megatron.optimizer_offload", True, ("not needed", None, None)),
        ("actor_rollout_ref.actor.checkpoint.save_contents", ["model"], ("not needed", None, None)),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", True,
         ("renamed", "actor.megatron.param_offload", True)),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype", "bf16", ("implied", None, None)),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype", "fp16", ("not supported", None, None)),
        ("critic.fsdp.model_dtype", "bfloat16", ("implied", None, None)),
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype", "bf16",
         ("implied", None, None)),
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype", "fp32", (("not "
                                                                                     "supported"),
                                                                                     None, None)),
        ("actor_rollout_ref.rollout.name", "vllm", ("same", "rollout.name", "vllm")),
        ("actor_rollout_ref.rollout.name", "sglang", ("same", "rollout.name", "sglang")),
        ("actor_rollout_ref.rollout.name", "trtllm", ("same", "rollout.name", "vllm")),
        ("actor_rollout_ref.rollout.name", "hf", ("same", "rollout.name", "vllm")),
        ("actor_rollout_ref.rollout.engine_kwargs.sglang.x", 1, ("not needed", None, None)),
        ("actor_rollout_ref.rollout.server.timeout", 1, ("not needed", None, None)),
        (f"{OF_EXPERTS}.context_parallel_algo", "ulysses", ("not needed", None, None)),
        (f"{OF_EXPERTS}.use_fused_rmsnorm", True, ("not needed", None, None)),
        (f"{OF_EXPERTS}.sequence_parallel", True, ("implied", None, None)),
        (f"{OF_EXPERTS}.context_parallel_size", 2, ("not supported", None, None)),
        (f"{OF_EXPERTS}.attention_dropout", 0.0, ("implied", None, None)),
        (f"{OF_EXPERTS}.attention_dropout", 0.1, ("not supported", None, None)),
        (f"{OF_EXPERTS}.normalization", "RMSNorm", ("implied", None, None)),
        (f"{OF_EXPERTS}.normalization", "LayerNorm", ("not supported", None, None)),
        ("actor_rollout_ref.actor.veomni.param_offload", True,
         ("renamed", "actor.megatron.param_offload", True)),
        ("actor_rollout_ref.actor.veomni.enable_fsdp_offload", True,
         ("renamed", "actor.fsdp_config.offload_policy", True)),
        ("actor_rollout_ref.actor.veomni.ulysses_parallel_size", 2,
         ("renamed", "actor.megatron.context_parallel_size", 2)),
        ("actor_rollout_ref.actor.veomni.moe_implementation", "fused", ("not needed", None, None)),
        ("actor_rollout_ref.actor.veomni.router_replay.mode", "R3",
         ("renamed", "algorithm.router_replay", "rollout")),
        ("actor_rollout_ref.actor.megatron.expert_model_parallel_size", 2,
         ("same", "actor.megatron.expert_model_parallel_size", 2)),
        ("actor_rollout_ref.actor.fsdp_config.optimizer_offload", True,
         ("renamed", "actor.megatron.optimizer_offload", True)),
        ("actor_rollout_ref.ref.fsdp_config.optimizer_offload", True, ("not needed", None, None)),
        ("actor_rollout_ref.ref.fsdp_config.offload_policy", True,
         ("renamed", "ref.fsdp_config.offload_policy", True)),
        ("actor_rollout_ref.ref.fsdp_config.offload_policy", False, ("implied", None, None)),
        ("critic.fsdp.param_offload", True, ("renamed", "critic.megatron.param_offload", True)),
        ("critic.fsdp.fsdp_size", 4, ("renamed", "critic.fsdp_config.fsdp_size", 4)),
        ("critic.fsdp.fsdp_size", 8, ("renamed", "critic.fsdp_config.fsdp_size", -1)),
        ("actor_rollout_ref.actor.strategy", "fsdp", ("renamed", "actor.strategy", "fsdp2")),
        ("actor_rollout_ref.actor.strategy", "megatron", ("implied", None, None)),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype", "fp32", ("implied", None, None)),
        ("actor_rollout_ref.ref.fsdp_config.model_dtype", "bf16", ("implied", None, None)),
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype", "fp16", (("not "
                                                                                     "supported"),
                                                                                     None, None)),
        ("actor_rollout_ref.model.enable_gradient_checkpointing", True,
         ("renamed", "actor.megatron.recompute_granularity", "full")),
        ("critic.model.enable_gradient_checkpointing", False,
         ("renamed", "critic.megatron.recompute_granularity", None)),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 4,
         ("renamed", "actor.megatron.context_parallel_size", 4)),
        ("actor_rollout_ref.actor.ppo_micro_batch_size", 64,
         ("renamed", "actor.ppo_max_token_len_per_gpu", 8 * 1024)),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 4,
         ("renamed", "actor.ppo_max_token_len_per_gpu", 4 * 1024)),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "x",
         ("not supported", None, None)),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 9000, ("not needed", None, None)),
        ("actor_rollout_ref.actor.ppo_micro_batch_size", 6, ("not supported", None, None)),
        # values that are not ours, though the setting is
        ("algorithm.adv_estimator", "gdpo", ("not supported", None, None)),
        ("algorithm.adv_estimator", "optimal_token_baseline", ("not supported", None, None)),
        ("algorithm.kl_penalty", "full", ("not supported", None, None)),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "dro", ("not supported", None, None)),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "dppo_tv",
         ("same", "actor.policy_loss.loss_mode", "dppo_tv")),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "dppo_kl",
         ("same", "actor.policy_loss.loss_mode", "dppo_kl")),
        ("actor_rollout_ref.actor.loss_agg_mode", "token-sum", ("not supported", None, None)),
        ("algorithm.rollout_correction.rollout_is", "geometric", ("not supported", None, None)),
        ("algorithm.rollout_correction.rollout_rs", "seq_max_k1", ("not supported", None, None)),
        ("actor_rollout_ref.actor.megatron.dtype", "float16", ("not supported", None, None)),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type", "wsd", ("not supported", None, None)),
        ("actor_rollout_ref.actor.router_replay.mode", "R3",
         ("renamed", "algorithm.router_replay", "rollout")),
        ("actor_rollout_ref.actor.router_replay.mode", "R2",
         ("renamed", "algorithm.router_replay", "recompute")),
        ("actor_rollout_ref.actor.router_replay.mode", "R4", ("not supported", None, None)),
        ("critic.megatron.router_replay.mode", "R3", ("not supported", None, None)),
        (f"{OF_EXPERTS}.moe_aux_loss_coeff", 0.01, ("not needed", None, None)),
        (f"{OF_EXPERTS}.moe_z_loss_coeff", 0.01, ("renamed", "actor.moe_z_loss_coeff", 0.01)),
        (f"{OF_EXPERTS}.moe_router_bias_update_rate", 0.01,
         ("renamed", "actor.moe_router_bias_update_rate", 0.01)),
        (f"{OF_EXPERTS}.moe_router_bias_update_rate", 0.0, ("implied", None, None)),
        (f"{OF_EXPERTS}.moe_router_load_balancing_type", "seq_aux_loss", ("implied", None, None)),
        (f"{OF_EXPERTS}.moe_router_load_balancing_type", "global_aux_loss",
         ("not supported", None, None)),
        (f"{OF_EXPERTS}.moe_aux_loss_coeff".replace("actor.", "ref."), 0.01,
         ("not needed", None, None)),
        (f"{OF_EXPERTS}.moe_z_loss_coeff".replace("actor_rollout_ref.actor", "critic"), 0.01,
         ("not supported", None, None)),
        ("actor_rollout_ref.actor.clip_ratio_low", "x", ("not supported", None, None)),
        ("reward_model.reward_manager.name", "gdpo", ("not supported", None, None)),
        # images
        ("actor_rollout_ref.model.path", "Qwen/Qwen2.5-VL-7B-Instruct",
         ("not supported", None, None)),
        ("actor_rollout_ref.model.path", "/models/qwen3-vl-8b", ("not supported", None, None)),
        ("actor_rollout_ref.model.path", "Qwen/Qwen2.5-7B",
         ("same", "model.path", "Qwen/Qwen2.5-7B")),
        ("data.image_key", "images", ("not supported", None, None)),
        ("data.image_key", None, ("not needed", None, None)),
        ("actor_rollout_ref.actor.freeze_vision_tower", True, ("not supported", None, None)),
        # of Ray, of vLLM and of files: no number depends on them
        ("reward_model.use_reward_loop", True, ("not needed", None, None)),
        ("reward_model.num_workers", 8, ("not needed", None, None)),
        ("actor_rollout_ref.rollout.layered_summon", True, ("not needed", None, None)),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache", True,
         ("not needed", None, None)),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype", "fp8",
         ("not supported", None, None)),
        ("actor_rollout_ref.rollout.data_parallel_size", 8, ("not needed", None, None)),
        ("trainer.v1.trainer_mode", "sync", ("implied", None, None)),
        ("trainer.v1.trainer_mode", "colocate_async", ("renamed", "rollout.partial_rollout", True)),
        ("trainer.v1.sampler.max_off_policy_threshold", 4, ("not needed", None, None)),
        ("trainer.v1.trainer_mode", "other", ("not supported", None, None)),
        ("trainer.v1.trainer_mode", "one_step_off", ("renamed", "rollout.one_step_off", True)),
        # without rollout.nnodes there are no ranks for a pool
        ("trainer.v1.trainer_mode", "separate_async", ("renamed", "rollout.partial_rollout", True)),
        ("async_training.staleness_threshold", 0, ("not needed", None, None)),
        ("async_training.staleness_threshold", 0.5,
         ("renamed", "rollout.prompts_in_flight", 1536)),
        ("async_training.partial_rollout", True, ("renamed", "rollout.partial_rollout", True)),
        ("async_training.partial_rollout", False, ("implied", None, None)),
        ("async_training.use_dynamic_resource_scheduling", True, ("not needed", None, None)),
        ("trainer.v1.separate_async.num_warmup_batches", 2, ("not needed", None, None)),
        ("rollout.total_rollout_steps", 5120, ("renamed", "trainer.total_training_steps", 20)),
        ("rollout.total_rollout_steps", None, ("implied", None, None)),
        ("rollout.nnodes", 1, ("not supported", None, None)),
        ("rollout.n_gpus_per_node", 8, ("not needed", None, None)),
        ("actor_rollout_ref.actor.optim.lr_decay_steps", 51200, ("not needed", None, None)),
        ("skip.rollout.enable", True, ("not supported", None, None)),
        # LoRA of FSDP, which reads model.lora_rank and not model.lora.rank
        ("actor_rollout_ref.model.lora_rank", 0, ("implied", None, None)),
        ("actor_rollout_ref.model.lora_rank", None, ("implied", None, None)),
        ("actor_rollout_ref.model.lora_rank", 32, ("renamed", "actor.lora.rank", 32)),
        ("critic.model.lora_rank", 8, ("renamed", "critic.lora.rank", 8)),
        ("actor_rollout_ref.model.lora_rank", -1, ("renamed", "actor.lora.rank", -1)),
        ("actor_rollout_ref.model.lora_rank", "many", ("not supported", None, None)),
        ("actor_rollout_ref.model.lora.rank", 8, ("not supported", None, None)),
        ("actor_rollout_ref.model.lora_alpha", 32, ("not needed", None, None)),
        ("actor_rollout_ref.model.target_modules", "x", ("not needed", None, None)),
        ("actor_rollout_ref.model.lora.dropout", 0.1, ("not needed", None, None)),
        ("actor_rollout_ref.model.lora_adapter_path", "adapter", ("not supported", None, None)),
        ("actor_rollout_ref.model.lora.adapter_path", "adapter", ("not supported", None, None)),
        ("actor_rollout_ref.model.use_rslora", True, ("not supported", None, None)),
        ("actor_rollout_ref.rollout.load_format", "safetensors", ("not needed", None, None)),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.max_loras", 2, ("not needed", None, None)),
        ("actor_rollout_ref.rollout.top_p", 0.9, ("not supported", None, None)),
        ("actor_rollout_ref.rollout.top_k", -1, ("implied", None, None)),
        ("actor_rollout_ref.rollout.do_sample", False, ("not supported", None, None)),
        ("actor_rollout_ref.rollout.max_model_len", 1024, ("implied", None, None)),
        ("actor_rollout_ref.rollout.max_model_len", 1023, ("not supported", None, None)),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space", 4, ("not needed", None, None)),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample", True, ("implied", None, None)),
        ("actor_rollout_ref.rollout.val_kwargs.top_p", 0.7, ("not needed", None, None)),
        ("actor_rollout_ref.rollout.multi_turn.enable", True, ("not needed", None, None)),
        ("actor_rollout_ref.rollout.agent.default_agent_loop", "tool_agent",
         ("implied", None, None)),
        ("actor_rollout_ref.rollout.agent.default_agent_loop", "mine",
         ("not supported", None, None)),
        ("actor_rollout_ref.rollout.agent.agent_loop_config_path", "a.yaml",
         ("not supported", None, None)),
        ("actor_rollout_ref.rollout.agent.custom_async_server.path", "a.py",
         ("not supported", None, None)),
        ("data.tool_config_path", "t.yaml", ("not supported", None, None)),
        ("actor_rollout_ref.rollout.multi_turn.format", "hermes", ("not needed", None, None)),
        ("critic.enable", None, ("implied", None, None)),
        ("critic.enable", False, ("not supported", None, None)),
        ("critic.shuffle", False, ("implied", None, None)),
        ("critic.shuffle", True, ("not supported", None, None)),
        ("critic.use_dynamic_bsz", True, ("implied", None, None)),
        ("actor_rollout_ref.actor.use_dynamic_bsz", False, ("not needed", None, None)),
        ("algorithm.filter_groups", None, ("implied", None, None)),
        ("algorithm.filter_groups.enable", True, ("same", "algorithm.filter_groups.enable", True)),
        ("algorithm.filter_groups.metric", "acc", ("not needed", None, None)),
        ("data.gen_batch_size", 1024, ("implied", None, None)),
        ("data.gen_batch_size", 1536, ("not needed", None, None)),
        ("algorithm.rollout_correction.rollout_is", "token",
         ("same", "algorithm.rollout_correction.rollout_is", "token")),
        ("algorithm.rollout_correction.rollout_rs", "token_k1,seq_max_k2",
         ("same", "algorithm.rollout_correction.rollout_rs", ["token_k1", "seq_max_k2"])),
        ("algorithm.rollout_correction.loss_type", "reinforce", ("not needed", None, None)),
        ("algorithm.rollout_correction.rollout_is_threshold", 2.0, ("not needed", None, None)),
        ("data.seed", 7, ("renamed", "trainer.seed", 7)),
        ("data.seed", None, ("implied", None, None)),
        ("data.truncation", "left", ("same", "data.truncation", "left")),
        ("data.custom_cls.path", "x.py", ("not supported", None, None)),
        ("data.custom_cls.path", None, ("implied", None, None)),
        ("data.apply_chat_template_kwargs.enable_thinking", False,
         ("same", "data.apply_chat_template_kwargs.enable_thinking", False)),
        ("reward.custom_reward_function.path", "r.py",
         ("same", "custom_reward_function.path", "r.py")),
        ("custom_reward_function.name", None, ("implied", None, None)),
        ("reward_model.model.path", "rm", ("not needed", None, None)),
        ("reward_model.reward_manager", "naive", ("implied", None, None)),
        ("reward_model.reward_manager", "mine", ("not supported", None, None)),
        ("reward_model.sandbox_fusion.url", "http://x", ("not supported", None, None)),
        ("trainer.resume_from_path", False, ("implied", None, None)),
        ("trainer.max_actor_ckpt_to_keep", 3, ("implied", None, None)),
        ("trainer.frobnicate", 1, ("not supported", None, None)),
    ],
)  # fmt: skip
def test_a_setting_has_this_answer(key: str, value: Any, expected: tuple[Any, ...]) -> None:
    kind, ours, result = line_of(key, value)
    assert (kind, ours) == expected[:2]
    assert result == (pytest.approx(expected[2]) if isinstance(expected[2], float) else expected[2])


def test_settings_that_depend_on_others() -> None:
    kind = {
        f"{OF_EXPERTS}.moe_router_load_balancing_type".replace("actor_rollout_ref.", ""): "aux_loss"
    }
    assert line_of(f"{OF_EXPERTS}.moe_aux_loss_coeff", 0.01, **kind) == (
        "renamed",
        "actor.moe_aux_loss_coeff",
        0.01,
    )
    ratio = "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"
    assert line_of(ratio, 0.1, actor__optim__lr_warmup_steps=7)[0] == "not needed"
    assert line_of("trainer.max_actor_ckpt_to_keep", 3, trainer__save_freq=5) == (
        "renamed", "trainer.max_ckpt_to_keep", 3)  # fmt: skip
    assert line_of("reward_model.model.path", "rm", reward_model__enable=True)[:2] == (
        "renamed", "reward_model.model_path")  # fmt: skip
    given = {"reward_model.enable": True, "reward_model.model.path": "rm"}
    key = "reward_model.model.input_tokenizer"
    for settings in (given, {**given, key: "actor"}):
        assert converted(settings).settings["reward_model.tokenizer_path"] == "rm"
    off = converted({**given, key: None}).settings
    assert off["reward_model.model_path"] == "rm" and "reward_model.tokenizer_path" not in off
    assert line_of("critic.optim.lr", 1.0, algorithm__adv_estimator="grpo")[0] == "not needed"
    correction: dict[str, Any] = {"algorithm__rollout_correction__rollout_is": "token"}
    bound = "algorithm.rollout_correction.rollout_is_threshold"
    assert line_of(bound, "0.5_5.0", **correction)[0] == "not supported", "IcePop"
    assert line_of(bound, "2.5", **correction) == ("same", bound, 2.5)
    whole = {"data__video_key": "videos"}
    assert line_of("data.image_key", "images", **whole)[0] == "not needed"
    assert (
        line_of("data.image_key", "images", **whole, model__path="Qwen3-VL-8B")[0]
        == "not supported"
    )
    contents = "actor_rollout_ref.actor.checkpoint.save_contents"
    assert line_of(contents, ["hf_model"], trainer__save_freq=5) == (
        "renamed",
        "trainer.export_freq",
        5,
    )


QKV = ["q_proj", "k_proj", "v_proj"]
LORA_OF_FSDP = [
    ("lora_alpha", 32, "renamed", 32),
    ("lora_alpha", 0, "renamed", 0),
    ("lora_alpha", None, "not supported", None),
    ("target_modules", "all-linear", "renamed", ["all-linear"]),
    ("target_modules", ["q_proj", "v_proj"], "renamed", ["q_proj", "v_proj"]),
    ("target_modules", "q_proj", "renamed", ["q_proj"]),
    ("target_modules", ["linear_qkv", "frobnicate"], "renamed", ["linear_qkv", "frobnicate"]),
    ("target_modules", [1], "not supported", None),
    ("target_modules", {"a": 1}, "not supported", None),
    ("target_modules", None, "not supported", None),
    ("exclude_modules", None, "implied", None),
    ("exclude_modules", "o_proj", "renamed", ["o_proj"]),
    ("lora_adapter_path", None, "implied", None),
    ("lora_adapter_path", "dir", "renamed", "dir"),
    ("lora.merge", True, "not needed", None),
    ("lora.alpha", 64, "not needed", None),
    ("lora.rank", 0, "implied", None),
    ("lora.rank", 8, "not supported", None),
]  # fmt: skip
"""Key of verl's in the model's section, value, kind of the answer, our value. model.lora_rank is
on."""
LORA_OF_MEGATRON = [
    ("lora.alpha", 32, "renamed", 32),
    ("lora.target_modules", ["linear_qkv"], "renamed", QKV),
    ("lora.target_modules", ["linear_proj", "linear_fc1", "linear_fc2"], "renamed",
     ["o_proj", "gate_proj", "up_proj", "down_proj"]),
    ("lora.target_modules", ["linear_q", "linear_k", "linear_v"], "renamed", QKV),
    ("lora.target_modules", ["linear_fc1_up", "linear_fc1_gate"], "renamed",
     ["up_proj", "gate_proj"]),
    ("lora.target_modules", ["linear_kv_up_proj"], "renamed", ["kv_b_proj"]),
    ("lora.target_modules", ["frobnicate", "*.layers.0.*.linear_qkv"], "renamed",
     ["frobnicate", "*.layers.0.*.linear_qkv"]),
    ("lora.target_modules", [["linear_qkv"]], "not supported", None),
    ("lora.target_modules", [], "renamed", ["all-linear"]),
    ("lora.exclude_modules", [], "implied", None),
    ("lora.exclude_modules", ["linear_proj"], "renamed", ["o_proj"]),
    ("lora.adapter_path", "dir", "renamed", "dir"),
    ("lora.adapter_path", None, "implied", None),
    ("lora.dropout", 0.0, "implied", None),
    ("lora.dropout", 0.05, "not supported", None),
    ("lora.type", "lora", "implied", None),
    ("lora.type", "canonical_lora", "implied", None),
    ("lora.type", "dora", "not supported", None),
    ("lora.type", "vlm_lora", "not supported", None),
    ("lora.lora_A_init_method", "kaiming", "implied", None),
    ("lora.lora_A_init_method", "normal", "not supported", None),
    ("lora.lora_B_init_method", "zero", "implied", None),
    ("lora.lora_B_init_method", "xavier", "not supported", None),
    ("lora.merge", True, "not needed", None),
    ("lora.a2a_experimental", True, "not needed", None),
    ("lora.dtype", "fp32", "not needed", None),
    ("lora.freeze_language_model", False, "not needed", None),
    ("lora.use_rslora", True, "not supported", None),
    ("lora.share_expert_adapters", False, "implied", None),
    ("lora.normalize_moe_lora", True, "not supported", None),
    ("lora_alpha", 64, "not needed", None),
    ("target_modules", ["q_proj"], "not needed", None),
    ("lora_rank", 8, "not supported", None),
]  # fmt: skip
"""The same where model.lora.rank is on."""


@pytest.mark.parametrize("section", ["actor_rollout_ref.model", "critic.model"])
@pytest.mark.parametrize(
    ("engine", "key", "value", "kind", "ours"),
    [("fsdp", *case) for case in LORA_OF_FSDP] + [("megatron", *case) for case in LORA_OF_MEGATRON],
)
def test_lora_has_this_answer(
    section: str, engine: str, key: str, value: Any, kind: str, ours: Any
) -> None:
    rank = f"{section}.{'lora_rank' if engine == 'fsdp' else 'lora.rank'}"
    conversion = converted({"model_engine": engine, rank: 8, f"{section}.{key}": value})
    (line,) = (line for name, line in conversion.report if name == f"{section}.{key}")
    assert (line.kind, line.value) == (kind, ours)
    role = "critic" if section == "critic.model" else "actor"
    if ours is not None:
        name = key.removeprefix("lora.").removeprefix("lora_")
        assert conversion.settings[f"{role}.lora.{name}"] == ours
    assert conversion.settings[f"{role}.lora.rank"] == 8


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [("lora_rank", -1, "actor.lora.rank"), ("lora_alpha", 0, "actor.lora.alpha")],
)
def test_lora_that_is_out_of_range_is_named_by_our_check(key: str, value: Any, ours: str) -> None:
    given = {"actor_rollout_ref.model.lora_rank": 8, f"actor_rollout_ref.model.{key}": value}
    paths = ["data.train_files=[a]", "model.path=m"]
    with pytest.raises(UserError, match=re.escape(ours)):
        check_config(load_config(nest_settings(converted(given).settings), paths), 8)


def test_defaults_of_megatrons_lora_are_written_out() -> None:
    """Check alpha and modules: verl's default of FSDP's alpha is ours."""
    on = {"model_engine": "megatron", "critic.model.lora.rank": 8}
    settings = converted(on).settings
    assert settings["critic.lora.alpha"] == 32 and "actor.lora.alpha" not in settings
    assert settings["critic.lora.target_modules"] == [
        *QKV, "o_proj", "gate_proj", "up_proj", "down_proj"]  # fmt: skip
    assert (
        converted({"model_engine": "fsdp", "critic.model.lora_rank": 8})
        .settings.keys()
        .isdisjoint({"critic.lora.alpha", "critic.lora.target_modules"})
    )
    assert "critic.lora.rank" not in converted({**on, "algorithm.adv_estimator": "grpo"}).settings


@pytest.mark.parametrize(
    ("engine", "rank", "layout"),
    [
        ("fsdp", "lora_rank", "fsdp_config.param_offload"),
        ("megatron", "lora.rank", "megatron.param_offload"),
    ],
)
def test_reference_without_adapters_has_no_layout(
    engine: str, rank: str, layout: str, tmp_path: Path
) -> None:
    """Check verl's usual offload of the reference, which is the actor with LoRA."""
    given = {
        "data.train_files": "a",
        "actor_rollout_ref.model.path": "m",
        "model_engine": engine,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2,
        "actor_rollout_ref.actor.megatron.dtype": "float32",  # verl's reference is bfloat16
        f"actor_rollout_ref.ref.{layout}": True,
    }
    assert converted(given).settings["ref.megatron.param_offload"] is True
    lora = converted({**given, f"actor_rollout_ref.model.{rank}": 8})
    assert not any(key.startswith("ref.megatron") for key in lora.settings)
    assert loaded(lora, tmp_path / "ours.yaml").actor.lora.rank == 8


def test_tools_become_an_environment() -> None:
    """Check settings of multi_turn in a run with tools, where they count whatever multi_turn.enable
    is."""
    given: dict[str, Any] = {"rollout__multi_turn__tool_config_path": "t.yaml"}
    for name, value, ours, wanted in (
        ("tool_config_path", "t.yaml", "tool_config_path", "t.yaml"),
        ("function_tool_path", "f.py", "function_tool_path", "f.py"),
        ("format", "gpt-oss", "format", "gpt-oss"),
        ("format", "glm", "format", "glm45"),
        ("max_parallel_calls", 3, "max_parallel_calls", 3),
        ("max_assistant_turns", 5, "max_turns", 5),
        ("max_user_turns", 5, "max_turns", 6),
        ("max_tool_response_length", 100, "max_observation_length", 100),
        # verl's names the part that is kept
        ("tool_response_truncate_side", "left", "truncate", "right"),
    ):
        key = f"actor_rollout_ref.rollout.multi_turn.{name}"
        assert line_of(key, value, **given) == ("renamed", f"rollout.environment.{ours}", wanted)
    both = {**given, "rollout__multi_turn__max_assistant_turns": 5}
    assert line_of("actor_rollout_ref.rollout.multi_turn.max_user_turns", 2, **both)[2] == 3
    interaction = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
    assert line_of(interaction, "i.yaml", **given)[0] == "not supported"
    assert line_of("data.tool_config_path", "t.yaml", **given)[0] == "implied"
    run = converted({"rollout.multi_turn.function_tool_path": "f.py"})
    assert run.settings["rollout.environment.max_observation_length"] == 256  # verl's default


def test_micro_batches_are_by_the_switch_of_their_pass() -> None:
    """Convert numbers of sequences of 8 + 2 tokens where the pass is not by token budget."""
    lengths: dict[str, Any] = {"data__max_prompt_length": 8, "data__max_response_length": 2}
    for role, ours in (
        ("rollout", "rollout.log_prob_"),
        ("ref", "ref.log_prob_"),
        ("critic", "critic.ppo_"),
    ):
        size = f"{ours}micro_batch_size_per_gpu"
        budget = f"{ours}max_token_len_per_gpu"
        switch = f"{role}__{'' if role == 'critic' else 'log_prob_'}use_dynamic_bsz"
        for switches, by_number in (({}, True), ({"actor__use_dynamic_bsz": True}, False),
                                    ({"actor__use_dynamic_bsz": True, switch: False}, True),
                                    ({"actor__use_dynamic_bsz": False, switch: True},
                                     False)):  # fmt: skip
            assert line_of(size, 3, **lengths, **switches)[1:] == (
                (budget, 30) if by_number else (None, None)
            )
            assert (line_of(budget, 90, **switches)[2] is None) == by_number
    scorer: dict[str, Any] = {"reward_model__enable": True, "critic__use_dynamic_bsz": True}
    assert line_of("reward_model.micro_batch_size_per_gpu", 3, **lengths, **scorer)[0] == "implied"
    del scorer["critic__use_dynamic_bsz"]
    assert line_of("reward_model.micro_batch_size_per_gpu", 3, **lengths, **scorer)[1:] == (
        "reward_model.forward_max_token_len_per_gpu", 30)  # fmt: skip
    given = {"actor.ppo_micro_batch_size_per_gpu": 3, "critic.ppo_micro_batch_size_per_gpu": 5}
    settings = converted({"algorithm.adv_estimator": "gae", **given}).settings
    assert settings["rollout.log_prob_max_token_len_per_gpu"] == 3 * 1024
    assert settings["critic.forward_max_token_len_per_gpu"] == 5 * 1024


def test_layouts_that_depend_on_others() -> None:
    both = {"actor__megatron__context_parallel_size": 2}
    assert line_of(f"{OF_EXPERTS}.context_parallel_size", 2, **both)[0] == "implied"
    experts = "actor_rollout_ref.actor.megatron.expert_model_parallel_size"
    sizes = {"actor__megatron__tensor_model_parallel_size": 4}
    for etp, ours in ((None, 8), (4, 8), (1, 2), (2, 4)):
        assert (
            line_of(experts, 8, **sizes, actor__megatron__expert_tensor_parallel_size=etp)[2]
            == ours
        )
    assert (
        line_of(experts, 6, **sizes, actor__megatron__expert_tensor_parallel_size=1)[0]
        == "not supported"
    )
    of_ref = experts.replace("actor.", "ref.")
    assert line_of(of_ref, 8, **sizes, actor__megatron__expert_tensor_parallel_size=1)[2] == 2, (
        "the actor's"
    )

    checkpointing = "actor_rollout_ref.model.enable_gradient_checkpointing"
    assert line_of(checkpointing, True, **sizes)[0] == "not needed", (
        "verl's Megatron does not read it"
    )
    ulysses: dict[str, Any] = {
        "actor__ulysses_sequence_parallel_size": 2,
        "actor__use_dynamic_bsz": True,
    }
    for key in ("actor.ppo_max_token_len_per_gpu", "ref.log_prob_max_token_len_per_gpu"):
        assert line_of(key, 9000, **ulysses) == ("same", key, 9000), "of one rank"
    del ulysses["actor__use_dynamic_bsz"]
    for key, tokens in (("ref.log_prob", 3 * 512), ("critic.ppo", 3 * 1024)):
        assert line_of(f"{key}_micro_batch_size_per_gpu", 3, **ulysses)[2] == tokens
    aggregation = "actor.loss_agg_mode"
    for loss, ours in (
        ("gspo", "seq-mean-token-mean"),
        ("sapo", "seq-mean-token-mean"),
        ("cispo", "token-mean"),
    ):
        assert line_of(aggregation, "token-mean", actor__policy_loss__loss_mode=loss)[2] == ours
    offload = "actor.veomni.param_offload"
    assert line_of(offload, True, actor__veomni__enable_fsdp_offload=True)[0] == "not needed"
    own = "ref.fsdp_config.offload_policy"
    assert line_of(own, False, actor__fsdp_config__offload_policy=True) == ("renamed", own, False)
    gspo = {"actor.policy_loss.loss_mode": "geo_mean"}
    assert converted(gspo).settings[aggregation] == "seq-mean-token-mean"


def test_fsdp_is_recomputed_and_says_how_to_find_a_layout() -> None:
    given = {"actor.strategy": "fsdp", "algorithm.adv_estimator": "gae"}
    fsdp = converted(given)
    assert fsdp.settings["actor.strategy"] == "fsdp2"
    assert fsdp.settings["actor.megatron.recompute_granularity"] == "full"
    assert "note: layout: FSDP stays FSDP2" in fsdp.text() and "--gpus-per-node" in fsdp.text()
    shared = converted({**given, "actor.ulysses_sequence_parallel_size": 2}).settings
    sizes = (shared["actor.strategy"], shared["actor.megatron.context_parallel_size"])
    assert sizes == ("fsdp2", 2)
    other = converted({**given, "actor.veomni.expert_parallel_size": 2})
    assert "actor.strategy" not in other.settings
    assert other.settings["actor.megatron.grad_offload"] is True
    reason = "(actor.veomni.expert_parallel_size is 2, which fsdp2 does not have)"
    assert reason in other.text()
    adapters = converted({**given, "critic.model.lora_rank": 8})
    assert "actor.strategy" not in adapters.settings
    assert "(critic.model.lora_rank is 8, and fsdp2 has no LoRA)" in adapters.text()
    asked = converted_arguments(["actor.strategy=fsdp", "--strategy", "megatron"])
    assert "actor.strategy" not in asked.settings and "--gpus-per-node" in asked.text()
    with pytest.raises(UserError, match="--strategy 'zero': expected fsdp2 or megatron"):
        converted_arguments(["actor.strategy=fsdp", "--strategy=zero"])
    megatron = converted(PPO_MATH)
    assert (
        "actor.megatron.recompute_granularity" not in megatron.settings
        and "note: layout" not in megatron.text()
    )


@pytest.mark.slow
def test_machine_gives_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
    }
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    given = ["data.train_files=[a]", f"actor_rollout_ref.model.path={model}",
     "algorithm.adv_estimator=grpo",
             "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.use_dynamic_bsz=True",
             "actor_rollout_ref.actor.strategy=fsdp2", f"{OF_ACTOR}.use_kl_loss=True",
             "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=32"]  # fmt: skip
    assert from_verl.main([*given, "--nodes", "2", "--gpus-per-node=8", "--gpu", "h100"]) == 0
    out = capsys.readouterr().out
    assert "sbatch --nodes 2 slurm/ppo_2nodes.sh THIS_FILE" in out
    (tmp_path / "ours.yaml").write_text(out)
    cfg = load_config(str(tmp_path / "ours.yaml"))
    shapes = planned_shapes(cfg)
    capacity = Capacity(16, parse_gpu("h100").memory, True, 8, None)
    assert check_fit(cfg, shapes, plan_run(cfg, shapes, capacity), capacity).problem is None
    assert from_verl.main([*given, "--nodes=1", "--gpus-per-node=1"]) == 2
    out, report = capsys.readouterr()
    assert out == "" and "no settings fit 1 GPUs" in report.splitlines()[-1]


@pytest.mark.slow
def test_machine_gives_a_layout_of_the_training_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(FULLY_ASYNC.replace("megatron_", ""))
    machine = ["--nodes=3", "--gpus-per-node=8", "--gpu=h100", "--model=qwen3-8b"]
    assert from_verl.main([str(script), *machine]) == 0
    out, report = capsys.readouterr()
    assert "to be changed" not in report and "sbatch --nodes 3 slurm" in out
    (tmp_path / "ours.yaml").write_text(out)
    cfg = load_config(str(tmp_path / "ours.yaml"))
    check_config(cfg, 24)
    assert (cfg.resource_pools.train, cfg.resource_pools.rollout) == (16, 8)
    assert cfg.rollout.tensor_model_parallel_size == 4  # of the script: the rollout ranks' own
    assert not cfg.rollout.free_cache_engine


def test_rewards_are_verls_rules() -> None:
    rules = converted({"algorithm.adv_estimator": "grpo"})
    assert rules.settings["reward.math_rule"] == "math_string" and "prime_code.py" in rules.text()
    own = converted({"custom_reward_function.path": "r.py"})
    assert "reward.math_rule" not in own.settings and "note: rewards" not in own.text()
    assert line_of("data.truncation", "left", data__filter_overlong_prompts=True)[0] == "not needed"
    filters = {"algorithm__filter_groups__enable": True}
    assert line_of("data.gen_batch_size", 1536, **filters) == ("same", "data.gen_batch_size", 1536)
    metric = "algorithm.filter_groups.metric"
    assert line_of(metric, "acc", **filters) == ("same", metric, "acc")
    assert line_of(metric, "seq_final_reward", **filters) == ("same", metric, "seq_reward")
    kl = {"algorithm__use_kl_in_reward": True}
    assert line_of(metric, "seq_final_reward", **filters, **kl)[0] == "not supported"
    most = "algorithm.filter_groups.max_num_gen_batches"
    assert [line_of(most, count, **filters)[2] for count in (10, 0, -1)] == [10, 0, 0]
    path = "actor_rollout_ref.actor.megatron.dist_checkpointing_path"
    assert (
        line_of(path, "m", actor__megatron__use_dist_checkpointing=True)[1]
        == "model.dist_checkpointing_path"
    )
    both = converted(
        {
            "actor.loss_agg_mode": "seq-mean-token-sum",
            "actor.ppo_max_token_len_per_gpu": 20000,
            "actor.use_dynamic_bsz": True,
        }
    ).settings
    assert both["critic.loss_agg_mode"] == "seq-mean-token-sum"
    assert both["rollout.log_prob_max_token_len_per_gpu"] == 20000


@pytest.mark.parametrize(
    ("statistics", "thresholds", "expected"),
    [
        ("token_k1", 2, ([2.0], None)),
        ("token_k1,seq_max_k2", "1.5, 1e-2", ([1.5, 0.01], None)),
        ("seq_mean_k1,seq_mean_k3", 1.2, ([1.2, 1.2], None)),  # one for all
        ("token_k1", "0.5_2.0", ([2.0], None)),
        ("token_k1,seq_sum_k3", "0.8_4,0.3", ([1.25, 0.3], 0.25)),  # 1 / rho from 0.8 to 4
        ("geometric", 1.1, ([1.1], None)),
        ("token_k1", "2_a", None),
        ("token_k3", "0.5_2", None),
        ("token_k1,token_k2,token_k3", "2,3", None),
        ("token_k1,seq_sum_k1", "0.8_4,2", None),  # two lower bounds
    ],
)
def test_strings_of_rejection_are_converted(
    statistics: str, thresholds: Any, expected: Any
) -> None:
    section = "algorithm.rollout_correction"
    conversion = converted(
        {f"{section}.rollout_rs": statistics, f"{section}.rollout_rs_threshold": thresholds}
    )
    if expected is None:
        assert [key for key, _ in conversion.refused()] == [f"{section}.rollout_rs_threshold"]
        return
    upper, lower = expected
    assert conversion.refused() == []
    assert conversion.settings[f"{section}.rollout_rs_threshold"] == pytest.approx(upper)
    assert conversion.settings.get(f"{section}.rollout_rs_threshold_lower") == lower


def test_bounds_of_an_earlier_version_pass() -> None:
    section = "algorithm.rollout_correction"
    given = {
        "rollout_rs": "sequence",
        "rollout_rs_threshold": 3.0,
        "rollout_rs_threshold_lower": 0.5,
    }
    settings = converted({f"{section}.{name}": value for name, value in given.items()}).settings
    ours = {name: settings[f"{section}.{name}"] for name in given}
    assert ours == {
        "rollout_rs": ["seq_sum_k1"],
        "rollout_rs_threshold": [3.0],
        "rollout_rs_threshold_lower": 0.5,
    }


# ---------------------------------------------------------------- scripts and overrides

SCRIPT = """\
set -x
DATA=$HOME/data            # of the environment
train="['$DATA/a.parquet', '$DATA/b.parquet']"
N=$((1024 * 2))
TP=${TP:-${OTHER_TP:-4}}
if [ "$mode" = "async" ]; then
    export return_raw_chat=True
fi
[ -n "$mode" ] && extra=1
MORE=(
    trainer.logger=['console','wandb']  # a list
    +data.apply_chat_template_kwargs.enable_thinking=False
)
MORE+=(algorithm.lam=0.95)
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo --config-path=config \\
    --config-name='ppo_megatron_trainer.yaml'\\
    data.train_files="$train" \\
    data.max_prompt_length=${N} \\
    data.return_raw_chat=$return_raw_chat \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP \\
    "${MORE[@]}" $@ 2>&1 | tee log
"""


def test_script_is_read(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    overrides = ["data.return_raw_chat=x", "algorithm.lam=1"]
    reading = read_verl(str(script), overrides, {"HOME": "/home/me"})
    given = {key: item.value for key, item in reading.settings.items()}
    assert reading.notes[0] == ("environment    HOME: /home/me", "given")
    assert given == {
        "data.train_files": ["/home/me/data/a.parquet", "/home/me/data/b.parquet"],
        "data.max_prompt_length": 2048,
        "data.return_raw_chat": "x",
        "actor.megatron.tensor_model_parallel_size": 4,
        "trainer.logger": ["console", "wandb"],
        "data.apply_chat_template_kwargs.enable_thinking": False,
        "algorithm.lam": 1,
    }
    without_data = read_verl(
        str(script), ["data.return_raw_chat=x", "~data", "trainer.seed=1"]
    ).settings
    names = [
        "actor.megatron.tensor_model_parallel_size",
        "trainer.logger",
        "algorithm.lam",
        "trainer.seed",
    ]
    assert list(without_data) == names


def test_words_that_expand_to_nothing_are_no_settings(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('NONE=()\npython3 -m verl.trainer.main_ppo a.b=1 "${NONE[@]}" a.c="" "$@"\n')
    assert {key: item.value for key, item in read_verl(str(script), []).settings.items()} == {
        "a.b": 1,
        "a.c": "",
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("k.a=$UNSET", "line 2: k.a: $UNSET is not set; give --env UNSET=VALUE, or k.a=VALUE"),
        ("k.a=x_$(date +%s)", "line 2: k.a: $(date +%s) is not evaluated; give k.a=VALUE"),
        ("k.a=$(date\n)", "k.a: $(date ) is not evaluated"),
        ("k.a=$((1 +))", "line 2: `+` must be followed by an expression"),
        ("notakey", "line 2: 'notakey': expected key=value"),
        ("--config-name=mine", "line 2: --config-name: mine.yaml is not in . or /"),
        ("--config-path=c --config-name=mine", "line 2: --config-name: mine.yaml is not in c or /"),
        ("k.a='x", "line 2: reached EOF without closing quote `'`"),
        ("k.a=[1,", "line 2: k.a: not valid YAML"),
        ("k.a=1 \\ \n k.b=1", "line 2: a space after the backslash ends the command here"),
    ],
)
def test_mistake_in_a_script_names_the_line(tmp_path: Path, line: str, words: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"# a comment\npython3 -m verl.trainer.main_ppo {line}\n")
    with pytest.raises(UserError) as caught:
        read_verl(str(script), [])
    assert (
        words in str(caught.value)
        and str(script) in str(caught.value)
        and "\n" not in str(caught.value)
    )


@pytest.mark.parametrize("module", ["recipe.dapo.main_dapo", "recipe.dapo.src.main_dapo"])
def test_script_of_the_dapo_recipe_is_read(tmp_path: Path, module: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "on=True\nsize=512\ngen=$((size * 3))\n"
        f"ray job submit --no-wait -- python3 -m {module} --config-name=dapo_trainer \\\n"
        "    data.train_batch_size=${size} data.gen_batch_size=${gen} "
        "actor_rollout_ref.rollout.n=16 \\\n"
        "    algorithm.adv_estimator=grpo algorithm.filter_groups.enable=${on} "
        "algorithm.filter_groups.metric=acc \\\n"
        "    algorithm.filter_groups.max_num_gen_batches=10\n"
    )
    found = convert(read_verl(str(script), []).settings)
    assert not found.refused()
    assert {
        key: found.settings[key] for key in found.settings if "filter" in key or "batch_size" in key
    } == {
        "data.train_batch_size": 512,
        "data.gen_batch_size": 1536,
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "acc",
        "algorithm.filter_groups.max_num_gen_batches": 10,
    }


FULLY_ASYNC = """\
python -m verl.experimental.fully_async_policy.fully_async_main \\
    --config-path=config --config-name='fully_async_ppo_megatron_trainer.yaml' \\
    data.train_files=a actor_rollout_ref.model.path=m algorithm.adv_estimator=grpo \\
    data.train_batch_size=0 data.gen_batch_size=1 actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.optim.lr_decay_steps=9999 actor_rollout_ref.hybrid_engine=False \\
    trainer.nnodes=2 trainer.n_gpus_per_node=8 trainer.total_epochs=10 \\
    rollout.nnodes=1 rollout.n_gpus_per_node=8 rollout.total_rollout_steps=12800 \\
    async_training.require_batches=2 async_training.trigger_parameter_sync_step=4 \\
    async_training.staleness_threshold=0.5 async_training.partial_rollout=True \\
    async_training.concurrent_samples_per_replica=16 "$@"
"""
"""A made-up script: a weight update after 4 x 2 x 16 = 128 prompts."""


def async_run(tmp_path: Path, script: str, *overrides: str) -> tuple[Config, Conversion]:
    """Return our config of a script of 24 GPUs, which passes the checks, and its report."""
    path = tmp_path / "run.sh"
    path.write_text(script)
    found = converted_arguments([str(path), *overrides])
    assert not found.refused()
    ours = tmp_path / "ours.yaml"
    ours.write_text(found.yaml("run.sh"))
    cfg = load_config(str(ours))
    check_config(cfg, found.nodes * found.processes)
    assert found.nodes * found.processes == 24
    return cfg, found


def test_fully_async_script_has_pools(tmp_path: Path) -> None:
    cfg, found = async_run(tmp_path, FULLY_ASYNC)
    assert (cfg.resource_pools.train, cfg.resource_pools.rollout) == (16, 8)
    assert (found.nodes, found.processes) == (3, 8)
    assert cfg.rollout.one_step_off and cfg.rollout.partial_rollout
    assert cfg.rollout.prompts_in_flight == 192  # 1.5 batches
    assert (cfg.data.train_batch_size, cfg.actor.ppo_mini_batch_size) == (128, 16)
    assert cfg.trainer.total_training_steps == 100
    assert cfg.actor.optim.lr_warmup_steps == 3  # of 10 updates, 4 a step
    assert cfg.algorithm.rollout_correction.bypass_mode
    assert cfg.algorithm.router_replay is None and not cfg.rollout.free_cache_engine
    report = found.text()
    for difference in (
        "fully_async_main -> rollout.one_step_off: true  (verl trains on groups as they end",
        "staleness_threshold -> rollout.prompts_in_flight: 192  (1 + 0.5 batches)",
        "async_training.partial_rollout -> rollout.partial_rollout: true",
    ):
        assert difference in report


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # without staleness a step trains on its own responses
        (["async_training.staleness_threshold=0"], (16, 8, False, False, True, None)),
        (["algorithm.filter_groups.enable=True"], (16, 8, True, True, True, None)),
        # no rollout ranks: partial rollouts on all ranks
        (["rollout.nnodes=0", "trainer.nnodes=3"], (None, None, False, True, True, None)),
        # old log-probs of the trainer, as verl's earlier name or bypass_mode has them
        (["async_training.compute_prox_log_prob=True"], (16, 8, True, True, False, "token")),
        (["algorithm.rollout_correction.bypass_mode=False"], (16, 8, True, True, False, "token")),
        (["algorithm.rollout_correction.rollout_is=sequence"],
         (16, 8, True, True, False, "sequence")),
        # each response of one version
        (["async_training.partial_rollout=False"], (16, 8, True, False, True, None)),
        (["algorithm.rollout_correction.rollout_rs=seq_mean_k1",
          "algorithm.rollout_correction.rollout_rs_threshold=0.99_1.01",
          "algorithm.rollout_correction.rollout_is=null",
          "algorithm.rollout_correction.rollout_is_threshold=null",
          "algorithm.rollout_correction.bypass_mode=True"], (16, 8, True, True, False, "token")),
    ],
)  # fmt: skip
def test_settings_of_an_async_script(
    tmp_path: Path, overrides: list[str], expected: tuple[Any, ...]
) -> None:
    cfg, _ = async_run(tmp_path, FULLY_ASYNC, *overrides)
    pools = cfg.resource_pools
    rollout = cfg.rollout
    correction = cfg.algorithm.rollout_correction
    assert expected == (
        pools.train,
        pools.rollout,
        rollout.one_step_off,
        rollout.partial_rollout,
        correction.bypass_mode,
        correction.rollout_is,
    )


@pytest.mark.parametrize(
    "program",
    ["verl.experimental.one_step_off_policy.main_ppo", "recipe.one_step_off_policy.main_ppo"],
)
def test_one_step_off_script_has_pools(tmp_path: Path, program: str) -> None:
    script = (
        f"python3 -m {program} data.train_files=a actor_rollout_ref.model.path=m "
        "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 data.train_batch_size=64 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.strategy=fsdp2 "
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10 trainer.total_training_steps=70 "
        "trainer.nnodes=2 trainer.n_gpus_per_node=6 rollout.nnodes=2 rollout.n_gpus_per_node=6\n"
    )
    cfg, found = async_run(tmp_path, script)
    assert (cfg.resource_pools.train, cfg.resource_pools.rollout) == (12, 12)
    assert cfg.rollout.one_step_off and cfg.algorithm.rollout_correction.bypass_mode
    assert (cfg.data.train_batch_size, cfg.trainer.total_training_steps) == (64, 70)
    assert cfg.actor.optim.lr_warmup_steps == 10
    assert f"{program} -> rollout.one_step_off: true" in found.text()


def test_separate_async_mode_has_pools(tmp_path: Path) -> None:
    script = (
        "python3 -m verl.trainer.main_ppo trainer.v1.trainer_mode=separate_async "
        "trainer.v1.separate_async.parameter_sync_step=4 trainer.nnodes=2 "
        "trainer.v1.separate_async.num_warmup_batches=2 actor_rollout_ref.rollout.nnodes=1 "
        "trainer.v1.sampler.max_off_policy_threshold=8 data.train_files=a "
        "actor_rollout_ref.model.path=m algorithm.adv_estimator=grpo data.train_batch_size=64 "
        "actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=16 "
        "actor_rollout_ref.actor.optim.lr_warmup_steps=9\n"
    )
    cfg, found = async_run(tmp_path, script)
    assert (cfg.resource_pools.train, cfg.resource_pools.rollout) == (16, 8)
    assert cfg.rollout.one_step_off and cfg.data.train_batch_size == 64
    assert cfg.rollout.partial_rollout and cfg.rollout.prompts_in_flight == 192
    assert cfg.rollout.max_off_policy_threshold == 8
    assert cfg.actor.optim.lr_warmup_steps == 3
    correction = cfg.algorithm.rollout_correction
    assert (correction.rollout_is, correction.bypass_mode) == ("token", False)
    assert "rollout.prompts_in_flight: 192  (1 + 2 batches)" in found.text()


def test_variable_under_a_condition_is_not_resolved(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    with pytest.raises(
        UserError,
        match=r"line 19: data.return_raw_chat: \$return_raw_chat is 'True' or not set, by the "
        r"condition .* in line 6, "
        r"which is not decided; give --env mode=VALUE, or data.return_raw_chat=VALUE",
    ):
        read_verl(str(script), [])
    script.write_text("echo nothing\n")
    with pytest.raises(UserError, match=r"no command with `-m verl.trainer.main_ppo`"):
        read_verl(str(script), [])


def report_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of the tool's report."""
    from_verl.main(arguments)
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("name", [*WHOLE_RUNS, "other_settings"])
def test_every_setting_of_a_script_is_in_the_report(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check scripts that have settings in arrays, in a branch that is not taken and behind the
    command's end."""
    words = [
        line
        for line in (EXAMPLES / f"{name}.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    parts = [words[start::4] for start in range(4)]
    quoted = [" \\\n    ".join(shlex.quote(word) for word in part) for part in parts]
    script = tmp_path / "run.sh"
    script.write_text(
        f"ALL=(\n    # these\n    {parts[0][0]}\n)\nALL+=({quoted[0]})\n"
        f'if [ -n "$MORE" ]; then\n    ALL+=({quoted[1]})\nfi\n'
        f'python3 -m verl.trainer.main_ppo {quoted[2]} \\\n    "${{ALL[@]}}" \\\n    # a comment '
        "ends it\n"
        f"    {quoted[3]}\n"
    )
    keys = [[word.partition("=")[0].lstrip("+") for word in part] for part in parts]
    for environment, passed in (([], (0, 2)), (["--env", "MORE=1"], (0, 1, 2))):
        found = report_of([str(script), *environment], capsys)
        kinds = {(line[:13].strip(), re.split("[: ]", line[15:])[0]) for line in found}
        not_given = [key for kind, key in kinds if kind == "not given"]
        assert sorted(not_given) == sorted(
            key for number in range(4) if number not in passed for key in keys[number]
        )
        others = {key for kind, key in kinds if kind not in ("not given", "default")}
        assert [key for number in passed for key in keys[number] if key not in others] == []


def test_name_that_is_not_known_becomes_a_plain_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    base = " ".join(
        shlex.quote(f"{key}={value}") for key, value in PPO_MATH.items() if value is not None
    )
    script.write_text(
        f"source env.sh\nNAME=a_$(date +%s)_$JOB\npython3 -m verl.trainer.main_ppo {base} "
        "trainer.experiment_name=$NAME"
        " trainer.default_local_dir=/x/$(date +%F)\n"
    )
    assert from_verl.main([str(script)]) == 0
    out, report = capsys.readouterr()
    assert "experiment_name: a_date_JOB\n" in out and "default_local_dir: /x/date\n" in out
    assert "not read       env.sh: line 1 sources it; give its variables by --env\n" in report
    assert (
        "replaced       trainer.experiment_name=a_date_JOB: $(date +%s) is not evaluated; a plain "
        "word"
    ) in report
    assert from_verl.main([str(script), "--env", "NAME=b"]) == 0
    out, report = capsys.readouterr()
    assert "experiment_name: b\n" in out and "environment    NAME: b: given\n" in report
    script.write_text(f"python3 -m verl.trainer.main_ppo {base} trainer.default_local_dir=$OUT/x\n")
    assert report_of([str(script)], capsys)[-1].endswith(
        "line 1: trainer.default_local_dir: $OUT is not set; give --env OUT=VALUE, or "
        "trainer.default_local_dir=VALUE"
    )


def test_variables_are_given_by_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "run.sh"
    overrides = " ".join(
        shlex.quote(f"{key}={value}") for key, value in PPO_MATH.items() if value is not None
    )
    script.write_text(
        f"python3 -m verl.trainer.main_ppo {overrides} data.train_files=$DATA/x.parquet\n"
    )
    monkeypatch.setenv("DATA", "/of/this/process")
    with pytest.raises(UserError, match=r"\$DATA is not set; give --env DATA=VALUE"):
        converted_arguments([str(script)])
    for arguments, expected in (
        (["--env", "DATA=/given"], "/given/x.parquet"),
        (["--env=DATA"], "/of/this/process/x.parquet"),
    ):
        settings = converted_arguments([str(script), *arguments, "trainer.seed=3"]).settings
        assert settings["data.train_files"] == expected and settings["trainer.seed"] == 3
    for wrong, words in (
        ("A B", "expected --env NAME=VALUE"),
        ("ABSENT", "the environment has no ABSENT"),
    ):
        with pytest.raises(UserError, match=words):
            converted_arguments([str(script), "--env", wrong])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train_files='${DATA}/x'", r"data.train_files: ${DATA} is no setting of verl's"),
        (
            "actor.ppo_mini_batch_size=${data.train_batch_size}",
            "data.train_batch_size is not given; give data.train_ba",
        ),
        ("trainer.experiment_name=x${trainer.project_name}", "trainer.project_name is not given"),
        ("model.path=${oc.env:MODEL}", "give --env MODEL=VALUE, or --env MODEL"),
        ("a.b=${a.b}", "a.b: ${a.b}: more than 10 references in turn"),
        (
            "custom_reward_function.name=mine",
            "custom_reward_function.name=mine without custom_reward_function.path",
        ),
        ("a.b={" + "{" * 5000, "not valid YAML: nested too deeply"),
        ("a.b=" + "[" * 5000, "not valid YAML: nested too deeply"),
    ],
)
def test_value_that_cannot_be_resolved_is_an_error(override: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_verl(None, [override])
    assert (
        words in str(caught.value)
        and len(str(caught.value)) < 300
        and "\n" not in str(caught.value)
    )


def test_home_in_settings_is_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = tmp_path / "verl.yaml"
    config.write_text(
        "data: {train_files: [$HOME/a, '${HOME}/b', $HOMER], val_files: '${oc.env:HOME}/c'}\n"
    )
    reading = read_verl(str(config), ["model.path=${oc.env:MODEL}"], {"MODEL": "m"})
    assert {key: item.value for key, item in reading.settings.items()} == {
        "data.train_files": ["/home/me/a", "/home/me/b", "$HOMER"],
        "data.val_files": "/home/me/c",
        "model.path": "m",
    }
    assert ("environment    HOME: /home/me", "of this process") in reading.notes


def test_yaml_with_references_is_read(tmp_path: Path) -> None:
    config = tmp_path / "verl.yaml"
    config.write_text(
        "defaults: [ppo_megatron_trainer, _self_]\n"
        "actor_rollout_ref:\n"
        "  actor: {ppo_epochs: 2, checkpoint: {save_contents: [model], load_contents: "
        "'${.save_contents}'}}\n"
        "  rollout: {n: 3, prompt_length: '${oc.select:data.max_prompt_length,512}', "
        "engine_kwargs: {vllm: {}}}\n"
        "critic: {ppo_epochs: '${actor_rollout_ref.actor.ppo_epochs}', shuffle: "
        "'${oc.select:absent.key}',\n"
        "  forward_max_token_len_per_gpu: '${.ppo_max_token_len_per_gpu}', "
        "ppo_max_token_len_per_gpu: 8}\n"
        "reward_model: {forward_max_token_len_per_gpu: '${critic.forward_max_token_len_per_gpu}'}\n"
        "trainer: {experiment_name: 'n${actor_rollout_ref.rollout.n}'}\n"
    )
    reading = read_verl(str(config), ["++actor_rollout_ref.rollout.n=4"])
    given = {key: item.value for key, item in reading.settings.items()}
    assert reading.notes == [
        (
            "default        critic.shuffle",
            "${oc.select:absent.key} is not given: verl's default of both",
        )
    ]
    assert given == {
        "actor.ppo_epochs": 2,
        "actor.checkpoint.save_contents": ["model"],
        "actor.checkpoint.load_contents": ["model"],
        "rollout.n": 4,
        "rollout.prompt_length": 512,
        "rollout.engine_kwargs.vllm": {},
        "critic.ppo_epochs": 2,
        "critic.forward_max_token_len_per_gpu": 8,
        "critic.ppo_max_token_len_per_gpu": 8,
        "reward_model.forward_max_token_len_per_gpu": 8,
        "trainer.experiment_name": "n4",
    }
    config.write_text("defaults: [mine]\n")
    with pytest.raises(UserError, match=f"defaults: mine.yaml is not in {tmp_path}"):
        read_verl(str(config), [])
    for defaults, words in (
        ("[verl, verl]", "more than 100 files; does one name itself?"),
        ("[1]", "defaults: expected a name, or `group: name`, found 1"),
        ("[{a: b, c: d}]", "expected a name, or `group: name`, found {'a': 'b', 'c': 'd'}"),
        (f"[{'x' * 999}]", "is not in"),
        ("[{actor: [x, null]}]", "actor/x.yaml is not in"),
    ):
        config.write_text(f"defaults: {defaults}\n")
        with pytest.raises(UserError) as caught:
            read_verl(str(config), [])
        assert words in str(caught.value) and "\n" not in str(caught.value)


def test_one_of_several_commands_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    run = "python3 -m verl.trainer.main_ppo"
    script.write_text(f"for s in 1 2; do\n  {run} trainer.seed=$s\ndone\n{run} trainer.seed=7\n")
    expected = (
        "3 commands (lines 2, 2, 4) with `-m verl.trainer.main_ppo` or another program of "
        "docs/from_verl.md; choose one"
    )
    for wrong in ([], ["--command", "4"]):
        assert f"{expected} by --command 1 to 3" in report_of([str(script), *wrong], capsys)[-1]
    assert "expected the number of a command" in report_of([str(script), "--command=x"], capsys)[-1]
    for number, seed in ((1, 1), (2, 2), (3, 7)):
        arguments = [str(script), f"--command={number}", "trainer.nnodes=1"]
        assert converted_arguments(arguments).settings["trainer.seed"] == seed


def test_value_that_is_no_yaml_can_be_removed_or_replaced(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo a.b='[1,' a.c='{x' trainer.seed=$SEED data.seed=1\n"
    )
    given = read_verl(str(script), ["~a.b", "a.c=2", "~trainer"]).settings
    assert {key: item.value for key, item in given.items()} == {"a.c": 2, "data.seed": 1}
    with pytest.raises(UserError, match=r"line 1: a\.b: not valid YAML"):
        read_verl(str(script), ["~a.c", "~trainer"])


def test_config_of_several_files_is_read(tmp_path: Path) -> None:
    """Compose as Hydra does: groups, packages, overrides of groups, and the order of files."""
    (tmp_path / "parts" / "actor").mkdir(parents=True)
    (tmp_path / "parts" / "actor" / "small.yaml").write_text(
        "# @package critic\ndefaults: [base]\noptim: {lr: 3}\nppo_epochs: 1\n"
    )
    (tmp_path / "parts" / "actor" / "base.yaml").write_text(
        "# @package _group_\noptim: {lr: 1, clip_grad: 2}\nshuffle: {}\n"
    )
    (tmp_path / "parts" / "actor" / "large.yaml").write_text("optim: null\n")
    (tmp_path / "parts" / "all.yaml").write_text(
        "# a comment\n# @package _global_\ntrainer: {seed: 1, nnodes: 2}\n"
    )
    (tmp_path / "parts" / "run.yaml").write_text(
        "hydra: {searchpath: ['file://verl/trainer/config']}\n"
        "defaults: [ppo_megatron_trainer, size: small, optional machine: mine,"
        " 'actor@actor_rollout_ref.actor': '${size}', _self_, all]\n"
        "actor_rollout_ref: {actor: {ppo_epochs: 4}}\ntrainer: {seed: 9}\n"
    )
    (tmp_path / "parts" / "size").mkdir()
    (tmp_path / "parts" / "size" / "small.yaml").write_text("# @package critic\nppo_epochs: 5\n")
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo --config-path=parts --config-name=run trainer.nnodes=3\n"
    )
    given = {
        "critic.ppo_epochs": 5,
        "actor.optim.lr": 3,
        "actor.optim.clip_grad": 2,
        "actor.shuffle": {},
        "actor.ppo_epochs": 4,
    }
    for source in (script, tmp_path / "parts" / "run.yaml"):
        reading = read_verl(str(source), ["data.seed=1"])
        settings = {
            key: item.value for key, item in reading.settings.items() if not key.startswith("hydra")
        }
        nodes = 3 if source == script else 2
        assert settings == {**given, "trainer.seed": 1, "trainer.nnodes": nodes, "data.seed": 1}
        assert reading.engine == "megatron"
    note = (f"config         {tmp_path}/parts/run.yaml", "the script's --config-name")
    assert note in read_verl(str(script), []).notes
    other = read_verl(str(script), ["actor@actor_rollout_ref.actor=large"]).settings
    assert {key: item.value for key, item in other.items() if "actor" in key} == {
        "actor.optim": None, "actor.ppo_epochs": 4}  # fmt: skip


def test_config_before_a_script_takes_the_place_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(
        "trainer: {nnodes: 4, seed: 1}\nactor_rollout_ref: {actor: {fsdp_config: {param_offload: "
        "true}}}\n"
    )
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo --config-name=absent trainer.seed=2\n")
    for files in ([str(config), str(script)], [str(script), str(config)]):
        found = converted_arguments([*files, "trainer.test_freq=3"])
        assert (
            found.nodes,
            found.settings["trainer.seed"],
            found.settings["trainer.test_freq"],
        ) == (4, 2, 3)
        assert found.settings["actor.megatron.param_offload"] is True
    assert f"Converted from {script} and {config}" in found.yaml(f"{script} and {config}")
    assert report_of([str(config), str(config)], capsys)[-1].endswith(
        "expected one YAML file, one script, or one of each"
    )


VERLS_OWN = (
    "defaults:\n  - model_engine: dp\n  - actor@actor_rollout_ref.actor: ${model_engine}_actor\n"
    "  - data@data: legacy_data\n"
    "  - critic@critic: ${model_engine}_critic\n  - legacy_reward_impl\n  - _self_\ntrainer: "
    "{nnodes: 2}\n"
)
"""The form of verl's ppo_trainer.yaml. Its parts are not there, as in a copy that a user has
changed."""


def test_verls_own_configs_are_read(tmp_path: Path) -> None:
    (tmp_path / "ppo_trainer.yaml").write_text(VERLS_OWN)
    megatron = tmp_path / "ppo_megatron_trainer.yaml"
    megatron.write_text(
        "defaults:\n  - ppo_trainer\n  - override model_engine: megatron\n  - _self_\n"
    )
    for name, engine in (("ppo_trainer", "fsdp"), ("ppo_megatron_trainer", "megatron")):
        reading = read_verl(str(tmp_path / f"{name}.yaml"), [])
        assert {key: item.value for key, item in reading.settings.items()} == {"trainer.nnodes": 2}
        assert reading.engine == engine
    assert (
        read_verl(str(tmp_path / "ppo_trainer.yaml"), ["model_engine=megatron"]).engine
        == "megatron"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.model.path", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
        ("actor_rollout_ref.model.path", "/models/gpt-oss-20b"),
        ("actor_rollout_ref.actor.megatron.expert_model_parallel_size", 8),
        ("actor_rollout_ref.rollout.quantization", "fp8"),
    ],
)
def test_sglang_with_what_its_engine_lacks_becomes_vllm(key: str, value: Any) -> None:
    name = "actor_rollout_ref.rollout.name"
    others = {key.replace(".", "__"): value, "actor_rollout_ref__rollout__top_p": 1.0}
    assert line_of(name, "sglang", **others) == ("same", "rollout.name", "vllm")
    del others[key.replace(".", "__")]
    dense = {"actor_rollout_ref__model__path": "Qwen/Qwen3-8B", **others}
    assert line_of(name, "sglang", **dense) == ("same", "rollout.name", "sglang")


@pytest.mark.parametrize(
    ("command", "is_fsdp"),
    [
        ("data.seed=1", True),
        ("--config-name=ppo_megatron_trainer", False),
        (f"--config-name=ppo_trainer {OF_ACTOR}.megatron.param_offload=True", True),
        (f"{OF_ACTOR}.fsdp_config.param_offload=True", True),
        (f"{OF_ACTOR}.megatron.param_offload=True", False),
        ("model_engine=megatron", False),
    ],
)
def test_overrides_do_not_change_the_engine_of_a_script(
    tmp_path: Path, command: str, is_fsdp: bool
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo {command} algorithm.adv_estimator=grpo\n")
    layout = [
        f"{OF_ACTOR}.megatron.{name}_model_parallel_size=2" for name in ("tensor", "pipeline")
    ]
    for overrides in ([], layout):
        settings = converted_arguments([str(script), *overrides]).settings
        recomputed = settings.get("actor.megatron.recompute_granularity")
        stays = settings.get("actor.strategy") == "fsdp2"
        assert (recomputed == "full") == is_fsdp and stays == (is_fsdp and not overrides)
        assert (settings.get("actor.megatron.grad_offload") is True) == (is_fsdp and not stays)
    assert "actor.megatron.recompute_granularity" not in converted_arguments(layout).settings


def test_tool_prints_config_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"{key}={'null' if value is None else value}" for key, value in PPO_MATH.items()]
    assert from_verl.main(overrides) == 0
    out, report = capsys.readouterr()
    path = tmp_path / "ours.yaml"
    path.write_text(out)
    check_config(load_config(str(path)), 8)
    assert "torchrun --standalone --nproc-per-node 8 -m rlhf_mc" in out
    assert (
        "renamed        critic.model.path -> critic.model_path: Qwen/Qwen2-7B-Instruct\n" in report
    )
    assert len(report.splitlines()) >= len(PPO_MATH) and "warning" not in report
    assert from_verl.main(["--env", "NAME=b", "trainer.project_name=http://me:secret@host/x"]) in (
        0,
        2,
    )
    out, report = capsys.readouterr()
    assert "http://***@host/x" in report and "secret" not in report
    assert from_verl.main(["--env", "NAME=b"]) == 0
    assert capsys.readouterr().out.startswith("# Converted from verl's overrides")

    assert from_verl.main([*overrides, "actor_rollout_ref.rollout.top_p=0.9", "trainer.x=1"]) == 2
    out, report = capsys.readouterr()
    assert out == ""
    assert report.splitlines()[-1].startswith(
        "rlhf_mc: error: 2 settings are not supported, and no config is written: "
        "actor_rollout_ref.rollout.top_p, "
    )
    assert from_verl.main([*overrides, "trainer.x=1", "~trainer.x", "data.train_files=~/x"]) == 0
    assert "to be changed before it runs: data.train_files is '~/x'" in capsys.readouterr().err


def test_profiles() -> None:
    """Convert verl's global_profiler and the actor's profiler, of which those of other roles are
    copies."""
    enabled: dict[str, Any] = {"actor__profiler__enable": True, "global_profiler__steps": [1, 2]}
    assert line_of("global_profiler.steps", [1, 2]) == ("renamed", "profile.steps", [1, 2])
    assert line_of("trainer.profile_steps", [1]) == ("renamed", "profile.steps", [1])
    assert line_of("global_profiler.steps", None)[0] == "implied"
    assert line_of("actor.profiler.ranks", [0, 3], **enabled) == (
        "renamed",
        "profile.ranks",
        [0, 3],
    )
    assert line_of("actor.profiler.ranks", [0, 3])[0] == "not needed"
    assert line_of("actor.profiler.all_ranks", True, **enabled) == (
        "renamed",
        "profile.ranks",
        None,
    )
    assert (
        line_of("actor.profiler.ranks", [], **enabled, actor__profiler__all_ranks=True)[0]
        == "implied"
    )
    contents = "actor.profiler.tool_config.torch.contents"
    assert line_of(contents, ["cpu", "memory"], **enabled) == (
        "renamed",
        "profile.contents",
        ["memory"],
    )
    assert (
        line_of(contents, ["cuda"], **enabled)[0] == line_of(contents, ["memory"])[0] == "implied"
    )
    assert (
        line_of("critic.profiler.ranks", [0])[0]
        == line_of("global_profiler.save_path", "x")[0]
        == "not needed"
    )


def test_distillation_is_converted(tmp_path: Path) -> None:
    """Convert the settings of verl's run_qwen3_8b_megatron.sh, with two teachers and all of verl's
    defaults."""
    section = "distillation"
    teachers = f"{section}.teacher_models"
    given = {
        "data.train_files": "train.parquet",
        "actor_rollout_ref.model.path": "student",
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 24576,
        "actor_rollout_ref.rollout.n": 1,
        "algorithm.adv_estimator": "grpo",
        "model_engine": "megatron",
        f"{section}.enabled": True,
        f"{section}.n_gpus_per_node": 4,
        f"{section}.nnodes": 1,
        f"{section}.teacher_key": "data_source",
        f"{teachers}.teacher_model.key": None,
        f"{teachers}.teacher_model.model_path": None,
        f"{teachers}.teacher_model.inference.tensor_model_parallel_size": 2,
        f"{teachers}.math.key": "openai/gsm8k",
        f"{teachers}.math.model_path": "teacher",
        f"{teachers}.math.inference.tensor_model_parallel_size": 4,
        f"{teachers}.math.inference.gpu_memory_utilization": 0.4,
        f"{teachers}.math.inference.temperature": 1.0,
        f"{teachers}.math.num_replicas": 2,
        f"{teachers}.other.key": "DigitalLearningGmbH/MATH-lighteval",
        f"{teachers}.other.model_path": "another",
        f"{section}.distillation_loss.loss_mode": "k3",
        f"{section}.distillation_loss.topk": 64,
        f"{section}.distillation_loss.use_task_rewards": False,
        f"{section}.distillation_loss.use_policy_gradient": False,
        f"{section}.distillation_loss.loss_max_clamp": 10.0,
        f"{section}.distillation_loss.log_prob_min_clamp": -10.0,
        f"{section}.distillation_loss.policy_loss_mode": "vanilla",
        f"{section}.distillation_loss.clip_ratio_low": 0.2,
        f"{section}.distillation_loss.use_chunked_topk": True,
    }
    fsdp = loaded(converted({**given, "model_engine": "fsdp"}), tmp_path / "ours.yaml")
    of_teachers = [teacher.strategy for teacher in fsdp.distillation.teacher_models.values()]
    assert (fsdp.actor.strategy, of_teachers) == ("fsdp2", ["megatron", "fsdp2"])
    cfg = loaded(converted(given), tmp_path / "ours.yaml")
    assert list(cfg.distillation.teacher_models) == ["math", "other"]
    math = cfg.distillation.teacher_models["math"]
    assert (math.key, math.model_path) == ("openai/gsm8k", "teacher")
    assert math.megatron.tensor_model_parallel_size == 4
    assert math.log_prob_max_token_len_per_gpu == 24576
    loss = cfg.distillation.distillation_loss
    assert (loss.loss_mode, loss.topk, loss.loss_max_clamp) == ("low_var_kl", 64, 10.0)
    assert cfg.algorithm.adv_estimator == "reinforce_plus_plus", "grpo with one response"
    key = "distillation.teacher_models.math.inference.temperature"
    assert line_of(
        key,
        0.5,
        **{"distillation.enabled": True, key.replace("inference.temperature", "model_path"): "m"},
    )[0] == ("not supported")
    off = converted({"distillation.enabled": False, f"{teachers}.math.model_path": "m"})
    assert {line.kind for key, line in off.report if "distillation" in key} == {
        "same",
        "not needed",
    }
