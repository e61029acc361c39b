"""The groups of several steps (trainer/pool/group_pool.py), their settings, and the metrics of
older weights."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from config_files import load, validated

from rlhf_mc.checkpoint.directory import CorruptCheckpoint
from rlhf_mc.checkpoint.training_state import read_arrays
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.roles import prompts_in_flight
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.data.batch import NOTHING, Generation, Prompt, Responses, build_batch
from rlhf_mc.environments.conversation import ConversationState
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.planner.storage import pool_bytes
from rlhf_mc.rewards.manager import GroupScores
from rlhf_mc.rewards.results import Episode
from rlhf_mc.rollout.base import Sampling
from rlhf_mc.rollout.work_sharing import ResponseLengths, SharedQueue
from rlhf_mc.trainer.logprob_check import Difference
from rlhf_mc.trainer.pool import generate, strategies
from rlhf_mc.trainer.pool.generate import CallPlan, EngineCall, prompt_order
from rlhf_mc.trainer.pool.group_pool import (
    POOL_FILE,
    Group,
    GroupPool,
    drop_stale,
    load_groups,
    may_end,
    oldest_first,
)
from rlhf_mc.trainer.pool.rollout_journal import RolloutJournal
from rlhf_mc.trainer.pool.stored_pool import load_pool
from rlhf_mc.trainer.pool.strategies import PartialRollout, TailBatching, off_policy_metrics
from rlhf_mc.trainer.resume import stored_position
from rlhf_mc.trainer.step_state import Position, StepSchedule, StepState

PROMPT = Prompt(3, np.array([1, 2], np.int32), "", None)
CORRECTION = "algorithm.rollout_correction.rollout_is=token"


def new_group(position: int) -> Group:
    return Group(position, PROMPT, [5, 6], [NOTHING] * 2, []).restarted()


def begun_group(position: int = 7) -> Group:
    """Return a group that steps 3 and 4 have generated: two tokens and none, then one more and
    two."""
    group = new_group(position).continued([Generation([10, 11], [-0.5, -0.25], False), NOTHING], 2)
    responses = [
        Generation([10, 11, 12], [-0.5, -0.25, -2.0], True),
        Generation([13, 14], [-1.0, -1.5], False),
    ]
    return group.continued(responses, 3)


def test_each_token_has_the_version_of_its_weights() -> None:
    group = begun_group()
    assert [each.tolist() for each in group.versions] == [[2, 2, 3], [3, 3]]
    assert group.first_version == 2 and new_group(0).first_version is None
    assert group.has_ended(8).tolist() == [True, False] and group.has_ended(2).tolist() == [
        True,
        True,
    ]
    assert group.restarted().first_version is None and group.restarted().responses == [NOTHING] * 2


def stored(pool: GroupPool, directory: Path) -> dict[str, Any]:
    """Write the pool as a checkpoint has it. Return its state."""
    for name, write in pool.files(0, None).items():
        write(directory / name)
    state: dict[str, Any] = json.loads(json.dumps(pool.state_dict()))
    return state


@pytest.mark.parametrize("max_tokens", [8, 2, 1])
def test_the_state_of_a_checkpoint(tmp_path: Path, max_tokens: int) -> None:
    """Check that responses longer than a lower limit are cut."""
    pool = GroupPool()
    pool.groups = [begun_group(), new_group(9)]
    pool.num_drawn = 12
    assert stored(pool, tmp_path) == {"num_drawn": 12, "num_groups": 2}
    arrays = read_arrays(tmp_path / POOL_FILE)
    assert arrays["positions"].tolist() == [7, 9]
    assert arrays["versions"].tolist() == [2, 3] and arrays["version_lens"].tolist() == [2, 3]
    first, second = load_groups(arrays, [new_group(7), new_group(9)], max_tokens, False)
    assert second.responses == [NOTHING] * 2 and second.position == 9
    for one, whole, versions in zip(
        first.responses, begun_group().responses, first.versions, strict=True
    ):
        assert (
            one.token_ids == whole.token_ids[:max_tokens]
            and one.log_probs == whole.log_probs[:max_tokens]
        )
        assert one.finished == (whole.finished and len(whole.token_ids) <= max_tokens)
        assert len(versions) == len(one.token_ids)
    assert first.versions[0].tolist() == [2, 2, 3][:max_tokens]


def test_a_write_in_the_background_has_the_groups_of_its_step(tmp_path: Path) -> None:
    """Check a pool that the next step changes before the file is written."""
    pool = GroupPool()
    pool.groups = [begun_group()]
    files = pool.files(0, None)
    pool.groups = [new_group(1), new_group(2)]
    files[POOL_FILE](tmp_path / POOL_FILE)
    assert read_arrays(tmp_path / POOL_FILE)["positions"].tolist() == [7]


def test_an_empty_pool_has_no_file() -> None:
    assert GroupPool().files(0, None) == {}
    assert GroupPool().state_dict() == {"num_drawn": 0, "num_groups": 0}


def test_groups_with_nothing_generated_have_a_file(tmp_path: Path) -> None:
    pool = GroupPool()
    pool.groups = [new_group(4)]
    stored(pool, tmp_path)
    (group,) = load_groups(read_arrays(tmp_path / POOL_FILE), [new_group(4)], 8, False)
    assert group.responses == [NOTHING] * 2 and group.first_version is None


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04" + bytes(40)])
def test_a_file_that_is_not_as_it_was_written_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / POOL_FILE).write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"group_pool\.npz: cannot be read"):
        read_arrays(tmp_path / POOL_FILE)


def test_the_planner_counts_the_bytes_of_the_file(config_file: Path, tmp_path: Path) -> None:
    """Compare with a file of as many groups as a run keeps at most, of the longest responses."""
    limit = 64
    cfg = _run(
        config_file, PARTIAL, "rollout.prompts_in_flight=9", f"data.max_response_length={limit}"
    ).config
    pool = GroupPool()
    response = Generation([7] * limit, [-1.0] * limit, False)
    pool.groups = [new_group(position).continued([response] * 2, 3) for position in range(5)]
    stored(pool, tmp_path)
    assert 0 < (tmp_path / POOL_FILE).stat().st_size - pool_bytes(cfg) < 3000
    assert pool_bytes(_run(config_file, TAIL).config) == pool_bytes(_run(config_file).config) == 0


@pytest.mark.parametrize(("version", "kept"), [(3, True), (4, True), (5, False)])
def test_a_group_spans_at_most_the_threshold(version: int, kept: bool) -> None:
    """Check a group whose oldest token is of version 2, where three versions are allowed: 2, 3 and
    4."""
    groups = [begun_group(), new_group(8)]
    drop = RolloutConfig(max_off_policy_threshold=3, max_off_policy_strategy="drop")
    wait = RolloutConfig(max_off_policy_threshold=3, max_off_policy_strategy="wait")
    assert drop_stale(groups, version, drop) == (groups if kept else groups[1:])
    assert drop_stale(groups, version, wait) == groups
    assert groups[0].span(version) == version - 1 and groups[1].span(version) == 1
    assert oldest_first(groups[::-1], version) == groups


@pytest.mark.parametrize(
    ("spans", "complete", "waits"),
    [
        ([1, 1, 1], [2], False),  # two groups for two later steps
        ([2, 2, 1], [2], True),  # two groups for one later step
        ([2, 2, 1], [1], False),
        ([3, 2, 1], [1], True),  # no later step may train on the first one
        ([3, 2, 1], [0], False),
        ([4, 4, 4], [0, 1, 2], False),  # nothing is left to wait for
    ],
)
def test_a_step_waits_while_the_others_would_be_trained_on_too_late(
    spans: list[int], complete: list[int], waits: bool
) -> None:
    is_complete = np.isin(np.arange(3), complete)
    wait = RolloutConfig(max_off_policy_threshold=3, max_off_policy_strategy="wait")
    assert may_end(np.array(spans), is_complete, 1, 1, wait) == (not waits)
    drop = RolloutConfig(max_off_policy_threshold=3, max_off_policy_strategy="drop")
    assert may_end(np.array(spans), is_complete, 1, 1, drop)
    assert not may_end(np.array(spans), is_complete, 4, 4, drop)


class Prompts:
    """Twelve prompts, each of the token of its index + `shift`."""

    def __init__(self, shift: int = 0) -> None:
        self.file_sizes = [12]
        self._shift = shift

    def __len__(self) -> int:
        return 12

    def select(self, indices: list[int]) -> list[Prompt]:
        return [Prompt(i, np.array([i + self._shift], np.int32), "", None) for i in indices]


def _run(config_file: Path, *overrides: str, shift: int = 0) -> Any:
    cfg = load(config_file, "data.train_batch_size=4", "rollout.n=2", CORRECTION, *overrides)
    run = {
        "train_prompts": Prompts(shift),
        "group_pool": GroupPool(),
        "journal": None,
        "environments": None,
    }
    schedule = StepSchedule(cfg.trainer, 100, 12 * cfg.trainer.total_epochs, False)
    actor = SimpleNamespace(replay=None, shape=SimpleNamespace(vocab_size=99, num_experts=0))
    return SimpleNamespace(config=cfg, actor=actor, schedule=schedule, **run)


PARTIAL = "rollout.partial_rollout=true"
TAIL = "rollout.tail_batching=true"
ONE_STEP_OFF = "rollout.one_step_off=true"


@pytest.mark.parametrize(
    ("overrides", "shift", "words"),
    [
        ((PARTIAL,), 0, ""),
        ((PARTIAL, "data.train_batch_size=3"), 0, ""),
        ((PARTIAL,), 1, "1 groups that earlier steps have begun are generated anew"),
        ((PARTIAL, "rollout.n=3"), 0, "1 groups"),
        ((PARTIAL, "trainer.seed=7"), 0, "1 groups"),
        ((ONE_STEP_OFF,), 0, ""),
        ((TAIL,), 0, "1 groups"),
        ((), 0, "1 groups"),
    ],
)
def test_groups_continue_with_the_prompts_and_seeds_that_have_begun_them(
    config_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    shift: int,
    words: str,
) -> None:
    """Check a pool of two groups, of which one has tokens, in a run with other prompts or settings.
    Tail
    batching, and a run without a pool, train on no token of older weights."""
    run = _run(config_file, PARTIAL)
    new = strategies.groups_at(run, [2, 5])
    first = new[0].continued(
        [Generation([10, 11], [-0.5, -0.25], False), Generation([12], [-1.0], True)], 3
    )
    run.group_pool.groups = [first, new[1]]
    run.group_pool.num_drawn = 9
    state = stored(run.group_pool, tmp_path)
    other = _run(config_file, *overrides, shift=shift)
    assert load_pool(other, state, tmp_path, Position(4, 4), prompt_order(other)) == 7, (
        "nine are drawn, two of them are in the pool"
    )
    said = capsys.readouterr().err
    assert words in said if words else not said
    pool = other.group_pool
    assert pool.num_drawn == 9 and [group.position for group in pool.groups] == [2, 5]
    for group in pool.groups:
        assert (
            len(group.seeds)
            == len(group.responses)
            == len(group.versions)
            == other.config.rollout.n
        )
        assert words == "" or group.first_version is None
    if not words:
        assert pool.groups[0].responses == first.responses and pool.groups[0].seeds == first.seeds


STATE = ConversationState(
    1, True, False, Episode([(1, 0.5)], {"x": 1.0}, {"raised": 1}, None, 0.0, [(0, 1)])
)


def forged_state(name: str, value: Any) -> str:
    return json.dumps([{"0": {**asdict(STATE), name: value}}, {}])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("positions", np.array([2, 90])),
        ("positions", np.array([2, 2])),
        ("positions", np.array([2])),
        ("positions", np.array([2.0, 5.0])),
        ("positions", None),
        ("lens", np.array([[2, 1], [0, 1]])),
        ("lens", np.array([[4, -1], [0, 0]])),
        ("lens", np.array([2, 1])),
        ("lens", np.array(3)),
        ("lens", np.array([[2**62, 2**62], [2**62, 2**62]])),
        ("tokens", np.array([10, 11, 99], np.int32)),
        ("log_probs", np.array([-0.5, np.nan, -1.0], np.float32)),
        ("versions", np.array([9], np.int32)),
        ("version_lens", np.array([2])),
        ("finished", np.array([[0, 1], [0, 0]])),
        ("conversations", np.array("[]")),
        ("conversations", np.array("{")),
        ("conversations", np.array(forged_state("engine", -1))),
        ("conversations", np.array(forged_state("waits", "no"))),
        ("conversations", np.array(forged_state("episode", {}))),
        (
            "conversations",
            np.array(
                forged_state("episode", asdict(replace(STATE.episode, observations=[(0, 9)])))
            ),
        ),
        *(
            (
                "conversations",
                np.array(forged_state("episode", asdict(replace(STATE.episode, **{name: value})))),
            )
            for name, value in (
                ("rewards", [("1", 0.5)]),
                ("rewards", [(1, np.nan)]),
                ("rewards", [(1, True)]),
                ("rewards", [(1, 0.5), (0, 0.5)]),
                ("info", {"x": np.inf}),
                ("info", {"x": 10**400}),
                ("failed_calls", ["raised"]),
                ("failed_calls", {"raised": "1"}),
                ("failed_calls", {"raised": -1}),
                ("failure", 0),
                ("default_score", np.nan),
                ("observations", [(0,)]),
                ("observations", [(1, 0)]),
            )
        ),
    ],
)
def test_a_forged_file_is_a_corrupt_checkpoint(
    config_file: Path, tmp_path: Path, name: str, value: Any
) -> None:
    """Check arrays that no run writes: the checkpoint before is then tried."""
    run = _run(config_file, PARTIAL)
    new = strategies.groups_at(run, [2, 5])
    responses = [Generation([10, 11], [-0.5, -0.25], False), Generation([12], [-1.0], True)]
    run.group_pool.groups = [new[0].continued(responses, 3, {0: STATE}), new[1]]
    run.group_pool.num_drawn = 9
    state = stored(run.group_pool, tmp_path)
    order = prompt_order(run)
    load_pool(_run(config_file, PARTIAL), state, tmp_path, Position(4, 4), order)
    arrays = read_arrays(tmp_path / POOL_FILE) | {name: value}
    np.savez(
        tmp_path / POOL_FILE, **{key: array for key, array in arrays.items() if array is not None}
    )
    with pytest.raises(CorruptCheckpoint, match=r"group_pool\.npz: corrupt") as caught:
        load_pool(_run(config_file, PARTIAL), state, tmp_path, Position(4, 4), order)
    assert "\n" not in str(caught.value)


def test_positions_follow_the_batches_of_prompts(config_file: Path) -> None:
    """Check data.gen_batch_size, which is not data.train_batch_size: the prompts of an epoch are
    drawn once each."""
    sizes = ["algorithm.filter_groups.enable=true", "data.gen_batch_size=3"]
    groups = strategies.groups_at(_run(config_file, PARTIAL, *sizes), range(12))
    assert sorted(group.prompt.index for group in groups) == list(range(12))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8])
def test_a_run_without_a_pool_continues_with_its_next_prompt(
    config_file: Path, tmp_path: Path, size: int
) -> None:
    """Check a resume after four of 12 prompts with another batch size. The remainder of an epoch
    fills no batch."""
    run = _run(config_file, f"data.train_batch_size={size}")
    order = prompt_order(run)
    position = load_pool(run, GroupPool().state_dict(), tmp_path, Position(1, 4), order)
    assert position == 4 and order.next_batch(position) == range(4, 4 + size)
    rest = 12 - 4 - (8 // size) * size
    assert load_pool(run, GroupPool().state_dict(), tmp_path, Position(1, 12 - rest), order) == 12


@pytest.mark.parametrize("places", [[11, 12], []])
def test_checkpoints_of_earlier_versions_count_without_remainders(
    config_file: Path, tmp_path: Path, places: list[int]
) -> None:
    """Check 13 prompts that are drawn, in batches of five of 12 prompts: three of the second epoch.
    The present run
    has batches of six."""
    old = _run(config_file, PARTIAL, "data.train_batch_size=5")
    old.group_pool.groups = strategies.groups_at(old, places)
    state = stored(old.group_pool, tmp_path) | {"num_drawn": 13}
    if places:
        arrays = read_arrays(tmp_path / POOL_FILE)
        np.savez(
            tmp_path / POOL_FILE, **{key: array for key, array in arrays.items() if key != "seeds"}
        )
    run = _run(config_file, PARTIAL, "data.train_batch_size=6")
    loop = {"position": {"step": 2, "num_batches": 2}, "group_pool": state}
    order = prompt_order(run).with_sizes({"train_batch_size": 5, "gen_batch_size": None})
    position = stored_position(loop, order)
    assert position == Position(2, 12)
    assert load_pool(run, state, tmp_path, position, order) == 15 - len(places)
    assert run.group_pool.num_drawn == 15
    assert [group.position for group in run.group_pool.groups] == [place + 2 for place in places]


@pytest.mark.parametrize(
    ("epochs", "drawn", "left", "expected"),
    [
        # seven groups, of eight in flight: the epoch has no other prompt
        (1, 8, 3, [*range(3), *range(8, 12)]),
        (1, 12, 4, [*range(4)]),
        (1, 12, 2, [0, 1, 12, 13]),  # groups were dropped as too stale
        (2, 8, 3, [*range(3), *range(8, 13)]),
    ],
)
def test_the_last_epoch_ends_with_its_own_prompts(
    config_file: Path, epochs: int, drawn: int, left: int, expected: list[int]
) -> None:
    run = _run(config_file, PARTIAL, f"trainer.total_epochs={epochs}")
    run.group_pool.groups = strategies.groups_at(run, range(left))
    run.group_pool.num_drawn = drawn
    plan = PartialRollout().plan(run, StepState(2, PhaseTimer()), 4)
    assert [group.position for group in plan.groups] == expected


def test_tail_batching_leaves_no_prompt_at_the_end_of_a_run(config_file: Path) -> None:
    """Check three groups of an earlier batch size: they are trained on before one of another epoch
    is."""
    run = _run(config_file, TAIL, "trainer.total_epochs=1")
    run.group_pool.groups = strategies.groups_at(run, [3, 4, 5])
    run.group_pool.num_drawn = 12
    plan = TailBatching().plan(run, StepState(2, PhaseTimer()), 4)
    assert [group.position for group in plan.groups] == [3, 4, 5, 12] and plan.enough is None


def test_a_step_of_tail_batching_has_enough_groups_after_any_change(config_file: Path) -> None:
    """Check an epoch of 12 prompts with two left and one group of an earlier batch size: a step of
    four begins one of the next epoch."""
    run = _run(config_file, TAIL)
    run.group_pool.groups = strategies.groups_at(run, [3])
    run.group_pool.num_drawn = 10
    plan = TailBatching().plan(run, StepState(2, PhaseTimer()), 4)
    assert [group.position for group in plan.groups] == [3, 10, 11, 12] and plan.enough is None


def test_responses_that_have_begun_are_generated_first(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a response that is longer than expected: others, which are not begun, do not pass it
    by."""
    run = _run(config_file, PARTIAL)
    run.response_lengths = ResponseLengths()
    run.response_lengths.record([0, 1, 2], [3, 3, 3])
    run.offload_schedule = SimpleNamespace(phase=lambda timer, name: nullcontext())
    run.rollout = SimpleNamespace(groups=[[0]])
    run.rollout_pool = run.stop_token_ids = None
    run.has_rollout_pool = False
    run.groups = SimpleNamespace(rank=0, mesh=SimpleNamespace(world=1))
    new = strategies.groups_at(run, range(2))
    begun = new[1].continued([Generation([7] * 9, [-1.0] * 9, False), NOTHING], 0)
    calls = []

    def no_token(
        engine: None, requests: Any, sampling: Any, clock: Any, expected_lens: Any, *rest: Any
    ) -> dict[int, Generation]:
        queue = SharedQueue(len(requests), expected_lens)
        calls.append([requests[number].partial.token_ids for number in queue.left])
        return {request.number: request.partial for request in requests}

    monkeypatch.setattr(generate, "generate_responses", no_token)
    monkeypatch.setattr(
        generate,
        "exchange_responses",
        lambda own, engines, count: Responses.of([own[i] for i in range(count)]),
    )
    ordered = oldest_first([new[0], begun], 1)
    scores = GroupScores(None, 2)  # type: ignore[arg-type]
    plan = CallPlan(ordered, 2, np.zeros(2, bool), is_resumable=True)
    call = EngineCall(run, plan, Sampling(1.0, 16, ()), scores)
    groups = call.collect(call.sample(), 0)
    assert calls == [[[7] * 9, [], [], []]]
    assert groups[0].responses == begun.responses and [
        len(each) for each in groups[0].versions
    ] == [9, 0]


