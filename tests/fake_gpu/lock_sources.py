"""The functions of vLLM that rlhf_mc/rollout/vllm_*.py call, patch or rely on. Their sources are
read from files, and compared with those that docs/internals/gpu_readings.md is about
(lock_sources.json). vLLM is not imported.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_suffix(".json")

CALLED = """
    vllm.config.vllm:set_current_vllm_config VllmConfig.use_v2_model_runner VllmConfig.compute_hash
    vllm.config.model:ModelConfig.maybe_untie_word_embeddings ModelConfig.head_dtype
    vllm.device_allocator.alloc_conf:expandable_segments_enabled_from_env
    vllm.distributed.aux_output_connector.worker:AuxOutputWorkerConnector
    vllm.distributed.parallel_state:init_model_parallel_group init_world_group
        destroy_distributed_environment
        get_tp_group
        initialize_model_parallel destroy_model_parallel _WORLD _NODE_COUNT
        GroupCoordinator.__init__ GroupCoordinator.destroy
    vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.__init__
        CpuCommunicator._all_group_ranks_share_shm_group_name
    vllm.distributed.device_communicators.flashinfer_all_reduce:_create_workspace
    vllm.engine.arg_utils:EngineArgs.create_engine_config
    vllm._custom_ops:cpu_fused_moe
    vllm.entrypoints.llm:LLM.__init__ LLM.sleep LLM.wake_up LLM.reset_prefix_cache
    vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest
    vllm.inputs.engine:tokens_input
    vllm.model_executor.layers.attention.mla_attention:MLAAttention.process_weights_after_loading
        MLAAttention
    vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d:causal_conv1d_fn_cpu
        causal_conv1d_update_cpu
    vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_causal_conv1d_fwd_cpu
        _causal_conv1d_update_cpu
    vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu RotaryEmbedding
    vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.process_weights_after_loading
    vllm.model_executor.layers.fused_moe.routed_experts_capturer:bind_routed_experts_capturer
    vllm.model_executor.layers.quantization.online.fp8:Fp8PtpcOnlineLinearMethod
    vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm
    vllm.model_executor.model_loader:register_model_loader
    vllm.model_executor.model_loader.base_loader:BaseModelLoader.download_model
        BaseModelLoader.load_weights
        BaseModelLoader.load_model
    vllm.model_executor.model_loader.reload.layerwise:_layerwise_process get_layerwise_info
    vllm.model_executor.model_loader.reload.meta:SKIP_TENSORS materialize_layer
        restore_layer_on_meta
    vllm.model_executor.model_loader.reload.utils:get_layer_params_buffers
    vllm.model_executor.model_loader.utils:initialize_model
    vllm.model_executor.models.qwen3_5:Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM
    vllm.model_executor.models.registry:_ModelRegistry.register_model
    vllm.platforms:__getattr__
    vllm.sampling_params:SamplingParams.__post_init__ SamplingParams.update_from_generation_config
    vllm.tool_parsers.abstract_tool_parser:ToolParserManager.get_tool_parser
        ToolParserManager.list_registered
        ToolParserManager
    vllm.utils.torch_utils:set_default_torch_dtype
    vllm.v1.core.sched.async_scheduler:AsyncScheduler
    vllm.v1.core.sched.interface:PauseState.UNPAUSED
    vllm.v1.core.sched.output:CachedRequestData SchedulerOutput
    vllm.v1.core.sched.scheduler:Scheduler.get_request_counts Scheduler.__init__ Scheduler.schedule
        Scheduler.update_from_output Scheduler._update_after_schedule
        Scheduler._make_cached_request_data
        Scheduler._update_request_with_output Scheduler._free_request
        Scheduler._get_new_block_ids_to_zero
        Scheduler.finish_requests Scheduler.has_requests
    vllm.v1.core.sched.utils:remove_all check_stop
    vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots KVCacheManager.cache_blocks
    vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager SingleTypeKVCacheManager
    vllm.v1.engine:EngineCoreOutput EngineCoreOutputs
    vllm.v1.engine.core:EngineCore.step EngineCore.step_with_batch_queue EngineCore.post_step
    vllm.v1.engine.input_processor:InputProcessor.process_inputs InputProcessor.assign_request_id
    vllm.v1.engine.llm_engine:LLMEngine.from_engine_args LLMEngine.get_supported_tasks
        LLMEngine.reset_prefix_cache LLMEngine.sleep LLMEngine.wake_up
    vllm.v1.engine.core_client:InprocClient
    vllm.v1.outputs:LogprobsTensors ModelRunnerOutput SamplerOutput
    vllm.v1.request:Request RequestStatus.FINISHED_STOPPED RequestStatus.RUNNING
    vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p
    vllm.v1.worker.cpu_model_runner:CPUModelRunner.__init__
    vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample
