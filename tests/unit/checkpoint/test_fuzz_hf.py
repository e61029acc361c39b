"""Arbitrary and corrupt Hugging Face checkpoints: config.json, safetensors, their index, the
tokenizer's files. Each is read, or rejected in one line."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzzing import corruptions, examples, restore, success_or_user_error
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint

from rlhf_mc.architectures.families import FAMILIES
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import INDEX, WEIGHTS, HFReader
from rlhf_mc.config.schema import DataConfig
from rlhf_mc.data.prompts import load_prompts
from rlhf_mc.data.source import write_prompts
from rlhf_mc.data.tokenizer import load_tokenizer
from rlhf_mc.reshard.layout import check_mcore, logical_shapes
from rlhf_mc.rollout.vllm_layout import check_vllm
from rlhf_mc.setup.value_heads import check_value_head

pytestmark = pytest.mark.slow

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2,
     300) | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["default", "linear", "yarn", "llama3", "silu", "gelu", "float32", 10**400]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta", "x"]), inner,
     max_size=3),
    max_leaves=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def intact(directory: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint in two shards."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    make_checkpoint(directory, **sizes)
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file(
            {name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"}
        )
    weight_map = {name: file for file, part in shards.items() for name in part}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def read(directory: Path) -> None:
    """Read everything that a run reads before it builds models, and every tensor."""
    reader = HFReader(directory)
    shape = ModelShape.from_hf_config(reader.config)
    ModelShape.from_hf_config(reader.config, value_head=True)
    check_mcore(shape, 2)
    check_vllm(shape, 2)
    reader.check(shape)
    check_value_head("model.path", reader)
    reader.dtype_name()
    for piece in reader.slices(logical_shapes(shape)).values():
        piece[:]


def test_intact_checkpoint_can_be_read(directory: Path, intact: dict[str, bytes]) -> None:
    read(directory)
    load_tokenizer(str(directory))


@examples(250)
@given(data=st.data(), corrupt=corruptions())
def test_corrupt_files(
    directory: Path,
    intact: dict[str, bytes],
    data: st.DataObject,
    corrupt: Callable[[bytes], bytes],
) -> None:
    name = data.draw(
        st.sampled_from(["config.json", INDEX, "model-1.safetensors", "model-2.safetensors"])
    )
    restore(directory, {**intact, name: corrupt(intact[name])})
    success_or_user_error(lambda: read(directory))


@examples(60)
@given(name=st.sampled_from(TOKENIZER), corrupt=corruptions())
def test_corrupt_tokenizers(
    directory: Path, intact: dict[str, bytes], name: str, corrupt: Callable[[bytes], bytes]
) -> None:
    restore(directory, {**intact, name: corrupt(intact[name])})
    row = {
        "prompt": "1+1=",
        "data_source": "x",
        "reward_model": {"ground_truth": "2"},
        "ability": "",
        "extra_info": {"i": 0},
    }
    write_prompts(directory / "a.parquet", [row])

    def tokenise() -> None:
        cfg = DataConfig(train_files=[], max_prompt_length=30, filter_overlong_prompts=True)
        load_prompts([str(directory / "a.parquet")], load_tokenizer(str(directory)), cfg, -1)

    success_or_user_error(tokenise)


@examples(300)
@given(data=st.data(), family=st.sampled_from(sorted(FAMILIES)))
def test_arbitrary_values_in_config_json(
    directory: Path, intact: dict[str, bytes], data: st.DataObject, family: str
) -> None:
    config = json.loads(intact["config.json"])
    extra = ["rope_scaling", "rope_theta", "sliding_window", "use_sliding_window", "num_experts",
     "attention_bias",
             "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
             "partial_rotary_factor"]  # fmt: skip
    keys = st.sampled_from([*config, *extra])
    config |= {
        "model_type": family,
        **data.draw(st.dictionaries(keys, json_values, min_size=1, max_size=3)),
    }
    restore(directory, {**intact, "config.json": json.dumps(config).encode()})
    success_or_user_error(lambda: read(directory))


@examples(100)
@given(content=json_values)
def test_arbitrary_index(directory: Path, intact: dict[str, bytes], content: Any) -> None:
    for index in (content, {"weight_map": content}, {"weight_map": {"model.norm.weight": content}}):
        restore(directory, {**intact, INDEX: json.dumps(index).encode()})
        success_or_user_error(lambda: read(directory))
