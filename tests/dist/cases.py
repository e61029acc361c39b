"""Functions that the ranks run in the tests of this folder. Each is called on every rank with the
same arguments."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from tiny import config_tree

from rlhf_mc.checkpoint import hf_format
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config
from rlhf_mc.config.reward_schema import CustomRewardFunctionConfig, RewardConfig
from rlhf_mc.data.batch import Prompt
from rlhf_mc.data.tokenizer import load_tokenizer
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.patching import replaced
from rlhf_mc.reshard import weight_sync
from rlhf_mc.rewards.manager import RewardManager, ScoreStream
from rlhf_mc.rewards.results import Score
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.setup.build import build_run
from rlhf_mc.topology.consensus import gather_objects, gather_results
from rlhf_mc.trainer import lifecycle, loop, start_table, step_state
from rlhf_mc.trainer.pool import generate
from rlhf_mc.trainer.run import Run


@contextlib.contextmanager
def built_run(config_path: str, overrides: list[str]) -> Iterator[Run]:
    """Build a whole run (models, vLLM, data) and close it afterwards, so that the next layout can
    follow.

    An engine that is left to the garbage collector would destroy the world."""
    torch.manual_seed(0)
    run = build_run(load_config(config_path, overrides))
    try:
        yield run
    finally:
        run.rollout.close()
        run.rewards.close()


def layout_overrides(tp: int, pp: int, rollout_tp: int) -> list[str]:
    return [
        f"actor.megatron.tensor_model_parallel_size={tp}",
        f"actor.megatron.pipeline_model_parallel_size={pp}",
        f"rollout.tensor_model_parallel_size={rollout_tp}",
    ]


def two_steps(
    config_path: str, tp: int, pp: int, rollout_tp: int, overrides: list[str], export_to: str
) -> dict[str, Any]:
    """Run two PPO steps of the loop. Return
    - "headlines": the loop's lines at its start,
    - "steps": each step's metrics,
    - "received": the bytes that this rank receives in a weight update,
    - "reference": the parameters of the reference that this rank holds,
    - "digests": a digest of each step's tokens,
    - "shared": vLLM's parameters that alias Megatron-Core's (see aliased_params),
    - "different": vLLM's parameters that differ from the exported checkpoint after the second step,
    - "segments": shared-memory segments that vLLM has created.
    """
    steps: list[dict[str, float]] = []
    digests: list[str] = []
    with built_run(config_path, [*layout_overrides(tp, pp, rollout_tp), *overrides]) as run:
        headlines = start_table.start_lines(run)
        for step in (1, 2):
            state = step_state.begin_step(
                step, RankStatus(), (step - 1) * run.config.data.train_batch_size
            )
            batch = loop.one_step(run, state, StopRequests(run.config.trainer))
            digests.append(hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest())
            steps.append(dict(state.metrics))
        generate.update_weights(run, PhaseTimer())
        lifecycle.export(run, state, Path(export_to))
        received = run.weight_sync.metrics["reshard/received_bytes"]
        dist.barrier()
        shared = aliased_params(run)
        segments = [
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "/dev/shm/psm_" in line
        ]
        different = params_unlike_export(run, Path(export_to), config_path, rollout_tp)
    return {
        "steps": steps,
        "received": received,
        "reference": 0 if run.reference is None else run.reference.rank_share().num_parameters,
        "digests": digests,
        "shared": shared,
        "different": different,
        "headlines": headlines,
        "segments": segments,
    }


def aliased_params(run: Run) -> list[str]:
    """Return the names, without layer numbers, of vLLM's parameters whose memory is the actor's."""
    storages = {param.untyped_storage().data_ptr() for param in run.actor.params.values()}
    found = set()
    for name, param in run.rollout.params.items():
        if param.untyped_storage().data_ptr() in storages:
            found.add(re.sub(r"layers\.\d+\.", "layers.*.", name))
    return sorted(found)


def corrupt_weight_updates(
    config_path: str,
    tp: int,
    rollout_tp: int,
    rank: int,
    elements: list[tuple[str, int]],
    overrides: list[str],
) -> list[str]:
    """Update the weights once for each element (vLLM's parameter, place in it), which `rank`
    changes between the update and its verification. Return the error messages."""
    messages = []
    with built_run(config_path, [*layout_overrides(tp, 1, rollout_tp), *overrides]) as run:
        original = weight_sync.verify
        for element in elements:

            def corrupt_then_verify(
                plan: Any, source: Any, target: Any, *rest: Any, element: Any = element
            ) -> None:
                name, place = element
                if dist.get_rank() == rank:
                    target[name].view(-1)[place] += 1.0
                original(plan, source, target, *rest)

            # An update that fails is not the first one: the next is verified too.
            with replaced(weight_sync, "verify", corrupt_then_verify):
                try:
                    generate.update_weights(run, PhaseTimer())
                except UserError as error:
                    messages.append(str(error))
    return messages


def run_two_steps(
    workers: Any,
    config: Path,
    layout: tuple[int, int, int],
    export_to: Path,
    overrides: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run two_steps on all workers in the layout (tp, pp, rollout TP). Return each rank's
    result."""
    tp, pp, rollout_tp = layout
    results: list[dict[str, Any]] = workers.run(
        two_steps,
        config_path=str(config),
        tp=tp,
        pp=pp,
        rollout_tp=rollout_tp,
        overrides=list(overrides),
        export_to=str(export_to),
    )
    return results


def params_unlike_export(
    run: Run, checkpoint: Path, config_path: str, rollout_tp: int
) -> list[str]:
    """Return the names of vLLM's parameters that differ in any bit from those that vLLM loads from
    the checkpoint; none on a rank without an engine."""
    if not run.rollout.params:
        return []
    updated = {name: param.clone() for name, param in run.rollout.params.items()}
    tensors = [
        (name, tensor)
        for name, tensor in exported_weights(str(checkpoint)).items()
        if not name.startswith("model.visual.")  # vLLM has the language model alone
    ]
    for param in run.rollout.params.values():
        param.fill_(torch.nan)
    run.rollout._model.load_weights(iter(tensors))
    loaded = run.rollout.params
    # vLLM's loader zeroes the padding of its vocabulary, whose rows are never read.
    vocab = run.actor.shape.vocab_size
    different = []
    for name, param in loaded.items():
        mine = updated[name]
        if name in ("model.embed_tokens.weight", "model.embedding.weight", "lm_head.weight"):
            tp_rank = next(g.index(dist.get_rank()) for g in [run.rollout._group])
            real = max(0, min(len(param), vocab - tp_rank * len(param)))
            param = param[:real]
            mine = mine[:real]
        if param.isnan().any() or not torch.equal(param, mine):
            different.append(name)
    return different


def exported_weights(directory: str) -> dict[str, torch.Tensor]:
    weights = {}
    for path in Path(directory).glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return weights


def try_to_build(directory: str, sections: dict[str, Any]) -> None:
    """Build a run from tiny.config_tree; for tests of settings and files that are rejected."""
    path = Path(directory) / f"config_{dist.get_rank()}.json"
    path.write_text(json.dumps(config_tree(Path(directory), **sections)))
    with built_run(str(path), []):
        pass


def build_where_a_read_fails(directory: str, failing_rank: int) -> None:
    """Build a run on TP 2 where one rank cannot read a tensor of the model, though it has opened
    its file."""
    original = hf_format.execute

    def execute(*args: Any, **kwargs: Any) -> None:
        if dist.get_rank() == failing_rank:
            raise SafetensorError("I/O error\nat some offset")
        original(*args, **kwargs)

    hf_format.execute = execute
    try:
        try_to_build(directory, {"actor": {"megatron": {"tensor_model_parallel_size": 2}}})
    finally:
        hf_format.execute = original


def build_where_vllm_is_absent(directory: str, failing_rank: int) -> None:
    """Build a run where one rank has no vLLM."""
    hidden = ["vllm", "rlhf_mc.rollout.vllm_engine", "rlhf_mc.rollout.vllm_patches"]
    saved = {name: sys.modules[name] for name in hidden}
    package = sys.modules["rlhf_mc.rollout"]
    patches = package.vllm_patches
    if dist.get_rank() == failing_rank:
        for name in hidden[1:]:
            del sys.modules[name]
        sys.modules["vllm"] = None  # type: ignore[assignment]
        del package.vllm_patches  # `from package import module` finds the attribute first
    try:
        try_to_build(directory, {})
    finally:
        sys.modules.update(saved)
        package.vllm_patches = patches  # type: ignore[attr-defined]


def step_with_nan_reference(config_path: str) -> None:
    """Run a step in which the reference's final norm is NaN, set after loading."""
    with built_run(config_path, []) as run:
        assert run.reference is not None
        run.reference.params["decoder.final_layernorm.weight"].fill_(torch.nan)
        loop.one_step(run, step_state.begin_step(1, RankStatus()), StopRequests(run.config.trainer))


def score_fixed_responses(directory: str, num_prompts: int, **reward: Any) -> list[Score]:
    """Score one response for each of num_prompts prompts by the directory's reward.py. reward: its
    settings."""
    tokenizer = load_tokenizer(str(Path(directory) / "model"))
    prompts = [
        Prompt(i, np.array([5], np.int32), "arithmetic", "2", {"index": i})
        for i in range(num_prompts)
    ]
    rewards = RewardManager(
        CustomRewardFunctionConfig(path=str(Path(directory) / "reward.py")), RewardConfig(**reward)
    )
    try:
        stream = ScoreStream(rewards, tokenizer, prompts)
        submit_share(stream, [[6, 7]] * num_prompts)
        return stream.collect()
    finally:
        rewards.close()


def submit_share(stream: ScoreStream, responses: Sequence[Sequence[int]]) -> None:
    """Submit this rank's share, round-robin, of all responses, which all ranks have."""
    stream.submit(
        {i: responses[i] for i in range(dist.get_rank(), len(responses), dist.get_world_size())}
    )


def gather_strings(sizes: Sequence[int], members: Sequence[int] | None = None) -> list[str] | None:
    """Gather from each rank a string of this many letters, its number in the alphabet; None outside
    of `members`, the ranks of the group. Every rank must call it with the same arguments."""
    group = None if members is None else dist.new_group(list(members), backend="gloo")
    rank = dist.get_rank()
    if members is not None and rank not in members:
        return None
    found = gather_objects(chr(ord("a") + rank) * sizes[rank], group)
    if group is not None:
        dist.destroy_process_group(group)
    return found


def fail_on(rank: int) -> None:
    """Raise a UserError with a long message on one rank, and on all of them by `gather_results`."""

    def fail_there() -> None:
        if dist.get_rank() == rank:
            raise UserError("x" * 100_000)

    gather_results(fail_there)
