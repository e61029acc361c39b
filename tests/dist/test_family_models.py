"""Families that test_models.py and test_layouts.py do not cover: log-probs and gradients against
transformers', and two PPO steps after which vLLM's weights are the exported ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import cases
import family_cases
import model_cases
import pytest
import torch
from gpu_parts.engines import Job, token_batch
from gpu_parts.reference import Reference, by_checkpoint_names
from test_models import transformers_gradients, transformers_model
from tiny import make_workspace, write_config

from rlhf_mc.data.batch import RaggedBatch

pytestmark = pytest.mark.dist

DENSE: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "tied": False},
    "mistral": {"family": "mistral", "tied": False},
    "gemma": {"family": "gemma", "tied": True},
}
HYBRID: dict[str, dict[str, Any]] = {
    # The first layer has a gated delta net.
    "qwen3_5_text": {"family": "qwen3_5_text", "tied": True},
    "qwen3_5": {"family": "qwen3_5", "tied": False},
}
EXPERTS = {
    "qwen3_moe": {"family": "qwen3_moe", "tied": False},
    "mixtral": {"family": "mixtral", "tied": False},
    "gpt_oss": {"family": "gpt_oss", "tied": False},
    # The first layer is dense.
    "glm4_moe": {"family": "glm4_moe", "tied": False},
    # Latent attention, groups of experts, yarn; and without a latent vector of queries, groups and
    # yarn, as Moonlight.
    "deepseek_v3": {"family": "deepseek_v3", "tied": False},
    "deepseek_plain": {
        "family": "deepseek_v3",
        "tied": False,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "rope_scaling": None,
    },
    # The first layer has a gated delta net.
    "qwen3_next": {"family": "qwen3_next", "tied": False},
    # In a model of images and text, all experts of a layer in one tensor.
    "qwen3_5_moe": {"family": "qwen3_5_moe", "tied": False},
    # Layers of two kinds. With two stages, the first has no experts. A token's experts have the
    # weights of the softmax over all experts, not normalised over the chosen ones.
    "qwen3_moe_mixed": {
        "family": "qwen3_moe",
        "tied": True,
        "mlp_only_layers": [0],
        "norm_topk_prob": False,
    },
}
WHOLE_SEQUENCES = ("gpt_oss", "qwen3_next", "qwen3_5_moe")
"""Families that context parallelism does not support."""
# Two of the equally long sequences are in one micro-batch.
PROMPT_LENS = (3, 8, 4, 4)
RESPONSE_LENS = (6, 1, 11, 5)


@pytest.fixture(scope="session")
def workspaces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a run's files for each family."""
    root = tmp_path_factory.mktemp("more_families")
    found = {
        name: make_workspace(root / name, **extra, num_hidden_layers=2)
        for name, extra in (DENSE | HYBRID | EXPERTS).items()
    }
    # Mistral also publishes files in its own format. These describe another model, so that reading
    # them would show.
    (found["mistral"] / "model" / "params.json").write_text(
        json.dumps({"dim": 64, "n_layers": 1, "head_dim": 64})
    )
    (found["mistral"] / "model" / "consolidated.safetensors").write_bytes(b"")
    return found


@pytest.fixture(scope="session")
def family_batch(workspaces: dict[str, Path]) -> RaggedBatch:
    """Return a batch of random tokens, with random values in the fields that the actor's loss
    reads."""
    vocab = json.loads((workspaces["qwen3"] / "model" / "config.json").read_text())["vocab_size"]
    empty = token_batch(vocab, PROMPT_LENS, RESPONSE_LENS)
    log_probs = transformers_model(str(workspaces["qwen3"] / "model")).log_probs(empty)[0].detach()
    noise = torch.randn(3, sum(RESPONSE_LENS), generator=torch.Generator().manual_seed(6))
    return empty.with_fields(
        old_log_probs=log_probs + 0.3 * noise[0],
        ref_log_probs=log_probs + 0.3 * noise[1],
        advantages=noise[2],
    )


