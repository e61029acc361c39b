"""Runs with an environment whose answers come at random times: the journal of observations repeats
a run, a run that was killed in a step, and one of rollout.partial_rollout, whose conversations are
cut within turns and between them. One run has tail_batching, whose conversations begin anew, the
other filter_groups."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pool_cases
import pytest
from tiny import make_workspace, write_config

from rlhf_mc.run_files import read_rows

WORLD = 2
N = 2
STEPS = 3
LIMIT = 80
ENVIRONMENT = """
import asyncio, os
from pathlib import Path
from rlhf_mc.rewards.results import MaskSample

CALLS = Path(__file__).with_name("calls")

class Environment:
    def __init__(self):
        self.seen = []

    def reset(self, row):
        assert row["prompt"]

    async def step(self, response, token_ids):
        with CALLS.open("a") as file:
            file.write("step\\n")
        await asyncio.sleep(0.05 * os.urandom(1)[0] / 255)
        self.seen += token_ids  # an environment without the earlier turns answers otherwise
        if sum(self.seen) % 29 == 3:
            raise MaskSample("no sandbox")
        if sum(self.seen) % 4 == 3:
            raise ValueError("not this turn")
        turn = [10 + sum(self.seen) % 200, 8]
        return turn, float(sum(self.seen) % 3 == 0), sum(self.seen) % 5 == 0, {"seen": len(self.seen)}
"""  # noqa: E501
AGENT = """
import asyncio, os, random
from pathlib import Path
from openai import AsyncOpenAI, BadRequestError

CALLS = Path(__file__).with_name("calls")

async def run(task, client_settings):
    model = client_settings.pop("model")
    client = AsyncOpenAI(**client_settings)
    messages = [*task["prompt"]]
    for turn in range(6):
        with CALLS.open("a") as file:
            file.write("call\\n")
        answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=9)
        text = answer.choices[0].message.content
        if sum(map(ord, text)) % 5 == 0:
            return {"score": sum(map(ord, text)) % 3 == 0, "turns": turn}
        await asyncio.sleep(0.05 * os.urandom(1)[0] / 255)
        question = {"role": "user", "content": f"{len(text)}"}
        kind = sum(map(ord, text)) % 3
        messages = [question] if kind == 0 else [*messages, answer.choices[0].message, question]
        try:
            if kind == 1:
                await client.chat.completions.create(model=model, messages=[question], max_tokens=3)
        except BadRequestError:  # no room
            return None
"""
SETTINGS = [
    "custom_reward_function.path=null",
    "actor.optim.lr=0",
    "actor.env_loss_coef=0.1",
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "algorithm.kl_ctrl.type=fixed",
    "algorithm.rollout_correction.rollout_is=token",
    "rollout.environment.max_tokens_per_turn=9",
    "rollout.environment.max_turns=6",
    "rollout.environment.default_observation=again",
    "health.patience=1",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
    "rollout.val_kwargs.n=2",
    "rollout.val_kwargs.temperature=1",
]
# All conversations of a step begin at once: else its replay has the same tokens, and other batches.
TAIL = [
    "rollout.tail_batching=true",
    "rollout.prompts_in_flight=8",
    "rollout.max_num_seqs=8",
    "algorithm.adv_estimator=grpo_turn",
]
PARTIAL = ["rollout.partial_rollout=true", "algorithm.filter_groups.enable=true"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_workspace(tmp_path_factory.mktemp("observations"), max_position_embeddings=128)
    (directory / "environment.py").write_text(ENVIRONMENT)
    (directory / "agent.py").write_text(AGENT)
    (directory / "model" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": list(range(4, 10))})
    )
    return write_config(
        directory,
        data={"train_batch_size": 4, "max_response_length": LIMIT},
        actor={"ppo_max_token_len_per_gpu": 512},
        ref={"log_prob_max_token_len_per_gpu": 512},
        rollout={
            "n": N,
            "max_num_seqs": 3,
            "log_prob_max_token_len_per_gpu": 512,
            "environment": {"path": str(directory / "environment.py")},
        },
        trainer={"total_training_steps": STEPS, "val_before_train": False},
    )


@pytest.fixture(scope="module")
def train(pool: Any, config: Path) -> Any:
    """Return train(name, *overrides): each rank's steps of a run in the directory of that name, and
    the calls of its environments."""

    def run(
        name: str, *overrides: str, world: int = WORLD
    ) -> tuple[list[list[dict[str, Any]]], int]:
        calls = config.parent / "calls"
        calls.write_text("")
        directory = f"trainer.default_local_dir={config.parent / name}"
        results = pool(world).run(
            pool_cases.train, config_path=str(config), overrides=[directory, *SETTINGS, *overrides]
        )
        return [rank["steps"] for rank in results], len(calls.read_text().splitlines())

    return run


def _copied(config: Path, name: str, copy: str, last: int) -> Path:
    """Copy a run's directory as a run has it that was killed after its last checkpoint."""
    directory = config.parent / copy
    shutil.copytree(config.parent / name, directory)
    for step in range(last + 1, STEPS + 1):
        shutil.rmtree(directory / f"global_step_{step}")
    return directory


