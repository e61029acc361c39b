"""Record of settings and command: no value of a secret is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import MINIMAL

from rlhf_mc.config.load import load_config, to_dict
from rlhf_mc.config.recorded import command_without_secrets, recorded, without_secrets
from rlhf_mc.trainer import run_record
from rlhf_mc.trainer.run_record import record_start

KWARGS: dict[str, Any] = {
    "API_Key": "sk-1",
    "judge": {"access_token": "sk-2", "url": "http://judge"},
    "judges": [{"password": "sk-3"}],
    "client_secret": {"id": 4, "value": "sk-4"},
    "max_tokens": 5,
    "token_limit": 6,
}


@pytest.fixture
def given(tmp_path: Path) -> Path:
    path = tmp_path / "given.yaml"
    path.write_text(MINIMAL)
    return path


def test_keyword_arguments_that_are_secrets_are_hidden(given: Path, tmp_path: Path) -> None:
    cfg = load_config(str(given), [f"trainer.default_local_dir={tmp_path}", "data.prompt_key=question"])
    cfg.custom_reward_function.reward_kwargs = KWARGS
    cfg.data.apply_chat_template_kwargs = {"token": "sk-5", "enable_thinking": False}
    found = recorded(cfg)
    assert found["custom_reward_function"]["reward_kwargs"] == {
        "API_Key": "***",
        "judge": {"access_token": "***", "url": "http://judge"},
        "judges": [{"password": "***"}],
        "client_secret": "***",
        "max_tokens": 5,
        "token_limit": 6,
    }
    assert found["data"]["apply_chat_template_kwargs"] == {"token": "***", "enable_thinking": False}
    assert found["data"]["prompt_key"] == "question", "a setting of the schema is no secret"
    assert without_secrets(found) == found and "sk-1" in str(to_dict(cfg)), "the run itself has the values"
    assert without_secrets({"data": None}) == {"data": None}, "a checkpoint of another version"


def test_overrides_that_hold_secrets_are_hidden() -> None:
    command = ["python", "-m", "rlhf_mc", "a=b.yaml", "data.prompt_key=question", "rollout.n=2"]
    secrets = [
        "custom_reward_function.reward_kwargs.api_key=sk-1",
        "+custom_reward_function.reward_kwargs.judge.PASSWORD=sk=2",
        "custom_reward_function.reward_kwargs={url: http://judge, access_token: sk-3}",
        "custom_reward_function.reward_kwargs={'secret' : sk-4}",
    ]
    found = command_without_secrets([*command, *secrets])
    assert found == [
        *command,
        "custom_reward_function.reward_kwargs.api_key=***",
        "+custom_reward_function.reward_kwargs.judge.PASSWORD=***",
        "custom_reward_function.reward_kwargs=***",
        "custom_reward_function.reward_kwargs=***",
    ]


def test_record_of_a_start_has_no_secret(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    override = "custom_reward_function.reward_kwargs.api_key=sk-1"
    monkeypatch.setattr(run_record, "_command", lambda: ["python", "-m", "rlhf_mc", "given.yaml", override])
    for key in ("sk-1", "sk-2"):
        cfg = load_config(str(given), [f"trainer.default_local_dir={tmp_path}", override.replace("sk-1", key)])
        record_start(cfg, "run1", 0)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(written) == {"given.yaml", "starts.jsonl", "resolved_config.yaml"}
    assert not any("sk-" in text for text in written.values())
    assert "reward_kwargs.api_key=***" in written["starts.jsonl"]
    again = load_config(str(tmp_path / "resolved_config.yaml"))
    assert again.custom_reward_function.reward_kwargs == {"api_key": "***"}, "a config that can be loaded"
