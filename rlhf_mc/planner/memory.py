"""Device memory of each rank in each phase of a step, from the settings and the shapes of the models.

What is resident follows from config/placement.py and the offload settings, as the offload schedule moves it. vLLM takes
the share of the device that rollout.gpu_memory_utilization gives it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.placement import row_of
from rlhf_mc.config.schema import Config, layouts, reward_models
from rlhf_mc.planner.activations import Pass, forward_peak, update_peak
from rlhf_mc.planner.model_state import ITEMSIZES, ModelState, frozen_state, trained_state
from rlhf_mc.reshard.aliasing import find_aliases
from rlhf_mc.reshard.grouping import choose_rollout_groups
from rlhf_mc.reshard.layout import Layout, vllm_layout
from rlhf_mc.reshard.placement import training_layouts
from rlhf_mc.topology.mesh import Mesh, mesh_of

RESERVED = 3 << 30
"""Bytes that no sum has: CUDA's context, kernels, workspaces of cuBLAS, NCCL's buffers. An assumption: no run on a GPU
has been measured yet."""
TRAINED = ("actor", "critic")


@dataclass(frozen=True)
class Phase:
    """Device memory of one rank in one phase."""

    name: str
    parts: Mapping[str, float]
    """Bytes by what takes them."""

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Rollout:
    """The memory of vLLM on one rank, in bytes."""

    budget: float
    """The share of the device that vLLM takes in all."""
    weights: int
    """Its weights, without those that alias the actor's."""
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
    rollout: Rollout
    states: Mapping[str, ModelState]
    """Of each model, by role, wherever it is."""

    @property
    def fullest(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)


def plan_memory(cfg: Config, shapes: Mapping[str, ModelShape], world: int, device_bytes: int) -> list[RankMemory]:
    """Return the memory of each class of ranks of a run on GPUs. shapes: of the run's models, by role."""
    meshes = {role: mesh_of(layouts(cfg)[role], world) for role in shapes}
    held = {role: training_layouts(shapes[role], mesh, transformer_engine=True) for role, mesh in meshes.items()}
    groups = choose_rollout_groups(shapes["actor"], meshes["actor"], cfg.rollout.tensor_model_parallel_size)
    tp_rank = {rank: place for group in groups for place, rank in enumerate(group)}
    alike: dict[object, list[int]] = {}
    for rank in range(world):
        key = (*(id(of_ranks[rank]) for of_ranks in held.values()), tp_rank[rank])
        alike.setdefault(key, []).append(rank)
    found: list[RankMemory] = []
    for ranks in alike.values():
        layout = {role: of_ranks[ranks[0]] for role, of_ranks in held.items()}
        rollout = _rollout(cfg, shapes["actor"], layout["actor"], tp_rank[ranks[0]], device_bytes)
        models = {role: _Model(cfg, role, shapes[role], meshes[role], layout[role], ranks[0]) for role in shapes}
        phases = tuple(_phases(cfg, models, rollout))
        states = {role: model.state for role, model in models.items()}
        same = next((other for other in found if (other.phases, other.rollout) == (phases, rollout)), None)
        if same is None:
            found.append(RankMemory(tuple(ranks), phases, rollout, states))
        else:
            found[found.index(same)] = RankMemory(tuple(sorted((*same.ranks, *ranks))), phases, rollout, states)
    return found


class _Model:
    """One role's model on one rank."""

    def __init__(self, cfg: Config, role: str, shape: ModelShape, mesh: Mesh, layout: Layout, rank: int) -> None:
        self.role = role
        self._shape = shape
        self._mesh = mesh
        self._stage = mesh.coordinate(rank).pp
        self._megatron = layouts(cfg)[role]
        if role in TRAINED:
            overlaps = self._megatron.overlap_grad_reduce
            self.state = trained_state(
                layout,
                self._megatron,
                mesh,
                self._stage,
                (),
                mesh.dp > 1 if overlaps is None else overlaps,
                shape.shares_embeddings,
            )
        else:
            self.state = frozen_state(layout, self._megatron)

    def resident(self, needed: Collection[str]) -> dict[str, float]:
        """Return the bytes of the parts that are on the device in a phase that needs these."""
        settings = self._megatron
        offloads = {
            "params": settings.param_offload,
            "grads": settings.grad_offload,
            "optimizer": settings.optimizer_offload,
        }
        sizes = vars(self.state)
        return {f"{self.role} {part}": sizes[part] for part in offloads if part in needed or not offloads[part]}

    def forward(self, work: Pass) -> float:
        """Return the bytes of activations of a pass without gradients."""
        return forward_peak(self._shape, self._megatron, self._mesh, self._stage, work, cuda=True)

    def update(self, work: Pass, entropy: bool) -> float:
        """Return the bytes of activations of an update."""
        return update_peak(self._shape, self._megatron, self._mesh, self._stage, work, cuda=True, entropy=entropy)

    @property
    def replicas(self) -> int:
        """Number of model replicas."""
        return self._mesh.dp


