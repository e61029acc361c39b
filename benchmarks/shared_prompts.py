"""Prompts computed once for their responses against whole sequences: time of a forward pass and of
a forward with a backward pass, and peak additional memory, on one rank of a CPU:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 1 benchmarks/shared_prompts.py
    ... benchmarks/shared_prompts.py --model DIRECTORY --prompts 45 --samples 8 --response 15
    ... benchmarks/shared_prompts.py --replicas 2 4 8 16

The last computes nothing: by the planner's costs of Llama 3 8B it prints how idle data-parallel
replicas are, and the work of the slowest, where 64 prompts with 8 responses each are planned as
single sequences and as groups.

Bound: r, the tokens of all sequences over those with each prompt once. Attention has whole
sequences in both variants, and the head the same positions, whose logits it computes again in the
backward pass; the benchmark prints r and the ratios of all operations, which bound the passes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
from log_probs import peak_bytes
from train_step import make_batch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_mc import platform
from rlhf_mc.architectures.operations import forward_flops
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import HFReader, import_hf
from rlhf_mc.config.schema import MegatronConfig, OptimConfig
from rlhf_mc.data.balance import (
    PromptGroups,
    plan_micro_batches,
    plan_prompt_groups,
    sequence_costs,
)
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine, engine_layouts
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.heads import log_prob_head, log_probs
from rlhf_mc.topology.groups import build_groups
from rlhf_mc.topology.mesh import Mesh
from rlhf_mc.topology.rendezvous import init_process_group
from rlhf_mc.trainer.token_budget import my_micro_batches

LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
VARIANTS = {"whole": False, "shared": True}


def grouped(vocab: int, groups: int, n: int, prompt: int, response: int) -> RaggedBatch:
    """Return random sequences: `groups` prompts with n responses each."""
    batch = make_batch([prompt + response] * groups * n, vocab)
    tokens = batch.tokens.view(groups, n, -1)
    tokens[:, :, :prompt] = tokens[:, :1, :prompt].clone()
    count = groups * n
    return RaggedBatch(
        tokens=tokens.flatten(),
        prompt_lens=torch.full((count,), prompt),
        response_lens=torch.full((count,), response),
        rollout_log_probs=torch.zeros(count * response),
        finished=torch.ones(count, dtype=torch.bool),
    )


def make_engines(directory: str) -> dict[str, ModelEngine]:
    """Build the checkpoint's model once with shared prompts and once without."""
    reader = HFReader(directory)
    groups = build_groups(Mesh(1, 1, 1))
    engines = {}
    for variant, shares in VARIANTS.items():
        config = MegatronConfig(
            dtype="float32", use_distributed_optimizer=False, share_prompts=shares
        )
        engine = ModelEngine("actor", reader.shape(), config, groups)
        import_hf(reader, engine_layouts(engine)[groups.rank], engine.params)
        engine.make_trainable(OptimConfig(), total_steps=1)
        engines[variant] = engine
    return engines


def passes(engine: ModelEngine, batch: RaggedBatch, budget: int) -> dict[str, Any]:
    """Return the two passes by name, as functions."""
    vocab = engine.shape.vocab_size
    plan = my_micro_batches(engine, batch, budget)

    def loss(model: object, states: torch.Tensor, micro: MicroBatch) -> Any:
        return log_probs(model, states, micro.targets, vocab, 1.0).sum(), {}

    return {
        "forward": lambda: engine.score(batch, plan, log_prob_head(vocab, 1.0)),
        "both": lambda: engine.backward(batch, plan, loss),
    }


