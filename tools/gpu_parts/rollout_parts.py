"""Parts that need vLLM: the quickstart as a user runs it, sleep, aliased weights under CUDA graphs,
speed of a step."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from gpu_parts import measure
from gpu_parts.engines import score_tokens, shared_directory
from gpu_parts.report import Report
from gpu_parts.sizes import Sizes
from gpu_parts.tiny import REWARD, make_checkpoint, make_prompts
from rlhf_mc import platform
from rlhf_mc.architectures.operations import forward_flops
from rlhf_mc.config.load import load_config
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.heads import log_prob_head
from rlhf_mc.run_files import SUCCESS_FILE
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.setup.build import build_run
from rlhf_mc.topology.consensus import gather_objects, on_rank_0
from rlhf_mc.trainer import log_probs, loop, step_state
from rlhf_mc.trainer.logprob_check import DEFAULT_BOUND
from rlhf_mc.trainer.pool import generate, sampling
from rlhf_mc.trainer.run import Run
from rlhf_mc.trainer.step_state import StepState

ROOT = Path(__file__).resolve().parents[2]
PASSES = {"gen": 1, "old_log_prob": 1, "values": 1, "update_critic": 3, "update_actor": 3}
"""Phase -> FLOPs over those of a forward pass."""
ACCURACY = 0.9
"""Validation accuracy that the quickstart must reach."""
GPU_MEMORY_UTILIZATION = 0.3
"""Share of the device memory for vLLM: with a small model most of it is KV cache."""


def quickstart(report: Report, sizes: Sizes) -> None:
    """Run the quickstart by its own commands, on all devices of this machine that torchrun was
    given."""
    directory = tempfile.mkdtemp()
    made = [
        f"model.path={directory}/model_hf",
        f"model.dist_checkpointing_path={directory}/model_mcore",
    ]
    made += [f"data.{name}_files={directory}/{name}.parquet" for name in ("train", "val")]
    settings = [
        f"trainer.default_local_dir={directory}/run",
        f"rollout.gpu_memory_utilization={GPU_MEMORY_UTILIZATION}",
    ]
    if sizes.quickstart_steps is not None:
        settings.append(f"trainer.total_training_steps={sizes.quickstart_steps}")
    world = os.environ["WORLD_SIZE"]
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        world,
        "-m",
        "rlhf_mc",
    ]
    for command in (
        ["tools/make_quickstart.py", "--output", directory],
        [
            "tools/convert_hf_to_mcore.py",
            "--hf-path",
            f"{directory}/model_hf",
            "--output",
            f"{directory}/model_mcore",
        ],
        [*launch, "configs/quickstart.yaml", *made, *settings],
    ):
        _run(command)
    if not (Path(directory) / "run" / SUCCESS_FILE).is_file():
        raise RuntimeError("the run has not written success.json")
    lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    accuracy = next(
        step[key] for step in reversed(steps) for key in step if key.startswith("val-core/")
    )
    trained = [step for step in steps if "timing_s/step" in step]
    difference = max(step["training/rollout_logprobs_diff_mean"] for step in trained)
    step_seconds = sorted(step["timing_s/step"] for step in trained)[len(trained) // 2]
    report.record(
        steps=len(trained),
        accuracy=accuracy,
        step_s=step_seconds,
        logprob_difference_mean=difference,
    )
    if sizes.quickstart_steps is None:
        report.check(
            accuracy >= ACCURACY, f"validation accuracy {accuracy:.3f} after {len(trained)} steps"
        )
    report.summarize(
        f"{len(trained)} steps of {step_seconds:.2f} s, accuracy {accuracy:.3f}, log-probs of vLLM "
        f"and the trainer differ by {difference:.1e}"
    )


def _run(command: list[str]) -> None:
    """Run a Python command of the repository as a shell would. Raise RuntimeError with the end of
    its output."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in ours}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True
    )
    print(done.stdout[-2000:], done.stderr[-2000:])
    if done.returncode != 0:
        last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-1:]
        raise RuntimeError(
            f"{' '.join(command[:2])} ended with exit code {done.returncode}: {' '.join(last)}"
        )


def sleep(report: Report, sizes: Sizes) -> None:
    """Generate, let vLLM sleep while the trainer scores, and generate again: memory must be
    released, and the same weights and seeds must give the same tokens. On a CPU nothing sleeps."""
    _sleep(report, sizes, {"offload_cuda_graphs": False})


def sleep_graphs(report: Report, sizes: Sizes) -> None:
    """Do as `sleep`, while the memory of CUDA graphs is on the host too."""
    _sleep(report, sizes, {"offload_cuda_graphs": True})


def sglang_sleep(report: Report, sizes: Sizes) -> None:
    """Do as `sleep` with SGLang's engine."""
    _sleep(report, sizes, {"name": "sglang"})


