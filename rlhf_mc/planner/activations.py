"""Bytes of the activations that a training pass stores for its backward pass, on one rank.

The sums follow the operations of one layer: for Transformer Engine's layers the operations of its
modules (saved_tensors of LayerNormLinear, Linear, attention), for Megatron-Core's local layers what
torch's autograd saves on a CPU.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rlhf_mc.architectures.operations import CHUNK_LOGITS, DELTA_CHUNK, GPU_CHUNKS
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


def layer_bytes(
    shape: ModelShape, megatron: MegatronConfig, transformer_engine: bool
) -> LayerBytes:
    """Return the bytes per token of a layer of a model whose layers are of one kind. With experts:
    for evenly routed tokens."""
    sizes = _Sizes(shape, megatron)
    all_of_it = sizes.transformer_engine() if transformer_engine else sizes.local()
    if megatron.recompute_granularity == "full":
        stored = sizes.states * sizes.itemsize
        return LayerBytes(stored, all_of_it + sizes.rule)
    if megatron.recompute_granularity is None or (shape.linear_layers and not transformer_engine):
        return LayerBytes(all_of_it, sizes.rule)
    if transformer_engine:
        recomputed = sizes.selective_transformer_engine()
        return LayerBytes(all_of_it - recomputed, recomputed + sizes.rule)
    # On a CPU the attention: its log-sum-exp is not stored, its output by the projection alone.
    log_sum_exp = _FLOAT32 * sizes.heads
    padded = sizes.padded * sizes.itemsize
    return LayerBytes(
        all_of_it - log_sum_exp - padded, log_sum_exp + padded + sizes.queries * sizes.itemsize
    )


class _Sizes:
    """Elements per token on one rank."""

    def __init__(self, shape: ModelShape, megatron: MegatronConfig) -> None:
        tp = megatron.tensor_model_parallel_size
        experts = shape.experts_per_token
        self.itemsize = ITEMSIZES[megatron.dtype]
        self.states = shape.hidden_size / (tp if megatron.sequence_parallel else 1)
        """The hidden states between layers: with sequence parallelism a shard."""
        self.queries = shape.num_heads * shape.head_dim / tp
        self.keys = max(shape.num_kv_heads / tp, 1) * shape.head_dim
        """Keys, and as many for values."""
        self.heads = shape.num_heads / tp
        self.values = self.heads * shape.value_dim
        self.padded = 2 * self.queries - self.values if shape.value_dim < shape.head_dim else 0.0
        """Of values and output that torch's attention pads to the size of the keys
        (models/layers.py)."""
        self.latents = (
            2 * (shape.q_lora_rank + shape.kv_lora_rank) + shape.rope_head_dim
            if shape.kv_lora_rank
            else 0.0
        )
        """Latent vectors, normalised too, and the part of the keys that all heads share."""
        self.latents /= tp if megatron.sequence_parallel else 1
        self.attention = 3 * self.queries + 3 * self.keys
        """Attention's inputs and output."""
        # padded copies; with windows, in every other layer, each key is in two blocks
        if shape.sinks:
            wider = (shape.head_dim + 8) / shape.head_dim
            self.attention = (2 * wider + 1) * self.queries + 3 * wider * self.keys
        if self.latents:  # no projections beside its inputs
            self.attention = 2 * self.queries + 2 * self.values + self.latents
        if shape.attention_gate:  # the gate's copy, its sigmoid, and the output before it
            self.attention += 3 * self.queries
        self.rule = 0.0
        """Bytes that a gated delta net computes again in its backward pass
        (models/gated_delta_net.py)."""
        if shape.linear_layers:
            # The projections, and of the gated norm its input, output, the gate's copy, its
            # activation and the product.
            sizes = shape.dims()
            self.attention = (
                sizes["linear_qkvz"] + sizes["linear_ba"] + 5 * sizes["linear_values"]
            ) / tp
            of_head = 10 * shape.linear_key_dim + 6 * shape.linear_value_dim + 6 * DELTA_CHUNK
            self.rule = (
                _FLOAT32
                / tp
                * (shape.linear_value_heads * of_head + 2 * shape.state_size / DELTA_CHUNK)
            )
        self.ffn = shape.active_ffn_size / tp
        """The product of gate and up, of the experts that a token has together."""
        self.shared_ffn = shape.shared_ffn_hidden_size / tp
        """The shared expert's part of it."""
        # The dispatcher gathers the tokens of all tensor-parallel ranks, each of which has a part
        # of every expert.
        self.expert_inputs = float(experts * shape.hidden_size)
        """Inputs of a token's experts; 0 for dense layers."""
        self.num_experts = shape.num_experts
        self.routing = 24 * experts + 5 * shape.num_experts
        """Bytes of a router's indices, probabilities and masks."""
        self.qk_norm = shape.qk_norm and not shape.linear_layers
        self.silu = shape.activation == "silu"
        """The activation is SiLU."""
        self.clamped = shape.activation == "clamped_swiglu"
        self.torch_norms = shape.zero_centered_norms or megatron.dtype != "float32"
        """On a CPU, torch computes the norms and their gradient operation by operation
        (models/layers.py)."""

    def transformer_engine(self) -> float:
        """Return the bytes of a layer of Transformer Engine without recomputation: inputs and
        outputs of both norms; queries, keys and values, and the first two after the rotation; the
        attention's output with its log-sum-exp; gate and up, and their product."""
        attention = self.attention + (self.queries + self.keys if self.qk_norm else 0)
        # torch attends, with k and v repeated for each query head (models/layers.py)
        if self.itemsize == _FLOAT32:
            attention += 2 * (self.queries - self.keys) + self.padded
        elements = 4 * self.states + attention + 3 * self.ffn + self.expert_inputs
        return elements * self.itemsize + _FLOAT32 * (self.heads + 2) + self.routing

    def selective_transformer_engine(self) -> float:
        """Return the bytes of what selective recomputation recomputes: the second norm's output
        with gate, up and product; of experts, the norm's output and the product, but for the shared
        expert's."""
        return (
            self.states + (self.ffn - self.shared_ffn if self.num_experts else 3 * self.ffn)
        ) * self.itemsize

    def local(self) -> float:
        """Return the bytes of a local layer on a CPU: input and output of each norm; keys and
        queries before the rotation, with the values; gate and up with the activated gate, and where
        Megatron-Core computes the activation a copy of up."""
        norms = 2 * self.norm() * self.states
        if self.qk_norm:
            norms += (2 if self.torch_norms else 1) * _FLOAT32 * (self.queries + self.keys)
        attention = self.attention + self.padded
        experts = (8 if self.clamped else 6) * self.ffn + self.expert_inputs
        dense = (4 if self.silu else 5) * self.ffn
        elements = attention + (experts if self.num_experts else dense)
        return norms + elements * self.itemsize + _FLOAT32 * (self.heads + 2) + self.routing

    def norm(self) -> int:
        """Return the bytes of an element of the states that a norm on a CPU keeps: of its input and
        its output, and where torch computes it, of the normalised states."""
        return (2 if self.torch_norms else 1) * _FLOAT32 + self.itemsize


