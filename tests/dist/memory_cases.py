"""Functions that the ranks run in test_out_of_memory.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gpu_parts import measure
from model_cases import _objective, make_engine, mesh_groups

from rlhf_mc.config.schema import OptimConfig
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import Loss
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.gpt_model import PackedGPT
from rlhf_mc.trainer.skipped_updates import SkippedUpdates
from rlhf_mc.trainer.update import update


def hungry_update(checkpoint: str, batch: RaggedBatch, directory: str) -> list[str]:
    """Take two updates, of which the second asks for more memory than there is. Return the notes of
    the error."""
    num_updates = 0
    with mesh_groups(1, 1) as groups:
        engine = make_engine(checkpoint, "actor", groups)
        engine.make_trainable(OptimConfig(lr=1e-3), total_steps=1)

        def objective(mini: RaggedBatch) -> Loss:
            nonlocal num_updates
            num_updates += 1
            loss = _objective(engine, mini, "token-mean")

            def hungry(model: PackedGPT, states: torch.Tensor, micro: MicroBatch) -> Any:
                if num_updates == 2:
                    torch.empty(1 << 30, dtype=torch.uint8)
                return loss(model, states, micro)

            return hungry

        whole = list(range(batch.num_sequences))
        try:
            with measure.limited_memory(1 << 29):
                update(
                    engine,
                    batch,
                    iter([whole, whole]),
                    objective,
                    int(batch.seq_lens.max()),
                    1,
                    SkippedUpdates(1, Path(directory)),
                )
        except RuntimeError as error:
            return error.__notes__
    return []
