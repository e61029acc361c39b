"""Responses of the engine as Python objects, in which tests compare them."""

from rlhf_mc.data.batch import Generation, Responses


def to_generations(responses: Responses) -> list[Generation]:
    ends = zip(responses.lens, responses.lens.cumsum(), strict=True)
    log_probs = [responses.log_probs[end - length : end].tolist() for length, end in ends]
    rows = zip(responses.token_ids(), log_probs, responses.finished.tolist(), strict=True)
    return [Generation(*row) for row in rows]
