"""vLLM's sampling kernels for GPUs, interpreted by Triton on the CPU, against their definitions.
Run by lock.py in the environment of requirements/gpu.txt, with TRITON_INTERPRET=1.

python tests/fake_gpu/lock_sampler.py
"""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import lock_platform
import numpy as np
import torch

VOCABULARIES = (50, 1024, 3001, 151_936)
"""Sizes around the kernels' blocks of 1,024 and 8,192 logits, and Qwen's."""
SEEDS = (0, 1, 12_345, 2**31, 2**32 + 7, 2**63 - 1)
"""trainer/pool/generate.py gives seeds below 2^63."""
POSITIONS = (0, 1, 511, 3071, 131_071)
MASK = 0xFFFFFFFF


def main() -> None:
    lock_platform.pretend("h100", 80 << 30)
    for name, check in (
        ("temperature", check_temperature),
        ("noise of a request's seed", check_noise),
        ("distribution of the tokens", check_distribution),
        ("log-probs of sampled tokens", check_log_probs),
        ("seed after a preemption", check_resumption),
    ):
        print(name, "|", check(), flush=True)


def murmur3(data: bytes) -> int:
    """Return MurmurHash3_x86_32 of the bytes, a multiple of 4, with seed 0."""
    h = 0
    for (k,) in struct.iter_unpack("<I", data):
        k = k * 0xCC9E2D51 & MASK
        k = (k << 15 | k >> 17) & MASK
        h ^= k * 0x1B873593 & MASK
        h = (h << 13 | h >> 19) & MASK
        h = (h * 5 + 0xE6546B64) & MASK
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def noise(seed: int, position: int, vocabulary: int) -> np.ndarray:
    """Return the Gumbel noise of each token, float64: -log(-log(1 - u)), where u from 0 to 1 is the
    hash of seed, position and token."""
    hashes = [murmur3(struct.pack("<qII", seed, position, token)) for token in range(vocabulary)]
    uniform = (np.array(hashes, dtype=np.float64) + 0.5) / 2**32
    return -np.log(-np.log1p(-uniform))


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return logits as peaked as a language model's, [rows, vocabulary]."""
    generator = torch.Generator().manual_seed(vocabulary)
    return (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype)


def check_temperature() -> str:
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

    temperatures = torch.tensor([0.7, 1.0, 0.0, 1.3])
    rows = torch.tensor([3, 0, 2, 1, 0], dtype=torch.int32)
    for vocabulary in VOCABULARIES:
        logits = logits_of(len(rows), vocabulary)
        scaled = logits.clone()
        apply_temperature(scaled, rows, temperatures)
        divisors = torch.where(temperatures == 0, 1.0, temperatures)[rows.long()]
        torch.testing.assert_close(scaled, logits / divisors[:, None], rtol=2e-7, atol=0)
    return f"logits / temperature, {len(VOCABULARIES)} sizes"


def check_noise() -> str:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    drawn = 0
    for vocabulary in VOCABULARIES[:3]:
        for temperature in (1.0, 0.0):
            seeds = torch.tensor(SEEDS)
            rows = torch.arange(len(SEEDS), dtype=torch.int32).repeat_interleave(len(POSITIONS))
            positions = torch.tensor(POSITIONS).repeat(len(SEEDS))
            logits = logits_of(len(rows), vocabulary)
            tokens = gumbel_sample(
                logits,
                rows,
                torch.full((len(SEEDS),), temperature),
                seeds,
                positions,
                False,
                is_drafting=False,
            )
            noised = logits.double().numpy()
            if temperature:
                pairs = [(seed, position) for seed in SEEDS for position in POSITIONS]
                noised = noised + np.stack([noise(*pair, vocabulary) for pair in pairs])
            assert tokens.tolist() == noised.argmax(-1).tolist(), (
                f"{vocabulary} tokens, temperature {temperature}"
            )
            next_position = logits.double().numpy() + noise(
                SEEDS[-1], POSITIONS[-1] + 1, vocabulary
            )
            assert tokens.tolist() != next_position.argmax(-1).tolist(), (
                "the comparison sees no difference of noise"
            )
            drawn += len(rows)
    return f"{drawn} tokens are the argmax of logits and MurmurHash3 of (seed, position, token)"


