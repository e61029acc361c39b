"""One PPO step of one role on one simulated rank of fake CUDA devices, and a weight update."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import te_kernels
import torch
import torch.distributed as dist
from fake_cases import CASES, Case, Report
from fake_device import FakeCuda
from families import traits
from gpu_parts.engines import TEMPERATURE, Role, make_engine, objective, token_batch
from megatron.core import parallel_state
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from safetensors.torch import save_file

from rlhf_mc.architectures.packed_experts import stored_shapes
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint import training_tensors
from rlhf_mc.checkpoint.training_blocks import TrainedModel, model_blocks
from rlhf_mc.checkpoint.training_tensors import HostBuffers, TensorWriter, read_tensors
from rlhf_mc.config.model_schema import FsdpConfig
from rlhf_mc.config.schema import LoraConfig, OptimConfig
from rlhf_mc.data.balance import Shared
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine, engine_layouts
from rlhf_mc.models.gpt_model import DTYPES
from rlhf_mc.models.heads import log_prob_head, value_head
from rlhf_mc.reshard.freeze import frozen_parameters, frozen_tensors
from rlhf_mc.reshard.layout import correction_biases, hf_layout
from rlhf_mc.reshard.placement import rollout_layouts
from rlhf_mc.reshard.plan import make_plans
from rlhf_mc.reshard.weight_sync import VerifyWhen, WeightSync
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology import groups as topology
from rlhf_mc.topology.consensus import sum_over_ranks
from rlhf_mc.topology.groups import build_groups, simulated_rank
from rlhf_mc.topology.mesh import Mesh

LENGTH = 16
"""Tokens of each sequence, half of them response tokens. All sequences have one prompt, and micro-
batches are equally large."""
PER_MICRO_BATCH = 4
_to_host = MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize


def run(case: Case, rank: int) -> Report:
    """Run the step of the case on one rank."""
    import fake_faults

    experts = ModelShape.from_hf_config(case.config).num_experts
    gpu = FakeCuda(case.config["num_experts_per_tok"] / experts if experts else 1.0)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _write_checkpoint(case, directory / "model")
        stack.enter_context(simulated_rank(rank, case.world))
        stack.enter_context(simulation())
        for fault in case.faults:
            stack.enter_context(getattr(fake_faults, fault)())
        stack.enter_context(gpu)
        _step(case, gpu, directory)
        gpu.phase = "end"
        gc.collect()  # unlocks the memory of this case
    return Report(frozenset(gpu.operators), gpu.waits, gpu.pageable, tuple(gpu.collectives))


def _write_checkpoint(case: Case, directory: Path) -> None:
    """Write the files of the model, with the same number everywhere."""
    directory.mkdir()
    shape = ModelShape.from_hf_config(case.config)
    shapes = stored_shapes(shape, hf_layout(shape).shapes)
    tensors = {name: torch.full(size, 0.01, dtype=torch.bfloat16) for name, size in shapes.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(case.config))


class _Inline:
    """Stands for threading.Thread, and runs at its start: another thread has no dispatch mode."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self.start = target

    def join(self, seconds: float | None = None) -> None: ...

    def is_alive(self) -> bool:
        return False


@contextlib.contextmanager
def simulation() -> Iterator[None]:
    """Replace what fake tensors and fake groups cannot do."""
    threading = SimpleNamespace(Thread=_Inline)
    with (
        # its tensors are of another case
        mock.patch.object(parallel_state, "_GLOBAL_MEMORY_BUFFER", None),
        mock.patch.object(topology, "threading", threading),
        mock.patch.object(training_tensors, "threading", threading),
        mock.patch.object(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _route_evenly),
        mock.patch.object(dist, "get_backend", lambda group=None: "cpu:gloo,cuda:nccl"),
    ):
        yield


