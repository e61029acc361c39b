"""Updates that are skipped for a gradient that is not finite: counted, recorded, bounded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from rlhf_mc import json_files
from rlhf_mc.checkpoint.finite import num_not_finite
from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.run_files import NONFINITE_FILE
from rlhf_mc.topology.consensus import gather_objects, on_rank_0

MOST_CONSECUTIVE = 3


@dataclass
class SkippedUpdates:
    """The count of updates that were skipped because loss or gradient were not finite, with the
    limit of the run."""

    limit: int
    """The run is aborted after this number of consecutive skipped updates of one model."""
    directory: Path
    """Directory of the files with the samples of skipped updates."""
    consecutive: dict[str, int] = field(default_factory=dict)
    """Consecutive skipped updates by the model's name."""

    def record(self, engine: ModelEngine, step: int, mini: RaggedBatch, skipped: bool) -> None:
        """Record an update of the model. Write the samples of a skipped update. Raise UserError
        after `limit` consecutive skipped updates. Every rank of the mesh must call it."""
        name = engine.name
        self.consecutive[name] = self.consecutive.get(name, 0) + 1 if skipped else 0
        if not skipped:
            return
        path = self.directory / NONFINITE_FILE.format(step)
        on_rank_0(
            lambda: write_samples(path, name, mini),
            f"{path}: cannot be written",
            engine.groups.members,
        )
        if self.consecutive[name] >= self.limit:
            raise UserError(
                f"{name}: loss or gradient not finite in {self.limit} consecutive updates, the "
                f"last in step {step}; their samples are in {path}; "
                f"{_find_not_finite(engine, mini)}"
            )

    def resume_from(self, step: int, consecutive: Mapping[str, int]) -> None:
        """Set the counts to a checkpoint's. On rank 0 delete the samples of later steps, which are
        repeated."""
        self.consecutive = dict(consecutive)
        for path in self.directory.glob(NONFINITE_FILE.format("*")) if dist.get_rank() == 0 else ():
            if int(path.stem.rpartition("_")[2]) > step:
                path.unlink()


def _find_not_finite(engine: ModelEngine, mini: RaggedBatch) -> str:
    """Return a description of the values that are not finite: weights, fields of the batch, or
    neither. Every rank of the mesh must call it."""
    first = next((local for local, param in engine.params.items() if num_not_finite(param)), None)
    for rank, local in enumerate(gather_objects(first, engine.groups.members)):
        if local is not None:
            return (
                f"the model's weights are not finite ({local} on rank {rank}): resume from an "
                "earlier checkpoint"
            )
    per_token = (
        "rollout_log_probs",
        "old_log_probs",
        "ref_log_probs",
        "values",
        "scores",
        "advantages",
        "returns",
    )
    fields = {key: getattr(mini, key) for key in per_token}
    bad = [
        f"{key} ({n})" for key, x in fields.items() if x is not None and (n := num_not_finite(x))
    ]
    if bad:
        return (
            f"weights are finite, and of the batch these have values that are not: {', '.join(bad)}"
        )
    return (
        "weights and batch are finite, so the loss or its gradient overflows: try a smaller "
        f"{engine.name}.optim.lr"
    )


def write_samples(path: Path, name: str, mini: RaggedBatch) -> None:
    """Append the mini-batch to a JSON file: one list of sequences per update of the step."""
    seq_lens = mini.seq_lens.tolist()
    response_lens = mini.response_lens.tolist()
    advantages = (
        mini.advantages.split(response_lens)
        if mini.advantages is not None
        else [None] * len(seq_lens)
    )
    sequences = [
        {
            "token_ids": tokens.tolist(),
            "prompt_length": prompt_length,
            "reward": None if mini.scores is None else float(mini.scores[i]),
            "advantages": None if advantage is None else advantage.tolist(),
        }
        for i, (tokens, prompt_length, advantage) in enumerate(
            zip(mini.tokens.split(seq_lens), mini.prompt_lens.tolist(), advantages, strict=True)
        )
    ]
    updates = json_files.read(path) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*updates, {"model": name, "sequences": sequences}]))
