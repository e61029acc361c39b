"""Lower bounds of the time of each phase of a step, from FLOPs, bytes, and the peak rates of the
GPU.

A real step takes longer: kernels reach a part of the peak rates, and launches, latencies, the
host's work and waiting for the longest response are not counted. All prompts have one length, and
all responses have one. Sources: roofline model (Williams et al. 2009), pipeline bubble of
interleaved 1F1B (arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf_mc.architectures.layer import Layer
from rlhf_mc.architectures.operations import BACKWARD, ForwardFlops, forward_flops, output_flops
from rlhf_mc.architectures.spec import ModelShape, padded_vocab_size
from rlhf_mc.config.model_schema import MegatronConfig
from rlhf_mc.config.roles import (
    has_rollout_pool,
    in_rollout_pool,
    overlaps_reduction,
    parts_on_device,
    shared_models,
)
from rlhf_mc.config.schema import Config, layouts
from rlhf_mc.planner.activations import Activations
from rlhf_mc.planner.collectives import Collective, Passes, PassTokens
from rlhf_mc.planner.full_sharding import FullySharded, full_sharding
from rlhf_mc.planner.generation_time import generation, sequences_at_a_time
from rlhf_mc.planner.gpus import Machine, ProductRate
from rlhf_mc.planner.lengths import Lengths
from rlhf_mc.planner.memory import Phase, RankMemory, sum_by_name
from rlhf_mc.planner.model_state import ITEMSIZES, ModelState
from rlhf_mc.planner.rank_layouts import SomeSettings, layout_at, model_coordinate, some_settings
from rlhf_mc.planner.traffic import GEN, UPDATE_WEIGHTS, PhasePasses, Traffic, phase_work
from rlhf_mc.reshard.model_checks import cp_comm_type
from rlhf_mc.topology.mesh import Mesh

_FLOAT32 = 4


@dataclass(frozen=True)
class StepTimes:
    """The times of a step."""

    phases: tuple[Phase, ...]
    """Seconds by what takes them, one after the other."""
    tokens: float
    """Prompts and responses of the batch that the step trains on, as perf/total_num_tokens counts
    them."""
    world: int
    sequences_at_a_time: int
    """Sequences that an engine decodes at a time."""
    overlaps: bool = False
    """Ranks of a rollout pool generate while the others train: all but the weight update."""
    of_rollout: Collection[str] = ()
    """The phases of models in the rollout pool."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        total = sum(phase.total for phase in self.phases)
        return total - min(self.pool_seconds.values()) if self.overlaps else total

    @property
    def pool_seconds(self) -> dict[str, float]:
        """Seconds of a step in which each pool works, without the weight update."""
        seconds = {phase.name: phase.total for phase in self.phases if phase.name != UPDATE_WEIGHTS}
        rollout = sum(seconds.pop(name) for name in (GEN, *self.of_rollout))
        return {"train": sum(seconds.values()), "rollout": rollout}

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens per second and GPU: perf/throughput."""
        return self.tokens / self.seconds / self.world

    @property
    def bubble_share(self) -> float:
        """The share of the step in which pipeline stages wait for others."""
        return sum(phase.parts.get("bubble", 0.0) for phase in self.phases) / self.seconds


def plan_times(
    cfg: Config,
    shapes: Mapping[str, ModelShape],
    plan: Sequence[RankMemory],
    weights: Sequence[Traffic],
    machine: Machine,
    lengths: Lengths,
) -> StepTimes:
    """Return the times of a step whose memory is planned. shapes: of the run's models, by role.
    weights: transfers of the weight update."""
    states = largest_states(plan)
    kv_tokens = max(
        0.0,
        min(
            ranks.rollout.kv_cache / ranks.rollout.kv_bytes_per_token
            for ranks in plan
            if ranks.rollout is not None
        ),
    )
    decoded = sequences_at_a_time(cfg, machine.world, lengths, kv_tokens)
    phases = [Phase("gen", generation(cfg, shapes["actor"], machine, lengths, decoded))]
    phases += passes(cfg, shapes, states, machine, lengths)
    steps = {
        w.role: w.passes for w in phase_work(cfg, shapes, machine.world, lengths) if w.is_update
    }
    steps |= dict.fromkeys(plan[0].staying & steps.keys(), 1)
    onload = onload_bytes(cfg, states, [phase.name for phase in phases], steps) / machine.rates.host
    received = sum(machine.seconds(*bucket) for transfer in weights for bucket in transfer.buckets)
    phases += [Phase(UPDATE_WEIGHTS, {"weights": received})] if received else []
    phases += [Phase("offload", {"onload": onload})] if onload else []
    tokens = cfg.data.train_batch_size * cfg.rollout.n * lengths.total
    overlaps = has_rollout_pool(cfg) and cfg.rollout.one_step_off
    pooled = [role for role in shapes if in_rollout_pool(cfg, role)]
    return StepTimes(tuple(phases), tokens, machine.world, decoded, overlaps, pooled)


def largest_states(plan: Sequence[RankMemory]) -> dict[str, ModelState]:
    """Return the state of each model, by role, on the rank that holds most of it."""
    states = [state for ranks in plan for state in ranks.states.items()]
    return {
        role: max(
            (state for of, state in states if of == role),
            key=lambda state: state.params + state.optimizer,
        )
        for role in dict(states)
    }


def passes(
    cfg: Config,
    shapes: Mapping[str, ModelShape],
    states: Mapping[str, ModelState],
    machine: Machine,
    lengths: Lengths,
) -> list[Phase]:
    """Return the times of the phases in which a model computes. states: of each model, by role, on
    the rank that holds most. The other arguments are plan_times's."""
    times = []
    for work in phase_work(cfg, shapes, machine.world, lengths):
        megatron = layouts(cfg)[work.role]
        shape = shapes[work.role]
        sharding = full_sharding(cfg, work.role, shape, work.mesh)
        model = _Model(shape, megatron, work.mesh, machine, lengths, work.computed, sharding)
        parts = model.update(work, states[work.role]) if work.is_update else model.forward(work)
        times.append(
            Phase(work.phase, {part: work.passes * seconds for part, seconds in parts.items()})
        )
    return times


