"""Checks of a model's sizes against its training layout. They need no torch, so that an error
precedes its import."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import Config, DataConfig, MegatronConfig, layouts
from rlhf_mc.reshard.layout import check_mcore, mcore_layout
from rlhf_mc.topology.mesh import Mesh

FP8_MULTIPLES = {"tensorwise": 16, "blockwise": 128, "mxfp8": 32}
"""Recipe -> the multiple that each dimension of a matrix must be on its rank. tensorwise: cuBLAS
requires it. The others: a block of values that share a scale (is_quantizable of Transformer
Engine's quantizers)."""


def check_length(where: str, shape: ModelShape, data: DataConfig) -> None:
    """Raise UserError if a prompt and its response may have more tokens than the model has
    positions. where: the model's setting, for the message."""
    longest = data.max_prompt_length + data.max_response_length
    if longest > shape.max_position_embeddings:
        raise UserError(
            f"{where}: max_position_embeddings is {shape.max_position_embeddings}, fewer than the "
            f"{longest} tokens of data.max_prompt_length + data.max_response_length"
        )


def check_layouts(cfg: Config, shapes: Mapping[str, ModelShape]) -> None:
    """Raise UserError, naming the role and its layout, if a layout cannot shard its role's
    model."""
    for role, shape in shapes.items():
        megatron = layouts(cfg)[role]
        try:
            check_layout(shape, megatron, role)
        except UserError as error:
            tp = megatron.tensor_model_parallel_size
            pp = megatron.pipeline_model_parallel_size
            raise UserError(f"{error} ({role}.megatron: TP {tp} x PP {pp})") from None


def check_layout(shape: ModelShape, megatron: MegatronConfig, role: str = "actor") -> None:
    """Raise a UserError for a layout ({role}.megatron) that the model cannot be split into."""
    check_mcore(
        shape, megatron.tensor_model_parallel_size, ep_size=megatron.expert_model_parallel_size
    )
    _check_experts(shape, megatron, f"{role}.megatron")
    _check_stages(shape.num_layers, megatron, f"{role}.megatron")
    cp = megatron.context_parallel_size
    obstacle = next(filter(None, (mixer.context_obstacle for mixer in shape.mixers)), None)
    if obstacle is not None and cp > 1:
        raise UserError(
            f"{role}.megatron.context_parallel_size: {cp}; a {shape.family} model has {obstacle}: "
            "set it to 1"
        )
    for mixer in shape.mixers if megatron.cp_comm_type == "a2a" else ():
        problem = mixer.all_to_all_obstacle(megatron.tensor_model_parallel_size, cp)
        if problem is not None:
            raise UserError(f"{role}.megatron.cp_comm_type is 'a2a'; {problem}: set it to p2p")
    if megatron.fp8 is not None:
        _check_fp8(shape, megatron.fp8, megatron.tensor_model_parallel_size, f"{role}.megatron")
    for mixer, feed_forward in shape.kinds:
        if mixer.o_bias != feed_forward.mlp_bias:
            raise UserError(
                f"config.json: attention_bias is {mixer.o_bias} and mlp_bias is "
                f"{feed_forward.mlp_bias}; Megatron-Core has both or none"
            )


def cp_comm_type(shape: ModelShape, megatron: MegatronConfig) -> str:
    """Return how context-parallel ranks exchange keys and values, by the setting or by the fewer
    bytes."""
    tp = megatron.tensor_model_parallel_size
    cp = megatron.context_parallel_size
    is_a2a_less = all(mixer.exchanges_less_by_all_to_all(tp, cp) for mixer in shape.mixers)
    return megatron.cp_comm_type or ("a2a" if is_a2a_less else "p2p")


def _check_fp8(shape: ModelShape, recipe: str, tp: int, section: str) -> None:
    multiple = FP8_MULTIPLES[recipe]
    small = shape.one_of_each_kind()
    for name, size in mcore_layout(
        small, 0, tp, range(small.num_layers), first=False, last=False
    ).shapes.items():
        if re.search(r"\.(linear_.*|in_proj|out_proj)\.weight", name) and any(
            n % multiple for n in size
        ):
            raise UserError(
                f"{section}.fp8: {recipe!r} needs dimensions that are multiples of {multiple}; "
                f"{name} has {list(size)} on a tensor-parallel rank of {tp}"
            )


def _check_stages(num_layers: int, megatron: MegatronConfig, section: str) -> None:
    pp = megatron.pipeline_model_parallel_size
    first = megatron.num_layers_in_first_pipeline_stage
    last = megatron.num_layers_in_last_pipeline_stage
    vpp = megatron.virtual_pipeline_model_parallel_size or 1
    if vpp > 1 and num_layers % (pp * vpp):
        raise UserError(
            f"{section}.virtual_pipeline_model_parallel_size: {vpp} chunks for each of {pp} stages "
            f"do not divide the model's {num_layers} layers"
        )
    if (
        Mesh(pp, 1, pp, first_stage_layers=first, last_stage_layers=last, vpp=vpp).stage_sizes(
            num_layers
        )
        is not None
    ):
        return
    if first is None and last is None:
        fit = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
        raise UserError(
            f"{section}.pipeline_model_parallel_size: {pp} does not divide the model's "
            f"{num_layers} layers; what divides them: {', '.join(map(str, fit))}; or set "
            "num_layers_in_first_pipeline_stage"
        )
    between = pp - (first is not None) - (last is not None)
    rest = num_layers - (first or 0) - (last or 0)
    raise UserError(
        f"{section}.num_layers_in_first_pipeline_stage {first} and "
        f"num_layers_in_last_pipeline_stage {last} leave "
        f"{rest} of the model's {num_layers} layers for the other {between} of {pp} stages; "
        "each of these needs one at least, and all of them as many"
    )


def _check_experts(shape: ModelShape, megatron: MegatronConfig, section: str) -> None:
    tp = megatron.tensor_model_parallel_size
    if shape.num_experts and tp > 1 and not megatron.sequence_parallel:
        raise UserError(
            f"{section}.tensor_model_parallel_size: {tp} with a mixture of experts needs "
            f"{section}.sequence_parallel: true"
        )
    for layer in shape.kinds:
        if (problem := layer.feed_forward.training_obstacle()) is not None:
            raise UserError(f"config.json: {problem}")
