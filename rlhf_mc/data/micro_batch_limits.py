"""The limit of a micro-batch in each pass over a batch. No torch here."""

from __future__ import annotations

from rlhf_mc.config.schema import Config, reward_models
from rlhf_mc.data.balance import Limit, Sequences


def micro_batch_limits(cfg: Config) -> dict[str, Limit]:
    """Return the limit of a micro-batch by phase: the pass's token budget or, without actor.use_dynamic_bsz, its number
    of sequences, by default the actor's. Phases of models that the run does not have never ask for theirs."""

    def limit(max_tokens: int, num_sequences: int | None) -> Limit:
        if cfg.actor.use_dynamic_bsz:
            return max_tokens
        num_sequences = num_sequences or cfg.actor.ppo_micro_batch_size_per_gpu
        assert num_sequences is not None, "config/checks.py ensures it"
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
