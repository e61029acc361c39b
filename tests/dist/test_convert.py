"""The two converters as command-line programs: a bit-exact round trip, any layout, and one line for
inputs that cannot be converted."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import forked
import model_cases
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
SOURCES: dict[str, dict[str, Any]] = {
    "tied_float32": {"family": "qwen2", "tied": True},
    "untied_bfloat16": {"family": "llama", "tied": False, "attention_bias": True, "mlp_bias": True},
    # its files have all experts in one tensor
    "untied_bfloat16_gpt_oss": {"family": "gpt_oss", "tied": False},
    "untied_float32_latent": {"family": "deepseek_v3", "tied": False},
    # its routers' correction biases are float32
    "tied_bfloat16_qwen3_5": {"family": "qwen3_5_text", "tied": True},
    "untied_bfloat16_glm": {"family": "glm4_moe", "tied": False},
}


def run_tool(
    name: str, largest_file: int | None = None, **options: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run a tool in one process. Files are limited to `largest_file` bytes, also for the writer's
    own processes."""
    return forked.run(
        [str(ROOT / "tools" / name), *command_line(options)], largest_file=largest_file
    )


def run_tool_on_two_ranks(name: str, **options: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a tool as torchrun starts it. Return both ranks' output, and a nonzero exit code if there
    was one."""
    return forked.run_ranks(2, [str(ROOT / "tools" / name), *command_line(options)])


def command_line(options: dict[str, str | Path]) -> list[str]:
    return [
        part
        for key, value in options.items()
        for part in (f"--{key.replace('_', '-')}", str(value))
    ]


def to_mcore(source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    return run_tool("convert_hf_to_mcore.py", hf_path=source, output=output)


def to_hf(checkpoint: Path, output: Path) -> subprocess.CompletedProcess[str]:
    return run_tool("convert_mcore_to_hf.py", checkpoint=checkpoint, output=output)


def lines_of(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines on stdout but for those of progress, which a slow machine has."""
    return [line for line in result.stdout.splitlines() if not line.startswith("  ")]


def assert_one_line(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Check for exit code 2 and one line on stderr that contains the parts."""
    assert result.returncode == 2, result.stderr
    assert lines_of(result) == []
    (line,) = result.stderr.splitlines()
    assert ": error: " in line
    for part in parts:
        assert part in line


def is_float32(name: str) -> bool:
    """Return whether a tensor is float32 in a model of any type."""
    return name.endswith("e_score_correction_bias")


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return for each source its Hugging Face and its Megatron checkpoint."""
    root = tmp_path_factory.mktemp("convert")
    out = {}
    for name, extra in SOURCES.items():
        source = make_checkpoint(root / name, **extra)
        output = root / f"{name}_mcore"
        if "bfloat16" in name:
            file = source / "model.safetensors"
            tensors = {
                key: tensor if is_float32(key) else tensor.bfloat16()
                for key, tensor in load_file(file).items()
            }
            save_file(tensors, file, {"format": "pt"})
        result = to_mcore(source, output)
        assert (result.returncode, result.stderr) == (0, "")
        assert len(lines_of(result)) == 1
        out[name] = (source, output)
    return out


@pytest.mark.parametrize("name", SOURCES)
def test_round_trip_is_bit_exact(
    converted: dict[str, tuple[Path, Path]], tmp_path: Path, name: str
) -> None:
    source, checkpoint = converted[name]
    result = to_hf(checkpoint, tmp_path / "back")
    assert (result.returncode, result.stderr) == (0, "")
    assert len(lines_of(result)) == 1
    wanted = load_file(source / "model.safetensors")
    got = load_file(tmp_path / "back" / "model.safetensors")
    assert got.keys() == wanted.keys()
    assert ("lm_head.weight" in got) == name.startswith("untied")
    for key, tensor in wanted.items():
        assert got[key].dtype == tensor.dtype
        assert is_float32(key) or tensor.dtype == getattr(torch, name.split("_")[1])
        assert torch.equal(got[key], tensor), key
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()


@pytest.mark.parametrize(("world", "tp", "pp"), [(2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 4, 1)])
def test_megatron_checkpoint_loads_into_any_layout(
    pool: Any, converted: dict[str, tuple[Path, Path]], world: int, tp: int, pp: int
) -> None:
    for name, (source, checkpoint) in converted.items():
        if name.endswith(("glm", "gpt_oss", "latent")) and tp > 1:
            continue  # experts need sequence parallelism, which the converters do not set
        different = pool(world).run(
            model_cases.params_unlike_hf,
            checkpoint=str(source),
            converted=str(checkpoint),
            tp=tp,
            pp=pp,
        )
        assert different == [[]] * world


def test_converters_on_two_ranks_write_the_same_tensors(
    converted: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """Convert by tensor parallel ranks, and back by pipeline stages into several files with an
    index."""
    source = converted["tied_float32"][0]
    to = run_tool_on_two_ranks(
        "convert_hf_to_mcore.py",
        hf_path=source,
        output=tmp_path / "mcore",
        tensor_model_parallel_size="2",
    )
    assert to.returncode == 0 and to.stdout.count("parameters") == 1, to.stderr
    back = run_tool_on_two_ranks(
        "convert_mcore_to_hf.py",
        checkpoint=tmp_path / "mcore",
        output=tmp_path / "hf",
        max_shard_gb="0.0005",
    )
    assert back.returncode == 0 and back.stdout.count("parameters") == 1, back.stderr
    files = sorted((tmp_path / "hf").glob("model-*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 600_000 for file in files)
    got = {name: tensor for file in files for name, tensor in load_file(file).items()}
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == got.keys()
    wanted = load_file(source / "model.safetensors")
    assert got.keys() == wanted.keys() and all(
        torch.equal(got[name], wanted[name]) for name in wanted
    )


def test_world_size_that_does_not_divide_is_rejected(
    converted: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    options = {"hf_path": converted["tied_float32"][0], "output": tmp_path / "output"}
    assert_one_line(
        run_tool("convert_hf_to_mcore.py", tensor_model_parallel_size="2", **options),
        "tensor-model-parallel-size 2 x pipeline-model-parallel-size 1",
        "does not divide the 1 processes",
    )
    assert not (tmp_path / "output").exists()


def test_checkpoint_of_another_architecture_is_rejected(
    pool: Any, converted: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    tied, tied_mcore = converted["tied_float32"]
    fewer = make_checkpoint(tmp_path / "fewer", num_hidden_layers=2)
    untied = make_checkpoint(tmp_path / "untied", tied=False)
    (message,) = pool(1).run(
        model_cases.error_of_loading, checkpoint=str(fewer), converted=str(tied_mcore)
    )
    assert "layers" in message and "another architecture" in message
    (message,) = pool(1).run(
        model_cases.error_of_loading, checkpoint=str(untied), converted=str(tied_mcore)
    )
    assert "holds no tensor model.output_layer.weight" in message
    untied_mcore = converted["untied_bfloat16"][1]
    (message,) = pool(1).run(
        model_cases.error_of_loading, checkpoint=str(tied), converted=str(untied_mcore)
    )
    assert "is no part of the model" in message


@pytest.mark.parametrize(
    ("tp", "pp", "ranks", "layer"),
    [(2, 1, [0], None), (2, 1, [0, 1], 0), (1, 2, [0], 0), (1, 2, [1], 2)],
)
def test_matrices_of_zeros_are_refused(
    pool: Any,
    converted: dict[str, tuple[Path, Path]],
    tmp_path: Path,
    tp: int,
    pp: int,
    ranks: list[int],
    layer: Any,
) -> None:
    """Refuse a matrix that is zero on all of its ranks, by its number in the whole model."""
    where = {"checkpoint": str(converted["tied_float32"][0]), "directory": str(tmp_path / "zeros")}
    messages = pool(2).run(model_cases.error_of_loading_zeros, **where, tp=tp, pp=pp, ranks=ranks)
    name = f"model.decoder.layers.{layer}.self_attention.linear_qkv.weight"
    refused = (
        f"{tmp_path / 'zeros'}: tensor {name}: all values are zero; the checkpoint has not been "
        "written completely"
    )
    assert set(messages) == {"no error" if layer is None else refused}


def test_nonfinite_weights_are_rejected(
    pool: Any, converted: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """Read them in a run that loads a Megatron checkpoint, and in the converters."""
    source = converted["tied_float32"][0]
    directory = tmp_path / "with_nan"
    messages = set(
        pool(2).run(
            model_cases.error_of_loading_nan, checkpoint=str(source), directory=str(directory), tp=2
        )
    )
    name = "model.decoder.layers.1.mlp.linear_fc2.weight"
    assert messages == {
        f"{directory}: tensor {name} has values that are not finite (NaN or infinite): 1"
    }
    assert_one_line(
        to_hf(directory, tmp_path / "hf"), f"tensor {name} has values that are not finite"
    )
    file = Path(shutil.copytree(source, tmp_path / "source")) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][:] = float("inf")
    # A rotary table is not a weight, so its values do not matter.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full(
        (16,), float("nan"), dtype=torch.bfloat16
    )
    save_file(tensors, file, {"format": "pt"})
    assert_one_line(
        to_mcore(file.parent, tmp_path / "mcore"),
        "model.norm.weight has values that are not finite (NaN or infinite): 128",
    )


@pytest.mark.parametrize("file", [".metadata", "metadata.json", "common.pt", "__0_0.distcp"])
def test_corrupt_checkpoint_is_rejected(
    pool: Any, converted: dict[str, tuple[Path, Path]], tmp_path: Path, file: str
) -> None:
    source, checkpoint = converted["tied_float32"]
    intact = (checkpoint / file).read_bytes()
    corruptions = {
        "missing": None,
        "directory": None,
        "garbage": b"garbage",
        "number": b"5",
        "truncated": intact[: len(intact) // 2],
    }
    for corruption, content in corruptions.items():
        broken = shutil.copytree(checkpoint, tmp_path / corruption)
        (broken / file).unlink()
        if content is not None:
            (broken / file).write_bytes(content)
        elif corruption == "directory":
            (broken / file).mkdir()
        (message,) = pool(1).run(
            model_cases.error_of_loading, checkpoint=str(source), converted=str(broken)
        )
        assert str(broken) in message and "\n" not in message and message != "no error"


def test_invalid_hugging_face_checkpoints_are_rejected(tmp_path: Path) -> None:
    output = tmp_path / "output"
    assert_one_line(
        to_mcore(tmp_path / "missing", output), "no such directory", str(tmp_path / "missing")
    )
    source = make_checkpoint(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    assert_one_line(to_mcore(source, output), "model_type", "gpt2")
    (source / "config.json").write_text(json.dumps({**config, "hidden_size": 256}))
    assert_one_line(to_mcore(source, output), "shape", "config.json")
    (source / "model.safetensors").unlink()
    assert_one_line(to_mcore(source, output), "only safetensors weights are read")
    assert not output.exists()


def test_full_disk_is_one_line_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    size = (source / "model.safetensors").stat().st_size
    result = run_tool(
        "convert_hf_to_mcore.py", largest_file=size // 4, hf_path=source, output=tmp_path / "output"
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert "the weights cannot be written" in result.stderr.splitlines()[-1]
    assert_one_line(to_hf(tmp_path / "output", tmp_path / "back"), "not a Megatron checkpoint")


def test_invalid_megatron_checkpoints_are_rejected(
    converted: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    assert_one_line(
        to_hf(tmp_path / "missing", output), "not a Megatron checkpoint", str(tmp_path / "missing")
    )
    other = shutil.copytree(converted["tied_float32"][1], tmp_path / "other")
    config = json.loads((other / "hf" / "config.json").read_text())
    (other / "hf" / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    assert_one_line(to_hf(other, output), "another architecture")
    assert not output.exists()


def test_existing_checkpoint_is_replaced(
    converted: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """Check that no file of the older checkpoint stays and that no warning is printed."""
    target = shutil.copytree(converted["untied_bfloat16"][1], tmp_path / "target")
    (target / "hf" / "merges.txt").write_text("of the older one")
    result = to_mcore(converted["tied_float32"][0], target)
    assert (result.returncode, result.stderr) == (0, "")
    assert not (target / "hf" / "merges.txt").exists()
    back = to_hf(target, tmp_path / "back")
    assert (back.returncode, back.stderr) == (0, "")
    wanted = load_file(converted["tied_float32"][0] / "model.safetensors")
    got = load_file(tmp_path / "back" / "model.safetensors")
    assert got.keys() == wanted.keys() and all(torch.equal(got[key], wanted[key]) for key in wanted)