@dataclass(frozen=True)
class Pass:
    """A pass over micro-batches: the largest of them, and how many there are."""

    tokens: int
    """Prompts and responses, packed."""
    logits: int
    """Positions at which the output layer is computed: response tokens."""
    num_micro_batches: int
    rows: float = 0.0
    """Tokens of whole sequences, for which attention copies shared prompts; 0: none is shared."""


def update_peak(
    shape: ModelShape,
    megatron: MegatronConfig,
    mesh: Mesh,
    stage: int,
    work: Pass,
    cuda: bool,
    entropy: bool,
) -> float:
    """Return the bytes of activations and gradients of activations at the peak of an update, on a
    rank of the stage. cuda: on a GPU, with Transformer Engine. entropy: the loss needs the
    entropy's gradient."""
    sizes = _Sizes(shape, megatron)
    stored = _stored_bytes(shape, megatron, mesh, stage, work, cuda)
    # With sequence parallelism the states of all tensor-parallel ranks are gathered, and so is
    # their gradient.
    gathered = 2 * shape.hidden_size if megatron.sequence_parallel else 0
    backward = 0.0
    for part in shape.by_kind(itertools.chain(*mesh.chunk_layers(shape.num_layers, stage))):
        of_kind = _Sizes(part, megatron)
        # A layer's backward pass begins with the gradients of its output, of the residual, and of
        # the MLP's product; of experts also with the gradients of their outputs, twice: in the
        # order of the tokens and of the experts.
        first = 2 * sizes.states + of_kind.ffn + 2 * of_kind.expert_inputs
        recomputed = layer_bytes(part, megatron, cuda).recomputed
        layer = work.tokens * (recomputed + sizes.itemsize * (first + gathered))
        layer += work.rows * 2 * of_kind.attention * sizes.itemsize  # and their gradients
        if not cuda:  # on a GPU the product that computes a weight's gradient adds it to main_grad
            layer += sizes.itemsize * shape.hidden_size * of_kind.ffn
        backward = max(backward, layer)
    if stage == mesh.pp - 1:
        norm = (2 * sizes.itemsize if cuda else sizes.norm()) * sizes.states
        head = _head_bytes(shape, megatron, work.logits, cuda, entropy)
        backward = max(backward, work.tokens * (norm + gathered * sizes.itemsize) + head)
    if mesh.pp > 1:  # the output of each micro-batch in flight, and the gradient of one
        outputs = min(mesh.pp - stage, work.num_micro_batches) + 1
        backward += work.tokens * outputs * sizes.states * sizes.itemsize
    return work.tokens * stored + backward


