"""verl's settings that schema.py does not have under the same name: our name, or why none is needed, or why the setting
is not supported. One table for the conversion (conversion.py), whose report has a Line for each setting, and for
messages on unknown keys (config/unknown.py).

Names are without `actor_rollout_ref.`; * is any text. The first pattern that matches counts. A setting that is in
neither schema.py, this table nor the converters of verl/values.py is not supported.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["same", "renamed", "implied", "not needed", "default", "not supported"]
OFF: tuple[Any, ...] = (None, False, 0, "", "null", {}, [])
"""Values that switch a feature off."""


@dataclass(frozen=True)
class Line:
    """One line of the report: what becomes of a setting of verl's."""

    kind: Kind
    text: str = ""
    """The reason, or what has changed."""
    ours: str | None = None
    """Our key; None: there is nothing to set."""
    value: Any = None
    """Our value."""


Settings = Mapping[str, Any]
"""verl's settings by key, without actor_rollout_ref."""


def same(key: str, value: Any, text: str = "") -> Line:
    """Return the line of a setting that keeps its name."""
    return Line("same", text, key, value)


def renamed(key: str, value: Any, text: str = "") -> Line:
    """Return the line of a setting that has another name here."""
    return Line("renamed", text, key, value)


def number(verl: Settings, key: str, default: int = 0) -> int:
    """Return a number of verl's settings, or the default where it is null, absent or no number."""
    value = verl.get(key)
    return value if type(value) is int else default


@dataclass(frozen=True)
class KeyRule:
    """The place of one of verl's settings in this project."""

    pattern: str
    kind: Kind
    text: str
    """Our key (renamed), or the reason."""
    values: tuple[Any, ...] = OFF
    """implied: values of verl's that mean what rlhf_mc does. not supported: values that do not use the feature."""

    def hint(self) -> str:
        """Return what to do with the key in a config of ours."""
        if self.kind == "renamed":
            return f"use {self.text}"
        return self.text if self.kind == "not supported" else f"{self.text}: leave it out"


def split_patterns(text: str) -> Iterator[str]:
    """Yield the patterns of a text with blanks between them, and {a,b} groups in them."""
    for pattern in text.split():
        match = re.fullmatch(r"(.*?)\{(.*?)\}(.*)", pattern)
        if match is None:
            yield pattern
        else:
            yield from split_patterns(" ".join(match[1] + name + match[3] for name in match[2].split(",")))


_WRITTEN = "what a run writes goes to trainer.default_local_dir"

