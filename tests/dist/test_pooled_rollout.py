"""rollout.tail_batching and rollout.partial_rollout in the whole loop: which groups a step trains
on, the ages of their tokens, and resumes that are bit for bit."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pool_cases
import pytest
from tiny import make_reward_model, make_workspace, write_config

from rlhf_mc.run_files import checked_line, checked_rows

N = 2
NEEDED = 4
KEPT = "training/off_policy/kept_groups"
PER_EPOCH = 6
STEPS = 4
LIMIT = 48
SECTIONS: dict[str, dict[str, Any]] = {
    "data": {"train_batch_size": NEEDED, "max_response_length": LIMIT},
    "actor": {"ppo_max_token_len_per_gpu": 512},
    "critic": {"ppo_max_token_len_per_gpu": 512, "forward_max_token_len_per_gpu": 512},
    "ref": {"log_prob_max_token_len_per_gpu": 512},
    "rollout": {"n": N, "max_num_seqs": 16, "log_prob_max_token_len_per_gpu": 512},
    "trainer": {"total_training_steps": STEPS, "test_freq": -1, "val_before_train": False},
}
PARTIAL = [
    "rollout.partial_rollout=true",
    "algorithm.rollout_correction.rollout_is=token",
    "trainer.save_freq=1",
]
ONE_STEP_OFF = [
    "rollout.one_step_off=true",
    "algorithm.rollout_correction.rollout_is=token",
]
WHOLE_EPOCH = f"trainer.total_training_steps={PER_EPOCH}"
AHEAD = [ONE_STEP_OFF[0], WHOLE_EPOCH]
FROZEN = ["actor.optim.lr=0", "critic.optim.lr=0"]


def _score(text: str, truth: Any) -> float:
    """Return the score of a response, which depends on its prompt too."""
    return float(sum(map(ord, text)) % 5 + 10 * (sum(map(ord, str(truth))) % 7))


REWARD_FILE = f"from __future__ import annotations\n{inspect.getsource(_score)}"
SCORE_ONE = f"""{REWARD_FILE}
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return _score(solution_str, ground_truth)
"""
SCORE_ALL = f"""{REWARD_FILE}
def compute_score(data_sources, solution_strs, ground_truths, extra_infos=None):
    return [_score(*row) for row in zip(solution_strs, ground_truths, strict=True)]
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a config whose responses end after 20 tokens on average: twelve tokens are end
    tokens."""
    directory = make_workspace(
        tmp_path_factory.mktemp("pooled"), num_hidden_layers=2, max_position_embeddings=128
    )
    (directory / "model" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": list(range(4, 16))})
    )
    (directory / "reward.py").write_text(SCORE_ONE)
    return write_config(directory, **SECTIONS)


@pytest.fixture(scope="module")
def train(pool: Any, config: Path) -> Any:
    """Return train(world, name, *overrides): each rank's result of a run in the directory of that
    name."""

    def run(world: int, name: str, *overrides: str) -> list[dict[str, Any]]:
        directory = f"trainer.default_local_dir={config.parent / name}"
        results: list[dict[str, Any]] = pool(world).run(
            pool_cases.train, config_path=str(config), overrides=[directory, *overrides]
        )
        return results

    return run


@pytest.fixture(scope="module")
def partial(train: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = train(2, "partial", *PARTIAL)
    return results


@pytest.fixture(scope="module")
def tail(train: Any) -> list[dict[str, Any]]:
    """Run an epoch with weights that do not change."""
    settings = ["rollout.tail_batching=true", "rollout.prompts_in_flight=8", *FROZEN, WHOLE_EPOCH]
    results: list[dict[str, Any]] = train(2, "tail", *settings)
    return results


def _decisions(step: dict[str, Any]) -> dict[str, Any]:
    return {
        key: step[key]
        for key in ("prompts", "responses", "rollout_log_probs", "ages", "is_weights")
    }


def _assert_same_in_pools(rank: int, step: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare a step on a rank of a run with two training ranks with one of a colocated run. Ranks
    of the rollout pool have no results of the trained models."""
    of_training = {"is_weights", "scores"} if rank >= 2 else set()
    for key in ("prompts", "responses", "rollout_log_probs", "ages", "is_weights", "scores"):
        assert step[key] == (None if key in of_training else wanted[key]), key


