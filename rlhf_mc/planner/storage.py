"""Bytes of a run's files: training checkpoints and exports of the actor, with the space and the
time that they take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.model_schema import MegatronConfig
from rlhf_mc.config.roles import prompts_in_flight, prompts_per_batch
from rlhf_mc.config.schema import Config, layouts
from rlhf_mc.planner.memory import RankMemory
from rlhf_mc.planner.model_state import ITEMSIZES
from rlhf_mc.reshard.freeze import frozen_tensors
from rlhf_mc.reshard.layout import logical_shapes

TRAINED = ("actor", "critic")
"""Roles of models that are trained, and saved in checkpoints."""
STORAGE_BANDWIDTH = 5e9
"""Bytes per second and direction between a node and the storage that all nodes share: an
assumption. Sites publish theirs; `dd` or `fio` on one node measures it."""
_FLOAT32 = 4


@dataclass(frozen=True)
class Storage:
    """Files of a run, in bytes, and lower bounds of their times, in seconds."""

    checkpoint: int
    """Bytes of a training checkpoint's tensors, and of the pool's responses at their longest.
    Metadata adds some hundred bytes a block."""
    export: int
    """Tensors of an export of the actor."""
    checkpoints: int | None
    """Checkpoints that exist at the same time: the retained ones, and the one being written. None:
    all are retained; 0: none is saved."""
    save: float
    """Time in which the ranks write a checkpoint, each its part, at the storage's bandwidth."""
    load: float
    """Time in which the node that reads most reads a checkpoint. All of its files are read once
    before, to verify their digests."""

    @property
    def space(self) -> int | None:
        """Bytes for the checkpoints and the last export; None: they grow with each save."""
        return (
            None if self.checkpoints is None else self.checkpoints * self.checkpoint + self.export
        )


def plan_storage(
    cfg: Config,
    shapes: Mapping[str, ModelShape],
    plan: Sequence[RankMemory],
    gpus_per_node: int,
    bandwidth: float = STORAGE_BANDWIDTH,
) -> Storage:
    """Return the files of a run whose memory is planned. shapes: of the run's models, by role.
    bandwidth: bytes per second and direction, of a node."""
    trainer = cfg.trainer
    settings = {
        role: (layouts(cfg)[role], getattr(cfg, role).freeze) for role in TRAINED if role in shapes
    }
    tensors = sum(checkpoint_bytes(shapes[role], *setting) for role, setting in settings.items())
    pool = pool_bytes(cfg)
    nodes = max(1, sum(len(ranks.ranks) for ranks in plan) // gpus_per_node)
    read: dict[int, float] = {}
    for ranks in plan:
        rank_bytes = sum(
            ranks.states[role].stored_params(shapes[role], ITEMSIZES[megatron.dtype])
            + ranks.states[role].optimizer
            for role, (megatron, _) in settings.items()
            if role in ranks.states
        )
        for rank in ranks.ranks:
            read[rank // gpus_per_node] = read.get(rank // gpus_per_node, 0) + rank_bytes
    most = trainer.max_ckpt_to_keep
    kinds = (trainer.save_freq > 0) + (trainer.save_minutes is not None)
    checkpoints = (
        0 if kinds == 0 else None if most is None else kinds * most + trainer.keep_best + 1
    )
    return Storage(
        tensors + pool,
        weight_bytes(shapes["actor"], cfg.actor.megatron),
        checkpoints,
        (tensors / nodes + pool) / bandwidth,
        (tensors / nodes + max(read.values()) + 2 * pool) / bandwidth,
    )


def weight_bytes(shape: ModelShape, megatron: MegatronConfig) -> int:
    """Return the bytes of a model's tensors in a Hugging Face checkpoint."""
    return sum(map(math.prod, logical_shapes(shape).values())) * ITEMSIZES[megatron.dtype]


def pool_bytes(cfg: Config) -> int:
    """Return the most bytes of the responses that rollout.partial_rollout or one_step_off keeps for
    later steps, a token and a log-prob each. One rank writes them, and every node reads them."""
    # A rollout gives data.train_batch_size groups to a step; with algorithm.filter_groups the last
    # one of a step may give one alone.
    size = cfg.data.train_batch_size
    num_taken = 1 if cfg.algorithm.filter_groups.enable else size
    num_unfinished = prompts_in_flight(cfg) - num_taken if cfg.rollout.partial_rollout else 0
    num_ahead = cfg.rollout.one_step_off * prompts_per_batch(cfg.data)
    num_stored = (num_unfinished + num_ahead) * cfg.rollout.n
    return num_stored * cfg.data.max_response_length * 2 * _FLOAT32


def checkpoint_bytes(shape: ModelShape, megatron: MegatronConfig, freeze: Sequence[str]) -> int:
    """Return the bytes of a trained model in a training checkpoint: its weights, but with adapters
    the trained ones alone; for trained weights also Adam's moments and, unless they are float32, a
    float32 copy. freeze: the patterns of its frozen tensors."""
    sizes = {name: math.prod(size) for name, size in logical_shapes(shape).items()}
    frozen = frozen_tensors("freeze", freeze, shape)
    copies = 2 + (megatron.dtype != "float32")
    trained = sum(numel for name, numel in sizes.items() if name not in frozen)
    stored = sum(sizes.values()) if shape.lora is None else trained
    return stored * ITEMSIZES[megatron.dtype] + trained * copies * _FLOAT32