_TABLE: dict[Kind, dict[str, str | tuple[str, tuple[Any, ...]]]] = {
    "renamed": {
        "model.tokenizer_path": "data.tokenizer",
        "critic.model_path": "critic.model.path",
        "reward_model.model_path": "reward_model.model.path",
        "reward.overlong_buffer.penalty_factor": "reward_model.*overlong_buffer*.penalty_factor",
        "reward.overlong_buffer.len": "reward_model.*overlong_buffer*.len",
        "role.optim.clip_grad": "actor.grad_clip critic.grad_clip",
        "role.megatron.dtype": "*.fsdp_config.dtype *.fsdp.dtype",
        "reward_model.megatron.tensor_model_parallel_size": "reward_model.rollout.tensor_model_parallel_size",
        "role.megatron.recompute_granularity": "*.megatron.override_transformer_config.recompute_granularity",
        "role.megatron.num_layers_in_first_pipeline_stage": (
            "*.override_transformer_config.num_layers_in_first_pipeline_stage"
        ),
        "role.megatron.num_layers_in_last_pipeline_stage": (
            "*.override_transformer_config.num_layers_in_last_pipeline_stage"
        ),
        "role.megatron.cp_comm_type": "*.megatron.override_transformer_config.cp_comm_type",
        "role.megatron.overlap_grad_reduce": "*.megatron.override_ddp_config.overlap_grad_reduce",
        "role.optim.lr_decay_style": "*.optim.warmup_style *.optim.lr_scheduler_type",
        "actor.policy_loss.tau_pos": "actor.tau_pos",
        "actor.policy_loss.tau_neg": "actor.tau_neg",
        "trainer.seed": "data.seed",
        "trainer.async_save": "actor.checkpoint.async_save",
        "profile.steps": "global_profiler.steps trainer.profile_steps",
        "profile.ranks": "actor.profile_ranks actor.profiler.ranks",
        "profile.contents": "actor.profiler.tool_config.torch.contents",
        "reshard.bucket_megabytes": (
            "rollout.update_weights_bucket_megabytes rollout.checkpoint_engine.update_weights_bucket_megabytes"
        ),
    },
    "not needed": {
        "models are trained by Megatron-Core": "actor.strategy critic.strategy model_engine actor.model_engine",
        "models are run by Megatron-Core": "ref.strategy reward_model.strategy reward_model.rollout.*",
        "actor and critic are one checkpoint: trainer.async_save": "critic.checkpoint.async_save",
        "the token budgets bound a rank's tokens": "*.max_seqlen_per_dp_cp_rank",
        "vLLM generates": "rollout.name",
        "algorithm.router_replay says it": "rollout.enable_rollout_routing_replay",
        "vLLM generates in the training processes": "rollout.mode",
        "vLLM's weights come from the actor": "rollout.load_format rollout.layer_name_map* *.load_weight",
        "it changes vLLM's speed and memory, and vLLM's own default is used": (
            "rollout.enable_chunked_prefill rollout.enable_prefix_caching rollout.cudagraph_capture_sizes"
            " rollout.disable_log_stats rollout.multi_stage_wake_up rollout.skip_tokenizer_init"
            " rollout.enable_sleep_mode rollout.engine_kwargs.vllm.{compilation_config*,cudagraph*,async_scheduling,"
            "additional_config.enable_cpu_binding,swap_space,block_size,enable_*,disable_*,mm_*,max_num_*}"
        ),
        "the log-probs of vLLM and of the trainer are always compared": "rollout.calculate_log_probs",
        "each rank has the environments of its conversations": "rollout.agent.num_workers",
        "torchrun or srun says how many processes there are": (
            "trainer.nnodes trainer.n_gpus_per_node reward_model.nnodes reward_model.n_gpus_per_node"
        ),
        _WRITTEN: "trainer.default_hdfs_dir trainer.tensorboard_dir trainer.rl_logging_board_dir",
        "batches are always balanced, and no number depends on it": "trainer.balance_batch",
        "the device is the one that the machine has": "trainer.device",
        "it is about Ray, or the layout of verl's workers": (
            "trainer.use_legacy_worker_impl trainer.del_local_ckpt_after_load trainer.esi_redundant_time hydra.*"
            " transfer_queue.* hybrid_engine *.enable_resource_pool reward_model.use_reward_loop"
            " reward_model.reward_loop_class* trainer.use_v1 trainer.v1.*async.* trainer.v1.sync*"
            " trainer.v1.sampler.[!c]* rollout.layered_summon rollout.disaggregation.* skip.*.dump_dir skip.*.steps"
            " skip.*.action rollout.agent.custom_async_server.name"
        ),
        "there is no Ray": "ray_init* ray_kwargs* *.ray_init* trainer.*ray_*",
        "verl does not pass it to NCCL; ours is trainer.dist_timeout_seconds": "*nccl_timeout",
        "it is for measurements alone; profile.steps and profile.ranks are of all phases": (
            "*.profiler.* global_profiler* *profile_steps* *.profile_ranks *.profile_ranks_all *.profile_discrete"
            " rollout.trace.* rollout.prometheus* *profile_continuous_steps"
        ),
        "all validation prompts are generated at once, and their order changes no number": (
            "data.val_batch_size data.validation_shuffle"
        ),
        "it changes how verl reads files, not what it reads": (
            "*.use_shm data.dataloader_num_workers data.filter_overlong_prompts_workers data.return_raw_chat"
            " data.return_raw_input_ids data.return_full_prompt data.return_multi_modal_inputs"
        ),
        "prompts have text alone": "data.image_patch_size data.mm_processor_kwargs",
        "sequences are always packed": "*.use_remove_padding",
        "it saves memory alone, which megatron.recompute_granularity does here": (
            "*.gradient_checkpointing_kwargs* *.enable_activation_offload"
        ),
        "code of a checkpoint is never run, and a model that needs it is refused when it is loaded": (
            "*.trust_remote_code"
        ),
        "kernels are chosen for the machine": (
            "*.use_fused_kernels *.use_torch_compile *.attn_implementation *.fused_kernel_options* *.attention_backend"
            " *.override_transformer_config.{use_flash_attn,use_triton_gdn,use_ascend_gdn,use_naive_l2norm,"
            "use_fused_*,apply_dsa_kernel_fusion,context_parallel_algo,cp_partition_mode,use_arbitrary_attention_mask,"
            "sequence_packing_scheduler} *.veomni.*_implementation"
        ),
        "weights are read by a table per model family": "*.use_mbridge *.vanilla_mbridge *.forward_only",
        "the critic reads the actor's tokens: model.tokenizer_path": "critic.model.tokenizer_path",
        "it is a name of verl's code, or a copy of rollout.n": "*.rollout_n *._target_ _target_",
        "checkpoints are read in any layout": (
            "*.checkpoint.strict *.dist_ckpt_optim_fully_reshardable *.distrib_optim_fully_reshardable_mem_efficient"
        ),
        "tensor and pipeline parallelism shard weights, and the distributed optimizer its state": "*.use_megatron_fsdp",
        "the optimizer is AdamW": "*.optim.muon_*",
        "it is of quantization-aware training": "*.qat.[!e]* rollout.qat*",
        "it is a metric of routers": "rollout.moe_load_balance_metrics_interval",
        "every random draw is a function of trainer.seed, and differs from verl's anyway": (
            "*.megatron.seed *.data_loader_seed *.rollout.seed rollout.seed *.engine.seed"
        ),
        "recompute_granularity alone is a setting; the modules are fixed, and full recomputes each layer": (
            "*.recompute_modules *.recompute_method *.recompute_num_layers"
        ),
        "it changes speed or memory alone, and is chosen for the machine": (
            "*.override_transformer_config.{apply_rope_fusion,masked_softmax_fusion,bias_activation_fusion,"
            "bias_dropout_fusion,gradient_accumulation_fusion,deallocate_pipeline_outputs,persist_layer_norm,"
            "moe_grouped_gemm,moe_permute_fusion,moe_token_dispatcher_type,moe_enable_deepep,moe_shared_expert_overlap,"
            "variable_seq_lengths,cross_entropy_loss_fusion}"
        ),
        "the state of Adam is float32; megatron.optimizer_offload keeps it in host memory": (
            "*.override_optimizer_config.{optimizer_offload_fraction,overlap_cpu_optimizer_d2h_h2d,"
            "optimizer_cpu_offload,use_precision_aware_optimizer}"
        ),
        "models are trained by Megatron-Core, not VeOmni: expert_model_parallel_size shards experts": (
            "*.veomni.expert_parallel_size"
        ),
        "models are trained by Megatron-Core, not FSDP, and it changes speed or memory alone": (
            "*.veomni.{fsdp_size,enable_full_shard,activation_gpu_limit,strategy,seed,use_torch_compile}"
            " *.entropy_from_logits* *.entropy_checkpointing *.{fsdp,fsdp_config}.{fsdp_size,wrap_policy*,"
            "reshard_after_forward,forward_prefetch,use_orig_params,seed,full_determinism,use_torch_compile,strategy,"
            "forward_only,turbo_config*,mixed_precision}"
        ),
        "sequences are packed without padding": "*.pad_to_length* *.pad_bshd_to_minibatch_max",
        "it is of another engine: vLLM generates": (
            "rollout.engine_kwargs.[!v]* rollout.sglang_* rollout.server.* rollout.hf_*"
        ),
        "an engine spans rollout.tensor_model_parallel_size ranks, and there are as many as the ranks make": (
            "rollout.data_parallel_size rollout.expert_parallel_size rollout.pipeline_model_parallel_size"
            " rollout.moe_tensor_parallel_size"
        ),
        "the total is that of the run": "*.optim.total_training_steps",
        "the statistics of the reward's parts are always logged": "reward_model.*overlong_buffer*.log",
        "reward functions run in worker processes while the log-prob passes run": "*.launch_reward_fn_async",
        "it is of lr_decay_style WSD, which is not supported": "*.optim.lr_wsd*",
        "the entropy is always computed": "*.calculate_entropy",
        "it changes speed or memory alone": (
            "*.use_prefix_grouper *.use_liger *.checkpoint.mbridge_config* rollout.scheduling_policy"
            " rollout.checkpoint_engine.* rollout.skip_dump_dir rollout.n_gpus_per_node"
            " algorithm.filter_groups.max_inflight_gen_batches"
        ),
        "an engine shards experts over its tensor-parallel ranks": "rollout.enable_expert_parallel",
        "rollout.quantization says how weights are quantized": "rollout.use_block_quant_rollout",
    },
    "implied": {
        "generation runs on the ranks that train": "rollout.nnodes",
        "algorithm.router_replay off is it; null is rollout for a model with experts": (
            "*.router_replay.mode",
            ("disabled", None),
        ),
        "reward functions are found by data source": (
            "*.reward_manager.source *.reward_loop_source",
            ("register", None),
        ),
        "in bypass mode the loss is PPO's clipped one": ("algorithm.rollout_correction.loss_type", ("ppo_clip", None)),
        "responses are sampled from the full distribution": ("rollout.top_p", (1, 1.0, None)),
        "use rollout.temperature, and rollout.val_kwargs.temperature (0: greedy)": ("rollout.do_sample", (True,)),
        "log-probs are of the distribution that is sampled": ("rollout.logprobs_mode", ("processed_logprobs",)),
        "a step trains on what its own weights generated": ("trainer.v1.trainer_mode", ("sync",)),
        "weights are read in megatron.dtype": ("*.torch_dtype", ("bfloat16", "bf16", "auto", None)),
        "a frozen model has megatron.dtype": (
            "ref.fsdp_config.model_dtype",
            ("fp32", "float32", "bf16", "bfloat16", None),
        ),
        "main parameters, gradients and Adam's state are float32, and computation is bfloat16": (
            "*.fsdp_config.model_dtype *.fsdp.model_dtype *.mixed_precision.reduce_dtype"
            " *.mixed_precision.buffer_dtype",
            ("fp32", "float32", None),
        ),
        "models compute in bfloat16: megatron.dtype": ("*.mixed_precision.param_dtype", ("bf16", "bfloat16", None)),
        "the decay is half a cosine": ("*.optim.num_cycles", (0.5, None)),
        "the first step of a warm-up has lr / lr_warmup_steps": ("*.optim.zero_indexed_step", (True, False, None)),
        "the optimizer is torch's or Apex's AdamW": ("*.optim.optimizer_impl", ("torch.optim", None)),
        "gradients are reduced in float32": ("*.grad_reduce_in_fp32", (True, False)),
        "the model is that of its config.json": (
            "*.override_transformer_config.{normalization,swiglu,multi_latent_attention}",
            ("RMSNorm", True),
        ),
        "there is no dropout": ("*.{hidden,attention}_dropout", (0, 0.0)),
        "gradients and the state of Adam are float32": (
            "*.optim.main_grads_dtype *.optim.exp_avg_dtype *.optim.exp_avg_sq_dtype",
            ("fp32", "float32", None),
        ),
        "the optimizer is AdamW": ("*.optim.optimizer", ("adam", "adamw", "AdamW", None)),
        "the weight decay of AdamW is decoupled": ("*.override_optimizer_config.decoupled_weight_decay", (True,)),
        "weight decay is constant": ("*.optim.weight_decay_incr_style", ("constant", None)),
        "a router's logits and weights are float32": ("*.moe_router_dtype", ("fp32",)),
        "the actor alone balances its experts": "*.moe_aux_loss_coeff *.moe_z_loss_coeff *.moe_router_bias_update_rate",
        "the auxiliary loss is of each sequence": (
            "*.moe_router_load_balancing_type",
            ("none", "aux_loss", "seq_aux_loss"),
        ),
        "a function of custom_reward_function.path is called by its form": (
            "reward_model.reward_manager reward_model.reward_manager.name",
            ("naive", "batch", "prime", "dapo", None),
        ),
    },
    "not supported": {
        "LoRA is not supported": "*.lora_* *.lora.* *.target_modules *.exclude_modules",
        "models are trained by Megatron-Core: see the megatron section": (
            "*.fsdp_config* *.fsdp.* *.veomni.* *.torchtitan.* *.automodel.* actor.engine.* ref.engine.*"
        ),
        "quantization-aware training is not supported": "*.qat.enable",
        "its estimator and losses are not supported": "*.calculate_sum_pi_squared",
        "vLLM generates in each step, for each prompt": "skip.*.enable data.min_response_length",
        "write the template to a file: data.chat_template_path": "*.custom_chat_template",
        "config.json is used as it is: edit it in a copy of model.path": "*.override_config*",
        "rows are read from data.train_files": (
            "data.custom_cls* data.sampler* data.datagen* *.external_lib trainer.v1.sampler.custom_sampler*"
        ),
        "this correction is not known here": "algorithm.rollout_correction*",
        "prompts are not reweighted": "algorithm.use_pf_ppo algorithm.pf_ppo*",
        "this policy loss is not known here": "actor.policy_loss*",
        "arguments of vLLM are settings of rollout": "rollout.engine_kwargs*",
        "use rollout.environment.path, or rollout.environment.function_tool_path for tools": (
            "rollout.multi_turn* rollout.agent*"
        ),
        "vLLM generates every response to its end": (
            "rollout.ignore_eos rollout.skip_rollout rollout.over_sample_rate rollout.mtp*"
        ),
        "rewards are computed by rules, by custom_reward_function.path or by reward_model.model_path": (
            "reward_model.sandbox_fusion* sandbox_fusion* reward_model.reward_manager* reward_model.reward_kwargs*"
            " reward_model.reward_loop*"
        ),
        "use megatron.num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage": (
            "*.account_for_embedding_in_pipeline_split *.account_for_loss_in_pipeline_split"
        ),
        "a name of an earlier version of verl: Megatron-Core's settings are those of megatron": (
            "megatron.extra.* *.megatron.extra.*"
        ),
        "a name of an earlier version of verl: use actor.use_kl_loss, kl_loss_coef and kl_loss_type": "actor.kl_loss.*",
        "a name of an earlier version of verl: use algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef": (
            "algorithm.in_reward_kl.*"
        ),
        "Megatron-Core's settings are those of megatron": (
            "*.override_transformer_config* *.override_ddp_config* *.override_mcore_model_config*"
        ),
        "the optimizer is AdamW with the settings of optim": (
            "*.override_optimizer_config* *.optim.lr_warmup_init *.optim.lr_decay_steps"
            " *.optim.use_checkpoint_opt_param_scheduler *.optim.use_layer_wise_distributed_optimizer"
            " *.optim.use_precision_aware_optimizer"
        ),
        "the model is built as Megatron-Core builds it": "*model.tiled_mlp* *model.mtp*",
        "use trainer.deterministic": "rollout.full_determinism",
        "a vision tower is not supported": "*.freeze_vision_tower *.enable_vision_context_parallelism",
        "use actor.freeze: patterns of the tensors that are not trained": "*.freeze_moe_router",
        "weights are read from model.path or model.dist_checkpointing_path": "*.dist_checkpointing_prefix",
        "use optim.min_lr": "*.min_lr_ratio",
        "the run has no other models": "distillation* *.distillation*",
    },
}
"""Patterns of verl's keys by kind, and by our key (renamed) or the reason; with values where they are not OFF. "role"
stands for the first part of the key. What is computed does not depend on settings that are not needed."""
RULES = [
    KeyRule(pattern, kind, text, *values)
    for kind, rows in _TABLE.items()
    for text, row in rows.items()
    for patterns, *values in [(row,) if isinstance(row, str) else row]
    for pattern in split_patterns(patterns)
]
RULES.append(KeyRule("rollout.top_k", "implied", "responses are sampled from the full distribution", (-1, 0, None)))

