"""The names and shards of vLLM's parameters, and the sizes that it can split. Nothing here imports
vLLM, since the dry run of a config plans with it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from rlhf_mc.architectures.parameters import engine_params
from rlhf_mc.architectures.rows import SPLIT_DIMS
from rlhf_mc.architectures.spec import ModelShape, padded_vocab_size
from rlhf_mc.config.errors import UserError
from rlhf_mc.reshard.layout import (
    Layout,
    Obstacle,
    check_split,
    indivisible,
    kv_obstacle,
    layout_of_layers,
    local_param,
    split_sizes,
    tensor_with,
)
from rlhf_mc.reshard.ranges import even_range, even_ranges, interleaved_ranges


@functools.cache
def vllm_layout(shape: ModelShape, tp_rank: int, tp_size: int) -> Layout:
    """Return the layout of a vLLM rank. The rows of all its query heads come first, then the rows
    of k, then the rows of v. KV heads are replicated if there are fewer than ranks. Every expert is
    split over all ranks."""
    check_vllm(shape, tp_size)
    vocab = padded_vocab_size(shape.vocab_size, 1)
    experts = range(shape.num_experts)
    params = []
    for param in engine_params(shape):
        name = str(param.engine)
        ranges = even_ranges(param, shape, tp_rank, tp_size, vocab)
        if param.rows and not param.kv_heads:
            ranges = interleaved_ranges(param.rows, tp_size, tp_rank, tp_size)
        if param.kv_heads:
            kv_shards = min(tp_size, param.kv_heads)
            kv = even_range(tp_rank * kv_shards // tp_size, kv_shards, shape.dims()["kv"])
            ranges = [(tensor, kv if "kv" in param.hf[tensor] else rows) for tensor, rows in ranges]
        if param.engine_alternates:
            halves = (replace(param, hf={tensor: param.hf[tensor]}) for tensor, _ in ranges)
            for number, (half, rows) in enumerate(zip(halves, ranges, strict=True)):
                params.append(replace(local_param(half, shape, name, [rows], experts), half=number))
            continue
        local = local_param(param, shape, name, ranges, experts)
        is_split = any(SPLIT_DIMS.intersection(dims) for dims in param.hf.values())
        if param.stage == "expert" and not is_split and tp_rank > 0:
            local = replace(local, shards=())  # of outputs: the first rank alone adds the bias
        params.append(replace(local, is_float32=local.is_float32 or param.engine_float32))
    layout = layout_of_layers(shape, params, range(shape.num_layers))
    return replace(layout, zero=frozenset(layout.stacked_shapes.keys() - layout.by_local.keys()))


def check_parameters(
    model_path: str, written: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise UserError unless the parameters that a weight update writes (name -> shape) are exactly
    the engine's.

    A parameter that nothing writes would stay zero, and the engine would generate with it."""
    wrong = [
        f"{name} is {actual.get(name, 'absent')} in the engine, {written.get(name, 'absent')} in "
        "the weight update"
        for name in {**actual, **written}
        if actual.get(name) != written.get(name)
    ]
    if not wrong:
        return
    more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    raise UserError(
        f"model.path {model_path}: the rollout engine's model is not the trainer's: "
        f"{'; '.join(wrong[:3])}{more}; "
        "a key of config.json means something else to the engine than to the trainer"
    )


def check_vllm(shape: ModelShape, tp_size: int) -> None:
    """Raise UserError if vLLM cannot split this model over tp_size ranks."""
    if shape.value_head:
        raise UserError("a model with a value head cannot be generated from; use the actor's model")
    check_split(
        "tensor_model_parallel_size", "vLLM", shape, tp_size, functools.partial(_obstacle, shape)
    )


def _obstacle(shape: ModelShape, tp_size: int) -> Obstacle | None:
    if problem := kv_obstacle(shape, tp_size):
        return problem
    for block in shape.blocks:
        if problem := block.engine_obstacle(tp_size):
            reason, dim = problem
            return reason, tensor_with(dim, shape)
    vocab = (
        "padded vocab_size",
        padded_vocab_size(shape.vocab_size, 1),
        "model.embed_tokens.weight",
    )
    return indivisible([*split_sizes(shape), vocab], tp_size)
