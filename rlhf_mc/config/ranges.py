"""The range of every numeric setting. Upper bounds exclude values on which a library fails, and no value of practical
use. Checks of several settings together are in validate.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import unnamed


@dataclass(frozen=True)
class Range:
    """Values from `low` to `high`, both included unless `open`, and `also`, a value with a special meaning."""

    low: float
    high: float
    open: bool = False
    also: int | None = None

    def complaint(self, value: float) -> str | None:
        """Return in words the bound that the value violates, or None if it is in the range."""
        if value == self.also:
            return None
        or_also = "" if self.also is None else f"{self.also} or "
        if value < self.low or (self.open and value == self.low):
            if self.low == 0 and self.also is None:
                return "above 0" if self.open else "0 or more"
            return f"{or_also}{'above' if self.open else 'at least'} {self.low:.15g}"
        if value > self.high or (self.open and value == self.high):
            return f"{or_also}{'below' if self.open else 'at most'} {self.high:.15g}"
        return None


_SECONDS = 1e6
"""11 days. Libraries count milliseconds in 32 bits, at most 24 days."""
_COUNT = Range(1, 1_000_000_000)
_FREQUENCY = Range(1, 1_000_000_000, also=-1)
_TOKENS = Range(1, 100_000_000)
_SEQUENCES = Range(1, 1_000_000)
_RANKS = Range(1, 1_000_000)
_LAYERS = Range(1, 100_000)
_COEFFICIENT = Range(0, 1e6)
_POSITIVE = Range(0, 1e6, open=True)
_FRACTION = Range(0, 1)
_SHARE = Range(1e-9, 1)

_OF_EACH_MODEL = {
    "optim.lr": Range(0, 1e6),
    "optim.min_lr": Range(0, 1e6),
    "optim.lr_warmup_steps": Range(0, 1_000_000_000),
    "optim.lr_warmup_steps_ratio": _FRACTION,
    "optim.weight_decay": _COEFFICIENT,
    "optim.betas": Range(0, 1),
    "optim.eps": Range(1e-30, 1e6),  # near the smallest float32
    "optim.clip_grad": Range(0, 1e30),
    "megatron.tensor_model_parallel_size": _RANKS,
    "megatron.pipeline_model_parallel_size": _RANKS,
    "megatron.virtual_pipeline_model_parallel_size": _LAYERS,
    "megatron.num_layers_in_first_pipeline_stage": _LAYERS,
    "megatron.num_layers_in_last_pipeline_stage": _LAYERS,
    "megatron.expert_model_parallel_size": _RANKS,
    "ppo_mini_batch_size": _SEQUENCES,
    "ppo_epochs": Range(1, 10_000),
    "loss_scale_factor": _TOKENS,
    "ppo_max_token_len_per_gpu": _TOKENS,
    "ppo_micro_batch_size_per_gpu": _SEQUENCES,
    "log_prob_max_token_len_per_gpu": _TOKENS,
    "log_prob_micro_batch_size_per_gpu": _SEQUENCES,
    "forward_max_token_len_per_gpu": _TOKENS,
    "forward_micro_batch_size_per_gpu": _SEQUENCES,
}
"""Ranges of settings that several sections have, by key without the section."""

RANGES = {
    "data.train_max_samples": _FREQUENCY,
    "data.val_max_samples": _FREQUENCY,
    "data.train_file_weights": _POSITIVE,
    "data.max_prompt_length": Range(1, 10_000_000),
    "data.max_response_length": Range(1, 10_000_000),
    "data.train_batch_size": _SEQUENCES,
    "data.gen_batch_size": _SEQUENCES,
    "actor.clip_ratio_low": _POSITIVE,
    "actor.clip_ratio_high": _POSITIVE,
    "actor.clip_ratio_c": Range(1, 1e6, open=True),
    "actor.entropy_coeff": Range(-1e6, 1e6),
    "actor.entropy_coeff_end": Range(-1e6, 1e6),
    "actor.policy_loss.clip_cov_ratio": _SHARE,
    "actor.policy_loss.clip_cov_lb": Range(-1e6, 1e6),
    "actor.policy_loss.clip_cov_ub": Range(-1e6, 1e6),
    "actor.policy_loss.kl_cov_ratio": _SHARE,
    "actor.policy_loss.ppo_kl_coef": _COEFFICIENT,
    "actor.policy_loss.tau_pos": _POSITIVE,
    "actor.policy_loss.tau_neg": _POSITIVE,
    "actor.kl_loss_coef": _COEFFICIENT,
    "critic.cliprange_value": Range(0, 1e30, open=True),
    "rollout.tensor_model_parallel_size": _RANKS,
    "rollout.n": Range(1, 10_000),
    "rollout.temperature": Range(0.01, 1e3),  # vLLM raises lower values to 0.01
    "rollout.gpu_memory_utilization": Range(0.01, 1),
    "rollout.cpu_kvcache_space_gb": Range(1, 65_536),
    "rollout.max_num_seqs": Range(1, 65_536),
    "rollout.max_num_batched_tokens": Range(1, 16_777_216),
    "rollout.val_kwargs.temperature": Range(0.01, 1e3, also=0),
    "rollout.val_kwargs.top_p": Range(0.001, 1),
    "rollout.val_kwargs.top_k": Range(1, 1_000_000_000, also=-1),
    "rollout.val_kwargs.n": Range(1, 10_000),
    "algorithm.gamma": _FRACTION,
    "algorithm.lam": _FRACTION,
    "algorithm.filter_groups.max_num_gen_batches": Range(0, 1_000_000_000),
    "algorithm.kl_ctrl.kl_coef": _COEFFICIENT,
    "algorithm.rollout_correction.rollout_is_threshold": _POSITIVE,
    "algorithm.rollout_correction.rollout_rs_threshold": _POSITIVE,
    "algorithm.rollout_correction.rollout_rs_threshold_lower": Range(0, 1, open=True),
    "algorithm.rollout_correction.rollout_token_veto_threshold": Range(0, 1, open=True),
    "algorithm.kl_ctrl.target_kl": _COEFFICIENT,
    "algorithm.kl_ctrl.horizon": _COUNT,
    "reward.num_workers": Range(1, 1_024),
    "reward.timeout_seconds": Range(0, _SECONDS, open=True),
    "reward.default_score": Range(-1e6, 1e6),
    "reward.remote.timeout_seconds": Range(0, _SECONDS, open=True),
    "reward.remote.max_retries": Range(0, 1_000),
    "reward.remote.max_concurrency": Range(1, 10_000),
    "reward.overlong_buffer.len": Range(0, 10_000_000),
    "reward.overlong_buffer.penalty_factor": _POSITIVE,
    "health.rollback_lr_factor": Range(0, 1, open=True),
    "health.max_rollbacks": _COUNT,
    "health.kl_coef": _COEFFICIENT,
    "health.patience": _COUNT,
    "health.window": Range(2, 1_000_000),
    "health.reward_window": Range(4, 1_000_000),
    "health.ppo_kl_min": _COEFFICIENT,
    "health.ppo_kl_max": _POSITIVE,
    "health.ppo_kl_explosion": _POSITIVE,
    "health.ref_kl_max": _POSITIVE,
    "health.grad_norm_min": Range(0, 1e30),
    "health.grad_norm_max": Range(0, 1e30, open=True),
    "health.grad_norm_growth": Range(1, 1e6, open=True),
    "health.entropy_drop": Range(0, 1, open=True),
    "health.entropy_min": _COEFFICIENT,
    "health.entropy_collapse": _COEFFICIENT,
    "health.vf_clipfrac_max": _FRACTION,
    "health.explained_variance_min": Range(-1e6, 1),
    "health.truncated_max": _FRACTION,
    "health.saturated_share": _SHARE,
    "health.equal_groups_max": _FRACTION,
    "health.throughput_min": Range(0, 1, open=True),
    "health.idle_share_max": _FRACTION,
    "health.memory_max": _SHARE,
    "reshard.bucket_megabytes": Range(1, 65_536),
    "profile.steps": _COUNT,
    "profile.ranks": Range(0, 1_000_000),
    "trainer.total_epochs": _COUNT,
    "trainer.total_training_steps": _COUNT,
    "trainer.test_freq": _FREQUENCY,
    "trainer.save_freq": _FREQUENCY,
    "trainer.export_freq": _FREQUENCY,
    "trainer.max_ckpt_to_keep": _COUNT,
    "trainer.log_val_generations": Range(0, 1_000_000_000),
    "trainer.log_train_generations": Range(0, 1_000_000_000),
    "trainer.log_train_freq": _FREQUENCY,
    "trainer.rollout_data_save_freq": _FREQUENCY,
    "trainer.target_val_acc": Range(-1e6, 1e6),
    "trainer.critic_warmup": Range(0, 1_000_000_000),
    "trainer.seed": Range(0, 2**32 - 1),  # numpy, which vLLM seeds too, takes 32 bits
    "trainer.max_consecutive_skipped_updates": _COUNT,
    "trainer.max_rollout_logprob_diff": _POSITIVE,
    "trainer.dist_timeout_seconds": Range(1, _SECONDS),
    "trainer.heartbeat_timeout_seconds": Range(1, _SECONDS),
    # After a rank has crashed, torchrun and Slurm send SIGTERM to the others, and SIGKILL 30 s later. A rank whose
    # grace period ends before SIGKILL would end with EXIT_REQUEUE, and the crashed run would be requeued.
    "trainer.preemption_grace_seconds": Range(60, _SECONDS),
    "trainer.stop_before_minutes": Range(0, _SECONDS / 60, open=True),
}
_ANY = Range(-(2**31), 2**31)
"""Range of a number that is in neither table."""


def range_of(key: str) -> Range:
    """Return the range of a numeric setting."""
    return RANGES.get(key) or _OF_EACH_MODEL.get(unnamed(key).partition(".")[2], _ANY)


def check_range(key: str, value: Any) -> None:
    """Raise a UserError unless the number, or each number of a list, is in the range of its setting."""
    for number in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            complaint = range_of(key).complaint(number)
            if complaint:
                verb = "has" if isinstance(value, (list, tuple)) else "is"
                raise UserError(f"{key} {verb} {number}; it must be {complaint}")