CONVERTED_HINTS = {
    "actor.clip_ratio": "use actor.clip_ratio_low and actor.clip_ratio_high",
    "reward_model.enable": "use reward_model.model_path (null: no reward model)",
    "reward_model.model.input_tokenizer": "use reward_model.tokenizer_path, the reward model's own tokenizer",
    "reward_model.*overlong_buffer*.enable": "use reward.overlong_buffer.len (0: no penalty)",
    "rollout.val_kwargs.do_sample": "use rollout.val_kwargs.temperature (0: greedy)",
    "rollout.prompt_length": "use data.max_prompt_length",
    "rollout.response_length": "use data.max_response_length",
    "rollout.max_model_len": "it is data.max_prompt_length + data.max_response_length: leave it out",
    "rollout.dtype": "vLLM's is that of the actor: actor.megatron.dtype",
    "ref.model.path": "the reference starts from model.path",
    "trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep": "use trainer.max_ckpt_to_keep (actor and critic"
    " are one checkpoint)",
    "*.dist_checkpointing_path *.use_dist_checkpointing": "use model.dist_checkpointing_path",
    "*.expert_tensor_parallel_size": "experts are sharded over the tensor-parallel ranks too: leave it out",
    "*.checkpoint.save_contents *.checkpoint.load_contents": "a checkpoint holds all that a resume needs: leave it out",
    "*.enable_gradient_checkpointing": "use megatron.recompute_granularity: full",
    "*.fsdp*.*param_offload *.fsdp*.offload_policy *.fsdp*.optimizer_offload": "use megatron.param_offload and"
    " megatron.optimizer_offload",
    "*.use_dynamic_bsz *.log_prob_use_dynamic_bsz": "micro-batches are always by token budget: leave it out",
    "*micro_batch_size *micro_batch_size_per_gpu": "use ..._max_token_len_per_gpu, the tokens of a micro-batch: that"
    " number of sequences times (data.max_prompt_length + data.max_response_length)",
    "critic.shuffle": "the critic's mini-batches are shuffled as the actor's: use actor.shuffle",
    "*ulysses_sequence_parallel_size": "use megatron.context_parallel_size",
    "data.image_key data.video_key data.audio_key": "prompts have text alone: leave it out",
    "rollout.multi_turn.* rollout.agent.* data.tool_config_path data.function_tool_path": "use"
    " rollout.environment.path, or rollout.environment.function_tool_path for tools",
}
"""Hints for settings that verl/values.py converts, by patterns."""


def find_rule(key: str) -> KeyRule | None:
    """Return the rule of verl's key, or None. Renamed keys have the role of the key."""
    rule = next((rule for rule in RULES if fnmatch.fnmatchcase(key, rule.pattern)), None)
    if rule is None or not rule.text.startswith("role."):
        return rule
    return dataclasses.replace(rule, text=key.partition(".")[0] + rule.text.removeprefix("role"))


def rename_hint(key: str) -> str | None:
    """Return what to do with verl's key in a config of ours, or None where it is not in the table."""
    for patterns, hint in CONVERTED_HINTS.items():
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in split_patterns(patterns)):
            return hint
    rule = find_rule(key)
    return rule.hint() if rule is not None else None


def plain_key(key: str) -> str:
    """Return verl's key without Hydra's + and without the sections that contain sections of ours."""
    name = key.lstrip("+~").removeprefix("actor_rollout_ref.")
    inner = name.removeprefix("reward.")
    sections = ("custom_reward_function", "reward_model", "reward_manager", "reward_kwargs", "sandbox_fusion")
    if inner.partition(".")[0] not in sections:
        return name
    return inner if inner.startswith(("custom_reward_function", "reward_model")) else f"reward_model.{inner}"
