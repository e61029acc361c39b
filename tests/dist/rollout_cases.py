"""What the ranks run in test_rollout.py: vLLM engines alone, and steps whose prompts are cut. Each function is called
on every rank with the same arguments."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases import a_run
from safetensors.torch import load_file
from vllm.config import ModelConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import HFReader
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.data.batch import Generation
from rlhf_mc.reshard.layout import vllm_layout
from rlhf_mc.rollout import vllm_engine, vllm_patches
from rlhf_mc.rollout.vllm_engine import RolloutEngine, Sampling
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import logprob_check, loop, phases, step_report


@contextlib.contextmanager
def an_engine(
    checkpoint: str,
    rollout_tp: int,
    max_model_len: int,
    shape: ModelShape | None = None,
    storage: Mapping[str, torch.Tensor] | None = None,
    **cfg: int,
) -> Iterator[RolloutEngine]:
    """Build engines over all ranks in float32 with the checkpoint's weights; shape: another than the checkpoint's."""
    groups = [list(range(first, first + rollout_tp)) for first in range(0, dist.get_world_size(), rollout_tp)]
    engine = RolloutEngine(
        checkpoint,
        shape or HFReader(checkpoint).shape(),
        RolloutConfig(tensor_model_parallel_size=rollout_tp, max_num_seqs=64, **cfg),
        groups,
        dist.get_rank(),
        max_model_len,
        "float32",
        seed=0,
        storage=storage,
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
    """Return the responses to the prompts, for each value of max_num_batched_tokens in `budgets`."""
    seeds = list(range(1000, 1000 + len(prompts)))
    responses = []
    for budget in budgets:
        with an_engine(checkpoint, rollout_tp, max_model_len, max_num_batched_tokens=budget) as engine:
            responses.append(engine.generate(prompts, seeds, Sampling(temperature, 8, ())))
    return responses


def generate_unpatched(checkpoint: str, max_model_len: int, prompts: Sequence[Sequence[int]], budget: int) -> str:
    """Return the error of vLLM's own `CPUModelRunner.sample_tokens` where prompts are cut."""
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


def build_with(checkpoint: str, rollout_tp: int, **changes: Any) -> None:
    """Build engines where the trainer expects another model than vLLM loads; for tests of what is refused."""
    shape = replace(HFReader(checkpoint).shape(), **changes)
    with an_engine(checkpoint, rollout_tp, 64, shape=shape):
        pass


def build_unpatched(checkpoint: str) -> None:
    """Let vLLM decide whether the language-model head is tied."""
    shape = HFReader(checkpoint).shape()
    embedding = "model.embed_tokens.weight"
    storage = {embedding: torch.ones(vllm_layout(shape, 0, 1).shapes[embedding])}
    original = vllm_patches._keep_tie_word_embeddings.__wrapped__
    with (
        mock.patch.object(vllm_engine, "patch", lambda: None),
        mock.patch.object(ModelConfig, "maybe_untie_word_embeddings", original),
        an_engine(checkpoint, 1, 64, storage=storage),
    ):
        pass


def disagree(config_path: str, from_step: int) -> list[str]:
    """Run two PPO steps. From that one on vLLM's last norm is three times the trainer's. Return the warnings."""
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    with a_run(config_path, ["reshard.share_weights=false"]) as run:
        updated = run.rollout.weights_updated

        def spoil() -> None:
            run.rollout.params["model.norm.weight"].mul_(3 if state.step >= from_step else 1)
            updated()

        run.rollout.weights_updated = spoil  # type: ignore[method-assign]
        logprob_check.logger.addHandler(handler)
        try:
            for step in (1, 2):
                state = step_report.begin_step(step, RankStatus())
                loop.one_step(run, state, StopRequests(run.config.trainer))
        except UserError:
            run.rollout.close()
            run.rewards.close()
            raise
        finally:
            logprob_check.logger.removeHandler(handler)
    return warned


def gsm8k_steps(config_path: str) -> dict[str, Any]:
    """Run two PPO steps and a sampled validation. Return digests of the tokens of each step, the metrics, the
    validation's samples, and the prompt tokens of this rank's engine in each step."""
    steps = []
    digests = []
    prompt_tokens = []
    with a_run(config_path, []) as run:
        for step in (1, 2):
            state = step_report.begin_step(step, RankStatus())
            batch = loop.one_step(run, state, StopRequests(run.config.trainer))
            digests.append(hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest())
            prompt_tokens.append(int(batch.prompt_lens[dist.get_rank() :: dist.get_world_size()].sum()))
            steps.append(dict(state.metrics))
        phases.validate(run, state)
        samples = Path(run.config.trainer.default_local_dir) / "generations/step_000002.txt"
        dist.barrier()
        return {"digests": digests, "steps": steps, "samples": samples.read_text(), "prompt_tokens": prompt_tokens}