@pytest.mark.parametrize(("world", "tp", "pp", "cp"), [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2)])
def test_log_probs_and_gradients_match_transformers(
    pool: Any,
    workspaces: dict[str, Path],
    family_batch: RaggedBatch,
    world: int,
    tp: int,
    pp: int,
    cp: int,
) -> None:
    names = DENSE | (HYBRID if cp == 1 else {})
    check_against_transformers(
        pool(world), {n: workspaces[n] for n in names}, family_batch, tp=tp, pp=pp, cp=cp
    )


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_more_tp_ranks_than_kv_heads(
    pool: Any,
    workspaces: dict[str, Path],
    family_batch: RaggedBatch,
    world: int,
    sequence_parallel: bool,
) -> None:
    """Split two KV heads over four ranks, with QK norms and zero-centred norms, whose gradient on
    each rank covers only its share of the tokens with sequence parallelism. Experts need it."""
    names = [
        "qwen3",
        "gemma",
        "qwen3_5_text",
        *(["qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_next"] if sequence_parallel else []),
    ]
    directories = {name: workspaces[name] for name in names}
    check_against_transformers(
        pool(world), directories, family_batch, tp=4, pp=1, sequence_parallel=sequence_parallel
    )


@pytest.mark.parametrize(
    ("world", "pp", "ep", "cp"),
    [(1, 1, 1, 1), (4, 2, 2, 1), (4, 1, 4, 2)],
)
def test_expert_parallel_layouts_match_transformers(
    pool: Any,
    workspaces: dict[str, Path],
    family_batch: RaggedBatch,
    world: int,
    pp: int,
    ep: int,
    cp: int,
) -> None:
    directories = {n: workspaces[n] for n in EXPERTS if cp == 1 or n not in WHOLE_SEQUENCES}
    check_against_transformers(pool(world), directories, family_batch, tp=1, pp=pp, ep=ep, cp=cp)


@pytest.mark.parametrize(("world", "tp", "ep", "cp"), [(2, 2, 1, 1), (4, 2, 2, 2)])
def test_experts_with_tensor_parallelism_match_transformers(
    pool: Any,
    workspaces: dict[str, Path],
    family_batch: RaggedBatch,
    world: int,
    tp: int,
    ep: int,
    cp: int,
) -> None:
    directories = {n: workspaces[n] for n in EXPERTS if cp == 1 or n not in WHOLE_SEQUENCES}
    layout = {"tp": tp, "pp": 1, "ep": ep, "cp": cp}
    check_against_transformers(
        pool(world), directories, family_batch, **layout, sequence_parallel=True
    )


def test_rank_without_sequences_serves_its_experts(
    pool: Any, workspaces: dict[str, Path], family_batch: RaggedBatch
) -> None:
    only_one = family_batch.select((2,))
    check_against_transformers(
        pool(2), {"qwen3_moe": workspaces["qwen3_moe"]}, only_one, tp=1, pp=1, ep=2
    )


def check_against_transformers(
    workers: Any, directories: dict[str, Path], batch: RaggedBatch, **layout: int
) -> None:
    """Compare each model's log-probs and gradients on every rank with transformers and autograd."""
    every = tuple(range(batch.num_sequences))
    jobs = {
        name: Job(str(directory / "model"), "actor", "token-mean", 24, every)
        for name, directory in directories.items()
    }
    results = workers.run(
        model_cases.log_probs_and_gradients, jobs=list(jobs.values()), batch=batch, **layout
    )
    for name, job in jobs.items():
        wanted, wanted_grads = transformers_results(job.checkpoint, batch, job)
        for rank, result in enumerate(results):
            (log_probs,), _, grads = result[job]
            error = float((log_probs - wanted).abs().max())
            assert error < 1e-5, f"{name}, rank {rank}: log-probs off by {error:.1e}"
            assert grads.keys() == wanted_grads.keys()
            for tensor, want in wanted_grads.items():
                # clamp_min: the gradient of an expert that no token has chosen is 0.
                error = float(
                    (grads[tensor] - want).abs().max() / want.abs().max().clamp_min(1e-12)
                )
                assert error < 1e-4, (
                    f"{name}, rank {rank}, {tensor}: gradient off by {error:.1e} of the largest"
                )


