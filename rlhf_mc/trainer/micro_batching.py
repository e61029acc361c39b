"""The split of a pass over a batch into micro-batches, for scoring and updates alike."""

from __future__ import annotations

from rlhf_mc.config.schema import Config, reward_models
from rlhf_mc.data.balance import Limit, Sequences, plan_micro_batches
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.forward import PackingCache, PlanKey


def micro_batch_limits(cfg: Config) -> dict[str, Limit]:
    """Return the limit of a micro-batch by phase: the pass's token budget or, without actor.use_dynamic_bsz, its number
    of sequences, by default the actor's. Phases of models that the run does not have never ask for theirs."""

    def limit(max_tokens: int, num_sequences: int | None) -> Limit:
        if cfg.actor.use_dynamic_bsz:
            return max_tokens
        num_sequences = num_sequences or cfg.actor.ppo_micro_batch_size_per_gpu
        assert num_sequences is not None, "validate.py ensures it"
        return Sequences(num_sequences)

    rollout = cfg.rollout
    ref = cfg.ref
    actor = cfg.actor
    critic = cfg.critic
    scorers = {
        role: limit(scorer.forward_max_token_len_per_gpu, scorer.forward_micro_batch_size_per_gpu)
        for role, scorer in reward_models(cfg).items()
    }
    return {
        "old_log_prob": limit(rollout.log_prob_max_token_len_per_gpu, rollout.log_prob_micro_batch_size_per_gpu),
        "ref": limit(ref.log_prob_max_token_len_per_gpu, ref.log_prob_micro_batch_size_per_gpu),
        "values": limit(critic.forward_max_token_len_per_gpu, critic.forward_micro_batch_size_per_gpu),
        **scorers,
        "update_critic": limit(critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu),
        "update_actor": limit(actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu),
    }


def my_micro_batches(
    engine: ModelEngine, batch: RaggedBatch, limit: Limit, packing: PackingCache | None = None
) -> list[list[int]]:
    """Return the sequences of each micro-batch of this rank's data-parallel replica.

    Models with the same cost of a sequence, the same number of replicas and the same limit have the same plan, and so
    share packed micro-batches through `packing`, the cache of the batch."""
    seq_lens = batch.seq_lens.tolist()
    cost = engine.shape.sequence_cost
    num_replicas = engine.groups.mesh.dp
    key = PlanKey(num_replicas, limit, tuple(cost(n) for n in seq_lens))
    plan = (packing or PackingCache()).plan(key, lambda: plan_micro_batches(seq_lens, num_replicas, limit, cost))
    return plan[engine.groups.coordinate.dp]
