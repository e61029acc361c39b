"""Updates of critic and actor: PPO epochs over mini-batches. Losses are in algorithms/losses.py;
models/engine.py computes gradients on the mesh.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from rlhf_mc import json_files, platform
from rlhf_mc.algorithms.kl import KLController
from rlhf_mc.algorithms.losses import ActorLossInputs, actor_loss, aggregation_weights, value_loss
from rlhf_mc.algorithms.policy_losses import PolicyLoss, PolicyLossInputs
from rlhf_mc.algorithms.rollout_correction import geometric_means
from rlhf_mc.checkpoint.finite import num_not_finite
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import adapts_kl_loss
from rlhf_mc.config.schema import ActorConfig, Config, CriticConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import Loss, ModelEngine, OptimizerStep
from rlhf_mc.models.forward import MicroBatch, PackingCache
from rlhf_mc.models.heads import log_probs_and_entropy, values
from rlhf_mc.observability.metrics import MeanMetrics
from rlhf_mc.runtime.work import counted
from rlhf_mc.topology.consensus import gather_objects, on_rank_0
from rlhf_mc.trainer.token_budget import TokenBudget, train_step


def mini_batches(
    num_prompts: int, responses_per_prompt: int, mini_batch_size: int, epochs: int, shuffle: bool, seed: tuple[int, ...]
) -> Iterator[list[int]]:
    """Yield the sequences of each mini-batch, epoch after epoch. A prompt's responses stay together.

    mini_batch_size: in prompts. The order is a function of `seed` alone: layout and resume do not change it."""
    n = responses_per_prompt
    for epoch in range(epochs):
        order = np.arange(num_prompts)
        if shuffle:
            order = np.random.default_rng((*seed, epoch)).permutation(num_prompts)
        for start in range(0, num_prompts, mini_batch_size):
            yield [int(p) * n + k for p in order[start : start + mini_batch_size] for k in range(n)]


@dataclass(frozen=True)
class ActorTerms:
    """Parts of the actor's loss in one step, beside its settings."""

    policy_loss: PolicyLoss
    """Of actor.policy_loss.loss_mode."""
    entropy_coeff: float
    """Coefficient of the entropy bonus in this step."""
    kl_loss_coef: float
    """Coefficient of the KL loss in this step; 0 without one."""
    loss_scale_factor: int
    """Divisor of loss_agg_mode seq-mean-token-sum-norm."""
    draws: torch.Generator
    """Random draws of the step's mini-batches, one after the other: the same on every rank."""


def entropy_coeff(cfg: ActorConfig, step: int, total_steps: int) -> float:
    """Return the coefficient of the entropy bonus in a step, from 1 to total_steps."""
    if cfg.entropy_coeff_end is None or total_steps == 1:
        return cfg.entropy_coeff
    done = (step - 1) / (total_steps - 1)
    return cfg.entropy_coeff + done * (cfg.entropy_coeff_end - cfg.entropy_coeff)


def kl_loss_coef(cfg: Config, controller: KLController, adjusted: float | None) -> float:
    """Return the coefficient of the KL loss in this step; 0 without one. The controller, where it sets the coefficient,
    has seen the KL of this step. adjusted: the coefficient that the run has set by itself, if any."""
    if not cfg.actor.use_kl_loss:
        return 0.0
    if adjusted is not None and not cfg.algorithm.use_kl_in_reward:
        return adjusted
    return controller.value if adapts_kl_loss(cfg) else cfg.actor.kl_loss_coef


def step_generator(seed: int, step: int) -> torch.Generator:
    """Return the generator of a step's draws, a function of (seed, step) alone."""
    state = np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> 1))


