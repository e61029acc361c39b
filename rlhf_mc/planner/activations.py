"""Bytes of the activations that a training pass stores for its backward pass, on one rank.

The sums follow the operations of one layer: for Transformer Engine's layers the operations of its
modules (saved_tensors of LayerNormLinear, Linear, attention), for Megatron-Core's local layers what
torch's autograd saves on a CPU.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rlhf_mc.architectures.layer import FeedForwardActivations, Layer, MixerActivations
from rlhf_mc.architectures.operations import CHUNK_LOGITS, GPU_CHUNKS
from rlhf_mc.architectures.spec import ModelShape, padded_vocab_size
from rlhf_mc.config.model_schema import MegatronConfig
from rlhf_mc.planner.model_state import ITEMSIZES
from rlhf_mc.topology.mesh import Mesh

_FLOAT32 = 4


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token of a micro-batch that one layer takes on one rank."""

    stored: float
    """From its forward to its backward pass."""
    recomputed: float
    """Stored for the time of its backward pass alone, by recomputation."""


@dataclass(frozen=True)
class MicroBatchPass:
    """A pass over micro-batches: the largest of them, and how many there are."""

    tokens: int
    """Prompts and responses, packed."""
    logits: int
    """Positions at which the output layer is computed: response tokens."""
    num_micro_batches: int
    rows: float = 0.0
    """Tokens of whole sequences, for which attention copies shared prompts; 0: none is shared."""


