"""LoRA: adapters train as the weights W + s B A of a full model would, in each family and layout,
and leave the base and its results as they are."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import cases
import forked
import lora_cases
import pytest
import torch
from gpu_parts.engines import Job
from gpu_parts.reference import Reference, by_checkpoint_names
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_family_models import DENSE, EXPERTS, HYBRID, family_batch, workspaces
from test_resume import SETTINGS, UninterruptedRuns, assembled, metrics
from tiny import make_checkpoint, make_workspace, write_config
from transformers import AutoModelForCausalLM

from rlhf_mc.data.batch import RaggedBatch

__all__ = ["family_batch", "workspaces"]

pytestmark = pytest.mark.dist

RANK = 3
ALPHA = 12.0


def trained(
    workers: Any,
    checkpoint: str,
    batch: RaggedBatch,
    directory: Path,
    layout: dict[str, int] | None = None,
    lora: dict[str, Any] | None = None,
    **megatron: Any,
) -> list[dict[str, Any]]:
    """Train the actor's adapters for a step, and write them. Return every rank's result."""
    results: list[dict[str, Any]] = workers.run(
        lora_cases.train_adapters,
        checkpoint=checkpoint,
        role="actor",
        lora={"rank": RANK, "alpha": ALPHA, **(lora or {})},
        batch=batch,
        directory=str(directory),
        layout=layout or {},
        **megatron,
    )
    return results


def check(
    workers: Any,
    workspace: Path,
    batch: RaggedBatch,
    directory: Path,
    layout: dict[str, int],
    lora: dict[str, Any] | None = None,
    **megatron: Any,
) -> None:
    """Compare every rank's log-probs with transformers' of the exported model, and its gradients
    with A's = s B^T dW and B's = s dW A^T of transformers' gradients dW."""
    checkpoint = str(workspace / "model")
    results = trained(workers, checkpoint, batch, directory, layout, lora, **megatron)
    merged = Reference(str(directory))
    start = Reference(checkpoint)
    with torch.no_grad():
        wanted = merged.log_probs(batch)[0]
        base = start.log_probs(batch)[0]
    every = tuple(range(batch.num_sequences))
    kind = merged.model.config.model_type
    job = Job(str(directory), "actor", "token-mean", 24, every)
    full = by_checkpoint_names(merged.gradients(batch, job)[1], kind)
    for rank, result in enumerate(results):
        assert (result["scores"] - wanted).abs().max() < 2e-5, rank
        assert (result["reference"] - base).abs().max() < 2e-5, rank
        # B = 0 computes what the base computes
        assert torch.equal(result["zero"], result["reference"]), rank
        before = result["before"]
        after = result["after"]
        adapters = result["adapters"]
        assert adapters and not any("embed" in name for name in adapters)
        for name, tensor in before.items():
            changed = not torch.equal(tensor, after[name])
            assert changed == (name in adapters), f"rank {rank}, {name}"
            assert torch.equal(tensor, result["reread"][name]), name
        total = 0.0
        for name in adapters:
            module, part, _ = name.rsplit(".", 2)
            gradient = full[f"{module}.weight"]
            other = before[f"{module}.lora_{'B' if part == 'lora_A' else 'A'}.weight"]
            want = other.T @ gradient if part == "lora_A" else gradient @ other.T
            want *= ALPHA / RANK
            total += float(want.square().sum())
            got = result["gradients"][name]
            error = float((got - want).abs().max() / want.abs().max().clamp_min(1e-12))
            assert error < 2e-4, f"rank {rank}, {name}: off by {error:.1e} of the largest"
        assert result["grad_norm"] == pytest.approx(total**0.5, rel=1e-4)


@pytest.mark.parametrize("world", [1])
@pytest.mark.parametrize("family", [*DENSE, *HYBRID, *EXPERTS])
def test_adapters_have_the_gradients_of_the_merged_weights(
    pool: Any,
    workspaces: dict[str, Path],
    family_batch: RaggedBatch,
    tmp_path: Path,
    world: int,
    family: str,
) -> None:
    check(pool(world), workspaces[family], family_batch, tmp_path, {})


SEQUENCE_PARALLEL = {"sequence_parallel": True}
SOME = {"target_modules": ["q_proj", "v_proj", "up_proj"]}


