"""A PPO step of rlhf_mc and of verl 0.9.1 (FSDP and vLLM, under Ray), both on a CPU: the same
model, prompts, lengths, epoch, optimizer steps, engine and cores, one after the other, several
times.

    python3.11 -m venv VERL  # of its own, with this project's torch and vLLM:
    echo "$PWD/.venv/lib/python3.11/site-packages" > VERL/lib/python3.11/site-packages/project.pth
    VERL/bin/pip install --no-deps verl==0.9.1 ray==2.60.0 tensordict==0.10.0 \\
        TransferQueue==0.1.11 pyvers==0.2.3 hydra-core==1.3.8 omegaconf==2.3.1 \\
        antlr4-python3-runtime==4.9.3 codetiming pylatexenc torchdata peft accelerate datasets \\
        multiprocess pandas pytz msgpack aiohttp-cors colorful opencensus opencensus-context py-spy
    OMP_NUM_THREADS=1 python benchmarks/vs_verl.py --verl-python VERL/bin/python

verl has no platform "cpu": verl_cpu.py is one, with the patches that verl and vLLM need for it.
Both train actor and critic in float32 with one PPO epoch and an optimizer step for each 64
sequences, compute log-probs of the actor and of a frozen reference, and have a reward function that
costs next to nothing. Each process that trains has a vLLM engine beside it. All responses have 64
tokens. "verl v1" is verl's trainer, "verl v0" the one before it, which 0.9.1 still has
(trainer.use_v1=false). peers.py says what a step is.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from argparse import Namespace
from pathlib import Path

import peers
from peers import Cell, Steps

FLOAT32 = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"


def main() -> None:
    # No "long-tailed": verl draws no token that the tokenizer lacks, so that the end token's
    # probability is another.
    parser = peers.parser(__doc__, lengths=["equal"])
    parser.add_argument(
        "--verl-python", type=Path, required=True, help="Python of the environment with verl"
    )
    parser.add_argument(
        "--override", nargs="*", default=[], help="more settings of verl, key=value"
    )
    args = parser.parse_args()
    programs = {
        "rlhf_mc": peers.own(),
        "verl v1": functools.partial(verl_steps, args, True),
        "verl v0": functools.partial(verl_steps, args, False),
    }
    peers.compare(args, programs)


def verl_steps(args: Namespace, use_v1: bool, cell: Cell, output: Path) -> Steps:
    """Run verl. Return the seconds of each counted step, by phase."""
    if peers.run(command(args, use_v1, cell, output), cell.seconds, **environment(output)) is None:
        return []
    logs = [
        json.loads(line)["data"] for line in (output / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(logs) == cell.num_steps, len(logs)
    return [
        {"whole": log["time"] - previous["time"], **peers.phases(log)}
        for previous, log in itertools.pairwise(logs)
    ][peers.WARM_UP - 1 :]


def command(args: Namespace, use_v1: bool, cell: Cell, output: Path) -> list[str]:
    """Return the command of a run of verl."""
    settings = {
        **settings_of_models(cell),
        **settings_of_rollout(cell),
        **settings_of_run(cell, output),
        "trainer.use_v1": use_v1,
    }
    assignments = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in settings.items()
    ]
    return [str(args.verl_python), "-m", "verl.trainer.main_ppo", *assignments, *args.override]


def environment(output: Path) -> dict[str, str]:
    """Return the environment variables of verl, Ray and vLLM. Ray hands them to each process that
    it starts."""
    return {
        "PYTHONPATH": str(Path(__file__).parent),
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # FSDP is registered for "cuda" and "npu"
        "VERL_FILE_LOGGER_PATH": str(output / "metrics.jsonl"),
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(output / "datasets"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # Ray would set another
    }


def settings_of_models(cell: Cell) -> dict[str, object]:
    """Return the settings of actor, reference and critic."""
    actor = "actor_rollout_ref.actor"
    critic = "critic"
    settings: dict[str, object] = {
        f"{actor}.ppo_mini_batch_size": 64,
        f"{actor}.use_dynamic_bsz": True,  # the critic's micro-batches are so in any case
        f"+{critic}.ppo_infer_max_token_len_per_gpu": cell.token_budget,
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": 0.001,
    }
    for role in (actor, critic):
        settings[f"{role}.strategy"] = "fsdp2"
        settings[f"{role}.ppo_max_token_len_per_gpu"] = cell.token_budget
        settings[f"{role}.optim.lr"] = 1e-6
    for engine in (f"{actor}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", f"{critic}.fsdp"):
        settings[f"+{engine}.mixed_precision"] = FLOAT32  # FSDP computes in bfloat16 by default
        settings[f"{engine}.use_torch_compile"] = False
    for model in ("actor_rollout_ref.model", f"{critic}.model"):
        settings[f"{model}.path"] = cell.directory / "model"
        settings[f"+{model}.override_config.attn_implementation"] = "sdpa"
        settings[f"{model}.use_remove_padding"] = False  # packed sequences need FlashAttention
        settings[f"{model}.enable_gradient_checkpointing"] = False
    return settings


def settings_of_rollout(cell: Cell) -> dict[str, object]:
    """Return the settings of data, vLLM and reward."""
    longest_prompt = max(map(len, cell.prompt_ids))
    rollout = "actor_rollout_ref.rollout"
    return {
        "data.train_files": cell.directory / "train.parquet",
        "data.val_files": cell.directory / "train.parquet",
        "data.train_batch_size": cell.num_prompts,
        "data.max_prompt_length": longest_prompt,
        "data.max_response_length": cell.longest,
        "data.dataloader_num_workers": 0,
        f"{rollout}.name": "vllm",
        f"{rollout}.dtype": "float32",
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.enforce_eager": True,
        f"{rollout}.free_cache_engine": False,  # vLLM's sleep needs a GPU
        f"+{rollout}.enable_sleep_mode": False,
        f"{rollout}.max_model_len": longest_prompt + cell.longest,
        f"{rollout}.max_num_seqs": 256,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 256,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": cell.directory / "reward.py",
    }


def settings_of_run(cell: Cell, output: Path) -> dict[str, object]:
    """Return the settings of the loop, of Ray and of hydra."""
    return {
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": cell.processes,
        "trainer.total_training_steps": cell.num_steps,
        "trainer.val_before_train": False,
        "trainer.logger": "[file]",
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": output / "checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.num_cpus": 32,  # what verl's actors ask for; they wait for one another
        "+ray_kwargs.ray_init.num_gpus": cell.processes,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "hydra.run.dir": output,
        "hydra.output_subdir": "null",
    }


if __name__ == "__main__":
    main()
