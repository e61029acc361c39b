"""The names and shards of vLLM's parameters, and the sizes that it can split. Nothing here imports
vLLM, since the dry run of a config plans with it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_mc.architectures.families import FAMILIES
from rlhf_mc.architectures.hf_config import HYBRID
from rlhf_mc.architectures.parameters import Param, model_params
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
from rlhf_mc.reshard.ranges import even_range, even_ranges, interleaved_ranges, is_qkv

_RENAMED = {
    ".self_attn.q_proj.": ".self_attn.qkv_proj.",
    ".self_attn.q_a_proj.": ".self_attn.fused_qkv_a_proj.",
    ".mlp.gate_proj.": ".mlp.gate_up_proj.",
    ".shared_experts.gate_proj.": ".shared_experts.gate_up_proj.",
    ".shared_expert.gate_proj.": ".shared_expert.gate_up_proj.",
    ".linear_attn.in_proj_qkv.": ".linear_attn.in_proj_qkvz.",
    ".linear_attn.in_proj_b.": ".linear_attn.in_proj_ba.",
    **{f".experts.{{e}}.{gate}.": ".experts.routed_experts.w13_" for gate in ("gate_proj", "w1")},
    **{f".experts.{{e}}.{down}.": ".experts.routed_experts.w2_" for down in ("down_proj", "w2")},
}
"""Part of the name of a parameter's first Hugging Face tensor -> vLLM's, which stacks a layer's
experts in one tensor [experts, ...]. All other names are Hugging Face's."""
_RENAMED_OF_FAMILY = {
    "gpt_oss": {".self_attn.": ".attn.", "model.embed_tokens.": "model.embedding."}
}
_FLOAT32 = {"glm4_moe": ".gate.", **dict.fromkeys(HYBRID, ".A_log")}
"""Family -> part of the names of the parameters that vLLM has in float32, since it computes with
them so."""
_HALF = "@"
"""Before the number of a half at the end of a local name: it is every second row of the experts of
vLLM's parameter, which has the rows of gate and up in turn."""


def vllm_name(param: Param, family: str) -> str:
    """Return vLLM's name of a parameter."""
    name = next(iter(param.hf))
    if len(param.hf) == 1 and ".q_proj." in name:
        return name  # of latent attention
    for part, renamed in (_RENAMED | _RENAMED_OF_FAMILY.get(family, {})).items():
        name = name.replace(part, renamed)
    return name


def _regrouped(params: Sequence[Param]) -> Iterator[Param]:
    """Yield the parameters, with the two projections to latent vectors as one: vLLM joins them, and
    replicates them. The projections of a delta net are two, whose rows are those of the
    checkpoint, or of two of its tensors each."""
    queries: Param | None = None
    for param in params:
        name = next(iter(param.hf))
        if ".q_a_proj." in name:
            queries = param
            continue
        if ".in_proj_qkvz." in name:
            yield from (
                replace(param, hf={tensor: dims}, rows=()) for tensor, dims in param.hf.items()
            )
            continue
        if ".in_proj_qkv." in name:
            tensors = list(param.hf.items())
            for pair in (tensors[:2], tensors[2:]):
                rows = tuple(part for part in param.rows if part.tensor in dict(pair))
                yield replace(param, hf=dict(pair), rows=rows)
            continue
        if ".kv_a_proj_with_mqa." in name and queries is not None:
            param = replace(param, hf={**queries.hf, **param.hf})
        yield param


