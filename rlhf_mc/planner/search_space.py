"""The settings that a search for the quickest plan (search.py) chooses from: layouts of training
and tensor-parallel sizes of rollout, token budgets, recomputation, offload.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_mc.config.load import load_config, nest_settings
from rlhf_mc.config.roles import (
    in_rollout_pool,
    num_rollout_ranks,
    num_training_ranks,
    tokens_on_rank,
)
from rlhf_mc.config.schema import Config, layouts, reward_models, teachers
from rlhf_mc.planner.gpus import Machine
from rlhf_mc.planner.start import planned_shapes

_MOST_CHUNKS = 8
_LEAST_SHARE = 4096  # tokens of the longest sequence that context parallelism leaves to a rank
_LARGEST_BUDGET = 1 << 16
_BUDGETS = [1 << power for power in range(_LARGEST_BUDGET.bit_length())]
RECOMPUTE = (None, "selective", "full")

_MEGATRON = "actor.megatron"
TP = f"{_MEGATRON}.tensor_model_parallel_size"
PP = f"{_MEGATRON}.pipeline_model_parallel_size"
_VPP = f"{_MEGATRON}.virtual_pipeline_model_parallel_size"
_CP = f"{_MEGATRON}.context_parallel_size"
_DYNAMIC_CP = f"{_MEGATRON}.dynamic_context_parallel"
EP = f"{_MEGATRON}.expert_model_parallel_size"
GRANULARITY = f"{_MEGATRON}.recompute_granularity"
ROLLOUT_TP = "rollout.tensor_model_parallel_size"
SHARE = "rollout.gpu_memory_utilization"
BUCKET = "reshard.bucket_megabytes"
_UPDATE_BUDGETS = ("actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu")
_FORWARD_BUDGETS = (
    "rollout.log_prob_max_token_len_per_gpu",
    "ref.log_prob_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu",
)

Settings = Mapping[str, Any]
"""Dotted key -> value."""


class SearchSpace:
    """The settings to choose from on one machine; all others are the user's."""

    def __init__(self, settings: Settings, machine: Machine) -> None:
        """Load the user's settings. Raise UserError if they are wrong."""
        self._settings = settings
        self._machine = machine
        self.base = self.config({})
        """The user's config."""
        self.num_training = num_training_ranks(self.base, machine.world)
        """Number of ranks that hold models."""
        self.num_rollout = num_rollout_ranks(self.base, machine.world)
        """Number of ranks that hold engines."""
        self.is_sharded = self.base.actor.strategy == "fsdp2"
        """The actor is sharded by FSDP2, without tensor or pipeline parallelism."""
        self.shapes = planned_shapes(self.base)
        """Shape of the model of each role."""
        self.longest = self.base.data.max_prompt_length + self.base.data.max_response_length
        """Tokens of the longest sequence."""

    def config(self, chosen: Settings) -> Config:
        """Return the user's config with the chosen settings in place of its own."""
        return load_config(nest_settings({**self._settings, **chosen}))

    def training_layouts(self, beyond_node: bool) -> Iterator[dict[str, Any]]:
        """Yield the layouts of training that divide the ranks; of FSDP2 without tensor,
        pipeline or expert parallelism."""
        shape = self.shapes["actor"]
        world = self.num_training
        if any(in_rollout_pool(self.base, role) for role in self.shapes):
            world = math.gcd(world, self.num_rollout)  # frozen models have the actor's layout
        for tp in self.group_sizes(world, beyond_node):
            for pp in _divisors(world // tp):
                replicas = world // tp // pp
                chunks = (
                    [n for n in _divisors(shape.num_layers // pp) if 1 < n <= _MOST_CHUNKS]
                    if pp > 1
                    else []
                )
                experts = (
                    [n for n in _divisors(replicas) if shape.num_experts % n == 0]
                    if shape.num_experts
                    else [1]
                )
                contexts = [
                    n for n in _divisors(replicas) if n == 1 or self.longest >= n * _LEAST_SHARE
                ]
                for vpp, ep, cp in itertools.product([None, *chunks], experts, contexts):
                    if self.is_sharded and tp * pp * ep > 1:
                        continue
                    yield {
                        TP: tp,
                        PP: pp,
                        _VPP: vpp,
                        EP: ep,
                        _CP: cp,
                        _DYNAMIC_CP: cp > 1 and self.base.actor.megatron.dynamic_context_parallel,
                        f"{_MEGATRON}.sequence_parallel": tp > 1,
                        f"{_MEGATRON}.num_layers_in_first_pipeline_stage": None,
                        f"{_MEGATRON}.num_layers_in_last_pipeline_stage": None,
                    }

    def group_sizes(self, num_ranks: int, beyond_node: bool) -> list[int]:
        """Return the tensor-parallel sizes to try on as many ranks: those that fill a node, or also
        whole nodes."""
        node = self._machine.gpus_per_node
        sizes = _divisors(num_ranks)
        return [n for n in sizes if node % n == 0 or (beyond_node and n % node == 0)]

    def budget_sizes(self, layout: Settings) -> list[int]:
        """Return the token budgets to try, ascending: one sequence, powers of two, and the
        user's."""
        models = layouts(self.config(layout))
        longest = max(
            tokens_on_rank(self.longest, models[role].context_parallel_size) for role in self.shapes
        )
        sizes = {longest, self.base.actor.ppo_max_token_len_per_gpu, *_BUDGETS}
        return sorted(size for size in sizes if longest <= size <= max(_LARGEST_BUDGET, longest))

    def budgets(self, update: int, forward: int) -> dict[str, Any]:
        """Return the settings of the token budgets of the models that the run has."""
        scorers = [f"{role}.forward_max_token_len_per_gpu" for role in reward_models(self.base)]
        scorers += [f"{role}.log_prob_max_token_len_per_gpu" for role in teachers(self.base)]
        budgets = dict.fromkeys(_UPDATE_BUDGETS, update) | dict.fromkeys(
            (*_FORWARD_BUDGETS, *scorers), forward
        )
        absent = tuple(f"{role}." for role in ("critic", "ref") if role not in self.shapes)
        return {key: value for key, value in budgets.items() if not key.startswith(absent)}

    def offload_levels(self) -> list[dict[str, Any]]:
        """Return the settings that offload: first the ones that free least, last the ones that free
        most and take most time."""
        shares = self.base.rollout.quantization is None
        offloads = ["grad_offload", "optimizer_offload", "param_offload"][self.is_sharded :]
        on_host = self.is_sharded and self.base.actor.fsdp_config.offload_policy
        levels = []
        for count in range(1 if on_host else len(offloads) + 1):
            level: dict[str, Any] = {
                f"{_MEGATRON}.{name}": offloads.index(name) < count for name in offloads
            }
            level["reshard.share_weights"] = shares and not level[f"{_MEGATRON}.param_offload"]
            levels.append({**level, "rollout.free_cache_engine": True})
        if not self.base.rollout.free_cache_engine:
            levels.insert(0, {**levels[0], "rollout.free_cache_engine": False})
        return levels


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
