"""batch.py: the ragged batch against the same data as lists of lists."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mc.data.batch import (
    CONTEXT_START,
    OBSERVED,
    Generation,
    Prompt,
    RaggedBatch,
    Responses,
    build_batch,
    concatenate,
    ragged_indices,
    with_prompts,
)

PROMPTS = [[11, 12, 13], [21], [31, 32]]
RESPONSES = [[14], [22, 23, 24], [33, 34]]
LOG_PROBS = [[-0.5], [-1.0, -1.5, -2.0], [-2.5, -3.0]]


def make_batch() -> RaggedBatch:
    prompts = [Prompt(i, np.array(ids, np.int32), "source", None) for i, ids in enumerate(PROMPTS)]
    finished = [True, False, True]
    rows = zip(RESPONSES, LOG_PROBS, finished, strict=True)
    return build_batch(
        prompts, Responses.of([Generation(ids, log_probs, end) for ids, log_probs, end in rows])
    )


def test_build_batch() -> None:
    batch = make_batch()
    assert batch.tokens.tolist() == [11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33, 34]
    assert batch.tokens.dtype == torch.int32  # as in the prompts' file and from vLLM
    assert batch.prompt_lens.tolist() == [3, 1, 2]
    assert batch.response_lens.tolist() == [1, 3, 2]
    assert batch.seq_lens.tolist() == [4, 4, 4]
    assert batch.num_sequences == 3
    assert batch.rollout_log_probs.tolist() == [-0.5, -1.0, -1.5, -2.0, -2.5, -3.0]
    assert batch.finished.tolist() == [True, False, True]
    assert batch.scores is None and batch.advantages is None


@given(st.data())
def test_with_prompts_is_a_batch_that_is_built_of_them(data: st.DataObject) -> None:
    """Compare responses with and without observations."""
    tokens = st.lists(st.integers(0, 99), min_size=1, max_size=4)
    sizes = data.draw(st.lists(st.tuples(tokens, tokens, tokens), min_size=1, max_size=4))
    number = data.draw(st.sampled_from([0.0, OBSERVED]))
    responses = Responses.of(
        [Generation([7, *ids, 8], [-0.5, *[number] * len(ids), -0.5], True) for _, _, ids in sizes]
    )

    def built(column: int) -> RaggedBatch:
        prompts = [np.array(row[column], np.int32) for row in sizes]
        return build_batch([Prompt(i, p, "", None) for i, p in enumerate(prompts)], responses)

    found = with_prompts(built(0), [np.array(row[1], np.int32) for row in sizes])
    for field in fields(RaggedBatch):
        value = getattr(found, field.name)
        wanted = getattr(built(1), field.name)
        assert (value is None) == (wanted is None), field.name
        assert value is None or (value.equal(wanted) and value.dtype == wanted.dtype), field.name


def test_build_batch_needs_one_generation_per_prompt() -> None:
    with pytest.raises(AssertionError):
        build_batch([Prompt(0, np.array([1], np.int32), "", None)], Responses.of([]))


def test_with_fields_checks_lengths_and_keeps_the_original() -> None:
    batch = make_batch()
    filled = batch.with_fields(scores=torch.ones(3), values=torch.arange(6.0))
    assert batch.values is None and filled.values is not None
    assert filled.values.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(AssertionError, match="values"):
        batch.with_fields(values=torch.zeros(12))  # one per token, not per response token
    with pytest.raises(AssertionError, match="scores"):
        batch.with_fields(scores=torch.zeros(6))


def test_concatenate_undoes_select() -> None:
    batch = make_batch().with_fields(scores=torch.tensor([7.0, 8.0, 9.0]), values=torch.arange(6.0))
    whole = concatenate([batch.select([0, 1]), batch.select([]), batch.select([2])])
    for field in fields(RaggedBatch):
        mine = getattr(whole, field.name)
        theirs = getattr(batch, field.name)
        assert (mine is None and theirs is None) or torch.equal(mine, theirs), field.name


def test_observations_are_in_the_tokens_alone() -> None:
    """Check a conversation, without and with others that have no observation."""
    prompts = [Prompt(i, np.array(ids, np.int32), "source", None) for i, ids in enumerate(PROMPTS)]
    conversation = Generation(
        [14, 15, 16, 17, 18], [-0.5, OBSERVED, OBSERVED, -0.25, OBSERVED], True
    )
    plain = [
        Generation(ids, log_probs, True)
        for ids, log_probs in zip(RESPONSES[1:], LOG_PROBS[1:], strict=True)
    ]
    batch = build_batch(prompts, Responses.of([conversation, *plain]))
    assert batch.response_lens.tolist() == [2, 3, 2] and batch.seq_lens.tolist() == [8, 4, 4]
    assert batch.rollout_log_probs.tolist() == [-0.5, -0.25, *LOG_PROBS[1], *LOG_PROBS[2]]
    assert batch.drawn_tokens.tolist() == [14, 17, 22, 23, 24, 33, 34]
    assert batch.responses() == [conversation.token_ids, *RESPONSES[1:]]
    parts = [
        build_batch(prompts[:1], Responses.of([conversation])),
        build_batch(prompts[1:], Responses.of(plain)),
    ]
    assert parts[1].response_mask is None
    for same in (concatenate(parts), batch.select([2, 0, 1]).select([1, 2, 0])):
        for field in fields(RaggedBatch):
            mine = getattr(same, field.name)
            theirs = getattr(batch, field.name)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs), field.name
    again = Responses.of([conversation, *plain]).select(np.array([0]))
    assert again.generations() == [conversation] and again.num_drawn == conversation.num_drawn == 2


def test_contexts_are_the_sequences_that_models_read() -> None:
    """Check a conversation of three contexts, the second with an observation in it, between others:
    where each begins, and that tokens, results and their order stay."""
    prompts = [Prompt(i, np.array(ids, np.int32), "source", None) for i, ids in enumerate(PROMPTS)]
    log_probs = {"d": -1.0, "o": OBSERVED, "c": CONTEXT_START}
    conversation = Generation(
        [*range(40, 50)], [log_probs[mark] for mark in "ddcodcdodo"], finished=True
    )
    others = [Generation(ids, [-1.0] * len(ids), True) for ids in (RESPONSES[0], RESPONSES[2])]
    responses = Responses.of([others[0], conversation, others[1]])
    assert conversation.num_drawn == 5 and responses.num_drawn == 8
    assert [conversation.context_start(end) for end in (2, 3, 5, 6, None)] == [0, 2, 2, 5, 5]
    batch = build_batch(prompts, responses).with_fields(numbers=torch.tensor([7, 8, 9]))
    contexts = batch.contexts()
    lens = [len(PROMPTS[0]) + 1, len(PROMPTS[1]) + 2, 3, 5, len(PROMPTS[2]) + 2]
    assert contexts.seq_lens.tolist() == lens
    assert contexts.prompt_lens.tolist() == [
        len(PROMPTS[0]),
        len(PROMPTS[1]),
        2,
        1,
        len(PROMPTS[2]),
    ]
    assert contexts.response_lens.tolist() == [1, 2, 1, 2, 2]
    assert contexts.observation_lens is not None
    assert contexts.observation_lens.tolist() == [0, 0, 0, 2, 0]
    assert contexts.numbers is not None
    assert contexts.numbers.tolist() == [7, 8, 8 + 2**48, 8 + 2 * 2**48, 9]
    assert torch.equal(contexts.tokens, batch.tokens)
    assert torch.equal(contexts.rollout_log_probs, batch.rollout_log_probs)
    of_agents = build_batch(prompts[1:2], Responses.of([conversation]), of_agents=True)
    assert of_agents.contexts().prompt_lens.tolist() == [len(PROMPTS[1]), 2, 1]
    asks = Generation([40, 41, 42], [OBSERVED, -1.0, OBSERVED], finished=True)
    equal = Generation([40, 43], [OBSERVED, -1.0], finished=True)
    of_agents = build_batch([prompts[0]] * 2, Responses.of([asks, equal]), of_agents=True)
    assert of_agents.contexts().prompt_lens.tolist() == [len(PROMPTS[0]) + 1] * 2
    assert of_agents.contexts().observation_lens.tolist() == [1, 0]  # type: ignore[union-attr]
    assert of_agents.contexts().prompt_groups.tolist() == [0, 0], "equal first requests are one"
    picked = batch.select([2, 1]).contexts()
    assert picked.seq_lens.tolist() == [*lens[4:], *lens[1:4]]
    assert batch.select([2, 0]).contexts().num_sequences == 2
    plain = build_batch(prompts[2:], Responses.of([others[1]]))
    both = concatenate([batch.select([1]), plain.with_fields(numbers=torch.tensor([9]))])
    assert both.contexts().seq_lens.tolist() == lens[1:]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0], [1], [1, 1, 0], []])
def test_select(order: list[int]) -> None:
    values = [[0.0], [1.0, 2.0, 3.0], [4.0, 5.0]]
    batch = make_batch().with_fields(scores=torch.tensor([7.0, 8.0, 9.0]), values=torch.arange(6.0))
    picked = batch.select(order)
    assert picked.tokens.tolist() == [t for i in order for t in PROMPTS[i] + RESPONSES[i]]
    assert picked.prompt_lens.tolist() == [len(PROMPTS[i]) for i in order]
    assert picked.response_lens.tolist() == [len(RESPONSES[i]) for i in order]
    assert picked.rollout_log_probs.tolist() == [x for i in order for x in LOG_PROBS[i]]
    assert picked.finished.tolist() == [[True, False, True][i] for i in order]
    assert picked.scores is not None and picked.values is not None
    assert picked.scores.tolist() == [[7.0, 8.0, 9.0][i] for i in order]
    assert picked.values.tolist() == [x for i in order for x in values[i]]
    assert picked.old_log_probs is None and picked.returns is None


def test_select_carries_every_field() -> None:
    """Catch a field that select forgets: it would be None or in its old order."""
    fields = (
        "rollout_log_probs",
        "old_log_probs",
        "ref_log_probs",
        "values",
        "advantages",
        "returns",
    )
    batch = make_batch().with_fields(
        **{name: 10.0 * k + torch.arange(6.0) for k, name in enumerate(fields)}
    )
    picked = batch.select(torch.tensor([2, 0]))
    for k, name in enumerate(fields):
        assert getattr(picked, name).tolist() == [10.0 * k + x for x in (4, 5, 0)], name


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
def test_ragged_indices(lens: list[int], data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, len(lens) - 1), max_size=10))
    segments = [list(range(sum(lens[:i]), sum(lens[: i + 1]))) for i in range(len(lens))]
    found = ragged_indices(np.array(lens), np.array(indices, dtype=np.int64))
    assert found.tolist() == [position for i in indices for position in segments[i]]
