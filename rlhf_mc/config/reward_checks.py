"""Checks of the reward settings, several together. Ranges are in ranges.py; reward.mixture is checked where the rules
are known, in rewards/mixture.py.
"""

from __future__ import annotations

import re

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.masking import HIDDEN, masked
from rlhf_mc.config.reward_schema import unnamed
from rlhf_mc.config.schema import Config, of_each_reward_model, reward_models, value_of

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
"""A part of a host's name."""


def check_rewards(cfg: Config) -> None:
    """Raise UserError if the reward settings contradict each other."""
    for problem in (_unused_function(cfg), _reward_models(cfg), _overlong_buffer(cfg), _remote(cfg)):
        if problem is not None:
            raise UserError(problem)


def _unused_function(cfg: Config) -> str | None:
    model = next(iter(reward_models(cfg)), None)
    if cfg.custom_reward_function.path is None or model is None or cfg.data.val_files or cfg.reward.mixture:
        return None
    return (
        f"custom_reward_function.path and {model}.model_path are both set, and data.val_files and reward.mixture are"
        " empty; the reward model's scores are trained on, so the function would never be called: set one of the two to"
        " null, or weigh both in reward.mixture"
    )


def _reward_models(cfg: Config) -> str | None:
    if "reward_model" in cfg.reward_models:
        return "reward_models: the name 'reward_model' is that of the part of reward_model.model_path; give another"
    needs = {"reward_model.tokenizer_path": "model_path", "reward_model.chat_template_path": "tokenizer_path"}
    for key in of_each_reward_model(cfg, needs):
        needed = f"{key.rpartition('.')[0]}.{needs[unnamed(key)]}"
        if value_of(cfg, key) is not None and value_of(cfg, needed) is None:
            return f"{key} is {value_of(cfg, key)!r}; that needs {needed}, which is null"
    return None


def _overlong_buffer(cfg: Config) -> str | None:
    buffer = cfg.reward.overlong_buffer.len
    longest = cfg.data.max_response_length
    if buffer <= longest:
        return None
    return f"reward.overlong_buffer.len is {buffer}; it must be at most data.max_response_length, {longest}"


def _remote(cfg: Config) -> str | None:
    remote = cfg.reward.remote
    variable = remote.api_key_env
    if variable is not None and not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
        return (
            f"reward.remote.api_key_env must be the name of an environment variable (letters, digits, _); it is another"
            f" text of {len(variable)} characters, not shown here: it may be the key"
        )
    if remote.url is None:
        for key in ("model", "api_key_env"):
            if (value := getattr(remote, key)) is not None:
                return f"reward.remote.{key} is {value!r}; that needs reward.remote.url, which is null"
        return None
    if problem := _url_problem(remote.url, variable is not None):
        # The text may have a password in a place where a valid URL has none.
        before, at, after = remote.url.rpartition("@")
        return f"reward.remote.url is {masked(HIDDEN + at + after if at else before + after)!r}; {problem}"
    if remote.api == "openai" and remote.model is None:
        return "reward.remote.api is openai; that needs reward.remote.model, which is null"
    return None


def _url_problem(text: str, has_key: bool) -> str | None:
    """Return why requests to the URL cannot be made, without repeating a part of it, or None."""
    import httpx  # a tenth of a second, for runs with an endpoint alone

    if not text.lower().startswith(("http://", "https://")):
        return "it must begin with http:// or https://"
    if wrong := next((c for c in text if c.isspace() or not c.isprintable() or c in '"<>\\^`{|}'), None):
        return f"the character {wrong!r} must be written as %{ord(wrong):02X}, or left out"
    try:
        url = httpx.URL(text)
        host = url.raw_host.decode() if url.host else ""  # each decodes names in another way
    except (httpx.InvalidURL, UnicodeError):
        return "its host or port is not valid"
    if not host:
        return "it has no host"
    if ":" not in host and not (len(host) <= 253 and all(map(_LABEL.fullmatch, host.removesuffix(".").split(".")))):
        return "its host is not valid"
    if url.port is not None and not 1 <= url.port <= 65535:
        return f"its port {url.port} is not between 1 and 65535"
    if url.fragment:
        return "the part after # is never sent; leave it out"
    if url.userinfo and has_key:
        return "with reward.remote.api_key_env it may have no user: only one of them can be sent"
    return None
