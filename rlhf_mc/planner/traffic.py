"""Bytes that move between ranks in one step, by phase and purpose, inside nodes and across them.

Counted are the bytes that a rank receives, for each phase on the rank that receives most from other
nodes, and among equals most in all. collectives.py has the collectives of Megatron-Core,
reshard/plan.py the weight update. All sequences have the same length. Validation and exports are
not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf_mc.architectures.run_shapes import router_replay
from rlhf_mc.architectures.spec import ModelShape, padded_vocab_size
from rlhf_mc.config.roles import (
    has_contiguous_experts,
    has_old_log_prob_pass,
    has_ref_pass,
    has_rollout_pool,
    num_training_ranks,
    overlaps_reduction,
    prompts_per_batch,
    shared_models,
    shares_weights,
    token_budgets,
    tokens_on_rank,
)
from rlhf_mc.config.schema import Config, layouts, reward_models, teachers
from rlhf_mc.data.balance import DUMMY_TOKENS
from rlhf_mc.planner.collectives import Collective, Passes, PassTokens
from rlhf_mc.planner.full_sharding import full_sharding
from rlhf_mc.planner.lengths import Lengths, computed_tokens, responses_per_prompt
from rlhf_mc.planner.model_state import ITEMSIZES
from rlhf_mc.planner.rank_layouts import choice_bytes_of_stage, planned_layouts
from rlhf_mc.reshard.layout import EMPTY, Layout, correction_biases
from rlhf_mc.reshard.placement import rollout_layouts, with_contiguous_experts
from rlhf_mc.reshard.plan import Plan, make_plans
from rlhf_mc.rollout.engines import engine_factory
from rlhf_mc.topology.mesh import Mesh, role_mesh, rollout_groups, training_mesh

UPDATE_WEIGHTS = "update_weights"
GEN = "gen"
_FLOAT32 = 4
_TOKEN_BYTES = 8
"""Bytes of a response token in the exchange of responses: token and log-prob
(data/responses.py)."""


@dataclass(frozen=True)
class Traffic:
    """One kind of collective for one purpose: bytes that a rank receives in one step. The rank is
    the one that receives most in the phase."""

    phase: str
    name: str
    """The purpose: "tensor parallel", "pipeline", "gradients", "parameters", "experts", "router
    replay", "results", "weights", "logits", "responses"."""
    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, or receive: point-to-point messages."""
    intra_node: float
    """Bytes received from ranks of its own node."""
    inter_node: float
    """Bytes received from other nodes."""
    count: float
    """Calls of the collective, or messages."""
    buckets: tuple[tuple[int, int], ...] = ()
    """Of the weight update: for each bucket the bytes that some rank sends or receives at most in
    its node, and to or from other nodes. Ranks exchange one bucket after another."""


def plan_traffic(
    cfg: Config,
    shapes: Mapping[str, ModelShape],
    world: int,
    gpus_per_node: int,
    lengths: Lengths,
) -> list[Traffic]:
    """Return the transfers of one step on GPUs, by phase. shapes: of the run's models, by role."""
    by_role = {
        role: planned_layouts(shape, _mesh(cfg, role, world)) for role, shape in shapes.items()
    }
    traffic = [weight_update(cfg, shapes["actor"], world, gpus_per_node)]
    steps = [(GEN, _rollout_collectives(cfg, shapes["actor"], world, gpus_per_node, lengths))]
    for work in phase_work(cfg, shapes, world, lengths):
        steps.append(
            (work.phase, _pass_collectives(cfg, work, shapes[work.role], by_role[work.role]))
        )
    for phase, by_rank in steps:
        received = [
            _received(phase, collectives, rank, gpus_per_node)
            for rank, collectives in enumerate(by_rank)
        ]
        traffic.append(max(received, key=_load))
    return [transfer for transfers in traffic for transfer in transfers]


def _mesh(cfg: Config, role: str, world: int) -> Mesh:
    """Return the mesh of a role's model, from rank 0 on: a pool begins with a node."""
    return replace(role_mesh(cfg, role, world), first=0)


@dataclass(frozen=True)
class PhasePasses:
    """A phase of passes over one model."""

    phase: str
    role: str
    mesh: Mesh
    """Of the model. With dynamic context parallelism each sequence is shared by as few ranks as it
    needs."""
    is_update: bool
    sequences: int
    """Of one data-parallel rank in one pass, as the number of micro-batches."""
    micro_batches: int
    results: float
    """Positions of each sequence at which the output layer is computed."""
    tokens: PassTokens
    """Of one pass: one mini-batch in an update, else all sequences."""
    passes: int
    computed: float
    """Tokens of a sequence that are computed outside attention: all, or fewer with shared
    prompts."""