class Activations:
    """The activations of one model on a rank."""

    def __init__(self, shape: ModelShape, megatron: MegatronConfig, cuda: bool) -> None:
        """cuda: on a GPU, with Transformer Engine."""
        self._shape = shape
        self._megatron = megatron
        self._cuda = cuda
        self._tp = megatron.tensor_model_parallel_size
        self._shards = self._tp if megatron.sequence_parallel else 1
        self._itemsize = ITEMSIZES[megatron.dtype]
        self._states = shape.hidden_size / self._shards
        """Elements per token of the hidden states between layers: with sequence parallelism a
        shard."""
        self._torch_norms = shape.zero_centered_norms or megatron.dtype != "float32"
        """On a CPU, torch computes the norms and their gradient operation by operation
        (models/layers.py)."""

    def layer_bytes(self, layer: Layer) -> LayerBytes:
        """Return the bytes per token of a layer of the model. With experts: for evenly routed
        tokens."""
        mixer, feed_forward = self._blocks(layer)
        all_of_it = (self._transformer_engine if self._cuda else self._local)(layer)
        granularity = self._megatron.recompute_granularity
        if granularity == "full":
            return LayerBytes(self._states * self._itemsize, all_of_it + mixer.recomputed_bytes)
        if granularity is None or not (self._cuda or mixer.heads):
            return LayerBytes(all_of_it, mixer.recomputed_bytes)
        if self._cuda:
            recomputed = (self._states + feed_forward.recomputed) * self._itemsize
            return LayerBytes(all_of_it - recomputed, recomputed + mixer.recomputed_bytes)
        # On a CPU the attention: its log-sum-exp is not stored, its output by the projection alone.
        log_sum_exp = _FLOAT32 * mixer.heads
        padded = mixer.padded * self._itemsize
        queries = mixer.queries * self._itemsize
        return LayerBytes(all_of_it - log_sum_exp - padded, log_sum_exp + padded + queries)

    def update_peak(
        self, mesh: Mesh, stage: int, work: MicroBatchPass, entropy: bool, at_layer: float = 0.0
    ) -> float:
        """Return the bytes of activations and gradients of activations at the peak of an update, on
        a rank of the stage. entropy: the loss needs the entropy's gradient. at_layer: bytes that a
        layer's backward pass has besides."""
        shape = self._shape
        itemsize = self._itemsize
        # With sequence parallelism the states of all tensor-parallel ranks are gathered, and so is
        # their gradient.
        gathered = 2 * shape.hidden_size if self._megatron.sequence_parallel else 0
        backward = 0.0
        for layer in shape.by_kind(itertools.chain(*mesh.chunk_layers(shape.num_layers, stage))):
            _, feed_forward = self._blocks(layer)
            # A layer's backward pass begins with the gradients of its output, of the residual, and
            # of the MLP's product; of experts also with the gradients of their outputs, twice: in
            # the order of the tokens and of the experts.
            first = 2 * self._states + feed_forward.product + 2 * feed_forward.inputs
            recomputed = self.layer_bytes(layer).recomputed
            of_layer = work.tokens * (recomputed + itemsize * (first + gathered))
            of_layer += 2 * self._row_bytes(layer, work)  # and their gradients
            # on a GPU the product that computes a weight's gradient adds it to main_grad
            if not self._cuda:
                of_layer += itemsize * shape.hidden_size * feed_forward.product
            backward = max(backward, of_layer + at_layer)
        if stage == mesh.pp - 1:
            norm = (2 * itemsize if self._cuda else self._norm()) * self._states
            head = self._head_bytes(work.logits, entropy)
            backward = max(backward, work.tokens * (norm + gathered * itemsize) + head)
        if mesh.pp > 1:  # the output of each micro-batch in flight, and the gradient of one
            outputs = min(mesh.pp - stage, work.num_micro_batches) + 1
            backward += work.tokens * outputs * self._states * itemsize
        return work.tokens * self._stored_bytes(mesh, stage, work.num_micro_batches) + backward

    def forward_peak(self, mesh: Mesh, stage: int, work: MicroBatchPass) -> float:
        """Return the bytes of activations at the peak of a pass without gradients, on a rank of the
        stage."""
        shape = self._shape
        num_bytes = 0.0
        for layer in shape.by_kind(itertools.chain(*mesh.chunk_layers(shape.num_layers, stage))):
            _, feed_forward = self._blocks(layer)
            # Of one layer: the residual, the norm's output with sequence parallelism gathered,
            # gate, up and their product. Of experts also where the tokens went, and their inputs
            # three times: in the order of the tokens, as received, and in the order of the experts;
            # and their outputs.
            elements = 3 * feed_forward.product + 4 * feed_forward.inputs
            of_token = (self._states + shape.hidden_size + elements) * self._itemsize
            num_bytes = max(num_bytes, work.tokens * (of_token + feed_forward.routing_bytes))
            num_bytes = max(num_bytes, self._row_bytes(layer, work))
        if stage < mesh.pp - 1:
            return num_bytes
        states = work.tokens * (self._states + shape.hidden_size) * self._itemsize
        return max(num_bytes, states + self._logit_bytes(work.logits))

    def _stored_bytes(self, mesh: Mesh, stage: int, num_micro_batches: int) -> float:
        """Return the bytes per token that the layers of a stage store for all micro-batches in
        flight."""
        num_layers = self._shape.num_layers
        of_chunks = [
            sum(n * self.layer_bytes(layer).stored for layer, n in counts.items())
            for counts in map(self._shape.by_kind, mesh.chunk_layers(num_layers, stage))
        ]
        return max(of_chunks) * chunks_in_flight(mesh, stage, num_micro_batches)

    def _blocks(self, layer: Layer) -> tuple[MixerActivations, FeedForwardActivations]:
        """Return what the blocks of a layer store, in elements per token."""
        mixer = layer.mixer.activations(self._tp, self._shards)
        return mixer, layer.feed_forward.activations(self._tp)

    def _row_bytes(self, layer: Layer, work: MicroBatchPass) -> float:
        """Return the bytes of the mixer's rows, where a micro-batch shares prompts."""
        mixer, _ = self._blocks(layer)
        return work.rows * mixer.stored * self._itemsize

    def _transformer_engine(self, layer: Layer) -> float:
        """Return the bytes per token of a layer of Transformer Engine without recomputation: inputs
        and outputs of both norms; queries, keys and values, and the first two after the rotation;
        the attention's output with its log-sum-exp; gate and up, and their product."""
        mixer, feed_forward = self._blocks(layer)
        attention = mixer.stored + mixer.normalised
        # torch attends, with k and v repeated for each query head (models/layers.py)
        if self._itemsize == _FLOAT32:
            attention += 2 * (mixer.queries - mixer.keys) + mixer.padded
        elements = 4 * self._states + attention + 3 * feed_forward.product + feed_forward.inputs
        routing = feed_forward.routing_bytes
        return elements * self._itemsize + _FLOAT32 * (mixer.heads + 2) + routing

    def _local(self, layer: Layer) -> float:
        """Return the bytes per token of a local layer on a CPU: input and output of each norm; keys
        and queries before the rotation, with the values; the feed-forward."""
        mixer, feed_forward = self._blocks(layer)
        norms = 2 * self._norm() * self._states
        norms += (2 if self._torch_norms else 1) * _FLOAT32 * mixer.normalised
        elements = mixer.stored + mixer.padded + feed_forward.local
        routing = feed_forward.routing_bytes
        return norms + elements * self._itemsize + _FLOAT32 * (mixer.heads + 2) + routing

    def _norm(self) -> int:
        """Return the bytes of an element of the states that a norm on a CPU keeps: of its input and
        its output, and where torch computes it, of the normalised states."""
        return (2 if self._torch_norms else 1) * _FLOAT32 + self._itemsize

    def _head_bytes(self, logits: int, entropy: bool) -> float:
        """Return the bytes of the output layer and its gradients (models/heads.py)."""
        states = 2 * logits * self._shape.hidden_size * self._itemsize
        if self._shape.value_head:
            return states
        # The gradient takes the place of the logits, with the entropy's beside it, and is copied
        # into the weights' type.
        narrow = 0 if self._megatron.dtype == "float32" else self._itemsize
        gradient = (narrow if self._cuda else 2 * narrow) + (_FLOAT32 if entropy else 0)
        weight = self._columns() * self._shape.hidden_size * (_FLOAT32 + narrow)
        return states + self._logit_bytes(logits, gradient) + weight

    def _logit_bytes(self, logits: int, gradient: int = 0) -> float:
        """Return the bytes of a chunk of logits, with `gradient` bytes beside each; 0 for a value
        head."""
        if self._shape.value_head:
            return 0.0
        product = _FLOAT32 if self._cuda else 2 * _FLOAT32  # on a CPU with its float32 copy
        columns = self._columns()
        chunk = min(logits, max(1, CHUNK_LOGITS * (GPU_CHUNKS if self._cuda else 1) // columns))
        return chunk * columns * (product + gradient)

    def _columns(self) -> int:
        """Return the columns of the output layer on a rank."""
        return padded_vocab_size(self._shape.vocab_size, self._tp) // self._tp


def chunks_in_flight(mesh: Mesh, stage: int, num_micro_batches: int) -> int:
    """Return the largest number of virtual pipeline chunks, counted once per micro-batch, whose
    activations a stage holds at a time, as Megatron-Core schedules passes
    (pipeline_parallel/schedules.py, get_pp_rank_microbatches)."""
    if mesh.vpp == 1:
        return min(mesh.pp - stage, num_micro_batches)
    warmup = 2 * (mesh.pp - stage - 1) + (mesh.vpp - 1) * mesh.pp
    return min(warmup + 1, mesh.vpp * num_micro_batches)
