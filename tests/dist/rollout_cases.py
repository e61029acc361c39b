"""Functions that the ranks run in test_rollout.py and test_engines_agree.py: vLLM engines alone,
and steps with chunked prefill. Each is called on every rank with the same arguments."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import vllm
from cases import built_run
from families import changed
from gpu_parts.engines import TEMPERATURE
from logged import messages_of
from safetensors.torch import load_file
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import HFReader
from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.reward_schema import CustomRewardFunctionConfig, RewardConfig
from rlhf_mc.config.schema import DataConfig, RolloutConfig
from rlhf_mc.data.batch import NOTHING, Generation, Prompt, Responses
from rlhf_mc.data.responses import exchange_responses
from rlhf_mc.data.tokenizer import load_tokenizer
from rlhf_mc.environments.environment_manager import EnvironmentManager
from rlhf_mc.environments.journal import ObservationJournal
from rlhf_mc.environments.turns import Conversations
from rlhf_mc.patching import replaced
from rlhf_mc.rewards.manager import RewardManager, ScoreStream
from rlhf_mc.rewards.results import Episode
from rlhf_mc.rollout.base import Request, RolloutEngine, Sampling
from rlhf_mc.rollout.engine_loop import generate_responses
from rlhf_mc.rollout.vllm_engine import VLLMEngine
from rlhf_mc.rollout.vllm_scheduler import DecodeScheduler
from rlhf_mc.rollout.work_sharing import CLOCKS, Clock, VirtualClock
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import evaluate, logprob_check, loop, step_state


@contextlib.contextmanager
def built_engine(
    checkpoint: str,
    rollout_tp: int,
    max_model_len: int,
    shape: ModelShape | None = None,
    storage: Mapping[str, torch.Tensor] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    dtype: str = "float32",
    **cfg: Any,
) -> Iterator[VLLMEngine]:
    """Build engines over all ranks with the checkpoint's weights. `shape` replaces the checkpoint's
    shape.
    groups: the ranks of each engine; None: consecutive ones. With `quantization` the caller writes
    the weights."""
    groups = groups or [
        list(range(first, first + rollout_tp))
        for first in range(0, dist.get_world_size(), rollout_tp)
    ]
    engine = VLLMEngine(
        checkpoint,
        shape or HFReader(checkpoint).shape(),
        RolloutConfig(tensor_model_parallel_size=rollout_tp, **{"max_num_seqs": 64, **cfg}),
        groups,
        dist.get_rank(),
        max_model_len,
        dtype,
        seed=0,
        storage=storage,
    )
    try:
        if "quantization" not in cfg:  # vLLM's loaders do not know of staged weights
            engine._model.load_weights(
                iter(load_file(Path(checkpoint) / "model.safetensors").items())
            )
        yield engine
    finally:
        engine.close()


def all_responses(
    engine: RolloutEngine,
    requests: Sequence[Request],
    sampling: Sampling,
    clock: Clock,
    **kwargs: Any,
) -> Responses:
    """Return the response to each request on every rank. kwargs: of generate_responses."""
    own = generate_responses(engine, requests, sampling, clock, **kwargs)
    return exchange_responses(own, engine.groups, len(requests))


def respond(
    engine: RolloutEngine, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: Sampling
) -> Responses:
    """Return one response to each prompt."""
    requests = [
        Request(i, prompt, seed, NOTHING)
        for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    return all_responses(engine, requests, sampling, VirtualClock())


def generate(
    checkpoint: str,
    rollout_tp: int,
    max_model_len: int,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    budgets: Sequence[int],
) -> list[list[Generation]]:
    """Return the responses to the prompts, for each value of max_num_batched_tokens in
    `budgets`."""
    seeds = list(range(1000, 1000 + len(prompts)))
    vectors = [np.array(prompt, np.int32) for prompt in prompts]
    responses = []
    for budget in budgets:
        with built_engine(
            checkpoint, rollout_tp, max_model_len, max_num_batched_tokens=budget
        ) as engine:
            responses.append(
                respond(engine, vectors, seeds, Sampling(temperature, 8, ())).generations()
            )
    return responses


def build_with_kv_cache_of(num_bytes: int, checkpoint: str, max_model_len: int) -> None:
    """Build an engine on a rank with memory for a KV cache of this size."""
    with replaced(CPUWorker, "determine_available_memory", lambda worker: num_bytes):
        with built_engine(checkpoint, 1, max_model_len):
            pass


def update_during_a_request(
    checkpoint: str, max_model_len: int, prompt: Sequence[int]
) -> tuple[str, str]:
    """Report new weights while a request is unfinished, and after its end. Return the engine's line
    for the console, and the first call's error."""
    with built_engine(checkpoint, 1, max_model_len) as engine:
        requests = engine._llm.llm_engine
        requests.add_request(
            "unfinished",
            vllm.TokensPrompt(prompt_token_ids=list(prompt)),
            vllm.SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False),
        )
        requests.step()
        try:
            engine.weights_updated()
            message = ""
        except RuntimeError as error:
            message = str(error)
        while requests.has_unfinished_requests():
            requests.step()
        engine.weights_updated()
        return engine.summary, message


