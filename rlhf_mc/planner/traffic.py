"""Bytes that move between ranks in one step, by phase and purpose, inside nodes and across them.

Counted are the bytes that a rank receives. Each phase has those of the rank that receives most from other nodes, and
among equals most in all. collectives.py has the collectives of Megatron-Core, reshard/plan.py the weight update. All
sequences have the same length. Validation and exports are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_mc.architectures.spec import ModelShape, padded_vocab_size
from rlhf_mc.config.roles import overlaps_reduction
from rlhf_mc.config.schema import Config, layouts, reward_models
from rlhf_mc.data.balance import micro_batch_limits
from rlhf_mc.planner.collectives import Collective, Passes, PassTokens
from rlhf_mc.planner.lengths import Lengths, Share, drawn_prompts, replica_share, responses_per_prompt
from rlhf_mc.planner.model_state import ITEMSIZES
from rlhf_mc.planner.rank_layouts import planned_layouts
from rlhf_mc.reshard.grouping import choose_rollout_groups
from rlhf_mc.reshard.layout import Layout
from rlhf_mc.reshard.placement import rollout_layouts
from rlhf_mc.reshard.plan import Plan, make_plan
from rlhf_mc.topology.mesh import training_mesh

UPDATE_WEIGHTS = "update_weights"
GEN = "gen"
_FLOAT32 = 4
_TOKEN_BYTES = 8
"""Bytes of a response token in the exchange of responses: token and log-prob (data/responses.py)."""


@dataclass(frozen=True)
class Traffic:
    """One kind of collective for one purpose: bytes that a rank receives in one step. The rank is the one that receives
    most in the phase."""

    phase: str
    name: str
    """The purpose: "tensor parallel", "pipeline", "gradients", "parameters", "experts", "results", "weights",
    "logits", "responses"."""
    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, or receive: point-to-point messages."""
    intra_node: float
    """Bytes received from ranks of its own node."""
    inter_node: float
    """Bytes received from other nodes."""
    count: float
    """Calls of the collective, or messages."""


def plan_traffic(
    cfg: Config,
    shapes: Mapping[str, ModelShape],
    world: int,
    gpus_per_node: int,
    lengths: Lengths,
) -> list[Traffic]:
    """Return the transfers of one step on GPUs, by phase. shapes: of the run's models, by role."""
    held = {role: planned_layouts(shapes[role], training_mesh(layouts(cfg)[role], world), cuda=True) for role in shapes}
    traffic = [weight_update(cfg, shapes["actor"], held["actor"], gpus_per_node)]
    steps = [(GEN, _Rollout(cfg, shapes["actor"], world, gpus_per_node, lengths).collectives)]
    for work in phase_work(cfg, shapes, world, lengths):
        steps.append((work.phase, _Model(cfg, work, shapes[work.role], held[work.role]).collectives))
    for phase, collectives in steps:
        received = [_received(phase, collectives(rank), rank, gpus_per_node) for rank in range(world)]
        traffic.append(max(received, key=_load))
    return [transfer for transfers in traffic for transfer in transfers]


@dataclass(frozen=True)
class PhasePasses:
    """A phase of passes over one model."""

    phase: str
    role: str
    is_update: bool
    share: Share
    """Of one replica in one pass."""
    results: float
    """Positions of each sequence at which the output layer is computed."""
    work: PassTokens
    """Of one pass: one mini-batch in an update, else all sequences."""
    passes: int


def phase_work(cfg: Config, shapes: Mapping[str, ModelShape], world: int, lengths: Lengths) -> Iterator[PhasePasses]:
    """Yield the phases in which a model computes, in the order of a step."""
    actor = cfg.actor
    limits = micro_batch_limits(cfg)

    def of(phase: str, role: str, count: int, passes: int | None = None) -> PhasePasses:
        mesh = training_mesh(layouts(cfg)[role], world)
        share = replica_share(mesh, count, limits[phase], lengths)
        # A reward model has one result for each sequence.
        results = 1.0 if role in reward_models(cfg) else lengths.response
        work = PassTokens(
            (share.sequences + share.dummies) * lengths.total,
            share.sequences * results,
            count * results,
            share.micro_batches + share.dummies,
        )
        return PhasePasses(phase, role, passes is not None, share, results, work, passes or 1)

    sampled = cfg.data.train_batch_size * cfg.rollout.n
    if not cfg.algorithm.rollout_correction.bypass_mode:
        yield of("old_log_prob", "actor", sampled)
    if "ref" in shapes:
        yield of("ref", "ref", sampled)
    if "critic" in shapes:
        yield of("values", "critic", sampled)
    for role in reward_models(cfg):
        yield of(role, role, drawn_prompts(cfg) * responses_per_prompt(cfg))
    for role, settings in (("critic", cfg.critic), ("actor", actor)):
        if role in shapes:
            prompts = settings.ppo_mini_batch_size or actor.ppo_mini_batch_size
            epochs = settings.ppo_epochs or actor.ppo_epochs
            passes = epochs * math.ceil(cfg.data.train_batch_size / prompts)
            yield of(f"update_{role}", role, prompts * cfg.rollout.n, passes)


