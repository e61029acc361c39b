"""Seeds of many rows at once are those of numpy's SeedSequence, row by row."""

import numpy as np
import pytest

from rlhf_mc.data.batch import Prompt
from rlhf_mc.trainer.sampling import TRAINING, sampling_seeds
from rlhf_mc.trainer.seed_sequences import first_states


@pytest.mark.parametrize("num_words", [1, 3, 4, 5, 9])
def test_states_are_numpys(num_words):
    entropy = np.random.default_rng(num_words).integers(0, 2**32, (50, num_words), dtype=np.uint32)
    entropy[0] = 0
    entropy[1] = 2**32 - 1
    entropy[2, 0] = 0
    expected = [np.random.SeedSequence(row).generate_state(1, np.uint64)[0] for row in entropy]
    assert first_states(entropy).tolist() == [int(state) for state in expected]


def test_no_rows():
    assert first_states(np.empty((0, 5), np.uint32)).tolist() == []


def test_a_seed_is_a_function_of_its_response_alone():
    prompts = [Prompt(index=index, token_ids=[1], text="", data_source="", ground_truth=None) for index in (7, 0, 7)]
    seeds = sampling_seeds(5, TRAINING, 2**32 - 1, prompts, 2)
    places = [(7, 0), (7, 1), (0, 0), (0, 1), (7, 2), (7, 3)]
    expected = [
        np.random.SeedSequence((5, TRAINING, 2**32 - 1, *place)).generate_state(1, np.uint64)[0] for place in places
    ]
    assert seeds == [int(state) >> 1 for state in expected]


def test_no_prompts():
    assert sampling_seeds(1, TRAINING, 1, [], 4) == []