class _Model:
    """One model's passes."""

    def __init__(
        self,
        shape: ModelShape,
        megatron: MegatronConfig,
        mesh: Mesh,
        machine: Machine,
        lengths: Lengths,
        computed: float,
        sharding: FullySharded | None,
    ) -> None:
        self._shape = shape
        self._sharding = sharding
        self._megatron = megatron
        self._mesh = mesh
        self._machine = machine
        self._rate = ProductRate(machine, megatron.dtype, megatron.fp8 is not None)
        self._lengths = lengths
        self._computed = computed

    def forward(self, work: PhasePasses) -> dict[str, float]:
        """Return the parts of a pass without gradients."""
        return self._pipelined(work, backward=False)

    def update(self, work: PhasePasses, state: ModelState) -> dict[str, float]:
        """Return the parts of an optimizer step: forward and backward passes, sums of gradients,
        and the optimizer. state: on the rank that holds most.

        Where gradients are reduced during the backward pass of the last micro-batch, the part that
        takes longer than that pass is counted. New parameters are gathered after the optimizer step
        (docs/decisions/0012)."""
        seconds = self._pipelined(work, backward=True)
        sums = {} if self._sharding is not None else self._sums_of_gradients()
        if sums and overlaps_reduction(self._megatron, self._mesh.replicas, True):
            last = seconds["products"] * BACKWARD / (1 + BACKWARD) / work.micro_batches
            sums["gradients"] = max(0.0, sums["gradients"] - last)
        # Host memory is as fast as a GPU's link to it.
        rates = self._machine.rates
        on_host = self._sharding is not None and self._sharding.on_host
        rate = rates.host if on_host else rates.memory
        return {**seconds, **sums, "optimizer": self._optimizer_bytes(state) / rate}

    def _pipelined(self, work: PhasePasses, backward: bool) -> dict[str, float]:
        """Return the parts of a pass over all micro-batches through the pipeline.

        The slowest stage works on one micro-batch after the other. Before its first and after its
        last it waits for the first chunks of the other stages: (p - 1) / (v m) of the time of m
        micro-batches, with p equal stages of v chunks (arXiv 2104.04473, section 2.2)."""
        stages = range(self._mesh.pp)
        sequences = work.sequences / work.micro_batches
        one_micro_batch = [
            self._stage(stage, sequences, work.results, backward) for stage in stages
        ]
        seconds = [sum(parts.values()) for parts in one_micro_batch]
        slowest = max(stages, key=seconds.__getitem__)
        parts = {part: work.micro_batches * time for part, time in one_micro_batch[slowest].items()}
        if self._mesh.pp > 1:
            parts["bubble"] = (sum(seconds) - seconds[slowest]) / self._mesh.vpp
        return parts | self._gathers(parts["products"], work.micro_batches, backward)

    def _stage(
        self, stage: int, sequences: float, results: float, backward: bool
    ) -> dict[str, float]:
        """Return the parts of a micro-batch on a stage: products, and communication that they wait
        for."""
        products = self._products(stage, sequences, results, backward)
        settings = some_settings(
            self._megatron,
            "dtype",
            "sequence_parallel",
            "recompute_granularity",
            "tensor_model_parallel_size",
            "context_parallel_size",
            "cp_comm_type",
        )
        tokens = PassTokens(self._computed, results, 0.0, 1)
        of_sequence = _communication(
            self._shape, settings, self._mesh, stage, tokens, self._machine, backward
        )
        communication = {name: sequences * seconds for name, seconds in of_sequence.items()}
        if self._mesh.vpp > 1:
            # Messages overlap with the products of other virtual pipeline chunks
            # (models/gpt_model.py).
            communication["pipeline"] = max(0.0, communication["pipeline"] - products)
        if self._mesh.cp > 1 and cp_comm_type(self._shape, self._megatron) == "p2p":
            # Keys and values are received while attention to the ones before is computed.
            attention = self._attention(stage, sequences) * (1 + BACKWARD * backward)
            communication["context parallel"] = max(
                0.0, communication["context parallel"] - attention
            )
        return {
            "products": products,
            **self._traffic(stage, sequences, results, backward),
            **communication,
        }

    def _gathers(self, products: float, micro_batches: int, backward: bool) -> dict[str, float]:
        """Return the seconds of a pass's collectives of FSDP2 that its products do not hide."""
        if self._sharding is None:
            return {}
        collectives = self._sharding.collectives(0, micro_batches, backward)
        waits = _seconds_by_purpose(collectives, 0, self._machine)
        if copied := self._sharding.copied(micro_batches, backward):
            waits["host copies"] = copied / self._machine.rates.host
        for name, seconds in waits.items():
            waits[name] = max(0.0, seconds - products)
            products = max(0.0, products - seconds)
        return waits

    def _traffic(
        self, stage: int, sequences: float, results: float, backward: bool
    ) -> dict[str, float]:
        """Return the seconds in which a micro-batch's activations and logits are read and written
        outside of products, by the machine's overheads; none in a lower bound."""
        extra = self._machine.overheads
        if not extra.forward_traffic:
            return {}
        mesh = self._mesh
        activations = Activations(self._shape, self._megatron, cuda=True)
        without_recomputation = replace(self._megatron, recompute_granularity=None)
        whole = Activations(self._shape, without_recomputation, cuda=True)
        moved = 0.0
        for layer, count in self._layers(stage).items():
            stored = whole.layer_bytes(layer).stored
            recomputed = activations.layer_bytes(layer).recomputed
            training = stored * extra.training_traffic + recomputed * extra.forward_traffic
            moved += count * (training if backward else stored * extra.forward_traffic)
        seconds = {
            "activations": sequences / mesh.cp * self._computed * moved / self._machine.rates.memory
        }
        if stage == mesh.pp - 1 and not self._shape.value_head:
            passes = extra.training_logits if backward else extra.forward_logits
            logits = (
                sequences
                / mesh.cp
                * results
                * padded_vocab_size(self._shape.vocab_size, mesh.tp)
                / mesh.tp
            )
            seconds["logits"] = passes * logits * _FLOAT32 / self._machine.rates.memory
        return seconds

    def _attention(self, stage: int, sequences: float) -> float:
        """Return the seconds of attention of a micro-batch's forward pass on a stage."""
        flops = self._flops(0.0, self._layers(stage)).attention
        ranks = self._mesh.tp * self._mesh.cp
        return sequences / ranks * self._rate.seconds(ForwardFlops(0.0, 0.0, flops, 0.0))

    def _products(self, stage: int, sequences: float, results: float, backward: bool) -> float:
        """Return the seconds of a micro-batch's products on a stage, or of its weights' memory if
        that is longer. A backward pass reads the weights again, and reads and writes their float32
        gradients; of FSDP2 it writes them in the model's type."""
        mesh = self._mesh
        shape = self._shape
        sequences /= mesh.cp
        layers = self._layers(stage)
        flops = self._flops(results, layers)
        output = sequences * flops.output if stage == mesh.pp - 1 else 0.0
        unique = sequences * self._computed / self._lengths.total
        inner = ForwardFlops(
            unique * flops.projections,
            unique * flops.feed_forward,
            sequences * flops.attention,
            0.0,
        )
        repeated = {layer: n for layer, n in layers.items() if layer.feed_forward.is_recomputed}
        dense = unique * self._flops(0.0, repeated).feed_forward
        last = ForwardFlops(0.0, 0.0, 0.0, output)
        seconds = self._rate.seconds(inner) + self._rate.seconds(last)
        if backward:
            # The output layer's logits are computed again in the backward pass (models/heads.py).
            seconds += 0.0 if shape.value_head else self._rate.seconds(last)
            seconds += sum(self._rate.seconds(part.backward(shape)) for part in (inner, last))
            seconds += self._recomputed_seconds(inner, dense)
        head = 0 if stage < mesh.pp - 1 else output_flops(shape) / 2
        of_layers = sum(count * self._layer_weights(layer) for layer, count in layers.items())
        weights = (of_layers + head) / mesh.tp
        itemsize = ITEMSIZES[self._megatron.dtype]
        gradients = 2 * _FLOAT32 if self._sharding is None else itemsize
        gradients *= shape.lora is None
        read = weights * (2 * itemsize + gradients if backward else itemsize)
        return max(seconds / mesh.tp, read / self._machine.rates.memory)

    def _sums_of_gradients(self) -> dict[str, float]:
        """Return the seconds of gradients and of new parameters, on the stage that takes
        longest."""
        settings = some_settings(
            self._megatron, "dtype", "sequence_parallel", "use_distributed_optimizer"
        )
        overlaps = overlaps_reduction(self._megatron, self._mesh.replicas, True)
        stages = [
            _sums_of_gradients(self._shape, settings, self._mesh, stage, overlaps, self._machine)
            for stage in range(self._mesh.pp)
        ]
        slowest = max(range(self._mesh.pp), key=lambda stage: sum(stages[stage].values()))
        return dict(stages[slowest])

    def _recomputed_seconds(self, layers: ForwardFlops, dense_mlps: float) -> float:
        """Return the seconds of the recomputation of layers (models/gpt_model.py:
        recompute_modules): full, all of it; selective, the dense MLPs (their FLOPs), and of experts
        nothing with products."""
        if self._megatron.recompute_granularity is None:
            return 0.0
        if self._megatron.recompute_granularity == "full":
            return self._rate.seconds(layers)
        return self._rate.seconds(ForwardFlops(0.0, dense_mlps, 0.0, 0.0))

    def _layers(self, stage: int) -> dict[Layer, int]:
        """Return the distinct layers of a stage, with the number of each."""
        chunks = self._mesh.chunk_layers(self._shape.num_layers, stage)
        return self._shape.by_kind(itertools.chain(*chunks))

    def _flops(self, results: float, layers: Mapping[Layer, int]) -> ForwardFlops:
        """Return the FLOPs of a forward pass of one sequence through these layers."""
        return forward_flops(self._shape, [self._lengths.total], results, layers)

    def _layer_weights(self, layer: Layer) -> float:
        """Return the weights of a layer on all tensor-parallel ranks, with the experts of one
        expert-parallel rank."""
        return layer.mixer.weights() + layer.feed_forward.weights(self._mesh.ep)

    def _optimizer_bytes(self, state: ModelState) -> float:
        """Return the bytes that Adam reads and writes on a rank for its shard: gradient, main
        parameter and two moments in float32, of which it writes all but the gradient, and the
        parameter in its own type, which FSDP2 does not keep."""
        narrow = self._megatron.dtype != "float32" and self._sharding is None
        numel = state.optimizer / (_FLOAT32 * (2 + narrow))
        return numel * (7 * _FLOAT32 + (ITEMSIZES[self._megatron.dtype] if narrow else 0))


