"""The two update phases: PPO epochs over mini-batches, for the critic and for the actor. What a loss is, is in
algorithms/losses.py; how a gradient comes about on the mesh, in models/engine.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from rlhf_mc.algorithms.losses import ActorLossInputs, actor_loss, aggregation_weights, value_loss
from rlhf_mc.config.schema import ActorConfig, CriticConfig
from rlhf_mc.data.balance import plan_micro_batches
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import Loss, ModelEngine
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.heads import log_probs_and_entropy, values
from rlhf_mc.observability.metrics import Metrics


def mini_batches(
    num_prompts: int, responses_per_prompt: int, mini_batch_size: int, epochs: int, shuffle: bool, seed: tuple[int, ...]
) -> Iterator[list[int]]:
    """The sequences of each mini-batch, epoch after epoch. A prompt's responses stay together.

    The order is a function of `seed` alone: the same for every layout and after a resume."""
    n = responses_per_prompt
    for epoch in range(epochs):
        order = np.arange(num_prompts)
        if shuffle:
            order = np.random.default_rng((*seed, epoch)).permutation(num_prompts)
        for start in range(0, num_prompts, mini_batch_size):
            yield [int(p) * n + k for p in order[start : start + mini_batch_size] for k in range(n)]


def actor_objective(mini: RaggedBatch, cfg: ActorConfig, vocab_size: int, temperature: float) -> Loss:
    """The actor's loss over this mini-batch, as shares of its micro-batches."""
    assert mini.old_log_probs is not None and mini.advantages is not None
    old_log_probs, advantages, ref = mini.old_log_probs, mini.advantages, mini.ref_log_probs
    weights = aggregation_weights(mini.response_lens, cfg.loss_agg_mode)

    def loss(model: object, states: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_probs, entropy = log_probs_and_entropy(model, states, micro.targets, vocab_size, temperature)
        take = _taker(micro, states.device)
        inputs = ActorLossInputs(
            log_probs=log_probs,
            old_log_probs=take(old_log_probs),
            advantages=take(advantages),
            weights=take(weights),
            entropy=entropy if cfg.entropy_coeff != 0.0 else entropy.detach(),
            ref_log_probs=take(ref) if cfg.use_kl_loss and ref is not None else None,
        )
        return actor_loss(
            inputs,
            num_tokens=len(old_log_probs),
            clip_low=cfg.clip_ratio_low,
            clip_high=cfg.clip_ratio_high,
            clip_c=cfg.clip_ratio_c,
            entropy_coeff=cfg.entropy_coeff,
            kl_loss_coef=cfg.kl_loss_coef if cfg.use_kl_loss else 0.0,
            kl_loss_type=cfg.kl_loss_type,
        )

    return loss


def critic_objective(mini: RaggedBatch, cfg: CriticConfig) -> Loss:
    """The critic's loss over this mini-batch, as shares of its micro-batches."""
    assert mini.values is not None and mini.returns is not None
    old_values, returns = mini.values, mini.returns
    weights = aggregation_weights(mini.response_lens, cfg.loss_agg_mode)

    def loss(model: object, states: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        take = _taker(micro, states.device)
        return value_loss(
            values(model, states),
            take(old_values),
            take(returns),
            take(weights),
            num_tokens=len(returns),
            cliprange=cfg.cliprange_value,
        )

    return loss


def _taker(micro: MicroBatch, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda per_token: per_token[micro.response_index].to(device)


def update(
    engine: ModelEngine,
    batch: RaggedBatch,
    mini_batch_indices: Iterator[list[int]],
    objective: Callable[[RaggedBatch], Loss],
    token_budget: int,
) -> dict[str, float]:
    """One optimizer step per mini-batch. Returns each statistic's mean over them. Every rank must call it."""
    metrics = Metrics()
    for indices in mini_batch_indices:
        mini = batch.select(indices)
        plan = plan_micro_batches(mini.seq_lens.tolist(), engine.groups.mesh.dp, token_budget)
        metrics.update(engine.train_step(mini, plan[engine.groups.coordinate.dp], objective(mini)))
    engine.end_of_ppo_step()
    return {f"{engine.name}/{key}": value for key, value in metrics.result().items()}
