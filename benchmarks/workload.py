"""The work that benchmarks of a whole step share: a random qwen2-style model whose responses have
lengths of a known distribution, prompts like "12+7=", a reward function, and a config for a run of
rlhf_mc.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from make_quickstart import Question, parquet_rows, train_tokenizer

from rlhf_mc.data.source import write_prompts

NUM_QUESTIONS = 2048
REWARD = '''"""Reward of the benchmarks: as cheap as any short rule."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
'''


@dataclass(frozen=True)
class Size:
    """The size of a model."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int


SIZES = {
    "0.7M": Size(hidden=128, ffn=256, layers=4, heads=4, kv_heads=2, vocab=512),
    "26M": Size(hidden=512, ffn=1280, layers=8, heads=8, kv_heads=4, vocab=4096),
}
"""By the number of parameters, of which the embedding and the output layer have one matrix each."""


@dataclass(frozen=True)
class Lengths:
    """The distribution of response lengths."""

    longest: int
    """Tokens at which a response is truncated."""
    end_probability: float
    """Probability of the end token at each position; 0: all responses have `longest` tokens."""


EQUAL = Lengths(64, 0.0)
LONG_TAILED = Lengths(512, 1 / 64)
TOKEN_BUDGET = 4096
"""Tokens of a micro-batch, at most."""


def questions() -> list[Question]:
    """Return the questions, the same at every call."""
    rng = random.Random(7)
    return [Question(rng.randrange(10, 90), rng.randrange(1, 100)) for _ in range(NUM_QUESTIONS)]


def make_model(directory: Path, size: Size, end_probability: float) -> PreTrainedTokenizerBase:
    """Write a model with random weights, which draws the end token with this probability wherever
    it stands, and its tokenizer. Return the tokenizer.

    Embeddings have a first component of 1 that no layer writes to. Of the output layer only the end
    token reads it."""
    tokenizer = train_tokenizer(questions())
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[tokenizer.eos_token_id] = 0.0
        tokens = torch.randint(size.vocab, (8, 64))
        states = model.model(tokens).last_hidden_state
        others = model.lm_head(states).exp().sum(-1).mean() - 1.0
        wanted = (others * end_probability / (1.0 - end_probability)).log().clamp(min=-50.0)
        model.lm_head.weight[tokenizer.eos_token_id, 0] = wanted / states[..., 0].mean()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return tokenizer


def make_workload(
    directory: Path, size: Size, lengths: Lengths, num_prompts: int, **sections: Any
) -> Path:
    """Write model, prompts, reward function and config of a run with one response to each prompt.
    Return the config.

    One PPO epoch, mini-batches of 64 sequences, actor, critic and reference. sections: settings
    that are added."""
    make_model(directory / "model", size, lengths.end_probability)
    write_prompts(directory / "train.parquet", parquet_rows(questions(), "train"))
    (directory / "reward.py").write_text(REWARD)
    tree: dict[str, Any] = {
        "data": {
            "train_files": str(directory / "train.parquet"),
            "val_files": [],
            "train_batch_size": num_prompts,
            "max_prompt_length": 16,
            "max_response_length": lengths.longest,
        },
        "model": {"path": str(directory / "model")},
        "actor": {
            "ppo_mini_batch_size": 64,
            "ppo_max_token_len_per_gpu": TOKEN_BUDGET,
            "optim": {"lr": 1e-6},
            "megatron": {"dtype": "float32"},
        },
        "critic": {
            "ppo_max_token_len_per_gpu": TOKEN_BUDGET,
            "forward_max_token_len_per_gpu": TOKEN_BUDGET,
            "optim": {"lr": 1e-6},
        },
        "rollout": {
            "cpu_kvcache_space_gb": 1,
            "log_prob_max_token_len_per_gpu": TOKEN_BUDGET,
            "max_num_seqs": 256,
        },
        "ref": {"log_prob_max_token_len_per_gpu": TOKEN_BUDGET},
        "algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "fixed", "kl_coef": 0.001}},
        "custom_reward_function": {"path": str(directory / "reward.py")},
        "trainer": {
            "default_local_dir": str(directory / "run"),
            "total_training_steps": 10_000,
            "val_before_train": False,
            "planner": "warn",
        },
    }
    for name, section in sections.items():
        tree.setdefault(name, {}).update(section)
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
