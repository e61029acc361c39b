"""Messages on keys that the schema does not have."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from config_files import MINIMAL, error_of, load

from rlhf_mc.config.load import dotted_keys
from rlhf_mc.verl import correction, multi_turn, parallelism, table, values


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("actor.ppo_epoch", "actor.ppo_epochs"),
        ("actr.ppo_epochs", "actor.ppo_epochs"),
        ("actor.optm.lr", "actor.optim.lr"),
        ("actor_rollout_ref.actor.ppo_epoch", "actor.ppo_epochs"),
        ("reward.custom_reward_function.path", "custom_reward_function.path"),
        ("+trainer.test_frq", "trainer.test_freq"),
    ],
)
def test_unknown_key_names_the_nearest(config_file: Path, key: str, nearest: str) -> None:
    message = error_of(config_file, f"{key}=1")
    assert repr(key) in message
    assert message.endswith(f"the nearest known key is {nearest!r}")
    assert message.startswith(f"override '{key}=1'")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("critic.use_dynamic_bsz", "micro-batches are always by token budget: leave it out"),
        (
            "actor.ppo_micro_batch_size_per_gpu",
            "use ..._max_token_len_per_gpu, the tokens of a micro-batch: that number",
        ),
        (
            "actor_rollout_ref.ref.log_prob_micro_batch_size",
            "use ..._max_token_len_per_gpu, the tokens",
        ),
        ("data.seed", "use trainer.seed"),
        ("reward_model.overlong_buffer.len", "use reward.overlong_buffer.len"),
        ("reward_model.reward_manager", "custom_reward_function.path"),
        ("reward_model.enable", "use reward_model.model_path (null: no reward model)"),
        (
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
            "micro-batches are always by token budget",
        ),
        ("actor.ulysses_sequence_parallel_size", "use megatron.context_parallel_size"),
    ],
)
def test_replaced_key_names_the_replacement(config_file: Path, key: str, words: str) -> None:
    message = error_of(config_file, f"{key}=2")
    assert f"unknown key {key!r}; " in message and words in message and "\n" not in message


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        # Where nothing is near, nothing is suggested.
        ("critic.pool", ("the critic trains, so it is on the ranks of resource_pools.train; only "
                         "frozen models have a pool")),
        ("rollout.frobnicate", "no known key is similar (rlhf_mc/config/schema.py lists them)"),
        ("trainer.name", "no known key is similar (rlhf_mc/config/schema.py lists them)"),
        ("quux", "no known key is similar (rlhf_mc/config/schema.py lists them)"),
        ("actor.megatron.tp", "no known key is similar (rlhf_mc/config/schema.py lists them)"),
        ("rollout.val_kwargs.m", "no known key is similar (rlhf_mc/config/schema.py lists them)"),
        # The same section goes before others.
        ("critic.lr", "the nearest known key is 'critic.optim.lr'"),
        ("critic.tensor_model_parallel_size", ("the nearest known key is "
                                              "'critic.megatron.tensor_model_parallel_size'")),
        ("ref.megatron.tensor_paralel_size", ("the nearest known key is "
                                             "'ref.megatron.tensor_model_parallel_size'")),
        ("critic.modelpath", "the nearest known key is 'critic.model_path'"),
        # verl's.
        ("critic.model.path", "use critic.model_path"),
        ("trainer.nnodes", "torchrun or srun says how many processes there are: leave it out"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload",
         "use megatron.param_offload and megatron.optimizer_offload"),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype",
         ("main parameters, gradients and Adam's state are float32, and computation is bfloat16: "
         "leave it out")),
        ("ray_init.num_cpus", "there is no Ray: leave it out"),
        ("algorithm.use_pf_ppo", "prompts are not reweighted"),
        ("+actor.ppo_epochs", "write it without '+': actor.ppo_epochs"),
    ],
)  # fmt: skip
def test_unknown_key_has_this_answer(config_file: Path, key: str, answer: str) -> None:
    assert error_of(config_file, f"{key}=1") == f"override '{key}=1': unknown key '{key}'; {answer}"


def test_keys_that_are_named_in_answers_exist() -> None:
    """Check each section.key in the replacements of verl's keys."""
    keys = [key.replace("*.", "actor.").replace(".*", "") for key in table.rows()]
    known = dotted_keys()
    for answer in filter(None, map(table.key_hint, keys)):
        for word in re.findall(r"\b[a-z_]+(?:\.(?!json)[a-z_]+)+\b", answer):
            assert any(key == word or key.endswith(f".{word}") for key in known), answer