def _sleep(report: Report, sizes: Sizes, rollout: dict[str, Any]) -> None:
    settings = _tensor_parallel(dist.get_world_size())
    settings["rollout"] |= {"free_cache_engine": True, **rollout}
    with built_run(sizes.runs["tiny"], settings) as run:
        first_state = step_state.begin_step(1, RankStatus())
        generate.update_weights(run, first_state.timer)
        first = sampling.sample_groups(run, first_state, 0)[1]
        platform.synchronize()
        awake = _used_memory()
        log_probs.log_probs(run, first_state, first)
        asleep = _used_memory()
        second_state = step_state.begin_step(1, RankStatus())
        generate.update_weights(run, second_state.timer)
        second = sampling.sample_groups(run, second_state, 0)[1]
    if platform.use_cuda():
        total = torch.cuda.get_device_properties(platform.device()).total_memory
        least = GPU_MEMORY_UTILIZATION / 3 * total
        released = f"{(awake - asleep) / 1e9:.2f} GB are released"
        report.check(asleep < awake, released)
        report.expect(
            awake - asleep >= least,
            f"{released}, at least {least / 1e9:.2f} GB of KV cache are expected",
        )
    report.check(torch.equal(first.tokens, second.tokens), "other tokens after the sleep")
    same_bits = torch.equal(first.rollout_log_probs, second.rollout_log_probs)
    report.record(
        released_gb=(awake - asleep) / 1e9,
        asleep_gb=asleep / 1e9,
        log_probs_have_the_same_bits=same_bits,
    )
    report.summarize(f"{(awake - asleep) / 1e9:.2f} GB released, the same tokens afterwards")


def _used_memory() -> int:
    """Return the bytes of device memory that all processes use together, 0 on a CPU. Every rank
    must call it: ranks may share the GPU."""
    if not platform.use_cuda():
        return 0
    torch.cuda.empty_cache()
    gather_objects(None)
    free, total = torch.cuda.mem_get_info()
    gather_objects(None)
    return total - free


def _tensor_parallel(world: int) -> dict[str, dict[str, Any]]:
    """Return settings with which actor and engine have TP 2, where the number of ranks is even."""
    if world % 2:
        return {"actor": {}, "rollout": {}}
    megatron = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    return {"actor": {"megatron": megatron}, "rollout": {"tensor_model_parallel_size": 2}}


def aliased_weights(report: Report, sizes: Sizes) -> None:
    """Take PPO steps with weights that vLLM and the trainer share, in bfloat16 and, on a GPU, under
    CUDA graphs. After an update that moves the log-probs, vLLM's must follow the trainer's."""
    _aliased_weights(report, sizes, "vllm")


def sglang(report: Report, sizes: Sizes) -> None:
    """Do as `aliased_weights` with SGLang's engine."""
    _aliased_weights(report, sizes, "sglang")


def _aliased_weights(report: Report, sizes: Sizes, engine: str) -> None:
    settings = {**_tensor_parallel(dist.get_world_size()), "reshard": {"verify": "always"}}
    settings["rollout"]["name"] = engine
    with built_run(sizes.runs["tiny"], settings) as run:
        bound = DEFAULT_BOUND["bfloat16"]
        spans = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in run.actor.params.values()]
        pointers = [param.data_ptr() for param in run.rollout.params.values()]
        aliased = sum(any(a <= at < b for a, b in spans) for at in pointers)
        differences = []
        batch = None
        for step in (1, 2, 3):
            state, batch = take_step(run, step)
            differences.append(state.metrics["training/rollout_logprobs_diff_mean"])
            report.check(
                differences[-1] < bound, f"step {step}: log-probs differ by {differences[-1]:.3f}"
            )
        assert batch is not None and batch.old_log_probs is not None
        head = log_prob_head(run.actor.shape.vocab_size, run.config.rollout.temperature)
        moved = float(
            (score_tokens(run.actor, batch, head, 4096) - batch.old_log_probs).abs().mean()
        )
        shared = run.weight_sync.metrics["reshard/shared_bytes"]
    report.check(
        aliased > 0 and shared > 0, f"no parameter of {engine} aliases one of the trainer's"
    )
    report.expect(
        moved > 3 * differences[-1], f"one update moves the log-probs by {moved:.1e} alone"
    )
    report.record(aliased_parameters=aliased, parameters=len(pointers), shared_mb=shared / 1e6)
    report.record(logprob_difference_mean=max(differences), logprob_moved_by_one_update=moved)
    report.summarize(
        f"{aliased} of {len(pointers)} parameters aliased; log-probs of {engine} and the trainer "
        f"differ by {max(differences):.1e} in bf16, an update moves them by {moved:.1e}"
    )


def experts(report: Report, sizes: Sizes) -> None:
    """Take GRPO steps of models with experts, which replay the experts that vLLM has chosen. vLLM's
    log-probs must follow the trainer's after an update, the weights that vLLM derives from others
    included."""
    texts = []
    for family, keys in sizes.experts.items():
        size = {"family": family, "model": keys, "prompts": 16, "response": 64}
        settings = {"algorithm": {"adv_estimator": "grpo"}, "reshard": {"verify": "always"}}
        with report.case(family), built_run(size, settings) as run:
            take_step(run, 1)
            # a step raises UserError where the log-probs differ by too much
            metrics = take_step(run, 2)[0].metrics
            difference = metrics["training/rollout_logprobs_diff_mean"]
            choices = metrics["training/expert_choices_diff"]
            report.record(
                **{
                    f"{family}_logprob_difference_mean": difference,
                    f"{family}_choices_diff": choices,
                }
            )
            texts.append(f"{family} {difference:.1e} ({choices:.1%} of choices)")
    report.summarize(f"log-probs of vLLM and the trainer differ by {', '.join(texts)}")


