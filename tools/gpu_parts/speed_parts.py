"""Parts about the speed of training: waits for the device per micro-batch, and tokens per
second."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from gpu_parts import measure
from gpu_parts.engines import (
    TEMPERATURE,
    mesh_groups,
    my_micro_batches,
    objective,
    random_engine,
    token_batch,
    with_targets,
)
from gpu_parts.host_syncs import host_syncs
from gpu_parts.report import Report
from gpu_parts.sizes import Sizes
from rlhf_mc import platform
from rlhf_mc.architectures.operations import forward_flops
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.gpt_model import uses_transformer_engine
from rlhf_mc.models.heads import log_prob_head

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of CUDA in which the host waits."""
READ = "aten::_local_scalar_dense"
"""Read of one element, the only such operation that a CPU shows."""
FEW = 2
MANY = 6
ONE_WAIT = 0.5
"""Waits per micro-batch from which on there is one: the library's own waits vary between two
measurements."""


def synchronisations(report: Report, sizes: Sizes) -> None:
    """Count the waits for the device in a log-prob pass and in an optimizer step of two and of six
    micro-batches. The difference gives the waits per micro-batch, which on a GPU should be none."""
    with mesh_groups(1, 1) as groups:
        engine = random_engine(sizes.trained, groups)
        batches = {
            count: with_targets(
                engine, token_batch(engine.shape.vocab_size, [5] * count, [9] * count)
            )
            for count in (FEW, MANY)
        }
        for name, action in {"score": _score, "train_step": _train_step}.items():
            counts = {
                count: _waits(_of_each_sequence(action, engine, batches[count]))
                for count in (FEW, MANY)
            }
            totals = {count: sum(waits.values()) for count, waits in counts.items()}
            per_micro_batch = (totals[MANY] - totals[FEW]) / (MANY - FEW)
            fixed = totals[FEW] - FEW * per_micro_batch
            report.record(
                **{f"{name}_waits_per_micro_batch": per_micro_batch, f"{name}_waits_besides": fixed}
            )
            report.record(**{f"{name}_waits_of_{MANY}": dict(counts[MANY])})
            # Without Transformer Engine's rotary embedding a GPU waits in each layer.
            if uses_transformer_engine() or not platform.use_cuda():
                text = f"{name}: the host waits {per_micro_batch:g} times per micro-batch"
                report.expect(per_micro_batch < ONE_WAIT, text)
            if platform.use_cuda():
                run = _of_each_sequence(action, engine, batches[MANY])
                with host_syncs() as sites:
                    run()
                report.record(**{f"{name}_waiting_lines": dict(sites.most_common(12))})
    figures = report.result.figures
    what = "waits" if platform.use_cuda() else "reads of single elements (on a GPU: waits)"
    report.summarize(
        f"{what} per micro-batch: {figures['score_waits_per_micro_batch']:g} in a log-prob pass, "
        f"{figures['train_step_waits_per_micro_batch']:g} in training"
    )


def _score(engine: ModelEngine, batch: RaggedBatch, micro_batches: list[list[int]]) -> None:
    engine.score(batch, micro_batches, log_prob_head(engine.shape.vocab_size, TEMPERATURE))


def _train_step(engine: ModelEngine, batch: RaggedBatch, micro_batches: list[list[int]]) -> None:
    engine.train_step(batch, micro_batches, objective(engine, batch, "token-mean"))


def _of_each_sequence(
    action: Callable[..., None], engine: ModelEngine, batch: RaggedBatch
) -> Callable[[], None]:
    """Return the action with one micro-batch per sequence, run once before."""
    micro_batches = [[i] for i in range(batch.num_sequences)]

    def run() -> None:
        action(engine, batch, micro_batches)

    run()
    return run


def _waits(action: Callable[[], None]) -> collections.Counter[str]:
    """Return the number of waits of each kind during the action."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if platform.use_cuda() else [])]
    names = WAITS if platform.use_cuda() else (READ,)
    platform.synchronize()
    with profile(activities=activities) as recorded:
        action()
    return collections.Counter(event.name for event in recorded.events() if event.name in names)


def throughput(report: Report, sizes: Sizes) -> None:
    """Measure tokens per second and share of the peak FLOP/s of a model of 0.5 B parameters, in a
    log-prob pass and in an optimizer step."""
    lens = sizes.speed_lens
    with mesh_groups(1, 1) as groups:
        engine = random_engine(sizes.half_billion, groups)
        prompts = [n // 4 for n in lens]
        num_sequences = len(lens) * groups.mesh.dp
        batch = token_batch(
            engine.shape.vocab_size,
            prompts * groups.mesh.dp,
            [n - n // 4 for n in lens] * groups.mesh.dp,
        )
        batch = with_targets(engine, batch)
        micro_batches = my_micro_batches(engine, batch, sum(lens) // 2)
        actions: dict[str, tuple[Callable[..., None], int]] = {
            "score": (_score, 1),
            "train_step": (_train_step, 3),
        }
        responses = sum(n - n // 4 for n in lens)
        peak = measure.matmul_rate(sizes.matmul)
        sheet = measure.data_sheet_flops()
        shares: dict[str, float] = {}
        for name, (action, passes) in actions.items():
            seconds = measure.seconds(functools.partial(action, engine, batch, micro_batches))
            flops = passes * forward_flops(engine.shape, lens, responses).total / seconds
            shares[name] = flops / (sheet or peak)
            report.record(
                **{f"{name}_tokens_per_s": sum(lens) / seconds, f"{name}_tflops": flops / 1e12}
            )
            report.record(**{f"{name}_share_of_matmul": flops / peak})
            share = f"{name}: {flops / peak:.3g} of the rate of a matrix product"
            report.check(
                flops / peak <= sizes.most_share,
                f"{share}, which is impossible: its work has not been done or waited for",
            )
            report.expect(
                flops / peak >= sizes.least_share,
                f"{share}; at least {sizes.least_share:g} is expected",
            )
            report.record(
                **{f"{name}_share_of_data_sheet": None if sheet is None else flops / sheet}
            )
    layers = "Transformer Engine" if uses_transformer_engine() else "local layers"
    report.record(
        layers=layers,
        sequences=num_sequences,
        tokens=sum(lens),
        peak_memory_gib=platform.peak_memory_gb(),
    )
    of = "the data sheet's" if sheet else "a matrix product's"
    texts = [
        (
            f"{name} {report.result.figures[f'{name}_tokens_per_s']:.0f} tokens/s ({share:.2g} of "
            f"{of} FLOP/s)"
        )
        for name, share in shares.items()
    ]
    report.summarize(f"{layers}: {', '.join(texts)}")