def test_the_most_specific_row_counts() -> None:
    whole, section = (row.text for row in table.find_rows("rollout.agent.num_workers"))
    assert whole.startswith("each rank") and section.startswith("use rollout.environment.path")
    longer, _ = (row.text for row in table.find_rows("actor.fsdp.qat.mode"))
    assert longer == "it is of quantization-aware training"
    assert [row.text for row in table.find_rows("critic.grad_clip")] == ["critic.optim.clip_grad"]
    assert list(table.find_rows("qat")) == [], "*. stands for a section"


def test_the_table_names_each_converter() -> None:
    named = {row.convert for row in table.rows().values()}
    for module in (correction, multi_turn, parallelism, values):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            is_ours = function.__module__ == module.__name__
            if is_ours and list(inspect.signature(function).parameters) == ["key", "value", "verl"]:
                assert function in named, f"{module.__name__}.{name}"


def test_all_unknown_keys_are_listed_at_once(config_file: Path) -> None:
    config_file.write_text(MINIMAL + "actor: {ppo_epoch: 1, ppo_epochs: 2}\nactor.shuffle: true\n")
    message = error_of(config_file, "rollout.m=1", "rollout.n=2", "trainer.nnodes=1")
    assert message.startswith("4 unknown keys: ")
    for words in (
        f"'actor.ppo_epoch' ({config_file}): the nearest known key is 'actor.ppo_epochs'",
        (
            f"'actor.shuffle' ({config_file}): a key with dots is for the command line; in a file "
            "sections are nested"
        ),
        "'rollout.m' (override 'rollout.m=1'): no known key is similar",
        "'trainer.nnodes' (override 'trainer.nnodes=1'): torchrun",
    ):
        assert words in message
    config_file.write_text(MINIMAL + "other: {" + ", ".join(f"k{i}: 1" for i in range(300)) + "}\n")
    message = error_of(config_file)
    assert (
        message.startswith(f"{config_file}: 300 unknown keys: 'other.k0': no known key is similar")
        and message.endswith("; and 290 more")
        and len(message) < 3000
    )


@pytest.mark.parametrize("prefix", ["", "actor_rollout_ref."])
def test_clip_ratio_names_both_replacements(config_file: Path, prefix: str) -> None:
    message = error_of(config_file, f"{prefix}actor.clip_ratio=0.2")
    assert "actor.clip_ratio_low" in message
    assert "actor.clip_ratio_high" in message


def test_unknown_key_in_a_file_names_the_file(config_file: Path) -> None:
    config_file.write_text(MINIMAL + "actor_rollout_ref: {actor: {ppo_epoch: 1}}\n")
    message = error_of(config_file)
    assert message.startswith(f"{config_file}: ")
    assert "'actor_rollout_ref.actor.ppo_epoch'" in message
    assert message.endswith("'actor.ppo_epochs'")


def test_verls_prefix_is_accepted(config_file: Path) -> None:
    config_file.write_text(
        MINIMAL.replace(
            "model:", "actor_rollout_ref:\n  actor: {ppo_epochs: 2, optim: {lr: 1.0}}\nmodel:"
        )
    )
    cfg = load(config_file, "actor_rollout_ref.rollout.n=3", "actor_rollout_ref.model.path=other")
    assert (cfg.actor.ppo_epochs, cfg.actor.optim.lr, cfg.rollout.n, cfg.model.path) == (
        2,
        1.0,
        3,
        "other",
    )
    config_file.write_text(
        MINIMAL + "actor_rollout_ref: {actor: {ppo_epochs: 1}}\nactor: {ppo_epochs: 2}\n"
    )
    assert "actor.ppo_epochs is given twice, with and without actor_rollout_ref" in error_of(
        config_file
    )
    config_file.write_text(MINIMAL)
    assert "'actor_rollout_ref.trainer.seed'" in error_of(
        config_file, "actor_rollout_ref.trainer.seed=1"
    )
    assert "expected an integer" in error_of(config_file, "actor_rollout_ref.rollout.n=x")