def build_with(checkpoint: str, rollout_tp: int, **changes: Any) -> None:
    """Build engines for a shape with `changes`, so that the trainer expects another model than vLLM
    loads."""
    shape = changed(HFReader(checkpoint).shape(), **changes)
    with built_engine(checkpoint, rollout_tp, 64, shape=shape):
        pass


def steps_with_wrong_vllm_weights(config_path: str, from_step: int) -> list[str]:
    """Run two PPO steps. Triple vLLM's last norm in each step from `from_step` on. Return the
    warnings."""
    with (
        built_run(config_path, ["reshard.share_weights=false"]) as run,
        messages_of(logprob_check.logger) as warnings,
    ):
        weights_updated = run.rollout.weights_updated

        def change_norm_then_update() -> None:
            run.rollout.params["model.norm.weight"].mul_(3 if state.step >= from_step else 1)
            weights_updated()

        run.rollout.weights_updated = change_norm_then_update  # type: ignore[method-assign]
        for step in (1, 2):
            state = step_state.begin_step(
                step, RankStatus(), (step - 1) * run.config.data.train_batch_size
            )
            loop.one_step(run, state, StopRequests(run.config.trainer))
    return warnings


def gsm8k_step(config_path: str) -> dict[str, Any]:
    """Run a PPO step and a sampled validation on one rank. Return the metrics of the step, the
    validation's samples, and the prompt tokens of the step."""
    with built_run(config_path, []) as run:
        state = step_state.begin_step(1, RankStatus())
        batch = loop.one_step(run, state, StopRequests(run.config.trainer))
        metrics = dict(state.metrics)
        evaluate.validate(run, state)
        samples = Path(run.config.trainer.default_local_dir) / "generations/1.jsonl"
        prompt_tokens = int(batch.prompt_lens.sum())
        return {
            "metrics": metrics,
            "samples": samples.read_text(),
            "prompt_tokens": prompt_tokens,
        }


Share = tuple[list[Generation], list[int]]
"""All responses; the requests of this rank's engine, in the order in which it took them."""
Continued = tuple[list[list[int]], list[Generation]]
"""Lengths of all responses after each call; the responses."""


def shared(
    checkpoint: str,
    groups: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    max_running: int,
    clock: str = "virtual",
    slow_rank: int | None = None,
) -> list[Share]:
    """Generate responses twice with engines that run max_running requests at once. slow_rank: waits
    in each step."""
    with built_engine(
        checkpoint, len(groups[0]), 128, groups=groups, max_num_seqs=max_running
    ) as engine:
        step = engine.step

        def slow_step() -> dict[int, Generation]:
            time.sleep(0.05)
            return step()

        if dist.get_rank() == slow_rank:
            engine.step = slow_step  # type: ignore[method-assign]
        return [_share(engine, prompts, CLOCKS[clock]()) for _ in range(2)]


def shared_and_in_parts(
    checkpoint: str,
    groups: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    max_running: int,
    part: int,
) -> tuple[list[Share], Continued]:
    """Generate responses as `shared` does, and then in several calls: each ends as soon as `part`
    more responses have ended, and the next one continues the others."""
    with built_engine(
        checkpoint, len(groups[0]), 128, groups=groups, max_num_seqs=max_running
    ) as engine:
        shares = [_share(engine, prompts, VirtualClock()) for _ in range(2)]
        return shares, _in_parts(engine, prompts, part)


def _share(engine: RolloutEngine, prompts: Sequence[Sequence[int]], clock: Clock) -> Share:
    requests = [
        Request(i, np.array(prompt, np.int32), 1000 + i, NOTHING)
        for i, prompt in enumerate(prompts)
    ]
    taken: list[int] = []
    with replaced(engine, "add", _recording(engine.add, taken)):
        responses = all_responses(engine, requests, Sampling(1.0, 64, (1, 2, 3)), clock)
    return responses.generations(), taken


def _recording(add: Callable[..., None], taken: list[int]) -> Callable[..., None]:
    def recording(requests: Sequence[Request], sampling: Sampling) -> None:
        taken.extend(request.number for request in requests)
        add(requests, sampling)

    return recording


def _in_parts(engine: RolloutEngine, prompts: Sequence[Sequence[int]], part: int) -> Continued:
    sampling = Sampling(1.0, 64, (1, 2, 3))
    drawn = [NOTHING] * len(prompts)
    lens: list[list[int]] = []
    while left := [
        i for i, one in enumerate(drawn) if not one.finished and len(one.token_ids) < 64
    ]:
        requests = [
            Request(number, np.array(prompts[i], np.int32), 1000 + i, drawn[i])
            for number, i in enumerate(left)
        ]
        wanted = min(part, len(left))
        responses = all_responses(
            engine,
            requests,
            sampling,
            VirtualClock(),
            enough=lambda ended, n=wanted: len(ended) >= n,
        )
        for i, one in zip(left, responses.generations(), strict=True):
            drawn[i] = one
        lens.append([len(one.token_ids) for one in drawn])
    return lens, drawn