def _route_evenly(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Do as the original, whose numbers on the host are unknown, with each expert having the same
    number of tokens."""
    result = _to_host(self, point, tokens_per_expert)
    if point != self.cuda_dtoh_point:
        return result
    tokens = self.routing_map.size(0) * self.config.moe_router_topk
    per_expert = tokens // self.num_experts
    if self.ep_size > 1 or self.tp_size > 1:
        self.input_splits = np.full(self.ep_size, tokens // self.ep_size)
        self.output_splits = self.input_splits.copy()
        self.output_splits_tp = np.full(self.tp_size, tokens)
    if self.num_local_experts > 1 and not self.config.moe_permute_fusion:
        shape = (self.tp_size * self.ep_size, self.num_local_experts)
        self.num_global_tokens_per_local_expert = torch.full(shape, per_expert)
    return (
        None
        if result is None
        else torch.full((self.num_local_experts,), per_expert * self.tp_size * self.ep_size)
    )


def _step(case: Case, gpu: FakeCuda, directory: Path) -> None:
    gpu.phase = "load"
    mesh = Mesh(
        case.world,
        case.tp,
        case.pp,
        case.ep,
        vpp=case.vpp,
        cp=case.cp,
        dynamic_cp=case.dynamic_cp,
        shards=case.shards or 1,
    )
    groups = build_groups(mesh)
    role: Role = "actor" if case.role == "actor" else "critic"
    engine = make_engine(
        str(directory / "model"),
        role,
        groups,
        LoraConfig(case.lora_rank),
        fsdp=FsdpConfig(case.shards, offload_policy=case.on_host) if case.shards else None,
        **{"dtype": "bfloat16", **case.megatron},
    )
    if case.role != "reward_model":
        gpu.phase = "make_trainable"
        frozen = frozen_tensors("actor.freeze", case.freeze, engine.shape)
        layout = engine_layouts(engine)[engine.groups.rank]
        engine.make_trainable(
            OptimConfig(lr=1e-6), total_steps=10, frozen=frozen_parameters(frozen, layout)
        )
    batch, micro_batches = _batch(engine)
    te_kernels.rotated.clear()
    gpu.phase = "score"
    head = (
        log_prob_head(engine.shape.vocab_size, TEMPERATURE) if case.role == "actor" else value_head
    )
    scores = engine.my_scores(batch, micro_batches, head, per_sequence=case.role == "reward_model")
    if case.lora_rank:
        engine.without_adapters().my_scores(batch, micro_batches, head)
    gpu.phase = "sum_scores"
    scores = sum_over_ranks(scores)
    if case.role != "reward_model":
        batch = with_targets(batch, scores)
        _train(case.steps, gpu, engine, batch, micro_batches)
        _checkpoint(gpu, engine, directory)
        if case.shards or case.world == 1:
            _step_after_load(gpu, engine, batch, micro_batches)
    if case.transformer_engine and case.cp > 1 and not traits(engine.shape).kv_lora_rank:
        assert te_kernels.rotated == set(mesh.context_sizes), te_kernels.rotated
    gpu.phase = "offload"
    engine.offload.offload_all_but(())
    gpu.phase = "onload"
    engine.offload.onload(engine.offload.names)
    if case.role == "actor":
        _update_weights(case, gpu, engine)


def _batch(engine: ModelEngine) -> tuple[RaggedBatch, list[Shared]]:
    """Return a batch of at least two micro-batches on every replica, and this replica's
    micro-batches. Stages have one more than their number, so that a forward and a backward pass
    follow each other. Virtual chunks take a multiple."""
    mesh = engine.groups.mesh
    num_micro_batches = 2 * mesh.pp if mesh.vpp > 1 else mesh.pp + 1
    count = PER_MICRO_BATCH * num_micro_batches * mesh.dp
    half = LENGTH // 2
    batch = token_batch(engine.shape.vocab_size, [half] * count, [half] * count)
    sequences = batch.tokens.view(count, LENGTH)
    sequences[:, :half] = sequences[0, :half].clone()
    of_replica = list(range(engine.groups.coordinate.dp, count, mesh.dp))
    sizes = itertools.cycle(reversed(mesh.context_sizes))
    return batch, [
        Shared(of_replica[i::num_micro_batches], next(sizes)) for i in range(num_micro_batches)
    ]


def with_targets(batch: RaggedBatch, scores: torch.Tensor) -> RaggedBatch:
    zeros = torch.zeros_like(scores)
    return batch.with_fields(
        old_log_probs=scores, ref_log_probs=zeros, advantages=zeros + 1, values=zeros, returns=zeros
    )


def _train(
    num_steps: int,
    gpu: FakeCuda,
    engine: ModelEngine,
    batch: RaggedBatch,
    micro_batches: list[Shared],
) -> None:
    gpu.phase = "objective"
    loss = objective(engine, batch, "token-mean")
    compute_gradient = engine._compute_gradient

    def gradient(*args: Any) -> Any:
        gpu.phase = "gradient"
        sums = compute_gradient(*args)
        gpu.phase = "optimizer_step"
        return sums

    with mock.patch.object(engine, "_compute_gradient", gradient):
        steps = [engine.train_step(batch, micro_batches, loss) for _ in range(num_steps)]
    gpu.phase = "statistics"
    assert not any(row["skipped"] for row in engine.statistics(steps))
    engine.end_of_ppo_step()


def _checkpoint(gpu: FakeCuda, engine: ModelEngine, directory: Path) -> None:
    """Save and load the training state: in a world of one by files, which need the plans of all
    ranks, otherwise from the device to the host and back."""
    model = TrainedModel(engine, engine_layouts(engine))
    path = directory / "checkpoint"
    engine.offload.onload(engine.offload.names)  # the optimizer state has left after its step
    for buffers in (HostBuffers(), None):
        gpu.phase = "save" if buffers is None else "async_save"
        blocks = model_blocks(model)
        if engine.groups.mesh.world == 1:
            path.mkdir()
            TensorWriter(blocks, path, buffers).finish()
            gpu.phase = "load_state"
            engine.load_progress(engine.progress())
            read_tensors(model_blocks(model), path)
            path = directory / "second_checkpoint"
        elif buffers is not None:
            for block, copy in zip(blocks, buffers.copies(blocks), strict=True):
                block.data.copy_(copy, non_blocking=True)


def _step_after_load(
    gpu: FakeCuda, engine: ModelEngine, batch: RaggedBatch, micro_batches: list[Shared]
) -> None:
    """Take a step with the optimizer state that a resume allocates. Its waits and copies are those
    of the other steps, and are not recorded."""
    recorded = gpu.waits.copy(), gpu.pageable.copy()
    engine.load_progress(engine.progress())
    engine.train_step(batch, micro_batches, objective(engine, batch, "token-mean"))
    gpu.waits, gpu.pageable = recorded


def _update_weights(case: Case, gpu: FakeCuda, engine: ModelEngine) -> None:
    """Move the weights to rollout engines of two ranks, or of one in a world of one, and verify
    those of one case, with blocks of other ranks and of this one: checksums are a third of the
    time, and the same for all."""
    rank = engine.groups.rank
    world = engine.groups.mesh.world
    size = min(2, world)
    wanted = rollout_layouts(
        engine.shape.base, [range(i, i + size) for i in range(0, world, size)], vllm_layout
    )
    dtype = DTYPES[engine.dtype]
    gpu.phase = "update_weights"
    biases = correction_biases(engine.shape)
    verify_when: VerifyWhen = "always" if case == CASES["experts, parallel"] else "off"
    trained = engine_layouts(engine, engine.shape.base)
    plans = make_plans(trained, wanted, biases, dtype.itemsize, 1 << 16)
    sync = WeightSync(plans, rank, verify_when, dtype, keep_views=not case.lora_rank)
    target = {
        name: torch.empty(
            shape, dtype=torch.float32 if name in wanted[rank].float32 else dtype, device="cuda:0"
        )
        for name, shape in wanted[rank].shapes.items()
    }
    sync.run(engine.rollout_params, target)
