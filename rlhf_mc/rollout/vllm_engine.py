"""The rollout engine over vLLM, in this process: built over given rank groups, with parameters that a reshard writes in
place. Besides vllm_patches.py the only file that imports vllm.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlhf_mc.rollout import vllm_patches  # isort: skip  (it sets what vllm reads when it is imported)
import vllm

from rlhf_mc import platform
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.data.batch import Generation
from rlhf_mc.reshard.layout import check_vllm, vllm_layout
from rlhf_mc.rollout.base import KV_CACHE, WEIGHTS, Sampling
from rlhf_mc.topology.consensus import gather_objects, on_every_rank


def check_rollout_layout(shape: ModelShape, cfg: RolloutConfig) -> None:
    """Raise UserError where vLLM cannot shard the model so, or has no kernel for its head dimension."""
    check_vllm(shape, cfg.tensor_model_parallel_size)
    if not platform.use_cuda() and shape.head_dim % 32:
        raise UserError(f"model.path: head dimension {shape.head_dim}; vLLM's CPU attention takes multiples of 32")


class VLLMEngine:
    """This rank's part of one vLLM engine, as rollout/base.py describes it. Before the first weight update the weights
    are arbitrary."""

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
        """Build the engine. Raise UserError, on all ranks, if vLLM's parameters are not those of the weight update.
        Every rank must call it.

        storage: tensors that become vLLM's parameters of these names, in place of memory that vLLM allocates."""
        self._group = next(list(g) for g in groups if rank in g)
        self._replica = next(i for i, g in enumerate(groups) if rank in g)
        self._num_replicas = len(groups)
        self._rank = rank
        self.awake = frozenset({WEIGHTS, KV_CACHE})
        """The parts on the device."""
        self._buffers: dict[str, torch.Tensor] = {}
        options: dict[str, Any] = {}
        if platform.use_cuda():
            options.update(gpu_memory_utilization=cfg.gpu_memory_utilization, enforce_eager=cfg.enforce_eager)
            options.update(enable_sleep_mode=cfg.free_cache_engine)
            # The only backend that does not repack the weights of experts: a weight update writes them in place.
            options.update(moe_backend="triton")
        else:
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cfg.cpu_kvcache_space_gb)
            options.update(enforce_eager=True)
        vllm_patches.patch()
        vllm_patches.use_storage(storage or {})
        with vllm_patches.tensor_parallel_groups(groups):
            self._llm = vllm.LLM(
                model_path,
                config_format="hf",  # not mistral's params.json, which the trainer does not read
                skip_tokenizer_init=True,
                tensor_parallel_size=cfg.tensor_model_parallel_size,
                distributed_executor_backend="external_launcher",
                load_format=vllm_patches.LOAD_FORMAT,
                hf_overrides={"tie_word_embeddings": shape.tie_embeddings},
                dtype=dtype,
                seed=seed,
                max_model_len=max_model_len,
                max_num_seqs=cfg.max_num_seqs,
                max_num_batched_tokens=max(cfg.max_num_batched_tokens, max_model_len),
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                **options,
            )
        written = vllm_layout(shape, self._group.index(rank), len(self._group)).shapes
        found = {name: tuple(param.shape) for name, param in self.params.items()}
        try:
            on_every_rank(lambda: _check_parameters(model_path, written, found))
        except UserError:
            self.close()
            raise

    @property
    def _model(self) -> torch.nn.Module:
        executor: Any = self._llm.llm_engine.model_executor
        model: torch.nn.Module = executor.driver_worker.worker.model_runner.model
        return model

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """vLLM's parameters, by the names of reshard's vLLM layout; a reshard writes them in place."""
        assert WEIGHTS in self.awake, "vLLM's weights are offloaded"
        return {name: param.data for name, param in self._model.named_parameters()}

    def weights_updated(self) -> None:
        """Discard the prefix cache, which earlier weights have filled. Call after each weight update. Raise
        RuntimeError if vLLM keeps it: responses would be computed from old keys and values."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: a request still holds blocks of the KV cache")

    def sleep(self) -> None:
        """Release the device memory of weights and KV cache. Neither is kept, since a weight update writes all weights.
        Parameters in `storage` stay: vLLM has not allocated them. GPU only."""
        self._buffers = {name: buffer.cpu().clone() for name, buffer in self._model.named_buffers()}
        self._llm.sleep(level=2)
        self.awake = frozenset()

    def wake_up(self, part: str) -> None:
        """Allocate the memory of WEIGHTS, which a weight update then fills, or of KV_CACHE. GPU only.

        Raise RuntimeError if vLLM has not restored a buffer that is no parameter (rotary tables): no update writes
        it."""
        self._llm.wake_up(tags=[part])
        self.awake |= {part}
        if part == WEIGHTS:
            for name, buffer in self._model.named_buffers():
                if not torch.equal(buffer.cpu(), self._buffers[name]):
                    raise RuntimeError(f"vLLM's buffer {name} is not what it was before its sleep")

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[Generation]:
        """Return one response per prompt, for all prompts, on every rank. Every rank must call it with the same
        arguments.

        Engine e takes prompts e, e + number of engines, ... A response depends on its prompt and seed, not on its
        engine or batch. Raise UserError if the ranks of one engine have drawn different tokens."""
        assert self.awake == {WEIGHTS, KV_CACHE}, "vLLM sleeps"
        mine = range(self._replica, len(prompts), self._num_replicas)
        requests = [
            vllm.SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,  # the end tokens are among stop_token_ids
                seed=seeds[i],
                logprobs=0,
                detokenize=False,
            )
            for i in mine
        ]
        outputs = (
            self._llm.generate(
                [vllm.TokensPrompt(prompt_token_ids=list(prompts[i])) for i in mine], requests, use_tqdm=False
            )
            if requests
            else []
        )
        responses = [_to_generation(out.outputs[0]) for out in outputs]
        digest = hashlib.sha256(repr([r.token_ids for r in responses]).encode()).hexdigest()
        is_first = self._rank == self._group[0]
        everyone = gather_objects((self._replica, digest, responses if is_first else None))
        _check_same_tokens(everyone)
        result: list[Generation | None] = [None] * len(prompts)
        for replica, _, part in everyone:
            if part is not None:
                result[replica :: self._num_replicas] = part
        assert all(r is not None for r in result)
        return result  # type: ignore[return-value]

    def close(self) -> None:
        """Free the engine and vLLM's process groups, so that another engine can be built in this process."""
        with vllm_patches.world_kept():
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()


