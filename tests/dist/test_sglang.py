"""SGLang's engine samples vLLM's tokens with vLLM's log-probs, of each family, over groups of ranks
at a stride, in parts and after weight updates. Whole steps are vLLM's too, by either strategy, and
it names what it lacks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import sglang_cases
from documents import ROOT
from tiny import make_checkpoint, make_workspace, write_config

pytestmark = pytest.mark.dist

PYTHON = ROOT / "build" / "sglang" / "bin" / "python"
"""Of the environment that `make test` makes."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tied": True},
    "llama": {"family": "llama", "tied": False},
    "qwen3": {"family": "qwen3", "tied": False},
    "mistral": {"family": "mistral", "tied": False},
}
STEPS = [
    "reshard.verify=always",
    "trainer.max_rollout_logprob_diff=1e-4",
    "trainer.val_before_train=false",
]
CHUNKED = ["rollout.max_num_seqs=5", "rollout.max_num_batched_tokens=16"]
RUNS = {
    "megatron": [*STEPS, "actor.megatron.tensor_model_parallel_size=2"],
    "fsdp2": [*STEPS, "actor.strategy=fsdp2", "rollout.tensor_model_parallel_size=2"],
    "pool": [
        *STEPS,
        "resource_pools.train=1",
        "resource_pools.rollout=1",
        "rollout.one_step_off=true",
        "algorithm.rollout_correction.rollout_is=token",
    ],
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a config over a model of qwen2, beside a checkpoint of each family."""
    directory = make_workspace(
        tmp_path_factory.mktemp("sglang"), num_hidden_layers=2, num_kv_heads=4
    )
    for name, extra in FAMILIES.items():
        make_checkpoint(directory / name, **{"num_hidden_layers": 2, **extra})
    make_checkpoint(directory / "experts", family="qwen3_moe", num_hidden_layers=2)
    make_checkpoint(
        directory / "biases",
        family="llama",
        num_hidden_layers=2,
        attention_bias=True,
        mlp_bias=True,
    )
    sections: dict[str, Any] = {"data": {"max_prompt_length": 48, "max_response_length": 24}}
    for role in ("actor", "critic"):
        sections[role] = {"ppo_max_token_len_per_gpu": 256}
    return write_config(directory, **sections)


@pytest.fixture(scope="module")
def calls(config: Path) -> dict[str, tuple[int, str, dict[str, Any]]]:
    """Return the calls of sglang_cases: world size, function and arguments, by their name here."""

    def call(
        world: int, function: str, *overrides: str, **options: bool
    ) -> tuple[int, str, dict[str, Any]]:
        arguments = {"config_path": str(config), "overrides": list(overrides), **options}
        return world, function, arguments

    def of_model(name: str) -> str:
        return f"model.path={config.parent / name}"

    return {
        # more prompts than slots, in several chunks
        **{
            name: call(1, "generated", of_model(name), *CHUNKED, every_kind=name == "qwen2")
            for name in FAMILIES
        },
        "crowded": call(1, "crowded", of_model("qwen2")),
        "stride": call(
            4,
            "generated",
            "actor.megatron.tensor_model_parallel_size=4",
            "rollout.tensor_model_parallel_size=2",
        ),
        **{name: call(2, "steps", *overrides) for name, overrides in RUNS.items()},
        "experts": call(1, "error_of", of_model("experts")),
        "biases": call(2, "error_of", of_model("biases")),
        "quantization": call(1, "error_of", "rollout.quantization=fp8"),
        "small cache": call(1, "error_with_small_cache"),
        "part": (2, "part", {"update_weights": True}),
        "faulty part": (1, "part", {"update_weights": False}),
    }


@pytest.fixture(scope="module")
def of_sglang(config: Path, calls: dict[str, Any]) -> dict[str, list[Any]]:
    """Return each rank's results of SGLang, by the call."""
    assert PYTHON.exists(), f"{PYTHON} is missing: make build/sglang/.installed"
    named = json.loads(json.dumps(list(calls.values())))
    for _, _, kwargs in named:
        if "overrides" in kwargs:
            kwargs["overrides"].insert(0, "rollout.name=sglang")
    directory = config.parent
    (directory / "calls.json").write_text(json.dumps(named))
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [str(PYTHON), sglang_cases.__file__, str(directory)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
    results = json.loads((directory / "results.json").read_text())
    return dict(zip(calls, results, strict=True))


def of_vllm(pool: Any, call: tuple[int, str, dict[str, Any]]) -> list[Any]:
    world, name, kwargs = call
    results: list[Any] = pool(world).run(getattr(sglang_cases, name), **kwargs)
    return results


def same_responses(kind: str, found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for response, other in zip(found, wanted, strict=True):
        assert response["tokens"] == other["tokens"], kind
        assert response["finished"] == other["finished"], kind
        np.testing.assert_allclose(response["log_probs"], other["log_probs"], atol=2e-5)


@pytest.mark.parametrize("name", [*FAMILIES, "stride"])
def test_responses_are_those_of_vllm(
    pool: Any, calls: dict[str, Any], of_sglang: dict[str, Any], name: str
) -> None:
    for mine, reference in zip(of_sglang[name], of_vllm(pool, calls[name]), strict=True):
        results = dict(mine["results"])
        woken = results.pop("woken")
        assert results.keys() == reference["results"].keys()
        for kind, responses in results.items():
            same_responses(kind, responses, reference["results"][kind])
        if name in ("qwen2", "stride"):
            same_responses("parts", results["parts"], results["stopped"])
            assert {r["finished"] for r in results["stopped"]} == {True, False}
            assert {len(r["tokens"]) for r in results["short"]} == {5}
        assert results["changed"] != results["sampled"]
        assert woken == results["changed"]
        for key in ("groups", "parameters", "cost", "aliased"):
            assert mine[key] == json.loads(json.dumps(reference[key])), key
        assert mine["summary"].endswith("attention by TorchNativeAttnBackend")
    assert name != "stride" or mine["groups"] == [[0, 2], [1, 3]]


def test_a_full_cache_changes_no_response(of_sglang: dict[str, Any]) -> None:
    (crowded,) = of_sglang["crowded"]
    assert crowded["preempted"] > 0
    same_responses("sampled", crowded["results"], of_sglang["qwen2"][0]["results"]["sampled"])


@pytest.mark.parametrize("name", RUNS)
def test_steps_are_those_of_vllm(
    pool: Any, calls: dict[str, Any], of_sglang: dict[str, Any], name: str
) -> None:
    for mine, reference in zip(of_sglang[name], of_vllm(pool, calls[name]), strict=True):
        assert [row["tokens"] for row in mine] == [row["tokens"] for row in reference]
        for row, other in zip(mine, reference, strict=True):
            for key in ("actor/grad_norm", "critic/score/mean", "reshard/received_bytes"):
                assert row.get(key) == pytest.approx(other.get(key), rel=1e-4), key
            assert row.get("training/rollout_logprobs_diff_max", 0) < 1e-4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "experts",
            "rollout.name is sglang, and the model is of the family qwen3_moe; sglang is for "
            "llama, qwen2, qwen3, mistral: use vllm",
        ),
        ("biases", "model.layers.0.mlp.down_proj.bias is absent in the engine, (128,) in"),
        (
            "quantization",
            "rollout.quantization is 'fp8'; rollout.name sglang has none: set it to null",
        ),
        ("small cache", "SGLang's KV cache holds 63 tokens, and a sequence has 72; raise"),
    ],
)
def test_what_it_lacks_is_one_line(of_sglang: dict[str, Any], name: str, message: str) -> None:
    for error in of_sglang[name]:
        assert message in error and "\n" not in error, error


def test_the_part_of_gpu_check_passes_and_notices_a_fault(of_sglang: dict[str, Any]) -> None:
    assert of_sglang["part"] == [["passed", ""]] * 2
    ((verdict, reason),) = of_sglang["faulty part"]
    assert verdict == "failed" and "the log-probs of the engine (rollout)" in reason


def test_without_sglang_the_line_names_the_installation(config: Path) -> None:
    """Check the exit code and the line of the environment of all other tests, which lacks it."""
    done = forked.run(["-m", "rlhf_mc", str(config), "rollout.name=sglang"])
    assert done.returncode == 2
    assert (
        "rlhf_mc: error: rollout.name is sglang, and no SGLang is installed; needed is 0.5.23, "
        "whose scheduler the trainer drives: pip install -e '.[sglang]', on a CPU pip install "
        "--no-deps -r requirements/sglang.txt\n"
    ) in done.stderr
