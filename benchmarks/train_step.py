"""Tokens per second of rlhf_mc's engine (packed sequences on Megatron-Core) against the same model
in transformers: padded, packed as transformers does (position ids, block-diagonal mask), and one
sequence at a time. One process on the CPU, alternating variants. Each computes log-probs of
response tokens only; padding is not counted:

    OMP_NUM_THREADS=1 python benchmarks/train_step.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import HFReader, import_hf
from rlhf_mc.config.schema import MegatronConfig, OptimConfig
from rlhf_mc.data.balance import plan_micro_batches
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine, engine_layouts
from rlhf_mc.models.heads import log_prob_head, log_probs
from rlhf_mc.topology.groups import build_groups
from rlhf_mc.topology.mesh import Mesh

PROMPT = 16
"""Tokens of each prompt."""
Run = Callable[[], torch.Tensor]
"""Function that scores all sequences, optionally with a backward pass. Returns log-probs [R] in the
batch's order."""


def make_batch(lens: list[int], vocab: int) -> RaggedBatch:
    draw = torch.Generator().manual_seed(3)
    lengths = torch.tensor(lens)
    return RaggedBatch(
        tokens=torch.randint(vocab, (int(lengths.sum()),), generator=draw),
        prompt_lens=torch.full_like(lengths, PROMPT),
        response_lens=lengths - PROMPT,
        rollout_log_probs=torch.zeros(int((lengths - PROMPT).sum())),
        finished=torch.ones(len(lens), dtype=torch.bool),
    )


def long_tailed(num_sequences: int, median: int, longest: int) -> list[int]:
    """Return log-normal lengths, like those of responses."""
    draw = torch.Generator().manual_seed(5)
    lengths = median * torch.exp(0.8 * torch.randn(num_sequences, generator=draw))
    return [int(n) for n in lengths.clamp(PROMPT + 8, longest)]


def engine_run(
    engine: ModelEngine, batch: RaggedBatch, budget: int, vocab: int, backward: bool
) -> Run:
    """Return a Run of the engine: micro-batches by token budget, packed."""
    plan = plan_micro_batches(batch.seq_lens.tolist(), 1, budget)[0]

    def run() -> torch.Tensor:
        if not backward:
            return engine.score(batch, plan, log_prob_head(vocab, 1.0))
        out = torch.zeros(int(batch.response_lens.sum()))

        def loss(model, states, micro):  # type: ignore[no-untyped-def]
            scored = log_probs(model, states, micro.targets, vocab, 1.0)
            out[micro.response_index] = scored.detach()
            return scored.sum(), {}

        engine.backward(batch, plan, loss)
        return out

    return run


def _log_probs(
    model: Qwen2ForCausalLM, states: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    return model.lm_head(states).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _padded(model: Qwen2ForCausalLM, batch: RaggedBatch, per_pass: int) -> Iterator[torch.Tensor]:
    """Yield the log-probs of passes of `per_pass` sequences in the batch's order, padded on the
    right."""
    seqs = batch.tokens.split(batch.seq_lens.tolist())
    lens = batch.seq_lens.tolist()
    for start in range(0, len(seqs), per_pass):
        part = seqs[start : start + per_pass]
        length = lens[start : start + per_pass]
        ids = torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True)
        positions = torch.arange(ids.shape[1])[None]
        mask = positions < torch.tensor(length)[:, None]
        states = model.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        is_target = mask & (positions >= PROMPT)
        yield _log_probs(model, states[:, :-1][is_target[:, 1:]], ids[is_target])


