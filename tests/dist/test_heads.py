"""Log-probs and entropies in chunks of tokens, with the vocabulary over several ranks, against the plain computation
with all logits at once."""

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
"""Of 4 ranks the last has no token at all: its 48 rows begin at 144."""


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    upstream: torch.Tensor,
    temperature: float,
    terms: tuple[str, ...],
    wide: bool = True,
) -> dict[str, torch.Tensor]:
    """What head_cases.log_probs_of gives, by autograd through all logits of the whole vocabulary: in float64, or with
    the logits in the type of the inputs and the rest in float32."""
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
    return {"log-prob": log_probs.detach(), "entropy": entropy.detach(), "hidden": states.grad, "weight": rows.grad}


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    return {
        "hidden": torch.randn(TOKENS, HIDDEN, generator=draw).to(dtype),
        "weight": (0.5 * torch.randn(VOCAB, HIDDEN, generator=draw)).to(dtype),
        # The first and the last token of the vocabulary among them.
        "targets": torch.cat([torch.tensor([0, VOCAB - 1]), torch.randint(VOCAB, (TOKENS - 2,), generator=draw)]),
        "upstream": torch.randn(2, TOKENS, generator=draw),
    }


def errors(results: list[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest error of each result over ranks, as a part of the largest element."""
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
def test_chunks_are_exact(pool: Any, world: int, terms: tuple[str, ...]) -> None:
    given = inputs()
    wanted = plain(**given, temperature=0.7, terms=terms)
    # One token a chunk; chunks that do not divide the tokens, tied and not; all in one.
    for tokens_per_chunk, tied in ((1, True), (8, False), (8, True), (1000, False)):
        results = pool(world).run(
            head_cases.log_probs_of,
            **given,
            temperature=0.7,
            tied=tied,
            terms=terms,
            chunk_logits=tokens_per_chunk * PADDED // world,
        )
        for name, error in errors(results, wanted).items():
            assert error < 2e-6, f"{tokens_per_chunk} tokens a chunk, {name}: off by {error:.1e} of the largest"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bfloat16_loses_no_more_than_one_matrix_product_does(pool: Any, world: int) -> None:
    """The softmax is in float32 and chunks add up in it: what is lost is the rounding of the logits and of the
    gradients handed back, as in a bfloat16 output layer over all tokens at once."""
    given = inputs(torch.bfloat16)
    terms = ("log-prob", "entropy")
    exact = plain(**given, temperature=1.0, terms=terms)
    rounded = plain(**given, temperature=1.0, terms=terms, wide=False)
    results = pool(world).run(
        head_cases.log_probs_of, **given, temperature=1.0, tied=False, terms=terms, chunk_logits=8 * PADDED // world
    )
    assert results[0]["log-prob"].dtype == results[0]["entropy"].dtype == torch.float32
    assert results[0]["hidden"].dtype == results[0]["weight"].dtype == torch.bfloat16
    for name, error in errors(results, exact).items():
        # Ranks add their parts of the states' gradient up in bfloat16, as Megatron-Core's output layer does.
        allowed = 2.5 * _error(rounded[name], exact[name])
        assert error < allowed < 0.05, f"{name}: off by {error:.1e} of the largest, {allowed:.1e} allowed"


@pytest.mark.parametrize("world", [1])
def test_no_tensor_is_larger_than_a_chunk_of_logits(pool: Any, world: int) -> None:
    vocab = 5000
    num_tokens = 400
    chunk = 50_000
    [largest] = pool(world).run(
        head_cases.largest_tensor, vocab=vocab, num_tokens=num_tokens, size=8, chunk_logits=chunk
    )
    assert 0.9 * chunk < largest <= chunk