"""
"""Functions that are called or replaced, and those that these names stand for: module, colon, names
in it."""
RELIED_ON = """
    vllm.device_allocator.cumem:CuMemAllocator
    vllm.device_allocator.sleep_mode_backend:CuMemBackend
    vllm.distributed.device_communicators.custom_all_reduce:CustomAllreduce.register_graph_buffers
    vllm.distributed.device_communicators.flashinfer_all_reduce:get_fi_ar_workspace
        get_fi_ar_quant_workspace
    vllm.compilation.passes.fusion.allreduce_rms_fusion:AllReduceFusionPass.__init__
    vllm.distributed.aux_output_connector.connector:AuxOutputSchedulerConnector.take_output
        AuxOutputSchedulerConnector.reset
    vllm.model_executor.layers.fused_moe.routed_experts_capturer:RoutedExpertsCapturer
    vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter
    vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod
    vllm.model_executor.layers.logits_processor:LogitsProcessor._apply_head
    vllm.v1.core.sched.scheduler:Scheduler._preempt_request
    vllm.v1.engine.core:EngineCore.sleep EngineCore.wake_up EngineCore.pause_scheduler
        EngineCore._reset_caches
        EngineCore.shutdown
    vllm.v1.executor.abstract:Executor.sleep Executor.wake_up
    vllm.v1.executor.uniproc_executor:UniProcExecutor._init_executor ExecutorWithExternalLauncher
    vllm.v1.worker.gpu_worker:Worker.sleep Worker.wake_up Worker.load_model Worker.init_device
        Worker.shutdown
        Worker._maybe_get_memory_pool_context Worker.initialize_from_config
        Worker._get_cudagraph_capture_context
        Worker.determine_available_memory
    vllm.v1.worker.utils:request_memory
    vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model GPUModelRunner.finish_requests
        GPUModelRunner.add_requests
    vllm.v1.worker.gpu.sample.gumbel:apply_temperature gumbel_sample gumbel_noised_argmax
        murmur3_hash32
    vllm.v1.worker.gpu.sample.logprob:compute_topk_scores
    vllm.v1.worker.gpu.sample.sampler:Sampler
    vllm.v1.worker.gpu.sample.penalties:PenaltiesState.add_request PenaltiesState.apply
    vllm.v1.worker.gpu.sample.logit_bias:LogitBiasState.add_request LogitBiasState.apply
    vllm.v1.worker.gpu.sample.bad_words:BadWordsState.add_request BadWordsState.apply
    vllm.v1.worker.gpu.states:RequestState.add_request
