"""What the ranks run in test_rollout.py: vLLM engines alone, and steps whose prompts are cut. Each function is called
on every rank with the same arguments."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from cases import a_run
from safetensors.torch import load_file
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.data.batch import Generation
from rlhf_mc.observability.whereabouts import Place
from rlhf_mc.rollout.engine import RolloutEngine, Sampling
from rlhf_mc.trainer import ppo
from rlhf_mc.trainer.preemption import StopRequests


@contextlib.contextmanager
def an_engine(checkpoint: str, rollout_tp: int, max_model_len: int, **cfg: int) -> Iterator[RolloutEngine]:
    """Engines over all ranks in float32 with the checkpoint's weights."""
    groups = [list(range(first, first + rollout_tp)) for first in range(0, dist.get_world_size(), rollout_tp)]
    engine = RolloutEngine(
        checkpoint,
        RolloutConfig(tensor_model_parallel_size=rollout_tp, max_num_seqs=64, **cfg),
        groups,
        dist.get_rank(),
        max_model_len,
        "float32",
        seed=0,
    )
    try:
        engine._model.load_weights(iter(load_file(Path(checkpoint) / "model.safetensors").items()))
        yield engine
    finally:
        engine.close()


def generate(
    checkpoint: str,
    rollout_tp: int,
    max_model_len: int,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    budgets: Sequence[int],
) -> list[list[Generation]]:
    """The responses to the prompts, for each value of max_num_batched_tokens in `budgets`."""
    seeds = list(range(1000, 1000 + len(prompts)))
    responses = []
    for budget in budgets:
        with an_engine(checkpoint, rollout_tp, max_model_len, max_num_batched_tokens=budget) as engine:
            responses.append(engine.generate(prompts, seeds, Sampling(temperature, 8, ())))
    return responses


def generate_unpatched(checkpoint: str, max_model_len: int, prompts: Sequence[Sequence[int]], budget: int) -> str:
    """Returns the error of vLLM's own `CPUModelRunner.sample_tokens` where prompts are cut."""
    with an_engine(checkpoint, 1, max_model_len, max_num_batched_tokens=budget) as engine:
        patched = CPUModelRunner.sample_tokens
        CPUModelRunner.sample_tokens = GPUModelRunner.sample_tokens
        try:
            engine.generate(prompts, list(range(len(prompts))), Sampling(1.0, 8, ()))
        except RuntimeError as error:
            return str(error)
        finally:
            CPUModelRunner.sample_tokens = patched
    return "no error"


def gsm8k_steps(config_path: str) -> dict[str, Any]:
    """Two PPO steps and a sampled validation. Returns digests of the tokens of each step, the metrics, the validation's
    samples, and the prompt tokens of this rank's engine in each step."""
    steps, digests, prompt_tokens = [], [], []
    with a_run(config_path, []) as run:
        for step in (1, 2):
            state = ppo.begin_step(step, Place())
            batch = ppo.one_step(run, state, StopRequests(run.config.trainer))
            digests.append(hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest())
            prompt_tokens.append(int(batch.prompt_lens[dist.get_rank() :: dist.get_world_size()].sum()))
            steps.append(dict(state.metrics))
        ppo.validate(run, state)
        samples = Path(run.config.trainer.default_local_dir) / "generations/step_000002.txt"
        dist.barrier()
        return {"digests": digests, "steps": steps, "samples": samples.read_text(), "prompt_tokens": prompt_tokens}