def _check_parameters(
    model_path: str, written: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise UserError unless the parameters that a weight update writes (name -> shape) are exactly vLLM's.

    A parameter that nothing writes would stay zero, and vLLM would generate with it."""
    wrong = [
        *(f"vLLM alone has {name} {shape}" for name, shape in found.items() if name not in written),
        *(f"vLLM lacks {name} {shape}" for name, shape in written.items() if name not in found),
        *(
            f"{name} has shape {found[name]} in vLLM, {shape} in the weight update"
            for name, shape in written.items()
            if name in found and found[name] != shape
        ),
    ]
    if not wrong:
        return
    more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    raise UserError(
        f"model.path {model_path}: vLLM's model is not the trainer's: {'; '.join(wrong[:3])}{more}; "
        "a key of config.json means something else to vLLM than to the trainer"
    )


def _to_generation(output: Any) -> Generation:
    token_ids = list(output.token_ids)
    log_probs = [entry[token].logprob for token, entry in zip(token_ids, output.logprobs, strict=True)]
    return Generation(token_ids, log_probs, finished=output.finish_reason == "stop")


def _check_same_tokens(everyone: Sequence[tuple[int, str, Any]]) -> None:
    """Raise UserError if ranks of one engine have different digests. All ranks have the same list, so all raise."""
    first: dict[int, int] = {}
    for rank, (replica, digest, _) in enumerate(everyone):
        other = first.setdefault(replica, rank)
        if everyone[other][1] != digest:
            raise UserError(
                f"rollout: ranks {other} and {rank} of one vLLM engine drew different tokens; they must run the same "
                "vLLM, the same weights and the same seeds (is one of them on other hardware or another version?)"
            )
