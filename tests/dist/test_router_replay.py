"""Router replay: with given choices of experts the trainer's log-probs and gradients are those of
transformers with the same choices in each layout, losses of the routers included, and in whole runs
the updates use the experts of the engine, or of the old log-probs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import replay_cases
import torch
from families import traits
from gpu_parts.engines import Job, token_batch
from gpu_parts.reference import Reference, by_checkpoint_names
from tiny import make_workspace, write_config
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.checkpoint.hf_format import HFReader
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.patching import replaced

pytestmark = pytest.mark.dist

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"family": "qwen3_moe", "num_hidden_layers": 4},
    # The first of two stages has no experts, whose numbers have more than 8 bits.
    "mixed": {
        "family": "qwen3_moe",
        "num_hidden_layers": 4,
        "mlp_only_layers": [0, 1, 3],
        "num_experts": 264,
        "moe_intermediate_size": 16,
    },
    # A router with a correction bias, which is for the choice alone.
    "glm4_moe": {"family": "glm4_moe", "num_hidden_layers": 4},
}
PROMPT_LENS = (3, 9, 4, 4, 6)
RESPONSE_LENS = (6, 1, 11, 5, 2)
Results = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Log-probs [R], gradients by the checkpoint's names."""
Balanced = tuple[Results, tuple[float, float], dict[int, np.ndarray]]
"""Results with replay_cases.BALANCE, both losses of a layer, and the correction biases after a
step, by layer."""
Choose = Callable[[int, torch.Tensor], torch.Tensor]
"""(number of the call of a router, its scores [tokens, experts]) -> experts [tokens, k]."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("router_replay")
    return {
        name: str(make_workspace(root / name, tied=False, **sizes) / "model")
        for name, sizes in MODELS.items()
    }


@pytest.fixture(scope="session")
def batch(checkpoints: dict[str, str]) -> RaggedBatch:
    vocab = HFReader(checkpoints["qwen3_moe"]).shape().vocab_size
    noise = torch.randn(3, sum(RESPONSE_LENS), generator=torch.Generator().manual_seed(6))
    return token_batch(vocab, PROMPT_LENS, RESPONSE_LENS).with_fields(
        numbers=torch.tensor([40, 7, 23, 8, 91]),
        old_log_probs=-5 + 0.3 * noise[0],
        ref_log_probs=-5 + 0.3 * noise[1],
        advantages=noise[2],
    )


@pytest.fixture(scope="session")
def choices(checkpoints: dict[str, str], batch: RaggedBatch) -> dict[str, list[np.ndarray]]:
    """Return for each model random experts for each token but the last."""
    draw = np.random.default_rng(3)

    def random_experts(shape: ModelShape) -> list[np.ndarray]:
        dtype = np.uint8 if shape.num_experts <= 256 else np.uint16
        sizes = [
            (length - 1, len(shape.expert_layers), shape.num_experts)
            for length in batch.seq_lens.tolist()
        ]
        return [
            draw.random(size).argsort(-1)[..., : shape.experts_per_token].astype(dtype)
            for size in sizes
        ]

    return {
        name: random_experts(HFReader(checkpoint).shape())
        for name, checkpoint in checkpoints.items()
    }


@contextlib.contextmanager
def choosing(num_experts: int, choose: Choose) -> Iterator[None]:
    """Let transformers' routers choose experts by `choose`."""
    original = torch.topk
    calls = 0

    def topk(scores: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if scores.shape[-1] != num_experts:
            return original(scores, k, *args, **kwargs)
        experts = choose(calls, scores)
        calls += 1
        return scores.gather(-1, experts), experts

    with replaced(torch, "topk", topk):
        yield


@pytest.fixture(scope="session")
def given_choices(
    checkpoints: dict[str, str], batch: RaggedBatch, choices: dict[str, list[np.ndarray]]
) -> dict[str, Balanced]:
    """Return for each model transformers' log-probs and gradients with `choices`."""
    return {name: balanced_reference(checkpoints[name], batch, choices[name]) for name in MODELS}


@pytest.fixture(scope="session")
def own_choices(
    checkpoints: dict[str, str], batch: RaggedBatch
) -> dict[str, tuple[Results, Results]]:
    """Return for each model transformers' log-probs and gradients with the choices of its routers,
    and the same with the weights of the routers reversed after these choices."""
    out = {}
    for name in MODELS:
        own = chosen_experts(checkpoints[name], batch)
        out[name] = tuple(
            reference(checkpoints[name], batch, own, is_reversed) for is_reversed in (False, True)
        )
    return out  # type: ignore[return-value]


def reference(
    checkpoint: str,
    batch: RaggedBatch,
    given: Sequence[np.ndarray],
    is_reversed: bool,
    model: Reference | None = None,
    chosen: list[torch.Tensor] | None = None,
) -> Results:
    """Return transformers' log-probs and gradients, with the routers' weights reversed or not, with
    these choices."""
    job = Job("", "actor", "token-mean", 0, tuple(range(batch.num_sequences)))
    model = model or Reference(checkpoint)
    if is_reversed:
        reverse(model)
    num_layers = given[0].shape[1]
    num_experts = HFReader(checkpoint).shape().num_experts
    original = torch.topk

    def choose(call: int, scores: torch.Tensor) -> torch.Tensor:
        sequence, layer = divmod(call, num_layers)
        experts = torch.from_numpy(given[sequence][:, layer].astype(np.int64))
        experts = torch.cat([experts, original(scores[-1:], experts.shape[1])[1]])
        if chosen is not None:
            chosen.append(experts)
        return experts

    with choosing(num_experts, choose), torch.no_grad():
        log_probs = model.log_probs(batch)[0]
    with choosing(num_experts, choose):
        return log_probs, by_checkpoint_names(
            model.gradients(batch, job)[1], model.model.config.model_type
        )


class BalancedReference(Reference):
    """A model with the losses of its routers, and the loads of their experts, by a slow
    definition."""

    def __init__(self, checkpoint: str) -> None:
        super().__init__(checkpoint)
        self.shape = HFReader(checkpoint).shape()
        self.chosen: list[torch.Tensor] = []
        """Experts [tokens, k] of each call of a router."""
        self._logits: list[torch.Tensor] = []
        for name, module in self.model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_pre_hook(self._keep_logits)

    def _keep_logits(self, router: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self._logits.append(inputs[0].flatten(0, -2) @ router.weight.T)

    def _actor_loss(
        self, mini: RaggedBatch, job: Job
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self._logits.clear()
        self.chosen.clear()
        loss, stats = super()._actor_loss(mini, job)
        aux_loss = z_loss = torch.zeros(())
        for logits, chosen in zip(self._logits, self.chosen, strict=True):
            aux_loss = aux_loss + self.aux_loss(logits, chosen) / mini.num_sequences
            z_loss = z_loss + logits.exp().sum(1).log().square().sum() / len(mini.tokens)
        layers = len(self.shape.expert_layers)
        self.losses = (float(aux_loss) / layers, float(z_loss) / layers)
        coefficients = replay_cases.BALANCE
        return (
            loss
            + coefficients.moe_aux_loss_coeff * aux_loss
            + coefficients.moe_z_loss_coeff * z_loss,
            stats,
        )

    def aux_loss(self, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the auxiliary loss of one layer's tokens."""
        scores = logits.sigmoid() if traits(self.shape).sigmoid_router else logits.softmax(1)
        of_tokens = torch.nn.functional.one_hot(chosen, self.shape.num_experts).sum(1)
        share = of_tokens.double().mean(0) / self.shape.experts_per_token
        return (
            self.shape.num_experts * (share * (scores / scores.sum(1, keepdim=True)).mean(0)).sum()
        )

    def biases_after_step(self) -> dict[int, np.ndarray]:
        """Return the correction bias of each layer with experts, moved by the loads of all
        tokens."""
        biases = [
            bias
            for name, bias in self.model.named_buffers()
            if name.endswith("e_score_correction_bias")
        ]
        out = {}
        for at, bias in enumerate(biases):
            loads = (
                torch.cat(self.chosen[at :: len(biases)])
                .flatten()
                .bincount(minlength=self.shape.num_experts)
            )
            step = (
                replay_cases.BALANCE.moe_router_bias_update_rate
                * (loads.double().mean() - loads).sign()
            )
            out[self.shape.expert_layers[at]] = (bias + step).numpy()
        return out


def balanced_reference(
    checkpoint: str, batch: RaggedBatch, given: Sequence[np.ndarray]
) -> Balanced:
    """Return what transformers has with these choices, and with its routers' own for the last token
    of a sequence."""
    model = BalancedReference(checkpoint)
    results = reference(checkpoint, batch, given, False, model, model.chosen)
    return results, model.losses, model.biases_after_step()


def test_auxiliary_loss_of_softmax_routers_is_transformers(checkpoints: dict[str, str]) -> None:
    """transformers does not divide the experts of a token by their number."""
    model = BalancedReference(checkpoints["qwen3_moe"])
    logits = torch.randn(9, 4)
    wanted = load_balancing_loss_func((logits,), num_experts=4, top_k=2)
    assert float(2 * model.aux_loss(logits, logits.topk(2).indices)) == pytest.approx(float(wanted))


def reverse(model: Reference) -> None:
    """Reverse the weights of the routers."""
    with torch.no_grad():
        for name, param in model.model.named_parameters():
            if name.endswith("gate.weight"):
                param.neg_()


LAYOUTS = {
    # TP, PP, EP, VPP, CP, and further settings.
    "one rank": (1, (1, 1, 1, 1, 1), {}),
    "replicas": (2, (1, 1, 1, 1, 1), {"recompute_granularity": "full"}),
    "virtual pipeline": (2, (1, 2, 1, 2, 1), {}),
    "sequence parallel": (
        2,
        (2, 1, 1, 1, 1),
        {"sequence_parallel": True, "recompute_granularity": "full"},
    ),
    "experts, pipeline": (4, (1, 2, 2, 1, 1), {"recompute_granularity": "selective"}),
    "sequence and context parallel": (4, (2, 1, 2, 1, 2), {"sequence_parallel": True}),
    "dynamic context parallel": (4, (1, 1, 1, 1, 4), {"dynamic_cp": True}),
}


WITHOUT_MANY_EXPERTS = ("replicas", "dynamic context parallel")
"""Layouts without the model `mixed`: others have their exchanges of its 16-bit numbers."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_choices_match_transformers(
    pool: Any,
    checkpoints: dict[str, str],
    choices: dict[str, list[np.ndarray]],
    batch: RaggedBatch,
    given_choices: dict[str, Balanced],
    own_choices: dict[str, tuple[Results, Results]],
    name: str,
) -> None:
    """Record the choices of a pass, and replay them in an update before and after the routers are
    reversed (R2). Replay given choices (R3), with the losses of the routers."""
    world, layout, settings = LAYOUTS[name]
    models = [model for model in MODELS if model != "mixed" or name not in WITHOUT_MANY_EXPERTS]
    found = pool(world).run(
        replay_cases.record_and_replay,
        checkpoints={model: checkpoints[model] for model in models},
        choices=choices,
        batch=batch,
        layout=layout,
        **settings,
    )
    for rank in range(world):
        for model in models:
            what = f"{model}, rank {rank}"
            (before, after), (results, losses, biases) = found[rank][model]
            wanted, wanted_losses, wanted_biases = given_choices[model]
            check(what, results, wanted)
            # Half of 2 random ones of 4 experts are among the router's own 2; of 264 hardly any.
            assert 0.3 < results[2] < 0.7 or (model == "mixed" and results[2] > 0.9)
            assert list(losses) == ["router_aux_loss", "router_z_loss"]
            assert list(losses.values()) == pytest.approx(wanted_losses, rel=1e-4), what
            assert bool(biases) == (model == "glm4_moe")
            for layer, bias in biases.items():
                assert np.abs(bias - wanted_biases[layer]).max() < 1e-6, what
            own, of_reversed = own_choices[model]
            check(f"{what}, recorded", before, own)
            assert before[2] == 0.0
            check(f"{what}, reversed", after, (own[0], of_reversed[1]))
            assert after[2] > 0.1, what


def chosen_experts(checkpoint: str, batch: RaggedBatch) -> list[np.ndarray]:
    """Return the experts that transformers' routers choose for each token but the last."""
    shape = HFReader(checkpoint).shape()
    found: list[np.ndarray] = []
    original = torch.topk

    def choose(call: int, scores: torch.Tensor) -> torch.Tensor:
        experts = original(scores, shape.experts_per_token)[1]
        found.append(experts[:-1].numpy())
        return experts

    with choosing(shape.num_experts, choose), torch.no_grad():
        Reference(checkpoint).log_probs(batch)
    num_layers = len(shape.expert_layers)
    return [
        np.stack(found[at : at + num_layers], axis=1) for at in range(0, len(found), num_layers)
    ]


def check(what: str, found: replay_cases.Results, wanted: Results) -> None:
    error = float((found[0] - wanted[0]).abs().max())
    assert error < 1e-5, f"{what}: log-probs off by {error:.1e}"
    assert found[1].keys() == wanted[1].keys()
    for tensor, want in wanted[1].items():
        error = float(
            (torch.from_numpy(found[1][tensor]) - want).abs().max()
            / want.abs().max().clamp_min(1e-12)
        )
        assert error < 1e-4, f"{what}, {tensor}: gradient off by {error:.1e} of the largest"


def test_sequence_without_choices(
    pool: Any, checkpoints: dict[str, str], batch: RaggedBatch
) -> None:
    for ok, error in pool(2).outcomes(
        replay_cases.without_choices, checkpoint=checkpoints["qwen3_moe"], batch=batch
    ):
        assert not ok and error[0] == "UserError"
        assert error[1] == (
            "algorithm.router_replay is rollout; for 2 of 5 responses the rollout engine has not "
            "returned the experts of all tokens before the last drawn one, in all layers with "
            "experts: set it to recompute or off"
        )


ENVIRONMENT = """
import asyncio, os

class Environment:
    def reset(self, row): ...

    async def step(self, response, token_ids):
        await asyncio.sleep(0.05 * os.urandom(1)[0] / 255)
        return [10, 20, 30], 1.0, sum(token_ids) % 4 == 0, {}
"""


@pytest.fixture(scope="module")
def runs(
    pool: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[str, dict[str, float], float]]]:
    """Return for each run replay_cases.two_steps, in bfloat16, where engine and trainer choose
    differently. Two have conversations, which are cut and continued, and of which some end with an
    observation."""
    directory = make_workspace(
        tmp_path_factory.mktemp("replayed_runs"),
        family="qwen3_moe",
        tied=False,
        num_hidden_layers=4,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
    )
    actor = {"megatron": {"dtype": "bfloat16"}, "ppo_epochs": 1}
    algorithm = {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}}
    config = write_config(
        directory, actor=actor, algorithm=algorithm, rollout={"n": 4}, trainer={"test_freq": -1}
    )
    (directory / "environment.py").write_text(ENVIRONMENT)
    turns = [
        f"rollout.environment.path={directory / 'environment.py'}",
        "rollout.environment.max_tokens_per_turn=5",
        "data.max_response_length=16",
        "custom_reward_function.path=null",
        "rollout.partial_rollout=true",
        "rollout.prompts_in_flight=10",
        "rollout.max_num_seqs=8",
        "algorithm.rollout_correction.rollout_is=token",
    ]
    layout = [
        "actor.megatron.pipeline_model_parallel_size=2",
        "rollout.tensor_model_parallel_size=2",
    ]
    overrides = {
        "default": [],
        "rollout": [
            *layout,
            *turns,
            "algorithm.router_replay=rollout",
            "actor.ppo_mini_batch_size=8",
        ],
        "recompute": [*turns, "algorithm.router_replay=recompute"],
        "off": ["algorithm.router_replay=off"],
    }
    found = {}
    for name, changes in overrides.items():
        found[name], other = pool(2).run(
            replay_cases.two_steps, config_path=str(config), overrides=changes
        )
        assert [digest for digest, _, _ in found[name]] == [digest for digest, _, _ in other]
    return found


def test_updates_use_the_replayed_experts(
    runs: dict[str, list[tuple[str, dict[str, float], float]]],
) -> None:
    for name in ("default", "rollout", "recompute"):
        for _, metrics, differing in runs[name]:
            assert differing == 0.0, name
            assert ("training/expert_choices_diff" in metrics) == (name != "recompute")
            layers = [metrics.get(f"training/expert_choices_diff/layer_{n}") for n in range(4)]
            if name != "recompute":
                assert sum(layers) / 4 == pytest.approx(metrics["training/expert_choices_diff"])
                assert len(set(layers)) > 1, "layers have shares of their own"
            # The routers alone would have chosen other experts for some tokens.
            assert 0.0 < metrics.get("training/expert_choices_diff", 0.01) < 0.2, name
    assert not any(
        key.endswith("expert_choices_diff") for _, metrics, _ in runs["off"] for key in metrics
    )
    for name in ("rollout", "recompute"):
        _, metrics, _ = runs[name][1]
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 1, (
            "responses were continued"
        )
        # One update: no pass of the old log-probs.
        training, updates = (metrics.get(f"{x}/expert_choices_diff") for x in ("training", "actor"))
        assert (training == updates) == (name == "rollout")
        assert metrics["num_turns/mean"] > 1 and metrics["response_length/clip_ratio"] > 0


def test_log_probs_agree_with_the_engines(
    runs: dict[str, list[tuple[str, dict[str, float], float]]],
) -> None:
    """Compare the first step, whose tokens are the same in both runs."""
    tokens, replayed, _ = runs["default"][0]
    same_tokens, off, _ = runs["off"][0]
    assert tokens == same_tokens
    for statistic in ("mean", "max"):
        key = f"training/rollout_logprobs_diff_{statistic}"
        assert replayed[key] < 0.7 * off[key]
