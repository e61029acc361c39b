"""The cases that run on fake CUDA devices, and what a run reports. No torch: the tests' own process
has another one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from fake_cuda import Collective

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 500,
    "max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16, "tie_word_embeddings": True},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "attention_bias": True,
        "use_qk_norm": True,
        "head_dim": 16,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "rope_scaling": YARN,
    },
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "full_attention_interval": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "head_dim": 16,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}


SEQUENCE = {"sequence_parallel": True}
DISTRIBUTED = {"use_distributed_optimizer": True}
WHOLE = {"share_prompts": False}
OFFLOAD_ROLE = dict.fromkeys(("param_offload", "grad_offload", "optimizer_offload"), True)
OFFLOAD = {**DISTRIBUTED, **OFFLOAD_ROLE}


@dataclass(frozen=True)
class Case:
    """One role's model in one layout, seen from some of the ranks."""

    family: str
    role: str = "actor"
    world: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    cp: int = 1
    dynamic_cp: bool = False
    shards: int = 0
    """Ranks that share each parameter with strategy fsdp2; 0: strategy megatron."""
    on_host: bool = False
    """With strategy fsdp2: offload_policy."""
    layers: int = 2
    ranks: tuple[int, ...] = (0,)
    megatron: dict[str, Any] = field(default_factory=dict)
    """Settings of MegatronConfig beside the sizes of the layout."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json in place of SIZES'."""
    transformer_engine: bool = False
    freeze: tuple[str, ...] = ()
    """Patterns of the frozen tensors, as in actor.freeze."""
    lora_rank: int = 0
    """Rank of the adapters; 0: none."""
    steps: int = 1
    """Optimizer steps."""
    faults: tuple[str, ...] = ()
    """Names of functions of fake_faults.py that change what the ranks run."""

    @property
    def config(self) -> dict[str, Any]:
        """The config.json of the model."""
        return {
            "model_type": self.family,
            "num_hidden_layers": self.layers,
            **SIZES,
            **FAMILIES[self.family],
            **self.sizes,
        }


@dataclass(frozen=True)
class Report:
    """The records of one rank: see FakeCuda."""

    operators: frozenset[tuple[str, tuple[str, ...]]]
    waits: Counter[tuple[str, str, str]]
    pageable: Counter[tuple[str, str]]
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class PhaseBytes:
    """Bytes of the actor's tensors, and of what is in use with them."""

    executed: float
    planned: float


@dataclass(frozen=True)
class Measured:
    """Result of one rank."""

    phases: dict[str, PhaseBytes]
    left: Counter[str]
    """After everything is offloaded that the settings offload, by the place of the allocation."""