class _Model:
    """The collectives of a phase of one model."""

    def __init__(self, cfg: Config, phase: PhasePasses, shape: ModelShape, held: Sequence[Layout]) -> None:
        self._phase = phase
        self._shape = shape
        self._megatron = layouts(cfg)[phase.role]
        self._held = held
        self._mesh = training_mesh(self._megatron, len(held))
        self._overlaps = overlaps_reduction(self._megatron, self._mesh.dp, cuda=True)

    def collectives(self, rank: int) -> list[Collective]:
        """Return those of all passes, on this rank."""
        passes = Passes(self._shape, self._megatron, self._mesh, rank, cuda=True)
        if self._phase.is_update:
            collectives = passes.update(self._phase.work, self._held[rank], self._overlaps)
        else:
            collectives = passes.forward(self._phase.work)
        return [one.times(self._phase.passes) for one in collectives]


class _Rollout:
    """The collectives of vLLM's engines, which are tensor parallel, and of the exchange of responses."""

    def __init__(self, cfg: Config, shape: ModelShape, world: int, gpus_per_node: int, lengths: Lengths) -> None:
        mesh = training_mesh(cfg.actor.megatron, world)
        groups = choose_rollout_groups(shape, mesh, cfg.rollout.tensor_model_parallel_size, gpus_per_node)
        self._group = {rank: tuple(sorted(group)) for group in groups for rank in group}
        self._world = tuple(range(world))
        self._shape = shape
        self._lengths = lengths
        self._itemsize = ITEMSIZES[cfg.actor.megatron.dtype]
        prompts = drawn_prompts(cfg)
        self._responses = prompts * responses_per_prompt(cfg)
        of_engine = self._responses / len(groups)
        self._sampled = of_engine * lengths.response
        # The responses of a prompt are generated by different engines, each of which computes the prompt once.
        prefilled = prompts * min(responses_per_prompt(cfg), len(groups)) / len(groups) * lengths.prompt
        self._tokens = self._sampled + prefilled
        decoding = lengths.response * math.ceil(of_engine / cfg.rollout.max_num_seqs)
        self._steps = prefilled / cfg.rollout.max_num_batched_tokens + decoding

    def collectives(self, rank: int) -> list[Collective]:
        """Return those of one step, on this rank: sums after the embedding and each layer's attention and MLP, and for
        each sampled token its float32 logits."""
        shape = self._shape
        sums = 2 * shape.num_layers + 1
        states = self._tokens * shape.hidden_size * self._itemsize
        columns = padded_vocab_size(shape.vocab_size, 1)
        logits = self._sampled * columns * _FLOAT32
        responses = self._responses * self._lengths.response * _TOKEN_BYTES
        group = self._group[rank]
        found = [
            Collective("tensor parallel", "all_reduce", group, sums * states, sums * self._steps),
            Collective("logits", "all_gather", group, logits, self._steps),
            Collective("responses", "all_gather", self._world, responses, 1),
        ]
        return [one for one in found if len(one.group) > 1]


def _received(phase: str, collectives: Sequence[Collective], rank: int, gpus_per_node: int) -> list[Traffic]:
    """Return what this rank receives, one Transfer for each purpose and kind."""
    received: dict[tuple[str, str], Traffic] = {}
    for one in collectives:
        intra, inter = one.received(rank, gpus_per_node)
        before = received.get((one.name, one.kind), Traffic(phase, one.name, one.kind, 0.0, 0.0, 0.0))
        received[one.name, one.kind] = Traffic(
            phase, one.name, one.kind, before.intra_node + intra, before.inter_node + inter, before.count + one.calls
        )
    return list(received.values())


def _load(transfers: Sequence[Traffic]) -> tuple[float, float]:
    inter = sum(transfer.inter_node for transfer in transfers)
    return inter, inter + sum(transfer.intra_node for transfer in transfers)


def weight_update_plan(cfg: Config, shape: ModelShape, held: Sequence[Layout], gpus_per_node: int) -> Plan:
    """Return the plan of the weight update, as a run makes it. shape, held: the actor's shape and the layouts of all
    ranks."""
    mesh = training_mesh(cfg.actor.megatron, len(held))
    groups = choose_rollout_groups(shape, mesh, cfg.rollout.tensor_model_parallel_size, gpus_per_node)
    return make_plan(
        held,
        rollout_layouts(shape, groups),
        ITEMSIZES[cfg.actor.megatron.dtype],
        cfg.reshard.bucket_megabytes << 20,
        gpus_per_node,
        cfg.reshard.share_weights,
    )


def weight_update(cfg: Config, shape: ModelShape, held: Sequence[Layout], gpus_per_node: int) -> list[Traffic]:
    """Return what the rank that receives most receives in the weight update."""
    plan = weight_update_plan(cfg, shape, held, gpus_per_node)
    inter, total = max(zip(plan.received_from_other_nodes, plan.received_bytes, strict=True))
    return [Traffic(UPDATE_WEIGHTS, "weights", "receive", total - inter, inter, len(plan.buckets))] if total else []