@functools.lru_cache(maxsize=4096)
def _communication(
    shape: ModelShape,
    settings: SomeSettings,
    mesh: Mesh,
    stage: int,
    tokens: PassTokens,
    machine: Machine,
    backward: bool,
) -> Mapping[str, float]:
    """Return the seconds, by purpose, of the collectives that a stage's products wait for, and of
    messages.

    Of the tensor-parallel collectives of a backward pass as many as a forward pass has overlap with
    the products of column-parallel layers: the sum of the input's gradient, and the second gather
    of the input (tensor_parallel/layers.py; Transformer Engine's layers do the same)."""
    rank = stage * mesh.tp * mesh.replicas
    of_rank = Passes(shape, MegatronConfig(**dict(settings)), mesh, rank, cuda=True)
    forward = _seconds_by_purpose(of_rank.forward(tokens), rank, machine)
    times = forward
    if backward:
        times = _seconds_by_purpose(of_rank.forward_and_backward(tokens), rank, machine)
        if mesh.tp > 1:
            times["tensor parallel"] -= forward["tensor parallel"]
    waited_for = ("tensor parallel", "context parallel", "experts", "pipeline")
    return {name: seconds for name, seconds in times.items() if name in waited_for}


@functools.lru_cache(maxsize=4096)
def _sums_of_gradients(
    shape: ModelShape,
    settings: SomeSettings,
    mesh: Mesh,
    stage: int,
    overlaps: bool,
    machine: Machine,
) -> Mapping[str, float]:
    rank = stage * mesh.tp * mesh.replicas
    of_rank = Passes(shape, MegatronConfig(**dict(settings)), mesh, rank, cuda=True)
    layout = layout_at(shape, mesh, model_coordinate(mesh, rank), True)
    return {
        "gradients": 0.0,
        **_seconds_by_purpose(of_rank.gradients(layout, overlaps), rank, machine),
    }


