"""Every family that test_models.py and test_layouts.py do not have: Megatron's log-probs and gradients against
transformers', and two PPO steps after which vLLM holds what the exported checkpoint says."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import cases
import family_cases
import model_cases
import pytest
import torch
from model_cases import Job
from test_models import Reference
from tiny import make_workspace, write_config

from rlhf_mc.data.batch import RaggedBatch

pytestmark = pytest.mark.dist

DENSE: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "tied": False},
    "mistral": {"family": "mistral", "tied": False},
    "gemma": {"family": "gemma", "tied": True},
}
EXPERTS = {
    "qwen3_moe": {"family": "qwen3_moe", "tied": False},
    # The weights of a token's experts as the softmax over all experts gives them.
    "qwen3_moe_plain": {"family": "qwen3_moe", "tied": True, "norm_topk_prob": False},
}
PROMPT_LENS = (3, 9, 4, 4)
RESPONSE_LENS = (6, 1, 11, 5)


@pytest.fixture(scope="session")
def workspaces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run's files for every family."""
    root = tmp_path_factory.mktemp("more_families")
    found = {
        name: make_workspace(root / name, **extra, num_hidden_layers=2) for name, extra in (DENSE | EXPERTS).items()
    }
    # Mistral's own files beside the others, as it publishes them; what they say here would be another model.
    (found["mistral"] / "model" / "params.json").write_text(json.dumps({"dim": 64, "n_layers": 1, "head_dim": 64}))
    (found["mistral"] / "model" / "consolidated.safetensors").write_bytes(b"")
    return found


@pytest.fixture(scope="session")
def family_batch(workspaces: dict[str, Path]) -> RaggedBatch:
    """Random tokens, and random numbers for all that the actor's loss reads."""
    draw = torch.Generator().manual_seed(5)
    prompt_lens = torch.tensor(PROMPT_LENS)
    response_lens = torch.tensor(RESPONSE_LENS)
    vocab = json.loads((workspaces["qwen3"] / "model" / "config.json").read_text())["vocab_size"]
    total = int((prompt_lens + response_lens).sum())
    responses = int(response_lens.sum())
    empty = RaggedBatch(
        tokens=torch.randint(vocab, (total,), generator=draw),
        prompt_lens=prompt_lens,
        response_lens=response_lens,
        rollout_log_probs=torch.zeros(responses),
        finished=torch.ones(len(prompt_lens), dtype=torch.bool),
    )
    log_probs = transformers_model(str(workspaces["qwen3"] / "model")).log_probs(empty)[0].detach()
    noise = torch.randn(3, responses, generator=draw)
    return empty.with_fields(
        old_log_probs=log_probs + 0.3 * noise[0], ref_log_probs=log_probs + 0.3 * noise[1], advantages=noise[2]
    )


@cache
def transformers_model(checkpoint: str) -> Reference:
    return Reference(checkpoint)


