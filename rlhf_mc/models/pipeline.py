"""Micro-batches through Megatron-Core's pipeline schedule, and its settings: shapes of the P2P
messages, the reduction of gradients during the backward pass (overlap_grad_reduce), named ranges in
traces, and recovery from running out of memory in the passes of an update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func, get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig

from rlhf_mc import platform
from rlhf_mc.config.model_schema import fsdp_config
from rlhf_mc.config.roles import overlaps_reduction
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.data.balance import num_sharing_ranks
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.context_parallel import Context
from rlhf_mc.models.expert_parts import RouterBalance
from rlhf_mc.models.forward import (
    MicroBatch,
    pack_micro_batch,
    packed_lengths,
    run_stage,
    states_at,
)
from rlhf_mc.models.gpt_model import PackedGPT
from rlhf_mc.models.heads import output_weight
from rlhf_mc.models.megatron_patches import megatron_calls, own_operations
from rlhf_mc.models.router_replay import ExpertReplay
from rlhf_mc.models.transformer_engine import token_multiple
from rlhf_mc.runtime.work import count, working
from rlhf_mc.topology.groups import ProcessGroups

Shape = tuple[int, int, int]
OnLastStage = Callable[[PackedGPT, torch.Tensor, MicroBatch], Any]
"""(model, states [r, 1, hidden], micro-batch) -> the loss, or nothing in a forward pass."""


class PlannedShapes(P2PCommunicator):
    """Megatron-Core's P2P messages, without its exchange of shapes before each tensor.

    With ragged micro-batches (variable_seq_lengths) the original sends the shape as a tensor of its
    own, waits for the device, and reads it on the host. Here the shapes come from the plan, in the
    order in which the schedule receives the tensors: the order of the micro-batches, forward and
    backward, or with virtual pipeline chunks of its schedule table."""

    def __init__(
        self, group: dist.ProcessGroup, config: TransformerConfig, lengths: Sequence[int]
    ) -> None:
        """lengths: tokens on this rank of each micro-batch, padding included."""
        super().__init__(group, config)
        chunks = config.virtual_pipeline_model_parallel_size or 1
        table = get_schedule_table(len(lengths), chunks, config.microbatch_group_size_per_vp_stage)
        shapes = [
            (chunk, (lengths[micro_batch], 1, config.hidden_size)) for micro_batch, chunk in table
        ]
        # From the last stage the first one receives the outputs of all chunks but the last, which
        # ends the model. The last stage receives the gradients of these outputs.
        around = [shape for chunk, shape in shapes if chunk < chunks - 1]
        every = [shape for _, shape in shapes]
        self._from_prev = iter(around if group.rank() == 0 else every)
        self._from_next = iter(around if group.rank() == group.size() - 1 else every)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        """Return the shapes of the next tensors from the previous and from the next stage."""
        from_prev = next(self._from_prev) if recv_prev else None
        from_next = next(self._from_next) if recv_next else None
        return from_prev, from_next


def set_reduction(config: Any, replicated: Sequence[Any]) -> None:
    """Let Megatron-Core's schedule reduce the gradients of these chunks (DistributedDataParallel,
    or a model of fsdp2: over the replicas of its shards) in the last micro-batch, as Megatron-LM
    does. config: the first chunk's. Without chunks no pass reduces: a forward pass would enter
    no_sync, and never leave it.

    With pipeline stages the first one reduces during its backward pass, the others together with it
    (Megatron-LM's align_grad_reduce)."""
    no_sync = [chunk.no_sync for chunk in replicated]
    start = [getattr(chunk, "start_grad_sync", None) for chunk in replicated]
    several = len(replicated) > 1
    config.no_sync_func = no_sync if several else next(iter(no_sync), None)
    config.grad_sync_func = start if several else next(iter(start), None)


def loss_of_dummy(model: PackedGPT, hidden: torch.Tensor) -> torch.Tensor:
    """Return 0 with a gradient of 0 for every parameter. DistributedDataParallel waits for all of
    them, so the output layer, which no head applies, is among them."""
    return (hidden.float().sum() + output_weight(model).view(-1)[:1].float().sum()) * 0.0


_NAMES = {"forward-compute": "forward", "backward-compute": "backward"}


class _Timers:
    """Stands for Megatron-Core's Timers: what is timed becomes a named range."""

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}
        self._name = ""

    def __call__(self, name: str, log_level: int | None = None) -> _Timers:
        """Choose the timer that the next call starts or stops. log_level: Megatron-Core's,
        unused."""
        self._name = name
        return self

    def start(self, barrier: bool = False) -> None:
        """Enter the range. barrier: unused, so that a trace shows how long ranks wait for others,
        and where."""
        self._open[self._name] = platform.named_range(_NAMES.get(self._name, self._name))
        self._open[self._name].__enter__()

    def stop(self, barrier: bool = False) -> None:
        """Leave the range."""
        self._open.pop(self._name).__exit__(None, None, None)

    def close(self) -> None:
        """Leave the ranges that an error has left open, the last first."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)


@contextlib.contextmanager
def schedule_ranges(config: Any) -> Iterator[None]:
    """Let Megatron-Core's schedule of a model with this config (TransformerConfig) mark its parts,
    where ranges are recorded."""
    if not platform.ranges_are_recorded():
        yield
        return
    config.timers = timers = _Timers()
    try:
        yield
    finally:
        timers.close()
        config.timers = None


class MicroBatchSchedule:
    """Megatron-Core's schedule of micro-batches through this rank's stage of a model."""

    def __init__(
        self, chunks: Sequence[PackedGPT], groups: ProcessGroups, megatron: MegatronConfig
    ) -> None:
        """chunks: this rank's virtual pipeline chunks; none outside of the mesh."""
        self._chunks = chunks
        self._groups = groups
        self._megatron = megatron
        sizes = (1, *groups.mesh.context_sizes) if groups.is_member else ()
        self._contexts = {size: Context.of(groups, size) for size in sizes}
        self.overlaps_reduction = overlaps_reduction(
            megatron, groups.mesh.replicas, platform.use_cuda()
        )
        """DistributedDataParallel reduces gradients during the backward pass."""
        self._has_no_sync = self.overlaps_reduction or fsdp_config(megatron) is not None

    def with_dummies(self, micro_batches: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Append dummy micro-batches: the schedule of virtual pipeline chunks needs a multiple of
        the stages."""
        group = self._groups.mesh.pp if len(self._chunks) > 1 else 1
        return [*micro_batches, *[()] * (-len(micro_batches) % group)]

    def run(
        self,
        batch: RaggedBatch,
        micro_batches: Sequence[Sequence[int]],
        on_last_stage: OnLastStage,
        trained: Sequence[Any] = (),
        at_last_token: bool = False,
        replay: ExpertReplay | None = None,
        balance: RouterBalance | None = None,
        with_observations: bool = False,
    ) -> None:
        """Run the micro-batches through this rank's stage, forward only unless there are chunks in
        `trained` (TrainingStrategy.trained).

        On the last stage `on_last_stage` gets the states at the logit positions, with_observations
        too at those of observations, or with at_last_token at the last tokens. It returns the loss,
        unless the passes are forward only."""
        forward_only = not trained
        pp = self._groups.mesh.pp
        multiple_of = token_multiple(self._megatron)

        def step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
            micro = next(iterator)

            def finish(hidden: torch.Tensor, non_loss_data: bool = False) -> Any:
                last = self._chunks[-1]
                with own_operations():
                    states = states_at(last, hidden, micro)
                    value = on_last_stage(last, states, micro)
                return value if non_loss_data else (value, {})

            if balance is not None and not forward_only:
                balance.expect(model, micro)
            with contextlib.nullcontext() if replay is None else replay.routing(model, micro):
                output = run_stage(model, micro)
            work.advance()  # on a GPU the kernels are launched: the schedule waits for some of them
            return output, finish

        contexts = [
            self._contexts[num_sharing_ranks(indices, self._groups.mesh.cp)]
            for indices in micro_batches
        ]
        shares = self._megatron.share_prompts
        lengths = packed_lengths(batch, micro_batches, multiple_of, contexts, shares)
        count(tokens=sum(lengths))
        extra: dict[str, Any] = {"pg_collection": self._groups.collection}
        if pp > 1:
            # The plan is the same on all stages of a replica.
            shards = self._groups.mesh.tp if self._megatron.sequence_parallel else 1
            on_rank = [n // shards for n in lengths]
            extra["p2p_communicator"] = PlannedShapes(
                self._groups.collection.pp, self._chunks[0].config, on_rank
            )

        with_sources = replay is not None or balance is not None

        def micros() -> Iterator[MicroBatch]:
            for indices, context in zip(micro_batches, contexts, strict=True):
                with platform.named_range("pack"), own_operations():
                    micro = pack_micro_batch(
                        batch,
                        indices,
                        multiple_of,
                        context,
                        at_last_token,
                        with_sources,
                        shares,
                        with_observations,
                    )
                yield micro

        several = len(self._chunks) > 1
        set_reduction(self._chunks[0].config, trained if self._has_no_sync else ())
        ranges = schedule_ranges(self._chunks[0].config)
        total = len(micro_batches) * len(self._chunks)
        with megatron_calls(), ranges, working(total=total, unit="micro-batches") as work:
            get_forward_backward_func(pp, len(self._chunks) if several else None)(
                forward_step_func=step,
                data_iterator=[micros() for _ in self._chunks] if several else micros(),
                model=list(trained or self._chunks),
                num_microbatches=len(micro_batches),
                seq_length=1,  # unused: micro-batches are ragged (variable_seq_lengths)
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
                **extra,
            )


class OutOfMemory(Exception):
    """A rank has run out of memory in the passes of an update. Raised on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is out of memory")
        self.rank = rank
        """The highest rank that has."""


class MemoryRecovery:
    """Lets every rank abandon an update in whose passes a rank runs out of memory.

    Until its gradients are reduced, a rank must not wait for another: one whose pass has failed
    would never come. So it is for models with data parallelism alone, without overlap_grad_reduce.
    It costs one reduction of 4 bytes over CPU memory for each update."""

    def __init__(self, config: Any) -> None:
        """config: Megatron-Core's TransformerConfig, whose finalize_model_grads_func reduces the
        gradients."""
        finalize = config.finalize_model_grads_func
        self._is_agreed = False

        def agree_then_finalize(*args: Any, **kwargs: Any) -> Any:
            self._agree(False)
            return finalize(*args, **kwargs)

        config.finalize_model_grads_func = agree_then_finalize

    def run(self, passes: Callable[[], None]) -> None:
        """Run the passes and the reduction that follows them. Raise OutOfMemory on every rank if
        one has run out of memory in its passes; all memory of the passes is free then. Every rank
        must call it."""
        self._is_agreed = False
        failed = False
        try:
            passes()
        except RuntimeError as error:
            if self._is_agreed or not platform.is_out_of_memory(error):
                raise
            # outside of this block nothing refers to the stack, which holds the activations
            failed = True
        if failed:
            platform.free_cached_memory()
            self._agree(True)

    def _agree(self, failed: bool) -> None:
        """Raise OutOfMemory if a rank calls it with True. Every rank must call it."""
        # CPU memory: over gloo
        rank = torch.tensor([dist.get_rank() if failed else -1], dtype=torch.int32)
        dist.all_reduce(rank, op=dist.ReduceOp.MAX)
        self._is_agreed = True
        if rank.item() >= 0:
            raise OutOfMemory(int(rank.item()))
