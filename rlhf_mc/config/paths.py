"""Checks of the settings that name files and directories: their syntax, and that the files exist
and can be read. The files are not opened here.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterator, Sequence

from rlhf_mc.config.errors import NodeError, UserError, disk_errors, error_reason
from rlhf_mc.config.reward_schema import unnamed
from rlhf_mc.config.schema import Config, expand_named_models, get_setting

INPUT_DIRECTORIES = (
    "model.path",
    "model.tokenizer_path",
    "model.dist_checkpointing_path",
    "actor.lora.adapter_path",
    "critic.model_path",
    "critic.lora.adapter_path",
    "reward_model.model_path",
    "reward_model.tokenizer_path",
    "teacher_model.model_path",
    "trainer.resume_from_path",
    "trainer.replay",
)
CUSTOM_FUNCTIONS = (
    "algorithm.custom_estimator.path",
    "actor.policy_loss.custom_loss.path",
    "rollout.custom_engine.path",
    "rollout.environment.path",
    "rollout.environment.function_tool_path",
    "rollout.environment.tool_config_path",
)
INPUT_FILES = (
    "data.train_files",
    "data.val_files",
    "data.chat_template_path",
    "reward_model.chat_template_path",
    "custom_reward_function.path",
    *CUSTOM_FUNCTIONS,
)
OUTPUT = "trainer.default_local_dir"
_REQUIRED = ("data.train_files", "model.path", OUTPUT)
OTHER_OUTPUTS = ("trainer.rollout_data_dir", "trainer.validation_data_dir")
"""Directories that are created when something is written to them."""
_REPLACED = ("hf", "export")
"""Directories inside OUTPUT that a run replaces. None of its inputs may be in them."""
_STEP = re.compile(r"global_step_\d+")
_MANIFEST = "manifest.json"
"""Last file of a checkpoint of ours (checkpoint/directory.py)."""
_OF_VERL = "latest_checkpointed_iteration.txt"
_REFERENCE = re.compile(r"\$\{[^}]*\}?|\$[A-Za-z_]\w*")


def check_written(cfg: Config) -> None:
    """Raise UserError for a path that is empty, has an unreplaced reference, or mixes inputs and
    outputs. No file is accessed."""
    for key, path in _paths(cfg, (*INPUT_FILES, *INPUT_DIRECTORIES, OUTPUT, *OTHER_OUTPUTS)):
        if not path.strip():
            raise UserError(
                f"{key} is empty; give a path" + ("" if key in _REQUIRED else ", or leave it out")
            )
        if path != path.strip() or not path.isprintable():
            raise UserError(
                f"{key} is {path!r}; a path has no space at its ends, and no control characters"
            )
        if match := _REFERENCE.search(path):
            raise UserError(
                f"{key} is {path!r}; {match[0]} is not replaced: write the path out, or give it on "
                "the command line, "
                f'where the shell replaces it: {key}="$NAME/..."'
            )
        if path.startswith("~"):
            raise UserError(f"{key} is {path!r}; ~ is not replaced: write the home directory out")
    _check_output_apart(cfg)


def check_present(cfg: Config) -> None:
    """Raise NodeError if an input does not exist, or the output directory cannot be created or
    written to."""
    for key, path in input_paths(cfg):
        _check_input(key, path)
    _check_output(cfg.trainer.default_local_dir)


def input_paths(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield each file and directory that the run reads if it starts now, with its key. A run that
    has its own checkpoints does not read trainer.resume_from_path."""
    resumes = _has_checkpoints(cfg.trainer.default_local_dir)
    for key, path in _paths(cfg):
        if key != OUTPUT and not (key == "trainer.resume_from_path" and resumes):
            yield key, path


def _paths(
    cfg: Config, keys: Sequence[str] = (*INPUT_FILES, *INPUT_DIRECTORIES, OUTPUT)
) -> Iterator[tuple[str, str]]:
    """Yield each path that is not null, with its key."""
    for key in expand_named_models(cfg, keys):
        value = get_setting(cfg, key)
        paths = value if isinstance(value, list) else [] if value is None else [value]
        for path in paths:
            yield key, path


def _check_input(key: str, path: str) -> None:
    """Raise NodeError unless the path is a file or a directory, as its key requires, and can be
    read."""
    wants_file = unnamed(key) in INPUT_FILES
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        raise NodeError(
            f"{key} {path}: no such {'file' if wants_file else 'directory'}{_here()}"
        ) from error
    except OSError as error:
        raise NodeError(f"{key} {path}: {error_reason(error)}{_here()}") from error
    if wants_file and not stat.S_ISREG(mode):
        raise NodeError(
            f"{key} {path}: not a file" + (", but a directory" if stat.S_ISDIR(mode) else "")
        )
    if not wants_file and not stat.S_ISDIR(mode):
        raise NodeError(f"{key} {path}: not a directory")
    if not os.access(path, os.R_OK if wants_file else os.R_OK | os.X_OK):
        raise NodeError(f"{key} {path}: no permission to read it{_here()}")


def _check_output(path: str) -> None:
    """Raise NodeError unless the directory, or its nearest existing parent, can be written to."""
    nearest = os.path.abspath(path)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    if not os.path.isdir(nearest):
        raise NodeError(f"{OUTPUT} {path}: {nearest} is not a directory{_here()}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise NodeError(f"{OUTPUT} {path}: no permission to write to {nearest}{_here()}")
    with disk_errors(OUTPUT):
        step = _checkpoint_of_verl(path)
    if step is not None:
        raise UserError(
            f"{OUTPUT} {path}: {step} there is a checkpoint of verl, which is neither resumed nor"
            f" moved; give another {OUTPUT}. To start from its weights, export them with"
            " verl.model_merger (docs/from_verl.md)"
        )


def _checkpoint_of_verl(directory: str) -> str | None:
    """Return the name of a checkpoint of verl, with a directory for each model and without our
    manifest, or None."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    for name in sorted(filter(_STEP.fullmatch, names)):
        path = os.path.join(directory, name)
        if os.path.isdir(path) and not os.path.exists(os.path.join(path, _MANIFEST)):
            has_models = any(entry.is_dir() for entry in os.scandir(path))
            if has_models or _OF_VERL in names:
                return name
    return None


def _check_output_apart(cfg: Config) -> None:
    """Raise UserError if the run would write into one of its inputs. An input may be in the output
    directory, but not in a directory of exports."""
    output = os.path.realpath(cfg.trainer.default_local_dir)
    for key, path in _paths(cfg):
        if unnamed(key) not in INPUT_DIRECTORIES:
            continue
        real = os.path.realpath(path)
        if _is_inside(output, real):
            what = f"is {key}" if output == real else f"lies inside {key} {path}"
            raise UserError(
                f"{OUTPUT} {cfg.trainer.default_local_dir} {what}; the run would write among its "
                "inputs: give another directory"
            )
        if any(_is_inside(real, os.path.join(output, name)) for name in _REPLACED):
            raise UserError(
                f"{key} {path} lies where this run writes its exports ({OUTPUT} "
                f"{cfg.trainer.default_local_dir}); give another {OUTPUT}"
            )


def _is_inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)


def _has_checkpoints(directory: str) -> bool:
    try:
        return any(name.startswith("global_step_") for name in os.listdir(directory))
    except OSError:
        return False


def _here() -> str:
    """Return " on <host>" if the run has several nodes, else an empty string."""
    nodes = os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_NNODES") or "1"
    return "" if nodes == "1" else f" on {socket.gethostname()}"
