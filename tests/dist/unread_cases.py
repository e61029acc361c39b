"""Functions that a rank runs in test_unread_settings.py."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from cases import built_run

from rlhf_mc.algorithms.kl import KLController
from rlhf_mc.config.load import load_config
from rlhf_mc.config.roles import uses_critic
from rlhf_mc.config.schema import Config
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.setup import build
from rlhf_mc.setup.custom_functions import load_estimator, load_policy_loss
from rlhf_mc.trainer.advantages import compute_advantages
from rlhf_mc.trainer.log_probs import log_probs
from rlhf_mc.trainer.pool.generate import update_weights
from rlhf_mc.trainer.pool.rollout import rollout
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.scores import rewards
from rlhf_mc.trainer.step_state import begin_step
from rlhf_mc.trainer.update import update_actor, update_critic


def effects(
    config_path: str, variants: Mapping[str, tuple[Sequence[str], Mapping[str, str]]]
) -> dict[str, dict[str, bool]]:
    """Return for each variant of the settings (overrides) and each of its changes (setting ->
    value) whether advantages, losses or gradients of one batch change by a bit. The learning rates
    must be 0."""
    with built_run(config_path, []) as run:
        batch = _batch(run)
        found = {}
        for name, (overrides, changes) in variants.items():
            roles = {key.partition(".")[0] for key in changes}
            before = _results(run, batch, load_config(config_path, [*overrides]), roles)
            changed = {
                key: load_config(config_path, [*overrides, f"{key}={value}"])
                for key, value in changes.items()
            }
            found[name] = {
                key: _results(run, batch, cfg, roles) != before for key, cfg in changed.items()
            }
        return found


def _batch(run: Run) -> RaggedBatch:
    """Return a scored batch whose log-probs and values lie on both sides of every bound."""
    state = begin_step(1, RankStatus())
    stop = StopRequests(run.config.trainer)
    update_weights(run, state.timer)
    prompts, batch, pending = rollout(run, state, stop)
    batch = log_probs(run, state, batch)
    batch = rewards(run, state, prompts, batch, pending, stop)
    assert batch.old_log_probs is not None and batch.scores is not None and batch.values is not None
    noise = torch.randn(3, len(batch.old_log_probs), generator=torch.Generator().manual_seed(1))
    return batch.with_fields(
        old_log_probs=batch.old_log_probs + 1.5 * noise[0],
        ref_log_probs=batch.old_log_probs + 1.5 * noise[0] - 0.1 + 0.01 * noise[1],
        values=batch.values + noise[2],
        scores=batch.scores + torch.linspace(0, 1, len(batch.scores)),
        accuracies=(torch.arange(len(batch.scores)) % 2).float(),
        decoupled_scores=batch.scores,
        greedy_scores=batch.scores,
    )


def _results(
    run: Run, batch: RaggedBatch, cfg: Config, roles: Collection[str]
) -> dict[str, object]:
    """Return all numbers of the phases after the rewards, with these settings: of the updates those
    of the roles."""
    controller: KLController = build._kl_controller(cfg)
    varied = replace(
        run,
        config=cfg,
        critic=run.critic if uses_critic(cfg) else None,
        estimator=load_estimator(cfg.algorithm),
        policy_loss=load_policy_loss(cfg.actor),
        kl_controller=controller,
    )
    state = begin_step(2, RankStatus())
    batch = compute_advantages(varied, state, batch)
    if "critic" in roles:
        update_critic(varied, state, batch)
    if "actor" in roles:
        update_actor(varied, state, batch)
    tensors = {
        name: getattr(batch, name) for name in ("advantages", "returns", "is_weights", "loss_mask")
    }
    numbers = {name: None if x is None else x.tolist() for name, x in tensors.items()}
    metrics = {name: repr(value) for name, value in state.metrics.items()}
    assert all(math.isfinite(float(value)) for value in metrics.values())
    coefficient = controller.value if cfg.algorithm.kl_ctrl.type == "adaptive" else None
    return {**numbers, **metrics, "coefficient of the next step": coefficient}