def check_distribution() -> str:
    draws = 20_000
    vocabulary = 16
    logits = logits_of(1, vocabulary)[0].double().numpy() / 4
    probabilities = np.exp(logits) / np.exp(logits).sum()
    counts = np.zeros(vocabulary)
    for draw in range(draws):
        counts[(logits + noise(draw // 100, draw % 100, vocabulary)).argmax()] += 1
    chi_squared = float(((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum())
    # 0.1 % of the distribution with 15 degrees of freedom
    assert chi_squared < 37.7, f"chi-squared {chi_squared:.1f}"
    return f"chi-squared {chi_squared:.1f} of {draws} draws over {vocabulary} tokens (37.7 allowed)"


def check_log_probs() -> str:
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    largest = 0.0
    for vocabulary in VOCABULARIES:
        for dtype in (torch.float32, torch.bfloat16):
            logits = logits_of(3, vocabulary, dtype)
            tokens = torch.tensor([0, vocabulary // 2, vocabulary - 1])
            scores = compute_topk_scores(logits, 0, tokens)
            assert scores.logprob_token_ids.tolist() == tokens[:, None].tolist()
            exact = logits.double().log_softmax(-1).gather(1, tokens[:, None])
            largest = max(largest, float((scores.logprobs - exact).abs().max()))
    assert largest < 1e-5, f"a log-prob is off by {largest:.1e}"
    return f"off by {largest:.1e} nats (at most)"


def sampler(slots: int, vocabulary: int) -> Any:
    """Return vLLM's sampler, and its state of requests, as model runner 2 builds them."""
    from lock_sleep import HostBuffer
    from vllm.utils import torch_utils
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    torch_utils.is_pin_memory_available = lambda: False
    buffer_utils.UvaBuffer = buffer_utils.NonUvaBuffer = HostBuffer
    device = torch.device("cpu")
    states = RequestState(slots, 256, 256, 0, vocabulary, device)
    config = SimpleNamespace(
        reasoning_config=None, speculative_config=None, num_speculative_tokens=0
    )
    return states, Sampler(config, slots, vocabulary, device, states, "processed_logprobs")


def add(states: Any, sampling: Any, name: str, slot: int, tokens: list[int], request: Any) -> None:
    """Add a request to a slot, with the tokens of its prompt and of its response so far."""
    states.free_indices.remove(slot)
    states.free_indices.append(slot)
    states.add_request(name, 4, tokens, 0, 32)
    sampling.add_request(slot, request)
    states.apply_staged_writes()
    sampling.apply_staged_writes()


def sampled(
    sampling: Any, slots: list[int], positions: list[int], logits: torch.Tensor
) -> list[int]:
    """Return the tokens that the sampler draws for requests in these slots, each at its
    position."""
    rows = torch.tensor(slots, dtype=torch.int32)
    lengths = np.array(positions, dtype=np.int32) + 1
    zeros = torch.zeros(len(slots), dtype=torch.int32)
    tokens, _ = sampling.sample(
        logits,
        rows,
        rows,
        np.array(slots),
        torch.tensor(positions),
        zeros,
        zeros,
        lengths,
        return_logprobs=True,
    )
    return tokens.tolist()


def check_resumption() -> str:
    """Compare a request's tokens with those after a preemption. It comes back as a new request,
    whose prompt includes its response so far: in another slot, in another batch, at the position of
    its last token."""
    from lock_sleep import parameters

    vocabulary = 50
    steps = 12
    interrupted = 5
    logits = logits_of(steps, vocabulary)
    request = parameters(0.9, 2**63 - 1)
    responses = []
    for slots in ([0] * steps, [0] * interrupted + [2] * (steps - interrupted)):
        states, sampling = sampler(4, vocabulary)
        add(states, sampling, "other", 1, [7] * 4, parameters(0.9, 99))
        tokens = [7] * 4
        for step, slot in enumerate(slots):
            if step == 0 or slot != slots[step - 1]:
                states.remove_request("request")
                add(states, sampling, "request", slot, tokens, request)
            batch = [slot, 1] if slot else [slot]  # after its return beside another request
            tokens = (
                tokens
                + sampled(
                    sampling, batch, [len(tokens) - 1] * len(batch), logits[[step] * len(batch)]
                )[:1]
            )
        responses.append(tokens)
    assert responses[0] == responses[1], (
        f"{responses[0]} without a preemption, {responses[1]} with one"
    )
    expected = [
        int(
            (
                logits[step].double().numpy() / 0.9 + noise(request.seed, 3 + step, vocabulary)
            ).argmax()
        )
        for step in range(steps)
    ]
    assert responses[0][4:] == expected
    return f"{steps} tokens equal, {steps - interrupted} of them after it"


if __name__ == "__main__":
    main()
