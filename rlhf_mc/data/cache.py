"""The cache of tokenised prompts (data.cache_dir): one entry for each file of rows. Its name is a
hash of all that the tokens depend on: content of the rows' file, tokenizer, chat template, settings
and versions. A changed input has another name, so that an old entry is never used for it. An entry
begins with a checksum of its name and content.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from rlhf_mc import durable, json_files
from rlhf_mc.config.errors import error_reason
from rlhf_mc.config.schema import DataConfig
from rlhf_mc.runtime.console import print_line

FORMAT = 4
"""Raised when the same inputs give other tokens, or the file's layout changes."""
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_SETTINGS = (
    "prompt_key",
    "reward_fn_key",
    "max_prompt_length",
    "truncation",
    "filter_overlong_prompts",
    "on_bad_row",
    "apply_chat_template_kwargs",
)
"""Settings that decide which rows become prompts, and their tokens."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "config.json",
)


@dataclass
class Counts:
    """Numbers of rows of a file: all, and those that are dropped, truncated or skipped."""

    num_rows: int = 0
    num_overlong: int = 0
    """Dropped: longer than data.max_prompt_length."""
    num_truncated: int = 0
    num_bad: int = 0
    """Skipped: cannot be used."""
    problems: list[str] = field(default_factory=list)
    """Problems of the first bad rows: "row 3: ...", without the file's name."""


@dataclass(frozen=True)
class Tokens:
    """The tokenised prompts of a file, as in dataset.FilePrompts."""

    tokens: np.ndarray
    lens: np.ndarray
    rows: np.ndarray
    counts: Counts


def cache_key(
    content: str,
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
    by_rule: bool,
    most_rows: int | None,
) -> str:
    """Return the name of a file's entry. content: SHA-256 of the file. most_rows: how many of them
    are wanted; None: all."""
    parts = {
        "format": FORMAT,
        "versions": [transformers.__version__, tokenizers.__version__, np.__version__],
        "content": content,
        "tokenizer": {
            name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name in _TOKENIZER_FILES
            if (path := Path(tokenizer.name_or_path) / name).is_file()
        },
        "class": type(tokenizer).__name__,
        "template": tokenizer.chat_template,
        "settings": {name: getattr(cfg, name) for name in _SETTINGS},
        "wanted": [by_rule, most_rows],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read(directory: str, key: str) -> Tokens | None:
    """Return an entry, or None if there is none. One that is not as it was written is reported, and
    counts as none."""
    path = _path(directory, key)
    try:
        content = memoryview(json_files.read_bytes(path))
        arrays = content[_CHECKSUM_BYTES:]
        if content[:_CHECKSUM_BYTES] != _checksum(key, arrays):
            raise ValueError("its checksum is wrong")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        print_line(
            f"warning: data.cache_dir: {path} cannot be used, its rows are tokenised anew ({error})"
        )
        return None
    with np.load(io.BytesIO(arrays), allow_pickle=False) as entry:
        counts = Counts(**json_files.parse(entry["counts"].tobytes()))
        return Tokens(entry["tokens"], entry["lens"], entry["rows"], counts)


def write(directory: str, key: str, tokens: Tokens) -> None:
    """Write an entry. An error of the file system is a warning: the run needs no cache."""
    path = _path(directory, key)
    counts = json.dumps(asdict(tokens.counts)).encode()
    buffer = io.BytesIO()
    arrays = {"tokens": tokens.tokens, "lens": tokens.lens, "rows": tokens.rows}
    np.savez(buffer, counts=np.frombuffer(counts, np.uint8), **arrays)  # type: ignore[arg-type]
    # Another node may write the same entry to the same file system.
    staging = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write(staging, _checksum(key, buffer.getbuffer()) + buffer.getbuffer())
        os.replace(staging, path)
    except OSError as error:
        print_line(
            f"warning: data.cache_dir: {path} cannot be written, the next start tokenises again "
            f"({error_reason(error)})"
        )
        with contextlib.suppress(OSError):
            staging.unlink()


def _checksum(key: str, arrays: memoryview) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(arrays)
    return digest.digest()


def _path(directory: str, key: str) -> Path:
    return Path(directory) / f"{key[:32]}.npz"