def _phases(cfg: Config, models: Mapping[str, _Model], rollout: Rollout) -> Iterator[Phase]:
    """Yield the phases that hold tensors on the device."""
    work = _activations(cfg, models)
    work["update_weights"] = {"reshard buckets": 2.0 * (cfg.reshard.bucket_megabytes << 20)}
    for name in ("update_weights", "gen", *(phase for phase in work if phase != "update_weights")):
        row = row_of(name)
        assert row is not None
        parts: dict[str, float] = {}
        for role, model in models.items():
            parts |= model.resident(row.get(role, frozenset()))
        if not cfg.rollout.free_cache_engine or "kv_cache" in row["vllm"]:
            parts["vLLM"] = rollout.budget
        elif "weights" in row["vllm"]:
            parts["vLLM weights"] = float(rollout.weights)
        yield Phase(
            name, {key: size for key, size in {**parts, **work.get(name, {}), "reserved": RESERVED}.items() if size}
        )


def _activations(cfg: Config, models: Mapping[str, _Model]) -> dict[str, dict[str, float]]:
    """Return the activations of each pass over the models, by phase."""
    roll = cfg.rollout
    actor = cfg.actor
    critic = cfg.critic
    found = {}

    def add(phase: str, role: str, tokens: int, sequences: int | None, mini_batch: int | None = None) -> None:
        if role not in models:
            return
        model = models[role]
        work = _pass(cfg, tokens, sequences, model.replicas, mini_batch)
        entropy = role == "actor" and (actor.entropy_coeff != 0 or actor.entropy_coeff_end is not None)
        size = model.forward(work) if mini_batch is None else model.update(work, entropy)
        found[phase] = {"activations": size}

    add("old_log_prob", "actor", roll.log_prob_max_token_len_per_gpu, roll.log_prob_micro_batch_size_per_gpu)
    add("ref", "ref", cfg.ref.log_prob_max_token_len_per_gpu, cfg.ref.log_prob_micro_batch_size_per_gpu)
    add("values", "critic", critic.forward_max_token_len_per_gpu, critic.forward_micro_batch_size_per_gpu)
    for role, scorer in reward_models(cfg).items():
        add(role, role, scorer.forward_max_token_len_per_gpu, scorer.forward_micro_batch_size_per_gpu)
    mini_batch = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
    add("update_critic", "critic", critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu, mini_batch)
    mini_batch = actor.ppo_mini_batch_size
    add("update_actor", "actor", actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu, mini_batch)
    return found


def _pass(cfg: Config, tokens: int, sequences: int | None, replicas: int, mini_batch: int | None) -> Pass:
    """Return the largest micro-batch of a pass, all of whose tokens may be responses, and the largest number of
    micro-batches."""
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    if not cfg.actor.use_dynamic_bsz:
        tokens = longest * (sequences or cfg.actor.ppo_micro_batch_size_per_gpu or 1)
    prompts = cfg.data.train_batch_size if mini_batch is None else mini_batch
    all_tokens = math.ceil(prompts * cfg.rollout.n / replicas) * longest
    return Pass(min(tokens, all_tokens), min(tokens, all_tokens), math.ceil(all_tokens / tokens))


def _rollout(cfg: Config, shape: ModelShape, layout: Layout, tp_rank: int, device_bytes: int) -> Rollout:
    megatron = cfg.actor.megatron
    itemsize = ITEMSIZES[megatron.dtype]
    tp = cfg.rollout.tensor_model_parallel_size
    target = vllm_layout(shape, tp_rank, tp)
    aliased = find_aliases(layout, target, itemsize) if cfg.reshard.share_weights else {}
    own = sum(math.prod(size) for name, size in target.stacked_shapes.items() if name not in aliased)
    kv_heads = max(shape.num_kv_heads // tp, 1)
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    tokens = max(cfg.rollout.max_num_batched_tokens, longest)
    # Of one engine step: states and their residual, gate, up and product; logits and their float32 copy of each
    # sequence.
    states = tokens * (3 * shape.hidden_size + 3 * shape.active_ffn_size / tp) * itemsize
    logits = cfg.rollout.max_num_seqs * shape.vocab_size * (itemsize + 4)
    return Rollout(
        budget=cfg.rollout.gpu_memory_utilization * device_bytes,
        weights=own * itemsize,
        activations=states + logits,
        kv_bytes_per_token=2 * shape.num_layers * kv_heads * shape.head_dim * itemsize,
    )
