"""Checks of the settings of algorithm, reward and environment, in the form of checks.py.
reward.mixture is checked where the rules are known, in rewards/mixture.py."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from rlhf_mc.config.algorithm_schema import SEQUENCE_LOSSES
from rlhf_mc.config.fields import needs
from rlhf_mc.config.masking import HIDDEN, masked
from rlhf_mc.config.reward_schema import unnamed
from rlhf_mc.config.roles import (
    depends_on_time,
    estimator_needs,
    prompts_in_flight,
    prompts_per_batch,
    sampling_versions,
    trains_on_older_weights,
    uses_critic,
)
from rlhf_mc.config.schema import Config, expand_named_models, get_setting, reward_models


def problems(cfg: Config) -> Iterator[str]:
    """Yield the problems of the settings of algorithm, policy loss, reward and environment."""
    checks = (
        _estimator,
        _losses,
        _rollout_correction,
        _kl_controller,
        _filter_groups,
        _in_flight,
        _reward_models,
        _remote,
        _environment,
    )
    return itertools.chain.from_iterable(check(cfg) for check in checks)


def _estimator(cfg: Config) -> Iterator[str]:
    custom = cfg.algorithm.custom_estimator
    name = cfg.algorithm.adv_estimator
    inputs = estimator_needs(cfg.algorithm)
    key = f"algorithm.adv_estimator is {name}"
    if name != "custom" and custom.needs:
        yield (
            f"algorithm.custom_estimator.needs is {custom.needs} and {key}; it is for "
            "adv_estimator custom"
        )
    if inputs.group and cfg.rollout.n < 2:
        yield (
            f"{key}, which compares the responses of a prompt; rollout.n is {cfg.rollout.n}; it "
            "must be at least 2"
        )
    if name.endswith("_turn") and not cfg.rollout.environment.is_set:
        yield f"{key}, of the turns of conversations; that needs rollout.environment"
    if (name == "maxrl" or inputs.parts) and cfg.algorithm.use_kl_in_reward:
        parts = "which reads the parts of the score alone"
        reads = parts if inputs.parts else "whose rewards must be 0 or more"
        yield (
            f"{key}, {reads}, and algorithm.use_kl_in_reward is true; set it to false, and "
            "actor.use_kl_loss to true"
        )
    if inputs.critic:
        return
    if cfg.critic.model_path is not None:
        yield (
            f"critic.model_path is {cfg.critic.model_path} and {key}, which needs no critic; leave "
            "it out"
        )
    if cfg.trainer.critic_warmup > 0:
        yield (
            f"trainer.critic_warmup is {cfg.trainer.critic_warmup} and {key}, which needs no "
            "critic; set it to 0"
        )


def _losses(cfg: Config) -> Iterator[str]:
    loss = cfg.actor.policy_loss
    mode = cfg.actor.loss_agg_mode
    key = f"actor.policy_loss.loss_mode is {loss.loss_mode}"
    if loss.loss_mode in SEQUENCE_LOSSES and mode != "seq-mean-token-mean":
        yield (
            f"{key}, a loss of sequences; actor.loss_agg_mode is {mode}; it must be "
            "seq-mean-token-mean"
        )
    if loss.loss_mode == "sao" and not cfg.algorithm.rollout_correction.bypass_mode:
        yield (
            f"{key}, whose ratio is to the engine's policy; that needs "
            "algorithm.rollout_correction.bypass_mode: true"
        )
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        yield (
            f"actor.policy_loss.clip_cov_lb is {loss.clip_cov_lb}; it must be below clip_cov_ub, "
            f"{loss.clip_cov_ub}"
        )
    scaled = "seq-mean-token-sum-norm"
    for role, section in (("actor", cfg.actor), ("critic", cfg.critic)):
        mode = section.loss_agg_mode
        if section.loss_scale_factor is not None and mode != scaled:
            aggregation = f"{role}.loss_agg_mode {scaled}, and it is {mode}"
            yield needs(cfg, f"{role}.loss_scale_factor", aggregation)


def _rollout_correction(cfg: Config) -> Iterator[str]:
    section = "algorithm.rollout_correction"
    correction = cfg.algorithm.rollout_correction
    statistics = correction.rollout_rs
    thresholds = correction.rollout_rs_threshold
    if len(statistics) != len(thresholds):
        yield (
            f"{section}.rollout_rs has {len(statistics)} statistics and "
            f"{section}.rollout_rs_threshold has"
            f" {len(thresholds)}; each statistic needs one threshold"
        )
    for name, threshold in zip(statistics, thresholds, strict=True):
        if threshold <= 1 and name.endswith("k1"):
            yield (
                f"{section}.rollout_rs_threshold of {name} is {threshold}; it bounds a ratio and "
                "must be above 1"
            )
    lower = correction.rollout_rs_threshold_lower
    if lower is not None and not any(name.endswith("k1") for name in statistics):
        yield (
            f"{section}.rollout_rs_threshold_lower is {lower}, a bound of the ..._k1 statistics; "
            f"{section}.rollout_rs has none of them"
        )
    if correction.bypass_mode and cfg.algorithm.router_replay == "recompute":
        yield (
            f"{section}.bypass_mode is true and algorithm.router_replay is recompute, which "
            "replays the choices of the"
            " pass that bypass_mode skips; set it to rollout or off"
        )
    given = [
        name
        for name in ("rollout_is", "rollout_rs", "rollout_token_veto_threshold")
        if getattr(correction, name)
    ]
    if correction.bypass_mode and given:
        yield (
            f"{section}.bypass_mode is true and {section}.{' and '.join(given)} set; it needs the "
            "trainer's log-probs, and bypass_mode skips their pass: set one or the other"
        )


def _kl_controller(cfg: Config) -> Iterator[str]:
    kl_ctrl = cfg.algorithm.kl_ctrl
    if kl_ctrl.type != "adaptive":
        return
    if kl_ctrl.target_kl == 0:
        yield (
            f"algorithm.kl_ctrl.target_kl is {kl_ctrl.target_kl}; it must be above 0 where "
            "kl_ctrl.type is adaptive"
        )
    if not (cfg.algorithm.use_kl_in_reward or cfg.actor.use_kl_loss):
        term = "algorithm.use_kl_in_reward or actor.use_kl_loss: true"
        yield needs(cfg, "algorithm.kl_ctrl.type", term)


def _in_flight(cfg: Config) -> Iterator[str]:
    rollout = cfg.rollout
    correction = cfg.algorithm.rollout_correction
    modes = [
        f"rollout.{name}" for name in ("tail_batching", "partial_rollout") if getattr(rollout, name)
    ]
    if len(modes) > 1:
        yield f"{' and '.join(modes)} are true; set one of them"
    if rollout.prompts_in_flight is not None:
        if not modes:
            mode = "rollout.tail_batching or rollout.partial_rollout: true"
            yield needs(cfg, "rollout.prompts_in_flight", mode)
        elif rollout.prompts_in_flight < cfg.data.train_batch_size:
            yield (
                f"rollout.prompts_in_flight is {rollout.prompts_in_flight}; it must be at least "
                f"data.train_batch_size, {cfg.data.train_batch_size}"
            )
    versions = sampling_versions(rollout)
    if rollout.partial_rollout and versions < 1:
        yield (
            f"rollout.max_off_policy_threshold is {rollout.max_off_policy_threshold} and "
            "rollout.one_step_off is true; it must be at least 2: a step trains on the tokens of "
            "the version before"
        )
    elif (
        rollout.partial_rollout
        and rollout.max_off_policy_strategy == "wait"
        and prompts_in_flight(cfg) > versions * cfg.data.train_batch_size
    ):
        less = " less 1 (one_step_off)" if rollout.one_step_off else ""
        yield (
            f"rollout.prompts_in_flight is {prompts_in_flight(cfg)} and "
            "rollout.max_off_policy_strategy is wait; it must be at most "
            f"rollout.max_off_policy_threshold{less} x data.train_batch_size, "
            f"{versions} x {cfg.data.train_batch_size} = {versions * cfg.data.train_batch_size}: "
            "later steps train on the others too late"
        )
    is_replayable = depends_on_time(rollout) or rollout.environment.is_set
    if cfg.trainer.replay is not None and not is_replayable:
        yield needs(
            cfg,
            "trainer.replay",
            "rollout.tail_batching or partial_rollout: true, or an environment (other runs draw "
            "the same tokens in any layout)",
        )
    if cfg.algorithm.filter_groups.enable and rollout.tail_batching:
        yield (
            "rollout.tail_batching is true and algorithm.filter_groups.enable is true; set one of "
            "them, or rollout.partial_rollout"
        )
    if not trains_on_older_weights(rollout):
        return
    mode = "one_step_off" if rollout.one_step_off else "partial_rollout"
    if correction.rollout_is is None and not correction.bypass_mode:
        yield (
            f"rollout.{mode} is true, which trains on tokens of older weights; that needs"
            " algorithm.rollout_correction.rollout_is (token or sequence), or bypass_mode: true"
        )
    if correction.bypass_mode and cfg.actor.policy_loss.loss_mode == "gpg":
        yield (
            f"rollout.{mode} is true and actor.policy_loss.loss_mode is gpg, which has no "
            "ratio to the policy that drew a token; set algorithm.rollout_correction.rollout_is in "
            "place of bypass_mode, or another loss"
        )


def _filter_groups(cfg: Config) -> Iterator[str]:
    data = cfg.data
    filtering = cfg.algorithm.filter_groups
    on = "algorithm.filter_groups.enable is true"
    if not filtering.enable:
        if data.gen_batch_size is not None:
            yield needs(cfg, "data.gen_batch_size", "algorithm.filter_groups.enable: true")
        return
    if cfg.rollout.n < 2:
        yield (
            f"{on}, which compares the responses of a prompt; rollout.n is {cfg.rollout.n}; it "
            "must be at least 2"
        )
    size = prompts_per_batch(data)
    most = filtering.max_num_gen_batches
    if 0 < most * size < data.train_batch_size:
        yield (
            f"algorithm.filter_groups.max_num_gen_batches {most} x data.gen_batch_size {size} = "
            f"{most * size} is fewer prompts than data.train_batch_size, {data.train_batch_size}, "
            "which each step keeps"
        )
    if filtering.metric != "seq_reward" and cfg.reward_model.model_path is not None:
        mixture = cfg.reward.mixture
        alone = [
            source
            for source, parts in mixture.items()
            if isinstance(parts, dict) and set(parts) == {"reward_model"}
        ]
        if alone or not mixture:
            where = f" of the data source {alone[0]!r}" if alone else ""
            yield (
                f"algorithm.filter_groups.metric is {filtering.metric}, which reward functions "
                f"give, and the reward model alone scores the responses{where}; it must be "
                "seq_reward"
            )
    schedules = [
        f"{role}.optim.lr_decay_style is {optim.lr_decay_style}"
        for role, optim in (("actor", cfg.actor.optim), ("critic", cfg.critic.optim))
        if optim.lr_decay_style != "constant" and (role == "actor" or uses_critic(cfg))
    ]
    if cfg.actor.entropy_coeff_end is not None:
        schedules.append(f"actor.entropy_coeff_end is {cfg.actor.entropy_coeff_end}")
    if schedules and cfg.trainer.total_training_steps is None:
        yield (
            f"{schedules[0]} and {on}: how many steps trainer.total_epochs has then depends on the "
            "dropped groups; set trainer.total_training_steps"
        )


def _reward_models(cfg: Config) -> Iterator[str]:
    model = next(iter(reward_models(cfg)), None)
    if cfg.custom_reward_function.path and model and not (cfg.data.val_files or cfg.reward.mixture):
        yield (
            f"custom_reward_function.path and {model}.model_path are both set, and data.val_files "
            "and reward.mixture are empty; the reward model's scores are trained on, so the "
            "function would never be called: set one of the two to null, or weigh both in "
            "reward.mixture"
        )
    if "reward_model" in cfg.reward_models:
        yield (
            "reward_models: the name 'reward_model' is that of the part of "
            "reward_model.model_path; give another"
        )
    others = {
        "reward_model.tokenizer_path": "model_path",
        "reward_model.chat_template_path": "tokenizer_path",
    }
    for key in expand_named_models(cfg, others):
        needed = f"{key.rpartition('.')[0]}.{others[unnamed(key)]}"
        if get_setting(cfg, key) is not None and get_setting(cfg, needed) is None:
            yield needs(cfg, key, f"{needed}, which is null")


def _remote(cfg: Config) -> Iterator[str]:
    remote = cfg.reward.remote
    variable = remote.api_key_env
    if variable is not None and not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
        yield (
            "reward.remote.api_key_env must be the name of an environment variable (letters, "
            "digits, _); it is another"
            f" text of {len(variable)} characters, not shown here: it may be the key"
        )
    if remote.url is None:
        for key in ("model", "api_key_env"):
            if getattr(remote, key) is not None:
                yield needs(cfg, f"reward.remote.{key}", "reward.remote.url, which is null")
        return
    if problem := _url_problem(remote.url, variable is not None):
        # The text may have a password in a place where a valid URL has none.
        _, separator, address = remote.url.rpartition("@")
        url = f"{HIDDEN}@{address}" if separator else address
        yield (f"reward.remote.url is {masked(url)!r}; {problem}")
    if remote.api == "openai" and remote.model is None:
        yield needs(cfg, "reward.remote.api", "reward.remote.model, which is null")


def _url_problem(text: str, has_key: bool) -> str | None:
    """Return why requests to the URL cannot be made, without repeating a part of it, or None."""
    import httpx  # a tenth of a second, for runs with an endpoint alone

    try:
        url = httpx.URL(text)
        is_valid = url.scheme in ("http", "https") and url.host != ""  # the host decodes names
    except (httpx.InvalidURL, UnicodeError):
        is_valid = False
    if not is_valid:
        return "it must begin with http:// or https://, and have a valid host and port"
    if url.userinfo and has_key:
        return "with reward.remote.api_key_env it may have no user: only one of them can be sent"
    return None


def _environment(cfg: Config) -> Iterator[str]:
    environment = cfg.rollout.environment
    num_agents = bool(environment.command) + bool(environment.is_agent and environment.path)
    others = environment.has_tools or environment.default_observation is not None
    if num_agents != environment.is_agent or (environment.is_agent and others):
        yield (
            "rollout.environment.command is for rollout.environment.name openai, an agent, which "
            "has either path or command, and neither tools of its own nor default_observation"
        )
    if not environment.is_set:
        return
    if environment.has_contexts and reward_models(cfg):
        yield (
            "rollout.environment.rewritten_history is new_context, and a reward model reads one "
            "context; set it to refuse"
        )
    loss = cfg.actor.policy_loss.loss_mode
    if environment.has_contexts and loss in ("gspo", "geo_mean", "custom"):
        yield (
            "rollout.environment.rewritten_history is new_context, and the loss of "
            f"actor.policy_loss.loss_mode {loss} is of whole sequences, whose contexts an update "
            "splits; set it to refuse"
        )
    if environment.path is not None and environment.has_tools:
        yield (
            "rollout.environment.path and tools (function_tool_path, tool_config_path) are both "
            "set; give one of them"
        )
    if environment.has_tools and environment.first_observation:
        yield "rollout.environment.first_observation is true, and tools have none; set it to false"
    if environment.has_tools and "tools" in cfg.data.apply_chat_template_kwargs:
        yield (
            "data.apply_chat_template_kwargs has 'tools', and rollout.environment has tools too; "
            "remove the former"
        )
    if (
        environment.max_tokens_per_turn is not None
        and environment.max_tokens_per_turn > cfg.data.max_response_length
    ):
        yield (
            f"rollout.environment.max_tokens_per_turn is {environment.max_tokens_per_turn}; it "
            f"must be at most data.max_response_length, {cfg.data.max_response_length}"
        )
