"""Scores of a reward model, and values of a critic that starts from one, against transformers' classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import model_cases
import pytest
import torch
from tiny import make_reward_model
from transformers import AutoModelForSequenceClassification

from rlhf_mc.data.batch import RaggedBatch

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward_model"))


@pytest.mark.parametrize(
    ("world", "tp", "pp", "settings"),
    [(1, 1, 1, {}), (2, 1, 1, {}), (2, 1, 2, {}), (2, 2, 1, {"sequence_parallel": True})],
)
def test_scores_and_values_match_transformers(
    pool: Any, checkpoint: Path, world: int, tp: int, pp: int, settings: dict[str, Any]
) -> None:
    draw = torch.Generator().manual_seed(7)
    prompt_lens = torch.tensor([3, 9, 5, 4, 2])
    response_lens = torch.tensor([6, 1, 11, 5, 7])
    batch = RaggedBatch(
        tokens=torch.randint(1, 260, (int((prompt_lens + response_lens).sum()),), generator=draw),
        prompt_lens=prompt_lens,
        response_lens=response_lens,
        rollout_log_probs=torch.zeros(int(response_lens.sum())),
        finished=torch.ones(5, dtype=torch.bool),
    )
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    scores = []
    values = []
    with torch.no_grad():
        for seq, prompt in zip(batch.tokens.split(batch.seq_lens.tolist()), prompt_lens.tolist(), strict=True):
            scores.append(model(seq[None]).logits[0, 0])
            values.append(model.score(model.model(seq[None]).last_hidden_state)[0, prompt - 1 : -1, 0])
    results = pool(world).run(
        model_cases.scores_and_values, checkpoint=str(checkpoint), tp=tp, pp=pp, batch=batch, **settings
    )
    assert float(torch.stack(scores).std()) > 0.1
    for got_scores, got_values in results:
        torch.testing.assert_close(got_scores, torch.stack(scores), rtol=0, atol=1e-5)
        torch.testing.assert_close(got_values, torch.cat(values), rtol=0, atol=1e-5)
