"""Router replay: the passes of the actor take the experts that the rollout engine chose for each
token (R3), or those that the pass of the old log-probs chose (R2), with weights from the trainer's
own logits. Megatron-Core's RouterReplay replaces the choice in each router.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.algorithm_schema import RouterReplayMode
from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import RaggedBatch, ragged_indices
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.sequence_rows import exchange_rows, flags_of_ranks
from rlhf_mc.runtime.work import count
from rlhf_mc.topology.consensus import sum_over_ranks
from rlhf_mc.topology.groups import ProcessGroups


class ReplayedRouter(RouterReplay):
    """Megatron-Core's RouterReplay of one router. Its targets [tokens, k] are -1 for tokens without
    a choice, for which the router chooses. It counts the choices that differ."""

    target_topk_idx: Any

    def __init__(self) -> None:
        super().__init__()
        # Megatron-Core's list of all routers of the process, for calls that replay in all models at
        # once.
        self.clear_global_router_replay_instances()
        self.counts: torch.Tensor | None = None
        """[2] int64: replayed choices that the router itself would not have made, and replayed
        choices."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values and indices of the chosen experts, [tokens, k], by the action that is
        set."""
        own_choice = (topk, num_groups, group_topk)
        if self.router_replay_action == RouterReplayAction.REPLAY_FORWARD:
            given = self.target_topk_idx
            self.target_topk_idx, chosen = self._completed(
                given, scores, default_compute_topk, own_choice
            )
            is_given = given >= 0
            differs = is_given & (given[:, :, None] != chosen[:, None, :]).all(2)
            counts = torch.stack([differs.sum(), is_given.sum()])
            self.counts = counts if self.counts is None else self.counts + counts
        elif self.router_replay_action == RouterReplayAction.REPLAY_BACKWARD:
            given = self.replay_backward_list[0]
            self.replay_backward_list[0] = self._completed(
                given, scores, default_compute_topk, own_choice
            )[0]
        result: tuple[torch.Tensor, torch.Tensor] = super().get_replay_topk(
            scores, *own_choice, default_compute_topk
        )
        return result

    @staticmethod
    def _completed(
        given: torch.Tensor, scores: torch.Tensor, compute_topk: Any, own_choice: tuple[Any, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the choices with the router's own where none is given, and the router's own."""
        chosen = compute_topk(scores.detach(), *own_choice)[1]
        return torch.where(given < 0, chosen, given), chosen