CASES: dict[str, Case] = {
    "llama": Case("llama", megatron=WHOLE),
    "qwen2 tied, stages": Case("qwen2", world=8, tp=2, pp=2, megatron=DISTRIBUTED, steps=2),
    "qwen3, sequence parallel": Case("qwen3", world=8, tp=2, ranks=(0, 1), megatron=SEQUENCE),
    "gemma": Case(
        "gemma", world=8, tp=2, ranks=(0, 1), megatron={"overlap_grad_reduce": False, **DISTRIBUTED}
    ),
    "experts": Case("qwen3_moe", steps=2),
    "experts, parallel": Case(
        "qwen3_moe",
        world=8,
        tp=2,
        ep=2,
        ranks=(0, 2),
        megatron={**SEQUENCE, **DISTRIBUTED, **WHOLE},
        steps=2,
    ),
    "shared expert, parallel": Case(
        "glm4_moe",
        world=8,
        tp=2,
        pp=2,
        ep=2,
        layers=4,
        ranks=(4,),
        megatron={**SEQUENCE, **DISTRIBUTED},
    ),
    "sinks, parallel": Case(
        "gpt_oss", world=8, tp=2, ep=2, ranks=(0,), megatron={**SEQUENCE, **DISTRIBUTED}
    ),
    "delta nets, parallel": Case(
        "qwen3_next",
        world=8,
        tp=2,
        pp=2,
        ep=2,
        layers=4,
        ranks=(4,),
        megatron={**SEQUENCE, **DISTRIBUTED},
    ),
    "latent attention, parallel": Case(
        "deepseek_v3",
        world=8,
        tp=2,
        pp=2,
        ep=2,
        layers=4,
        ranks=(4,),
        megatron={**SEQUENCE, **DISTRIBUTED},
    ),
    "latent attention, context parallel": Case(
        "deepseek_v3",
        world=4,
        tp=2,
        cp=2,
        ranks=(0,),
        megatron={**SEQUENCE},
        sizes={"q_lora_rank": None},
    ),
    "frozen": Case(
        "llama",
        freeze=("model.embed_tokens.*", "model.layers.0.*"),
        megatron={"recompute_granularity": "full", **DISTRIBUTED},
    ),
    "adapters": Case(
        "qwen3",
        world=8,
        tp=2,
        pp=2,
        lora_rank=4,
        megatron={"recompute_granularity": "full", **SEQUENCE, **DISTRIBUTED},
    ),
    "adapters of experts": Case(
        "deepseek_v3",
        world=8,
        tp=2,
        ep=2,
        ranks=(0, 1),
        lora_rank=4,
        megatron={**SEQUENCE, **OFFLOAD},
    ),
    "reward model": Case("qwen2", role="reward_model", world=8, tp=2, ranks=(0,), megatron=OFFLOAD),
    "experts, stages": Case(  # the first stage has a dense layer
        "qwen3_moe",
        world=8,
        pp=2,
        ep=2,
        layers=4,
        ranks=(0, 4),
        megatron={"recompute_granularity": "full"},
        sizes={"mlp_only_layers": [0]},
    ),
    "critic": Case(
        "qwen2",
        role="critic",
        world=8,
        tp=2,
        pp=2,
        ranks=(4,),
        megatron={"dtype": "float32", **SEQUENCE},
    ),
    "float32, offload": Case("qwen2", megatron={"dtype": "float32", **OFFLOAD}),
    "context parallel": Case(
        "qwen3", world=8, tp=2, cp=2, ranks=(0, 2), megatron={**SEQUENCE, **DISTRIBUTED}
    ),
    "more ranks than KV heads": Case(
        "llama",
        world=8,
        tp=8,
        ranks=(7,),
        megatron={"recompute_granularity": "selective", **SEQUENCE},
    ),
    "fsdp2, offload": Case("llama", world=8, shards=8, megatron=OFFLOAD_ROLE),
    "fsdp2 on the host, replicas": Case("glm4_moe", world=8, shards=4, ranks=(4,), on_host=True),
    "fsdp2 on the host, frozen": Case(
        "qwen2", shards=1, on_host=True, freeze=("model.embed_tokens.*", "model.layers.0.*")
    ),
    "fsdp2 of experts, replicas": Case("qwen3_moe", world=8, shards=4, ranks=(0, 4)),
    "fsdp2 of a critic, context parallel": Case(  # one row for the value head: rank 0 alone has it
        "qwen2",
        role="critic",
        world=8,
        cp=2,
        shards=8,
        ranks=(0, 7),
        megatron={"recompute_granularity": "full"},
    ),
}
"""With Megatron-Core's local layers."""
TE_RANKS: dict[str, tuple[int, ...]] = {
    "llama": (0,),
    "qwen2 tied, stages": (0, 1, 4),
    "gemma": (0,),
    "adapters": (0, 4),
    "adapters of experts": (0,),
    "experts": (0,),
    "experts, parallel": (0, 4),
    "shared expert, parallel": (0,),
    "delta nets, parallel": (0,),
    "latent attention, parallel": (0,),
    "latent attention, context parallel": (0,),
    "critic": (0,),
    "context parallel": (0, 2),
    "more ranks than KV heads": (0,),
}
"""Cases that run with Transformer Engine's layers too -> their ranks."""
FP8_SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
TE_CASES: dict[str, Case] = {
    **{
        f"{name}, Transformer Engine": replace(CASES[name], transformer_engine=True, ranks=ranks)
        for name, ranks in TE_RANKS.items()
    },
    "virtual chunks, Transformer Engine": Case(
        "llama",
        layers=4,
        world=8,
        tp=2,
        pp=2,
        vpp=2,
        ranks=(0, 4),
        transformer_engine=True,
        megatron=DISTRIBUTED,
        steps=2,
    ),
    "bfloat16, offload, Transformer Engine": Case(
        "llama", world=8, tp=2, transformer_engine=True, megatron={**OFFLOAD, **WHOLE}
    ),
    "context parallel a2a, Transformer Engine": Case(
        "qwen3",
        world=8,
        tp=2,
        cp=2,
        ranks=(0, 2),
        transformer_engine=True,
        megatron={"cp_comm_type": "a2a"},
    ),
    "context parallel dynamic, Transformer Engine": Case(
        "qwen3",
        world=8,
        cp=2,
        dynamic_cp=True,
        ranks=(0, 1),
        transformer_engine=True,
        megatron=DISTRIBUTED,
    ),
    **{
        f"fp8 {recipe}": Case(
            "llama",
            world=8,
            tp=2,
            ranks=(0,),
            sizes=FP8_SIZES,
            transformer_engine=True,
            megatron={"fp8": recipe, **SEQUENCE},
        )
        for recipe in ("tensorwise", "blockwise")
    },
}
