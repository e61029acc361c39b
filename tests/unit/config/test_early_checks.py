"""Checks that run before torch is imported: missing paths, layouts that do not fit, files of the
wrong kind. Each message begins with the wrong key."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT
from families import shape_of

from rlhf_mc.architectures.run_shapes import router_replay
from rlhf_mc.config import paths
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import dotted_keys, load_config
from rlhf_mc.config.reward_schema import unnamed
from rlhf_mc.data.source import write_prompts
from rlhf_mc.runtime import error_report
from rlhf_mc.setup.early_checks import check_early

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 270,
    "max_position_embeddings": 128,
}
ROW = {
    "data_source": "arithmetic",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Write the files that are read before torch is imported: no weights, no tokenizer."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    for name in ("train", "val"):
        write_prompts(tmp_path / f"{name}.parquet", [ROW])
    (tmp_path / "reward.py").write_text("compute_score = len\n")
    (tmp_path / "config.yaml").write_text(
        f"data: {{train_files: {tmp_path}/train.parquet, val_files: [{tmp_path}/val.parquet],\n"
        "  max_prompt_length: 16, max_response_length: 16}\n"
        f"model: {{path: {tmp_path}/model}}\n"
        f"custom_reward_function: {{path: {tmp_path}/reward.py}}\n"
        f"trainer: {{default_local_dir: {tmp_path}/run}}\n"
    )
    return tmp_path


def check(directory: Path, *overrides: str, world: int = 2) -> None:
    check_early(load_config(str(directory / "config.yaml"), overrides), world)


def error_of(directory: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        check(directory, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_valid_config_passes(directory: Path) -> None:
    check(directory)
    # As in the quickstart: the inputs lie in the run's output directory.
    check(directory, f"trainer.default_local_dir={directory}")
    check(directory, "trainer.default_local_dir=not/yet/there")


def test_every_path_setting_is_classified() -> None:
    named = {
        unnamed(key) for key in dotted_keys() if key.endswith(("path", "_files", "_dir", ".replay"))
    }
    assert named == {
        *paths.INPUT_FILES,
        *paths.INPUT_DIRECTORIES,
        paths.OUTPUT,
        *paths.OTHER_OUTPUTS,
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["reward.remote.url=http://h:x"],
            "reward.remote.url is 'http://h:x'; it must begin with http:// or https://",
        ),
        (
            ["reward.remote.api_key_env=NO_SUCH_KEY"],
            "the environment variable NO_SUCH_KEY is not set",
        ),
        (["reward.remote.url=http://***@h"], "as a secret is recorded; give its value again"),
    ],
)
def test_endpoint_is_checked_before_torch_is_imported(
    directory: Path, overrides: list[str], message: str
) -> None:
    endpoint = ["custom_reward_function.path=null", "reward.remote.url=http://h"]
    check(directory, *endpoint)
    assert message in error_of(directory, *endpoint, *overrides)


TEACHER = "distillation.teacher_models.t.model_path"
DIRECTORIES = [
    TEACHER if key == "teacher_model.model_path" else key for key in paths.INPUT_DIRECTORIES
]
EXTRA = {
    "trainer.resume_from_path": ["trainer.resume_mode=resume_path"],
    "trainer.replay": ["rollout.tail_batching=true"],
    TEACHER: ["distillation.enabled=true"],
    "algorithm.custom_estimator.path": ["algorithm.adv_estimator=custom"],
    "reward_model.tokenizer_path": ["reward_model.model_path={0}/model"],
    "reward_model.chat_template_path": [
        "reward_model.model_path={0}/model",
        "reward_model.tokenizer_path={0}/model",
    ],
    "actor.policy_loss.custom_loss.path": ["actor.policy_loss.loss_mode=custom"],
    "rollout.custom_engine.path": ["rollout.name=custom"],
}
"""Settings that a path needs, by its key. {0}: the directory."""


@pytest.mark.parametrize("key", [*paths.INPUT_FILES, *DIRECTORIES])
def test_missing_path_is_named_with_its_key(directory: Path, key: str) -> None:
    extra = [setting.format(directory) for setting in EXTRA.get(key, [])]
    kind = "file" if key in paths.INPUT_FILES else "directory"
    assert error_of(directory, f"{key}=/nowhere/x", *extra) == f"{key} /nowhere/x: no such {kind}"


@pytest.mark.parametrize("key", [*paths.INPUT_FILES, *DIRECTORIES])
def test_file_for_a_directory_and_vice_versa_are_rejected(directory: Path, key: str) -> None:
    extra = [setting.format(directory) for setting in EXTRA.get(key, [])]
    wrong = directory / ("model" if key in paths.INPUT_FILES else "train.parquet")
    message = error_of(directory, f"{key}={wrong}", *extra)
    assert message.startswith(f"{key} {wrong}: not a ")


def test_output_directory_that_cannot_be_created_is_rejected(directory: Path) -> None:
    message = error_of(directory, f"trainer.default_local_dir={directory}/train.parquet/run")
    assert (
        message.startswith("trainer.default_local_dir ")
        and f"{directory}/train.parquet is not a directory" in message
    )
    if os.geteuid() != 0:  # root may write anywhere
        (directory / "closed").mkdir(mode=0o500)
        assert "no permission to write to" in error_of(
            directory, f"trainer.default_local_dir={directory}/closed/run"
        )
        (directory / "unlisted").mkdir(mode=0o300)
        assert "Permission denied" in error_of(
            directory, f"trainer.default_local_dir={directory}/unlisted"
        )


@pytest.mark.parametrize("files", [["data.pt"], ["actor/huggingface/config.json"]])
def test_output_directory_with_checkpoints_of_verl_is_rejected(
    directory: Path, files: list[str]
) -> None:
    run = directory / "run"
    for name in files:
        (run / "global_step_10" / name).parent.mkdir(parents=True)
        (run / "global_step_10" / name).touch()
    if "data.pt" in files:
        check(directory)  # a checkpoint of ours that a killed process was deleting
        (run / "latest_checkpointed_iteration.txt").write_text("10")
    message = error_of(directory)
    assert (
        "run: global_step_10 there is a checkpoint of verl" in message
        and "verl.model_merger" in message
    )
    (run / "global_step_10" / "manifest.json").touch()
    check(directory)


def test_resume_path_may_be_gone_once_the_run_has_a_checkpoint(directory: Path) -> None:
    start = ("trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere/global_step_4")
    assert "/nowhere/global_step_4: no such directory" in error_of(directory, *start)
    config = load_config(str(directory / "config.yaml"), start)
    assert "trainer.resume_from_path" in dict(paths.input_paths(config))
    (directory / "run" / "global_step_6").mkdir(parents=True)
    check(directory, *start)
    # not compared between nodes either
    assert "trainer.resume_from_path" not in dict(paths.input_paths(config))


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (lambda d: (d / "model/config.json").unlink(), ["model.path: ", "config.json", ("cannot be "
                                                                                       "read")]),
        (lambda d: (d / "model/config.json").write_text("{"),
         ["model.path: ", "config.json", ("not "
                                                                                              "valid JSON")]),  # noqa: E501
        (lambda d: (d / "model/config.json").write_text("[" * 100_000), ["model.path: ", ("not "
                                                                                         "valid "
                                                                                         "JSON")]),
        (lambda d: (d / "model/config.json").write_text("[]"),
         ["model.path: ", "not a JSON object"]),
        (lambda d: _edit(d, model_type="gpt2"), ["model.path: ", ("model/config.json: model_type "
                                                                  "is "
                                                                 "'gpt2'")]),
        (lambda d: _edit(d, architectures=["LlamaModel"]), ["model.path: ", ("architectures is "
                                                                            "['LlamaModel']")]),
        (lambda d: (d / "val.parquet").write_text("x"), ["data.val_files ", ("val.parquet: not a "
                                                                            "readable parquet")]),
    ],
)  # fmt: skip
def test_invalid_input_files_are_named(
    directory: Path, corrupt: Callable[[Path], Any], words: list[str]
) -> None:
    corrupt(directory)
    message = error_of(directory)
    assert message.startswith(words[0]) and all(word in message for word in words)


def _edit(directory: Path, **changes: Any) -> None:
    (directory / "model" / "config.json").write_text(json.dumps({**MODEL, **changes}))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.megatron.tensor_model_parallel_size=3",
         ["actor.megatron.tensor_model_parallel_size 3", "1, 2"]),
        ("critic.megatron.pipeline_model_parallel_size=3",
         ["critic.megatron.pipeline_model_parallel_size 3", "1, 2"]),
        ("rollout.tensor_model_parallel_size=3", [("rollout.tensor_model_parallel_size 3 does not "
                                                  "divide"), "1, 2"]),
        ("critic.megatron.expert_model_parallel_size=2", ["critic.megatron", ("a qwen2 model has "
                                                                              "no "
                                                                             "experts")]),
        ("data.prompt_key=question",
         ["data.train_files ", "no column 'question'; its columns are"]),
        ("rollout.n=0", ["rollout.n is 0"]),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_world_size_or_files(
    directory: Path, override: str, words: list[str]
) -> None:
    message = error_of(directory, override)
    assert all(word in message for word in words)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("train=1", "resource_pools.train is 1 and resource_pools.rollout is null; both must be"),
        ("train=1 rollout=0", "resource_pools.rollout is 0; it must be"),
        ("train=1 rollout=2", "train 1 + resource_pools.rollout 2 = 3 ranks; this run has 2 "),
        ("train=1 rollout=1 rollout.tensor_model_parallel_size=2",
         "rollout.tensor_model_parallel_size 2 does not divide the 1 processes of "
         "resource_pools.rollout; what would: 1"),
        ("train=1 rollout=1 actor.megatron.tensor_model_parallel_size=2",
         "actor.megatron.tensor_model_parallel_size 2 x actor.megatron.pipeline_model_parallel_size"
         " 1 = 2 does not divide the 1 processes of resource_pools.train; what would: 1"),
        ("ref.pool=rollout", "ref.pool is rollout; that needs resource_pools.rollout"),
        ("reward_models.a.pool=rollout",
         "reward_models.a.pool is rollout; that needs resource_pools.rollout"),
        ("train=1 rollout=1 ref.pool=rollout actor.lora.rank=4 algorithm.use_kl_in_reward=true",
         "actor.lora.rank is 4 and ref.pool is rollout; the reference is the actor without its"),
        ("train=1 rollout=1 ref.pool=rollout ref.megatron.tensor_model_parallel_size=2",
         "ref.megatron.tensor_model_parallel_size 2 x ref.megatron.pipeline_model_parallel_size"
         " 1 = 2 does not divide the 1 processes of resource_pools.rollout; what would: 1"),
        ("train=1 rollout=1 health.out_of_memory=halve_tokens",
         "health.out_of_memory is halve_tokens and resource_pools is set"),
    ],
)  # fmt: skip
def test_pools_that_cannot_be(directory: Path, overrides: str, words: str) -> None:
    keys = [
        f"resource_pools.{key}" if key.startswith(("train=", "rollout=")) else key
        for key in overrides.split()
    ]
    assert words in error_of(directory, *keys)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("", ""),
        ("teacher_models.t.key=a", ""),
        ("distillation_loss.loss_mode=k1 distillation_loss.use_policy_gradient=true", ""),
        ("teacher_models=null", "distillation.teacher_models is empty; it needs a teacher"),
        ("teacher_models.u.model_path={0}/model teacher_models.u.key=a",
         "distillation.teacher_models.t.key is null; of 2 teachers each needs the data source"),
        ("teacher_models.t.key=a teacher_models.u.key=a teacher_models.u.model_path={0}/model",
         "distillation.teacher_models.t.key is a; of 2 teachers each needs the data source that it "
         "scores, and a data source has one"),
        ("distillation_loss.loss_mode=k1", "distillation_loss.use_policy_gradient is false; set"),
        ("distillation_loss.log_prob_min_clamp=0", "is 0.0; it must be below 0"),
        ("distillation_loss.use_task_rewards=false",
         "algorithm.adv_estimator is gae, whose critic no loss of the actor would read; set"),
        ("distillation_loss.use_policy_gradient=true actor.policy_loss.loss_mode=kl_cov",
         "actor.policy_loss.loss_mode is kl_cov, which selects tokens by the rewards' advantages"),
        ("distillation_loss.loss_mode=forward_kl_topk distillation_loss.topk=301",
         "distillation.distillation_loss.topk is 301; the vocabulary of model.path has 270 tokens"),
        ("teacher_models.t.log_prob_max_token_len_per_gpu=1",
         "teacher_models.t.log_prob_max_token_len_per_gpu is 1; it must be at least the longest"),
        ("teacher_models.t.source=actor", "and source actor; a teacher has one of them"),
        ("teacher_models.t.model_path=null", "model_path null and source null; a teacher"),
        *((f"teacher_models.t.model_path=null teacher_models.t.source={source} {key}", words)
          for source, key, words in (
              ("actor", "", ""),
              ("ref", "", ""),
              ("actor", "teacher_models.t.megatron.param_offload=true",
               "t.megatron.param_offload is True; the teacher has the layout of actor: remove it"),
              ("ref", "teacher_models.t.pool=rollout", "t.pool is rollout; the teacher has"),
              ("ref", "ref.pool=rollout", "t.source is ref and ref.pool is rollout; the teacher"),
          )),
        ("teacher_models.t.megatron.tensor_model_parallel_size=3",
         "distillation.teacher_models.t.megatron.tensor_model_parallel_size 3 x"),
    ],
)  # fmt: skip
def test_distillation_that_cannot_be(directory: Path, overrides: str, words: str) -> None:
    keys = [
        f"distillation.{key}" if key.startswith(("teacher", "distill")) else key
        for key in overrides.format(directory).split()
    ]
    given = [] if "teacher_models=null" in overrides else [f"{TEACHER}={directory}/model"]
    settings = ["distillation.enabled=true", *given, *keys]
    if words:
        assert words in error_of(directory, *settings)
    else:
        check(directory, *settings)


def test_pools_cover_the_run(directory: Path) -> None:
    check(directory, "resource_pools.train=1", "resource_pools.rollout=1")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["actor.megatron.pipeline_model_parallel_size=2",
          "actor.megatron.num_layers_in_first_pipeline_stage=4"],
         "actor.megatron.num_layers_in_first_pipeline_stage 4 and "
         "num_layers_in_last_pipeline_stage None leave 0 of the model's 4 layers for the other 1 "
         "of 2 stages"),
        (["critic.megatron.pipeline_model_parallel_size=3"],
         "critic.megatron.pipeline_model_parallel_size: 3 does not divide the model's 4 layers; "
         "what divides them: 1, 2, 4"),
        (["actor.megatron.context_parallel_size=3", "actor.megatron.cp_comm_type=a2a"],
         "actor.megatron.cp_comm_type is 'a2a'; it needs KV heads that context_parallel_size 3 "
         "divides, and a tensor-parallel rank has 2 of the model's 2: set it to p2p (model.path)"),
        (["data.max_response_length=200"],
         "model.path: max_position_embeddings is 128, fewer than the 216 tokens"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_model_sizes(
    directory: Path, overrides: list[str], words: str
) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        check(directory, *overrides, world=6)


EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize("value", ["rollout", "recompute"])
def test_a_dense_model_replays_no_experts(directory: Path, value: str) -> None:
    wanted = (
        f"algorithm.router_replay is {value}; the model of model.path has no experts: set it to "
        "off or null"
    )
    assert error_of(directory, f"algorithm.router_replay={value}") == wanted
    check(directory, "algorithm.router_replay=off")


def test_settings_that_balance_experts_need_them(directory: Path) -> None:
    wanted = "actor.moe_{} is 0.1; the model of model.path has {}: set it to 0"
    for name in ("aux_loss_coeff", "z_loss_coeff", "router_bias_update_rate"):
        assert error_of(directory, f"actor.moe_{name}=0.1") == wanted.format(name, "no experts")
    _edit(directory, **EXPERTS)
    check(directory, "actor.moe_aux_loss_coeff=0.1", "actor.moe_z_loss_coeff=0.1")
    without_bias = wanted.format("router_bias_update_rate", "routers without a correction bias")
    assert error_of(directory, "actor.moe_router_bias_update_rate=0.1") == without_bias


def test_experts_are_replayed_by_default(directory: Path) -> None:
    _edit(directory, **EXPERTS)
    cfg = load_config(str(directory / "config.yaml"))
    hybrid = shape_of("qwen3_next")
    assert router_replay(cfg, shape_of("qwen3_moe")) == "rollout"
    assert router_replay(cfg, shape_of("qwen3")) == "off"
    assert router_replay(cfg, hybrid) == "recompute"
    with pytest.raises(UserError, match="vLLM returns no experts of a model with linear attention"):
        router_replay(
            replace(cfg, algorithm=replace(cfg.algorithm, router_replay="rollout")), hybrid
        )
    agent = ["rollout.environment.name=openai", "rollout.environment.command=[python]"]
    with_agent = load_config(str(directory / "config.yaml"), agent)
    assert router_replay(with_agent, shape_of("qwen3_moe")) == "recompute"
    error = error_of(directory, *agent, "algorithm.router_replay=rollout")
    assert "the engine's experts are those of an agent's last context" in error
    bypass = ["algorithm.rollout_correction.bypass_mode=true", "algorithm.router_replay=recompute"]
    assert (
        "algorithm.router_replay is recompute, which replays the choices of the pass that"
        in error_of(directory, *bypass)
    )


def test_rollout_tp_must_divide_the_heads(directory: Path) -> None:
    _edit(directory, num_attention_heads=3, num_key_value_heads=3, hidden_size=96)
    message = error_of(directory, "rollout.tensor_model_parallel_size=2")
    assert message.startswith(
        "rollout.tensor_model_parallel_size 2 (vLLM): num_key_value_heads is 3"
    )
    assert message.endswith("(model.path)")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("''", "is empty; give a path"),
        ("'${oc.env:HOME}/run'", "${oc.env:HOME} is not replaced"),
        ("$HOME/run", "$HOME is not replaced"),
        ("~/run", "~ is not replaced"),
        ("'run '", "no space at its ends"),
        ('"run\\nx"', "no control characters"),
        ('"run\\0x"', "no control characters"),
    ],
)
@pytest.mark.parametrize("key", ["trainer.default_local_dir", "model.path", "data.val_files"])
def test_unexpanded_or_malformed_paths_are_rejected(
    directory: Path, key: str, value: str, words: str
) -> None:
    message = error_of(directory, f"{key}={value}")
    assert message.startswith(f"{key} is ") and words in message
    assert not list(directory.glob("$*"))


def test_output_directory_inside_an_input_is_rejected(directory: Path) -> None:
    (directory / "link").symlink_to(directory / "model")
    for output in ("model", "model/run", "link/deeper/run", "other/../model"):
        message = error_of(directory, f"trainer.default_local_dir={directory}/{output}")
        assert (
            f"/{output} {'is' if output.endswith('model') else 'lies inside'} model.path" in message
        )
    (directory / "run/hf").mkdir(parents=True)
    (directory / "model/config.json").rename(directory / "run/hf/config.json")
    message = error_of(directory, f"model.path={directory}/run/hf")
    assert message.startswith("model.path ") and "where this run writes its exports" in message


# ---------------------------------------------------------------- the program


def run_program(directory: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the program in an environment where importing torch raises RuntimeError."""
    (directory / "no_torch").mkdir(exist_ok=True)
    code = (
        "import os\nraise RuntimeError('torch was imported', "
        "os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'))\n"
    )
    (directory / "no_torch" / "torch.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{directory / 'no_torch'}:{ROOT}", **env}
    command = [sys.executable, "-m", "rlhf_mc", *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, cwd=directory
    )


