"""The rollout engine over SGLang, in this process: its scheduler (continuous batching, radix cache,
CUDA graphs), driven step by step, without its processes and sockets. Parameters are written in
place by a reshard. sglang_patches.py is the other file that imports sglang.
"""

from __future__ import annotations

import gc
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from rlhf_mc.rollout import sglang_patches  # isort: skip  (first: it sets what sglang reads)

with sglang_patches.stand_ins():
    from sglang.srt.layers.sampler import Sampler, multinomial_with_seed
    from sglang.srt.managers.io_struct import (
        AbortReq,
        ContinueGenerationReqInput,
        PauseGenerationReqInput,
        TokenizedGenerateReqInput,
    )
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.data.batch import Generation
from rlhf_mc.rollout.base import KV_CACHE, WEIGHTS, Request, Sampling
from rlhf_mc.rollout.draws import Draws, LogProbs
from rlhf_mc.rollout.vllm_layout import check_parameters, vllm_layout
from rlhf_mc.topology.consensus import gather_objects, on_every_rank
from rlhf_mc.topology.groups import pool_group

MARGIN = 8
"""Tokens of a context that SGLang keeps free."""
_OVERHEAD_BYTES = {True: 1 << 32, False: 1 << 24}
"""As in vllm_engine.py."""


class DrawnTokens(Sampler):
    """SGLang's sampler, with a draw that depends on the request's seed and the token's place."""

    def begin(self, sampling: Sampling) -> None:
        """Begin a call without requests."""
        self.sampling = sampling
        self.draws = Draws(sampling)
        self.seeds: dict[int, int] = {}
        self.requests = np.zeros(0, np.int64)
        """The request of each row of the next batch."""
        self.log_probs = torch.zeros(0)
        """Of the tokens that were drawn last, [rows]."""
        self.warpers = LogitsProcessorList()
        if sampling.top_k > 0:
            self.warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.warpers.append(TopPLogitsWarper(sampling.top_p))

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests."""
        self.draws.add(requests)
        self.seeds.update((request.number, request.seed) for request in requests)

    def forward(self, logits_output: Any, info: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the tokens [rows] int32. positions: [rows], the place before the token's."""
        positions = args[3] if len(args) > 3 else kwargs["positions"]
        logits = logits_output.next_token_logits.float()
        if self.sampling.temperature == 0:
            tokens = logits.argmax(-1)
        else:
            logits = self.warpers(None, logits / self.sampling.temperature)
            tokens = self._draw(logits, positions + 1)
        drawn = logits.gather(1, tokens[:, None].long()) - logits.logsumexp(-1, keepdim=True)
        self.log_probs = drawn[:, 0]
        return tokens.to(torch.int32)

    def _draw(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if not platform.use_cuda():
            keys = self.draws.keys(self.requests, positions.numpy())
            return torch.ops._C.fused_gumbel_argmax(logits.contiguous(), keys)
        seeds = torch.tensor([self.seeds[int(number)] for number in self.requests])
        tokens = multinomial_with_seed(logits.log_softmax(-1), seeds.to(logits.device), positions)
        return tokens[:, 0]


class SGLangEngine:
    """This rank's part of one SGLang engine, as rollout/base.py describes it. Before the first
    weight update the weights are zero."""

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
    ) -> None:
        """Build the engine. Raise UserError, on all ranks of `groups`, if SGLang's parameters are
        not the weight update's. Every rank of `groups` must call it.

        storage: tensors that become SGLang's parameters of these names."""
        pool = pool_group([other for ranks in groups for other in ranks])
        self._group = next(list(g) for g in groups if rank in g)
        self.groups = groups
        self.max_running = cfg.max_num_seqs
        self.awake = frozenset({WEIGHTS, KV_CACHE})
        self._sampling: Sampling | None = None
        self._log_probs = LogProbs(0)
        self._requests: dict[int, tuple[Request, Any]] = {}
        """The requests that have not ended, by their numbers, with SGLang's objects."""
        if not platform.use_cuda():
            import vllm._C  # noqa: F401  (the kernel that draws: rollout/draws.py)
        tp_rank = self._group.index(rank)
        layout = vllm_layout(shape, tp_rank, len(self._group))
        kv_bytes = shape.cached_per_token(len(self._group)) * getattr(torch, dtype).itemsize
        arguments = ServerArgs(
            **server_arguments(model_path, shape, cfg, max_model_len, dtype, seed, kv_bytes)
        )
        place = platform.device().index or 0 if platform.use_cuda() else 0
        publish(arguments, role="scheduler", ranks=SpawnRanks(tp_rank, gpu_id=place))
        with (
            sglang_patches.tensor_parallel_groups(groups),
            sglang_patches.use_storage(storage or {}),
        ):
            self._scheduler = sglang_patches.SteppedScheduler(
                arguments, sglang_patches.SimpleNamespace(nccl_port=0)
            )
        self._scheduler.model_config.hf_eos_token_id = set()  # the end tokens are the request's
        self._sampler = self._runner.sampler = DrawnTokens()
        read_bytes = max(gather_objects(self.weight_bytes, pool))
        self.cached_token_cost = kv_bytes / (read_bytes + _OVERHEAD_BYTES[platform.use_cuda()])
        shapes = {name: tuple(p.shape) for name, p in self._model.named_parameters()}
        try:
            on_every_rank(lambda: check_parameters(model_path, layout.shapes, shapes), group=pool)
            if self._scheduler.max_req_len <= max_model_len:
                raise UserError(
                    f"SGLang's KV cache holds {self._scheduler.max_req_len} tokens, and a sequence "
                    f"has {max_model_len}; raise rollout.gpu_memory_utilization, or on a CPU "
                    "rollout.cpu_kvcache_space_gb"
                )
        except UserError:
            self.close()
            raise

    @property
    def _runner(self) -> Any:
        return self._scheduler.tp_worker.model_runner

    @property
    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._runner.model
        return model

    @property
    def summary(self) -> str:
        """One line of text for the console: the KV cache of a rank, and what computes attention."""
        return (
            f"KV cache for {self._scheduler.max_total_num_tokens} tokens; "
            f"attention by {type(self._runner.attn_backend).__name__}"
        )

    @property
    def num_parameters(self) -> int:
        """Parameters that this rank holds."""
        return sum(param.numel() for param in self._model.parameters())

    @property
    def weight_bytes(self) -> int:
        """Bytes of these parameters, those that alias the trainer's included."""
        return sum(param.numel() * param.element_size() for param in self._model.parameters())

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """SGLang's parameters by name; a reshard writes them in place."""
        return {name: param.data for name, param in self._model.named_parameters()}

    @torch.inference_mode()
    def weights_updated(self) -> None:
        """Discard the radix cache, which earlier weights have filled. Raise RuntimeError if SGLang
        keeps it."""
        if not self._requests:
            self._scheduler.step(self._set_rows)  # it frees the requests that ended last
        if not self._scheduler.flush_cache(empty_cache=False):
            raise RuntimeError("SGLang did not flush its cache: a request is unfinished")

    @property
    def num_unfinished(self) -> int:
        """Number of requests that were added and have not ended."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Number of requests with a place in the KV cache."""
        return len(self._requests) - len(self._scheduler.waiting_queue)

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Add requests, with the same sampling parameters as all that have not ended."""
        assert not self._requests or sampling == self._sampling, "two kinds of sampling at once"
        if not self._requests:
            self._sampling = sampling
            self._log_probs = LogProbs(sampling.max_tokens)
            self._sampler.begin(sampling)
        if not requests:
            return
        self._log_probs.add(requests)
        self._sampler.add(requests)
        for request in requests:
            limit = (request.max_tokens or sampling.max_tokens) - len(request.partial.token_ids)
            self._scheduler.handle_generate_request(
                TokenizedGenerateReqInput(
                    rid=str(request.number),
                    input_text=None,
                    input_ids=array("q", [*request.prompt.tolist(), *request.partial.token_ids]),
                    input_embeds=None,
                    mm_inputs=None,
                    token_type_ids=None,
                    sampling_params=SamplingParams(
                        max_new_tokens=limit,
                        stop_token_ids=set(sampling.stop_token_ids),
                        stop_strs=[],
                        stop_regex_strs=[],
                        is_normalized=True,
                    ),
                    return_logprob=False,
                    logprob_start_len=-1,
                    top_logprobs_num=0,
                    token_ids_logprob=None,
                    stream=False,
                )
            )
            self._requests[request.number] = (request, self._scheduler.waiting_queue[-1])

    def step(self) -> dict[int, Generation]:
        """Draw the next token of each request that runs. Return the responses that ended, by the
        request's number."""
        before = {number: len(state.output_ids) for number, (_, state) in self._requests.items()}
        states = self._scheduler.step(self._set_rows)
        numbers = [int(state.rid) for state in states]
        drew = [
            len(state.output_ids) > before[number]
            for number, state in zip(numbers, states, strict=True)
        ]
        if any(drew):
            log_probs = self._sampler.log_probs.cpu().numpy()
            self._log_probs.append(
                [n for n, yes in zip(numbers, drew, strict=True) if yes], log_probs[drew]
            )
        ended = {}
        for number, state in zip(numbers, states, strict=True):
            if state.finished():
                ended[number] = self._response(number)
                del self._requests[number]
        return ended

    def _set_rows(self, states: Sequence[Any]) -> None:
        self._sampler.requests = np.array([int(state.rid) for state in states])

    def _response(self, number: int) -> Generation:
        request, state = self._requests[number]
        return Generation(
            [*request.partial.token_ids, *state.output_ids],
            self._log_probs.of(number),
            finished=isinstance(state.finished_reason, FINISH_MATCHED_TOKEN),
        )

    @torch.inference_mode()
    def abort(self) -> dict[int, Generation]:
        """Abort all requests. Return the partial responses, by the request's number."""
        responses = {number: self._response(number) for number in self._requests}
        self._requests.clear()
        # Retracted requests wait, and a request that waits is dropped without another token.
        self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._scheduler.abort_request(AbortReq(abort_all=True))
        self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        return responses

    def sleep(self) -> None:
        """Raise RuntimeError: rollout.free_cache_engine is refused."""
        raise RuntimeError("the engine of SGLang does not sleep")

    def wake_up(self, part: str) -> None:
        """Raise RuntimeError: rollout.free_cache_engine is refused."""
        raise RuntimeError("the engine of SGLang does not sleep")

    def close(self) -> None:
        """Free the engine and SGLang's process groups; the trainer's stay."""
        del self._scheduler
        sglang_patches.destroy_groups()
        gc.collect()


