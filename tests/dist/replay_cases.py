"""Functions that the ranks run in test_router_replay.py. Each is called on every rank with the same
arguments."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cases import built_run
from families import traits
from gpu_parts.engines import (
    TEMPERATURE,
    logical_tensors,
    make_engine,
    mesh_groups,
    my_micro_batches,
    objective,
)
from megatron.core.transformer.moe.router import TopKRouter

from rlhf_mc.config.schema import ActorConfig, OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.expert_parts import RouterBalance
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.heads import log_prob_head
from rlhf_mc.models.router_replay import ExpertReplay
from rlhf_mc.patching import replaced
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.topology.consensus import sum_over_ranks
from rlhf_mc.topology.groups import ProcessGroups
from rlhf_mc.trainer import loop, step_state

BUDGET = 24
BALANCE = ActorConfig(
    moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.02, moe_router_bias_update_rate=0.01
)
Results = tuple[Any, ...]
"""Log-probs [R], gradients by the checkpoint's names (arrays: each tensor would be sent as an open
file), the share of choices that the routers would not have made; of given ones also the share of a
prompt's that differ between its responses."""


def replaying_engine(
    checkpoint: str, groups: ProcessGroups, mode: str, **megatron: Any
) -> ModelEngine:
    """Return a trainable actor that replays."""
    engine = make_engine(checkpoint, "actor", groups, **megatron)
    engine.make_trainable(OptimConfig(), total_steps=1)
    engine.replay = ExpertReplay(mode, engine.shape, groups, engine.chunks)  # type: ignore[arg-type]
    return engine


def _gradients(engine: ModelEngine, batch: RaggedBatch) -> dict[str, np.ndarray]:
    engine.backward(
        batch, my_micro_batches(engine, batch, BUDGET), objective(engine, batch, "token-mean")
    )
    grads = {
        name: param.main_grad
        for name, param in engine.named_parameters().items()
        if param.requires_grad
    }
    return {name: grad.numpy() for name, grad in logical_tensors(engine, grads).items()}


def _log_probs(engine: ModelEngine, batch: RaggedBatch) -> torch.Tensor:
    return engine.score(
        batch,
        my_micro_batches(engine, batch, BUDGET),
        log_prob_head(engine.shape.vocab_size, TEMPERATURE),
    )


Recorded = tuple[Results, Results]
"""Results of a pass that records the choices and an update that replays them, and the same where
the routers are reversed between the two."""
Replayed = tuple[Results, dict[str, float], dict[int, np.ndarray]]
"""Results with given choices and with BALANCE, the losses of the routers, and the correction biases
after a step, by layer."""


def record_and_replay(
    checkpoints: Mapping[str, str],
    choices: Mapping[str, Sequence[np.ndarray]],
    batch: RaggedBatch,
    layout: Sequence[int],
    dynamic_cp: bool = False,
    **megatron: Any,
) -> dict[str, tuple[Recorded, Replayed]]:
    """Return the results of each checkpoint. choices: those of each sequence that are replayed,
    which some rank holds. layout: TP, PP, EP, VPP, CP."""
    out = {}
    with mesh_groups(*layout, dynamic_cp=dynamic_cp) as groups:
        for name, checkpoint in checkpoints.items():
            engine = replaying_engine(checkpoint, groups, "recompute", **megatron)
            recorded = _recorded(engine, batch)
            engine.replay = ExpertReplay("rollout", engine.shape, groups, engine.chunks)
            out[name] = recorded, _replayed(engine, batch, choices[name])
    return out


def _recorded(engine: ModelEngine, batch: RaggedBatch) -> Recorded:
    """Reverse the routers twice: the engine then has its weights again."""
    assert engine.replay is not None
    results = []
    log_probs = _log_probs(engine, batch)
    for _ in range(2):
        results.append((log_probs, _gradients(engine, batch), engine.replay.differing_shares()[0]))
        for name, param in engine.params.items():
            if name.endswith("router.weight"):
                param.neg_()
    return results[0], results[1]


def _replayed(engine: ModelEngine, batch: RaggedBatch, choices: Sequence[np.ndarray]) -> Replayed:
    assert engine.replay is not None and batch.numbers is not None
    groups = engine.groups
    for i, (number, of_sequence) in enumerate(zip(batch.numbers.tolist(), choices, strict=True)):
        if (5 * i + 1) % groups.mesh.world == groups.rank:
            engine.replay.stored[number] = of_sequence
    rate = BALANCE.moe_router_bias_update_rate if traits(engine.shape).sigmoid_router else 0.0
    settings = replace(BALANCE, moe_router_bias_update_rate=rate)
    engine.balance = RouterBalance(settings, engine.shape, groups, engine.chunks)
    log_probs = _log_probs(engine, batch)
    differing, _, of_prompts = engine.replay.differing_shares()
    results = log_probs, _gradients(engine, batch), differing, of_prompts
    engine.balance.step()
    modules = itertools.chain(*(chunk.modules() for chunk in engine.chunks))
    routers = [module for module in modules if isinstance(module, TopKRouter)]
    biases = {
        r.layer_number - 1: r.expert_bias.numpy() for r in routers if r.expert_bias is not None
    }
    return results, engine.balance.losses(), biases


