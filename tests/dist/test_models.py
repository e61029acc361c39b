"""Megatron's models in every layout against transformers' on one process: log-probs, entropies, and
gradients of PPO's losses, for any split of the batch and the model. Whole PPO steps:
test_layouts.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import model_cases
import numpy as np
import pytest
import torch
from gpu_parts.engines import Job, token_batch
from gpu_parts.reference import Reference
from tiny import make_checkpoint

from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import OBSERVED as OBSERVED_TOKEN
from rlhf_mc.data.batch import Generation, Prompt, RaggedBatch, Responses, build_batch

pytestmark = pytest.mark.dist

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Shorter than the test's sequences, so that the scaled frequencies matter.
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_tied": {"family": "qwen2", "tied": True},
    "qwen2_untied": {"family": "qwen2", "tied": False},
    "llama_untied": {"family": "llama", "tied": False},
    "llama_rope3": {"family": "llama", "tied": True, "rope_parameters": LLAMA3},
    "qwen2_one_kv_head": {"family": "qwen2", "tied": True, "num_kv_heads": 1},
    "llama_biases": {"family": "llama", "tied": False, "attention_bias": True, "mlp_bias": True},
}
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
PROMPT_LENS = (3, 9, 5, 4, 4, 14, 2)
RESPONSE_LENS = (6, 1, 11, 5, 5, 16, 8)
OBSERVED = {2: (2, 3, 4, 7), 5: (0, 8, 9), 6: (7,)}
"""Places of observations in the responses, by sequence: within one, at its beginning and at its
end."""
ALL = tuple(range(len(PROMPT_LENS)))
BIG = 10_000
SMALL = 32
"""Token budgets: all sequences in one micro-batch, and no two long ones together (the longest has
30 tokens)."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("families")
    return {name: str(make_checkpoint(root / name, **extra)) for name, extra in FAMILIES.items()}


@pytest.fixture(scope="session")
def batch(checkpoints: dict[str, str]) -> RaggedBatch:
    """Return a batch of random tokens, some of them observations, with inputs of the losses such
    that only some tokens are clipped."""
    return with_loss_inputs(
        checkpoints["qwen2_tied"], PROMPT_LENS, RESPONSE_LENS, observed=OBSERVED
    )


@pytest.fixture(scope="session")
def odd_batch(checkpoints: dict[str, str]) -> RaggedBatch:
    """Return sequences of fewer than 2 x 4 tokens, of one token more than a multiple, and a long
    one among them."""
    prompt_lens = (1, 1, 2, 1, 3, 60)
    response_lens = (1, 2, 1, 16, 13, 61)
    # Of this seed no token is the padding token, whose embedding has no gradient in transformers.
    return with_loss_inputs(checkpoints["qwen2_tied"], prompt_lens, response_lens, seed=0)


def with_loss_inputs(
    checkpoint: str,
    prompt_lens: Sequence[int],
    response_lens: Sequence[int],
    seed: int = 5,
    observed: Mapping[int, Sequence[int]] | None = None,
) -> RaggedBatch:
    """observed: places of observations in responses, by sequence."""
    draw = torch.Generator().manual_seed(6)
    vocab = json.loads((Path(checkpoint) / "config.json").read_text())["vocab_size"]
    empty = token_batch(vocab, prompt_lens, response_lens, seed)
    if observed is not None:
        prompts = [Prompt(0, np.zeros(length, np.int32), "", None) for length in prompt_lens]
        marks = [
            Generation(
                [0] * n,
                [OBSERVED_TOKEN if i in observed.get(row, ()) else 0.0 for i in range(n)],
                True,
            )
            for row, n in enumerate(response_lens)
        ]
        empty = replace(build_batch(prompts, Responses.of(marks)), tokens=empty.tokens)
    responses = int(empty.response_lens.sum())
    log_probs = transformers_model(checkpoint).log_probs(empty)[0].detach()

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(responses, generator=draw)

    return empty.with_fields(
        old_log_probs=log_probs + noise(0.3),
        ref_log_probs=log_probs + noise(0.3),
        advantages=noise(1.0),
        values=noise(1.0),
        returns=noise(1.0),
    )


@cache
def transformers_model(checkpoint: str) -> Reference:
    return Reference(checkpoint)


