"""Reading of Hugging Face checkpoints: tied heads, nonfinite values, corrupt or unsupported
files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import all_tensors, import_all, merge_ranks, save_model, tp2_pp2
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint import hf_format
from rlhf_mc.checkpoint.finite import num_not_finite
from rlhf_mc.checkpoint.hf_export import export_hf
from rlhf_mc.checkpoint.hf_format import HFReader, import_hf
from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.layout import mcore_layout


def add_head(start: Path, change: float) -> torch.Tensor:
    """Add a language-model head to a tied checkpoint, in another file: the embedding, with `change`
    added to its last element. Return the head.
    """
    head = load_file(start / "model.safetensors")["model.embed_tokens.weight"].clone()
    head[-1, -1] += change
    save_file({"lm_head.weight": head}, start / "head.safetensors")
    names = dict.fromkeys(load_file(start / "model.safetensors"), "body.safetensors")
    (start / "model.safetensors").rename(start / "body.safetensors")
    index = {"metadata": {}, "weight_map": names | {"lm_head.weight": "head.safetensors"}}
    (start / "model.safetensors.index.json").write_text(json.dumps(index))
    return head


@pytest.mark.parametrize("change", [0.0, 1.0])
@pytest.mark.parametrize("compared_bytes", [1000, hf_format.COMPARED_BYTES])
def test_tied_checkpoint_with_its_own_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, change: float, compared_bytes: int
) -> None:
    """Check that an equal head is tied, and a different one untied as in transformers, also in the
    export."""
    monkeypatch.setattr(hf_format, "COMPARED_BYTES", compared_bytes)
    start = save_model(tmp_path / "start", "qwen2-tied")
    assert "lm_head.weight" not in HFReader(start).names
    head = add_head(start, change)
    reader = HFReader(start)
    shape = reader.shape()
    assert shape.tie_embeddings == (change == 0)
    assert ("lm_head.weight differs" in caplog.text) == (change != 0)
    reader.check(shape)
    layouts = tp2_pp2(shape)
    params, layout = merge_ranks(import_all(reader, layouts), layouts)
    export_hf(params, [layout], shape, tmp_path / "end", "float32", start)
    exported = all_tensors(tmp_path / "end")
    assert (
        torch.equal(exported["lm_head.weight"], head)
        if change
        else "lm_head.weight" not in exported
    )
    assert HFReader(tmp_path / "end").config["tie_word_embeddings"] == (change == 0)
    before, after = (AutoModelForCausalLM.from_pretrained(d) for d in (start, tmp_path / "end"))
    tokens = torch.arange(12)[None]
    assert torch.equal(before(tokens).logits, after(tokens).logits)
    critic = reader.shape(value_head=True)
    reader.check(critic)
    assert not critic.shares_embeddings


@pytest.mark.parametrize("size", [(448, 64), (447, 0), ()])
def test_head_of_another_size_is_rejected(tmp_path: Path, size: tuple[int, ...]) -> None:
    start = save_model(tmp_path / "start", "qwen2-tied")
    rewrite(start, lambda tensors: tensors.update({"lm_head.weight": torch.ones(size)}))
    reader = HFReader(start)
    message = f"lm_head.weight has shape {size}, config.json describes (447, 64)"
    with pytest.raises(UserError, match=re.escape(message)):
        reader.check(reader.shape())


@pytest.mark.parametrize("size", [(447, 0), ()])
def test_empty_head_and_embedding_are_rejected(tmp_path: Path, size: tuple[int, ...]) -> None:
    start = save_model(tmp_path / "start", "qwen2-tied")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        rewrite(start, lambda tensors, name=name: tensors.update({name: torch.ones(size)}))
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight has shape"):
        HFReader(start).check(HFReader(start).shape())


def rewrite(start: Path, change) -> None:
    tensors = load_file(start / "model.safetensors")
    change(tensors)
    save_file(tensors, start / "model.safetensors")


def truncate(start: Path) -> None:
    content = (start / "model.safetensors").read_bytes()
    (start / "model.safetensors").write_bytes(content[: len(content) // 2])


NORM = "model.layers.1.input_layernorm.weight"


def write_tensors(**more: torch.Tensor):
    """Return a change that adds or replaces tensors. In names `__` stands for a dot."""
    renamed = {name.replace("__", "."): tensor for name, tensor in more.items()}
    return lambda d: rewrite(d, lambda tensors: tensors.update(renamed))


def with_scales(directory: Path) -> None:
    """Add a scale, as a checkpoint in fp8 has it."""
    write_tensors(model__layers__0__self_attn__q_proj__weight_scale_inv=torch.ones(1))(directory)


def to_shards(index: dict[str, str] | None = None, **more: dict[str, torch.Tensor]):
    """Return a change to shards: the checkpoint as a.safetensors, and those given. `index` goes
    over their index."""

    def change(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "a.safetensors")
        names = dict.fromkeys(load_file(directory / "a.safetensors"), "a.safetensors")
        for file, tensors in more.items():
            save_file(tensors, directory / f"{file}.safetensors")
        content = {"weight_map": names | (index or {})}
        (directory / "model.safetensors.index.json").write_text(json.dumps(content))

    return change


def only_bin(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def empty_directory(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()


@pytest.mark.parametrize(
    "corrupt, message",
    [
        (lambda d: rewrite(d, lambda t: t.pop(NORM)), f"tensor {NORM} is missing"),
        (
            lambda d: rewrite(d, lambda t: t.update({NORM: torch.ones(63)})),
            rf"{NORM} has shape \(63,\).*\(64,\)",
        ),
        (
            lambda d: rewrite(d, lambda t: t.update({NORM: torch.ones(0)})),
            rf"{NORM} has shape \(0,\).*\(64,\)",
        ),
        (
            write_tensors(model__layers__3__x=torch.ones(1)),
            "model.layers.3.x is no part of the qwen2 model",
        ),
        (
            with_scales,
            (
                "q_proj.weight_scale_inv is no part of .*; the weights are quantized: convert them "
                "to bfloat16"
            ),
        ),
        (
            write_tensors(v_head__weight=torch.ones(1, 64)),
            "v_head.weight is no part of the qwen2 model",
        ),
        (write_tensors(empty=torch.ones(0)), "empty is no part of the qwen2 model"),
        (
            write_tensors(**{f"base_model__{i}__lora_A": torch.ones(1) for i in range(9)}),
            r"base_model\.0\.lora_A, .*base_model\.4\.lora_A and 4 more are no part",
        ),
        (
            lambda d: rewrite(d, lambda t: t.update({NORM: t[NORM].to(torch.int8)})),
            rf"tensors of I8 \({NORM}\); expected float32, bfloat16, float16",
        ),
        (truncate, "model.safetensors: not a readable safetensors file"),
        (
            lambda d: (d / "model.safetensors").write_bytes(b""),
            "model.safetensors: not a readable safetensors file",
        ),
        (empty_directory, "model.safetensors: not a readable safetensors file"),
        (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (only_bin, r"only safetensors weights are read \(there is pytorch_model\.bin\)"),
        (lambda d: (d / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda d: (d / "config.json").unlink(), "config.json cannot be read"),
        (
            to_shards({NORM: "b.safetensors"}),
            r"b\.safetensors: missing, though .*index.json names it",
        ),
        (to_shards({NORM: "../b.safetensors"}), "expected a weight_map"),
        (
            to_shards({NORM: "b.safetensors"}, b={NORM: torch.ones(64)}),
            rf"tensor {NORM} is in b\.safetensors and in a\.safetensors; one of them counts",
        ),
        (
            to_shards({NORM: "b.safetensors"}, b={"x": torch.ones(64)}),
            rf"b\.safetensors: tensor {NORM} is missing, though .*index.json names it",
        ),
        (
            to_shards(
                {"model.x": "b.safetensors"}, b={"model.x": torch.ones(1), "model.y": torch.ones(1)}
            ),
            r"b\.safetensors: tensor model\.y is not in model\.safetensors\.index\.json",
        ),
        (
            lambda d: (d / "model.safetensors.index.json").write_text(
                '{"weight_map": {"model.norm.weight": "no.st"}}'
            ),
            r"holds model\.safetensors and .*index\.json, which names other files; remove one",
        ),
        (
            lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": []}'),
            "expected a weight_map from",
        ),
    ],
)
def test_bad_checkpoint_is_a_one_line_error(tmp_path: Path, corrupt, message: str) -> None:
    start = save_model(tmp_path / "start")
    shape = ModelShape.from_hf_config(HFReader(start).config)
    corrupt(start)
    with pytest.raises(UserError, match=message) as caught:
        HFReader(start).check(shape)
    assert "\n" not in str(caught.value) and str(start) in str(caught.value)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((3, 32, 48), r"gate_up_proj has shape \(3, 32, 48\), config.json describes \(4, 32, 48\)"),
        (None, "is missing"),
    ],
)
def test_experts_in_one_tensor_are_checked(
    tmp_path: Path, size: tuple[int, ...] | None, message: str
) -> None:
    """Check the tensors of the files of gpt_oss, by the number of experts too."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_hidden_layers": 1,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 70}
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt_oss", **sizes, **heads)
    ).save_pretrained(tmp_path)
    reader = HFReader(tmp_path)
    reader.check(reader.shape())
    name = "model.layers.0.mlp.experts.gate_up_proj"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]
        if size is not None:
            tensors[name] = torch.ones(size)

    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=message):
        HFReader(tmp_path).check(reader.shape())