def transformers_results(
    checkpoint: str, batch: RaggedBatch, job: Job
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return (log-probs, gradients by the names of the checkpoint)."""
    reference = transformers_model(checkpoint)
    with torch.no_grad():
        log_probs = reference.log_probs(batch)[0]
    return log_probs, by_checkpoint_names(
        transformers_gradients(batch, job)[1], reference.model.config.model_type
    )


@pytest.mark.parametrize(
    ("world", "family", "ep", "other_ep"),
    [
        (2, "qwen3_moe", 2, 1),
        (2, "mixtral", 1, 2),
        (2, "qwen3_moe_mixed", 2, 1),
        (2, "glm4_moe", 1, 2),
        (2, "gpt_oss", 2, 1),
        (2, "deepseek_v3", 1, 2),
        (2, "qwen3_next", 2, 1),
        (2, "qwen3_5_moe", 1, 2),
    ],
)
def test_experts_load_with_another_expert_parallel_size(
    pool: Any,
    workspaces: dict[str, Path],
    tmp_path: Path,
    world: int,
    family: str,
    ep: int,
    other_ep: int,
) -> None:
    checkpoint = str(workspaces[family] / "model")
    different = pool(world).run(
        family_cases.save_and_load,
        checkpoint=checkpoint,
        directory=str(tmp_path / "mcore"),
        ep=ep,
        other_ep=other_ep,
    )
    assert different == [[]] * world


LAYER_NAMES = {
    "qwen3": {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"},
    "qwen3_moe": {
        "mlp.experts.experts.linear_fc1.weight",
        "mlp.experts.experts.linear_fc2.weight",
        "mlp.router.weight",
        "pre_mlp_layernorm.weight",
    },
}
LAYER_NAMES["mixtral"] = LAYER_NAMES["qwen3_moe"]
# Layers of unequal kinds are not stacked: each has its number.
LAYER_NAMES["qwen3_moe_mixed"] = {f"0.{name}" for name in LAYER_NAMES["qwen3"]} | {
    f"1.{name}" for name in LAYER_NAMES["qwen3_moe"]
}
LAYER_NAMES["glm4_moe"] = LAYER_NAMES["qwen3_moe_mixed"] | {
    "1.mlp.router.expert_bias",
    "1.mlp.shared_experts.linear_fc1.weight",
    "1.mlp.shared_experts.linear_fc2.weight",
}
LAYER_NAMES["gpt_oss"] = LAYER_NAMES["qwen3_moe"] | {
    "mlp.experts.experts.linear_fc1.bias",
    "mlp.experts.experts.linear_fc2.bias",
    "mlp.router.bias",
}
LATENT_NAMES = {
    "input_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attention.linear_kv_up_proj.weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_q_up_proj.weight",
}
MLP_NAMES = {
    *LAYER_NAMES["qwen3_moe"],
    *(
        f"mlp.shared_experts.{name}"
        for name in ("gate_weight", "linear_fc1.weight", "linear_fc2.weight")
    ),
}
DELTA_NET_NAMES = {
    *("A_log", "dt_bias", "in_proj.layer_norm_weight", "out_norm.weight", "out_proj.weight"),
    *(f"in_proj.weight.{part}" for part in ("query", "key", "value", "z", "beta", "alpha")),
    *(f"conv1d.weight.{part}" for part in ("query", "key", "value")),
}
ATTENTION_NAMES = {
    *("linear_qkv.layer_norm_weight", "linear_qkv.weight", "linear_proj.weight"),
    *("q_layernorm.weight", "k_layernorm.weight"),
}
LAYER_NAMES["qwen3_next"] = {
    *(f"{i}.{name}" for i in range(2) for name in MLP_NAMES),
    *(
        f"{i}.self_attention.{n}"
        for i, names in enumerate((DELTA_NET_NAMES, ATTENTION_NAMES))
        for n in names
    ),
}
LAYER_NAMES["qwen3_5_moe"] = LAYER_NAMES["qwen3_next"]
LAYER_NAMES["deepseek_v3"] = LAYER_NAMES["glm4_moe"] | {
    f"{i}.{name}" for i in range(2) for name in LATENT_NAMES
}
"""Names of a layer's tensors after its attention, and for latent attention and delta nets of all,
in the Megatron checkpoints that Transformer Engine's layers write
(docs/internals/gpu_readings.md)."""


@pytest.mark.parametrize("family", LAYER_NAMES)
def test_megatron_checkpoints_are_those_of_transformer_engine(
    pool: Any, workspaces: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """Compare the names, and load a checkpoint without extra states, which other modules have in
    its layers."""
    checkpoint = str(workspaces[family] / "model")
    [(names, different)] = pool(1).run(
        family_cases.load_without_extra_states,
        checkpoint=checkpoint,
        directory=str(tmp_path / "mcore"),
    )
    assert different == []
    inside = {name.removeprefix("model.decoder.layers.") for name in names if ".layers." in name}
    assert LAYER_NAMES[family] == {
        name
        for name in inside
        if "mlp" in name or family in ("deepseek_v3", "qwen3_next", "qwen3_5_moe")
    }


YARN = {"factor": 8.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 50.0},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "yarn": {
        "rope_scaling": {"type": "yarn", **YARN, "beta_fast": 4, "attention_factor": 1.7},
        "rope_theta": 1e6,
    },
    "llama3": {
        "rope_scaling": {"type": "llama3", **YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    },
}
"""Rope settings as earlier versions of transformers wrote them. tests/unit covers the newer
spelling."""


def test_rope_types_match_transformers_and_vllm(pool: Any, tmp_path: Path) -> None:
    """Compare log-probs of vLLM, the trainer and transformers, which differ from those of a model
    without scaling."""
    directory = make_workspace(tmp_path / "llama", family="llama", num_hidden_layers=1)
    config = json.loads((directory / "model" / "config.json").read_text())
    del config["rope_parameters"]
    models = []
    for name, keys in ROPES.items():
        models.append(shutil.copytree(directory / "model", tmp_path / name))
        (models[-1] / "config.json").write_text(json.dumps(config | keys))
    (batches,) = pool(1).run(
        family_cases.sample_and_score,
        config_path=str(write_config(directory)),
        models=[str(m) for m in models],
    )
    plain = Reference(str(directory / "model"))
    for name, model, batch in zip(ROPES, models, batches, strict=True):
        with torch.no_grad():
            wanted = Reference(str(model)).log_probs(batch)[0]
            without = plain.log_probs(batch)[0]
        for engine, found in (
            ("vLLM", batch.rollout_log_probs),
            ("the trainer", batch.old_log_probs),
        ):
            error = float((found - wanted).abs().max())
            assert error < 2e-5, f"{name}: log-probs of {engine} are off by {error:.1e}"
        # "dynamic" scales nothing up to max_position_embeddings tokens.
        assert (float((without - wanted).abs().max()) > 1e-2) == (name != "dynamic"), name


# From training TP 2 to rollout TP 1 every split tensor is gathered; from 1 to 2 every tensor is
# split.
@pytest.mark.parametrize(
    ("world", "family", "tp", "rollout_tp", "sizes"),
    [
        (2, "qwen3", 2, 1, ()),
        (2, "mistral", 2, 1, ()),
        (2, "gemma", 1, 2, ()),
        (2, "mixtral", 1, 2, ()),
        (4, "qwen3_moe_mixed", 1, 2, ("pipeline", "expert")),
        (2, "glm4_moe", 1, 2, ("expert",)),
        (2, "gpt_oss", 1, 2, ("expert",)),
        (2, "deepseek_plain", 1, 2, ("expert",)),
    ],
)
def test_vllm_has_the_trained_weights(
    pool: Any,
    workspaces: dict[str, Path],
    world: int,
    family: str,
    tp: int,
    rollout_tp: int,
    sizes: tuple[str, ...],
) -> None:
    """sizes: the other sizes of the actor's layout that are 2."""
    overrides = [f"actor.megatron.{size}_model_parallel_size=2" for size in sizes]
    check_two_steps(
        pool(world), workspaces[family], tp=tp, rollout_tp=rollout_tp, overrides=overrides
    )


def test_decode_weights_of_latent_attention_follow_an_update(
    pool: Any, workspaces: dict[str, Path]
) -> None:
    config = write_config(
        workspaces["deepseek_v3"], "derived.yaml", data={"max_response_length": 2}
    )
    (found,) = pool(1).run(family_cases.derived_after_update, config_path=str(config))
    assert found == [False, True, True]


@pytest.mark.parametrize(
    "family", ["glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe"]
)
def test_float32_parts_of_a_bfloat16_model(
    pool: Any, workspaces: dict[str, Path], family: str
) -> None:
    """Send a router's weights in bfloat16 to vLLM, to glm4_moe's in float32, and its correction
    bias, which moves, in float32; and qwen3_next's A_log to vLLM's in float32."""
    directory = workspaces[family]
    types = [f"{role}.megatron.dtype=bfloat16" for role in ("actor", "critic", "ref")]
    types += (
        ["actor.moe_router_bias_update_rate=0.01"] if family in ("glm4_moe", "deepseek_v3") else []
    )
    config = write_config(directory, data={"train_batch_size": 4}, actor={"ppo_epochs": 1})
    export_to = directory / "out_bfloat16"
    for result in cases.run_two_steps(
        pool(2), config, (1, 2, 2), export_to, [*types, "reshard.verify=always"]
    ):
        assert result["different"] == []
        assert all(
            metrics["training/rollout_logprobs_diff_mean"] < 0.03 for metrics in result["steps"]
        )
    start, end = (cases.exported_weights(str(path)) for path in (directory / "model", export_to))
    for name, weight in end.items():
        if name.endswith("e_score_correction_bias"):
            assert weight.dtype == torch.float32 and not torch.equal(
                weight, weight.bfloat16().float()
            )
            moves = (weight - start[name]) / 0.01
            assert moves.abs().max() > 0.5 and (moves - moves.round()).abs().max() < 1e-4
        elif name.startswith("model.visual."):  # copied from the initial checkpoint
            assert torch.equal(weight, start[name])
        else:
            assert weight.dtype == torch.bfloat16 and not torch.equal(weight, start[name])


def test_ppo_with_experts_on_two_ranks_matches_one_rank(
    pool: Any, workspaces: dict[str, Path]
) -> None:
    """Run on one rank, then with EP 2 in training and with vLLM on TP 1 and on TP 2."""
    directory = workspaces["qwen3_moe"]
    alone = check_two_steps(pool(1), directory, tp=1, rollout_tp=1, overrides=[])[0]
    expert_parallel = ["actor.megatron.expert_model_parallel_size=2"]
    # With TP 2 the critic, which has the actor's body, holds all of its experts on each rank.
    for rollout_tp, extra in ((1, []), (2, ["critic.megatron.expert_model_parallel_size=1"])):
        for result in check_two_steps(
            pool(2), directory, tp=1, rollout_tp=rollout_tp, overrides=[*expert_parallel, *extra]
        ):
            assert result["digests"] == alone["digests"]
            for mine, wanted in zip(result["steps"], alone["steps"], strict=True):
                for key in (
                    "actor/loss",
                    "actor/grad_norm",
                    "critic/vf_loss",
                    "critic/grad_norm",
                    "actor/entropy",
                ):
                    assert mine[key] == pytest.approx(wanted[key], rel=2e-4, abs=2e-6), key


def test_aliased_experts_change_no_number(pool: Any, workspaces: dict[str, Path]) -> None:
    """Compare metrics and weights bit for bit between aliased and copied experts. With all experts
    on each rank vLLM's stacks are views of the distributed optimizer's buffer; with the experts
    over two ranks they are not."""
    stacks = {
        f"model.layers.*.block_sparse_moe.experts.routed_experts.{name}_weight"
        for name in ("w13", "w2")
    }
    directory = workspaces["mixtral"]  # all of its tensors are multiples of 128 elements
    found = []
    for shares, ep in (("true", 1), ("false", 1), ("true", 2)):
        settings = [
            f"reshard.share_weights={shares}",
            f"actor.megatron.expert_model_parallel_size={ep}",
        ]
        overrides = ["reshard.verify=always", *settings]
        results = check_two_steps(pool(2), directory, tp=1, rollout_tp=1, overrides=overrides)
        for result in results:
            if shares == "false":
                assert result["shared"] == []
            elif ep == 1:
                assert stacks <= set(result["shared"])
            else:
                assert stacks.isdisjoint(result["shared"])
        keys = ("actor/", "critic/")
        steps = [
            {k: v for k, v in step.items() if k.startswith(keys)} for step in results[0]["steps"]
        ]
        found.append(
            (steps, results[0]["digests"], cases.exported_weights(str(directory / "out_1_1_3")))
        )
    (steps, digests, weights), (steps_copied, digests_copied, weights_copied), _ = found
    assert steps == steps_copied and digests == digests_copied
    assert all(torch.equal(weights[name], weights_copied[name]) for name in weights)


def check_two_steps(
    workers: Any, directory: Path, tp: int, rollout_tp: int, overrides: list[str]
) -> list[dict[str, Any]]:
    """Run two PPO steps. Check that the weights move and that vLLM has them: its log-probs are
    Megatron's, and its parameters are bit for bit those that it loads from the exported checkpoint.
    """
    export_to = directory / f"out_{tp}_{rollout_tp}_{len(overrides)}"
    config = write_config(directory, actor={"ppo_epochs": 1})
    results = cases.run_two_steps(workers, config, (tp, 1, rollout_tp), export_to, overrides)
    for rank, result in enumerate(results):
        assert result["different"] == [], f"rank {rank}: vLLM's weights are not the exported ones"
        for metrics in result["steps"]:
            assert metrics["training/rollout_logprobs_diff_max"] < 1e-4
    start, end = (cases.exported_weights(str(path)) for path in (directory / "model", export_to))
    assert start.keys() == end.keys()
    constant = {name for name in end if name.endswith("e_score_correction_bias")}
    assert {name for name, weight in end.items() if torch.equal(start[name], weight)} == constant
    return results