@pytest.mark.slow
def test_user_errors_are_reported_before_torch_is_imported(directory: Path) -> None:
    config = str(directory / "config.yaml")
    for arguments in (
        [config, "rollout.m=1"],
        [config, "data.prompt_key=question"],
        [config, "rollout.tensor_model_parallel_size=2"],
    ):
        done = run_program(directory, *arguments)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("rlhf_mc: error: ") and len(done.stderr.splitlines()) == 1, (
            done.stderr
        )
    done = run_program(directory, config)
    assert done.returncode == 1 and "torch was imported" in done.stderr, (
        "a valid config gets as far as torch"
    )


def test_cuda_connections_are_set_before_torch_is_imported(directory: Path) -> None:
    """Import torch with the variable set, as the driver reads it; the tensor-parallel model is not
    the first."""
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = run_program(
        directory,
        str(directory / "config.yaml"),
        "critic.megatron.tensor_model_parallel_size=2",
        **env,
    )
    assert "('torch was imported', '1')" in done.stderr, done.stderr


def test_early_error_is_reported_by_one_rank(directory: Path) -> None:
    """Start two ranks with the environment of torchrun's agent, before they are connected."""
    outputs = []
    for rank in ("1", "0"):
        error_file = directory / "attempt_0" / rank / "error.json"
        error_file.parent.mkdir(parents=True)
        env = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "TORCHELASTIC_ERROR_FILE": str(error_file),
        }
        agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "1"}
        done = run_program(directory, str(directory / "config.yaml"), "rollout.n=0", **env, **agent)
        assert done.returncode == 2 and "rollout.n is 0" in error_file.read_text()
        outputs.append(done.stderr)
    assert [len(text.splitlines()) for text in outputs] == [1, 0], outputs


@pytest.mark.parametrize(("of_this_node", "expected"), [(False, ["0"]), (True, ["0", "4"])])
def test_without_an_agent_rank_0_reports_or_each_nodes_first_rank(
    monkeypatch: pytest.MonkeyPatch, of_this_node: bool, expected: list[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    reporters = []
    for rank in ("0", "1", "4", "5"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", str(int(rank) % 4))
        reporters += [rank] if error_report._is_first_to_report("key", of_this_node) else []
    assert reporters == expected


def test_world_size_must_be_a_number(directory: Path) -> None:
    done = run_program(directory, str(directory / "config.yaml"), RANK="0", WORLD_SIZE="many")
    assert done.returncode == 2 and "WORLD_SIZE is 'many'" in done.stderr


def test_missing_master_addr_is_named(directory: Path) -> None:
    done = run_program(
        directory, str(directory / "config.yaml"), RANK="0", WORLD_SIZE="1", MASTER_PORT="1"
    )
    assert (
        done.returncode == 2
        and "RANK is set in the environment, and MASTER_ADDR not" in done.stderr
    )
    assert len(done.stderr.splitlines()) == 1
