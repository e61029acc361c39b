"""A PPO step of rlhf_mc and of TRL (experimental PPOTrainer, generation by transformers): the same
model, prompts, distribution of lengths, epoch, optimizer steps and cores, one after the other,
several times.

    python3.11 -m venv TRL  # an environment of its own, with this project's torch:
    echo "$PWD/.venv/lib/python3.11/site-packages" > TRL/lib/python3.11/site-packages/project.pth
    TRL/bin/pip install accelerate datasets
    TRL/bin/pip install --no-deps trl==1.12.0           # 1.16 has no PPO
    OMP_NUM_THREADS=1 python benchmarks/vs_trl.py --trl-python TRL/bin/python  # a table of 8 cells

Both train actor and critic with one PPO epoch and an optimizer step for each 64 sequences, compute
log-probs of a frozen reference, and have a reward that costs next to nothing. Response lengths:
"equal" has 64 tokens and no end token; "long-tailed" has an end token with probability 1/64 at each
token, and at most 512 tokens. TRL takes the old log-probs from the generation. rlhf_mc computes
them by default; "generation's log-probs" is rlhf_mc with algorithm.rollout_correction.bypass_mode,
which takes them from the generation too. peers.py says what a step is.

    make real-model    # or tools/make_smollm2.py alone, which writes runs/smollm2
    OMP_NUM_THREADS=1 python benchmarks/vs_trl.py --trl-python TRL/bin/python \\
        --task runs/smollm2 --processes 2

compares GRPO on a real model instead: the settings of configs/smollm2_grpo.yaml in both, and the
same reward function. Beside them the bound: the passes of the same number of tokens in plain
transformers, packed, without generation, optimizer and exchange of gradients. Then the greedy
accuracy of both trained models, by plain transformers.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import peers
from peers import Cell, Steps

from rlhf_mc.config.load import load_config

GRPO = str(peers.ROOT / "configs" / "smollm2_grpo.yaml")


def main() -> None:
    parser = peers.parser(__doc__)
    parser.add_argument(
        "--trl-python", type=Path, required=True, help="Python of the environment with TRL"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=32, help="TRL's sequences of a micro-batch"
    )
    parser.add_argument(
        "--rollout-batch", type=int, default=0, help="TRL's sequences of a generation; 0: all"
    )
    parser.add_argument("--task", type=Path, help="directory of tools/make_smollm2.py")
    parser.add_argument("--seed", type=int, default=1, help="of GRPO on --task")
    args = parser.parse_args()
    if args.task is not None:
        for processes in args.processes:
            compare_on_task(args, args.task.resolve(), processes)
        return
    programs = {
        "rlhf_mc": peers.own(),
        "rlhf_mc, generation's log-probs": peers.own(
            "algorithm.rollout_correction.bypass_mode=true"
        ),
        "TRL": functools.partial(trl_steps, args),
    }
    peers.compare(args, programs)


def trl_steps(args: Namespace, cell: Cell, output: Path) -> Steps:
    """Run TRL. Return the seconds of each counted step, and of its generation."""
    settings = {
        "model": str(cell.directory / "model"),
        "prompts": cell.prompt_ids,
        "num_prompts": cell.num_prompts,
        "mini_batch": 64,
        "micro_batch": args.micro_batch,
        "rollout_batch": args.rollout_batch,
        "longest": cell.longest,
        "has_end": cell.has_end,
        "steps": cell.num_steps,
        "output": str(output / "trl"),
    }
    (output / "trl.json").write_text(json.dumps(settings))
    program = str(Path(__file__).with_name("trl_ppo.py"))
    command = [str(args.trl_python), "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={cell.processes}", program, str(output / "trl.json")]
    out = peers.run(command, cell.seconds)
    if out is None:
        return []
    result = json.loads(next(line for line in reversed(out.splitlines()) if line.startswith("{")))
    pairs = list(zip(result["steps"], result["generation"], strict=True))[peers.WARM_UP :]
    return [{"whole": whole, "generation": generation} for whole, generation in pairs]


# ---------------------------------------------------------------- GRPO on a real model


def compare_on_task(args: Namespace, task: Path, processes: int) -> None:
    """Train by rlhf_mc and by TRL and print both beside the passes of plain transformers."""
    cfg = load_config(GRPO, [])
    settings = {
        "n": cfg.rollout.n,
        "longest": cfg.data.max_response_length,
        "sequences": cfg.data.train_batch_size * cfg.rollout.n,
        "packed": cfg.actor.ppo_max_token_len_per_gpu,
        "beta": cfg.actor.kl_loss_coef,
        "learning_rate": cfg.actor.optim.lr,
        "weight_decay": cfg.actor.optim.weight_decay,
        "max_grad_norm": cfg.actor.optim.clip_grad,
        "model": str(task / "model_hf"),
        "reward": str(peers.ROOT / "examples" / "smollm2_reward.py"),
        "rows": read_rows(task / "train.parquet"),
        "val": read_rows(task / "val.parquet"),
        "micro_batch": args.micro_batch,
        "steps": peers.WARM_UP + args.steps,
        "seed": args.seed,
        "repetitions": 2,
    }
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory)
        file = output / "settings.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        own, settings["tokens"] = own_grpo(settings, torchrun, output / "rlhf_mc", args.seconds)
        settings["output"] = str(output / "TRL")
        file.write_text(json.dumps(settings))
        program = [str(Path(__file__).with_name("trl_grpo.py")), str(file)]
        trl = last_json([str(args.trl_python), *torchrun, *program], args.seconds)
        plain = [str(Path(__file__).with_name("plain_transformers.py"))]
        seconds = last_json(
            [sys.executable, *torchrun, *plain, "passes", settings["model"], str(file)],
            args.seconds,
        )
        bound = statistics.median(seconds)
        print(
            f"\nGRPO, {settings['tokens']:,.0f} tokens a step, {processes} process(es); passes "
            f"alone {bound:.1f} s"
        )
        head = (
            f"{'s a step':>9} {'min':>6} {'gen':>6} {'others':>7} {'passes/it':>9} {'accuracy':>9}"
        )
        print(f"{'':>8} {head}  sampled reward")
        for name, one in (("rlhf_mc", own), ("TRL", trl)):
            steps = one["steps"][peers.WARM_UP :]
            generation = statistics.median(one["generation"][peers.WARM_UP :])
            whole = statistics.median(steps)
            correct = last_json(
                [sys.executable, *plain, "accuracy", str(output / name / "hf"), str(file)],
                args.seconds,
            )
            cells = (
                f"{whole:9.1f} {min(steps):6.1f} {generation:6.1f} {whole - generation:7.1f} "
                f"{bound / whole:9.2f}"
            )
            rewards = " ".join(f"{reward:.2f}" for reward in one["reward"])
            print(f"{name:>8} {cells} {correct:9.2f}  {rewards}", flush=True)


def own_grpo(
    settings: dict[str, Any], torchrun: list[str], output: Path, limit: int
) -> tuple[dict[str, list[float]], float]:
    """Run rlhf_mc. Return the seconds of its steps, of their generation, and their rewards; and the
    mean tokens of a counted step."""
    overrides = [
        f"trainer.default_local_dir={output}",
        f"model.path={settings['model']}",
        f"data.train_files={Path(settings['model']).parent / 'train.parquet'}",
        f"data.val_files={Path(settings['model']).parent / 'val.parquet'}",
        f"trainer.total_training_steps={settings['steps']}",
        f"trainer.seed={settings['seed']}",
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"),
        *("trainer.max_ckpt_to_keep=null", "trainer.log_val_generations=0"),
    ]
    steps = last_json([sys.executable, *torchrun, peers.__file__, GRPO, *overrides], limit)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    result = {
        "steps": [step["whole"] for step in steps],
        "generation": [step["generation"] for step in steps],
        "reward": [row["critic/score/mean"] for row in rows],
    }
    return result, statistics.mean(row["perf/total_num_tokens"] for row in rows[peers.WARM_UP :])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return prompt, data source and answer of each row."""
    import pyarrow.parquet as pq

    return [
        {
            "prompt": [
                {key: message[key] for key in ("role", "content")} for message in row["prompt"]
            ],
            "data_source": row["data_source"],
            "answer": row["reward_model"]["ground_truth"],
        }
        for row in pq.read_table(path).to_pylist()
    ]


def last_json(command: list[str], limit: int) -> Any:
    """Return the last line of JSON that a command prints, within a limit in seconds."""
    out = peers.run(command, limit, PYTHONPATH=str(peers.ROOT))
    if out is None:
        sys.exit(f"{' '.join(command)} takes more than {limit} s")
    return json.loads(
        next(line for line in reversed(out.splitlines()) if line[:1] in "[{0123456789")
    )


if __name__ == "__main__":
    main()
