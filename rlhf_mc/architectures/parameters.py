"""The table of parameters: the rows of each kind of layer, which its blocks have, and those of the
model outside its layers.

A row has the parameter's names in Megatron-Core, the Hugging Face tensors that it concatenates, and
the names of their dimensions, which decide the tensor-parallel split. ModelShape.dims has the sizes
of the dimensions; reshard/layout.py computes the shards of each rank, and rollout/vllm_layout.py
those of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlhf_mc.architectures.families import FAMILIES
from rlhf_mc.architectures.lora import AdapterRows, adapter_rows, choose_modules
from rlhf_mc.architectures.rows import Param
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.model_schema import LoraConfig


def _outside(shape: ModelShape) -> list[Param]:
    """Return the parameters outside the layers."""
    embedding = {"model.embed_tokens.weight": ("vocab", "hidden")}
    params = [
        Param("first", embedding, "embedding.word_embeddings.weight"),
        Param("last", {"model.norm.weight": ("hidden",)}, "decoder.final_layernorm.weight"),
    ]
    if shape.value_head:
        return [*params, Param("last", {"score.weight": ("one", "hidden")}, "output_layer.weight")]
    if shape.tie_embeddings:  # Megatron-Core replicates a tied embedding on the last stage
        return [*params, Param("last_if_not_first", embedding, "output_layer.weight")]
    return [*params, Param("last", {"lm_head.weight": ("vocab", "hidden")}, "output_layer.weight")]


def model_params(shape: ModelShape) -> tuple[Param, ...]:
    """Return the rows of the parameters that this model has, each once for each kind of layer."""
    adapters = (row for rows in model_adapters(shape) for row in (rows.a, rows.b))
    return (*_outside(shape), *_in_layers(shape), *adapters)


def _in_layers(shape: ModelShape) -> list[Param]:
    """Return the parameters of the layers, without adapters."""
    return [
        replace(param, kind=kind)
        for kind, layer in enumerate(shape.kinds)
        for block in layer
        for param in block.params()
    ]


def model_adapters(shape: ModelShape) -> list[AdapterRows]:
    """Return the rows of the model's adapters, each once for each kind of layer."""
    return [] if shape.lora is None else adapter_rows(_in_layers(shape), shape.lora)


def with_adapters(shape: ModelShape, key: str, settings: LoraConfig) -> ModelShape:
    """Return the model with the adapters of the settings `key`: none with rank 0. Raise UserError
    for a name that is of no linear layer."""
    if settings.rank == 0:
        return shape
    return replace(shape, lora=choose_modules(key, settings, _in_layers(shape)))


def engine_params(shape: ModelShape) -> list[Param]:
    """Return the rows as vLLM has them: `engine` is its parameter, one for each."""
    params: dict[tuple[int | None, str], Param] = {}
    for param in model_params(shape.base):
        if param.stage == "last_if_not_first":
            continue  # the tied embedding, which vLLM has once
        engine = param.engine
        names = engine if isinstance(engine, Mapping) else {t: engine or t for t in param.hf}
        has_rows = engine is not None or len(param.hf) == 1
        for name in dict.fromkeys(names.values()):
            hf = {tensor: dims for tensor, dims in param.hf.items() if names[tensor] == name}
            rows = tuple(part for part in param.rows if has_rows and part.tensor in hf)
            for module, renamed in FAMILIES[shape.family].engine_modules.items():
                name = name.replace(module, renamed)
            before = params.pop((param.kind, name), None)
            hf = {**(before.hf if before else {}), **hf}
            params[param.kind, name] = replace(param, hf=hf, rows=rows, engine=name)
    return list(params.values())
