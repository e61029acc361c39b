"""vLLM's parameters without its engine: the model of each tensor-parallel rank is built on torch's
meta device, in one process, to compare the layout of the weight update with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mc.rollout import vllm_patches  # isort: skip  (first: it sets what vllm reads)
import vllm.distributed.parallel_state as vllm_state
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import Config
from rlhf_mc.patching import replaced
from rlhf_mc.rollout.vllm_engine import check_build
from rlhf_mc.rollout.vllm_layout import check_parameters, vllm_layout
from rlhf_mc.rollout.vllm_options import engine_settings
from rlhf_mc.topology.groups import simulated_rank


def check_rollout_layouts(cfg: Config, shape: ModelShape) -> int:
    """Build vLLM's model on each rank of an engine. Return the number of parameters that were
    compared. Raise UserError unless they are the layout's parameters, or where vLLM is another
    build than the trainer's.

    vLLM may still repack a parameter after loading: VLLMEngine compares again when a run starts."""
    check_build()
    vllm_patches.patch()
    vllm_patches.use_storage({})
    tp = cfg.rollout.tensor_model_parallel_size
    num_compared = 0
    for rank in range(tp):
        layout = vllm_layout(shape, rank, tp)
        shapes = {
            name: tuple(param.shape) for name, param in _model(cfg, shape, rank).named_parameters()
        }
        check_parameters(f"{cfg.model.path}, rank {rank} of an engine", layout.shapes, shapes)
        num_compared += len(shapes)
    return num_compared


def _model(cfg: Config, shape: ModelShape, rank: int) -> torch.nn.Module:
    """Return vLLM's model of one rank of an engine, on the meta device. A model that quantizes
    weights while they are loaded is returned with the weights that are loaded."""
    tp = cfg.rollout.tensor_model_parallel_size
    length = cfg.data.max_prompt_length + cfg.data.max_response_length
    settings = engine_settings(cfg.model.path, shape, cfg.rollout, length, cfg.actor.megatron.dtype)
    arguments = EngineArgs(**settings, enforce_eager=True)
    with simulated_rank(rank, tp), _groups(rank, tp):
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            vllm_state.initialize_model_parallel(tp)
            with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
                model: torch.nn.Module = initialize_model(vllm_config=config)
    return model


@contextlib.contextmanager
def _groups(rank: int, tp: int) -> Iterator[None]:
    """Let vLLM take stand-ins for its groups of ranks, while the body runs."""

    def init_group(group_ranks: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> _Group:
        return _Group(next(ranks for ranks in group_ranks if rank in ranks), rank)

    world = _Group(range(tp), rank)
    try:
        with (
            replaced(vllm_state, "_WORLD", world),
            replaced(vllm_state, "init_model_parallel_group", init_group),
        ):
            yield
    finally:
        vllm_state.destroy_model_parallel()


class _Group:
    """Stands for a group of ranks of vLLM (GroupCoordinator) while a model is built: its sizes, and
    no connection."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks = list(ranks)
        self.rank = rank
        self.local_rank = rank
        self.world_size = len(ranks)
        self.rank_in_group = self.ranks.index(rank)
        self.is_first_rank = self.rank_in_group == 0
        self.is_last_rank = self.rank_in_group == len(ranks) - 1
        self.device_group = dist.group.WORLD

    def destroy(self) -> None:
        """Do nothing. vLLM calls it."""