def _assert_same(
    ranks: list[list[dict[str, Any]]],
    others: list[list[dict[str, Any]]],
    varying: tuple[str, ...] = (),
) -> None:
    """Compare tokens, log-probs and metrics of steps, bit for bit. varying: begins of the names of
    further metrics that differ."""
    for rank, (steps, wanted) in enumerate(zip(ranks, others, strict=True)):
        for step, other in zip(steps, wanted, strict=True):
            for key in (
                "step",
                "prompts",
                "responses",
                "rollout_log_probs",
                "ages",
                "is_weights",
                "scores",
                "sample_mask",
                "turns",
                "advantages",
            ):
                of_rollout_rank = step[key] is None and rank >= WORLD  # of models that it lacks
                assert of_rollout_rank or step[key] == other[key], (step["step"], key)
            same = step["metrics"].keys() & other["metrics"].keys()
            names = {
                key for key in same if not key.startswith(("timing", "perf", "memory", *varying))
            }
            different = {key for key in names if step["metrics"][key] != other["metrics"][key]}
            assert not different, (step["step"], different)


def _responses(steps: list[dict[str, Any]]) -> Counter[tuple[int, tuple[int, ...]]]:
    """Count the responses to each prompt."""
    pairs = (
        pair for step in steps for pair in zip(step["prompts"], step["responses"], strict=True)
    )
    return Counter((prompt, tuple(tokens)) for prompt, tokens in pairs)


def _assert_same_tokens(rows: Counter[Any], others: Counter[Any]) -> None:
    """Compare the responses to the prompts that both have."""
    prompts = {prompt for prompt, _ in rows} & {prompt for prompt, _ in others}
    assert len(prompts) >= 4
    assert {row for row in rows if row[0] in prompts} == {
        row for row in others if row[0] in prompts
    }


def _assert_complete(run: Path, steps: list[dict[str, Any]]) -> None:
    """Check that a run has trained on whole groups, and on each that it has begun once, unless the
    last pool has it."""
    assert all(set(Counter(step["prompts"]).values()) == {N} for step in steps)
    taken = [position for _, row in read_rows(run / "rollouts.jsonl") for position in row["taken"]]
    with np.load(run / f"global_step_{STEPS}" / "group_pool.npz") as arrays:
        left = arrays["positions"].tolist()
    assert left and sorted([*taken, *left]) == [*range(len(taken) + len(left))]


@pytest.fixture(scope="module")
def tail(train: Any) -> Any:
    return train("tail", *TAIL)


def test_conversations_have_several_turns_and_failed_calls(config: Path, tail: Any) -> None:
    steps, num_calls = tail
    assert num_calls > N * 4 * STEPS, "conversations of several turns"
    assert not all(all(step["sample_mask"]) for step in steps[0])
    assert all(step["metrics"]["actor/env_loss"] > 1 for step in steps[0])
    assert all(max(step["turns"]) > 0 and any(step["advantages"]) for step in steps[0])
    events = [event for _, event in read_rows(config.parent / "tail" / "health.jsonl")]
    assert "calls_failing" in {event["rule"] for event in events}