@pytest.mark.parametrize(
    ("world", "tp", "pp", "settings"),
    [
        (1, 1, 1, {}),
        (4, 2, 2, {}),
        (2, 2, 1, {"sequence_parallel": True}),
        (2, 1, 2, {"vpp": 2}),
        (4, 1, 1, {"cp": 4}),
        (4, 1, 2, {"cp": 2}),
        (4, 2, 1, {"cp": 2, "sequence_parallel": True}),
        (4, 1, 1, {"cp": 4, "dynamic_cp": True}),
    ],
)
def test_log_probs_and_entropy_match_transformers(
    pool: Any,
    checkpoints: dict[str, str],
    batch: RaggedBatch,
    world: int,
    tp: int,
    pp: int,
    settings: dict[str, Any],
) -> None:
    results = pool(world).run(
        model_cases.log_probs,
        checkpoints=list(checkpoints.values()),
        tp=tp,
        pp=pp,
        batch=batch,
        budget=48,
        **settings,
    )
    for family, checkpoint in checkpoints.items():
        with torch.no_grad():
            wanted = transformers_model(checkpoint).log_probs(batch)
        for rank, result in enumerate(results):
            for name, got, want in zip(
                ("log-prob", "entropy"), result[checkpoint], wanted, strict=True
            ):
                torch.testing.assert_close(
                    got,
                    want,
                    rtol=0,
                    atol=1e-5,
                    msg=lambda m, n=name, f=family, r=rank: f"{f}, rank {r}, {n}: {m}",
                )


def gradient_jobs(checkpoints: dict[str, str], modes: Sequence[str]) -> list[Job]:
    """Return jobs of both losses in these aggregation modes on one family, in one of them with one
    micro-batch too, and single jobs on others."""
    budgets = [*((mode, SMALL) for mode in modes), (modes[0], BIG)]
    jobs = [
        Job(checkpoints["qwen2_tied"], role, *budget, ALL)
        for role in ("actor", "critic")
        for budget in budgets
    ]
    others = [
        ("qwen2_one_kv_head", "actor"),
        ("llama_biases", "actor"),
        ("qwen2_untied", "actor"),
        ("qwen2_untied", "critic"),
    ]
    return jobs + [Job(checkpoints[f], role, "token-mean", SMALL, ALL) for f, role in others]


_wanted: dict[tuple[int, Job], tuple[RaggedBatch, Any]] = {}


def transformers_gradients(batch: RaggedBatch, job: Job) -> Any:
    """Return the statistics and gradients of transformers' model, of each batch and job once."""
    key = (id(batch), job)
    if key not in _wanted:
        # the batch keeps its id
        _wanted[key] = (batch, transformers_model(job.checkpoint).gradients(batch, job))
    return _wanted[key][1]


def assert_gradients(results: list[dict[Job, Any]], batch: RaggedBatch) -> None:
    """Compare every job on every rank with transformers and autograd on the mini-batch as a
    whole."""
    for job in results[0]:
        stats, grads = transformers_gradients(batch, job)
        for rank, result in enumerate(results):
            got_stats, got = result[job]
            assert got_stats.pop("computed_tokens") >= 1.0, "random prompts are not shared"
            assert got_stats == pytest.approx(stats, rel=1e-4, abs=1e-5), f"rank {rank}, {job}"
            assert got.keys() == grads.keys()
            for name, want in grads.items():
                # Rounding errors are relative to a tensor's largest gradient, not to each element.
                error = float((got[name] - want).abs().max() / want.abs().max())
                assert error < 1e-4, (
                    f"rank {rank}, {job}, {name}: off by {error:.1e} of the largest"
                )


# Each pair of axes. One axis alone: the tests of engine settings and of replicas without sequences
# below.
@pytest.mark.parametrize(
    ("world", "tp", "pp", "cp"),
    [(1, 1, 1, 1), (4, 2, 2, 1), (4, 2, 1, 2), (4, 1, 2, 2), (4, 1, 1, 4)],
)
def test_gradient_does_not_depend_on_layout_or_micro_batches(
    pool: Any,
    checkpoints: dict[str, str],
    batch: RaggedBatch,
    world: int,
    tp: int,
    pp: int,
    cp: int,
) -> None:
    # Only context parallelism splits a sequence, by whose length some modes divide.
    jobs = gradient_jobs(checkpoints, MODES if world == 1 or cp == 4 else MODES[:1])
    assert_gradients(
        pool(world).run(model_cases.gradients, jobs=jobs, tp=tp, pp=pp, cp=cp, batch=batch), batch
    )


