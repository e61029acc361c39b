"""Device memory of each rank in each phase of a step, from the settings and the shapes of the
models.

What is resident follows from config/roles.py and the offload settings, as the offload schedule
moves it. The rollout engine takes the share of the device that rollout.gpu_memory_utilization gives
it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_mc.architectures.run_shapes import router_replay
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.roles import (
    has_contiguous_experts,
    has_ref_pass,
    has_rollout_pool,
    num_teacher_tokens,
    num_training_ranks,
    parts_on_device,
    shared_models,
    shares_weights,
    token_budgets,
    tokens_on_rank,
)
from rlhf_mc.config.schema import Config, layouts, teachers
from rlhf_mc.planner.activations import Activations, MicroBatchPass
from rlhf_mc.planner.full_sharding import full_sharding
from rlhf_mc.planner.lengths import Lengths, computed_tokens
from rlhf_mc.planner.model_state import ITEMSIZES, ModelState
from rlhf_mc.planner.rank_layouts import (
    choice_bytes_of_stage,
    model_coordinate,
    own_rollout_weights,
    rank_state,
    rollout_tp_ranks,
)
from rlhf_mc.planner.reserved import reserved_bytes
from rlhf_mc.rollout.engines import engine_factory
from rlhf_mc.topology.mesh import Mesh, role_mesh

RESERVED_ON_CPU = 3 << 28
"""Bytes of a process with its libraries. The peak of a rank of the quickstart without its KV cache
is 0.73 GiB."""

_ROLES_OF_PASSES = {
    "old_log_prob": "actor",
    "values": "critic",
    "update_actor": "actor",
    "update_critic": "critic",
}
"""The model of each pass; the others are named after it."""
ROOM = 0.05
"""Share of the device that is left where the optimizer state stays there between the steps of an
update."""
_RESULT = 4
"""Bytes of a float32."""
_TOP_IN_UPDATE = 32
"""Bytes of a teacher's token at a position of a micro-batch that is updated: its number and
log-prob as they come, its number as int64, the student's log-prob, and the gradients of sums and
products."""
_QUANTIZED = re.compile(r"\.layers\.\d+\..*_proj\.weight$")
"""Weights that rollout.quantization quantizes: of linear layers, without embeddings and router."""


@dataclass(frozen=True)
class Capacity:
    """The number of ranks, and the memory of each."""

    num_ranks: int
    device_bytes: int
    """Memory of each GPU, or an equal share of the memory of a GPU or of a node for each of its
    ranks."""
    cuda: bool = True
    """False: on CPUs, where the ranks of a node share its memory."""
    ranks_per_node: int = 8
    host_bytes: float | None = None
    """Host memory of each node with GPUs; None: it is not compared."""
    transformer_engine: bool = True
    """The GPUs run Transformer Engine's layers."""
    ranks_per_gpu: int = 1


@dataclass(frozen=True)
class Phase:
    """Device memory of one rank in one phase, or the time of a phase (times.py)."""

    name: str
    parts: Mapping[str, float]
    """Bytes or seconds by what takes them."""

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