def test_a_replayed_step_may_be_repeated(config_file: Path, tmp_path: Path) -> None:
    """Check a step of two rollouts, as algorithm.filter_groups has them, that a roll-back
    repeats."""
    run = _run(config_file, PARTIAL, f"trainer.default_local_dir={tmp_path}")
    writer = RolloutJournal(run.config)
    for position in (4, 5):
        (new,) = strategies.groups_at(run, [position])
        groups = [new.continued([Generation([7], [-1.0], True)] * 2, 2)]
        writer.record(3, groups, groups)
    filtered = ["algorithm.filter_groups.enable=true", f"trainer.replay={tmp_path}"]
    journal = RolloutJournal(_run(config_file, PARTIAL, *filtered).config)
    for _ in range(2):
        assert [journal.replayed(3, rollout).positions for rollout in range(2)] == [[4], [5]]
    with pytest.raises(UserError, match="the journal has no step 3"):
        journal.replayed(3, 2)


def test_metrics_of_older_weights() -> None:
    responses = [Generation([1] * 4, [-1.0] * 4, True), Generation([1] * 2, [-1.0] * 2, True)]
    batch = build_batch([PROMPT] * 2, Responses.of(responses))
    batch = batch.with_fields(token_ages=torch.tensor([3, 1, 1, 0, 2, 2], dtype=torch.int32))
    metrics = off_policy_metrics(batch)
    prefix = "training/off_policy"
    assert [metrics[f"{prefix}/trajectory_spans/{kind}"] for kind in ("mean", "max", "min")] == [
        2.5,
        4,
        1,
    ]
    assert [
        metrics[f"{prefix}/trajectory_staleness/{kind}"] for kind in ("mean", "max", "min")
    ] == [1, 2, 0]
    assert [
        metrics[f"{prefix}/trajectory_staleness_worst/{kind}"] for kind in ("mean", "max", "min")
    ] == [2.5, 3, 2]
    assert [metrics[f"{prefix}/token_share/age_{age}"] for age in range(4)] == pytest.approx(
        [1 / 6, 1 / 3, 1 / 3, 1 / 6]
    )
    batch = batch.with_fields(old_log_probs=torch.tensor([-9.0, -1.0, -1.0, -1.5, -9.0, -9.0]))
    assert Difference.from_batch(batch) == Difference(0.5, 0.5, 0.5), (
        "of the tokens of the trained weights alone"
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("rollout.tail_batching=true", "rollout.partial_rollout=true", CORRECTION),
            "rollout.tail_batching and rollout.partial_rollout are true; set one of them",
        ),
        (
            (PARTIAL, ONE_STEP_OFF, CORRECTION, "rollout.max_off_policy_threshold=1"),
            "rollout.max_off_policy_threshold is 1 and rollout.one_step_off is true; it must be at"
            " least 2",
        ),
        (
            (
                PARTIAL,
                ONE_STEP_OFF,
                CORRECTION,
                "rollout.max_off_policy_strategy=wait",
                "rollout.max_off_policy_threshold=2",
            ),
            "it must be at most rollout.max_off_policy_threshold less 1 (one_step_off) x data.",
        ),
        (
            (ONE_STEP_OFF,),
            "rollout.one_step_off is true, which trains on tokens of older weights; that needs",
        ),
        (
            (ONE_STEP_OFF, CORRECTION, "rollout.prompts_in_flight=64"),
            "rollout.prompts_in_flight is 64; that needs rollout.tail_batching",
        ),
        (
            ("rollout.partial_rollout=true",),
            "rollout.partial_rollout is true, which trains on tokens of older weights; that needs"
            " algorithm.rollout_correction.rollout_is",
        ),
        (
            (
                PARTIAL,
                "algorithm.rollout_correction.bypass_mode=true",
                "actor.policy_loss.loss_mode=gpg",
            ),
            (
                "actor.policy_loss.loss_mode is gpg, which has no ratio to the policy that drew a "
                "token"
            ),
        ),
        (
            (
                PARTIAL,
                CORRECTION,
                "rollout.max_off_policy_strategy=wait",
                "rollout.max_off_policy_threshold=1",
            ),
            "rollout.prompts_in_flight is 64 and rollout.max_off_policy_strategy is wait; it must "
            "be at most rollout.max_off_policy_threshold x data.train_batch_size, 1 x 32 = 32",
        ),
        (
            ("rollout.prompts_in_flight=2048",),
            "that needs rollout.tail_batching or rollout.partial_rollout: true",
        ),
        (
            ("rollout.tail_batching=true", "rollout.prompts_in_flight=8"),
            "rollout.prompts_in_flight is 8; it must be at least data.train_batch_size, 32",
        ),
        (
            (
                "rollout.tail_batching=true",
                "algorithm.filter_groups.enable=true",
                "algorithm.adv_estimator=grpo",
                "rollout.n=2",
            ),
            (
                "rollout.tail_batching is true and algorithm.filter_groups.enable is true; set one "
                "of them, or"
            ),
        ),
    ],
)
def test_settings_that_do_not_go_together(
    config_file: Path, overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        validated(config_file, *overrides)
    assert words in str(caught.value)


def test_prompts_in_flight(config_file: Path) -> None:
    size = "data.train_batch_size=10"
    assert prompts_in_flight(load(config_file, size, "rollout.tail_batching=true")) == 13
    assert prompts_in_flight(load(config_file, size, "rollout.partial_rollout=true")) == 20
    assert prompts_in_flight(load(config_file, size, "rollout.prompts_in_flight=11")) == 11
