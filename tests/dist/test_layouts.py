"""Two PPO steps in every layout: the same rollouts, losses, gradient norms and weights, and vLLM
holds exactly the exported weights."""

from __future__ import annotations

import functools
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_reward_model, make_workspace, write_config

# (world, tp, pp, rollout TP); the data-parallel size follows. The first four have one axis each.
# Then: split KV heads; TP and PP; TP and DP with rollout TP ranks in another order. The tests of
# settings, roles and stages below run (2, 2, 1, 1), (2, 1, 1, 1), (4, 2, 2, 1) and (2, 1, 2, 2).
# test_plan.py has the weight update of any pair.
LAYOUTS = [
    (1, 1, 1, 1),
    (2, 2, 1, 2),
    (2, 1, 2, 1),
    (2, 1, 1, 2),
    (4, 4, 1, 4),
    (4, 2, 2, 4),
]

QKV, QKV_BIAS = (f"model.layers.*.self_attn.qkv_proj.{kind}" for kind in ("weight", "bias"))
ALL_PARAMS = (
    "model.embed_tokens.weight",
    "model.layers.*.input_layernorm.weight",
    QKV,
    QKV_BIAS,
    "model.layers.*.self_attn.o_proj.weight",
    "model.layers.*.post_attention_layernorm.weight",
    "model.layers.*.mlp.gate_up_proj.weight",
    "model.layers.*.mlp.down_proj.weight",
    "model.norm.weight",
)

COMPARED = (
    "actor/loss",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/entropy_loss",
    "actor/reward_kl_penalty",
    "critic/vf_loss",
    "critic/grad_norm",
    "critic/values/mean",
)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_workspace(tmp_path_factory.mktemp("layouts"))
    write_config(directory, actor={"ppo_epochs": 1})
    return directory


Run = Callable[[int, int, int, int], tuple[list[dict[str, Any]], Path]]


@pytest.fixture(scope="session")
def run_layout(pool: Any, workspace: Path) -> Run:
    """Return run_layout(world, tp, pp, rollout_tp): each rank's result of two steps, and the
    exported weights. Each layout runs once."""

    @functools.cache
    def run(world: int, tp: int, pp: int, rollout_tp: int) -> tuple[list[dict[str, Any]], Path]:
        export_to = workspace / f"out_{world}_{tp}_{pp}_{rollout_tp}"
        overrides = ["reshard.verify=always"]
        layout = (tp, pp, rollout_tp)
        return cases.run_two_steps(
            pool(world), workspace / "config.yaml", layout, export_to, overrides
        ), export_to

    return run


@pytest.fixture(scope="session")
def reference(run_layout: Run) -> dict[str, Any]:
    """Return the results of one process, which all layouts must reproduce."""
    (result,), exported = run_layout(1, 1, 1, 1)
    return {**result, "weights": cases.exported_weights(str(exported))}


@pytest.mark.parametrize(("world", "tp", "pp", "rollout_tp"), LAYOUTS)
def test_every_layout_gives_the_same_training(
    run_layout: Run, reference: dict[str, Any], world: int, tp: int, pp: int, rollout_tp: int
) -> None:
    results, export_to = run_layout(world, tp, pp, rollout_tp)
    for result in results:
        # With equal tensor parallelism all parameters alias Megatron-Core's, except the fused q, k,
        # v, which do only with one KV head a rank (TP 2). With TP 4 vLLM replicates each KV head,
        # and Megatron-Core splits it.
        expected = set(ALL_PARAMS) if pp == 1 and tp == rollout_tp else set()
        assert result["segments"] == []
        assert set(result["shared"]) >= expected - (set() if tp == 2 else {QKV, QKV_BIAS})
    check_same_training(reference, results, export_to)


