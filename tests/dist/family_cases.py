"""What the ranks run in test_family_models.py, beside cases.py and model_cases.py."""

from __future__ import annotations

import torch
from model_cases import make_engine, mesh_groups

from rlhf_mc.checkpoint.save_load import load_mcore, save_mcore
from rlhf_mc.models.engine import ModelEngine


def saved_and_loaded(checkpoint: str, directory: str, ep: int, other_ep: int) -> list[str]:
    """Writes the model as a Megatron checkpoint with its experts over ep ranks and reads it with them over other_ep.
    Names of this rank's parameters that are then not what the Hugging Face checkpoint gives."""
    with mesh_groups(1, 1, ep) as groups:
        save_mcore(make_engine(checkpoint, "actor", groups).model, directory, checkpoint)
    with mesh_groups(1, 1, other_ep) as groups:
        wanted = make_engine(checkpoint, "actor", groups)
        loaded = ModelEngine("actor", wanted.shape, wanted._megatron, groups)
        for param in loaded.params.values():
            param.fill_(torch.nan)
        load_mcore(loaded.model, directory)
        return [name for name, param in loaded.params.items() if not torch.equal(param, wanted.params[name])]
