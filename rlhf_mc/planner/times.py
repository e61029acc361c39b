"""Lower bounds of the time of each phase of a step, from FLOPs, bytes, and the peak rates of the GPU.

A real step takes longer: kernels reach a part of the peak rates, and launches, latencies, the host's work and waiting
for the longest response are not counted. All prompts have one length, and all responses have one. Sources: roofline
model (Williams et al. 2009), pipeline bubble of interleaved 1F1B (arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_mc.architectures.operations import BACKWARD, ForwardFlops, forward_flops, output_flops
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.model_schema import MegatronConfig
from rlhf_mc.config.placement import row_of
from rlhf_mc.config.reward_schema import unnamed
from rlhf_mc.config.schema import Config, layouts, reward_models
from rlhf_mc.planner.gpus import Rates
from rlhf_mc.planner.lengths import Lengths, Share, drawn_prompts, responses_per_prompt, share_of
from rlhf_mc.planner.memory import RankMemory
from rlhf_mc.planner.model_state import ITEMSIZES, ModelState
from rlhf_mc.topology.mesh import mesh_of

_FLOAT32 = 4


@dataclass(frozen=True)
class Machine:
    """The GPUs of a run and their links."""

    world: int
    gpus_per_node: int
    rates: Rates
    network: float
    """Bytes per second and direction of the network, per GPU."""


@dataclass(frozen=True)
class PhaseTime:
    """The time of a phase."""

    name: str
    parts: Mapping[str, float]
    """Seconds by what takes them, one after the other."""

    @property
    def seconds(self) -> float:
        """The seconds of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class StepTimes:
    """The times of a step."""

    phases: tuple[PhaseTime, ...]
    tokens: float
    """Prompts and responses of the batch that the step trains on, as perf/total_num_tokens counts them."""
    world: int
    sequences_at_a_time: int
    """Sequences that an engine decodes at a time."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens per second and GPU: perf/throughput."""
        return self.tokens / self.seconds / self.world

    @property
    def bubble_share(self) -> float:
        """The share of the step in which pipeline stages wait for others."""
        return sum(phase.parts.get("bubble", 0.0) for phase in self.phases) / self.seconds


def plan_times(
    cfg: Config, shapes: Mapping[str, ModelShape], plan: Sequence[RankMemory], machine: Machine, lengths: Lengths
) -> StepTimes:
    """Return the times of a step whose memory is planned. shapes: of the run's models, by role."""
    states = {
        role: max((ranks.states[role] for ranks in plan), key=lambda state: state.params + state.optimizer)
        for role in shapes
    }
    kv_tokens = min(ranks.rollout.kv_cache / ranks.rollout.kv_bytes_per_token for ranks in plan)
    return step_times(cfg, shapes, states, machine, lengths, max(kv_tokens, 0.0))


def step_times(
    cfg: Config,
    shapes: Mapping[str, ModelShape],
    states: Mapping[str, ModelState],
    machine: Machine,
    lengths: Lengths,
    kv_tokens: float,
) -> StepTimes:
    """Return the times of a step. shapes: of the run's models, by role. states: of each model on the rank that holds
    most. kv_tokens: tokens for which an engine's KV cache has room."""
    models = {role: _Model(shape, layouts(cfg)[role], machine, states[role], lengths) for role, shape in shapes.items()}
    held = sequences_at_a_time(cfg, machine.world, lengths, kv_tokens)
    phases = [PhaseTime("gen", generation(cfg, shapes["actor"], machine, lengths, held)), *_passes(cfg, models)]
    onload = onload_bytes(cfg, states, [phase.name for phase in phases]) / machine.rates.host
    phases += [PhaseTime("offload", {"onload": onload})] if onload else []
    tokens = cfg.data.train_batch_size * cfg.rollout.n * lengths.total
    return StepTimes(tuple(phases), tokens, machine.world, held)


# ---------------------------------------------------------------- generation


def sequences_at_a_time(cfg: Config, world: int, lengths: Lengths, kv_tokens: float) -> int:
    """Return the number of sequences that an engine decodes at a time: those of its KV cache, if each is half
    generated, at most rollout.max_num_seqs, and at most the engine's."""
    engines = world // cfg.rollout.tensor_model_parallel_size
    mine = math.ceil(drawn_prompts(cfg) * responses_per_prompt(cfg) / engines)
    half_generated = lengths.prompt + lengths.response / 2
    return max(1, min(cfg.rollout.max_num_seqs, mine, int(kv_tokens / half_generated)))