def scored_meanwhile(
    checkpoint: str, prompts: Sequence[Sequence[int]], directory: str, names: Sequence[str]
) -> list[tuple[list[float], bool]]:
    """Generate responses and score them, by a copy of directory/NAME.py of this rank for each name.
    Return the scores, and whether the file scored, which the reward function makes beside itself,
    was there before the last step of the engine."""
    with built_engine(checkpoint, 1, 128, max_num_seqs=4) as engine:
        return [
            _scored_meanwhile(engine, checkpoint, prompts, Path(directory) / f"{name}.py")
            for name in names
        ]


def _scored_meanwhile(
    engine: RolloutEngine, checkpoint: str, prompts: Sequence[Sequence[int]], file: Path
) -> tuple[list[float], bool]:
    where = file.with_name(f"{file.stem}_rank{dist.get_rank()}")
    where.mkdir()
    shutil.copy(file, where)
    rows = [Prompt(i, np.array(prompt, np.int32), "mine", None) for i, prompt in enumerate(prompts)]
    requests = [Request(i, row.token_ids, 1000 + i, NOTHING) for i, row in enumerate(rows)]
    rewards = RewardManager(CustomRewardFunctionConfig(path=str(where / file.name)), RewardConfig())
    was_there = []
    step = engine.step

    def slow_step() -> dict[int, Generation]:
        was_there.append((where / "scored").exists())
        time.sleep(0.02)
        return step()

    try:
        stream = ScoreStream(rewards, load_tokenizer(checkpoint), rows)
        with replaced(engine, "step", slow_step):
            generate_responses(
                engine,
                requests,
                Sampling(1.0, 64, (1, 2, 3)),
                VirtualClock(),
                on_ended=lambda ended: stream.submit(
                    {i: r.token_ids for i, r in ended.items()}, others_follow=True
                ),
            )
        stream.submit({})
        return [score.score for score in stream.collect()], was_there[-1]
    finally:
        rewards.close()


def conversations(
    checkpoint: str,
    layouts: Sequence[Sequence[Sequence[int]]],
    prompts: Sequence[Sequence[int]],
    path: str,
) -> list[tuple[list[Generation], dict[int, Episode], int]]:
    """Let the engines of each layout, with few places, have a conversation for each prompt with the
    environment of this file. Return the responses, their episodes, and the tokens that this rank's
    engine has computed."""
    limit = 60
    results = []
    rows = [Prompt(i, np.array(prompt, np.int32), "mine", i) for i, prompt in enumerate(prompts)]
    requests = [Request(row.index, row.token_ids, 1000 + row.index, NOTHING) for row in rows]
    schedule = DecodeScheduler.schedule
    num_computed = 0

    def counted(scheduler: DecodeScheduler, *args: Any) -> Any:
        nonlocal num_computed
        output = schedule(scheduler, *args)
        num_computed += output.total_num_scheduled_tokens
        return output

    data = DataConfig(train_files=[], max_response_length=limit)
    cfg = EnvironmentConfig(path, max_tokens_per_turn=6)
    journal = ObservationJournal(None, None, dist.get_rank(), 0, 0, 0)
    environments = EnvironmentManager(cfg, data, load_tokenizer(checkpoint), (1, 2, 3), journal)
    try:
        for groups in layouts:
            environments.connect(groups)
            num_computed = 0
            with (
                replaced(DecodeScheduler, "schedule", counted),
                built_engine(
                    checkpoint, len(groups[0]), 256, groups=groups, max_num_seqs=4
                ) as engine,
            ):
                turns = Conversations(environments, requests, rows)
                sampling = Sampling(TEMPERATURE, limit, (1, 2, 3))
                responses = all_responses(
                    engine, turns.requests, sampling, VirtualClock(), turns=turns
                )
            episodes = {number: state.episode for number, state in turns.states().items()}
            results.append((responses.generations(), episodes, num_computed))
    finally:
        environments.close()
    return results


def preempted(
    checkpoint: str, groups: Sequence[Sequence[int]], kv_cache_bytes: int
) -> tuple[list[list[int]], int]:
    """Generate long responses on engines with a KV cache of this size. Return them, and how many
    requests vLLM has preempted on this rank."""
    requests = [Request(i, np.arange(4, 14, dtype=np.int32), 1000 + i, NOTHING) for i in range(12)]
    count = 0
    preempt = Scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        preempt(*args, **kwargs)

    with (
        replaced(CPUWorker, "determine_available_memory", lambda worker: kv_cache_bytes),
        replaced(Scheduler, "_preempt_request", counted),
        built_engine(checkpoint, len(groups[0]), 400, groups=groups, max_num_seqs=12) as engine,
    ):
        responses = all_responses(engine, requests, Sampling(1.0, 380, ()), VirtualClock())
        return responses.token_ids(), count