@pytest.mark.parametrize(
    ("world", "tp", "pp", "setting"),
    [
        (2, 2, 1, "sequence_parallel=true"),
        (2, 1, 2, "virtual_pipeline_model_parallel_size=2"),
        (2, 1, 1, "recompute_granularity=full"),
        (4, 2, 1, "context_parallel_size=2"),
    ],
)
def test_engine_settings_give_the_same_training(
    pool: Any,
    reference: dict[str, Any],
    workspace: Path,
    world: int,
    tp: int,
    pp: int,
    setting: str,
) -> None:
    export_to = workspace / f"set_{setting}"
    results = cases.run_two_steps(
        pool(world),
        workspace / "config.yaml",
        (tp, pp, 1),
        export_to,
        ["reshard.verify=always", f"actor.megatron.{setting}"],
    )
    check_same_training(reference, results, export_to)
    for result in results:
        text = " ".join(line.strip() for line in result["headlines"])
        line = "for each response, since context_parallel_size is fixed: actor, critic, ref"
        assert (line in text) == setting.startswith("context")


@pytest.mark.parametrize(
    ("world", "actor", "critic", "ref"), [(2, (2, 1), (1, 1), (1, 2)), (4, (2, 2), (1, 1), (2, 1))]
)
def test_role_layouts_give_the_same_training(
    pool: Any,
    reference: dict[str, Any],
    workspace: Path,
    world: int,
    actor: tuple[int, int],
    critic: tuple[int, int],
    ref: tuple[int, int],
) -> None:
    """Run with these (tp, pp) for each role."""
    export_to = workspace / f"roles_{world}"
    overrides = [
        f"{role}.megatron.{kind}_model_parallel_size={size}"
        for role, layout in (("critic", critic), ("ref", ref))
        for kind, size in zip(("tensor", "pipeline"), layout, strict=True)
    ]
    results = cases.run_two_steps(
        pool(world), workspace / "config.yaml", (*actor, 1), export_to, overrides
    )
    check_same_training(reference, results, export_to)
    for result in results:
        assert all(len(line) <= 80 for line in result["headlines"])
        assert "  Megatron-Core's local layers; float32: actor, critic, ref" in result["headlines"]
        rows = {cells[0]: cells[1:] for line in result["headlines"] if (cells := line.split())}
        for role, (tp, pp) in (("actor", actor), ("critic", critic), ("ref", ref)):
            assert rows[role][:4] == [str(tp), "1", str(pp), str(world // (tp * pp))]
            assert (rows[role][-2:] == ["-", "-"]) == (role == "ref")


def test_uneven_stages_give_the_same_training(
    pool: Any, reference: dict[str, Any], workspace: Path
) -> None:
    """Split four layers as 1 and 3."""
    export_to = workspace / "uneven"
    results = cases.run_two_steps(
        pool(2),
        workspace / "config.yaml",
        (1, 2, 2),
        export_to,
        [
            "actor.megatron.num_layers_in_first_pipeline_stage=1",
            "actor.megatron.num_layers_in_last_pipeline_stage=3",
        ],
    )
    check_same_training(reference, results, export_to)


def check_same_training(
    reference: dict[str, Any], results: list[dict[str, Any]], export_to: Path
) -> None:
    """Compare tokens, losses, gradient norms and weights with one process, and vLLM's weights with
    the export."""
    for rank, result in enumerate(results):
        assert result["different"] == [], f"rank {rank}: vLLM's weights are not the exported ones"
        assert result["digests"] == reference["digests"], f"rank {rank} drew other tokens"
        for step, (mine, wanted) in enumerate(
            zip(result["steps"], reference["steps"], strict=True), 1
        ):
            assert mine["training/rollout_logprobs_diff_max"] < 1e-4
            for key in COMPARED:
                assert mine[key] == pytest.approx(wanted[key], rel=2e-4, abs=2e-6), (
                    f"rank {rank}, step {step}: {key}"
                )
    weights = cases.exported_weights(str(export_to))
    assert weights.keys() == reference["weights"].keys()
    for name, wanted in reference["weights"].items():
        torch.testing.assert_close(
            weights[name], wanted, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_training_changes_every_weight(reference: dict[str, Any], workspace: Path) -> None:
    """Guard the comparisons above, which would pass with weights that do not train."""
    start = cases.exported_weights(str(workspace / "model"))
    assert all(
        not torch.equal(start[name], weight) for name, weight in reference["weights"].items()
    )


POOLS = [
    # (training ranks, tp, pp, rollout TP) of LAYOUTS: as many engines as in the colocated run.
    (1, 1, 1, 1),
    (2, 2, 1, 2),
    (2, 1, 2, 1),
    (2, 1, 1, 2),
]


@pytest.mark.parametrize(("ranks", "tp", "pp", "rollout_tp"), POOLS)
def test_pools_give_the_bits_of_ranks_that_train_and_generate(
    pool: Any, run_layout: Run, workspace: Path, ranks: int, tp: int, pp: int, rollout_tp: int
) -> None:
    """Compare with a colocated run of as many training ranks and engines: metrics, tokens and
    weights are equal to the last bit on all ranks, though the engines' parameters alias the actor's
    in the colocated run alone. With two ranks the reference is on those of the engines, and no
    training rank holds a parameter of it."""
    colocated, exported = run_layout(ranks, tp, pp, rollout_tp)
    assert all(result["shared"] for result in colocated)
    export_to = workspace / f"pools_{ranks}_{tp}_{pp}_{rollout_tp}"
    overrides = [
        "reshard.verify=always",
        f"resource_pools.train={ranks}",
        f"resource_pools.rollout={ranks}",
        f"ref.pool={'train' if ranks == 1 else 'rollout'}",
    ]
    layout = (tp, pp, rollout_tp)
    results = cases.run_two_steps(
        pool(2 * ranks), workspace / "config.yaml", layout, export_to, overrides
    )
    wanted = [without_times(step) for step in colocated[0]["steps"]]
    for rank, result in enumerate(results):
        assert result["digests"] == colocated[0]["digests"], f"rank {rank} has other tokens"
        assert [without_times(step) for step in result["steps"]] == wanted, f"rank {rank}"
        assert result["different"] == [] and result["shared"] == []
        assert (result["received"] > 0) == (rank >= ranks)
        assert (result["reference"] > 0) == ((rank >= ranks) == (ranks == 2))
        assert result["steps"][0]["reshard/copied_bytes"] == 0
    weights = cases.exported_weights(str(export_to))
    expected = cases.exported_weights(str(exported))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "scores",
            [
                "actor.lora.rank=4",
                "reward_model.megatron.dtype=float32",
                "algorithm.filter_groups.enable=true",
                "algorithm.filter_groups.metric=seq_reward",
                "rollout.n=2",
            ],
        ),
        (
            "experts",
            [
                "algorithm.router_replay=recompute",
                "actor.moe_aux_loss_coeff=0.01",
                "actor.moe_z_loss_coeff=0.01",
            ],
        ),
    ],
)
def test_pools_have_all_roles(pool: Any, workspace: Path, name: str, settings: list[str]) -> None:
    """Run with adapters and groups that a reward model's scores filter, and with experts. Compare
    metrics and exported files with a colocated rank, to the last bit."""
    if name == "scores":
        make_reward_model(workspace / "reward_model")
        settings = [*settings, f"reward_model.model_path={workspace / 'reward_model'}"]
    pools = ["resource_pools.train=1", "resource_pools.rollout=1"]
    config = workspace / "config.yaml"
    if name == "experts":
        (workspace / "experts").mkdir()
        config = write_config(
            make_workspace(workspace / "experts", family="qwen3_moe", tied=False),
            actor={"megatron": {"dtype": "float32"}},
            trainer={"test_freq": -1},
        )
    found = []
    for world, overrides in ((1, settings), (2, [*settings, *pools])):
        export_to = workspace / f"{name}_{world}"
        results = cases.run_two_steps(pool(world), config, (1, 1, 1), export_to, overrides)
        files = [path.read_bytes() for path in sorted(export_to.rglob("*.safetensors"))]
        found.append(([without_times(step) for step in results[0]["steps"]], files))
    assert len(found[0][1]) >= 1 and found[0] == found[1]


