"""Checks of values: settings that must go together, and the range of every number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from config_files import validated

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.fields import leaf_hints, number_range


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (
            "actor.megatron.tensor_model_parallel_size=2",
            "actor.megatron.pipeline_model_parallel_size=2",
        ),
        ("rollout.tensor_model_parallel_size=4",),
        (
            "actor.megatron.tensor_model_parallel_size=4",
            "critic.megatron.tensor_model_parallel_size=1",
            "ref.megatron.tensor_model_parallel_size=2",
            "ref.megatron.pipeline_model_parallel_size=2",
        ),
        (
            "model.dist_checkpointing_path=/somewhere",
            "critic.model_path=/its/own",
            "critic.megatron.virtual_pipeline_model_parallel_size=2",
            "critic.megatron.pipeline_model_parallel_size=2",
        ),
        ("actor.clip_ratio_high=1.5",),
        ("critic.ppo_mini_batch_size=32",),
        # exactly the smallest budget
        ("data.max_prompt_length=8192", "data.max_response_length=8192"),
        ("ref.log_prob_max_token_len_per_gpu=1",),  # no KL term: no reference pass
        ("reward_model.forward_max_token_len_per_gpu=1",),  # no reward model
        (
            "actor.megatron.context_parallel_size=2",
            "critic.megatron.context_parallel_size=1",
            "actor.ppo_max_token_len_per_gpu=512",
            "rollout.log_prob_max_token_len_per_gpu=512",
        ),
        # Experts are sharded over context-parallel ranks too.
        ("actor.megatron.context_parallel_size=4", "actor.megatron.expert_model_parallel_size=4"),
        (  # it truncates its own tokens
            "reward_model.model_path=rm",
            "reward_model.tokenizer_path=rm",
            "reward_model.forward_max_token_len_per_gpu=1",
        ),
        ("rollout.val_kwargs.n=4", "rollout.val_kwargs.temperature=1.0"),
        ("trainer.test_freq=5", "data.val_files=v.parquet", "trainer.target_val_acc=0.9"),
        ("algorithm.kl_ctrl.type=adaptive", "algorithm.use_kl_in_reward=true"),
        ("algorithm.kl_ctrl.type=adaptive", "actor.use_kl_loss=true"),
        ("rollout.quantization=fp8", "reshard.share_weights=false"),
        ("actor.strategy=fsdp2", "actor.fsdp_config.fsdp_size=2"),
        # no weights are shared
        ("actor.strategy=fsdp2", "actor.megatron.param_offload=true"),
        ("actor.strategy=fsdp2", "actor.megatron.context_parallel_size=2"),
        # the actor's split is not inherited
        ("actor.megatron.tensor_model_parallel_size=2", "ref.strategy=fsdp2"),
        ("algorithm.kl_ctrl.target_kl=0",),  # not used by the fixed controller
    ],
)
def test_valid_settings_pass(config_file: Path, overrides: tuple[str, ...]) -> None:
    validated(config_file, *overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        *(
            (
                ("actor.strategy=fsdp2", f"actor.megatron.{name}={value}"),
                (f"actor.strategy is fsdp2 and actor.megatron.{name} is {shown}; set it to",),
            )
            for name, value, shown in (
                ("tensor_model_parallel_size", 2, 2),
                ("pipeline_model_parallel_size", 2, 2),
                ("expert_model_parallel_size", 2, 2),
                ("fp8", "tensorwise", "tensorwise"),
                ("use_distributed_optimizer", "false", "false"),
                ("overlap_grad_reduce", "true", "true"),
                ("grad_offload", "true", "true"),
            )
        ),
        (
            ("actor.strategy=fsdp2", "actor.fsdp_config.fsdp_size=3"),
            ("actor.fsdp_config.fsdp_size 3 does not divide the 4 processes of this run",),
        ),
        (
            (
                "ref.strategy=fsdp2",
                "ref.fsdp_config.offload_policy=true",
                "ref.megatron.param_offload=true",
            ),
            ("ref.fsdp_config.offload_policy and ref.megatron.param_offload are true",),
        ),
        (
            ("ref.strategy=fsdp2", "model.dist_checkpointing_path=/somewhere"),
            ("ref.strategy is fsdp2; its weights come from the safetensors of model.path",),
        ),
        (
            (
                "actor.lora.rank=4",
                "reshard.share_weights=false",
                "actor.use_kl_loss=true",
                "ref.strategy=fsdp2",
            ),
            ("actor.lora.rank is 4 and ref.strategy is fsdp2; the reference is the actor",),
        ),
        *(
            ((f"{key}=1023", *kl), (f"{key} is 1023", "longest sequence", ("data.max_prompt_length "
                                                                          "512"), "= 1024"))
            for key, kl in (
                ("actor.ppo_max_token_len_per_gpu", ()),
                ("critic.ppo_max_token_len_per_gpu", ()),
                ("critic.forward_max_token_len_per_gpu", ()),
                ("rollout.log_prob_max_token_len_per_gpu", ()),
                ("ref.log_prob_max_token_len_per_gpu", ("actor.use_kl_loss=true",)),
                ("reward_model.forward_max_token_len_per_gpu", ("reward_model.model_path=rm",)),
            )
        ),
        (
            ("rollout.quantization=fp8", "actor.megatron.dtype=float32",
             "reshard.share_weights=false"),
            (("rollout.quantization is 'fp8' and actor.megatron.dtype is float32; vLLM quantizes "
             "bfloat16"),),
        ),
        (
            ("rollout.quantization=fp8",),
            ("rollout.quantization is 'fp8' and reshard.share_weights is true", ("set "
                                                                                "reshard.share_weights to false")),  # noqa: E501
        ),
        (("reward.remote.url=localhost:80",), (("reward.remote.url is 'localhost:80'; it must "
                                                "begin "
                                               "with http://"),)),
        (("reward.remote.url=http://a", "reward.remote.api=openai"), (("needs reward.remote.model, "
                                                                      "which is null"),)),
        (("reward.remote.api_key_env=KEY",), (("reward.remote.api_key_env is KEY; that needs "
                                              "reward.remote.url"),)),
        (("reward.overlong_buffer.len=99999",), (("reward.overlong_buffer.len is 99999; it must be "
                                                 "at most"),)),
        (("profile.steps=[3, 0]",), ("profile.steps has 0; it must be at least 1",)),
        (("profile.steps=[-1]",), ("profile.steps has -1; it must be at least 1",)),
        (("profile.ranks=[-1]",), ("profile.ranks has -1; it must be 0 or more",)),
        (("profile.ranks=[0, 64]",), ("profile.ranks has 64; a run of",)),
        (("profile.contents=[memory]",), (("profile.contents is [memory]; that needs "
                                          "profile.steps"),)),
        (("reward.num_workers=0",), ("reward.num_workers is 0; it must be at least 1",)),
        (("reward.num_workers=-2",), ("reward.num_workers is -2; it must be at least 1",)),
        (("reward.timeout_seconds=0",), ("reward.timeout_seconds is 0.0; it must be above 0",)),
        (
            ("actor.megatron.tensor_model_parallel_size=3",),
            ("3 x actor.megatron.pipeline_model_parallel_size 1 = 3", "1, 2, 4"),
        ),
        (("actor.megatron.tensor_model_parallel_size=4",
          "actor.megatron.pipeline_model_parallel_size=2"), ("= 8",)),
        (
            ("actor.megatron.tensor_model_parallel_size=2",
             "actor.megatron.expert_model_parallel_size=4"),
            ("expert_model_parallel_size 4 does not divide the 2 replicas", "what would: 1, 2"),
        ),
        (
            ("actor.megatron.virtual_pipeline_model_parallel_size=2",),
            ("virtual_pipeline_model_parallel_size is 2", ("pipeline_model_parallel_size of at "
                                                          "least 2")),
        ),
        (
            (
                "actor.megatron.virtual_pipeline_model_parallel_size=1",
                "actor.megatron.pipeline_model_parallel_size=2",
            ),
            ("virtual_pipeline_model_parallel_size is 1", "at least 2"),
        ),
        (
            (
                "actor.megatron.virtual_pipeline_model_parallel_size=2",
                "actor.megatron.pipeline_model_parallel_size=2",
                "actor.megatron.num_layers_in_first_pipeline_stage=3",
            ),
            ("num_layers_in_first_pipeline_stage to null",),
        ),
        (
            (
                "actor.megatron.virtual_pipeline_model_parallel_size=2",
                "actor.megatron.pipeline_model_parallel_size=2",
                "model.dist_checkpointing_path=/somewhere",
            ),
            ("virtual_pipeline_model_parallel_size is 2", "model.dist_checkpointing_path to null"),
        ),
        (
            (
                "critic.megatron.virtual_pipeline_model_parallel_size=2",
                "critic.megatron.pipeline_model_parallel_size=2",
                "model.dist_checkpointing_path=/somewhere",
            ),
            ("critic.megatron.virtual_pipeline_model_parallel_size is 2",
             "model.dist_checkpointing_path to null"),
        ),
        (("trainer.preemption_grace_seconds=59",),
         ("preemption_grace_seconds is 59", "at least 60")),
        (
            ("critic.model_path=''",),
            ("critic.model_path is empty", "leave it out"),
        ),
        (
            ("custom_reward_function.path=a.py", "reward_model.model_path=rm", "data.val_files=[]"),
            ("custom_reward_function.path", "reward_model.model_path", "never be called"),
        ),
        (
            ("actor.megatron.param_offload=true",),
            ("actor.megatron.param_offload is true", "reshard.share_weights is true", ("set one of "
                                                                                      "them to "
                                                                                      "false")),
        ),
        (
            ("actor.megatron.sequence_parallel=true",),
            ("actor.megatron.sequence_parallel is true",
             "tensor_model_parallel_size of at least 2"),
        ),
        (
            ("critic.megatron.pipeline_model_parallel_size=3",),
            (("critic.megatron.tensor_model_parallel_size 1 x "
             "critic.megatron.pipeline_model_parallel_size 3 = 3"),),
        ),
        (
            ("actor.megatron.context_parallel_size=3",),
            ("x actor.megatron.context_parallel_size 3 = 3 does not divide", "1, 2, 4"),
        ),
        (("actor.megatron.context_parallel_size=0",),
         ("actor.megatron.context_parallel_size is 0",)),
        (("actor.megatron.cp_comm_type=all_gather",),
         ("actor.megatron.cp_comm_type", "p2p", "a2a")),
        (
            ("actor.megatron.context_parallel_size=4", "critic.ppo_max_token_len_per_gpu=255"),
            ("critic.ppo_max_token_len_per_gpu is 255", "= 1024, of which each of 4 ranks has 256"),
        ),
        (("ref.megatron.tensor_model_parallel_size=8",),
         (("ref.megatron.tensor_model_parallel_size "
                                                          "8"), "1, 2, 4")),
        (("critic.megatron.tensor_model_parallel_size=0",),
         ("critic.megatron.tensor_model_parallel_size is 0",)),
        (
            ("actor.megatron.tensor_model_parallel_size=4",
             "critic.megatron.expert_model_parallel_size=4",
             "critic.megatron.tensor_model_parallel_size=2"),
            ("critic.megatron.expert_model_parallel_size 4 does not divide the 2 replicas",),
        ),
        (
            ("ref.megatron.sequence_parallel=true",),
            ("ref.megatron.sequence_parallel is true", ("ref.megatron.tensor_model_parallel_size "
                                                        "of "
                                                       "at least 2")),
        ),
        (
            ("critic.megatron.virtual_pipeline_model_parallel_size=2",),
            ("critic.megatron.virtual_pipeline_model_parallel_size is 2",
             "critic.megatron.pipeline_model"),
        ),
        (
            ("critic.megatron.num_layers_in_last_pipeline_stage=2",),
            ("critic.megatron.num_layers_in_last_pipeline_stage is 2",
             "critic.megatron.pipeline_model"),
        ),
        (
            ("actor.megatron.tensor_model_parallel_size=4",
             "critic.megatron.tensor_model_parallel_size=1",
             "actor.ppo_mini_batch_size=2"),
            ("critic.ppo_mini_batch_size 2", ("fewer sequences than the 4 data-parallel ranks of "
                                             "critic.megatron")),
        ),
        (("rollout.tensor_model_parallel_size=3",), ("rollout.tensor_model_parallel_size 3", ("1, "
                                                                                             "2, 4"))),  # noqa: E501
        (("data.train_batch_size=0",), ("data.train_batch_size is 0", "at least 1")),
        (("actor.ppo_mini_batch_size=64",),
         ("actor.ppo_mini_batch_size is 64", "data.train_batch_size, 32")),
        (("actor.ppo_mini_batch_size=5",), ("actor.ppo_mini_batch_size is 5", "divide")),
        (("critic.ppo_mini_batch_size=5",), ("critic.ppo_mini_batch_size is 5", "divide")),
        (("actor.ppo_mini_batch_size=2",), ("fewer sequences than the 4 data-parallel ranks",)),
        (("actor.ppo_max_token_len_per_gpu=1000",),
         ("actor.ppo_max_token_len_per_gpu is 1000", "512 + ", "= 1024")),
        (("critic.ppo_max_token_len_per_gpu=1023",), ("critic.ppo_max_token_len_per_gpu is 1023",)),
        (("critic.forward_max_token_len_per_gpu=1023",), (("critic.forward_max_token_len_per_gpu "
                                                           "is "
                                                          "1023"),)),
        (("rollout.log_prob_max_token_len_per_gpu=1",), (("rollout.log_prob_max_token_len_per_gpu "
                                                         "is 1"),)),
        (("ref.log_prob_max_token_len_per_gpu=1", "actor.use_kl_loss=true"),
         ("ref.log_prob_max_token_len",)),
        (("data.max_response_length=0",), ("data.max_response_length is 0",)),
        (("data.apply_chat_template_kwargs.tokenize=true",), (("data.apply_chat_template_kwargs: "
                                                              "'tokenize' is set"),)),
        (
            ("rollout.environment.first_observation=true",
             "rollout.environment.function_tool_path=tools.py"),
            ("rollout.environment.first_observation is true, and tools have none",),
        ),
        (
            ("rollout.environment.name=openai", "rollout.environment.path=agent.py",
             "reward_model.model_path=model"),
            ("rollout.environment.rewritten_history is new_context, and a reward model",),
        ),
        (
            ("rollout.environment.name=openai", "rollout.environment.path=agent.py",
             "actor.policy_loss.loss_mode=gspo",
             "actor.loss_agg_mode=seq-mean-token-mean"),
            ("rollout.environment.rewritten_history is new_context, and the loss of actor.policy",),
        ),
        *(
            (given, ("rollout.environment.command is for rollout.environment.name openai",))
            for given in (
                ("rollout.environment.command=[agent]",),
                ("rollout.environment.name=openai",),
                ("rollout.environment.name=openai", "rollout.environment.command=[]"),
                ("rollout.environment.name=openai", "rollout.environment.command=[agent]",
                 "rollout.environment.path=agent.py"),
                ("rollout.environment.name=openai", "rollout.environment.command=[agent]",
                 "rollout.environment.function_tool_path=tools.py"),
                ("rollout.environment.name=openai", "rollout.environment.path=agent.py",
                 "rollout.environment.default_observation=again"),
            )
        ),
        (("data.train_max_samples=0",), ("data.train_max_samples is 0", "-1 or at least 1")),
        (("rollout.n=0",), ("rollout.n is 0",)),
        (("rollout.max_num_batched_tokens=100",), ("rollout.max_num_batched_tokens, 100",)),
        (("actor.clip_ratio_low=0",), ("actor.clip_ratio_low is 0.0",)),
        (("actor.clip_ratio_high=0",), ("actor.clip_ratio_high is 0.0",)),
        (("actor.clip_ratio_c=1",), ("actor.clip_ratio_c is 1.0", "above 1")),
        (("algorithm.gamma=1.01",), ("algorithm.gamma is 1.01",)),
        (("algorithm.lam=-0.1",), ("algorithm.lam is -0.1",)),
        (("rollout.temperature=0",), ("rollout.temperature is 0.0", "at least 0.01")),
        (("rollout.gpu_memory_utilization=1.5",), ("rollout.gpu_memory_utilization is 1.5",)),
        (("rollout.val_kwargs.n=4",), ("rollout.val_kwargs.n is 4", "temperature")),
        (("rollout.val_kwargs.top_k=4",),
         ("rollout.val_kwargs: top_p 1.0 and top_k 4", "temperature")),
        (("trainer.val_only=true",), ("trainer.val_only", "data.val_files")),
        (("trainer.validation_data_dir=out",), ("trainer.validation_data_dir", "data.val_files")),
        (("trainer.best_metric=val-core/x/acc/mean@1",),
         ("trainer.best_metric is val-core", "keep_best")),
        (("actor.optim.lr=-1e-6",), ("actor.optim.lr is -1e-06",)),
        (("critic.optim.min_lr=1",), ("critic.optim.min_lr is 1.0", "critic.optim.lr, 1e-05")),
        (("actor.optim.betas=[0.9,1.0]",), ("actor.optim.betas has 1.0",)),
        (("actor.optim.lr_warmup_steps=9", "trainer.total_training_steps=8"),
         ("actor.optim.lr_warmup_steps is 9",)),
        (("trainer.test_freq=5",), ("trainer.test_freq is 5", "data.val_files")),
        (("trainer.test_freq=0",), ("trainer.test_freq is 0",)),
        (("trainer.target_val_acc=0.9",), ("trainer.target_val_acc is 0.9", "trainer.test_freq")),
        (("algorithm.kl_ctrl.horizon=0",), ("algorithm.kl_ctrl.horizon is 0",)),
        (("algorithm.kl_ctrl.type=adaptive",), ("algorithm.use_kl_in_reward", "actor.use_kl_loss")),
        (("algorithm.kl_ctrl.type=adaptive", "algorithm.use_kl_in_reward=true",
          "algorithm.kl_ctrl.target_kl=0"),
         ("algorithm.kl_ctrl.target_kl is 0.0",)),
        (("trainer.seed=-1",), ("trainer.seed is -1",)),
        (("data.train_files=[]",), ("data.train_files is empty",)),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(
    config_file: Path, overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        validated(config_file, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_one_tensor_parallel_size_of_actor_and_engine_divides_the_other(config_file: Path) -> None:
    def check(actor: int, engine: int) -> None:
        validated(
            config_file,
            f"actor.megatron.tensor_model_parallel_size={actor}",
            f"rollout.tensor_model_parallel_size={engine}",
            world_size=12,
        )

    for actor, engine in ((6, 3), (3, 6), (4, 4)):
        check(actor, engine)
    with pytest.raises(UserError) as caught:
        check(6, 4)
    assert str(caught.value) == (
        "rollout.tensor_model_parallel_size 4 and actor.megatron.tensor_model_parallel_size 6: one "
        "must divide the other"
    )


def numeric_keys() -> list[str]:
    return [
        key
        for key, hint in leaf_hints().items()
        if re.search(r"\b(int|float)\b", str(hint)) and "Literal" not in str(hint)
    ]


@pytest.mark.parametrize("key", numeric_keys())
def test_every_number_has_a_range(config_file: Path, key: str) -> None:
    bounds = number_range(leaf_hints()[key])
    assert bounds is not None, f"{key} needs a type with a Range (config/numbers.py)"
    for value in (10**40, -(10**40), 1e308, -1e308, bounds.high * 1.01 + 1, bounds.low * 1.01 - 2):
        with pytest.raises(UserError):
            list_or_number = f"[{value}, {value}]" if key.endswith("betas") else value
            validated(config_file, f"{key}={list_or_number}")
    inside = (bounds.low + bounds.high) / 2 if bounds.open else bounds.high
    assert bounds.violated_bound(inside) is None
