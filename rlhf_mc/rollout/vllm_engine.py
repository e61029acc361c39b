"""The in-process vLLM engine: builds it over given rank groups, hands out its parameters to be written in place,
and generates. It knows nothing of rewards or training. Beside vllm_patches.py, the only file that imports vllm.
"""

from __future__ import annotations

import os

# Read by vllm when it is imported: the engine lives in this very process, and nothing is fetched or reported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from rlhf_mc import platform

if not platform.use_cuda():
    # The CPU engine runs eagerly; what it would still compile costs a C++ compiler and minutes on first use. (The
    # environment's TORCH_COMPILE_DISABLE is read when another library imports torch._dynamo, which is too early.)
    torch._dynamo.config.disable = True

import contextlib
import functools
import gc
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
import vllm
import vllm.distributed.parallel_state as vllm_state
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.data.batch import Generation
from rlhf_mc.reshard.layout import check_vllm, vllm_layout
from rlhf_mc.rollout.vllm_patches import patch
from rlhf_mc.topology.consensus import gather_objects, on_every_rank


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Nothing is cut off the distribution (no top-k, no top-p)."""

    temperature: float
    """0: greedy."""
    max_tokens: int
    """Longest response."""
    stop_token_ids: tuple[int, ...]
    """A response ends with any of these, the token included."""


def check_rollout_layout(shape: ModelShape, cfg: RolloutConfig) -> None:
    """Refuses, before an engine is built, a model that vLLM cannot cut so, or whose heads it has no kernel for."""
    check_vllm(shape, cfg.tensor_model_parallel_size)
    if not platform.use_cuda() and shape.head_dim % 32:
        raise UserError(f"model.path: head dimension {shape.head_dim}; vLLM's CPU attention takes multiples of 32")


@contextlib.contextmanager
def _groups_as_given(groups: Sequence[Sequence[int]]) -> Iterator[None]:
    """vLLM takes consecutive ranks as tensor-parallel groups; inside this context it takes the given ones, whose order
    is that of their shards (torch would sort the ranks of a group, and gather in that order).

    No group gets vLLM's message queue in shared memory: each rank drives its own engine, so nothing is broadcast, and a
    process that ends without closing its queue leaks it."""
    original = vllm_state.init_model_parallel_group
    in_order = functools.partial(dist.new_group, sort_ranks=False)

    def init_group(group_ranks: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["use_message_queue_broadcaster"] = False
        if kwargs.get("group_name") != "tp":
            return original(group_ranks, *args, **kwargs)
        with mock.patch.object(dist, "new_group", in_order):
            return original([list(ranks) for ranks in groups], *args, **kwargs)

    with mock.patch.object(vllm_state, "init_model_parallel_group", init_group):
        yield


WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""vLLM's names for what it can give back."""
LOAD_FORMAT = "rlhf_mc"
"""vLLM's name for the way in which its parameters get their memory here."""


def _give_memory(storage: Mapping[str, torch.Tensor]) -> None:
    """Has vLLM take these tensors as its parameters of these names; all others are its own, and zero.

    It is done where vLLM would load weights: before it measures memory or captures graphs, which hold addresses."""

    class Loader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass  # nothing is loaded: a reshard fills the parameters

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            for name, param in model.named_parameters():
                found = storage.get(name)
                if found is None or found.shape != param.shape:  # which is refused once the engine is built
                    param.data.zero_()
                    continue
                assert found.dtype == param.dtype, name
                param.data = found

    register_model_loader(LOAD_FORMAT)(Loader)


class RolloutEngine:
    """This rank's part of one vLLM engine. Its weights are arbitrary until the first update."""

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
        """storage: by vLLM's names, tensors that are to be its parameters, in place of memory of its own.

        Every rank must call it. UserError on all of them where vLLM's parameters are not those of the weight update."""
        self._group = next(list(g) for g in groups if rank in g)
        self._replica = next(i for i, g in enumerate(groups) if rank in g)
        self._num_replicas = len(groups)
        self._rank = rank
        self.awake = frozenset({WEIGHTS, KV_CACHE})
        """What is on the device."""
        self._buffers: dict[str, torch.Tensor] = {}
        options: dict[str, Any] = {}
        if platform.use_cuda():
            options.update(gpu_memory_utilization=cfg.gpu_memory_utilization, enforce_eager=cfg.enforce_eager)
            options.update(enable_sleep_mode=cfg.free_cache_engine)
            # The one backend that keeps the weights of experts as they are laid out, so that they can be written.
            options.update(moe_backend="triton")
        else:
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cfg.cpu_kvcache_space_gb)
            options.update(enforce_eager=True)
        patch()
        _give_memory(storage or {})
        with _groups_as_given(groups):
            self._llm = vllm.LLM(
                model_path,
                config_format="hf",  # not mistral's params.json, which the trainer does not read
                skip_tokenizer_init=True,
                tensor_parallel_size=cfg.tensor_model_parallel_size,
                distributed_executor_backend="external_launcher",
                load_format=LOAD_FORMAT,
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
        """vLLM's own parameters, by the names of reshard's vLLM layout; a reshard writes them in place."""
        assert WEIGHTS in self.awake, "vLLM's weights are put away"
        return {name: param.data for name, param in self._model.named_parameters()}

    def weights_updated(self) -> None:
        """Forgets what was computed with earlier weights (the prefix cache). Call after each reshard."""
        self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Gives the device memory of weights and KV cache back. Nothing of either is kept, since an update brings all
        weights; parameters that were given to vLLM (`storage`) are not its to give back, and stay. GPU only."""
        self._buffers = {name: buffer.cpu().clone() for name, buffer in self._model.named_buffers()}
        self._llm.sleep(level=2)
        self.awake = frozenset()

    def wake_up(self, part: str) -> None:
        """Takes the memory of WEIGHTS again, to be filled by an update, or then of KV_CACHE. GPU only. RuntimeError
        where vLLM has not brought a buffer back that is no parameter (rotary tables): no update would."""
        self._llm.wake_up(tags=[part])
        self.awake |= {part}
        if part == WEIGHTS:
            for name, buffer in self._model.named_buffers():
                if not torch.equal(buffer.cpu(), self._buffers[name]):
                    raise RuntimeError(f"vLLM's buffer {name} is not what it was before its sleep")

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[Generation]:
        """One response per prompt, for all prompts, on every rank. Every rank must call it with the same arguments.

        Engine e takes prompts e, e + number of engines, ...; each response depends on its own seed alone, not on
        who generates it or beside what. Raises where the ranks of one engine have drawn different tokens."""
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
        """Frees the engine and vLLM's process groups, so that another engine can be built in this process."""
        # vLLM would take the whole world down with its own groups; the world is the trainer's.
        with mock.patch.object(vllm_state, "destroy_distributed_environment", lambda: None):
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
    """Every rank holds the same list, so all ranks raise together."""
    first: dict[int, int] = {}
    for rank, (replica, digest, _) in enumerate(everyone):
        other = first.setdefault(replica, rank)
        if everyone[other][1] != digest:
            raise UserError(
                f"rollout: ranks {other} and {rank} of one vLLM engine drew different tokens; they must run the same "
                "vLLM, the same weights and the same seeds (is one of them on other hardware or another version?)"
            )