ONE = "reward_models.one"
OTHER = "reward_models.other"


@pytest.fixture(scope="module")
def two_reward_models(workspace: Path) -> list[str]:
    """Return the settings of two reward models. The second one reads conversations of its own
    template, of which some lose tokens."""
    model = make_reward_model(workspace / "two_reward_models")
    (workspace / "template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    )
    return [
        *(f"{role}.model_path={model}" for role in (ONE, OTHER)),
        *(f"{role}.megatron.dtype=float32" for role in (ONE, OTHER)),
        f"{OTHER}.tokenizer_path={model}",
        f"{OTHER}.chat_template_path={workspace}/template.jinja",
        f"{OTHER}.forward_max_token_len_per_gpu=16",
        "reward.mixture={'*': {one: 0.5, other: -2.0, custom: 1.0}}",
    ]


def test_reward_models_of_either_pool_give_the_same_bits(
    pool: Any, workspace: Path, two_reward_models: list[str]
) -> None:
    """Compare two ranks with two and two: scores, their metrics, weights. Greedy responses are
    scored too."""
    settings = [*two_reward_models, "algorithm.adv_estimator=remax"]
    pools = ["resource_pools.train=2", "resource_pools.rollout=2", f"{OTHER}.pool=rollout"]
    found = []
    for world, overrides in ((2, settings), (4, [*settings, *pools])):
        export_to = workspace / f"two_reward_models_{world}"
        results = cases.run_two_steps(
            pool(world), workspace / "config.yaml", (1, 1, 1), export_to, overrides
        )
        for result in results:
            metrics = [without_times(step) for step in result["steps"]]
            found.append((metrics, cases.exported_weights(str(export_to))))
        step = results[0]["steps"][0]
        assert step["reward/num_truncated/other"] > 0
        assert abs(step["reward/arithmetic/other"] + 4 * step["reward/arithmetic/one"]) > 1e-3
    (wanted, expected), *others = found
    for metrics, weights in others:
        assert metrics == wanted
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ["scores", "log-probs", "both"])
def test_an_error_of_one_pool_ends_both_in_one_line(
    pool: Any, workspace: Path, two_reward_models: list[str], name: str
) -> None:
    """Break the scores of the rollout pool, which the other one waits for, and the log-probs of the
    other one, which then does not receive the scores."""
    pools = ["resource_pools.train=1", "resource_pools.rollout=1", f"{OTHER}.pool=rollout"]
    settings = [*two_reward_models, *pools]
    broken = workspace / "broken_reward_model"
    if name != "log-probs":
        shutil.copytree(workspace / "two_reward_models", broken, dirs_exist_ok=True)
        tensors = load_file(broken / "model.safetensors")
        tensors["model.norm.weight"].fill_(3e38)
        save_file(tensors, broken / "model.safetensors", {"format": "pt"})
        settings.append(f"{OTHER}.model_path={broken}")
    if name != "scores":
        settings.append("trainer.max_rollout_logprob_diff=1e-12")
    start = time.monotonic()
    outcomes = pool(2).outcomes(
        cases.two_steps,
        **{"config_path": str(workspace / "config.yaml"), "overrides": settings},
        **{"tp": 1, "pp": 1, "rollout_tp": 1, "export_to": str(workspace / "broken")},
    )
    [(kind, line)] = {value[:2] for ok, value in outcomes if not ok}
    assert len(outcomes) == 2 and kind == "UserError" and "\n" not in line
    assert time.monotonic() - start < 100, "no rank has waited for a collective's timeout"
    not_finite = f"{OTHER}.model_path: {broken}: a score is not finite in step 1"
    assert line == not_finite if name == "scores" else "where trainer.max_rollout_" in line


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    """Return a step's metrics without those that depend on a clock, on memory, or on the ranks that
    hold the engines."""
    varying = ("timing_", "perf/", "reshard/", "memory/")
    return {key: value for key, value in metrics.items() if not key.startswith(varying)}


def test_verification_names_the_first_differing_block(pool: Any, workspace: Path) -> None:
    """Change a block received from rank 1, and a block copied on the rank."""
    received = "model.layers.2.mlp.down_proj.weight"
    copied = "model.layers.1.self_attn.qkv_proj.weight"
    for messages in pool(2).run(
        cases.corrupt_weight_updates,
        config_path=str(workspace / "config.yaml"),
        tp=2,
        rollout_tp=1,
        rank=0,
        elements=[(received, -1), (copied, 0)],
        overrides=["reshard.verify=first"],
    ):
        for message, name, source, sender in zip(
            messages,
            (received, copied),
            (r"decoder\.layers\.2\.mlp\.linear_fc2", r"decoder\.layers\.1\.self_attention"),
            (1, 0),
            strict=True,
        ):
            assert re.search(
                rf"reshard\.verify: {re.escape(name)}\[.*\].* on rank 0 differs from {source}.*"
                rf" on rank {sender} \(1 of",
                message,
            ), message
            assert "1 rank(s)" in message