@pytest.mark.parametrize(
    ("world", "cp", "settings"),
    [
        (4, 2, {}),
        (4, 4, {}),
        (4, 4, {"dynamic_cp": True}),
        (4, 2, {"dynamic_cp": True, "pp": 2, "vpp": 2, "recompute_granularity": "full"}),
        (4, 2, {"dynamic_cp": True, "tp": 2, "sequence_parallel": True}),
    ],
)
def test_context_parallel_ranks_share_sequences_of_any_length(
    pool: Any,
    checkpoints: dict[str, str],
    odd_batch: RaggedBatch,
    world: int,
    cp: int,
    settings: dict[str, Any],
) -> None:
    every = (0, 1, 2, 3, 4, 5)
    jobs = [
        Job(checkpoints["qwen2_untied"], role, "seq-mean-token-mean", budget, sequences)
        for role, budget, sequences in (
            ("actor", BIG, every),
            ("actor", 128, every),
            ("actor", BIG, (2,)),
            ("actor", BIG, (0, 1)),
            ("critic", BIG, every),
        )
    ]
    layout = {"tp": 1, "pp": 1, "cp": cp, **settings}
    assert_gradients(
        pool(world).run(model_cases.gradients, jobs=jobs, batch=odd_batch, **layout), odd_batch
    )


SETTINGS: dict[str, dict[str, Any]] = {
    # The padded vocabulary has 320 tokens: chunks of 3 tokens on one rank, of 6 on two.
    "chunks of logits": {"chunk_logits": 960},
    "sequence parallel, full recomputation": {
        "sequence_parallel": True,
        "recompute_granularity": "full",
    },
    "virtual pipeline, full recomputation": {"vpp": 2, "recompute_granularity": "full"},
    "virtual pipeline, sequence parallel": {"vpp": 2, "sequence_parallel": True},
    "context parallel, selective recomputation": {"cp": 2, "recompute_granularity": "selective"},
    "context parallel, sequence parallel": {"cp": 2, "sequence_parallel": True},
    "context parallel, virtual pipeline": {"cp": 2, "vpp": 2, "recompute_granularity": "full"},
}
"""Settings that must not change a gradient."""


@pytest.mark.parametrize(
    ("world", "tp", "pp", "name"),
    [
        (1, 1, 1, "chunks of logits"),
        (2, 2, 1, "chunks of logits"),
        (2, 2, 1, "sequence parallel, full recomputation"),
        (2, 1, 2, "virtual pipeline, full recomputation"),
        (4, 2, 2, "virtual pipeline, sequence parallel"),
        (2, 1, 1, "context parallel, selective recomputation"),
        (4, 2, 1, "context parallel, sequence parallel"),
        (4, 1, 2, "context parallel, virtual pipeline"),
    ],
)
def test_gradient_does_not_depend_on_engine_settings(
    pool: Any,
    checkpoints: dict[str, str],
    batch: RaggedBatch,
    world: int,
    tp: int,
    pp: int,
    name: str,
) -> None:
    jobs = [
        Job(checkpoints["qwen2_tied"], role, "token-mean", SMALL, ALL)
        for role in ("actor", "critic")
    ]
    jobs += [Job(checkpoints["llama_biases"], "actor", "seq-mean-token-mean", SMALL, ALL)]
    settings = SETTINGS[name]
    assert_gradients(
        pool(world).run(model_cases.gradients, jobs=jobs, tp=tp, pp=pp, batch=batch, **settings),
        batch,
    )


@pytest.mark.parametrize("world", [4])
def test_stages_agree_on_the_shapes_of_their_messages(
    pool: Any, batch: RaggedBatch, tmp_path: Path, world: int
) -> None:
    """Run 4 stages of 2 virtual chunks on 7 micro-batches of different lengths, and a dummy."""
    checkpoint = str(make_checkpoint(tmp_path, num_hidden_layers=8))
    of_16_tokens = 6 * (2,)
    jobs = [Job(checkpoint, "actor", "token-mean", 30, (5, *of_16_tokens, 1))]
    assert_gradients(
        pool(world).run(model_cases.gradients, jobs=jobs, tp=1, pp=4, vpp=2, batch=batch), batch
    )


@pytest.mark.parametrize("world", [1])
def test_recomputation_is_bit_exact_and_saves_memory(
    pool: Any, checkpoints: dict[str, str], batch: RaggedBatch, world: int
) -> None:
    checkpoint = checkpoints["qwen2_tied"]
    saved = {}
    grads = {}
    for granularity in (None, "selective", "full"):
        [(saved[granularity], grads[granularity])] = pool(world).run(
            model_cases.saved_activations,
            checkpoint=checkpoint,
            batch=batch,
            recompute_granularity=granularity,
        )
    for granularity in ("selective", "full"):
        for name, grad in grads[None].items():
            assert torch.equal(grads[granularity][name], grad), f"{granularity}, {name}"
    assert saved["selective"] < saved[None]
    # Only the input of each of the 4 layers is saved.
    assert saved["full"] < 0.25 * saved[None]


