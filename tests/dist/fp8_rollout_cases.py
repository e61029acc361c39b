"""Functions that the ranks run in test_fp8_rollout.py. Each is called on every rank with the same
arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist
import vllm.model_executor.kernels.linear
from cases import built_run
from rollout_cases import built_engine, respond
from vllm.platforms import PlatformEnum

from rlhf_mc.checkpoint.hf_format import HFReader, import_hf
from rlhf_mc.patching import replaced
from rlhf_mc.rollout.base import Sampling
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import loop, step_state


def update_and_generate(checkpoints: list[str], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Write the weights of each checkpoint into one fp8 engine over all ranks. Return for each what
    was written, what the engine then holds and where, and its responses."""
    world = dist.get_world_size()
    shape = HFReader(checkpoints[0]).shape()
    layout = vllm_layout(shape, dist.get_rank(), world)
    out = []
    vectors = [np.array(prompt, np.int32) for prompt in prompts]
    with built_engine(checkpoints[0], world, 72, dtype="bfloat16", quantization="fp8") as engine:
        for checkpoint in checkpoints:
            params = engine.params
            shapes = {name: tuple(param.shape) for name, param in params.items()}
            assert shapes == layout.shapes
            import_hf(HFReader(checkpoint), layout, params)
            written = {name: param.float() for name, param in params.items()}
            engine.weights_updated()
            held = dict(engine._model.named_parameters())
            out.append(
                {
                    "written": written,
                    "held": {name: param.data.clone() for name, param in held.items()},
                    "addresses": {name: param.data_ptr() for name, param in held.items()},
                    "responses": respond(
                        engine, vectors, list(range(len(vectors))), Sampling(0.0, 8, ())
                    ).generations(),
                }
            )
    return out


def build_without_kernels(checkpoint: str) -> None:
    """Build an fp8 engine where vLLM has no kernel for fp8."""
    with replaced(
        vllm.model_executor.kernels.linear, "_POSSIBLE_FP8_KERNELS", {PlatformEnum.CPU: []}
    ):
        with built_engine(checkpoint, 1, 72, dtype="bfloat16", quantization="fp8"):
            pass


def steps(config_path: str, overrides: list[str]) -> list[dict[str, float]]:
    """Run two PPO steps. Return the metrics of each."""
    metrics = []
    with built_run(config_path, overrides) as run:
        for step in (1, 2):
            state = step_state.begin_step(
                step, RankStatus(), (step - 1) * run.config.data.train_batch_size
            )
            loop.one_step(run, state, StopRequests(run.config.trainer))
            metrics.append(dict(state.metrics))
    return metrics