def _packed(model: Qwen2ForCausalLM, batch: RaggedBatch, budget: int) -> Iterator[torch.Tensor]:
    """Yield the log-probs of passes of consecutive sequences up to the token budget, concatenated.
    transformers infers from the position ids where each sequence begins.
    """
    groups: list[list[torch.Tensor]] = [[]]
    for seq in batch.tokens.split(batch.seq_lens.tolist()):
        if sum(map(len, groups[-1])) + len(seq) > budget:
            groups.append([])
        groups[-1].append(seq)
    for group in groups:
        ids = torch.cat(group)
        positions = torch.cat([torch.arange(len(seq)) for seq in group])
        states = model.model(input_ids=ids[None], position_ids=positions[None]).last_hidden_state[0]
        targets = torch.nonzero(positions >= PROMPT)[:, 0]
        yield _log_probs(model, states[targets - 1], ids[targets])


def transformers_run(
    model: Qwen2ForCausalLM, passes: Callable[[], Iterator[torch.Tensor]], backward: bool
) -> Run:
    def run() -> torch.Tensor:
        model.zero_grad()
        out = []
        with torch.set_grad_enabled(backward):
            for scored in passes():
                if backward:
                    scored.sum().backward()
                out.append(scored.detach())
        return torch.cat(out)

    return run


def compare(
    name: str, variants: dict[str, tuple[Run, Run]], batch: RaggedBatch, rounds: int
) -> None:
    """Print the tokens per second of each variant. Check that all give the same log-probs."""
    tokens = int(batch.seq_lens.sum())
    wanted = None
    times: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds + 1):  # the first is a warm-up
        for variant, runs in variants.items():
            for direction, run in enumerate(runs):
                start = time.perf_counter()
                scored = run()
                seconds = time.perf_counter() - start
                wanted = scored if wanted is None else wanted
                torch.testing.assert_close(scored, wanted, rtol=0, atol=1e-4)
                if number:
                    times.setdefault((variant, direction), []).append(seconds)
    lens = batch.seq_lens.float()
    print(
        f"\n{name}: {len(lens)} sequences of {int(lens.min())} to {int(lens.max())} tokens, "
        f"{tokens} in all"
    )
    print(f"{'':>34} {'forward':>16} {'forward + backward':>20}")
    for variant in variants:
        rates = [tokens / statistics.median(times[variant, direction]) for direction in (0, 1)]
        print(f"{variant:>34} {rates[0]:>10.0f} tok/s {rates[1]:>14.0f} tok/s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a micro-batch")
    parser.add_argument("--per-pass", type=int, default=8, help="sequences of a padded pass")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 256),
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,  # with a cache transformers treats packed sequences as one
    )
    model = Qwen2ForCausalLM(config).float()
    engine = make_engine(model)
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, "
        f"{torch.get_num_threads()} threads,",
        end="",
    )
    print(f" micro-batches of {args.budget} tokens; medians of {args.rounds} rounds")
    mixes = {"uniform": [128] * 16, "long-tailed": long_tailed(20, median=96, longest=768)}
    for name, lens in mixes.items():
        batch = make_batch(lens, args.vocab)
        passes: dict[str, Callable[[], Iterator[torch.Tensor]]] = {
            "transformers, padded": lambda b=batch: _padded(model, b, args.per_pass),
            "transformers, packed": lambda b=batch: _packed(model, b, args.budget),
            "transformers, one at a time": lambda b=batch: _padded(model, b, 1),
        }
        variants = {
            "rlhf_mc, packed": tuple(
                engine_run(engine, batch, args.budget, args.vocab, b) for b in (False, True)
            )
        }
        variants |= {
            variant: tuple(transformers_run(model, part, b) for b in (False, True))
            for variant, part in passes.items()
        }
        compare(name, variants, batch, args.rounds)


def make_engine(model: Qwen2ForCausalLM) -> ModelEngine:
    """Build an engine of one process with the model's weights."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        reader = HFReader(directory)
        megatron = MegatronConfig(dtype="float32", use_distributed_optimizer=False)
        groups = build_groups(Mesh(1, 1, 1))
        engine = ModelEngine("actor", ModelShape.from_hf_config(reader.config), megatron, groups)
        import_hf(reader, engine_layouts(engine)[0], engine.params)
    engine.make_trainable(OptimConfig(), total_steps=1)
    return engine


if __name__ == "__main__":
    main()