@pytest.mark.parametrize(
    ("world", "family", "layout", "settings"),
    [
        (2, "qwen3", {"tp": 2}, {}),
        (2, "qwen3", {"tp": 2}, SEQUENCE_PARALLEL | {"recompute_granularity": "full"}),
        (2, "qwen3", {"tp": 2}, {"lora": SOME}),
        (2, "qwen3", {"pp": 2}, {"lora": SOME, "recompute_granularity": "selective"}),
        (2, "gemma", {"cp": 2}, {"lora": {"exclude_modules": ["o_proj", "down_proj"]}}),
        (2, "qwen3_5", {"tp": 2}, SEQUENCE_PARALLEL),
        (2, "qwen3_5", {"tp": 2}, {}),
        (2, "deepseek_v3", {"tp": 2}, SEQUENCE_PARALLEL),
        (2, "deepseek_v3", {"ep": 2}, {}),
        (2, "gpt_oss", {"tp": 2}, SEQUENCE_PARALLEL),
        (2, "glm4_moe", {"pp": 2}, {}),
        # more ranks than KV heads
        (4, "qwen3", {"tp": 4}, SEQUENCE_PARALLEL | {"lora": SOME}),
        (4, "qwen3_moe", {"tp": 2, "ep": 2}, SEQUENCE_PARALLEL),
        (4, "mixtral", {"ep": 2, "cp": 2}, {}),
    ],
)
def test_adapters_in_every_layout(
    pool: Any,
    workspaces: dict[str, Path],
    family_batch: RaggedBatch,
    tmp_path: Path,
    world: int,
    family: str,
    layout: dict[str, int],
    settings: dict[str, Any],
) -> None:
    check(pool(world), workspaces[family], family_batch, tmp_path, layout, **settings)


ADAPTERS = ["actor.lora.rank=4", "actor.optim.lr=5e-3", "reshard.verify=always"]


@pytest.mark.parametrize(
    ("world", "family", "layout", "settings"),
    [
        (2, "qwen3", (2, 1, 1), []),
        (2, "qwen3", (1, 2, 2), ["critic.lora.rank=2"]),
        (2, "gpt_oss", (1, 1, 2), ["actor.megatron.expert_model_parallel_size=2"]),
        (2, "deepseek_v3", (1, 1, 2), []),
        (2, "qwen3_5", (1, 1, 1), ["actor.megatron.dtype=bfloat16"]),
    ],
)
def test_vllm_has_the_merged_weights(
    pool: Any,
    workspaces: dict[str, Path],
    tmp_path: Path,
    world: int,
    family: str,
    layout: tuple[int, int, int],
    settings: list[str],
) -> None:
    """Run two PPO steps: vLLM's weights are those of the exported model, its log-probs are
    Megatron's, the base is unchanged, and the first reference log-probs are the actor's."""
    directory = workspaces[family]
    config = write_config(directory, f"lora_{len(settings)}.yaml", actor={"ppo_epochs": 1})
    results = cases.run_two_steps(pool(world), config, layout, tmp_path, [*ADAPTERS, *settings])
    most = 1e-4 if "bfloat16" not in str(settings) else 0.1
    for result in results:
        assert result["different"] == [] and result["shared"] == []
        first, second = result["steps"]
        for step in (first, second):
            assert step["training/rollout_logprobs_diff_max"] < most
        kl = "actor/reward_kl_penalty"
        assert abs(first[kl]) < 1e-6 < abs(second[kl])
        assert not any(line.startswith("ref") for line in result["headlines"])
        text = " ".join(line.strip() for line in result["headlines"])
        assert "reference: the actor without its adapters" in text
    start, end = (cases.exported_weights(str(path)) for path in (directory / "model", tmp_path))
    changed = {
        name
        for name, weight in end.items()
        if not torch.equal(start[name].to(weight.dtype), weight)
    }
    constant = (
        "norm",
        "embed",
        "lm_head",
        "router",
        "bias",
        "sinks",
        ".gate.",
        "conv1d",
        "A_log",
        "visual",
    )
    assert changed == {name for name in end if not any(part in name for part in constant)}