def _stored_bytes(
    shape: ModelShape, megatron: MegatronConfig, mesh: Mesh, stage: int, work: Pass, cuda: bool
) -> float:
    """Return the bytes per token that the layers of a stage store for all micro-batches in
    flight."""
    chunks = [shape.by_kind(layers) for layers in mesh.chunk_layers(shape.num_layers, stage)]
    of_chunks = [
        sum(part.num_layers * layer_bytes(part, megatron, cuda).stored for part in parts)
        for parts in chunks
    ]
    return max(of_chunks) * chunks_in_flight(mesh, stage, work.num_micro_batches)


def forward_peak(
    shape: ModelShape, megatron: MegatronConfig, mesh: Mesh, stage: int, work: Pass, cuda: bool
) -> float:
    """Return the bytes of activations at the peak of a pass without gradients, on a rank of the
    stage."""
    sizes = _Sizes(shape, megatron)
    num_bytes = 0.0
    for part in shape.by_kind(itertools.chain(*mesh.chunk_layers(shape.num_layers, stage))):
        of_kind = _Sizes(part, megatron)
        # Of one layer: the residual, the norm's output with sequence parallelism gathered, gate, up
        # and their product. Of experts also where the tokens went, and their inputs three times: in
        # the order of the tokens, as received, and in the order of the experts; and their outputs.
        layer = sizes.states + shape.hidden_size + 3 * of_kind.ffn + 4 * of_kind.expert_inputs
        num_bytes = max(num_bytes, work.tokens * (layer * sizes.itemsize + of_kind.routing))
        num_bytes = max(num_bytes, work.rows * of_kind.attention * sizes.itemsize)
    if stage < mesh.pp - 1:
        return num_bytes
    states = work.tokens * (sizes.states + shape.hidden_size) * sizes.itemsize
    return max(num_bytes, states + _logit_bytes(shape, megatron, work.logits, cuda))


def _head_bytes(
    shape: ModelShape, megatron: MegatronConfig, logits: int, cuda: bool, entropy: bool
) -> float:
    """Return the bytes of the output layer and its gradients (models/heads.py)."""
    itemsize = ITEMSIZES[megatron.dtype]
    states = 2 * logits * shape.hidden_size * itemsize
    if shape.value_head:
        return states
    # The gradient takes the place of the logits, with the entropy's beside it, and is copied into
    # the weights' type.
    narrow = 0 if megatron.dtype == "float32" else itemsize
    gradient = (narrow if cuda else 2 * narrow) + (_FLOAT32 if entropy else 0)
    weight = _columns(shape, megatron) * shape.hidden_size * (_FLOAT32 + narrow)
    return states + _logit_bytes(shape, megatron, logits, cuda, gradient) + weight


def _logit_bytes(
    shape: ModelShape, megatron: MegatronConfig, logits: int, cuda: bool, gradient: int = 0
) -> float:
    """Return the bytes of a chunk of logits, with `gradient` bytes beside each; 0 for a value
    head."""
    if shape.value_head:
        return 0.0
    product = _FLOAT32 if cuda else 2 * _FLOAT32  # on a CPU with its float32 copy
    columns = _columns(shape, megatron)
    chunk = min(logits, max(1, CHUNK_LOGITS * (GPU_CHUNKS if cuda else 1) // columns))
    return chunk * columns * (product + gradient)


def _columns(shape: ModelShape, megatron: MegatronConfig) -> int:
    """Return the columns of the output layer on a rank."""
    tp = megatron.tensor_model_parallel_size
    return padded_vocab_size(shape.vocab_size, tp) // tp


def chunks_in_flight(mesh: Mesh, stage: int, num_micro_batches: int) -> int:
    """Return the largest number of virtual pipeline chunks, counted once per micro-batch, whose
    activations a stage holds at a time, as Megatron-Core schedules passes
    (pipeline_parallel/schedules.py, get_pp_rank_microbatches)."""
    if mesh.vpp == 1:
        return min(mesh.pp - stage, num_micro_batches)
    warmup = 2 * (mesh.pp - stage - 1) + (mesh.vpp - 1) * mesh.pp
    return min(warmup + 1, mesh.vpp * num_micro_batches)
