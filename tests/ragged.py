"""Responses of the engine from Python objects, as tests write them."""

from collections.abc import Sequence

import numpy as np

from rlhf_mc.data.batch import Generation, Responses


def to_responses(generations: Sequence[Generation]) -> Responses:
    return Responses(
        np.array([len(g.token_ids) for g in generations], dtype=np.int64),
        np.array([t for g in generations for t in g.token_ids], dtype=np.int32),
        np.array([x for g in generations for x in g.log_probs], dtype=np.float32),
        np.array([g.finished for g in generations], dtype=np.bool_),
    )
