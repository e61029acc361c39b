"""Every patch of Megatron-Core, and of torch for its sake, is still needed: without it the library
behaves as the patch's reason says. A patch whose test fails after an upgrade can be dropped."""

from __future__ import annotations

import gc
import importlib.metadata
import inspect
import re
from pathlib import Path
from typing import Any

import patch_cases
import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from tiny import make_checkpoint

from rlhf_mc import torch_patches
from rlhf_mc.models import megatron_patches

NO_CUDA = "Torch not compiled with CUDA enabled|No CUDA|NVIDIA driver|requires CUDA support"
RANDOM = "megatron.core.tensor_parallel.random"
DISPATCHER = "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher"
MAPPINGS = "megatron.core.tensor_parallel.mappings"
STEPS = {
    # target of the patch: (model, tp, pp, error without the patch)
    "torch.cuda.current_device": ("dense", 1, 2, NO_CUDA),
    "torch.cuda.get_rng_state": ("dense", 2, 1, NO_CUDA),
    "torch.Tensor.cuda": ("dense", 1, 2, NO_CUDA),
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": (
        "experts",
        2,
        1,
        "'te_general_gemm' is not defined",
    ),
    f"{RANDOM}._get_cuda_rng_state": ("dense", 2, 1, NO_CUDA),
    f"{DISPATCHER}.cuda_dtoh_stream": ("experts", 2, 1, NO_CUDA),
    "megatron.core.ssm.gated_delta_net.HAVE_FLA": ("delta", 1, 1, "FLA is not installed"),
    "megatron.core.transformer.multi_latent_attention.TELinear": (
        "latent",
        2,
        1,
        r"isinstance\(\) arg 2 must be",
    ),
    f"{DISPATCHER}._maybe_dtoh_and_synchronize": (
        "experts",
        2,
        1,
        f"{NO_CUDA}|no attribute 'wait_stream'",
    ),
}
TESTED_ALONE = {
    "torch.cuda.synchronize",
    "torch.distributed.distributed_c10d.ProcessGroupGloo.__init__",
    f"{RANDOM}._set_cuda_rng_state",
    f"{DISPATCHER}.combine_postprocess",
    f"{MAPPINGS}._gather_along_first_dim",
    "megatron.core.tensor_parallel.layers._grad_accum_fusion_available",
    # in tests/unit/models/test_cpu_operations.py
    "megatron.core.transformer.attention.apply_rotary_pos_emb",
    "megatron.core.optimizer.clip_grads.l2_norm_impl",  # in the same file
}
WORLD = pytest.mark.parametrize("world", [2])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("patches")
    families = {
        "dense": "qwen2",
        "experts": "qwen3_moe",
        "delta": "qwen3_next",
        "latent": "deepseek_v3",
    }
    untied = ("delta", "latent")
    return {
        name: str(
            make_checkpoint(root / name, family, num_hidden_layers=2, tied=name not in untied)
        )
        for name, family in families.items()
    }


def all_fail(outcomes: list[tuple[bool, Any]], error: str) -> bool:
    """Return whether every rank has raised, with a stack trace that matches `error`."""
    return all(not ok and re.search(error, value[2]) for ok, value in outcomes)


def test_the_patches_are_of_the_installed_versions() -> None:
    assert importlib.metadata.version("megatron-core") == megatron_patches.TESTED_VERSION
    assert torch.__version__.partition("+")[0] == torch_patches.TESTED_VERSION


def test_every_patch_has_a_test() -> None:
    assert set(patch_cases.PATCHES) == STEPS.keys() | TESTED_ALONE
    for patch in patch_cases.PATCHES.values():
        assert patch.original is not patch.replacement, patch.target
        if patch.name != "te_general_gemm":
            assert hasattr(patch.owner, patch.name), f"{patch.target} is gone"


@WORLD
@pytest.mark.parametrize("target", STEPS)
def test_a_step_fails_without_the_patch(
    pool: Any, models: dict[str, str], world: int, target: str
) -> None:
    model, tp, pp, error = STEPS[target]
    outcomes = pool(world).outcomes(
        patch_cases.step_without, target=target, checkpoint=models[model], tp=tp, pp=pp
    )
    assert all_fail(outcomes, error), outcomes


@WORLD
def test_a_checkpoint_synchronises_the_gpu(
    pool: Any, models: dict[str, str], tmp_path: Path, world: int
) -> None:
    arguments = {"checkpoint": models["dense"], "directory": str(tmp_path)}
    assert all_fail(
        pool(world).outcomes(patch_cases.save_without_synchronize, **arguments), NO_CUDA
    )


@WORLD
def test_gloo_does_not_gather_parts_of_different_sizes(pool: Any, world: int) -> None:
    outcomes = pool(world).outcomes(patch_cases.gather_different_sizes)
    assert all_fail(outcomes, "size"), outcomes