def test_environments_run_beside_the_engines_of_a_pool(train: Any, config: Path, tail: Any) -> None:
    """Replay a colocated run in pools, and a run in pools colocated: no environment is called, and
    tokens, scores and metrics have the same bits."""
    pools = ["resource_pools.train=2", "resource_pools.rollout=2"]
    steps, num_calls = train("pools", *TAIL, *pools, world=4)
    assert num_calls > N * 4 * STEPS
    for replayed, wanted, overrides, world in (
        ("tail", tail[0][0], pools, 4),
        ("pools", steps[0], [], 2),
    ):
        replay = f"trainer.replay={config.parent / replayed}"
        results, num_again = train(f"{replayed}_again", *TAIL, replay, *overrides, world=world)
        assert num_again == 0
        _assert_same(results, [wanted] * world, varying=("reshard",))


def test_conversations_of_a_tail_begin_anew(config: Path, tail: Any) -> None:
    """Check that the second step trains on the groups that the first one has left."""
    _assert_complete(config.parent / "tail", tail[0][0])
    first, second, _ = ({*step["prompts"]} for step in tail[0][0])
    assert len(first) == len(second) == 4 and not first & second
    assert tail[0][0][0]["metrics"]["train/tail_groups"] == 4


def test_a_run_that_was_killed_in_a_step_calls_environments_for_the_rest_alone(
    train: Any, config: Path, tail: Any
) -> None:
    """Check a journal that ends within a row."""
    for path in (_copied(config, "tail", "killed", 1) / "observations").glob("step_000003_*.jsonl"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    steps, num_calls = train("killed", *TAIL)
    assert 0 < num_calls < tail[1] / 2
    _assert_same([rank[:1] for rank in steps], [rank[1:2] for rank in tail[0]])
    _assert_same_tokens(_responses(steps[0]), _responses(tail[0][0][1:]))


@pytest.fixture(scope="module")
def partial(train: Any) -> Any:
    return train("partial", *PARTIAL)


def test_conversations_that_are_cut_end_as_those_that_are_not(
    config: Path, tail: Any, partial: Any
) -> None:
    """Check conversations that are cut within a turn and between two. A validation between leaves
    them as they are."""
    steps = partial[0][0]
    rows = _responses(steps)
    assert max(rows.values()) == 1
    _assert_same_tokens(rows, _responses(tail[0][0]))
    _assert_complete(config.parent / "partial", steps)
    assert all(np.ptp(np.reshape(step["scores"], (-1, N)), axis=1).all() for step in steps)
    assert sum(step["metrics"]["train/dropped_groups_ratio"] for step in steps) > 0
    assert steps[1]["metrics"]["val-aux/arithmetic/seen/std@2"] > 0, (
        "two conversations of each prompt"
    )
    states = []
    for step in range(1, STEPS + 1):
        with np.load(
            config.parent / "partial" / f"global_step_{step}" / "group_pool.npz"
        ) as arrays:
            groups = json.loads(str(arrays["conversations"]))
            lens = arrays["lens"]
        states.append(
            [(one, lens[g, int(i)]) for g, group in enumerate(groups) for i, one in group.items()]
        )
    nums_waiting = [sum(one["waits"] for one, _ in each) for each in states]
    assert sum(nums_waiting) > 0, "some wait for their environment"
    drawn = [
        length for each in states for one, length in each if not (one["waits"] or one["ended"])
    ]
    assert sum(drawn) > 0, "some are cut within a turn"
    rows = [
        row
        for path in (config.parent / "partial").glob("observations/*")
        for _, row in read_rows(path)
    ]
    num_answers = sum(row["row"]["type"] == "answer" for row in rows)
    assert num_answers <= partial[1] <= num_answers + nums_waiting[-1], (
        "an environment stays alive between two calls"
    )


def test_a_partial_run_resumes_with_the_same_bits(train: Any, config: Path, partial: Any) -> None:
    _copied(config, "partial", "resumed", 1)
    masked = "reward/arithmetic/num_failed/masked"
    assert any(masked in step["metrics"] for step in partial[0][0][1:])
    steps, num_calls = train("resumed", *PARTIAL)
    assert num_calls == 0
    _assert_same(steps, [rank[1:] for rank in partial[0]])


def test_environments_are_rebuilt_where_the_journal_is_lost(
    train: Any, config: Path, partial: Any
) -> None:
    """Check too that a journal goes back to the oldest checkpoint."""
    directory = _copied(config, "partial", "rebuilt", 1)
    shutil.rmtree(directory / "observations")
    steps, num_calls = train("rebuilt", *PARTIAL, "trainer.max_ckpt_to_keep=1")
    assert num_calls > 0
    assert (
        not list((directory / "observations").iterdir())
        and (directory / f"global_step_{STEPS}").exists()
    )
    _assert_same_tokens(_responses(steps[0]), _responses(partial[0][0][1:]))


def test_another_layout_replays_conversations(train: Any, config: Path, partial: Any) -> None:
    replay = [
        *PARTIAL,
        f"trainer.replay={config.parent / 'partial'}",
        "rollout.tensor_model_parallel_size=2",
    ]
    steps, num_calls = train(
        "replayed_partial", *replay, "actor.megatron.tensor_model_parallel_size=2"
    )
    assert num_calls == 0
    for step, other in zip(steps[0], partial[0][0], strict=True):
        assert all(step[key] == other[key] for key in ("prompts", "responses", "ages", "scores"))
        assert step["rollout_log_probs"] == pytest.approx(other["rollout_log_probs"], abs=1e-3)


def test_an_agents_run_is_repeated(train: Any, config: Path) -> None:
    """Check an agent that speaks to the endpoint, rewrites its history and asks beside it: a
    replay, and a partial run that is resumed, run no agent and have the same bits; agents of a run
    that was killed run again for the rest. The run ends where log-probs of a context are not those
    of the engine."""
    agent = [
        "rollout.environment.name=openai",
        f"rollout.environment.path={config.parent / 'agent.py'}",
        "rollout.environment.default_observation=null",
        "rollout.environment.max_tokens_per_turn=null",
    ]
    steps, num_calls = train("agent", *TAIL, *agent)
    assert num_calls > N * 4 * STEPS, "conversations of several turns"
    metrics = [step["metrics"] for step in steps[0]]
    assert not any(values["environment/failed_calls"] for values in metrics)
    assert all(values["training/rollout_logprobs_diff_max"] < 1e-4 for values in metrics)
    assert any(values["reward_extra/arithmetic/turns"] > 0 for values in metrics)
    journal = (config.parent / "agent" / "observations").glob("*.jsonl")
    assert sum(len(re.findall('"is_context": ?true', file.read_text())) for file in journal) > 10
    replay = f"trainer.replay={config.parent / 'agent'}"
    replayed, num_again = train("agent_replayed", *TAIL, *agent, replay)
    assert num_again == 0
    _assert_same(replayed, steps)
    directory = _copied(config, "agent", "agent_killed", 1)
    for path in (directory / "observations").glob("step_000003_*.jsonl"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    killed, num_calls_again = train("agent_killed", *TAIL, *agent)
    assert 0 < num_calls_again < num_calls
    _assert_same([rank[:1] for rank in killed], [rank[1:2] for rank in steps])
    _assert_same_tokens(_responses(killed[0]), _responses(steps[0][1:]))
    partial, _ = train("agent_partial", *PARTIAL, *agent)
    _copied(config, "agent_partial", "agent_resumed", 1)
    resumed, num_calls_again = train("agent_resumed", *PARTIAL, *agent)
    assert num_calls_again == 0
    _assert_same(resumed, [rank[1:] for rank in partial])