@pytest.mark.parametrize(("world", "cp"), [(2, 2), (4, 4)])
def test_a_context_parallel_rank_saves_its_share_of_activations(
    pool: Any, checkpoints: dict[str, str], world: int, cp: int
) -> None:
    checkpoint = checkpoints["qwen2_tied"]
    batch = with_loss_inputs(checkpoint, (40, 1), (200, 39))
    saved = {
        size: [
            most
            for most, _ in pool(ranks).run(
                model_cases.saved_activations, checkpoint=checkpoint, batch=batch, **layout
            )
        ]
        for size, ranks, layout in (
            (1, 1, {"recompute_granularity": "selective"}),
            (cp, world, {"cp": cp}),
        )
    }
    assert max(saved[cp]) < 1.02 * saved[1][0] / cp


def test_recomputation_of_the_mlp_is_bit_exact_and_saves_memory(
    pool: Any, checkpoints: dict[str, str], batch: RaggedBatch
) -> None:
    """Recompute on local layers what selective recomputation recomputes with Transformer Engine."""
    checkpoint = checkpoints["qwen2_tied"]
    [(most, wanted)] = pool(1).run(
        model_cases.saved_activations, checkpoint=checkpoint, batch=batch
    )
    [(saved, grads)] = pool(1).run(
        model_cases.saved_activations_of, modules=["mlp"], checkpoint=checkpoint, batch=batch
    )
    assert saved < most
    assert all(torch.equal(grads[name], grad) for name, grad in wanted.items())


@pytest.mark.parametrize(
    ("world", "tp", "pp", "cp", "sequences"),
    [
        (4, 1, 1, 1, (5, 1)),
        (4, 1, 2, 1, (2,)),
        (4, 2, 1, 2, (1,)),
    ],
)
def test_replica_without_sequences_changes_no_gradient(
    pool: Any,
    checkpoints: dict[str, str],
    batch: RaggedBatch,
    world: int,
    tp: int,
    pp: int,
    cp: int,
    sequences: tuple[int, ...],
) -> None:
    tied = checkpoints["qwen2_tied"]
    untied = checkpoints["qwen2_untied"]
    roles = ((tied, "actor"), (untied, "actor"), (tied, "critic"))
    jobs = [Job(checkpoint, role, "token-mean", BIG, sequences) for checkpoint, role in roles]
    assert_gradients(
        pool(world).run(model_cases.gradients, jobs=jobs, tp=tp, pp=pp, cp=cp, batch=batch), batch
    )


def test_batch_has_clipped_tokens(checkpoints: dict[str, str], batch: RaggedBatch) -> None:
    """Guard the gradients above, which must not be those of a surrogate without clipping."""
    tied = checkpoints["qwen2_tied"]
    stats, _ = transformers_model(tied).gradients(batch, Job(tied, "actor", "token-mean", BIG, ALL))
    assert 0.1 < stats["pg_clipfrac"] < 0.9
    assert stats["kl_loss"] > 0.01
    stats, _ = transformers_model(tied).gradients(
        batch, Job(tied, "critic", "token-mean", BIG, ALL)
    )
    assert 0.1 < stats["vf_clipfrac"] < 0.9


@pytest.mark.parametrize(
    ("world", "tp", "pp", "family", "cp"),
    [
        (4, 1, 2, "qwen2_untied", 1),
        (4, 1, 1, "qwen2_untied", 2),
        (4, 2, 1, "qwen2_one_kv_head", 2),
    ],
)
def test_distributed_optimizer_takes_the_same_steps(
    pool: Any,
    checkpoints: dict[str, str],
    batch: RaggedBatch,
    world: int,
    tp: int,
    pp: int,
    family: str,
    cp: int,
) -> None:
    checkpoint = checkpoints[family]
    optim = OptimConfig(lr=1e-2, eps=1e-3, clip_grad=0.5, weight_decay=0.1)
    results = {
        distributed: pool(world).run(
            model_cases.weights_after_steps,
            checkpoint=checkpoint,
            tp=tp,
            pp=pp,
            cp=cp,
            batch=batch,
            distributed_optimizer=distributed,
            optim=optim,
            steps=2,
        )
        for distributed in (False, True)
    }
    norm, wanted = results[False][0]
    assert norm > optim.clip_grad, "clipping must take effect"
    start = transformers_model(checkpoint).model.state_dict()
    for name, want in wanted.items():
        assert float((want - start[name]).abs().max()) > 1e-3, f"{name} has not moved"
        for distributed, ranks in results.items():
            for rank, (_, weights) in enumerate(ranks):
                torch.testing.assert_close(
                    weights[name],
                    want,
                    rtol=0,
                    atol=1e-5,
                    msg=lambda m, r=rank, d=distributed, n=name: (
                        f"rank {r}, distributed {d}, {n}: {m}"
                    ),
                )


