"""How a pass over a batch is cut into micro-batches, for scoring and updates alike."""

from __future__ import annotations

from rlhf_mc.config.schema import ActorConfig
from rlhf_mc.data.balance import Limit, Sequences, plan_micro_batches
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine


def micro_batch_limit(actor: ActorConfig, max_tokens: int, num_sequences: int | None) -> Limit:
    """How large a pass's micro-batches may be: its token budget or, without actor.use_dynamic_bsz, its number of
    sequences, which where it is null is the actor's."""
    if actor.use_dynamic_bsz:
        return max_tokens
    num_sequences = num_sequences or actor.ppo_micro_batch_size_per_gpu
    assert num_sequences is not None, "validate.py sees to it"
    return Sequences(num_sequences)


def my_micro_batches(engine: ModelEngine, batch: RaggedBatch, limit: Limit) -> list[list[int]]:
    """The sequences of each micro-batch of this rank's data-parallel replica. Models whose sequences cost the same, on
    as many replicas and within the same limit, cut a batch alike, and so share what is packed."""
    dp, lens = engine.groups.mesh.dp, batch.seq_lens.tolist()
    costs = tuple(engine.shape.sequence_cost(n) for n in lens)
    plan = batch.once(
        ("plan", dp, limit, costs), lambda: plan_micro_batches(lens, dp, limit, engine.shape.sequence_cost)
    )
    return plan[engine.groups.coordinate.dp]
