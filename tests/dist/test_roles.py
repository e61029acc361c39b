"""Actor, critic, reference and reward model in their own layouts on the same ranks: scores,
gradients and steps match one process, and process groups of the same ranks are created once. Whole
PPO steps: test_layouts.py."""

from __future__ import annotations

from typing import Any

import pytest
import role_cases
import torch
from role_cases import RolePlacement
from test_models import PROMPT_LENS, RESPONSE_LENS
from tiny import make_checkpoint

from rlhf_mc.data.batch import RaggedBatch

pytestmark = pytest.mark.dist

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "dense": {"family": "qwen2", "tied": True},
    "experts": {"family": "qwen3_moe", "tied": False, "num_hidden_layers": 2},
}
CASES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "2 ranks: TP, DP, PP": (
        2,
        {"actor": {"tp": 2}, "critic": {}, "ref": {"pp": 2}, "reward_model": {"pp": 2}},
    ),
    "2 ranks: PP in chunks, TP with sequence parallelism, DP": (
        2,
        {"actor": {"pp": 2, "vpp": 2}, "critic": {"tp": 2, "sequence_parallel": True}, "ref": {}},
    ),
    "2 ranks: experts over replicas, a dense critic with TP, another reference": (
        2,
        {
            "actor": {"checkpoint": "experts", "ep": 2},
            "critic": {"tp": 2},
            "ref": {"checkpoint": "experts"},
        },
    ),
    # Middle stages are in no embedding group.
    "4 ranks: PP, TP x PP, TP x DP": (
        4,
        {"actor": {"pp": 4}, "critic": {"tp": 2, "pp": 2}, "ref": {"tp": 2}, "reward_model": {}},
    ),
}


@pytest.fixture(scope="session")
def role_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("roles")
    return {name: str(make_checkpoint(root / name, **extra)) for name, extra in CHECKPOINTS.items()}


@pytest.fixture(scope="session")
def role_batch() -> RaggedBatch:
    """Return a batch of random tokens, with random values in the fields that the losses read."""
    draw = torch.Generator().manual_seed(5)
    prompt_lens = torch.tensor(PROMPT_LENS)
    response_lens = torch.tensor(RESPONSE_LENS)
    responses = int(response_lens.sum())
    names = ("old_log_probs", "ref_log_probs", "advantages", "values", "returns")
    values = {name: torch.randn(responses, generator=draw) for name in names}
    values |= {name: 0.3 * values[name] - 4.0 for name in ("old_log_probs", "ref_log_probs")}
    return RaggedBatch(
        tokens=torch.randint(260, (int((prompt_lens + response_lens).sum()),), generator=draw),
        prompt_lens=prompt_lens,
        response_lens=response_lens,
        rollout_log_probs=torch.zeros(responses),
        finished=torch.ones(len(prompt_lens), dtype=torch.bool),
        **values,
    )


def placements(
    checkpoints: dict[str, str], layouts: dict[str, dict[str, Any]], alone: bool
) -> dict[str, RolePlacement]:
    """Return each role's checkpoint and layout; with `alone`, the layout of one process."""
    out = {}
    for role, layout in layouts.items():
        checkpoint = checkpoints[layout.get("checkpoint", "dense")]
        split = (
            {} if alone else {key: value for key, value in layout.items() if key != "checkpoint"}
        )
        out[role] = RolePlacement(checkpoint, **split)
    return out


@pytest.fixture(scope="session")
def alone(
    pool: Any, role_checkpoints: dict[str, str], role_batch: RaggedBatch
) -> dict[str, dict[str, Any]]:
    """Return for each case the results of its models on one process."""
    known: dict[frozenset[Any], dict[str, Any]] = {}
    out = {}
    for name, (_, layouts) in CASES.items():
        models = placements(role_checkpoints, layouts, alone=True)
        key = frozenset(models.items())
        if key not in known:
            [known[key]] = pool(1).run(
                role_cases.step_all_roles, placements=models, batch=role_batch
            )
        out[name] = known[key]
    return out


def assert_close(got: Any, want: Any, name: str) -> None:
    """Compare trees of tensors and numbers, up to fp32 rounding relative to a tensor's largest
    element."""
    if isinstance(want, dict):
        assert got.keys() == want.keys(), name
        for key in want:
            assert_close(got[key], want[key], f"{name}, {key}")
    elif isinstance(want, torch.Tensor):
        error = float((got - want).abs().max() / want.abs().max())
        assert error < 1e-4, f"{name}: off by {error:.1e} of the largest"
    else:
        assert got == pytest.approx(want, rel=2e-4, abs=2e-6), name


@pytest.mark.parametrize("world", [2])
def test_ranks_that_do_not_connect_in_time_end_with_one_line(pool: Any, world: int) -> None:
    late, connected = pool(world).run(role_cases.connect_late, seconds=0.5)
    assert late.startswith(
        "the 2 ranks have reached one another through torch's store, but not in a collective on cpu"
    )
    assert connected == ""


@pytest.mark.parametrize(("world", "case"), [(world, case) for case, (world, _) in CASES.items()])
def test_roles_in_their_own_layouts_match_one_process(
    pool: Any,
    alone: dict[str, dict[str, Any]],
    role_checkpoints: dict[str, str],
    role_batch: RaggedBatch,
    world: int,
    case: str,
) -> None:
    models = placements(role_checkpoints, CASES[case][1], alone=False)
    results = pool(world).run(role_cases.step_all_roles, placements=models, batch=role_batch)
    for rank, result in enumerate(results):
        for name, want in alone[case].items():
            if name not in ("communicators", "connected", "exchanging", "paired", "messaging"):
                assert_close(result[name], want, f"rank {rank}, {name}")
        # No two groups of the same ranks, over all purposes and roles.
        assert len(set(result["communicators"])) == len(result["communicators"])
        # With NCCL a batch of messages between some ranks of a group must not be the group's first
        # operation.
        assert (
            tuple(range(world)) in result["exchanging"]
            and result["exchanging"] <= result["connected"]
        )
        # Nor may the first message by itself, for which NCCL connects two ranks, be inside of a
        # micro-batch.
        assert result["messaging"] == result["paired"]
        assert bool(result["paired"]) == any(model.vpp > 1 for model in models.values())


def test_step_changes_only_actor_and_critic(alone: dict[str, dict[str, Any]]) -> None:
    """Guard the comparison above: actor and critic train, reference and reward model do not."""
    for result in alone.values():
        for role in result["before"]:
            trained = role in ("actor", "critic")
            assert torch.equal(result["before"][role], result["after"][role]) != trained
            assert not trained or result["steps"][role] > 0.01