@WORLD
def test_a_dispatcher_keeps_the_routing(pool: Any, models: dict[str, str], world: int) -> None:
    kept = pool(world).run(patch_cases.kept_routing, checkpoint=models["experts"], original=True)
    assert kept == [["probs", "reversed_local_input_permutation_mapping", "routing_map"]] * world
    assert (
        pool(world).run(patch_cases.kept_routing, checkpoint=models["experts"], original=False)
        == [[]] * world
    )


@WORLD
def test_each_group_of_gloo_has_a_thread(pool: Any, world: int) -> None:
    assert (
        pool(world).run(patch_cases.groups_of_gloo, original=True)
        == [(3, 90.0, float(world))] * world
    )
    assert pool(world).run(patch_cases.groups_of_gloo) == [(0, 90.0, float(world))] * world


@WORLD
@pytest.mark.parametrize(
    "variable", ["TORCH_GLOO_LAZY_INIT", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"]
)
def test_devices_of_gloo_that_cannot_be_shared(pool: Any, world: int, variable: str) -> None:
    groups = pool(world).run(patch_cases.groups_of_gloo, variables=[variable])
    assert groups == [(3, 90.0, float(world))] * world
    assert pool(world).run(patch_cases.groups_of_gloo) == [(0, 90.0, float(world))] * world


@WORLD
def test_random_states_are_queued_for_a_gpu(pool: Any, world: int) -> None:
    assert pool(world).run(patch_cases.queued_random_states) == [1, 1]


@WORLD
@pytest.mark.parametrize(("mode", "error"), [("none", NO_CUDA), ("device only", "FloatTensor")])
def test_the_optimizer_needs_the_device_mode(
    pool: Any, models: dict[str, str], world: int, mode: str, error: str
) -> None:
    outcomes = pool(world).outcomes(patch_cases.step_in_mode, checkpoint=models["dense"], mode=mode)
    assert all_fail(outcomes, error), outcomes


@WORLD
def test_sequence_parallelism_needs_random_states(
    pool: Any, models: dict[str, str], world: int
) -> None:
    outcomes = pool(world).outcomes(
        patch_cases.step_without_random_states, checkpoint=models["dense"]
    )
    assert all_fail(outcomes, "cuda rng state model-parallel-rng is not added"), outcomes


@WORLD
def test_the_output_layer_asks_for_apex(pool: Any, models: dict[str, str], world: int) -> None:
    """Build an output layer of its own weight, and one that is a copy of the embedding on the last
    stage."""
    case = patch_cases.output_layer_with_fused_accumulation
    outcomes = pool(world).outcomes(case, checkpoint=models["dense"], patched=False)
    assert all_fail(outcomes, "fused_weight_gradient_mlp_cuda"), outcomes
    pool(world).run(case, checkpoint=models["dense"], patched=True)


@WORLD
def test_megatron_marks_no_parameter_as_sharded(
    pool: Any, models: dict[str, str], world: int
) -> None:
    unmarked, _ = pool(world).run(patch_cases.unmarked_parameters, checkpoint=models["dense"])
    assert "embedding.word_embeddings.weight" in unmarked
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in unmarked


@WORLD
def test_frozen_layers_multiply_token_by_token(
    pool: Any, models: dict[str, str], world: int
) -> None:
    assert all(pool(world).run(patch_cases.batched_products, checkpoint=models["dense"]))


@WORLD
def test_each_optimizer_gathers_all_parameters(
    pool: Any, models: dict[str, str], world: int
) -> None:
    without, patched = (
        pool(world).run(
            patch_cases.gathered_parameters, checkpoint=models["experts"], patched=patched
        )
        for patched in (False, True)
    )
    assert without == [2 * num_bytes for num_bytes in patched]


@WORLD
def test_tied_embeddings_ask_for_the_global_parallel_state(
    pool: Any, models: dict[str, str], world: int
) -> None:
    first, last = pool(world).outcomes(
        patch_cases.tie_by_parallel_state, checkpoint=models["dense"]
    )
    assert first[0] and all_fail([last], "data parallel group"), last


def test_the_writer_turns_the_garbage_collector_off(tmp_path: Path) -> None:
    enabled = []

    class Queue:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: enabled.append(gc.isenabled())

    bucket = (str(tmp_path / "file"), "file", ([], []))
    FileSystemWriterAsync.write_preloaded_data([], 0, bucket, Queue(), Queue(), use_fsync=False)
    assert enabled and not any(enabled)
    assert list(inspect.signature(megatron_patches.write_bucket).parameters)[:3] == [
        "transform_list",
        "local_proc_idx",
        "write_bucket",
    ]


def test_a_save_of_megatron_starts_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """PlannedSave overrides a method of the strategy, and keep_results_in_process fills the
    module's place for a queue in a process."""
    assert "_get_save_and_finalize_callbacks" in vars(TorchDistSaveShardedStrategy)
    started = []
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    monkeypatch.setattr(
        filesystem_async.mp, "get_context", lambda method: started.append(method) or pytest.skip
    )
    with pytest.raises(AttributeError):
        filesystem_async._get_write_results_queue()
    assert started == ["spawn"]