"""
"""Functions that vLLM calls in a GPU run and whose behaviour the trainer needs."""
REEXPORTED = {
    "vllm:LLM": "vllm.entrypoints.llm:LLM",
    "vllm.model_executor.models:ModelRegistry": (
        "vllm.model_executor.models.registry:_ModelRegistry"
    ),
    "vllm:SamplingParams": "vllm.sampling_params:SamplingParams",
    "vllm:__version__": "",
    "vllm.config:ModelConfig": "vllm.config.model:ModelConfig",
    "vllm.config:VllmConfig": "vllm.config.vllm:VllmConfig",
    "vllm.config:set_current_vllm_config": "vllm.config.vllm:set_current_vllm_config",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe:cpu_fused_moe": (
        "vllm._custom_ops:cpu_fused_moe"
    ),
    "vllm.distributed.aux_output_connector.worker:get_tp_group": (
        "vllm.distributed.parallel_state:get_tp_group"
    ),
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner._sample": (
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample"
    ),
    "vllm.model_executor.layers.attention:MLAAttention": (
        "vllm.model_executor.layers.attention.mla_attention:MLAAttention"
    ),
    "vllm.model_executor.models.gpt_oss:dist": "",
    "vllm.platforms:current_platform": "vllm.platforms:__getattr__",
}
"""Name that a module passes on, or a class inherits -> its definition; "": it is no function."""


def targets(table: str = CALLED + RELIED_ON) -> list[tuple[str, str]]:
    """Return module and name of each target of a table."""
    out = []
    module = ""
    for word in table.split():
        before, colon, name = word.partition(":")
        module = before if colon else module
        out.append((module, name if colon else before))
    return out


def sources(package: Path) -> dict[str, list[str]]:
    """Return for each target "module:name" its parameters and the hash of its source. package: the
    folder of an installed vLLM. Raise LookupError for a target that is not there."""
    trees: dict[str, tuple[str, ast.Module]] = {}
    out = {}
    for module, name in targets():
        if module not in trees:
            path = package.joinpath(*module.split(".")[1:])
            path = (
                path.with_suffix(".py")
                if path.with_suffix(".py").is_file()
                else path / "__init__.py"
            )
            text = path.read_text() if path.is_file() else ""
            trees[module] = text, ast.parse(text)
        text, tree = trees[module]
        nodes = _definitions(tree.body, name)
        if not nodes:
            raise LookupError(f"{module} has no {name}")
        segments = [_normalised(text, node) for node in nodes]
        parameters = [ast.unparse(node.args) for node in nodes if isinstance(node, ast.FunctionDef)]
        digest = hashlib.sha256("\n".join(segments).encode()).hexdigest()[:16]
        out[f"{module}:{name}"] = ["; ".join(parameters), digest]
    return out


def _definitions(body: list[ast.stmt], name: str) -> list[ast.stmt]:
    """Return the statements that define a dotted name, those below an `if` or `try` included."""
    first, _, rest = name.partition(".")
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            inner = [
                *node.body,
                *node.orelse,
                *(line for h in getattr(node, "handlers", ()) for line in h.body),
            ]
            found += _definitions(inner, name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not rest:
            assigned = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [node] * any(
                isinstance(target, ast.Name) and target.id == first for target in assigned
            )
        elif getattr(node, "name", None) == first:
            found += (
                _definitions(node.body, rest)
                if rest and isinstance(node, ast.ClassDef)
                else [node] * (not rest)
            )
    return found


def _normalised(text: str, node: Any) -> str:
    """Return the source of a definition, its decorators included, without empty lines and lines of
    comments."""
    start = min(
        [node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))]
    )
    lines = text.splitlines()[start - 1 : node.end_lineno]
    kept = [line.rstrip() for line in lines if line.strip() and not line.strip().startswith("#")]
    return textwrap.dedent("\n".join(kept))


def used() -> set[str]:
    """Return "module:name" of each name of vLLM that rlhf_mc/rollout/vllm_*.py import, read as an
    attribute of a module of vLLM, or replace."""
    out: set[str] = set()
    for path in sorted((ROOT / "rlhf_mc" / "rollout").glob("vllm_*.py")):
        tree = ast.parse(path.read_text())
        modules = {}
        names = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules.update(
                    {
                        a.asname or a.name: a.name
                        for a in node.names
                        if a.name.split(".")[0] == "vllm"
                    }
                )
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    names[alias.asname or alias.name] = (node.module, alias.name)
        # A name that is imported from a package may be a module of it.
        modules.update(
            {alias: ".".join(pair) for alias, pair in names.items() if _is_module(".".join(pair))}
        )
        out |= {":".join(pair) for alias, pair in names.items() if alias not in modules}
        out |= {f"{modules[owner]}:{name}" for owner, name in _attributes(tree) if owner in modules}
        members = [
            (names[owner], name)
            for owner, name in _attributes(tree)
            if owner in names and owner not in modules
        ]
        out |= {f"{module}:{cls}.{name}" for (module, cls), name in members if cls[0].isupper()}
    return out


def _attributes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield owner and name of each attribute that is read, set or replaced (Patch, replaced)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("Patch", "replaced"):
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield ast.unparse(node.args[0]), str(name.value)


def installed() -> Path:
    """Return the folder of this environment's vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "vLLM is not installed"
    return Path(spec.origin).parent


def _is_module(name: str) -> bool:
    path = installed().joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def missing() -> list[str]:
    """Return the names that `used` finds and no target covers."""
    have = {f"{module}:{name}" for module, name in targets()}
    wanted = {_defined(name) for name in used()} - {""}
    return sorted(
        name for name in wanted if not any(f"{one}.".startswith(f"{name}.") for one in have)
    )


def _defined(name: str) -> str:
    """Return a name where it is defined; "" for what is no function."""
    for passed_on, definition in REEXPORTED.items():
        if f"{name}.".startswith(f"{passed_on}."):
            return definition and name.replace(passed_on, definition)
    return name


def differences(package: Path) -> list[str]:
    """Return a line for each target of an installed vLLM that is not as recorded."""
    recorded = json.loads(RECORD.read_text())
    found = sources(package)
    lines = [f"{name} has no record" for name in found.keys() - recorded.keys()]
    lines += [
        f"{name} is recorded and no longer a target" for name in recorded.keys() - found.keys()
    ]
    for name in found.keys() & recorded.keys():
        parameters, digest = found[name]
        recorded_parameters, recorded_digest = recorded[name]
        if parameters != recorded_parameters:
            lines.append(f"{name} takes ({parameters}), recorded is ({recorded_parameters})")
        elif digest != recorded_digest:
            lines.append(f"{name} has another source than the recorded one")
    return sorted(lines)


def record(package: Path) -> None:
    """Write the sources of an installed vLLM to the record."""
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in sources(package).items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