def _seconds_by_purpose(
    collectives: Iterable[Collective], rank: int, machine: Machine
) -> dict[str, float]:
    """Return the seconds of the collectives on this rank, by purpose, one after the other."""
    return sum_by_name(
        (collective.name, machine.seconds(*collective.received(rank, machine.gpus_per_node)))
        for collective in collectives
    )


def onload_bytes(
    cfg: Config, states: Mapping[str, ModelState], phases: Sequence[str], steps: Mapping[str, int]
) -> float:
    """Return the bytes that offload settings bring to the device in a step of these phases, in
    their order, after the weight update. steps: how often the optimizer state comes, by role.
    Gradients are freed without a copy; copies to the host overlap with the computation
    (models/offload.py): neither is counted."""
    shared = shared_models(cfg)
    placed = (parts_on_device(phase, shared) for phase in ("update_weights", *phases))
    rows = [row for row in placed if row is not None]
    total = 0
    for role, state in states.items():
        settings = layouts(cfg)[role]
        needed = ["params" in row.get(role, ()) for row in rows]
        # The step after this one begins with the same phase as this one.
        arrivals = sum(
            now and not before for before, now in zip([needed[-1], *needed], needed, strict=False)
        )
        total += arrivals * state.params * settings.param_offload
        total += steps.get(role, 0) * state.optimizer * settings.optimizer_offload
    return total
