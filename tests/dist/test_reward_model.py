"""Scores of a reward model, and values of a critic that starts from one, against transformers'
classifier."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import model_cases
import numpy as np
import pytest
import torch
from tiny import make_reward_model, make_tokenizer
from transformers import AutoModelForSequenceClassification

from rlhf_mc.data.batch import Generation, Prompt, RaggedBatch, Responses, build_batch
from rlhf_mc.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward_model"))


@pytest.mark.parametrize(
    ("world", "tp", "pp", "settings"),
    [
        (1, 1, 1, {}),
        (2, 1, 1, {}),
        (2, 1, 2, {}),
        (2, 2, 1, {"sequence_parallel": True}),
        (2, 1, 1, {"cp": 2}),
    ],
)
def test_scores_and_values_match_transformers(
    pool: Any, checkpoint: Path, world: int, tp: int, pp: int, settings: dict[str, Any]
) -> None:
    """Three of the sequences have one prompt."""
    draw = torch.Generator().manual_seed(7)
    prompt_lens = torch.tensor([9, 9, 9, 4, 2])
    response_lens = torch.tensor([6, 1, 11, 5, 7])
    tokens = torch.randint(1, 260, (int((prompt_lens + response_lens).sum()),), generator=draw)
    tokens[15:24] = tokens[25:34] = tokens[:9]
    batch = RaggedBatch(
        tokens=tokens,
        prompt_lens=prompt_lens,
        response_lens=response_lens,
        rollout_log_probs=torch.zeros(int(response_lens.sum())),
        finished=torch.ones(5, dtype=torch.bool),
    )
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    scores = []
    values = []
    with torch.no_grad():
        for seq, prompt in zip(
            batch.tokens.split(batch.seq_lens.tolist()), prompt_lens.tolist(), strict=True
        ):
            scores.append(model(seq[None]).logits[0, 0])
            values.append(
                model.score(model.model(seq[None]).last_hidden_state)[0, prompt - 1 : -1, 0]
            )
    results = pool(world).run(
        model_cases.scores_and_values,
        checkpoint=str(checkpoint),
        tp=tp,
        pp=pp,
        batch=batch,
        **settings,
    )
    assert float(torch.stack(scores).std()) > 0.1
    for got_scores, got_values in results:
        torch.testing.assert_close(got_scores, torch.stack(scores), rtol=0, atol=1e-5)
        torch.testing.assert_close(got_values, torch.cat(values), rtol=0, atol=1e-5)


TEMPLATE = "{% for m in messages %}<|bot|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"


@pytest.mark.parametrize(("world", "pp"), [(2, 1), (2, 2)])
def test_conversations_of_its_own_tokenizer_match_transformers(
    pool: Any, checkpoint: Path, tmp_path: Path, world: int, pp: int
) -> None:
    """Another vocabulary and template than the actor's. Conversations of more than 40 tokens lose
    their first."""
    shutil.copytree(checkpoint, tmp_path / "model")
    own = make_tokenizer(tmp_path / "model", ["user"])
    own.chat_template = TEMPLATE
    own.save_pretrained(tmp_path / "model")
    actor = load_tokenizer(str(checkpoint))
    assert own.get_vocab() != actor.get_vocab()
    texts = [
        ("1+1=", "2"),
        ("what is one?", "a number, of which there are " + "many " * 9),
        ("3", ""),
        ("a b", "c"),
    ]
    prompts = [
        Prompt(
            i, np.array(ids, np.int32), "a", None, messages=[{"role": "user", "content": question}]
        )
        for i, (question, _) in enumerate(texts)
        for ids in [actor(question)["input_ids"]]
    ]
    responses = [[*actor(answer)["input_ids"], actor.eos_token_id] for _, answer in texts]
    batch = build_batch(
        prompts, Responses.of([Generation(ids, [0.0] * len(ids), True) for ids in responses])
    )
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    ids = [
        own.apply_chat_template(
            [*prompt.messages, {"role": "assistant", "content": answer}], return_dict=False
        )
        for prompt, (_, answer) in zip(prompts, texts, strict=True)
    ]
    assert [len(tokens) > 40 for tokens in ids] == [False, True, False, False]
    with torch.no_grad():
        # The last token, whatever it is: a classifier of transformers would look for padding from
        # the right.
        read = [
            model.score(model.model(torch.tensor([tokens[-40:]])).last_hidden_state)[0, -1, 0]
            for tokens in ids
        ]
        plain = [
            model(seq[None]).logits[0, 0] for seq in batch.tokens.split(batch.seq_lens.tolist())
        ]
    asked = [0, 1, 3]
    arguments = {
        "checkpoint": str(tmp_path / "model"),
        "actor": str(checkpoint),
        "pp": pp,
        "asked": asked,
    }
    for found in pool(world).run(
        model_cases.conversation_scores, prompts=prompts, batch=batch, **arguments
    ):
        assert [num_truncated for _, num_truncated in found] == [1, 0]
        for (scores, _), want in zip(found, (read, plain), strict=True):
            torch.testing.assert_close(scores[asked], torch.stack(want)[asked], rtol=0, atol=1e-5)
            assert scores[2] == 0, "not asked for"
