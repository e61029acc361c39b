"""Checks of the reward settings, several together. Ranges are in ranges.py; reward.mixture is checked where the rules
are known, in rewards/mixture.py.
"""

from __future__ import annotations

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.reward_schema import unnamed
from rlhf_mc.config.schema import Config, of_each_reward_model, reward_models, value_of


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
    if remote.url is None:
        for key in ("model", "api_key_env"):
            if (value := getattr(remote, key)) is not None:
                return f"reward.remote.{key} is {value!r}; that needs reward.remote.url, which is null"
        return None
    if not remote.url.startswith(("http://", "https://")):
        return f"reward.remote.url is {remote.url!r}; it must begin with http:// or https://"
    if remote.api == "openai" and remote.model is None:
        return "reward.remote.api is openai; that needs reward.remote.model, which is null"
    return None
