"""The rollout engine over vLLM, in this process: built over given rank groups, with parameters that
a reshard writes in place. The other files that import vllm are its neighbours vllm_*.py.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlhf_mc.rollout import vllm_patches  # isort: skip  (first: it sets what vllm reads)
import vllm
from vllm.inputs.engine import tokens_input
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    bind_routed_experts_capturer,
)
from vllm.platforms import current_platform
from vllm.v1.request import Request as VLLMRequest
from vllm.v1.request import RequestStatus

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError, first_line
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.data.batch import Generation
from rlhf_mc.rollout.base import KV_CACHE, WEIGHTS, Request, Sampling
from rlhf_mc.rollout.draws import Draws, LogProbs, request_number
from rlhf_mc.rollout.engine_loop import cached_token_cost
from rlhf_mc.rollout.routed_experts import RoutedExperts
from rlhf_mc.rollout.vllm_derived import derive_weights, loaded_parameters
from rlhf_mc.rollout.vllm_fp8 import METHOD, QuantizedLayers
from rlhf_mc.rollout.vllm_layout import (
    check_parameters,
    vllm_layout,
)
from rlhf_mc.rollout.vllm_limits import check_dtype, kv_cache_share
from rlhf_mc.rollout.vllm_options import (
    custom_all_reduce,
    engine_settings,
    gpu_options,
    sampling_params,
)
from rlhf_mc.topology.consensus import on_every_rank
from rlhf_mc.topology.groups import pool_group
from rlhf_mc.topology.shared_gpu import in_turn


def check_build() -> None:
    """Raise UserError if this build of vLLM does not compute where the trainer does, or draws
    tokens by generators. vLLM chooses the device by its own build and the driver, without
    RLHF_MC_DEVICE."""
    device = current_platform.device_type
    wanted = platform.device().type
    if device != wanted:
        raise UserError(
            f"rollout: this vLLM computes on {device or 'no device'}, and the trainer on {wanted}; "
            "install vLLM's build for "
            f"{wanted}{', or unset RLHF_MC_DEVICE' if device == 'cuda' else ''}"
        )
    if wanted == "cuda" and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        raise UserError(
            "rollout: VLLM_USE_V2_MODEL_RUNNER is 0; unset it: vLLM's other model runner does not "
            "draw by seed and position, and a response that is continued would repeat its draws"
        )


class VLLMEngine:
    """This rank's part of one vLLM engine, as rollout/base.py describes it. Before the first weight
    update the weights are arbitrary."""

    def __init__(
        self,
        model_path: str,
        shape: ModelShape,
        cfg: RolloutConfig,
        groups: Sequence[Sequence[int]],
        rank: int,
        max_model_len: int,
        dtype: str,
        seed: int,
        storage: Mapping[str, torch.Tensor] | None = None,
        return_experts: bool = False,
    ) -> None:
        """Build the engine. Raise UserError, on all ranks of `groups`, if vLLM's parameters are not
        the weight update's. Every rank of `groups` must call it.

        storage: tensors that become vLLM's parameters of these names, in place of memory that vLLM
        allocates. return_experts: responses have the experts that vLLM has chosen
        (Generation.experts)."""
        check_dtype(shape, dtype)
        pool = pool_group([other for ranks in groups for other in ranks])
        self._group = next(list(g) for g in groups if rank in g)
        self.groups = groups
        self.max_running = cfg.max_num_seqs
        self._sampling: Sampling | None = None
        """Sampling parameters of the requests that have not ended."""
        self._draws: Draws | None = None
        """Random draws of these requests, on a CPU."""
        self._log_probs = LogProbs(0)
        """Log-probs of these requests."""
        self._requests: dict[int, tuple[Request, VLLMRequest]] = {}
        """The requests that have not ended, by their numbers, with vLLM's objects."""
        self.awake = frozenset({WEIGHTS, KV_CACHE})
        """The parts on the device."""
        self._layout = vllm_layout(shape, self._group.index(rank), len(self._group))
        self._buffers: dict[str, torch.Tensor] = {}
        self._expert_layers = shape.expert_layers if return_experts else []
        self._experts: RoutedExperts | None = None
        """The record of the routers' choices, on a CPU."""
        options: dict[str, Any] = {"disable_custom_all_reduce": not custom_all_reduce(groups, cfg)}
        if platform.use_cuda():
            _keep_stream()
            shared = storage or {}
            kv_cache = on_every_rank(
                lambda: kv_cache_share(cfg, self._layout, getattr(torch, dtype), shared),
                group=pool,
            )
            options.update(
                gpu_options(cfg),
                enable_return_routed_experts=return_experts,
                kv_cache_memory_bytes=kv_cache,
            )
        else:
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cfg.cpu_kvcache_space_gb)
            options.update(enforce_eager=True)
            for block in shape.blocks:
                options.update(block.vllm_cpu_options)
            # prefix caching computes a prompt once, and only one request's routers are recorded
            if return_experts:
                options.update(enable_prefix_caching=False)
        if cfg.quantization is not None:
            options.update(quantization=METHOD)
        vllm_patches.patch()
        vllm_patches.use_storage(storage or {})
        with (
            vllm_patches.tensor_parallel_groups(groups),
            vllm_patches.in_any_world(shape.family),
            vllm_patches.on_own_gpu(),
            _build_errors(cfg),
        ):
            self._llm = vllm.LLM(
                **engine_settings(model_path, shape, cfg, max_model_len, dtype) | options,
                # A part of the name of vLLM's cache of compiled code, in which each global rank has
                # a folder. The code contains what follows from the rank's place in its engine (its
                # range of the vocabulary), and vLLM does not know that `groups` sets the place.
                additional_config={"rank_in_engine": self._group.index(rank)},
                seed=seed,
                logprobs_mode="processed_logprobs",
            )
        if return_experts and not platform.use_cuda():
            self._experts = RoutedExperts(shape)
            bind_routed_experts_capturer(self._model, self._experts)
        kv_bytes = shape.cached_per_token(len(self._group)) * getattr(torch, dtype).itemsize
        self.cached_token_cost = cached_token_cost(kv_bytes, self.weight_bytes, pool)
        self._quantized = QuantizedLayers(self._model, self._llm.llm_engine.vllm_config)
        shapes = self._quantized.shapes(self._model)
        try:
            on_every_rank(
                lambda: check_parameters(model_path, self._layout.shapes, shapes), group=pool
            )
        except UserError:
            self.close()
            raise

    @property
    def _runner(self) -> Any:
        executor: Any = self._llm.llm_engine.model_executor
        return executor.driver_worker.worker.model_runner

    @property
    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    @property
    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._runner.model
        return model

    @property
    def summary(self) -> str:
        """One line of text for the console: the KV cache of a rank, and what computes attention."""
        config = self._llm.llm_engine.vllm_config
        cache = config.cache_config
        layers = config.compilation_config.static_forward_context.values()
        attention = {
            layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")
        }
        num_bytes = sum(tensor.size for tensor in self._runner.kv_cache_config.kv_cache_tensors)
        return (
            f"KV cache: {num_bytes / 1e9:.2f} GB, for {cache.kv_cache_size_tokens} tokens: "
            f"{cache.kv_cache_max_concurrency:.1f} sequences of "
            f"{config.model_config.max_model_len} tokens; "
            f"attention by {', '.join(sorted(attention))}"
        )

    @property
    def num_parameters(self) -> int:
        """Parameters that this rank holds, which may sleep."""
        return sum(param.numel() for _, param in loaded_parameters(self._model))

    @property
    def weight_bytes(self) -> int:
        """Bytes of these parameters, those that alias the trainer's included."""
        return sum(
            param.numel() * param.element_size() for _, param in loaded_parameters(self._model)
        )

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """vLLM's parameters by name; a reshard writes them in place. With rollout.quantization
        those of linear layers are temporary and unquantized, until `weights_updated`."""
        assert WEIGHTS in self.awake, "vLLM's weights are offloaded"
        self._quantized.stage()
        return {name: param.data for name, param in loaded_parameters(self._model)}

    def weights_updated(self) -> None:
        """Quantize new weights (rollout.quantization), derive others from them, and discard the
        prefix cache, which earlier weights have filled. Call after each weight update. Raise
        RuntimeError if vLLM keeps the cache."""
        self._quantized.quantize()
        derive_weights(self._model)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache: a request still holds blocks of the KV cache"
            )

    def sleep(self) -> None:
        """Release the device memory of weights and KV cache. Neither is kept, since a weight update
        writes all weights. Parameters in `storage` stay: vLLM has not allocated them. GPU only.
        Every rank must call it: those of one GPU take turns, since vLLM asserts that the GPU has
        more free memory afterwards."""
        self._buffers = {name: buffer.cpu().clone() for name, buffer in self._model.named_buffers()}
        in_turn(lambda: self._llm.sleep(level=2))
        self.awake = frozenset()

    def wake_up(self, part: str) -> None:
        """Allocate the memory of WEIGHTS, which a weight update then fills, or of KV_CACHE. GPU
        only.

        Raise RuntimeError if vLLM has not restored a buffer that is no parameter (rotary tables):
        no update writes it."""
        self._llm.wake_up(tags=[part])
        self.awake |= {part}
        if part == WEIGHTS:
            for name in self._layout.zero:
                self.params[name].zero_()
            for name, buffer in self._model.named_buffers():
                if not torch.equal(buffer.cpu(), self._buffers[name]):
                    raise RuntimeError(f"vLLM's buffer {name} is not what it was before its sleep")

    @property
    def num_unfinished(self) -> int:
        """Number of requests that were added and have not ended."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Number of requests with a place in the KV cache."""
        num_running, _ = self._core.scheduler.get_request_counts()
        return int(num_running)

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Add requests, with the same sampling parameters as all that have not ended."""
        assert self.awake == {WEIGHTS, KV_CACHE}, "vLLM sleeps"
        assert not self._requests or sampling == self._sampling, "two kinds of sampling at once"
        if not self._requests:
            self._sampling = sampling
            self._log_probs = LogProbs(sampling.max_tokens)
            self._draws = None if platform.use_cuda() else Draws(sampling)
        if not requests:
            return
        self._log_probs.add(requests)
        if self._draws is not None:
            self._draws.add(requests)
        engine = self._llm.llm_engine
        try:
            for request in requests:
                # Not LLM.generate: it renders each prompt first, which tokens do not need, in a
                # quarter of the time of adding a request. Not LLMEngine.add_request: vLLM's output
                # processor would wait for each token.
                prompt = tokens_input(request.tokens())
                params = sampling_params(sampling, request, draws_itself=self._draws is None)
                core_request = engine.input_processor.process_inputs(
                    str(request.number), prompt, params, engine.get_supported_tasks()
                )
                engine.input_processor.assign_request_id(core_request)
                engine.engine_core.add_request(core_request)
                self._requests[request.number] = (
                    request,
                    self._core.scheduler.requests[core_request.request_id],
                )
        except Exception:  # raised again: the next call would wait for these requests
            self.abort()
            raise

    def step(self) -> dict[int, Generation]:
        """Draw the next token of each request that runs. Return the responses that ended, by the
        request's number."""
        draws = self._draws
        with (
            contextlib.nullcontext()
            if draws is None
            else vllm_patches.drawing(draws, self._experts),
            self._core.scheduler.recording(self._log_probs),
        ):
            ended = self._llm.llm_engine.engine_core.get_output().outputs
        responses = {}
        for output in ended:
            request, state = self._requests.pop(request_number(output.request_id))
            responses[request.number] = self._with_experts(
                request, self._response(request, state), output
            )
        return responses

    def _response(self, request: Request, state: VLLMRequest) -> Generation:
        """Return the tokens sampled so far."""
        return Generation(
            [*request.partial.token_ids, *state.output_token_ids],
            self._log_probs.of(request.number),
            finished=state.status == RequestStatus.FINISHED_STOPPED,
        )

    def _with_experts(self, request: Request, response: Generation, output: Any) -> Generation:
        """Return the response with the experts of vLLM's output or of this engine's own record, if
        asked for."""
        if self._experts is not None:
            num_routed = len(request.prompt) + len(response.token_ids) - 1
            return replace(response, experts=self._experts.take(request.number, num_routed))
        if self._expert_layers:
            return replace(response, experts=output.routed_experts[:, self._expert_layers])
        return response

    def abort(self) -> dict[int, Generation]:
        """End all requests. Return what was generated of each response, by the request's number."""
        responses = {number: self._response(*states) for number, states in self._requests.items()}
        if self._experts is not None:
            self._experts.forget([*responses])
        core = self._llm.llm_engine.engine_core
        core.abort_requests([state.request_id for _, state in self._requests.values()])
        self._requests.clear()
        while self._core.batch_queue:  # steps that vLLM has begun ahead of their results
            core.get_output()
        return responses

    def close(self) -> None:
        """Free the engine and vLLM's process groups, so that another engine can be built in this
        process."""
        if self.awake != {WEIGHTS, KV_CACHE}:
            # Of memory that sleeps vLLM would print a CUDA error for each block. So it does where
            # there is no room.
            with contextlib.suppress(RuntimeError):
                self._llm.wake_up()
        with vllm_patches.preserved_world():
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()