def sum_by_name(amounts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sum of the amounts of each name."""
    totals: dict[str, float] = {}
    for name, amount in amounts:
        totals[name] = totals.get(name, 0.0) + amount
    return totals


@dataclass(frozen=True)
class Rollout:
    """The memory of the rollout engine on one rank, in bytes."""

    budget: float
    """The share of the device that the engine takes in all."""
    weights: int
    """Its weights, without those that alias the actor's."""
    staged: int
    """With rollout.quantization: the unquantized weights that an update writes."""
    activations: float
    """Of one engine step."""
    kv_bytes_per_token: int

    @property
    def kv_cache(self) -> float:
        """Bytes that are left for keys and values; negative where even the weights do not fit."""
        return self.budget - self.weights - self.activations


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank, and of all ranks like it."""

    ranks: tuple[int, ...]
    phases: tuple[Phase, ...]
    rollout: Rollout | None
    """None: the ranks have no rollout engine."""
    states: Mapping[str, ModelState]
    """Of each model that the ranks hold, by role, wherever it is."""
    staying: frozenset[str]
    """Roles whose optimizer state stays on the device between the steps of an update, the same on
    all ranks: there is room for it beside the passes, or nothing to gain. Where trainer.planner is
    "off", none."""

    @property
    def fullest(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)


def plan_memory(
    cfg: Config,
    shapes: Mapping[str, ModelShape],
    capacity: Capacity,
    one_of_each_stage: bool = False,
) -> list[RankMemory]:
    """Return the memory of each class of ranks of a run, those of a rollout pool last.
    one_of_each_stage: of one rank of each class of pipeline stages, which is nearly the memory of
    its tensor-parallel group.

    shapes: of the run's models, by role."""
    world = capacity.num_ranks
    cuda = capacity.cuda
    num_training = num_training_ranks(cfg, world)
    meshes = {role: role_mesh(cfg, role, world) for role in shapes}
    rollout_tp = cfg.rollout.tensor_model_parallel_size
    pool = cfg.resource_pools.rollout
    tp_rank = rollout_tp_ranks(meshes["actor"], rollout_tp, capacity.ranks_per_node, pool)
    stages = _one_of_each_stage(list(meshes.values()))
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank in (
        *(stages if one_of_each_stage else range(num_training)),
        *range(num_training, world),
    ):
        of_rank = [mesh for mesh in meshes.values() if rank in mesh.ranks]
        coordinates = (model_coordinate(mesh, rank) for mesh in of_rank)
        alike.setdefault((rank < num_training, *coordinates, tp_rank.get(rank)), []).append(rank)
    # By all that the phases of a rank follow from, in which tensor-parallel ranks mostly agree.
    classes: dict[tuple[object, ...], tuple[dict[str, _Model], Rollout | None, list[int]]] = {}
    for ranks in alike.values():
        rank = ranks[0]
        rollout = None
        if rank in tp_rank:
            source = min(rank, num_training - 1)  # in a rollout pool no weight is shared
            rollout = _rollout(
                cfg, shapes["actor"], meshes["actor"], source, tp_rank[rank], capacity
            )
        models = {
            role: _Model(cfg, role, shapes[role], meshes[role], rank, cuda)
            for role in shapes
            if rank in meshes[role].ranks
        }
        key = (rollout, *((model.state, model.stage) for model in models.values()))
        classes.setdefault(key, (models, rollout, []))[2].extend(ranks)
    names = _phase_names(cfg, shapes)

    def phases(staying: Collection[str]) -> list[tuple[Phase, ...]]:
        of_class = [(models, rollout) for models, rollout, _ in classes.values()]
        return [tuple(_phases(cfg, names, *parts, capacity, staying)) for parts in of_class]

    updates = {
        phase: role
        for phase, role in _ROLES_OF_PASSES.items()
        if "update" in phase and role in shapes
    }
    planned = phases(updates.values())
    room = 0.0 if cfg.trainer.planner == "off" else (1 - ROOM) * capacity.device_bytes
    full = {phase.name for of_rank in planned for phase in of_rank if cuda and phase.total > room}
    staying = frozenset(role for phase, role in updates.items() if phase not in full)
    if len(staying) < len(updates):
        planned = phases(staying)
    return [
        RankMemory(
            tuple(sorted(ranks)), of_rank, rollout, {r: m.state for r, m in models.items()}, staying
        )
        for (models, rollout, ranks), of_rank in zip(classes.values(), planned, strict=True)
    ]


def _one_of_each_stage(meshes: Sequence[Mesh]) -> list[int]:
    """Return a rank for each combination of stages that training ranks have in these meshes: the
    last rank of each stage of each."""
    training = [mesh for mesh in meshes if mesh.first == 0]
    return sorted(
        {(stage + 1) * (mesh.world // mesh.pp) - 1 for mesh in training for stage in range(mesh.pp)}
    )


class _Model:
    """One role's model on one rank."""

    def __init__(
        self, cfg: Config, role: str, shape: ModelShape, mesh: Mesh, rank: int, cuda: bool
    ) -> None:
        self.role = role
        self._shape = shape
        self.mesh = mesh
        """The layout of its ranks."""
        self._megatron = layouts(cfg)[role]
        self._cuda = cuda
        self._activations = Activations(shape, self._megatron, cuda)
        coordinate = model_coordinate(mesh, rank)
        self.stage = coordinate.pp
        freeze = {"actor": cfg.actor.freeze, "critic": cfg.critic.freeze}.get(role)
        self.sharding = full_sharding(cfg, role, shape, mesh, cuda)
        self.state = (
            self.sharding.state
            if self.sharding is not None
            else rank_state(role, shape, self._megatron, mesh, coordinate, freeze, cuda)
        )

    def resident(self, needed: Collection[str]) -> dict[str, float]:
        """Return the bytes of the parts that are on the device in a phase that needs these."""
        settings = self._megatron
        if self.sharding is not None and self.sharding.on_host:
            return {f"{self.role} grads": self.sharding.grads} if "grads" in needed else {}
        offloads = {
            # On a CPU what is offloaded stays in the same memory; gradients are freed.
            "params": settings.param_offload and self._cuda,
            "grads": settings.grad_offload or self.sharding is not None,
            "optimizer": settings.optimizer_offload and self._cuda,
        }
        sizes = vars(self.state)
        return {
            f"{self.role} {part}": sizes[part]
            for part in offloads
            if part in needed or not offloads[part]
        }

    def updated(
        self, needed: Collection[str], passes: Mapping[str, float], stays: bool
    ) -> dict[str, float]:
        """Return the bytes of the parts that are on the device while the model is updated, where
        they take most. passes: of forward and backward passes. stays: the optimizer state is there
        meanwhile, too."""
        in_steps = self.resident({*needed, "optimizer"})
        if stays:
            return {**in_steps, **passes}
        return max(
            {**self.resident(needed), **passes}, in_steps, key=lambda parts: sum(parts.values())
        )

    def replayed_experts(self, cfg: Config, sequences: int) -> float:
        """Return the bytes of the experts that are replayed in a pass over as many sequences, all
        of maximum length."""
        if self.role != "actor" or router_replay(cfg, self._shape) == "off":
            return 0.0
        tokens = sequences * (cfg.data.max_prompt_length + cfg.data.max_response_length)
        return float(tokens * choice_bytes_of_stage(self._shape, self.mesh, self.stage))

    def forward(self, work: MicroBatchPass) -> dict[str, float]:
        """Return the bytes of a pass without gradients."""
        size = self._activations.forward_peak(self.mesh, self.stage, work)
        fsdp = self.sharding
        if fsdp is None:
            return {"activations": size}
        return _with_gathered(size, fsdp.gathered + fsdp.gathered_at_layer, fsdp.at_start)

    def update(self, work: MicroBatchPass, entropy: bool) -> dict[str, float]:
        """Return the bytes of an update, without the model's state."""
        fsdp = self.sharding
        at_layer = 0.0 if fsdp is None else fsdp.gathered_at_layer + fsdp.gradients_at_layer
        size = self._activations.update_peak(self.mesh, self.stage, work, entropy, at_layer)
        if fsdp is None:
            return {"activations": size}
        return _with_gathered(size, fsdp.gathered, fsdp.at_end)


def _with_gathered(activations: float, gathered: float, alone: float) -> dict[str, float]:
    """Return the bytes of a pass of FSDP2 where it has most: with activations, or without them."""
    if activations + gathered > alone:
        return {"activations": activations, "gathered": gathered}
    return {"gathered": alone}


def _phase_names(cfg: Config, roles: Collection[str]) -> list[str]:
    """Return the phases that hold tensors on the device. roles: of the run's models."""
    absent = () if has_ref_pass(cfg) else ("ref",)
    passes = [p for p in token_budgets(cfg) if _pass_role(cfg, p) in roles and p not in absent]
    # Every run may save, if only when it is preempted. load_checkpoint needs what save_checkpoint
    # does.
    return ["update_weights", "gen", *passes, "save_checkpoint", "export"]


def _pass_role(cfg: Config, phase: str) -> str:
    """Return the role of the model of a pass."""
    return {**_ROLES_OF_PASSES, **shared_models(cfg)}.get(phase, phase)


def _phases(
    cfg: Config,
    names: Sequence[str],
    models: Mapping[str, _Model],
    rollout: Rollout | None,
    capacity: Capacity,
    staying: Collection[str],
) -> Iterator[Phase]:
    """Yield these phases of a rank. staying: RankMemory's."""
    meshes = [model.mesh for model in models.values()]
    rollout_tp = cfg.rollout.tensor_model_parallel_size
    work = _activations(cfg, models)
    bucket = float(cfg.reshard.bucket_megabytes << 20)
    work["update_weights"] = {"reshard buckets": 2 * bucket}
    if rollout is not None:
        buckets = 2 * min(bucket, rollout.weights + rollout.staged)
        work["update_weights"] = {"reshard buckets": buckets, "unquantized weights": rollout.staged}
    actor = models.get("actor")
    if actor is not None and actor.sharding is not None:
        for name in ("update_weights", "export"):
            work.setdefault(name, {})["weights to send"] = actor.sharding.narrowed
    for name in names:
        row = parts_on_device(name, shared_models(cfg))
        assert row is not None
        parts: dict[str, float] = {}
        for role, model in models.items():
            needed = row.get(role, frozenset())
            is_updated = name == f"update_{role}"
            parts |= (
                model.updated(needed, work.pop(name), role in staying)
                if is_updated
                else model.resident(needed)
            )
        # Beside models the engine sleeps in phases of theirs; with ranks of its own it never does.
        frees_cache = cfg.rollout.free_cache_engine and "kv_cache" not in row["rollout"]
        asleep = rollout is not None and not has_rollout_pool(cfg) and frees_cache
        if rollout is not None and not asleep:
            parts["vLLM"] = rollout.budget
        elif rollout is not None and "weights" in row["rollout"]:
            parts["vLLM weights"] = float(rollout.weights)
        reserved: float = RESERVED_ON_CPU
        if capacity.cuda:
            reserved = reserved_bytes(meshes, capacity.ranks_per_node, rollout_tp, asleep)
        parts = {**parts, **work.get(name, {}), "reserved": reserved}
        yield Phase(name, {key: size for key, size in parts.items() if size})


def _activations(cfg: Config, models: Mapping[str, _Model]) -> dict[str, dict[str, float]]:
    """Return the activations of each pass over the models, by phase."""
    peaks = {}
    for phase, budget in token_budgets(cfg).items():
        role = _pass_role(cfg, phase)
        if role not in models:
            continue
        model = models[role]
        prompts = cfg.data.train_batch_size
        is_update = phase in ("update_actor", "update_critic")
        if is_update:
            prompts = getattr(cfg, role).ppo_mini_batch_size or cfg.actor.ppo_mini_batch_size
            entropy = cfg.actor.entropy_coeff != 0 or cfg.actor.entropy_coeff_end is not None
            sizes = model.update(
                _pass(cfg, role, budget, model.mesh, prompts), role == "actor" and entropy
            )
        else:
            sizes = model.forward(_pass(cfg, role, budget, model.mesh, prompts))
        sequences = math.ceil(prompts * cfg.rollout.n / model.mesh.replicas)
        peaks[phase] = {
            **sizes,
            "replayed experts": model.replayed_experts(cfg, sequences),
            "teacher's tokens": _teacher_bytes(cfg, phase, budget, model.mesh),
        }
    return peaks


def _teacher_bytes(cfg: Config, phase: str, budget: int, mesh: Mesh) -> float:
    """Return the bytes of the teachers' most probable tokens in a phase. A teacher's pass has those
    of the rows that its replica scores, at most an equal part of the batch; an update has those of
    a micro-batch of `budget` tokens. The exchange before it, without activations, is not counted.
    mesh: of the model."""
    k = num_teacher_tokens(cfg)
    if phase == "update_actor":
        return float(budget * k * _TOP_IN_UPDATE)
    sequences = math.ceil(cfg.data.train_batch_size * cfg.rollout.n / mesh.dp)
    tokens = sequences * cfg.data.max_response_length
    return float(tokens * (1 + 2 * k) * _RESULT) if phase in teachers(cfg) else 0.0


def _pass(cfg: Config, role: str, budget: int, mesh: Mesh, prompts: int) -> MicroBatchPass:
    """Return a rank's part of the largest micro-batch of a pass over the responses to these
    prompts, all of whose tokens may be responses, and the largest number of micro-batches. With
    shared prompts attention has the rows of the longest sequences."""
    # Of few sequences dynamic context parallelism may give one to a single rank.
    cp = 1 if mesh.dynamic_cp else mesh.cp
    longest = tokens_on_rank(cfg.data.max_prompt_length + cfg.data.max_response_length, cp)
    all_tokens = math.ceil(prompts * cfg.rollout.n / mesh.replicas * cp) * longest
    tokens = min(budget, all_tokens)
    lengths = Lengths(cfg.data.max_prompt_length, cfg.data.max_response_length)
    computed = computed_tokens(lengths, layouts(cfg)[role], cfg.rollout.n, budget)
    rows = tokens * lengths.total / computed if computed < lengths.total else 0.0
    return MicroBatchPass(tokens, tokens, math.ceil(all_tokens / budget), rows)


def _rollout(
    cfg: Config,
    shape: ModelShape,
    mesh: Mesh,
    rank: int,
    tp_rank: int,
    capacity: Capacity,
) -> Rollout:
    cuda = capacity.cuda
    settings = cfg.rollout
    dtype = cfg.actor.megatron.dtype
    itemsize = ITEMSIZES[dtype]
    tp = settings.tensor_model_parallel_size
    coordinate = model_coordinate(mesh, rank)
    layout = engine_factory(settings).layout
    shares = shares_weights(cfg)
    contiguous = has_contiguous_experts(cfg)
    weights_of_rank = own_rollout_weights(
        shape, mesh, coordinate, tp_rank, tp, layout, dtype, shares, cuda, contiguous
    )
    weights = sum(weights_of_rank.values())
    staged = 0
    if settings.quantization is not None:
        staged = sum(size for name, size in weights_of_rank.items() if _QUANTIZED.search(name))
        weights -= staged - staged // itemsize
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    tokens = max(settings.max_num_batched_tokens, longest)
    # Of one engine step: states and their residual, gate, up and product; logits and their float32
    # copy of each sequence. The states of delta nets are of all sequences.
    widest = max(layer.feed_forward.active_size() for layer in shape.kinds)
    states = tokens * (3 * shape.hidden_size + 3 * widest / tp) * itemsize
    logits = settings.max_num_seqs * shape.vocab_size * (itemsize + 4)
    activations = states + logits + settings.max_num_seqs * shape.cached_per_sequence(tp, itemsize)
    kv_cache = settings.cpu_kvcache_space_gb << 30
    return Rollout(
        budget=settings.gpu_memory_utilization * capacity.device_bytes
        if cuda
        else weights + activations + kv_cache,
        weights=weights,
        staged=staged,
        activations=activations,
        kv_bytes_per_token=shape.cached_per_token(tp) * itemsize,
    )
