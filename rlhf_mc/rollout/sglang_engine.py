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
import torch.distributed as dist
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
from rlhf_mc.rollout.engine_loop import cached_token_cost
from rlhf_mc.rollout.vllm_layout import check_parameters, vllm_layout
from rlhf_mc.topology.consensus import gather_objects, on_every_rank
from rlhf_mc.topology.groups import pool_group

MARGIN = 8
"""Tokens of a context that SGLang keeps free."""
_ABSENT = ("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")
"""Fields of a request that SGLang's server sends for images, texts and log-probs."""
_NO_LOG_PROBS = {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0}


class DrawnTokens(Sampler):
    """SGLang's sampler, with a draw that depends on the request's seed and the token's place."""

    def begin(self, sampling: Sampling) -> None:
        """Begin a call without requests."""
        self.sampling = sampling
        self.draws = Draws(sampling)
        self.rows = np.zeros(0, np.int64), np.zeros(0, np.int64)
        """Request number and place in the sequence of each row's next token, two vectors [rows]."""
        self.log_probs = torch.zeros(0)
        """Log-probs of the tokens that were drawn last, [rows]."""
        self.warpers = LogitsProcessorList()
        if sampling.top_k > 0:
            self.warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.warpers.append(TopPLogitsWarper(sampling.top_p))

    def forward(self, logits_output: Any, info: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the tokens [rows] int32. The last argument: [rows] on the device."""
        logits = logits_output.next_token_logits.float()
        if self.sampling.temperature == 0:
            tokens = logits.argmax(-1)
        else:
            logits = self.warpers(None, logits / self.sampling.temperature)
            keys = self.draws.keys(*self.rows)
            if platform.use_cuda():
                keys = keys.view(torch.uint64).to(logits.device, non_blocking=True)
                # no places: the keys differ by them
                tokens = multinomial_with_seed(logits, keys, torch.zeros_like(args[-1]))[:, 0]
            else:
                tokens = torch.ops._C.fused_gumbel_argmax(logits.contiguous(), keys)
        self.log_probs = logits.gather(1, tokens[:, None].long())[:, 0] - logits.logsumexp(-1)
        return tokens.to(torch.int32)


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
        storage: Mapping[str, torch.Tensor],
    ) -> None:
        """Build the engine. Raise UserError, on all ranks of `groups`, if SGLang's parameters are
        not the weight update's. Every rank of `groups` must call it.

        storage: tensors that become SGLang's parameters of these names."""
        pool = pool_group([other for ranks in groups for other in ranks])
        group = next(list(ranks) for ranks in groups if rank in ranks)
        self.groups = groups
        self.max_running = cfg.max_num_seqs
        self.awake = frozenset({WEIGHTS, KV_CACHE})
        self._log_probs = LogProbs(0)
        self._requests: dict[int, tuple[Request, Any]] = {}
        """The requests that have not ended, by their numbers, with SGLang's objects."""
        if not platform.use_cuda():
            import vllm._C  # noqa: F401  (the kernel that draws: rollout/draws.py)
        self._layout = vllm_layout(shape, group.index(rank), len(group))
        kv_bytes = shape.cached_per_token(len(group)) * getattr(torch, dtype).itemsize
        arguments = ServerArgs(
            model_path=model_path,
            dtype=dtype,
            random_seed=seed,
            context_length=max_model_len + MARGIN,
            json_model_override_args=json.dumps({"tie_word_embeddings": shape.tie_embeddings}),
            **server_arguments(cfg, group, pool, kv_bytes),
        )
        place = platform.device().index if platform.use_cuda() else 0
        publish(arguments, role="scheduler", ranks=SpawnRanks(group.index(rank), gpu_id=place))
        with sglang_patches.tensor_parallel_groups(groups), sglang_patches.use_storage(storage):
            self._scheduler = on_every_rank(
                lambda: sglang_patches.SteppedScheduler(arguments), group=pool
            )
        self._scheduler.model_config.hf_eos_token_id = set()  # the end tokens are the request's
        runner = self._scheduler.tp_worker.model_runner
        self._sampler = runner.sampler = DrawnTokens()
        self._model: torch.nn.Module = runner.model
        self.num_parameters = sum(param.numel() for param in self._model.parameters())
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        self.cached_token_cost = cached_token_cost(kv_bytes, self.weight_bytes, pool)
        self.summary = (
            f"KV cache for {self._scheduler.max_total_num_tokens} tokens; "
            f"attention by {type(runner.attn_backend).__name__}"
        )
        shapes = {name: tuple(param.shape) for name, param in self.params.items()}
        try:
            on_every_rank(
                lambda: check_parameters(model_path, self._layout.shapes, shapes), group=pool
            )
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
    def params(self) -> dict[str, torch.Tensor]:
        """SGLang's parameters by name; a reshard writes them in place."""
        assert WEIGHTS in self.awake, "SGLang's weights are offloaded"
        return {name: param.data for name, param in self._model.named_parameters()}

    @torch.inference_mode()
    def weights_updated(self) -> None:
        """Discard the radix cache, which earlier weights have filled. Raise RuntimeError if SGLang
        keeps it."""
        if not self._requests:
            self._scheduler.step()  # it frees the requests that ended last
        if not self._scheduler.flush_cache(empty_cache=False):
            raise RuntimeError("SGLang did not flush its cache: a request is unfinished")

    def sleep(self) -> None:
        """Release the device memory of weights and KV cache, without a copy. Parameters in
        `storage` and CUDA graphs stay; the memory that `storage` has replaced is held while awake.
        On a CPU SGLang keeps all memory."""
        self.weights_updated()
        kept = [*self._model.buffers(), *(self.params[name] for name in self._layout.zero)]
        self._kept = [(tensor, tensor.cpu().clone()) for tensor in kept]
        platform.synchronize()  # torch_memory_saver unmaps without a wait, and SGLang has none
        for part in self.awake:  # it ends the process where it pauses a part twice
            self._scheduler.memory_saver_adapter.pause(part)
        self.awake = frozenset()

    @torch.inference_mode()
    def wake_up(self, part: str) -> None:
        """Allocate the memory of WEIGHTS, which a weight update then fills, or of KV_CACHE."""
        self._scheduler.memory_saver_adapter.resume(part)
        self.awake |= {part}
        if part == KV_CACHE:
            # its first row is that of the requests with which SGLang pads a CUDA graph
            self._scheduler.req_to_token_pool.req_to_token.zero_()
        for tensor, content in self._kept if part == WEIGHTS else ():
            tensor.copy_(content)

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
        assert self.awake == {WEIGHTS, KV_CACHE}, "SGLang sleeps"
        assert not self._requests or sampling == self._sampler.sampling, "two kinds of sampling"
        if not self._requests:
            self._log_probs = LogProbs(sampling.max_tokens)
            self._sampler.begin(sampling)
        if not requests:
            return
        self._log_probs.add(requests)
        self._sampler.draws.add(requests)
        for request in requests:
            limit = (request.max_tokens or sampling.max_tokens) - len(request.partial.token_ids)
            params = SamplingParams(
                max_new_tokens=limit, stop_token_ids=set(sampling.stop_token_ids)
            )
            params.normalize(None)
            self._scheduler.handle_generate_request(
                TokenizedGenerateReqInput(
                    rid=str(request.number),
                    input_ids=array("q", request.tokens()),
                    sampling_params=params,
                    stream=False,
                    **_NO_LOG_PROBS,
                    **dict.fromkeys(_ABSENT),
                )
            )
            self._requests[request.number] = (request, self._scheduler.waiting_queue[-1])

    def step(self) -> dict[int, Generation]:
        """Draw the next token of each request that runs. Return the responses that ended, by the
        request's number."""
        before = {number: len(state.output_ids) for number, (_, state) in self._requests.items()}
        states = self._scheduler.step()
        numbers = [int(state.rid) for state in states]
        # a prompt of several chunks draws with its last one
        drew = [len(s.output_ids) > before[n] for n, s in zip(numbers, states, strict=True)]
        if any(drew):
            log_probs = self._sampler.log_probs.cpu().numpy()
            self._log_probs.append(np.array(numbers)[drew].tolist(), log_probs[drew])
        over = [n for n, s in zip(numbers, states, strict=True) if s.finished()]
        ended = {number: self._response(number) for number in over}
        for number in over:
            del self._requests[number]
        return ended

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

    def close(self) -> None:
        """Free the engine and SGLang's process groups; the trainer's stay."""
        del self._scheduler, self._model, self._sampler
        sglang_patches.destroy_groups()
        gc.collect()


def server_arguments(
    cfg: RolloutConfig, group: Sequence[int], pool: dist.ProcessGroup | None, kv_bytes: int
) -> dict[str, Any]:
    """Return SGLang's arguments, without those of the model. group: the ranks of the engine. pool:
    those of all engines, which must call it. kv_bytes: of one token in the KV cache of a rank."""
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "tp_size": len(group),
        "max_running_requests": cfg.max_num_seqs,
        "chunked_prefill_size": cfg.max_num_batched_tokens,
        "grammar_backend": "none",
        "enable_fp32_lm_head": platform.float32_products(),
        "disable_overlap_schedule": True,  # a step returns the tokens that it has drawn
        "watchdog_timeout": 1e6,  # the trainer has its own (trainer.dist_timeout_seconds)
    }
    if not platform.use_cuda():
        return arguments | {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "max_total_tokens": (cfg.cpu_kvcache_space_gb << 30) // kv_bytes,
        }
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    free = min(gather_objects(free, pool))  # the ranks of an engine have caches of one size
    return arguments | {
        "device": "cuda",
        "disable_cuda_graph": cfg.enforce_eager,
        # vLLM's limits on Hopper. SGLang's are 8 to 512 requests, and all tokens of a chunk,
        # whose activations' memory the graphs hold while the engine sleeps.
        "cuda_graph_max_bs_decode": min(cfg.max_num_seqs, 512),
        "cuda_graph_max_bs_prefill": min(cfg.max_num_batched_tokens, 512),
        # as vLLM's, it numbers the ranks of a group in ascending order while graphs are captured
        "disable_custom_all_reduce": list(group) != sorted(group),
        "enable_memory_saver": cfg.free_cache_engine,
        # SGLang's share is of the free memory
        "mem_fraction_static": min(cfg.gpu_memory_utilization * total / free, 0.95),
    }