def measure(engines: dict[str, ModelEngine], batch: RaggedBatch, rounds: int, budget: int) -> str:
    """Return a row: the medians of alternating rounds, after one that is not measured."""
    todo = {variant: passes(engine, batch, budget) for variant, engine in engines.items()}
    seconds: dict[tuple[str, str], list[float]] = {}
    memory: dict[tuple[str, str], int] = {}
    results = {variant: functions["forward"]() for variant, functions in todo.items()}
    torch.testing.assert_close(results["whole"], results["shared"], rtol=0, atol=1e-4)
    for number in range(rounds):
        for name in ("forward", "both"):
            for variant, functions in todo.items():
                start = time.perf_counter()
                if number:
                    functions[name]()
                    seconds.setdefault((name, variant), []).append(time.perf_counter() - start)
                else:
                    memory[name, variant] = peak_bytes(functions[name])
    cells = []
    for name in ("forward", "both"):
        whole, shared = (statistics.median(seconds[name, v]) for v in VARIANTS)
        cells.append(f"{whole:8.2f} {shared:8.2f} {whole / shared:6.2f}")
    whole_bytes, shared_bytes = (memory["both", v] for v in VARIANTS)
    cells.append(f"{whole_bytes / 2**20:8.0f} {shared_bytes / 2**20:8.0f}")
    return " ".join(cells)


def plans(replicas: int, prompt: int, response: int, budget: int = 16384) -> str:
    """Return a row: idle shares of replicas, and the work of the slowest with shared prompts over
    that without. Lengths are log-normal around these medians."""
    n = 8
    draw = np.random.default_rng(replicas)
    prompts = (prompt * draw.lognormal(0, 0.35, 64)).astype(int).repeat(n)
    lens = [*map(int, prompts + (response * draw.lognormal(0, 0.5, len(prompts))).astype(int) + 1)]
    firsts = [i // n * n for i in range(len(lens))]
    groups = PromptGroups(lens, prompts.tolist(), firsts)
    cost = ModelShape.from_hf_config(LLAMA_3_8B).sequence_cost

    costs = sequence_costs(lens, cost)
    whole = [
        groups.cost(replica, costs, 0.0)
        for replica in plan_micro_batches(lens, replicas, budget, cost)
    ]
    shared = [
        groups.cost(replica, costs, cost(1))
        for replica in plan_prompt_groups(groups, replicas, budget, cost)
    ]
    idle = [1 - sum(work) / len(work) / max(work) for work in (whole, shared)]
    return (
        f"{replicas:8} {prompt:6} {response:8}  {idle[0]:6.1%} {idle[1]:6.1%}"
        f" {max(shared) / max(whole):8.2f} {sum(shared) / sum(whole):8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Hugging Face checkpoint; default: a small random one")
    parser.add_argument("--prompts", type=int, nargs="+", default=[45, 150, 1000, 4000])
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4000, help="of whole sequences, at least")
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--replicas", type=int, nargs="+", help="print plans alone")
    args = parser.parse_args()
    if args.replicas:
        print("replicas prompt response  idle: whole, shared  slowest, shared/whole  all")
        for prompt, response in ((150, 64), (1000, 300), (4000, 1000), (200, 2000)):
            for replicas in args.replicas:
                print(plans(replicas, prompt, response))
        return
    platform.keep_freed_memory()
    init_process_group(600)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        if args.model is None:
            config = Qwen2Config(
                vocab_size=4096,
                hidden_size=256,
                intermediate_size=1024,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=8192,
                tie_word_embeddings=True,
            )
            Qwen2ForCausalLM(config).float().save_pretrained(directory)
        engines = make_engines(args.model or directory)
        shape = engines["whole"].shape
        print(
            "prompt  n  sequences    r  operations: both | forward: whole, shared s, ratio |"
            " with backward: the same | MiB: whole, shared",
            flush=True,
        )
        for prompt in args.prompts:
            for n in args.samples:
                groups = max(1, args.tokens // (n * (prompt + args.response)))
                batch = grouped(shape.vocab_size, groups, n, prompt, args.response)
                whole = prompt + args.response
                ratio = n * whole / (prompt + n * args.response)
                flops = forward_flops(shape, [whole] * n, n * args.response)
                saved = (1 - 1 / ratio) * (flops.projections + flops.feed_forward)
                total = flops.total + flops.output + flops.backward(shape).total
                bounds = flops.total / (flops.total - saved), total / (total - 3 * saved)
                row = measure(engines, batch, args.rounds, args.budget)
                print(
                    f"{prompt:6} {n:2} {groups * n:10} {ratio:5.2f} "
                    f"{bounds[0]:11.2f} {bounds[1]:5.2f}  {row}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
