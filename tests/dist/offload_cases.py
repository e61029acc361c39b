"""Functions that the ranks run in test_offload_schedule.py. Each is called on every rank with the
same arguments."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases import built_run
from gpu_parts.engines import score_tokens
from model_cases import _my_micro_batches, _objective, make_engine, mesh_groups

from rlhf_mc.config.roles import DEVICE_PLACEMENT
from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.heads import log_prob_head
from rlhf_mc.models.offload import optimizer_tensors
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.observability.sinks import METRICS_FILE
from rlhf_mc.platform import SideStream
from rlhf_mc.rollout import vllm_engine
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.setup import build
from rlhf_mc.trainer import lifecycle, loop

OFFLOAD_ALL = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}


def fit(config_path: str, overrides: list[str], vllm_sleeps: bool = False) -> dict[str, Any]:
    """Run the whole loop. Return its metrics (on rank 0), the calls of vLLM's sleep and wake_up, by
    phase and role the tensor groups on the device, and each step and phase of the rank status. With
    vllm_sleeps vLLM's sleep is simulated: its weights are lost as on a GPU, except those that alias
    the actor's.
    """
    vllm_calls: list[str] = []
    on_device: dict[str, dict[str, list[str]]] = {}
    reported: list[tuple[int, str]] = []
    phase = PhaseTimer.phase

    def record_phase(timer: PhaseTimer, name: str) -> Any:
        if name in DEVICE_PLACEMENT:
            on_device[name] = {
                role: groups_on_device(engine)
                for role, engine in run.offload_schedule._engines.items()
            }
        return phase(timer, name)

    def sleep(llm: Any, level: int) -> None:
        vllm_calls.append(f"sleep {level}")
        shared = {param.untyped_storage()._cdata for param in run.actor.named_parameters().values()}
        for param in model_of(llm).parameters():
            if param.untyped_storage()._cdata not in shared:
                param.data.fill_(torch.nan)

    def wake_up(llm: Any, tags: Sequence[str] = ("everything",)) -> None:
        vllm_calls.append(f"wake {' '.join(tags)}")

    with (
        mock.patch.object(build, "for_this_device", lambda cfg: cfg),
        mock.patch.multiple(vllm_engine.vllm.LLM, sleep=sleep, wake_up=wake_up),
        mock.patch.object(PhaseTimer, "phase", record_phase),
        mock.patch.object(lifecycle, "write_run_report", lambda *args: None),
        built_run(
            config_path, [*overrides, f"rollout.free_cache_engine={str(vllm_sleeps).lower()}"]
        ) as run,
    ):
        status = RankStatus()
        status.on_move = lambda: reported.append((status.step, status.phases[-1]))
        loop.fit(run, status)
        steps = []
        if dist.get_rank() == 0:
            lines = (
                (Path(run.config.trainer.default_local_dir) / METRICS_FILE).read_text().splitlines()
            )
            steps = [json.loads(line) for line in lines]
    return {"steps": steps, "vllm_calls": vllm_calls, "on_device": on_device, "reported": reported}


def model_of(llm: Any) -> torch.nn.Module:
    model: torch.nn.Module = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    return model


def groups_on_device(engine: ModelEngine) -> list[str]:
    """Return the names of the model's tensor groups on the device. Each group must be there
    entirely or not at all."""
    tensors: dict[str, list[torch.Tensor]] = {"params": list(engine.named_parameters().values())}
    if engine.strategy.optimizer is not None:
        params = {param.untyped_storage()._cdata for param in tensors["params"]}
        tensors["grads"] = [param.main_grad for param in tensors["params"]]
        state = optimizer_tensors(engine.strategy.optimizer)
        tensors["optimizer"] = [t for t in state if t.untyped_storage()._cdata not in params]
    found = []
    for name, members in tensors.items():
        has = {tensor.untyped_storage().nbytes() > 0 for tensor in members}
        assert len(has) <= 1, f"the {name} of {engine.name} are offloaded in part"
        if has == {True}:
            found.append(name)
    return found


def steps_with_offload(
    checkpoint: str, mesh: dict[str, int], batch: RaggedBatch, offload: bool, **megatron: Any
) -> tuple[list[torch.Tensor], list[float], list[int]]:
    """Run two updates; with `offload`, all tensor groups are offloaded before each. The optimizer
    state comes for the step alone, and after the second one stays. Return the weights and all
    tensors of the optimizer, the gradient norms, and the bytes offloaded each time.
    """
    offloaded = []
    norms = []
    with mesh_groups(**{"tp": 1, "pp": 1, **mesh}) as groups:
        engine = make_engine(
            checkpoint, "actor", groups, **megatron, **(OFFLOAD_ALL if offload else {})
        )
        engine.make_trainable(OptimConfig(lr=1e-3), total_steps=1)
        for stays in (False, True):
            engine.offload.optimizer_stays = stays
            engine.offload.offload_all_but(())
            offloaded.append(engine.offload.offloaded_bytes)
            engine.offload.onload(("params", "grads"))
            micro_batches = _my_micro_batches(engine, batch, 48)
            objective = _objective(engine, batch, "token-mean")

            def loss(*args: Any, objective: Any = objective) -> Any:
                assert not offload or "optimizer" not in groups_on_device(engine)
                return objective(*args)

            norms.append(engine.train_step(batch, micro_batches, loss).grad_norm)
            assert ("optimizer" in groups_on_device(engine)) == (stays or not offload)
        engine.offload.offload_all_but(())
        offloaded.append(engine.offload.offloaded_bytes)
        engine.offload.onload(("params", "optimizer"))
        held = [*engine.params.values(), *optimizer_tensors(engine.strategy.optimizer)]
        return [tensor.detach().clone() for tensor in held], norms, offloaded


def frozen_scores(checkpoint: str, batch: RaggedBatch) -> dict[str, Any]:
    """Return the scores of a frozen model before offload and after each of two offloads, the error
    message of scoring while it is offloaded, and the number of copies to the host.
    """
    with (
        mesh_groups(1, 1) as groups,
        mock.patch.object(SideStream, "to_host", autospec=True) as to_host,
    ):
        to_host.side_effect = lambda *args: contextlib.nullcontext()
        engine = make_engine(checkpoint, "actor", groups, param_offload=True)
        head = log_prob_head(engine.shape.vocab_size, 1.0)
        scores = [score_tokens(engine, batch, head, 48)]
        for _ in range(2):
            engine.offload.offload_all_but(())
            try:
                score_tokens(engine, batch, head, 48)
                message = "no error"
            except RuntimeError as error:
                message = str(error)
            engine.offload.onload(("params",))
            scores.append(score_tokens(engine, batch, head, 48))
    return {"scores": scores, "message": message, "copies": to_host.call_count}
