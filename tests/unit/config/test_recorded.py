"""Record of settings and command: no value of a secret is in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_files import MINIMAL

from rlhf_mc import command_line
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config, to_dict
from rlhf_mc.config.masking import masked
from rlhf_mc.config.printing import (
    check_not_hidden,
    command_without_secrets,
    recorded,
    without_secrets,
)
from rlhf_mc.run_directory import starts
from rlhf_mc.run_directory.starts import record_end, record_start
from rlhf_mc.run_files import differences
from rlhf_mc.runtime import console, error_report

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
    cfg = load_config(
        str(given), [f"trainer.default_local_dir={tmp_path}", "data.prompt_key=question"]
    )
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
    assert without_secrets(found) == found and "sk-1" in str(to_dict(cfg)), (
        "the run itself has the values"
    )
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


def test_record_of_a_start_has_no_secret(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    override = "custom_reward_function.reward_kwargs.api_key=sk-1"
    monkeypatch.setattr(
        starts, "_command", lambda: ["python", "-m", "rlhf_mc", "given.yaml", override]
    )
    for key in ("sk-1", "sk-2"):
        cfg = load_config(
            str(given), [f"trainer.default_local_dir={tmp_path}", override.replace("sk-1", key)]
        )
        record_start(cfg, "run1", 0)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(written) == {"given.yaml", "starts.jsonl", "resolved_config.yaml"}
    assert not any("sk-" in text for text in written.values())
    assert "reward_kwargs.api_key=***" in written["starts.jsonl"]
    again = load_config(str(tmp_path / "resolved_config.yaml"))
    assert again.custom_reward_function.reward_kwargs == {"api_key": "***"}, (
        "a config that can be loaded"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://u:p@h:80/v1?a=1", "http://***@h:80/v1?a=1"),
        ("at https://sk-1@h and http://u:p%40@h.", "at https://***@h and http://***@h."),
        ("http://u:p@ss@h", "http://***@h"),
        ("http://h/?api_key=sk-1&n=2&Token=t#x", "http://h/?api_key=***&n=2&Token=***#x"),
        ("http://h/react@18?monkey=1&keys=2", "http://h/react@18?monkey=***&keys=2"),
        ('{"url": "http://h", "mail": "a@b"}', '{"url": "http://h", "mail": "a@b"}'),
        ("me@host: nothing?key=2", "me@host: nothing?key=2"),
    ],
)
def test_secrets_of_urls_are_masked(text: str, expected: str) -> None:
    assert masked(text) == expected
    assert masked(expected) == expected


URL = "http://me:PASS@judge:8000/v1?api_key=PASS"
KEY = "custom_reward_function.reward_kwargs"
MASKED = "http://***@judge:8000/v1?api_key=***"


def test_nothing_that_a_run_writes_has_a_secret(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Give a URL with a password in the settings, on the command line, and in errors."""
    override = f"reward.remote.url={URL}"
    arguments = [str(given), override, f"trainer.default_local_dir={tmp_path / 'run'}"]
    monkeypatch.setattr(starts, "_command", lambda: ["python", "-m", "rlhf_mc", *arguments])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "run").mkdir()
    cfg = load_config(arguments[0], arguments[1:])
    assert cfg.reward.remote.url == URL, "the run itself has it"
    record_start(cfg, "run1", 0)
    record_end(cfg, 0, 3, "failed", f"cannot reach {URL}")
    console.print_line(f"warning: {URL}")
    error_report.report(f"error: {URL}", "key")
    console.write_line(command_line.parse([*arguments, "--print-config"]).text())
    with pytest.raises(UserError) as caught:
        load_config(str(given), [f"reward.remote.url.x={URL}"])
    shown = {path.name: path.read_text() for path in tmp_path.glob("**/*.*") if path != given}
    shown |= {"console": "".join(capfd.readouterr()), "error": str(caught.value)}
    assert {*shown} == {"starts.jsonl", "resolved_config.yaml", "error.json", "console", "error"}
    for name, text in shown.items():
        assert "PASS" not in text and "//me" not in text and MASKED.partition("?")[0] in text, name
    assert shown["starts.jsonl"].count(MASKED) == 3 and shown["console"].count(MASKED) == 4


def test_unknown_override_with_a_secret_does_not_show_it(given: Path) -> None:
    with pytest.raises(UserError, match=r"reward\.remote\.api_key=\*\*\*") as caught:
        load_config(str(given), ["reward.remote.api_key=PASS"])
    assert "PASS" not in str(caught.value)


def test_resume_compares_settings_without_secrets(given: Path) -> None:
    """Resume a checkpoint of a version that recorded them, too."""
    cfg = load_config(str(given), [f"reward.remote.url={URL}"])
    changed = load_config(str(given), [f"reward.remote.url={URL.replace('PASS', 'other')}"])
    for stored in (recorded(cfg), to_dict(cfg)):
        assert differences(without_secrets(stored), recorded(changed)) == {}
    moved = load_config(str(given), [f"reward.remote.url={URL.replace('judge', 'jury')}"])
    pairs = differences(recorded(cfg), recorded(moved))
    assert pairs == {"reward.remote.url": [MASKED, MASKED.replace("judge", "jury")]}


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (f"reward.remote.url={URL}", "reward.remote.url"),
        (
            f"{KEY}={{judges: [{{api_key: PASS}}]}}",
            f"{KEY}.judges.0.api_key",
        ),
    ],
)
def test_recorded_config_must_get_its_secrets_again(
    given: Path, tmp_path: Path, override: str, key: str
) -> None:
    cfg = load_config(str(given), [override])
    check_not_hidden(cfg)
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(recorded(cfg)))
    again = load_config(str(tmp_path / "again.yaml"))
    words = rf"^{re.escape(key)} is '.*\*\*\*', as a secret is recorded; give its value again"
    with pytest.raises(UserError, match=words):
        check_not_hidden(again)
    check_not_hidden(load_config(str(tmp_path / "again.yaml"), [override]))
