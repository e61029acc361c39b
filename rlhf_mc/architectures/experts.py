"""Mixtures of experts: a router chooses some of a layer's experts for each token. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rlhf_mc.architectures import hf_config
from rlhf_mc.architectures.dense import dense_layers
from rlhf_mc.architectures.hf_config import flag, refused, size
from rlhf_mc.architectures.layer import FeedForward, FeedForwardActivations, Indivisible
from rlhf_mc.architectures.rows import HF, MC, Param, linear, norm
from rlhf_mc.config.errors import UserError


@dataclass(frozen=True)
class ExpertNames:
    """Names of a mixture of experts in Hugging Face checkpoints and in config.json."""

    block: str = "mlp"
    """The module in a layer that has the router and the experts, `experts`."""
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    """The module in the block with the expert that every token has."""
    in_one_tensor: Literal["columns", "halves"] | None = None
    """Files have all experts of a layer in one tensor (architectures/packed_experts.py), and gate
    and up in turn, as vLLM has them then, or one after the other."""
    engine_float32: bool = False
    """vLLM's router is float32 whatever the type of the model."""
    ffn_key: str = "moe_intermediate_size"
    """Key of config.json with the intermediate size of an expert."""


@dataclass(frozen=True, kw_only=True)
class Experts(FeedForward):
    """A mixture of experts, and the expert that every token has."""

    expert_names: ExpertNames
    num_experts: int  # type: ignore[misc]
    experts_per_token: int  # type: ignore[misc]
    expert_ffn_hidden_size: int
    """Intermediate size of one expert."""
    shared_ffn_hidden_size: int = 0
    """Intermediate size of the expert that every token has; 0: there is none."""
    routed_scaling: float = 1.0
    """Factor of the router's weights."""
    norm_topk_prob: bool = False
    """The router's weights of a token's experts are normalised to sum to 1."""
    router_groups: int = 1
    """Equal groups of experts."""
    groups_per_token: int = 1
    """Groups that a token's experts come from: those with the largest sums of their best scores."""
    shared_expert_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of a gate, one for each token."""
    sigmoid_router: bool = False
    """A token's experts have the largest sigmoids plus a correction bias without a gradient; their
    weights are the sigmoids."""

    is_recomputed: ClassVar[bool] = False
    quantizes: ClassVar[bool] = False

    def dims(self) -> dict[str, int]:
        return {
            "hidden": self.hidden_size,
            "experts": self.num_experts,
            "expert_ffn": self.expert_ffn_hidden_size,
            "shared_ffn": self.shared_ffn_hidden_size,
            "one": 1,
        }

    def params(self) -> list[Param]:
        names = self.expert_names
        expert = f"{HF}{names.block}.experts.{{e}}."
        gate_up = dict.fromkeys((expert + names.gate, expert + names.up), ("expert_ffn", "hidden"))
        down = {expert + names.down: ("hidden", "expert_ffn")}
        experts = [
            Param(
                "expert",
                {f"{part}.{kind}": dims[:num_dims] for part, dims in parts.items()},
                f"{MC}mlp.experts.local_experts.{{e}}.{module}.{kind}",
                f"{HF}{names.block}.experts.routed_experts.{engine}_{kind}",
                f"{MC}mlp.experts.{module}.{kind}{{e}}",
                engine_alternates=names.in_one_tensor == "columns" and len(parts) == 2,
            )
            for module, engine, parts in (
                ("linear_fc1", "w13", gate_up),
                ("linear_fc2", "w2", down),
            )
            for kind, num_dims in (("weight", 2), ("bias", 1))[: 1 + self.mlp_bias]
        ]
        router = {f"{names.block}.{names.router}": ("experts", "hidden")}
        return [
            # the norm before a router is not fused
            norm("post_attention_layernorm", "pre_mlp_layernorm"),
            *linear("mlp.router", router, self.mlp_bias, engine_float32=names.engine_float32),
            *self._others(),
            *experts,
        ]

    def _others(self) -> list[Param]:
        """Return the correction bias, and the rows of the shared expert."""
        names = self.expert_names
        others = []
        if self.sigmoid_router:
            bias = {f"{HF}{names.block}.gate.e_score_correction_bias": ("experts",)}
            name = MC + "mlp.router.expert_bias"
            others.append(Param("layer", bias, name, is_correction_bias=True))
        if self.shared_ffn_hidden_size:
            shared = f"{names.block}.{names.shared}."
            parts = (shared + names.gate, shared + names.up)
            gate_up = dict.fromkeys(parts, ("shared_ffn", "hidden"))
            down = {shared + names.down: ("hidden", "shared_ffn")}
            fc1 = "mlp.shared_experts.linear_fc1"
            others += linear(fc1, gate_up, False, f"{shared}gate_up_proj")
            others += linear("mlp.shared_experts.linear_fc2", down, bias=False)
        if self.shared_expert_gate:
            gate = {f"{HF}{names.block}.shared_expert_gate.weight": ("one", "hidden")}
            others.append(Param("layer", gate, MC + "mlp.shared_experts.gate_weight"))
        return others

    def split_sizes(self) -> list[Indivisible]:
        key = self.expert_names.ffn_key
        sizes = [(key, self.expert_ffn_hidden_size, "expert_ffn")]
        if self.shared_ffn_hidden_size:
            gated = self.shared_expert_gate
            what = "shared_expert_intermediate_size" if gated else f"n_shared_experts x {key}"
            sizes.append((what, self.shared_ffn_hidden_size, "shared_ffn"))
        return sizes

    def engine_obstacle(self, tp: int) -> tuple[str, str] | None:
        if tp > self.num_experts:
            return f"num_experts is {self.num_experts}, fewer than ranks", "experts"
        return None

    @property
    def choice_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the numbers of the experts that a token has chosen: one each of up to 256
        experts, else two."""
        return self.experts_per_token * (1 if self.num_experts <= 256 else 2)

    @property
    def sharded_pairs(self) -> int:  # type: ignore[override]
        """Pairs of a column-parallel and a row-parallel layer: the shared expert's."""
        return int(self.shared_ffn_hidden_size > 0)

    def active_size(self) -> int:
        return self.experts_per_token * self.expert_ffn_hidden_size + self.shared_ffn_hidden_size

    def training_obstacle(self) -> str | None:
        if self.experts_per_token > 1 or not self.norm_topk_prob:
            return None
        return (
            "num_experts_per_tok is 1 and norm_topk_prob is true: every weight is 1 and the router "
            "cannot learn; Megatron-Core refuses it"
        )

    def router_rows(self) -> int:
        return self.num_experts + self.shared_expert_gate

    def weights(self, ep: int) -> int:
        experts = self.num_experts * self.expert_ffn_hidden_size // ep
        return self.hidden_size * 3 * (experts + self.shared_ffn_hidden_size)

    def read_weights(self, tp: int, tokens: int) -> float:
        """Return the weights of the experts that any token has: of E experts, of which a token has
        k, E (1 - (1 - k / E)^tokens) of evenly routed tokens."""
        missed = 1 - self.experts_per_token / self.num_experts
        used = self.num_experts * (1 - missed**tokens)
        ffn = used * self.expert_ffn_hidden_size + self.shared_ffn_hidden_size
        return self.hidden_size * 3 * (ffn / tp)

    def activations(self, tp: int) -> FeedForwardActivations:
        product = self.active_size() / tp
        inputs = float(self.experts_per_token * self.hidden_size)
        return FeedForwardActivations(
            product,
            local=(8 if self.activation == "clamped_swiglu" else 6) * product + inputs,
            recomputed=product - self.shared_ffn_hidden_size / tp,
            inputs=inputs,
            routing_bytes=24 * self.experts_per_token + 5 * self.num_experts,
        )


