"""Time that data-parallel ranks wait for each other before the gradient reduction: sequences
assigned round-robin, and balanced by cost as the trainer does, over lengths like GSM8K's.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/idle_time.py

If the ranks share cores, read the share of processor time: it excludes the time in which a rank was
ready to compute but had no core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import MegatronConfig, OptimConfig
from rlhf_mc.data.balance import micro_batches, plan_micro_batches
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.heads import log_probs
from rlhf_mc.topology.consensus import gather_objects
from rlhf_mc.topology.groups import build_groups, shut_down
from rlhf_mc.topology.mesh import Mesh
from rlhf_mc.topology.rendezvous import init_process_group

VOCAB = 4096


def gsm8k_like_batch(num_sequences: int, longest: int, seed: int) -> RaggedBatch:
    """Return a batch of log-normal prompts (median 100 tokens) and responses (median 180)."""
    draw = torch.Generator().manual_seed(seed)
    prompts = (
        (100 * torch.exp(0.35 * torch.randn(num_sequences, generator=draw))).clamp(40, 512).long()
    )
    responses = (
        (180 * torch.exp(0.5 * torch.randn(num_sequences, generator=draw)))
        .clamp(20, longest)
        .long()
    )
    return RaggedBatch(
        tokens=torch.randint(VOCAB, (int((prompts + responses).sum()),), generator=draw),
        prompt_lens=prompts,
        response_lens=responses,
        rollout_log_probs=torch.zeros(int(responses.sum())),
        finished=torch.ones(num_sequences, dtype=torch.bool),
    )


def make_engine(hidden: int, layers: int) -> ModelEngine:
    """Build a small Qwen2 with random weights, the same on every rank."""
    config = {
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 256),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    groups = build_groups(Mesh(dist.get_world_size(), 1, 1))
    engine = ModelEngine(
        "actor", ModelShape.from_hf_config(config), MegatronConfig(dtype="float32"), groups
    )
    torch.manual_seed(0)
    for param in engine.params.values():
        param.normal_(std=0.02)
    engine.make_trainable(OptimConfig(), total_steps=1)
    return engine


class Waits:
    """Times from the start of a backward pass until this rank has its gradient, and until all ranks
    have theirs."""

    def __init__(self, engine: ModelEngine) -> None:
        config = engine.chunks[0].config
        finalize = config.finalize_model_grads_func

        def wait_then_finalize(*args: Any, **kwargs: Any) -> Any:
            self.ready = time.perf_counter()
            self.ready_cpu = time.process_time()
            dist.barrier()
            self.all_ready = time.perf_counter()
            return finalize(*args, **kwargs)

        config.finalize_model_grads_func = wait_then_finalize

    def start(self) -> None:
        dist.barrier()
        self.begun = time.perf_counter()
        self.begun_cpu = time.process_time()

    def shares(self) -> tuple[float, float]:
        """Return the idle shares (of wall time, of processor time) over all ranks."""
        times = (
            self.ready - self.begun,
            self.all_ready - self.begun,
            self.ready_cpu - self.begun_cpu,
        )
        busy, whole, cpu = zip(*gather_objects(times), strict=True)
        return 1 - sum(busy) / sum(whole), 1 - sum(cpu) / (len(cpu) * max(cpu))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=64, help="of a mini-batch, over all ranks")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a response")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    init_process_group(600)
    rank = dist.get_rank()
    world = dist.get_world_size()
    engine = make_engine(args.hidden, args.layers)
    waits = Waits(engine)

    def loss(model, states, micro):  # type: ignore[no-untyped-def]
        return log_probs(model, states, micro.targets, VOCAB, 1.0).sum(), {}

    shares: dict[str, list[tuple[float, float, float]]] = {
        "round-robin": [],
        "balanced by cost": [],
    }
    for number in range(args.rounds + 1):  # the first is a warm-up
        batch = gsm8k_like_batch(args.sequences, args.longest, seed=number)
        lens = batch.seq_lens.tolist()
        cost = engine.shape.sequence_cost
        round_robin = [list(range(r, len(lens), world)) for r in range(world)]
        count = max(
            len(micro_batches([lens[i] for i in part], args.budget)) for part in round_robin
        )
        cut = [micro_batches([lens[i] for i in part], args.budget, count) for part in round_robin]
        plans: dict[str, Sequence[Sequence[Sequence[int]]]] = {
            "round-robin": [
                [[part[i] for i in g] for g in c] for part, c in zip(round_robin, cut, strict=True)
            ],
            "balanced by cost": plan_micro_batches(lens, world, args.budget, cost),
        }
        for name, plan in plans.items():
            waits.start()
            engine.backward(batch, plan[rank], loss)
            costs = [sum(cost(lens[i]) for group in replica for i in group) for replica in plan]
            measured = waits.shares()
            if number:
                shares[name].append((*measured, 1 - sum(costs) / (world * max(costs))))
    if rank == 0:
        print(
            f"{world} replicas, {args.sequences} sequences a mini-batch; median (largest) of "
            f"{args.rounds} mini-batches"
        )
        print(
            f"{'idle share of time':>28} {'wall clock':>16} {'processor time':>16} "
            f"{'by the plan':>16}"
        )
        for name, rows in shares.items():
            columns = (
                f"{statistics.median(c):.1%} ({max(c):.1%})" for c in zip(*rows, strict=True)
            )
            print(f"{name:>28} " + " ".join(f"{column:>16}" for column in columns))
    shut_down()


if __name__ == "__main__":
    main()
