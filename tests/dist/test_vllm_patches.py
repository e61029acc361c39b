"""Every patch of vLLM is still needed: without it vLLM behaves as the patch's reason says. A patch
whose test fails after an upgrade can be dropped. Draws of our own are tested in test_rollout.py,
engines over given storage in test_layouts.py."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import vllm
import vllm_patch_cases
from gpu_parts.reference import Reference
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.aux_output_connector import worker
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.oracle.unquantized import map_unquantized_backend
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms.cpu import CpuPlatform
from vllm.utils import torch_utils

from rlhf_mc import platform
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.fields import field_types, number_range
from rlhf_mc.config.schema import RolloutConfig, ValKwargsConfig
from rlhf_mc.machine.check import TESTED_VERSIONS
from rlhf_mc.rollout import vllm_derived, vllm_engine, vllm_options, vllm_patches
from rlhf_mc.rollout.cpu_experts import fused_moe

TIED = "vllm.config.model.ModelConfig.maybe_untie_word_embeddings"
LINEAR = "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm"
SHARED_MEMORY = (
    "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"
    "._all_group_ranks_share_shm_group_name"
)
EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
REPACK = f"{EXPERTS}.CPUUnquantizedExperts.process_weights_after_loading"
SIZES = f"{EXPERTS}.CPUUnquantizedExperts._supports_grouped_gemm"
ROTATION = "vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding.forward_cpu"
DELTA_NETS = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
CONVOLUTIONS = {f"{DELTA_NETS}._causal_conv1d_fwd_cpu", f"{DELTA_NETS}._causal_conv1d_update_cpu"}
TARGETS = CONVOLUTIONS | {
    TIED,
    LINEAR,
    SHARED_MEMORY,
    REPACK,
    SIZES,
    ROTATION,
    f"{EXPERTS}.cpu_fused_moe",
}


def test_vllm_takes_the_bounds_of_sampling_settings() -> None:
    """Compare them with vLLM's own, which would refuse the first rollout."""
    bounded = (
        ("temperature", RolloutConfig),
        ("temperature", ValKwargsConfig),
        ("top_p", ValKwargsConfig),
    )
    for name, section in bounded:
        allowed = number_range(field_types(section)[name])
        assert allowed is not None
        for value in (allowed.low, allowed.high):
            vllm.SamplingParams(**{name: value})
    with pytest.raises(VLLMValidationError, match="temperature"):
        vllm.SamplingParams(temperature=2.01)
    assert vllm.SamplingParams(top_k=-1).top_k <= 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a checkpoint whose config ties the language-model head, and which has a head of its
    own."""
    source = make_checkpoint(tmp_path_factory.mktemp("patches") / "model", num_hidden_layers=2)
    file = source / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        file,
        {"format": "pt"},
    )
    return str(source)


def test_the_patches_are_of_the_installed_version() -> None:
    assert vllm.__version__.partition("+")[0] == TESTED_VERSIONS["vllm"]


def test_ranks_of_an_engine_return_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that without the patch all ranks but the first return none, and that the scheduler of
    such a rank fails."""
    capturer = SimpleNamespace(shape_per_token=(1, 2), output_dtype_name="uint8")
    monkeypatch.setattr(worker, "RoutedExpertsCapturer", lambda **settings: capturer)
    monkeypatch.setattr(worker, "bind_routed_experts_capturer", lambda *args: None)
    monkeypatch.setattr(
        worker, "resolve_kv_cache_block_sizes", mock.Mock(side_effect=EOFError("it has a store"))
    )
    scheduler = SimpleNamespace(max_num_batched_tokens=8)
    config = SimpleNamespace(scheduler_config=scheduler, max_concurrent_batches=1)
    parts = {"vllm_config": config, "model": None, "kv_cache_config": None}
    patch, _ = vllm_patches.on_gpu()
    assert patch.owner is worker
    monkeypatch.setattr(worker, "get_tp_group", lambda: SimpleNamespace(is_first_rank=False))
    output = worker.AuxOutputWorkerConnector(**parts).prepare_output(mock.Mock())
    assert output is None
    with pytest.raises(AssertionError, match="output is missing 0"):
        AuxOutputSchedulerConnector().take_output(SimpleNamespace(request_id="0"), output)
    monkeypatch.setattr(worker, "get_tp_group", patch.replacement)
    with pytest.raises(EOFError, match="it has a store"):
        worker.AuxOutputWorkerConnector(**parts)