def test_rotary_tables_are_not_weights(tmp_path: Path) -> None:
    """Read an older checkpoint, which has rotary tables in float32 next to weights of another
    dtype."""
    start = save_model(tmp_path / "start", dtype=torch.bfloat16)
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(16) for i in range(3)}
    rewrite(start, lambda tensors: tensors.update(buffers))
    reader = HFReader(start)
    reader.check(reader.shape())
    assert reader.dtype_name() == "bfloat16"


def test_tensors_of_several_types_are_named(tmp_path: Path) -> None:
    start = save_model(tmp_path / "start", dtype=torch.bfloat16)
    rewrite(start, lambda tensors: tensors.update({NORM: tensors[NORM].float()}))
    message = (
        rf"tensors of float32 \({NORM}\), of bfloat16 \(lm_head.weight, model.embed.* and "
        r"\d+ more\); expected"
    )
    with pytest.raises(UserError, match=message):
        HFReader(start).dtype_name()


@pytest.mark.parametrize(
    "name", ["model.layers.2.self_attn.v_proj.weight", "model.embed_tokens.weight"]
)
def test_nonfinite_values_are_counted_by_the_reading_rank(tmp_path: Path, name: str) -> None:
    """Check that only the rank with the block of the nonfinite values raises."""
    start = save_model(tmp_path / "start")

    def set_nonfinite(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][5, :3] = torch.tensor([math.nan, math.inf, -math.inf])

    rewrite(start, set_nonfinite)
    reader = HFReader(start)
    layouts = tp2_pp2(reader.shape())
    num_raised = 0
    for layout in layouts:
        if any(p.tensor == name and p.box[0][0] <= 5 < p.box[0][1] for p in layout.shards):
            num_raised += 1
            with pytest.raises(
                UserError,
                match=rf"model\.safetensors: {name} has values that are not finite .*: 3$",
            ):
                import_all(reader, [layout])
        else:
            import_all(reader, [layout])
    assert num_raised == 1


