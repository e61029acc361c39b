"""The record of the experts that vLLM's routers choose on a CPU."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.rollout.routed_experts import RoutedExperts


def shape(**sizes: Any) -> ModelShape:
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "norm_topk_prob": True,
    }
    return ModelShape.from_hf_config(json.loads(json.dumps({**config, **sizes})))


def choices(tokens: list[int], layer: int) -> torch.Tensor:
    return torch.tensor([[token + layer, token + layer + 1] for token in tokens])


def record(experts: RoutedExperts, steps: list[list[tuple[int, int, int]]]) -> None:
    """Record steps of (request, place of its first token, number of tokens); the choices are those
    of the place."""
    for step in steps:
        tokens = [place + i for _, place, count in step for i in range(count)]
        for layer in (0, 2):
            experts.capture(layer, choices(tokens, layer))
        requests, places, counts = (np.array(each) for each in zip(*step, strict=True))
        experts.record(requests, places, np.concatenate([[0], counts.cumsum()]))


@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(8, np.uint8), (256, np.uint8), (257, np.uint16)]
)
def test_steps_are_joined(num_experts: int, dtype: type) -> None:
    """Record chunks of a prompt, single tokens, one that is computed ahead, and a request that is
    computed again."""
    experts = RoutedExperts(shape(num_experts=num_experts))
    record(
        experts,
        [[(3, 0, 4), (7, 0, 1)], [(7, 1, 2), (3, 4, 1)], [(7, 0, 4)], [(7, 4, 1), (3, 5, 1)]],
    )
    for request, count in ((3, 5), (7, 5)):
        found = experts.take(request, count)
        assert found.dtype == dtype
        wanted = torch.stack([choices(list(range(count)), layer) for layer in (0, 2)], 1).numpy()
        assert (found == wanted).all()


def test_token_that_is_not_recorded() -> None:
    experts = RoutedExperts(shape())
    record(experts, [[(3, 2, 4)]])
    with pytest.raises(AssertionError, match="2 of 6 tokens of request 3 are not recorded"):
        experts.take(3, 6)


def test_aborted_requests_are_forgotten() -> None:
    experts = RoutedExperts(shape())
    record(experts, [[(3, 0, 4), (5, 0, 2)]])
    experts.forget([3, 4])
    record(experts, [[(3, 0, 2)]])
    assert len(experts.take(3, 2)) == len(experts.take(5, 2)) == 2
