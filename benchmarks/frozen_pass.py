"""Log-prob pass of a frozen model (a reference) against the same model with an optimizer (an
actor): time and peak additional memory of a tensor-parallel rank. On the CPU, alternating variants:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/frozen_pass.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from log_probs import peak_bytes
from train_step import make_batch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import HFReader, import_hf
from rlhf_mc.config.schema import MegatronConfig, OptimConfig
from rlhf_mc.models.engine import ModelEngine, engine_layouts
from rlhf_mc.models.heads import log_prob_head
from rlhf_mc.topology.groups import build_groups
from rlhf_mc.topology.mesh import Mesh
from rlhf_mc.topology.rendezvous import init_process_group
from rlhf_mc.trainer.token_budget import my_micro_batches

VARIANTS = ("trainable", "frozen")


def make_variants(directory: str, dtype: str) -> dict[str, ModelEngine]:
    """Build the checkpoint's model twice, over all ranks by tensor parallelism."""
    reader = HFReader(directory)
    world = dist.get_world_size()
    groups = build_groups(Mesh(world, world, 1))
    engines = {}
    for variant in VARIANTS:
        config = MegatronConfig(
            tensor_model_parallel_size=world, dtype=dtype, use_distributed_optimizer=False
        )
        engine = ModelEngine(variant, ModelShape.from_hf_config(reader.config), config, groups)
        import_hf(reader, engine_layouts(engine)[groups.rank], engine.params)
        engines[variant] = engine
    engines["trainable"].make_trainable(OptimConfig(), total_steps=1)
    return engines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=16_384)
    parser.add_argument("--sequences", type=int, default=6, help="of 128 tokens, one micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    init_process_group(600)
    torch.manual_seed(0)
    rank = dist.get_rank()
    config = Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        tie_word_embeddings=False,
    )
    batch = make_batch([128] * args.sequences, args.vocab)
    with tempfile.TemporaryDirectory() as directory:
        if rank == 0:
            model = Qwen2ForCausalLM(config).float()
            model.save_pretrained(directory)
            size = sum(p.numel() for p in model.parameters())
            print(
                f"{size / 1e6:.1f} M parameters, tensor parallel {dist.get_world_size()}, "
                f"{int(batch.seq_lens.sum())} tokens, {torch.get_num_threads()} threads; medians "
                f"of {args.rounds} rounds on rank 0"
            )
        shared = [directory]
        dist.broadcast_object_list(shared)
        for dtype in ("bfloat16", "float32"):
            engines = make_variants(shared[0], dtype)
            rows: dict[str, list[tuple[float, int]]] = {variant: [] for variant in VARIANTS}
            scores: dict[str, Any] = {}
            for number in range(args.rounds + 1):  # the first is a warm-up
                for variant, engine in engines.items():

                    def run(
                        variant: str = variant,
                        engine: ModelEngine = engine,
                        out: dict[str, Any] = scores,
                    ) -> None:
                        out[variant] = engine.score(
                            batch,
                            my_micro_batches(engine, batch, 1 << 20),
                            log_prob_head(args.vocab, 1.0),
                        )

                    dist.barrier()
                    start = time.perf_counter()
                    peak = peak_bytes(run)
                    if number:
                        rows[variant].append((time.perf_counter() - start, peak))
            torch.testing.assert_close(scores["frozen"], scores["trainable"], rtol=0, atol=0.1)
            medians = {
                variant: [statistics.median(column) for column in zip(*rows[variant], strict=True)]
                for variant in VARIANTS
            }
            if rank == 0:
                for variant, (seconds, peak) in medians.items():
                    print(f"{dtype:>9} {variant:>10}: {seconds:6.2f} s {peak / 2**20:8.0f} MiB")
                time_ratio, memory_ratio = (
                    a / b for a, b in zip(medians["frozen"], medians["trainable"], strict=True)
                )
                print(
                    f"{dtype:>9} frozen / trainable: {time_ratio:.2f} in time, {memory_ratio:.2f} "
                    "in memory"
                )
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
