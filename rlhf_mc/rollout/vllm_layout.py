"""vLLM as a rollout engine, without importing it: the names and shards of its parameters, and the sizes that it can
split. The dry run of a config plans with it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlhf_mc.architectures.parameters import Param, model_params
from rlhf_mc.architectures.spec import ModelShape, padded_vocab_size
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import Config, RolloutConfig
from rlhf_mc.reshard.layout import (
    FIRST_LAYER,
    Layout,
    Obstacle,
    check_split,
    even_range,
    even_ranges,
    ffn_size,
    heads_size,
    indivisible,
    is_qkv,
    kv_obstacle,
    layout_of_layers,
    local_param,
)

if TYPE_CHECKING:
    import torch

    from rlhf_mc.rollout.base import RolloutEngine

_RENAMED = {
    ".self_attn.q_proj.": ".self_attn.qkv_proj.",
    ".mlp.gate_proj.": ".mlp.gate_up_proj.",
    ".mlp.experts.{e}.gate_proj.": ".mlp.experts.routed_experts.w13_",
    ".mlp.experts.{e}.down_proj.": ".mlp.experts.routed_experts.w2_",
}
"""Part of the name of a parameter's first Hugging Face tensor -> vLLM's, which stacks a layer's experts in one tensor
[experts, ...]. All other names are Hugging Face's."""


def vllm_name(param: Param) -> str:
    """Return vLLM's name of a parameter."""
    name = next(iter(param.hf))
    for part, renamed in _RENAMED.items():
        name = name.replace(part, renamed)
    return name


@functools.cache
def vllm_layout(shape: ModelShape, tp_rank: int, tp_size: int) -> Layout:
    """Return the layout of a vLLM rank. The rows of all its query heads come first, then the rows of k, then the rows
    of v. KV heads are replicated if there are fewer than ranks. Every expert is split over all ranks."""
    check_vllm(shape, tp_size)
    kv_shards = min(tp_size, shape.num_kv_heads)
    kv = even_range(tp_rank * kv_shards // tp_size, kv_shards, shape.num_kv_heads * shape.head_dim)
    vocab = padded_vocab_size(shape.vocab_size, 1)
    params = []
    for param in model_params(shape):
        if param.stage == "last_if_not_first":
            continue  # the tied embedding, which vLLM has once
        ranges = even_ranges(param, shape, tp_rank, tp_size, vocab)
        if is_qkv(param):
            ranges = [(name, kv) if "kv" in param.hf[name] else (name, rows) for name, rows in ranges]
        params.append(local_param(param, shape, vllm_name(param), ranges, range(shape.num_experts)))
    return layout_of_layers(shape, params, range(shape.num_layers))


def check_vllm(shape: ModelShape, tp_size: int) -> None:
    """Raise UserError if vLLM cannot split this model over tp_size ranks."""
    if shape.value_head:
        raise UserError("a model with a value head cannot be generated from; use the actor's model")
    check_split("tensor_model_parallel_size", "vLLM", shape, tp_size, functools.partial(_obstacle, shape))


def _obstacle(shape: ModelShape, tp_size: int) -> Obstacle | None:
    if problem := kv_obstacle(shape, tp_size):
        return problem
    if shape.has_experts and tp_size > shape.num_experts:
        return f"num_experts is {shape.num_experts}, fewer than ranks", FIRST_LAYER + "mlp.gate.weight"
    vocab = ("padded vocab_size", padded_vocab_size(shape.vocab_size, 1), "model.embed_tokens.weight")
    return indivisible([heads_size(shape), ffn_size(shape), vocab], tp_size)


class VLLM:
    """vLLM, as rollout/base.py describes an EngineFactory. Its engine is imported by name where a run is built, since
    it imports torch and vLLM."""

    title = "vLLM"
    layout = staticmethod(vllm_layout)
    check_layout = staticmethod(check_vllm)

    def check_installation(self) -> None:
        """Import vLLM. Raise UserError if it is missing, of another version or for another device."""
        importlib.import_module("rlhf_mc.rollout.vllm_engine").check_build()

    def check_model(self, shape: ModelShape, cfg: RolloutConfig) -> None:
        """Raise UserError where vLLM cannot shard the model so, or has no kernel for it on this machine."""
        check_vllm(shape, cfg.tensor_model_parallel_size)
        importlib.import_module("rlhf_mc.rollout.vllm_limits").check_kernels(shape, cfg)

    def build(
        self,
        cfg: Config,
        shape: ModelShape,
        groups: Sequence[Sequence[int]],
        rank: int,
        storage: Mapping[str, torch.Tensor],
    ) -> RolloutEngine:
        """Return this rank's part of the engines over these groups. Every rank must call it."""
        engine: RolloutEngine = importlib.import_module("rlhf_mc.rollout.vllm_engine").VLLMEngine(
            cfg.model.path,
            shape,
            cfg.rollout,
            groups,
            rank,
            max_model_len=cfg.data.max_prompt_length + cfg.data.max_response_length,
            dtype=cfg.actor.megatron.dtype,
            seed=cfg.trainer.seed,
            storage=storage,
        )
        return engine