def server_arguments(
    model_path: str,
    shape: ModelShape,
    cfg: RolloutConfig,
    max_model_len: int,
    dtype: str,
    seed: int,
    kv_bytes: int,
) -> dict[str, Any]:
    """Return SGLang's arguments. kv_bytes: of one token in the KV cache of a rank."""
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "json_model_override_args": json.dumps({"tie_word_embeddings": shape.tie_embeddings}),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": dtype,
        "tp_size": cfg.tensor_model_parallel_size,
        "context_length": max_model_len + MARGIN,
        "max_running_requests": cfg.max_num_seqs,
        "chunked_prefill_size": cfg.max_num_batched_tokens,
        "grammar_backend": "none",
        "random_seed": seed,
        "enable_fp32_lm_head": platform.float32_products(),
        "disable_overlap_schedule": True,  # a step returns the tokens that it has drawn
        "watchdog_timeout": 1e6,  # the trainer has its own (trainer.dist_timeout_seconds)
        "log_level": "error",
    }
    if not platform.use_cuda():
        return arguments | {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "max_total_tokens": (cfg.cpu_kvcache_space_gb << 30) // kv_bytes,
        }
    free, total = torch.cuda.mem_get_info()
    return arguments | {
        "device": "cuda",
        "disable_cuda_graph": cfg.enforce_eager,
        # SGLang's share is of the free memory
        "mem_fraction_static": min(cfg.gpu_memory_utilization * total / free, 0.95),
    }
