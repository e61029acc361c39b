"""Small Hugging Face checkpoints written by transformers, and their import to a simulated TP 2 x PP
2."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import HFReader, import_hf
from rlhf_mc.reshard.layout import Layout, mcore_layout

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 447,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "qwen2-tied": Qwen2Config(
        **SIZES, tie_word_embeddings=True, rope_parameters={"rope_theta": 5e5}
    ),
    "qwen2": Qwen2Config(**SIZES),
    "llama": LlamaConfig(**SIZES),
    "llama-biases": LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
}


def save_model(
    directory: Path, name: str = "qwen2", dtype: torch.dtype = torch.float32, **arguments
) -> Path:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(directory, **arguments)
    return directory


def all_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: t
        for file in sorted(directory.glob("*.safetensors"))
        for name, t in load_file(file).items()
    }


def tp2_pp2(shape: ModelShape) -> list[Layout]:
    stages = [range(0, 2), range(2, 3)]
    return [mcore_layout(shape, t, 2, stages[p], p == 0, p == 1) for p in (0, 1) for t in (0, 1)]


def import_all(
    reader: HFReader, layouts: list[Layout], skip=(), dtype=torch.float32
) -> list[dict[str, torch.Tensor]]:
    ranks = []
    for layout in layouts:
        params = {name: torch.full(size, 7.0, dtype=dtype) for name, size in layout.shapes.items()}
        import_hf(reader, layout, params, skip)
        ranks.append(params)
    return ranks


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def merge_ranks(
    ranks: list[dict[str, torch.Tensor]], layouts: list[Layout]
) -> tuple[dict[str, torch.Tensor], Layout]:
    """Merge the ranks' tensors into those of one process, so that export runs here without a
    process group."""
    params = {}
    shapes = {}
    shards = []
    seen = set()
    for rank, (tensors, layout) in enumerate(zip(ranks, layouts, strict=True)):
        params |= {f"{rank}:{name}": t for name, t in tensors.items()}
        shapes |= {f"{rank}:{name}": s for name, s in layout.shapes.items()}
        for p in layout.shards:
            if (p.tensor, p.box) not in seen:
                seen.add((p.tensor, p.box))
                shards.append(type(p)(p.tensor, p.box, f"{rank}:{p.local}", p.offset))
    return params, Layout(shapes, tuple(shards))