@pytest.mark.parametrize(("world", "tp", "pp"), [(1, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_log_probs_and_gradients_are_those_of_transformers(
    pool: Any, workspaces: dict[str, Path], family_batch: RaggedBatch, world: int, tp: int, pp: int
) -> None:
    check_against_transformers(pool(world), {n: workspaces[n] for n in DENSE}, family_batch, tp=tp, pp=pp)


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_more_ranks_than_kv_heads(
    pool: Any, workspaces: dict[str, Path], family_batch: RaggedBatch, world: int, sequence_parallel: bool
) -> None:
    """Two KV heads on four ranks, with norms of heads, and norms around zero; experts need split sequences."""
    names = ["qwen3", "gemma", *(["qwen3_moe"] if sequence_parallel else [])]
    directories = {name: workspaces[name] for name in names}
    check_against_transformers(pool(world), directories, family_batch, tp=4, pp=1, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize(("world", "pp", "ep"), [(1, 1, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1)])
def test_experts_are_those_of_transformers_on_however_many_ranks(
    pool: Any, workspaces: dict[str, Path], family_batch: RaggedBatch, world: int, pp: int, ep: int
) -> None:
    check_against_transformers(pool(world), {n: workspaces[n] for n in EXPERTS}, family_batch, tp=1, pp=pp, ep=ep)


@pytest.mark.parametrize(("world", "tp", "ep"), [(2, 2, 1), (4, 2, 2)])
def test_experts_split_over_tensor_parallel_ranks_are_those_of_transformers(
    pool: Any, workspaces: dict[str, Path], family_batch: RaggedBatch, world: int, tp: int, ep: int
) -> None:
    directories = {n: workspaces[n] for n in EXPERTS}
    check_against_transformers(pool(world), directories, family_batch, tp=tp, pp=1, ep=ep, sequence_parallel=True)


@pytest.mark.parametrize(("world", "family"), [(2, "qwen3"), (2, "gemma")])
def test_norms_of_split_sequences_have_their_whole_gradient(
    pool: Any, workspaces: dict[str, Path], family_batch: RaggedBatch, world: int, family: str
) -> None:
    """Norms of heads and norms around zero, of which each rank sees its part of the tokens."""
    directories = {family: workspaces[family]}
    check_against_transformers(pool(world), directories, family_batch, tp=2, pp=1, sequence_parallel=True)


def test_a_rank_without_sequences_serves_its_experts(
    pool: Any, workspaces: dict[str, Path], family_batch: RaggedBatch
) -> None:
    only_one = family_batch.select((2,))
    check_against_transformers(pool(2), {"qwen3_moe": workspaces["qwen3_moe"]}, only_one, tp=1, pp=1, ep=2)


def check_against_transformers(workers: Any, directories: dict[str, Path], batch: RaggedBatch, **layout: int) -> None:
    """Log-probs and gradients of each model are, on every rank, those of transformers and autograd."""
    checkpoints = {name: str(directory / "model") for name, directory in directories.items()}
    scores = workers.run(
        model_cases.log_probs, checkpoints=list(checkpoints.values()), budget=24, batch=batch, **layout
    )
    every = tuple(range(batch.num_sequences))
    jobs = {name: Job(checkpoint, "actor", "token-mean", 24, every) for name, checkpoint in checkpoints.items()}
    gradients = workers.run(model_cases.gradients, jobs=list(jobs.values()), batch=batch, **layout)
    for name, checkpoint in checkpoints.items():
        wanted, wanted_grads = of_transformers(checkpoint, batch, jobs[name])
        for rank, (score, gradient) in enumerate(zip(scores, gradients, strict=True)):
            error = float((score[checkpoint][0] - wanted).abs().max())
            assert error < 1e-5, f"{name}, rank {rank}: log-probs off by {error:.1e}"
            grads = gradient[jobs[name]][1]
            assert grads.keys() == wanted_grads.keys()
            for tensor, want in wanted_grads.items():
                # An expert that no token has chosen has no gradient.
                error = float((grads[tensor] - want).abs().max() / want.abs().max().clamp_min(1e-12))
                assert error < 1e-4, f"{name}, rank {rank}, {tensor}: gradient off by {error:.1e} of the largest"


def of_transformers(checkpoint: str, batch: RaggedBatch, job: Job) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(log-probs, gradients by the names of the checkpoint)."""
    reference = transformers_model(checkpoint)
    with torch.no_grad():
        log_probs = reference.log_probs(batch)[0]
    grads = {}
    for name, grad in reference.gradients(batch, job)[1].items():
        # In memory transformers keeps the experts of a layer in two tensors, gate and up in one.
        prefix, is_expert, part = name.partition("experts.")
        for number, of_expert in enumerate(grad) if is_expert else ():
            halves = of_expert.chunk(2) if part == "gate_up_proj" else [of_expert]
            for what, half in zip(("gate", "up") if part == "gate_up_proj" else ("down",), halves, strict=True):
                grads[f"{prefix}experts.{number}.{what}_proj.weight"] = half
        if not is_expert:
            grads[name] = grad
    return log_probs, grads


@pytest.mark.parametrize(("world", "ep", "other_ep"), [(2, 2, 1), (2, 1, 2)])
def test_a_checkpoint_of_experts_loads_on_another_number_of_ranks(
    pool: Any, workspaces: dict[str, Path], tmp_path: Path, world: int, ep: int, other_ep: int
) -> None:
    checkpoint = str(workspaces["qwen3_moe"] / "model")
    different = pool(world).run(
        family_cases.saved_and_loaded,
        checkpoint=checkpoint,
        directory=str(tmp_path / "mcore"),
        ep=ep,
        other_ep=other_ep,
    )
    assert different == [[]] * world


YARN = {"factor": 8.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 50.0},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "yarn": {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 4, "attention_factor": 1.7}, "rope_theta": 1e6},
    "llama3": {"rope_scaling": {"type": "llama3", **YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
}
"""As earlier versions of transformers wrote them; the newer spelling is read as the same in tests/unit."""


def test_a_rope_is_that_of_transformers_and_of_vllm(pool: Any, tmp_path: Path) -> None:
    """Each way to write one: vLLM, the trainer and transformers give the same log-probs, and not those of another."""
    directory = make_workspace(tmp_path / "llama", family="llama", num_hidden_layers=1)
    config = json.loads((directory / "model" / "config.json").read_text())
    del config["rope_parameters"]
    models = []
    for name, keys in ROPES.items():
        models.append(shutil.copytree(directory / "model", tmp_path / name))
        (models[-1] / "config.json").write_text(json.dumps(config | keys))
    (batches,) = pool(1).run(
        family_cases.sampled_and_scored, config_path=str(write_config(directory)), models=[str(m) for m in models]
    )
    plain = Reference(str(directory / "model"))
    for name, model, batch in zip(ROPES, models, batches, strict=True):
        with torch.no_grad():
            wanted = Reference(str(model)).log_probs(batch)[0]
            without = plain.log_probs(batch)[0]
        for engine, found in (("vLLM", batch.rollout_log_probs), ("the trainer", batch.old_log_probs)):
            error = float((found - wanted).abs().max())
            assert error < 2e-5, f"{name}: log-probs of {engine} are off by {error:.1e}"
        # "dynamic" is plain as long as a sequence has no more tokens than max_position_embeddings.
        assert (float((without - wanted).abs().max()) > 1e-2) == (name != "dynamic"), name


# Training TP 2 and rollout TP 1 gather every split tensor; the other way round, every tensor is cut.
@pytest.mark.parametrize(
    ("world", "family", "tp", "rollout_tp"),
    [(2, "qwen3", 2, 1), (2, "mistral", 2, 1), (2, "gemma", 2, 1), (2, "gemma", 1, 2)],
)
def test_vllm_generates_with_what_megatron_trained(
    pool: Any, workspaces: dict[str, Path], world: int, family: str, tp: int, rollout_tp: int
) -> None:
    directory = workspaces[family]
    check_two_steps(pool(world), directory, tp=tp, rollout_tp=rollout_tp, overrides=[])


def test_ppo_of_experts_is_the_same_on_one_rank_and_spread_over_two(pool: Any, workspaces: dict[str, Path]) -> None:
    """One process; then experts spread over two ranks in training, generated from whole, and split inside vLLM."""
    directory = workspaces["qwen3_moe"]
    alone = check_two_steps(pool(1), directory, tp=1, rollout_tp=1, overrides=[])[0]
    spread = ["actor.megatron.expert_model_parallel_size=2"]
    # The second time the critic, which has the actor's body, holds all of its experts on each rank.
    for rollout_tp, more in ((1, []), (2, ["critic.megatron.expert_model_parallel_size=1"])):
        for result in check_two_steps(pool(2), directory, tp=1, rollout_tp=rollout_tp, overrides=[*spread, *more]):
            assert result["digests"] == alone["digests"]
            for mine, wanted in zip(result["steps"], alone["steps"], strict=True):
                for key in ("actor/loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "actor/entropy"):
                    assert mine[key] == pytest.approx(wanted[key], rel=2e-4, abs=2e-6), key


def check_two_steps(
    workers: Any, directory: Path, tp: int, rollout_tp: int, overrides: list[str]
) -> list[dict[str, Any]]:
    """Two PPO steps move the weights, and vLLM has them: its log-probs are Megatron's, its parameters bit for bit what
    its own loader makes of the exported checkpoint."""
    export_to = directory / f"out_{tp}_{rollout_tp}_{len(overrides)}"
    config = write_config(directory)
    results = cases.run_two_steps(workers, config, (tp, 1, rollout_tp), export_to, overrides)
    for rank, result in enumerate(results):
        assert result["different"] == [], f"rank {rank}: vLLM's weights are not the exported ones"
        for metrics in result["steps"]:
            assert metrics["training/rollout_logprobs_diff_max"] < 1e-4
    start, end = (cases.exported_weights(str(path)) for path in (directory / "model", export_to))
    assert start.keys() == end.keys()
    assert all(not torch.equal(start[name], weight) for name, weight in end.items())
    return results