ATTENTION = [f"model.layers.1.self_attn.{kind}_proj.weight" for kind in "qkv"]
MLP = [f"model.layers.1.mlp.{kind}_proj.weight" for kind in ("gate", "up")]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("all", "lm_head.weight (and 7 more)"),
        (["model.embed_tokens.weight"], "model.embed_tokens.weight"),
        (["lm_head.weight"], "lm_head.weight"),
        (ATTENTION, ", ".join(ATTENTION)),
        (MLP, ", ".join(MLP)),
        ([ATTENTION[0], MLP[0]], None),
        # an identity block
        (["model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight"], None),
        (["model.layers.1.self_attn.q_proj.bias", NORM], None),
    ],
)
def test_matrices_of_zeros_are_refused(tmp_path: Path, names: Any, found: str | None) -> None:
    start = save_model(tmp_path / "start")
    rewrite(
        start,
        lambda tensors: [tensors[name].zero_() for name in (tensors if names == "all" else names)],
    )
    reader = HFReader(start)
    layout = mcore_layout(reader.shape(), 0, 1, range(3), True, True)
    params = {name: torch.zeros(size) for name, size in layout.shapes.items()}
    if found is None:
        import_hf(reader, layout, params)
        return
    with pytest.raises(UserError) as error:
        import_hf(reader, layout, params)
    assert (
        str(error.value)
        == f"{start}: {found}: all values are zero; the checkpoint has not been written completely"
    )


def test_overflow_of_a_sum_is_not_a_nonfinite_value() -> None:
    assert num_not_finite(torch.full((4,), 6e4, dtype=torch.float16)) == 0
    assert num_not_finite(torch.full((4,), 3e38)) == 0
    assert (
        num_not_finite(torch.tensor([math.inf, -math.inf, 1.0, math.nan], dtype=torch.bfloat16))
        == 3
    )
    assert num_not_finite(torch.empty(0)) == 0


def test_values_too_large_for_the_dtype_are_counted(tmp_path: Path) -> None:
    start = save_model(tmp_path / "start")
    rewrite(start, lambda tensors: tensors[NORM][:2].fill_(1e5))
    reader = HFReader(start)
    import_all(reader, tp2_pp2(reader.shape()))
    with pytest.raises(UserError, match=rf"{NORM} has values too large for float16: 2$"):
        import_all(reader, tp2_pp2(reader.shape()), dtype=torch.float16)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    start = save_model(tmp_path / "start", max_shard_size="100KB")
    reader = HFReader(start)
    gone = sorted(start.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UserError, match=f"{gone.name}: missing, though"):
        reader.check(ModelShape.from_hf_config(reader.config))


def test_error_in_config_json_names_its_directory(tmp_path: Path) -> None:
    start = save_model(tmp_path / "start")
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(config | {"partial_rotary_factor": 0.5}))
    with pytest.raises(
        UserError, match=rf"^{start}/config\.json: partial_rotary_factor is 0\.5; only 1"
    ):
        HFReader(start).shape()
    (start / "config.json").write_text(json.dumps(config))
    (start / "hf_quant_config.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"hf_quant_config\.json: quantized weights are not supported"
    ):
        HFReader(start).shape()


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        HFReader(tmp_path / "nowhere")
