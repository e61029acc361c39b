"""What the ranks run in test_offload_schedule.py; each function is called on every rank with the same arguments."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases import a_run
from model_cases import _my_micro_batches, _objective, make_engine, mesh_groups

from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.offload import optimizer_tensors
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.observability.sinks import METRICS_FILE
from rlhf_mc.platform import SideStream
from rlhf_mc.rollout import vllm_engine
from rlhf_mc.trainer import loop, offload_schedule, setup
from rlhf_mc.trainer.scoring import log_prob_head, score_tokens

ALL_AWAY = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}


def fit(config_path: str, overrides: list[str], vllm_sleeps: bool = False) -> dict[str, Any]:
    """The whole loop. Returns its metrics (rank 0 alone), what vLLM was told, and by phase and role the parts whose
    memory was there. vllm_sleeps: vLLM's sleep is acted out as a GPU carries it out; what the weights were is lost,
    save those that lie in the actor's memory."""
    told: list[str] = []
    seen: dict[str, dict[str, list[str]]] = {}
    phase = PhaseTimer.phase

    def look(timer: PhaseTimer, name: str) -> Any:
        if name in offload_schedule.TABLE:
            seen[name] = {role: there(engine) for role, engine in run.offload_schedule._engines.items()}
        return phase(timer, name)

    def sleep(llm: Any, level: int) -> None:
        told.append(f"sleep {level}")
        shared = {param.untyped_storage()._cdata for param in run.actor.named_parameters().values()}
        for param in model_of(llm).parameters():
            if param.untyped_storage()._cdata not in shared:
                param.data.fill_(torch.nan)

    def wake_up(llm: Any, tags: list[str]) -> None:
        told.append(f"wake {' '.join(tags)}")

    with (
        mock.patch.object(setup, "check_offload", lambda rollout: None),
        mock.patch.multiple(vllm_engine.vllm.LLM, sleep=sleep, wake_up=wake_up),
        mock.patch.object(PhaseTimer, "phase", look),
        mock.patch.object(loop, "plot_run", lambda *args, **kwargs: None),
        a_run(config_path, [*overrides, f"rollout.free_cache_engine={str(vllm_sleeps).lower()}"]) as run,
    ):
        loop.fit(run)
        steps = []
        if dist.get_rank() == 0:
            lines = (Path(run.config.trainer.default_local_dir) / METRICS_FILE).read_text().splitlines()
            steps = [json.loads(line) for line in lines]
    return {"steps": steps, "told": told, "seen": seen}


def model_of(llm: Any) -> torch.nn.Module:
    model: torch.nn.Module = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    return model


def there(engine: ModelEngine) -> list[str]:
    """Which parts of a model have memory; of each part, all or nothing."""
    tensors: dict[str, list[torch.Tensor]] = {"params": list(engine.named_parameters().values())}
    if engine._optimizer is not None:
        params = {param.untyped_storage()._cdata for param in tensors["params"]}
        tensors["grads"] = [param.main_grad for param in tensors["params"]]
        state = optimizer_tensors(engine._optimizer)
        tensors["optimizer"] = [t for t in state if t.untyped_storage()._cdata not in params]
    found = []
    for name, members in tensors.items():
        has = {tensor.untyped_storage().nbytes() > 0 for tensor in members}
        assert len(has) <= 1, f"a part of the {name} of {engine.name} is away and a part is not"
        if has == {True}:
            found.append(name)
    return found


def steps_with_pauses(
    checkpoint: str, mesh: dict[str, int], batch: RaggedBatch, pauses: bool, **megatron: Any
) -> tuple[list[torch.Tensor], list[float], list[int]]:
    """Two updates; with pauses, all that may go away does so before each pass and comes back. Returns all that the
    optimizer holds and the weights, the gradient norms, and the bytes that were away at each pause."""
    away = []
    norms = []
    with mesh_groups(**{"tp": 1, "pp": 1, **mesh}) as groups:
        engine = make_engine(checkpoint, "actor", groups, **megatron, **(ALL_AWAY if pauses else {}))
        engine.make_trainable(OptimConfig(lr=1e-3), total_steps=1)
        for _ in range(2):
            engine.offload.offload_all_but(())
            away.append(engine.offload.offloaded_bytes)
            engine.offload.onload(("params", "grads", "optimizer"))
            micro_batches = _my_micro_batches(engine, batch, 48)
            norms.append(engine.train_step(batch, micro_batches, _objective(engine, batch, "token-mean"))["grad_norm"])
        engine.offload.offload_all_but(())
        away.append(engine.offload.offloaded_bytes)
        engine.offload.onload(("params", "optimizer"))
        held = [*engine.params.values(), *optimizer_tensors(engine._optimizer)]
        return [tensor.detach().clone() for tensor in held], norms, away


def frozen_scores(checkpoint: str, batch: RaggedBatch) -> dict[str, Any]:
    """Scores of a frozen model before it was put away and after each of two times, the message of scoring while it is
    away, and the copies to the host."""
    with mesh_groups(1, 1) as groups, mock.patch.object(SideStream, "leaving", autospec=True) as leaving:
        leaving.side_effect = lambda *args: contextlib.nullcontext()
        engine = make_engine(checkpoint, "actor", groups, param_offload=True)
        head = log_prob_head(engine.shape.vocab_size, 1.0)
        scores = [score_tokens(engine, batch, head, 48)]
        for _ in range(2):
            engine.offload.offload_all_but(())
            try:
                score_tokens(engine, batch, head, 48)
                message = "it was scored"
            except RuntimeError as error:
                message = str(error)
            engine.offload.onload(("params",))
            scores.append(score_tokens(engine, batch, head, 48))
    return {"scores": scores, "message": message, "copies": leaving.call_count}