@functools.cache
def vllm_layout(shape: ModelShape, tp_rank: int, tp_size: int) -> Layout:
    """Return the layout of a vLLM rank. The rows of all its query heads come first, then the rows
    of k, then the rows of v. KV heads are replicated if there are fewer than ranks. Every expert is
    split over all ranks."""
    check_vllm(shape, tp_size)
    kv_shards = min(tp_size, shape.num_kv_heads)
    kv = even_range(tp_rank * kv_shards // tp_size, kv_shards, shape.num_kv_heads * shape.head_dim)
    vocab = padded_vocab_size(shape.vocab_size, 1)
    params = []
    for param in _regrouped(model_params(shape)):
        if param.stage == "last_if_not_first":
            continue  # the tied embedding, which vLLM has once
        ranges = even_ranges(param, shape, tp_rank, tp_size, vocab)
        if param.rows and not is_qkv(param):
            ranges = interleaved_ranges(param.rows, tp_size, tp_rank, tp_size)
        if is_qkv(param):
            ranges = [
                (name, kv) if "kv" in param.hf[name] else (name, rows) for name, rows in ranges
            ]
        name = vllm_name(param, shape.family)
        experts = range(shape.num_experts)
        if (
            param.stage == "expert"
            and len(ranges) == 2
            and FAMILIES[shape.family].expert_names.in_one_tensor == "columns"
        ):
            halves = (replace(param, hf={tensor: param.hf[tensor]}) for tensor, _ in ranges)
            for number, (half, one) in enumerate(zip(halves, ranges, strict=True)):
                params.append(local_param(half, shape, f"{name}{_HALF}{number}", [one], experts))
        else:
            params.append(local_param(param, shape, name, ranges, experts))
            if name.endswith("w2_bias") and tp_rank > 0:  # the first rank alone adds it
                params[-1] = replace(params[-1], shards=())
    layout = layout_of_layers(shape, params, range(shape.num_layers))
    layout = replace(layout, zero=frozenset(layout.stacked_shapes.keys() - layout.by_local.keys()))
    wide = _FLOAT32.get(shape.family, "no parameter")
    return replace(
        layout, float32=layout.float32 | {name for name in layout.stacked_shapes if wide in name}
    )


def parameter_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the parameters of vLLM that have the local tensors of a layout."""
    shapes: dict[str, tuple[int, ...]] = {}
    for local, (experts, *rows) in layout.shapes.items():
        name, half, _ = local.partition(_HALF)
        shapes[name] = (experts, 2 * rows[0], *rows[1:]) if half else (experts, *rows)
    return shapes


def local_tensors(layout: Layout, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the local tensors of a layout: vLLM's parameters and views of them, by local name."""
    tensors = {}
    for local in layout.shapes:
        name, _, half = local.partition(_HALF)
        tensors[local] = parameters[name][:, int(half) :: 2] if half else parameters[name]
    return tensors


def check_parameters(
    model_path: str, written: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise UserError unless the parameters that a weight update writes (name -> shape) are exactly
    vLLM's.

    A parameter that nothing writes would stay zero, and vLLM would generate with it."""
    wrong = [
        *(
            f"vLLM alone has {name} {shape}"
            for name, shape in actual.items()
            if name not in written
        ),
        *(f"vLLM lacks {name} {shape}" for name, shape in written.items() if name not in actual),
        *(
            f"{name} has shape {actual[name]} in vLLM, {shape} in the weight update"
            for name, shape in written.items()
            if actual.get(name, shape) != shape
        ),
    ]
    if not wrong:
        return
    more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    raise UserError(
        f"model.path {model_path}: vLLM's model is not the trainer's: "
        f"{'; '.join(wrong[:3])}{more}; "
        "a key of config.json means something else to vLLM than to the trainer"
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
    if shape.sinks and tp_size > shape.num_kv_heads:
        return f"num_key_value_heads is {shape.num_kv_heads}, fewer than ranks", tensor_with(
            "kv", shape
        )
    if shape.has_experts and tp_size > shape.num_experts:
        return f"num_experts is {shape.num_experts}, fewer than ranks", tensor_with(
            "experts", shape
        )
    vocab = (
        "padded vocab_size",
        padded_vocab_size(shape.vocab_size, 1),
        "model.embed_tokens.weight",
    )
    return indivisible([*split_sizes(shape), vocab], tp_size)