@pytest.fixture(scope="module")
def runs(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> UninterruptedRuns:
    """Return runs whose actor and critic have adapters."""
    root = tmp_path_factory.mktemp("lora")
    settings = copy.deepcopy(SETTINGS)
    settings["actor"] |= {"lora": {"rank": 4}}
    settings["critic"] |= {"lora": {"rank": 3, "exclude_modules": ["down_proj"]}}
    return UninterruptedRuns(pool, write_config(make_workspace(root), **settings), root)


@pytest.mark.parametrize(("source", "layout"), [("TP 2", "TP 2"), ("TP 2", "one rank")])
def test_resumes_with_adapters(
    runs: UninterruptedRuns, tmp_path: Path, source: str, layout: str
) -> None:
    """Resume from a checkpoint that has the adapters, the value head and their optimizer state
    alone."""
    resumed = runs.resumed(source, layout, tmp_path)
    then = assembled(resumed, "then")
    saved = assembled(runs.results(source), "then")
    assert then.keys() == saved.keys()
    assert all((then[key] == saved[key]).all() for key in then)
    tensors = {key.split(".", 2)[2] for key in then if not key.endswith(" is filled")}
    assert all(".lora_" in name or name == "score.weight" for name in tensors)
    assert sum("critic.exp_avg_sq" in key for key in then) > 20
    mine = metrics(tmp_path)
    theirs = metrics(runs.directory(source))
    if layout == source:
        assert mine == theirs
    for step in (3, 4):
        for key in ("actor/loss", "critic/vf_loss", "actor/grad_norm", "actor/reward_kl_penalty"):
            assert mine[step][key] == pytest.approx(theirs[step][key], rel=2e-4, abs=2e-6), key


def test_training_checkpoint_is_converted(runs: UninterruptedRuns, tmp_path: Path) -> None:
    runs.results("TP 2")
    run = runs.directory("TP 2")
    tool = str(Path(__file__).parents[2] / "tools" / "convert_mcore_to_hf.py")
    done = forked.run([tool, "--checkpoint", str(run / "global_step_4"), "--output", str(tmp_path)])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    exported = load_file(run / "hf" / "model.safetensors")
    converted = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == converted.keys()
    for name, tensor in exported.items():
        assert torch.allclose(tensor, converted[name], rtol=0, atol=1e-7), name
    base = AutoModelForCausalLM.from_pretrained(runs.config.parent / "model")
    adapted = PeftModel.from_pretrained(base, run / "hf" / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(run / "hf")
    tokens = torch.arange(1, 30)[None]
    with torch.no_grad():
        assert torch.allclose(adapted(tokens).logits, merged(tokens).logits, rtol=0, atol=1e-5)


def test_weights_below_adapters_are_those_that_the_run_has_read(
    runs: UninterruptedRuns, tmp_path: Path
) -> None:
    """Convert a step of a run that has read them from a Megatron checkpoint, which are not those of
    model.path."""
    tools = Path(__file__).parents[2] / "tools"
    other = make_checkpoint(tmp_path / "other", seed=7)
    mcore = tmp_path / "mcore"
    to_mcore = ["--hf-path", str(other), "--output", str(mcore)]
    assert forked.run([str(tools / "convert_hf_to_mcore.py"), *to_mcore]).returncode == 0
    settings = [f"model.dist_checkpointing_path={mcore}", "trainer.total_training_steps=1"]
    runs.train("one rank", tmp_path / "run", [*settings, "trainer.save_freq=1"])
    saved = str(tmp_path / "run" / "global_step_1")
    to_hf = [str(tools / "convert_mcore_to_hf.py"), "--checkpoint", saved]
    done = forked.run([*to_hf, "--output", str(tmp_path / "wrong")])
    assert done.returncode == 2 and f"are in {mcore} (model.dist_check" in done.stderr, done.stderr
    assert not (tmp_path / "wrong").exists()
    done = forked.run([*to_hf, "--output", str(tmp_path / "right"), "--hf-path", str(other)])
    assert (done.returncode, done.stderr) == (0, "")
    exported = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    converted = load_file(tmp_path / "right" / "model.safetensors")
    for name, tensor in exported.items():
        assert torch.allclose(tensor, converted[name], rtol=0, atol=1e-7), name


@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_peft_computes_the_same(
    pool: Any,
    workspaces: dict[str, Path],
    family_batch: RaggedBatch,
    tmp_path: Path,
    family: str,
) -> None:
    """Load the written adapter with PEFT: log-probs, and the gradients of A and B."""
    checkpoint = str(workspaces[family] / "model")
    lora = {"exclude_modules": ["k_proj"]}
    (result,) = trained(pool(1), checkpoint, family_batch, tmp_path, lora=lora)
    reference = Reference(checkpoint)
    assert not result["warnings"]
    adapter = PeftModel.from_pretrained(reference.model, tmp_path / "adapter", is_trainable=True)
    assert adapter.peft_config["default"].base_model_name_or_path == checkpoint
    with torch.no_grad():
        assert (reference.log_probs(family_batch)[0] - result["scores"]).abs().max() < 2e-5
    every = tuple(range(family_batch.num_sequences))
    job = Job(checkpoint, "actor", "token-mean", 24, every)
    gradients = {
        name.replace(".default", ""): x
        for name, x in reference.gradients(family_batch, job)[1].items()
    }
    assert {name for name in gradients if ".lora_" in name} == set(result["adapters"])
    for name in result["adapters"]:
        error = (gradients[name] - result["gradients"][name]).abs().max() / gradients[
            name
        ].abs().max()
        assert error < 2e-4, name


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_peft_has_the_adapters_of_experts(
    pool: Any,
    workspaces: dict[str, Path],
    family_batch: RaggedBatch,
    tmp_path: Path,
    family: str,
) -> None:
    """Load the written adapter with PEFT, which finds the experts in one module of transformers'
    model."""
    checkpoint = str(workspaces[family] / "model")
    (result,) = trained(pool(1), checkpoint, family_batch, tmp_path)
    assert "PEFT finds the adapters of experts of qwen3_moe" in result["warnings"][0]
    reference = Reference(checkpoint)
    PeftModel.from_pretrained(reference.model, tmp_path / "adapter")
    with torch.no_grad():
        assert (reference.log_probs(family_batch)[0] - result["scores"]).abs().max() < 2e-5


def test_adapters_that_do_not_fit_are_refused(
    pool: Any, workspaces: dict[str, Path], family_batch: RaggedBatch, tmp_path: Path
) -> None:
    """Read adapters of another rank, model or method, with a NaN, with a tensor too few or too
    many: one line that names it, on every rank."""
    checkpoint = str(workspaces["qwen3"] / "model")
    trained(pool(1), checkpoint, family_batch, tmp_path)
    whole = tmp_path / "adapter"
    config = json.loads((whole / "adapter_config.json").read_text())
    tensors = load_file(whole / "adapter_model.safetensors")
    first, second, *_ = tensors
    prefix = "base_model.model.model.layers.0."

    def written(name: str, config: Any, tensors: dict[str, torch.Tensor]) -> str:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, directory / "adapter_model.safetensors")
        return str(directory)

    without = {name: x for name, x in tensors.items() if name != second}
    cases = {
        str(tmp_path / "nowhere"): "adapter_config.json cannot be read",
        written("rank", config | {"r": 8}, tensors): "r is 8, and actor.lora.rank is 3",
        written(
            "alpha", config | {"lora_alpha": 1}, tensors
        ): "lora_alpha is 1, and actor.lora.alpha",
        written("dora", config | {"use_dora": True}, tensors): "use_dora is True, which is not",
        written("base of another", config | {"init_lora_weights": "pissa_niter_4"}, tensors): (
            "init_lora_weights is pissa_niter_4, which is not supported"
        ),
        written("activated", config | {"alora_invocation_tokens": [1, 2]}, tensors): (
            "alora_invocation_tokens is [1, 2], which is not supported"
        ),
        written("kind", config | {"peft_type": "IA3"}, tensors): "peft_type must be LORA",
        written("list", [], tensors): "adapter_config.json is not a JSON object",
        written("few", config, without): f"has no {second}, which actor.lora.target_modules",
        written("many", config, tensors | {f"{prefix}x.lora_A.weight": torch.ones(3, 2)}): (
            f"has {prefix}x.lora_A.weight, which actor.lora.target_modules does not ask for"
        ),
        written("nan", config, tensors | {first: tensors[first] * torch.nan}): (
            f"{first} has {tensors[first].numel()} values that are not finite"
        ),
        written("base", config, tensors | {first: tensors[first][:, 1:].contiguous()}): (
            "the adapter is of another model"
        ),
    }
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "cut" / "adapter_model.safetensors").write_bytes(b"\x10")
    cases[str(tmp_path / "cut")] = "adapter_model.safetensors cannot be read"
    found = pool(2).run(
        lora_cases.read_errors,
        checkpoint=checkpoint,
        lora={"rank": RANK, "alpha": ALPHA},
        directories=list(cases),
    )
    for errors in found:
        for error, words in zip(errors, cases.values(), strict=True):
            assert error.startswith("actor.lora.adapter_path: ") and words in error, error
            assert "\n" not in error
