"""Floating-point operations (FLOPs) of a model's forward and backward pass over packed sequences.
Only products of matrices are counted, a multiplication and an addition each; norms, activations,
softmax and rotary positions are not. No torch here.

Causal attention counts the pairs that the mask leaves: a sequence of n tokens has n (n + 1) / 2.
Kernels that also compute masked pairs do up to twice that. With a sliding window it counts the
pairs within, and sinks not at all. In a mixture of experts each token counts its own experts. A
gated delta net counts three products of each token with its states (arXiv 2412.06464, equation 10):
what the key reads, what is written, what the query reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlhf_mc.architectures.layer import Layer
from rlhf_mc.architectures.spec import ModelShape, padded_vocab_size

BACKWARD = 2
"""FLOPs of the backward pass divided by the forward pass's: one product for the gradient of the
input, and one for the gradient of the weight (or, in attention, of the other factor)."""


WITH_ADAPTERS = 1
"""The same of products with frozen weights, which have no gradient. Those with adapters, of which
each is 2 r / (in + out) of the product with its weight, are not counted."""


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of a forward pass through all layers."""

    projections: float
    """To queries, keys and values, and from the attention's output."""
    feed_forward: float
    """Gate, up and down of the dense network or of the tokens' experts, and the router."""
    attention: float
    """The scores, and the weighted sums of values; reading and writing the states of delta nets."""
    output: float
    """The output layer or value head, at the positions where it is computed."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.projections + self.feed_forward + self.attention + self.output

    def backward(self, shape: ModelShape) -> ForwardFlops:
        """Return the FLOPs of the backward pass."""
        of_weights = BACKWARD if shape.lora is None else WITH_ADAPTERS
        return ForwardFlops(
            of_weights * self.projections,
            of_weights * self.feed_forward,
            BACKWARD * self.attention,
            (BACKWARD if shape.value_head else of_weights) * self.output,
        )


def output_flops(shape: ModelShape) -> float:
    """Return the FLOPs of the output layer at one position, padding columns included; of a value
    head 2 per weight."""
    return (
        2.0
        * shape.hidden_size
        * (1 if shape.value_head else padded_vocab_size(shape.vocab_size, 1))
    )


def forward_flops(
    shape: ModelShape,
    seq_lens: Iterable[float],
    num_positions: float,
    layers: Mapping[Layer, int] | None = None,
) -> ForwardFlops:
    """Return the FLOPs of a forward pass: in each layer 2 per weight and token, and for each pair
    of a query and a key 2 per dimension of the query and of the value. num_positions: positions at
    which the output layer is computed, such as the number of response tokens for log-probs, or the
    number of sequences for a reward model. layers: numbers of the layers that are counted; None:
    all."""
    lens = list(seq_lens)
    tokens = sum(lens)
    counts = (shape.by_kind() if layers is None else layers).items()
    rows = sum(
        count * (3 * layer.feed_forward.active_size() + layer.feed_forward.router_rows())
        for layer, count in counts
    )
    return ForwardFlops(
        projections=tokens * sum(count * 2.0 * layer.mixer.weights() for layer, count in counts),
        feed_forward=tokens * (2.0 * shape.hidden_size * rows),
        attention=sum(count * layer.mixer.flops(lens) for layer, count in counts),
        output=num_positions * output_flops(shape),
    )


CHUNK_LOGITS = 1 << 26
"""Maximum number of logits on a rank at a time: tokens of a chunk times columns of the rank. 256
MiB in float32, twice as much with the entropy. benchmarks/log_probs.py: larger chunks are no
faster, much smaller ones are slower."""


GPU_CHUNKS = 4
"""Factor of CHUNK_LOGITS on a GPU. Each chunk reads the weight and reads and writes the sum of its
gradient: with 441 tokens (1 << 26 logits of 152,000 columns) that takes as long as two thirds of
the products, with 1766 a sixth."""
