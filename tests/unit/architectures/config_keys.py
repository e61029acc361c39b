"""The keys of config.json that architectures/ reads, and those that it may leave unread."""

from __future__ import annotations

from collections.abc import Mapping

SUPPORTED = frozenset(
    {
        "architectures",
        "attention_bias",
        "decoder_sparse_step",
        "first_k_dense_replace",
        "full_attention_interval",
        "head_dim",
        "kv_lora_rank",
        "hidden_act",
        "hidden_activation",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "max_position_embeddings",
        "mlp_bias",
        "mlp_only_layers",
        "model_type",
        "moe_intermediate_size",
        "norm_topk_prob",
        "n_routed_experts",
        "n_shared_experts",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_local_experts",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "qkv_bias",
        "rms_norm_eps",
        "rope_interleave",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "routed_scaling_factor",
        "sliding_window",
        "tie_word_embeddings",
        "use_qk_norm",
        "use_sliding_window",
        "v_head_dim",
        "vocab_size",
    }
)
"""Keys that ModelShape.from_hf_config or a check of config.json reads."""

_LENGTH = "vLLM reads it as the maximum sequence length, and refuses longer sequences"
_OUTPUT = "it selects outputs of transformers' forward besides the logits"
_LABELS = "labels of a classifier; score.weight has their number"
_TOKENS = "stop tokens come from the tokenizer and generation_config.json"
_HOW = "it selects an implementation in transformers, with the same result"
_LIBRARY = "metadata of transformers"
_MTP = (
    "layers of multi-token prediction, which no pass here uses; an export has those of its initial "
    "checkpoint"
)
_EXPERT_NAMES = "vLLM reads it for models without num_experts"

IGNORED: Mapping[str, str] = {
    "ada_rms_norm_t_cond_dim": "read only with ada_rms_norm_t_cond, which is refused",
    "attn_implementation": _HOW,
    "bos_token_id": "the tokenizer tokenises the prompts",
    "chunk_size_feed_forward": _HOW,
    "dtype": "{role}.megatron.dtype is the dtype of the model",
    "torch_dtype": "{role}.megatron.dtype is the dtype of the model",
    "eos_token_id": _TOKENS,
    "experts_implementation": _HOW,
    "hidden_size_per_head": "vLLM reads it in place of head_dim; no supported model has it",
    "id2label": _LABELS,
    "initializer_range": "weights are read from a checkpoint",
    "label2id": _LABELS,
    "mamba_ssm_dtype": "the states of delta nets are float32 in trainer and engine",
    "max_seq_len": _LENGTH,
    "max_seq_length": _LENGTH,
    "max_sequence_length": _LENGTH,
    "max_target_positions": _LENGTH,
    "max_window_layers": "it selects the layers with a sliding window, and there are none",
    "model_max_length": _LENGTH,
    "moe_num_experts": _EXPERT_NAMES,
    "moe_top_k": _EXPERT_NAMES,
    "moe_topk": _EXPERT_NAMES,
    "n_positions": _LENGTH,
    "name_or_path": _LIBRARY,
    "num_experts_per_token": _EXPERT_NAMES,
    "num_labels": _LABELS,
    "mtp_num_hidden_layers": _MTP,
    "mtp_use_dedicated_embeddings": _MTP,
    "num_mtp_layers": _MTP,
    "num_nextn_predict_layers": _MTP,
    "output_attentions": _OUTPUT,
    "output_hidden_states": _OUTPUT,
    "output_router_logits": _OUTPUT,
    "pad_token_id": (
        "sequences are packed, so no token has this id; transformers drops the gradient of its row"
    ),
    "pretraining_tp": (
        "transformers no longer reads it; earlier versions split matrix products, with the same "
        "result"
    ),
    "problem_type": _LABELS,
    "return_dict": _OUTPUT,
    "qk_head_dim": "it is qk_nope_head_dim + qk_rope_head_dim",
    "router_aux_loss_coef": "actor.moe_aux_loss_coeff is the run's",
    "seq_len": _LENGTH,
    "seq_length": _LENGTH,
    "top_k_experts": _EXPERT_NAMES,
    "transformers_version": _LIBRARY,
    "use_cache": _HOW,
}
"""Key -> the reason why it changes no computation here."""