@pytest.mark.parametrize(("world", "tp", "pp"), [(2, 1, 1), (4, 2, 2)])
def test_first_ratio_is_one(
    pool: Any, checkpoints: dict[str, str], batch: RaggedBatch, world: int, tp: int, pp: int
) -> None:
    results = pool(world).run(
        model_cases.first_update, checkpoint=checkpoints["qwen2_tied"], tp=tp, pp=pp, batch=batch
    )
    for metrics in results:
        assert abs(metrics["actor/ppo_kl"]) < 1e-6
        assert metrics["actor/kl_loss"] < 1e-11  # log-ratios of less than 5e-6
        assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0
        assert metrics["actor/pg_loss"] == pytest.approx(-float(batch.advantages.mean()), abs=1e-5)


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {"use_distributed_optimizer": False}),
        (2, {"use_distributed_optimizer": True, "dtype": "bfloat16"}),
    ],
)
def test_nonfinite_update_on_one_rank_is_skipped_on_all(
    pool: Any,
    checkpoints: dict[str, str],
    batch: RaggedBatch,
    tmp_path: Path,
    world: int,
    settings: dict[str, Any],
) -> None:
    bad = (False, True, True, False, True, True, True)
    ranks = pool(world).run(
        model_cases.updates_with_bad_losses,
        checkpoint=checkpoints["qwen2_tied"],
        batch=batch.with_fields(scores=torch.arange(float(batch.num_sequences))),
        bad=bad,
        limit=3,
        directory=str(tmp_path / "run"),
        **settings,
    )
    for results in ranks:
        for step, (is_bad, result) in enumerate(zip(bad, results, strict=True)):
            if not is_bad:
                assert result["metrics"]["actor/skipped"] == 0
                assert result["metrics"]["actor/grad_norm"] > 0
                assert len(result["changed"]) > 10
                continue
            assert result["changed"] == []
            if step < 6:  # a finite update resets the count
                assert result["metrics"] == {"actor/skipped": 1.0}
    errors = {results[6]["error"] for results in ranks}
    assert len(errors) == 1
    message = errors.pop()
    assert "actor: loss or gradient not finite in 3 consecutive updates" in message
    assert "weights and batch are finite" in message
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        f"nonfinite_step_{step}.json" for step, is_bad in enumerate(bad) if is_bad
    ]
    [sample] = json.loads((tmp_path / "run" / "nonfinite_step_1.json").read_text())
    assert sample["model"] == "actor"
    assert [s["token_ids"] for s in sample["sequences"]] == [
        seq.tolist() for seq in batch.tokens.split(batch.seq_lens.tolist())
    ]
    assert [s["prompt_length"] for s in sample["sequences"]] == list(PROMPT_LENS)
    assert [s["reward"] for s in sample["sequences"]] == list(range(batch.num_sequences))
    assert torch.equal(
        torch.tensor([a for s in sample["sequences"] for a in s["advantages"]]), batch.advantages
    )


@pytest.mark.parametrize(("world", "distributed_optimizer"), [(1, False), (1, True), (2, True)])
def test_bfloat16_weights_accumulate_updates_below_their_precision(
    pool: Any,
    checkpoints: dict[str, str],
    batch: RaggedBatch,
    world: int,
    distributed_optimizer: bool,
) -> None:
    results = pool(world).run(
        model_cases.bfloat16_steps,
        checkpoint=checkpoints["qwen2_untied"],
        batch=batch,
        distributed_optimizer=distributed_optimizer,
        steps=10,
    )
    for result in results:
        assert result["weights"] == {"torch.bfloat16"}
        assert result["main"] == result["grads"] == result["moments"] == {"torch.float32"}
        # 4e-5 is less than half the spacing of bfloat16 at 0.02; 10 * 4e-5 exceeds half the spacing
        # at 0.1.
        assert result["moved_first"] == 0
        assert result["moved_last"] > 0.3