def step_speed(report: Report, sizes: Sizes) -> None:
    """Measure a PPO step of a 0.5B model: tokens per second and share of the peak FLOP/s of each
    phase, and the weight update against one copy on the device."""
    with built_run(sizes.runs["half_billion"], {"reshard": {"share_weights": False}}) as run:
        for step in (1, 2):  # the first includes compilation and first allocations
            state, batch = take_step(run, step)
            difference = state.metrics["training/rollout_logprobs_diff_mean"]
            report.check(
                difference < DEFAULT_BOUND["bfloat16"],
                f"step {step}: log-probs differ by {difference:.3f}",
            )
        times = state.timer.result()
        assert run.critic is not None
        critic = run.critic.shape
        shapes = dict.fromkeys(PASSES, run.actor.shape) | {
            "values": critic,
            "update_critic": critic,
        }
        world = run.groups.mesh.world
    lens = batch.seq_lens.tolist()
    responses = int(batch.response_lens.sum())
    peak = measure.matmul_rate(sizes.matmul)
    sheet = measure.data_sheet_flops()
    texts = []
    for phase, shape in shapes.items():
        seconds = times[f"timing_s/{phase}"]
        tokens = (
            int(batch.response_lens.sum() if phase == "gen" else batch.seq_lens.sum())
            / seconds
            / world
        )
        share = (
            PASSES[phase]
            * forward_flops(shape, lens, responses).total
            / seconds
            / world
            / (sheet or peak)
        )
        report.record(**{f"{phase}_tokens_per_s": tokens, f"{phase}_share_of_peak": share})
        texts.append(f"{phase} {tokens:.0f} ({share:.1%})")
    copied = (
        run.weight_sync.metrics["reshard/copied_bytes"]
        + run.weight_sync.metrics["reshard/received_bytes"]
    )
    copy = measure.device_copy_rate(int(min(max(copied, 1), sizes.copy_bytes)))
    rate = copied / times["timing_s/update_weights"]
    report.record(
        update_gb=copied / 1e9, update_gb_per_s=rate / 1e9, update_share_of_copy=rate / copy
    )
    report.record(step_s=times["timing_s/step"], peak_memory_gib=platform.peak_memory_gb())
    report.record(logprob_difference_mean=difference)
    of = "the data sheet's" if sheet else "a matrix product's"
    update = f"update {rate / 1e9:.0f} GB/s ({rate / copy:.2f} of a copy)"
    report.summarize(f"tokens/s and share of {of} FLOP/s: {', '.join(texts)}; {update}")


def take_step(run: Run, step: int) -> tuple[StepState, RaggedBatch]:
    """Take a PPO step. Return its state and its batch."""
    state = step_state.begin_step(step, RankStatus(), (step - 1) * run.config.data.train_batch_size)
    return state, loop.one_step(run, state, StopRequests(run.config.trainer))


def _make_inputs(directory: Path, size: dict[str, Any]) -> None:
    make_checkpoint(directory / "model", size.get("family", "qwen2"), **size["model"])
    make_prompts(directory / "train.parquet", 4 * size["prompts"], seed=1)
    (directory / "reward.py").write_text(REWARD)


@contextlib.contextmanager
def built_run(size: dict[str, Any], sections: dict[str, dict[str, Any]]) -> Iterator[Run]:
    """Build a whole run in bfloat16 over random weights, with these settings beside its own, and
    close it."""
    with shared_directory() as directory:
        on_rank_0(lambda: _make_inputs(directory, size))
        tree: dict[str, Any] = {
            "data": {
                "train_files": str(directory / "train.parquet"),
                "train_batch_size": size["prompts"],
                "max_prompt_length": 24,
                "max_response_length": size["response"],
            },
            "model": {"path": str(directory / "model")},
            "actor": {"ppo_mini_batch_size": size["prompts"] // 2, "optim": {"lr": 1e-3}},
            "critic": {"optim": {"lr": 1e-3}},
            "rollout": {"n": 2, "gpu_memory_utilization": GPU_MEMORY_UTILIZATION},
            "custom_reward_function": {"path": str(directory / "reward.py")},
            "trainer": {
                "default_local_dir": str(directory / "run"),
                "total_training_steps": 4,
                "logger": [],
            },
        }
        for section, values in sections.items():
            tree.setdefault(section, {}).update(values)
        path = directory / "config.yaml"
        on_rank_0(lambda: path.write_text(yaml.safe_dump(tree)))
        run = build_run(load_config(str(path), []))
        try:
            yield run
        finally:
            run.rollout.close()
            run.rewards.close()
