"""The split of a pass over a batch into micro-batches, for scoring and updates alike."""

from __future__ import annotations

from rlhf_mc.data.balance import Limit, plan_micro_batches
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.forward import PackingCache, PlanKey


def my_micro_batches(
    engine: ModelEngine, batch: RaggedBatch, limit: Limit, packing: PackingCache | None = None
) -> list[list[int]]:
    """Return the sequences of each micro-batch of this rank's data-parallel replica.

    Models with the same cost of a sequence, the same number of replicas and the same limit have the same plan, and so
    share packed micro-batches through `packing`, the cache of the batch."""
    seq_lens = batch.seq_lens.tolist()
    costs = {n: engine.shape.sequence_cost(n) for n in sorted(set(seq_lens))}
    num_replicas = engine.groups.mesh.dp
    key = PlanKey(num_replicas, limit, tuple(costs.values()))
    plan = (packing or PackingCache()).plan(
        key, lambda: plan_micro_batches(seq_lens, num_replicas, limit, costs.__getitem__)
    )
    return plan[engine.groups.coordinate.dp]