def expert_layers(
    config: Mapping[str, Any], traits: Mapping[str, Any], names: ExpertNames
) -> list[FeedForward]:
    """Return the feed-forward of each layer that config.json describes: experts, or dense. traits:
    of the family, by name."""
    # transformers 5 writes num_local_experts, earlier versions num_experts.
    key = next(
        (key for key in ("num_experts", "n_routed_experts") if config.get(key)), "num_local_experts"
    )
    if config.get("num_local_experts") not in (None, config.get(key)):
        other = f"{key} is {str(config[key])[:80]}, and they are two names of one number"
        raise refused("num_local_experts", config["num_local_experts"], other)
    num_experts = size(config, key)
    ffn = size(config, names.ffn_key)
    per_token = size(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise UserError(
            f"config.json: num_experts_per_tok is {per_token}, more than {key}, which is "
            f"{num_experts}"
        )
    hidden_size = size(config, "hidden_size")
    experts = Experts(
        hidden_size=hidden_size,
        expert_names=names,
        num_experts=num_experts,
        experts_per_token=per_token,
        expert_ffn_hidden_size=ffn,
        shared_ffn_hidden_size=ffn * hf_config.size_or_zero(config, "n_shared_experts")
        or hf_config.size_or_zero(config, "shared_expert_intermediate_size"),
        routed_scaling=hf_config.positive(config, "routed_scaling_factor", 1.0),
        norm_topk_prob=flag(config, "norm_topk_prob"),
        **_router_groups(config, num_experts, per_token),
        **Experts.traits(traits),
    )
    dense = dense_layers(config, traits)
    is_dense = _dense_layers(config)
    return [block if layer in is_dense else experts for layer, block in enumerate(dense)]


def _dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers that have no experts: mlp_only_layers, those that decoder_sparse_step
    passes over, and the first_k_dense_replace first ones."""
    num_layers = size(config, "num_hidden_layers")
    listed = [] if config.get("mlp_only_layers") is None else config["mlp_only_layers"]
    if not isinstance(listed, list) or not all(
        type(layer) is int and 0 <= layer < num_layers for layer in listed
    ):
        raise refused(
            "mlp_only_layers", listed, f"expected a list of layers from 0 to {num_layers - 1}"
        )
    step = 1 if config.get("decoder_sparse_step") is None else size(config, "decoder_sparse_step")
    first = hf_config.size_or_zero(config, "first_k_dense_replace")
    dense = tuple(
        layer
        for layer in range(num_layers)
        if layer < first or layer in listed or (layer + 1) % step
    )
    if len(dense) == num_layers:
        key = "mlp_only_layers" if len(set(listed)) == num_layers else "decoder_sparse_step"
        key = "first_k_dense_replace" if first >= num_layers else key
        raise refused(key, config[key], f"none of the {num_layers} layers would have experts")
    return dense


def _router_groups(config: Mapping[str, Any], num_experts: int, per_token: int) -> dict[str, Any]:
    """Return the fields of Experts for the groups of experts among which a router chooses; none
    where it chooses among all. A group is ranked by the sum of its two best scores (transformers,
    vLLM); Megatron-Core takes as many as a token has experts in each group."""
    if config["model_type"] not in hf_config.LATENT:
        return {}
    groups = size(config, "n_group")
    chosen = size(config, "topk_group")
    if groups == 1 and chosen == 1:
        return {}
    if num_experts % groups or num_experts // groups < 2:
        raise refused(
            "n_group",
            groups,
            f"expected a divisor of {num_experts} experts, with two or more in a group",
        )
    if per_token != 2 * chosen or chosen > groups:
        raise refused(
            "topk_group",
            chosen,
            f"expected half of num_experts_per_tok {per_token}, and at most n_group",
        )
    return {"router_groups": groups, "groups_per_token": chosen}
