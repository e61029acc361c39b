"""Export of Hugging Face checkpoints: a bit-exact round trip through a simulated TP 2 x PP 2,
files, and failures."""

from __future__ import annotations

import json
import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_checkpoints import (
    CONFIGS,
    all_tensors,
    assert_same_bits,
    import_all,
    merge_ranks,
    save_model,
    tp2_pp2,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint import hf_export
from rlhf_mc.checkpoint.hf_export import export_hf
from rlhf_mc.checkpoint.hf_format import HFReader
from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.layout import mcore_layout


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_is_bit_exact(tmp_path: Path, name: str, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    start = save_model(tmp_path / "start", name, dtype)
    reader = HFReader(start)
    shape = ModelShape.from_hf_config(reader.config)
    reader.check(shape)
    layouts = tp2_pp2(shape)
    ranks = import_all(reader, layouts, dtype=dtype)
    assert (ranks[1]["embedding.word_embeddings.weight"][447 - 224 :] == 7).all(), (
        "padding was touched"
    )
    params, layout = merge_ranks(ranks, layouts)
    export_hf(params, [layout], shape, tmp_path / "end", dtype_name, start)
    assert_same_bits(all_tensors(tmp_path / "end"), all_tensors(start))
    with safe_open(tmp_path / "end" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    before, after = (AutoModelForCausalLM.from_pretrained(d) for d in (start, tmp_path / "end"))
    tokens = torch.arange(12)[None]
    assert after.dtype == dtype and torch.equal(before(tokens).logits, after(tokens).logits)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("per_expert", [False, True])
def test_round_trip_of_a_language_model_among_images_is_bit_exact(
    tmp_path: Path, family: str, per_expert: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Export all tensors of the initial checkpoint, those for images copied. Files with tensors for
    each expert, which transformers writes, are read too; an export has those of a layer in one."""
    start = make_checkpoint(tmp_path / "start", family, tied=False, num_hidden_layers=3)
    wanted = all_tensors(start)
    if per_expert:
        save_file(by_expert(wanted), start / "model.safetensors", {"format": "pt"})
    reader = HFReader(start)
    shape = reader.shape()
    reader.check(shape)
    assert reader.dtype_name() == "float32"
    layout = mcore_layout(shape, 0, 1, range(3), True, True)
    (params,) = import_all(reader, [layout])
    export_hf(params, [layout], shape, tmp_path / "end", "float32", start)
    assert_same_bits(all_tensors(tmp_path / "end"), wanted)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "end")
    assert "weights for images" not in caplog.text
    for file in start.glob("*.safetensors"):
        file.unlink()
    export_hf(params, [layout], shape, tmp_path / "alone", "float32", start)
    language = {name: x for name, x in wanted.items() if not name.startswith("model.visual.")}
    assert_same_bits(all_tensors(tmp_path / "alone"), language)
    assert "the weights for images are not written" in caplog.text


def by_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with those of all experts of a layer apart."""
    out = {}
    for name, tensor in tensors.items():
        layer, is_packed, part = name.partition(".experts.")
        halves = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for expert, of_expert in enumerate(tensor) if is_packed else ():
            for half, rows in zip(halves, of_expert.chunk(len(halves)), strict=True):
                out[f"{layer}.experts.{expert}.{half}.weight"] = rows.contiguous()
        if not is_packed:
            out[name] = tensor
    return out


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 50_000])
def test_layers_of_multi_token_prediction_are_kept(tmp_path: Path, max_shard_bytes: int) -> None:
    """Copy the layers after the model's last one, in a type of their own, as far as config.json
    says that there are any, and what is named "mtp"."""
    start = save_model(tmp_path / "start")
    names = ("model.layers.3.eh_proj.weight", "model.layers.3.x.weight", "mtp.layers.0.x.weight")
    draft = {name: torch.randn(100, 100).bfloat16() for name in names}
    save_file(
        {**load_file(start / "model.safetensors"), **draft},
        start / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((start / "config.json").read_text())
    shape = ModelShape.from_hf_config(config)
    with pytest.raises(
        UserError,
        match=r"model\.layers\.3\.eh_proj.weight, model\.layers\.3\.x\.weight are no part",
    ):
        HFReader(start).check(shape)
    (start / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    reader = HFReader(start)
    reader.check(shape)
    assert reader.dtype_name() == "float32"
    layouts = tp2_pp2(shape)
    params, layout = merge_ranks(import_all(reader, layouts), layouts)
    for end in ("end", "again"):
        export_hf(params, [layout], shape, tmp_path / end, "float32", start, max_shard_bytes)
        assert_same_bits(all_tensors(tmp_path / end), all_tensors(start))
        start = tmp_path / end
    index = json.loads((tmp_path / "end" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in all_tensors(start).values()
    )
    value = replace(shape, value_head=True, tie_embeddings=False)
    assert (
        hf_export._draft_files(start, value, 1) == hf_export._draft_files(tmp_path, shape, 1) == []
    )


def test_rank_reads_only_its_own_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the elements that are sliced from the file: those of the rank's parameters, without
    padding."""
    reader = HFReader(save_model(tmp_path / "start"))
    shape = ModelShape.from_hf_config(reader.config)
    read: list[int] = []

    class Counting:
        def __init__(self, found) -> None:
            self.found = found
            self.get_shape = found.get_shape

        def __getitem__(self, index):
            block = self.found[index]
            read.append(block.numel())
            return block

    original = HFReader.slices
    monkeypatch.setattr(
        HFReader,
        "slices",
        lambda self, names: {n: Counting(f) for n, f in original(self, names).items()},
    )
    total = sum(t.numel() for t in all_tensors(tmp_path / "start").values())
    for layout in tp2_pp2(shape):
        read.clear()
        import_all(reader, [layout])
        num_own = sum(math.prod(b - a for a, b in shard.box) for shard in layout.shards)
        assert sum(read) == num_own < 0.5 * total


def test_export_holds_one_file_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = save_model(tmp_path / "start")
    reader = HFReader(start)
    shape = ModelShape.from_hf_config(reader.config)
    params, layout = merge_ranks(import_all(reader, tp2_pp2(shape)), tp2_pp2(shape))
    alive: list[weakref.ref] = []
    largest = 0

    def save(tensors: dict[str, torch.Tensor], file: Path, subject: str) -> None:
        nonlocal largest
        assert all(ref() is None for ref in alive), "an earlier file's tensors are still held"
        alive.extend(weakref.ref(t) for t in tensors.values())
        largest = max(largest, sum(t.nbytes for t in tensors.values()))

    monkeypatch.setattr(hf_export, "_save", save)
    monkeypatch.setattr(hf_export, "_finish", lambda *args: None)
    export_hf(params, [layout], shape, tmp_path / "end", "float32", start, 120_000)
    assert len(alive) == len(all_tensors(start)) and 0 < largest <= 120_000


def test_sharded_files_are_read_and_written(tmp_path: Path) -> None:
    start = save_model(tmp_path / "start", max_shard_size="100KB")
    assert not (start / "model.safetensors").exists()
    reader = HFReader(start)
    shape = ModelShape.from_hf_config(reader.config)
    reader.check(shape)
    params, layout = merge_ranks(import_all(reader, tp2_pp2(shape)), tp2_pp2(shape))
    end = tmp_path / "end"
    # the second export replaces the first, which has more files
    for max_shard_bytes in (50_000, 120_000):
        export_hf(params, [layout], shape, end, "float32", start, max_shard_bytes)
    files = sorted(end.glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    assert all(f.stat().st_size < 125_000 for f in files)
    index = json.loads((end / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in all_tensors(start).values())
    assert_same_bits(all_tensors(end), all_tensors(start))
    HFReader(end).check(shape)
    assert AutoModelForCausalLM.from_pretrained(end).lm_head.weight.shape == (447, 64)


def test_export_casts_and_copies_the_tokenizer(tmp_path: Path) -> None:
    start = save_model(tmp_path / "start", "qwen2-tied")
    (start / "tokenizer.json").write_text("{}")
    reader = HFReader(start)
    shape = ModelShape.from_hf_config(reader.config)
    params, layout = merge_ranks(import_all(reader, tp2_pp2(shape)), tp2_pp2(shape))
    export_hf(params, [layout], shape, tmp_path / "end", "bfloat16", start)
    assert_same_bits(
        all_tensors(tmp_path / "end"), {n: t.bfloat16() for n, t in all_tensors(start).items()}
    )
    config = json.loads((tmp_path / "end" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and config["tie_word_embeddings"] is True
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "end").dtype == torch.bfloat16
    assert {f.name for f in (tmp_path / "end").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_critic_is_exported_as_a_classifier(tmp_path: Path) -> None:
    start = save_model(tmp_path / "start", "qwen2-tied")
    reader = HFReader(start)
    shape = ModelShape.from_hf_config(reader.config, value_head=True)
    reader.check(shape)
    assert "score.weight" not in reader.names
    ranks = import_all(reader, tp2_pp2(shape), skip={"score.weight"})
    assert all(
        (r["output_layer.weight"] == 7).all() and r["output_layer.weight"].shape == (1, 64)
        for r in ranks[2:]
    )
    assert "output_layer.weight" not in ranks[0]
    params, layout = merge_ranks(ranks, tp2_pp2(shape))
    export_hf(params, [layout], shape, tmp_path / "end", "float32", start)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "end")
    assert again.num_labels == 1 and (again.score.weight == 7).all()
    assert torch.equal(again.model.norm.weight, all_tensors(start)["model.norm.weight"])
    reader = HFReader(tmp_path / "end")
    reader.check(shape)
    assert "score.weight" in reader.names
    with pytest.raises(UserError, match=r"score\.weight is missing"):
        import_all(HFReader(start), tp2_pp2(shape))


def test_failed_export_leaves_the_previous_one(tmp_path: Path, monkeypatch) -> None:
    start = save_model(tmp_path / "start")
    reader = HFReader(start)
    shape = ModelShape.from_hf_config(reader.config)
    params, layout = merge_ranks(import_all(reader, tp2_pp2(shape)), tp2_pp2(shape))
    end = tmp_path / "end"
    export_hf(params, [layout], shape, end, "float32", start)

    def disk_full(*_, **__) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlhf_mc.checkpoint.hf_export.save_file", disk_full)
    with pytest.raises(UserError, match=r"failed on rank 0: .*No space left on device"):
        export_hf(params, [layout], shape, end, "bfloat16", start)
    HFReader(end).check(shape)
    assert_same_bits(all_tensors(end), all_tensors(start))
