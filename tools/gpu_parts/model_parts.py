"""Parts that compare the models of all families with transformers: log-probs and gradients."""

from __future__ import annotations

import functools
import gc
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_parts.engines import (
    TEMPERATURE,
    Job,
    Role,
    logical_tensors,
    make_engine,
    mesh_groups,
    my_micro_batches,
    objective,
    score_tokens,
    shared_directory,
    token_batch,
)
from gpu_parts.reference import Reference, by_checkpoint_names
from gpu_parts.report import Report
from gpu_parts.sizes import Sizes
from gpu_parts.tiny import make_checkpoint
from rlhf_mc import platform
from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.gpt_model import uses_transformer_engine
from rlhf_mc.models.heads import log_prob_head
from rlhf_mc.topology.consensus import on_rank_0
from rlhf_mc.topology.groups import ProcessGroups

BOUNDS = {"log_prob": 1e-4, "gradient": 1e-3}
"""Largest errors in float32: of a log-prob in nats, and of a gradient relative to its norm.
tests/dist bounds the same errors on a CPU at 1e-5 and 1e-4; a GPU adds in another order."""
FACTOR = 3.0
"""In bfloat16 the errors may be this multiple of the errors of transformers in bfloat16. Both are
against transformers in float32 on the same weights. Over seeds of the small models the ratio is 0.5
to 2.1, since a token may cross the clip range, or change its expert, in one of them."""
_SHARING = ("qwen2", "gpt_oss", "deepseek_v3", "qwen3_next")
"""Families whose models are compared with shared prompts too."""
BUDGET = 1024
"""Tokens of a micro-batch, beside the longest sequence."""


@dataclass(frozen=True)
class Computed:
    """Results of one model."""

    log_probs: torch.Tensor
    """[R]"""
    grads: dict[str, torch.Tensor]
    """By the names of the Hugging Face checkpoint."""
    attention: str = ""
    """Attention of the layers: "transformer_engine" or "torch"."""


def models_float32(report: Report, sizes: Sizes) -> None:
    """Compare each family's model in float32, with Megatron-Core's local layers."""
    _compare_families(report, sizes, "float32")


def models_bfloat16(report: Report, sizes: Sizes) -> None:
    """Compare each family's model in bfloat16, with Megatron-Core's local layers."""
    _compare_families(report, sizes, "bfloat16")


def models_te(report: Report, sizes: Sizes) -> None:
    """Compare each family's model in bfloat16, with Transformer Engine's layers."""
    report.check(uses_transformer_engine(), "the layers are not Transformer Engine's")
    _compare_families(report, sizes, "bfloat16")


def models_te_float32(report: Report, sizes: Sizes) -> None:
    """Compare each family's model in float32, with Transformer Engine's layers and torch's
    attention: Transformer Engine's own has no float32 kernel for packed sequences."""
    report.check(uses_transformer_engine(), "the layers are not Transformer Engine's")
    _compare_families(report, sizes, "float32")


def _compare_families(report: Report, sizes: Sizes, dtype: str) -> None:
    worst = {"log_prob": 0.0, "gradient": 0.0}
    layouts = _layouts(dist.get_world_size())
    with shared_directory() as directory:
        for family, extra in sizes.families.items():
            keys = {**sizes.model, **extra}
            # transformers writes on rank 0 alone.
            make = functools.partial(make_checkpoint, directory / family, family, **keys)
            checkpoint = str(on_rank_0(make))
            for role in ("actor", "critic") if family == "qwen2" else ("actor",):
                for layout, settings in (layouts | _further_layouts(family, role)).items():
                    name = f"{family}_{role}" + (f"_{layout}" if layout else "")
                    with report.case(name):
                        errors = _compare(report, name, checkpoint, role, sizes, dtype, settings)
                        worst = {key: max(worst[key], errors[key]) for key in worst}
    report.summarize(
        f"{len(sizes.families)} families: log-probs off by {worst['log_prob']:.1e} nats "
        f"({'at most' if dtype == 'float32' else 'median'}), gradients by {worst['gradient']:.1e}"
    )


def _layouts(world: int) -> dict[str, dict[str, Any]]:
    """Return the layouts to compare: over the ranks by tensor parallelism and by pipeline
    stages."""
    if world % 2:
        return {"": {}}
    # experts with tensor parallelism need sequence parallelism
    tensor = {"tp": 2, "sequence_parallel": True}
    return {"tp2": tensor, "pp2": {"pp": 2}}


def _further_layouts(family: str, role: Role) -> dict[str, dict[str, Any]]:
    """Return the layouts of one family: its experts, or the sequences, over two ranks; and prompts
    that are computed once, for one family of each kind of attention."""
    if role == "critic":
        return {}
    shared = {"shared": {"share_prompts": True}}
    found: dict[str, Any] = shared if family in _SHARING else {}
    if dist.get_world_size() % 2:
        return found
    layouts = {"qwen2": {"cp2": {"cp": 2}}, "qwen3_moe": {"ep2": {"ep": 2}}}
    return found | layouts.get(family, {})


