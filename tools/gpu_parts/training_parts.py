"""Parts about training and its checkpoints: steps with the distributed optimizer, a resume, an
asynchronous save."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from gpu_parts.engines import (
    cloned_state,
    different,
    mesh_groups,
    my_micro_batches,
    objective,
    random_engine,
    shared_directory,
    token_batch,
    train_once,
    with_targets,
)
from gpu_parts.report import Report
from gpu_parts.sizes import Sizes
from rlhf_mc import platform
from rlhf_mc.checkpoint import directory
from rlhf_mc.checkpoint.training_blocks import TrainedModel, model_blocks, num_bytes
from rlhf_mc.checkpoint.training_state import Save, load
from rlhf_mc.checkpoint.training_tensors import HostBuffers
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine, engine_layouts

BUDGET = 1024
GRADIENT_BOUND = 0.02
"""Largest difference of two computations of one gradient in bfloat16, relative to its norm. On a
GPU sums have no order."""


def resume(report: Report, sizes: Sizes) -> None:
    """Take two optimizer steps, save, load into a new model, and take the same third step with
    both. The loaded state must have the same bits. The third step must, too, on a CPU; on a GPU the
    difference is recorded."""
    _resume(report, sizes, must_agree=not platform.use_cuda())


def deterministic(report: Report, sizes: Sizes) -> None:
    """Do as `resume` with trainer.deterministic, where the third step has the same bits on a GPU
    too."""
    report.check(
        torch.are_deterministic_algorithms_enabled(), "deterministic algorithms are not on"
    )
    _resume(report, sizes, must_agree=True)


def _resume(report: Report, sizes: Sizes, must_agree: bool) -> None:
    with mesh_groups(1, 1) as groups, shared_directory() as root:
        first = random_engine(sizes.trained, groups)
        batch = with_targets(
            first, token_batch(first.shape.vocab_size, sizes.prompt_lens, sizes.response_lens)
        )
        begin = time.perf_counter()
        for _ in range(2):
            report.check(not train_once(first, batch, BUDGET).skipped, "a step was skipped")
        step_seconds = (time.perf_counter() - begin) / 2
        begin = time.perf_counter()
        Save(root, 2, _models(first), {}, {}, {}, "gpu_check", None).commit()
        save_seconds = time.perf_counter() - begin
        second = random_engine(sizes.trained, groups, seed=1)
        report.check(
            bool(different(cloned_state(first), cloned_state(second))),
            "two models of other seeds are the same",
        )
        load(directory.final_path(root, 2), _models(second))
        names = different(cloned_state(first), cloned_state(second))
        report.check(not names, f"{len(names)} loaded tensors differ, {names[:1]} first")
        grads = [_gradient(engine, batch) for engine in (first, first, second)]
        again, loaded = (_relative(grads[0], other) for other in grads[1:])
        for engine in (first, second):
            train_once(engine, batch, BUDGET)
        names = different(cloned_state(first), cloned_state(second))
    gradient_bits = sum(not torch.equal(a, b) for a, b in zip(*grads[:2], strict=True))
    report.record(
        step_s=step_seconds, save_s=save_seconds, tensors_that_differ_after_step_3=len(names)
    )
    report.record(
        gradients_that_differ_when_repeated=gradient_bits, gradient_difference_when_repeated=again
    )
    report.record(gradient_difference_after_load=loaded)
    report.check(
        max(again, loaded) < GRADIENT_BOUND,
        f"the same gradient differs by {max(again, loaded):.1e} of its norm",
    )
    if must_agree:
        report.check(
            not names and not gradient_bits,
            f"step 3 differs in {len(names)} tensors, {names[:1]} first",
        )
    same = "the same bits" if not names else f"{len(names)} tensors differ"
    report.summarize(
        f"loaded state equal; third step: {same}; a repeated gradient differs by {again:.1e} of "
        "its norm"
    )


def _models(engine: ModelEngine) -> list[TrainedModel]:
    return [TrainedModel(engine, engine_layouts(engine))]


def _gradient(engine: ModelEngine, batch: RaggedBatch) -> list[torch.Tensor]:
    engine.backward(
        batch, my_micro_batches(engine, batch, BUDGET), objective(engine, batch, "token-mean")
    )
    params: Iterable[Any] = engine.named_parameters().values()
    return [param.main_grad.clone() for param in params]


def _relative(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Return the norm of the difference over the norm, of all tensors together."""
    difference = sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True))
    return (difference / sum(float(x.double().square().sum()) for x in a)) ** 0.5


def async_save(report: Report, sizes: Sizes) -> None:
    """Save in the background while all parameters and optimizer states change at once, then load.
    The loaded state must be the state at the beginning of the save."""
    with mesh_groups(1, 1) as groups, shared_directory() as root:
        engine = random_engine(sizes.trained, groups)
        batch = with_targets(
            engine, token_batch(engine.shape.vocab_size, sizes.prompt_lens, sizes.response_lens)
        )
        train_once(engine, batch, BUDGET)
        models = _models(engine)
        size = num_bytes(block for model in models for block in model_blocks(model))
        buffers = HostBuffers()
        for step in (1, 2):  # the first allocates the host memory
            wanted = cloned_state(engine)
            platform.synchronize()
            begin = time.perf_counter()
            save = Save(root, step, models, {}, {}, {}, "gpu_check", buffers)
            blocked = time.perf_counter() - begin
            _change(engine)
            while not save.is_written():
                _change(engine)
                time.sleep(0.01)
            written = time.perf_counter() - begin
            save.commit()
        report.check(
            bool(different(wanted, cloned_state(engine))),
            "the parameters have not changed during the save",
        )
        load(directory.final_path(root, 2), models)
        names = different(wanted, cloned_state(engine))
        report.check(
            not names,
            f"{len(names)} tensors are not as at the beginning of the save, {names[:1]} first",
        )
    report.record(
        saved_gb=size / 1e9,
        blocked_s=blocked,
        written_after_s=written,
        copy_gb_per_s=size / blocked / 1e9,
    )
    report.summarize(
        f"{size / 1e9:.3g} GB a rank: blocked {blocked:.2f} s ({size / blocked / 1e9:.3g} GB/s), "
        f"written after {written:.1f} s, bits as at the beginning"
    )


def _change(engine: ModelEngine) -> None:
    """Change every parameter and optimizer state in place, as an optimizer step does."""
    with torch.no_grad():
        for param in engine.params.values():
            param.add_(0.01)
        for part in engine.optimizer_parts():
            for value in part.state.values():
                value.add_(0.01)