def generation(cfg: Config, shape: ModelShape, machine: Machine, lengths: Lengths, held: int) -> dict[str, float]:
    """Return the parts of the generation of a step's responses. held: sequences that an engine decodes at a time.

    Prefill is bound by its FLOPs; an engine computes each prompt once, by its prefix cache. Decoding computes one token
    of each sequence in an engine step, which reads the weights and the keys and values of all sequences: the longer of
    memory and FLOPs, at the mean length. A layer has two all-reduces."""
    tp = cfg.rollout.tensor_model_parallel_size
    engines = machine.world // tp
    prompts = drawn_prompts(cfg)
    responses = responses_per_prompt(cfg)
    sequences = math.ceil(prompts * responses / engines)
    # The responses of a prompt are generated by different engines (rollout/vllm_engine.py).
    prefilled = math.ceil(prompts * min(responses, engines) / engines)
    rates = machine.rates
    fp8 = cfg.rollout.quantization == "fp8"
    rate = _Rate(rates, cfg.actor.megatron.dtype, fp8)
    prefill = rate.seconds(forward_flops(shape, [lengths.prompt], 1)) * prefilled / tp
    # Positions 1 to the last but one of the response; its first token comes from the prefill.
    steps = max(lengths.response - 1, 0.0) * sequences / held
    context = lengths.prompt + lengths.response / 2
    flops = forward_flops(shape, [context], 1)
    one = ForwardFlops(
        flops.projections / context, flops.feed_forward / context, 2 * flops.attention / (context + 1), flops.output
    )
    itemsize = ITEMSIZES[cfg.actor.megatron.dtype]
    kv_bytes = 2 * shape.num_layers * max(shape.num_kv_heads // tp, 1) * shape.head_dim * itemsize
    read = decode_weight_bytes(shape, tp, itemsize, 1 if fp8 else itemsize, held) + held * context * kv_bytes
    memory = read / rates.memory
    products = held * rate.seconds(one) / tp
    found = {"prefill": prefill, "decode": steps * max(memory, products)}
    if tp > 1:
        tokens = steps * held + prefilled * lengths.prompt
        states = 2 * shape.num_layers * tokens * shape.hidden_size * itemsize
        found["tensor parallel"] = ring_seconds(2 * states, tp, machine)
    return found


def decode_weight_bytes(shape: ModelShape, tp: int, itemsize: int, linear_itemsize: int, tokens: int) -> float:
    """Return the bytes of weights that an engine step of `tokens` tokens reads on a rank: all layers and the output
    layer. Of E experts, of which a token has k, it reads those that any token has: E (1 - (1 - k / E)^tokens) of evenly
    routed tokens."""
    q = shape.num_heads * shape.head_dim / tp
    kv = max(shape.num_kv_heads / tp, 1) * shape.head_dim
    used = 1.0
    if shape.has_experts:
        missed = 1 - shape.experts_per_token / shape.num_experts
        used = shape.num_experts / shape.experts_per_token * (1 - missed**tokens)
    layer = shape.hidden_size * (2 * q + 2 * kv + 3 * used * shape.active_ffn_size / tp)
    head = shape.vocab_size * shape.hidden_size / tp
    return shape.num_layers * layer * linear_itemsize + head * itemsize


def ring_seconds(num_bytes: float, ranks: int, machine: Machine) -> float:
    """Return the seconds of an all-gather or reduce-scatter of this many bytes in all over consecutive ranks, in rings
    (Patarasuk and Yuan 2009): each rank receives (n - 1) / n of them. Of the k members on a node each receives 1 / k of
    its bytes from another node."""
    received = num_bytes * (ranks - 1) / ranks
    inside = received / machine.rates.nvlink
    members = min(ranks, machine.gpus_per_node)
    return inside if ranks <= members else max(inside, received / members / machine.network)


# ---------------------------------------------------------------- passes of training


class _Rate:
    """Rates of products."""

    def __init__(self, rates: Rates, dtype: str, fp8: bool) -> None:
        self._wide = rates.float32 if dtype == "float32" else rates.bfloat16
        self._weights = (rates.fp8 or self._wide) if fp8 else self._wide

    def seconds(self, flops: ForwardFlops) -> float:
        """Return the seconds of a forward pass. With fp8 attention and output layer are in bfloat16."""
        in_layers = (flops.projections + flops.feed_forward) / self._weights
        return in_layers + (flops.attention + flops.output) / self._wide


class _Model:
    """One role's model."""

    def __init__(
        self, shape: ModelShape, megatron: MegatronConfig, machine: Machine, state: ModelState, lengths: Lengths
    ) -> None:
        self.megatron = megatron
        self.mesh = mesh_of(megatron, machine.world)
        self.state = state
        self._shape = shape
        self._machine = machine
        self._rate = _Rate(machine.rates, megatron.dtype, megatron.fp8 is not None)
        self._lengths = lengths

    def share(self, num_sequences: int, limit: int, dynamic: bool) -> Share:
        """Return a replica's share of a batch. limit: tokens of a micro-batch (dynamic), or its sequences."""
        return share_of(self.mesh, num_sequences, limit, dynamic, self._lengths)

    def forward(self, share: Share, per_sequence: bool = False) -> dict[str, float]:
        """Return the parts of a pass without gradients. per_sequence: the output is of the last token alone."""
        return self._pipelined(share, backward=False, positions=1 if per_sequence else self._lengths.response)

    def update(self, share: Share) -> dict[str, float]:
        """Return the parts of an optimizer step: forward and backward passes, and the optimizer."""
        found = self._pipelined(share, backward=True, positions=self._lengths.response)
        return {**found, "optimizer": self._optimizer_bytes() / self._machine.rates.memory}

    def _pipelined(self, share: Share, backward: bool, positions: float) -> dict[str, float]:
        """Return the parts of a pass over all micro-batches through the pipeline.

        The slowest stage works on one micro-batch after the other. Before its first and after its last it waits for
        the first chunks of the other stages: (p - 1) / (v m) of the time of m micro-batches, with p equal stages of v
        chunks (arXiv 2104.04473, section 2.2)."""
        mean = share.sequences / share.micro_batches
        of_one = [self._stage_seconds(stage, mean, positions, backward) for stage in range(self.mesh.pp)]
        slowest = max(range(self.mesh.pp), key=of_one.__getitem__)
        found = {"products": share.micro_batches * of_one[slowest]}
        if self.mesh.pp > 1:
            found["bubble"] = (sum(of_one) - of_one[slowest]) / self.mesh.vpp
        if share.dummies:
            found["dummies"] = share.dummies * self._stage_seconds(slowest, 1, positions, backward)
        return found

    def _stage_seconds(self, stage: int, sequences: float, positions: float, backward: bool) -> float:
        """Return the seconds of a micro-batch on a stage: of its products, or of its weights' memory if that is
        longer. A backward pass reads the weights again, and reads and writes their float32 gradients."""
        mesh = self.mesh
        shape = self._shape
        layers = sum(map(len, mesh.chunk_layers(shape.num_layers, stage)))
        flops = forward_flops(shape, [self._lengths.total], positions)
        part = sequences * layers / shape.num_layers
        output = sequences * flops.output if stage == mesh.pp - 1 else 0.0
        inner = ForwardFlops(part * flops.projections, part * flops.feed_forward, part * flops.attention, 0.0)
        seconds = self._rate.seconds(inner)
        end = self._rate.seconds(ForwardFlops(0.0, 0.0, 0.0, output))
        if backward:
            # The output layer's logits are computed again in the backward pass (models/heads.py).
            end *= 1 + BACKWARD + (not shape.value_head)
            seconds = seconds * (1 + BACKWARD) + self._recomputed_seconds(inner)
        head = 0 if stage < mesh.pp - 1 else output_flops(shape) / 2
        weights = (layers * self._layer_weights() + head) / mesh.tp
        itemsize = ITEMSIZES[self.megatron.dtype]
        read = weights * (2 * itemsize + 2 * _FLOAT32 if backward else itemsize)
        return max((seconds + end) / mesh.tp, read / self._machine.rates.memory)

    def _recomputed_seconds(self, layers: ForwardFlops) -> float:
        """Return the seconds of the recomputation of layers (models/build.py: recompute_modules): full, all of it;
        selective, a dense MLP, or of experts nothing with products."""
        if self.megatron.recompute_granularity is None:
            return 0.0
        if self.megatron.recompute_granularity == "full":
            return self._rate.seconds(layers)
        if self._shape.has_experts:
            return 0.0
        return self._rate.seconds(ForwardFlops(0.0, layers.feed_forward, 0.0, 0.0))

    def _layer_weights(self) -> float:
        """Return the weights of a layer on all tensor-parallel ranks, of the experts those of one expert-parallel
        rank."""
        shape = self._shape
        q = shape.num_heads * shape.head_dim
        kv = shape.num_kv_heads * shape.head_dim
        experts = shape.num_experts * shape.expert_ffn_hidden_size // self.mesh.ep
        return shape.hidden_size * (2 * q + 2 * kv + 3 * (experts if shape.has_experts else shape.ffn_hidden_size))

    def _optimizer_bytes(self) -> float:
        """Return the bytes that Adam reads and writes on a rank for its shard: gradient, main parameter and two moments
        in float32, of which it writes all but the gradient, and the parameter in its own type."""
        narrow = self.megatron.dtype != "float32"
        numel = self.state.optimizer / (_FLOAT32 * (2 + narrow))
        return numel * (7 * _FLOAT32 + (ITEMSIZES[self.megatron.dtype] if narrow else 0))


def _passes(cfg: Config, models: Mapping[str, _Model]) -> Iterator[PhaseTime]:
    """Yield the phases that pass the step's batch through a model, in the order of a step."""
    dynamic = cfg.actor.use_dynamic_bsz
    batch = cfg.data.train_batch_size * cfg.rollout.n
    roll = cfg.rollout

    def limit(tokens: int, sequences: int | None) -> int:
        return tokens if dynamic else sequences or cfg.actor.ppo_micro_batch_size_per_gpu or 1

    scored = {
        "old_log_prob": ("actor", limit(roll.log_prob_max_token_len_per_gpu, roll.log_prob_micro_batch_size_per_gpu)),
        "ref": ("ref", limit(cfg.ref.log_prob_max_token_len_per_gpu, cfg.ref.log_prob_micro_batch_size_per_gpu)),
        "values": (
            "critic",
            limit(cfg.critic.forward_max_token_len_per_gpu, cfg.critic.forward_micro_batch_size_per_gpu),
        ),
    }
    if cfg.algorithm.rollout_correction.bypass_mode:
        del scored["old_log_prob"]
    for role, scorer in reward_models(cfg).items():
        scored[role] = (role, limit(scorer.forward_max_token_len_per_gpu, scorer.forward_micro_batch_size_per_gpu))
    for phase, (role, most) in scored.items():
        if role in models:
            model = models[role]
            of_sequences = unnamed(role) == "reward_model"
            yield PhaseTime(phase, model.forward(model.share(batch, most, dynamic), of_sequences))
    for role, section in (("critic", cfg.critic), ("actor", cfg.actor)):
        if role in models:
            mini = section.ppo_mini_batch_size or cfg.actor.ppo_mini_batch_size
            steps = (section.ppo_epochs or cfg.actor.ppo_epochs) * cfg.data.train_batch_size // mini
            most = limit(section.ppo_max_token_len_per_gpu, section.ppo_micro_batch_size_per_gpu)
            found = models[role].update(models[role].share(mini * roll.n, most, dynamic))
            yield PhaseTime(f"update_{role}", {part: steps * seconds for part, seconds in found.items()})


def onload_bytes(cfg: Config, states: Mapping[str, ModelState], phases: Sequence[str]) -> float:
    """Return the bytes that offload settings bring to the device in a step of these phases, in their order, after the
    weight update. Gradients are freed without a copy; copies to the host overlap with the computation
    (models/offload.py): neither is counted."""
    rows = [row for row in map(row_of, ("update_weights", *phases)) if row is not None]
    total = 0
    for role, state in states.items():
        settings = layouts(cfg)[role]
        for part, offloads in (("params", settings.param_offload), ("optimizer", settings.optimizer_offload)):
            needed = [part in row.get(role, ()) for row in rows]
            # The step after this one begins with the same phase as this one.
            arrivals = sum(now and not before for before, now in zip([needed[-1], *needed], needed, strict=False))
            total += arrivals * vars(state)[part] * offloads
    return total
