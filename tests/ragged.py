"""Responses of the engine as Python objects, in which tests compare them."""

import numpy as np

from rlhf_mc.data.batch import Generation, Responses


def to_generations(responses: Responses) -> list[Generation]:
    log_probs = np.split(responses.log_probs, responses.lens.cumsum()[:-1])
    rows = zip(responses.token_ids(), log_probs, responses.finished.tolist(), strict=True)
    return [Generation(token_ids, row.tolist(), finished) for token_ids, row, finished in rows]