def _keep_stream() -> None:
    """Let vLLM use the current stream. Its current_stream() knows a stream only by
    torch.cuda.set_stream, which it has replaced when it was imported; without a call since then it
    enters a stream of its own."""
    torch.cuda.set_stream(torch.cuda.current_stream())


@contextlib.contextmanager
def _build_errors(cfg: RolloutConfig) -> Iterator[None]:
    """Raise UserError, with the settings to change, where vLLM lacks memory for itself or for one
    sequence, or has no fp8 kernel."""
    setting, value = (
        ("rollout.gpu_memory_utilization", cfg.gpu_memory_utilization)
        if platform.use_cuda()
        else ("rollout.cpu_kvcache_space_gb", cfg.cpu_kvcache_space_gb)
    )
    more = (
        f"raise {setting} or rollout.tensor_model_parallel_size, or lower data.max_prompt_length "
        "or data.max_response_length"
    )
    less = f"lower {setting}, or free memory (offload the models, fewer ranks)"
    advice = {
        "To serve at least one request": more,
        "No available memory": more,
        "Free memory on device": less,
        "Available memory on node": less,
    }
    try:
        yield
    except ValueError as error:
        for start, change in advice.items():
            if str(error).startswith(start):
                reason = re.split(r"\. (?=Try|Decrease|Reduce|On the CPU)", str(error))[0]
                raise UserError(f"{setting} {value}: vLLM says: {reason}; {change}") from error
        if cfg.quantization is not None and str(error).startswith(
            ("Failed to find a kernel", "FP8 PTPC")
        ):
            raise UserError(
                f"rollout.quantization is 'fp8'; vLLM says: {first_line(error)}; set it to null"
            ) from error
        raise