def actor_objective(
    mini: RaggedBatch, cfg: ActorConfig, vocab_size: int, temperature: float, terms: ActorTerms
) -> Loss:
    """Return the actor's loss of this mini-batch, as a function of a micro-batch that returns its share."""
    assert mini.old_log_probs is not None and mini.advantages is not None
    mode = cfg.loss_agg_mode
    selection = terms.policy_loss.selection
    per_token = {
        "old_log_probs": mini.old_log_probs,
        "advantages": mini.advantages,
        "weights": aggregation_weights(mini.response_lens, mode, terms.loss_scale_factor, mini.kept),
        "sequence": torch.repeat_interleave(mini.response_lens),
    }
    if selection is not None:
        per_token["selected"] = selection(mini.old_log_probs, mini.advantages, cfg.policy_loss, terms.draws)
    if mini.is_weights is not None:
        is_geometric = terms.policy_loss.has_geometric_weights
        per_token["is_weights"] = (
            geometric_means(mini.is_weights, mini.response_lens) if is_geometric else mini.is_weights
        )
    if cfg.use_kl_loss and mini.ref_log_probs is not None:
        per_token["ref_log_probs"] = mini.ref_log_probs
    on_device = dict(zip(per_token, platform.to_device(list(per_token.values())), strict=True))

    def loss(model: object, states: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_probs, entropy = log_probs_and_entropy(model, states, micro.targets, vocab_size, temperature)
        mine = {name: values[micro.response_index] for name, values in on_device.items()}
        policy = PolicyLossInputs(
            log_probs=log_probs,
            old_log_probs=mine["old_log_probs"],
            advantages=mine["advantages"],
            weights=mine["weights"] * mine["is_weights"] if "is_weights" in mine else mine["weights"],
            sequence=mine["sequence"],
            num_tokens=len(per_token["weights"]),
            num_sequences=mini.num_sequences,
            selected=mine.get("selected"),
            clip_low=cfg.clip_ratio_low,
            clip_high=cfg.clip_ratio_high,
            clip_c=cfg.clip_ratio_c,
            kl_coef=cfg.policy_loss.ppo_kl_coef,
        )
        inputs = ActorLossInputs(
            policy=policy,
            weights=mine["weights"],
            entropy=entropy if terms.entropy_coeff != 0.0 else entropy.detach(),
            ref_log_probs=mine.get("ref_log_probs"),
        )
        return actor_loss(
            inputs,
            terms.policy_loss.function,
            entropy_coeff=terms.entropy_coeff,
            kl_loss_coef=terms.kl_loss_coef,
            kl_loss_type=cfg.kl_loss_type,
        )

    return loss


def critic_objective(mini: RaggedBatch, cfg: CriticConfig, loss_scale_factor: int) -> Loss:
    """Return the critic's loss of this mini-batch, as a function of a micro-batch that returns its share."""
    assert mini.values is not None and mini.returns is not None
    weights = aggregation_weights(mini.response_lens, cfg.loss_agg_mode, loss_scale_factor)
    old_values, returns, weights = platform.to_device([mini.values, mini.returns, weights])

    def loss(model: object, states: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return value_loss(
            values(model, states),
            old_values[micro.response_index],
            returns[micro.response_index],
            weights[micro.response_index],
            num_tokens=len(returns),
            cliprange=cfg.cliprange_value,
        )

    return loss


_SAMPLES = "nonfinite_step_{}.json"


@dataclass
class SkippedUpdates:
    """The count of updates that were skipped because loss or gradient were not finite, with the limit of the run."""

    limit: int
    """The run is aborted after this number of consecutive skipped updates of one model."""
    directory: Path
    """Directory of the files with the samples of skipped updates."""
    consecutive: dict[str, int] = field(default_factory=dict)
    """Consecutive skipped updates by the model's name."""

    def count(self, engine: ModelEngine, step: int, mini: RaggedBatch, skipped: bool) -> None:
        """Count one update of the model. Write the samples of a skipped update. Raise UserError
        after `limit` consecutive skipped updates. Every rank must call it."""
        name = engine.name
        self.consecutive[name] = self.consecutive.get(name, 0) + 1 if skipped else 0
        if not skipped:
            return
        path = self.directory / _SAMPLES.format(step)
        on_rank_0(lambda: write_samples(path, name, mini), f"{path}: cannot be written")
        if self.consecutive[name] >= self.limit:
            raise UserError(
                f"{name}: loss or gradient not finite in {self.limit} consecutive updates "
                f"(trainer.max_consecutive_skipped_updates), the last in step {step}; their samples are in {path}; "
                f"{_find_not_finite(name, mini, engine.params)}"
            )

    def resume_from(self, step: int, consecutive: Mapping[str, int]) -> None:
        """Set the counts to those of a checkpoint. On rank 0 delete the samples of later steps, which are repeated."""
        self.consecutive = dict(consecutive)
        for path in self.directory.glob(_SAMPLES.format("*")) if dist.get_rank() == 0 else ():
            if int(path.stem.rpartition("_")[2]) > step:
                path.unlink()


def _find_not_finite(name: str, mini: RaggedBatch, params: Mapping[str, torch.Tensor]) -> str:
    """Return a description of the values that are not finite: weights, fields of the batch, or neither. Every rank must
    call it."""
    mine = next((local for local, param in params.items() if num_not_finite(param)), None)
    for rank, found in enumerate(gather_objects(mine)):
        if found is not None:
            return f"the model's weights are not finite ({found} on rank {rank}): resume from an earlier checkpoint"
    per_token = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "scores", "advantages", "returns")
    fields = {key: getattr(mini, key) for key in per_token}
    bad = [f"{key} ({n})" for key, x in fields.items() if x is not None and (n := num_not_finite(x))]
    if bad:
        return f"weights are finite, and of the batch these have values that are not: {', '.join(bad)}"
    return f"weights and batch are finite, so the loss or its gradient overflows: try a smaller {name}.optim.lr"


def write_samples(path: Path, name: str, mini: RaggedBatch) -> None:
    """Append the mini-batch to a JSON file: one list of sequences per update of the step."""
    seq_lens = mini.seq_lens.tolist()
    response_lens = mini.response_lens.tolist()
    advantages = mini.advantages.split(response_lens) if mini.advantages is not None else [None] * len(seq_lens)
    sequences = [
        {
            "token_ids": tokens.tolist(),
            "prompt_length": len(tokens) - response_length,
            "reward": None if mini.scores is None else float(mini.scores[i]),
            "advantages": None if advantage is None else advantage.tolist(),
        }
        for i, (tokens, response_length, advantage) in enumerate(
            zip(mini.tokens.split(seq_lens), response_lens, advantages, strict=True)
        )
    ]
    updates = json_files.read(path) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*updates, {"model": name, "sequences": sequences}]))


def update(
    engine: ModelEngine,
    batch: RaggedBatch,
    mini_batch_indices: Iterator[list[int]],
    objective: Callable[[RaggedBatch], Loss],
    budget: TokenBudget,
    skipped: SkippedUpdates,
    packing: PackingCache | None = None,
) -> dict[str, float]:
    """Take one optimizer step per mini-batch. Return the mean of each statistic over the steps that were taken, and the
    share of steps that were skipped, under "{role}/{statistic}". Every rank must call it."""
    metrics = MeanMetrics()
    packing = packing or PackingCache()
    minis = list(mini_batch_indices)
    steps: list[OptimizerStep] = []
    for number, indices in enumerate(counted(minis, len(minis), "mini-batches")):
        with platform.named_range("mini_batch"):
            mini = batch.select(indices)
            step = train_step(engine, mini, objective(mini), budget, number, packing.of_mini_batch(indices))
        steps.append(step)
        skipped.count(engine, budget.step, mini, step.skipped)
    for stats in engine.statistics(steps):
        metrics.add(stats)
    engine.end_of_ppo_step()
    return {f"{engine.name}/{key}": value for key, value in metrics.result().items()}
