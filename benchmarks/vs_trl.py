"""A PPO step of rlhf_mc and of TRL (experimental PPOTrainer, generation by transformers): the same model, prompts,
distribution of lengths, epoch, optimizer steps and cores, one after the other, several times.

    python3.11 -m venv TRL                              # an environment of its own, with this project's torch:
    echo "$PWD/.venv/lib/python3.11/site-packages" > TRL/lib/python3.11/site-packages/project.pth
    TRL/bin/pip install accelerate datasets
    TRL/bin/pip install --no-deps trl==1.12.0           # 1.16 has no PPO
    OMP_NUM_THREADS=1 python benchmarks/vs_trl.py --trl-python TRL/bin/python               # a table of 8 cells

Both train actor and critic with one PPO epoch and an optimizer step for each 64 sequences, compute log-probs of a
frozen reference, and have a reward that costs next to nothing. Response lengths: "equal" has 64 tokens and no end
token; "long-tailed" has an end token with probability 1/64 at each token, and at most 512 tokens. TRL takes the old
log-probs from the generation. rlhf_mc computes them by default; "generation's log-probs" is rlhf_mc with
algorithm.rollout_correction.bypass_mode, which takes them from the generation too. peers.py says what a step is.
"""

from __future__ import annotations

import functools
import json
from argparse import Namespace
from pathlib import Path

import peers
from peers import Cell, Steps


def main() -> None:
    parser = peers.parser(__doc__)
    parser.add_argument("--trl-python", type=Path, required=True, help="Python of the environment with TRL")
    parser.add_argument("--micro-batch", type=int, default=32, help="TRL's sequences of a micro-batch")
    parser.add_argument("--rollout-batch", type=int, default=0, help="TRL's sequences of a generation; 0: all")
    args = parser.parse_args()
    programs = {
        "rlhf_mc": peers.own(),
        "rlhf_mc, generation's log-probs": peers.own("algorithm.rollout_correction.bypass_mode=true"),
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


if __name__ == "__main__":
    main()