def phase_work(
    cfg: Config, shapes: Mapping[str, ModelShape], world: int, lengths: Lengths
) -> Iterator[PhasePasses]:
    """Yield the phases in which a model computes, in the order of a step."""
    actor = cfg.actor
    budgets = token_budgets(cfg)

    def work(phase: str, role: str, count: int, updates: int | None = None) -> PhasePasses:
        mesh = _mesh(cfg, role, world)
        if mesh.dynamic_cp:
            fits = (
                size
                for size in mesh.context_sizes
                if tokens_on_rank(math.ceil(lengths.total), size) <= budgets[phase]
            )
            mesh = replace(mesh, cp=next(fits, mesh.cp), dynamic_cp=False)
        sequences = math.ceil(count / mesh.dp)
        budget = budgets[phase] * mesh.cp
        computed = computed_tokens(lengths, layouts(cfg)[role], cfg.rollout.n, budget)
        micro_batches = math.ceil(sequences / max(1, int(budget // computed)))
        # Virtual pipeline chunks need a multiple of the stages.
        dummies = -micro_batches % mesh.pp if mesh.vpp > 1 else 0
        # A reward model has one result for each sequence.
        results = 1.0 if role in reward_models(cfg) else lengths.response
        of_replica = sequences * computed + dummies * DUMMY_TOKENS
        tokens = PassTokens(
            of_replica, sequences * results, count * results, micro_batches + dummies
        )
        return PhasePasses(
            phase,
            role,
            mesh,
            updates is not None,
            sequences,
            micro_batches,
            results,
            tokens,
            updates or 1,
            computed,
        )

    sampled = cfg.data.train_batch_size * cfg.rollout.n
    if has_old_log_prob_pass(cfg, router_replay(cfg, shapes["actor"])):
        yield work("old_log_prob", "actor", sampled)
    shared = shared_models(cfg)
    if has_ref_pass(cfg):
        yield work("ref", shared.get("ref", "ref"), sampled)
    if "critic" in shapes:
        yield work("values", "critic", sampled)
    for role in teachers(cfg):
        # how many rows are its own is known only when the data is read: an equal share
        yield work(role, shared.get(role, role), math.ceil(sampled / len(teachers(cfg))))
    for role in reward_models(cfg):
        yield work(role, role, prompts_per_batch(cfg.data) * responses_per_prompt(cfg))
    for role, settings in (("critic", cfg.critic), ("actor", actor)):
        if role in shapes:
            prompts = settings.ppo_mini_batch_size or actor.ppo_mini_batch_size
            epochs = settings.ppo_epochs or actor.ppo_epochs
            passes = epochs * math.ceil(cfg.data.train_batch_size / prompts)
            yield work(f"update_{role}", role, prompts * cfg.rollout.n, passes)


def _pass_collectives(
    cfg: Config, work: PhasePasses, shape: ModelShape, rank_layouts: Sequence[Layout]
) -> Iterator[list[Collective]]:
    """Yield by rank the collectives of a phase of passes over one model."""
    megatron = layouts(cfg)[work.role]
    mesh = work.mesh
    replay = router_replay(cfg, shape) if work.role == "actor" else "off"
    overlaps = overlaps_reduction(megatron, mesh.replicas, cuda=True)
    sharding = full_sharding(cfg, work.role, shape, mesh)
    for rank, layout in enumerate(rank_layouts):
        passes = Passes(shape, megatron, mesh, rank, cuda=True)
        once = (
            passes.forward_and_backward(work.tokens)
            if work.is_update
            else passes.forward(work.tokens)
        )
        if sharding is not None:
            micro_batches = work.tokens.num_micro_batches
            once += sharding.collectives(rank, micro_batches, work.is_update)
        elif work.is_update:
            once += passes.gradients(layout, overlaps)
        if replay == "rollout" or (replay == "recompute" and work.is_update):
            choices = choice_bytes_of_stage(shape, mesh, mesh.coordinate(rank).pp)
            everyone = tuple(range(mesh.world))
            once.append(
                Collective("router replay", "all_to_all", everyone, work.tokens.tokens * choices, 1)
            )
        yield [collective.times(work.passes) for collective in once]


def _rollout_collectives(
    cfg: Config, shape: ModelShape, world: int, gpus_per_node: int, lengths: Lengths
) -> Iterator[list[Collective]]:
    """Yield by rank the collectives of the rollout engines, which are tensor parallel, and of the
    exchange of responses, in pools with the experts that are replayed: sums after the embedding and
    each layer's attention and MLP, and for each sampled token its float32 logits."""
    mesh = training_mesh(cfg.actor.megatron, num_training_ranks(cfg, world))
    tp = cfg.rollout.tensor_model_parallel_size
    groups = rollout_groups(mesh, tp, gpus_per_node, cfg.resource_pools.rollout)
    group_of_rank = {rank: tuple(sorted(group)) for group in groups for rank in group}
    prompts = prompts_per_batch(cfg.data)
    responses = prompts * responses_per_prompt(cfg)
    of_engine = responses / len(groups)
    sampled = of_engine * lengths.response
    # The responses of a prompt are generated by different engines, each of which computes the
    # prompt once.
    prefilled = prompts * min(responses_per_prompt(cfg), len(groups)) / len(groups) * lengths.prompt
    decoding = lengths.response * math.ceil(of_engine / cfg.rollout.max_num_seqs)
    steps = prefilled / cfg.rollout.max_num_batched_tokens + decoding
    sums = 2 * shape.num_layers + 1
    states = (sampled + prefilled) * shape.hidden_size * ITEMSIZES[cfg.actor.megatron.dtype]
    logits = sampled * padded_vocab_size(shape.vocab_size, 1) * _FLOAT32
    exchanged = responses * lengths.response * _TOKEN_BYTES
    everyone = tuple(range(world))
    sends_experts = has_rollout_pool(cfg) and router_replay(cfg, shape) == "rollout"
    choices = responses * lengths.total * shape.choice_bytes * len(shape.expert_layers)
    for rank in everyone:
        collectives = [Collective("responses", "all_gather", everyone, exchanged, 1)]
        if sends_experts and rank < mesh.world:
            share = choices / mesh.world
            collectives.append(Collective("router replay", "receive", (rank, world - 1), share, 1))
        if (group := group_of_rank.get(rank)) is not None:
            collectives += [
                Collective("tensor parallel", "all_reduce", group, sums * states, sums * steps),
                Collective("logits", "all_gather", group, logits, steps),
            ]
        yield [collective for collective in collectives if len(collective.group) > 1]


def _received(
    phase: str, collectives: Sequence[Collective], rank: int, gpus_per_node: int
) -> list[Traffic]:
    """Return the traffic that this rank receives, one for each purpose and kind."""
    received: dict[tuple[str, str], Traffic] = {}
    for collective in collectives:
        intra, inter = collective.received(rank, gpus_per_node)
        key = (collective.name, collective.kind)
        before = received.get(key, Traffic(phase, *key, 0.0, 0.0, 0.0))
        received[key] = replace(
            before,
            intra_node=before.intra_node + intra,
            inter_node=before.inter_node + inter,
            count=before.count + collective.calls,
        )
    return list(received.values())


def _load(transfers: Sequence[Traffic]) -> tuple[float, float]:
    inter = sum(transfer.inter_node for transfer in transfers)
    return inter, inter + sum(transfer.intra_node for transfer in transfers)


def weight_update_plans(
    cfg: Config, shape: ModelShape, world: int, gpus_per_node: int
) -> list[Plan]:
    """Return the plans of the weight update on GPUs, as a run makes them. shape: the actor's."""
    mesh = training_mesh(layouts(cfg)["actor"], num_training_ranks(cfg, world))
    shape = shape.base
    rank_layouts = planned_layouts(shape, mesh)
    if has_contiguous_experts(cfg):
        rank_layouts = with_contiguous_experts(rank_layouts, mesh)
    layout = engine_factory(cfg.rollout).layout
    tp = cfg.rollout.tensor_model_parallel_size
    groups = rollout_groups(mesh, tp, gpus_per_node, cfg.resource_pools.rollout)
    plans = make_plans(
        [*rank_layouts, *[EMPTY] * (world - mesh.world)],
        rollout_layouts(shape, groups, layout),
        correction_biases(shape),
        ITEMSIZES[cfg.actor.megatron.dtype],
        cfg.reshard.bucket_megabytes << 20,
        gpus_per_node,
        shares_weights(cfg),
    )
    return [plan for plan in plans if plan is not None]


def weight_update(cfg: Config, shape: ModelShape, world: int, gpus_per_node: int) -> list[Traffic]:
    """Return what the rank that receives most receives in the weight update."""
    plans = weight_update_plans(cfg, shape, world, gpus_per_node)

    def by_rank(name: str) -> list[int]:
        return [
            sum(of_rank) for of_rank in zip(*(getattr(plan, name) for plan in plans), strict=True)
        ]

    inter, total = max(
        zip(by_rank("received_from_other_nodes"), by_rank("received_bytes"), strict=True)
    )
    buckets = tuple(maxima for plan in plans for maxima in plan.bucket_maxima())
    return (
        [Traffic(UPDATE_WEIGHTS, "weights", "receive", total - inter, inter, len(buckets), buckets)]
        if total
        else []
    )
