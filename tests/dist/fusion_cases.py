"""Functions that the ranks run in test_fusions.py: engines with the fusions of a GPU, as far as a
CPU computes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import model_cases
import torch
from megatron.core.fusions import fused_bias_geglu, fused_bias_swiglu
from megatron.core.tensor_parallel import layers
from model_cases import Job

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models import gpt_model, pipeline
from rlhf_mc.models.engine import engine_layouts
from rlhf_mc.models.gpt_model import fusions
from rlhf_mc.patching import replaced
from rlhf_mc.reshard.freeze import frozen_parameters, frozen_tensors

Calls = list[str]
FUNCTIONS = {
    "swiglu": (fused_bias_swiglu.SwiGLUFunction, "backward"),
    "bias_swiglu": (fused_bias_swiglu.BiasSwiGLUFunction, "backward"),
    "weighted_swiglu": (fused_bias_swiglu.WeightedSwiGLUFunction, "backward"),
    "geglu": (fused_bias_geglu.GeGLUFunction, "backward"),
}


@contextlib.contextmanager
def fused_activations() -> Iterator[Calls]:
    """Build models with Megatron-Core's fused activations, whose functions are interpreted instead
    of compiled. Yield the names of those whose backward pass runs."""
    calls: Calls = []

    def on_gpu(shape: ModelShape) -> dict[str, Any]:
        return {**fusions(shape), **gpt_model._fused_activation(shape)}

    with contextlib.ExitStack() as stack:
        for name, (function, method) in FUNCTIONS.items():
            original = getattr(function, method)

            def backward(ctx: Any, *grads: Any, name: str = name, original: Any = original) -> Any:
                calls.append(name)
                return original(ctx, *grads)

            stack.enter_context(replaced(function, method, staticmethod(backward)))
        stack.enter_context(replaced(gpt_model, "fusions", on_gpu))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield calls


@contextlib.contextmanager
def fused_accumulation() -> Iterator[Calls]:
    """Build models whose linear layers add to main_grad in the backward pass. Apex's kernel for it
    runs on GPUs only: its definition, out += grad^T input, takes its place. Yield an entry for each
    of its calls."""
    calls: Calls = []

    def accumulate(inputs: torch.Tensor, grads: torch.Tensor, out: torch.Tensor) -> None:
        calls.append("wgrad_gemm_accum_fp32")
        out.addmm_(grads.t().to(out.dtype), inputs.to(out.dtype))

    def on_gpu(shape: ModelShape) -> dict[str, Any]:
        return {**fusions(shape), "gradient_accumulation_fusion": True}

    with (
        replaced(
            layers,
            "fused_weight_gradient_mlp_cuda",
            SimpleNamespace(wgrad_gemm_accum_fp32=accumulate),
        ),
        replaced(layers, "_grad_accum_fusion_available", True),
        replaced(gpt_model, "fusions", on_gpu),
    ):
        yield calls


KINDS = {"activations": fused_activations, "accumulation": fused_accumulation}


def gradients(
    kind: str, jobs: Sequence[Job], tp: int, pp: int, batch: RaggedBatch, **megatron: Any
) -> tuple[set[str], dict[Job, tuple[dict[str, float], dict[str, torch.Tensor]]]]:
    """Return (names of the fused functions that ran, model_cases.gradients) with a kind of
    fusion."""
    with KINDS[kind]() as calls:
        found = model_cases.gradients(jobs, tp, pp, batch, **megatron)
    return set(calls), found


def padded_gradients(
    jobs: Sequence[Job], tp: int, batch: RaggedBatch, multiple: int, **megatron: Any
) -> dict[Job, tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """Return model_cases.gradients with micro-batches padded to a multiple, as for fp8."""
    with replaced(pipeline, "token_multiple", lambda megatron: multiple):
        return model_cases.gradients(jobs, tp, 1, batch, **megatron)


def partly_frozen_gradients(
    job: Job, patterns: Sequence[str], tp: int, pp: int, batch: RaggedBatch, **megatron: Any
) -> dict[str, torch.Tensor]:
    """Return the gradients with fused accumulation while the tensors that match `patterns` are
    frozen; theirs is
    NaN."""
    with fused_accumulation(), model_cases.mesh_groups(tp, pp) as groups:
        model = model_cases.make_engine(job.checkpoint, job.role, groups, **megatron)
        tensors = frozen_tensors(f"{job.role}.freeze", patterns, model.shape)
        frozen = frozen_parameters(tensors, engine_layouts(model)[groups.rank])
        model.make_trainable(OptimConfig(), total_steps=1, frozen=frozen)
        mini = batch.select(job.sequences)
        micro_batches = model_cases._my_micro_batches(model, mini, job.budget)
        model.backward(mini, micro_batches, model_cases._objective(model, mini, job.mode))
        local = {
            name: param.main_grad if param.requires_grad else torch.full_like(param, torch.nan)
            for name, param in model.named_parameters().items()
        }
        return model_cases.logical_tensors(model, local)