def test_a_sampler_that_cannot_continue_responses_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_engine, "current_platform", SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr(platform, "device", lambda: torch.device("cuda"))
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    vllm_engine.check_build()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(UserError, match=r"^rollout: VLLM_USE_V2_MODEL_RUNNER is 0; unset it"):
        vllm_engine.check_build()


def test_every_patch_has_a_test() -> None:
    assert set(vllm_patch_cases.PATCHES) == TARGETS
    for patch in vllm_patch_cases.PATCHES.values():
        assert hasattr(patch.owner, patch.name), f"{patch.target} is gone"
        assert patch.original is not patch.replacement, patch.target


@pytest.mark.parametrize("world", [1])
@pytest.mark.parametrize(
    ("family", "dtype", "feature", "sizes"),
    [
        ("qwen3_next", "bfloat16", "_is_avx512_bf16_supported", {"linear_conv_kernel_dim": 3}),
        ("deepseek_v3", "float32", "_is_amx_tile_supported", {}),
    ],
)
def test_processors_generate_alike(
    pool: Any,
    tmp_path: Path,
    world: int,
    family: str,
    dtype: str,
    feature: str,
    sizes: dict[str, int],
) -> None:
    """Take both branches of vLLM on any processor. Log-probs are transformers'."""
    model = str(
        make_checkpoint(tmp_path / "model", family, tied=False, num_hidden_layers=2, **sizes)
    )
    arguments = {"checkpoint": model, "dtype": dtype, "feature": feature}
    ((with_it, without),) = pool(world).run(vllm_patch_cases.generate_on_processors, **arguments)
    assert with_it == without
    reference = Reference(model).model
    for prompt, tokens, found in zip(vllm_patch_cases.PROMPTS, *with_it[1:], strict=True):
        sequence = torch.tensor([[*prompt.tolist(), *tokens]])
        with torch.no_grad():
            logits = reference(sequence).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        difference = float((torch.tensor(found) - wanted).abs().mean())
        assert difference < (0.03 if dtype == "bfloat16" else 2e-5), difference


