"""The part that compares the output layer with a plain log-softmax, and measures its memory and
speed."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

from gpu_parts import measure
from gpu_parts.report import Report
from gpu_parts.sizes import Sizes
from rlhf_mc import platform
from rlhf_mc.architectures.spec import padded_vocab_size
from rlhf_mc.models import heads

TEMPERATURE = 0.7
FACTOR = 3.0
"""The errors may be this multiple of the errors of a log-softmax of logits in the weights' type.
Both are against float64."""
CHUNKS_IN_MEMORY = 2.0
"""Largest peak of the backward pass beside the gradients, in chunks of logits in float32. It needs
1.5: the logits, and their gradient in bfloat16."""


def heads_152k(report: Report, sizes: Sizes) -> None:
    """Compare log-probs and gradients of the output layer at a vocabulary of 152k with a plain
    log-softmax in float64, and measure its memory and speed. The vocabulary is split over all
    ranks."""
    for dtype in (torch.float32, torch.bfloat16):
        with report.case(str(dtype)):
            _compare_head(report, sizes, dtype)
    _measure_head(report, sizes)


@dataclass
class _Head:
    """The output layer alone, with random states, weights and targets."""

    states: torch.Tensor
    """[R, hidden]"""
    weight: torch.Tensor
    """[columns of this rank, hidden]"""
    targets: torch.Tensor
    """[R]"""
    vocab: int

    @staticmethod
    def make(num_tokens: int, sizes: Sizes, dtype: torch.dtype) -> _Head:
        """Return a head of which every rank has the same states and targets, and columns of its
        own. All are drawn on the device."""
        vocab = sizes.vocabulary
        hidden = sizes.head_hidden
        world = dist.get_world_size()
        columns = padded_vocab_size(vocab, world) // world
        device = platform.device()
        draw = torch.Generator(device).manual_seed(1)
        states = torch.randn(num_tokens, hidden, generator=draw, dtype=dtype, device=device)
        targets = torch.randint(vocab, (num_tokens,), generator=draw, device=device)
        draw = torch.Generator(device).manual_seed(2 + dist.get_rank())
        weight = torch.empty(columns, hidden, dtype=dtype, device=device).normal_(
            std=2.0 / hidden**0.5, generator=draw
        )
        weight[max(0, vocab - dist.get_rank() * columns) :] = 0.0  # padding
        return _Head(states.requires_grad_(), weight.requires_grad_(), targets, vocab)

    def log_probs(self) -> torch.Tensor:
        """Return the log-probs [R] by rlhf_mc.models.heads."""
        model = SimpleNamespace(
            output_weight=lambda: None,
            output_layer=SimpleNamespace(weight=self.weight),
            pg_collection=SimpleNamespace(tp=dist.group.WORLD),
        )
        return heads.log_probs(model, self.states[:, None], self.targets, self.vocab, TEMPERATURE)

    def plain(self, wide: bool) -> torch.Tensor:
        """Return the log-probs by log_softmax: in float64, or rounding the logits to the weights'
        type."""
        states = self.states.double() if wide else self.states
        weight = self.weight.double() if wide else self.weight
        logits = torch.nn.functional.linear(states, weight)[:, : self.vocab]
        wide_logits = logits if wide else logits.float()
        return (wide_logits / TEMPERATURE).log_softmax(-1).gather(1, self.targets[:, None])[:, 0]

    def gradients(self, log_probs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradients of the sum of the log-probs, weighted by position."""
        upstream = torch.linspace(
            -1, 1, len(log_probs), device=log_probs.device, dtype=log_probs.dtype
        )
        gradients = torch.autograd.grad((log_probs * upstream).sum(), (self.states, self.weight))
        return dict(zip(("states", "weight"), gradients, strict=True))


def _compare_head(report: Report, sizes: Sizes, dtype: torch.dtype) -> None:
    head = _Head.make(min(sizes.head_tokens, 256), sizes, dtype)
    log_probs = head.log_probs()
    results = {"log_prob": log_probs.detach(), **head.gradients(log_probs)}
    whole = _Head.make(len(head.states), sizes, dtype)
    if dist.get_world_size() > 1:
        parts = [torch.empty_like(whole.weight) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, whole.weight.detach())
        whole.weight = torch.cat(parts).requires_grad_()
    exact, rounded = (
        {"log_prob": x.detach(), **whole.gradients(x)}
        for x in (whole.plain(True), whole.plain(False))
    )
    for whole_results in (exact, rounded):  # this rank's columns
        whole_results["weight"] = whole_results["weight"].chunk(dist.get_world_size())[
            dist.get_rank()
        ]
    name = str(dtype).removeprefix("torch.")
    for key, wanted in exact.items():
        error, plain = (
            float((x[key].double() - wanted).norm() / wanted.norm()) for x in (results, rounded)
        )
        report.record(**{f"{name}_{key}_error": error, f"{name}_{key}_error_of_log_softmax": plain})
        bound = FACTOR * plain + 1e-6
        report.check(
            error <= bound, f"{name} {key}: off by {error:.1e} of its norm, bound {bound:.1e}"
        )


def _measure_head(report: Report, sizes: Sizes) -> None:
    head = _Head.make(sizes.head_tokens, sizes, torch.bfloat16)

    def forward() -> None:
        with torch.no_grad():
            head.log_probs()

    def both() -> None:
        head.gradients(head.log_probs())

    columns = len(head.weight)
    product = 2.0 * sizes.head_tokens * columns * sizes.head_hidden
    rates = {
        "forward": product / measure.seconds(forward),
        "forward_backward": 4 * product / measure.seconds(both),
    }
    full = 4 * sizes.head_tokens * columns
    chunk = min(full, 4 * heads.CHUNK_LOGITS * (heads.GPU_CHUNKS if platform.use_cuda() else 1))
    peaks = {
        "forward": measure.extra_memory(forward),
        "forward_backward": measure.extra_memory(both),
    }
    # The gradients of weight and states are results; of the weight there is a sum in float32 too.
    # The upstream gradient and the statistics of each token are a few vectors.
    results = 6 * head.weight.numel() + 4 * head.states.numel() + 100 * sizes.head_tokens
    report.record(**{f"{key}_tflops": value / 1e12 for key, value in rates.items()})
    report.record(
        **{f"{key}_peak_gb": value / 1e9 for key, value in peaks.items()}, full_logits_gb=full / 1e9
    )
    beyond = peaks["forward_backward"] - results
    report.record(chunk_gb=chunk / 1e9, peak_besides_gradients_gb=beyond / 1e9)
    if platform.use_cuda():  # the resident memory of a process on a CPU depends on more
        text = (
            f"peak memory beside the gradients {beyond / 1e9:.2f} GB, one chunk of logits "
            f"{chunk / 1e9:.2f} GB"
        )
        report.expect(beyond < CHUNKS_IN_MEMORY * chunk, text)
    report.summarize(
        f"{sizes.head_tokens} tokens: {rates['forward'] / 1e12:.3g} TFLOP/s forward, "
        f"{rates['forward_backward'] / 1e12:.3g} with backward; peak "
        f"{peaks['forward_backward'] / 1e9:.2f} GB, "
        f"all logits {full / 1e9:.2f} GB"
    )