def without_choices(checkpoint: str, batch: RaggedBatch) -> None:
    """Score a batch of whose last sequences one has no choices and another those of one layer
    less."""
    with mesh_groups(1, 1) as groups:
        engine = replaying_engine(checkpoint, groups, "rollout")
        assert engine.replay is not None and batch.numbers is not None
        shape = engine.shape
        *numbers, last, _ = batch.numbers.tolist()
        for number, length in zip([*numbers, last], batch.seq_lens.tolist(), strict=False):
            size = (
                length - 1,
                len(shape.expert_layers) - (number == last),
                shape.experts_per_token,
            )
            engine.replay.stored[number] = np.zeros(size, np.uint8)
        _log_probs(engine, batch)


@contextlib.contextmanager
def counted_choices(engine: ModelEngine) -> Iterator[Callable[[], float]]:
    """Compare what the routers choose in the updates with the choices that the ranks held at the
    end of the rollout, token by token up to the last drawn one: the body gets the share of (token,
    layer) whose experts are others, over all ranks. For layouts whose ranks have whole
    micro-batches: neither sequence nor context parallelism."""
    totals = torch.zeros(2, dtype=torch.int64)
    held: dict[int, np.ndarray] = {}
    batches: list[RaggedBatch] = []
    micros: list[MicroBatch] = []
    assert engine.replay is not None
    passes = engine.replay.passes
    routing = engine.replay.routing
    route = TopKRouter.routing
    layers = engine.shape.expert_layers

    def watched_passes(batch: RaggedBatch, micro_batches: Any, forward_only: bool) -> Any:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, engine.replay.stored)  # type: ignore[union-attr]
        # A rank that has begun a continued response may hold the shorter choices of its beginning.
        assert batch.numbers is not None
        lens = dict(zip(batch.numbers.tolist(), batch.last_drawn.tolist(), strict=True))
        for part in parts:
            held.update({n: each for n, each in part.items() if len(each) == lens.get(n)})
        batches.append(batch)
        return passes(batch, micro_batches, forward_only)

    def watched_routing(model: Any, micro: MicroBatch) -> Any:
        micros.append(micro)
        return routing(model, micro)

    def watched_route(router: TopKRouter, logits: torch.Tensor, **kwargs: Any) -> Any:
        probs, chosen = route(router, logits, **kwargs)
        if router.router_replay is not None and torch.is_grad_enabled():
            batch = batches[-1]
            ends = batch.seq_lens.cumsum(0)
            for row, source in enumerate(micros[-1].sources.tolist()):
                sequence = int(torch.searchsorted(ends, source, right=True))
                mask = batch.response_mask
                has_further = source + 1 < ends[sequence] and (
                    mask is None or mask[source + 1 : ends[sequence]].any()
                )
                if source < 0 or not has_further:
                    continue
                place = source - int(ends[sequence] - batch.seq_lens[sequence])
                column = layers.index(router.layer_number - 1)
                wanted = set(held[int(batch.numbers[sequence])][place, column].tolist())
                totals[0] += wanted != set(chosen[row].nonzero().flatten().tolist())
                totals[1] += 1
        return probs, chosen

    with (
        replaced(engine.replay, "passes", watched_passes),
        replaced(engine.replay, "routing", watched_routing),
        replaced(TopKRouter, "routing", watched_route),
    ):
        yield lambda: float(torch.divide(*sum_over_ranks(totals)))


def two_steps(
    config_path: str, overrides: Sequence[str]
) -> list[tuple[str, dict[str, float], float]]:
    """Return of two steps a digest of the tokens, the metrics, and the share of tokens whose
    experts in the updates are not those that are held; -1 without replay."""
    out = []
    with built_run(config_path, list(overrides)) as run:
        for step in (1, 2):
            state = step_state.begin_step(
                step, RankStatus(), (step - 1) * run.config.data.train_batch_size
            )
            watch = (
                contextlib.nullcontext(lambda: -1.0)
                if run.actor.replay is None
                else counted_choices(run.actor)
            )
            with watch as share:
                batch = loop.one_step(run, state, StopRequests(run.config.trainer))
                differing = share()
            digest = hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest()
            out.append((digest, dict(state.metrics), differing))
    return out
