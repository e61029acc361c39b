"""Modules that some families need: gemma's norm and embedding scale, and vLLM's experts on a
CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM

from rlhf_mc.models.gpt_model import scale_embeddings
from rlhf_mc.models.layers import ZeroCenteredRMSNorm
from rlhf_mc.rollout.experts import fused_moe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemma_norm_and_embeddings_round_like_transformers(dtype: torch.dtype) -> None:
    """Use a hidden size whose root is rounded: sqrt(96) is 9.798, or 9.8125 in bfloat16."""
    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    theirs = (
        GemmaForCausalLM(GemmaConfig(vocab_size=50, hidden_size=96, intermediate_size=8, **sizes))
        .to(dtype)
        .model
    )
    torch.nn.init.normal_(theirs.norm.weight)
    tokens = torch.arange(50)
    embedding = torch.nn.Embedding.from_pretrained(theirs.embed_tokens.weight.detach())
    scale_embeddings(SimpleNamespace(embedding=embedding), 96)
    states = embedding(tokens)
    assert states.dtype == dtype and torch.equal(states, theirs.embed_tokens(tokens))
    norm = ZeroCenteredRMSNorm(
        SimpleNamespace(sequence_parallel=False), 96, eps=theirs.norm.eps
    ).to(dtype)
    norm.load_state_dict(theirs.norm.state_dict())
    assert torch.equal(norm(states), theirs.norm(states))


@pytest.mark.parametrize("skip_weighted", [False, True])
def test_cpu_experts_match_a_dense_computation(skip_weighted: bool) -> None:
    """Compare with every token through every expert, at weight 0 if not selected. One expert has no
    tokens."""
    torch.manual_seed(0)
    tokens = 9
    experts = 5
    hidden = 6
    ffn = 4
    x = torch.randn(tokens, hidden)
    w13 = torch.randn(experts, 2 * ffn, hidden)
    w2 = torch.randn(experts, hidden, ffn)
    weights, ids = torch.rand(tokens, experts - 1).topk(2)
    gate, up = torch.einsum("th,efh->tef", x, w13).chunk(2, dim=-1)
    of_each = torch.einsum("tef,ehf->teh", torch.nn.functional.silu(gate) * up, w2)
    used = torch.ones_like(weights) if skip_weighted else weights
    wanted = torch.einsum("teh,te->th", of_each, torch.zeros(tokens, experts).scatter(1, ids, used))
    out = torch.full_like(x, torch.nan)
    fused_moe(out, x, w13, w2, None, None, weights, ids.int(), "silu", "vec", skip_weighted)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
