"""Log-probs and entropies in chunks of tokens, with the vocabulary split over ranks, against the
computation with all logits at once."""

from __future__ import annotations

from typing import Any

import head_cases
import pytest
import torch

pytestmark = pytest.mark.dist

VOCAB = 130
PADDED = 192
HIDDEN = 24
TOKENS = 37
"""With 4 ranks the last one holds only padding: its 48 rows begin at 144."""


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    upstream: torch.Tensor,
    temperature: float,
    terms: tuple[str, ...],
    wide: bool = True,
) -> dict[str, torch.Tensor]:
    """Compute the results of head_cases.chunked_log_probs by autograd through the logits of the
    whole vocabulary: in float64 (`wide`), or with logits in the inputs' dtype and the rest in
    float32.
    """
    states, rows = (x.double() if wide else x.clone() for x in (hidden, weight))
    states.requires_grad_()
    rows.requires_grad_()
    logits = states @ rows.t()
    all_log_probs = ((logits if wide else logits.float()) / temperature).log_softmax(-1)
    log_probs = all_log_probs.gather(1, targets[:, None])[:, 0]
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    loss = sum(
        (u * x).sum()
        for u, x, term in zip(upstream, (log_probs, entropy), ("log-prob", "entropy"), strict=True)
        if term in terms
    )
    loss.backward()
    assert states.grad is not None and rows.grad is not None
    return {
        "log-prob": log_probs.detach(),
        "entropy": entropy.detach(),
        "hidden": states.grad,
        "weight": rows.grad,
    }


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    return {
        "hidden": torch.randn(TOKENS, HIDDEN, generator=draw).to(dtype),
        "weight": (0.5 * torch.randn(VOCAB, HIDDEN, generator=draw)).to(dtype),
        # Including the first and the last token of the vocabulary.
        "targets": torch.cat(
            [torch.tensor([0, VOCAB - 1]), torch.randint(VOCAB, (TOKENS - 2,), generator=draw)]
        ),
        "upstream": torch.randn(2, TOKENS, generator=draw),
    }


def errors(
    results: list[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Return the largest error of each result over ranks, relative to its largest element."""
    weight = torch.cat([result["weight"] for result in results])
    assert not weight[VOCAB:].any(), "padding has a gradient"
    out = {"weight": _error(weight[:VOCAB], wanted["weight"])}
    for name in ("log-prob", "entropy", "hidden"):
        for result in results:
            if result[name].numel():
                out[name] = max(out.get(name, 0.0), _error(result[name], wanted[name]))
    return out


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("terms", [("log-prob", "entropy"), ("log-prob",), ("entropy",)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_chunks_match_the_full_computation(pool: Any, world: int, terms: tuple[str, ...]) -> None:
    given = inputs()
    wanted = plain(**given, temperature=0.7, terms=terms)
    # One token a chunk; chunks that do not divide the tokens, untied and tied; all tokens in one
    # chunk.
    for tokens_per_chunk, tied in ((1, True), (8, False), (8, True), (1000, False)):
        results = pool(world).run(
            head_cases.chunked_log_probs,
            **given,
            temperature=0.7,
            tied=tied,
            terms=terms,
            chunk_logits=tokens_per_chunk * PADDED // world,
        )
        for name, error in errors(results, wanted).items():
            assert error < 2e-6, (
                f"{tokens_per_chunk} tokens a chunk, {name}: off by {error:.1e} of the largest"
            )


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bfloat16_error_is_that_of_one_matrix_product(pool: Any, world: int) -> None:
    """Bound the error by that of a bfloat16 output layer over all tokens at once. Softmax and sums
    over chunks are in float32, so that only logits and returned gradients are rounded.
    """
    given = inputs(torch.bfloat16)
    terms = ("log-prob", "entropy")
    exact = plain(**given, temperature=1.0, terms=terms)
    rounded = plain(**given, temperature=1.0, terms=terms, wide=False)
    results = pool(world).run(
        head_cases.chunked_log_probs,
        **given,
        temperature=1.0,
        tied=False,
        terms=terms,
        chunk_logits=8 * PADDED // world,
    )
    assert results[0]["log-prob"].dtype == results[0]["entropy"].dtype == torch.float32
    assert results[0]["hidden"].dtype == results[0]["weight"].dtype == torch.bfloat16
    for name, error in errors(results, exact).items():
        # The all-reduce of the states' gradient is in bfloat16, as in Megatron-Core's output layer.
        allowed = 2.5 * _error(rounded[name], exact[name])
        assert error < allowed < 0.05, (
            f"{name}: off by {error:.1e} of the largest, {allowed:.1e} allowed"
        )


@pytest.mark.parametrize("world", [1, 2])
def test_float32_products_of_bfloat16_are_exact(pool: Any, world: int) -> None:
    """Compare the path of a GPU, in which no logit is rounded to bfloat16: only returned gradients
    are, and the gradient of the logits before it is multiplied."""
    given = inputs(torch.bfloat16)
    terms = ("log-prob", "entropy")
    wanted = plain(**given, temperature=0.7, terms=terms)
    results = pool(world).run(
        head_cases.chunked_log_probs,
        **given,
        temperature=0.7,
        tied=False,
        terms=terms,
        chunk_logits=8 * PADDED // world,
        wide=True,
    )
    found = errors(results, wanted)
    assert max(found["log-prob"], found["entropy"]) < 2e-6
    assert max(found["hidden"], found["weight"]) < 2**-7


@pytest.mark.parametrize("world", [1])
def test_no_tensor_is_larger_than_a_chunk_of_logits(pool: Any, world: int) -> None:
    vocab = 5000
    num_tokens = 400
    chunk = 50_000
    [largest] = pool(world).run(
        head_cases.largest_tensor, vocab=vocab, num_tokens=num_tokens, size=8, chunk_logits=chunk
    )
    assert 0.9 * chunk < largest <= chunk


@pytest.mark.parametrize("k", [1, 6, VOCAB])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_most_probable_tokens_and_their_log_probs(pool: Any, world: int, k: int) -> None:
    """Compare with float64. With VOCAB tokens some ranks give fewer than k columns."""
    given = inputs()
    upstream = torch.randn(TOKENS, k, generator=torch.Generator().manual_seed(3))
    states, rows = (given[name].double().requires_grad_() for name in ("hidden", "weight"))
    log_probs = (states @ rows.t() / 0.7).log_softmax(-1)
    top, tokens = log_probs.detach().topk(k)
    entropy = -(log_probs.exp() * log_probs).sum()
    ((upstream * log_probs.gather(1, tokens)).sum() + entropy).backward()
    for tokens_per_chunk in (1, 8, 1000):
        results = pool(world).run(
            head_cases.chunked_tokens,
            hidden=given["hidden"],
            weight=given["weight"],
            upstream=upstream,
            k=k,
            chunk_logits=tokens_per_chunk * PADDED // world,
        )
        for result in results:
            first, numbers, values = result["top"].split([1, k, k], 1)
            assert torch.equal(numbers.long(), tokens)
            assert _error(values, top) < 2e-6 and _error(result["of_tokens"], top) < 2e-6
            assert _error(first[:, 0], log_probs[:, 0].detach()) < 2e-6
            assert states.grad is not None and _error(result["hidden"], states.grad) < 5e-6
        weight = torch.cat([result["weight"] for result in results])
        assert not weight[VOCAB:].any(), "padding has a gradient"
        assert rows.grad is not None and _error(weight[:VOCAB], rows.grad) < 5e-6