class ExpertReplay:
    """Records and replays the choices of experts in the passes of one model.

    Choices are [tokens, layers, k] uint8, or uint16 for more than 256 experts, of all tokens of a
    sequence before the last drawn one. The engine does not route that one, nor an observation that
    follows it, and no result depends on their experts: the trainer's routers choose them. A rank
    holds the choices of the sequences that its engine has generated, or with R2 those of its own
    passes, and sends them to the ranks that train the sequence."""

    def __init__(
        self,
        mode: RouterReplayMode,
        shape: ModelShape,
        groups: ProcessGroups,
        chunks: Sequence[Any],
    ) -> None:
        """Replace the choice of each router of the chunks. They must have experts."""
        self.mode = mode
        self.stored: dict[int, np.ndarray] = {}
        """The choices that this rank holds, by the number of the response in the run
        (RaggedBatch.numbers): in all layers with experts, or with R2 in those of this rank's
        stage."""
        self._groups = groups
        self._k = shape.experts_per_token
        self._choice_bytes = shape.choice_bytes
        self._shards = groups.mesh.tp if chunks[0].config.sequence_parallel else 1
        self._shard = groups.coordinate.tp % self._shards
        self._recomputes = chunks[0].config.recompute_granularity == "full"
        self._layers = shape.expert_layers
        of_stage = [
            groups.mesh.chunk_layers(shape.num_layers, stage) for stage in range(groups.mesh.pp)
        ]
        self._columns = [
            [self._layers.index(i) for chunk in stage for i in chunk if i in self._layers]
            for stage in of_stage
        ]
        """For each stage the places of its layers among all with experts."""
        num_routers = 0
        self._routers: dict[Any, list[tuple[int, ReplayedRouter]]] = {}
        """The routers of each chunk, with their places among the stage's layers with experts."""
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            for router in routers:
                router.router_replay = ReplayedRouter()
            self._routers[chunk] = [
                (num_routers + i, router.router_replay) for i, router in enumerate(routers)
            ]
            num_routers += len(routers)
        assert num_routers == len(self._columns[groups.coordinate.pp])
        self._copied = torch.zeros(2, dtype=torch.int64, device=platform.device())
        """Choices of a shared prompt's tokens in sequences that do not own them: those which differ
        from the owner's, and all."""
        self._records = False
        self._keeps = False
        self._numbers: list[int] = []
        self._lens = self._sequences = np.zeros(0, np.int64)

    @contextlib.contextmanager
    def passes(
        self, batch: RaggedBatch, micro_batches: Sequence[Sequence[int]], forward_only: bool
    ) -> Iterator[None]:
        """Receive the choices of the sequences of these micro-batches for their passes, which the
        body runs, or with R2 and forward_only record them. Every rank must call it. Raise
        UserError, on all ranks, if no rank has them."""
        assert batch.numbers is not None
        self._records = forward_only and self.mode == "recompute"
        self._keeps = not forward_only and self._recomputes
        self._numbers = batch.numbers.tolist()
        self._lens = batch.last_drawn.numpy()
        wanted = np.zeros(batch.num_sequences, np.bool_)
        wanted[[i for indices in micro_batches for i in indices]] = True
        num_layers = len(self._columns[self._groups.coordinate.pp])
        row_bytes = num_layers * self._choice_bytes
        if self._records:
            self._sequences = np.flatnonzero(wanted)
            rows = torch.zeros(
                (self._lens[self._sequences].sum() + 1) * row_bytes, dtype=torch.uint8
            )
            rows = rows.to(platform.device())
        else:
            rows = self._exchange(wanted, row_bytes)
        num_rows = self._lens[self._sequences].sum()
        # torch indexes no uint16. The last row is of the tokens without a choice.
        dtype = torch.uint8 if self._choice_bytes == self._k else torch.int16
        self._choices = rows.view(dtype).view(num_rows + 1, num_layers, self._k)
        segments = np.stack([self._lens, batch.seq_lens.numpy() - self._lens], axis=1).ravel()
        row_of = np.full(segments.sum() + 1, -1)
        row_of[ragged_indices(segments, 2 * self._sequences)] = np.arange(num_rows)
        (self._row_of,) = platform.to_device([torch.from_numpy(row_of)])
        """[T + 1] int64: of each token of the batch, the row of _choices; -1 of those without, and
        as the last one."""
        try:
            yield
            if self._records and self._groups.coordinate.tp == 0:
                choices = self._choices.cpu().numpy()
                lens = self._lens[self._sequences]
                for i, end, length in zip(self._sequences, lens.cumsum(), lens, strict=True):
                    self.stored[self._numbers[i]] = choices[end - length : end]
        finally:
            self._clear()

    def _exchange(self, wanted: np.ndarray, row_bytes: int) -> torch.Tensor:
        """Return the choices of the sequences `wanted` [S] in the layers of this rank's stage, and
        one row more, as bytes on the device; _sequences gets their order."""
        mesh = self._groups.mesh
        held_bytes = (
            row_bytes
            if self.mode == "recompute"
            else sum(map(len, self._columns)) * self._choice_bytes
        )
        lens = zip(self._numbers, self._lens.tolist(), strict=True)
        holds = np.array(
            [
                n in self.stored and self.stored[n].nbytes == length * held_bytes
                for n, length in lens
            ],
            np.bool_,
        )
        wants, has = flags_of_ranks([wanted, holds], self._groups)
        if missing := int((wants.any(0) & ~has.any(0)).sum()):
            raise UserError(
                f"algorithm.router_replay is {self.mode}; for {missing} of {len(holds)} responses "
                "the rollout engine has not returned the experts of all tokens before the last "
                "drawn one, in all layers with experts: set it to recompute or off"
            )
        stages = np.array([mesh.coordinate(other).pp for other in range(mesh.world)])
        columns: list[Any] = [self._columns[stage] for stage in stages]
        if self.mode == "recompute":  # each rank holds the layers of its stage
            is_same = (stages == stages[self._groups.rank])[:, None]
            wants = wants & is_same
            has = has & is_same
            columns = [slice(None)] * mesh.world
        # context-parallel ranks have recorded the same: the first one sends it
        self._sequences, rows = exchange_rows(
            wants,
            has,
            lambda i, other: self.stored[self._numbers[i]][:, columns[other]],
            self._lens * row_bytes,
            self._groups,
            row_bytes,
        )
        count(expert_bytes=len(rows) - row_bytes)
        return rows

    @contextlib.contextmanager
    def routing(self, model: Any, micro: MicroBatch) -> Iterator[None]:
        """Replay or record the choices of a micro-batch in the forward pass of a chunk, which the
        body is. Where whole layers are recomputed, the backward pass then replays them too."""
        assert micro.sources is not None
        routers = self._routers[getattr(model, "module", model)]
        if self._records:
            for _, router in routers:
                router.set_router_replay_action(RouterReplayAction.RECORD)
            yield
            self._record(routers, micro)
            return
        rows = self._row_of[micro.sources]
        if (shared := micro.packed.shared) is not None and self.mode == "rollout":
            self._compare_with_owners(self._row_of[shared.sources], rows[shared.rows.index])
        rows = rows.chunk(self._shards)[self._shard]
        choices = self._choices[rows].to(torch.int16).masked_fill_((rows < 0)[:, None, None], -1)
        for index, router in routers:
            router.set_target_indices(choices[:, index])
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        for _, router in routers:
            router.target_topk_idx = None
            router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            if not self._keeps:
                router.clear_indices()

    def _compare_with_owners(self, rows: torch.Tensor, owners: torch.Tensor) -> None:
        """Count the differences between the choices of tokens and of those that are replayed in
        their place, by their rows [N]; -1 of those without."""
        is_copy = (rows != owners) & (rows >= 0) & (owners >= 0)
        differs = (self._choices[rows].sort()[0] != self._choices[owners].sort()[0]).any(2)
        num_copies = is_copy.sum() * differs.shape[1]
        self._copied += torch.stack([(differs & is_copy[:, None]).sum(), num_copies])

    def _record(self, routers: Sequence[tuple[int, ReplayedRouter]], micro: MicroBatch) -> None:
        """Keep what the routers have recorded in a micro-batch. The ranks that share its tokens
        exchange it."""
        if not routers:
            return
        context = micro.packed.context
        sources = micro.sources
        assert sources is not None
        recorded = [router.get_recorded_indices() for _, router in routers]
        # gloo has no 16-bit integers
        parts = torch.stack(recorded, 1).to(self._choices.dtype).view(torch.uint8)
        if self._shards > 1:
            of_shards = parts.new_empty(self._shards * len(parts), *parts.shape[1:])
            dist.all_gather_into_tensor(of_shards, parts, group=self._groups.collection.tp)
            parts = of_shards
        if context.size > 1:
            parts = context.gather(parts).flatten(0, 1)
            sources = context.gather(sources).flatten()
        if (shared := micro.packed.shared) is not None:
            parts = parts[shared.rows.index]
            sources = shared.sources
        first = routers[0][0]
        self._choices[self._row_of[sources], first : first + len(routers)] = parts.view(
            self._choices.dtype
        )

    def differing_shares(self) -> tuple[float, dict[int, float], float]:
        """Return the share of the choices replayed since the last call that the routers themselves
        would not have made, over all layers and ranks, and that of each layer with experts, 0 the
        first of the model; and the share of a shared prompt's choices, of all its responses but the
        one whose choices are replayed, that differ from these; 0 of none. Every rank of the
        mesh must call it."""
        sums = torch.zeros(len(self._layers) + 1, 2, dtype=torch.int64, device=platform.device())
        sums[-1] = self._copied
        self._copied.zero_()
        columns = self._columns[self._groups.coordinate.pp]
        for index, router in itertools.chain(*self._routers.values()):
            sums[columns[index]] += 0 if router.counts is None else router.counts
            router.counts = None
        sums = sum_over_ranks(sums, self._groups.members).double()
        *of_layers, of_copies = (sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()
        differing, replayed = sums[:-1].sum(0)
        share = float(differing / replayed.clamp(min=1))
        return share, dict(zip(self._layers, of_layers, strict=True)), of_copies

    def _clear(self) -> None:
        """Let the routers choose by themselves, and free the choices of the last pass."""
        for _, router in itertools.chain(*self._routers.values()):
            router.clear_indices()
            router.clear_router_replay_action()
        self._choices = self._row_of = torch.zeros(0)


def replayed(
    replay: ExpertReplay | None,
    batch: RaggedBatch,
    micro_batches: Sequence[Sequence[int]],
    forward_only: bool,
) -> contextlib.AbstractContextManager[None]:
    """Return the context of the passes of a model: ExpertReplay.passes, if it has one."""
    return (
        contextlib.nullcontext()
        if replay is None
        else replay.passes(batch, micro_batches, forward_only)
    )
