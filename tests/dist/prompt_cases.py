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
    """Return the prompts as this rank has them. `{rank}` in a file's name is this rank's
    number."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    names = [file.replace("{rank}", str(rank)) for file in files]
    cfg = DataConfig(train_files=[], **settings)
    return list(load_prompts(names, load_tokenizer(model), cfg, max_samples))


def validation_samples(config_path: str) -> str:
    """Validate. Return the samples that are written."""
    with built_run(
        config_path,
        [
            "trainer.log_val_generations=3",
            "rollout.val_kwargs.n=2",
            "rollout.val_kwargs.temperature=1",
        ],
    ) as run:
        evaluate.validate(run, step_state.begin_step(1, RankStatus()))
        dist.barrier()
        written = Path(run.config.trainer.default_local_dir) / "generations/1.jsonl"
        return written.read_text()
