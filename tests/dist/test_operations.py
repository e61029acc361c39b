"""FLOPs by architectures/operations.py are those that torch counts in real Megatron-Core models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import operation_cases
import pytest
from operation_cases import PROMPTS, RESPONSES
from tiny import make_checkpoint
from workers import Workers

from rlhf_mc.architectures.operations import BACKWARD, forward_flops, num_pairs
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import HFReader

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("family", "role", "megatron"),
    [
        ("qwen2", "actor", {}),  # grouped queries, biases of queries, keys and values
        ("qwen3_moe", "actor", {}),  # and a dense layer
        ("mixtral", "actor", {}),
        ("glm4_moe", "actor", {}),
        ("gpt_oss", "actor", {}),  # windows, sinks, biases of experts
        ("deepseek_v3", "actor", {}),
        ("qwen3_next", "actor", {}),
        ("qwen3_5_text", "actor", {}),
        ("llama", "critic", {}),
        ("qwen2", "actor", {"recompute_granularity": "full"}),
    ],
)
def test_flops_are_those_of_torch(
    pool: Callable[[int], Workers],
    tmp_path: Path,
    family: str,
    role: str,
    megatron: dict[str, Any],
) -> None:
    """Compare products with weights exactly, and attention by the formula of its difference."""
    # Values of fewer dimensions than keys are padded, on a CPU.
    changes = {
        "qwen3_moe": {"mlp_only_layers": [1]},
        "deepseek_v3": {"v_head_dim": 96, "tied": False},
        "gpt_oss": {"tied": False},
        "qwen3_next": {"tied": False},
    }
    checkpoint = str(make_checkpoint(tmp_path / "model", family, **changes.get(family, {})))
    (found,) = pool(1).run(
        operation_cases.counted_flops, checkpoint=checkpoint, role=role, **megatron
    )
    shape = ModelShape.from_hf_config(HFReader(checkpoint).config, value_head=role == "critic")
    lens = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    expected = forward_flops(shape, lens, sum(RESPONSES))
    weights = expected.projections + expected.feed_forward

    def products(counts: dict[str, int]) -> int:
        return counts["aten.mm"] + counts.get("aten.addmm", 0)

    assert products(found["forward"]) == weights + expected.output
    passes = 2 if "recompute_granularity" in megatron else 1
    # heads.py computes the logits again in the backward pass.
    output = expected.output * (1 + BACKWARD + (role == "actor"))
    assert products(found["update"]) == weights * (passes + BACKWARD) + output

    # torch counts masked pairs too: n * n instead of n * (n + 1) / 2.
    states = sum(lens) * 6 * sum(part.num_layers * part.state_size for part in shape.by_kind())
    all_pairs = (expected.attention - states) / num_pairs(lens) * sum(n * n for n in lens)
    if family == "gpt_oss":
        all_pairs = computed_by_blocks(shape, lens)
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert found["forward"][attention] == all_pairs
    assert found["update"][attention] == passes * all_pairs
    # Flash attention has five products in its backward pass, one of them the scores again; BACKWARD
    # counts four.
    assert found["update"][f"{attention}_backward"] == (BACKWARD + 0.5) * all_pairs


def computed_by_blocks(shape: ModelShape, lens: list[int]) -> float:
    """Return the FLOPs of attention with sinks and windows as models/layers.py computes it: a key
    and a query more for the sink, 8 dimensions more, and with a window blocks of queries that see
    two blocks of keys and the sink."""
    whole = sum((n + 1) ** 2 for n in lens)
    window = shape.sliding_window
    in_blocks = sum(-(-n // window) * window * (2 * window + 1) for n in lens)
    return (shape.num_layers - shape.num_windowed) * whole * 4.0 * shape.num_heads * (
        shape.head_dim + 8
    ) + (shape.num_windowed * in_blocks * 4.0 * shape.num_heads * (shape.head_dim + 8))


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_flops_of_mfu_are_those_of_torch_in_an_update(
    pool: Callable[[int], Workers], tmp_path: Path, role: str
) -> None:
    """Compare a whole update: epochs, mini-batches and micro-batches of sequences of several
    lengths."""
    checkpoint = str(make_checkpoint(tmp_path / "model", "qwen2"))
    ((counts, of_mfu),) = pool(1).run(
        operation_cases.counted_update, checkpoint=checkpoint, role=role
    )
    shape = ModelShape.from_hf_config(HFReader(checkpoint).config, value_head=role == "critic")
    lens = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    once = forward_flops(shape, lens, sum(RESPONSES))
    epochs = 2
    # What torch counts and MFU does not: the logits again (heads.py), masked pairs, and the scores
    # of attention again.
    logits = epochs * once.output * (role == "actor")
    all_pairs = epochs * once.attention / num_pairs(lens) * sum(n * n for n in lens)
    assert (
        sum(counts.values())
        == of_mfu + logits + (1 + BACKWARD + 0.5) * all_pairs - epochs * 3 * once.attention
    )