def _compare(
    report: Report,
    name: str,
    checkpoint: str,
    role: Role,
    sizes: Sizes,
    dtype: str,
    settings: dict[str, Any],
) -> dict[str, float]:
    """Compare one model in one layout. Return its errors."""
    torch_dtype = getattr(torch, dtype)
    exact = Reference(checkpoint, str(platform.device()), torch_dtype)
    exact.model.float()
    exact.score.data = exact.score.data.float()
    vocab = json.loads((Path(checkpoint) / "config.json").read_text())["vocab_size"]
    batch = _batch(exact, vocab, sizes, bool(settings.get("share_prompts")))
    job = Job(
        checkpoint,
        role,
        "token-mean",
        max(BUDGET, int(batch.seq_lens.max())),
        tuple(range(batch.num_sequences)),
    )
    wanted = _by_transformers(exact, batch, job)
    bounds = dict(BOUNDS)
    if torch_dtype != torch.float32:
        rounded = _errors(
            _by_transformers(Reference(checkpoint, exact.device, torch_dtype), batch, job),
            wanted,
            True,
        )
        bounds = {key: FACTOR * value + BOUNDS[key] for key, value in rounded.items()}
        report.record(
            **{f"{name}_{key}_error_of_transformers": value for key, value in rounded.items()}
        )
    del exact
    sizes_of_mesh = {key: settings.get(key, 1) for key in ("tp", "pp", "ep", "cp")}
    rest = {key: value for key, value in settings.items() if key not in sizes_of_mesh}
    with mesh_groups(**sizes_of_mesh) as groups:
        results = _by_megatron(checkpoint, role, groups, batch, job, dtype=dtype, **rest)
    errors = _errors(results, wanted, torch_dtype != torch.float32)
    report.record(**{f"{name}_{key}_error": value for key, value in errors.items()})
    report.record(**{f"{name}_attention": results.attention})
    for key, value in errors.items():
        report.check(
            value <= bounds[key], f"{name}: {key} error {value:.1e}, bound {bounds[key]:.1e}"
        )
    gc.collect()
    return errors


def _batch(exact: Reference, vocab: int, sizes: Sizes, has_one_prompt: bool) -> RaggedBatch:
    """Return random sequences, with inputs of the losses such that only some tokens are clipped.
    has_one_prompt: all have the longest prompt."""
    longest = max(sizes.prompt_lens)
    prompt_lens = [longest] * len(sizes.prompt_lens) if has_one_prompt else sizes.prompt_lens
    empty = token_batch(vocab, prompt_lens, sizes.response_lens)
    if has_one_prompt:
        for start in (empty.seq_lens.cumsum(0) - empty.seq_lens).tolist():
            empty.tokens[start : start + longest] = empty.tokens[:longest].clone()
    with torch.no_grad():
        log_probs = exact.log_probs(empty)[0]
    noise = torch.randn(5, len(log_probs), generator=torch.Generator().manual_seed(6))
    return empty.with_fields(
        old_log_probs=log_probs + 0.3 * noise[0],
        ref_log_probs=log_probs + 0.3 * noise[1],
        advantages=noise[2],
        values=noise[3],
        returns=noise[4],
    )


def _by_transformers(reference: Reference, batch: RaggedBatch, job: Job) -> Computed:
    with torch.no_grad():
        log_probs = reference.log_probs(batch)[0]
    grads = by_checkpoint_names(
        reference.gradients(batch, job)[1], reference.model.config.model_type
    )
    return Computed(log_probs, grads)


def _by_megatron(
    checkpoint: str,
    role: Role,
    groups: ProcessGroups,
    batch: RaggedBatch,
    job: Job,
    **megatron: Any,
) -> Computed:
    engine = make_engine(checkpoint, role, groups, **megatron)
    head = log_prob_head(engine.shape.vocab_size, TEMPERATURE)
    log_probs = score_tokens(engine, batch, head, job.budget) if role == "actor" else torch.zeros(0)
    engine.make_trainable(OptimConfig(), total_steps=1)
    engine.backward(
        batch, my_micro_batches(engine, batch, job.budget), objective(engine, batch, job.mode)
    )
    params: Mapping[str, Any] = engine.named_parameters()
    grads = {name: param.main_grad for name, param in params.items() if param.requires_grad}
    attention = "transformer_engine" if engine.chunks[0].qkv_format == "thd" else "torch"
    return Computed(log_probs, logical_tensors(engine, grads), attention)


def _errors(results: Computed, wanted: Computed, is_rounded: bool) -> dict[str, float]:
    """Return the error of the log-probs, and the error of the gradients relative to each tensor's
    norm: the largest, or the median where numbers are rounded."""
    assert results.grads.keys() == wanted.grads.keys(), sorted(
        results.grads.keys() ^ wanted.grads.keys()
    )[:4]
    difference = (results.log_probs - wanted.log_probs[: len(results.log_probs)]).abs()
    log_prob = 0.0
    if len(difference):
        log_prob = float(difference.median() if is_rounded else difference.max())
    # clamp_min: the gradient of an expert that no token has chosen is 0.
    gradients = [
        float(
            (results.grads[name].float() - want.float()).norm()
            / want.float().norm().clamp_min(1e-9)
        )
        for name, want in wanted.grads.items()
    ]
    return {
        "log_prob": log_prob,
        "gradient": statistics.median(gradients) if is_rounded else max(gradients),
    }
