"""Functions that the ranks run in test_lora.py."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from logged import messages_of
from model_cases import (
    TEMPERATURE,
    Role,
    _my_micro_batches,
    _objective,
    logical_tensors,
    make_engine,
    mesh_groups,
    score_tokens,
)

from rlhf_mc.checkpoint import peft_format
from rlhf_mc.checkpoint.hf_export import export_hf
from rlhf_mc.checkpoint.peft_format import (
    adapter_tensors,
    export_adapters,
    read_adapters,
    start_adapters,
)
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import LoraConfig, OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine, engine_layouts
from rlhf_mc.models.heads import log_prob_head, value_head
from rlhf_mc.reshard.freeze import frozen_parameters, frozen_tensors


def fill_b(engine: ModelEngine) -> None:
    """Fill every B with numbers that do not depend on the layout."""
    sizes = adapter_tensors(engine.shape)
    for shard in engine_layouts(engine)[engine.groups.rank].shards:
        if shard.tensor.endswith("lora_B.weight"):
            draw = torch.Generator().manual_seed(zlib.crc32(shard.tensor.encode()))
            whole = torch.randn(sizes[shard.tensor], generator=draw) / 4
            (start, end), _ = shard.box
            first = shard.offset[0]
            engine.params[shard.local][first : first + end - start] = whole[start:end]


def train_adapters(
    checkpoint: str,
    role: Role,
    lora: dict[str, Any],
    batch: RaggedBatch,
    directory: str,
    layout: dict[str, int],
    **megatron: Any,
) -> dict[str, Any]:
    """Start a model with adapters, write it to `directory` (the model, and in `adapter` its
    adapters), and train it for a step. Return its results with adapters, without, and without B;
    gradients and weights before and after the step."""
    with mesh_groups(**{"tp": 1, "pp": 1, **layout}) as groups:
        settings = LoraConfig(**lora)
        engine = make_engine(checkpoint, role, groups, settings, **megatron)
        shape = engine.shape
        head = value_head if role == "critic" else log_prob_head(shape.vocab_size, TEMPERATURE)
        layouts = engine_layouts(engine)
        start_adapters(engine.params, layouts[groups.rank], shape, seed=1)
        zero = score_tokens(engine, batch, head, 32)
        fill_b(engine)
        base = engine_layouts(engine, shape.base)
        if role == "actor":
            dtype = str(engine.dtype)
            export_hf(engine.rollout_params, base, shape.base, directory, dtype, checkpoint)
        adapter = Path(directory) / "adapter"
        with messages_of(peft_format.logger) as warnings:
            export_adapters(engine.params, layouts, shape, adapter, engine.dtype, checkpoint)
        before = logical_tensors(engine, engine.params)
        for name, param in engine.params.items():
            if ".lora_" in name:
                param.zero_()
        read_adapters(
            "actor.lora.adapter_path", adapter, engine.params, layouts[groups.rank], shape
        )
        reread = logical_tensors(engine, engine.params)

        frozen = frozen_parameters(frozen_tensors("", [], shape), layouts[groups.rank])
        engine.make_trainable(OptimConfig(lr=1e-2, weight_decay=0.1), 1, frozen)
        scores = score_tokens(engine, batch, head, 32)
        reference = score_tokens(engine.without_adapters(), batch, head, 32)
        micro_batches = _my_micro_batches(engine, batch, 32)
        objective = _objective(engine, batch, "token-mean")
        engine.backward(batch, micro_batches, objective)
        local = {
            name: param.main_grad if param.requires_grad else torch.full_like(param, torch.nan)
            for name, param in engine.named_parameters().items()
        }
        gradients = logical_tensors(engine, local)
        step = engine.train_step(batch, micro_batches, objective)
        return {
            "zero": zero,
            "scores": scores,
            "reference": reference,
            "gradients": gradients,
            "grad_norm": step.grad_norm,
            "before": before,
            "reread": reread,
            "after": logical_tensors(engine, engine.params),
            "adapters": list(adapter_tensors(shape)),
            "warnings": warnings,
        }


def read_errors(checkpoint: str, lora: dict[str, Any], directories: Sequence[str]) -> list[str]:
    """Return the error of reading each directory's adapter; "" without one."""
    errors = []
    with mesh_groups(1, 1) as groups:
        engine = make_engine(checkpoint, "actor", groups, LoraConfig(**lora))
        layout = engine_layouts(engine)[groups.rank]
        for directory in directories:
            try:
                key = "actor.lora.adapter_path"
                read_adapters(key, directory, engine.params, layout, engine.shape)
                errors.append("")
            except UserError as error:
                errors.append(str(error))
    return errors