def test_new_sinks_reach_an_attention_that_has_copied_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's attention and a CPU's in float16 compute with float32 copies."""
    types: list[torch.dtype] = []
    attention = SimpleNamespace(sinks=torch.zeros(2), process_weights_after_loading=types.append)
    module = torch.nn.Module()
    module.sinks = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    module.attn = SimpleNamespace(impl=attention)
    model = torch.nn.Sequential(torch.nn.Sequential(module))
    vllm_derived.derive_weights(model)
    assert attention.sinks is module.sinks and types == []
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    vllm_derived.derive_weights(model)
    assert types == [torch.float16]


@pytest.mark.parametrize("world", [1])
def test_sizes_that_vllms_kernel_of_experts_does_not_take(
    pool: Any, tmp_path: Path, world: int
) -> None:
    sizes = {"tied": False, "num_hidden_layers": 1, "intermediate_size": 48}
    model = str(make_checkpoint(tmp_path / "model", "gpt_oss", **sizes))
    ((ok, value),) = pool(world).outcomes(
        vllm_patch_cases.generate_without, target=SIZES, checkpoint=model
    )
    assert not ok and "No Unquantized MoE backend supports" in value[1], value
    pool(world).run(vllm_patch_cases.generate_in_a_world_of_seven, checkpoint=model, patched=True)


@pytest.mark.parametrize("world", [1])
def test_gpt_oss_in_a_world_that_does_not_divide_it(pool: Any, tmp_path: Path, world: int) -> None:
    """Fail without the patch. With it, the test above generates in this world."""
    case = vllm_patch_cases.generate_in_a_world_of_seven
    model = str(make_checkpoint(tmp_path / "model", "gpt_oss", tied=False, num_hidden_layers=1))
    ((ok, value),) = pool(world).outcomes(case, checkpoint=model, patched=False)
    assert not ok and "config.intermediate_size % self.world_size == 0" in value[2], value


@pytest.mark.parametrize("world", [1])
@pytest.mark.parametrize(
    ("target", "error"),
    [(TIED, "absent in the weight update"), (LINEAR, "is (0,) in the engine")],
)
def test_an_engine_fails_without_the_patch(
    pool: Any, checkpoint: str, world: int, target: str, error: str
) -> None:
    ((ok, value),) = pool(world).outcomes(
        vllm_patch_cases.generate_without, target=target, checkpoint=checkpoint
    )
    assert not ok and error in value[1], value


@pytest.mark.parametrize("world", [1])
def test_vllms_own_seeds_fail_where_a_prompt_is_split(
    pool: Any, checkpoint: str, world: int
) -> None:
    ((ok, value),) = pool(world).outcomes(
        vllm_patch_cases.generate_with_vllms_seeds, checkpoint=checkpoint
    )
    assert not ok and "does not use offset" in value[1], value


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_vllm_repacks_the_weights_of_experts_for_its_kernel(activation: str) -> None:
    """Compare also gpt_oss' activation, large enough to be clamped, and biases."""
    tokens = 5
    experts = 3
    hidden = 32
    ffn = 32
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(experts, 2 * ffn, hidden, generator=generator)
    w2 = torch.randn(experts, hidden, ffn, generator=generator)
    x = torch.randn(tokens, hidden, generator=generator)
    biases = [torch.randn(experts, rows, generator=generator) for rows in (2 * ffn, hidden)]
    if activation == "silu":
        biases = [None, None]
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]], dtype=torch.int32)
    weights = torch.full((tokens, 2), 0.5)
    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(w13.clone(), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(w2.clone(), requires_grad=False)
    kernel = SimpleNamespace(isa="vec", _pad_moe_intermediate=lambda layer: None)
    vllm_patch_cases.PATCHES[REPACK].original(kernel, layer)
    assert not torch.equal(layer.w13_weight, w13)

    def result(function: Any, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        function(out, x, w13, w2, *biases, weights, ids, activation, "vec", False)
        return out

    own = vllm_patch_cases.PATCHES[f"{EXPERTS}.cpu_fused_moe"].original
    wanted = result(fused_moe, w13, w2)
    torch.testing.assert_close(
        result(own, layer.w13_weight, layer.w2_weight), wanted, rtol=1e-4, atol=1e-4
    )
    assert not torch.allclose(result(own, w13, w2), wanted, rtol=1e-2, atol=1e-2)
    assert cpu_moe.CPUUnquantizedExperts.isa == "vec"


def test_vllm_rotates_other_dimensions_of_latent_attention() -> None:
    with set_current_vllm_config(VllmConfig()):
        embedding = RotaryEmbedding(8, 8, 32, 1e4, False, torch.float32)
    patch = vllm_patch_cases.PATCHES[ROTATION]
    positions = torch.arange(5)

    def rotated(forward: Any, parts: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        # of which the last 8 dimensions are rotated
        heads = torch.randn(5, 3, 12, generator=generator)
        query = heads[..., 4:] if parts else heads[..., 4:].contiguous().flatten(1)
        key = torch.randn(5, 1, 8, generator=generator)
        out, _ = forward(embedding, positions, query, key if parts else key.flatten(1))
        return out.reshape(5, 3, 8)

    wanted = rotated(patch.original, parts=False)
    torch.testing.assert_close(rotated(patch.replacement, parts=True), wanted)
    torch.testing.assert_close(rotated(patch.replacement, parts=False), wanted)
    assert not torch.allclose(rotated(patch.original, parts=True), wanted, atol=1e-2)


@pytest.mark.parametrize("world", [2])
def test_ranks_of_a_node_get_collectives_in_shared_memory(
    pool: Any, checkpoint: str, world: int
) -> None:
    found = pool(world).run(
        vllm_patch_cases.uses_shared_memory, checkpoint=checkpoint, target=SHARED_MEMORY
    )
    assert found == [(has_kernel, has_kernel) for _, has_kernel in found]


@pytest.mark.parametrize("world", [2])
def test_vllm_groups_consecutive_ranks_and_torch_sorts_them(
    pool: Any, checkpoint: str, world: int
) -> None:
    for groups, has_queue, sorted_by_torch, order in pool(world).run(
        vllm_patch_cases.own_groups, checkpoint=checkpoint
    ):
        assert groups == [[0, 1]] and has_queue is True
        assert sorted_by_torch == [0, 1]
        assert order == [1, 0]


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("ranks", [[0, 1], [1, 0]], ids=str)
def test_custom_all_reduce_is_off_where_ranks_do_not_ascend(
    pool: Any, checkpoint: str, world: int, ranks: list[int]
) -> None:
    """Check that vLLM's custom all-reduce loses addresses of captured graphs in a group that does
    not ascend. If it no longer does, the option can be dropped."""
    registered = pool(world).run(vllm_patch_cases.registered_graph_buffers, ranks=ranks)
    found = pool(world).run(
        vllm_patch_cases.custom_all_reduce_is_off, checkpoint=checkpoint, ranks=ranks
    )
    if ranks == [0, 1]:
        assert registered == [[[[0], [1]], [[0], [10]]]] * 2
        assert found == [([False], [])] * 2
    else:
        assert all(None in handles and None in offsets for handles, offsets in registered)
        line = (
            "rollout: vLLM's custom all-reduce is off: it needs ascending ranks, and an engine has "
            "[1, 0]"
        )
        assert found == [([True], [line])] * 2


@pytest.mark.parametrize("world", [2])
def test_compiled_code_is_of_a_place_in_an_engine(pool: Any, checkpoint: str, world: int) -> None:
    """Check that a rank which changes its place does not find its earlier code. If it does not
    without additional_config either, the option can be dropped."""
    ascending = pool(world).run(vllm_patch_cases.cache_names, checkpoint=checkpoint, ranks=[0, 1])
    swapped = pool(world).run(vllm_patch_cases.cache_names, checkpoint=checkpoint, ranks=[1, 0])
    ours = [name for name, _ in ascending]
    assert [name for name, _ in swapped] == ours[::-1] and ours[0] != ours[1]
    assert len({name for _, name in ascending + swapped}) == 1


@pytest.mark.parametrize("world", [1])
@pytest.mark.parametrize("float32_products", [False, True])
def test_head_multiplies_as_the_trainers(
    pool: Any, checkpoint: str, world: int, float32_products: bool
) -> None:
    """Check that vLLM's logits are float32 exactly where the trainer's are."""
    arguments = {"checkpoint": checkpoint, "float32_products": float32_products}
    product = "torch.float32" if float32_products else "torch.bfloat16"
    assert pool(world).run(vllm_patch_cases.head_types, **arguments) == [
        (product, "torch.bfloat16")
    ]


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("offloads", [False, True])
def test_graphs_are_offloaded_in_a_sleep_alone(sleeps: bool, offloads: bool) -> None:
    cfg = RolloutConfig(free_cache_engine=sleeps, offload_cuda_graphs=offloads)
    found = EngineArgs(model="model", **vllm_options.gpu_options(cfg))
    assert (found.enable_sleep_mode, found.sleep_mode_offload_cudagraph) == (
        sleeps,
        sleeps and offloads,
    )


@pytest.mark.parametrize("deterministic", [False, True])
def test_vllm_has_the_options_for_gpus(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        options = vllm_options.gpu_options(RolloutConfig(free_cache_engine=True))
    finally:
        torch.use_deterministic_algorithms(False)
    found = EngineArgs(model="model", **options)
    assert found.enable_sleep_mode and found.sleep_mode_offload_cudagraph
    assert map_unquantized_backend(found.moe_backend).name == "TRITON"
    fused = found.compilation_config.pass_config.fuse_allreduce_rms
    assert fused is (False if deterministic else None)  # None: vLLM chooses by the GPU


@pytest.mark.parametrize(
    ("settings", "is_off"),
    [
        ({"free_cache_engine": False}, True),
        ({"free_cache_engine": True}, False),
        ({"free_cache_engine": True, "offload_cuda_graphs": False}, True),
        ({"enforce_eager": True}, False),
    ],
    ids=str,
)
def test_custom_all_reduce_is_off_with_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, bool], is_off: bool
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    monkeypatch.setattr(vllm_options, "print_line", lambda line, rank_0_only: lines.append(line))
    conf = "max_split_size_mb:512,expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
    settings = {"free_cache_engine": False, "enforce_eager": False, **settings}
    assert vllm_options.custom_all_reduce([[0, 1]], RolloutConfig(**settings)) != is_off
    assert len(lines) == is_off and all("expandable_segments" in line for line in lines)


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize(
    ("failing", "alone", "together"),
    [
        ({}, ["mnnvl", "mnnvl"], [("mnnvl", []), ("mnnvl", [])]),
        ({"mnnvl": [1]}, ["mnnvl", "trtllm"], [("trtllm", ["mnnvl"]), ("trtllm", [])]),
        (
            {"mnnvl": [0, 1], "trtllm": [0]},
            ["none", "trtllm"],
            [("none", []), ("none", ["trtllm"])],
        ),
    ],
    ids=str,
)
def test_ranks_of_an_engine_agree_on_flashinfers_all_reduce(
    pool: Any,
    world: int,
    failing: dict[str, list[int]],
    alone: list[str],
    together: list[tuple[str, list[str]]],
) -> None:
    """Check that without the patch of `_create_workspace` ranks would have different all-reduces,
    which wait for each other."""
    case = vllm_patch_cases.all_reduce_workspaces
    assert [
        backend for backend, _ in pool(world).run(case, patched=False, failing=failing)
    ] == alone
    assert pool(world).run(case, patched=True, failing=failing) == together


@pytest.mark.parametrize("world", [1])
def test_vllm_is_told_that_ranks_share_gpus(pool: Any, world: int) -> None:
    (found,) = pool(world).run(vllm_patch_cases.options_of_shared_gpus)
    assert found["devices"] == [0, 0, 1, 1] and found["custom"] is False
    assert found["gpu_memory_utilization"] == 0.3
    assert found["compilation_config"] == {"pass_config": {"fuse_allreduce_rms": False}}


@pytest.mark.parametrize("world", [2])
def test_ranks_of_a_gpu_take_turns(pool: Any, world: int) -> None:
    (_, end_of_first), (begin_of_second, _) = pool(world).run(vllm_patch_cases.turns)
    assert end_of_first <= begin_of_second


@pytest.mark.parametrize("world", [1])
def test_vllm_destroys_the_world_when_it_shuts_down(pool: Any, checkpoint: str, world: int) -> None:
    assert pool(world).run(vllm_patch_cases.destroys_the_world, checkpoint=checkpoint) == [1]


def test_the_base_class_of_loaders_is_there() -> None:
    assert {"download_model", "load_weights"} == BaseModelLoader.__abstractmethods__


def test_compilation_is_off() -> None:
    """Libraries that import torch._dynamo earlier have read TORCH_COMPILE_DISABLE by now."""
    assert torch._dynamo.config.disable


@pytest.mark.parametrize("told", [True, False])
def test_vllm_replaces_a_stream_that_it_has_not_seen(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enter the stream before vLLM is imported, as rendezvous.py does."""
    device: list[Any] = [mock.Mock(name="our stream")]
    ours = device[0]
    monkeypatch.setattr(torch_utils, "prev_set_stream", device.append)
    monkeypatch.setattr(torch_utils, "_current_stream_tls", threading.local())
    monkeypatch.setattr(torch.cuda, "set_stream", torch_utils._patched_set_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device[-1])
    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock)
    monkeypatch.setattr(CpuPlatform, "is_cuda", lambda self: True)
    if told:
        vllm_engine._keep_stream()
    assert (torch_utils.current_stream() is ours) == (device[-1] is ours) == told
