"""Functions that the ranks run in test_shared_prompts.py: each tokenises its part of the
prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from cases import built_run

from rlhf_mc.config.schema import DataConfig
from rlhf_mc.data.batch import Prompt
from rlhf_mc.data.prompts import load_prompts
from rlhf_mc.data.tokenizer import load_tokenizer
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import evaluate, step_state


def load(files: list[str], model: str, max_samples: int = -1, **settings: Any) -> list[Prompt]:
    """Return the prompts as this rank has them. `{rank}` in a file's or the cache's name is this
    rank's number."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    names = [file.replace("{rank}", str(rank)) for file in files]
    if "cache_dir" in settings:
        settings["cache_dir"] = settings["cache_dir"].replace("{rank}", str(rank))
    cfg = DataConfig(train_files=[], **settings)
    return list(load_prompts(names, load_tokenizer(model), cfg, max_samples))


def decoded_by_validation(config_path: str) -> tuple[int, str]:
    """Validate. Return how many texts this rank decodes with their special tokens, as samples are,
    and the samples that are written."""
    with built_run(
        config_path,
        [
            "trainer.log_val_generations=3",
            "rollout.val_kwargs.n=2",
            "rollout.val_kwargs.temperature=1",
        ],
    ) as run:
        decoded = []
        decode = run.tokenizer.decode

        def counted(*args: Any, **kwargs: Any) -> Any:
            decoded.extend([args] * (kwargs.get("skip_special_tokens") is False))
            return decode(*args, **kwargs)

        run.tokenizer.decode = counted
        evaluate.validate(run, step_state.begin_step(1, RankStatus()))
        dist.barrier()
        written = Path(run.config.trainer.default_local_dir) / "generations/step_000001.txt"
        return len(decoded), written.read_text()