def _pairs(step: dict[str, Any]) -> list[tuple[int, list[int]]]:
    return list(zip(step["prompts"], step["responses"], strict=True))


def test_tail_batching_trains_on_the_responses_of_plain_sampling(
    train: Any, tail: list[dict[str, Any]]
) -> None:
    """Check that with weights that do not change an epoch has the same responses, in another
    order."""
    plain = train(1, "plain", *FROZEN, WHOLE_EPOCH)[0]["steps"]
    first, second = (rank["steps"] for rank in tail)
    assert [_decisions(step) for step in first] == [_decisions(step) for step in second]
    rows = [
        Counter((prompt, tuple(tokens)) for step in steps for prompt, tokens in _pairs(step))
        for steps in (plain, first)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == NEEDED * N * PER_EPOCH
    assert max(Counter(prompt for prompt, _ in rows[1]).values()) == N, "each prompt once"
    longest = [max(map(len, step["responses"])) for step in first]
    left = [step["metrics"]["train/tail_groups"] for step in first]
    assert max(left) > 0 and left[-1] == 0, "the epoch ends without groups that are left"
    assert min(longest) < min(max(map(len, step["responses"])) for step in plain), (
        "some steps have no long response"
    )


def test_partial_rollout_continues_responses_with_new_weights(
    partial: list[dict[str, Any]],
) -> None:
    steps = partial[0]["steps"]
    assert [_decisions(step) for step in steps] == [
        _decisions(step) for step in partial[1]["steps"]
    ]
    assert all(len(set(step["prompts"])) == NEEDED for step in steps)
    seen = Counter(prompt for step in steps for prompt in set(step["prompts"]))
    assert len(seen) > 2 * NEEDED
    ages = np.concatenate([step["ages"] for step in steps])
    assert ages.min() == 0 and ages.max() >= 2, "tokens of this step's weights, and older ones"
    spans = 0
    for step in steps:
        ends = np.cumsum([len(tokens) for tokens in step["responses"]])
        for each in np.split(np.array(step["ages"]), ends[:-1]):
            assert (np.diff(each) <= 0).all(), "later tokens are of newer weights"
            spans += each[0] > each[-1]
        metrics = step["metrics"]
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == max(step["ages"])
        shares = [value for key, value in metrics.items() if "token_share" in key]
        assert (
            sum(shares) == pytest.approx(1) and metrics["training/rollout_logprobs_diff_max"] < 1e-4
        )
        weights = np.array(step["is_weights"])
        old = np.array(step["ages"]) > 0
        assert np.allclose(weights[~old], 1, atol=1e-4)
        assert not old.any() or np.abs(weights[old] - 1).max() > 1e-3, (
            "older weights drew these tokens"
        )
    assert spans > 0, "some responses were continued"


@pytest.mark.parametrize("name", ["partial", "partial_batched", "tail"])
def test_each_trained_response_is_scored_once_and_the_first_while_others_are_generated(
    train: Any, config: Path, request: pytest.FixtureRequest, name: str
) -> None:
    """Check too the scores of greedy responses, which are numbered behind the others."""
    is_batched = name == "partial_batched"
    if is_batched:
        (config.parent / "score_all.py").write_text(SCORE_ALL)
        settings = [
            *PARTIAL[:2],
            f"custom_reward_function.path={config.parent / 'score_all.py'}",
            "algorithm.adv_estimator=remax",
        ]
        results = train(2, name, *settings)
    else:
        results = request.getfixturevalue(name)
    early = 0
    for steps in zip(*(rank["steps"] for rank in results), strict=True):
        for step in steps:
            rows = zip(step["texts"], step["truths"], strict=True)
            assert step["scores"] == [_score(*row) for row in rows]
            if is_batched:
                assert [score // 10 for score in step["greedy_scores"]] == [
                    _score("", t) // 10 for t in step["truths"]
                ]
        assert sum(step["submitted"]["all"] for step in steps) == NEEDED * N + (
            NEEDED if is_batched else 0
        )
        early += sum(step["submitted"]["early"] for step in steps)
    assert (early > NEEDED * N) != is_batched, "a function of all rows waits for the last"


def test_a_run_without_a_pool_trains_on_the_groups_that_are_left(train: Any, config: Path) -> None:
    """Check that a resume that turns the pool off takes each prompt of the epoch once. Then it
    draws batches again."""
    seven = [*PARTIAL, "rollout.prompts_in_flight=7", "trainer.total_training_steps=3"]
    with_pool = train(1, "turned_on", *seven)[0]["steps"]
    start = config.parent / "turned_on" / "global_step_3"
    resume = [
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={start}",
        "trainer.save_freq=1",
    ]
    steps = train(1, "turned_off", *resume, "trainer.total_training_steps=8")[0]["steps"]
    trained = Counter(prompt for step in [*with_pool, *steps[:3]] for prompt in step["prompts"])
    assert set(trained.values()) == {N} and len(trained) == NEEDED * PER_EPOCH
    assert all(step["ages"] is None for step in steps)
    assert [step["metrics"].get("train/tail_groups") for step in steps] == [3, 3, 0, None, None]
    assert [step["metrics"]["training/epoch"] for step in steps] == [0, 0, 0, 1, 1]
    again = train(1, "turned_off", "trainer.resume_mode=auto", "trainer.total_training_steps=9")[0][
        "steps"
    ]
    assert not {*again[0]["prompts"]} & {prompt for step in steps[3:] for prompt in step["prompts"]}


def test_a_checkpoint_has_the_pool_in_a_file_of_its_own(
    config: Path, partial: list[dict[str, Any]]
) -> None:
    directory = config.parent / "partial" / "global_step_3"
    state = json.loads((directory / "state.json").read_text())["loop"]["group_pool"]
    manifest = json.loads((directory / "manifest.json").read_text())["files"]
    with np.load(directory / "group_pool.npz") as arrays:
        assert (
            len(arrays["positions"])
            == state["num_groups"]
            == partial[0]["steps"][2]["metrics"][KEPT]
        )
        assert (
            arrays["lens"].sum()
            == len(arrays["tokens"])
            == arrays["version_lens"].sum()
            > len(arrays["versions"])
        )
    assert manifest["group_pool.npz"]["bytes"] == (directory / "group_pool.npz").stat().st_size


def test_a_partial_run_resumes_bit_for_bit(
    train: Any, config: Path, partial: list[dict[str, Any]]
) -> None:
    """Check too that trainer.save_minutes saves, deletes none that save_freq asks for, and changes
    nothing else."""
    start = config.parent / "partial" / "global_step_1"
    settings = [
        *PARTIAL[:2],
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={start}",
    ]
    settings += ["trainer.save_freq=3", "trainer.save_minutes=1e-6", "trainer.max_ckpt_to_keep=1"]
    resumed = train(2, "resumed", *settings)
    assert sorted(path.name for path in (config.parent / "resumed").glob("global_step_*")) == [
        "global_step_3",
        "global_step_4",
    ]
    for part, whole in zip(resumed, partial, strict=True):
        assert [step["step"] for step in part["steps"]] == [2, 3, 4]
        for step, other in zip(part["steps"], whole["steps"][1:], strict=True):
            assert _decisions(step) == _decisions(other)
            assert step["metrics"]["actor/loss"] == other["metrics"]["actor/loss"]
        _assert_same_weights(part, whole)


def test_a_resume_with_another_batch_size_ends_the_epoch_with_its_own_prompts(
    train: Any, config: Path, partial: list[dict[str, Any]]
) -> None:
    """Check that kept groups continue, and that each prompt of the epoch is trained on once."""
    start = config.parent / "partial" / "global_step_3"
    resume = [
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={start}",
        "trainer.save_freq=1",
    ]
    resume += [*PARTIAL[:2], "data.train_batch_size=6", "trainer.total_epochs=1"]
    resume += [f"{role}.ppo_mini_batch_size=3" for role in ("actor", "critic")]
    rest = train(1, "larger_batches", *resume, "trainer.total_training_steps=null")[0]["steps"]
    trained = Counter(
        prompt for step in [*partial[0]["steps"][:3], *rest] for prompt in step["prompts"]
    )
    assert set(trained.values()) == {N} and len(trained) == NEEDED * PER_EPOCH
    assert [step["step"] for step in rest] == [4, 5] and max(rest[0]["ages"]) > 0
    assert [step["metrics"]["training/epoch"] for step in rest] == [0, 0]


def test_kept_responses_keep_the_experts_that_were_chosen_for_them(
    pool: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Check resumes too, which read them: without its experts a response cannot be trained on. In
    pools they go to the ranks that train. The routers have losses, and correction biases that
    move."""
    directory = make_workspace(
        tmp_path_factory.mktemp("pooled_experts"),
        family="glm4_moe",
        tied=False,
        num_hidden_layers=2,
        max_position_embeddings=128,
    )
    (directory / "model" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": list(range(4, 10))})
    )
    settings = [
        *PARTIAL,
        "algorithm.router_replay=rollout",
        "data.max_response_length=96",
    ]
    balance = {"aux_loss_coeff": 0.01, "z_loss_coeff": 0.001, "router_bias_update_rate": 0.01}
    settings += [f"actor.moe_{name}={value}" for name, value in balance.items()]
    config = str(write_config(directory, **SECTIONS))

    def train(world: int, name: str, *overrides: str) -> list[dict[str, Any]]:
        arguments = [*settings, f"trainer.default_local_dir={directory / name}", *overrides]
        results: list[dict[str, Any]] = pool(world).run(
            pool_cases.train, config_path=config, overrides=arguments
        )
        return results

    def resume(name: str, step: int) -> list[str]:
        start = directory / name / f"global_step_{step}"
        assert len([*start.glob("group_pool_experts_*.npz")]) == 2
        return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={start}"]

    whole = train(2, "whole")
    in_pools = ["resource_pools.train=2", "resource_pools.rollout=2"]
    pools = train(4, "pools", *in_pools, *resume("whole", 2))
    for rank, result in enumerate(pools):
        wanted = whole[rank % 2]["steps"][2:]
        for step, other in zip(result["steps"], wanted, strict=True):
            _assert_same_in_pools(rank, step, other)
            for key in ("actor/loss", "actor/grad_norm", "training/expert_choices_diff"):
                assert step["metrics"][key] == other["metrics"][key], key
        if rank < 2:
            _assert_same_weights(result, whole[rank])
    resumed = train(2, "resumed", *resume("pools", 3))
    for part, other in zip(resumed, whole, strict=True):
        (step,) = part["steps"]
        assert step["step"] == 4
        metrics = other["steps"][3]["metrics"]
        assert step["metrics"]["actor/loss"] == metrics["actor/loss"]
        _assert_same_weights(part, other)
        losses = {key: value for key, value in metrics.items() if key.startswith("actor/router_")}
        assert losses == {
            key: step["metrics"][key] for key in ("actor/router_aux_loss", "actor/router_z_loss")
        }
        assert 0.9 < losses["actor/router_aux_loss"] < 2.0
    oldest = [
        step["metrics"]["training/off_policy/trajectory_staleness/max"]
        for step in whole[0]["steps"]
    ]
    assert max(oldest) > 0, "no response has ended in an earlier step"


def test_groups_that_would_be_too_stale(train: Any, config: Path) -> None:
    settings = [
        *PARTIAL[:2],
        "rollout.max_off_policy_threshold=2",
        "health.patience=1",
    ]
    dropped, waited = (
        train(1, name, *settings, f"rollout.max_off_policy_strategy={name}")[0]["steps"]
        for name in ("drop", "wait")
    )
    key = "training/off_policy/dropped_groups"
    assert (
        sum(step["metrics"][key] for step in dropped)
        > 0
        == sum(step["metrics"][key] for step in waited)
    )
    events = [
        json.loads(line)
        for line in (config.parent / "drop" / "health.jsonl").read_text().splitlines()
    ]
    assert "groups_dropped" in {event["rule"] for event in events}
    for step in (*dropped, *waited):
        assert max(step["ages"]) <= 1, (
            "at most two versions from the first token to the trained weights"
        )


def test_a_lower_limit_cuts_kept_responses(
    train: Any, config: Path, partial: list[dict[str, Any]]
) -> None:
    start = config.parent / "partial" / "global_step_2"
    overrides = [
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={start}",
        "data.max_response_length=10",
    ]
    steps = train(1, "shorter", *PARTIAL[:2], *overrides)[0]["steps"]
    assert {len(tokens) for step in steps for tokens in step["responses"]} <= set(range(1, 11))


@pytest.fixture(scope="module")
def one_step_off(train: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = train(2, "off", *ONE_STEP_OFF)
    return results


def test_one_step_off_trains_on_samples_of_the_weights_before(
    pool: Any, config: Path, one_step_off: list[dict[str, Any]]
) -> None:
    """Compare with plain sampling by an engine whose weights are one step older: tokens, scores,
    losses and weights to the last bit."""
    settings = [*ONE_STEP_OFF[1:], "reshard.share_weights=false"]
    directory = f"trainer.default_local_dir={config.parent / 'older'}"
    plain = pool(2).run(
        pool_cases.train_with_older_weights,
        config_path=str(config),
        overrides=[directory, *settings],
    )
    for rank, wanted in zip(one_step_off, plain, strict=True):
        for step, other in zip(rank["steps"], wanted["steps"], strict=True):
            assert {*step["ages"]} == {int(step["step"] > 1)}
            assert _decisions(step) == {**_decisions(other), "ages": step["ages"]}
            assert step["scores"] == other["scores"]
            for key in ("actor/loss", "actor/grad_norm", "critic/vf_loss", "training/epoch"):
                assert step["metrics"].get(key) == other["metrics"].get(key)
        _assert_same_weights(rank, wanted)
    ratios = [weight for step in plain[0]["steps"] for weight in step["is_weights"]]
    assert max(ratios) > 1.01 and min(ratios) < 0.99, "the weights change"
    kept = [step["metrics"][KEPT] for step in one_step_off[0]["steps"]]
    assert kept == [NEEDED] * (STEPS - 1) + [0], "the last step samples nothing"


def test_one_step_off_in_pools_has_the_same_bits(
    train: Any, one_step_off: list[dict[str, Any]]
) -> None:
    pools = ["resource_pools.train=2", "resource_pools.rollout=2", "ref.pool=rollout"]
    results = train(4, "off_pools", *ONE_STEP_OFF, *pools)
    for rank, result in enumerate(results):
        wanted = one_step_off[rank % 2]["steps"]
        for step, other in zip(result["steps"], wanted, strict=True):
            _assert_same_in_pools(rank, step, other)
            for key in ("actor/loss", "actor/grad_norm", "critic/vf_loss"):
                assert step["metrics"].get(key) == other["metrics"].get(key)
            assert step["metrics"]["timing_per_token_ms/ref"] > 0, "of the rollout ranks"
        if rank < 2:
            _assert_same_weights(result, one_step_off[rank])


@pytest.fixture(scope="module")
def partial_ahead(train: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = train(2, "partial_off", *PARTIAL, *AHEAD)
    return results


def test_ages_one_step_ahead_are_those_of_the_journal(
    config: Path, partial_ahead: list[dict[str, Any]]
) -> None:
    """Check the ages of rollout.partial_rollout with one_step_off by the lengths that each call of
    the engines has left: call k, in step k, samples with the weights of step k - 1 for step
    k + 1."""
    rows = checked_rows(config.parent / "partial_off" / "rollouts.jsonl").rows.values()
    calls = {row["step"]: dict(zip(row["positions"], row["lens"], strict=True)) for row in rows}
    oldest = 0
    for row in rows:
        step = partial_ahead[0]["steps"][row["step"]]
        ages: list[int] = []
        for position in row["taken"]:
            for i in range(N):
                lens = [
                    calls[call][position][i] if position in calls[call] else 0
                    for call in range(1, row["step"] + 1)
                ]
                for call, (before, after) in enumerate(
                    zip([0, *lens], lens, strict=False), start=1
                ):
                    ages += [step["step"] - call] * (after - before)
        assert step["ages"] == ages
        oldest = max(oldest, *ages)
    assert oldest >= 3, "responses that three calls have sampled"


def test_partial_rollout_one_step_ahead_in_pools_resumed_and_replayed(
    train: Any, config: Path, partial_ahead: list[dict[str, Any]]
) -> None:
    settings = [*PARTIAL[:2], *AHEAD]
    directory = config.parent / "partial_off"
    pools = ["resource_pools.train=2", "resource_pools.rollout=2"]
    start = f"trainer.resume_from_path={directory / 'global_step_3'}"
    resume = ["trainer.resume_mode=resume_path", start]
    in_pools = train(4, "partial_off_pools", *settings, *pools, *resume)
    resumed = train(2, "partial_off_resumed", *settings, *resume)
    for run in (in_pools, resumed):
        for rank, result in enumerate(run):
            wanted = partial_ahead[rank % 2]["steps"][3:]
            for step, other in zip(result["steps"], wanted, strict=True):
                _assert_same_in_pools(rank, step, other)
                for key in ("actor/loss", "actor/grad_norm", "critic/vf_loss", KEPT):
                    assert step["metrics"].get(key) == other["metrics"].get(key)
            if rank < 2:
                _assert_same_weights(result, partial_ahead[rank])
    replayed = train(1, "partial_off_replay", *settings, f"trainer.replay={directory}")[0]
    for step, other in zip(replayed["steps"], partial_ahead[0]["steps"], strict=True):
        assert all(step[key] == other[key] for key in ("prompts", "responses", "ages"))


def test_filtered_and_greedy_one_step_ahead_resumed_in_pools(train: Any, config: Path) -> None:
    """Check that algorithm.filter_groups takes the batch of the step before first, and then
    samples what it lacks with the present weights; and the greedy responses of remax, which are of
    the present weights after a resume too. A reward model, of the rollout pool, scores them all."""
    (config.parent / "parity.py").write_text(REWARD)
    model = make_reward_model(config.parent / "reward_model")
    settings = [
        *ONE_STEP_OFF,
        f"reward_model.model_path={model}",
        "reward.mixture={'*': {custom: 1.0, reward_model: 0.1}}",
        "algorithm.adv_estimator=remax",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=score",
        f"custom_reward_function.path={config.parent / 'parity.py'}",
    ]
    whole = train(2, "filtered_off", *settings, "data.gen_batch_size=6", "trainer.save_freq=1")
    pools = ["resource_pools.train=2", "resource_pools.rollout=2", "data.gen_batch_size=6"]
    pools.append("reward_model.pool=rollout")
    start = f"trainer.resume_from_path={config.parent / 'filtered_off' / 'global_step_2'}"
    results = train(
        4, "filtered_pools", *settings, *pools, "trainer.resume_mode=resume_path", start
    )
    for rank, result in enumerate(results):
        wanted = whole[rank % 2]["steps"][2:]
        for step, other in zip(result["steps"], wanted, strict=True):
            for key in ("prompts", "responses", "ages", "scores", "greedy_scores"):
                assert step[key] == other[key], key
            for key in ("actor/loss", "actor/grad_norm", "train/num_gen_batches", KEPT):
                assert step["metrics"].get(key) == other["metrics"].get(key)
        if rank < 2:
            _assert_same_weights(result, whole[rank])
    ages = [{*step["ages"]} for step in whole[0]["steps"]]
    assert ages[0] == {0} and all(1 in of_step for of_step in ages[1:])
    assert any(of_step == {0, 1} for of_step in ages[1:]), "some steps lack groups"
    for step in whole[0]["steps"]:
        by_group = np.array(step["scores"]).reshape(-1, N)
        assert (by_group.min(axis=1) < by_group.max(axis=1)).all()


def test_tail_batching_one_step_ahead_trains_on_each_prompt_once(train: Any) -> None:
    settings = [*ONE_STEP_OFF, "rollout.tail_batching=true", "rollout.prompts_in_flight=8"]
    steps = train(1, "tail_off", *settings, WHOLE_EPOCH)[0]["steps"]
    assert max(Counter(prompt for step in steps for prompt, _ in _pairs(step)).values()) == N
    assert [{*step["ages"]} for step in steps] == [{0}] + [{1}] * (PER_EPOCH - 1)


def test_pools_work_at_the_same_time(
    pool: Any, config: Path, one_step_off: list[dict[str, Any]]
) -> None:
    results = pool(2).run(
        pool_cases.train_while_generating,
        config_path=str(config),
        overrides=[
            f"trainer.default_local_dir={config.parent / 'same_time'}",
            *ONE_STEP_OFF,
            "trainer.total_training_steps=2",
            "resource_pools.train=1",
            "resource_pools.rollout=1",
        ],
    )
    for step, wanted in zip(results[0]["steps"], one_step_off[0]["steps"], strict=False):
        assert step["responses"] == wanted["responses"]
        for side in ("train", "rollout"):
            assert 0 <= step["metrics"][f"perf/idle_share/{side}"] < 1
    assert [step["metrics"] for step in results[1]["steps"]] == [
        step["metrics"] for step in results[0]["steps"]
    ]


def test_engines_of_a_pool_wait_as_long_as_all_ranks(pool: Any, config: Path) -> None:
    settings = ["resource_pools.train=1", "resource_pools.rollout=1"]
    settings.append("trainer.dist_timeout_seconds=77")
    found = pool(2).run(pool_cases.timeouts, config_path=str(config), overrides=settings)
    assert found == [[77.0], [77.0, 77.0]]


def test_pools_of_ranks_train_on_the_same_tokens(train: Any, partial: list[dict[str, Any]]) -> None:
    """Compare a run with partial rollouts and training ranks of their own with a colocated one:
    tokens, scores and weights to the last bit, and only ranks with an engine score."""
    pools = ["resource_pools.train=2", "resource_pools.rollout=2"]
    results = train(4, "pools", *PARTIAL, *pools)
    for rank, result in enumerate(results):
        wanted = partial[rank % 2]["steps"]
        for step, other in zip(result["steps"], wanted, strict=True):
            _assert_same_in_pools(rank, step, other)
            for key in ("actor/loss", "actor/grad_norm", "critic/vf_loss", KEPT):
                assert step["metrics"][key] == other["metrics"][key]
            assert step["submitted"] == (
                other["submitted"] if rank >= 2 else {"all": 0, "early": 0}
            )
        _assert_same_weights(result, partial[rank] if rank < 2 else {"last": []})


def test_another_layout_replays_the_run(
    train: Any, config: Path, partial: list[dict[str, Any]]
) -> None:
    replay = [*PARTIAL[:2], f"trainer.replay={config.parent / 'partial'}"]
    tp = ["actor.megatron.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2"]
    steps = train(4, "replay", *replay, *tp)[0]["steps"]
    for step, other in zip(steps, partial[0]["steps"], strict=True):
        assert all(step[key] == other[key] for key in ("prompts", "responses", "ages"))
        assert step["rollout_log_probs"] == pytest.approx(other["rollout_log_probs"], abs=1e-3)
        for key in (
            "actor/loss",
            "critic/vf_loss",
            "actor/grad_norm",
            "training/off_policy/kept_groups",
        ):
            assert step["metrics"][key] == pytest.approx(
                other["metrics"][key], rel=1e-2, abs=1e-4
            ), key


def test_a_step_that_generates_nothing_is_replayed(train: Any, config: Path) -> None:
    """Check a run whose responses all end in one period, so that its second step trains on groups
    of the first one."""
    settings = [*PARTIAL[:2], "data.max_response_length=10", "trainer.total_training_steps=2"]
    steps = train(2, "short", *settings)[0]["steps"]
    assert set(steps[1]["ages"]) == {1}
    replayed = train(1, "replay_short", *settings, f"trainer.replay={config.parent / 'short'}")[0][
        "steps"
    ]
    for step, other in zip(replayed, steps, strict=True):
        assert all(step[key] == other[key] for key in ("prompts", "responses", "ages"))


def _journal(config: Path, name: str, change: Any) -> str:
    """Write a copy of the journal to a directory, with changed lines. Return the setting that
    replays it."""
    lines = [
        checked_line(row)
        for row in checked_rows(config.parent / "partial" / "rollouts.jsonl").rows.values()
    ]
    (config.parent / name).mkdir()
    (config.parent / name / "rollouts.jsonl").write_text("".join(change(lines)))
    return f"trainer.replay={config.parent / name}"


def _changed(line: str, name: str, change: Any, new_name: str | None = None) -> str:
    """Return a line with a checksum of which one field is changed, and its name."""
    row = json.loads(line)
    del row["crc32"]
    value = change(row.pop(name))
    return checked_line({**row, new_name or name: value})


def _with_length(line: str, length: int) -> str:
    """Return a line in which a response that the step has trained on has this length."""
    row = json.loads(line)
    first = row["positions"].index(row["taken"][0])
    row["lens"][first][0] = length
    return _changed(line, "lens", lambda _: row["lens"])


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "cut",
            lambda lines: [*lines[:2], lines[2][:20]],
            "the journal has no step 3: it has 1 to 2",
        ),
        (
            "empty",
            lambda lines: [lines[0][:30]],
            "rollouts.jsonl has no rows; a run writes it with rollout.tail_batching",
        ),
        (
            "flipped",
            lambda lines: [lines[0], lines[1].replace("0", "1", 1)],
            "line 2: its checksum is wrong",
        ),
        (
            "seed",
            lambda lines: [_changed(line, "seed", lambda _: 9) for line in lines],
            "is of a run with seed 9",
        ),
        (
            "limit",
            lambda lines: [_changed(line, "max_response_length", lambda _: 99) for line in lines],
            "is of a run with seed 1, train_batch_size 4, n 2, max_response_length 99",
        ),
        (
            "other",
            lambda lines: [_changed(lines[0], "taken", list, "took")],
            "is no journal of rollouts",
        ),
        (
            "taken",
            lambda lines: [_changed(lines[0], "taken", lambda taken: taken[:-1])],
            "taken has 3 groups; this",
        ),
        ("drawn", lambda lines: [_with_length(lines[0], LIMIT - 1)], "tokens and "),
    ],
)
def test_a_journal_that_cannot_be_replayed_is_one_line(
    pool: Any, config: Path, partial: list[dict[str, Any]], name: str, change: Any, words: str
) -> None:
    overrides = [
        *PARTIAL[:2],
        _journal(config, name, change),
        f"trainer.default_local_dir={config.parent / name}_run",
    ]
    ((ok, value),) = pool(1).outcomes(
        pool_cases.train, config_path=str(config), overrides=overrides
    )
    assert not ok and value[0] == "UserError" and words in value[1], value


FILTERED = [
    *PARTIAL[:2],
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "algorithm.kl_ctrl.type=fixed",
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=score",
    "trainer.save_freq=1",
]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 2)
"""


def test_groups_of_equal_scores_are_replaced_by_the_next_that_end(train: Any, config: Path) -> None:
    """Check too a resume bit for bit, and a replay in another layout."""
    (config.parent / "parity.py").write_text(REWARD)
    settings = [*FILTERED, f"custom_reward_function.path={config.parent / 'parity.py'}"]
    first, second = train(2, "filtered", *settings)
    assert [_decisions(step) for step in first["steps"]] == [
        _decisions(step) for step in second["steps"]
    ]
    rows = [
        json.loads(line)
        for line in (config.parent / "filtered" / "rollouts.jsonl").read_text().splitlines()
    ]
    assert max(Counter(position for row in rows for position in row["taken"]).values()) == 1, (
        "no group is taken twice"
    )
    for step in first["steps"]:
        assert len(step["prompts"]) == NEEDED * N
        assert step["metrics"]["train/surplus_groups_ratio"] == 0, (
            "no more groups are taken than are missing"
        )
        assert step["metrics"]["critic/score/mean"] == 0.5
    assert max(step["metrics"]["train/num_gen_batches"] for step in first["steps"]) > 1
    assert max(step["metrics"]["train/dropped_groups_ratio"] for step in first["steps"]) > 0
    assert max(max(step["ages"]) for step in first["steps"]) > 0
    start = config.parent / "filtered" / "global_step_2"
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={start}"]
    resumed = train(2, "filtered_resumed", *settings, *resume)[0]
    replay = f"trainer.replay={config.parent / 'filtered'}"
    replayed = train(1, "filtered_replayed", *settings, replay)[0]
    for step, other in zip(resumed["steps"], first["steps"][2:], strict=True):
        assert _decisions(step) == _decisions(other)
    for step, other in zip(replayed["steps"], first["steps"], strict=True):
        assert all(step[key] == other[key] for key in ("prompts", "responses", "ages"))


def _assert_same_weights(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare the last weights of two runs on one rank, bit for bit."""
    for (key, *_, mine), (same_key, *_, theirs) in zip(one["last"], other["last"], strict=True):
        assert key == same_key and np.array_equal(mine, theirs), key
